"""The equivalence gate around its verdict: what is made of a lease, what is kept, and a trainer that changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.training import equivalence
from benchmarks.training.equivalence_play import (
    COUNTED,
    Ends,
    FrozenTrainer,
    Sketch,
    group_of,
    job_of,
    record,
)
from benchmarks.training.equivalence_sums import FLEETS, Group
from benchmarks.training.fleets import FleetPlan, on_core, worth_a_cut
from rose.demo.demo_config import DemoConfig
from rose.demo.models import POLICY, ensure_model
from rose.testing.fake_engine import Fault
from rose.train.batch import samples_of
from rose.train.train_config import TrainConfig
from rose.train.workers import Parts
from tests.benchmarks.test_equivalence_sums import fleet
from tests.train.file_publisher import RUN, file_publisher
from tests.train.traces import random_batch
from tests.train.world import running_world


def turn(
    segments: list[tuple[str, int]], versions: list[tuple[str, int, int]], **more: Any
) -> dict[str, Any]:
    told = [
        {"tier": tier, "n": count, "attempt": number}
        for number, (tier, count) in enumerate(segments, start=1)
    ]
    ids = [10 + index % 4 for index in range(36)]
    return {"token_ids": ids, "segments": told, "versions": versions, **more}


def trajectory(success: bool, moves: int, one: dict[str, Any], **more: Any) -> dict[str, Any]:
    task = {"map": ["SF", "FG"]}
    return {
        "id": f"t{moves}",
        "success": success,
        "info": {"moves": moves},
        "task": task,
        "turns": [one],
        **more,
    }


def test_a_leased_group_is_summed_and_its_cut_turns_counted() -> None:
    both = [("1.4", 0, 20), ("1.5", 20, 16)]
    new = [("1.5", 0, 36)]
    members = [
        trajectory(True, 3, turn([("harvested", 20), ("dedicated", 16)], both)),
        trajectory(False, 5, turn([("harvested", 4), ("harvested", 32)], new), stale=True),
        trajectory(True, 4, turn([("harvested", 6), ("dedicated", 30)], new)),
        trajectory(True, 2, turn([("dedicated", 6), ("harvested", 30)], new)),
        trajectory(False, 6, turn([("harvested", 36)], new)),
    ]
    ends = Ends()
    ends.take(
        {
            "spans": [
                (1, "w", "harvested", "t3", 1, 0.0, 1.0, "reclaim"),
                (2, "w", "dedicated", "t3", 2, 1.0, 2.0, "done"),
                (3, "w", "harvested", "t5", 1, 0.0, 1.0, "reclaim"),
                (4, "w", "harvested", "t4", 1, 0.0, 1.0, "migrate"),
                (5, "w", "dedicated", "t2", 1, 0.0, 1.0, "reclaim"),
                (6, "w", "harvested", "t6", 1, 0.0, None, ""),
            ]
        }
    )
    group, counted = group_of(
        members,
        version=(1, 5),
        boards=[["SG", "FF"], ["SF", "FG"]],
        actions=[10, 11, 12, 13],
        gradient=np.zeros(2),
        ends=ends.how,
    )
    assert (group.board, group.episodes, group.wins, group.moves) == (1, 5, 3, 20)
    assert (group.tokens, group.lag) == (180, 20)
    assert (group.cut, group.cut_wins) == (2, 1)
    assert (counted["moved"], counted["migrated"], counted["deep"]) == (4, 1, 1)
    assert (counted["stale"], counted["versions"]) == (1, 1)
    assert np.array(group.actions).reshape(36, 4).sum(axis=0).tolist() == [45, 45, 45, 45]
    assert group.actions[:8] == (5, 0, 0, 0, 0, 5, 0, 0)


def rows(count: int, wins: int = 8, cut: int = 0) -> list[dict[str, Any]]:
    extra = dict.fromkeys(COUNTED, 0)
    return [{**one.to_json(), "wins": wins, **extra} for one in fleet(0, num_groups=count, cut=cut)]


STEP = {"seconds": 10.0, "whole_s": 70.0, "num_stale_groups": 2}


def test_a_step_that_was_torn_is_leased_again(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    store = equivalence.Store(path)
    store.add(rows(8), STEP, level="0.5", fleet="uncut", part=0, seed=7)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])

    again = equivalence.Store(path)
    assert (len(again.of("group", "0.5", "uncut")), len(again.of("step", "0.5", "uncut"))) == (8, 1)
    assert path.read_bytes() == whole
    assert again.lines == store.lines


def test_every_start_has_a_seed_of_its_own() -> None:
    seeds = [
        equivalence.seed_of(str(level), name, part)
        for level in equivalence.LEVELS
        for name in FLEETS
        for part in range(100)
    ]
    assert len(set(seeds)) == len(seeds)


def test_a_run_that_is_not_whole_is_told_and_not_judged(tmp_path: Path) -> None:
    store = equivalence.Store(tmp_path / "groups.jsonl")
    for part in range(2):
        for name in ("dedicated", "harvested"):
            store.add(rows(8, cut=4), STEP, level="0.5", fleet=name, part=part, seed=part)

    found = equivalence.summarise(store, ["0.2", "0.5", "0.9"])
    assert (found["0.5.verdict"], found["met"]) == ("not judged", False)
    assert found["0.5.reason"] == "dedicated has 256 of 5000 episodes"
    assert found["0.5.dedicated.success"] == 0.5
    assert (found["0.5.harvested.groups_given_up_as_stale"], found["0.5.harvested.starts"]) == (4, 2)
    assert found["0.5.harvested_dedicated.success"] == 0.0
    assert "0.2.verdict" not in found


def test_the_hours_of_the_whole_follow_from_a_pilot(tmp_path: Path) -> None:
    store = equivalence.Store(tmp_path / "pilot.jsonl")
    for name in FLEETS:
        for step in range(3):
            told = {**STEP, "seconds": 30.0 + 10.0 * step, "whole_s": 90.0 + 10.0 * step}
            store.add(rows(8), told, level="0.5", fleet=name, part=0, seed=0)

    found = equivalence.trial_summary(store, "pilot")
    assert found["uncut.tokens_per_s"] == 460.8
    # Three fleets at three levels: a minute to start, and forty steps of ten seconds.
    assert found["hours_of_the_whole"] == round(9 * (60 + 40 * 10) / 3600, 2)
    assert not any("verdict" in name for name in found)
    store.lines = store.of("step", "0.5", "uncut") + store.of("group", "0.5", "uncut")
    assert "hours_of_the_whole" not in equivalence.trial_summary(store, "pilot")


def test_a_run_goes_on_from_its_file_and_a_trial_cannot_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    store = equivalence.Store(path.with_suffix(".groups.jsonl"))
    store.add(rows(8), {**STEP, "commit": "abc"}, level="0.5", fleet="uncut", part=0, seed=7)

    def run(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["equivalence.py", "--json", str(path), *options])
        return equivalence.main()

    # Groups without a result are of another run: kept, and left out.
    assert run("--judge") == 0
    assert "0.5.uncut.episodes" not in json.loads(path.read_text())["summary"]
    path.with_suffix(".groups.old").rename(path.with_suffix(".groups.jsonl"))

    assert run("--judge") == 0
    found = json.loads(path.read_text())
    assert (found["summary"]["0.5.uncut.episodes"], found["details"]["seeds"]) == (128, [7])
    with pytest.raises(SystemExit):
        run("--pilot")
    assert "name another for a trial" in capsys.readouterr().err


def test_a_frozen_trainer_measures_each_group_and_changes_nothing(tmp_path: Path) -> None:
    recipe = replace(POLICY, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    plan = FleetPlan(config=DemoConfig(), cores=(0, 1), root=tmp_path, logs=tmp_path)
    plan.policy_model = ensure_model(recipe, tmp_path)
    trainer = FrozenTrainer(job_of(plan, 1))
    before = [one.detach().clone() for one in trainer.masters]
    batch = [one for trace in random_batch(0) for one in samples_of(trace, vocab_size=320, max_tokens=512)]
    batch = [replace(one, reward=1.0) if one.group_id == "g0" else one for one in batch]

    report = trainer.step(batch)
    together = dict(trainer.gradients)
    trainer.step([one for one in batch if one.group_id == "g2"])

    assert (report.num_sequences, report.num_updates, trainer.step_index) == (16, 0, 2)
    assert all(torch.equal(*pair) for pair in zip(before, trainer.masters, strict=True))
    assert sorted(together) == ["g0", "g1", "g2", "g3"]
    # Of equal rewards there is nothing to learn; of others the gradient is the group's own, whoever is beside it.
    assert not together["g0"].any()
    assert together["g2"].any()
    np.testing.assert_allclose(trainer.gradients["g2"], together["g2"], rtol=1e-5, atol=1e-9)


def test_a_projection_keeps_products() -> None:
    draws = torch.Generator().manual_seed(0)
    one = torch.randn(20_000, generator=draws)
    other = 0.6 * one + 0.8 * torch.randn(20_000, generator=draws)
    sketch = Sketch(20_000)
    ours, theirs = sketch.of([one[:5], one[5:]]), sketch.of([other])
    assert ours @ theirs / np.sqrt((ours @ ours) * (theirs @ theirs)) == pytest.approx(0.6, abs=0.08)


def test_what_a_loop_is_leased_is_recorded_with_its_cuts(tmp_path: Path) -> None:
    """Real scheduler, loop and environments; engines in torch, the second of which loses every turn that it begins after six tokens."""
    recipe = replace(POLICY, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    plan = FleetPlan(config=DemoConfig(), cores=(0, 1), root=tmp_path, logs=tmp_path)
    plan.policy_model = ensure_model(recipe, tmp_path)
    steps: list[tuple[list[Mapping[str, Any]], Mapping[str, Any]]] = []
    with running_world(tmp_path / "world", plan.policy_model) as world:
        world.engines[1].faults.extend(Fault(kind="reclaim", after=6) for _ in range(1000))
        # Room for two turns on the first: else, by who is heard of first with a new version, it plays all of them.
        world.nodes[0].kv_budget_tokens = 300
        small = {"num_groups": 2, "group_size": 4}
        table = job_of(plan, 2).model_dump()
        config = TrainConfig.model_validate(
            {
                **table,
                "rollout": {**table["rollout"], **small},
                "scheduler": {"url": world.url},
                "weights": {"directory": world.versions},
                "job": RUN,
            }
        )
        parts = Parts(make_trainer=FrozenTrainer, make_publisher=file_publisher)

        def sink(rows: Sequence[Mapping[str, Any]], step: Mapping[str, Any]) -> None:
            steps.append((list(rows), step))

        asyncio.run(record(config, world.tokens, parts, sink, lambda text: None))
        assert world.scheduler is not None
        turns = [turn for one in world.scheduler.store.trajectories.values() for turn in one.turns]

    assert [len(rows) for rows, _ in steps] == [2, 2]
    groups = [Group.from_json(row) for rows, _ in steps for row in rows]
    assert {(one.episodes, one.tokens) for one in groups} == {(4, 4 * 36)}
    assert not any(one.lag for one in groups[:2])  # of the version that leased them
    # Turns that began on the second engine were cut there, and the tokens of both engines are one turn's.
    cut, moved = sum(one.cut for one in groups), sum(row["moved"] for rows, _ in steps for row in rows)
    assert 0 < cut <= moved <= sum(len(turn.segments) > 1 for turn in turns)


@pytest.mark.parametrize(
    ("before", "now", "worth"),
    [
        ((10, 200), (12, 232), True),
        ((10, 200), (12, 231), False),
        ((10, 200), (10, 200), False),  # it stands
        ((10, 200), (2, 64), False),  # it is another engine
    ],
)
def test_harvesting_is_switched_off_where_an_engine_decodes_for_many(
    before: tuple[int, int], now: tuple[int, int], worth: bool
) -> None:
    assert worth_a_cut(before, now) is worth


async def test_training_has_a_core_to_itself_and_programs_are_started_from_all() -> None:
    ours = os.sched_getaffinity(0)
    core = max(ours)
    seen: list[set[int]] = []

    async def work() -> None:
        seen.append(os.sched_getaffinity(0))
        seen.append(await asyncio.to_thread(os.sched_getaffinity, 0))

    await on_core(core, work())

    assert seen == [{core}, {core}]
    assert os.sched_getaffinity(0) == ours


async def test_training_on_a_core_of_its_own_ends_when_the_part_is_broken_off() -> None:
    here, begun, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        here.call_soon_threadsafe(begun.set)
        try:
            await asyncio.Event().wait()
        finally:
            here.call_soon_threadsafe(ended.set)

    running = asyncio.ensure_future(on_core(max(os.sched_getaffinity(0)), work()))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await ended.wait()


async def test_what_went_wrong_on_a_core_of_its_own_is_told() -> None:
    async def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await on_core(max(os.sched_getaffinity(0)), work())


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_fleets_second_engine_is_its_own(tmp_path: Path, fleet: str) -> None:
    """Both that may be the second are of one name, and so of one file."""
    plan = FleetPlan(config=DemoConfig(), cores=(0, 1), root=tmp_path, logs=tmp_path / "logs")
    plan.prepare_fleet(fleet)

    started = [program.spec.name for program in plan.fleet(fleet)]

    written = tmp_path / "harvested.toml"
    assert ("harvested" in started) == written.exists() == (fleet != "dedicated")
    assert ("production" in started) == (fleet == "harvested")
    assert plan.work_core(fleet) == (0 if started[-1] == "dedicated" else 1)
    if written.exists():
        node = tomllib.loads(written.read_text())
        assert (Path(node["dir"]).name, node["mode"]) == (
            ("second", "on") if fleet == "uncut" else ("node", "off")
        )
