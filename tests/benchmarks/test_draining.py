"""Moves home while a job drains: what meets the bar."""

from __future__ import annotations

import pytest

from benchmarks.sim import draining
from benchmarks.sim.draining import ENDS_WITH_THE_LONGEST, EQUAL, JUDGED, SEEDS, Rows, conclude


def rows(**changed: float) -> Rows:
    """Gains of 1.02 everywhere (harm of 1 over 1.02 in the loads), each a little other by seed; ``changed``: by case."""
    made: Rows = {}
    for seed in SEEDS:
        noise = 1.0 + 0.001 * (seed % 3)
        for case in (*JUDGED, *(f"equal.{size}" for size in EQUAL)):
            gain = changed.get(case.replace(".", "_"), 1.02)
            made.setdefault(case, {})[str(seed)] = {"2": 100.0 * gain * noise, "16": 100.0}
        for metric in draining.METRICS:
            harm = changed.get(metric, 0.98)
            made.setdefault("loads", {}).setdefault(str(seed), {}).update(
                {f"2.{metric}.A.0": 10.0, f"16.{metric}.A.0": 10.0 * harm * noise}
            )
    return made


def test_what_holds_everywhere_meets_the_bar() -> None:
    found = conclude(rows())

    assert found["bar_met"]
    assert found[f"{JUDGED[0]}.gain"] == pytest.approx(1.021, abs=1e-3)
    assert found["all_cells.gain_low"] > 1.02


@pytest.mark.parametrize(
    "changed",
    [{ENDS_WITH_THE_LONGEST[0]: 0.999}, {"equal_8": 0.985}, {"mean_s": 1.012}, {"p90_s": 1.012}],
    ids=lambda changed: next(iter(changed)),
)
def test_one_case_that_loses_misses_it(changed: dict[str, float]) -> None:
    assert not conclude(rows(**changed))["bar_met"]


def test_a_longer_makespan_of_the_loads_is_shown_and_not_judged() -> None:
    found = conclude(rows(makespan_s=1.05))

    assert found["bar_met"]
    assert found["loads.makespan_s"] > 1.05


def test_a_run_that_does_not_end_leaves_its_case_without_a_figure() -> None:
    endless = rows()
    endless["equal.4"][str(SEEDS[0])]["16"] = float("nan")
    found = conclude(endless)

    assert "equal.4.gain" not in found
    assert not found["bar_met"]
