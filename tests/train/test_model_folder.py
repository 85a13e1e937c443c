"""What can be seen to be wrong with a model folder by the headers of its files, before anything is started."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose.errors import ConfigError
from rose.train.loop import check_job
from rose.train.train_config import TrainConfig
from rose.train.workers import Parts
from tests.train.file_publisher import file_publisher


def job(folder: Path, **trainer: Any) -> TrainConfig:
    table = {"model": folder, "weights": {"directory": folder}, "trainer": {"learning_rate": 1e-3, **trainer}}
    return TrainConfig.model_validate(table)


def saved_in(dtype: torch.dtype, policy_model: Path, folder: Path) -> Path:
    """The policy model's folder again, its weights in ``dtype``."""
    shutil.copytree(policy_model, folder)
    weights = load_file(folder / "model.safetensors")
    converted = {name: tensor.to(dtype) for name, tensor in weights.items()}
    save_file(converted, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("dtype", "policy_dtype", "message"),
    [
        (torch.float16, "bfloat16", r"model: .* is in F16, .* in BF16 .*save it in bfloat16 first\)$"),
        (
            torch.float32,
            "bfloat16",
            r"in bfloat16 first, or trainer\.policy_dtype = float32 and engines with --dtype float32",
        ),
        (torch.bfloat16, "float32", r"model: .* is in BF16, .* in F32 .*trainer\.policy_dtype = bfloat16"),
    ],
)
def test_a_folder_in_another_type_than_what_is_published_is_refused(
    policy_model: Path, tmp_path: Path, dtype: torch.dtype, policy_dtype: str, message: str
) -> None:
    """Its engines would refuse every version: they hold the folder's own types."""
    folder = saved_in(dtype, policy_model, tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        check_job(job(folder, policy_dtype=policy_dtype))


def test_who_publishes_otherwise_may_hold_any_type(policy_model: Path, tmp_path: Path) -> None:
    folder = saved_in(torch.float16, policy_model, tmp_path / "model")
    check_job(job(folder), Parts(make_publisher=file_publisher))


def test_a_folder_in_the_type_that_is_published_is_taken(policy_model: Path, tmp_path: Path) -> None:
    check_job(job(policy_model))
    check_job(job(saved_in(torch.float32, policy_model, tmp_path / "model"), policy_dtype="float32"))
