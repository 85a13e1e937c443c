"""One trajectory in memory: a tree of turns, mostly a line.

A turn keeps only what its parent does not have (``suffix_ids`` and its own output), so a trajectory of n turns costs its length once,
not n times.  :meth:`Trajectory.full_ids` puts a branch together.

Changed by ``rose.scheduler.store`` alone.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from rose.lineage import Version, parse_version
from rose.policy.staleness import ends
from rose.scheduler import side
from rose.scheduler.deliveries import Deliveries
from rose.scheduler.holdings import SCORE_BYTES, created_bytes, score_bytes, turn_bytes
from rose.scheduler.ids import split, unpack_ids, unpack_logprobs
from rose.scheduler.messages import TIP_BYTES
from rose.scheduler.records import CreateRecord, FinishRecord, ScoreRecord, TurnRecord, unpacked
from rose.wire.answers import RoutedExperts, TrajectoryTrace, TurnSegment, TurnTiming, TurnTrace, TurnUsage


class Trajectory:
    """One run of an environment: a tree of turns, mostly a line."""

    __slots__ = (
        "branch_rewards",
        "closed",
        "created",
        "deliveries",
        "finish",
        "has_tools",
        "lengths",
        "named",
        "newest",
        "num_bytes",
        "num_tokens",
        "parents",
        "runs",
        "score",
        "stale",
        "tips",
        "turn_rewards",
        "turns",
        "versions",
    )

    def __init__(self, created: CreateRecord) -> None:
        self.created = created
        self.turns: list[TurnRecord] = []
        self.lengths: list[int] = []
        """Of each turn's prompt and output together, in tokens."""
        self.tips: dict[bytes, tuple[int, ...]] = {}
        """Message list that ends with our answer, in a form in which it was delivered -> the turns that answered so."""
        self.named: dict[str, int] = {}
        """Name that a client gave its request -> the first turn of its answer."""
        self.deliveries = Deliveries()
        self.finish: FinishRecord | None = None
        self.score: ScoreRecord | None = None
        """What it is to be finished with, where that was said before its end."""
        self.turn_rewards: dict[int, float] = {}
        self.branch_rewards: dict[int, float] = {}
        """Of branches, by the last turn of each."""
        self.closed = False
        """It takes no more turns."""
        self.stale = False
        self.parents: set[int] = set()
        """Turns that another turn continues."""
        self.has_tools = False
        """Some of its turns offered tools."""
        self.num_tokens = 0
        """Sampled, in all turns."""
        self.num_bytes = created_bytes(created)
        """Held in memory."""
        self.versions: tuple[Version, ...] = ()
        """Of its tokens: the ends of each attempt's (:func:`~rose.policy.staleness.ends`)."""
        self.newest: Version | None = None
        self.runs: tuple[str, ...] = ()
        """Whose weights sampled its turns, where an engine said."""

    @property
    def run(self) -> str:
        """Whose weights sampled its newest turn; empty: of no name."""
        segments = self.turns[-1].segments if self.turns else []
        return segments[-1].get("run", "") if segments else ""

    @property
    def id(self) -> str:
        return self.created.id

    def add(self, record: TurnRecord) -> None:
        if record.prompt_of is not None:
            record = msgspec.structs.replace(record, suffix_ids=self.turns[record.prompt_of].suffix_ids)
        held = 0 if record.parent is None else self.lengths[record.parent]
        self.lengths.append(held + (len(record.suffix_ids) + len(record.token_ids)) // 4)
        self.turns.append(record)
        self.num_bytes += turn_bytes(record)
        self.num_tokens += len(record.token_ids) // 4
        self.has_tools = self.has_tools or record.asks == side.TOOLS
        self._add_tips(record.turn, record.tip)
        if record.choice == 0:
            self.deliveries.add(record.turn, record.retry)
        name, first = request_name(record.key, record.turn_key), record.turn - record.choice
        if name and record.id and record.choice == record.num_choices - 1 and self._is_whole(first):
            self.named[name] = first
        if record.parent is not None:
            self.parents.add(record.parent)
        for segment in record.segments:
            run = segment.get("run", "")
            if run and run not in self.runs:
                self.runs += (run,)
        sampled = [parse_version(text) for text, _, _ in record.versions]
        self.versions = ends((*self.versions, *sampled))
        for version in sampled:
            self.newest = version if self.newest is None else max(self.newest, version)

    def is_side(self, record: TurnRecord) -> bool:
        """Was it beside the task, as far as is known by now?"""
        return record.asks == side.SIDE or (
            record.asks == side.SMALL
            and self.has_tools
            and record.parent is None
            and record.turn not in self.parents
            and not self.created.trains_side
        )

    def add_scores(self, record: ScoreRecord) -> None:
        """What was said of the same before is replaced."""
        before = len(self.turn_rewards) + len(self.branch_rewards)
        self.turn_rewards.update(record.turns)
        self.branch_rewards.update(record.branches)
        self.num_bytes += SCORE_BYTES * (len(self.turn_rewards) + len(self.branch_rewards) - before)
        if record.reward is not None:
            whole = msgspec.structs.replace(record, turns=[], branches=[])
            self.num_bytes += score_bytes(whole) - score_bytes(self.score)
            self.score = whole

    def scores(self) -> ScoreRecord | None:
        """All that was said of its rewards, as one record."""
        turns, branches = list(self.turn_rewards.items()), list(self.branch_rewards.items())
        if self.score is not None:
            return msgspec.structs.replace(self.score, turns=turns, branches=branches)
        return ScoreRecord(id=self.id, turns=turns, branches=branches) if turns or branches else None

    def turn_numbers(self) -> dict[str, int]:
        """Turns by their ids."""
        return {record.id: record.turn for record in self.turns if record.id}

    def routed_from(self, parent: int | None) -> int | None:
        """From which position on a turn's routing to experts is to be recorded; None where it is not."""
        if "routed_experts" not in self.created.record:
            return None
        # The parent's last token went through the model for the first time here.
        return 0 if parent is None else max(0, self.lengths[parent] - 1)

    def answers_to(self, digest: str) -> Iterator[int]:
        """First turns of the answers to a request that was given no name, newest first, but for those that another turn
        continues: they have arrived."""
        for record in reversed(self.turns):
            # One without an id is of an older journal, which does not say what its request had besides.
            if (
                record.id
                and record.digest == digest
                and record.choice == 0
                and not (record.key or record.turn_key)
            ):
                group = range(record.turn, record.turn + record.num_choices)
                if self.parents.isdisjoint(group) and self._is_whole(record.turn):
                    yield record.turn

    def _is_whole(self, first: int) -> bool:
        """Whether the answer that begins with this turn has all its choices.  A kill may have come between two of them, and other turns
        may have been recorded since."""
        if first < 0:
            return False
        begun = self.turns[first]
        choices = self.turns[first : first + begun.num_choices]
        return [each.choice for each in choices] == list(range(begun.num_choices)) and all(
            (each.key, each.turn_key, each.digest, each.num_choices)
            == (begun.key, begun.turn_key, begun.digest, begun.num_choices)
            for each in choices
        )

    def add_form(self, turn: int, tip: bytes, thoughts: bytes) -> None:
        """More names of this turn's answer and of its reasoning."""
        known = self.turns[turn]
        self._add_tips(turn, tip)
        self.turns[turn] = record = msgspec.structs.replace(
            known, tip=joined_names(known.tip, tip), thoughts=joined_names(known.thoughts, thoughts)
        )
        self.num_bytes += turn_bytes(record) - turn_bytes(known)

    def _add_tips(self, turn: int, tip: bytes) -> None:
        for name in split(tip, TIP_BYTES):
            turns = self.tips.get(name, ())
            if turn not in turns:
                self.tips[name] = (*turns, turn)

    def full_ids(self, turn: int) -> list[int]:
        """Prompt and output of ``turn``: what a continuation starts with."""
        return unpack_ids(self.packed_ids(turn))

    def messages_of(self, turn: int) -> list[dict[str, Any]] | None:
        """The messages up to and with this turn's answer; None where they were not kept."""
        parts: list[list[dict[str, Any]]] = []
        at: int | None = turn
        while at is not None:
            record = self.turns[at]
            if not record.messages:
                return None
            parts.append(msgspec.msgpack.decode(record.messages))
            at = record.messages_of
        return [message for part in reversed(parts) for message in part]

    def first_messages(self, turn: int) -> list[dict[str, Any]] | None:
        """The first part of :meth:`messages_of`: the messages up to and with the first answer whose messages were kept."""
        record = self.turns[turn]
        while record.messages and record.messages_of is not None:
            record = self.turns[record.messages_of]
        return msgspec.msgpack.decode(record.messages) if record.messages else None

    def prompt_ids(self, turn: int) -> list[int]:
        record = self.turns[turn]
        return unpack_ids(self._packed_prompt(record))

    def sampled(self, turn: int) -> list[list[int]]:
        """``[[start, num_tokens, turn], ...]``: which of this branch's ids were sampled, and in which
        turn."""
        line: list[TurnRecord] = []
        at: int | None = turn
        while at is not None:
            line.append(self.turns[at])
            at = self.turns[at].parent
        spans: list[list[int]] = []
        position = 0
        for record in reversed(line):
            position += len(record.suffix_ids) // 4
            count = len(record.token_ids) // 4
            spans.append([position, count, record.turn])
            position += count
        return spans

    def num_prompt_tokens(self, record: TurnRecord) -> int:
        return self.lengths[record.turn] - len(record.token_ids) // 4

    def trace_turn(self, record: TurnRecord, *, whole_prompts: bool = True) -> TurnTrace:
        """A turn as the wire has it.

        Args:
            whole_prompts: Else only what its parent does not hold: of n turns the prompts together grow with n squared.
        """
        told: TurnTrace = {
            "turn": record.turn,
            "kind": record.kind,
            "parent": record.parent,
            "fork": record.fork,
            "side": self.is_side(record),
            "token_ids": unpack_ids(record.token_ids),
            "logprobs": unpack_logprobs(record.logprobs),
            "finish_reason": record.finish_reason,
            "stop_reason": record.stop_reason,
            "versions": record.versions,
            "kv_mixed": record.kv_mixed,
            "segments": cast("list[TurnSegment]", record.segments),
            "usage": cast("TurnUsage", record.usage),
            "timing": cast("TurnTiming", record.timing),
            "sampling": record.sampling,
            "constraints": record.constraints,
            "id": record.id,
            "reward": self.turn_rewards.get(record.turn),
            "branch_reward": self.branch_rewards.get(record.turn),
        }
        if whole_prompts:
            told["prompt_token_ids"] = self.prompt_ids(record.turn)
            told["sampled"] = self.sampled(record.turn)
        else:
            told["suffix_token_ids"] = unpack_ids(record.suffix_ids)
            told["num_prompt_tokens"] = self.num_prompt_tokens(record)
        if record.routed_experts:
            told["routed_experts"] = [
                RoutedExperts(start=at, npy=b64(data)) for at, data in record.routed_experts
            ]
        return told

    def trace(self, state: str, reason: str = "", *, turns: list[TurnTrace] | None = None) -> TrajectoryTrace:
        """As the wire has it.

        Args:
            turns: See :meth:`trace_turn`, of each; None: with whole prompts.
        """
        created, finish = self.created, self.finish
        return {
            "id": created.id,
            "job": created.job,
            "group_id": created.group_id,
            "group_size": created.group_size,
            "task": unpacked(created.task),
            "task_kind": created.task_kind,
            "metadata": created.metadata,
            "sampling": created.sampling,
            "created_at": created.created_at,
            "deadline_at": created.deadline_at,
            "state": state,
            "reason": reason,
            "stale": self.stale,
            "reward": None if finish is None else finish.reward,
            "success": None if finish is None else finish.success,
            "info": None if finish is None else unpacked(finish.info),
            "turns": [self.trace_turn(record) for record in self.turns] if turns is None else turns,
            "branches": [record.turn for record in self.turns if record.turn not in self.parents],
        }

    def packed_ids(self, turn: int) -> bytes:
        record = self.turns[turn]
        return self._packed_prompt(record) + record.token_ids

    def _packed_prompt(self, record: TurnRecord) -> bytes:
        parts: list[bytes] = []
        at: TurnRecord | None = record
        while at is not None:
            parts.append(at.suffix_ids)
            if at.parent is None:
                break
            at = self.turns[at.parent]
            parts.append(at.token_ids)
        return b"".join(reversed(parts))


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def request_name(key: str, turn_key: str) -> str:
    """What a client calls a request, so that it can ask again: ``Idempotency-Key``, else ``X-ROSE-Turn``; else empty."""
    return f"i:{key}" if key else f"t:{turn_key}" if turn_key else ""


def joined_names(known: bytes, more: bytes) -> bytes:
    """``known`` and the names in ``more`` that are not in it."""
    have = split(known, TIP_BYTES)
    return b"".join([known, *(name for name in split(more, TIP_BYTES) if name not in have)])
