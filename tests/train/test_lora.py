"""LoRA: only adapters move, what is published is what PEFT itself would merge, and the rest of a trainer's promises hold for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rose.errors import ConfigError, TrainError
from rose.train import checkpoint as checkpoints
from rose.train.adapter import LoraParams
from rose.train.batch import TrainingSequence, samples_of
from rose.train.loss import LossParams, kl_estimate
from rose.train.model import Dtype
from rose.train.trainer import TorchTrainer, TrainerParams
from rose.weights.publisher import WeightPublisher
from rose.weights.stores import open_store
from tests.train.local_run import assert_applied_once, run
from tests.train.traces import random_batch
from tests.train.world import World, running_world

pytest.importorskip("peft")

LORA = LoraParams(rank=4, alpha=8.0, seed=5)
PARAMS = TrainerParams(
    learning_rate=1e-2, minibatch_sequences=8, num_epochs=2, policy_dtype="float32", lora=LORA
)


def samples(seed: int) -> list[TrainingSequence]:
    return [one for trace in random_batch(seed) for one in samples_of(trace, vocab_size=320, max_tokens=1024)]


def held(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    """What engines are to hold."""
    return {name: tensor.detach().clone() for name, tensor in trainer.module.named_parameters()}


@pytest.fixture
def world(tmp_path: Path, policy_model: Path) -> Iterator[World]:
    with running_world(tmp_path, policy_model) as world:
        yield world


def test_training_begins_with_the_model_itself(policy_model: Path) -> None:
    whole = TorchTrainer(policy_model, replace(PARAMS, lora=None))
    adapted = TorchTrainer(policy_model, PARAMS)
    for left, right in zip(whole.log_probs(samples(1)), adapted.log_probs(samples(1)), strict=True):
        assert torch.allclose(left, right, atol=1e-6)
    assert held(whole).keys() == held(adapted).keys()
    assert all(torch.equal(tensor, held(adapted)[name]) for name, tensor in held(whole).items())


def test_only_linear_layers_move_and_by_a_small_rank(policy_model: Path) -> None:
    trainer = TorchTrainer(policy_model, PARAMS)
    before = held(trainer)
    trainer.step(samples(2))
    moved = {name: now - before[name] for name, now in held(trainer).items()}
    for name, change in moved.items():
        if "proj" in name:
            assert 1 <= int(torch.linalg.matrix_rank(change.double(), rtol=1e-4)) <= 4, name
        else:
            assert not change.any(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_model_is_the_trained_one_without_its_adapters(policy_model: Path, dtype: Dtype) -> None:
    """No second one is held for a KL penalty, and what the first says stays the same while adapters move."""
    params = replace(PARAMS, policy_dtype=dtype, loss=LossParams(kl_weight=0.1))
    trainer = TorchTrainer(policy_model, params)
    first = TorchTrainer(policy_model, replace(params, lora=None)).log_probs(samples(4))
    assert trainer.step(samples(3)).kl_reference == 0.0
    now = trainer.log_probs(samples(4))
    told = trainer.step(samples(4)).kl_reference
    assert told > 1e-4
    assert told == pytest.approx(float(kl_estimate(torch.cat(now), torch.cat(first), "k3").mean()), rel=1e-3)
    assert trainer._reference is None


def test_what_is_merged_is_what_the_trainer_computes_with(policy_model: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(policy_model, PARAMS)
    trainer.step(samples(3))
    trainer.export(tmp_path / "model")
    served = TorchTrainer(tmp_path / "model", replace(PARAMS, lora=None))
    for left, right in zip(trainer.log_probs(samples(3)), served.log_probs(samples(3)), strict=True):
        assert torch.allclose(left, right, atol=2e-5)


def test_in_bf16_engines_hold_the_merged_weights_rounded_once(policy_model: Path) -> None:
    trainer = TorchTrainer(policy_model, replace(PARAMS, policy_dtype="bfloat16"))
    exact = TorchTrainer(policy_model, PARAMS)
    base = held(trainer)
    assert all(tensor.dtype == torch.bfloat16 for tensor in base.values())
    assert all(torch.equal(tensor, held(exact)[name].bfloat16()) for name, tensor in base.items())
    trainer.step(samples(3))
    changed = [
        float((now != base[name]).float().mean()) for name, now in held(trainer).items() if "proj" in name
    ]
    assert max(changed) > 0.1


def test_peft_reads_the_adapter_and_merges_the_same(policy_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = TorchTrainer(policy_model, PARAMS)
    trainer.step(samples(4))
    trainer.export(tmp_path / "model")

    folder = tmp_path / "model-adapter"
    assert {path.name for path in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    base = AutoModelForCausalLM.from_pretrained(policy_model, dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(base, str(folder)).merge_and_unload()  # pyright: ignore
    theirs = dict(merged.named_parameters())
    for name, ours in held(trainer).items():
        assert torch.allclose(ours, theirs[name], atol=1e-6), name


def test_a_checkpoint_holds_the_adapter_alone_and_a_resume_is_exact(
    policy_model: Path, tmp_path: Path
) -> None:
    steady = TorchTrainer(policy_model, PARAMS)
    steady.step(samples(5))
    path = checkpoints.save(steady.capture(attempt=1, version=1, consumed={}), tmp_path)
    after_one = held(steady)
    steady.step(samples(6))

    (file,) = path.glob("*.safetensors")
    assert all(".lora_" in name for name in load_file(file))

    resumed = TorchTrainer(policy_model, PARAMS)
    resumed.restore(checkpoints.load(path))
    assert all(torch.equal(tensor, held(resumed)[name]) for name, tensor in after_one.items())
    resumed.step(samples(6))
    assert all(torch.equal(tensor, held(resumed)[name]) for name, tensor in held(steady).items())


@pytest.mark.parametrize(
    ("held_by", "asked", "field", "message"),
    [
        (None, LORA, "trainer.lora.rank", r"is 4, and .*step-000000\.1 holds the whole model \(set it to 0 "),
        (LORA, None, "trainer.lora.rank", r"is 0, and .* holds adapters of rank 4 \(set it to 4 "),
        (LORA, replace(LORA, rank=2), "trainer.lora.rank", r"is 2, and .* adapters of rank 4 \(set it to 4 "),
        (
            replace(LORA, targets=("q_proj", "v_proj")),
            replace(LORA, targets=("q_proj",)),
            "trainer.lora.targets",
            r"are not those of .*, whose adapters are in q_proj, v_proj \(",
        ),
    ],
)
def test_a_checkpoint_of_other_adapters_names_the_setting_and_a_way_out(
    policy_model: Path,
    tmp_path: Path,
    held_by: LoraParams | None,
    asked: LoraParams | None,
    field: str,
    message: str,
) -> None:
    first = TorchTrainer(policy_model, replace(PARAMS, lora=held_by))
    path = checkpoints.save(first.capture(attempt=1, version=0, consumed={}), tmp_path)
    other = TorchTrainer(policy_model, replace(PARAMS, lora=asked))
    before = held(other)
    with pytest.raises(TrainError, match=message) as caught:
        other.restore(checkpoints.load(path))
    assert caught.value.field == field
    assert "another output_dir to begin anew" in str(caught.value.fix)
    assert all(torch.equal(tensor, before[name]) for name, tensor in held(other).items())


def test_adapters_of_another_base_are_refused_and_the_same_base_is_known_elsewhere(
    policy_model: Path, tmp_path: Path
) -> None:
    """Of the same shapes: nothing else would notice, and what is merged would be a model that nobody trained."""
    trainer = TorchTrainer(policy_model, PARAMS)
    trainer.step(samples(5))
    path = checkpoints.save(trainer.capture(attempt=1, version=1, consumed={}), tmp_path)

    moved = shutil.copytree(policy_model, tmp_path / "moved")
    TorchTrainer(moved, PARAMS).restore(checkpoints.load(path))
    weights = load_file(moved / "model.safetensors")
    save_file(
        {name: 1.01 * tensor for name, tensor in weights.items()},
        moved / "model.safetensors",
        {"format": "pt"},
    )
    other = TorchTrainer(moved, PARAMS)
    before = held(other)
    with pytest.raises(TrainError, match=r"model: .*step-000001\.1 .* another base .*moved.*output_dir"):
        other.restore(checkpoints.load(path))
    assert all(torch.equal(tensor, before[name]) for name, tensor in held(other).items())

    older = replace(checkpoints.load(path), base="")  # from before it was recorded
    other.restore(older)
    assert other.step_index == 1


def test_a_layer_that_is_not_there_is_named(policy_model: Path) -> None:
    lora = replace(LORA, targets=("nowhere_proj",))
    with pytest.raises(ConfigError, match="nowhere_proj") as caught:
        TorchTrainer(policy_model, replace(PARAMS, lora=lora))
    assert caught.value.field == "trainer.lora.targets"


def test_versions_have_the_names_of_the_base_and_what_has_changed_travels(
    policy_model: Path, tmp_path: Path
) -> None:
    whole = TorchTrainer(policy_model, replace(PARAMS, lora=None, policy_dtype="bfloat16"))
    adapted = TorchTrainer(policy_model, replace(PARAMS, policy_dtype="bfloat16", learning_rate=1e-6))
    publishers = [
        WeightPublisher(one.module, open_store(str(tmp_path / name)), "run", 1)
        for name, one in (("whole", whole), ("adapted", adapted))
    ]
    first = [publisher.publish(0) for publisher in publishers]
    assert dict(first[0].state) == dict(first[1].state)  # the same bits under the same names

    adapted.step(samples(7))
    second = publishers[1].publish(1)
    assert second.kind == "delta"
    assert dict(second.state).keys() == dict(first[0].state).keys()
    assert 0 < second.bytes_sent < second.bytes_dense / 2


async def test_engines_sample_from_what_adapters_are_merged_to(world: World) -> None:
    """A whole job: versions by their usual names, and engine and trainer as near as rounding leaves them."""
    settings = {"lora": {"rank": 4}, "learning_rate": 3e-3, "fine_tuning_steps": 0}
    script, config, result = await run(world, {1: "kill_trainer"}, num_steps=4, trainer=settings)
    assert (result.num_steps, result.attempt) == (4, 2)
    assert_applied_once(world, config)
    versions = [load_file(path) for path in sorted(world.versions.glob("*.safetensors"))]
    assert all(one.keys() == versions[0].keys() for one in versions)
    assert any(not torch.equal(versions[0][name], versions[-1][name]) for name in versions[0])
    on_policy = [record for record in script.records if record["lag_max"] == 0]
    assert on_policy
    assert all(record["mismatch_kl"] < 1e-3 for record in on_policy)
