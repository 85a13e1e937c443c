"""Which running turns go on elsewhere: those that a slow engine would keep longer than a dedicated one with room.

A harvested engine is as fast as production lets it be.  A step of a job is as long as its slowest turn, so a turn that a burst of
production holds back costs the job more than the harvested engine ever gave it, while a dedicated one stands half empty.  What a
migration costs is known: the prompt and the tokens so far are read again there; none is lost.

A turn is moved when ``here > ratio * there + margin``, with ::

    here  = left * (token + crowd * beside) + lost
    there = tokens * prefill * (1 + social_read * beside) + left * (token + (1 + social) * crowd * beside)

each with what was learned of that engine's speed (:mod:`rose.policy.speed`) and the turns that run there.  ``left``: tokens that it is
expected to make yet.  ``lost``: how much longer it has taken so far than that speed says; nobody knows how long a burst lasts, and
what has lasted so long is expected to last as long again (Lindy's law).  So a turn with much to read again is moved late, and a
short one soon.  Turns go from engines that can be taken back to dedicated ones only, so none goes to and fro.

Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rose.policy.routing import CostParams
from rose.policy.turn import Turn
from rose.policy.turn_events import TurnParams
from rose.policy.worker import Worker

COST = CostParams()
LEAST_LEFT = 0.25
"""Of what was expected of a turn: what one that has made more is still expected to make."""
_ROUNDING = 1.0 - 1e-9
"""So that a bound by other sums than the figure's own is no larger than it."""
MIN_OBSERVED = 8
"""Attempts of an engine that have to have ended before anything can be said to take longer there than it should."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """``made`` and ``left`` in tokens, ``here_s``: how long the rest would take where the turn is."""

    turn: Turn
    home: Worker
    made: float
    left: float
    here_s: float


def made_tokens(turn: Turn) -> float | None:
    """Tokens that the live attempt has made: counted where they are streamed, else by its engine's pace; None: nobody knows."""
    worker = turn.worker
    assert worker is not None
    counted = len(turn.token_ids) - turn.attempt_start
    paced = worker.pace.since(turn.attempt_at_s, turn.attempt_made)
    return max(float(counted), paced or 0.0) if counted or paced is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """Of a running turn: tokens ``made`` by this attempt and expected to be ``left``, and how long these would take where it is."""

    made: float
    left: float
    here_s: float


def rest_of(turn: Turn, at_s: float) -> Rest | None:
    """None: nobody knows, or too little of its engine."""
    worker = turn.worker
    assert worker is not None
    made = made_tokens(turn)
    if made is None or worker.speed.num_observed < MIN_OBSERVED:
        return None
    left = max(turn.expected_tokens - made, LEAST_LEFT * turn.expected_tokens, 1.0)
    here = worker.speed
    token_s = here.token_s + (worker.inflight - 1) * here.crowd_s
    fresh = turn.num_tokens - turn.attempt_resident
    lost_s = max(0.0, at_s - turn.attempt_at_s - made * token_s - fresh * here.prefill_s)
    return Rest(made=made, left=left, here_s=left * token_s + lost_s)


def there_s(turn: Turn, rest: Rest, worker: Worker, beside: int) -> float:
    """How long the rest would take at ``worker``, beside so many other turns; what these lose by it counts."""
    speed = worker.speed
    read_s = speed.prefill_s * (turn.num_tokens + rest.made) * (1.0 + beside * COST.social_read)
    return read_s + rest.left * (speed.token_s + beside * speed.crowd_s * (1.0 + COST.social))


@dataclass(frozen=True, kw_only=True, slots=True)
class Least:
    """No worker of some is quicker than this: seconds for a token to read, and for one to make."""

    read_s: float
    token_s: float

    @classmethod
    def of(cls, workers: Iterable[Worker]) -> Least:
        read_s = token_s = math.inf
        for worker in workers:
            speed, beside = worker.speed, worker.inflight
            if beside < worker.slots:
                read_s = min(read_s, speed.prefill_s * (1.0 + beside * COST.social_read))
                token_s = min(token_s, speed.token_s + beside * speed.crowd_s * (1.0 + COST.social))
        return cls(read_s=read_s * _ROUNDING, token_s=token_s * _ROUNDING)

    def there_s(self, turn: Turn, rest: Rest) -> float:
        """At most what :func:`there_s` says for any of them, beside as many turns as run there now or more."""
        return self.read_s * (turn.num_tokens + rest.made) + rest.left * self.token_s


def to_move(
    turns: Iterable[Turn],
    homes: Callable[[Turn], list[Worker]],
    params: TurnParams,
    at_s: float,
    everyone: Iterable[Worker],
) -> list[Move]:
    """Turns that are better off elsewhere, with where that is.

    Args:
        turns: Live ones, none of a dedicated worker; all of them, since those that were asked for have their room kept.
        homes: Dedicated workers that could run a turn now.
        everyone: All workers that are a home for any turn.  Most turns are nowhere near to being moved: the best that one of
            these could do tells so, without a look at each.
        params: ``migrate_ratio`` and ``migrate_margin_s``.
    """
    found: list[Move] = []
    coming: Counter[str] = Counter()
    staying: list[Turn] = []
    for turn in turns:
        if turn.stopped_at_s is not None and at_s - turn.stopped_at_s < params.stall_s:
            coming[turn.stopped_for] += 1  # its engine has not answered yet
        elif turn.spec.resumable and not turn.spec.only_at:
            staying.append(turn)
    least = Least.of(everyone)
    for turn in staying:
        rest = rest_of(turn, at_s)
        if rest is None or rest.here_s <= params.migrate_margin_s:
            continue
        if rest.here_s <= params.migrate_ratio * least.there_s(turn, rest) + params.migrate_margin_s:
            continue
        best: tuple[float, Worker] | None = None
        for home in homes(turn):
            beside = home.inflight + coming[home.worker_id]
            if beside >= home.slots:
                continue
            needs_s = there_s(turn, rest, home, beside)
            if best is None or needs_s < best[0]:
                best = needs_s, home
        if best is not None and rest.here_s > params.migrate_ratio * best[0] + params.migrate_margin_s:
            found.append(Move(turn=turn, home=best[1], made=rest.made, left=rest.left, here_s=rest.here_s))
            coming[best[1].worker_id] += 1
    return found
