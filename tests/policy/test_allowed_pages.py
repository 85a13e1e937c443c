"""What the rollout engine allows itself, and which parameters are refused."""

from __future__ import annotations

import math
import random

import pytest

from rose.errors import ConfigError
from rose.policy.coserving.rollout import allowed_pages
from rose.policy.lending import LendingParams
from rose.policy.lending_events import (
    Mode,
    Phase,
)
from tests.policy.lending_world import CALM


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (30, "the loan")),
        ({"lend_pages": 50}, (40, "serving still holds them")),
        ({"serving_needed": 85}, (15, "serving claims pages")),
        ({"serving_needed": 500}, (0, "serving claims pages")),
        ({"mode": Mode.OFF}, (0, "mode is off")),
        ({"mode": Mode.OBSERVE}, (0, "mode is observe")),
        ({"mode": 77}, (0, "mode is off")),
        ({"node_age_s": 2.1}, (0, "node agent is silent")),
        ({"node_age_s": math.inf}, (0, "node agent is silent")),
        ({"node_age_s": math.nan}, (0, "node agent is silent")),
        ({"serving_alive": False}, (0, "serving is not there")),
        ({"serving_phase": Phase.STARTING}, (0, "serving is starting")),
        ({"serving_phase": Phase.OFF}, (0, "serving does not share")),
        ({"serving_age_s": 2.1}, (0, "serving is silent")),
        ({"serving_age_s": math.nan}, (0, "serving is silent")),
        ({"has_serving": False, "serving_alive": False}, (30, "no serving on this device")),
        ({"has_serving": False, "node_age_s": 3.0}, (0, "node agent is silent")),
        ({"has_serving": False}, (0, "production lives here, and the agent has no [serving]")),
        ({"lend_pages": -5}, (0, "the loan")),
        ({"serving_reserved": -1000}, (30, "the loan")),
        ({"serving_reserved": 1000}, (0, "serving still holds them")),
        ({"serving_needed": -1000}, (30, "the loan")),
        ({"serving_needed": 60}, (30, "the loan")),  # it holds them by now: asked for once
    ],
)
def test_allowed_pages(change: dict[str, object], expected: tuple[int, str]) -> None:
    assert allowed_pages(**{**CALM, **change}) == expected  # type: ignore[arg-type]


def test_what_both_engines_may_hold_never_exceeds_the_device() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        total = rng.randint(0, 200)
        reserved = rng.randint(0, total)
        pages, _ = allowed_pages(
            **{
                **CALM,
                "serving_total": total,
                "serving_reserved": reserved,
                "lend_pages": rng.randint(-10, 300),
                "serving_needed": rng.randint(-10, 300),
            }  # type: ignore[arg-type]
        )
        assert 0 <= pages <= total - reserved


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_headroom_fraction", 0.0),
        ("grow_step_fraction", 1.5),
        ("hysteresis_fraction", math.nan),
        ("reclaim_deadline_s", 0.0),
        ("cool_down_s", math.inf),
        ("max_cuts", 0),
        ("max_hit_rate_loss", 0.0),
    ],
)
def test_parameters_out_of_range_name_their_field(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        LendingParams(**{name: value})  # type: ignore[arg-type]
