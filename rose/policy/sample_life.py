"""The life of a trajectory and of its group in the book: begun, turn by turn, finished or given up, counted.

What trainers lease, and the door that every event comes through, are in :mod:`rose.policy.samples`, which has the invariants too.
Pure.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rose.errors import Conflict, Gone, NotFound
from rose.lineage import Version
from rose.policy.discards import Discards
from rose.policy.sample_events import (
    Action,
    Discard,
    GroupForsaken,
    GroupReady,
    TrajectoryCancelled,
    TrajectoryCreated,
    TrajectoryFinished,
    TurnAdded,
)
from rose.policy.staleness import is_spent


class SampleState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    LEASED = "leased"
    CONSUMED = "consumed"
    FILTERED = "filtered"
    CANCELLED = "cancelled"
    STALE = "stale"


FINAL = (SampleState.CONSUMED, SampleState.FILTERED, SampleState.CANCELLED, SampleState.STALE)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobParams:
    """How one job's groups are handed out."""

    alpha: int = 4
    """Versions a sample may lie behind the trainer that takes it."""
    on_stale: str = "cancel"
    """``cancel`` drops the group, ``mask`` hands it out with ``stale`` set on its old members, ``wait`` also
    grants nothing that would leave groups behind until they are too old."""
    filter_equal: bool = False
    """Drop complete groups without any difference in reward (DAPO's dynamic sampling)."""
    order: str = "ready"
    """``ready``: first complete, first leased; ``submitted``: in the order of their first trajectory.  Before either: groups
    that could not wait for another step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleParams(JobParams):
    """What holds for jobs that have no settings of their own."""

    jobs: Mapping[str, JobParams] = field(default_factory=lambda: dict[str, JobParams]())
    abandoned_s: float = 60.0
    """Between two members of a group that is still played; under ``wait`` no trainer waits longer for one that is not."""
    max_acked: int = 4096
    """Names of acknowledged batches remembered, so that an acknowledgement may be repeated; as many of batches given back."""

    def of(self, job: str) -> JobParams:
        return self.jobs.get(job, self)


@dataclass(kw_only=True, slots=True)
class Sample:
    trajectory_id: str
    job: str
    group_id: str
    state: SampleState = SampleState.RUNNING
    versions: tuple[Version, ...] = ()
    """Of its tokens: the ends of each attempt's (:func:`~rose.policy.staleness.ends`)."""
    floor: Version | None = None
    num_tokens: int = 0
    runs: tuple[str, ...] = ()
    reward: float = 0.0
    reason: str = ""


@dataclass(kw_only=True, slots=True)
class Group:
    job: str
    group_id: str
    size: int
    number: int
    """Order of submission."""
    members: list[str] = field(default_factory=lambda: list[str]())
    ready: bool = False
    quiet_since_s: float | None = None
    """When a lease first found it without a running member."""


@dataclass(kw_only=True, slots=True)
class Batch:
    batch_id: str
    job: str
    group_ids: tuple[str, ...]
    expires_at_s: float
    ttl_s: float
    """The longest that it was asked for; when it runs out goes by the last."""
    consumer: str = ""


@dataclass(kw_only=True, slots=True)
class SampleLife:
    """See the module docstring."""

    params: SampleParams = field(default_factory=SampleParams)
    samples: dict[str, Sample] = field(default_factory=lambda: dict[str, Sample]())
    groups: dict[tuple[str, str], Group] = field(default_factory=lambda: dict[tuple[str, str], Group]())
    ready: dict[str, list[str]] = field(default_factory=lambda: dict[str, list[str]]())
    batches: dict[str, Batch] = field(default_factory=lambda: dict[str, Batch]())
    acked: OrderedDict[str, tuple[int, int]] = field(
        default_factory=lambda: OrderedDict[str, tuple[int, int]]()
    )
    expired: OrderedDict[str, Batch] = field(default_factory=lambda: OrderedDict[str, Batch]())
    """Leases that ran out, whose trainer may still acknowledge them."""
    returned: OrderedDict[str, None] = field(default_factory=lambda: OrderedDict[str, None]())
    """Names of batches that were given back."""
    attempts: dict[tuple[str, str], int] = field(default_factory=lambda: dict[tuple[str, str], int]())
    """By job and consumer."""
    num_created: Counter[str] = field(default_factory=lambda: Counter[str]())
    num_here: Counter[tuple[str, SampleState]] = field(
        default_factory=lambda: Counter[tuple[str, SampleState]]()
    )
    """Those in the book, by job and state."""
    num_gone: Counter[tuple[str, SampleState]] = field(
        default_factory=lambda: Counter[tuple[str, SampleState]]()
    )
    """Final trajectories that have left the book, by job and state."""
    runs: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    """Of jobs whose trainer named one."""
    discards: Discards = field(default_factory=Discards)
    bounds: dict[str, tuple[Version, int]] = field(default_factory=lambda: dict[str, tuple[Version, int]]())
    """Of jobs under ``cancel``: the newest version, and how far behind it a token may lie."""
    _num_groups: int = 0

    def counts(self, job: str | None = None) -> Counter[str]:
        """Trajectories by state, those that have left the book included."""
        counts: Counter[str] = Counter()
        for table in (self.num_here, self.num_gone):
            for (its_job, state), count in table.items():
                if count and (job is None or its_job == job):
                    counts[state.value] += count
        return counts

    def latest_attempts(self) -> dict[str, int]:
        """By job, the highest of any of its consumers."""
        latest: dict[str, int] = {}
        for (job, _), attempt in self.attempts.items():
            latest[job] = max(attempt, latest.get(job, 0))
        return latest

    def _move(self, sample: Sample, state: SampleState) -> None:
        self.num_here[(sample.job, sample.state)] -= 1
        self.num_here[(sample.job, state)] += 1
        sample.state = state

    # --- trajectories ----------------------------------------------------------------------------------

    def _create(self, event: TrajectoryCreated) -> list[Action]:
        if event.trajectory_id in self.samples:
            raise Conflict(f"trajectory {event.trajectory_id} exists", field="id")
        key = (event.job, event.group_id)
        group = self.groups.get(key)
        if group is not None and group.size != event.group_size:
            raise Conflict(f"group {event.group_id} has size {group.size}", field="group_size")
        if group is not None and group.ready:
            raise Conflict(f"group {event.group_id} is complete", field="group_id")
        if group is None:
            self._num_groups += 1
            group = self.groups[key] = Group(
                job=event.job, group_id=event.group_id, size=event.group_size, number=self._num_groups
            )
        group.members.append(event.trajectory_id)
        self.samples[event.trajectory_id] = Sample(
            trajectory_id=event.trajectory_id, job=event.job, group_id=event.group_id, floor=event.floor
        )
        self.num_created[event.job] += 1
        self.num_here[(event.job, SampleState.RUNNING)] += 1
        return []

    def _turn(self, event: TurnAdded) -> list[Action]:
        sample = self.samples.get(event.trajectory_id)
        if sample is None:
            return []
        sample.versions, sample.num_tokens, sample.runs = event.versions, event.num_tokens, event.runs
        bound = self.bounds.get(sample.job)
        if (
            bound is None
            or sample.state is not SampleState.RUNNING
            or not any(is_spent(bound[0], version, bound[1]) for version in event.versions)
        ):
            return []
        return [self._drop_stale(sample.job, [sample.group_id])]

    def _finish(self, event: TrajectoryFinished) -> list[Action]:
        sample = self._running(event.trajectory_id)
        self._move(sample, SampleState.FINISHED)
        sample.versions, sample.reward = event.versions, event.reward
        self.discards.ended(sample.job, sample.num_tokens)
        group = self.groups[(sample.job, sample.group_id)]
        done = [member for member in group.members if self.samples[member].state is SampleState.FINISHED]
        if len(done) < group.size:
            return []
        group.ready = True
        surplus = tuple(member for member in group.members if member not in done)
        for member in surplus:
            self._final(member, SampleState.CANCELLED, "redundant")
        group.members = done
        actions: list[Action] = []
        if (
            event.filter_equal
            and len({self.samples[member].reward for member in done}) == 1
            and len(done) > 1
        ):
            for member in done:
                self._final(member, SampleState.FILTERED, "filtered")
            del self.groups[(group.job, group.group_id)]
            actions.append(Discard(trajectory_ids=tuple(done), reason="filtered"))
        else:
            self.ready.setdefault(group.job, []).append(group.group_id)
            actions.append(GroupReady(job=group.job, group_id=group.group_id))
        if surplus:
            actions.append(Discard(trajectory_ids=surplus, reason="redundant"))
        return actions

    def _cancel(self, event: TrajectoryCancelled) -> list[Action]:
        sample = self._running(event.trajectory_id)
        group = self.groups[(sample.job, sample.group_id)]
        group.members.remove(event.trajectory_id)
        if not group.members:
            del self.groups[(sample.job, sample.group_id)]
        self._final(event.trajectory_id, SampleState.CANCELLED, event.reason)
        return [Discard(trajectory_ids=(event.trajectory_id,), reason=event.reason)]

    def _forsake(self, event: GroupForsaken) -> list[Action]:
        group = self.groups.get((event.job, event.group_id))
        if group is None:
            raise NotFound(f"job '{event.job}' has no group '{event.group_id}'", field="group_id")
        if not self.is_waiting(group):
            raise Conflict("some of its trajectories are played, or a trainer has them", field="group_id")
        return [self._drop(event.job, [event.group_id], SampleState.CANCELLED, event.reason)]

    # --- books -----------------------------------------------------------------------------------------

    def _drop_stale(self, job: str, group_ids: list[str]) -> Discard:
        return self._drop(job, group_ids, SampleState.STALE, "stale")

    def _drop(self, job: str, group_ids: list[str], state: SampleState, reason: str) -> Discard:
        ids: list[str] = []
        self._forget_expired(job, group_ids)
        for group_id in group_ids:
            group = self.groups.pop((job, group_id))
            if group.ready:
                self.ready[job].remove(group_id)
            for member in group.members:
                self._final(member, state, reason)
                ids.append(member)
        return Discard(trajectory_ids=tuple(ids), reason=reason)

    def _consume(self, job: str, group_ids: tuple[str, ...]) -> list[str]:
        ids: list[str] = []
        self._forget_expired(job, group_ids)
        for group_id in group_ids:
            for member in self.groups.pop((job, group_id)).members:
                self._final(member, SampleState.CONSUMED, "")
                ids.append(member)
        return ids

    def _final(self, trajectory_id: str, state: SampleState, reason: str) -> None:
        sample = self.samples[trajectory_id]
        if state is not SampleState.CONSUMED:
            if sample.state is SampleState.RUNNING:
                self.discards.ended(sample.job, sample.num_tokens)
            self.discards.discarded(sample.job, reason, sample.num_tokens)
        self._move(sample, state)
        sample.reason = reason

    def forget(self, trajectory_id: str) -> None:
        """Drop a final trajectory from the book; it stays counted."""
        sample = self.samples.get(trajectory_id)
        if sample is not None and sample.state in FINAL:
            del self.samples[trajectory_id]
            self.num_here[(sample.job, sample.state)] -= 1
            self.num_gone[(sample.job, sample.state)] += 1

    def _running(self, trajectory_id: str) -> Sample:
        sample = self.samples.get(trajectory_id)
        if sample is None:
            raise NotFound(f"trajectory {trajectory_id} is unknown", field="id", code="unknown_session")
        if sample.state in (SampleState.CANCELLED, SampleState.STALE):
            text = f"trajectory was cancelled ({sample.reason})"
            raise Gone(text, field="id", code="trajectory_cancelled", reason=sample.reason)
        if sample.state is not SampleState.RUNNING:
            raise Conflict(f"trajectory is already {sample.state.value}", field="id")
        return sample

    def _is_of_another_run(self, group: Group) -> bool:
        """Has it tokens that other weights than those of its job's run sampled?  Of a job that names none: of two runs."""
        run = self.runs.get(group.job, "")
        if run:
            return any(one != run for name in group.members for one in self.samples[name].runs)
        return len({one for name in group.members for one in self.samples[name].runs}) > 1

    def is_waiting(self, group: Group) -> bool:
        """All of it has finished, and no trainer has it."""
        return all(self.samples[name].state is SampleState.FINISHED for name in group.members)

    def _is_leased(self, group: Group) -> bool:
        return any(self.samples[name].state is SampleState.LEASED for name in group.members)

    def _use_up(self, batch_id: str) -> None:
        self.expired.pop(batch_id, None)
        self.returned[batch_id] = None
        while len(self.returned) > self.params.max_acked:
            self.returned.popitem(last=False)

    def _forget_expired(self, job: str, group_ids: Iterable[str]) -> None:
        """These groups are no more; others may come under their names, and are no part of a batch that ran out before."""
        gone = set(group_ids)
        for batch in list(self.expired.values()):
            if batch.job == job and not gone.isdisjoint(batch.group_ids):
                self._use_up(batch.batch_id)
