"""Activation checkpointing runs a model in training mode: whatever it draws there has to be switched off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rose.errors import ConfigError
from rose.train import model as policy_model
from rose.train.model import PolicyModel

SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDER = SHAPE | {"intermediate_size": 64, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}


def policy_of(folder: Path, family: str, settings: dict[str, Any]) -> PolicyModel:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).save_pretrained(folder)
    return PolicyModel(
        folder, policy_dtype="float32", compute_dtype="float32", device="cpu", activation_checkpointing=True
    )


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("starcoder2", WIDER | {"residual_dropout": 0.3, "embedding_dropout": 0.3, "attention_dropout": 0.3}),
        ("opt", SHAPE | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.3, "layerdrop": 0.5}),
        ("mixtral", WIDER | {"num_local_experts": 4, "router_jitter_noise": 0.5}),
        ("falcon", SHAPE | {"hidden_dropout": 0.3, "attention_dropout": 0.3}),
    ],
)
def test_nothing_is_drawn_at_random(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    model = policy_of(tmp_path, family, settings).computing
    assert model.training
    ids_BT = torch.arange(3, 33).unsqueeze(0)
    first, again = (model(input_ids=ids_BT, use_cache=False).logits for _ in range(2))
    assert torch.equal(first, again)
    assert torch.allclose(first, model.eval()(input_ids=ids_BT, use_cache=False).logits, atol=1e-5)


def test_a_model_that_still_draws_is_refused_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_model, "_silence_dropout", lambda model: None)
    settings = WIDER | {"embedding_dropout": 0.3}
    with pytest.raises(ConfigError, match=r"activation_checkpointing: .*\(starcoder2\) draws at random"):
        policy_of(tmp_path, "starcoder2", settings)
