"""Fleets of real engines for a train loop of this process: the demo's own programs (:mod:`rose.demo.programs`), in three forms.

``dedicated``, one engine; ``harvested``, the same and one beside a production engine, under bursty traffic, which takes its memory back; ``uncut``,
two engines that nobody cuts.  Scheduler, relay, node agents and vLLM are real; the loop and its workers run here, on the core that is left: of two,
the one without the dedicated engine where it is alone, else beside it.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.auth import PARTS, Tokens
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import RolloutLease
from rose.demo import programs
from rose.demo.demo_config import DemoConfig
from rose.demo.models import PRODUCTION, ensure_model
from rose.demo.preflight import check_facts, gather_facts
from rose.demo.programs import DemoPlan
from rose.demo.supervisor import ProcessSupervisor, Program
from rose.demo.workplace import Workplace, default_parent
from rose.errors import EngineError, LedgerError
from rose.evaluation.arrivals import generate_arrivals
from rose.node_client import ControlClient
from rose.shared_memory import SharedMemorySweep

HARVESTED = "harvested"
WORTH_A_CUT = 16
"""Requests that the harvested engine decodes for at once when harvesting is switched off."""
LOOK_S = 0.1
OFF_WAIT_S = 10.0
"""For all memory to be back."""


class FleetPlan(DemoPlan):
    """The demo's programs, and a second engine with the first core to itself."""

    def prepare_fleet(self, fleet: str) -> None:
        self.prepare(generate_arrivals(self.config.shape(), self.config.seed))
        if fleet == "uncut":
            (self.root / "second").mkdir(mode=0o700)

    def fleet(self, fleet: str) -> list[Program]:
        """What is started, in this order.  Each program's file is written here, and the second engine's has the harvested one's name."""
        production = [self.production()] if fleet == HARVESTED else []
        others = {HARVESTED: self.harvested, "uncut": self.second}
        return [
            *(self.relay(), self.scheduler(), *production, self.dedicated()),
            *([others[fleet]()] if fleet in others else []),
        ]

    def work_core(self, fleet: str) -> int:
        """Production or a second engine has the first core."""
        return self.cores[0 if fleet == "dedicated" else 1]

    def second(self) -> Program:
        # On the harvested engine's port and core, without production.
        engine = self._engine(HARVESTED, core=self.cores[0])
        return self._node(HARVESTED, self.root / "second", {"mode": "on", "engine": engine})


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Which engines, and what they serve."""

    name: str
    policy: Path
    switch_s: float
    """Of the harvested fleet: harvesting is switched off and on again so often; 0 = never."""


Work = Callable[[FleetPlan, Tokens], Coroutine[Any, Any, None]]
"""What is done on a fleet once it runs; it has the tokens that ``rose train`` needs."""


def play(config: DemoConfig, fleet: Fleet, work: Work, told: Callable[[str], None]) -> None:
    """Start the fleet, do the work, and end everything.

    Raises:
        ConfigError: This machine cannot run it.
        RoseError: A program or the work failed.
    """
    parent = config.run_directory or default_parent()
    check_facts(gather_facts(config.ports(), parent))
    cores = config.cores()
    with SharedMemorySweep(), Workplace(parent) as workplace:
        Tokens.generate().save(workplace.path / programs.TOKEN_FILE)
        plan = FleetPlan(
            config=config, cores=cores, root=workplace.path, logs=config.out / "logs" / fleet.name
        )
        plan.production_model, plan.policy_model = ensure_model(PRODUCTION), fleet.policy
        asyncio.run(_play(plan, fleet, work, told))


async def _play(plan: FleetPlan, fleet: Fleet, work: Work, told: Callable[[str], None]) -> None:
    async with ProcessSupervisor(lambda kind, text: told(f"{kind}: {text}")) as supervisor:
        plan.prepare_fleet(fleet.name)
        await supervisor.guarded(_run(plan, fleet, supervisor, work, told))


async def _run(
    plan: FleetPlan, fleet: Fleet, supervisor: ProcessSupervisor, work: Work, told: Callable[[str], None]
) -> None:
    for program in plan.fleet(fleet.name):
        told(f"{program.spec.name} started in {await supervisor.start(program):.0f} s")
        if program.spec.name == "production":
            await supervisor.start(plan.traffic())
    switching = None
    if fleet.name == HARVESTED:
        await _node(plan, supervisor, "on")
        if fleet.switch_s:
            switching = asyncio.create_task(_switch(plan, fleet.switch_s, plan.config.seed))
    tokens = Tokens.load(plan.root / programs.TOKEN_FILE, PARTS["train"])
    working = asyncio.ensure_future(on_core(plan.work_core(fleet.name), work(plan, tokens)))
    both = [working, *([switching] if switching else [])]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if switching is not None and switching.done():
            switching.result()
        await working
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


def engine_counts(plan: FleetPlan) -> dict[str, int]:
    """What the harvested engine itself counts as cut; nothing where there is none."""
    lease = _lease_of(plan)
    return {} if lease is None else {"cuts": lease.reclaim_seq, "cut_requests": lease.cut_requests}


def _lease_of(plan: FleetPlan) -> RolloutLease | None:
    try:
        return NodeDir(plan.node_dir).rollout_lease().read()
    except (LedgerError, OSError):
        return None


async def _switch(plan: FleetPlan, every_s: float, seed: int) -> None:
    """Harvesting off and on again, as an operator would, but at moments when there is much to cut: ``every_s`` or up to half as much
    more after the last time, as soon as the harvested engine decodes for :data:`WORTH_A_CUT` requests at once.

    By the call that `rose node off` makes, without the second in which that program starts: an answer is over by then.
    """
    agent = ControlClient(Path(plan.node_dir), Tokens.load(plan.root / programs.TOKEN_FILE, ["node"]))
    draws = random.Random(seed)
    while every_s:
        await asyncio.sleep(every_s * draws.uniform(1.0, 1.5))
        before = _decoded(plan)
        while True:
            await asyncio.sleep(LOOK_S)
            now = _decoded(plan)
            if worth_a_cut(before, now):
                break
            before = now
        await asyncio.to_thread(agent.off, OFF_WAIT_S)
        await asyncio.to_thread(agent.set, mode="on", engine=True)


def worth_a_cut(before: tuple[int, int], now: tuple[int, int]) -> bool:
    """Whether an engine of so many steps and decoded tokens decodes for :data:`WORTH_A_CUT` requests or more."""
    steps, tokens = now[0] - before[0], now[1] - before[1]
    return steps > 0 and tokens >= WORTH_A_CUT * steps  # one that has begun anew has fewer than before


def _decoded(plan: FleetPlan) -> tuple[int, int]:
    """Steps and decoded tokens of the harvested engine, as it tells them itself."""
    lease = _lease_of(plan)
    return (0, 0) if lease is None else (lease.steps, lease.decoded)


async def _node(plan: FleetPlan, supervisor: ProcessSupervisor, command: str) -> None:
    program = plan.node_command(command)
    await supervisor.start(program)
    if await supervisor.wait_end(program.spec.name, program.timeout_s) != 0:
        raise EngineError(f"failed: {supervisor.log_tail(program.spec.name)}", field=f"rose node {command}")


async def on_core(core: int, work: Coroutine[Any, Any, None]) -> None:
    """Await ``work`` in a thread and loop of its own, which stay on that core.

    This thread may have all cores meanwhile: it starts programs, now and after a death, and can give none a core that it has not.
    """
    there = asyncio.Runner()
    task = there.get_loop().create_task(work)

    async def waited() -> None:
        await task

    def run() -> None:
        os.sched_setaffinity(0, {core})  # of this thread, and of those that it starts
        with there:
            there.run(waited())

    with ThreadPoolExecutor(1) as pool:
        running = asyncio.get_running_loop().run_in_executor(pool, run)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # it has ended
                there.get_loop().call_soon_threadsafe(task.cancel)
            await asyncio.gather(running, return_exceptions=True)
            raise
