"""An agent that rewrites its history makes several sequences of one episode.  What the episode counts stays the same; computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rose.errors import TrainError
from rose.train.batch import TrainingSequence, samples_of
from rose.train.loss import LossParams
from rose.train.recipes import AdvantageScale, Aggregation
from rose.train.trainer import TorchTrainer, TrainerParams
from tests.train.traces import trajectory, turn


def episodes() -> list[TrainingSequence]:
    """One group: an episode that succeeds, in a branch of 1 sampled token and one of 3, and one that fails, of 2 tokens."""
    first = trajectory([turn([10], [1]), turn([20], [3, 4, 5])], id="forked", reward=1.0)
    second = trajectory([turn([30], [6, 7])], id="plain", reward=0.0)
    return [sample for one in (first, second) for sample in samples_of(one, vocab_size=320, max_tokens=64)]


def params(aggregation: Aggregation, scale: AdvantageScale = "group") -> TrainerParams:
    loss = LossParams(aggregation=aggregation, sum_tokens=8, correction="none")
    return TrainerParams(learning_rate=1e-9, num_epochs=1, scale_advantages=scale, loss=loss)


@pytest.mark.parametrize(
    ("aggregation", "scale", "loss"),
    [
        # (r - 1/2) / (1/2): 1 and -1.  The mean over two episodes of the mean over their tokens, whatever branch they are in.
        ("sequence", "group", -(4 * 1 / 4 - 2 * 1 / 2) / 2),
        # r - 1/2, over the constant of 8 tokens and two episodes.
        ("sum", "none", -(4 * 0.5 / 8 - 2 * 0.5 / 8) / 2),
        # One mean over all six tokens.
        ("token", "group", -(4 * 1 - 2 * 1) / 6),
    ],
)
def test_an_episode_counts_once_and_its_branches_share_its_advantage(
    policy_model: Path, aggregation: Aggregation, scale: AdvantageScale, loss: float
) -> None:
    """Ratios are 1 in the first update, so that the loss is the advantages' alone."""
    samples = episodes()
    assert [len(sample.positions) for sample in samples] == [1, 3, 2]
    report = TorchTrainer(policy_model, params(aggregation, scale)).step(samples)
    assert report.loss == pytest.approx(loss, abs=1e-6)


def test_branches_in_minibatches_of_their_own_weigh_by_their_tokens(policy_model: Path) -> None:
    """A minibatch is a mean over what it holds: one of a quarter of an episode is divided by a quarter."""
    trainer = TorchTrainer(policy_model, replace(params("sequence"), minibatch_sequences=1))
    report = trainer.step(episodes())
    assert report.num_updates == 3
    assert report.loss == pytest.approx(-(1 + 1 - 1) / 3, abs=1e-6)


def test_branches_of_equal_lengths_are_measured_each_by_itself(policy_model: Path) -> None:
    """Told the trainer's own log-probs, none of their tokens is off."""
    forked = trajectory([turn([10], [1]), turn([20], [9])], id="forked", reward=1.0)
    plain = trajectory([turn([30], [6, 7])], id="plain", reward=0.0)
    samples = [one for trace in (forked, plain) for one in samples_of(trace, vocab_size=320, max_tokens=64)]
    assert samples[0].positions == samples[1].positions
    trainer = TorchTrainer(policy_model, params("sequence"))
    told = trainer.log_probs(samples)
    samples = [
        replace(one, logprobs=tuple(map(float, values))) for one, values in zip(samples, told, strict=True)
    ]
    report = trainer.step(samples)
    assert report.mismatch_kl == pytest.approx(0.0, abs=1e-9)
    assert report.logprob_diff_max == pytest.approx(0.0, abs=1e-6)


def test_a_branch_that_is_told_twice_is_refused(policy_model: Path) -> None:
    trainer = TorchTrainer(policy_model, params("sequence"))
    with pytest.raises(TrainError, match="forked"):
        trainer.step([*episodes(), episodes()[0]])
