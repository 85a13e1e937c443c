"""Trajectories and their turns in memory, in step with the journal.

:class:`Store` is the one place that changes them: each method journals what it decided, then applies it; a
restart applies the same records again through the same code.  Which trajectory a trainer gets is decided by
``rose.policy.samples``; what a prompt is made of by ``rose.scheduler.prompts``.

Invariant: the journal is written before the change is visible to anyone; finish, lease, acknowledge and
resume are on disk before their caller is answered (``await store.journal.commit()``, in the routes).
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rose.errors import CapacityError, Conflict, Gone, LedgerError, NotFound, PolicyError
from rose.lineage import Version, format_version, parse_version
from rose.policy import samples as sp
from rose.scheduler.holdings import Holdings, created_bytes, finished_bytes
from rose.scheduler.journal import (
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
    Journal,
    LeaseRecord,
    Record,
    ResumeRecord,
    ReturnedRecord,
    ReturnRecord,
    ScoreRecord,
    TurnRecord,
    VersionRecord,
    packed,
)
from rose.scheduler.snapshot import snapshot
from rose.scheduler.trajectory import Trajectory, joined_names

log = logging.getLogger("rose.scheduler")


UNSCORED = "unscored"
"""State of a trajectory that takes no more turns and has no reward yet."""


class Store:
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
        self._by_key: dict[str, str] = {}
        self._finals: OrderedDict[str, None] = OrderedDict()
        self._untouched: OrderedDict[str, float] = OrderedDict()
        """Running trajectories and when their last turn was added (or they began), longest ago first."""
        self._deadlines: list[tuple[float, str]] = []
        """Heap of ``(seconds since 1970, trajectory)``; those that ended meanwhile are passed over."""
        self.on_stale = on_stale
        self.num_stale = 0
        self._max_trajectories = max_trajectories
        self._retained_finals = retained_finals
        self._retained_bytes = retained_bytes
        self._final_bytes = 0
        self.holdings = Holdings(max_job_bytes=max_job_bytes, max_bytes=max_held_bytes)
        self.num_recovered = 0
        self.epoch = 0
        """Of the process that wrote last."""
        self._compact_bytes = compact_bytes
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
        return self.journal.size_bytes > self._compact_bytes and not self.journal.is_compacting

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
            log.error("the journal was not compacted: %s", getattr(error, "strerror", None) or error)

    def _snapshot(self) -> Iterator[Record]:
        return snapshot(self.book, self.trajectories, self.versions, self.runs, self.epoch)

    def _compacted(self) -> None:
        self._compact_bytes = max(self._compact_bytes, 2 * self.journal.size_bytes)

    # --- trajectories ----------------------------------------------------------------------------------

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

    def open(self, trajectory_id: str) -> Trajectory:
        """A trajectory that may take another turn.

        Raises:
            NotFound: Unknown.
            Gone: Cancelled.
            Conflict: Finished already.
        """
        trajectory = self.get(trajectory_id)
        sample = self.book.samples[trajectory_id]
        if sample.state in (sp.SampleState.CANCELLED, sp.SampleState.STALE):
            raise Gone(
                f"trajectory was cancelled ({sample.reason})",
                field="X-Session-ID",
                code="trajectory_cancelled",
                reason=sample.reason,
            )
        if sample.state is not sp.SampleState.RUNNING or trajectory.closed:
            raise Conflict(
                f"trajectory is {self.state(trajectory_id)[0]}, it takes no more turns", field="X-Session-ID"
            )
        return trajectory

    def held_bytes(self, job: str) -> int:
        """Of its trajectories that are not final."""
        return self.holdings.jobs[job]

    def state(self, trajectory_id: str) -> tuple[str, str]:
        sample = self.book.samples[trajectory_id]
        if sample.state is sp.SampleState.RUNNING and self.trajectories[trajectory_id].closed:
            return UNSCORED, sample.reason
        return sample.state.value, sample.reason

    def create(
        self,
        *,
        job: str,
        group_id: str | None,
        group_size: int,
        task: Any,
        sampling: dict[str, Any],
        key: str = "",
        task_kind: str = "",
        prefill_per_decode: float | None = None,
        deadline_s: float | None = None,
        metadata: dict[str, str] | None = None,
        record: Sequence[str] = (),
    ) -> str:
        """A new trajectory; the same ``key`` again gives the same one.  ``deadline_s`` is from now on."""
        if key and key in self._by_key:
            return self._by_key[key]
        if len(self.trajectories) >= self._max_trajectories:
            raise CapacityError("too many trajectories are open", status=429, code="queue_full")
        name = f"t-{secrets.token_hex(10)}"
        now = time.time()
        made = CreateRecord(
            id=name,
            job=job,
            group_id=name if group_id is None else group_id,
            group_size=group_size,
            created_at=now,
            task=packed(task),
            sampling=sampling,
            key=key,
            task_kind=task_kind,
            prefill_per_decode=prefill_per_decode,
            floor=format_version(self.versions[job]) if job in self.versions else "",
            deadline_at=None if deadline_s is None else now + deadline_s,
            metadata=metadata or {},
            record=list(record),
        )
        self.holdings.check(job, created_bytes(made))
        self._write(made)
        return name

    def expire_idle(self, idle_s: float, busy: set[str]) -> list[sp.Action]:
        """Cancel running trajectories that nobody has touched for ``idle_s``: their agent is gone."""
        limit_s = time.monotonic() - idle_s
        actions: list[sp.Action] = []
        while self._untouched:
            name = next(iter(self._untouched))
            if self._untouched[name] >= limit_s:
                break
            if name in busy:
                self._touch(name)
            else:
                actions.extend(self._write(CancelRecord(id=name, reason="idle")))
        return actions

    def expire_late(self, at: float) -> list[sp.Action]:
        """Cancel running trajectories whose deadline was before ``at`` (seconds since 1970)."""
        actions: list[sp.Action] = []
        while self._deadlines and self._deadlines[0][0] <= at:
            _, name = heapq.heappop(self._deadlines)
            sample = self.book.samples.get(name)
            if sample is not None and sample.state is sp.SampleState.RUNNING:
                actions.extend(self._write(CancelRecord(id=name, reason="deadline")))
        return actions

    def _touch(self, name: str) -> None:
        self._untouched[name] = time.monotonic()
        self._untouched.move_to_end(name)

    def add_turn(self, record: TurnRecord) -> list[sp.Action]:
        """A turn is done: remembered before its client is answered.  It may show that its group is too old to be of use."""
        self.journal.append(record)
        actions = self._apply(record)
        if actions:
            self._drop(self.trajectories[record.trajectory_id].created.job, actions)
            self._after(actions)
        return actions

    def add_form(self, trajectory: Trajectory, turn: int, tip: bytes, thoughts: bytes) -> None:
        """An answer is about to be delivered in a form with these names: remembered before its last piece leaves."""
        known = trajectory.turns[turn]
        if (
            joined_names(known.tip, tip) != known.tip
            or joined_names(known.thoughts, thoughts) != known.thoughts
        ):
            self._write(FormRecord(trajectory_id=trajectory.id, turn=turn, tip=tip, thoughts=thoughts))

    def delivered(self, trajectory: Trajectory, turn: int, retry: int) -> None:
        """The answer that begins with ``turn`` left whole."""
        deliveries = trajectory.deliveries
        if deliveries.is_open(turn) or retry > deliveries.retry(turn):
            self._write(DeliveredRecord(trajectory_id=trajectory.id, answers=[(turn, retry)]))

    def finish(self, record: FinishRecord) -> list[sp.Action]:
        """Idempotent: the same reward again is no error."""
        trajectory = self.trajectories.get(record.id)
        job = "" if trajectory is None else trajectory.created.job
        record = msgspec.structs.replace(record, filter_equal=self.book.params.of(job).filter_equal)
        if trajectory is not None and trajectory.finish is not None:
            same = msgspec.structs.replace(record, filter_equal=trajectory.finish.filter_equal)
            if trajectory.finish == same:
                return []
            raise Conflict("trajectory was finished with another reward", field="reward")
        return self._write(record)

    def check_sampled(self, job: str, segments: Sequence[Mapping[str, Any]]) -> None:
        """A turn that ended before its job's trainer named the run may have ended under another.

        Raises:
            CapacityError: So it is; asked for again, it runs on the job's own weights.
        """
        run = self.runs.get(job, "")
        if run and any(segment.get("run", run) != run for segment in segments):
            raise CapacityError(f"the job is run {run}'s now, and another's weights had sampled the turn")

    def close(self, trajectory_id: str) -> list[sp.Action]:
        """It takes no more turns; it is finished when its reward is known.  Idempotent."""
        trajectory = self.get(trajectory_id)
        if trajectory.finish is not None:
            return []
        if not trajectory.closed:
            self.open(trajectory_id)
            self._write(CloseRecord(id=trajectory_id))
        return self._finish_scored(trajectory)

    def add_scores(self, record: ScoreRecord) -> list[sp.Action]:
        """Rewards of a trajectory that is not finished.  Idempotent.

        Raises:
            NotFound: Unknown.
            Gone: Cancelled.
            Conflict: Finished with others.
        """
        trajectory = self.get(record.id)
        if trajectory.finish is not None:
            whole = trajectory.finish
            same = record.reward is None or (record.reward, record.success, record.info) == (
                whole.reward,
                whole.success,
                whole.info,
            )
            if (
                same
                and all(trajectory.turn_rewards.get(turn) == reward for turn, reward in record.turns)
                and all(trajectory.branch_rewards.get(turn) == reward for turn, reward in record.branches)
            ):
                return []
            raise Conflict("trajectory is finished, its rewards stay as they are", field="reward")
        if not trajectory.closed:
            self.open(record.id)
        elif self.book.samples[record.id].state is not sp.SampleState.RUNNING:
            raise Gone(
                f"trajectory was cancelled ({self.book.samples[record.id].reason})",
                field="id",
                code="trajectory_cancelled",
                reason=self.book.samples[record.id].reason,
            )
        self._write(record)
        return self._finish_scored(trajectory)

    def _finish_scored(self, trajectory: Trajectory) -> list[sp.Action]:
        score = trajectory.score
        if not trajectory.closed or score is None or score.reward is None:
            return []
        return self.finish(
            FinishRecord(id=trajectory.id, reward=score.reward, success=score.success, info=score.info)
        )

    def cancel(self, trajectory_id: str, reason: str) -> list[sp.Action]:
        self.get(trajectory_id)
        if self.book.samples[trajectory_id].state in (sp.SampleState.CANCELLED, sp.SampleState.STALE):
            return []
        return self._write(CancelRecord(id=trajectory_id, reason=reason))

    # --- batches ---------------------------------------------------------------------------------------

    def lease(
        self,
        *,
        job: str,
        num_groups: int,
        version: Version,
        ttl_s: float,
        alpha: int | None = None,
        on_stale: str | None = None,
        name: str = "",
        consumer: str = "",
    ) -> tuple[sp.Leased | None, list[sp.Action]]:
        """A batch, or None where too few groups wait.  The same ``name`` again gives the same batch."""
        batch_id = name or f"b-{secrets.token_hex(10)}"
        event = sp.BatchAsked(
            at_s=time.monotonic(),
            batch_id=batch_id,
            job=job,
            num_groups=num_groups,
            version=version,
            ttl_s=ttl_s,
            alpha=alpha,
            on_stale=on_stale,
            consumer=consumer,
        )
        # Which groups are stale depends on the book alone, so deciding first and recording the decision
        # is safe: nothing is visible before the record is written, and a failed write undoes nothing
        # that was promised (the lease then expires).
        actions = self.book.handle(event)
        leased = next((action for action in actions if isinstance(action, sp.Leased)), None)
        dropped = self._stale_groups(actions)
        if (leased is not None and leased.is_new) or dropped:
            record = LeaseRecord(
                batch_id=batch_id,
                job=job,
                group_ids=[] if leased is None else list(leased.group_ids),
                stale_group_ids=dropped,
                ttl_s=ttl_s,
                consumer=consumer,
                stale_ids=[] if leased is None else list(leased.stale_ids),
            )
            self.journal.append(record)
            self._mark_stale(record)
        self._after(actions)
        return leased, actions

    def _mark_stale(self, record: LeaseRecord) -> None:
        for name in record.stale_ids:
            self.trajectories[name].stale = True

    def give_back(self, batch_id: str) -> list[sp.Action]:
        """What is leased under this name waits again, and the name is used up."""
        return [] if batch_id in self.book.returned else self._write(ReturnRecord(batch_id=batch_id))

    def ack(self, batch_id: str, step: int, attempt: int) -> list[sp.Action]:
        if self.book.acked.get(batch_id) == (step, attempt):
            return []
        return self._write(AckRecord(batch_id=batch_id, step=step, attempt=attempt))

    def resume(self, job: str, attempt: int, consumed: list[str], consumer: str = "") -> list[sp.Action]:
        return self._write(ResumeRecord(job=job, attempt=attempt, consumed=consumed, consumer=consumer))

    def expire(self, at_s: float) -> list[sp.Action]:
        """Return the batches whose trainer has gone quiet."""
        actions: list[sp.Action] = []
        for batch_id in self.book.due(at_s):
            actions.extend(self._write(ExpireRecord(batch_id=batch_id)))
        return actions

    def require(self, job: str, version: Version, run: str = "") -> bool:
        """Note a job's published version, and of which run it is; False when it was known.

        Raises:
            Conflict: It is older than the one before, or another run has this job.
        """
        self.check_run(job, run)
        known, whose = self.versions.get(job), self.runs.get(job, "")
        run = run or whose
        if known == version and run == whose:
            return False
        if known is not None and version < known:
            raise Conflict("is older than the version published before", field="version")
        self.journal.append(VersionRecord(job=job, attempt=version[0], version=version[1], run=run))
        self.versions[job] = version
        self.runs[job] = run
        return True

    def check_run(self, job: str, run: str) -> None:
        """A job is one run's, from when its trainer has named it: samples of another would be taken for its own.

        Raises:
            Conflict: It is another's.
        """
        whose = self.runs.get(job, "")
        if run and whose and run != whose:
            raise Conflict(
                f"job {job} is trained by run {whose}",
                field="run",
                fix="give each trainer a job name of its own",
            )

    def drop_spent(
        self,
        *,
        job: str,
        version: Version,
        alpha: int | None,
        on_stale: str | None,
        live: Mapping[str, Version],
    ) -> list[sp.Action]:
        """Give up what no trainer at ``version`` or later may take; see :class:`~rose.policy.sample_events.VersionPublished`."""
        event = sp.VersionPublished(job=job, version=version, alpha=alpha, on_stale=on_stale, live=live)
        actions = self.book.handle(event)
        self._drop(job, actions)
        self._after(actions)
        return actions

    def _drop(self, job: str, actions: list[sp.Action]) -> None:
        """Record which groups were given up; a restart is told, and decides nothing of its own."""
        dropped = self._stale_groups(actions)
        if dropped:
            name = f"b-{secrets.token_hex(10)}"
            record = LeaseRecord(batch_id=name, job=job, group_ids=[], stale_group_ids=dropped, ttl_s=0.0)
            self.journal.append(record)

    def _stale_groups(self, actions: list[sp.Action]) -> list[str]:
        """To be asked before :meth:`_after`, which may forget their trajectories."""
        names = [
            name
            for action in actions
            if isinstance(action, sp.Discard) and action.reason == "stale"
            for name in action.trajectory_ids
        ]
        return list(dict.fromkeys(self.trajectories[name].created.group_id for name in names))

    # --- one way in, live and at recovery --------------------------------------------------------------

    def _write(self, record: Record) -> list[sp.Action]:
        """Decide, then record.  A refused event raises before anything is written; a failed write means
        that the process stops promising (see the journal), and a restart sees the last durable state."""
        actions = self._apply(record)
        self.journal.append(record)
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
                            oldest=trajectory.oldest,
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
                if record.key:
                    self._by_key[record.key] = record.id
            case FinishRecord():
                trajectory = self.get(record.id)
                actions = self.book.handle(
                    sp.TrajectoryFinished(
                        trajectory_id=record.id,
                        oldest=trajectory.oldest,
                        reward=record.reward,
                        filter_equal=record.filter_equal,
                    )
                )
                with self._counted(trajectory):
                    trajectory.finish = record
                    trajectory.num_bytes += finished_bytes(record)
                self._untouched.pop(record.id, None)
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
            if isinstance(action, sp.Consumed | sp.Discard):
                for name in action.trajectory_ids:
                    if name not in self._finals and name in self.trajectories:
                        final = self.trajectories[name]
                        self.holdings.add(final.created.job, -final.num_bytes)
                        self._final_bytes += final.num_bytes
                    self._finals[name] = None
                    self._untouched.pop(name, None)
        while self._finals and (
            len(self._finals) > self._retained_finals or self._final_bytes > self._retained_bytes
        ):
            name, _ = self._finals.popitem(last=False)
            gone = self.trajectories.pop(name, None)
            if gone is not None:
                self._final_bytes -= gone.num_bytes
                self._by_key.pop(gone.created.key, None)
            self.book.forget(name)
