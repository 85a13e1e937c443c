"""TRL trains on ROSE's engines through its own extension points: the example as a user runs it, from an image that has torch imported."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rose.auth import Tokens
from rose.train.envs.base import Observation, Task
from rose.weights.stores import open_store
from rose.weights.subscriber import WeightSubscriber
from tests.engine_launcher import run_module
from tests.train.file_publisher import RUN
from tests.train.world import running_world
from tests.weights.reading import whole

pytest.importorskip("trl", reason="TRL is not installed: pip install '.[trl]' from a checkout of ROSE")

pytestmark = pytest.mark.timeout(300)
NUM_STEPS = 3


class Parity:
    """Two turns; an answer with an even number of characters is paid."""

    allowed_texts = None

    def tasks(self) -> list[Task]:
        return [{"env": "parity", "n": n} for n in range(4)]

    def held_out_tasks(self, count: int) -> list[Task]:
        return []

    def make(self) -> Any:
        return ParityEpisode()


class ParityEpisode:
    async def reset(self, task: Task) -> Observation:
        self.paid, self.turn = 0, 0
        return Observation(messages=({"role": "user", "content": f"SF{task['n']}"},))

    async def step(self, text: str) -> Observation:
        self.paid += len(text) % 2 == 0
        self.turn += 1
        if self.turn == 2:
            return Observation(done=True, reward=float(self.paid))
        return Observation(messages=({"role": "user", "content": "FH"},))

    async def close(self) -> None: ...


def parity() -> Parity:
    return Parity()


def follow(store: str, folder: Path, over: threading.Event) -> None:
    """What a node agent does with versions: follow the store, and hand each to the engines of the world."""
    subscriber = WeightSubscriber(open_store(store), RUN, folder / "spool")
    try:
        is_last = False
        while not is_last:
            is_last = over.is_set()  # and what was published before that is still to be had
            version = subscriber.poll(timeout_s=0.1)
            target = folder / "versions" / f"{version}.safetensors"
            if version is not None and not target.exists():
                part = target.with_suffix(".part")
                save_file(whole(subscriber, version), part)
                os.rename(part, target)
    finally:
        subscriber.close()


def test_trl_trains_on_the_engines_tokens_and_the_engines_on_its_weights(
    tmp_path: Path, policy_model: Path
) -> None:
    over = threading.Event()
    with running_world(tmp_path, policy_model, num_engines=1) as world:
        world.tokens.save(tmp_path / "tokens.toml")
        follower = threading.Thread(target=follow, args=(str(tmp_path / "store"), tmp_path, over))
        follower.start()
        try:
            command = ["--env", "tests.train.test_trl:parity"]
            command += ["--url", world.url, "--store", str(tmp_path / "store"), "--model", str(policy_model)]
            command += ["--steps", str(NUM_STEPS), "--group-size", "4", "--groups", "2", "--max-tokens", "3"]
            command += ["--learning-rate", "1e-3", "--output-dir", str(tmp_path / "out")]
            command += ["--token-file", str(tmp_path / "tokens.toml"), "--job", RUN]
            done = run_module("examples.trl_grpo", *command, timeout=250)
        finally:
            over.set()
            follower.join(100)
        assert done.returncode == 0, done.stdout[-3000:]
        assert world.scheduler is not None
        traces = [one.trace("", "") for one in world.scheduler.store.trajectories.values()]
    assert len([line for line in done.stdout.splitlines() if line.startswith("step ")]) == NUM_STEPS
    assert len(traces) == NUM_STEPS * 8
    # Step s was played by version s and no other: TRL's step-end callback published it, and the scheduler waited for it.
    played = Counter(
        (int(trace["group_id"].partition("-")[0]), span[0])
        for trace in traces
        for turn in trace["turns"]
        for span in turn["versions"]
    )
    assert played == {(step, f"1.{step}"): 16 for step in range(NUM_STEPS)}
    # The last version is not the first: it did train.
    first, last = (
        load_file(tmp_path / "versions" / f"1.{version}.safetensors") for version in (0, NUM_STEPS)
    )
    assert any(not first[name].equal(last[name]) for name in first)


def test_adapters_beside_the_model_are_refused_in_one_line(tmp_path: Path, policy_model: Path) -> None:
    """The example with TRL's `peft_config`: before anything is sampled or trained on."""
    Tokens.generate().save(tmp_path / "tokens.toml")
    command = ["--env", "tests.train.test_trl:parity", "--model", str(policy_model)]
    command += ["--store", str(tmp_path / "store"), "--output-dir", str(tmp_path / "out")]
    command += ["--token-file", str(tmp_path / "tokens.toml")]
    done = run_module("tests.train.trl_adapters", *command, timeout=250)
    assert done.returncode == 2, done.stdout[-3000:]
    assert "Traceback" not in done.stdout
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert said.startswith("error: model: has adapters")
    assert "peft_config" in said
