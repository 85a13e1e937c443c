"""Packed sequences: computed as padded ones, by every model that is allowed, and unseen by their neighbours; all others are refused."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rose.errors import ConfigError
from rose.train.adapter import LoraParams
from rose.train.batch import Minibatch, TrainingSequence, make_minibatch, samples_of
from rose.train.loss import LossParams
from rose.train.model import PolicyModel
from rose.train.packing import PACKED_MODELS, pack_by_length
from rose.train.trainer import TorchTrainer, TrainerParams
from tests.train.traces import random_batch

pytestmark = pytest.mark.timeout(120)

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
EXPERTS |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
EXPERTS |= dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1)
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
LATENT |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
WINDOW = {"sliding_window": 6}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
"""Windows that end inside a sequence, in every second layer."""

MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**EXPERTS, **LATENT},
    "gemma3_text": MIXED,
    "glm4": {},
    "glm4_moe": EXPERTS,
    "llama": {},
    "mistral": WINDOW,
    "mixtral": EXPERTS,
    "olmo2": {},
    "olmo3": MIXED,
    "phi3": {},
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": WINDOW,
}
OTHER_POSITIONS: dict[str, dict[str, Any]] = {
    "llama, linear": {"rope_type": "linear", "factor": 2.0},
    "llama, yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama, llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
CASES = {
    **MODELS,
    **{name: {"rope_parameters": {"rope_theta": 1e4, **told}} for name, told in OTHER_POSITIONS.items()},
}
LENGTHS = (14, 2, 10, 18, 3)
VOCAB = 64


def write_folder(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 256}
    # Of weights as small as usual a random model's attention would say next to nothing.
    told = {**shape, **heads, **special, **sizes, "initializer_range": 0.3, **changes}
    config = AutoConfig.for_model(name.split(",", maxsplit=1)[0], **told)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def with_attention(folder: Path, implementation: str) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attn_implementation": implementation}))
    return folder


def policy_of(folder: Path) -> PolicyModel:
    return PolicyModel(folder, policy_dtype="float32", compute_dtype="float32", device="cpu", packing=True)


@pytest.fixture(scope="module", params=CASES)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    name = request.param
    return policy_of(write_folder(tmp_path_factory.mktemp("model"), name, CASES[name]))


def sequences(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[TrainingSequence]:
    """About the second half of each is sampled."""
    rng = random.Random(seed)
    return [
        TrainingSequence(
            trajectory_id=f"t{index}",
            group_id="g",
            reward=0.0,
            token_ids=tuple(rng.randrange(3, VOCAB) for _ in range(length)),
            positions=(positions := tuple(range(max(1, length // 2), length))),
            logprobs=(-1.0,) * len(positions),
            temperatures=(0.8,) * len(positions),
            allowed=(None,) * len(positions),
        )
        for index, length in enumerate(lengths)
    ]


def computed(policy: PolicyModel, batch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradient of a sum in which every token has a weight of its own."""
    log_probs_N, entropy_N = policy.log_probs(batch)
    weight_N = torch.linspace(-1.0, 1.0, batch.num_tokens)
    (weight_N * (log_probs_N + 0.1 * entropy_N)).sum().backward()
    policy.collect_gradients()
    found = {name: tensor.clone() for name, tensor in policy.gradients().items()}
    for master in policy.masters:
        master.grad = None
    return log_probs_N.detach(), found


def assert_same_gradients(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Within 2e-5 of the largest of the model, in fp32."""
    assert left.keys() == right.keys()
    largest = max(float(tensor.abs().max()) for tensor in left.values())
    for name, gradient in left.items():
        assert float((gradient - right[name]).abs().max()) < 2e-5 * largest, name


def test_every_allowed_model_has_a_case() -> None:
    assert set(MODELS) == PACKED_MODELS


def test_packed_equals_padded_in_log_probs_and_gradients(policy: PolicyModel) -> None:
    padded = computed(policy, make_minibatch(sequences(), vocab_size=VOCAB))
    packed = computed(policy, make_minibatch(sequences(), vocab_size=VOCAB, packed=True))
    assert torch.allclose(padded[0], packed[0], atol=2e-5, rtol=2e-5)
    assert_same_gradients(padded[1], packed[1])


def test_no_token_sees_another_sequence(policy: PolicyModel) -> None:
    before = sequences()
    for changed in range(len(LENGTHS)):
        after = [*before]
        after[changed] = sequences(seed=1)[changed]
        batches = [make_minibatch(one, vocab_size=VOCAB, packed=True) for one in (before, after)]
        with torch.no_grad():
            left, right = (policy.log_probs(batch)[0] for batch in batches)
        others = batches[0].sequence_N != changed
        assert torch.allclose(left[others], right[others], atol=1e-6)
        assert not torch.allclose(left[~others], right[~others], atol=1e-2)


NO_ATTENTION = {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4}
NO_ATTENTION |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
NO_ATTENTION |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("qwen3_next", NO_ATTENTION, r"layers of another kind than attention \(linear_attention\)"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, r"another kind than attention \(conv\)"),
        ("gpt_oss", {**EXPERTS, **MIXED}, "has not been shown to compute packed sequences"),
        ("olmoe", EXPERTS, "has not been shown to compute packed sequences"),
        (
            "llama, dynamic",
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
            r"scales positions by the longest sequence of a row \(rope_type dynamic\)",
        ),
        ("llama, eager", {}, "computes attention by 'eager'"),
    ],
)
def test_other_models_are_refused_with_the_reason(
    tmp_path: Path, name: str, changes: dict[str, Any], reason: str
) -> None:
    write_folder(tmp_path, name, changes)
    if name == "llama, eager":
        with_attention(tmp_path, "eager")
    family = name.split(",", maxsplit=1)[0]
    with pytest.raises(ConfigError, match=rf"trainer\.packing: .*\({family}\).*{reason}"):
        TorchTrainer(tmp_path, TrainerParams(learning_rate=1e-3, packing=True))


def test_attention_that_does_not_tell_sequences_apart_is_seen_at_the_start(
    policy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(ConfigError, match="lets a packed sequence see the one before it"):
        policy_of(policy_model)


def test_only_a_row_of_several_sequences_has_a_mask(
    policy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(policy_model)
    shapes: list[tuple[int, ...] | None] = []
    real = functional.scaled_dot_product_attention

    def spy(*args: Any, attn_mask: Tensor | None = None, **told: Any) -> Tensor:
        shapes.append(None if attn_mask is None else tuple(attn_mask.shape))
        return real(*args, attn_mask=attn_mask, **told)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    for lengths in ((10,), (10, 4)):
        policy.log_probs(make_minibatch(sequences(lengths=lengths), vocab_size=VOCAB, packed=True))
    assert shapes == [None, None, (1, 1, 12, 12), (1, 1, 12, 12)]


def unequal(
    calls: list[list[int]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """What flash attention's function for sequences of unequal length computes, ``[S, heads, D]``."""
    sizes = cu_seqlens_q.diff().tolist()
    calls.append(sizes)
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max(sizes) == int(max_seqlen_q) == int(max_seqlen_k)
    parts = zip(*(one.unsqueeze(0).split(sizes, dim=1) for one in (q, k, v)), strict=True)
    return torch.cat([equal(*part, softmax_scale=softmax_scale, causal=causal)[0] for part in parts])


def equal(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    """The same for equal lengths, ``[B, T, heads, D]``."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    found = functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return found.transpose(1, 2)


def test_flash_attention_is_told_where_sequences_begin(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's way from positions to lengths; what stands at its end here is not the kernel, which needs a GPU."""
    from transformers import PreTrainedModel
    from transformers import modeling_flash_attention_utils as flash

    calls: list[list[int]] = []
    kernels = (equal, partial(unequal, calls), None, None, None)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: kernels)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    padded = computed(policy_of(policy_model), make_minibatch(sequences(), vocab_size=VOCAB))
    folder = with_attention(shutil.copytree(policy_model, tmp_path / "flash"), "flash_attention_2")
    policy = policy_of(folder)
    calls.clear()

    packed = computed(policy, make_minibatch(sequences(), vocab_size=VOCAB, packed=True))

    assert calls == [[length - 1 for length in LENGTHS]] * 2  # of two layers
    assert policy.row_tokens is None
    assert torch.allclose(padded[0], packed[0], atol=2e-5, rtol=2e-5)
    assert_same_gradients(padded[1], packed[1])


class RecordingTrainer(TorchTrainer):
    def __init__(self, model_path: Path, params: TrainerParams) -> None:
        super().__init__(model_path, params)
        self.updates: list[dict[str, Tensor]] = []

    def _update(self, limit: float) -> float:
        self.updates.append({name: one.clone() for name, one in self._policy.gradients().items()})
        return super()._update(limit)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_part_tokens": 150},
        {"activation_checkpointing": True},
        {"lora": LoraParams(rank=3, alpha=6.0)},
    ],
    ids=["whole", "in parts", "activations twice", "adapters"],
)
def test_a_packed_step_is_the_padded_one(policy_model: Path, changes: dict[str, Any]) -> None:
    """Minibatches, every update's gradient, and all that is told of the step."""
    batch = [one for trace in random_batch(3) for one in samples_of(trace, vocab_size=320, max_tokens=1024)]
    params = TrainerParams(
        learning_rate=1e-4,
        minibatch_sequences=6,
        num_epochs=2,
        policy_dtype="float32",
        loss=LossParams(kl_weight=0.02, ratio="sequence", entropy_weight=0.01),
        **changes,
    )
    trainers = [RecordingTrainer(policy_model, replace(params, packing=packing)) for packing in (False, True)]

    padded, packed = (trainer.step(batch).to_dict() for trainer in trainers)

    assert padded["num_updates"] == 6
    for name, value in padded.items():
        if name != "seconds":
            assert packed[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    for left, right in zip(*(trainer.updates for trainer in trainers), strict=True):
        assert_same_gradients(left, right)


@pytest.mark.parametrize("world_size", [1, 3])
def test_parts_hold_every_index_once_within_both_bounds(world_size: int) -> None:
    rng = random.Random(world_size)
    lengths = [rng.choice([5, 30, 120, 300, 900]) for _ in range(60)]
    owners = [rng.randrange(world_size) for _ in lengths]

    parts = pack_by_length(range(60), lengths, owners, max_tokens=700, max_row_tokens=250)

    assert sorted(index for part in parts for index in part) == list(range(60))
    for part in parts:
        rows = [[lengths[index] for index in part if owners[index] == rank] for rank in range(world_size)]
        assert len(part) == 1 or sum(map(sum, rows)) <= 700
        assert all(len(row) <= 1 or sum(row) <= 250 for row in rows)
    assert len(parts) < 45  # they do share
