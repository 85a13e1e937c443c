"""The expected times of large models: what the code divides is divided, what it does not is not, and the page says the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.weight_transfer import weights_expected as expected

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"
MODEL = expected.MODELS["235B"]


def terms(model: expected.Model = MODEL, *, gbps: float = 200, threads: int = 32) -> dict[str, float]:
    live, parts = expected.measured()
    return expected.seconds(model, gbps, threads, live, parts)


def changed(before: dict[str, float], after: dict[str, float]) -> set[str]:
    return {name for name in before if before[name] != pytest.approx(after[name])}


def test_every_term_is_in_the_sum_and_depends_on_what_the_code_depends_on() -> None:
    assert set(terms()) == set(expected.TERMS)
    assert changed(terms(), terms(gbps=10)) == {"wire"}
    assert changed(terms(), terms(threads=1)) == {"pull", "decode"}
    assert changed(terms(), terms(replace(MODEL, trainer_ranks=1))) == {"publish"}
    assert changed(terms(), terms(replace(MODEL, engine_ranks=4))) == {"stage", "pause"}
    assert changed(terms(), terms(replace(MODEL, billions=1.0))) == set(expected.TERMS) - {"fixed"}


def test_more_engine_ranks_do_not_divide_staging() -> None:
    alone, eight = terms(replace(MODEL, engine_ranks=1)), terms(replace(MODEL, engine_ranks=8))
    assert alone["stage"] / 2 < eight["stage"] <= alone["stage"]
    assert eight["pause"] == pytest.approx(alone["pause"] / 8)


def test_the_page_has_the_table_that_the_committed_results_give() -> None:
    page = PAGE.read_text()
    for line in expected.lines():
        assert line in page
