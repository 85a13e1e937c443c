"""The trainer's weights reach the store that the job names, as the engines will hold them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rose.auth import Tokens
from rose.errors import ConfigError
from rose.signatures import SigningKey
from rose.train.batch import samples_of
from rose.train.build import make_publisher, signing_key, weight_store
from rose.train.train_config import TrainConfig
from rose.train.trainer import TorchTrainer, TrainerParams
from rose.weights.sealed import SealedStore
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


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"publish_key": ""}, r"no key to sign.*--upgrade.*weights\.signed = false"),
        ({"publish_key": SigningKey.generate().delegate().text}, "anchors only"),
        ({"publish_key": SigningKey.generate().text}, r"the token file names another.*nodes would refuse"),
    ],
)
def test_a_key_that_nodes_would_not_take_is_refused_before_training(
    spoil: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        signing_key(replace(Tokens.generate(), **spoil))


def test_under_a_new_key_the_attempts_of_the_old_one_count(tmp_path: Path) -> None:
    old, new = Tokens.generate(), Tokens.generate()
    both = replace(new, public_key=f"{old.public_key} {new.public_key}")
    table = {"model": "m", "trainer": {"learning_rate": 1e-6}, "weights": {"directory": tmp_path}}
    config = TrainConfig.model_validate(table)
    make_publisher(config, old, torch.nn.Linear(4, 4), 5).publish(0)
    for tokens, attempt in ((both, 5), (new, None)):
        store = weight_store(config, tokens)
        head = store.get_head(config.run_id)
        assert (head and head.attempt) == attempt
        store.close()
    make_publisher(config, both, torch.nn.Linear(4, 4), 6).publish(0)


def test_versions_are_signed_unless_the_job_says_otherwise(tmp_path: Path) -> None:
    tokens = Tokens.generate()
    table = {"model": "m", "trainer": {"learning_rate": 1e-6}}
    other = TrainConfig.model_validate(table | {"weights": {"directory": tmp_path / "rank"}})
    store = weight_store(other, replace(tokens, publish_key=""), signs=False)  # of another rank than 0
    assert not isinstance(store, SealedStore)
    for signed in (True, False):
        weights = {"directory": tmp_path / str(signed), "signed": signed}
        store = weight_store(TrainConfig.model_validate(table | {"weights": weights}), tokens)
        assert isinstance(store, SealedStore) is signed
        store.close()
