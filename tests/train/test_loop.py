"""The whole loop on Ray, with the real scheduler and engines that run the policy: it learns, and it survives."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from rose.auth import Tokens
from rose.config import load_config
from rose.errors import ConfigError
from rose.train import checkpoint as checkpoints
from rose.train.actors import Actors, answer_of
from rose.train.check import check_job
from rose.train.cluster import ray_for
from rose.train.loop import run_training
from rose.train.metrics import MetricsFile, trajectory_metrics
from rose.train.train_config import TrainConfig
from rose.train.workers import Parts
from tests.train.file_publisher import file_publisher
from tests.train.ray_world import Assassin, actor_pid, job_table
from tests.train.traces import trajectory, turn
from tests.train.world import World, running_world

EXAMPLE = Path(__file__).parents[2] / "examples" / "frozenlake_grpo.toml"


def job(world: World, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(job_table(world, **changes))


class Observer(Assassin):
    """Also notes on which addresses the run can be reached."""

    def __init__(self, victims: Mapping[int, str]) -> None:
        super().__init__(victims)
        self.listening: set[str] = set()

    def __call__(self, record: Mapping[str, Any]) -> None:
        if "event" not in record:
            self.listening |= listening_hosts()
        super().__call__(record)


def listening_hosts() -> set[str]:
    """Addresses on which this process and its descendants take connections."""
    hosts: set[str] = set()
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            sockets = process.net_connections(kind="inet")
        except psutil.Error:  # gone meanwhile
            continue
        hosts |= {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
    return {host.removeprefix("::ffff:") for host in hosts}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_loop_learns_survives_killed_actors_and_applies_each_trajectory_once(
    tmp_path: Path, policy_model: Path, short_tmp: Path
) -> None:
    assassin = Observer({1: "EnvManager", 3: "TrainWorker"})
    # Fewer slots than a step has episodes: the engine that first has the new weights cannot take them all.
    with running_world(tmp_path, policy_model, cap_dedicated=16, cap_harvested=16) as world:
        config = job(world)

        result = run_training(
            config, world.tokens, progress=assassin, parts=Parts(make_publisher=file_publisher)
        )

        assert world.scheduler is not None
        states = dict(world.scheduler.store.book.counts("loop"))
    assert (result.num_steps, result.attempt) == (6, 2)
    assert result.num_restarts == 2
    assert assassin.events == [
        "attempt",
        "actor_died environment manager 0",
        "actor_died trainer",
        "attempt",
    ]

    # It learns: six small steps are not many, but the untrained policy is far below this.
    success = [record["success_rate"] for record in assassin.records]
    assert success[-1] > success[0] + 0.2, success

    # Every step once, each on exactly the version before it, log-probs of engine and trainer equal.
    lines = [json.loads(line) for line in (config.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(6))
    assert all(line["lag_max"] == 0 and line["logprob_diff_max"] < 1e-3 for line in lines)
    assert [line["lr"] for line in lines] == [1e-3] * 4 + [5e-6] * 2
    used = [set(line["tiers"]) for line in lines]
    assert {"dedicated", "harvested"} in used  # of one step at least

    # Exactly once, proven from the checkpoints: 6 steps of 32, no id twice, and nothing else was consumed.
    newest, _ = checkpoints.load_latest(config.output_dir / "checkpoints")
    assert newest is not None
    assert newest.step == 6
    assert [len(newest.consumed[step]) for step in range(6)] == [32] * 6
    assert len(set(newest.consumed_ids)) == 6 * 32
    assert states.get("consumed") == 6 * 32
    assert not states.get("leased")
    assert not states.get("finished")
    assert assassin.listening == {"127.0.0.1"}  # nobody outside this machine can reach its Ray
    assert list(short_tmp.iterdir()) == []  # Ray's sockets and logs are gone
    with pytest.raises(AssertionError, match="no actor"):
        actor_pid("TrainWorker")


def test_two_drivers_on_one_folder_are_refused(tmp_path: Path, policy_model: Path) -> None:
    from rose.train.loop import sole_driver

    with (
        sole_driver(tmp_path),
        pytest.raises(ConfigError, match="another run is at work"),
        sole_driver(tmp_path),
    ):
        pass
    with sole_driver(tmp_path):  # free again
        pass


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.learning_rat=1", r"trainer.learning_rat: unknown key \(did you mean 'learning_rate'\?\)"),
        ("rollout.group_size=1", r"rollout.group_size: .*greater than or equal to 2"),
        ("weights.directory='x'", r"weights: .*exactly one of relay_url and directory"),
        ("scheduler.url='ftp://x'", r"scheduler.url: .*"),
        ("job='../x'", "job: .*"),
        ("trainer.algorithm='ppo'", "trainer.algorithm: .*'grpo', 'dapo', 'dr_grpo', .* or 'lite_ppo'"),
        ("env.reward_range=[1.0, 0.0]", "env: .*needs low < high"),
        ("reward.min_workers=9", "reward: .*min_workers exceeds max_workers"),
        ("rollout.alpha=-1", "rollout.alpha: .*"),
    ],
)
def test_bad_settings_are_refused_with_their_field(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, EXAMPLE, [override])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "nowhere"}, "model: .*/nowhere is not a model folder"),
        ({"env": {"kind": "chess"}}, "unknown environment 'chess'"),
        ({"env": {"settings": {"num_maps": 0}}}, "num_maps"),
        ({"env": {"kind": "math_tools"}}, r"rollout\.max_tokens: is required .*free text"),
        ({"tasks": [{"name": "a", "kind": "math_tools"}]}, r"rollout\.max_tokens: is required .*free text"),
        ({"reward": {"kind": "oracle"}}, "unknown reward 'oracle'"),
        ({"reward": {"kind": "endpoint", "settings": {"url": "ftp://x"}}}, "reward.settings.url"),
        ({"env": {"settings": {"size": 2}}, "eval": {"at_end": True, "num_tasks": 20}}, "env.num_maps"),
        (
            {"env": {"settings": {"size": 2, "num_maps": 1}}, "eval": {"at_end": True, "num_tasks": 20}},
            "eval.num_tasks",
        ),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_anything_starts(
    policy_model: Path, changes: dict[str, Any], message: str
) -> None:
    trainer = {"learning_rate": 1e-6}
    table = {"model": policy_model, "weights": {"directory": "x"}, "trainer": trainer} | changes
    with pytest.raises(ConfigError, match=message):
        check_job(TrainConfig.model_validate(table))


def test_of_settings_that_do_not_go_together_the_words_are_told_alone(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        'model = "m"\n[weights]\ndirectory = "w"\n[trainer]\nlearning_rate = 1.0\n[env]\nkind = "frozenlake"\n'
        '[[tasks]]\nname = "a"\nkind = "frozenlake"\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, job)
    assert str(caught.value) == "env.kind is each task's own where there are tasks"
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, EXAMPLE, ["env.reward_range=[1.0, 0.0]"])
    assert str(caught.value) == "env: reward_range needs low < high, both within 1e+09"


TASK = {"name": "a", "kind": "frozenlake"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": [TASK], "reward": {"timeout_s": 120.0}}, r"reward\.timeout_s is each task's own"),
        ({"tasks": [TASK], "reward": {"max_workers": 32}}, r"reward\.max_workers is each task's own"),
        ({"tasks": [TASK], "env": {"kind": "frozenlake"}}, r"env\.kind is each task's own"),
    ],
)
def test_what_each_task_says_itself_is_not_read_elsewhere_and_so_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(
            {"model": "x", "weights": {"directory": "x"}, "trainer": {"learning_rate": 1e-6}} | changes
        )


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({}, False),
        ({"algorithm": "dapo"}, True),
        ({"algorithm": "dapo", "dynamic_sampling": {"enabled": False}}, False),
        ({"algorithm": "dapo", "dynamic_sampling": {"max_rounds": 2}}, True),
        ({"dynamic_sampling": {"enabled": True}}, True),
    ],
)
def test_an_algorithm_sets_only_what_is_not_set(trainer: dict[str, Any], expected: bool) -> None:
    table = {"model": "x", "weights": {"directory": "x"}, "trainer": {"learning_rate": 1e-6, **trainer}}
    assert TrainConfig.model_validate(table).has_dynamic_sampling is expected


def test_paths_are_those_of_where_the_job_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig.model_validate(
        {"model": "m", "weights": {"directory": "w"}, "trainer": {"learning_rate": 1e-6}}
    )
    monkeypatch.chdir("/")
    assert (config.model, config.output_dir) == (tmp_path / "m", tmp_path / "out/train")
    assert config.weights.directory == tmp_path / "w"


def test_turns_are_counted_where_they_ended_and_tokens_where_they_were_sampled() -> None:
    moved = turn(
        [1],
        [2, 3, 4],
        segments=[{"tier": "harvested", "n": 2}, {"tier": "dedicated", "n": 1}],
        versions=[["1.4", 0, 2], ["1.5", 2, 1]],
    )
    stayed = turn([1], [2], segments=[{"tier": "harvested", "n": 1}], versions=[["1.5", 0, 1]])

    metrics = trajectory_metrics([trajectory([moved, stayed])], version=(1, 6))

    assert metrics["tiers"] == {
        "dedicated": {"turns": 1, "tokens": 1},
        "harvested": {"turns": 1, "tokens": 3},
    }
    assert (metrics["num_resumed_turns"], metrics["lag_max"]) == (1, 2)


def test_a_line_torn_by_a_crash_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1, "succ')
    metrics = MetricsFile(path)
    metrics.append({"step": 1})
    metrics.close()
    lines = path.read_text().splitlines()
    assert (lines[0], lines[2]) == ('{"step": 0}', '{"step": 1}')


class Patient:
    """An environment manager whose groups never end."""

    def __init__(self, *_: Any) -> None: ...

    async def run(self, plans: Any) -> None:
        await asyncio.Event().wait()

    async def pid(self) -> int:
        return os.getpid()


@pytest.mark.slow
def test_a_manager_full_of_groups_still_says_that_it_lives(
    tmp_path: Path, policy_model: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray runs a thousand calls of an actor at once unless told otherwise, and a silent manager is replaced."""
    monkeypatch.setattr("rose.train.actors.EnvManager", Patient)
    rollout = {"mode": "asynchronous", "alpha": 4, "num_groups": 256}
    table = {"model": policy_model, "weights": {"directory": "x"}, "rollout": rollout, "output_dir": tmp_path}
    table |= {"ray": {"address": "local"}, "trainer": {"learning_rate": 1e-3}}
    config = TrainConfig.model_validate(table)

    async def fill_and_ask() -> int:
        actors = Actors(config, Tokens.generate(), None)
        await actors._hold_room()
        manager = actors._managers[0] = actors._make_manager(0)
        await answer_of(manager.pid.remote())
        running = [asyncio.create_task(actors.run_on(0, [])) for _ in range(5 * 256)]
        try:
            await asyncio.sleep(0)  # they have been sent
            return await asyncio.wait_for(answer_of(manager.pid.remote()), 60)
        finally:
            for one in running:
                one.cancel()

    with ray_for(config):
        assert asyncio.run(fill_and_ask()) > 0
