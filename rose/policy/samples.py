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

Staleness is checked where it counts, at the lease, on the weight versions of a group's tokens, of each attempt of its trainer.
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

A group that no trainer comes for, or whose job begins anew, leaves as a whole when the shell says so (:class:`GroupForsaken`), once nobody plays it.

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

from collections import Counter
from dataclasses import dataclass
from typing import assert_never

from rose.errors import Conflict, Gone
from rose.lineage import Version
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
    GroupForsaken,
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
from rose.policy.sample_life import (
    FINAL,
    Batch,
    Group,
    JobParams,
    Sample,
    SampleLife,
    SampleParams,
    SampleState,
)
from rose.policy.staleness import is_spent, worst_lag

__all__ = [  # what the shells need beside the book
    "FINAL",
    "STALE_RULES",
    "Action",
    "Batch",
    "BatchAcked",
    "BatchAsked",
    "BatchExpired",
    "BatchRestored",
    "BatchReturned",
    "Consumed",
    "Discard",
    "Event",
    "GroupForsaken",
    "GroupReady",
    "JobParams",
    "JobResumed",
    "Leased",
    "Returned",
    "SampleBook",
    "SampleParams",
    "SampleState",
    "TrajectoryCancelled",
    "TrajectoryCreated",
    "TrajectoryFinished",
    "TurnAdded",
    "VersionPublished",
]

STALE_RULES = ("wait", "mask", "cancel")
_NEVER = float("inf")


@dataclass(kw_only=True, slots=True)
class SampleBook(SampleLife):
    """See the module docstring; :class:`~rose.policy.sample_life.SampleLife` for its arguments."""

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
            case GroupForsaken():
                return self._forsake(event)
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

    def is_training(self, job: str) -> bool:
        """A trainer of it has a batch."""
        return any(batch.job == job for batch in self.batches.values())

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
        sampled = [version for name in group.members for version in self.samples[name].versions]
        sampled += [event.live[name] for name in group.members if name in event.live]
        return any(is_spent(event.version, version, alpha) for version in sampled)

    def _ask(self, event: BatchAsked) -> list[Action]:
        self._check_unused(event.batch_id)
        attempt = self.attempts.get((event.job, event.consumer), 0)
        if event.version[0] < attempt:
            raise Conflict(f"attempt {event.version[0]} was replaced by {attempt}", field="version")
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
                f"batch {event.batch_id} has samples of another run than {self.runs.get(event.job) or 'its first'}",
                field="batch_id",
                fix="choose another name",
            )
        if is_leased:
            known.ttl_s, known.expires_at_s = max(known.ttl_s, event.ttl_s), event.at_s + event.ttl_s
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
        bounds = [version for name in group.members for version in _at_most(self.samples[name])]
        return min((version[1] + alpha for version in bounds), default=_NEVER)

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
            raise Gone(
                f"batch {event.batch_id} is unknown or was returned: its lease ran out, or its consumer resumed",
                field="batch_id",
            )
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
        return [Returned(batch_id=batch.batch_id, job=batch.job, group_ids=batch.group_ids)]

    def _stale_members(self, job: str, group_id: str, version: Version, alpha: int) -> list[str]:
        members = self.groups[(job, group_id)].members
        return [name for name in members if worst_lag(version, self.samples[name].versions) > alpha]

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


def _at_most(sample: Sample) -> tuple[Version, ...]:
    """Versions that a sample's tokens have, or may yet turn out to have: a first turn that is under way has none."""
    if not sample.versions and sample.state is SampleState.RUNNING and sample.floor is not None:
        return (sample.floor,)
    return sample.versions
