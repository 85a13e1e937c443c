"""Steps that begin with the groups that are complete: the same update as of the whole batch at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.errors import ConfigError, TrainError
from rose.train.advantages import OverlongParams
from rose.train.batch import Minibatch, TrainingSequence, samples_of
from rose.train.build import trainer_params
from rose.train.check import check_job
from rose.train.client import SchedulerClient
from rose.train.guard import GuardParams
from rose.train.loss import LossParams
from rose.train.train_config import TrainConfig
from rose.train.trainer import TorchTrainer, TrainerParams
from rose.train.workers import Parts, TrainWorker
from tests.train.file_publisher import file_publisher
from tests.train.local_actors import LocalActors
from tests.train.local_run import SMALL, assert_applied_once, consumed_of, run
from tests.train.ray_world import SHORT_LAKES, LateGroups, job_table
from tests.train.traces import random_batch
from tests.train.world import World, running_world

TOLERANCE = 2e-5
"""Of the largest entry of a gradient: float32 sums in another order (as for two ranks, ``test_ranks.py``)."""


class Recording(TorchTrainer):
    """Remembers the gradients of each update."""

    def __init__(self, model_path: Path, params: TrainerParams) -> None:
        super().__init__(model_path, params)
        self.gradients: list[dict[str, torch.Tensor]] = []

    def _update(self, limit: float) -> float:
        self.gradients.append({name: one.clone() for name, one in self._policy.gradients().items()})
        return super()._update(limit)


def groups_of(seed: int) -> list[list[TrainingSequence]]:
    """Four groups: one of equal rewards, which teaches nothing; one whose members are too old; one with a member that was cut."""
    groups: dict[str, list[TrainingSequence]] = {}
    for trace in random_batch(seed):
        for sample in samples_of(trace, vocab_size=320, max_tokens=1024):
            groups.setdefault(sample.group_id, []).append(sample)
    found = list(groups.values())
    unequal = [[replace(one, reward=float(place % 2)) for place, one in enumerate(group)] for group in found]
    unequal[0] = [replace(one, reward=0.0) for one in unequal[0]]
    unequal[1] = [replace(one, masked=True) for one in unequal[1]]
    unequal[2][0] = replace(unequal[2][0], truncated=True)
    return unequal


def taken(
    model: Path,
    params: TrainerParams,
    groups: Sequence[Sequence[TrainingSequence]],
    begun: Sequence[int] = (),
    **told: Any,
) -> tuple[Recording, dict[str, Any]]:
    """A trainer after one step on ``groups``, of which it began with some, in this order."""
    trainer = Recording(model, params)
    for index in begun:
        trainer.begin(groups[index])
    report = trainer.step([sample for group in groups for sample in group], **told).to_dict()
    return trainer, report


def assert_same_step(left: tuple[Recording, dict[str, Any]], right: tuple[Recording, dict[str, Any]]) -> None:
    (one, first), (other, second) = left, right
    assert len(one.gradients) == len(other.gradients) > 0
    for ours, theirs in zip(one.gradients, other.gradients, strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            largest = float(gradient.abs().max())
            assert torch.allclose(gradient, theirs[name], atol=TOLERANCE * largest + 1e-9, rtol=1e-3), name
    for name, tensor in one.module.named_parameters():
        assert torch.allclose(tensor, dict(other.module.named_parameters())[name], atol=2e-5), name
    for name, value in first.items():
        if name not in ("seconds", "num_begun_in_vain"):
            assert value == pytest.approx(second[name], rel=1e-3, abs=1e-5), name


# With a floor under AdamW's divisor: an entry that is rounding in one sum and 0 in the other would be a whole step.
PARAMS = TrainerParams(
    learning_rate=1e-3,
    num_epochs=1,
    minibatch_sequences=64,
    adam_epsilon=1e-4,
    policy_dtype="float32",
    streamed="gradients",
)
RECIPES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss": LossParams(aggregation="sequence", kl_weight=0.04, entropy_weight=0.01)},
    "rloo": {
        "baseline": "others",
        "scale_advantages": "none",
        "loss": LossParams(objective="reinforce", aggregation="sum", kl_weight=0.03, kl_kind="reward"),
    },
    "gspo": {"loss": LossParams(ratio="sequence", aggregation="sequence")},
    "shaped": {
        "overlong": OverlongParams(max_tokens=20, buffer_tokens=10, filtering=True),
        "count_idle": False,
    },
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_streamed_step_is_the_step_on_the_whole_batch(policy_model: Path, recipe: str) -> None:
    params, groups = replace(PARAMS, **RECIPES[recipe]), groups_of(3)
    whole = taken(policy_model, params, groups)
    streamed = taken(policy_model, params, groups, (2, 0, 3, 1))
    assert_same_step(whole, streamed)
    assert streamed[1]["num_begun_in_vain"] == 0
    assert streamed[1]["num_updates"] == 1


def test_in_one_part_it_is_the_same_to_the_last_bit(policy_model: Path) -> None:
    """Nothing but the order of a sum differs."""
    groups = [[sample for group in groups_of(3) for sample in group]]
    (one, _), (other, _) = taken(policy_model, PARAMS, groups), taken(policy_model, PARAMS, groups, (0,))
    for left, right in zip(one.masters, other.masters, strict=True):
        assert torch.equal(left, right)


def test_gradients_are_there_before_the_batch_is(policy_model: Path) -> None:
    """What has begun is not computed again: the step itself passes nothing through the model."""
    trainer, groups = Recording(policy_model, PARAMS), groups_of(3)
    for group in groups:
        trainer.begin(group)

    def refuse(batch: Minibatch) -> Any:
        raise AssertionError("computed again")

    trainer._policy.log_probs = refuse
    report = trainer.step([sample for group in groups for sample in group])
    assert report.num_updates == 1


@pytest.mark.parametrize(
    ("change", "in_vain"),
    [
        ({"minibatch_sequences": 5}, True),
        ({"num_epochs": 2, "minibatch_sequences": 8}, True),
        ({"scale_advantages": "batch"}, True),
        ({"streamed": "log_probs", "num_epochs": 2, "minibatch_sequences": 5}, False),
        ({"streamed": "log_probs", "scale_advantages": "batch"}, False),
    ],
)
def test_what_gradients_cannot_begin_with_is_computed_at_the_end(
    policy_model: Path, change: dict[str, Any], in_vain: bool
) -> None:
    params, groups = replace(PARAMS, **change), groups_of(4)
    whole, streamed = (taken(policy_model, params, groups, order) for order in ((), (3, 1, 0, 2)))
    assert_same_step(whole, streamed)
    assert (streamed[1]["num_begun_in_vain"] > 0) == in_vain


def test_a_batch_that_turns_out_to_be_another_leaves_no_trace(policy_model: Path) -> None:
    groups = groups_of(5)
    whole = taken(policy_model, PARAMS, groups[:3])
    for begun in ((0, 3), (2,)):
        trainer = Recording(policy_model, PARAMS)
        for index in begun:
            trainer.begin(groups[index])
        report = trainer.step([sample for group in groups[:3] for sample in group]).to_dict()
        assert_same_step(whole, (trainer, report))


def test_a_starved_step_changes_nothing_and_the_next_has_none_of_its_gradients(policy_model: Path) -> None:
    params = replace(PARAMS, guard=GuardParams(min_informative=4))
    trainer, groups = Recording(policy_model, params), groups_of(6)
    before = [tensor.detach().clone() for tensor in trainer.masters]
    for group in groups:
        trainer.begin(group)
    report = trainer.step([sample for group in groups for sample in group])
    assert report.num_starved == 1
    assert report.num_begun_in_vain > 0
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.masters, strict=True))
    assert all(tensor.grad is None for tensor in trainer.masters)


def test_steps_in_a_row_with_the_guards_measure(policy_model: Path) -> None:
    """The shuffle of the next step, the optimiser's moments and the guard's state go on as without."""
    params = replace(PARAMS, guard=GuardParams(kl_target=0.05, adapt_rate=True, grad_quantile=0.9))
    whole, streamed = Recording(policy_model, params), Recording(policy_model, params)
    for seed in (7, 8):
        groups = groups_of(seed)
        batch = [sample for group in groups for sample in group]
        for group in groups:
            streamed.begin(group)
        left, right = whole.step(batch).to_dict(), streamed.step(batch).to_dict()
        assert_same_step((whole, left), (streamed, right))


# --- in a run ------------------------------------------------------------------------------------------

STREAMED = {"stream_groups": "gradients", "num_epochs": 1, "minibatch_sequences": 64, "fine_tuning_steps": 0}
UNEVEN = {"settings": SHORT_LAKES, "latency": {"median_s": 0.01, "sigma": 2.0}}
"""Environments with stragglers, so that groups end at different times."""


@pytest.fixture
def world(tmp_path: Path, policy_model: Path) -> Iterator[World]:
    with running_world(tmp_path, policy_model) as world:
        yield world


def rollout(mode: str) -> dict[str, Any]:
    return {**SMALL, "num_groups": 3, "mode": mode, "alpha": 2, "on_stale": "mask"}


class Calls:
    """Groups and sequences that trainers began with, and what their steps were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[set[str]] = []
        self.stepped: list[tuple[set[str], set[str]]] = []
        begin, step = TorchTrainer.begin, TorchTrainer.step
        since: set[str] = set()

        def noting_begin(trainer: TorchTrainer, samples: Sequence[TrainingSequence]) -> None:
            since.update(sample.trajectory_id for sample in samples)
            self.begun.append({sample.group_id for sample in samples})
            begin(trainer, samples)

        def noting_step(trainer: TorchTrainer, samples: Sequence[TrainingSequence], **told: Any) -> Any:
            self.stepped.append((set(since), {sample.trajectory_id for sample in samples}))
            since.clear()
            return step(trainer, samples, **told)

        monkeypatch.setattr(TorchTrainer, "begin", noting_begin)
        monkeypatch.setattr(TorchTrainer, "step", noting_step)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
async def test_a_streamed_run_begins_early_and_applies_each_trajectory_once(
    world: World, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A manager dies on the way, and the trainer."""
    calls, original = Calls(monkeypatch), TrainWorker._begin
    monkeypatch.setattr(LateGroups, "has_begun", False)
    monkeypatch.setattr(LateGroups, "num_free", 5)
    monkeypatch.setattr("rose.train.workers.LEASE_WAIT_S", 0.2)

    async def noting(worker: TrainWorker) -> bool:
        found = await original(worker)
        if worker._collected.num_missing > 0:
            LateGroups.has_begun |= found
            if not found:
                LateGroups.found_none()
        return found

    monkeypatch.setattr(TrainWorker, "_begin", noting)
    deeds = {0: "kill_manager", 2: "kill_trainer"}
    env = {"kind": "tests.train.ray_world:late_groups"}
    script, config, result = await run(
        world, deeds, num_steps=5, rollout=rollout(mode), env=env, trainer=STREAMED
    )

    assert (result.num_steps, result.num_restarts) == (5, 2)
    assert {step: len(ids) for step, ids in consumed_of(config).items()} == dict.fromkeys(range(5), 12)
    assert_applied_once(world, config)
    assert any(len(groups) < 3 for groups in calls.begun)
    assert any(record["streamed_s"] > 0.0 for record in script.records)
    assert all(record["num_begun_in_vain"] == 0 for record in script.records)
    assert all(given <= begun for begun, given in calls.stepped)  # of a step after a death, it began anew
    assert all(record["num_updates"] <= 1 for record in script.records)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("victim", "mode"),
    [
        ("kill_trainer", "synchronous"),
        ("kill_manager", "asynchronous"),
        pytest.param("kill_trainer", "asynchronous", marks=pytest.mark.conformance),
        pytest.param("kill_manager", "synchronous", marks=pytest.mark.conformance),
    ],
)
async def test_a_death_in_the_middle_of_a_step_loses_what_had_begun_and_nothing_else(
    world: World, monkeypatch: pytest.MonkeyPatch, mode: str, victim: str
) -> None:
    """Right after a part of the step's groups was computed: their leases are open, their gradients in memory alone."""
    original, num_calls = TrainWorker._begin, 0
    monkeypatch.setattr(LateGroups, "has_begun", False)
    monkeypatch.setattr("rose.train.workers.LEASE_WAIT_S", 0.2)

    def prepare(actors: LocalActors) -> None:
        async def dying(worker: TrainWorker) -> bool:
            nonlocal num_calls
            found = await original(worker)
            is_partial = found and worker._collected.num_missing > 0
            num_calls += is_partial
            LateGroups.has_begun |= is_partial
            if is_partial and num_calls == 1:
                getattr(actors, victim)()
                if victim == "kill_trainer":
                    await asyncio.Event().wait()
            return found

        monkeypatch.setattr(TrainWorker, "_begin", dying)

    env = {"kind": "tests.train.ray_world:late_groups"}
    _, config, result = await run(
        world, {}, prepare=prepare, num_steps=4, rollout=rollout(mode), env=env, trainer=STREAMED
    )
    assert num_calls >= 1
    assert (result.num_steps, result.num_restarts) == (4, 1)
    assert {step: len(ids) for step, ids in consumed_of(config).items()} == dict.fromkeys(range(4), 12)
    assert_applied_once(world, config)


@pytest.mark.timeout(300)
async def test_no_more_groups_are_begun_than_without(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trainer holds of an incomplete batch counts: the bound of staleness rests on it."""
    config_of, most = rollout("asynchronous"), 0

    def prepare(actors: LocalActors) -> None:
        original = TrainWorker._begin

        async def counting(worker: TrainWorker) -> bool:
            nonlocal most
            assert world.scheduler is not None
            found = await original(worker)
            book = world.scheduler.store.book
            open_groups = {group for (job, group), state in book.groups.items() if job == "loop"}
            most = max(most, len(open_groups))
            return found

        monkeypatch.setattr(TrainWorker, "_begin", counting)

    await run(world, {}, prepare=prepare, num_steps=5, rollout=config_of, env=UNEVEN, trainer=STREAMED)
    assert 3 < most <= (2 + 1) * 3


@pytest.mark.timeout(300)
async def test_dynamic_sampling_has_the_same_rounds(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of equal rewards are replaced, and only the others begun with."""
    calls = Calls(monkeypatch)
    trainer = {**STREAMED, "dynamic_sampling": {"enabled": True, "max_rounds": 3}}
    env = {"kind": "tests.train.ray_world:half_dull", "latency": UNEVEN["latency"]}
    script, config, _ = await run(
        world, {}, num_steps=3, rollout=rollout("synchronous"), env=env, trainer=trainer
    )
    assert_applied_once(world, config)
    assert sum(record["num_filtered_groups"] for record in script.records) > 0
    for record, (begun, given) in zip(script.records, calls.stepped, strict=True):
        assert begun == given or not begun  # nothing began of a step in which every group was set aside
        assert record["num_begun_in_vain"] == 0


class Plain:
    """A trainer that knows nothing of it."""

    def __init__(self, config: TrainConfig) -> None:
        self.step_index = 0


async def test_what_cannot_be_exact_is_refused_by_name(world: World) -> None:
    def job(**trainer: Any) -> TrainConfig:
        return TrainConfig.model_validate(
            job_table(world, rollout=rollout("synchronous"), trainer={**STREAMED, **trainer})
        )

    check_job(job())
    for change, field in (
        ({"num_epochs": 2}, "trainer.num_epochs"),
        ({"minibatch_sequences": 8}, "trainer.minibatch_sequences"),
        ({"algorithm": "lite_ppo"}, "trainer.scale_advantages"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_job(job(**change))
        assert caught.value.field == field
        check_job(job(**change, stream_groups="log_probs"))
    parts = Parts(make_publisher=file_publisher, make_trainer=Plain)
    with pytest.raises(TrainError, match="Plain has no begin") as refused:
        await run(world, {}, parts=parts, rollout=rollout("synchronous"), trainer=STREAMED)
    assert refused.value.field == "trainer.stream_groups"


def test_a_job_that_says_nothing_streams_where_it_is_exact(world: World) -> None:
    def job(trainer: dict[str, Any], **change: Any) -> TrainConfig:
        small = {name: one for name, one in rollout("synchronous").items() if name != "on_stale"}
        plain = {name: one for name, one in STREAMED.items() if name != "stream_groups"}
        return TrainConfig.model_validate(
            job_table(world, rollout={**small, **change}, trainer={**plain, **trainer})
        )

    found = job({})
    check_job(found)
    assert (found.streamed, found.stale_rule) == ("gradients", "mask")
    for other in (
        job({"stream_groups": "off"}),
        job({"num_epochs": 2}),
        job({"minibatch_sequences": 8}),
        job({}, mode="asynchronous"),
    ):
        check_job(other)
        assert (other.streamed, other.stale_rule) == ("off", None)
    waits = job({}, on_stale="wait")
    assert (waits.streamed, waits.stale_rule) == ("off", "wait")


class Unaware(TorchTrainer):
    """A whole trainer of one's own, without ``begin``."""

    begin = property()  # type: ignore[assignment]


async def test_a_trainer_without_begin_waits_for_its_batch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: set[str | None] = set()
    lease = SchedulerClient.lease

    def noting(client: SchedulerClient, **told: Any) -> Any:
        rules.add(told.get("on_stale"))
        return lease(client, **told)

    monkeypatch.setattr(SchedulerClient, "lease", noting)
    plain = {name: one for name, one in rollout("synchronous").items() if name != "on_stale"}
    trainer = {name: one for name, one in STREAMED.items() if name != "stream_groups"}
    parts = Parts(
        make_publisher=file_publisher,
        make_trainer=lambda config: Unaware(config.model, trainer_params(config)),
    )
    script, config, result = await run(
        world, {}, parts=parts, num_steps=2, rollout=plain, env=UNEVEN, trainer=trainer
    )
    assert result.num_steps == 2
    assert rules == {None}  # the scheduler's own
    assert_applied_once(world, config)
    assert all(record["streamed_s"] == 0.0 for record in script.records)
