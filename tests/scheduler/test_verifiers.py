"""An environment of verifiers played through the endpoint, as the example does it: what it pays is what the trainer leases."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rose.train.batch import samples_of
from tests.scheduler.conftest import World
from tests.scheduler.speaker import Speaker, Speech

vf = pytest.importorskip(
    "verifiers.v1", reason="verifiers is not installed: `make others` has it, in an environment of its own"
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers_episodes.py"
ENVIRONMENTS = Path(__file__).parent / "verifiers_envs"


class Clerk(Speaker):
    """Looks up the note that is asked for, says what it says, and says it again."""

    def speech(self, asked: dict[str, Any], token_ids: list[int]) -> Speech:
        last = asked["messages"][-1]
        if last["role"] == "tool":
            return Speech(content=f"It says {last['content']}.")
        if "other words" in str(last["content"]):
            return Speech(content="As I said.")
        letter = str(last["content"]).split("the note ")[1][0]
        return Speech(content="I look.", calls=[("read_note", json.dumps({"name": letter}))])


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("verifiers_episodes", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def env(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    made = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "rose-desk"}}))
    async with made.serving():
        yield made


@pytest.fixture
async def rose(world: World) -> AsyncIterator[httpx.AsyncClient]:
    await world.start()
    await world.add("a", kind=Clerk, says=lambda _: Speech(), mean_tokens=10**6)
    headers = {"Authorization": f"Bearer {world.tokens.environment}"}
    async with httpx.AsyncClient(base_url=world.url, headers=headers) as client:
        yield client


async def test_an_episodes_turns_are_a_trajectory_with_the_rubrics_reward(
    world: World, rose: httpx.AsyncClient, env: Any, example: Any
) -> None:
    model = example.endpoint(world.url, world.tokens, model="policy", max_tokens=24)
    for at, task in enumerate(env.taskset):
        for _ in range(2):
            await example.play(rose, env, task, model, job="own", group_id=f"g{at}", group_size=2)

    wanted = {"job": "own", "num_groups": 2, "version": [0, 0], "prompts": "whole"}
    leased = await world.ok("PUT", "/rose/v1/batches/b", wanted, role="trainer")
    traces = leased["trajectories"]
    assert sorted(trace["group_id"] for trace in traces) == ["g0", "g0", "g1", "g1"]
    for trace in traces:
        assert trace["reward"] == 1.25
        assert trace["info"] == {"rewards": {"answered": 1.0, "looked_up": 0.25}, "metrics": {"turns": 3.0}}
        # The call, the answer to its result, the answer to the user: one line, of exactly what was sampled.
        assert [(turn["parent"], turn["fork"]) for turn in trace["turns"]] == [
            (None, None),
            (0, None),
            (1, None),
        ]
        (sample,) = samples_of(trace, vocab_size=2**20, max_tokens=4096)
        sampled = [sample.token_ids[place] for place in sample.positions]
        assert sampled == [token for turn in trace["turns"] for token in turn["token_ids"]]
        assert list(sample.logprobs) == [one for turn in trace["turns"] for one in turn["logprobs"]]


async def test_a_rubric_that_fails_leaves_no_zero(
    world: World, rose: httpx.AsyncClient, env: Any, example: Any
) -> None:
    task = next(iter(env.taskset)).with_data(fails=True)
    model = example.endpoint(world.url, world.tokens, model="policy", max_tokens=24)
    with pytest.raises(example.EpisodeFailed, match="no such rubric"):
        await example.play(rose, env, task, model, job="own", group_id="g", group_size=1)
    (trajectory,) = world.scheduler.store.trajectories
    assert world.scheduler.store.state(trajectory) == ("cancelled", "cancelled")


async def test_a_second_run_of_an_agent_is_refused(
    world: World, rose: httpx.AsyncClient, env: Any, example: Any
) -> None:
    task = next(iter(env.taskset)).with_data(num_runs=2)
    model = example.endpoint(world.url, world.tokens, model="policy", max_tokens=24)
    with pytest.raises(example.EpisodeFailed, match="one run of one agent"):
        await example.play(rose, env, task, model, job="own", group_id="g", group_size=1)
    (trajectory,) = world.scheduler.store.trajectories
    assert world.scheduler.store.state(trajectory) == ("cancelled", "cancelled")


async def test_the_command_plays_groups_of_a_taskset(
    world: World,
    rose: httpx.AsyncClient,
    example: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    world.tokens.save(world.tmp_path / "tokens.toml")
    command = ["verifiers_episodes.py", "--taskset", "rose-desk", "--url", world.url, "--size", "2"]
    command += ["--token-file", str(world.tmp_path / "tokens.toml"), "--max-tokens", "24"]
    monkeypatch.setattr(sys, "argv", command)
    await example.main()
    assert capsys.readouterr().out == "4 episodes, mean reward 1.25\n"
    groups = [one.created.group_id for one in world.scheduler.store.trajectories.values()]
    assert sorted(groups.count(group) for group in set(groups)) == [2, 2]
