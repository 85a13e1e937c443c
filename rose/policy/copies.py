"""Second copies of turns that hold a step back: the first to end stands, the other is given up.

A step waits for its longest trajectories, and near its end most engines stand idle.  There a turn that runs on a harvested engine gets a
copy on another one, if that is expected to end it about as soon: whichever of the two production disturbs, the step waits for the other.  Only while
nobody waits for an engine, and at most so many at once.  Migration (:mod:`rose.policy.migration`) moves a turn for good; a copy is a bet on both.

**On-policy.**  Of two samples of one turn the one that ends first is the shorter one, more often than not: to keep it would train on short turns.  So a
copy is no second sample.  It begins with the tokens that the turn has so far, on weights of the same version, and draws what the turn itself would
draw: the same seed, token for token.  Which copy ends first is then a matter of engines alone.  Where the seed does not fix the tokens (kernels
whose sums depend on the batch round differently, and a token may tip over) the two part, and from there on the first to end is biased towards the shorter.

Who feeds a :class:`~rose.policy.turns.TurnBook` asks :meth:`Copies.look` after each tick, submits what it says, and tells it what waits again and what ended.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from rose.errors import ConfigError
from rose.policy import turn_events as te
from rose.policy.migration import rest_of, there_s
from rose.policy.turn import Turn
from rose.policy.turns import TurnBook
from rose.policy.worker import Tier, Worker

MARK = "+copy"
"""Ends the id of a copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyParams:
    """Raises:
    ConfigError: A value out of range.
    """

    most: int = 0
    """Copies at once; 0: none."""
    ratio: float = 1.0
    """A turn is copied where the copy is expected to take at most so many times as long as the turn's own rest."""
    least_s: float = 2.0
    """And where that rest is at least so long."""

    def __post_init__(self) -> None:
        if self.most < 0:
            raise ConfigError(f"{self.most} is below 0", field="most")
        if not self.ratio > 0:
            raise ConfigError(f"{self.ratio} is not above 0", field="ratio")


@dataclass(kw_only=True, slots=True)
class Copies:
    """Args:
    book: Whose turns are copied; the caller submits and cancels.
    """

    book: TurnBook
    params: CopyParams
    of: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    """Turn -> its copy."""
    _overtaken: set[str] = field(default_factory=lambda: set[str]())
    """Turns whose copies have ended first."""

    def look(self, at_s: float, made: Callable[[Turn], int]) -> Iterator[te.TurnSubmitted]:
        """Copies to submit now, one after the other; the caller does before it asks for the next.

        Args:
            made: Tokens that the live attempt of a turn has sampled so far, which the copy begins with.
        """
        if self.book.queue or len(self.of) >= self.params.most:
            return
        for turn in sorted(filter(self._may_be_copied, self.book.turns.values()), key=self._rank):
            if len(self.of) >= self.params.most or self.book.queue:
                return
            worker = self._place_for(turn, at_s)
            if worker is None:
                continue
            spec, num_made = turn.spec, len(turn.token_ids) + made(turn)
            if num_made >= spec.max_tokens:
                continue
            self.of[spec.turn_id] = spec.turn_id + MARK
            yield replace(
                spec,
                at_s=at_s,
                turn_id=spec.turn_id + MARK,
                num_prompt_tokens=spec.num_prompt_tokens + num_made,
                max_tokens=spec.max_tokens - num_made,
                num_copied=num_made,
                only_at=worker.worker_id,
            )

    def _may_be_copied(self, turn: Turn) -> bool:
        worker = turn.worker
        return (
            worker is not None
            and worker.tier is not Tier.DEDICATED
            and worker.version == turn.dispatch_version
            and turn.spec.resumable
            and turn.stopped_at_s is None
            and not turn.spec.only_at
            and turn.spec.turn_id not in self.of
        )

    def _rank(self, turn: Turn) -> tuple[float, str]:
        """The longest predicted rest of a trajectory comes first."""
        tokens = self.book.remaining.tokens(turn.spec.trajectory_id, turn.spec.history)
        return -(tokens or 0.0), turn.spec.turn_id

    def _place_for(self, turn: Turn, at_s: float) -> Worker | None:
        """The worker that would end a copy soonest, if that is soon enough."""
        rest = rest_of(turn, at_s)
        if rest is None or rest.here_s < self.params.least_s:
            return None
        found = [
            (there_s(turn, rest, worker, worker.inflight), worker.worker_id, worker)
            for worker in self.book.placer.places(turn, at_s)
            if worker is not turn.worker
            and worker.version == turn.dispatch_version
            and worker.run == turn.dispatch_run
        ]
        best = min(found, default=None)
        return None if best is None or best[0] > self.params.ratio * rest.here_s else best[2]

    def is_of_no_use(self, turn_id: str) -> bool:
        """Whether a turn that waits is a copy, to be cancelled: it is of use at once or not at all."""
        return turn_id.endswith(MARK) and turn_id.removesuffix(MARK) in self.of

    def ended(self, turn_id: str, outcome: te.TurnState) -> tuple[str | None, bool]:
        """A turn or a copy has ended: which one to cancel for it, and whether this is how the turn ended."""
        if turn_id.endswith(MARK):
            own = turn_id.removesuffix(MARK)
            if self.of.pop(own, None) is None or outcome is not te.TurnState.DONE:
                return None, False
            self._overtaken.add(own)
            return own, True
        if turn_id in self._overtaken:
            self._overtaken.discard(turn_id)
            return None, False
        return self.of.pop(turn_id, None), True
