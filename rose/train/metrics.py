"""What a step was, in numbers: one JSON object per line of ``metrics.jsonl``.

Counts come from the leased trajectories, that is from what was trained on, not from what environments say.
Times are seconds; ``end_s`` is CLOCK_MONOTONIC, so that a line can be laid beside the records of
other processes of the machine.  ``tiers`` counts a turn where it ended and a token where it was sampled.

A restarted run appends: where a step number comes twice, the later line is the surviving one.  A step that a checkpoint has, and whose line its driver did not
live to write, has a line of ``step``, ``"restored": true`` and ``num_consumed`` alone, which may stand behind those of later steps.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rose.lineage import Version, parse_version
from rose.policy.staleness import lag
from rose.train.constrained import constraints_on

UNKNOWN_TIER = "unknown"


MAX_LINE_BYTES = 1 << 24
"""Longer ones are read as pieces, none of which is a record."""
QUANTILES = 4
"""Lengths are shown by quarters, the shortest first."""


def trajectory_metrics(trajectories: Sequence[Mapping[str, Any]], *, version: Version) -> dict[str, Any]:
    """Success, length, tiers and staleness of a batch that ``version`` consumes."""
    turns: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    lags: list[int] = []
    trained_lags: list[int] = []
    num_turns = num_resumed = num_prompt_tokens = num_truncated = num_cut = num_mixed = num_side = 0
    num_constrained = 0
    for trajectory in trajectories:
        num_truncated += bool(_table(trajectory.get("info")).get("truncated"))
        for turn in _tables(trajectory.get("turns")):
            num_turns += 1
            num_mixed += turn.get("kv_mixed") is True
            num_side += turn.get("side") is True
            num_constrained += turn.get("side") is not True and bool(constraints_on(trajectory, turn))
            # A turn of one token always ends at its limit.
            sampled = turn.get("token_ids") or ()
            num_cut += turn.get("finish_reason") == "length" and len(sampled) > 1
            num_prompt_tokens += num_prompt(turn)
            segments = _tables(turn.get("segments"))
            num_resumed += len(segments) > 1
            for segment in segments:
                tokens[str(segment.get("tier", UNKNOWN_TIER))] += _whole(segment.get("n"))
            if segments:
                turns[str(segments[-1].get("tier", UNKNOWN_TIER))] += 1
            else:
                turns[UNKNOWN_TIER] += 1
                tokens[UNKNOWN_TIER] += len(turn.get("token_ids") or ())
            for span in turn.get("versions") or ():
                found = lag(version, parse_version(span[0]))
                lags.append(found)
                if trajectory.get("stale") is not True:
                    trained_lags.append(found)
    count = max(1, len(trajectories))
    return {
        "num_trajectories": len(trajectories),
        "success_rate": success_rate(trajectories),
        "reward_mean": sum(float(one.get("reward") or 0.0) for one in trajectories) / count,
        "sampled_mean": sum(map(num_sampled, trajectories)) / count,
        "num_turns": num_turns,
        "turns_mean": num_turns / count,
        "truncated_fraction": num_truncated / count,
        "num_prompt_tokens": num_prompt_tokens,
        "prefill_per_decode": prefill_per_decode(trajectories),
        "cut_turn_fraction": num_cut / max(1, num_turns),
        "reward_by_length": rewards_by_quantile(trajectories),
        "num_resumed_turns": num_resumed,
        "num_kv_mixed_turns": num_mixed,
        "num_side_turns": num_side,
        "num_constrained_turns": num_constrained,
        "tiers": {tier: {"turns": turns[tier], "tokens": tokens[tier]} for tier in sorted({*turns, *tokens})},
        "num_stale": sum(one.get("stale") is True for one in trajectories),
        "lag_max": max(lags, default=0),
        "trained_lag_max": max(trained_lags, default=0),
        "lag_mean": sum(lags) / len(lags) if lags else 0.0,
        **({"tasks": by_task} if (by_task := _by_task(trajectories)) else {}),
    }


def success_rate(trajectories: Sequence[Mapping[str, Any]]) -> float:
    """Share that succeeded.

    With dynamic sampling, that of what was *trained on* says little: groups that all succeed are set aside, so it stays near a half
    however good the policy is.  ``sampled_success_rate`` of a step counts these groups too.
    """
    return sum(bool(one.get("success")) for one in trajectories) / max(1, len(trajectories))


def success_by_task(trajectories: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """:func:`success_rate` of each task of a job that has several, and of how many; empty for any other job."""
    names = sorted({str(one.get("task_kind") or "") for one in trajectories} - {""})
    own = {name: [one for one in trajectories if one.get("task_kind") == name] for name in names}
    return {name: {"num_trajectories": len(of), "success_rate": success_rate(of)} for name, of in own.items()}


def _by_task(trajectories: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The same, in short, of each task of a job that has several; empty for any other."""
    found = success_by_task(trajectories)
    for name in found:
        own = [one for one in trajectories if one.get("task_kind") == name]
        found[name] |= {
            "reward_mean": sum(float(one.get("reward") or 0.0) for one in own) / len(own),
            "turns_mean": sum(len(_tables(one.get("turns"))) for one in own) / len(own),
            "sampled_mean": sum(num_sampled(one) for one in own) / len(own),
            "prefill_per_decode": prefill_per_decode(own),
        }
    return found


def prefill_per_decode(trajectories: Sequence[Mapping[str, Any]]) -> float:
    """New prompt tokens per sampled token; 0 where nothing was sampled.

    New are those that the turn before it did not hold: what an engine with a perfect prefix cache would read.
    """
    num_new = 0
    for trajectory in trajectories:
        turns = [turn for turn in _tables(trajectory.get("turns")) if turn.get("side") is not True]
        ends = {turn.get("turn"): num_prompt(turn) + len(turn.get("token_ids") or ()) for turn in turns}
        for turn in turns:
            held = 0 if turn.get("parent") is None else ends.get(turn["parent"], 0)
            num_new += max(0, num_prompt(turn) - held)
    sampled = sum(map(num_sampled, trajectories))
    return num_new / sampled if sampled else 0.0


def num_prompt(turn: Mapping[str, Any]) -> int:
    """Tokens of its prompt, which a leased turn holds as a number and without those that its parent holds."""
    return _whole(turn.get("num_prompt_tokens")) or len(turn.get("prompt_token_ids") or ())


def num_sampled(trajectory: Mapping[str, Any]) -> int:
    """Tokens that the policy sampled in a trajectory, but for requests beside its task."""
    turns = (turn for turn in _tables(trajectory.get("turns")) if turn.get("side") is not True)
    return sum(len(turn.get("token_ids") or ()) for turn in turns)


def rewards_by_quantile(trajectories: Sequence[Mapping[str, Any]]) -> list[float]:
    """Mean reward of each quarter by sampled length, the shortest first: what long thinking is paid."""
    ordered = sorted(trajectories, key=num_sampled)
    parts = [
        ordered[i * len(ordered) // QUANTILES : (i + 1) * len(ordered) // QUANTILES] for i in range(QUANTILES)
    ]
    return [sum(float(one.get("reward") or 0.0) for one in part) / len(part) for part in parts if part]


def lengths_by_quantile(trajectories: Sequence[Mapping[str, Any]]) -> list[int]:
    """Sampled tokens at the quartiles, minimum and maximum included; empty for no trajectory."""
    lengths = sorted(num_sampled(one) for one in trajectories)
    return (
        [lengths[round(i * (len(lengths) - 1) / QUANTILES)] for i in range(QUANTILES + 1)] if lengths else []
    )


class MetricsFile:
    """Appends whole lines; a line torn by a crash stays a line of its own.  Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0, os.SEEK_END)
        if self._file.tell() > 0:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def append(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of a file of metrics, in order, those of steps that were taken again too; nothing where there is no file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(MAX_LINE_BYTES):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue  # torn by a crash
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def steps_without_a_line(path: Path, step: int) -> list[int]:
    """Of the steps before ``step`` those of which a file of metrics says nothing: no line, or only one of before they were taken again."""
    told: list[int] = []
    restored: set[int] = set()
    for record in records_of(path):
        if record.get("restored") is True:
            restored.add(record["step"])
            continue
        while told and told[-1] >= record["step"]:
            told.pop()
        restored = {one for one in restored if one < record["step"]} if restored else restored
        told.append(record["step"])
    return sorted({*range(step)} - {*told} - restored)


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
