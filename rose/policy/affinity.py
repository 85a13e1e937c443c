"""What each trajectory left in which engine's cache, and how long its turns usually are.

Affinity is to what is *still resident*, not to what was used last: a restart, a KV cut or new weights empty
it (``Worker.kv_epoch``), and so does the cache turning over.  Also remembers where the first turn of each
group went, because the members of a group share their prompt.

Pure bookkeeping; bounded in size.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from rose.policy.fleet import Fleet
from rose.policy.turn_events import TurnSubmitted
from rose.policy.worker import Health, Worker

T = TypeVar("T")


_Residency = tuple[str, str, int, int, int]
"""Worker, its incarnation and KV epoch then, tokens of the trajectory there, tokens admitted there by then.  A plain tuple:
there is one per trajectory, and those of plain values are no business of the garbage collector."""


class Affinity:
    """Args:
    fleet: Where workers are looked up.
    max_entries: Trajectories and groups remembered; the oldest are forgotten first.
    expected_tokens: Output of a turn before its kind has history.
    ewma: Weight of a new observation of that.
    """

    def __init__(self, fleet: Fleet, *, max_entries: int, expected_tokens: int, ewma: float) -> None:
        self._fleet = fleet
        self._max_entries = max_entries
        self._default_tokens = expected_tokens
        self._ewma = ewma
        self._residency: OrderedDict[str, _Residency] = OrderedDict()
        self._group_worker: OrderedDict[str, tuple[str, int, int]] = OrderedDict()
        self._expected: OrderedDict[str, float] = OrderedDict()

    def expected_tokens(self, spec: TurnSubmitted) -> int:
        """Output tokens of a turn: running mean of what was seen of its kind.

        Before that, what the measured ratio of its task makes of the prompt tokens that are new; else the default.
        """
        seen = self._expected.get(spec.history)
        if seen is None and spec.prefill_per_decode:
            num_fresh = spec.num_prompt_tokens - min(
                spec.num_prompt_tokens, self.where(spec.trajectory_id)[1]
            )
            seen = num_fresh / spec.prefill_per_decode
        return max(1, round(float(self._default_tokens) if seen is None else seen))

    def where(self, trajectory_id: str) -> tuple[Worker | None, int]:
        """The worker that ran this trajectory last, and how many of its tokens it still holds."""
        entry = self._residency.get(trajectory_id)
        if entry is None:
            return None, 0
        worker_id, incarnation, kv_epoch, num_tokens, admitted_tokens = entry
        worker = self._fleet.workers.get(worker_id)
        if worker is None or worker.health is Health.DEAD:
            return None, 0
        if incarnation != worker.incarnation or kv_epoch != worker.kv_epoch:
            return worker, 0
        budget = worker.kv_budget_tokens
        if budget is not None and worker.admitted_tokens - admitted_tokens > budget:
            return worker, 0  # the cache has turned over since
        return worker, num_tokens

    def group_worker(self, group_id: str | None) -> tuple[Worker | None, int]:
        """The worker that took this group's last first turn, and the length of that turn's prompt."""
        entry = None if group_id is None else self._group_worker.get(group_id)
        worker = None if entry is None else self._fleet.workers.get(entry[0])
        return (None, 0) if entry is None or worker is None else (worker, entry[2])

    def started(self, group_id: str, worker: Worker, num_prompt: int) -> None:
        """A first turn went to ``worker``: its group follows, up to half the worker's cap, then spreads."""
        name, count, _ = self._group_worker.get(group_id, (worker.worker_id, 0, 0))
        count = count + 1 if name == worker.worker_id else 1
        if count >= max(1, worker.cap // 2):
            self._group_worker.pop(group_id, None)
            return
        self._group_worker[group_id] = (worker.worker_id, count, num_prompt)
        self._group_worker.move_to_end(group_id)
        self._trim(self._group_worker)

    def finished(
        self, trajectory_id: str, history: str, worker: Worker, *, num_prompt: int, num_new: int
    ) -> None:
        """A turn ended on ``worker``, which now holds its prompt and output.  ``history``: of its spec."""
        seen = self._expected.get(history)
        self._expected[history] = float(num_new) if seen is None else seen + self._ewma * (num_new - seen)
        self._trim(self._expected)
        self._residency[trajectory_id] = (
            worker.worker_id,
            worker.incarnation,
            worker.kv_epoch,
            num_prompt + num_new,
            worker.admitted_tokens,
        )
        self._residency.move_to_end(trajectory_id)
        self._trim(self._residency)

    def closed(self, trajectory_id: str) -> None:
        self._residency.pop(trajectory_id, None)

    def _trim(self, table: OrderedDict[str, T]) -> None:
        while len(table) > self._max_entries:
            table.popitem(last=False)
