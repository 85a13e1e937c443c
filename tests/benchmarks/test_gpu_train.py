"""The training stages of gpu_check: the whole way of one at a tiny shape on the CPU, what it keeps on the way, and where it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu import common, figures, models, ready, stages, train

GIB = 1 << 30
WITHOUT_GPU = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")


@pytest.fixture
def rehearsing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A rehearsal's environment; its file of figures so far."""
    monkeypatch.setenv(common.REHEARSE, "1")
    monkeypatch.setenv(common.PARTIAL, str(tmp_path / "partial.json"))
    monkeypatch.delenv(common.MEMORY, raising=False)
    return tmp_path / "partial.json"


def test_a_stage_takes_steps_and_publishes_the_version_after_each(
    rehearsing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[dict[str, Any]] = []
    keep = train.keep
    monkeypatch.setattr(train, "keep", lambda found: (kept.append(dict(found)), keep(found)))

    found, details = stages.STAGES["train"].call()

    assert (found["shape"], found["device"], found["offload"], found["encoder"]) == (
        "tiny",
        "cpu",
        False,
        "host",
    )
    assert found["steps"] == train.NUM_STEPS == len(details["steps"]) - 1
    assert {row["kind"] for row in details["steps"]} == {"delta"}
    assert 0 < found["delta_changed_fraction"] < 0.25
    assert 0 < found["delta_bytes"] < 0.25 * found["anchor_bytes"]
    assert found["tokens_per_s"] == pytest.approx(8 * 32 / found["step_s"])
    assert (found["mfu"], "peak is not known" in found["no_mfu"]) == (None, True)
    assert found["weights"] == pytest.approx(train.num_weights(models.TINY), rel=0.01)
    assert found["peak_host_gib"] > 0
    assert "peak_device_gib" not in found
    # A call that is ended keeps what there was: after loading, after the anchor, after each step.
    assert [one.get("steps") for one in kept] == [None, None, *range(1 + train.NUM_STEPS)]
    assert json.loads(rehearsing.read_text()) == found


def test_steps_that_take_too_long_are_fewer(rehearsing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "STEPS_S", 0.0)
    found, _ = stages.STAGES["train"].call()
    assert found["steps"] == 1


# --- where it refuses


@WITHOUT_GPU
@pytest.mark.parametrize("name", ["contract_train", "train", "train_4b"])
def test_without_a_gpu_the_stage_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(ready, "_import", lambda names: {})
    monkeypatch.setattr(
        sys, "argv", ["gpu_check.py", "--dry-run", "--stage", name, "--out", str(tmp_path / "out")]
    )
    for variable in (common.ALLOW_MPS, common.REHEARSE):
        monkeypatch.setenv(variable, "0")
    gpu_check.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert (line.split()[0], "no NVIDIA GPU here" in line) == (name, True)


@WITHOUT_GPU
def test_a_driver_whose_device_torch_does_not_see_fails_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(common.REHEARSE, "0")
    found = gpu_check._answer(stages.STAGES["train_4b"])
    assert (found["state"], found["reason"]) == ("failed", "LedgerError: torch sees no CUDA device")


@pytest.mark.parametrize(
    ("shape", "device_gib", "host_gib", "offload"),
    [
        (models.SMALL, 79, 64, False),
        (models.MEDIUM, 139, 120, False),
        (models.MEDIUM, 79, 120, True),
        (models.MEDIUM, 16, 500, None),
        (models.MEDIUM, 79, 64, None),
        (models.MEDIUM, 139, 32, None),
    ],
)
def test_what_does_not_fit_on_the_device_goes_to_the_host_or_is_skipped(
    shape: models.Shape, device_gib: int, host_gib: int, offload: bool | None
) -> None:
    def ask() -> bool:
        return train.offloads(shape, device_gib * GIB, host_gib * GIB)

    if offload is not None:
        assert ask() is offload
        return
    with pytest.raises(common.Skip, match=f"qwen3-4b wants .*; {device_gib} and {host_gib} are free"):
        ask()


def test_all_training_stages_fit_into_one_call() -> None:
    names = ("contract_train", "train", "train_4b")
    assert sum(stages.STAGES[name].needs_s for name in names) < gpu_check.UNTIL_S - gpu_check.CLOSE_S
    # Loading and publishing beside the steps: the stage ends by itself before it is ended.
    assert 0.5 * stages.STAGES["train_4b"].limit_s > train.STEPS_S


# --- what its figures are


def test_the_shapes_are_those_of_the_published_models() -> None:
    assert train.num_weights(models.SMALL) == pytest.approx(596e6, rel=0.001)
    assert train.num_weights(models.MEDIUM) == pytest.approx(4.022e9, rel=0.001)


ROUND = models.Shape(
    name="round", family="qwen3", hidden_size=10, intermediate_size=20, num_layers=2,
    num_heads=2, num_kv_heads=1, head_size=5, vocab_size=100,
)  # fmt: skip
"""900 weights a layer: 300 of attention, 600 behind it; 1,000 of the output layer."""


def test_the_flop_of_an_update_are_six_a_weight_and_token_and_causal_attention() -> None:
    # One of 4 tokens, 2 sampled: 4 * 1,800 + 2 * 1,000 + 2 layers * 2 heads * 5 * 4**2.
    assert figures.update_flop(ROUND, [(4, 2)]) == 6 * (7200 + 2000 + 320)
    assert figures.update_flop(ROUND, [(4, 2), (4, 2)]) == 2 * figures.update_flop(ROUND, [(4, 2)])


def a_step(step_s: float, **told: float) -> dict[str, float]:
    return {"step_s": step_s, "publish_s": 1.0, "bytes_sent": 50, "density": 0.01, **told}


def test_a_step_is_the_median_behind_one_that_warms_up() -> None:
    rows = [a_step(9.0), a_step(2.0, publish_s=3.0), a_step(4.0, density=0.03), a_step(2.0)]
    found = figures.training(rows, ROUND, [(4, 2)], 57120.0)
    assert (found["first_step_s"], found["steps"], found["step_s"], found["tokens_per_s"]) == (
        9.0,
        3,
        2.0,
        2.0,
    )
    assert found["mfu"] == pytest.approx(57120 / 2.0 / 57120)
    assert (found["delta_publish_s"], found["delta_bytes"], found["delta_changed_fraction"]) == (
        1.0,
        50,
        0.01,
    )
    assert "no_mfu" not in found
    assert figures.training(rows[:1], ROUND, [(4, 2)], None) == {"first_step_s": 9.0, "steps": 0}


def test_a_device_of_which_no_peak_is_known_has_no_mfu_and_says_so() -> None:
    found = figures.training(
        [a_step(1.0), a_step(1.0)], ROUND, [(4, 2)], figures.BF16_FLOP_S.get("Unheard of")
    )
    assert (found["mfu"], found["no_mfu"]) == (None, "the device's bf16 peak is not known here")
