"""One run: builds the fleet of a system, lets time pass, and gathers what happened.

``simulate`` is the only door.  A seed and a scenario give one run, byte for byte, whatever the machine.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rose.errors import ConfigError
from rose.lineage import Version
from rose.policy import turn_events as te
from rose.policy.coserving.timing import is_late
from rose.policy.rounds import RoundParams
from rose.policy.worker import Tier
from rose.sim.arrivals import Arrivals, Floats, make_arrivals
from rose.sim.cluster import JOB, Counters, SimCluster
from rose.sim.device import SimDevice
from rose.sim.engine import Request, SimEngine
from rose.sim.events import EventDigest, EventQueue
from rose.sim.hardware import Hardware
from rose.sim.job import Hooks, SimJob, SimStep
from rose.sim.links import transfer
from rose.sim.live import Configs, configs_of
from rose.sim.scenario import Scenario
from rose.sim.systems import SYSTEMS, System

SAMPLE_POINTS = 600
"""Points of the timeline, whatever the length of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetState:
    """The fleet at one moment."""

    at_s: float
    dedicated_turns: int
    harvested_turns: int
    """And borrowed, as below."""
    queued_turns: int
    serving_running: int
    lent_share: float
    held_share: float
    serving_kv: float
    """Share of its KV memory that production's requests hold."""
    harvested_engines: int
    sampled: tuple[int, int]
    """Tokens so far on dedicated and on other engines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSpan:
    """One event of the Chrome trace: a span on a lane."""

    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass(kw_only=True, slots=True)
class SimResult:
    """Everything one system did."""

    system: System
    scenario: Scenario
    seed: int
    duration_s: float
    steps: list[SimStep]
    counters: Counters
    ttft_s: list[tuple[float, float]]
    tpot_s: list[tuple[float, float]]
    samples: list[FleetState]
    marks: list[LaneSpan]
    late: dict[int, float]
    """Number of each request of production that missed a limit -> when it came; numbers are the same in all systems of a scenario."""
    arrived_s: Floats
    """When each of them came."""
    late_unanswered: dict[int, float] = field(default_factory=lambda: dict[int, float]())
    """Those of ``late`` that had no answer when the run ended."""
    relay_bytes: float = 0.0
    billed_gpu_s: float = 0.0
    """Dedicated, trainer and bought GPUs; harvested ones are paid for by production."""
    allocated_s: float = 0.0
    wasted_s: float = 0.0
    """Of ``allocated_s`` of extra engines: not yet able to sample."""
    num_events: int = 0
    num_steps: int = 0
    digest: str = ""
    cpu_s: float = 0.0
    busy: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    job_steps: dict[str, list[SimStep]] = field(default_factory=lambda: dict[str, list[SimStep]]())
    """By job; ``steps`` is the first one's."""
    num_switches: int = 0
    """Of shared engines from one job to another."""


class SimWorld(Hooks):
    def __init__(
        self,
        scenario: Scenario,
        system: System,
        journal: EventDigest,
        arrivals: Arrivals | None,
        configs: Configs | None = None,
    ) -> None:
        self.scenario, self.system = scenario, system
        self.journal = journal
        self.queue = EventQueue()
        self.rng = random.Random((scenario.seed << 8) ^ 0x3A)
        self.hardware = Hardware(scenario)
        self.hardware.check([system.name])
        self.policy_model = self.hardware.policy_model
        shared = scenario.fleet.serving > 0 and system.extra == "harvest"
        pages = self.hardware.serving_pages(shared=True) if shared else 0
        self.configs = configs = configs or configs_of(scenario, system, pages)
        batches = configs.scheduler.batches.params()
        several = scenario.num_jobs > 1
        if several and system.extra not in ("none", "harvest"):
            raise ConfigError(
                f"{system.name} has not been tried with several jobs", field="num_jobs", fix="num_jobs = 1"
            )
        self.jobs: dict[str, SimJob] = {}
        for index in range(scenario.num_jobs):
            name = f"{JOB}{index}" if several else JOB
            self.jobs[name] = SimJob(
                scenario,
                system,
                self.queue,
                journal,
                self,
                self.policy_model,
                self.hardware.gpu,
                batches,
                name=name,
                prefix=f"{name}/" if several else "",
                seed=scenario.seed + index,
            )
        self.job = next(iter(self.jobs.values()))
        """The first; of most scenarios the only one."""

        def is_training(name: str) -> bool:
            return name in self.jobs and self.jobs[name].book.is_training(name)

        self.cluster = SimCluster(
            scenario, system, self.queue, journal, self._turn_ended, is_training, configs
        )
        for job in self.jobs.values():
            job.cluster = self.cluster
        self.serving_devices: list[SimDevice] = []
        self.extra: list[str] = []
        self.samples: list[FleetState] = []
        self.relay_bytes = 0.0
        self.allocated_s = 0.0
        self.wasted_s = 0.0
        self.alive_since: dict[str, float] = {}
        self._build()
        self._arrivals = arrivals
        self._next = 0

    # --- building --------------------------------------------------------------------------------------

    def _rollout_engine(self, num_gpus: int) -> SimEngine:
        return SimEngine(
            self.hardware.rollout_steps(num_gpus),
            self.scenario.job.chunk_tokens,
            0,
            attention_s=self.hardware.rollout_attention_s(num_gpus),
        )

    def _own_device(self, name: str, num_gpus: int | None = None) -> SimDevice:
        """A device that runs rollouts only, over ``fleet.rollout_gpus`` unless said."""
        num_gpus = num_gpus or self.scenario.fleet.rollout_gpus
        pages, page_tokens = self.hardware.rollout_pages(num_gpus), self.hardware.rollout_page_tokens()
        engine = self._rollout_engine(num_gpus)
        engine.budget_tokens = int(pages * page_tokens)
        return SimDevice(
            name,
            self.queue,
            self.cluster,
            total_pages=pages,
            serving=None,
            rollout=engine,
            rollout_page_tokens=page_tokens,
        )

    def _serving_device(self, name: str, shared: bool) -> SimDevice:
        scenario, config = self.scenario, self.scenario.serving
        node = self.configs.harvested
        assert node.serving is not None
        pages, page_tokens = self.hardware.serving_pages(shared=shared), self.hardware.serving_page_tokens()
        model = self.hardware.serving_steps()
        return SimDevice(
            name,
            self.queue,
            self.cluster,
            total_pages=pages,
            serving=SimEngine(
                model,
                config.chunk_tokens,
                int(pages * page_tokens),
                config.block_tokens,
                self.hardware.serving_attention_s(),
            ),
            rollout=self._rollout_engine(scenario.fleet.serving_gpus) if shared else None,
            serving_page_tokens=page_tokens,
            rollout_page_tokens=self.hardware.rollout_page_tokens(),
            priority=scenario.fleet.sharing == "priority",
            overlap=scenario.efficiency.overlap,
            preempt_s=scenario.fleet.preempt_s,
            idle_chunk_tokens=scenario.fleet.idle_chunk_tokens,
            rounds=RoundParams(most=scenario.fleet.round_steps, tpot_share=scenario.fleet.round_tpot),
            slo_ttft_s=node.serving.slo_ttft_ms / 1e3,
            slo_tpot_s=node.serving.slo_tpot_ms / 1e3,
            params=node.gate.params(node.serving.slo_ttft_ms),
        )

    def _build(self) -> None:
        fleet, system, cluster = self.scenario.fleet, self.system, self.cluster
        runs = list(self.jobs) if len(self.jobs) > 1 else [""]
        for job in [name for name in runs if name]:
            cluster.require(job, (0, 0))
        for index in range(fleet.dedicated * len(runs)):
            name = f"d{index}"
            run = runs[index // fleet.dedicated]
            cluster.join(name, self._own_device(name), Tier.DEDICATED, version=(0, 0), run=run)
        for index in range(fleet.wide * len(runs)):
            name = f"w{index}"
            run = runs[index // fleet.wide]
            device = self._own_device(name, fleet.wide_gpus)
            cluster.join(name, device, Tier.DEDICATED, version=(0, 0), run=run, for_tail=True)
        for index in range(fleet.serving):
            name = f"s{index}"
            device = self._serving_device(name, system.extra == "harvest")
            self.serving_devices.append(device)
            if system.extra == "harvest":
                run = runs[index % len(runs)]
                cluster.join(name, device, Tier.HARVESTED, version=(0, 0), run=run)
                self.extra.append(name)
        if system.extra in ("spot", "serverless"):
            for index in range(fleet.spot):
                name = f"x{index}"
                cap = self.configs.scheduler.cap_dedicated
                cluster.join(name, self._own_device(name), Tier.HARVESTED, version=None, cap=cap)
                self.extra.append(name)
                if system.extra == "spot":
                    up = self.rng.random() < fleet.spot_up_s / (fleet.spot_up_s + fleet.spot_down_s)
                    mean_s = fleet.spot_up_s if up else fleet.spot_down_s
                    if up:
                        self._spot_up(0.0, name)
                    else:
                        self.queue.at(self.rng.expovariate(1.0 / mean_s), self._spot_up, name)
        if system.extra == "trainers":
            for index in range(fleet.trainers // fleet.rollout_gpus):
                name = f"t{index}"
                cluster.join(name, self._own_device(name), Tier.BORROWED, version=(0, 0))
                self.extra.append(name)
        if fleet.mean_hours_between_failures > 0:
            for name in list(cluster.nodes):
                self._schedule_failure(name)

    def _schedule_failure(self, name: str) -> None:
        mean_s = self.scenario.fleet.mean_hours_between_failures * 3600.0
        self.queue.at(self.queue.now_s + self.rng.expovariate(1.0 / mean_s), self._fail, name)

    def _fail(self, now_s: float, name: str) -> None:
        self.cluster.fail(name)
        self._schedule_failure(name)

    # --- spot and serverless ---------------------------------------------------------------------------

    def _spot_up(self, now_s: float, name: str) -> None:
        fleet = self.scenario.fleet
        self.alive_since[name] = now_s
        self.queue.at(now_s + self.rng.expovariate(1.0 / fleet.spot_up_s), self._spot_down, name)
        ready_s = fleet.cold_start_s + self._pull_s(1)
        self.queue.at(now_s + ready_s, self._extra_ready, (name, now_s))

    def _spot_down(self, now_s: float, name: str) -> None:
        # The token stream was kept: what it had sampled goes on elsewhere.
        self._release(name, now_s, keep=True, reason="preempted")
        self.queue.at(
            now_s + self.rng.expovariate(1.0 / self.scenario.fleet.spot_down_s), self._spot_up, name
        )

    def _extra_ready(self, now_s: float, word: tuple[str, float]) -> None:
        name, since_s = word
        if self.alive_since.get(name) == since_s and not self.cluster.nodes[name].registered:
            self.wasted_s += now_s - since_s
            self.cluster.start(name, self.job.version)

    def _release(self, name: str, now_s: float, *, keep: bool, reason: str) -> None:
        since_s = self.alive_since.pop(name, None)
        if since_s is None:
            return
        self.allocated_s += now_s - since_s
        if self.cluster.nodes[name].registered:
            self.cluster.stop(name, keep_tokens=keep, reason=reason)
        else:
            self.wasted_s += now_s - since_s

    @property
    def _extra_ranks(self) -> int:
        """GPUs of an engine that gets its weights through the relay."""
        fleet = self.scenario.fleet
        return fleet.serving_gpus if self.system.extra == "harvest" else fleet.rollout_gpus

    def _pull_s(self, num: int) -> float:
        """A new engine pulls full weights."""
        plan = transfer(
            self.system,
            self.policy_model,
            self.scenario.links,
            num,
            self.scenario.job.changed_fraction,
            num_ranks=self._extra_ranks,
            full=True,
        )
        self.relay_bytes += plan.relay_bytes
        return plan.extra_s

    # --- seams of a step -------------------------------------------------------------------------------

    def _turn_ended(self, ended: te.TurnEnded, now_s: float) -> None:
        job = ended.result.trajectory_id.partition("/")[0]
        self.jobs.get(job, self.job).turn_ended(ended, now_s)

    def rollouts_begin(self, job: str, step: int) -> None:
        if self.system.extra == "serverless":
            now_s = self.queue.now_s
            pull_s = self._pull_s(len(self.extra))
            for name in self.extra:
                self.alive_since[name] = now_s
                start_s = self.scenario.fleet.cold_start_s * self.rng.uniform(0.5, 1.5)
                self.queue.at(now_s + start_s + pull_s, self._extra_ready, (name, now_s))
        elif self.system.extra == "trainers":
            switch_s = self.scenario.fleet.activation_s if step else 0.0
            for name in self.extra:
                self.queue.at(self.queue.now_s + switch_s, self._borrow, (name, step))

    def _borrow(self, now_s: float, word: tuple[str, int]) -> None:
        """Lend a training GPU, and renew that while the step's rollouts run."""
        name, number = word
        step = self.job.steps[-1]
        if step.number != number or not math.isnan(step.ready_s):
            return
        if not self.cluster.nodes[name].registered:
            self.cluster.start(name, self.job.version)
        lend_s = self.scenario.fleet.lend_s
        self.cluster.lend(name, lend_s)
        self.queue.at(now_s + lend_s / 3, self._borrow, word)

    def rollouts_end(self, job: str, step: int) -> float:
        if self.system.extra == "serverless":
            for name in self.extra:
                self._release(name, self.queue.now_s, keep=False, reason="released")
        elif self.system.extra == "trainers":
            for name in self.extra:
                self.cluster.lend(name, 0.0)
                if self.cluster.nodes[name].registered:
                    self.cluster.stop(name, keep_tokens=True, reason="returned")
            return self.scenario.fleet.activation_s
        return 0.0

    def publish(self, job: str, version: Version) -> float:
        now_s, nodes = self.queue.now_s, self.cluster.nodes
        waiting = [name for name in self.extra if nodes[name].registered and nodes[name].run in ("", job)]
        if self.system.extra == "trainers":
            waiting = []
        plan = transfer(
            self.system,
            self.policy_model,
            self.scenario.links,
            len(waiting),
            self.scenario.job.changed_fraction,
            num_ranks=self._extra_ranks,
            full=False,
        )
        self.relay_bytes += plan.relay_bytes
        for name, node in self.cluster.nodes.items():
            if node.tier is Tier.DEDICATED and node.run in ("", job):
                self.queue.at(now_s + plan.dedicated_s, self._commit, (name, job, version))
        for name in waiting:
            self.queue.at(now_s + plan.extra_s, self._commit, (name, job, version))
        return plan.dedicated_s

    def _commit(self, now_s: float, word: tuple[str, str, Version]) -> None:
        name, job, version = word
        if self.cluster.nodes[name].run not in ("", job):
            return  # it has gone over to another job meanwhile
        self.cluster.commit(name, version, recompute=self.system.name == "fixed_async")

    # --- time ------------------------------------------------------------------------------------------

    def _arrive(self, now_s: float, index: int) -> None:
        arrivals = self._arrivals
        assert arrivals is not None
        device = self.serving_devices[int(arrivals.engine[index])]
        prompt, output = int(arrivals.prompt[index]), int(arrivals.output[index])
        request = Request(f"p{index}", prompt, output, now_s)
        if arrivals.prefixes is not None:
            arrivals.prefixes.mark(request, index)
        device.arrive(request, now_s)
        if index + 1 < len(arrivals.at_s):
            self.queue.at(float(arrivals.at_s[index + 1]), self._arrive, index + 1)

    def _sweep(self, now_s: float, _: object) -> None:
        self.cluster.sweep(now_s)
        self.queue.at(now_s + self.cluster.heartbeat_s, self._sweep)

    def _sample(self, now_s: float, every_s: float) -> None:
        turns = dict.fromkeys((tier.value for tier in Tier), 0)
        lent = held = total = 0
        engines = 0
        for node in self.cluster.nodes.values():
            rollout = node.device.rollout
            assert rollout is not None
            turns[node.tier.value] += len(rollout.requests)
            if node.tier is Tier.HARVESTED:
                engines += node.registered
                if node.device.serving is not None:
                    lent += node.device.lend_pages
                    held += node.device.rollout_pages
                    total += node.device.total_pages
        serving = self.serving_devices
        whole = sum(device.total_pages for device in serving)
        running = sum(device.serving.running for device in serving if device.serving is not None)
        self.samples.append(
            FleetState(
                at_s=now_s,
                dedicated_turns=turns["dedicated"],
                harvested_turns=turns["harvested"] + turns["borrowed"],
                queued_turns=len(self.cluster.book.queue),
                serving_running=running,
                lent_share=lent / total if total else 0.0,
                held_share=held / total if total else 0.0,
                serving_kv=sum(device.serving_pages for device in serving) / whole if whole else 0.0,
                harvested_engines=engines,
                sampled=(
                    self.cluster.counters.sampled["dedicated"],
                    self.cluster.counters.sampled["harvested"] + self.cluster.counters.sampled["borrowed"],
                ),
            )
        )
        self.queue.at(now_s + every_s, self._sample, every_s)

    def run(self, progress: Callable[[float], None] | None) -> None:
        scenario = self.scenario
        self.queue.at(0.0, self._sweep)
        for index, job in enumerate(self.jobs.values()):
            self.queue.at(index * scenario.jobs_apart_s, job.begin)
        every_s = scenario.duration_s / SAMPLE_POINTS
        self.queue.at(every_s, self._sample, every_s)
        if self._arrivals is not None and len(self._arrivals.at_s):
            self.queue.at(float(self._arrivals.at_s[0]), self._arrive, 0)

        def stop() -> bool:
            if progress is not None:
                progress(min(1.0, self.queue.now_s / scenario.duration_s))
            return all(job.done for job in self.jobs.values())

        self.queue.run(scenario.duration_s, stop, every=512)

    def unanswered_late(self, now_s: float) -> dict[int, float]:
        """Requests still in an engine at the end that can no longer be in time: with their first token, or, if the last one came now, with those after it."""
        return {
            int(request.key[1:]): request.arrived_s
            for device in self.serving_devices
            if device.serving is not None
            for request in device.serving.requests.values()
            if is_late((request.first_s or now_s) - request.arrived_s, device.slo_ttft_s)
            or is_late(request.token_s(now_s) or 0.0, device.slo_tpot_s)
        }

    def check(self) -> None:
        for job in self.jobs.values():
            job.check()
        self.cluster.check()
        for device in [*self.serving_devices, *(node.device for node in self.cluster.nodes.values())]:
            device.check()


def simulate(
    scenario: Scenario,
    system_name: str,
    *,
    journal_path: Path | None = None,
    digest: bool = False,
    progress: Callable[[float], None] | None = None,
    check: bool = False,
    arrivals: Arrivals | None = None,
    asynchronous: bool = False,
) -> SimResult:
    """Run one system through one scenario.

    Args:
        digest: Keep the journal's digest also where no file is asked for.
        progress: Called with the share of time that has passed.
        check: Assert every book's invariants at the end.
        asynchronous: Train asynchronously whatever the system does otherwise.
        arrivals: Those of an earlier run of the same scenario, to save making them again.

    Raises:
        ConfigError: An impossible fleet, an unknown name, a malformed trace.
    """
    began_s = time.process_time()
    journal = EventDigest(journal_path, digest=digest)
    fleet = scenario.fleet
    if arrivals is None and fleet.serving:
        arrivals = make_arrivals(scenario.serving, fleet.serving, scenario.duration_s, scenario.seed)
    system = SYSTEMS[system_name]
    if asynchronous:
        system = replace(system, training="async")
    with _few_collections():
        world = SimWorld(scenario, system, journal, arrivals)
        world.run(progress)
    if check:
        world.check()
    now_s = world.queue.now_s
    unanswered = world.unanswered_late(now_s)
    for name in list(world.alive_since):
        world.allocated_s += now_s - world.alive_since[name]
        if not world.cluster.nodes[name].registered:
            world.wasted_s += now_s - world.alive_since[name]
    job_steps = {
        name: [step for step in job.steps if not math.isnan(step.end_s) and step.end_s <= now_s + 1e-6]
        for name, job in world.jobs.items()
    }
    steps = next(iter(job_steps.values()))
    busy = {
        "serving": sum(device.serving_busy_s for device in world.serving_devices),
        "serving_own": sum(device.serving_own_s for device in world.serving_devices),
        "harvested": sum(device.rollout_busy_s for device in world.serving_devices),
        "dedicated": sum(
            node.device.rollout_busy_s for node in world.cluster.nodes.values() if node.device.serving is None
        ),
    }
    own = fleet.dedicated * fleet.rollout_gpus + fleet.wide * fleet.wide_gpus
    gpus = scenario.num_jobs * (own + fleet.trainers)
    return SimResult(
        system=world.system,
        scenario=scenario,
        seed=scenario.seed,
        duration_s=now_s,
        steps=steps,
        counters=world.cluster.counters,
        ttft_s=world.cluster.ttft_s,
        tpot_s=world.cluster.tpot_s,
        samples=world.samples,
        marks=_marks(steps),
        late={**world.cluster.late, **unanswered},
        late_unanswered=unanswered,
        arrived_s=arrivals.at_s if arrivals is not None else np.zeros(0),
        relay_bytes=world.relay_bytes,
        billed_gpu_s=gpus * now_s + world.allocated_s * fleet.rollout_gpus,
        allocated_s=world.allocated_s,
        wasted_s=world.wasted_s,
        num_events=world.queue.num_events,
        num_steps=sum(d.num_steps for d in world.serving_devices)
        + sum(n.device.num_steps for n in world.cluster.nodes.values() if n.device.serving is None),
        digest=journal.close(),
        cpu_s=time.process_time() - began_s,
        busy=busy,
        job_steps=job_steps,
        num_switches=world.cluster.num_switches,
    )


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """A run makes millions of small objects, hardly any in cycles: with Python's own thresholds, looking for cycles
    is a seventh of its time."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _marks(steps: list[SimStep]) -> list[LaneSpan]:
    return [
        LaneSpan(lane="step", name=f"{what} {step.number}", start_s=start_s, end_s=end_s)
        for step in steps
        for what, start_s, end_s in (
            ("rollout", step.start_s, step.ready_s),
            ("train", step.ready_s, step.trained_s),
            ("weights", step.trained_s, step.end_s),
        )
    ]
