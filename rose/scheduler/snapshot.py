"""The live state of a store as the records that make it again: what a compacted journal holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import TypeVar

import msgspec

from rose.lineage import Version
from rose.policy import samples as sp
from rose.scheduler.records import (
    AckedRecord,
    CloseRecord,
    DeliveredRecord,
    EpochRecord,
    ExpiredRecord,
    LeaseRecord,
    Record,
    ResumeRecord,
    ReturnedRecord,
    TurnRecord,
    VersionRecord,
)
from rose.scheduler.trajectory import Trajectory

Item = TypeVar("Item")
_PART = 512
"""Names in a record."""


def snapshot(
    book: sp.SampleBook,
    trajectories: Mapping[str, Trajectory],
    versions: Mapping[str, Version],
    runs: Mapping[str, str],
    epoch: int,
) -> Iterator[Record]:
    """The live state of now as records: what is not final, leases in front of what waits."""
    head: list[Record] = [EpochRecord(epoch=epoch)] if epoch else []
    head.extend(
        VersionRecord(job=job, attempt=version[0], version=version[1], run=runs.get(job, ""))
        for job, version in versions.items()
    )
    acked = [(name, *done) for name, done in book.acked.items()]
    head.extend(AckedRecord(batches=part) for part in _parts(acked))
    head.extend(ReturnedRecord(batch_ids=part) for part in _parts(list(book.returned)))
    head.extend(
        ResumeRecord(job=job, attempt=attempt, consumed=[], consumer=consumer)
        for (job, consumer), attempt in book.attempts.items()
    )
    live = [name for name, sample in book.samples.items() if sample.state not in sp.FINAL]
    # Turns are only ever added: to know how many there are now is enough.  One that gets another form meanwhile has it
    # in a record of its own, and to add it twice changes nothing.
    turns = [(trajectories[name], len(trajectories[name].turns)) for name in live]
    return chain(head, _records(turns), _outcomes(book, trajectories, live))


def _outcomes(book: sp.SampleBook, trajectories: Mapping[str, Trajectory], live: list[str]) -> list[Record]:
    """Rewards of ``live`` trajectories, in the order in which their groups are to be leased, and the leases.

    Whoever finished a group decided whether it was filtered, and which member that was is lost in this order: what is complete
    and here was not, whatever its members' records said.
    """
    ordered: list[str] = []
    for batch in book.batches.values():
        for group_id in batch.group_ids:
            ordered.extend(book.groups[(batch.job, group_id)].members)
    for job, group_ids in book.ready.items():
        for group_id in group_ids:
            ordered.extend(book.groups[(job, group_id)].members)
    seen = set(ordered)
    found: list[Record] = []
    for name in [*ordered, *(name for name in live if name not in seen)]:
        finish = trajectories[name].finish
        if finish is not None:
            found.append(msgspec.structs.replace(finish, filter_equal=False) if name in seen else finish)
    found.extend(
        LeaseRecord(
            batch_id=batch.batch_id,
            job=batch.job,
            group_ids=list(batch.group_ids),
            stale_group_ids=[],
            ttl_s=batch.ttl_s,
            consumer=batch.consumer,
            stale_ids=[
                name
                for group_id in batch.group_ids
                for name in book.groups[(batch.job, group_id)].members
                if trajectories[name].stale
            ],
        )
        for batch in book.batches.values()
    )
    # One for each: as large as the lease that it was, and together they have no bound.
    found.extend(
        ExpiredRecord(
            batches=[(late.batch_id, late.job, list(late.group_ids), late.ttl_s)],
            consumers={late.batch_id: late.consumer} if late.consumer else {},
        )
        for late in book.expired.values()
    )
    return found


def _parts(items: list[Item]) -> list[list[Item]]:
    return [items[at : at + _PART] for at in range(0, len(items), _PART)]


def _without_shared_prompt(record: TurnRecord) -> TurnRecord:
    return record if record.prompt_of is None else msgspec.structs.replace(record, suffix_ids=b"")


def _records(turns: list[tuple[Trajectory, int]]) -> Iterator[Record]:
    for trajectory, count in turns:
        yield trajectory.created
        yield from map(_without_shared_prompt, islice(trajectory.turns, count))
        answers = trajectory.deliveries.ended(
            record.turn for record in islice(trajectory.turns, count) if record.choice == 0
        )
        if answers:
            yield DeliveredRecord(trajectory_id=trajectory.id, answers=answers)
        scores = trajectory.scores()
        if scores is not None:
            yield scores
        if trajectory.closed:
            yield CloseRecord(id=trajectory.id)
