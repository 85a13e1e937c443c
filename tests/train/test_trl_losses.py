"""Every recipe that TRL has too, against TRL's own code: from the same rewards and log-probs, in float64, to 1e-9.

TRL's trainers are built from its own settings and go their own way from the rewards to the gradient: ``_generate_and_score_completions``
(advantages, importance weights of the engine) and ``compute_loss``.  Only what a model would say is told to them (:class:`Told`).
Their answers have text of an environment in between, which TRL masks and ours never sees.

What differs is turned into TRL's, or set to the paper's.  TRL divides advantages by the deviation of the sample (n - 1) plus 1e-4, ours by
the deviation of what is there (n), which no paper settles.  It multiplies the KL penalty by the ratio (DeepSeek-V3.2) until
``use_bias_correction_kl`` is False, as GRPO's paper has it.  And its RLOO is PPO's clipped objective on the ratio of whole sequences, where
the paper has REINFORCE; where the policy is still the one that sampled, their gradients are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rose.train.advantages import OverlongParams, overlong_penalty
from rose.train.recipes import RECIPES, AdvantageScale
from tests.train.recipe_answers import (
    BUDGET,
    Answers,
    Array,
    Found,
    answers,
    job,
    our_advantages,
    our_loss,
)

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install '.[trl]' from a checkout of ROSE")

pytestmark = pytest.mark.timeout(300)

# Fractions of two: TRL reads rewards in float32.  One group teaches nothing, and counts in the divisors.
REWARDS = (1, 0, 0, 0, 0.25, 0.875, 0.125, 0.5, 1, 1, 1, 0, 0.5, 0.5, 0.5, 0.5, 0.75, 0.25, 0, 1, 0, 0, 0, 1)
SMALL_DRIFT = 2e-3
"""At which about half of GSPO's sequences are within its bounds."""


class Rows:
    """Answers as TRL lays them: one row each, padded, with tokens of the environment in between; chance wherever nothing was sampled."""

    def __init__(self, made: Answers, seed: int, *, environment_speaks: bool) -> None:
        self._rng = np.random.default_rng(seed)
        most = 4 if environment_speaks else 1
        self.masks = [
            self._rng.permutation([1] * size + [0] * int(self._rng.integers(most))).tolist()
            for size in made.sizes
        ]
        self.sampled_BT = torch.zeros(len(self.masks), max(map(len, self.masks)), dtype=torch.bool)
        for row, mask in zip(self.sampled_BT, self.masks, strict=True):
            row[: len(mask)] = torch.tensor(mask, dtype=torch.bool)
        self.current_BT = self._laid(made.current).requires_grad_()
        self.proximal_BT, self.reference_BT = self._laid(made.proximal), self._laid(made.reference)
        self.behaviour_BT = self._laid(made.behaviour)

    def _laid(self, values: list[Array]) -> torch.Tensor:
        laid_BT = torch.from_numpy(self._rng.normal(-1.0, 0.5, tuple(self.sampled_BT.shape)))
        laid_BT[self.sampled_BT] = torch.from_numpy(np.concatenate(values))
        return laid_BT

    def completions(self) -> list[list[int]]:
        return [[5] * len(mask) for mask in self.masks]

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's ``rollout_func``."""
        told = [row[: len(mask)].tolist() for row, mask in zip(self.behaviour_BT, self.masks, strict=True)]
        return {
            "prompt_ids": [[7, 8]] * len(prompts),
            "completion_ids": self.completions(),
            "logprobs": told,
            "env_mask": self.masks,
        }


class Told:
    """A trainer of TRL's that is told log-probs and computes everything else."""

    rows: Rows
    ref_model: Any

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Any, Any, None]:
        if model is self.ref_model:
            told_BT = self.rows.reference_BT
        else:
            told_BT = self.rows.current_BT if torch.is_grad_enabled() else self.rows.proximal_BT
        return told_BT, torch.zeros_like(told_BT), None


class ToldGRPO(Told, trl.GRPOTrainer):
    pass


class ToldRLOO(Told, trl.RLOOTrainer):
    def _generate(self, prompts: list[Any]) -> tuple[list[Any], list[Any], list[str]]:
        return [[7, 8]] * len(prompts), self.rows.completions(), [""] * len(prompts)


@dataclass(frozen=True)
class Theirs:
    loss: float
    gradient: list[Array]
    advantages: Array
    metrics: Mapping[str, float]


@pytest.fixture
def theirs(tmp_path: Path, policy_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What TRL makes of answers."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def build(made: Answers, rows: Rows, *, is_rloo: bool, settings: dict[str, Any]) -> Any:
        from datasets import Dataset
        from datasets.table import InMemoryTable

        def reward(completions: list[Any], **_: Any) -> list[float]:
            return made.rewards.tolist()

        arguments = (trl.RLOOConfig if is_rloo else trl.GRPOConfig)(
            output_dir=str(tmp_path),
            num_generations=4,
            per_device_train_batch_size=made.rewards.size,
            max_completion_length=BUDGET,
            num_iterations=2,  # without a second one TRL takes the current log-probs for the proximal ones
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            use_cpu=True,
            report_to="none",
            **settings,
        )
        table = InMemoryTable.from_pylist([{"prompt": "q"}] * made.rewards.size)
        kind: Any = ToldRLOO if is_rloo else ToldGRPO
        return kind(
            model=str(policy_model),
            processing_class=AutoTokenizer.from_pretrained(policy_model, padding_side="left"),
            reward_funcs=reward,
            train_dataset=Dataset(table, fingerprint="rose-prompts"),
            args=arguments,
            **({} if is_rloo else {"rollout_func": rows.rollout}),
        )

    def say(made: Answers, *, is_rloo: bool = False, engine_differs: bool = False, **settings: Any) -> Theirs:
        rows = Rows(made, seed=7, environment_speaks=not is_rloo)
        trainer = build(made, rows, is_rloo=is_rloo, settings=settings)
        trainer.rows = rows
        trainer.current_gradient_accumulation_steps = 1  # which `train` sets
        trainer.model.train()
        if engine_differs:  # as with vLLM, once its weights are loaded
            trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            inputs = trainer._generate_and_score_completions([{"prompt": "q"}] * made.rewards.size)
            loss = trainer.compute_loss(trainer.model, inputs)
        finally:
            torch.set_default_dtype(before)
        assert loss.dtype == inputs["advantages"].dtype == torch.float64
        loss.backward()
        gradient_BT = rows.current_BT.grad
        assert gradient_BT is not None
        assert not gradient_BT[~rows.sampled_BT].any()
        return Theirs(
            float(loss.detach()),
            [part.numpy() for part in gradient_BT[rows.sampled_BT].split(made.sizes)],
            inputs["advantages"].numpy(),
            {name: values[-1] for name, values in trainer._metrics["train"].items()},
        )

    return say


def as_trl_divides(made: Answers, advantages: Array, scale: AdvantageScale) -> Array:
    def ratio(rewards: Array) -> float:
        return rewards.std() / (rewards.std(ddof=1) + 1e-4)

    if scale == "none":
        return advantages
    if scale == "batch":
        return advantages * ratio(made.rewards)
    return advantages * [ratio(made.rewards[made.groups == group]) for group in made.groups]


def ours_as_trl_divides(made: Answers, *, engine_differs: bool = False, **trainer: Any) -> Found:
    config = job(**trainer)
    advantages = as_trl_divides(made, our_advantages(made, config), config.trainer.recipe.scale_advantages)
    return our_loss(made, config, advantages, engine_differs=engine_differs)


def assert_equal(ours: Found, theirs: Theirs) -> None:
    """To 1e-9, of the loss and of the largest derivative."""
    loss, gradient = ours
    found, wanted = np.concatenate(gradient), np.concatenate(theirs.gradient)
    assert abs(loss - theirs.loss) <= 1e-9 * abs(theirs.loss)
    assert np.abs(found - wanted).max() <= 1e-9 * np.abs(wanted).max()


TRLS: Mapping[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "lite_ppo": {"loss_type": "dapo", "scale_rewards": "batch"},
}
"""TRL's settings of a recipe; what is not named is its default (epsilon 0.2, no KL, groups' deviations)."""

DRIFTS = {"gspo": SMALL_DRIFT, "cispo": 1.5}
CLIPPED = {"cispo": ("cispo_clip_ratio",)}


def test_every_recipe_has_trls() -> None:
    assert {*TRLS, "rloo"} == set(RECIPES)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TRLS)
def test_a_recipe_equals_trls(name: str, seed: int, theirs: Any) -> None:
    made = answers(seed, rewards=REWARDS, drift=DRIFTS.get(name, 0.4))

    said = theirs(made, **TRLS[name])

    assert_equal(ours_as_trl_divides(made, algorithm=name), said)
    # By TRL's own word some are clipped at each bound, and some are not.
    for metric in CLIPPED.get(name, ("clip_ratio/low_mean", "clip_ratio/high_mean")):
        assert 0.0 < said.metrics[metric] < 0.5


@pytest.mark.parametrize(
    ("trainer", "settings", "drift"),
    [
        pytest.param({"algorithm": "dapo", "clip_high": 0.2}, {"loss_type": "bnpo"}, 0.4, id="bnpo"),
        pytest.param(
            {"algorithm": "gspo", "aggregation": "sum", "sum_tokens": 1},
            TRLS["gspo"] | {"loss_type": "luspo"},
            SMALL_DRIFT,
            id="luspo",
        ),
    ],
)
def test_what_is_no_recipe_here_is_settings_of_one(
    trainer: dict[str, Any], settings: dict[str, Any], drift: float, theirs: Any
) -> None:
    made = answers(0, rewards=REWARDS, drift=drift)
    assert_equal(ours_as_trl_divides(made, **trainer), theirs(made, **settings))


def test_dual_clip_is_trls_delta(theirs: Any) -> None:
    made = answers(0, rewards=REWARDS, drift=1.0)

    said = theirs(made, delta=3.0, **TRLS["grpo"])

    assert_equal(ours_as_trl_divides(made, algorithm="grpo", guard={"dual_clip": 3.0}), said)
    ratios = [np.exp(now - old) for now, old in zip(made.current, made.proximal, strict=True)]
    assert any(
        (ratio > 3.0).any() for ratio, advantage in zip(ratios, said.advantages, strict=True) if advantage < 0
    )


@pytest.mark.parametrize("kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_mismatch_of_engine_and_trainer_weighs_as_in_trl(kind: str, theirs: Any) -> None:
    """The policy gradient and not the KL penalty.  TRL's truncation may have a lower bound too, ours has none."""
    made = answers(1, rewards=REWARDS)
    lowest = 0.5 if kind.endswith("mask") else None

    said = theirs(
        made,
        engine_differs=True,
        vllm_importance_sampling_mode=kind,
        vllm_importance_sampling_clip_max=1.5,
        vllm_importance_sampling_clip_min=lowest,
        **TRLS["grpo"],
    )

    bounds = {"correction": kind, "truncation": 1.5, "truncation_low": 0.5}
    assert_equal(ours_as_trl_divides(made, engine_differs=True, algorithm="grpo", **bounds), said)
    least, most = (said.metrics[f"sampling/importance_sampling_ratio/{which}"] for which in ("min", "max"))
    assert (least == 0.0 < most) if lowest else (0.0 < least < most == 1.5)


def test_without_a_correction_the_engine_has_no_say_in_trl_either(theirs: Any) -> None:
    made = answers(1, rewards=REWARDS)
    said = theirs(made, engine_differs=True, vllm_importance_sampling_correction=False, **TRLS["grpo"])
    assert_equal(ours_as_trl_divides(made, engine_differs=True, algorithm="grpo", correction="none"), said)


def sampled_by_the_policy(seed: int) -> Answers:
    return answers(seed, rewards=REWARDS, drift=0.0)


@pytest.mark.parametrize("seed", range(3))
def test_rloo_has_trls_gradient_where_the_policy_is_the_one_that_sampled(seed: int, theirs: Any) -> None:
    """The loss is another function with the same slope: ours is linear in the log-probs, hence it is the slope times them."""
    made = sampled_by_the_policy(seed)
    said = theirs(made, is_rloo=True, beta=0.03)
    of_that_slope = sum(
        float((slope * now).sum()) for slope, now in zip(said.gradient, made.current, strict=True)
    )
    ours = our_loss(made, job(algorithm="rloo"), our_advantages(made, job(algorithm="rloo")))
    assert_equal(ours, Theirs(of_that_slope, said.gradient, said.advantages, {}))


def test_rloos_advantages_are_trls(theirs: Any) -> None:
    """With the KL penalty, which is taken off the reward."""
    made = sampled_by_the_policy(0)
    found = our_advantages(made, job(algorithm="rloo"))
    assert np.abs(found - theirs(made, is_rloo=True, beta=0.03).advantages).max() < 1e-9


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_trls_but_for_how_a_deviation_is_counted(scale: AdvantageScale, theirs: Any) -> None:
    made = answers(0, rewards=REWARDS)
    found = as_trl_divides(made, our_advantages(made, job(scale_advantages=scale)), scale)
    assert np.abs(found - theirs(made, scale_rewards=scale).advantages).max() < 1e-9


def test_the_penalty_of_length_is_trls() -> None:
    rewards = pytest.importorskip("trl.rewards")
    lengths = range(1, 130)
    wanted = rewards.get_soft_overlong_punishment(100, 20)(completion_ids=[[5] * size for size in lengths])
    params = OverlongParams(max_tokens=100, buffer_tokens=20)
    assert [overlong_penalty(size, params) for size in lengths] == pytest.approx(wanted, abs=1e-9)
