"""One tiny policy model for the whole folder, made once per run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rose.demo.models import POLICY, ensure_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The tensors here are small: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def policy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy smaller than the demo's: what is tested here does not depend on its size."""
    recipe = replace(POLICY, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=2, num_kv_heads=1)
    return ensure_model(recipe, tmp_path_factory.mktemp("models"), seed=0)


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Ray's directory is made.  Short, because Unix sockets live in it, and ours alone."""
    path = Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)
