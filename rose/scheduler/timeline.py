"""What happened lately, for people: spans of turns on workers, marks of trouble, and one sample a second.

Bounded rings, nothing on disk.  The dashboard reads it over ``/events``, ``/debug/trace`` gives it to Perfetto or
``chrome://tracing``.  Fed with every action of the turn book and once a second with the whole status; decides nothing.

Its rows are those of :mod:`rose.wire.status`: tuples of plain values, which a full garbage collection does not look at.
Times are seconds of the scheduler's own clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

from rose.evaluation.statistics import percentile
from rose.policy import turn_events as te
from rose.policy.fleet import Fleet
from rose.policy.worker import Health, LendingState, Tier
from rose.scheduler.learning import Learning
from rose.scheduler.slices import Slices
from rose.wire.status import (
    DashboardSample,
    History,
    LearningRow,
    SchedulerStatus,
    StepMark,
    TurnSpan,
    WorkerMark,
)

MAX_SPANS = 20_000
MAX_MARKS = 2_000
MAX_SAMPLES = 900
HOURS_EVERY_S = 30.0
MAX_HOURS = 24 * 120
"""A day of every thirtieth sample."""
_WINDOW = 512
"""Latest waits and moves that percentiles are taken over."""


class Promise(NamedTuple):
    """What production promised and what it does: the P99 of its recent requests, in seconds."""

    p99_s: float
    slo_s: float

    @property
    def share(self) -> float:
        return self.p99_s / self.slo_s


def _nothing(_: Any) -> None:
    pass


class Timeline:
    """Args:
    now_s: The scheduler's clock.
    trajectory_of: The trajectory of a turn.
    on_rerouted: Told the seconds from a turn's loss of its worker to its next token (or its end).
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        fleet: Fleet,
        trajectory_of: Callable[[str], str],
        on_rerouted: Callable[[float], None] = _nothing,
    ) -> None:
        self._on_rerouted = on_rerouted
        self._now_s = now_s
        self._fleet = fleet
        self._trajectory_of = trajectory_of
        self._open: dict[str, TurnSpan] = {}
        self._closed: deque[TurnSpan] = deque(maxlen=MAX_SPANS)
        self._num_spans = 0
        self._changed: deque[TurnSpan] = deque(maxlen=MAX_SPANS)
        """Spans opened or closed, oldest first; ``_num_changes`` counts all there ever were."""
        self._num_changes = 0
        self.marks: deque[WorkerMark] = deque(maxlen=MAX_MARKS)
        self.samples: deque[DashboardSample] = deque(maxlen=MAX_SAMPLES)
        self.hours: deque[DashboardSample] = deque(maxlen=MAX_HOURS)
        """The same, one for each ``HOURS_EVERY_S``."""
        self._queue_s: deque[float] = deque(maxlen=_WINDOW)
        self._reroute_s: deque[float] = deque(maxlen=_WINDOW)
        self._moved_at_s: dict[str, float] = {}
        """Turns that lost their worker and got no token since."""
        self._promises: dict[str, dict[str, Promise]] = {}
        """Worker -> ``ttft`` and ``tpot`` of the production engine beside it."""
        self._under_pressure: set[str] = set()
        self.staleness: Counter[int] = Counter()
        """Versions a leased trajectory lay behind its consumer -> how many."""
        self.steps: deque[StepMark] = deque(maxlen=200)
        self.num_finished = 0
        self._learning = Learning()
        self.num_broken = 0
        """Promises of production's SLO that were broken, by all engines, since this process began."""
        self._broken: dict[str, int] = {}

    # --- fed by the daemon -----------------------------------------------------------------------------

    def on_action(self, action: te.Action) -> None:
        match action:
            case te.Dispatch():
                self._begin(action)
            case te.Requeued():
                self._end(action.turn_id, action.reason)
                self._moved_at_s.setdefault(action.turn_id, self._now_s())
            case te.TokensKept():
                if self._moved_at_s:
                    self._arrived(action.turn_id)
            case te.TurnEnded():
                self._end(action.turn_id, action.outcome.value)
                if action.outcome is te.TurnState.DONE:
                    self._arrived(action.turn_id)
                else:
                    self._moved_at_s.pop(action.turn_id, None)
            case _:
                pass

    def on_step(self, job: str, version: str) -> None:
        self.steps.append((self._now_s(), job, version, self.num_finished))

    def on_finished(self, job: str, reward: float, success: bool | None) -> None:
        """A trajectory has its reward."""
        self.num_finished += 1
        self._learning.finished(job, self._now_s(), reward, success)

    def on_leased(self, lags: Iterable[int]) -> None:
        self.staleness.update(lags)

    def on_breaches(self, worker_id: str, count: int) -> None:
        """A worker's running count of broken promises; a smaller one than before is a new engine's."""
        new = count - self._broken.get(worker_id, count)
        self._broken[worker_id] = count
        if new > 0:
            self.num_broken += new
            self.marks.append((self._now_s(), worker_id, "slo"))

    def on_promises(self, worker_id: str, promises: dict[str, Promise]) -> None:
        """A heartbeat's word on production's P99; empty when it has none."""
        if promises:
            self._promises[worker_id] = promises
        else:
            self._promises.pop(worker_id, None)

    def worst_promises(self) -> dict[str, Promise]:
        """``ttft`` and ``tpot`` of the engine that is nearest to breaking its promise, or farthest beyond it."""
        worst: dict[str, Promise] = {}
        for promises in self._promises.values():
            for kind, promise in promises.items():
                if kind not in worst or promise.share > worst[kind].share:
                    worst[kind] = promise
        return worst

    def sample(self, status: SchedulerStatus) -> None:
        """Once a second."""
        now_s = self._now_s()
        flight = {tier.value: 0 for tier in Tier}
        slack: list[float] = []
        use = [worker.serving_use for worker in self._fleet if worker.tier is Tier.HARVESTED]
        pressed: set[str] = set()
        for worker in self._fleet:
            flight[worker.tier.value] += worker.inflight
            if worker.slack_s is not None:
                slack.append(worker.slack_s)
            if worker.lending is LendingState.PRESSURE:
                pressed.add(worker.worker_id)
        for name in sorted(pressed - self._under_pressure):
            self.marks.append((now_s, name, "pressure"))
        self._under_pressure = pressed
        here = self._fleet.workers
        self._broken = {name: count for name, count in self._broken.items() if name in here}
        self._promises = {
            name: promises
            for name, promises in self._promises.items()
            if name in here and here[name].health is not Health.DEAD
        }
        tokens = status["tokens"]
        self.samples.append(
            {
                "t": round(now_s, 3),
                "flight": flight,
                "queued": status["queue"]["depth"],
                "done": status["turns"]["done"],
                "finished": self.num_finished,
                "queue_s": _percentiles(self._queue_s),
                "reroute_s": _percentiles(self._reroute_s),
                "tokens": (
                    tokens.get("prompt", 0),
                    tokens.get("cached", 0),
                    tokens.get("recomputed", 0),
                    tokens.get("discarded", 0),
                    tokens.get("generated", 0),
                ),
                "slack_s": round(min(slack), 4) if slack else None,
                "gated": sum(worker.gated for worker in self._fleet),
                "serving_use": round(sum(use) / len(use), 4) if use else None,
                "broken": self.num_broken,
                "p99": {
                    kind: (round(promise.p99_s, 5), round(promise.slo_s, 5))
                    for kind, promise in self.worst_promises().items()
                },
            }
        )

        if not self.hours or now_s >= self.hours[-1]["t"] + HOURS_EVERY_S:
            self.hours.append(self.samples[-1])

    # --- read by people --------------------------------------------------------------------------------

    async def history(self) -> History:
        """A day, encoded in slices."""
        slices, now, curves = Slices(), round(self._now_s(), 3), self._learning.curves()
        hours = await slices.json_list(list(self.hours))
        jobs = {job: await slices.json_list(rows) for job, rows in curves.items()}
        return {
            "now": now,
            "hours": cast("list[DashboardSample]", hours),
            "jobs": cast("dict[str, list[LearningRow]]", jobs),
        }

    @property
    def num_changes(self) -> int:
        return self._num_changes

    def spans(self) -> list[TurnSpan]:
        """Everything still remembered, the running ones last."""
        return [*self._closed, *self._open.values()]

    def changes_since(self, count: int) -> list[TurnSpan]:
        """Spans opened or closed after ``num_changes`` was ``count``; at most what the ring holds."""
        missed = min(self._num_changes - count, len(self._changed))
        return (
            []
            if missed <= 0
            else [self._changed[at] for at in range(len(self._changed) - missed, len(self._changed))]
        )

    def chrome_trace(self) -> dict[str, Any]:
        """The Trace Event format: one process per tier, one thread per worker; microseconds."""
        now_s = self._now_s()
        threads: dict[tuple[str, str], int] = {}
        events: list[dict[str, Any]] = []
        pids = {tier.value: number for number, tier in enumerate(Tier, 1)}
        for number, worker, tier, trajectory, attempt, start_s, end_s, how in self.spans():
            thread = threads.setdefault((tier, worker), len(threads) + 1)
            events.append(
                {
                    "name": trajectory,
                    "cat": how or "running",
                    "ph": "X",
                    "pid": pids[tier],
                    "tid": thread,
                    "ts": round(start_s * 1e6),
                    "dur": round(((now_s if end_s is None else end_s) - start_s) * 1e6),
                    "args": {"span": number, "attempt": attempt, "ended": how},
                }
            )
        tier_of = {worker: tier for tier, worker in threads}
        for at_s, worker, kind in self.marks:
            tier = tier_of.get(worker)
            if tier is not None:
                thread = threads[(tier, worker)]
                events.append(
                    {
                        "name": kind,
                        "ph": "i",
                        "s": "t",
                        "pid": pids[tier],
                        "tid": thread,
                        "ts": round(at_s * 1e6),
                    }
                )
        for tier, pid in pids.items():
            events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": tier}})
        for (tier, worker), thread in threads.items():
            names = {
                "name": "thread_name",
                "ph": "M",
                "pid": pids[tier],
                "tid": thread,
                "args": {"name": worker},
            }
            events.append(names)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    # --- inside ----------------------------------------------------------------------------------------

    def _begin(self, action: te.Dispatch) -> None:
        worker = self._fleet.workers[action.worker_id]
        if action.attempt == 1:
            self._queue_s.append(action.queued_s)
        self._num_spans += 1
        span = (
            self._num_spans,
            action.worker_id,
            worker.tier.value,
            self._trajectory_of(action.turn_id),
            action.attempt,
            round(self._now_s(), 4),
            None,
            "",
        )
        self._open[action.turn_id] = span
        self._note(span)

    def _end(self, turn_id: str, how: str) -> None:
        span = self._open.pop(turn_id, None)
        if span is None:
            return
        end_s = round(self._now_s(), 4)
        span = (*span[:6], end_s, how)
        self._closed.append(span)
        if how not in ("done", "cancelled", "failed"):
            self.marks.append((end_s, span[1], how))
        self._note(span)

    def _arrived(self, turn_id: str) -> None:
        """The first token since its worker was lost; of an engine that does not stream, its whole answer."""
        moved_at_s = self._moved_at_s.pop(turn_id, None)
        if moved_at_s is not None:
            seconds = self._now_s() - moved_at_s
            self._reroute_s.append(seconds)
            self._on_rerouted(seconds)

    def _note(self, span: TurnSpan) -> None:
        self._changed.append(span)
        self._num_changes += 1


def _percentiles(values: deque[float]) -> tuple[float, float] | None:
    """P50 and P99 of the latest values."""
    if not values:
        return None
    return round(percentile(values, 0.5), 4), round(percentile(values, 0.99), 4)
