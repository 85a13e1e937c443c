"""What can be seen to be wrong with a model folder by the headers of its files, before anything is started."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rose.auth import Tokens
from rose.errors import ConfigError
from rose.train.adapter import LoraParams, parameters_of
from rose.train.build import make_publisher
from rose.train.check import check_job
from rose.train.loading import empty_modules, export_module, load_module
from rose.train.model import Dtype, FrozenModel, PolicyModel
from rose.train.model_folder import identity_of
from rose.train.train_config import TrainConfig
from rose.train.workers import Parts
from rose.weights.folder import checkpoint_tensors
from rose.weights.spec import DTYPE_BYTES
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


def test_a_folder_is_known_by_its_weights_and_by_nothing_else(policy_model: Path, tmp_path: Path) -> None:
    folder = saved_in(torch.bfloat16, policy_model, tmp_path / "model")
    known, weights = identity_of(folder), load_file(folder / "model.safetensors")
    assert known == identity_of(policy_model)

    names = sorted(weights)
    for file, part in (("model.safetensors", names[::2]), ("more.safetensors", names[1::2])):
        save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
    (folder / "config.json").write_text("{}")
    assert identity_of(folder) == known

    (folder / "more.safetensors").unlink()
    for name in names[:: len(names) // 4]:
        changed = weights | {name: weights[name] + 1.0}
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        assert identity_of(folder) != known, name
    (folder / "model.safetensors").unlink()
    assert identity_of(folder) == ""


@pytest.mark.parametrize(
    ("files", "taken"),
    [
        ({"tokenizer_config.json": "{}"}, False),
        ({"tokenizer_config.json": '{"chat_template": ""}'}, False),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "tool_use", "template": "x"}]}'}, False),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "x"}]}'}, True),
        ({"tokenizer_config.json": "{}", "chat_template.jinja": "x"}, True),
        ({"tokenizer_config.json": "{}", "tekken.json": "{}"}, True),
    ],
)
def test_a_folder_with_which_no_engine_can_render_a_conversation_is_refused(
    policy_model: Path, tmp_path: Path, files: dict[str, str], taken: bool
) -> None:
    """All environments are conversations: every turn would fail, at the engines."""
    folder = shutil.copytree(policy_model, tmp_path / "model")
    for name, text in files.items():
        (folder / name).write_text(text)
    if taken:
        check_job(job(folder))
        return
    with pytest.raises(ConfigError, match=r"model: .*has no chat template.*chat_template\.jinja") as refused:
        check_job(job(folder))
    assert refused.value.field == "model"


def test_who_publishes_otherwise_may_hold_any_type(policy_model: Path, tmp_path: Path) -> None:
    folder = saved_in(torch.float16, policy_model, tmp_path / "model")
    check_job(job(folder), Parts(make_publisher=file_publisher))


def test_a_folder_in_the_type_that_is_published_is_taken(policy_model: Path, tmp_path: Path) -> None:
    check_job(job(policy_model))
    check_job(job(saved_in(torch.float32, policy_model, tmp_path / "model"), policy_dtype="float32"))


SHAPE = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def saved(family: str, folder: Path, **shape: Any) -> Path:
    """A tiny model of ``family`` with random weights, as transformers saves it in bfloat16."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE, **shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def test_a_mixture_of_experts_is_refused_on_several_ranks(policy_model: Path, tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path / "model", num_local_experts=2, num_experts_per_tok=1)
    message = r"model: .*mixture of experts \(model\.layers\.0\..*trainer\.num_ranks = 1"
    with pytest.raises(ConfigError, match=message):
        empty_modules(folder, torch.bfloat16)
    with pytest.raises(ConfigError, match=message):
        check_job(job(folder, num_ranks=2))
    check_job(job(policy_model, num_ranks=2))


def test_an_export_has_no_list_of_files_that_it_does_not_have(policy_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(policy_model, source)
    for name in ("pytorch_model.bin.index.json", "pytorch_model.bin.index.fp16.json"):
        (source / name).write_text("{}")
    export_module(load_module(policy_model), source, tmp_path / "out", torch.bfloat16)
    assert not list((tmp_path / "out").glob("*.index.*"))
    assert (tmp_path / "out" / "tokenizer.json").is_file()


MIXTURES = {
    "glm4_moe": {
        "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "first_k_dense_replace": 0, "n_shared_experts": 1,
    },
    "minimax_m2": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
"""Of the second, transformers has other names than the folder."""


@pytest.fixture(params=MIXTURES)
def with_fp32(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder in bfloat16 whose routers' corrections are in float32."""
    folder = saved(request.param, tmp_path / "model", **MIXTURES[request.param])
    weights = load_file(folder / "model.safetensors")
    fine = {name: torch.rand(tensor.shape) for name, tensor in weights.items() if "e_score" in name}
    assert fine
    save_file(weights | fine, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_what_the_folder_holds_in_fp32_is_published_in_fp32(with_fp32: Path, tmp_path: Path) -> None:
    """An engine that holds this folder takes a version with just these types."""
    table = {
        "model": with_fp32,
        "weights": {"directory": tmp_path / "store"},
        "trainer": {"learning_rate": 1e-3},
    }
    config, tokens = TrainConfig.model_validate(table), Tokens.generate()
    report = make_publisher(config, tokens, load_module(with_fp32), 1).publish(0)
    held = checkpoint_tensors(with_fp32)
    assert report.bytes_dense == sum(one.num_elements * DTYPE_BYTES[one.dtype] for one in held)


def test_what_the_folder_holds_in_fp32_is_exported_in_fp32(with_fp32: Path, tmp_path: Path) -> None:
    export_module(load_module(with_fp32), with_fp32, tmp_path / "out", torch.bfloat16)
    before, after = (load_file(path / "model.safetensors") for path in (with_fp32, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


ERNIE = {
    "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 0, "moe_num_shared_experts": 1,
}  # fmt: skip
"""Its routers, correction and all, are parameters in float32."""


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["trained", "adapters", "frozen"])
def test_what_the_folder_holds_in_fp32_is_computed_with_in_fp32(
    tmp_path: Path, kind: str, compute_dtype: Dtype
) -> None:
    """As by an engine: rounded routers choose other experts."""
    folder = saved("ernie4_5_moe", tmp_path / "model", **ERNIE)
    weights = load_file(folder / "model.safetensors")
    fine = {name: torch.rand(one.shape) / 3 for name, one in weights.items() if one.dtype == torch.float32}
    assert sorted(name.partition("mlp.")[2] for name in fine) == [
        "gate.weight",
        "moe_statics.e_score_correction_bias",
    ]
    save_file(weights | fine, folder / "model.safetensors", {"format": "pt"})

    types: dict[str, Any] = {"policy_dtype": "bfloat16", "compute_dtype": compute_dtype, "device": "cpu"}
    if kind == "frozen":
        computing = FrozenModel(folder, **types)._policy.model
    else:
        lora = LoraParams(rank=2, alpha=4.0, targets=("q_proj",)) if kind == "adapters" else None
        computing = PolicyModel(folder, **types, lora=lora).computing

    held = {name.rpartition("mlp.")[2]: tensor for name, tensor in parameters_of(computing)[0].items()}
    for name, tensor in fine.items():
        found = held[name.partition("mlp.")[2].replace("moe_statics", "gate.moe_statics")]
        assert torch.equal(found.detach(), tensor), name
    coarse = held["gate_proj.weight" if "gate_proj.weight" in held else "shared_experts.gate_proj.weight"]
    assert torch.equal(coarse.float(), coarse.bfloat16().float())
