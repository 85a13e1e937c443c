"""What a server costs with ROSE over without: what counts is servers, and no verdict is below the noise between equal ones."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.coserving.overhead_end import LOUD, MOST, SERVERS, summary


def turns(num_servers: int, cost: float, spread: float, rounds: int = 6) -> dict[str, list[float]]:
    """Seconds: each server has a speed of its own, within ``spread``, and every round another load that all four share."""
    rng = np.random.default_rng(3)
    found: dict[str, list[float]] = {}
    for first in range(0, num_servers, 2):
        load = rng.uniform(1.0, 2.0, rounds)
        for number in (first, first + 1):
            for what, factor in (("stock", 1.0), ("rose", cost)):
                own = 1.0 + spread * rng.uniform(-1.0, 1.0)
                found[f"{what}_{number}"] = (load * own * factor).tolist()
    return found


@pytest.mark.parametrize(("cost", "met"), [(1.0, True), (1.1, False)])
def test_a_cost_above_what_equal_servers_show_is_found(cost: float, met: bool) -> None:
    seconds = turns(SERVERS, cost, spread=0.01)
    found = summary(seconds, seconds)
    assert found["end_ratio"] == pytest.approx(cost, abs=0.015)
    assert found["end_ratio_low"] <= found["end_ratio"] <= found["end_ratio_high"]
    assert found["end_aa_ratio"] == pytest.approx(1.0, abs=0.02)
    assert found["end_limit_met"] is met


def test_the_bar_is_not_below_the_noise() -> None:
    quiet, loud = (turns(SERVERS, 1.0, spread) for spread in (0.0, 0.2))
    assert summary(quiet, quiet)["end_bar"] == MOST
    assert summary(quiet, quiet)["end_limit_met"]
    assert summary(loud, loud)["end_bar"] > LOUD
    assert summary(loud, loud)["end_limit_met"] is None


def test_fewer_servers_give_no_verdict() -> None:
    seconds = turns(2, 1.0, spread=0.0)
    assert summary(seconds, seconds)["end_limit_met"] is None
