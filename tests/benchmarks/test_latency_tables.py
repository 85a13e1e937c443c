"""Published latency tables beside the simulated engine: where the rows come from, and what is simulated for one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.sim.latency_tables import FIGURES, LLAMA_2, TABLES, Row, conclude, hardware_of, main, run_row
from rose.sim.tables import DEVICES, MODELS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "sim" / "latency_tables"
LONE = Row(
    model="qwen3-8b", gpus=1, users=1, prompt=4096, output=101, first_ms=1.0, token_ms=1.0, tokens_s=1.0
)
TABLE = dataclasses.replace(TABLES["silybench_h100"], chunk_tokens=8192, requests=3, at_least=1, text="")


def test_every_row_is_of_a_stated_source_device_and_model() -> None:
    assert len(TABLES) >= 2
    for table in TABLES.values():
        assert table.source.startswith("https://")
        assert table.version
        assert table.device in DEVICES
        assert table.rows()
        for row in table.rows():
            assert row.model in {**MODELS, **LLAMA_2}
            figures = [value for name in FIGURES if (value := getattr(row, name)) is not None]
            assert figures
            assert min(figures) > 0


def test_a_lone_request_takes_its_steps_on_the_scenario_s_engine() -> None:
    hardware, _ = hardware_of(TABLE, LONE, {})
    steps, pair_s = hardware.serving_steps(), hardware.serving_attention_s()
    first_s = steps.predict(LONE.prompt) + pair_s * LONE.prompt**2 / 2
    # Each of the hundred further tokens attends to one more; their median is the fiftieth's.
    rest_s = [
        steps.base_s + steps.decode_s + (LONE.prompt + 1 + k) * steps.context_token_s for k in range(100)
    ]

    found = run_row(TABLE, LONE, {})

    assert found is not None
    assert found["first_ms"] == pytest.approx(first_s * 1e3)
    assert found["token_ms"] == pytest.approx(sum(rest_s) / 100 * 1e3)
    assert found["tokens_s"] == pytest.approx(101 / (first_s + sum(rest_s)))


def test_hidden_operations_leave_a_decode_step_what_it_reads_and_adds_up() -> None:
    for gpus in (1, 4):
        row = dataclasses.replace(LONE, gpus=gpus)
        added, half, hidden = (
            hardware_of(TABLE, row, {"decode_hidden": share})[0].serving_steps() for share in (0.0, 0.5, 1.0)
        )

        # Over several GPUs what the ranks add up is still there: as much of a prompt's token as of a decoding one's.
        operations_s = added.prefill_token_s - hidden.decode_s
        assert operations_s == pytest.approx(
            2 * MODELS["qwen3-8b"].num_params / (gpus * 0.5 * DEVICES["h100"].flops)
        )
        assert half.decode_s == pytest.approx(added.decode_s - operations_s / 2)
        assert (hidden.decode_s == 0.0) == (gpus == 1)
        assert {steps.prefill_token_s for steps in (added, half, hidden)} == {added.prefill_token_s}
        assert {steps.base_s for steps in (added, half, hidden)} == {added.base_s}


def test_a_static_batch_reads_all_its_prompts_in_one_step() -> None:
    row = dataclasses.replace(LONE, users=8, output=1)
    table = dataclasses.replace(TABLE, chunk_tokens=None, requests=1)
    hardware, _ = hardware_of(table, row, {})
    step_s = hardware.serving_steps().predict(8 * 4096) + 8 * hardware.serving_attention_s() * 4096**2 / 2

    found = run_row(table, row, {})

    assert found is not None
    assert found["first_ms"] == pytest.approx(step_s * 1e3)


def test_a_row_that_does_not_fit_the_memory_is_left_out_and_counted() -> None:
    assert run_row(TABLE, dataclasses.replace(LONE, users=1000), {}) is None
    lines = [
        {"table": name, "figure": "token_ms", "ratio": ratio} for name in TABLES for ratio in (2.0, 1.0, None)
    ]

    summary = conclude(lines)

    for name in TABLES:
        assert summary[f"{name}.left_out"] == 1
        assert (summary[f"{name}.decode.ratio"], summary[f"{name}.decode.meets_bar"]) == (1.5, True)
    assert summary["within_bar"] == len(TABLES)


def test_the_program_runs_and_the_committed_file_has_these_rows(tmp_path: Path) -> None:
    assert main(["--json", str(tmp_path / "f.json")]) == 0

    made = json.loads((tmp_path / "f.json").read_text())
    kept = json.loads(max(RESULTS.glob("*.json")).read_text())
    own = ("simulated", "ratio")
    assert made["details"]["sources"] == kept["details"]["sources"]
    assert [{k: v for k, v in line.items() if k not in own} for line in made["details"]["rows"]] == [
        {k: v for k, v in line.items() if k not in own} for line in kept["details"]["rows"]
    ]
    assert set(made["summary"]) == set(kept["summary"])
