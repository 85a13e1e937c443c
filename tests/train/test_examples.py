"""Every file in ``examples/`` that belongs to training loads, and the agent of one's own runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rose.config import load_config
from rose.train.batch import samples_of
from rose.train.check import checks_of, checks_of_the_start
from rose.train.client import SchedulerClient
from rose.train.env_manager import family_of
from rose.train.train_config import TrainConfig
from tests.train.world import running_world

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_no_example_is_forgotten() -> None:
    assert {path.name for path in EXAMPLES.glob("*.toml")} == {
        "frozenlake_grpo.toml",
        "math_tools_dapo.toml",
        "textgame_async.toml",
    }


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_an_example_can_be_started_where_there_is_no_cluster(policy_model: Path, path: Path) -> None:
    config = load_config(TrainConfig, path, [f'model="{policy_model}"', 'ray.address="local"'])
    ray = [check for check in checks_of_the_start(config) if check.name == "Ray"]
    told = {check.name: check.look() for check in (*checks_of(config), *ray) if check.name != "environment"}
    assert told["Ray"].startswith("a private cluster of ")


def test_frozenlake_ends_with_the_fine_tuning_rate() -> None:
    config = load_config(TrainConfig, EXAMPLES / "frozenlake_grpo.toml")
    rates = [config.learning_rate_at(step) for step in range(config.num_steps)]
    assert rates == [config.trainer.learning_rate] * (config.num_steps - 3) + [5e-6] * 3
    assert (config.alpha, config.has_dynamic_sampling) == (1, False)


def test_mathematics_samples_dynamically_and_has_tasks_of_both_kinds() -> None:
    config = load_config(TrainConfig, EXAMPLES / "math_tools_dapo.toml")
    family = family_of(config.all_tasks[0])
    assert config.has_dynamic_sampling
    assert len(family.tasks()) == 512
    assert len(family.held_out_tasks(config.eval.num_tasks)) == 64


def test_the_text_game_is_asynchronous_with_a_bound_of_four() -> None:
    config = load_config(TrainConfig, EXAMPLES / "textgame_async.toml")
    assert (config.rollout.mode, config.alpha) == ("asynchronous", 4)
    pytest.importorskip("textworld", reason="needs pip install '.[textgame]' from a checkout of ROSE")
    assert len(family_of(config.all_tasks[0]).tasks()) == 64


def test_an_agent_of_ones_own_starts_again_and_ends_with_the_scheduler_s_words(
    tmp_path: Path, policy_model: Path
) -> None:
    """Its groups of before are there still: nobody has trained on them."""
    with running_world(tmp_path, policy_model, num_engines=1) as world:
        world.tokens.save(tmp_path / "tokens.toml")
        command = [
            sys.executable,
            str(EXAMPLES / "bring_your_own_agent.py"),
            f"--url={world.url}",
            "--groups=1",
        ]
        command += [f"--token-file={tmp_path / 'tokens.toml'}"]
        env = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}

        def start(*more: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*command, *more], capture_output=True, text=True, check=False, env=env, timeout=300
            )

        for size in (1, 2):
            done = start(f"--size={size}")
            assert done.returncode == 0, done.stderr[-2000:]
        refused = start("--size=1", "--job=")
    assert refused.returncode == 1
    assert refused.stderr.startswith("job: "), refused.stderr[-2000:]
    assert "Traceback" not in refused.stderr


def test_an_agent_of_ones_own_becomes_trainable(tmp_path: Path, policy_model: Path) -> None:
    """The example as a user runs it, then its trajectories as a trainer gets them."""
    with running_world(tmp_path, policy_model, num_engines=1) as world:
        world.tokens.save(tmp_path / "tokens.toml")
        command = [sys.executable, str(EXAMPLES / "bring_your_own_agent.py"), f"--url={world.url}"]
        command += ["--groups=2", "--size=2", "--job=own", f"--token-file={tmp_path / 'tokens.toml'}"]
        env = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=100)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.startswith("4 episodes, mean reward ")

        async def lease() -> list[dict[str, object]]:
            async with SchedulerClient(
                world.url, environment_token=world.tokens.environment, trainer_token=world.tokens.trainer
            ) as client:
                leased = await client.lease(job="own", num_groups=2, attempt=0, version=0, ttl_s=60, wait_s=5)
                assert leased is not None
                return leased[1]

        trajectories = asyncio.run(lease())
    samples = [one for trace in trajectories for one in samples_of(trace, vocab_size=320, max_tokens=1024)]
    assert len(samples) == len(trajectories) == 4  # no conversation forked: each is one sequence
    assert all(sample.positions for sample in samples)
