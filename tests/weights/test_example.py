"""The examples that any trainer could copy run as they stand, and a reader has every bit of what they trained."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from rose.auth import Tokens
from rose.lineage import WeightVersion
from rose.signatures import PublicKeys
from rose.weights.stores import open_store
from rose.weights.subscriber import WeightSubscriber

pytest.importorskip("torch")
import torch
from safetensors.torch import load_file

from tests.engine_launcher import fork_module, free_port
from tests.tiny_model import write_tiny_model
from tests.weights.reading import newest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)  # imports for the most part
RANKS = pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.conformance), 2])


def run(
    folder: Path, name: str, *args: str, ranks: int = 1, signed: bool = True, launched: bool = False
) -> list[str]:
    """Lines of an example's output.

    ``launched``: as its user starts it, with several ranks by torchrun, which is imports for the most part; else its processes are forked
    with what torchrun would tell them.
    """
    tokens = Tokens.generate()
    tokens.save(folder / "tokens.toml")
    env = {
        **os.environ,
        "ROSE_TOKEN_FILE": str(folder / "tokens.toml") if signed else "",
        "OMP_NUM_THREADS": "1",
    }
    if not launched:
        return _forked(folder, name, args, env, ranks)
    launcher: list[str] = []
    if ranks > 1:  # a port of its own choice, on this machine
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    command = [sys.executable, *launcher, str(ROOT / "examples" / name), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def _forked(folder: Path, name: str, args: Sequence[str], env: dict[str, str], ranks: int) -> list[str]:
    output, errors = folder / "stdout", folder / "stderr"
    if ranks > 1:
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env |= here | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    module = f"examples.{name.removesuffix('.py')}"
    processes = [
        fork_module(
            module,
            args,
            env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
            {1: output, 2: errors},
        )
        for rank in range(ranks)
    ]
    for process in processes:
        assert process.wait(250) == 0, errors.read_text()[-4000:]
    return output.read_text().splitlines()


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


@pytest.mark.parametrize(
    ("signed", "ranks"), [pytest.param(True, 1, marks=pytest.mark.conformance), (False, 1), (True, 2)]
)
def test_the_publishing_example_ends_bit_identical(tmp_path: Path, signed: bool, ranks: int) -> None:
    """Two ranks: FSDP2 cuts the model, and each publishes its own shard."""
    args = [f"file://{tmp_path}/store", "--steps", "2", *([] if signed else ["--unsigned"])]
    lines = run(tmp_path, "publish_weights.py", *args, ranks=ranks, signed=signed, launched=signed)
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


def megatron() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "megatron_weights", ROOT / "examples" / "megatron_weights.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("tp", "pp", "ranks"), [(2, 2, 4), pytest.param(1, 2, 4, marks=pytest.mark.conformance)]
)
def test_ranks_that_hold_megatrons_tensors_publish_the_checkpoints(
    tmp_path: Path, tp: int, pp: int, ranks: int
) -> None:
    """Expert parallel is what tensor parallel groups and stages leave: 1 and 2."""
    args = [f"file://{tmp_path}/store", "--tp", str(tp), "--pp", str(pp)]
    lines = run(tmp_path, "megatron_weights.py", *args, ranks=ranks)
    assert [line.split()[:2] for line in lines] == [["1.0", "anchor"], ["1.1", "delta"], ["1.2", "delta"]]
    version, found = read(tmp_path)
    assert version == WeightVersion(1, 2)
    toy = megatron()
    assert len(found) == 3 + toy.LAYERS * 8 + 3 + (toy.LAYERS - 1) * (1 + 3 * toy.EXPERTS)
    expected = {name: toy.initial(name, tuple(each.shape)) for name, each in found.items()}
    for _ in range(2):
        expected = {name: each * toy.DECAY for name, each in expected.items()}
    assert same_bits(found, expected)


def test_fused_matrices_are_read_as_megatron_lays_them_out() -> None:
    """Made here by hand: groups of queries, key, value; gate over up; rows beyond the vocabulary are padding."""
    toy = megatron()
    shapes = {"q": (64, 32), "k": (32, 32), "v": (32, 32), "gate": (48, 32), "up": (48, 32)}
    q, k, v, gate, up = (toy.initial(name, shape) for name, shape in shapes.items())
    for tp in range(2):
        groups = [(q[g * 16 :][:16], k[g * 8 :][:8], v[g * 8 :][:8]) for g in (2 * tp, 2 * tp + 1)]
        held = {
            "decoder.layers.1.self_attention.linear_qkv.weight": torch.cat(
                [part for g in groups for part in g]
            ),
            "decoder.layers.1.mlp.experts.linear_fc1.weight1": torch.cat(
                [gate[tp * 24 :][:24], up[tp * 24 :][:24]]
            ),
            "output_layer.weight": torch.zeros(128, 32),
        }
        at = toy.Place(tp=tp, pp=1, ep=1, tp_size=2, pp_size=2, ep_size=2)
        table = toy.checkpoint_tensors(held, at)
        layer = "model.layers.3"
        wholes = {
            f"{layer}.self_attn.{name}_proj.weight": each for name, each in (("q", q), ("k", k), ("v", v))
        }
        wholes |= {
            f"{layer}.mlp.experts.3.{name}_proj.weight": each for name, each in (("gate", gate), ("up", up))
        }
        assert table.keys() == {*wholes, "lm_head.weight"}
        assert table["lm_head.weight"].tensor.shape == ((128, 122)[tp], 32)
        for name, whole in wholes.items():
            parts = table[name] if isinstance(table[name], list) else [table[name]]
            assert sum(part.tensor.shape[0] for part in parts) == whole.shape[0] // 2
            for part in parts:
                assert part.shape == tuple(whole.shape)
                assert torch.equal(part.tensor, whole[part.offset[0] :][: part.tensor.shape[0]])


def test_the_page_quotes_the_function_that_runs() -> None:
    """Of ``docs/weights.md``, for a fused matrix."""
    page = (ROOT / "docs" / "weights.md").read_text()
    quoted = next(block.partition("```")[0] for block in page.split("```python\n") if "q_proj" in block)
    assert quoted.strip() in (ROOT / "examples" / "megatron_weights.py").read_text()
