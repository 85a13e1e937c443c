"""Trajectories and their turns in memory, in step with the journal.

:class:`TrajectoryStore` is the one place that changes them: each method journals what it decided, then applies it; a
restart applies the same records again through the same code.  Which trajectory a trainer gets is decided by
``rose.policy.samples``; what a prompt is made of by ``rose.scheduler.prompts``.

Invariant: the journal is written before the change is visible to anyone; finish, lease, acknowledge and
resume are on disk before their caller is answered (``await store.journal.commit()``, in the routes).  A turn and the form that it was
delivered in are with the kernel by then, which a kill does not undo.  A power loss may take the last of them: its
client, which sends all it has, begins another branch with it.  That an answer left whole is written behind its last byte, and a journal that
refuses it stops nobody: killed between the two, the next scheduler takes it for not delivered, and an equal request without a name whose
client says that it asks again gets that answer again.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rose.errors import CapacityError, Conflict, Gone, RequestError
from rose.lineage import Version, format_version
from rose.policy import samples as sp
from rose.policy.staleness import lag, set_back
from rose.scheduler.books import Books
from rose.scheduler.holdings import created_bytes
from rose.scheduler.records import (
    AckRecord,
    CancelRecord,
    CloseRecord,
    CreateRecord,
    DeliveredRecord,
    ExpireRecord,
    FinishRecord,
    FormRecord,
    LeaseRecord,
    RenewRecord,
    ResumeRecord,
    ReturnRecord,
    ScoreRecord,
    TurnRecord,
    UnleasedRecord,
    VersionRecord,
    packed,
)
from rose.scheduler.trajectory import Trajectory, joined_names

UNSCORED = "unscored"
"""State of a trajectory that takes no more turns and has no reward yet."""

log = logging.getLogger("rose.scheduler")


class TrajectoryStore(Books):
    """See the module docstring; :class:`~rose.scheduler.books.Books` for its arguments."""

    # --- trajectories ----------------------------------------------------------------------------------

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
        trains_side: bool = False,
    ) -> str:
        """A new trajectory; the same ``key`` of the job again gives the same one.  ``deadline_s`` is from now on.

        Raises:
            RequestError: The key's trajectory is another one.
        """
        if key and (name := self._by_key.get((job, key))) is not None:
            old = self.trajectories[name].created
            asked = (
                group_size,
                packed(task),
                sampling,
                task_kind,
                prefill_per_decode,
                metadata or {},
                list(record),
                trains_side,
            )
            kept = (
                old.group_size, old.task, old.sampling, old.task_kind, old.prefill_per_decode, old.metadata, old.record,
                old.trains_side,
            )  # fmt: skip
            if asked != kept or (name if group_id is None else group_id) != old.group_id:
                raise RequestError(
                    "another trajectory was begun with it; give each its own",
                    field="Idempotency-Key", status=422, code="turn_conflict",
                )  # fmt: skip
            return name
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
            trains_side=trains_side,
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

    def expire_unleased(self, unleased_s: float) -> list[sp.Action]:
        """Give up groups that have waited for a trainer for ``unleased_s``, so that their job's bytes come back."""
        limit_s = time.monotonic() - unleased_s
        actions: list[sp.Action] = []
        given_up: Counter[str] = Counter()
        for job, group_id in list(
            itertools.takewhile(lambda key: self._waiting[key] <= limit_s, self._waiting)
        ):
            if self.book.is_waiting(self.book.groups[job, group_id]):
                actions.extend(self._write(UnleasedRecord(job=job, group_id=group_id)))
                given_up[job] += 1
            else:
                self._wait(job, group_id)  # it is played, or a trainer has it
        for job, count in given_up.items():
            log.warning(
                "%d groups of job '%s' are given up: no trainer came for them in %g s",
                count,
                job[:64],
                unleased_s,
            )
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
            other = next(
                (
                    name
                    for name in ("reward", "success")
                    if getattr(trajectory.finish, name) != getattr(same, name)
                ),
                "info",
            )
            raise Conflict(f"trajectory was finished with another {other}", field=other)
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
        """A batch, or None where too few groups wait.  The same ``name`` again gives the same batch, for another ``ttl_s``."""
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
        known = self.book.batches.get(batch_id)
        longest_s = 0.0 if known is None else known.ttl_s
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
        elif leased is not None and ttl_s > longest_s:
            self.journal.append(RenewRecord(batch_id=batch_id, ttl_s=ttl_s))
        self._note_ahead(job, version, actions)
        self._after(actions)
        return leased, actions

    def give_back(self, batch_id: str) -> list[sp.Action]:
        """What is leased under this name waits again, and the name is used up."""
        return [] if batch_id in self.book.returned else self._write(ReturnRecord(batch_id=batch_id))

    def ack(self, batch_id: str, step: int, attempt: int) -> list[sp.Action]:
        if self.book.acked.get(batch_id) == (step, attempt):
            return []
        return self._write(AckRecord(batch_id=batch_id, step=step, attempt=attempt))

    def resume(self, job: str, attempt: int, consumed: list[str], consumer: str = "") -> list[sp.Action]:
        return self._write(ResumeRecord(job=job, attempt=attempt, consumed=consumed, consumer=consumer))

    def begin_afresh(self, job: str) -> tuple[int, int, list[sp.Action]]:
        """Give up all of the job that no trainer has: how many groups that waited, incomplete ones too, and how many trajectories that ran."""
        cancelled, forsaken = list[sp.Action](), list[sp.Action]()
        groups = [group for key, group in self.book.groups.items() if key[0] == job]
        for name in [name for group in groups for name in group.members]:
            sample = self.book.samples.get(name)
            if sample is not None and sample.state is sp.SampleState.RUNNING:
                cancelled.extend(self._write(CancelRecord(id=name, reason="afresh")))
        for group in groups:
            if group.members and self.book.is_waiting(group):
                record = UnleasedRecord(job=job, group_id=group.group_id, reason="afresh")
                forsaken.extend(self._write(record))
        if cancelled or forsaken:
            log.warning(
                "a trainer of job '%s' begins afresh: %d groups that waited and %d episodes that ran are given up",
                job[:64],
                len(forsaken),
                len(cancelled),
            )
        return len(forsaken), len(cancelled), [*cancelled, *forsaken]

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

    def published(self, run: str) -> Version | None:
        """The newest version of ``run`` that a trainer said it had published; None: none did."""
        found = (
            self.versions[job] for job, whose in self.runs.items() if whose == run and job in self.versions
        )
        return max(found, default=None)

    def check_run(self, job: str, run: str) -> None:
        """A job is one run's, from when its trainer has named it: samples of another would be taken for its own.

        Args:
            run: What a trainer says of itself; empty: nothing, which any trainer of any run could have said.

        Raises:
            Conflict: It is another's, or this trainer does not say that it is the job's.
        """
        whose = self.runs.get(job, "")
        if not whose or run == whose:
            return
        mine = f'a trainer of this run says "run": "{whose}" in each of its calls'
        raise Conflict(
            f"job {job} is trained by run {whose}, and {f'this is run {run}' if run else 'no run was named'}",
            field="run",
            fix=f"{mine}; any other needs a job name of its own",
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

    def _note_ahead(self, job: str, version: Version, actions: list[sp.Action]) -> None:
        """Say what a trainer that began anew below its own earlier steps loses by it; to be asked before :meth:`_after`."""
        sampled = [
            self.trajectories[name].versions
            for action in actions
            if isinstance(action, sp.Discard) and action.reason == "stale"
            for name in action.trajectory_ids
        ]
        farthest = [max(each, key=lambda one: lag(version, one)) for each in sampled if each]
        ahead = [each for each in farthest if set_back(version, each)]
        if ahead:
            self.on_ahead(len(ahead))
            log.error(
                "job %s: %d trajectories are dropped: weights of up to %s sampled them, too far above %s, where its trainer began anew; "
                "if that was without its checkpoint, stop it and start it from there",
                job,
                len(ahead),
                format_version(max(ahead)),
                format_version(version),
            )

    def _stale_groups(self, actions: list[sp.Action]) -> list[str]:
        """To be asked before :meth:`_after`, which may forget their trajectories."""
        names = [
            name
            for action in actions
            if isinstance(action, sp.Discard) and action.reason == "stale"
            for name in action.trajectory_ids
        ]
        return list(dict.fromkeys(self.trajectories[name].created.group_id for name in names))
