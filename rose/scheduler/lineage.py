"""Which turn of a trajectory does a message list continue?

Answers of several turns may look alike: choices of one request, or branches, that say the same for different reasons.  A
list of messages then names several turns, and what else came back tells them apart: an id that our answer carried, the
ids of tool calls, reasoning, and which turn an earlier answer of the list was.  Evidence that fits no candidate counts for
nothing: clients cut reasoning and draw ids of their own.

Tested in ``tests/scheduler/test_tips.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rose.scheduler.messages import call_id, loose, thought
from rose.scheduler.records import TurnRecord
from rose.scheduler.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Continued:
    """``num_messages`` of a list lead up to and include an answer of ours; ``turns`` may have given it: none, one, or several
    that nothing tells apart."""

    num_messages: int = 0
    turns: tuple[int, ...] = ()


def continued(
    trajectory: Trajectory, context: bytes, hashes: Sequence[bytes], messages: Sequence[Mapping[str, Any]]
) -> Continued:
    """The last answer of ours that ``messages``, which ``hashes`` name, begin with."""
    line: set[int] = set()
    found = Continued()
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        turns = trajectory.tips.get(hashes[at])
        if turns is None:
            turns = trajectory.tips.get(loose(hashes[at - 1] if at else context, message))
            if turns is None:
                continue
        # What led to a turn's answer begins with its parent's, so the parent was met on the way here.
        mine = [
            record
            for record in map(trajectory.turns.__getitem__, turns)
            if record.parent is None or record.parent in line
        ]
        if len(mine) > 1:
            mine = _told_apart(mine, message)
        if mine:
            found = Continued(at + 1, tuple(record.turn for record in mine))
            line.update(found.turns)
    if len(found.turns) > 1 and len({trajectory.packed_ids(turn) for turn in found.turns}) == 1:
        # The same tokens, whichever it was: one that nothing continues yet, so that each is continued once.
        fresh = [turn for turn in found.turns if turn not in trajectory.parents]
        found = Continued(found.num_messages, tuple(fresh or found.turns)[:1])
    return found


def _told_apart(records: list[TurnRecord], message: Mapping[str, Any]) -> list[TurnRecord]:
    name = message.get("id")
    if name and isinstance(name, str):
        records = _where(records, lambda record: name in _ids(record))
    calls = message.get("tool_calls")
    drawn = [call.get("id") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    if any(isinstance(each, str) for each in drawn):
        records = _where(
            records,
            lambda record: all(
                call_id(record.id, at, each) == each for at, each in enumerate(drawn) if isinstance(each, str)
            ),
        )
    mark = thought(message)
    if mark:
        records = _where(records, lambda record: mark in record.thoughts)
    return records


def _ids(record: TurnRecord) -> tuple[str, ...]:
    """An answer with several choices has one id for all, which tells nothing of which."""
    return (record.id, f"chatcmpl-{record.id}") if record.num_choices == 1 else (record.id,)


def _where(records: list[TurnRecord], fits: Callable[[TurnRecord], bool]) -> list[TurnRecord]:
    return [record for record in records if fits(record)] or records
