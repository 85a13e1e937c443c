"""WeightPublisher: which settings and models are refused, and what is told about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rose.errors import CapacityError, ConfigError, RoseError
from rose.testing.memory_store import MemoryStore
from rose.weights.file_store import FileStore
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from tests.weights.publisher.kit import SMALL, FlakyStore
from tests.weights.toy import ToyTrainer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cast", "FP4"),
        ("anchor_every", 0),
        ("raw_density", 1.5),
        ("anchor_density", -0.1),
        ("chain_fraction", float("nan")),
        ("fragment_elements", 1000),
        ("fragment_elements", 1 << 30),
        ("bucket_bytes", 10),
        ("num_threads", 0),
    ],
)
def test_bad_parameters_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        WeightsParams(**{name: value})
    assert caught.value.field == f"weights.{name}"


@pytest.mark.parametrize("run_id", ["", "../x", "a/b"])
def test_bad_run_ids_are_refused(run_id: str) -> None:
    with pytest.raises(RoseError, match="run_id"):
        WeightPublisher(dict, MemoryStore(), run_id, 1)


def test_a_model_that_is_not_there_yet_is_no_version(store: FlakyStore) -> None:
    with pytest.raises(ConfigError, match="no rank gave any"):
        WeightPublisher(lambda: {}, store, "run", 1, SMALL).publish(0)
    assert store.get_head("run") is None


def test_patterns_are_a_tuple_and_one_that_fits_nothing_is_warned_of(
    trainer: ToyTrainer, store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"^weights\.keep: must be a tuple"):
        WeightsParams(keep="lm_head.*")  # type: ignore[arg-type]
    WeightPublisher(trainer.tensors, store, "run", 1, WeightsParams(keep=("*", "no-such-*"))).publish(0)
    assert [each.message for each in caplog.records if "keep" in each.message] == [
        "weights.keep: no tensor is called no-such-*"
    ]


def test_halves_that_become_the_other_kind_are_told_once(
    store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)).half()
    publisher = WeightPublisher(model, store, "run", 1)
    for version in range(2):
        publisher.publish(version)
    assert [each.message for each in caplog.records if "BF16" in each.message] == [
        "4 tensors are F16 and are published as BF16, 0.weight first: for engines of float16 say WeightsParams(cast='F16')"
    ]
    caplog.clear()
    WeightPublisher(model, store, "same", 1, WeightsParams(cast="F16")).publish(0)
    WeightPublisher(model.float(), store, "masters", 1).publish(0)
    assert not caplog.records


def test_a_store_that_is_to_take_less_than_two_copies_is_told(
    trainer: ToyTrainer, store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    WeightPublisher(trainer.tensors, store, "run", 1, WeightsParams(max_store_bytes=1 << 10)).publish(0)
    assert [
        each.message for each in caplog.records if each.message.startswith("weights.max_store_bytes: 1.0 KiB")
    ]


def test_an_anchor_that_is_larger_than_the_store_is_said_once_and_in_the_error(
    trainer: ToyTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = FileStore(tmp_path, max_total_bytes=1000, durable=False)
    with pytest.raises(
        CapacityError, match=r"store is full.*nothing is left to delete; a full copy of this model takes"
    ):
        WeightPublisher(trainer.tensors, small, "run", 1).publish(0)
    assert not caplog.records


def test_parameters_are_of_their_own_type(trainer: ToyTrainer, store: FlakyStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^params: must be WeightsParams, got dict"):
        WeightSubscriber(store, "run", tmp_path, {"cast": "BF16"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^params: must be WeightsParams, got dict"):
        WeightPublisher(trainer.tensors, store, "run", 1, {"cast": "BF16"})  # type: ignore[arg-type]
