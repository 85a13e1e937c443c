"""What is learned of an engine's speed from the attempts that it finished."""

from __future__ import annotations

import random

import pytest

from rose.policy.speed import Speed

TOKEN_S, CROWD_S, PREFILL_S = 0.0036, 0.0001, 1.5e-5
"""Of an engine six times as fast as the first guess."""


def attempt(rng: random.Random, speed: Speed, *, num_prefilled: int, slowness: float = 1.0) -> None:
    num_new, crowd = rng.randint(100, 900), rng.uniform(0.0, 30.0)
    seconds = num_new * (TOKEN_S + crowd * CROWD_S) + num_prefilled * PREFILL_S
    speed.observe(
        at_s=0.0,
        seconds=slowness * seconds * rng.uniform(0.9, 1.1),
        num_new=num_new,
        crowd=crowd,
        num_prefilled=num_prefilled,
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_fast_engine_is_known_to_read_fast_before_it_has_read_anything(seed: int) -> None:
    rng, speed = random.Random(seed), Speed()
    for _ in range(40):
        attempt(rng, speed, num_prefilled=20)  # what an observation adds: half a per cent of the time
    assert 0.6 * TOKEN_S < speed.token_s < 1.5 * TOKEN_S
    assert speed.prefill_s < 3 * PREFILL_S  # at first 7 times


@pytest.mark.parametrize("seed", range(3))
def test_a_burst_is_not_taken_for_the_price_of_reading(seed: int) -> None:
    rng, speed = random.Random(seed), Speed()
    for _ in range(200):
        attempt(rng, speed, num_prefilled=20)
    before = speed.prefill_s
    for _ in range(20):
        attempt(rng, speed, num_prefilled=20, slowness=5.0)
    assert speed.token_s > 1.5 * TOKEN_S
    assert speed.prefill_s < 1.2 * before


def test_one_attempt_that_hung_changes_little() -> None:
    rng, speed = random.Random(0), Speed()
    for _ in range(200):
        attempt(rng, speed, num_prefilled=20)
    before = speed.token_s
    attempt(rng, speed, num_prefilled=20, slowness=1e6)
    assert speed.token_s < 1.12 * before


@pytest.mark.parametrize(("seconds", "num_new"), [(0.0, 10), (-1.0, 10), (1.0, 0)])
def test_an_attempt_without_time_or_tokens_teaches_nothing(seconds: float, num_new: int) -> None:
    speed = Speed()
    speed.observe(at_s=5.0, seconds=seconds, num_new=num_new, crowd=0.0, num_prefilled=0)
    assert speed == Speed()
