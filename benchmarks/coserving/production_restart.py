#!/usr/bin/env python
"""Production is killed while rollouts hold all that it lent: how long its own command takes to bring it back.

Two real engines (vLLM on CPU) on one core and a real node agent on the other.  In turns, as often as asked for, the time from the
start of production's command to its first answer of ``/health``:

- ``stock``: without the plugin, and with nothing else on the machine.
- ``alone``: with the plugin, before there is a node agent.
- ``killed``: production was SIGKILLed while the rollout engine held its whole loan and was busy.
- ``agent_stopped``: the same, with the node agent SIGSTOPped first: nobody is told, and nobody can tell the rollout engine.
- ``agent_dead``: the same, with the node agent SIGKILLed first, which takes its engine along.

Limit: the median of each killed case is at most that of ``stock`` and 2 s.

    python benchmarks/coserving/production_restart.py --json FILE    # about three minutes a repeat
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp

from benchmarks.coserving.rollouts import Registry, Trajectories
from benchmarks.coserving.world import VOCAB, BenchPlan
from benchmarks.lib.report import Report
from rose.auth import Tokens
from rose.coserve.node_dir import NodeDir
from rose.demo import programs
from rose.demo.demo_config import DemoConfig, ProductionSettings, RolloutEngineSettings
from rose.demo.supervisor import Program
from rose.demo.workplace import Workplace
from rose.node_client import ControlClient
from rose.proc import Child
from rose.shared_memory import SharedMemorySweep

KV_CACHE_BYTES = 192 * 2**20
NUM_TRAJECTORIES = 32
SLACK_S = 2.0
HOLD_TIMEOUT_S = 120.0
STEADY_S = 3.0
"""So long the rollout engine has held the same number of pages, all of its loan, before production is killed."""
CASES = ("killed", "agent_stopped", "agent_dead")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("out/production_restart.json"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--base-port", type=int, default=18970)
    args = parser.parse_args()
    report = Report("production_restart")
    config = DemoConfig(
        base_port=args.base_port,
        production=ProductionSettings(kv_cache_bytes=KV_CACHE_BYTES),
        rollout=RolloutEngineSettings(kv_cache_bytes=KV_CACHE_BYTES),
        out=args.json.parent / "production-restart-logs",
    )
    cores = config.cores()
    rounds: list[dict[str, Any]] = []
    for number in range(args.repeats):
        rounds.append(asyncio.run(_round(config, cores)))
        report.progress("rounds", number + 1, args.repeats)
        print(rounds[-1], flush=True)
    summary: dict[str, Any] = {"repeats": len(rounds)}
    for name in ("stock", "alone", *CASES):
        seconds = [one[name]["start_s"] for one in rounds]
        summary[f"{name}_start_s_p50"] = statistics.median(seconds)
        summary[f"{name}_start_s_max"] = max(seconds)
    for name in CASES:
        summary[f"{name}_held_pages_min"] = min(one[name]["held_pages"] for one in rounds)
        added_s = summary[f"{name}_start_s_p50"] - summary["stock_start_s_p50"]
        summary[f"{name}_added_s"] = added_s
        summary[f"{name}_limit_met"] = added_s <= SLACK_S
    report.finish(summary, {"rounds": rounds}, args.json)
    return 0


async def _round(config: DemoConfig, cores: tuple[int, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with SharedMemorySweep(), Workplace() as workplace:
        Tokens.generate().save(workplace.path / programs.TOKEN_FILE)
        plan = BenchPlan(config=config, cores=cores, root=workplace.path, logs=config.out / "logs")
        plan.prepare([])
        plan.make_models()
        production, node = plan.production(), plan.node()
        async with Registry(config.port("scheduler")) as registry, _Processes() as processes:
            env = {k: v for k, v in production.spec.env.items() if k not in ("ROSE_ROLE", "ROSE_DIR")}
            stock = replace(production, spec=replace(production.spec, env=env))
            await processes.start("production", stock)  # not counted: the first one fills the kernel's caches
            processes.kill("production")
            found["stock"] = {"start_s": await processes.start("production", stock)}
            processes.kill("production")
            found["alone"] = {"start_s": await processes.start("production", production)}
            await processes.start("node", node)
            client = ControlClient(plan.node_dir, Tokens.load(plan.root / programs.TOKEN_FILE))
            async with Trajectories(registry, NUM_TRAJECTORIES, VOCAB, config.seed):
                for case in CASES:
                    await asyncio.to_thread(lambda: client.set(mode="on"))
                    held = await _held(NodeDir(plan.node_dir))
                    if case == "agent_stopped":
                        processes.signal("node", signal.SIGSTOP)
                    elif case == "agent_dead":
                        processes.signal("node", signal.SIGKILL)
                    processes.kill("production")
                    start_s = await processes.start("production", production)
                    found[case] = {"start_s": start_s, "held_pages": held}
                    await _asked(f"{config.url('production')}/v1/completions")
                    if case == "agent_stopped":
                        processes.signal("node", signal.SIGCONT)
    return found


async def _held(node: NodeDir) -> int:
    """Pages of the rollout engine, once it steadily holds all that is lent."""
    lease, state = node.rollout_lease(), node.node()
    until_s, steady_s, last = time.monotonic() + HOLD_TIMEOUT_S, time.monotonic(), -1
    while time.monotonic() < until_s:
        engine, told = lease.read(), state.read()
        held, lent = (engine.reserved_pages if engine else 0), (told.lend_pages if told else 0)
        if held != last or not 0 < lent <= held:
            last, steady_s = held, time.monotonic()
        elif time.monotonic() - steady_s > STEADY_S:
            return held
        await asyncio.sleep(0.05)
    raise SystemExit(f"rollouts hold {last} pages and not all of their loan after {HOLD_TIMEOUT_S:.0f} s")


async def _asked(url: str) -> None:
    """Production does not only say that it is well: it answers."""
    body = {"model": programs.PRODUCTION_MODEL, "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        response.raise_for_status()


class _Processes:
    """Those of one round; all of them end with it."""

    def __init__(self) -> None:
        self._children: dict[str, Child] = {}

    async def __aenter__(self) -> _Processes:
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self._children.values():
            child.kill()

    async def start(self, name: str, program: Program) -> float:
        """Seconds until it is ready."""
        began_s = time.monotonic()
        child = self._children[name] = Child.start(program.spec)
        assert program.ready is not None
        await child.wait_ready_async(program.ready, program.timeout_s, None)
        return time.monotonic() - began_s

    def kill(self, name: str) -> None:
        """SIGKILL to the whole tree."""
        self._children[name].kill()

    def signal(self, name: str, number: signal.Signals) -> None:
        self._children[name].signal(number)


if __name__ == "__main__":
    sys.exit(main())
