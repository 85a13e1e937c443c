"""Models of other families than the toy's, as they lie in their folders: what is trained, what comes out again, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rose.config import validate
from rose.errors import ConfigError
from rose.train.batch import TrainingSequence, samples_of
from rose.train.build import trainer_params
from rose.train.train_config import TrainConfig
from rose.train.trainer import TorchTrainer
from tests.train.traces import random_batch

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "bloom": {"vocab_size": 320, "hidden_size": 32, "n_layer": 2, "n_head": 4},
}


def folder_of(family: str, path: Path) -> Path:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
    for tensor in model.parameters():
        if tensor.dim() > 1:
            tensor.data.normal_(0.0, 0.2)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def trainer_of(folder: Path, **trainer: Any) -> TorchTrainer:
    table = {
        "job": "j",
        "model": str(folder),
        "weights": {"directory": "unused"},
        "trainer": {"learning_rate": 1e-3, **trainer},
    }
    return TorchTrainer(folder, trainer_params(validate(TrainConfig, table)))


def samples(seed: int = 1) -> list[TrainingSequence]:
    return [one for trace in random_batch(seed) for one in samples_of(trace, vocab_size=320, max_tokens=256)]


@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"]])
def test_adapters_of_a_mixture_of_experts_are_in_its_linear_layers(
    tmp_path: Path, targets: list[str]
) -> None:
    trainer = trainer_of(folder_of("mixtral", tmp_path / "m"), lora={"rank": 4, "targets": targets})
    before = {name: one.detach().clone() for name, one in trainer.module.named_parameters()}
    trainer.step(samples())
    trainer.export(tmp_path / "out")
    moved = {name for name, one in trainer.module.named_parameters() if not one.equal(before[name])}
    assert moved
    assert {name.split(".")[-2] for name in moved} <= set(
        targets or ["q_proj", "k_proj", "v_proj", "o_proj", "gate"]
    )


@pytest.mark.parametrize(
    ("family", "target", "why"),
    [
        ("llama", "lm_head", "the output layer"),
        ("llama", "embed_tokens", "Embedding"),
        ("llama", "mlp", "LlamaMLP"),
        ("gpt2", "c_proj", "Conv1D"),
    ],
)
def test_a_target_that_cannot_have_an_adapter_is_refused(
    tmp_path: Path, family: str, target: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        trainer_of(
            folder_of(family, tmp_path / "m"),
            lora={"rank": 4, "targets": [target]},
        )
    assert caught.value.field == "trainer.lora.targets"


def test_a_model_without_linear_layers_gets_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no linear layers"):
        trainer_of(folder_of("gpt2", tmp_path / "m"), lora={"rank": 4})


def test_generation_settings_that_the_library_finds_fault_with_are_exported_as_they_are(
    tmp_path: Path,
) -> None:
    """Folders say how to sample, and not that it is to be done: the library refuses to write that."""
    folder = folder_of("llama", tmp_path / "m")
    settings = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    trainer = trainer_of(folder)
    trainer.step(samples())
    trainer.export(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == settings
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_folder_that_lacks_a_tensor_is_not_trained_from_random_numbers(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj") as caught:
        trainer_of(folder)
    assert caught.value.field == "model"


def test_a_file_that_is_torn_or_of_other_shapes_is_named(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        trainer_of(folder)
    (folder / "model.safetensors").write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        trainer_of(folder)


def test_a_model_without_a_longest_context_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bloom has no max_position_embeddings"):
        trainer_of(folder_of("bloom", tmp_path / "m"))


def test_what_the_page_calls_a_formula_as_published_changes_no_rate(tmp_path: Path) -> None:
    """Half of the groups succeed as a whole: a guard that is on would make a shorter step."""
    import tomllib

    page = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text()
    block = page.split("A formula as published:")[1].split("```toml")[1].split("```")[0]
    settings = tomllib.loads(block)["trainer"]
    trainer = trainer_of(folder_of("llama", tmp_path / "m"), **settings)
    batch = []
    for trace in random_batch(3):
        reward = 1.0 if trace["group_id"] in ("g0", "g1") else trace["reward"]
        batch += samples_of({**trace, "reward": reward}, vocab_size=320, max_tokens=256)
    report = trainer.step(batch)
    assert report.learning_rate == settings["learning_rate"]
    assert report.num_updates > 0
