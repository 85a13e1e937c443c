"""The recipe learns: the same trainer, loss and environment as in a real run, with torch in place of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.train.batch import samples_of
from rose.train.envs.frozenlake import FrozenLakeFamily, FrozenLakeParams
from rose.train.loss import LossParams
from rose.train.trainer import TorchTrainer, TrainerParams
from tests.train.offline import OfflineRollout, success_rate


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [0])
def test_success_rises_from_chance_to_most_episodes(policy_model: Path, seed: int) -> None:
    """Four maps instead of the demo's eight, and a smaller policy: the quick version."""
    trainer = TorchTrainer(
        policy_model,
        TrainerParams(
            learning_rate=1e-3,
            minibatch_sequences=16,
            num_epochs=2,
            loss=LossParams(entropy_weight=0.01),
            seed=seed,
        ),
    )
    family = FrozenLakeFamily(FrozenLakeParams(num_maps=4, seed=seed))
    rollout = OfflineRollout(trainer.rounded_model, policy_model, family, temperature=1.0, seed=seed)
    curve: list[float] = []
    for step in range(12):
        traces = rollout.run(step, 16)
        curve.append(success_rate(traces))
        samples = [one for trace in traces for one in samples_of(trace, vocab_size=320, max_tokens=1024)]
        report = trainer.step(samples)
        assert report.logprob_diff_max < 1e-3  # sampler and trainer compute one policy
    assert curve[0] < 0.35, curve
    assert max(curve[-3:]) > 0.8, curve
