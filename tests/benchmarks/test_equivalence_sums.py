"""The equivalence gate's verdict on made-up groups, where what is true is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.training.equivalence_sums import BAR, FLEETS, Figure, Group, judge, total_variation

NUM_BOARDS, GROUP_SIZE, CELLS, WIDTH = 8, 16, 9, 24
DIRECTION = np.ones(WIDTH)


def fleet(
    seed: int,
    *,
    worse: float = 0.0,
    moves: float = 8.0,
    lag: float = 1.0,
    up: float = 0.25,
    turn: float = 0.0,
    scale: float = 1.0,
    cut: int = 0,
    cut_worse: float = 0.0,
    num_groups: int = 320,
) -> list[Group]:
    """Groups of a policy that succeeds in about a half of its episodes, with what is planted.

    Args:
        turn: Of the mean gradient, in radians.
        cut: Turns of each group that were cut.
    """
    rng = np.random.default_rng(seed)
    sideways = DIRECTION * np.where(np.arange(WIDTH) % 2, 1.0, -1.0)
    mean = scale * (np.cos(turn) * DIRECTION + np.sin(turn) * sideways)
    found: list[Group] = []
    for index in range(num_groups):
        rate = 0.1 + 0.8 * (index % NUM_BOARDS) / (NUM_BOARDS - 1)
        wins = rng.binomial(GROUP_SIZE - cut, rate - worse)
        cut_wins = rng.binomial(cut, rate - worse - min(cut_worse, rate))
        actions = rng.multinomial(GROUP_SIZE, [1 - 0.5 - up, 0.25, 0.25, up], size=CELLS)
        found.append(
            Group(
                board=index % NUM_BOARDS,
                episodes=GROUP_SIZE,
                wins=int(wins + cut_wins),
                moves=int(rng.poisson(moves * GROUP_SIZE)),
                tokens=GROUP_SIZE * CELLS,
                lag=int(rng.binomial(GROUP_SIZE * CELLS, lag / 2) * 2),
                actions=tuple(int(one) for one in actions.ravel()),
                cut=cut,
                cut_wins=int(cut_wins),
                gradient=mean + rng.normal(0.0, 2.0, WIDTH),
            )
        )
    return found


def level(**planted: Any) -> Any:
    """Judged: the harvested fleet has what was planted, the others nothing."""
    groups = {name: fleet(seed) for seed, name in enumerate(FLEETS)}
    groups["harvested"] = fleet(7, **{"cut": 4, **planted})
    return judge(groups, num_draws=400)


def test_fleets_that_play_alike_are_equivalent() -> None:
    found = level()
    assert (found.verdict, found.reason) == ("equivalent", "")
    success = found.pairs["harvested", "dedicated"]["success"]
    assert success.low < success.value < success.high
    assert success.high - success.low == pytest.approx(
        2 * 1.96 * np.sqrt(2 * 0.1648 / (320 * GROUP_SIZE)), rel=0.2
    )


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("success", {"worse": 0.06}),
        ("length", {"moves": 9.0}),
        ("lag", {"lag": 1.5}),
        ("actions", {"up": 0.35}),
        ("gradient_cosine", {"turn": 0.8}),
        ("gradient_norm", {"scale": 1.6}),
        ("cut_success", {"cut_worse": 0.4}),
    ],
)
def test_a_planted_difference_is_found_by_its_figure(name: str, planted: dict[str, float]) -> None:
    found = level(**planted)
    assert found.verdict == "different"
    assert found.pairs["harvested", "dedicated"][name].verdict == "outside"
    assert found.pairs["uncut", "dedicated"][name if name != "cut_success" else "success"].verdict == "within"


def test_a_difference_at_the_margin_is_left_open() -> None:
    found = level(worse=0.03)
    assert found.verdict == "undecided"
    assert "success of harvested and dedicated: undecided" in found.reason


def test_too_few_cut_turns_judge_nothing() -> None:
    assert (level(cut=1).verdict, level(cut=1).reason) == ("not judged", "320 of 500 turns were cut")


def test_too_few_episodes_judge_nothing() -> None:
    found = level(num_groups=300)
    assert (found.verdict, found.reason) == ("not judged", "harvested has 4800 of 5000 episodes")
    assert judge({"dedicated": fleet(0)}).reason == "harvested has 0 of 5000 episodes"


def test_a_mean_gradient_lost_in_noise_is_left_open() -> None:
    found = level(scale=0.0)
    assert found.pairs["harvested", "dedicated"]["gradient_cosine"].verdict == "undecided"
    assert found.verdict != "equivalent"


def test_groups_that_were_dropped_show_in_success() -> None:
    groups = {name: fleet(seed, cut=4 * (name == "harvested")) for seed, name in enumerate(FLEETS)}
    groups["harvested"] = [
        one for one in fleet(9, cut=4, num_groups=430) if one.board > 1
    ]  # the two hardest never came
    found = judge(groups, num_draws=400)
    assert found.pairs["harvested", "dedicated"]["success"].verdict == "outside"


def test_total_variation_is_the_mean_over_cells() -> None:
    ours, other = np.array([[10, 0, 0, 0, 5, 5, 0, 0]]), np.array([[0, 10, 0, 0, 5, 5, 0, 0]])
    assert total_variation(ours.astype(float), other.astype(float)) == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.03, 0.03, "within"),
        (-0.031, 0.0, "undecided"),
        (0.031, 0.05, "outside"),
        (-0.05, -0.031, "outside"),
    ],
)
def test_an_interval_lies_within_outside_or_across(low: float, high: float, verdict: str) -> None:
    assert Figure(value=0.0, low=low, high=high, margin=(-0.03, 0.03)).verdict == verdict


def test_a_group_survives_its_file() -> None:
    one = replace(fleet(0)[0], gradient=np.array([1.5, -2.25]))
    found = Group.from_json(json.loads(json.dumps({**one.to_json(), "level": "half"})))
    assert (found.gradient.tolist(), replace(found, gradient=one.gradient)) == ([1.5, -2.25], one)


def test_the_bar_names_a_margin_for_every_figure() -> None:
    names = set(level().pairs["harvested", "dedicated"])
    assert names == set(BAR.margins)
    assert _has_room(list(BAR.margins.values()))


def _has_room(margins: Sequence[tuple[float, float]]) -> bool:
    return all(low < high for low, high in margins)
