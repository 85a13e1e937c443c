"""The processes of the co-serving benchmark and what is read from them while it runs.

Both engines on one core; node agent, traffic sender and this process on the other.  The engines are started once; arms
are switched by ``POST /set`` to the node agent, as ``rose node set`` does it.  A production of several engine cores has a node agent and a
rollout engine for each, all engines on the one core.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.coserving.plan import HALF, PAIRS_PER_SEGMENT, WHOLE, Arm, Schedule
from benchmarks.coserving.rollouts import Registry
from benchmarks.lib.engine_kinds import KINDS, PLAIN, Kind
from rose.auth import Tokens
from rose.coserve.node_dir import NodeDir, core_dir
from rose.coserve.records import Phase
from rose.demo import programs
from rose.demo.demo_config import DemoConfig
from rose.demo.models import POLICY, PRODUCTION, ensure_model
from rose.demo.supervisor import ProcessSupervisor, Program
from rose.demo.traffic import TrafficPlan, write_phase
from rose.errors import RoseError
from rose.node_client import ControlClient
from rose.policy.compat import Support

PRODUCTION_RECIPE = replace(PRODUCTION, name="bench-production", num_layers=16)
"""Twice the demo's layers: one decode step takes 20 ms or more, which is where policies begin to differ."""
POLICY_RECIPE = replace(POLICY, name="bench-policy", hidden_size=256, num_layers=4, head_size=64)
"""2 KiB of KV memory per token: rollouts need a real part of the device."""
VOCAB = programs.BYTE_TOKENS
LONGEST_S = 60.0
"""A request that takes longer is an error."""
PROBE_SEEDS = 1_000_003
PORTS = ("scheduler", "relay"), ("harvested", "dedicated")
"""Of the registry and the rollout engine beside each engine core; the demo's relay and its dedicated engine are not started here."""


class BenchPlan(programs.DemoPlan):
    """The demo's programs with the benchmark's models, and nothing of its training side.

    Attributes:
        kind: What production has switched on.
        kind_args: Its arguments, once the models are made.
    """

    kind: Kind = KINDS[PLAIN]
    kind_args: tuple[str, ...] = ()

    def make_models(self) -> None:
        plain = ensure_model(PRODUCTION_RECIPE, seed=self.config.seed)
        self.production_model, self.kind_args = self.kind.prepare(plain, self.root / "models")
        self.policy_model = ensure_model(POLICY_RECIPE, seed=self.config.seed)

    def production(self) -> Program:
        program = super().production()
        return replace(program, spec=replace(program.spec, argv=(*program.spec.argv, *self.kind_args)))

    def node_dirs(self) -> list[Path]:
        """Of each of production's engine cores."""
        cores = self.kind.num_cores
        return [self.node_dir] if cores == 1 else [core_dir(self.node_dir, core) for core in range(cores)]

    def write_traffic(self, schedule: Schedule, probe: int = 0) -> None:
        """The sender's plan: the whole schedule is one period.  Each ``probe`` has prompts of its own, of which the run finds none in a cache."""
        plan = TrafficPlan(
            url=self.config.url("production"),
            model=programs.PRODUCTION_MODEL,
            period_s=schedule.length_s + LONGEST_S + 5.0,
            request_timeout_s=LONGEST_S,
            arrivals=[(a.at_s, a.prompt_tokens, a.output_tokens) for a in schedule.arrivals],
            prefixes=[(p.system, p.system_tokens, p.session, p.history_tokens) for p in schedule.prefixes],
            # By the pair, so that a request asks for the same in every arm.
            models=[
                self.kind.model_of(key % PAIRS_PER_SEGMENT, programs.PRODUCTION_MODEL)
                for key in schedule.keys
            ],
            seed=self.config.seed + PROBE_SEEDS * probe,
            token_id_low=0,
            token_id_high=VOCAB,
            phase_file=str(self.phase_path),
            out_file=str(self.records_path),
        )
        write_phase(self.phase_path, "bench")
        (self.root / "traffic.json").write_text(plan.model_dump_json())

    def node(self, core: int = 0) -> Program:
        """The node agent beside one of production's engine cores: no relay, and a scheduler that only registers."""
        registry, name = PORTS[0][core], PORTS[1][core]
        engine = {**self._engine(name, core=self.cores[0]), "sched": "idle", "warm": True}
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
            "scheduler": {"url": self.config.url(registry)},
        }
        program = self._node(name, self.node_dirs()[core], table)
        path = self.root / f"{name}.toml"
        # No relay in this benchmark: the engine keeps the weights it started with.
        path.write_text(re.sub(r"\n\[weights\][^\[]*", "\n", path.read_text()))
        return program


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
    """In steps.  Of several engine cores, whose steps overlap on the one core that they have: what production has used of it."""
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
    drafted: int = 0
    accepted: int = 0
    """Drafts of speculative decoding, and those that were right."""


@dataclass(kw_only=True)
class Place:
    """One of production's engine cores: its shared files, and its agent."""

    directory: Path
    client: ControlClient
    lease: Any = field(init=False)
    board: Any = field(init=False)
    serving: Any = field(init=False)
    layers: Any = field(init=False)

    def __post_init__(self) -> None:
        node = NodeDir(self.directory)
        self.lease, self.board = node.rollout_lease(), node.serving_board()
        self.serving, self.layers = node.serving_lease(), node.layers()

    def total_pages(self) -> int:
        lease = self.serving.read()
        return lease.total_pages if lease is not None else 0


class World:
    """Reads and steers the running programs.  ``registries``: one for each of production's engine cores."""

    def __init__(self, config: DemoConfig, plan: BenchPlan, *registries: Registry) -> None:
        self.config, self.plan, self.registries = config, plan, registries
        self.places: list[Place] = []
        self._production: psutil.Process | None = None

    async def start(self, supervisor: ProcessSupervisor, progress: Any) -> None:
        """Production, then the node agent with its engine; ready when both are."""
        await supervisor.start(self.plan.production(), progress)
        self._production = production_of(self.config.port("production"))
        for core, directory in enumerate(self.plan.node_dirs()):
            hurrying = asyncio.create_task(self.hurry(directory))
            try:
                await supervisor.start(self.plan.node(core), progress)
            finally:
                hurrying.cancel()
                await asyncio.gather(hurrying, return_exceptions=True)
        await self.connect()

    async def hurry(self, directory: Path) -> None:
        """Give the engine that the agent of this directory starts a normal share of its core.

        In the idle class it waits for ever for a core that another program wants too, and nothing is measured yet.
        """
        client = ControlClient(directory, Tokens.load(self.plan.root / programs.TOKEN_FILE))
        while True:
            try:
                status = await asyncio.to_thread(client.status)
                if status["engine"]["pid"]:
                    await asyncio.to_thread(client.set, sched="normal")
                    return
            except RoseError:
                pass  # the agent does not listen yet
            await asyncio.sleep(0.2)

    async def connect(self) -> None:
        """Once the agents run; their engines are of the idle class from then on.

        Raises:
            RoseError: Production does not take part with its memory, so nothing could be measured.
        """
        tokens = Tokens.load(self.plan.root / programs.TOKEN_FILE)
        self.places = [
            Place(directory=one, client=ControlClient(one, tokens)) for one in self.plan.node_dirs()
        ]
        while any(one.worker is None for one in self.registries):  # noqa: ASYNC110 - another process registers
            await asyncio.sleep(0.1)
        for place in self.places:
            lease = place.serving.read()
            if lease is None or lease.phase != Phase.READY or lease.support != Support.ELASTIC:
                raise RoseError(f"production is not elastic in {place.directory}: {lease}")
        await self._set(sched="idle")

    def total_pages(self) -> int:
        return sum(place.total_pages() for place in self.places)

    async def enter(self, arm: Arm) -> None:
        """Put ``arm`` in force."""
        for place in self.places:
            settings = dict(arm.settings)
            if "max_lend_pages" in settings:
                settings["max_lend_pages"] = _pages(settings["max_lend_pages"], place.total_pages())
            await asyncio.to_thread(place.client.set, **settings)

    async def first_token_s(self, prompt_tokens: int, count: int = 9) -> float:
        """How long production, alone, takes to the first token of such a prompt: the median of some, one after the other."""
        url = self.config.url("production")
        await self._set(mode="off")
        rng = random.Random(self.config.seed)
        found: list[float] = []
        async with aiohttp.ClientSession() as session:
            for _ in range(count + 2):  # the first two warm it up
                body = {
                    "model": programs.PRODUCTION_MODEL,
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
        await self._set(slo_ttft_ms=ttft_s * 1e3)

    async def _set(self, **settings: Any) -> None:
        for place in self.places:
            await asyncio.to_thread(place.client.set, **settings)

    async def read(self) -> Reading:
        return await asyncio.to_thread(self._read)

    def _read(self) -> Reading:
        metrics = _metrics(self.config.url("production"))
        serving_cpu_s = cpu_s(self._production) if self._production is not None else 0.0
        engines = [place.client.status()["engine"] for place in self.places]
        leases = [lease for place in self.places if (lease := place.lease.read()) is not None]
        boards = [board for place in self.places if (board := place.board.read()) is not None]
        layers = [layer for place in self.places if (layer := place.layers.read()) is not None]
        return Reading(
            at_s=time.monotonic(),
            decoded=_sum(leases, "decoded"),
            computed=_sum(leases, "tokens"),
            cut_requests=_sum(leases, "cut_requests"),
            steps=_sum(leases, "steps"),
            serving_steps=_sum(boards, "step"),
            serving_busy_s=_sum(boards, "busy_ns") / 1e9 if len(self.places) == 1 else serving_cpu_s,
            prefix_queries=metrics.get("vllm:prefix_cache_queries_total", 0),
            prefix_hits=metrics.get("vllm:prefix_cache_hits_total", 0),
            rollout_pages=_sum(leases, "reserved_pages"),
            idle_s=psutil.cpu_times(percpu=True)[self.plan.cores[0]].idle,
            serving_cpu_s=serving_cpu_s,
            rollout_cpu_s=sum(_cpu_s_of(one["pid"]) for one in engines if one["pid"]),
            kills=sum(int(one["kills"]) for one in engines),
            stops=_sum(layers, "stops"),
            quick_stops=_sum(layers, "quick_stops"),
            stops_late_s=_sum(layers, "late_ns") / 1e9,
            stopped_s=_sum(layers, "waited_ns") / 1e9,
            stops_given_up=_sum(layers, "given_up"),
            drafted=metrics.get("vllm:spec_decode_num_draft_tokens_total", 0),
            accepted=metrics.get("vllm:spec_decode_num_accepted_tokens_total", 0),
        )


def production_of(port: int) -> psutil.Process:
    """The server at this port, below us."""
    word = f"--port={port}"
    below = psutil.Process().children(recursive=True)
    return next(each for each in below if word in _argv(each) and "serve" in _argv(each))


def _sum(records: Sequence[Any], name: str) -> int:
    return sum(getattr(one, name) for one in records)


def _pages(loan: Any, total: int) -> int:
    return total if loan == WHOLE else total // 2 if loan == HALF else int(loan)


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


def _cpu_s_of(pid: int) -> float:
    """0 for an engine that has ended since its agent told of it: that is a part of what is measured, and no end of it."""
    try:
        return cpu_s(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return 0.0


def _metrics(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if name.startswith(("vllm:prefix_cache", "vllm:spec_decode_num_")):
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


async def answered(records: Path, num: int, timeout_s: float = LONGEST_S) -> int:
    """Wait until the first ``num`` requests have ended, each in its own way; how many have."""
    until_s = time.monotonic() + timeout_s
    while True:
        lines = [json.loads(line) for line in records.read_text().split("\n")[:-1]]
        found = sum(line["type"] == "request" and line["index"] < num for line in lines)
        if found >= num or time.monotonic() > until_s:
            return found
        await asyncio.sleep(0.1)


def delta(before: Reading, after: Reading) -> dict[str, float]:
    """What happened between two readings, and the later one's levels.  Of an engine that was replaced, what the new one has used."""
    first, last = asdict(before), asdict(after)
    change = {name: last[name] - first[name] for name in last if name not in ("at_s", "rollout_pages")}
    if change["rollout_cpu_s"] < 0:
        change["rollout_cpu_s"] = last["rollout_cpu_s"]
    return {**change, "seconds": last["at_s"] - first["at_s"], "rollout_pages": last["rollout_pages"]}
