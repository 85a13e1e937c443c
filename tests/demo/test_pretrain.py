"""The start of the demo's policy: made once, complete or absent, the same for the same seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from rose.demo.models import PRODUCTION
from rose.demo.pretrain import PLANNER, PretrainParams, ensure_pretrained
from rose.errors import ConfigError
from rose.train.envs.frozenlake import ACTIONS, FrozenLakeParams, show_map
from rose.train.envs.frozenlake_plan import LakePlanFamily, shortest_plan, start_of

SMALL = replace(PLANNER, hidden_size=64, intermediate_size=64, num_heads=1, num_kv_heads=1, head_size=32)
LAKES = FrozenLakeParams(size=4, num_maps=2)
PARAMS = PretrainParams(num_updates=40, batch_size=8, learning_rate=1e-2, careless=0.2)


def share_of_good_moves(folder: Path) -> float:
    """Probability that the model gives to the plan's moves, along the plan."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shares: list[float] = []
    for task in LakePlanFamily(LAKES).tasks():
        rows = task["map"]
        prompt = f"<|user|>{show_map(rows, start_of(rows))}<|end|><|assistant|>"
        plan = [tokenizer.token_to_id(ACTIONS[move]) for move in shortest_plan(rows)]
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids + plan
        with torch.no_grad():
            chances = torch.softmax(model(torch.tensor([ids])).logits[0], -1)
        first = len(ids) - len(plan)
        shares += [float(chances[first + at - 1, token]) for at, token in enumerate(plan)]
    return sum(shares) / len(shares)


def test_it_writes_plans_and_is_made_once(tmp_path: Path) -> None:
    made = ensure_pretrained(SMALL, LAKES, PARAMS, tmp_path)
    written = (made / "model.safetensors").stat().st_mtime_ns

    assert share_of_good_moves(made) > 0.4
    assert ensure_pretrained(SMALL, LAKES, PARAMS, tmp_path) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_same_seed_gives_the_same_weights_and_other_lakes_others(tmp_path: Path) -> None:
    few = replace(PARAMS, num_updates=2)
    first, again = (ensure_pretrained(SMALL, LAKES, few, tmp_path / name) for name in ("a", "b"))
    other = ensure_pretrained(SMALL, replace(LAKES, seed=1), few, tmp_path / "a")

    one, two = (load_file(path / "model.safetensors") for path in (first, again))
    assert first.name == again.name != other.name
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        ensure_pretrained(SMALL, LAKES, PARAMS, tmp_path / "file")


def test_the_planner_s_cache_is_shaped_unlike_production_s() -> None:
    """Two models whose KV layouts agree would hide what co-serving must not mix up."""
    for name in ("hidden_size", "num_layers", "num_heads"):
        assert getattr(PLANNER, name) != getattr(PRODUCTION, name), name
