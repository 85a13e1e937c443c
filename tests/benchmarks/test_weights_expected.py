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


def test_every_term_depends_on_what_the_code_depends_on() -> None:
    assert set(terms()) == set(expected.TERMS)
    assert changed(terms(), terms(gbps=10)) == {"wire"}
    assert changed(terms(), terms(threads=1)) == {"pull", "decode", "stage"}
    assert changed(terms(), terms(replace(MODEL, trainer_ranks=1))) == {"publish"}
    assert changed(terms(), terms(replace(MODEL, engine_ranks=4))) == {"stage", "pause"}
    assert changed(terms(), terms(replace(MODEL, billions=1.0))) == set(expected.TERMS) - {"fixed"}


def test_the_way_to_the_node_takes_as_long_as_its_slowest_part_and_the_last_object() -> None:
    by_term = terms(gbps=10)
    sent_gb = expected.sent_gigabytes(MODEL, expected.measured()[0])
    slower_link = by_term | {"wire": 1000.0}  # 500 s on each side of the relay
    rest = sum(by_term[name] for name in ("fixed", "decode", "file", "stage", "pause"))
    assert rest + 500 < expected.total(slower_link, sent_gb) < rest + 500 + 20
    assert expected.total(by_term, sent_gb) < sum(by_term.values())
    one_object = expected.total(by_term, expected.BUCKET_GB / 2)
    assert one_object == pytest.approx(sum(by_term.values()))  # nothing is beside anything


def test_ranks_share_the_threads_that_stage() -> None:
    alone, eight = (terms(replace(MODEL, engine_ranks=ranks), threads=32) for ranks in (1, 8))
    whole = [terms(replace(MODEL, engine_ranks=ranks), threads=1) for ranks in (1, 8)]
    assert alone["stage"] == pytest.approx(whole[0]["stage"] / 32)
    assert eight["stage"] == pytest.approx(whole[1]["stage"] / 4)


def test_more_engine_ranks_do_not_divide_staging_by_their_number() -> None:
    alone, eight = (terms(replace(MODEL, engine_ranks=ranks), threads=1) for ranks in (1, 8))
    assert alone["stage"] / 8 < eight["stage"] <= alone["stage"]
    assert eight["pause"] == pytest.approx(alone["pause"] / 8)


def test_the_page_has_the_table_that_the_committed_results_give() -> None:
    page = PAGE.read_text()
    for line in expected.lines():
        assert line in page
