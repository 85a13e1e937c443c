"""What the journal's records amount to: trajectories, the book of samples, versions, and how much memory they hold.

:class:`Books` has one way in, :meth:`Books._apply`, for what is decided now and for what a journal is read back from, so that both come to
the same.  What is decided, and what clients may ask, is in :class:`rose.scheduler.store.TrajectoryStore`.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from rose.errors import CapacityError, LedgerError, NotFound, PolicyError
from rose.lineage import Version, parse_version
from rose.policy import samples as sp
from rose.scheduler.holdings import Holdings, finished_bytes
from rose.scheduler.journal import Journal, framed
from rose.scheduler.records import (
    AckedRecord,
    AckRecord,
    CancelRecord,
    CloseRecord,
    CreateRecord,
    DeliveredRecord,
    EpochRecord,
    ExpiredRecord,
    ExpireRecord,
    FinishRecord,
    FormRecord,
    LeaseRecord,
    Record,
    RenewRecord,
    ResumeRecord,
    ReturnedRecord,
    ReturnRecord,
    ScoreRecord,
    TurnRecord,
    UnleasedRecord,
    VersionRecord,
)
from rose.scheduler.snapshot import snapshot
from rose.scheduler.trajectory import Trajectory

log = logging.getLogger("rose.scheduler")

_SPARE_DEADLINES = 1000
COMPACT_AGAIN_S = 60.0
"""After a compaction that failed: the disk may have room again."""


class Books:
    """Args:
    journal: Recovered here; one that follows is read as far as it is written, see :meth:`catch_up` and :meth:`begin`.
    params: Of the sample book.
    max_trajectories: Bound on trajectories in memory.
    retained_finals: Consumed or cancelled ones that stay readable.
    compact_bytes: A journal beyond this is rewritten with the live state.
    retained_bytes: Of consumed or cancelled ones.
    max_job_bytes, max_held_bytes: Of the others, see :class:`~rose.scheduler.holdings.Holdings`.
    on_stale: Told how many trajectories were dropped as stale.
    """

    def __init__(
        self,
        journal: Journal,
        params: sp.SampleParams,
        *,
        max_trajectories: int,
        retained_finals: int,
        compact_bytes: int,
        retained_bytes: int = sys.maxsize,
        max_job_bytes: int = sys.maxsize,
        max_held_bytes: int = sys.maxsize,
        on_stale: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.journal = journal
        self.book = sp.SampleBook(params=params)
        self.trajectories: dict[str, Trajectory] = {}
        self.versions: dict[str, Version] = {}
        self.runs = self.book.runs
        """Of jobs whose trainer named one."""
        self._by_key: dict[tuple[str, str], str] = {}
        """Job and ``Idempotency-Key`` of a creation -> what it made."""
        self._finals: OrderedDict[str, None] = OrderedDict()
        self._untouched: OrderedDict[str, float] = OrderedDict()
        """Running trajectories and when their last turn was added (or they began), longest ago first."""
        self._waiting: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Job and name of groups of which something has finished, and when it did or last came back from a trainer, longest ago first."""
        self._deadlines: list[tuple[float, str]] = []
        """Heap of ``(seconds since 1970, trajectory)``; those that ended meanwhile are passed over, and taken out when they are most."""
        self.on_stale = on_stale
        self.on_ahead: Callable[[int], None] = lambda count: None
        """Told how many of these were of later steps than their trainer's, which began anew below them."""
        self.num_stale = 0
        self.on_unleased: Callable[[int], None] = lambda count: None
        self.num_unleased = 0
        """Trajectories that no trainer came for."""
        self._max_trajectories = max_trajectories
        self._retained_finals = retained_finals
        self._retained_bytes = retained_bytes
        self._final_bytes = 0
        self.holdings = Holdings(max_job_bytes=max_job_bytes, max_bytes=max_held_bytes)
        self.num_recovered = 0
        self.epoch = 0
        """Of the process that wrote last."""
        self._compact_bytes = compact_bytes
        self._compact_at_s = 0.0
        if journal.claim is None:
            self.catch_up()
        else:
            self.begin()

    def catch_up(self) -> None:
        """Read what another process has written meanwhile.

        Raises:
            Replaced: Its journal is another file now.
        """
        self._read(self.journal.follow())

    def begin(self) -> None:
        """Read what is left, and be the one that writes: the journal has its claim.

        Raises:
            Replaced: It is not the file that was read so far.
            LedgerError: It is damaged, or cannot be written.
        """
        journal = self.journal
        self._read(journal.recover())
        if journal.must_move:
            try:
                journal.compact(self._snapshot())
            except OSError as error:
                raise LedgerError(
                    f"the journal cannot be written: {error.strerror}", field="journal"
                ) from error
            self._compacted()
        elif self.is_journal_large:
            with self._reported():
                journal.compact(self._snapshot())
                self._compacted()
        # When each was last asked for is not in the journal: just now, for all that we know.
        now_s = time.monotonic()
        for batch in self.book.batches.values():
            batch.expires_at_s = now_s + batch.ttl_s
        assert journal.claim is not None
        journal.claim.rise_above(self.epoch)
        self._write(EpochRecord(epoch=journal.claim.epoch))

    def _read(self, records: Iterator[Record]) -> None:
        for record in records:
            self._apply(record)
            self.num_recovered += 1

    @property
    def is_journal_large(self) -> bool:
        """Large, and mostly history."""
        is_large = self.journal.size_bytes > self._compact_bytes and not self.journal.is_compacting
        return is_large and time.monotonic() >= self._compact_at_s

    async def compact(self) -> None:
        """Rewrite the journal with the live state, beside everything else."""
        with self._reported():
            await self.journal.compact_beside(self._snapshot())
            self._compacted()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Around a compaction: the journal that there is goes on where its successor cannot be written."""
        try:
            yield
        except (OSError, CapacityError) as error:
            self._compact_at_s = time.monotonic() + COMPACT_AGAIN_S
            log.error("the journal was not compacted: %s", getattr(error, "strerror", None) or error)
        except Exception:
            # Nobody waits for it who could do better, and the journal of a process that stops is still to be closed.
            self._compact_at_s = time.monotonic() + COMPACT_AGAIN_S
            log.exception("the journal was not compacted")

    def _snapshot(self) -> Iterator[Record]:
        return snapshot(self.book, self.trajectories, self.versions, self.runs, self.epoch)

    def _compacted(self) -> None:
        self._compact_bytes = max(self._compact_bytes, 2 * self.journal.size_bytes)

    def get(self, trajectory_id: str) -> Trajectory:
        """Raises:
        NotFound: Unknown or long forgotten.
        """
        trajectory = self.trajectories.get(trajectory_id)
        if trajectory is None:
            raise NotFound(
                f"trajectory '{trajectory_id[:64]}' is unknown", field="X-Session-ID", code="unknown_session"
            )
        return trajectory

    def _touch(self, name: str) -> None:
        self._untouched[name] = time.monotonic()
        self._untouched.move_to_end(name)

    def _wait(self, job: str, group_id: str) -> None:
        """A trainer may come for something of this group from now on."""
        self._waiting[job, group_id] = time.monotonic()
        self._waiting.move_to_end((job, group_id))

    def _mark_stale(self, record: LeaseRecord) -> None:
        """As this lease has it: with another version or bound an earlier one may have marked others."""
        for group_id in record.group_ids:
            for name in self.book.groups[record.job, group_id].members:
                self.trajectories[name].stale = False
        for name in record.stale_ids:
            self.trajectories[name].stale = True

    # --- one way in, live and at recovery --------------------------------------------------------------

    def _write(self, record: Record) -> list[sp.Action]:
        """Decide, then record.  What is no record, and a refused event, raises before anything is written or decided; a failed write means
        that the process stops promising (see the journal), and a restart sees the last durable state."""
        data = framed(record)
        actions = self._apply(record)
        self.journal.append_framed(data)
        return actions

    def _apply(self, record: Record) -> list[sp.Action]:
        match record:
            case TurnRecord():
                trajectory = self.trajectories.get(record.trajectory_id)
                if trajectory is not None and record.turn == len(trajectory.turns):
                    with self._counted(trajectory):
                        trajectory.add(record)
                    if record.trajectory_id in self._untouched:
                        self._touch(record.trajectory_id)
                    return self.book.handle(
                        sp.TurnAdded(
                            trajectory_id=trajectory.id,
                            versions=trajectory.versions,
                            num_tokens=trajectory.num_tokens,
                            runs=trajectory.runs,
                        )
                    )
                return []
            case FormRecord():
                trajectory = self.trajectories.get(record.trajectory_id)
                if trajectory is not None and record.turn < len(trajectory.turns):
                    with self._counted(trajectory):
                        trajectory.add_form(record.turn, record.tip, record.thoughts)
                return []
            case DeliveredRecord():
                trajectory = self.trajectories.get(record.trajectory_id)
                if trajectory is not None:
                    for turn, retry in record.answers:
                        trajectory.deliveries.end(turn, retry)
                return []
            case CreateRecord():
                actions = self.book.handle(
                    sp.TrajectoryCreated(
                        trajectory_id=record.id,
                        job=record.job,
                        group_id=record.group_id,
                        group_size=record.group_size,
                        floor=parse_version(record.floor) if record.floor else None,
                    )
                )
                self.trajectories[record.id] = trajectory = Trajectory(record)
                self.holdings.add(record.job, trajectory.num_bytes)
                self._touch(record.id)
                if record.deadline_at is not None:
                    heapq.heappush(self._deadlines, (record.deadline_at, record.id))
                    if len(self._deadlines) > 2 * len(self._untouched) + _SPARE_DEADLINES:
                        self._deadlines = [each for each in self._deadlines if each[1] in self._untouched]
                        heapq.heapify(self._deadlines)
                if record.key:
                    self._by_key[record.job, record.key] = record.id
            case FinishRecord():
                trajectory = self.get(record.id)
                actions = self.book.handle(
                    sp.TrajectoryFinished(
                        trajectory_id=record.id,
                        versions=trajectory.versions,
                        reward=record.reward,
                        filter_equal=record.filter_equal,
                    )
                )
                with self._counted(trajectory):
                    trajectory.finish = record
                    trajectory.num_bytes += finished_bytes(record)
                self._untouched.pop(record.id, None)
                self._wait(trajectory.created.job, trajectory.created.group_id)
            case ScoreRecord():
                trajectory = self.trajectories.get(record.id)
                if trajectory is not None:
                    with self._counted(trajectory):
                        trajectory.add_scores(record)
                return []
            case CloseRecord():
                trajectory = self.trajectories.get(record.id)
                if trajectory is not None and not trajectory.closed:
                    trajectory.closed = True
                    if record.id in self._untouched:
                        self._touch(record.id)  # a judge has as long as an agent
                return []
            case CancelRecord():
                actions = self.book.handle(
                    sp.TrajectoryCancelled(trajectory_id=record.id, reason=record.reason)
                )
            case UnleasedRecord():
                actions = self.book.handle(
                    sp.GroupForsaken(job=record.job, group_id=record.group_id, reason=record.reason)
                )
            case LeaseRecord():
                actions = self.book.handle(
                    sp.BatchRestored(
                        at_s=time.monotonic(),
                        batch_id=record.batch_id,
                        job=record.job,
                        group_ids=tuple(record.group_ids),
                        stale_group_ids=tuple(record.stale_group_ids),
                        ttl_s=record.ttl_s,
                        consumer=record.consumer,
                    )
                )
                self._mark_stale(record)
            case RenewRecord():
                batch = self.book.batches.get(record.batch_id)
                if batch is not None:
                    batch.ttl_s = record.ttl_s
                return []
            case ExpireRecord():
                actions = self.book.handle(sp.BatchExpired(batch_id=record.batch_id))
            case ReturnRecord():
                actions = self.book.handle(sp.BatchReturned(batch_id=record.batch_id))
            case AckRecord():
                actions = self.book.handle(
                    sp.BatchAcked(batch_id=record.batch_id, step=record.step, attempt=record.attempt)
                )
            case ResumeRecord():
                actions = self.book.handle(
                    sp.JobResumed(
                        job=record.job,
                        attempt=record.attempt,
                        consumed=tuple(record.consumed),
                        consumer=record.consumer,
                    )
                )
            case AckedRecord():
                for batch_id, step, attempt in record.batches:
                    self.book.acked[batch_id] = (step, attempt)
                return []
            case ReturnedRecord():
                self.book.returned.update(dict.fromkeys(record.batch_ids))
                return []
            case ExpiredRecord():
                for batch_id, job, group_ids, ttl_s in record.batches:
                    self.book.expired[batch_id] = sp.Batch(
                        batch_id=batch_id,
                        job=job,
                        group_ids=tuple(group_ids),
                        expires_at_s=time.monotonic(),
                        ttl_s=ttl_s,
                        consumer=record.consumers.get(batch_id, ""),
                    )
                return []
            case EpochRecord():
                if record.epoch <= self.epoch:
                    raise LedgerError(
                        f"epoch {record.epoch} comes behind {self.epoch}: two have written here",
                        field="journal",
                    )
                self.epoch = record.epoch
                return []
            case VersionRecord():
                self.versions[record.job] = (record.attempt, record.version)
                self.runs[record.job] = record.run
                return []
            case _:
                raise PolicyError(f"unknown record {type(record).__name__}")
        self._after(actions)
        return actions

    @contextlib.contextmanager
    def _counted(self, trajectory: Trajectory) -> Iterator[None]:
        """Around what makes it larger."""
        before = trajectory.num_bytes
        yield
        if trajectory.id in self._finals:
            self._final_bytes += trajectory.num_bytes - before
        else:
            self.holdings.add(trajectory.created.job, trajectory.num_bytes - before)

    def _after(self, actions: list[sp.Action]) -> None:
        """Final trajectories leave memory, oldest first, once enough newer ones are kept to look at."""
        for action in actions:
            if isinstance(action, sp.Discard) and action.reason == "stale":
                self.num_stale += len(action.trajectory_ids)
                self.on_stale(len(action.trajectory_ids))
            if isinstance(action, sp.Discard) and action.reason == "unleased":
                self.num_unleased += len(action.trajectory_ids)
                self.on_unleased(len(action.trajectory_ids))
            if isinstance(action, sp.Returned):
                for group_id in action.group_ids:
                    self._wait(action.job, group_id)
            if isinstance(action, sp.Consumed | sp.Discard):
                for name in action.trajectory_ids:
                    if name not in self._finals and name in self.trajectories:
                        final = self.trajectories[name]
                        self.holdings.add(final.created.job, -final.num_bytes)
                        self._final_bytes += final.num_bytes
                        key = (final.created.job, final.created.group_id)
                        if key not in self.book.groups:
                            self._waiting.pop(key, None)
                    self._finals[name] = None
                    self._untouched.pop(name, None)
        while self._finals and (
            len(self._finals) > self._retained_finals or self._final_bytes > self._retained_bytes
        ):
            name, _ = self._finals.popitem(last=False)
            gone = self.trajectories.pop(name, None)
            if gone is not None:
                self._final_bytes -= gone.num_bytes
                self._by_key.pop((gone.created.job, gone.created.key), None)
            self.book.forget(name)
