"""The co-serving benchmark's plan and its arithmetic: what is paired with what, and when the bar is met."""

from __future__ import annotations

import itertools
import subprocess
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.coserving.analysis import BlockRecord, analyse, stop_verdict, verdict
from benchmarks.coserving.plan import (
    BURST_TRAFFIC_S,
    PAIRS_PER_SEGMENT,
    SOLO,
    SOLO_EVERY,
    Timing,
    make_schedule,
    make_segments,
    retime,
)
from benchmarks.coserving.world import Reading, _cpu_s_of, delta
from rose.evaluation.arms import RequestLatency, Slo
from rose.evaluation.arrivals import TraceRow, TrafficShape

ARMS = ("alone_1", "alone_2", "rose")
SHAPE = TrafficShape(
    period_s=40.0,
    mean_rate_hz=0.5,
    prompt_median_tokens=64,
    prompt_max_tokens=400,
    output_median_tokens=12,
    output_max_tokens=48,
)


def test_each_arm_serves_the_same_requests_at_the_same_moments_of_its_blocks() -> None:
    timing = Timing()
    segments = make_segments("generated", SHAPE, timing, 5, 0, None)
    schedule = make_schedule(segments, ARMS, timing)

    served: dict[str, set[tuple[int, float, int]]] = {arm: set() for arm in ARMS}
    for block in schedule.blocks:
        for number in range(block.first, block.first + block.count):
            one = schedule.arrivals[number]
            served[block.arm].add(
                (schedule.keys[number], round(one.at_s - block.start_s, 6), one.prompt_tokens)
            )
    assert served["alone_1"] == served["alone_2"] == served["rose"]
    assert len(served["rose"]) == sum(map(len, segments)) > 0


def test_another_rate_of_a_stretch_is_the_same_requests_closer_together() -> None:
    timing = Timing()
    segments = make_segments("generated", SHAPE, timing, 6, 0, None)

    def moments(segments: Any) -> list[tuple[float, int, int]]:
        return [
            (number * timing.traffic_s + one.at_s, one.prompt_tokens, one.output_tokens)
            for number, segment in enumerate(segments)
            for one, _ in segment
        ]

    closer = retime(segments, timing, 1.7)

    assert all(0 <= one.at_s < timing.traffic_s for segment in closer for one, _ in segment)
    assert [row[1:] for row in moments(closer)] == [row[1:] for row in moments(segments)]
    assert [row[0] for row in moments(closer)] == pytest.approx([row[0] / 1.7 for row in moments(segments)])


def test_rollouts_alone_take_their_turn_among_the_arms() -> None:
    timing = Timing()
    segments = make_segments("generated", SHAPE, timing, 7, 0, None)
    schedule = make_schedule(segments, ARMS, timing)

    alone = [block for block in schedule.blocks if block.arm == SOLO]
    assert [block.segment for block in alone] == list(range(0, 7, SOLO_EVERY))
    assert all(block.count == 0 for block in alone)
    starts = [block.start_s for block in schedule.blocks]
    assert starts == [number * timing.block_s for number in range(len(starts))]


def test_a_burst_is_in_every_segment_each_time_with_other_requests() -> None:
    times = sorted([0.4 * index for index in range(2000)] + [500.0 + 0.01 * index for index in range(60)])
    rows = [TraceRow(at_s=at, context_tokens=1000, generated_tokens=20) for at in times]
    segments = make_segments("burst", SHAPE, Timing(traffic_s=BURST_TRAFFIC_S), 6, 0, rows)

    busiest = [
        max(sum(int(one.at_s) == second for one, _ in segment) for second in range(20))
        for segment in segments
    ]
    assert min(busiest) >= 10  # of 62 in that second, a fifth; the mean is 0.5
    assert len({tuple(one.at_s for one, _ in segment) for segment in segments}) > 1


def block(arm: str, number: int, decoded: float = 0.0, busy_s: float = 0.0) -> BlockRecord:
    counters = {
        "seconds": 10.0, "decoded": decoded, "serving_busy_s": busy_s, "serving_steps": 100, "prefix_queries": 0,
        "prefix_hits": 0, "cut_requests": 0, "kills": 0,
    }  # fmt: skip
    return BlockRecord(arm=arm, segment=0, run=0, number=number, counters=counters)


def sample(arm: str, index: int, ttft_s: float) -> RequestLatency:
    return RequestLatency(
        index=index, phase=arm, at_s=0.0, ttft_s=ttft_s, end_s=1.0, itl_s=(0.02,) * 5, num_tokens=6, late_s=0.0, error=None
    )  # fmt: skip


def result(rose_ttft_s: float = 0.1, decoded: float = 6000.0) -> dict[str, Any]:
    samples = [sample(arm, i, 0.1) for arm in ARMS[:2] for i in range(40)]
    samples += [sample("rose", i, rose_ttft_s) for i in range(40)]
    blocks = [block(arm, n, busy_s=4.0) for arm in ARMS[:2] for n in range(2)]
    blocks += [block("rose", 4, decoded=decoded), block("rose", 5, decoded=decoded)]
    blocks += [block(SOLO, 6, decoded=9000.0), block(SOLO, 7, decoded=11000.0)]
    return analyse(samples, blocks, Slo(ttft_s=1.0, tpot_s=0.15), ARMS)


def test_the_harvested_share_is_of_what_the_idle_part_of_the_core_could_make() -> None:
    summary = result()["summary"]

    assert summary["serving_busy_fraction"] == pytest.approx(0.4)
    assert summary["harvested_share"] == pytest.approx(6000 / (10_000 * 0.6))
    # Two blocks of rollouts alone, 9,000 and 11,000 tokens: what a resample of them can be.
    assert summary["harvested_share_low"] == pytest.approx(6000 / (11_000 * 0.6))
    assert summary["harvested_share_high"] == pytest.approx(6000 / (9_000 * 0.6))


def test_the_bar_is_met_when_nothing_is_worse_and_enough_is_harvested() -> None:
    assert result()["summary"]["bar_met"] is True


@pytest.mark.parametrize(("ttft_s", "decoded"), [(0.12, 6000.0), (0.1, 5000.0), (1.2, 6000.0)])
def test_the_bar_is_missed_by_latency_share_or_violations_alone(ttft_s: float, decoded: float) -> None:
    assert result(ttft_s, decoded)["summary"]["bar_met"] is False


def test_noise_above_the_bar_raises_it() -> None:
    found = result(0.12)
    row = found["arms"]["rose"]
    noise = {
        "ttft": {"value": 1.0, "low": 0.8, "high": 1.19, "num_pairs": 40},
        "itl": row["itl_p99_ratio"],
    }

    assert verdict(row, noise)


# --- beside the paper's way

BOTH = (*ARMS, "paper")


def beside_paper(ttft_s: float, paper_ttft_s: float, decoded: float, paper_decoded: float) -> dict[str, Any]:
    samples = [sample(arm, i, 0.1) for arm in ARMS[:2] for i in range(40)]
    samples += [sample("rose", i, ttft_s) for i in range(40)] + [
        sample("paper", i, paper_ttft_s) for i in range(40)
    ]
    blocks = [block(arm, n, busy_s=4.0) for arm in ARMS[:2] for n in range(2)]
    blocks += [block("rose", 4 + n, decoded=decoded) for n in range(2)]
    blocks += [block("paper", 6 + n, decoded=paper_decoded) for n in range(2)]
    blocks += [block(SOLO, 8 + n, decoded=10000.0) for n in range(2)]
    return analyse(samples, blocks, Slo(ttft_s=1.0, tpot_s=0.15), BOTH)["summary"]


@pytest.mark.parametrize(
    ("figures", "met"),
    [
        ((0.1, 0.12, 5000.0, 5000.0), True),  # sooner, the rest alike
        ((0.1, 0.1, 5000.0, 4000.0), True),  # more harvested, the rest alike
        ((0.1, 0.1, 5000.0, 5000.0), False),  # ahead in nothing
        ((0.1, 0.12, 5000.0, 6000.0), False),  # ahead in one, behind in one
        ((0.12, 0.2, 5000.0, 4000.0), False),  # ahead in two, but later than alone
    ],
)
def test_ours_is_judged_by_alone_and_by_the_papers_way(
    figures: tuple[float, float, float, float], met: bool
) -> None:
    assert beside_paper(*figures)["judged_met"] is met


def test_the_used_share_is_of_what_production_left_and_others_take_what_nobody_else_has() -> None:
    samples = [sample(arm, i, 0.1) for arm in ARMS for i in range(4)]
    used = {"alone_1": (9.0, 0.0, 0.5), "alone_2": (9.0, 0.0, 0.5), "rose": (6.0, 3.0, 0.5)}
    names = ("serving_cpu_s", "rollout_cpu_s", "idle_s")
    blocks = [
        replace(block(arm, n), counters={**block(arm, n).counters, **dict(zip(names, seconds, strict=True))})
        for n, (arm, seconds) in enumerate(used.items())
    ]

    found = analyse(samples, blocks, Slo(ttft_s=1.0, tpot_s=0.15), ARMS)

    assert found["arms"]["rose"]["used_share"] == pytest.approx(0.75)
    assert found["summary"]["others_share"] == pytest.approx(0.05)


def test_runs_that_counted_no_cpu_seconds_have_no_used_share() -> None:
    found = result()

    assert found["arms"]["rose"]["used_share"] is None
    assert found["summary"]["others_share"] is None


# --- steps that stop at layers


def test_tight_prompts_come_one_after_the_other_and_are_as_long_as_any() -> None:
    timing = Timing()
    (one, other) = make_segments("tight", SHAPE, timing, 2, 0, None)
    assert [a.at_s for a, _ in one] != [a.at_s for a, _ in other]
    for segment in (one, other):
        times = [a.at_s for a, _ in segment]
        assert {a.prompt_tokens for a, _ in segment} == {SHAPE.prompt_max_tokens}
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert min(gaps) > 0.5 * timing.traffic_s / len(times)
        assert max(times) < timing.traffic_s


STOP_ARMS = ("alone_1", "alone_2", "rose_serial", "rose_serial_layers")


def stopped(late: dict[str, int], ttft_s: dict[int, float] | None = None, runs: int = 1) -> dict[str, Any]:
    """Of 40 prompts a run that take 0.9 s of 1 s alone, and 10 that take half of it, ``late`` of each arm miss their limit."""
    samples, blocks = [], []
    for run in range(runs):
        first = run * 1000 * PAIRS_PER_SEGMENT
        for arm in STOP_ARMS:
            took = [1.1 if i < late.get(arm, 0) else 0.9 for i in range(40)] + [0.5] * 10
            samples += [sample(arm, first + i, t * (run + 1)) for i, t in enumerate(took)]
            counters = {
                **block(arm, 0, decoded=1000.0).counters,
                "stops": 100,
                "quick_stops": 97,
                "stops_late_s": 0.1,
            }
            blocks.append(BlockRecord(arm=arm, segment=0, run=run, number=0, counters=counters))
    return analyse(samples, blocks, Slo(ttft_s=1.0, tpot_s=0.15), STOP_ARMS, ttft_s)


def test_added_misses_count_prompts_that_need_nearly_all_of_their_limit_alone() -> None:
    found = stopped({"alone_1": 1, "alone_2": 2, "rose_serial": 21, "rose_serial_layers": 3})
    assert {arm: row["tight_added_misses"] for arm, row in found["arms"].items()} == {
        "alone_1": 0, "alone_2": 1, "rose_serial": 20, "rose_serial_layers": 2,
    }  # fmt: skip
    assert {row["tight_requests"] for row in found["arms"].values()} == {40}
    assert found["arms"]["rose_serial_layers"]["stops_late_ms"] == pytest.approx(1.0)


def test_each_run_of_a_pool_is_held_to_its_own_promise() -> None:
    found = stopped({"rose_serial": 20}, ttft_s={0: 1.0, 1: 2.0}, runs=2)
    assert found["arms"]["rose_serial"]["tight_misses"] == 40
    assert found["arms"]["rose_serial"]["num_violations"] == 40
    assert found["arms"]["rose_serial_layers"]["num_violations"] == 0


FOUND: dict[str, Any] = {
    "tight_requests": 200, "tight_added_misses_aa": 1, "tight_added_misses_without": 40, "tight_added_misses_with": 3,
    "stops_quick_share": 0.96, "stop_rollout_tokens_ratio": 0.93,
}  # fmt: skip


def test_the_bar_of_the_stops_is_met() -> None:
    assert stop_verdict(FOUND, 0) is True


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"tight_added_misses_with": 4}, id="more than the noise"),
        pytest.param(
            {"tight_added_misses_aa": 30, "tight_added_misses_with": 21}, id="more than half of those without"
        ),
        pytest.param({"stop_rollout_tokens_ratio": 0.89}, id="it costs rollouts too much"),
        pytest.param({"stops_quick_share": 0.94}, id="it is too slow"),
        pytest.param({"kills": 1}, id="it cost an engine"),
    ],
)
def test_the_bar_of_the_stops_is_missed(change: dict[str, Any]) -> None:
    kills = change.pop("kills", 0)
    assert stop_verdict({**FOUND, **change}, kills) is False


def test_too_few_misses_without_stops_tell_nothing() -> None:
    assert stop_verdict({**FOUND, "tight_added_misses_without": 9}, 0) is None


def test_a_rollout_engine_that_was_replaced_has_used_what_the_new_one_has() -> None:
    fields = [field.name for field in dataclass_fields(Reading)]
    before = Reading(**dict.fromkeys(fields, 1) | {"rollout_cpu_s": 90.0})
    after = Reading(**dict.fromkeys(fields, 3) | {"rollout_cpu_s": 2.5})
    assert delta(before, after)["rollout_cpu_s"] == 2.5


def test_an_engine_that_has_ended_since_its_agent_told_of_it_ends_no_measurement() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert _cpu_s_of(ended.pid) == 0.0
