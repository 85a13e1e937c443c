"""What a step was, in numbers: one JSON object per line of ``metrics.jsonl``.

Counts come from the leased trajectories, that is from what was trained on, not from what environments say.
Times are seconds; ``end_s`` is CLOCK_MONOTONIC, so that a line can be laid beside the records of
other processes of the machine.  ``tiers`` counts a turn where it ended and a token where it was sampled.

A restarted run appends: where a step number comes twice, the later line is the surviving one.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

UNKNOWN_TIER = "unknown"


def trajectory_metrics(trajectories: Sequence[Mapping[str, Any]], *, version: int) -> dict[str, Any]:
    """Success, length, tiers and staleness of a batch that ``version`` consumes."""
    turns: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    lags: list[int] = []
    num_turns, num_resumed, num_prompt_tokens, num_truncated = 0, 0, 0, 0
    for trajectory in trajectories:
        num_truncated += bool(_table(trajectory.get("info")).get("truncated"))
        for turn in _tables(trajectory.get("turns")):
            num_turns += 1
            num_prompt_tokens += len(turn.get("prompt_token_ids") or ())
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
                _, _, sampled = str(span[0]).partition(".")
                if sampled.isdigit():
                    lags.append(abs(version - int(sampled)))
    count = max(1, len(trajectories))
    return {
        "num_trajectories": len(trajectories),
        "success_rate": sum(bool(one.get("success")) for one in trajectories) / count,
        "reward_mean": sum(float(one.get("reward") or 0.0) for one in trajectories) / count,
        "num_turns": num_turns,
        "turns_mean": num_turns / count,
        "truncated_fraction": num_truncated / count,
        "num_prompt_tokens": num_prompt_tokens,
        "num_resumed_turns": num_resumed,
        "tiers": {tier: {"turns": turns[tier], "tokens": tokens[tier]} for tier in sorted({*turns, *tokens})},
        "lag_max": max(lags, default=0),
        "lag_mean": sum(lags) / len(lags) if lags else 0.0,
    }


class MetricsFile:
    """Appends whole lines; a line torn by a crash stays a line of its own.  Not thread-safe."""

    def __init__(self, path: Path) -> None:
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


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
