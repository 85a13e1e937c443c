"""What happened when: samples of counters that other processes keep, turned into curves, events and sums.

:class:`Observer` reads the node directory's records (memory reads) and the new lines of two JSON-lines files
(the sender's records, the trainer's steps), and is handed the scheduler's ``/status``.  It starts nothing
and asks nobody, and a source that is missing or torn is skipped until it is there: what watches a
system must not be what breaks it.

Counters of a process start again at 0 when it is restarted; :class:`Counter` keeps the sum over its lives.
Times are CLOCK_MONOTONIC; :meth:`Observer.at` turns them into seconds of the run.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rose.coserve.node_dir import NodeDir
from rose.demo.result import (
    DEDICATED,
    HARVESTED,
    TIERS,
    Curve,
    Reclaim,
    StepRecord,
    TierCount,
    TimelineEvent,
)
from rose.errors import LedgerError

MAX_EVENTS = 5000
MAX_TAIL_BYTES = 64 * 2**20


class Counter:
    """Sum of a counter over all lives of the process that keeps it."""

    def __init__(self) -> None:
        self._last = 0
        self.total = 0

    @property
    def last(self) -> int:
        return self._last

    def see(self, value: int) -> int:
        """Take a reading; how much was added since the one before."""
        added = value - self._last if value >= self._last else value
        self._last = value
        self.total += added
        return added


class JsonLines:
    """Reads whole new lines of a growing file.  A line that is no JSON object is counted and skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.num_bad = 0

    def poll(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(MAX_TAIL_BYTES)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1  # the rest is being written
        self._offset += end
        found: list[dict[str, Any]] = []
        for line in data[:end].splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                found.append(record)
            elif line.strip():
                self.num_bad += 1
        return found


class Observer:
    """Collects one run.

    Args:
        start_s: The run's beginning.
        node_dir: Directory that production and the harvested engine share.
        records_path: The traffic sender's output.
        steps_path: The trainer's ``metrics.jsonl``.
    """

    def __init__(self, *, start_s: float, node_dir: Path, records_path: Path, steps_path: Path) -> None:
        self._start_s = start_s
        node = NodeDir(node_dir)
        self._board, self._rollout, self._node = node.serving_board(), node.rollout_lease(), node.node()
        self._records, self._steps = JsonLines(records_path), JsonLines(steps_path)
        self._pressure, self._cuts, self._cut_requests = Counter(), Counter(), Counter()
        self._resumed, self._continued, self._kills = Counter(), Counter(), 0
        self._engine_kills = Counter()
        self.idle_by: str | None = None
        """How the harvested engine yields production's core, as its node agent says."""
        self._counters = {tier: (Counter(), Counter()) for tier in TIERS}
        self._status: list[tuple[float, dict[str, TierCount]]] = []
        self._lent: list[tuple[float, float]] = []
        self._requests_by_second: dict[int, int] = {}
        self.events: list[TimelineEvent] = []
        self.steps: list[StepRecord] = []
        self.cycles: list[tuple[str, float]] = []
        """``(phase, CLOCK_MONOTONIC)`` of every period that the sender began."""
        self.num_requests = 0
        self.num_errors = 0

    def start(self, now_s: float) -> None:
        """The run begins now; nothing has been seen yet."""
        self._start_s = now_s

    def at(self, monotonic_s: float) -> float:
        return monotonic_s - self._start_s

    def note(self, now_s: float, kind: str, text: str) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(TimelineEvent(at_s=round(self.at(now_s), 3), kind=kind, text=text))
        if kind == "kill":
            self._kills += 1

    def sample(self, now_s: float) -> None:
        """Look at the shared files and at what was written since the last call."""
        board, rollout, node = _read(self._board), _read(self._rollout), _read(self._node)
        if board is not None and (added := self._pressure.see(board.pressure_seq)):
            times = "" if added == 1 else f" {added} times"
            self.note(
                now_s, "pressure", f"production asked for memory{times}, {board.needed_pages} pages in all"
            )
        if rollout is not None:
            stopped = self._cut_requests.see(rollout.cut_requests)
            if self._cuts.see(rollout.reclaim_seq):
                self.note(
                    now_s,
                    "cut",
                    f"rollouts gave memory back in {rollout.cut_ns / 1e6:.1f} ms, {stopped} requests stopped",
                )
        if node is not None:
            self._lent.append((self.at(now_s), float(node.lend_pages)))
        for record in self._records.poll():
            self._take_traffic(record)
        for record in self._steps.poll():
            self._take_step(record)

    def see_status(self, now_s: float, status: Mapping[str, Any]) -> None:
        """Take one answer of the scheduler's ``/status``; what is missing counts as unchanged."""
        turns_by_tier, tokens_by_tier = (_table(_table(status, k), "by_tier") for k in ("turns", "tokens"))
        for tier, (turns, tokens) in self._counters.items():
            turns.see(_count(turns_by_tier, tier, turns))
            tokens.see(_count(tokens_by_tier, tier, tokens))
        self._resumed.see(_count(status, "resumed_turns", self._resumed))
        self._continued.see(_count(status, "continued_turns", self._continued))
        self._status.append((self.at(now_s), self.tier_totals()))

    def see_node(self, status: Mapping[str, Any]) -> None:
        """Take one answer of the harvested host's node agent."""
        engine = _table(status, "engine")
        self._engine_kills.see(_count(engine, "kills", self._engine_kills))
        if isinstance(engine.get("idle_by"), str):
            self.idle_by = engine["idle_by"]

    def tier_totals(self) -> dict[str, TierCount]:
        return {
            tier: TierCount(num_turns=turns.total, num_tokens=tokens.total)
            for tier, (turns, tokens) in self._counters.items()
        }

    def tiers_between(self, start_s: float, end_s: float) -> dict[str, TierCount]:
        """What each tier delivered between two times of the run, to the nearest earlier sample."""
        low, high = self._status_at(start_s), self._status_at(end_s)
        return {
            tier: TierCount(
                num_turns=high[tier].num_turns - low[tier].num_turns,
                num_tokens=high[tier].num_tokens - low[tier].num_tokens,
            )
            for tier in TIERS
        }

    def steps_between(self, start_s: float, end_s: float) -> float:
        """RL steps done between two times of the run; of a step that lies across a border, the part of its time inside."""
        return sum(
            max(0.0, min(end_s, step.end_s) - max(start_s, step.start_s)) / (step.end_s - step.start_s)
            for step in self.steps
            if step.end_s > step.start_s
        )

    def reclaim(self) -> Reclaim:
        return Reclaim(
            pressure_events=self._pressure.total,
            cuts=self._cuts.total,
            cut_requests=self._cut_requests.total,
            resumed_turns=self._resumed.total,
            continued_turns=self._continued.total,
            engine_kills=self._engine_kills.total,
            kills=self._kills,
        )

    def curves(self) -> dict[str, Curve]:
        seconds = range(max(self._requests_by_second, default=-1) + 2)
        by_second = [(float(second), float(self._requests_by_second.get(second, 0))) for second in seconds]
        return {
            "production": Curve(name="production requests", points=by_second),
            DEDICATED: Curve(name="tokens of dedicated rollouts", points=self._token_rate(DEDICATED)),
            HARVESTED: Curve(name="tokens of harvested rollouts", points=self._token_rate(HARVESTED)),
            "lent": Curve(name="pages lent", points=self._lent),
        }

    def _status_at(self, at_s: float) -> dict[str, TierCount]:
        index = bisect_right(self._status, at_s, key=lambda entry: entry[0]) - 1
        return self._status[index][1] if index >= 0 else {tier: TierCount() for tier in TIERS}

    def _token_rate(self, tier: str) -> list[tuple[float, float]]:
        points: list[tuple[float, float]] = []
        for (before_s, before), (after_s, after) in zip(self._status, self._status[1:], strict=False):
            if after_s > before_s:
                rate = (after[tier].num_tokens - before[tier].num_tokens) / (after_s - before_s)
                points.append((after_s, rate))
        return points

    def _take_traffic(self, record: Mapping[str, Any]) -> None:
        at_s = _number(record, "at_s")
        if at_s is None:
            return
        if record.get("type") == "cycle":
            self.cycles.append((str(record.get("phase")), at_s))
        elif record.get("type") == "request":
            self.num_requests += 1
            self.num_errors += record.get("error") is not None
            second = int(self.at(at_s))
            self._requests_by_second[second] = self._requests_by_second.get(second, 0) + 1

    def _take_step(self, record: Mapping[str, Any]) -> None:
        """One line of the trainer's metrics.  Without its number, success and end it is not a step."""
        number, success, end_s = (_number(record, name) for name in ("step", "success_rate", "end_s"))
        if number is None or success is None or end_s is None:
            return
        step_s, lr = _number(record, "step_s") or 0.0, _number(record, "lr") or 0.0
        update = _table(record, "update")
        tiers = _table(record, "tiers")
        step = StepRecord(
            step=int(number),
            start_s=self.at(end_s - step_s),
            end_s=self.at(end_s),
            success_rate=success,
            lr=lr,
            tiers={
                tier: TierCount(
                    num_turns=int(_number(_table(tiers, tier), "turns") or 0),
                    num_tokens=int(_number(_table(tiers, tier), "tokens") or 0),
                )
                for tier in TIERS
            },
            rollout_s=_number(record, "rollout_s"),
            train_s=_number(record, "train_s"),
            publish_s=_number(record, "publish_s"),
            entropy=_number(record, "entropy"),
            mismatch_kl=_number(record, "mismatch_kl"),
            update_kind=str(update["kind"]) if "kind" in update else None,
            bytes_dense=_whole(update, "bytes_dense"),
            bytes_sent=_whole(update, "bytes_sent"),
            density=_number(update, "density"),
        )
        # A step that a restarted trainer repeats replaces its first, unfinished life.
        self.steps = [*(old for old in self.steps if old.step != step.step), step]
        self.steps.sort(key=lambda one: one.step)


def _read(reader: Any) -> Any:
    try:
        return reader.read()
    except LedgerError:
        return None  # being replaced; the next look finds it


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = table.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(table: Mapping[str, Any], name: str) -> float | None:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _whole(table: Mapping[str, Any], name: str) -> int | None:
    value = _number(table, name)
    return None if value is None else int(value)


def _count(table: Mapping[str, Any], name: str, counter: Counter) -> int:
    """A reading of ``counter``, or its last one where the table has none."""
    value = _whole(table, name)
    return counter.last if value is None or value < 0 else value
