"""``rose train --export``: a checkpoint of a run becomes a Hugging Face folder, with nothing started for it."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from typer.testing import CliRunner

from rose.cli import app
from rose.config import load_config, validate
from rose.errors import ConfigError, TrainError
from rose.train import adapter, loading
from rose.train import checkpoint as checkpoints
from rose.train.adapter import LoraParams
from rose.train.batch import samples_of
from rose.train.build import torch_trainer
from rose.train.train_config import TrainConfig
from tests.train.traces import random_batch


def job(folder: Path, model: Path, trainer: str = "") -> Path:
    file = folder / "job.toml"
    file.write_text(
        f'model = "{model}"\noutput_dir = "{folder / "out"}"\n[weights]\ndirectory = "{folder}"\n'
        f"[trainer]\nlearning_rate = 1e-2\n{trainer}"
    )
    return file


def run_of_three_steps(config: TrainConfig) -> list[dict[str, torch.Tensor]]:
    """What was exported after each step; its second is the best."""
    trainer, found = torch_trainer(config), []
    for step in (1, 2, 3):
        samples = [
            one for trace in random_batch(step) for one in samples_of(trace, vocab_size=320, max_tokens=1024)
        ]
        trainer.step(samples)
        path = config.output_dir / "checkpoints"
        checkpoints.save(trainer.capture(attempt=1, version=step, consumed={}), path)
        checkpoints.note_best(path, checkpoints.name_of(step, 1), 0.9 if step == 2 else 0.1, "sampled")
        trainer.export(config.output_dir / f"after-{step}")
        found.append(load_file(config.output_dir / f"after-{step}" / "model.safetensors"))
    return found


@pytest.mark.parametrize("trainer", ["", "[trainer.lora]\nrank = 4\n"])
def test_the_best_and_the_last_checkpoint_become_what_the_trainer_would_have_exported(
    tmp_path: Path, policy_model: Path, trainer: str
) -> None:
    file = job(tmp_path, policy_model, trainer)
    config = load_config(TrainConfig, file)
    after = run_of_three_steps(config)
    for which, step, words in (
        ("best", 2, "step-000002.1, the best (success 0.90)"),
        ("last", 3, "step-000003.1, the last"),
    ):
        done = CliRunner().invoke(app, ["train", "--config", str(file), "--export", which])
        assert done.exit_code == 0, done.output
        assert done.output.splitlines() == [f"exported: {config.output_dir / 'model'}, {words}"]
        exported = load_file(config.output_dir / "model" / "model.safetensors")
        assert exported.keys() == after[step - 1].keys()
        assert all(torch.equal(tensor, after[step - 1][name]) for name, tensor in exported.items())
    assert (config.output_dir / "model" / "tokenizer.json").is_file()
    assert (config.output_dir / "model-adapter").is_dir() == bool(trainer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--export", "best"],
            r"--export: .*checkpoints has none that was noted as the best \(--export last",
        ),
        (["--export", "last"], r"output_dir: there is no checkpoint in .*checkpoints"),
        (["--export", "worst"], "--export: is 'worst', and can be last or best"),
        (["--export", "best", "--check"], "--check: does not go with --export"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(
    tmp_path: Path, policy_model: Path, arguments: list[str], message: str
) -> None:
    done: Any = CliRunner().invoke(app, ["train", "--config", str(job(tmp_path, policy_model)), *arguments])
    with pytest.raises(ConfigError, match=message):
        raise done.exception


def test_checkpoints_of_which_none_can_be_read_are_told_apart_from_none(
    tmp_path: Path, policy_model: Path
) -> None:
    file = job(tmp_path, policy_model)
    config = load_config(TrainConfig, file)
    captured = torch_trainer(config).capture(attempt=1, version=0, consumed={})
    path = checkpoints.save(replace(captured, step=1), config.output_dir / "checkpoints")
    (path / "state.json").write_text("{}")
    done: Any = CliRunner().invoke(app, ["train", "--config", str(file), "--export", "last"])
    assert "step-000001.1: schema" in str(done.exception)


def test_a_disk_that_fills_up_is_told_in_a_line_and_keeps_nothing_of_the_export(
    tmp_path: Path, policy_model: Path
) -> None:
    """A file may have no more than so many bytes here: safetensors says so with an exception of its own."""
    file = job(tmp_path, policy_model)
    config = load_config(TrainConfig, file)
    captured = torch_trainer(config).capture(attempt=1, version=0, consumed={})
    checkpoints.save(replace(captured, step=1), config.output_dir / "checkpoints")
    most = 64 << 10
    command = [sys.executable, "-m", "rose.cli", "train", "--config", str(file), "--export", "last"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
        timeout=550,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert f"{config.output_dir / 'model'} cannot be written: " in done.stderr
    assert done.returncode != 0
    assert sorted(path.name for path in config.output_dir.iterdir()) == ["checkpoints"]


@pytest.mark.parametrize("error", [SafetensorError("I/O error: no space"), OSError(errno.ENOSPC, "no space")])
def test_an_adapter_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(adapter, "save_file", full)
    params = LoraParams(rank=2, alpha=4.0)
    tensors = {"layer.lora_A.weight": torch.zeros(2, 4), "layer.lora_B.weight": torch.zeros(4, 2)}
    with pytest.raises(TrainError, match=r"export: .*adapter cannot be written: .*no space"):
        adapter.write_adapter(tensors, params, tmp_path, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_by_the_system_leaves_nothing_of_the_export_behind(
    tmp_path: Path, policy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(loading.shutil, "copy2", full)
    with pytest.raises(TrainError, match=r"model cannot be written: .*no space"):
        loading.export_module(
            loading.load_module(policy_model), policy_model, tmp_path / "model", torch.bfloat16
        )
    assert list(tmp_path.iterdir()) == []


def test_who_keeps_no_best_cannot_export_it() -> None:
    table = {"model": "m", "weights": {"directory": "w"}, "trainer": {"learning_rate": 1.0}, "export": "best"}
    assert validate(TrainConfig, table).export == "best"
    table["trainer"] = {"learning_rate": 1.0, "guard": {"keep_best": False}}
    with pytest.raises(ConfigError, match=r"export = \"best\" needs trainer\.guard\.keep_best"):
        validate(TrainConfig, table)
