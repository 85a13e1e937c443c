"""Two FSDP2 ranks over gloo equal one: in gradients, in weights, in checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rose.train.model import _shard, load_module
from tests.engine_launcher import free_port
from tests.train.rank_main import run_steps

pytestmark = pytest.mark.timeout(200)


def run_ranks(model_path: Path, out: Path, world_size: int, *arguments: str) -> None:
    """One process per rank, as any launcher of torch programs starts them."""
    port = str(free_port())
    processes = []
    for rank in range(world_size):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.train.rank_main", str(model_path), str(out), *arguments]
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    for process in processes:
        _, error = process.communicate(timeout=180)
        assert process.returncode == 0, error[-3000:]


@pytest.fixture(scope="module")
def both(policy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same two steps on one rank and on two."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    run_steps(policy_model, one)
    run_ranks(policy_model, two, 2)
    return one, two


def test_gradients_of_two_ranks_equal_those_of_one(both: tuple[Path, Path]) -> None:
    """Of every update.  The norm would hide a wrong divisor under AdamW, whose step does not depend on the scale."""
    one, two = (load_file(folder / "gradients.safetensors") for folder in both)
    assert one.keys() == two.keys()
    assert len(one) > 20
    for name, gradient in one.items():
        largest = float(gradient.abs().max())
        assert torch.allclose(gradient, two[name], atol=2e-5 * largest + 1e-9, rtol=1e-3), name


def test_weights_and_reports_of_two_ranks_equal_those_of_one(both: tuple[Path, Path]) -> None:
    one, two = (load_file(folder / "weights.safetensors") for folder in both)
    for name, weight in one.items():
        assert torch.allclose(weight, two[name], atol=2e-5), name
    reports: list[list[dict[str, Any]]] = [
        json.loads((folder / "reports.json").read_text()) for folder in both
    ]
    for left, right in zip(*reports, strict=True):
        for name in left:
            if name != "seconds":
                assert left[name] == pytest.approx(right[name], rel=1e-3, abs=1e-5), name


def test_a_checkpoint_of_two_ranks_goes_on_on_one(
    both: tuple[Path, Path], policy_model: Path, tmp_path: Path
) -> None:
    """And the other way round: what is stored is whole, whoever computed it."""
    _, two = both
    run_steps(policy_model, tmp_path / "one", resume=two)
    run_ranks(policy_model, tmp_path / "two", 2, str(two))
    left, right = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    start = load_file(two / "weights.safetensors")
    assert any(not torch.equal(start[name], left[name]) for name in start)
    for name, weight in left.items():
        assert torch.allclose(weight, right[name], atol=3e-5), name


def test_gradients_of_bf16_products_are_summed_in_fp32(policy_model: Path, tmp_path: Path) -> None:
    """Two ranks cannot show it: the sum of two bf16 numbers is rounded once, in either type."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        computing: Any = load_module(policy_model).to(torch.bfloat16)
        _shard(computing, computing)
        found = {
            module._get_fsdp_state()._mp_policy.reduce_dtype
            for module in computing.modules()
            if hasattr(module, "_get_fsdp_state")
        }
    finally:
        dist.destroy_process_group()
    assert found == {torch.float32}
