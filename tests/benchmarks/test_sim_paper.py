"""When a claim about draws is decided."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.sim_paper import is_faster, verdict


def row(rose_s: float | None, fixed_s: float | None) -> dict[str, Any]:
    return {"rose": {"step_s": rose_s}, "fixed_sync": {"step_s": fixed_s}}


@pytest.mark.parametrize("seed", range(30))
def test_a_claim_that_is_decided_early_is_what_all_draws_would_have_said(seed: int) -> None:
    rng = random.Random(seed)
    chance = rng.uniform(0.8, 1.0)
    rows = [row(1.0 if rng.random() < chance else 3.0, 2.0) for _ in range(200)]

    wins = sum(is_faster(one, "rose", "fixed_sync") for one in rows)
    holds, after = verdict(rows, "rose", "fixed_sync", 200)

    assert holds == (wins >= 180)
    assert verdict(rows[: after - 1], "rose", "fixed_sync", 200) == (None, after - 1)


def test_twenty_one_losses_refute_and_180_wins_prove_and_less_says_nothing() -> None:
    lost, won = row(3.0, 2.0), row(1.0, 2.0)

    assert verdict([lost] * 21, "rose", "fixed_sync", 200) == (False, 21)
    assert verdict([lost] * 20 + [won] * 179, "rose", "fixed_sync", 200) == (None, 199)
    assert verdict([won] * 180, "rose", "fixed_sync", 200) == (True, 180)


def test_a_step_that_never_ended_is_slower_than_one_that_did() -> None:
    assert is_faster(row(5.0, None), "rose", "fixed_sync")
    assert not is_faster(row(None, 5.0), "rose", "fixed_sync")
    assert not is_faster(row(None, None), "rose", "fixed_sync")
