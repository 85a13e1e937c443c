"""Trajectories, groups and batches: each finished trajectory reaches a trainer exactly once.

A *group* is what one prompt was sampled into.  It is ready when ``group_size`` of its trajectories have
finished; members still running are then redundant.  A trainer *leases* whole ready groups, first ready first,
and *acknowledges* the batch with its step.  A lease that expires, or whose trainer starts again, returns its
groups to the front of the line.

A trainer names each batch that it asks for.  Asking again under that name gives the same groups for another ``ttl_s``, as long as
the batch is leased, or its lease has run out and its groups still wait.  A name is used once: after the batch was acknowledged or given
back (by name, or by :class:`JobResumed` of its consumer) nothing is leased under it any more, so a repeat that arrives late does no harm.

Everything goes through one method, :meth:`SampleBook.handle`.  The caller journals what was decided and replays it through the same
method after a restart (a lease is replayed with the names of its groups, so that compaction may drop what was consumed).

A job is one run's (``rose.lineage``) from when its trainer has named it: no batch has a group from then on that weights of another run
have sampled.  Such groups are dropped with each version that is published and, whatever happened in between, at the lease.

Staleness is checked where it counts, at the lease, on the oldest weight version among a group's tokens.
What happens beyond ``alpha`` versions is the job's ``on_stale``:

- ``cancel`` drops the whole group, as soon as it is known to be too old: when a version is published, or when the turn ends that shows
  it.  No later lease could take it.
- ``mask`` hands the group out with its old members marked.
- ``wait`` makes the trainer wait instead.  Groups with the oldest tokens go first, and no batch is granted that would leave more groups
  behind than later batches can take in time.  A group without a running member for ``abandoned_s`` is not waited for: its agent is
  gone.  Nothing gets too old while at most ``(alpha + 1) * num_groups`` groups are begun and not consumed; beyond that, ``wait`` marks.

Under ``cancel`` and ``mask``, ready groups that would be too old for the next step go before the others.

A trainer may name ``alpha`` and ``on_stale`` with each version and each batch that it asks for; else its job's hold.

A job may *filter* (DAPO): a complete group whose rewards are all equal teaches nothing and leaves as a whole.
It may take groups in the order they were *submitted*: then no short group overtakes a long one.

What is thrown away is counted by cause and by length (``rose.policy.discards``).

An acknowledgement that comes after its lease ran out still counts while the groups have not been leased
again; one from an attempt older than its consumer's last :class:`JobResumed` never does (its weights are gone).

Invariants, checked by :meth:`SampleBook.check`:

1. created = running + finished + leased + consumed + filtered + cancelled + stale, in total and per job.
2. A trajectory is in at most one batch that is open, and never in one after it was consumed.
3. A ready group has exactly ``group_size`` finished members.

A batch that was granted before its job's run was known stays with the trainer that has it; asked for again, it is refused.

Refused events raise :class:`~rose.errors.RequestError` and change nothing.  Pure.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from rose.errors import Conflict, Gone, NotFound
from rose.lineage import Version
from rose.policy.discards import Discards
from rose.policy.sample_events import (
    Action,
    BatchAcked,
    BatchAsked,
    BatchExpired,
    BatchRestored,
    BatchReturned,
    Consumed,
    Discard,
    Event,
    GroupReady,
    JobResumed,
    Leased,
    Returned,
    TrajectoryCancelled,
    TrajectoryCreated,
    TrajectoryFinished,
    TurnAdded,
    VersionPublished,
)
from rose.policy.staleness import is_spent, worst_lag


class SampleState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    LEASED = "leased"
    CONSUMED = "consumed"
    FILTERED = "filtered"
    CANCELLED = "cancelled"
    STALE = "stale"


STALE_RULES = ("wait", "mask", "cancel")
_NEVER = float("inf")
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
    oldest: Version | None = None
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
    consumer: str = ""


@dataclass(kw_only=True, slots=True)
class SampleBook:
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

    def handle(self, event: Event) -> list[Action]:
        match event:
            case TrajectoryCreated():
                return self._create(event)
            case TurnAdded():
                return self._turn(event)
            case TrajectoryFinished():
                return self._finish(event)
            case TrajectoryCancelled():
                return self._cancel(event)
            case VersionPublished():
                return self._publish(event)
            case BatchAsked():
                return self._ask(event)
            case BatchRestored():
                return self._restore(event)
            case BatchExpired():
                return self._expire(event)
            case BatchReturned():
                return self._give_back(event)
            case BatchAcked():
                return self._ack(event)
            case JobResumed():
                return self._resume(event)
            case _:
                assert_never(event)

    def due(self, at_s: float) -> list[str]:
        """Batches whose lease has run out; the shell feeds each back as :class:`BatchExpired`."""
        return [batch.batch_id for batch in self.batches.values() if at_s >= batch.expires_at_s]

    def counts(self, job: str | None = None) -> Counter[str]:
        """Trajectories by state, those that have left the book included."""
        counts: Counter[str] = Counter()
        for table in (self.num_here, self.num_gone):
            for (its_job, state), count in table.items():
                if count and (job is None or its_job == job):
                    counts[state.value] += count
        return counts

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
        sample.oldest, sample.num_tokens, sample.runs = event.oldest, event.num_tokens, event.runs
        bound = self.bounds.get(sample.job)
        if (
            bound is None
            or event.oldest is None
            or sample.state is not SampleState.RUNNING
            or not is_spent(bound[0], event.oldest, bound[1])
        ):
            return []
        return [self._drop_stale(sample.job, [sample.group_id])]

    def _finish(self, event: TrajectoryFinished) -> list[Action]:
        sample = self._running(event.trajectory_id)
        self._move(sample, SampleState.FINISHED)
        sample.oldest, sample.reward = event.oldest, event.reward
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

    # --- batches ---------------------------------------------------------------------------------------

    def _publish(self, event: VersionPublished) -> list[Action]:
        params = self._params_for(event)
        cancels = params.on_stale == "cancel"
        if cancels:
            self.bounds[event.job] = (event.version, params.alpha)
        else:
            self.bounds.pop(event.job, None)
        spent = [
            group_id
            for (job, group_id), group in self.groups.items()
            if job == event.job
            and not self._is_leased(group)
            and (self._is_of_another_run(group) or (cancels and self._is_spent(group, event, params.alpha)))
        ]
        return [self._drop_stale(event.job, spent)] if spent else []

    def _is_spent(self, group: Group, event: VersionPublished, alpha: int) -> bool:
        return any(
            sampled is not None and is_spent(event.version, sampled, alpha)
            for name in group.members
            for sampled in (self.samples[name].oldest, event.live.get(name))
        )

    def _is_of_another_run(self, group: Group) -> bool:
        """Has it tokens that other weights than those of its job's run sampled?"""
        run = self.runs.get(group.job, "")
        return run != "" and any(one != run for name in group.members for one in self.samples[name].runs)

    def _is_leased(self, group: Group) -> bool:
        return any(self.samples[name].state is SampleState.LEASED for name in group.members)

    def _ask(self, event: BatchAsked) -> list[Action]:
        self._check_unused(event.batch_id)
        params = self._params_for(event)
        known = self.batches.get(event.batch_id) or self.expired.get(event.batch_id)
        if known is not None:
            return self._ask_again(event, known, params)
        waiting = self.ready.get(event.job, ())
        others = [name for name in waiting if self._is_of_another_run(self.groups[event.job, name])]
        actions: list[Action] = [self._drop_stale(event.job, others)] if others else []
        picked: list[str] = []
        stale_groups: list[str] = []
        for group_id in self._in_order(event, params):
            if len(picked) == event.num_groups:
                break
            if params.on_stale == "cancel" and self._stale_members(
                event.job, group_id, event.version, params.alpha
            ):
                stale_groups.append(group_id)
            else:
                picked.append(group_id)
        if stale_groups:
            actions.append(self._drop_stale(event.job, stale_groups))
        if len(picked) < event.num_groups or (
            params.on_stale == "wait" and self._must_wait(event, params, picked)
        ):
            return actions
        stale_ids = [
            name
            for group_id in picked
            for name in self._stale_members(event.job, group_id, event.version, params.alpha)
        ]
        return actions + self._grant(event, tuple(picked), (*others, *stale_groups), tuple(stale_ids))

    def _ask_again(self, event: BatchAsked, known: Batch, params: JobParams) -> list[Action]:
        """The same batch: it is leased, or its lease ran out and its groups still wait."""
        asked = (event.job, event.consumer, event.num_groups)
        if (known.job, known.consumer, len(known.group_ids)) != asked:
            raise Conflict(
                f"batch {event.batch_id} has {len(known.group_ids)} groups of job '{known.job}' for consumer "
                f"'{known.consumer}'",
                field="batch_id",
                fix="choose another name",
            )
        is_leased = event.batch_id in self.batches
        if not is_leased:
            self._check_waiting(known)
        if any(self._is_of_another_run(self.groups[known.job, name]) for name in known.group_ids):
            raise Gone(
                f"batch {event.batch_id} has samples of another run than {self.runs[event.job]}",
                field="batch_id",
                fix="choose another name",
            )
        if is_leased:
            known.ttl_s, known.expires_at_s = event.ttl_s, event.at_s + event.ttl_s
            return [
                Leased(
                    batch_id=event.batch_id,
                    group_ids=known.group_ids,
                    trajectory_ids=self._members(known),
                    stale_ids=(),
                    stale_group_ids=(),
                    is_new=False,
                )
            ]
        stale = [
            name
            for group_id in known.group_ids
            for name in self._stale_members(event.job, group_id, event.version, params.alpha)
        ]
        if stale and params.on_stale == "cancel":
            raise Gone(f"batch {event.batch_id} expired and is too old now", field="batch_id")
        return self._grant(event, known.group_ids, (), tuple(stale))

    def _check_unused(self, batch_id: str) -> None:
        """Raises:
        RequestError: The name was used, and is nobody's any more.
        """
        if batch_id in self.acked:
            raise Conflict(
                f"batch {batch_id} was acknowledged with step {self.acked[batch_id][0]}", field="batch_id"
            )
        if batch_id in self.returned:
            raise Gone(f"batch {batch_id} was given back", field="batch_id", fix="choose another name")

    def _check_waiting(self, batch: Batch) -> None:
        """Raises:
        Gone: Some group of an expired batch no longer waits.
        """
        waiting = self.ready.get(batch.job, [])
        if any(group_id not in waiting for group_id in batch.group_ids):
            raise Gone(f"batch {batch.batch_id} expired and was leased again", field="batch_id")

    def _params_for(self, event: BatchAsked | VersionPublished) -> JobParams:
        own = self.params.of(event.job)
        return JobParams(
            alpha=own.alpha if event.alpha is None else event.alpha,
            on_stale=own.on_stale if event.on_stale is None else event.on_stale,
            filter_equal=own.filter_equal,
            order=own.order,
        )

    def _in_order(self, event: BatchAsked, params: JobParams) -> list[str]:
        """Groups that may be leased now, next first."""
        job = event.job
        waiting = list(self.ready.get(job, ()))
        if params.order == "submitted":
            # One that nobody plays any more would hold up all that came after it.
            unready = [
                group.number
                for group in self.groups.values()
                if group.job == job and self._is_played(group, event.at_s)
            ]
            first = min(unready, default=self._num_groups + 1)
            numbers = {group_id: self.groups[(job, group_id)].number for group_id in waiting}
            waiting = sorted((name for name in waiting if numbers[name] < first), key=numbers.__getitem__)
        last = {name: self._last_step(self.groups[(job, name)], params.alpha) for name in waiting}
        if params.on_stale == "wait":
            return sorted(waiting, key=last.__getitem__)
        return sorted(waiting, key=lambda name: last[name] > event.version[1])

    def _must_wait(self, event: BatchAsked, params: JobParams, picked: list[str]) -> bool:
        """Would this batch leave more groups behind than the next ones can take in time, and would waiting help?

        Batches hold ``num_groups`` each; of the groups that can be trained on for ``n`` more steps, at most ``n`` batches may be left.
        """
        version = event.version[1]
        last = {
            name: self._last_step(group, params.alpha)
            for (job, name), group in self.groups.items()
            if job == event.job
        }
        played = [name for name in last if self._is_played(self.groups[(event.job, name)], event.at_s)]
        first_played = min((last[name] for name in played), default=_NEVER)
        youngest_picked = max((last[name] for name in picked), default=_NEVER)
        left = sorted(last[name] for name in {*played, *self.ready.get(event.job, ())} - set(picked))
        for num_left, step in enumerate(left, start=1):
            if first_played <= step < youngest_picked and num_left > event.num_groups * max(
                0, step - version
            ):
                return True
        return False

    def _is_played(self, group: Group, at_s: float) -> bool:
        """Whether a group that is not complete may still be."""
        if group.ready:
            return False
        if any(self.samples[name].state is SampleState.RUNNING for name in group.members):
            group.quiet_since_s = None
        elif group.quiet_since_s is None:
            group.quiet_since_s = at_s
        return group.quiet_since_s is None or at_s - group.quiet_since_s <= self.params.abandoned_s

    def _last_step(self, group: Group, alpha: int) -> float:
        """The last version of the trainer that may train on what the group has by now."""
        bounds = [_oldest_possible(self.samples[name]) for name in group.members]
        return min((bound[1] + alpha for bound in bounds if bound is not None), default=_NEVER)

    def _restore(self, event: BatchRestored) -> list[Action]:
        missing = [
            group_id
            for group_id in event.group_ids
            if group_id not in self.ready.get(event.job, []) or event.batch_id in self.batches
        ]
        if missing:
            raise Conflict(f"group {missing[0]} cannot be leased", field="group_ids")
        actions: list[Action] = []
        stale = [
            group_id
            for group_id in event.stale_group_ids
            if (group := self.groups.get((event.job, group_id))) is not None and not self._is_leased(group)
        ]
        if stale:
            actions.append(self._drop_stale(event.job, stale))
        return actions + (self._grant(event, event.group_ids, tuple(stale), ()) if event.group_ids else [])

    def _grant(
        self,
        event: BatchAsked | BatchRestored,
        group_ids: tuple[str, ...],
        stale_group_ids: tuple[str, ...],
        stale_ids: tuple[str, ...],
    ) -> list[Action]:
        self.expired.pop(event.batch_id, None)
        batch = self.batches[event.batch_id] = Batch(
            batch_id=event.batch_id,
            job=event.job,
            group_ids=group_ids,
            expires_at_s=event.at_s + event.ttl_s,
            ttl_s=event.ttl_s,
            consumer=event.consumer,
        )
        ids = self._members(batch)
        for group_id in group_ids:
            self.ready[event.job].remove(group_id)
        for name in ids:
            self._move(self.samples[name], SampleState.LEASED)
        return [
            Leased(
                batch_id=event.batch_id,
                group_ids=group_ids,
                trajectory_ids=ids,
                stale_ids=stale_ids,
                stale_group_ids=stale_group_ids,
            )
        ]

    def _ack(self, event: BatchAcked) -> list[Action]:
        done = self.acked.get(event.batch_id)
        if done is not None:
            if done == (event.step, event.attempt):
                return []
            raise Conflict(f"batch {event.batch_id} was acknowledged with step {done[0]}", field="step")
        batch = self.batches.get(event.batch_id) or self.expired.get(event.batch_id)
        if batch is None:
            raise Gone(f"batch {event.batch_id} is unknown or was returned", field="batch_id")
        if event.attempt < self.attempts.get((batch.job, batch.consumer), 0):
            raise Conflict(f"attempt {event.attempt} was replaced by a later one", field="attempt")
        if self.batches.pop(event.batch_id, None) is None:
            self._check_waiting(batch)
            del self.expired[event.batch_id]
            waiting = self.ready[batch.job]
            self.ready[batch.job] = [name for name in waiting if name not in batch.group_ids]
        self.acked[event.batch_id] = (event.step, event.attempt)
        while len(self.acked) > self.params.max_acked:
            self.acked.popitem(last=False)
        return [Consumed(trajectory_ids=tuple(self._consume(batch.job, batch.group_ids)))]

    def _resume(self, event: JobResumed) -> list[Action]:
        key = (event.job, event.consumer)
        known = self.attempts.get(key, 0)
        if event.attempt < known:
            raise Conflict(f"attempt {event.attempt} was replaced by {known}", field="attempt")
        self.attempts[key] = event.attempt
        actions: list[Action] = []
        consumed = set(event.consumed)
        for batch in [*self.expired.values(), *self.batches.values()]:
            if (batch.job, batch.consumer) == key:
                actions.extend(self._give_back(BatchReturned(batch_id=batch.batch_id)))
        taken: list[str] = []
        for group_id in list(self.ready.get(event.job, [])):
            members = self.groups[(event.job, group_id)].members
            # Groups are leased and trained whole, so one consumed member means that all were.
            if consumed.intersection(members):
                self.ready[event.job].remove(group_id)
                taken.extend(self._consume(event.job, (group_id,)))
        if taken:
            actions.append(Consumed(trajectory_ids=tuple(taken)))
        return actions

    def _expire(self, event: BatchExpired) -> list[Action]:
        batch = self.batches.get(event.batch_id)
        if batch is None:
            raise Gone(f"batch {event.batch_id} is not leased", field="batch_id")
        self.expired[batch.batch_id] = batch
        while len(self.expired) > self.params.max_acked:
            self.expired.popitem(last=False)
        return self._return(batch)

    def _give_back(self, event: BatchReturned) -> list[Action]:
        if event.batch_id in self.returned:
            return []
        self._check_unused(event.batch_id)
        self._use_up(event.batch_id)
        batch = self.batches.get(event.batch_id)
        # A name that nobody knows is used up all the same: the request for it may be on its way.
        return [] if batch is None else self._return(batch)

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

    def _members(self, batch: Batch) -> tuple[str, ...]:
        groups = (self.groups[(batch.job, group_id)] for group_id in batch.group_ids)
        return tuple(name for group in groups for name in group.members)

    def _return(self, batch: Batch) -> list[Action]:
        del self.batches[batch.batch_id]
        for group_id in batch.group_ids:
            for member in self.groups[(batch.job, group_id)].members:
                self._move(self.samples[member], SampleState.FINISHED)
        # To the front: they were ready before everything that waits there now.
        self.ready[batch.job] = [*batch.group_ids, *self.ready.get(batch.job, [])]
        return [Returned(batch_id=batch.batch_id, group_ids=batch.group_ids)]

    # --- books -----------------------------------------------------------------------------------------

    def _stale_members(self, job: str, group_id: str, version: Version, alpha: int) -> list[str]:
        stale: list[str] = []
        for member in self.groups[(job, group_id)].members:
            oldest = self.samples[member].oldest
            if oldest is not None and worst_lag(version, [oldest]) > alpha:
                stale.append(member)
        return stale

    def _drop_stale(self, job: str, group_ids: list[str]) -> Discard:
        ids: list[str] = []
        self._forget_expired(job, group_ids)
        for group_id in group_ids:
            group = self.groups.pop((job, group_id))
            if group.ready:
                self.ready[job].remove(group_id)
            for member in group.members:
                self._final(member, SampleState.STALE, "stale")
                ids.append(member)
        return Discard(trajectory_ids=tuple(ids), reason="stale")

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

    def check(self) -> None:
        """Assert the invariants of the module docstring, in its order."""
        here = Counter((sample.job, sample.state) for sample in self.samples.values())
        assert here == +self.num_here
        for job, created in self.num_created.items():
            assert created == sum(self.counts(job).values())
        leased: Counter[str] = Counter()
        for batch in self.batches.values():
            for group_id in batch.group_ids:
                leased.update(self.groups[(batch.job, group_id)].members)
        assert all(count == 1 for count in leased.values())
        assert {name for name, s in self.samples.items() if s.state is SampleState.LEASED} == set(leased)
        for job, group_ids in self.ready.items():
            assert len(set(group_ids)) == len(group_ids)
            for group_id in group_ids:
                members = self.groups[(job, group_id)].members
                assert len(members) == self.groups[(job, group_id)].size
                assert all(self.samples[member].state is SampleState.FINISHED for member in members)


def _oldest_possible(sample: Sample) -> Version | None:
    """The oldest version that a sample's tokens have, or may yet turn out to have: a first turn that is under way has none."""
    if sample.oldest is None and sample.state is SampleState.RUNNING:
        return sample.floor
    return sample.oldest
