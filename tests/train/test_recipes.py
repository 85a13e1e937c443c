"""Every published recipe against its paper's formula: loss and gradient, in numpy and float64, written here and nowhere else.

A batch of three questions with four answers each; the engine and the trainer's proximal policy are equal, as the papers have it.  Each
formula is written as its paper writes it, answer by answer, with its derivative by the log-prob of each token by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np
import pytest
import torch

from rose.config import validate
from rose.errors import ConfigError
from rose.train.build import trainer_params
from rose.train.loss import LossParams, correction, outside_fraction, policy_loss
from rose.train.recipes import RECIPES, Algorithm
from rose.train.train_config import TrainConfig
from tests.train.recipe_answers import Answers, Array, Found, answers, job, ours


def within_group(made: Answers, of: Callable[[Array], Array]) -> Array:
    return np.concatenate([of(made.rewards[made.groups == group]) for group in range(3)])


def normalised(made: Answers) -> Array:
    return within_group(made, lambda rewards: (rewards - rewards.mean()) / rewards.std())


def clipped_surrogate(ratio: Array, advantage: float, low: float, high: float) -> tuple[Array, Array]:
    """PPO's, to be maximised, and its derivative by log current."""
    free, held = ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage
    return np.minimum(free, held), np.where(free <= held, free, 0.0)


def ppo(
    made: Answers,
    advantages: Array,
    share: Callable[[int], float],
    low: float,
    high: float,
    beta: float = 0.0,
) -> Found:
    loss, slopes = 0.0, []
    for index, advantage in enumerate(advantages):
        ratio = np.exp(made.current[index] - made.proximal[index])
        value, slope = clipped_surrogate(ratio, advantage, low, high)
        delta = made.reference[index] - made.current[index]
        penalty, penalty_slope = np.exp(delta) - delta - 1, 1 - np.exp(delta)
        loss -= share(index) * (value - beta * penalty).sum()
        slopes.append(-share(index) * (slope - beta * penalty_slope))
    return loss, slopes


def grpo(made: Answers) -> Found:
    """Shao et al. 2024, equation 3: the mean over answers of the mean over their tokens, k3 with 0.04."""
    return ppo(made, normalised(made), lambda i: 1 / (12 * made.current[i].size), 0.2, 0.2, beta=0.04)


def dapo(made: Answers) -> Found:
    """Yu et al. 2025, equation 8: one mean over all tokens, clip higher."""
    total = sum(one.size for one in made.current)
    return ppo(made, normalised(made), lambda _: 1 / total, 0.2, 0.28)


def dr_grpo(made: Answers) -> Found:
    """Liu et al. 2025: no standard deviation, and a constant, the budget of 8 tokens, in place of the length."""
    centred = within_group(made, lambda rewards: rewards - rewards.mean())
    return ppo(made, centred, lambda _: 1 / (12 * 8), 0.2, 0.2)


def lite_ppo(made: Answers) -> Found:
    """Liu et al. 2025: mean of the group, standard deviation of the batch, one mean over all tokens."""
    centred = within_group(made, lambda rewards: rewards - rewards.mean())
    total = sum(one.size for one in made.current)
    return ppo(made, centred / made.rewards.std(), lambda _: 1 / total, 0.2, 0.2)


def rloo(made: Answers) -> Found:
    """Ahmadian et al. 2024: REINFORCE of whole answers, against the mean of the others, on rewards less 0.03 of the drift from the reference.

    The drift is that of the weights that sampled.
    """
    drift = [float((old - start).sum()) for old, start in zip(made.proximal, made.reference, strict=True)]
    rewards = made.rewards - 0.03 * np.array(drift)
    loss, slopes = 0.0, []
    for index in range(12):
        others = (made.groups == made.groups[index]) & (np.arange(12) != index)
        advantage = rewards[index] - rewards[others].mean()
        loss -= advantage * made.current[index].sum() / 12
        slopes.append(np.full(made.current[index].size, -advantage / 12))
    return loss, slopes


def gspo(made: Answers) -> Found:
    """Zheng et al. 2025, equation 5: the ratio of the answer, its tokens' geometric mean, clipped at 3e-4 and 4e-4."""
    loss, slopes = 0.0, []
    for index, advantage in enumerate(normalised(made)):
        size = made.current[index].size
        ratio = np.exp((made.current[index] - made.proximal[index]).sum() / size)
        value, slope = clipped_surrogate(ratio, advantage, 3e-4, 4e-4)
        loss -= float(value) / 12
        slopes.append(np.full(size, -float(slope) / (12 * size)))
    return loss, slopes


def cispo(made: Answers) -> Found:
    """MiniMax 2025, equation 4: REINFORCE with the clipped ratio for a weight that has no gradient; no lower bound, 5 above."""
    total = sum(one.size for one in made.current)
    loss, slopes = 0.0, []
    for index, advantage in enumerate(normalised(made)):
        weight = np.minimum(np.exp(made.current[index] - made.proximal[index]), 5.0)
        loss -= (weight * advantage * made.current[index]).sum() / total
        slopes.append(-weight * advantage / total)
    return loss, slopes


FORMULAS: Mapping[str, Callable[[Answers], Found]] = {
    "grpo": grpo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "gspo": gspo,
    "cispo": cispo,
    "lite_ppo": lite_ppo,
}


def test_every_recipe_has_its_formula_here() -> None:
    assert set(FORMULAS) == set(RECIPES) == set(get_args(Algorithm))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FORMULAS)
def test_a_recipe_equals_its_papers_formula(name: str, seed: int) -> None:
    made = answers(seed)
    expected, slopes = FORMULAS[name](made)

    loss, gradient = ours(made, job(algorithm=name))

    assert loss == pytest.approx(expected, abs=1e-9)
    for found, wanted in zip(gradient, slopes, strict=True):
        assert np.abs(found - wanted).max() < 1e-9


def test_the_formulas_tell_the_recipes_apart() -> None:
    losses = {round(formula(answers(0))[0], 6) for formula in FORMULAS.values()}
    assert len(losses) == len(FORMULAS)


def test_only_dapo_samples_groups_anew() -> None:
    assert {name for name in FORMULAS if job(algorithm=name).has_dynamic_sampling} == {"dapo"}


def test_a_jobs_own_setting_stands_and_the_rest_is_the_recipes() -> None:
    loss = trainer_params(job(algorithm="grpo", clip_high=0.5, kl_weight=0.0)).loss
    assert (loss.clip_low, loss.clip_high, loss.kl_weight, loss.aggregation) == (0.2, 0.5, 0.0, "sequence")


def test_the_penalty_is_not_weighed_by_the_mismatch_of_engine_and_trainer() -> None:
    """It is between two policies of the trainer: what the engine said has no part in it."""
    made = answers(1)
    with_penalty = ours(made, job(algorithm="grpo", truncation=1.5), engine_differs=True)
    without = ours(made, job(algorithm="grpo", truncation=1.5, kl_weight=0.0), engine_differs=True)
    expected, slopes = 0.0, []
    for now, start in zip(made.current, made.reference, strict=True):
        delta = start - now
        expected += 0.04 * (np.exp(delta) - delta - 1).mean() / 12
        slopes.append(0.04 * (1 - np.exp(delta)) / (12 * now.size))
    assert with_penalty[0] - without[0] == pytest.approx(expected, abs=1e-9)
    for found, other, wanted in zip(with_penalty[1], without[1], slopes, strict=True):
        assert np.abs(found - other - wanted).max() < 1e-9


def expected_weights(made: Answers, kind: str) -> Array:
    weights = []
    for old, engine in zip(made.proximal, made.behaviour, strict=True):
        ratio = np.exp(old - engine)
        if kind.startswith("sequence"):
            ratio = np.full(old.size, ratio.prod())
        if kind.endswith("truncate"):
            weights.append(np.minimum(ratio, 1.5))
        else:
            weights.append(np.where((ratio < 0.5) | (ratio > 1.5), 0.0, ratio))
    return np.concatenate(weights)


@pytest.mark.parametrize("kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_mismatch_is_truncated_or_masked_by_token_or_by_sequence(kind: str) -> None:
    made = answers(2)
    params = trainer_params(job(correction=kind, truncation=1.5, truncation_low=0.5)).loss
    sequence_N = torch.repeat_interleave(torch.tensor([one.size for one in made.current]))
    told = (torch.from_numpy(np.concatenate(one)) for one in (made.behaviour, made.proximal))
    behaviour_N, proximal_N = told

    found = correction(behaviour_N, proximal_N, sequence_N, params).numpy()

    wanted = expected_weights(made, kind)
    assert np.abs(found - wanted).max() < 1e-9
    changed = (wanted == 0.0) | (wanted == 1.5)
    assert 0.0 < changed.mean() < 1.0
    assert outside_fraction(behaviour_N, proximal_N, sequence_N, params) == pytest.approx(changed.mean())


def test_without_a_correction_the_engine_has_no_say() -> None:
    made = answers(3)
    assert ours(made, job(correction="none"), engine_differs=True)[0] == ours(made, job())[0]


def test_dual_clip_bounds_what_a_bad_token_can_push() -> None:
    """Of ratio 5 and advantage -2 the plain loss is 10, with a gradient of 10; bounded at 3 it is 6, with none."""
    current_N = torch.log(torch.tensor([5.0, 2.0, 5.0], dtype=torch.float64)).requires_grad_()
    zeros_N, ones_N = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    loss, num_held = policy_loss(
        current_N=current_N,
        proximal_N=zeros_N,
        behaviour_N=zeros_N,
        advantage_N=torch.tensor([-2.0, -2.0, 2.0], dtype=torch.float64),
        share_N=ones_N,
        sequence_N=torch.arange(3),
        params=LossParams(dual_clip=3.0),
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(6.0 + 4.0 - 2.0 * 1.28)
    assert current_N.grad is not None
    assert current_N.grad.tolist() == pytest.approx([0.0, 4.0, 0.0])
    assert int(num_held) == 2


def test_a_job_without_a_learning_rate_is_told_what_is_usual() -> None:
    for table in ({}, {"trainer": {"algorithm": "dapo"}}):
        with pytest.raises(ConfigError, match=r"trainer\.learning_rate: is required \(usual are 1e-6 for"):
            validate(TrainConfig, {"model": "m", "weights": {"directory": "w"}} | table)


def test_a_job_that_names_no_place_for_its_weights_is_told_which_there_are() -> None:
    for table in ({}, {"weights": {"signed": False}}):
        with pytest.raises(
            ConfigError, match=r"^weights: is required \(weights\.relay_url, .* or weights\.dir"
        ):
            validate(TrainConfig, {"model": "m", "trainer": {"learning_rate": 1e-6}} | table)


def test_a_fine_tuning_step_needs_a_rate_of_its_own() -> None:
    with pytest.raises(ConfigError, match="fine_tuning_steps needs fine_tuning_learning_rate"):
        job(fine_tuning_steps=3)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"fine_tuning_learning_rate": 1e-6}, "fine_tuning_learning_rate needs fine_tuning_steps"),
        ({"lora": {"alpha": 16.0}}, "alpha needs rank above 0"),
        ({"lora": {"targets": ["q_proj"]}}, "targets needs rank above 0"),
    ],
)
def test_what_would_have_no_effect_is_refused_unless_it_was_switched_off(
    trainer: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job(**trainer)
    job(fine_tuning_learning_rate=1e-6, fine_tuning_steps=0, lora={"rank": 0, "alpha": 16.0})
