"""Stages with two engines, the 7B production shape and the 8B policy shape, on one GPU: table 1, and activation.

The programs, the traffic and the analysis are those of ``benchmarks/coserve.py``; what differs is what a GPU needs: shapes without
weights, memory by the device's size, cores of their own for each engine's host side.  One stage is one repeat on the busiest 20 seconds; the
repeats are put together by ``figures.table_1``.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
from rich.console import Console

from benchmarks import coserve
from benchmarks.gpu import figures, models
from benchmarks.gpu.common import (
    GIB,
    GRAPHS,
    RATE,
    TRACE,
    Figures,
    keep,
    logs_folder,
    rehearsing,
    torch_on_gpu,
)
from rose.auth import Tokens, bearer
from rose.demo import programs
from rose.demo.demo_config import DemoConfig, ProductionSettings, RolloutEngineSettings, TrafficSettings
from rose.demo.supervisor import ProcessSupervisor, Program
from rose.demo.ui import Stages
from rose.demo.workplace import Workplace
from rose.errors import EngineError
from rose.evaluation.arms import read_records, to_samples
from rose.evaluation.arrivals import load_trace
from rose.node_client import ControlClient
from rose.shared_memory import SharedMemorySweep

ARMS = ("alone_1", "alone_2", "naive", "static", "paper", "rose")
WINDOW_S = 20.0
RATES_HZ = {"burst": 0.3, "generated": 1.0}
"""Of a whole trace (its busiest second is 26 times that), and of generated traffic (up to 10 times): what one such GPU serves alone
without a broken promise has to be found; ``serving_busy_fraction`` and ``violations_alone`` say so."""
SLO_TTFT_S, SLO_TPOT_S = 0.5, 0.15
"""The paper's promises of its 7B production model."""
MINUTES = 6.5
NUM_TRAJECTORIES = 48
ROLLOUT_EXTRA_BYTES = 6 * GIB
"""Context, activations and graphs of the rollout engine, beside its weights."""
RESERVE_BYTES = 3 * GIB
SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How one device is planned: fractions for ``--gpu-memory-utilization``, bytes of the rollout engine's KV addresses."""

    production: float
    rollout: float
    rollout_kv_bytes: int

    @classmethod
    def of(cls, total_bytes: int) -> Split:
        """The rollout engine's weights stay; all the rest but a reserve is production's, to lend."""
        rollout = models.POLICY.weight_bytes + ROLLOUT_EXTRA_BYTES
        production = total_bytes - rollout - RESERVE_BYTES
        kv = production - models.PRODUCTION.weight_bytes - ROLLOUT_EXTRA_BYTES
        if kv < 4 * GIB:
            raise EngineError(f"{total_bytes / GIB:.0f} GiB are too few for both engines", field="device")
        return cls(
            production=round(production / total_bytes, 3),
            rollout=round(rollout / total_bytes, 3),
            rollout_kv_bytes=kv,
        )


def core_lists(cores: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Cores of production, of the rollout engine, and of everything else: 3/8, 3/8 and the rest, at least one each."""
    if len(cores) < 3:
        raise EngineError(f"{len(cores)} cores are too few: 3 are needed", field="machine")
    each = max(1, len(cores) * 3 // 8)
    return cores[:each], cores[each : 2 * each], cores[2 * each :]


class GpuPlan(coserve.BenchPlan):
    """The benchmark's programs on a GPU.

    Attributes:
        rung: Of the compute ladder, to be asked for; None: the one that it chooses.
    """

    split: Split
    rung: str | None = None

    def make_models(self) -> None:
        self.production_model = models.write_folder(models.PRODUCTION, self.root / "models" / "production")
        self.policy_model = models.write_folder(models.POLICY, self.root / "models" / "policy")

    def _engine_env(self) -> dict[str, str]:
        env = dict(super()._engine_env())
        for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
            env.pop(name, None)
        return {**env, "VLLM_PLUGINS": "rose"}

    def production(self) -> Program:
        mine, _, _ = core_lists(sorted(os.sched_getaffinity(0)))
        program = super().production()
        settings = self.config.production
        argv = (
            *SERVE,
            str(self.production_model),
            f"--served-model-name={programs.PRODUCTION_MODEL}",
            "--host=127.0.0.1",
            f"--port={self.config.port('production')}",
            "--load-format=dummy",
            *(("--enforce-eager",) if _eager() else ()),
            f"--max-model-len={settings.max_model_len}",
            f"--gpu-memory-utilization={self.split.production}",
            f"--seed={self.config.seed}",
        )
        env = {**program.spec.env, "ROSE_ALLOW_UNMEASURED": "1", "CUDA_VISIBLE_DEVICES": _device()}
        return replace(program, spec=replace(program.spec, argv=argv, env=env, cores=tuple(mine)))

    def _engine(self, name: str, core: int) -> dict[str, Any]:
        _, theirs, _ = core_lists(sorted(os.sched_getaffinity(0)))
        cores = ",".join(map(str, theirs))
        table = super()._engine(name, core)
        table |= {
            "command": ["taskset", "--cpu-list", cores, *SERVE],
            "allow_unmeasured": True,
            **({"compute_rung": self.rung} if self.rung is not None else {}),
            "env": {**self._engine_env(), "CUDA_VISIBLE_DEVICES": _device()},
            "args": [
                "--load-format=dummy",
                "--enforce-eager",  # as a green context needs it: every rung on the same engine
                f"--gpu-memory-utilization={self.split.rollout}",
                f"--kv-cache-memory-bytes={self.split.rollout_kv_bytes}",
                f"--seed={self.config.seed}",
            ],
        }
        return table

    def _node(self, name: str, directory: Path, table: dict[str, Any]) -> Program:
        # The reserve is held against the GPU's own figure where NVML can be asked for it.
        kind = "gpu" if importlib.util.find_spec("pynvml") is not None else "host"
        device: dict[str, Any] = {"kind": kind}
        if kind == "gpu" and _device().isdigit():
            device["gpu"] = int(_device())
        return super()._node(name, directory, {**table, "device": device})


class GpuWorld(coserve.World):
    """Both engines, with a look at the device between their starts."""

    def __init__(
        self, config: DemoConfig, plan: GpuPlan, registry: Any, free_bytes: Callable[[], int]
    ) -> None:
        super().__init__(config, plan, registry)
        self._free_bytes = free_bytes
        self.free_beside_production = 0

    async def start(self, supervisor: ProcessSupervisor, progress: Any) -> None:
        await supervisor.start(self.plan.production(), progress)
        self.free_beside_production = self._free_bytes()
        await supervisor.start(self.plan.node(), progress)
        await self.connect()


def _eager() -> bool:
    """Is production eager: nobody has seen yet that this device runs graphs, and a table must not fail for it?"""
    return rehearsing() or os.environ.get(GRAPHS) != "1"


def _device() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def repeat(number: int) -> tuple[Figures, dict[str, Any]]:
    """One repeat of table 1: every arm on the busiest 20 seconds; figures, and the blocks and samples for a pool."""
    return asyncio.run(_with_engines(number, _table))


def on_rung(rung: str) -> tuple[Figures, dict[str, Any]]:
    """The same on a rung of the compute ladder that is asked for; fails where another one is in force."""
    return asyncio.run(_with_engines(1, _table, rung))


def activation() -> tuple[Figures, dict[str, Any]]:
    """A deployed engine that holds nothing: its memory, ``on`` to a first token five times, and what ``off`` leaves."""
    return asyncio.run(_with_engines(0, _activation))


async def _with_engines(number: int, measure: Any, rung: str | None = None) -> tuple[Figures, dict[str, Any]]:
    stages = Stages(Console(stderr=True))
    rows = load_trace(Path(os.environ[TRACE])) if os.environ.get(TRACE) else None
    workload = "burst" if rows is not None else "generated"
    rate_hz = float(os.environ.get(RATE) or RATES_HZ[workload])
    config, window_s = _rehearsal_config(number) if rehearsing() else (_config(number, rate_hz), WINDOW_S)
    free_bytes = _free_bytes()
    timing = coserve.Timing(traffic_s=window_s)
    segments = coserve.make_segments(workload, config.shape(), timing, 1, number, rows)
    schedule = coserve.make_schedule(segments, ARMS, timing, number)
    with SharedMemorySweep(), Workplace(keep=False) as workplace:
        Tokens.generate().save(workplace.path / programs.TOKEN_FILE)
        plan = _plan(config, workplace.path, logs_folder(), rung)
        plan.prepare(schedule.arrivals)
        plan.write_traffic(schedule)
        plan.make_models()
        async with (
            coserve.Registry(config.port("scheduler")) as registry,
            ProcessSupervisor(lambda _, text: stages.note(text)) as supervisor,
        ):
            world = GpuWorld(config, plan, registry, free_bytes)
            with stages.stage("Starting both engines on one GPU"):
                await world.start(supervisor, lambda s: stages.update(f"{s:.0f} s"))
            run = SimpleNamespace(
                stages=stages, config=config, plan=plan, schedule=schedule, world=world, supervisor=supervisor,
                registry=registry, number=number, workload=workload, free_bytes=free_bytes, rung=rung,
            )  # fmt: skip
            return await measure(run)


def _config(number: int, rate_hz: float) -> DemoConfig:
    return DemoConfig(
        seed=number,
        base_port=18670,
        traffic=TrafficSettings(
            period_s=WINDOW_S, mean_rate_hz=rate_hz, prompt_median_tokens=1500, prompt_max_tokens=7400,
            output_median_tokens=24, output_max_tokens=400,
        ),
        production=ProductionSettings(max_model_len=8192, slo_ttft_s=SLO_TTFT_S, slo_tpot_s=SLO_TPOT_S),
        rollout=RolloutEngineSettings(max_model_len=8192, max_num_seqs=256),
        start_timeout_s=200.0,
    )  # fmt: skip


def _rehearsal_config(number: int) -> tuple[DemoConfig, float]:
    """What ``benchmarks/coserve.py`` measures on two cores, and short windows."""
    config = DemoConfig(
        seed=number,
        base_port=18770,
        traffic=TrafficSettings(
            mean_rate_hz=1.5, output_median_tokens=8, output_max_tokens=16, prompt_max_tokens=200
        ),
        production=ProductionSettings(kv_cache_bytes=coserve.KV_CACHE_BYTES),
        rollout=RolloutEngineSettings(kv_cache_bytes=coserve.KV_CACHE_BYTES),
        start_timeout_s=400.0,
    )  # fmt: skip
    return config, 4.5


def _plan(config: DemoConfig, root: Path, logs: Path, rung: str | None) -> coserve.BenchPlan:
    if rehearsing():
        return coserve.BenchPlan(config=config, cores=config.cores(), root=root, logs=logs)
    _, _, rest = core_lists(sorted(os.sched_getaffinity(0)))
    plan = GpuPlan(config=config, cores=(rest[0], rest[-1]), root=root, logs=logs)
    plan.split, plan.rung = Split.of(torch_on_gpu().cuda.mem_get_info()[1]), rung
    return plan


def _free_bytes() -> Callable[[], int]:
    if rehearsing():
        return lambda: psutil.virtual_memory().available
    torch = torch_on_gpu()
    return lambda: int(torch.cuda.mem_get_info()[0])


async def _table(run: Any) -> tuple[Figures, dict[str, Any]]:
    ladder = (await _status(run))["engine"]["ladder"]
    if run.rung not in (None, ladder["rung"]):
        raise EngineError(
            f"{run.rung} was asked for, {ladder['rung']} is in force: {ladder['reason']}", field="rung"
        )
    args = argparse.Namespace(run=run.number, minutes=MINUTES)
    async with coserve.Trajectories(run.registry, NUM_TRAJECTORIES, coserve.VOCAB, run.number) as rollouts:
        blocks = await coserve._run(args, run.world, run.supervisor, run.schedule, run.stages)
        counts = {"turns": rollouts.turns, "cut": rollouts.cut, "failed": rollouts.failed}
    measured = {block.number for block in blocks}
    samples = coserve.label(to_samples(read_records(run.plan.records_path)), run.schedule, measured)
    arms = [arm for arm in ARMS if any(block.arm == arm for block in blocks)]
    lost = coserve.unanswered(samples, run.schedule, measured)
    found = coserve.analyse(samples, blocks, run.config.slo(), arms, unanswered_by_arm=lost)
    details = {
        "workload": run.workload,
        "rate_hz": run.config.traffic.mean_rate_hz,
        "production_eager": _eager(),
        "split": _split(run.plan),
        "rollouts": counts,
        "ladder": ladder,
        "arms": found["arms"],
        "blocks": [asdict(block) for block in blocks],
        "samples": [coserve._pack(sample) for sample in samples],
    }
    return {**found["summary"], "rung": ladder["rung"], "production_eager": _eager()}, details


async def _activation(run: Any) -> tuple[Figures, dict[str, Any]]:
    client = _client(run)
    await asyncio.to_thread(lambda: client.set(mode="off"))
    await asyncio.sleep(2.0)
    off = run.free_bytes()
    inactive = run.world.free_beside_production - off
    seconds: list[float] = []
    pages = run.world.total_pages()
    async with aiohttp.ClientSession() as http:
        for number in range(5):
            begun = time.monotonic()
            await asyncio.to_thread(
                lambda: client.set(mode="on", policy="static", rule="free", max_lend_pages=pages // 2)
            )
            await _first_token(http, run.registry, number)
            seconds.append(time.monotonic() - begun)
            await asyncio.to_thread(lambda: client.set(mode="off"))
            await asyncio.sleep(2.0)
            left = off - run.free_bytes()
            keep(figures.activation(inactive, seconds, left))
    found = figures.activation(inactive, seconds, left)
    if isinstance(run.plan, GpuPlan):
        found["inactive_without_weights_gib"] = (inactive - models.POLICY.weight_bytes) / GIB
    return found, {"seconds": seconds, "split": _split(run.plan), "production_eager": _eager()}


def _split(plan: coserve.BenchPlan) -> dict[str, Any] | None:
    return asdict(plan.split) if isinstance(plan, GpuPlan) else None


async def _first_token(http: aiohttp.ClientSession, registry: Any, number: int) -> None:
    """Ask until there is one: before there is memory the engine answers at once, with none."""
    worker = registry.worker
    body = {
        "request_id": f"activation-{number}",
        "token_ids": [5 + number] * 64,
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "ignore_eos": True},
    }
    until_s = time.monotonic() + 30.0
    attempt = 0
    while time.monotonic() < until_s:
        attempt += 1
        body["request_id"] = f"activation-{number}-{attempt}"
        async with http.post(
            f"{worker['url']}/inference/v1/generate", json=body, headers=bearer(worker["engine_token"])
        ) as response:
            answer = await response.json() if response.status == 200 else {}
        if any(choice.get("token_ids") for choice in answer.get("choices", [])):
            return
        await asyncio.sleep(0.005)
    raise EngineError("no token within 30 s of being switched on", field="activation")


def _client(run: Any) -> ControlClient:
    return ControlClient(run.plan.node_dir, Tokens.load(run.plan.root / programs.TOKEN_FILE))


async def _status(run: Any) -> dict[str, Any]:
    return await asyncio.to_thread(_client(run).status)
