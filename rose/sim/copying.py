"""Second copies of running turns in a simulated fleet: the shell around :mod:`rose.policy.copies`.

A script says how long a turn is, so a turn and its copy are equally long here, as two are that draw with one seed.
"""

from __future__ import annotations

from typing import Protocol

from rose.policy import turn_events as te
from rose.policy.copies import MARK, Copies, CopyParams
from rose.policy.turn import Turn
from rose.policy.turns import TurnBook
from rose.sim.events import EventDigest
from rose.sim.node import Counters, SimNode


class Cluster(Protocol):
    """What copies need of the fleet that they run on."""

    book: TurnBook
    nodes: dict[str, SimNode]
    counters: Counters
    journal: EventDigest
    targets: dict[str, tuple[int, int, str, str]]

    def feed(self, event: te.Event) -> None: ...

    def cancel(self, turn_id: str, reason: str) -> None: ...


class SimCopies:
    """Args:
    cluster: Whose turns are copied, after each of its ticks.
    """

    def __init__(self, cluster: Cluster, params: CopyParams) -> None:
        self._cluster = cluster
        self._copies = Copies(book=cluster.book, params=params)
        self._begun_with: dict[str, tuple[str, int]] = {}
        """Copy -> the tier of the engine that the turn ran on, and what had been sampled of the turn."""

    def look(self, now_s: float) -> None:
        cluster = self._cluster
        for copy in self._copies.look(now_s, lambda turn: self._made(turn, now_s)):
            own_id = copy.turn_id.removesuffix(MARK)
            own = cluster.book.turns[own_id]
            assert own.worker is not None
            self._begun_with[copy.turn_id] = own.worker.tier.value, copy.num_copied
            target, _, trajectory, _ = cluster.targets[own_id]
            cluster.targets[copy.turn_id] = target - copy.num_copied, copy.num_prompt_tokens, trajectory, ""
            cluster.counters.copies += 1
            cluster.journal.write(now_s, "copy", own_id, copy.only_at)
            cluster.feed(copy)
            if cluster.book.turns[copy.turn_id].worker is None:
                cluster.cancel(copy.turn_id, "no place")

    def _made(self, turn: Turn, now_s: float) -> int:
        """Tokens of the live attempt; the turn has at least one more to come."""
        assert turn.worker is not None
        device = self._cluster.nodes[turn.worker.worker_id].device
        left = self._cluster.targets[turn.spec.turn_id][0] - len(turn.token_ids)
        return min(device.made(f"{turn.spec.turn_id}/{turn.attempt}", now_s), left - 1)

    def requeued(self, turn_id: str) -> None:
        if self._copies.is_of_no_use(turn_id):
            self._cluster.cancel(turn_id, "no place")

    def given_up(self, num_tokens: int) -> None:
        """Sampled by an attempt that nobody waits for any more."""
        self._cluster.counters.copied += num_tokens

    def stands(self, ended: te.TurnEnded) -> bool:
        """Whether this is how the turn ended; what has lost by it is cancelled."""
        cluster = self._cluster
        loser, stands = self._copies.ended(ended.turn_id, ended.outcome)
        tier, num_copied = self._begun_with.pop(ended.turn_id, ("", 0))
        if stands and tier and loser in cluster.book.turns:
            # What the turn's engine has not reported, and now never will.
            unsaid = max(0, num_copied - len(cluster.book.turns[loser].token_ids))
            cluster.counters.copies_won += 1
            cluster.counters.sampled[tier] += unsaid
            cluster.counters.delivered += unsaid
        if loser is not None:
            cluster.cancel(loser, "overtaken")
        return stands
