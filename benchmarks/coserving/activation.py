#!/usr/bin/env python
"""A rollout engine that is deployed beside production: what it holds while inactive, and how fast it comes and goes.

Two real engines (vLLM on CPU) and a real node agent on the cores that this process may use.  The policy model is the larger
one, so that its weights show: about 150 M parameters in bf16.  Then, as often as asked for:

- *inactive*: mode off.  KV memory of the engine by the kernel's word, and what its processes hold otherwise (proportional
  set size: pages that they share count once).  Limit on a GPU: 2 GB of its memory; on a host the processes count, too.
- *activate*: from ``rose node on`` to the first token of a client that asks again and again, and to the heartbeat that
  tells rose-scheduler.  The weights stay resident.  Limit: 1 s.
- *deactivate*: rollouts fill the memory for a while, then ``rose node off``: until the engine has booked everything back, and what
  the kernel says then.  Limit: all of it, within the reclaim deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
import psutil

from benchmarks.coserving.rollouts import Registry, Trajectories
from benchmarks.coserving.world import VOCAB, BenchPlan
from benchmarks.lib.report import Report
from rose.auth import Tokens, bearer
from rose.coserve.node_dir import NodeDir
from rose.demo import programs
from rose.demo.demo_config import DemoConfig, ProductionSettings, RolloutEngineSettings
from rose.demo.models import POLICY, PRODUCTION, ensure_model
from rose.demo.supervisor import ProcessSupervisor
from rose.demo.workplace import Workplace
from rose.evaluation.statistics import percentile
from rose.node_client import ControlClient
from rose.shared_memory import SharedMemorySweep

POLICY_RECIPE = replace(
    POLICY,
    name="bench-policy-150m",
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=12,
    num_heads=16,
    num_kv_heads=8,
    head_size=64,
)
KV_CACHE_BYTES = 192 * 2**20
ACTIVATE_LIMIT_S, FOOTPRINT_LIMIT_BYTES = 1.0, 2 * 10**9
HOLD_S = 2.0
PROMPT_TOKENS = 32
NUM_TRAJECTORIES = 8
RETRY_S = 0.005


class Plan(BenchPlan):
    def make_models(self) -> None:
        self.production_model = ensure_model(PRODUCTION, seed=self.config.seed)
        self.policy_model = ensure_model(POLICY_RECIPE, seed=self.config.seed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("out/activation.json"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--base-port", type=int, default=18770)
    args = parser.parse_args()
    report = Report("activation")
    summary, details = asyncio.run(_measure(args, report))
    report.finish(summary, details, args.json)
    return 0


async def _measure(args: argparse.Namespace, report: Report) -> tuple[dict[str, Any], dict[str, Any]]:
    config = DemoConfig(
        base_port=args.base_port,
        production=ProductionSettings(kv_cache_bytes=KV_CACHE_BYTES),
        rollout=RolloutEngineSettings(kv_cache_bytes=KV_CACHE_BYTES),
        out=args.json.parent / "activation-logs",
    )
    core = min(os.sched_getaffinity(0))
    with SharedMemorySweep(), Workplace() as workplace:
        Tokens.generate().save(workplace.path / programs.TOKEN_FILE)
        plan = Plan(config=config, cores=(core, core), root=workplace.path, logs=config.out / "logs")
        plan.prepare([])
        plan.make_models()
        async with (
            Registry(config.port("scheduler")) as registry,
            ProcessSupervisor(lambda _, text: print(text)) as supervisor,
        ):
            for program in (plan.production(), plan.node()):
                print(f"starting {program.spec.name} ...", flush=True)
                await supervisor.start(program, lambda _: None)
            while registry.worker is None:  # noqa: ASYNC110 - another process registers
                await asyncio.sleep(0.1)
            client = ControlClient(plan.node_dir, Tokens.load(plan.root / programs.TOKEN_FILE))
            world = _World(registry, client, NodeDir(plan.node_dir))
            inactive = await asyncio.to_thread(world.footprint)
            print(f"inactive: {inactive}", flush=True)
            rounds: list[dict[str, Any]] = []
            for number in range(args.repeats):
                rounds.append(await world.once(args.base_port + number))
                report.progress("rounds", number + 1, args.repeats)
            after = await asyncio.to_thread(world.footprint)
            audit = client.status()["audit"]
            weights_bytes = sum(path.stat().st_size for path in plan.policy_model.glob("*.safetensors"))
    summary: dict[str, Any] = {
        "weights_bytes": weights_bytes,
        "inactive_kv_resident_bytes": inactive["kv_resident_bytes"],
        "inactive_pss_bytes": inactive["pss_bytes"],
        "inactive_rss_bytes": inactive["rss_bytes"],
        "inactive_after_pss_bytes": after["pss_bytes"],
        "inactive_after_kv_resident_bytes": after["kv_resident_bytes"],
        "inactive_limit_met": max(inactive["pss_bytes"], after["pss_bytes"]) <= FOOTPRINT_LIMIT_BYTES,
    }
    for name in ("first_token_s", "told_scheduler_s", "returned_s", "held_pages"):
        values = [each[name] for each in rounds]
        summary |= {f"{name}_p50": percentile(values, 0.5), f"{name}_max": max(values)}
    summary |= {"audit_looks": audit["looks"], "audit_disagreements": audit["disagreements"]}
    summary["activate_limit_met"] = summary["first_token_s_max"] <= ACTIVATE_LIMIT_S
    summary["all_returned"] = all(
        each["left_pages"] == 0 and each["left_kv_resident_bytes"] == inactive["kv_resident_bytes"]
        for each in rounds
    )
    return summary, {"rounds": rounds, "inactive": inactive, "inactive_after": after}


class _World:
    def __init__(self, registry: Registry, client: ControlClient, node: NodeDir) -> None:
        self._registry, self._client = registry, client
        self._lease, self._rank = node.rollout_lease(), node.rank("rollout", 0)

    async def once(self, seed: int) -> dict[str, Any]:
        registry = self._registry
        registry.ready.clear()
        assert registry.worker is not None
        headers = bearer(registry.worker["engine_token"])
        url = f"{registry.worker['url']}/inference/v1/generate"
        body = {
            "token_ids": [1 + n % 200 for n in range(seed, seed + PROMPT_TOKENS)],
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        }
        begun = time.monotonic()
        told = asyncio.create_task(self._told(begun))
        asked = asyncio.create_task(asyncio.to_thread(lambda: self._client.set(mode="on")))
        attempts = 0
        async with aiohttp.ClientSession(headers=headers) as http:
            while True:
                attempts += 1
                async with http.post(url, json=body) as response:
                    choice = (await response.json())["choices"][0]
                if choice.get("token_ids"):
                    break
                if time.monotonic() - begun > 60.0:
                    raise SystemExit(f"no token in 60 s: {choice}")
                await asyncio.sleep(RETRY_S)
        first_token_s = time.monotonic() - begun
        await asked
        told_s = await told
        async with Trajectories(registry, NUM_TRAJECTORIES, VOCAB, seed):
            await asyncio.sleep(HOLD_S)
            held = self._pages()
            begun = time.monotonic()
            off = asyncio.create_task(asyncio.to_thread(lambda: self._client.off(30.0)))
            while any(self._pages()):
                if time.monotonic() - begun > 60.0:
                    raise SystemExit(f"not given back in 60 s: {self._pages()}")
                await asyncio.sleep(0.001)
            returned_s = time.monotonic() - begun
            proof = (await off)["after"]
        return {
            "first_token_s": first_token_s,
            "attempts": attempts,
            "told_scheduler_s": told_s,
            "held_pages": held[1],
            "returned_s": returned_s,
            "left_pages": proof["resident_pages"],
            "left_kv_resident_bytes": proof["engine_kv_resident_bytes"],
        }

    async def _told(self, begun: float) -> float:
        await self._registry.ready.wait()
        return time.monotonic() - begun

    def _pages(self) -> tuple[int, int]:
        """Reserved by the engine, mapped by its worker."""
        lease, rank = self._lease.read(), self._rank.read()
        return (lease.reserved_pages if lease else 0, rank.resident_pages if rank else 0)

    def footprint(self) -> dict[str, int]:
        """Of the rollout engine's processes, by the kernel."""
        pid = self._client.status()["engine"]["pid"]
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        found = {"pss_bytes": 0, "rss_bytes": 0, "processes": len(tree)}
        for process in tree:
            memory = process.memory_full_info()
            found["pss_bytes"] += memory.pss
            found["rss_bytes"] += memory.rss
        proof = self._client.off(0.0)["after"]
        found["kv_resident_bytes"] = proof["engine_kv_resident_bytes"]
        found["resident_pages"] = proof["resident_pages"]
        return found


if __name__ == "__main__":
    sys.exit(main())
