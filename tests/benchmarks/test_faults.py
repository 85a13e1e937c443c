"""The plan and the verdicts of the fault matrix and of the conformance matrix; the engines are in tests/plugin/test_faults_engine.py."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import conformance, faults
from benchmarks.faults import FILES, PROCESSES, Case, Found, plan, summarise
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Phase, ServingLease
from rose.policy.compat import UNLISTED, row
from tests.pair.memory import TOTAL_PAGES
from tests.tiny_shapes import SHAPES

WELL = {"name": "x", "kind": "kill core", "seed": 1, "back_s": 0.1, "promised_s": 0.5, "recovered_s": 1.0}


def test_every_kill_and_stop_is_done_as_often_as_asked_and_every_fault_to_every_file() -> None:
    kinds = Counter(case.kind for case in plan(20, 3))
    for who in PROCESSES:
        assert kinds[f"kill {who}"] == kinds[f"stop {who}"] == 20
    assert kinds["freeze v1"] == kinds["freeze v2"] == 20
    for what in ("unlink", "truncate", "garbage", "chmod"):
        assert [kinds[f"{what} {file}"] for file in FILES] == [3] * len(FILES)
    assert kinds["rmdir"] == kinds["full"] == 3


def test_a_part_of_the_plan_has_something_of_everything() -> None:
    cases = plan(20, 3)
    kinds = {case.kind for case in cases}
    assert {case.kind for case in cases[: len(kinds)]} == kinds


def test_every_file_that_engines_and_agent_share_is_among_those_that_are_spoilt(tmp_path: Path) -> None:
    node = NodeDir(tmp_path / "n")
    for role in ("serving", "rollout"):
        node.chunks_writer(role, 4).close()
        node.rank_writer(role, 0, 4).close()
    for writer in (
        node.node_writer(),
        node.serving_lease_writer(),
        node.serving_board_writer(),
        node.rollout_lease_writer(),
    ):
        writer.close()
    assert {path.name for path in node.path.iterdir()} == set(FILES)


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({}, None),
        ({"errors": ["status 500"]}, "errors"),
        ({"wrong": 1}, "wrong tokens"),
        ({"worst_pages": TOTAL_PAGES + 0.01}, "more than the device"),
        ({"back_s": None}, "not back"),
        ({"recovered_s": None}, "not recovered"),
        ({"back_s": 0.5 + faults.MARGIN_S + 0.01}, "late"),
    ],
)
def test_a_case_is_judged_by_every_limit(change: dict[str, object], failure: str | None) -> None:
    found = Found(**{**WELL, **change})  # type: ignore[arg-type]
    assert found.failures == ([] if failure is None else [failure])
    assert summarise([found])["cases_that_broke_a_limit"] == (failure is not None)


def test_late_is_judged_by_what_the_agent_promises_now() -> None:
    status = {"lending": {"worst_reclaim_s": 4.3}}
    assert faults.promised_s(Case(what="kill", whom="core", number=0), status) == 4.3
    for what, whom in (("stop", "agent"), ("freeze", "v1")):
        assert faults.promised_s(Case(what=what, whom=whom, number=0), status) == 4.3 + faults.SILENCE_S


def test_a_run_that_goes_on_knows_what_was_found_before(tmp_path: Path) -> None:
    done = [Found(**WELL), Found(**{**WELL, "name": "y", "errors": ["e"]})]  # type: ignore[arg-type]
    path = tmp_path / "faults.json"
    faults.save(path, done, ["abc"], argparse.Namespace(seed=1, kills=1, file_faults=1))
    assert faults.load(path) == done


def test_a_cell_is_expected_to_get_what_the_stricter_of_its_rows_allows() -> None:
    assert conformance.SHAPE_ROWS.keys() == SHAPES.keys()
    every = conformance.cells()
    assert len(every) == len(SHAPES) * len(conformance.FEATURES)
    assert all(one is not UNLISTED for cell in every for one in cell.rows)
    expected = {cell.name: cell.expected.label for cell in every}
    assert expected["qwen3 x plain"] == expected["moe x tensor_parallel"] == "elastic"
    assert expected["mla x speculative"] == expected["qwen3 x lora"] == expected["gemma3 x lora"] == "elastic"
    assert expected["qwen3 x offload"] == expected["gemma3 x offload"] == "compute-only"
    for shape in ("gemma3", "gpt_oss"):  # drafts beside several groups have a row of their own
        assert expected[f"{shape} x speculative"] == expected[f"{shape} x draft_model"] == "compute-only"
    assert expected["gemma3 x priority"] == expected["pooling x kv_events"] == "refused"
    assert every[0].name == "qwen3 x plain"
    assert row("decoder").serving == max(one.serving for cell in every for one in cell.rows)


REFUSED = conformance.Words(
    lease=ServingLease(phase=Phase.OFF, row=row("lora").number),
    log=f"ERROR [compat.py] ROSE is off, serving goes on as without it: {row('lora').feature}: why",
    shared=[],
    status={
        "engine": {"waits_for": f"serving does not share: {row('lora').feature}: why"},
        "lending": {"lend_pages": 0},
    },
    held_pages=0,
)


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        ({}, None),
        ({"lease": ServingLease(phase=Phase.READY)}, "its lease says"),
        ({"lease": ServingLease(phase=Phase.OFF, total_pages=9, reserved_pages=9)}, "its lease says"),
        ({"log": "INFO ready"}, "its log does not say"),
        ({"shared": ["serving.chunks"]}, "it writes serving.chunks"),
        ({"status": {**REFUSED.status, "engine": {"waits_for": None}}}, "the agent waits for ''"),
        ({"status": {**REFUSED.status, "lending": {"lend_pages": 7}}}, "the agent lends 7 pages"),
        ({"held_pages": 3}, "a rollout engine holds 3 pages"),
    ],
)
def test_every_sign_of_a_loan_beside_a_refused_engine_is_seen(
    change: dict[str, Any], sign: str | None
) -> None:
    found = conformance.signs_of_a_loan(replace(REFUSED, **change), row("lora"))
    assert [one.startswith(sign or "?") for one in found] == ([] if sign is None else [True])


@pytest.mark.parametrize(
    ("got", "row_of_lease", "says", "row_named", "problem", "found"),
    [
        ("elastic", "lora", "elastic", "lora", "", []),
        (
            "elastic", "decoder", "elastic", "lora", "",
            ["the doctor says it is elastic by lora, not by decoder"],
        ),
        ("refused", "priority", "refused", "priority", "", []),
        ("refused", "priority", "elastic", "lora", "", ["the doctor says elastic of what is refused"]),
        (
            "refused", "priority", "refused", "pooling", "",
            ["the doctor says it is refused by pooling, not by priority"],
        ),
        ("elastic", "decoder", None, None, "no start", ["the doctor says no start of what is elastic"]),
    ],
)  # fmt: skip
def test_the_doctors_word_is_held_against_what_happened(
    got: str, row_of_lease: str, says: str | None, row_named: str | None, problem: str, found: list[str]
) -> None:
    outcome = conformance.Outcome(name="x", expected=got, got=got, row=row_of_lease)
    rows = [{"row": row_named}, {"row": "tensor_parallel"}] if row_named else []
    answer = {"support": says, "rows": rows, "problem": problem, "notes": []}

    assert conformance.against_the_doctor(outcome, answer) == found
    assert (outcome.doctor, outcome.doctor_row) == (says or "", row_named or "")


def test_of_a_state_whose_kind_only_the_start_tells_the_doctor_may_say_just_that() -> None:
    outcome = conformance.Outcome(name="x", expected="refused", got="refused", row="state_kind")
    answer = {"support": "compute-only", "rows": [], "problem": "", "notes": [conformance.NOT_TOLD]}
    assert conformance.against_the_doctor(outcome, answer) == []
    assert conformance.against_the_doctor(outcome, answer | {"notes": []}) != []


def test_cases_have_names_of_their_own() -> None:
    cases = plan()
    assert len({case.name for case in cases}) == len(cases)
    assert Case(what="rmdir", whom="", number=2).name == "rmdir 2"
