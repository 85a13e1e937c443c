"""Advantages and loss against a plain float64 reference, written out token by token."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rose.errors import TrainError
from rose.train.advantages import (
    OverlongParams,
    group_advantages,
    overlong_penalty,
    uninformative_groups,
)
from rose.train.envs.base import MAX_REWARD
from rose.train.loss import (
    LossParams,
    distinct_restrictions,
    effective_sample_size,
    entropy,
    mismatch,
    policy_loss,
    restricted_log_softmax,
    share_divisor,
    undivided_shares,
)
from rose.train.recipes import Aggregation


def reference_loss(
    current: list[float],
    proximal: list[float],
    behaviour: list[float],
    advantage: list[float],
    num_tokens: int,
) -> float:
    total = 0.0
    for c, p, b, a in zip(current, proximal, behaviour, advantage, strict=True):
        ratio = math.exp(c - p)
        clipped = min(max(ratio, 0.8), 1.28)
        weight = min(math.exp(p - b), 2.0)
        total += weight * -min(ratio * a, clipped * a)
    return total / num_tokens


def random_tokens(seed: int, count: int = 200) -> list[list[float]]:
    rng = random.Random(seed)
    proximal = [-rng.uniform(0.05, 3.0) for _ in range(count)]
    current = [value + rng.gauss(0.0, 0.4) for value in proximal]
    behaviour = [value + rng.gauss(0.0, 0.6) for value in proximal]
    advantage = [rng.gauss(0.0, 1.5) for _ in range(count)]
    return [current, proximal, behaviour, advantage]


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_the_reference(seed: int) -> None:
    current, proximal, behaviour, advantage = random_tokens(seed)
    current_N = torch.tensor(current, dtype=torch.float64, requires_grad=True)

    loss, _ = policy_loss(
        current_N=current_N,
        proximal_N=torch.tensor(proximal, dtype=torch.float64),
        behaviour_N=torch.tensor(behaviour, dtype=torch.float64),
        advantage_N=torch.tensor(advantage, dtype=torch.float64),
        share_N=torch.full((200,), 1 / 250, dtype=torch.float64),
        sequence_N=torch.arange(200),
        params=LossParams(),
    )
    loss.backward()

    assert loss.item() == pytest.approx(
        reference_loss(current, proximal, behaviour, advantage, 250), abs=1e-12
    )
    assert current_N.grad is not None
    step = 1e-6
    for index in range(0, 200, 17):
        up, down = list(current), list(current)
        up[index] += step
        down[index] -= step
        slope = (
            reference_loss(up, proximal, behaviour, advantage, 250)
            - reference_loss(down, proximal, behaviour, advantage, 250)
        ) / (2 * step)
        assert float(current_N.grad[index]) == pytest.approx(slope, abs=1e-7)


def test_each_policy_plays_its_own_part() -> None:
    """Ratio 1 between current and proximal: the loss is the truncated weight times -A, whatever the engine said."""
    one = torch.zeros(1, dtype=torch.float64)

    def loss_of(behaviour: float) -> float:
        return float(
            policy_loss(
                current_N=one - 1.0,
                proximal_N=one - 1.0,
                behaviour_N=one + behaviour,
                advantage_N=one + 1.0,
                share_N=one + 1.0,
                sequence_N=torch.zeros(1, dtype=torch.long),
                params=LossParams(),
            )[0]
        )

    assert loss_of(-1.0) == pytest.approx(-1.0)
    assert loss_of(-1.0 - math.log(1.5)) == pytest.approx(-1.5)
    assert loss_of(-9.0) == pytest.approx(-2.0)  # truncated
    assert loss_of(0.0) == pytest.approx(-math.exp(-1.0))


def test_clip_stops_the_gradient_only_in_the_direction_that_has_gone_far_enough() -> None:
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 1.27], [1.0, -1.0, 1.0, -1.0, 1.0]
    current_N = torch.tensor([math.log(ratio) for ratio in ratios], requires_grad=True)

    loss, num_held_back = policy_loss(
        current_N=current_N,
        proximal_N=torch.zeros(5),
        behaviour_N=torch.zeros(5),
        advantage_N=torch.tensor(advantages),
        share_N=torch.full((5,), 0.2),
        sequence_N=torch.arange(5),
        params=LossParams(),
    )
    loss.backward()

    assert current_N.grad is not None
    assert [bool(slope != 0.0) for slope in current_N.grad] == [False, True, True, False, True]
    assert int(num_held_back) == 2


def test_log_probs_are_those_of_the_restricted_tempered_distribution() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_NV = torch.randn(3, 10, generator=generator, dtype=torch.float64)
    allowed_KV, index = distinct_restrictions([(2, 5), None, (1, 2, 3)], 10)

    log_probs_NV = restricted_log_softmax(
        logits_NV, torch.tensor([0.7, 1.0, 2.0]), allowed_KV, torch.tensor(index)
    )

    for row, (temperature, allowed) in enumerate([(0.7, (2, 5)), (1.0, range(10)), (2.0, (1, 2, 3))]):
        weights = {token: math.exp(float(logits_NV[row, token]) / temperature) for token in allowed}
        for token in range(10):
            expected = math.log(weights[token] / sum(weights.values())) if token in weights else -math.inf
            assert float(log_probs_NV[row, token]) == pytest.approx(expected, abs=1e-6)
        probabilities = [weight / sum(weights.values()) for weight in weights.values()]
        expected = -sum(p * math.log(p) for p in probabilities)
        assert float(entropy(log_probs_NV)[row]) == pytest.approx(expected, abs=1e-6)


def test_gradient_through_a_restriction_is_finite_and_zero_on_forbidden_tokens() -> None:
    logits_NV = torch.randn(2, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
    allowed_KV, index = distinct_restrictions([(0, 1), (0, 1)], 6)

    log_probs_NV = restricted_log_softmax(logits_NV, torch.ones(2), allowed_KV, torch.tensor(index))
    (log_probs_NV[:, 0].sum() + entropy(log_probs_NV).sum()).backward()

    assert logits_NV.grad is not None
    assert bool(torch.isfinite(logits_NV.grad).all())
    assert bool((logits_NV.grad[:, 2:] == 0.0).all())


def test_advantage_is_the_reward_against_its_own_group() -> None:
    rewards = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 1.0, "x": 5.0, "y": 7.0}
    groups = dict.fromkeys("abcd", "g1") | {"x": "g2", "y": "g2"}

    assert group_advantages(rewards, groups) == pytest.approx(
        {"a": 1.0, "b": -1.0, "c": -1.0, "d": 1.0, "x": -1.0, "y": 1.0}
    )
    assert group_advantages(rewards, groups, scale="none")["a"] == pytest.approx(0.5)


def test_rloo_compares_with_the_others_alone() -> None:
    rewards = {"a": 1.0, "b": 0.0, "c": 0.5}
    found = group_advantages(rewards, dict.fromkeys("abc", "g"), baseline="others", scale="none")
    assert found == pytest.approx({"a": 1.0 - 0.25, "b": 0.0 - 0.75, "c": 0.5 - 0.5})


def test_shares_add_up_to_one_and_weigh_tokens_or_sequences_alike() -> None:
    def shares(aggregation: Aggregation) -> list[float]:
        return [
            one / share_divisor([1, 3], [1, 3], aggregation)
            for one in undivided_shares([1, 3], aggregation, 100)
        ]

    assert shares("token") == [0.25, 0.25]
    assert shares("sequence") == pytest.approx([1 / 2, 1 / 6])
    assert shares("sum") == [1 / 200, 1 / 200]


def test_length_costs_nothing_until_the_buffer_and_no_more_than_the_weight() -> None:
    params = OverlongParams(max_tokens=100, buffer_tokens=20, weight=0.5)
    found = [overlong_penalty(length, params) for length in (10, 80, 90, 100, 500)]
    assert found == pytest.approx([0.0, 0.0, -0.25, -0.5, -0.5])
    assert overlong_penalty(10**6, OverlongParams()) == 0.0


def test_only_groups_of_equal_rewards_teach_nothing() -> None:
    rewards = {"a": 1.0, "b": 1.0, "x": 0.0, "y": 1.0}
    assert uninformative_groups(rewards, {"a": "g", "b": "g", "x": "h", "y": "h"}) == {"g"}


def test_effective_sample_size_is_that_of_kish() -> None:
    assert effective_sample_size(torch.tensor([2.0, 2.0, 2.0])) == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)


def test_of_a_batch_whose_every_token_is_masked_nothing_is_effective() -> None:
    """And no NaN: what is told of a step is JSON."""
    assert effective_sample_size(torch.zeros(4)) == 0.0


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    assert group_advantages({"a": 0.3, "b": 0.3}, {"a": "g", "b": "g"}) == {"a": 0.0, "b": 0.0}


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e31])
def test_a_reward_out_of_range_is_refused_by_name(reward: float) -> None:
    with pytest.raises(TrainError, match="trajectory a is out of range") as caught:
        group_advantages({"a": reward}, {"a": "g"})
    assert caught.value.field == "reward"


def test_what_length_takes_from_the_least_reward_that_there_may_be_is_no_error() -> None:
    found = group_advantages({"a": -MAX_REWARD - 1.0, "b": MAX_REWARD}, {"a": "g", "b": "g"})
    assert found == pytest.approx({"a": -1.0, "b": 1.0})


def test_mismatch_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    log_probs_N = torch.tensor([-0.5, -1.0, -2.0])
    assert mismatch(log_probs_N, log_probs_N) == {
        "mismatch_kl": 0.0,
        "ratio_p99": 1.0,
        "logprob_diff_max": 0.0,
    }
    apart = mismatch(log_probs_N, log_probs_N + torch.tensor([0.1, -0.1, 0.3]))
    assert apart["mismatch_kl"] > 0.0
    assert apart["logprob_diff_max"] == pytest.approx(0.3)
    assert apart["ratio_p99"] == pytest.approx(math.exp(0.3))


def test_mismatch_is_a_number_however_far_apart_the_policies_are() -> None:
    found = mismatch(torch.tensor([-900.0, -1.0]), torch.tensor([-0.5, -1.0]))
    assert all(map(math.isfinite, found.values()))
    assert found["logprob_diff_max"] == pytest.approx(899.5)
