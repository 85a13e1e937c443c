"""The workers as packed columns, so that one decision over a thousand of them is a few array operations.

:class:`WorkerTable` mirrors what placement needs to know of each :class:`~rose.policy.worker.Worker`, one row
each.  The worker objects stay the truth: whoever changes one calls :meth:`WorkerTable.sync`, and
:meth:`WorkerTable.check` asserts that nobody forgot.

:class:`Eligible` is what a routing policy gets: the rows that may take one turn, as a plain sequence of
workers and as columns.

The only policy module that uses numpy, and only its arithmetic: no randomness, no I/O.  Cost: O(rows) per
question, about 1 us per clause for a thousand rows; O(1) per change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from rose.policy.speed import Speed

if TYPE_CHECKING:
    from rose.lineage import Version
    from rose.policy.worker import Worker

NO_LIMIT = 2**62
"""Room of a worker that advertises no KV budget."""

_SPARE_NAMES = 256
_FIRST_ROWS = 16
_TIERS = {"harvested": 0, "dedicated": 1, "borrowed": 2}
"""Rows of :attr:`WorkerTable.tier_speed`."""

Mask = NDArray[np.bool_]
Rows = NDArray[np.int64]
_NO_ROWS = np.zeros(0, dtype=np.int64)


class WorkerTable:
    """One row per worker; a removed worker's row is taken by the last one.

    Columns, each ``[num_rows]``: ``open`` (may take turns, has a slot), ``model`` and ``job`` (a number per name, -1: any job),
    ``tier`` (a row of ``tier_speed``), ``dedicated``, ``for_tail``, ``max_len`` and ``room`` in tokens, ``run`` (a number per name), ``attempt`` and ``version`` (-1 when unknown),
    ``inflight``, ``free`` slots, ``safe`` (serving has slack), ``reclaim_rate``, ``until_s``, ``observed_at_s``.  ``speed``,
    ``[3, num_rows]``: what was learned, ``token_s``, ``crowd_s`` and ``prefill_s`` (``rose.policy.speed``).
    ``tier_speed``, ``[3, 3]``: the same three of harvested (row 0), dedicated (row 1) and borrowed (row 2) workers at large.

    ``gained`` holds the ids of workers that got better for somebody since :meth:`take_gained`.
    """

    any_reclaims = True
    """Some worker ever had a ``reclaim_rate``: the cost of a cut is then part of a decision."""
    any_ends = False
    """Some worker was ever lent for a time: whether a turn ends before that is then part of a decision."""

    def __init__(self) -> None:
        self.any_reclaims = False
        self.workers: list[Worker] = []
        self.rows: dict[str, int] = {}
        self.gained: set[str] = set()
        self.num_open = 0
        """Rows with ``open``."""
        self.epoch = 0
        """Grows whenever the answer of :meth:`suits` may have changed."""
        self._numbers: dict[str, int] = {}
        self.tier_speed = np.tile(np.array(Speed().coefficients()), (len(_TIERS), 1))
        self._columns: dict[str, NDArray[Any]] = {}
        self._allocate(_FIRST_ROWS)

    def _allocate(self, size: int) -> None:
        kinds = {
            "open": np.bool_,
            "dedicated": np.bool_,
            "for_tail": np.bool_,
            "safe": np.bool_,
            "tier": np.int64,
            "model": np.int64,
            "job": np.int64,
            "max_len": np.int64,
            "room": np.int64,
            "run": np.int64,
            "attempt": np.int64,
            "version": np.int64,
            "inflight": np.int64,
            "free": np.int64,
            "reclaim_rate": np.float64,
            "until_s": np.float64,
            "observed_at_s": np.float64,
        }
        self.everyone = np.ones(size, dtype=np.bool_)
        self.numbers = np.arange(size)
        # One array for the three that are always used together: a third of the operations.
        speed = np.zeros((3, size))
        if self._columns:
            speed[:, : self.speed.shape[1]] = self.speed
        self.speed = speed
        for name, kind in kinds.items():
            column: NDArray[Any] = np.zeros(size, dtype=kind)
            old = self._columns.get(name)
            if old is not None:
                column[: len(old)] = old
            self._columns[name] = column
            setattr(self, name, column)

    def upgrade(self) -> None:
        """Complete the state of a decision log from before workers named runs, were borrowed, or were for the tail."""
        if "for_tail" not in self._columns:
            self._columns["for_tail"] = self.for_tail = np.zeros(len(self.open), dtype=np.bool_)
        if "run" not in self._columns:
            self._columns["run"] = self.run = np.full(len(self.open), self._number(""), dtype=np.int64)
        if "until_s" not in self._columns:
            self._columns["until_s"] = self.until_s = np.full(len(self.open), np.inf)
            self._columns["tier"] = self.tier = self.dedicated.astype(np.int64)
            self.tier_speed = np.vstack((self.tier_speed, Speed().coefficients()))

    everyone: Mask
    numbers: NDArray[np.int64]
    open: Mask
    dedicated: Mask
    for_tail: Mask
    safe: Mask
    tier: NDArray[np.int64]
    model: NDArray[np.int64]
    job: NDArray[np.int64]
    max_len: NDArray[np.int64]
    room: NDArray[np.int64]
    run: NDArray[np.int64]
    attempt: NDArray[np.int64]
    version: NDArray[np.int64]
    inflight: NDArray[np.int64]
    free: NDArray[np.int64]
    reclaim_rate: NDArray[np.float64]
    until_s: NDArray[np.float64]
    speed: NDArray[np.float64]
    observed_at_s: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.workers)

    # --- writing ---------------------------------------------------------------------------------------

    def put(self, worker: Worker) -> None:
        """Add a worker, or replace the one of the same id."""
        row = self.rows.get(worker.worker_id)
        if row is None:
            row = self.rows[worker.worker_id] = len(self.workers)
            self.workers.append(worker)
            if row >= len(self.open):
                self._allocate(2 * len(self.open))
            self.model[row] = self.job[row] = self.run[row] = -1  # of whoever had the row before
        else:
            self.workers[row] = worker
            self.num_open -= bool(self.open[row])
        self.epoch += 1
        self.open[row] = False
        self.model[row] = self._number(worker.model)
        self.max_len[row] = worker.max_model_len
        self.tier[row] = _TIERS[worker.tier.value]
        self.dedicated[row] = worker.tier.value == "dedicated"
        self.for_tail[row] = worker.for_tail
        self.until_s[row] = worker.until_s
        self.any_ends = self.any_ends or worker.until_s != np.inf
        worker.facts = worker.load = None
        self.sync(worker)
        self.sync_speed(worker)

    def remove(self, worker_id: str) -> None:
        row = self.rows.pop(worker_id)
        self.epoch += 1
        self.num_open -= bool(self.open[row])
        last = self.workers.pop()
        self.gained.discard(worker_id)
        if last.worker_id != worker_id:
            self.workers[row] = last
            self.rows[last.worker_id] = row
            for column in self._columns.values():
                column[row] = column[len(self.workers)]
            self.speed[:, row] = self.speed[:, len(self.workers)]

    def sync(self, worker: Worker) -> None:
        """Copy everything that can change, but for the speed."""
        # Most heartbeats bring nothing new, and to compare a tuple is a tenth of looking into the columns.
        safe = worker.serving_holds_slo
        facts = (worker.job, worker.version, worker.run, safe, worker.reclaim_rate, worker.until_s)
        if facts != worker.facts:
            worker.facts = facts
            self._sync_facts(worker, safe)
        self.sync_load(worker)

    def _sync_facts(self, worker: Worker, safe: bool) -> None:
        row = self.rows[worker.worker_id]
        attempt, version = (-1, -1) if worker.version is None else worker.version
        job = -1 if worker.job is None else self._number(worker.job)
        if job != self.job[row]:
            self.job[row] = job
            self.gained.add(worker.worker_id)
            self.epoch += 1
        run = self._number(worker.run)
        if attempt != self.attempt[row] or version != self.version[row] or run != self.run[row]:
            self.gained.add(worker.worker_id)
            self.attempt[row], self.version[row], self.run[row] = attempt, version, run
            self.epoch += 1
        if safe != self.safe[row]:
            if safe:
                self.gained.add(worker.worker_id)
            self.safe[row] = safe
        if worker.until_s != self.until_s[row]:
            if worker.until_s > self.until_s[row]:
                self.gained.add(worker.worker_id)
            self.until_s[row] = worker.until_s
        self.reclaim_rate[row] = worker.reclaim_rate
        self.any_reclaims = self.any_reclaims or worker.reclaim_rate > 0

    def sync_speed(self, worker: Worker) -> None:
        """Copy what a finished attempt taught."""
        row = self.rows[worker.worker_id]
        speed = worker.speed
        self.speed[:, row] = speed.coefficients()
        self.observed_at_s[row] = speed.observed_at_s

    def sync_load(self, worker: Worker) -> None:
        """Copy what a dispatch or a release changes."""
        inflight, budget = worker.inflight, worker.kv_budget_tokens
        free = worker.slots - inflight
        is_open = free > 0 and worker.may_take_turns
        room = NO_LIMIT if budget is None else budget - worker.reserved_tokens
        load = (is_open, room, inflight, free)
        before = worker.load
        if load == before:
            return
        worker.load = load
        row = self.rows[worker.worker_id]
        was_open, had_room = (bool(self.open[row]), self.room[row]) if before is None else before[:2]
        if is_open and (not was_open or room > had_room):
            self.gained.add(worker.worker_id)
        if is_open is not was_open:
            self.open[row] = is_open
            self.num_open += 1 if is_open else -1
        self.room[row] = room
        self.inflight[row], self.free[row] = inflight, free

    def set_tier(self, tier: str, speed: Speed) -> None:
        self.tier_speed[_TIERS[tier]] = speed.coefficients()

    def home_speedup(self, tier: str) -> float:
        """How many times faster dedicated workers at large make a token, with nobody beside it, than those of ``tier``."""
        return float(self.tier_speed[_TIERS[tier], 0] / self.tier_speed[_TIERS["dedicated"], 0])

    def is_roomy(self) -> bool:
        """Could the dedicated workers take, in free slots, all turns that run on others, and one more?"""
        count = len(self.workers)
        own = self.dedicated[:count]
        return int(self.free[:count][own & self.open[:count]].sum()) > int(self.inflight[:count][~own].sum())

    def take_gained(self) -> NDArray[np.int64]:
        """Rows in :attr:`gained`, which is then empty."""
        if not self.gained:
            return _NO_ROWS
        rows = np.array(sorted(self.rows[name] for name in self.gained), dtype=np.int64)
        self.gained.clear()
        return rows

    # --- asking ----------------------------------------------------------------------------------------

    def may_run(
        self, *, model: str, job: str, dedicated_only: bool, floor: Version | None, run: str | None = None
    ) -> Mask:
        """Rows that are open to any turn of this model, job, tier, run and weight version; ``[num_rows]``."""
        suits = self.suits(model=model, job=job, dedicated_only=dedicated_only, floor=floor, run=run)
        return suits & self.open[: len(self.workers)]

    def suits(
        self, *, model: str, job: str, dedicated_only: bool, floor: Version | None, run: str | None = None
    ) -> Mask:
        """The same of rows that are open or not; good until :attr:`epoch` changes.  ``run`` None: any, or none."""
        count = len(self.workers)
        mask = self.serves(model, job)
        if dedicated_only:
            mask &= self.dedicated[:count]
        if run is not None:
            mask &= self.of_run(run)
        if floor is not None:
            mask &= self.at_least(floor)
        return mask

    def of_run(self, run: str) -> Mask:
        """Rows whose weights are of this run."""
        return self.run[: len(self.workers)] == self._numbers.get(run, -2)

    def serves(self, model: str, job: str) -> Mask:
        """Rows with this model that work for this job, open or not.  A turn of no job runs where nobody was assigned: the empty name on a
        worker says that it is parked."""
        count = len(self.workers)
        mine = self.job[:count]
        mask = (mine == -1) | (mine == (self._numbers.get(job, -2) if job else -2))
        return mask & (self.model[:count] == self._numbers.get(model, -2))

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            # A row has three names.  Names come and go without end, rows do not.
            if len(self._numbers) >= _SPARE_NAMES + 6 * len(self.workers):
                self._forget_names()
            number = self._numbers[name] = len(self._numbers)
        return number

    def _forget_names(self) -> None:
        """Number anew the names that some row has; -1 stays."""
        count = len(self.workers)
        columns = [self._columns[kind][:count] for kind in ("model", "job", "run")]
        used = {int(number) for column in columns for number in column}
        moved = np.full(len(self._numbers) + 1, -1, dtype=np.int64)  # the last one is that of -1
        kept = [(name, number) for name, number in self._numbers.items() if number in used]
        for new, (_, old) in enumerate(kept):
            moved[old] = new
        for column in columns:
            column[:] = moved[column]
        self._numbers = {name: new for new, (name, _) in enumerate(kept)}

    def at_least(self, floor: Version) -> Mask:
        """Rows whose weights are ``floor`` or newer."""
        count = len(self.workers)
        attempt = self.attempt[:count]
        return (attempt > floor[0]) | ((attempt == floor[0]) & (self.version[:count] >= floor[1]))

    def fits(self, mask: Mask, *, num_tokens: int, need_tokens: int) -> Mask:
        """Those of ``mask`` whose model length and KV room hold the turn."""
        count = len(self.workers)
        fit = self.room[:count] >= need_tokens
        fit &= mask
        fit &= self.max_len[:count] > num_tokens
        return fit

    def ends_in_time(
        self, mask: Mask, *, at_s: float, num_prompt: int, num_new: int, resident: tuple[str | None, int]
    ) -> Mask:
        """Those of ``mask`` where a turn that begins now is expected to end before the worker goes back.

        Args:
            num_new: Tokens that it is expected to make.
            resident: The worker that has some of its prompt's tokens already, and how many.
        """
        count = len(self.workers)
        token_s, crowd_s, prefill_s = self.speed[:, :count]
        takes_s = num_new * (token_s + crowd_s * self.inflight[:count]) + num_prompt * prefill_s
        name, num_tokens = resident
        if name is not None:
            row = self.rows[name]
            takes_s[row] -= num_tokens * prefill_s[row]
        return mask & (at_s + takes_s <= self.until_s[:count])

    def check(self, workers: Iterable[Worker]) -> None:
        """Every row says what its worker says."""
        mine = list(workers)
        assert len(mine) == len(self.workers) == len(self.rows)
        assert self.num_open == int(self.open[: len(mine)].sum())
        for worker in mine:
            row = self.rows[worker.worker_id]
            assert self.workers[row] is worker
            assert self.open[row] == (worker.may_take_turns and worker.inflight < worker.slots)
            assert self.inflight[row] == worker.inflight
            assert self.free[row] == worker.slots - worker.inflight
            budget = worker.kv_budget_tokens
            assert self.room[row] == (NO_LIMIT if budget is None else budget - worker.reserved_tokens)
            assert (self.attempt[row], self.version[row]) == (worker.version or (-1, -1))
            assert self.job[row] == (-1 if worker.job is None else self._numbers[worker.job])
            assert self.run[row] == self._numbers[worker.run]
            assert self.safe[row] == worker.serving_holds_slo
            assert tuple(self.speed[:, row]) == worker.speed.coefficients()
            assert self.reclaim_rate[row] == worker.reclaim_rate
            assert self.until_s[row] == worker.until_s
            assert self.for_tail[row] == worker.for_tail
            assert self.tier[row] == _TIERS[worker.tier.value]
            assert self.any_ends or worker.until_s == np.inf


class Eligible(Sequence["Worker"]):
    """The workers that may take one turn: a sequence of them, and ``rows`` into the table's columns."""

    __slots__ = ("_which", "mask", "rows", "table")

    def __init__(self, table: WorkerTable, mask: Mask, rows: NDArray[np.int64] | None = None) -> None:
        self.table = table
        self.mask = mask
        self.rows: NDArray[np.int64] = mask.nonzero()[0] if rows is None else rows
        # Where every worker may, as in a fleet with room, a slice is a tenth of the cost of a gather.
        self._which = slice(0, len(mask)) if len(self.rows) == len(mask) else self.rows

    @classmethod
    def of(cls, workers: Iterable[Worker]) -> Eligible:
        """All of ``workers``, in a table of their own; for tests and for policies tried by hand."""
        table = WorkerTable()
        for worker in workers:
            table.put(worker)
        return cls(table, np.ones(len(table), dtype=np.bool_))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Worker: ...
    @overload
    def __getitem__(self, index: slice) -> list[Worker]: ...
    def __getitem__(self, index: int | slice) -> Worker | list[Worker]:
        if isinstance(index, slice):
            return [self.table.workers[int(row)] for row in self.rows[index]]
        return self.table.workers[int(self.rows[index])]

    def __iter__(self) -> Iterator[Worker]:
        workers = self.table.workers
        return iter([workers[int(row)] for row in self.rows])

    def __contains__(self, worker: object) -> bool:
        row = self.table.rows.get(getattr(worker, "worker_id", ""))
        return row is not None and self.table.workers[row] is worker and bool(self.mask[row])

    def widened(self) -> Eligible:
        """Every row of the table: to compute for all and keep :attr:`rows` is cheaper than to gather most of them."""
        return Eligible(
            self.table, self.table.everyone[: len(self.mask)], self.table.numbers[: len(self.mask)]
        )

    def index_of(self, worker: Worker) -> int:
        """Where an eligible worker stands in :attr:`rows`."""
        if isinstance(self._which, slice):
            return self.table.rows[worker.worker_id]
        return int(self.rows.searchsorted(self.table.rows[worker.worker_id]))

    def column(self, name: str) -> NDArray[Any]:
        """A column of the table at the eligible rows, ``[len(self)]``; to be read only."""
        return getattr(self.table, name)[self._which]

    def speeds(self, at_s: float, fade_s: float) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """``token_s``, ``crowd_s``, ``prefill_s``, each ``[len(self)]``, faded to the tier's."""
        trust = self.column("observed_at_s") - at_s
        trust *= 1.0 / fade_s
        np.exp(trust, out=trust)
        tiers = self.table.tier_speed
        base = tiers.T[:, self.column("tier")]
        faded = self.table.speed[:, self._which] - base
        faded *= trust
        faded += base
        return faded[0], faded[1], faded[2]

    def where(self, mask: Mask) -> Eligible:
        """Those for which ``mask``, ``[len(self)]``, is true."""
        narrowed = self.mask.copy()
        narrowed[self.rows[~mask]] = False
        return Eligible(self.table, narrowed)

    def least(self, values: NDArray[Any], draw: float) -> Worker:
        """One with the smallest of ``values``, ``[len(self)]``; ``draw`` in [0, 1) decides between equals."""
        ties = np.flatnonzero(values <= values.min())
        return self[int(ties[min(int(draw * len(ties)), len(ties) - 1)])]
