"""Learning on fleets around its verdict: what a pair comes to, in which order arms run, and which versions play.  The fleets are the gate's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import learning_fleets
from benchmarks.training.fleets import FleetPlan
from benchmarks.training.learning_fleets import (
    ARMS,
    FIGURES,
    LAST_VERSIONS,
    KeepingTrainer,
    job_of,
    lakes,
    order_of,
    play_versions,
    summarise,
    verdict_of,
)
from rose.demo.demo_config import DemoConfig
from rose.demo.models import POLICY, ensure_model
from rose.train.batch import samples_of
from rose.train.envs.frozenlake_plan import LakePlanFamily
from tests.train.traces import random_batch


def run(arm: str, seed: int, held_out: float) -> dict[str, Any]:
    more = {"lag_mean": 0.5, "harvested_share": 0.1, "trained_s": 1.0, "turns_cut": 3}
    return {"arm": arm, "seed": seed, **dict.fromkeys(FIGURES, 0.5), **more, "held_out": held_out}


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.05, 0.05, "as well"),
        (-0.06, 0.01, "undecided"),
        (-0.2, -0.06, "different"),
        (0.06, 0.2, "different"),
        (-float("inf"), float("inf"), "undecided"),
    ],
)
def test_a_verdict_needs_the_whole_interval(low: float, high: float, verdict: str) -> None:
    assert verdict_of(low, high) == verdict


def test_pairs_are_of_one_seed_and_a_run_without_its_other_counts_for_nothing() -> None:
    runs = [run("dedicated", 0, 0.5), run("harvested", 0, 0.52), run("dedicated", 1, 0.7)]
    runs += [run("harvested", 1, 0.72), run("harvested", 2, 0.0), run("again", 0, 0.4)]

    found = summarise(runs)

    assert (found["pairs"], found["harvested.turns_cut"]) == (2, 6)
    assert found["harvested.held_out"] == pytest.approx(0.02)
    assert found["verdict"] == "undecided"  # before all seeds are there
    assert "again.held_out" not in found  # one pair has no interval


def test_all_seeds_together_have_a_verdict() -> None:
    arms = {"dedicated": 0.5, "harvested": 0.52}
    runs = [run(arm, seed, mean + seed / 100) for arm, mean in arms.items() for seed in learning_fleets.SEEDS]
    assert summarise(runs)["verdict"] == "as well"


def test_each_arm_comes_first_second_and_last_as_often() -> None:
    orders = [order_of(seed) for seed in learning_fleets.SEEDS]
    for place in range(len(ARMS)):
        assert {arm: [order[place] for order in orders].count(arm) for arm in ARMS} == dict.fromkeys(ARMS, 2)


def test_the_trainer_keeps_the_last_versions_as_the_engine_has_them(tmp_path: Path) -> None:
    plan = FleetPlan(config=DemoConfig(), cores=(0, 1), root=tmp_path, logs=tmp_path / "logs")
    small = replace(POLICY, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    plan.policy_model = ensure_model(small, tmp_path)
    trainer = KeepingTrainer(job_of(plan, 3, 5))
    name = next(iter(trainer.rounded_model.state_dict()))
    seen = []
    for step in range(LAST_VERSIONS + 2):
        batch = [
            one
            for trace in random_batch(step)
            for one in samples_of(trace, vocab_size=trainer.vocab_size, max_tokens=trainer.max_tokens)
        ]
        trainer.step(batch)
        seen.append(trainer.rounded_model.state_dict()[name].clone())

    assert [kept[name].equal(one) for kept, one in zip(trainer.kept, seen[2:], strict=True)] == [
        True
    ] * LAST_VERSIONS
    assert not trainer.kept[0][name].equal(trainer.kept[-1][name])


def test_versions_play_boards_that_neither_the_start_nor_training_has_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = {tuple(task["map"]) for task in LakePlanFamily(replace(lakes(100_003), num_maps=64)).tasks()}
    trained = {tuple(task["map"]) for task in LakePlanFamily(lakes(3)).tasks()}
    held_out = {tuple(task["map"]) for task in LakePlanFamily(lakes(3)).held_out_tasks(64)}
    assert len(held_out) == 64
    assert not held_out & (read | trained)


def test_a_versions_play_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that differ play differently, and one plays the same twice."""
    from transformers import Qwen3ForCausalLM

    monkeypatch.setattr(learning_fleets, "NUM_HELD_OUT", 8)
    folder = ensure_model(POLICY, seed=3)
    model = Qwen3ForCausalLM.from_pretrained(folder)
    first = {name: one.clone() for name, one in model.state_dict().items()}
    seen: list[float] = []

    def told(model: Any, *_: Any, **__: Any) -> tuple[float, ...]:
        seen.append(float(model.state_dict()["model.norm.weight"].sum()))
        return (0.5,)

    monkeypatch.setattr(learning_fleets, "success_on", told)
    second = first | {"model.norm.weight": first["model.norm.weight"] * 2}

    found = play_versions(model, [first, second], folder, 3)

    assert found == dict.fromkeys(FIGURES, 0.5)
    assert len(seen) == 8
    assert seen[4] == pytest.approx(2 * seen[0])
