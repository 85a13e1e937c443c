"""The examples that any trainer could copy run as they stand, and a reader has every bit of what they trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rose.auth import Tokens
from rose.lineage import WeightVersion
from rose.signatures import PublicKeys
from rose.weights.stores import open_store
from rose.weights.subscriber import WeightSubscriber

pytest.importorskip("torch")
import torch
from safetensors.torch import load_file

from tests.tiny_model import write_tiny_model
from tests.weights.reading import newest

ROOT = Path(__file__).resolve().parents[2]
RANKS = pytest.mark.parametrize("ranks", [1, 2])


def run(folder: Path, name: str, *args: str, ranks: int = 1, signed: bool = True) -> list[str]:
    """Lines of an example's output.  With several ranks as torchrun starts it."""
    tokens = Tokens.generate()
    tokens.save(folder / "tokens.toml")
    env = {
        **os.environ,
        "ROSE_TOKEN_FILE": str(folder / "tokens.toml") if signed else "",
        "OMP_NUM_THREADS": "1",
    }
    launcher: list[str] = []
    if ranks > 1:  # a port of its own choice, on this machine
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    command = [sys.executable, *launcher, str(ROOT / "examples" / name), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def read(folder: Path) -> tuple[WeightVersion, dict[str, torch.Tensor]]:
    """The store's newest version."""
    trusted = PublicKeys.parse(Tokens.load(folder / "tokens.toml", ["public_key"]).public_key)
    store = open_store(f"file://{folder}/store", trusted=trusted)
    reader = WeightSubscriber(store, "example", folder / "reader")
    try:
        return newest(reader)
    finally:
        reader.close()


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """``expected`` in whatever type the trainer holds it, ``found`` in bf16."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name].view(torch.int16), expected[name].bfloat16().view(torch.int16))
        for name in found
    )


@pytest.mark.parametrize(("signed", "ranks"), [(True, 1), (False, 1), (True, 2)])
def test_the_publishing_example_ends_bit_identical(tmp_path: Path, signed: bool, ranks: int) -> None:
    """Two ranks: FSDP2 cuts the model, and each publishes its own shard."""
    args = [f"file://{tmp_path}/store", "--steps", "2", *([] if signed else ["--unsigned"])]
    lines = run(tmp_path, "publish_weights.py", *args, ranks=ranks, signed=signed)
    assert [line.split()[:2] for line in lines[:3]] == [["1.0", "anchor"], ["1.1", "delta"], ["1.2", "delta"]]
    assert lines[3] == "a reader is at 1.2; its weights are bit-identical"


@RANKS
def test_a_callback_publishes_what_the_trainer_of_transformers_trains(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip(
        "accelerate", reason="accelerate is not installed, and transformers' Trainer needs it"
    )
    before = write_tiny_model(tmp_path / "model", seed=5)
    args = [str(tmp_path / "model"), f"file://{tmp_path}/store", "--steps", "5", "--every", "2"]
    lines = run(tmp_path, "hf_trainer.py", *args, "--output-dir", str(tmp_path / "out"), ranks=ranks)
    shown = [line.split()[:2] for line in lines if line.startswith("1.")]
    assert shown == [["1.0", "anchor"], ["1.2", "delta"], ["1.4", "delta"], ["1.5", "delta"]]
    version, found = read(tmp_path)
    assert version == WeightVersion(1, 5)
    assert same_bits(found, load_file(tmp_path / "out" / "model.safetensors"))
    assert not same_bits(found, before)
