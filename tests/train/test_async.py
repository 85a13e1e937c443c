"""One asynchronous run with stragglers, judged rewards, evaluation, and actors killed in the middle of steps.

The run is made once; each test reads one thing from its record.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.lineage import parse_version
from rose.policy.staleness import lag
from rose.train import checkpoint as checkpoints
from rose.train.loop import RunResult, run_training
from rose.train.train_config import TrainConfig
from rose.train.workers import Parts
from tests.train.file_publisher import file_publisher
from tests.train.ray_world import Assassin, job_table
from tests.train.world import running_world

pytestmark = [pytest.mark.slow, pytest.mark.conformance, pytest.mark.timeout(400)]

ALPHA, NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 1, 6, 2, 4
VICTIMS = {0: "EnvManager", 1: "RewardWorker", 3: "TrainWorker"}


@dataclass(frozen=True)
class Run:
    result: RunResult
    lines: list[dict[str, Any]]
    events: list[str]
    consumed: dict[int, tuple[str, ...]]
    traces: dict[str, dict[str, Any]]
    states: dict[str, int]
    out: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, policy_model: Path) -> Iterator[Run]:
    assassin = Assassin(VICTIMS, mid_step=True)
    ray_dir = Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp"))  # short: sockets live in it
    with running_world(tmp_path_factory.mktemp("async"), policy_model) as world:
        table = job_table(
            world,
            num_steps=NUM_STEPS,
            rollout={
                "mode": "asynchronous",
                "alpha": ALPHA,
                "num_groups": NUM_GROUPS,
                "group_size": GROUP_SIZE,
                "redundant_episodes": 1,
            },
            env={"settings": {"num_maps": 4}, "num_managers": 2, "latency": {"median_s": 0.05, "sigma": 1.0}},
            reward={"kind": "tests.train.ray_world:reward_of_length", "max_workers": 2},
            trainer={"algorithm": "dapo", "keep_checkpoints": 100, "dynamic_sampling": {"max_rounds": 3}},
            eval={"at_end": True, "num_tasks": 3, "num_training_tasks": 2, "sampled_episodes": 2},
            export=True,
            ray={"temp_dir": str(ray_dir)},
        )
        config = TrainConfig.model_validate(table)
        parts = Parts(make_publisher=file_publisher)
        result = run_training(config, world.tokens, progress=assassin, parts=parts, watch_s=0.1)
        assert world.scheduler is not None
        newest, _ = checkpoints.load_latest(config.output_dir / "checkpoints")
        assert newest is not None
        store = world.scheduler.store
        traces = {name: store.trajectories[name].trace(*store.state(name)) for name in newest.consumed_ids}
        lines = [json.loads(line) for line in (config.output_dir / "metrics.jsonl").read_text().splitlines()]
        yield Run(
            result=result,
            lines=lines,
            events=assassin.events,
            consumed=dict(newest.consumed),
            traces=traces,
            states=dict(store.book.counts("loop")),
            out=config.output_dir,
        )
    shutil.rmtree(ray_dir, ignore_errors=True)


def test_the_run_ends_though_actors_were_killed_in_the_middle_of_steps(run: Run) -> None:
    assert (run.result.num_steps, run.result.attempt) == (NUM_STEPS, 2)
    assert run.result.num_restarts == 2  # the reward worker is the pool's own affair
    assert sorted(event for event in run.events if event.startswith("actor_died"))[1] == "actor_died trainer"
    assert sum("environment manager" in event for event in run.events) == 1
    assert [line["step"] for line in run.lines] == list(range(NUM_STEPS))


def test_no_token_beyond_alpha_is_trained_on(run: Run) -> None:
    """Judged from the tokens' own versions in the scheduler's traces, not from what the trainer says of itself."""
    num_over, lags = 0, []
    for step, ids in run.consumed.items():
        attempt = run.lines[step]["attempt"]
        for name in ids:
            spans = [span for turn in run.traces[name]["turns"] for span in turn["versions"]]
            assert spans
            worst = max(lag((attempt, step), parse_version(span[0])) for span in spans)
            lags.append(worst)
            num_over += worst > ALPHA
    assert max(lags) >= 1  # the run was asynchronous indeed
    assert sum(line["num_stale"] for line in run.lines) <= num_over
    assert max(line["trained_lag_max"] for line in run.lines) <= ALPHA
    # What was beyond was marked, and marked trajectories are in no update.
    for line in run.lines:
        assert line["num_trained_sequences"] <= line["num_trajectories"] - line["num_stale"]


def test_each_trajectory_is_applied_at_most_once(run: Run) -> None:
    ids = [name for step in range(NUM_STEPS) for name in run.consumed[step]]
    assert len(ids) == len(set(ids))
    assert len(ids) >= NUM_STEPS * GROUP_SIZE
    assert run.states.get("consumed") == len(ids)
    assert not run.states.get("leased")


def test_rewards_come_from_the_pool_and_never_from_a_failure(run: Run) -> None:
    for trace in run.traces.values():
        assert trace["reward"] == pytest.approx(1.0 / trace["info"]["turns"])


def test_groups_that_teach_nothing_are_set_aside(run: Run) -> None:
    for line in run.lines:
        groups: dict[str, set[float]] = {}
        for name in run.consumed[line["step"]]:
            groups.setdefault(run.traces[name]["group_id"], set()).add(run.traces[name]["reward"])
        dull = sum(len(rewards) == 1 for rewards in groups.values())
        assert line["num_filtered_groups"] in (dull, 0 if dull == len(groups) else dull)


def test_the_evaluation_is_pinned_to_the_last_version(run: Run) -> None:
    found = run.lines[-1]["eval"]
    assert (found["version"], found["num_episodes"]) == (f"2.{NUM_STEPS}", 3)
    assert (found["training"]["num_episodes"], found["sampled_training"]["num_episodes"]) == (2, 4)
    assert run.result.success_held_out == found["success_rate"]
    assert all("eval" not in line for line in run.lines[:-1])


def test_plots_and_an_exported_model_are_there(run: Run, policy_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (events,) = (run.out / "tensorboard").glob("events.out.tfevents.*")
    written = events.read_bytes()
    for name in (
        b"policy/entropy",
        b"policy/ess",
        b"reward/success_rate",
        b"time/train_s",
        b"eval/success_rate",
    ):
        assert name in written
    exported = AutoModelForCausalLM.from_pretrained(run.out / "model")
    newest, _ = checkpoints.load_latest(run.out / "checkpoints")
    assert newest is not None
    assert newest.path is not None
    weights = {name: torch.empty(tensor.shape) for name, tensor in exported.named_parameters()}
    checkpoints.read_into({f"weights/{name}": tensor for name, tensor in weights.items()}, newest.path)
    for name, tensor in exported.named_parameters():
        assert (tensor.float() == weights[name].bfloat16().float()).all(), name
    assert AutoTokenizer.from_pretrained(run.out / "model").chat_template
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in (run.out / "model").iterdir()}
