"""The trainer's weights reach the store that the job names, as the engines will hold them."""

from __future__ import annotations

from pathlib import Path

from rose.auth import Tokens
from rose.train.batch import samples_of
from rose.train.build import make_publisher
from rose.train.train_config import TrainConfig
from rose.train.trainer import TorchTrainer, TrainerParams
from tests.train.traces import random_batch


def test_a_job_publishes_an_anchor_then_sparse_deltas_and_a_new_attempt_starts_over(
    policy_model: Path, tmp_path: Path
) -> None:
    config = TrainConfig.model_validate(
        {
            "model": policy_model,
            "weights": {"directory": tmp_path / "store"},
            "trainer": {"learning_rate": 1e-3},
        }
    )
    trainer = TorchTrainer(policy_model, TrainerParams(learning_rate=1e-3))
    batch = [s for one in random_batch(0) for s in samples_of(one, vocab_size=320, max_tokens=1024)]

    publisher = make_publisher(config, Tokens.generate(), trainer.module, 1)
    first = publisher.publish(0)
    trainer.step(batch, learning_rate=5e-6, single_update=True)
    second = publisher.publish(1, step=0, lr=5e-6)
    restarted = make_publisher(config, Tokens.generate(), trainer.module, 2).publish(1)

    assert (first.kind, second.kind, restarted.kind) == ("anchor", "delta", "anchor")
    assert first.bytes_dense == 2 * sum(tensor.numel() for tensor in trainer.module.parameters())
    assert 0.0 < second.density < 0.1
    assert second.bytes_sent < first.bytes_dense / 4
