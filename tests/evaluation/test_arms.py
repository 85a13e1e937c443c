"""Percentiles, violations and ratios, on numbers that can be checked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rose.errors import ConfigError
from rose.evaluation.arms import RequestLatency, Slo, arm_stats, ratio, read_records, to_samples

SLO = Slo(ttft_s=0.5, tpot_s=0.1)


def sample(
    index: int,
    ttft_s: float = 0.1,
    itl_s: tuple[float, ...] = (0.02, 0.02),
    error: str | None = None,
) -> RequestLatency:
    return RequestLatency(
        index=index,
        phase="x",
        at_s=0.0,
        ttft_s=ttft_s,
        end_s=ttft_s + sum(itl_s),
        itl_s=itl_s,
        num_tokens=len(itl_s) + 1,
        late_s=0.0,
        error=error,
    )


def test_stall_is_the_longest_gap_and_single_tokens_have_none() -> None:
    stats = arm_stats([sample(0, itl_s=(0.02, 0.3)), sample(1, itl_s=())], SLO)

    assert stats.stall_max_s == 0.3
    assert stats.stall_p50_s == 0.3


def test_late_first_token_slow_stream_and_failure_each_violate() -> None:
    arm = [
        sample(0),
        sample(1, ttft_s=0.51),
        sample(2, itl_s=(0.05, 0.16)),  # mean 0.105 s
        sample(3, itl_s=(0.01, 0.18)),  # one long gap, mean 0.095 s: within
        sample(4, error="HTTP 500"),
    ]

    stats = arm_stats(arm, SLO)

    assert (stats.num_requests, stats.num_errors, stats.num_violations) == (5, 1, 3)


def test_failed_requests_leave_latencies_alone() -> None:
    stats = arm_stats([sample(0, ttft_s=0.1), sample(1, ttft_s=9.0, error="x")], SLO)

    assert stats.ttft_p99_s == 0.1
    assert arm_stats([sample(1, error="x")], SLO).ttft_p99_s is None


def test_ratio_of_an_arm_to_itself_is_one_without_spread() -> None:
    arm = [sample(index, ttft_s=0.1 + 0.01 * index) for index in range(50)]

    found = ratio(arm, arm, "ttft", 0.99)

    assert found is not None
    assert (found.value, found.low, found.high, found.num_pairs) == (1.0, 1.0, 1.0, 50)


def test_interval_covers_the_true_factor_about_95_times_in_100() -> None:
    rng = np.random.default_rng(5)
    num_covered = 0
    for seed in range(100):
        below = [sample(i, ttft_s=float(t)) for i, t in enumerate(rng.lognormal(-2, 0.5, 100))]
        above = [sample(i, ttft_s=float(t)) for i, t in enumerate(1.3 * rng.lognormal(-2, 0.5, 100))]
        found = ratio(above, below, "ttft", 0.5, seed=seed, num_resamples=200)
        assert found is not None
        assert found.high - found.low < 0.8  # an interval that says nothing covers everything
        num_covered += found.low <= 1.3 <= found.high

    assert 88 <= num_covered <= 99


def test_interval_is_a_function_of_its_seed() -> None:
    below = [sample(i, ttft_s=0.1 + 0.01 * (i * 7 % 31)) for i in range(60)]
    above = [sample(i, ttft_s=0.1 + 0.01 * (i * 11 % 37)) for i in range(60)]

    assert ratio(above, below, "ttft", 0.5, seed=1) == ratio(above, below, "ttft", 0.5, seed=1)


def test_pairs_resampled_together_are_tighter_than_their_spread() -> None:
    """Large and small requests pair up: the spread between requests must not widen the ratio."""
    below = [sample(i, ttft_s=0.01 * (i + 1)) for i in range(100)]
    above = [sample(i, ttft_s=0.02 * (i + 1)) for i in range(100)]

    found = ratio(above, below, "ttft", 0.5)

    assert found is not None
    assert (found.low, found.high) == (2.0, 2.0)


def test_requests_failed_or_absent_in_one_arm_are_left_out_of_both() -> None:
    below = [sample(0, ttft_s=0.1), sample(1, ttft_s=0.1, error="x"), sample(2, ttft_s=50.0)]
    above = [sample(0, ttft_s=0.2), sample(1, ttft_s=90.0), sample(3, ttft_s=70.0)]

    found = ratio(above, below, "ttft", 0.99)

    assert found is not None
    assert (found.value, found.num_pairs) == (2.0, 1)
    assert ratio(above[1:2], below[1:2], "ttft", 0.99) is None


def test_an_arm_may_hold_several_cycles_of_one_request() -> None:
    below = [sample(0, ttft_s=0.1), sample(1, ttft_s=0.1)]
    above = [sample(0, ttft_s=0.1), sample(1, ttft_s=0.1), sample(0, ttft_s=0.3), sample(1, ttft_s=0.3)]

    found = ratio(above, below, "ttft", 0.99)

    assert found is not None
    assert found.value == pytest.approx(3.0)


def test_a_cycle_cut_short_does_not_weigh_its_beginning_more() -> None:
    """The shared phase ends when the job does: its first requests were sent once more than its last."""
    alone = [sample(0, ttft_s=0.1), sample(1, ttft_s=0.2)]
    shared = [sample(0, ttft_s=0.1), sample(1, ttft_s=0.2), sample(0, ttft_s=0.1), sample(0, ttft_s=0.1)]
    found = ratio(shared, alone, "ttft", 0.6)
    assert found is not None
    assert found.value == 1.0


def test_torn_last_line_is_dropped_and_a_broken_middle_is_an_error(tmp_path: Path) -> None:
    line = json.dumps(
        {
            "type": "request",
            "index": 4,
            "phase": "alone_1",
            "at_s": 1.0,
            "late_s": 0.0,
            "num_tokens": 0,
            "ttft_s": None,
            "end_s": None,
            "itl_s": [],
            "error": "HTTP 500",
        }
    )
    path = tmp_path / "records.jsonl"
    path.write_text('{"type": "cycle"}\n' + line + "\n" + line[:40])

    samples = to_samples(read_records(path))

    assert [(s.index, s.error) for s in samples] == [(4, "HTTP 500")]
    path.write_text(line[:40] + "\n" + line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_records(path)
    assert caught.value.field == f"{path}:1"
