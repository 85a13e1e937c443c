"""Which leased groups a step is trained on, and how many more it needs.

With *dynamic sampling* (DAPO) a group whose rewards are all equal is set aside, because it would only dilute the batch,
and a whole new group is sampled in its place.  What was set aside is consumed with the step all the same: its ids are in
the checkpoint, and nobody is handed it again.

So is a group in which nothing was sampled at all (its episodes were over when they began), with dynamic sampling or without.

A *round* is what the step lacks, leased at once or in parts: only when all of it is there is more asked for.  A step with too few groups of unequal rewards waits for more, where the job says so: it keeps what it has.

A trajectory that cannot be trained on (a trace that makes no sense, sampling settings that the trainer does not reproduce) is set
aside by itself, counted and named; a step of which most are ends the run.

:class:`Collected` holds the leases of one step.  Groups are taken in the order in which the scheduler handed them out.
:class:`Acceptance` learns which part of the groups is kept, so that a refill launches about as many as it will need.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rose.errors import RoseError, TrainError
from rose.lineage import Version, parse_version
from rose.policy.staleness import worst_lag
from rose.train.advantages import uninformative_groups
from rose.train.envs.base import MAX_REWARD, unusable
from rose.train.metrics import num_sampled

MAX_MALFORMED_FRACTION = 0.5
"""Of a step's trajectories; more are a mistake in the job or the scheduler, and no accident."""
NAMELESS = "?"
"""Begins the name of a trajectory that told none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectParams:
    num_groups: int
    alpha: int
    """A trajectory with a token older than this many versions is measured, not trained on."""
    dynamic_sampling: bool = False
    max_rounds: int = 8
    """Of one step, until it has ``num_groups``; then it is trained on what there is."""
    min_informative: int = 0
    """Groups with unequal rewards that are waited for, with more groups, for ``starved_rounds`` rounds."""
    starved_rounds: int = 4


@dataclass(slots=True)
class Acceptance:
    """EWMA of the part of groups that is kept; starts at 1."""

    rate: float = 1.0
    weight: float = 0.3
    """Of a new observation."""
    max_factor: float = 4.0
    """A refill launches at most this many times what is missing, however poor the rate."""

    def observe(self, num_kept: int, num_seen: int) -> None:
        if num_seen:
            self.rate += self.weight * (num_kept / num_seen - self.rate)

    def to_launch(self, num_missing: int) -> int:
        return math.ceil(num_missing / max(self.rate, 1.0 / self.max_factor) - 1e-9)


@dataclass(slots=True)
class Round:
    """Groups of the round under way, or of the last."""

    num_due: int = 0
    """Still to be leased; 0: it is over."""
    num_kept: int = 0
    num_seen: int = 0
    num_informative: int = 0


@dataclass(slots=True)
class Collected:
    """The leases of one step."""

    params: CollectParams
    batch_ids: list[str] = field(default_factory=list)
    kept: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Trajectories by group, in the order of arrival."""
    filtered: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    malformed: dict[str, str] = field(default_factory=dict)
    """Trajectories that cannot be trained on, and why.  Consumed like the others: they would be no better the next time."""
    num_seen: int = 0
    """Trajectories leased for this step."""
    num_informative: int = 0
    """Kept groups with unequal rewards."""
    num_leases_starved: int = 0
    """Rounds after which the step still had too few of these."""
    num_rounds: int = 0
    """That are over."""
    round: Round = field(default_factory=Round)
    first_malformed: RoseError | None = None

    @property
    def num_missing(self) -> int:
        """Groups to lease before the step can be taken; 0 = it can."""
        if self.round.num_due:
            return self.round.num_due
        may_refill = self.num_rounds < self.params.max_rounds
        num_lacking = max(0, self.params.num_groups - len(self.kept)) if may_refill else 0
        return num_lacking or self.num_starving

    @property
    def num_starving(self) -> int:
        """Groups with unequal rewards that are still waited for."""
        if not self.num_rounds or self.num_rounds >= self.params.starved_rounds:
            return 0
        return max(0, self.params.min_informative - self.num_informative)

    @property
    def trajectories(self) -> list[dict[str, Any]]:
        """What to train on.  All of it where every group was set aside: the step then measures and changes nothing."""
        groups = self.kept or self.filtered
        return [one for members in groups.values() for one in members]

    @property
    def ids(self) -> tuple[str, ...]:
        """Everything this step consumes, in order."""
        groups = [*self.kept.values(), *self.filtered.values()]
        named = [str(one["id"]) for members in groups for one in members]
        return (*named, *(name for name in self.malformed if not name.startswith(NAMELESS)))

    def add(
        self,
        batch_id: str,
        trajectories: list[dict[str, Any]],
        version: Version,
        check: Callable[[dict[str, Any]], Any] | None = None,
        *,
        num_groups: int | None = None,
    ) -> tuple[int, int]:
        """Take a leased batch in; ``(groups kept, groups seen)`` of the round so far.  Marks what is too old for ``version``.

        Args:
            num_groups: Of this lease; None = all that the step lacks.

        A trajectory without a usable id, group, version or reward, or for which ``check`` raises, is set aside by itself: its
        group goes on without it.

        Raises:
            TrainError: More than :data:`MAX_MALFORMED_FRACTION` of the step's trajectories were, when a round is over: then it is not they.
        """
        begins, due = not self.round.num_due, self.num_missing
        due = max(0, due - (due if num_groups is None else num_groups))
        members: dict[str, list[dict[str, Any]]] = {}
        malformed: dict[str, str] = {}
        for one in trajectories:
            try:
                for name in ("id", "group_id"):
                    if not isinstance(one.get(name), str) or not one[name]:
                        raise TrainError("a leased trajectory needs it", field=name)
                reward_of(one)
                marked = one | {"stale": True} if lag_of(one, version) > self.params.alpha else one
                if check is not None:
                    check(marked)
            except RoseError as error:
                self.first_malformed = self.first_malformed or error
                known = isinstance(one.get("id"), str) and one["id"]
                malformed[one["id"] if known else f"{NAMELESS}{len(malformed)}"] = str(error)
                continue
            members.setdefault(one["group_id"], []).append(marked)
        num_bad, num_seen = len(self.malformed) + len(malformed), self.num_seen + len(trajectories)
        first = self.first_malformed
        if first is not None and not due and num_bad > MAX_MALFORMED_FRACTION * num_seen:
            text = f"{num_bad} of {num_seen} trajectories cannot be trained on, the first: {first}"
            raise TrainError(text, field=first.field) from first
        usable = [one for group in members.values() for one in group]
        rewards = {one["id"]: reward_of(one) for one in usable}
        dull = {name for name, group in members.items() if not any(map(num_sampled, group))}
        equal = uninformative_groups(rewards, {one["id"]: one["group_id"] for one in usable})
        if self.params.dynamic_sampling:
            dull |= equal
        too_old = {name for name, group in members.items() if all(one.get("stale") for one in group)}
        if begins:
            self.round = Round()
        found = self.round
        found.num_due = due
        found.num_kept += len(members) - len(dull)
        found.num_seen += len(members)
        num_informative = len(members.keys() - dull - equal - too_old)
        found.num_informative += num_informative
        self.num_informative += num_informative
        self.batch_ids.append(batch_id)
        self.malformed |= malformed
        self.num_seen = num_seen
        for group_id, group in members.items():
            (self.filtered if group_id in dull else self.kept)[group_id] = group
        if not due:
            self.num_rounds += 1
            self.num_leases_starved += self.num_informative < self.params.min_informative
        return found.num_kept, found.num_seen

    def clear(self) -> None:
        self.batch_ids.clear()
        self.kept.clear()
        self.filtered.clear()
        self.malformed.clear()
        self.num_seen = 0
        self.num_informative = 0
        self.num_leases_starved = 0
        self.num_rounds = 0
        self.round = Round()
        self.first_malformed = None


def reward_of(trajectory: Mapping[str, Any]) -> float:
    """The reward; a missing one is an error and never 0.

    Raises:
        TrainError: Not a finite number, or beyond :data:`~rose.train.envs.base.MAX_REWARD`.
    """
    reward: Any = trajectory.get("reward")
    found = unusable(reward)
    if found is None and not -MAX_REWARD <= reward <= MAX_REWARD:
        found = f"{reward:g} is out of range (within {MAX_REWARD:g})"
    if found is not None:
        raise TrainError(f"reward of trajectory {trajectory.get('id')}: {found}", field="reward")
    return float(reward)


def lag_of(trajectory: Mapping[str, Any], version: Version) -> int:
    """Versions between ``version`` and the oldest token of the trajectory.

    Raises:
        RequestError: A turn names something that is no version.
    """
    spans = [span for turn in trajectory.get("turns") or () for span in turn.get("versions") or ()]
    return worst_lag(version, [parse_version(span[0]) for span in spans if span])
