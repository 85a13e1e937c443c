"""What the arm with foresight knows, and what is concluded of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.sim.foresight import Foresight, Rows, conclude, key_of
from benchmarks.sim.paper_cells import Setting
from rose.sim.scenario import JobSection
from rose.sim.workload import make_script

JOB = JobSection()


def test_what_is_left_is_the_truth_from_the_first_turn_to_the_last() -> None:
    """Of a group that was begun again, too."""
    outputs = make_script(JOB, 7, 3, 1).outputs
    known = Foresight(JOB, 7)

    for name in ("g3.1", "other-g3again.1"):
        assert known.tokens(name, "job") == sum(outputs)
        known.made(name, "job", outputs[0])
        assert known.tokens(name, "job") == max(1, sum(outputs[1:]))


def test_gain_and_reached_are_over_the_same_seeds_and_a_cell_that_lacks_one_says_nothing() -> None:
    """Nor does one with a run in another setting, or whose steps did not end."""
    runs = {
        f"{arm}/{seed}": {"step_s": step_s * (1 + seed / 100)}
        for arm, step_s in (("fixed", 120.0), ("rose", 110.0), ("ceiling", 60.0))
        for seed in (5, 6)
    }
    setting = Setting(system="rose", tensor_parallel=8, tail_fraction=0.1)
    five, six = key_of(setting, 5), key_of(setting, 6)
    other = key_of(replace(setting, cap=512), 6)
    rows: Rows = {
        "whole": {five: 96 * 1.05, six: 96 * 1.06},
        "part": {five: 96.0, other: 96.0},
        "part, stuck": {five: 96.0, six: None},
    }

    found = conclude({name: {"runs": runs} for name in rows}, dict.fromkeys(rows, setting), rows)

    assert found["whole.foresight.gain"] == 1.25
    assert found["whole.foresight.reached"] == 0.25
    assert found["whole.rose.reached"] == pytest.approx(120 / 110 - 1, abs=1e-3)
    assert not [key for key in found if key.startswith("part")]
