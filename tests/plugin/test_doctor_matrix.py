"""Every shape of model x every feature of the conformance matrix: `rose doctor` says of its command line what the table says, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.conformance import SHAPE_ROWS, Cell, cells
from benchmarks.lib.engine_kinds import FEATURES
from rose.policy.compat import Support
from tests.engine_launcher import BASE_ARGS
from tests.pair.pair import PRODUCTION_ARGS
from tests.plugin.ask_doctor import NOT_TOLD, ask
from tests.tiny_shapes import write_shape

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Cell, dict[str, Any]]]:
    """Of all cells, in one process: a few minutes."""
    folder = tmp_path_factory.mktemp("models")
    for shape in SHAPE_ROWS:
        write_shape(folder / shape, shape)
    every = cells()
    args = [[*BASE_ARGS, *PRODUCTION_ARGS, *cell.args(folder / cell.shape)] for cell in every]
    questions = [
        {"role": "serving", "args": [str(folder / cell.shape), *more]}
        for cell, more in zip(every, args, strict=True)
    ]
    return list(zip(every, ask(questions, timeout_s=1100), strict=True))


@pytest.mark.parametrize("feature", FEATURES)
def test_the_doctor_says_of_each_cell_what_the_table_says(
    answers: list[tuple[Cell, dict[str, Any]]], feature: str
) -> None:
    """But where vLLM does not start it, and of a state whose kind only the start tells, where the doctor says that too."""
    some = [(cell, answer) for cell, answer in answers if cell.feature == feature]
    assert len(some) == len(SHAPE_ROWS)
    for cell, answer in some:
        if answer["problem"]:
            assert answer["support"] is None, cell.name
            assert answer["problem"].startswith("vLLM does not start with it"), cell.name
        elif SHAPE_ROWS[cell.shape] == "state_kind" and answer["support"] != "refused":
            assert (answer["support"], answer["notes"]) == ("compute-only", [NOT_TOLD]), cell.name
        else:
            assert answer["support"] == cell.expected.label, cell.name
            names = {one.name for one in cell.rows if one.serving == cell.expected}
            assert answer["support"] == Support.ELASTIC.label or answer["rows"][0]["row"] in names, cell.name
