"""The benchmark of streamed steps: its proof that updates are equal can fail, and its engines end requests."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.training.engines import EngineSpec, TimedEngine
from benchmarks.training.streamed import Proof, sequence_of
from rose.train.batch import TrainingSequence, samples_of
from tests.train.traces import random_batch


def parts_of(seed: int) -> list[list[TrainingSequence]]:
    groups: dict[str, list[TrainingSequence]] = {}
    for trace in random_batch(seed):
        for sample in samples_of(trace, vocab_size=512, max_tokens=2048):
            groups.setdefault(sample.group_id, []).append(sample)
    written = json.dumps([[asdict(one) for one in group] for group in groups.values()])
    return [[sequence_of(one) for one in group] for group in json.loads(written)]


def test_equal_updates_pass_and_others_do_not(tmp_path: Path) -> None:
    proof = Proof(tmp_path)
    proof.check(parts_of(1))
    assert proof.num_steps == 1
    assert proof.worst > 0.0  # two sums, not one and the same
    proof._whole.step([one for part in parts_of(3) for one in part])  # its weights are others now
    with pytest.raises(RuntimeError, match="gradients differ"):
        proof.check(parts_of(2))


def test_no_attribute_of_the_fake_engine_hides_a_method_of_the_timed_one() -> None:
    engine = TimedEngine(EngineSpec(name="d0"))
    methods = {name for name, value in vars(TimedEngine).items() if callable(value)}
    assert not methods & vars(engine).keys()
