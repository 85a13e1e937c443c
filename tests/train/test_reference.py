"""Losses, advantages and gradients of every algorithm, on trajectories recorded from a real engine, against float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.train.advantages import OverlongParams
from rose.train.batch import samples_of
from rose.train.loss import LossParams
from rose.train.trainer import TorchTrainer, TrainerParams
from tests.train import reference
from tests.train.reference import Recipe

RECORDED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "recorded_frozenlake.json").read_text())
RECORDED = RECORDED[:8]
"""Two groups of four; the reference computes them turn by turn."""
pytestmark = pytest.mark.timeout(300)

RATE = 2e-3
"""Large enough that the second update meets the clip on both sides."""

ALGORITHMS = {
    "grpo": Recipe(aggregation="sequence", clip_high=0.2, kl_weight=0.04),
    "dr_grpo, k2": Recipe(scale="none", aggregation="sum", kl_weight=0.1, kl_kind="k2"),
    "dapo": Recipe(overlong_max=8, overlong_buffer=6),
    "rloo, clipped": Recipe(baseline="others", scale="none", aggregation="sequence"),
    "rloo, KL in the reward": Recipe(
        baseline="others",
        scale="none",
        objective="reinforce",
        aggregation="sum",
        kl_weight=0.05,
        kl_kind="reward",
    ),
    "gspo": Recipe(ratio="sequence", aggregation="sequence", clip_low=3e-4, clip_high=4e-4),
    "cispo": Recipe(objective="cispo", clip_low=1.0, clip_high=0.1),
    "lite_ppo": Recipe(scale="batch", clip_high=0.2),
    "demo": Recipe(entropy_weight=0.01),
}


def params_of(recipe: Recipe) -> TrainerParams:
    return TrainerParams(
        learning_rate=RATE,
        num_epochs=2,
        minibatch_sequences=1000,
        baseline="others" if recipe.baseline == "others" else "mean",
        scale_advantages=recipe.scale,  # pyright: ignore[reportArgumentType]
        loss=LossParams(
            clip_low=recipe.clip_low,
            clip_high=recipe.clip_high,
            truncation=recipe.truncation,
            entropy_weight=recipe.entropy_weight,
            objective=recipe.objective,  # pyright: ignore[reportArgumentType]
            ratio=recipe.ratio,  # pyright: ignore[reportArgumentType]
            aggregation=recipe.aggregation,  # pyright: ignore[reportArgumentType]
            kl_weight=recipe.kl_weight,
            kl_kind=recipe.kl_kind,  # pyright: ignore[reportArgumentType]
        ),
        overlong=OverlongParams(max_tokens=recipe.overlong_max, buffer_tokens=recipe.overlong_buffer),
    )


class RecordingTrainer(TorchTrainer):
    """Keeps the model and the gradients of each update."""

    def __init__(self, model_path: Path, params: TrainerParams) -> None:
        super().__init__(model_path, params)
        self.updates: list[tuple[Any, Mapping[str, torch.Tensor]]] = []

    def _update(self, limit: float) -> float:
        gradients = {name: tensor.clone() for name, tensor in self._policy.gradients().items()}
        self.updates.append((copy.deepcopy(self.rounded_model).double(), gradients))
        return super()._update(limit)


def forked(recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In every other conversation the last turn's agent has forgotten its first token: a branch of its own.  The first of them forgets at each turn."""
    made = copy.deepcopy(recorded)
    for number, one in enumerate(made[::2]):
        for turn in one["turns"][1:] if number == 0 else one["turns"][-1:]:
            turn["prompt_token_ids"] = turn["prompt_token_ids"][1:]
    return made


def train(
    model_path: Path, params: TrainerParams, recorded: list[dict[str, Any]] = RECORDED
) -> tuple[RecordingTrainer, Any]:
    trainer = RecordingTrainer(model_path, params)
    samples = [
        sample
        for one in recorded
        for sample in samples_of(one, vocab_size=trainer.vocab_size, max_tokens=trainer.max_tokens)
    ]
    return trainer, trainer.step(samples)


@pytest.mark.parametrize(
    ("name", "forks"),
    [*((name, False) for name in ALGORITHMS), ("grpo", True), ("dr_grpo, k2", True), ("demo", True)],
)
def test_both_updates_of_a_step_equal_the_float64_reference(
    policy_model: Path, name: str, forks: bool
) -> None:
    """Also where conversations fork: an episode is one, in however many branches the trainer computes it."""
    recipe, recorded = ALGORITHMS[name], forked(RECORDED) if forks else RECORDED

    trainer, report = train(policy_model, params_of(recipe), recorded)
    assert (report.num_sequences > len(recorded)) == forks

    losses, start = [], None
    for model, gradients in trainer.updates:
        current = reference.policy_of(model, recorded)
        start = start or current
        loss = reference.loss_of(recorded, current=current, proximal=start, reference=start, recipe=recipe)
        parameters = dict(model.named_parameters())
        found = torch.autograd.grad(loss, [parameters[one] for one in gradients], retain_graph=True)
        losses.append(float(loss.detach()))
        largest = max(float(tensor.abs().max()) for tensor in found)
        for parameter, wanted in zip(gradients, found, strict=True):
            difference = float((gradients[parameter].double() - wanted).abs().max())
            assert difference < 2e-5 * largest, (parameter, difference, largest)
    assert report.loss == pytest.approx(sum(losses) / 2, rel=1e-4, abs=1e-6)
    if recipe.objective != "reinforce":
        assert report.clip_fraction > 0.02  # the second update did meet the clip


def test_the_reference_would_notice(policy_model: Path) -> None:
    """The comparison above has teeth: each setting of the recipes changes the reference's loss."""
    trainer, _ = train(policy_model, params_of(Recipe()))
    with torch.no_grad():
        start, moved = (reference.policy_of(model, RECORDED) for model, _ in trainer.updates)
    changes: list[dict[str, Any]] = [
        {"baseline": "others"},
        {"scale": "none"},
        {"scale": "batch"},
        {"objective": "cispo"},
        {"objective": "reinforce"},
        {"ratio": "sequence"},
        {"aggregation": "sequence"},
        {"aggregation": "sum"},
        {"clip_low": 0.1},
        {"clip_high": 0.1},
        {"truncation": 1.0},
        {"entropy_weight": 0.01},
        {"kl_weight": 0.1},
        {"kl_weight": 0.1, "kl_kind": "k2"},
        {"overlong_max": 8, "overlong_buffer": 6},
    ]

    def loss(recipe: Recipe) -> float:
        policies = {"current": moved, "proximal": start, "reference": start}
        return float(reference.loss_of(RECORDED, **policies, recipe=recipe))

    found = [loss(Recipe()), *(loss(replace(Recipe(), **change)) for change in changes)]
    assert len({round(one, 9) for one in found}) == len(found), found


def test_computing_in_small_parts_or_with_checkpointed_activations_gives_the_same_gradient(
    policy_model: Path,
) -> None:
    """Gradient accumulation and recomputation are ways of computing, not other algorithms."""
    base = params_of(ALGORITHMS["dapo"])
    whole, _ = train(policy_model, base)
    for changes in ({"max_part_tokens": 64}, {"activation_checkpointing": True}):
        other, _ = train(policy_model, replace(base, **changes))
        for name, gradient in whole.updates[0][1].items():
            assert torch.allclose(gradient, other.updates[0][1][name], atol=1e-6, rtol=1e-4), (changes, name)


def test_bf16_products_give_nearly_the_gradient_of_fp32_ones(policy_model: Path) -> None:
    exact, _ = train(policy_model, params_of(ALGORITHMS["dapo"]))
    coarse, _ = train(policy_model, replace(params_of(ALGORITHMS["dapo"]), compute_dtype="bfloat16"))
    assert all(tensor.dtype == torch.float32 for tensor in coarse.module.parameters())  # the masters stay
    left = torch.cat([tensor.flatten() for tensor in exact.updates[0][1].values()])
    right = torch.cat([coarse.updates[0][1][name].flatten() for name in exact.updates[0][1]])
    assert float(torch.cosine_similarity(left, right, dim=0)) > 0.98
