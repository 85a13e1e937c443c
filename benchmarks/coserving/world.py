"""The processes of the co-serving benchmark and what is read from them while it runs.

Both engines on one core; node agent, traffic sender and this process on the other.  The engines are started once; arms
are switched by ``POST /set`` to the node agent, as ``rose node set`` does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import statistics
import time
import urllib.request
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.coserving.plan import HALF, WHOLE, Arm, Schedule
from benchmarks.coserving.rollouts import Registry
from rose.auth import Tokens
from rose.coserve.node_dir import NodeDir
from rose.demo import parts
from rose.demo.demo_config import DemoConfig
from rose.demo.fleet import Fleet, Part
from rose.demo.models import POLICY, PRODUCTION, ensure_model
from rose.demo.traffic import TrafficPlan, write_phase
from rose.node_client import ControlClient

PRODUCTION_RECIPE = replace(PRODUCTION, name="bench-production", num_layers=16)
"""Twice the demo's layers: one decode step takes 20 ms or more, which is where policies begin to differ."""
POLICY_RECIPE = replace(POLICY, name="bench-policy", hidden_size=256, num_layers=4, head_size=64)
"""2 KiB of KV memory per token: rollouts need a real part of the device."""
VOCAB = parts.BYTE_TOKENS


class BenchPlan(parts.Plan):
    """The demo's parts with the benchmark's models, and nothing of its training side."""

    def make_models(self) -> None:
        self.production_model = ensure_model(PRODUCTION_RECIPE, seed=self.config.seed)
        self.policy_model = ensure_model(POLICY_RECIPE, seed=self.config.seed)

    def write_traffic(self, schedule: Schedule) -> None:
        """The sender's plan: the whole schedule is one period."""
        plan = TrafficPlan(
            url=self.config.url("production"),
            model=parts.PRODUCTION_MODEL,
            period_s=schedule.length_s + 5.0,
            arrivals=[(a.at_s, a.prompt_tokens, a.output_tokens) for a in schedule.arrivals],
            prefixes=[(p.system, p.system_tokens, p.session, p.history_tokens) for p in schedule.prefixes],
            seed=self.config.seed,
            token_id_low=0,
            token_id_high=VOCAB,
            phase_file=str(self.phase_path),
            out_file=str(self.records_path),
        )
        write_phase(self.phase_path, "bench")
        (self.root / "traffic.json").write_text(plan.model_dump_json())

    def node(self) -> Part:
        """The node agent beside production: no relay, and a scheduler that only registers."""
        engine = {**self._engine("harvested", core=self.cores[0]), "sched": "idle", "warm": True}
        production = self.config.production
        table = {
            "mode": "off",
            "serving": {
                "slo_ttft_ms": production.slo_ttft_s * 1e3,
                "slo_tpot_ms": production.slo_tpot_s * 1e3,
            },
            "engine": engine,
            # As in the demo: an idle-class step may take long; a kill would end the run's comparison.
            "lending": {"reclaim_deadline_s": 3.0},
        }
        part = self._node("harvested", self.node_dir, table)
        path = self.root / "harvested.toml"
        # No relay in this benchmark: the engine keeps the weights it started with.
        path.write_text(re.sub(r"\n\[weights\][^\[]*", "\n", path.read_text()))
        return part


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Counters at one moment."""

    at_s: float
    decoded: int
    computed: int
    cut_requests: int
    steps: int
    serving_steps: int
    serving_busy_s: float
    prefix_queries: int
    prefix_hits: int
    rollout_pages: int
    idle_s: float
    """Of the engines' core, by the kernel's own count (hundredths of a second); so the two below."""
    serving_cpu_s: float
    """What the processes of production have used of it, and those of the rollout engine; they run nowhere else."""
    rollout_cpu_s: float
    kills: int
    stops: int
    """Of rollout steps between two layers; with how many were quick, how late all were, how long they lasted and how many gave up."""
    quick_stops: int
    stops_late_s: float
    stopped_s: float
    stops_given_up: int


class World:
    """Reads and steers the running parts."""

    def __init__(self, config: DemoConfig, plan: BenchPlan, registry: Registry) -> None:
        self.config, self.plan, self.registry = config, plan, registry
        node = NodeDir(plan.node_dir)
        self._lease, self._board = node.rollout_lease(), node.serving_board()
        self._serving, self._layers = node.serving_lease(), node.layers()
        self._client: ControlClient | None = None
        self._production: psutil.Process | None = None

    async def start(self, fleet: Fleet, progress: Any) -> None:
        """Production, then the node agent with its engine; ready when both are."""
        await fleet.start(self.plan.production(), progress)
        here, port = psutil.Process(), f"--port={self.config.port('production')}"
        self._production = next(
            each for each in here.children(recursive=True) if port in _argv(each) and "serve" in _argv(each)
        )
        await fleet.start(self.plan.node(), progress)
        self._client = ControlClient(self.plan.node_dir, Tokens.load(self.plan.root / parts.TOKEN_FILE))
        while self.registry.worker is None:  # noqa: ASYNC110 - another process registers
            await asyncio.sleep(0.1)

    def total_pages(self) -> int:
        lease = self._serving.read()
        return lease.total_pages if lease is not None else 0

    def _pages(self, loan: Any) -> int:
        total = self.total_pages()
        match loan:
            case _ if loan == HALF:
                return total // 2
            case _ if loan == WHOLE:
                return total
            case _:
                return int(loan)

    async def enter(self, arm: Arm) -> None:
        """Put ``arm`` in force."""
        settings = dict(arm.settings)
        if "max_lend_pages" in settings:
            settings["max_lend_pages"] = self._pages(settings["max_lend_pages"])
        assert self._client is not None
        await asyncio.to_thread(lambda: self._client.set(**settings))  # type: ignore[union-attr]

    async def first_token_s(self, prompt_tokens: int, count: int = 9) -> float:
        """How long production, alone, takes to the first token of such a prompt: the median of some, one after the other."""
        assert self._client is not None
        client, url = self._client, self.config.url("production")
        await asyncio.to_thread(lambda: client.set(mode="off"))
        rng = random.Random(self.config.seed)
        found: list[float] = []
        async with aiohttp.ClientSession() as session:
            for _ in range(count + 2):  # the first two warm it up
                body = {
                    "model": parts.PRODUCTION_MODEL,
                    "prompt": [rng.randrange(VOCAB) for _ in range(prompt_tokens)],
                    "max_tokens": 1,
                    "ignore_eos": True,
                }
                begun = time.monotonic()
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    await answer.read()
                found.append(time.monotonic() - begun)
        return statistics.median(found[2:])

    async def promise(self, ttft_s: float) -> None:
        """Production's users are promised first tokens within so long."""
        assert self._client is not None
        client = self._client
        await asyncio.to_thread(lambda: client.set(slo_ttft_ms=ttft_s * 1e3))

    async def read(self) -> Reading:
        return await asyncio.to_thread(self._read)

    def _read(self) -> Reading:
        lease, board, layers = self._lease.read(), self._board.read(), self._layers.read()
        metrics = _metrics(self.config.url("production"))
        assert self._client is not None
        engine = self._client.status()["engine"]
        kills = int(engine["kills"])
        return Reading(
            at_s=time.monotonic(),
            decoded=lease.decoded if lease else 0,
            computed=lease.tokens if lease else 0,
            cut_requests=lease.cut_requests if lease else 0,
            steps=lease.steps if lease else 0,
            serving_steps=board.step if board else 0,
            serving_busy_s=board.busy_ns / 1e9 if board else 0.0,
            prefix_queries=metrics.get("vllm:prefix_cache_queries_total", 0),
            prefix_hits=metrics.get("vllm:prefix_cache_hits_total", 0),
            rollout_pages=lease.reserved_pages if lease else 0,
            idle_s=psutil.cpu_times(percpu=True)[self.plan.cores[0]].idle,
            serving_cpu_s=cpu_s(self._production) if self._production is not None else 0.0,
            rollout_cpu_s=cpu_s(psutil.Process(engine["pid"])) if engine["pid"] else 0.0,
            kills=kills,
            stops=layers.stops if layers else 0,
            quick_stops=layers.quick_stops if layers else 0,
            stops_late_s=layers.late_ns / 1e9 if layers else 0.0,
            stopped_s=layers.waited_ns / 1e9 if layers else 0.0,
            stops_given_up=layers.given_up if layers else 0,
        )


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []  # it has just ended


def cpu_s(root: psutil.Process) -> float:
    """Used by a process and all below it; 0 when it has ended."""
    used = 0.0
    with contextlib.suppress(psutil.Error):
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used += times.user + times.system
    return used


def _metrics(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if name.startswith("vllm:prefix_cache"):
            found[name] = found.get(name, 0) + int(float(value))
    return found


async def traffic_start_s(records: Path, timeout_s: float = 30.0) -> float:
    """CLOCK_MONOTONIC of the schedule's zero, from the sender's own record."""
    async with asyncio.timeout(timeout_s):
        while True:
            if records.exists():
                for line in records.read_text().splitlines():
                    record = json.loads(line)
                    if record.get("type") == "cycle":
                        return float(record["at_s"])
            await asyncio.sleep(0.02)


def delta(before: Reading, after: Reading) -> dict[str, float]:
    """What happened between two readings, and the later one's levels."""
    first, last = asdict(before), asdict(after)
    change = {name: last[name] - first[name] for name in last if name not in ("at_s", "rollout_pages")}
    return {**change, "seconds": last["at_s"] - first["at_s"], "rollout_pages": last["rollout_pages"]}
