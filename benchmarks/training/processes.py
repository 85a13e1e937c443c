"""The processes of the train benchmark that are not engines, each with a :class:`~benchmarks.training.probe.Probe` in its loop.

``python -m benchmarks.training.processes KIND SPEC.json``:

- ``scheduler``: rose-scheduler as its own command runs it, on uvloop.
- ``manager``: one :class:`rose.train.env_manager.EnvManager` with all its episodes at once, on uvloop as in a Ray actor.
- ``client``: the least that an environment manager could do: the same chat requests from as many coroutines, each reading its
  answer and doing nothing with it.  The limit that ``manager`` is compared with.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks.training import envs
from benchmarks.training.probe import Probe
from rose.auth import Tokens, bearer
from rose.scheduler.app import Scheduler
from rose.scheduler.cli import YOUNG_OBJECTS
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.train.env_manager import EnvManager
from rose.train.plan import GroupPlan
from rose.train.train_config import TrainConfig


async def scheduler(spec: dict[str, Any]) -> None:
    tokens = Tokens.load(Path(spec["token_file"]))
    daemon = Scheduler(SchedulerConfig.model_validate(spec["settings"]), tokens, Path(spec["journal"]))
    await daemon.start()
    gc.collect()  # this and the next two as its command does
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    print(f"ready {daemon.url}", flush=True)
    await Probe(Path(spec["probe_file"])).run()


async def manager(spec: dict[str, Any]) -> None:
    """Play all groups of the spec, then wait to be ended."""
    config = TrainConfig.model_validate(spec["job"])
    worker = EnvManager(config, Tokens.load(Path(spec["token_file"])))
    size, tasks = config.rollout.group_size, envs.scripted().tasks()
    plans = [
        GroupPlan(group_id=f"g{i}", group_size=size, task=tasks[i % len(tasks)], num_missing=size)
        for i in range(spec["num_groups"])
    ]
    runner = worker._runner("")  # its counters are wanted from the first line on

    def counters() -> dict[str, float]:
        return {"started": runner.num_started, "ended": runner.num_ended, "turns": envs.num_turns}

    probe = asyncio.create_task(Probe(Path(spec["probe_file"]), counters).run())
    print("ready manager:0", flush=True)
    await asyncio.sleep(spec["wait_s"])
    report = await worker.run(plans)
    if report.failures:
        raise RuntimeError(f"{len(report.failures)} groups failed, one: {report.failures[0]}")
    await probe


async def client(spec: dict[str, Any]) -> None:
    """Requests like the manager's, one after another per coroutine."""
    num_done = 0
    headers = bearer("none")
    observation = "the file holds nothing of note. " * 7

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal num_done
        while True:
            messages: list[dict[str, str]] = []
            for turn in range(spec["turns"]):
                messages.append({"role": "user", "content": observation})
                body = {
                    "model": "policy",
                    "messages": messages,
                    "temperature": 1.0,
                    "max_tokens": spec["max_tokens"],
                    "logprobs": True,
                }
                named = {**headers, "X-Session-ID": f"t{number}", "X-ROSE-Turn": str(turn)}
                url = spec["url"] + "/v1/chat/completions"
                async with session.post(url, json=body, headers=named) as response:
                    answer = await response.json()
                messages.append(answer["choices"][0]["message"])
                num_done += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        probe = asyncio.create_task(Probe(Path(spec["probe_file"]), lambda: {"turns": num_done}).run())
        print("ready client:0", flush=True)
        async with asyncio.TaskGroup() as group:
            for number in range(spec["concurrency"]):
                group.create_task(one(session, number))
        await probe


if __name__ == "__main__":
    kinds = {"scheduler": scheduler, "manager": manager, "client": client}
    uvloop.run(kinds[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text())))
