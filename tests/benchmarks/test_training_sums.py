"""What the training benchmarks make of their runs, on numbers that can be checked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.training import collapse, curves, learning
from benchmarks.training.demo import whole_pairs
from benchmarks.training.stale import trained_by_quarter
from benchmarks.training.throughput import gain_of


def run_of(fleet: str, seed: int, last: float, **changes: Any) -> dict[str, Any]:
    job = learning.JOBS["maths"]
    return {
        "task": "maths",
        "fleet": fleet,
        "seed": seed,
        "job": job,
        "success": [0.3] * (job["num_steps"] - learning.LAST_STEPS) + [last] * learning.LAST_STEPS,
        "success_held_out": last,
        "seconds": 100.0 + seed,
    } | changes


def test_pairs_are_compared_by_their_difference_and_its_interval() -> None:
    runs = [run_of("dedicated", seed, 0.8) for seed in range(3)]
    runs += [run_of("harvested", seed, last) for seed, last in enumerate((0.78, 0.80, 0.82))]
    runs.append(run_of("dedicated", 3, 0.1))  # half a pair
    found = learning.summarise(runs, None)
    assert (found["maths_pairs"], found["maths_difference"]) == (3, 0.0)
    # t = 4.303 for three pairs, deviation 0.02: 4.303 * 0.02 / sqrt(3)
    assert found["maths_difference_low"] == pytest.approx(-0.0497, abs=1e-4)
    assert found["maths_meets_bar"]


def test_a_run_counts_as_taken_only_with_the_very_same_job() -> None:
    job = learning.JOBS["maths"]
    runs = [run_of("dedicated", 0, 0.8)]
    assert learning.find(runs, "maths", "dedicated", 0, job) is runs[0]
    assert learning.find(runs, "maths", "dedicated", 0, job | {"num_steps": 2}) is None
    assert learning.find(runs, "maths", "harvested", 0, job) is None


def test_the_page_has_a_line_per_run_and_a_mean_per_fleet() -> None:
    runs = [run_of(fleet, seed, 0.8) for fleet in learning.FLEETS for seed in range(2)]
    page = curves.page(runs, learning.BAR)
    assert page.count('class="line s-') == 9
    assert page.count(" mean") >= 2


def test_shares_by_quarter_split_equal_lengths_evenly() -> None:
    ended = [
        {"num_turns": turns, "trained": trained, "state": "consumed"}
        for turns, trained in (
            (1, True),
            (1, True),
            (1, False),
            (1, False),
            (2, True),
            (3, True),
            (9, False),
            (9, False),
        )
    ]
    ended.append({"num_turns": 50, "trained": False, "state": "finished"})  # nobody has asked for it yet
    assert trained_by_quarter(ended) == [0.5, 0.5, 1.0, 0.0]


def test_pools_that_add_up_gain_all_that_is_possible() -> None:
    rates = {"asynchronous_dedicated": 100.0, "asynchronous_harvested": 50.0, "asynchronous_both": 140.0}
    assert gain_of(rates, False)["gain_over_limit"] == pytest.approx(0.8)


def test_held_out_success_is_that_of_a_run_s_second_half() -> None:
    run = {"job": {"num_steps": 4}, "held_out": {"0": 0.9, "1": 0.8, "2": 0.5, "3": 0.1}}

    assert learning.held_out(run) == pytest.approx(0.3)


def test_held_out_gaps_are_told_only_of_runs_that_were_evaluated_on_the_way() -> None:
    def pair(dedicated: dict[str, float], harvested: dict[str, float]) -> dict[str, dict[str, object]]:
        return {
            name: {"job": {"num_steps": 2}, "held_out": rates}
            for name, rates in (("dedicated", dedicated), ("harvested", harvested))
        }

    often = [
        pair({"0": 0.0, "1": 0.5}, {"0": 1.0, "1": 0.25}),
        pair({"0": 0.0, "1": 0.5}, {"0": 1.0, "1": 0.75}),
    ]

    assert learning.held_out_gap("x", [*often, pair({"1": 0.5}, {"1": 0.5})], "harvested") == {}
    found = learning.held_out_gap("x", often, "harvested")
    assert found["x_held_out_mean"] == 0.5
    assert found["x_held_out_difference"] == 0.0
    assert found["x_held_out_difference_low"] < -1  # two pairs say little


def test_a_run_collapsed_if_it_falls_far_below_its_best_so_far() -> None:
    assert collapse.fall_of([0.1, 0.5, 1.0, 0.375, 0.9]) == pytest.approx(0.625)
    assert collapse.fall_of([0.0, 0.2, 0.4]) == 0.0
    curves = {
        "greedy": [0.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        "sampled": [0.5] * 6,
        "greedy_failures": 8,
        "greedy_out_of_turns": 3,
    }
    guard = {name: [0.0] * 6 for name in collapse.GUARD_FIGURES}
    runs = [
        {"arm": "bare", "fall": 0.2, **curves, **guard},
        {"arm": "bare", "fall": 0.5, **curves, "greedy": [1.0, 0.5, 0.5, 0.5, 0.5, 0.5], **guard},
    ]
    runs[0]["sampled"] = [0.9, 0.55, 0.5, 0.5, 0.5, 0.5]
    told = collapse.summarise(runs)
    assert (told["bare_lost"], told["bare_sampled_fall"]) == (
        1,
        pytest.approx(0.4),
    )  # greedy play need not have fallen
    assert (told["bare_greedy_failures"], told["bare_greedy_out_of_turns"]) == (16, 6)
    assert (told["bare_runs"], told["bare_collapsed"]) == (2, 1)
    assert (told["bare_greedy"], told["bare_greedy_steady"]) == (0.75, 1.0)


def test_only_blocks_of_the_demo_that_have_a_partner_count() -> None:
    blocks = [
        {"harvesting": on, "start_s": 0.0, "end_s": 30.0, "num_steps": num_steps, "tiers": {}}
        for on, num_steps in ((False, 8.0), (True, 10.0), (True, 12.0))
    ]

    assert [one.num_steps for one in whole_pairs(blocks)] == [8.0, 10.0]
