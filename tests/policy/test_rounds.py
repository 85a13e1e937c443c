"""How many rollout steps follow one of production's."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.policy.rounds import CALM, RoundParams, Rounds


def rounds_of(most: int = 8, tpot_share: float = 0.5) -> Rounds:
    return Rounds(params=RoundParams(most=most, tpot_share=tpot_share), slo_tpot_s=0.1)


def test_as_many_steps_as_the_slack_holds_and_always_one() -> None:
    rounds = rounds_of()
    assert rounds.fit(slack_s=0.035, step_s=0.01) == 3
    assert rounds.fit(slack_s=0.005, step_s=0.01) == 1  # admission has let it begin
    assert rounds.fit(slack_s=math.inf, step_s=0.01) == 8
    assert rounds_of(most=1).fit(slack_s=math.inf, step_s=0.01) == 1


def test_a_slow_request_halves_them_and_a_row_of_quick_ones_brings_one_back() -> None:
    rounds = rounds_of()
    rounds.served(0.051)
    assert rounds.steps == 4
    for _ in range(CALM - 1):
        rounds.served(0.05)
    rounds.served(0.2)
    assert rounds.steps == 2  # the row began anew
    for _ in range(CALM):
        rounds.served(0.01)
    assert rounds.steps == 3
    assert rounds.fit(slack_s=math.inf, step_s=0.01) == 3


def test_they_stay_between_one_and_the_most() -> None:
    rounds = rounds_of(most=4)
    for _ in range(10 * CALM):
        rounds.served(0.01)
    assert rounds.steps == 4
    for _ in range(10):
        rounds.served(9.0)
    assert rounds.steps == 1


def test_production_without_a_limit_gives_no_feedback() -> None:
    rounds = Rounds(params=RoundParams(most=4), slo_tpot_s=0.0)
    rounds.served(1e9)
    assert rounds.steps == 4


@pytest.mark.parametrize(
    ("params", "field"),
    [({"most": 0}, "most"), ({"tpot_share": 0.0}, "tpot_share"), ({"tpot_share": 1.1}, "tpot_share")],
)
def test_what_is_out_of_range_is_refused(params: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RoundParams(**params)
    assert caught.value.field == field
