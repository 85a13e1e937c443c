"""The cells of ``benchmarks/sim_paper.py``: which job beside which production, what is searched, and how a run is made of a setting.

Fixed before the first judged run; ``benchmarks/sim_paper.py`` says what is judged and by which bar.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rose.sim.arrivals import Arrivals, make_arrivals
from rose.sim.scenario import Scenario
from rose.sim.scenario_file import load_scenario

ROOT = Path(__file__).resolve().parents[2]
JOBS = ("grpo_8b", "grpo_32b", "dapo_8b", "dapo_32b")
BATCHES = {256: 16, 1024: 64}
"""Trajectories of a step -> groups of 16."""
BUSY = {"quiet": 0.19, "busy": 0.60}
"""Share of the time that production's own steps take: about the paper's 18.9 % (which is of SMs, over a day), and a fleet that is used."""
P99_ALONE_MS = {"8b": (315.0, 118.0), "32b": (716.0, 313.0)}
"""Published, production alone: first token, between tokens (arXiv 2605.06534)."""
PUBLISHED = {"grpo_8b": 1.31, "grpo_32b": 1.46, "dapo_8b": 1.42, "dapo_32b": 3.31}
"""Step-time gain of the paper's system over its fixed baseline; which batch each is of is not public in what we could read."""

PRODUCTION: dict[tuple[str, str], tuple[str, ...]] = {
    ("8b", "quiet"): (
        "serving.chunk_tokens=2048",
        "serving.burst_factor=7.0",
        "serving.burst_length_s=10.0",
        "serving.requests_per_s=0.149",
    ),
    ("8b", "busy"): (
        "serving.chunk_tokens=2048",
        "serving.burst_factor=7.0",
        "serving.burst_length_s=10.0",
        "serving.requests_per_s=0.747",
    ),
    ("32b", "quiet"): (
        "serving.chunk_tokens=8192",
        "serving.burst_factor=7.0",
        "serving.burst_length_s=10.0",
        "serving.requests_per_s=0.122",
    ),
    ("32b", "busy"): (
        "serving.chunk_tokens=8192",
        "serving.burst_factor=7.0",
        "serving.burst_length_s=10.0",
        "serving.requests_per_s=0.690",
    ),
}
"""(size, setting) -> what ``benchmarks/sim/paper_production.py`` found (2026-11-23); see :data:`FREE`.  Residuals: P99 first token x1.16 (8B) and x0.59
(32B) of the published one, between tokens x0.10 and x0.04: no value of these parameters comes near the published time between tokens."""
FREE = {
    "serving.chunk_tokens": (2048, 8192, 16384),
    "serving.burst_factor": (1.0, 3.5, 7.0),
    "serving.burst_length_s": (2.0, 10.0),
}
"""Free parameters of production and what is tried, all combinations; ``serving.requests_per_s`` follows from the busy share.  Chosen is the
combination with the smallest sum of squared logarithms of simulated over published P99, first token and between tokens, at the quiet
setting; the busy one has the same but for its rate."""

TENSOR_PARALLEL = {"8b": (1, 2, 4, 8), "32b": (2, 4, 8, 16)}
"""GPUs of a dedicated engine; their number is the job's rollout GPUs divided by it."""
CAPS = (16, 32, 64, 128, 256, 512)
"""Turns or trajectories of a dedicated engine; the search begins at 256, where a wide engine can hold a batch of 256 whole."""
HARVESTED_CAPS = (8, 16, 32, 64)
LONGEST_S = (0.0, 60.0, 300.0)
"""``scheduler.longest_first_s``; likewise the next ``scheduler.tail_fraction``."""
TAIL = (0.0, 0.1, 0.2)
MOST_ADDED = 0.0002
"""Of production's requests, that miss their limits beyond those that miss them without rollouts."""
RESERVE = 0.2
"""``gate.first_token_reserve`` of the tail engine; not searched, as the search looks at step times alone."""
LIMIT_S = 7200.0
NUM_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One point of the search."""

    system: str
    tensor_parallel: int
    cap: int = 32
    cap_harvested: int = 16
    longest_first_s: float = 0.0
    tail_fraction: float = 0.0

    @property
    def key(self) -> str:
        return (
            f"{self.system}-tp{self.tensor_parallel}-cap{self.cap}-harvested{self.cap_harvested}"
            f"-longest{self.longest_first_s:g}-tail{self.tail_fraction:g}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """What is compared.  ``systems``: each is searched by itself, and the fastest stands for the arm; ``levers``: whether the scheduler's
    two levers for the tail are searched; ``serving``: whether production is there at all."""

    systems: tuple[str, ...]
    levers: bool = False
    serving: bool = True
    unlimited: bool = False
    """An engine for every trajectory."""
    streamed: bool = False
    """Forward and backward of a group begin when it is complete: the user's gain with and without harvesting, so it is in the baseline and the ceiling too."""
    engine_levers: bool = False
    """Rollout steps that stop at a layer, chunks of 512 tokens while production stands still, up to four rollout steps for each of production's, and
    a reserve of the first token's slack."""
    over: str = ""
    """The arm that its gain is over; empty: it is not judged."""
    rival: str = ""
    """That it must be ahead of."""
    ceiling: str = ""


_OWN = ("fixed_sync", "fixed_ours")
ARMS: dict[str, Arm] = {
    "fixed": Arm(systems=_OWN, levers=True),
    "paper": Arm(systems=("paper",), over="fixed", ceiling="ceiling"),
    "rose": Arm(systems=("rose",), over="fixed", rival="paper", ceiling="ceiling"),
    "ceiling": Arm(systems=_OWN, levers=True, serving=False),
    "unlimited": Arm(systems=_OWN, levers=True, serving=False, unlimited=True),
    "fixed_tail": Arm(systems=_OWN, levers=True, streamed=True),
    "paper_tail": Arm(systems=("paper",), streamed=True, over="fixed_tail", ceiling="ceiling_tail"),
    "rose_tail": Arm(
        systems=("rose",), levers=True, streamed=True, engine_levers=True,
        over="fixed_tail", rival="paper_tail", ceiling="ceiling_tail",
    ),
    "ceiling_tail": Arm(systems=_OWN, levers=True, serving=False, streamed=True),
}  # fmt: skip
"""``fixed_sync``: a trajectory holds a slot, as ROLL limits concurrent rollouts.  ``fixed_ours``: ``rose-scheduler`` on the job's own engines, nothing
harvested.  The fixed baseline is the faster of the two: what is left to gain is harvesting's alone."""
JUDGED = tuple(name for name, arm in ARMS.items() if arm.over)
OURS = tuple(name for name in JUDGED if ARMS[name].rival)
"""Judged by the bar; the others are what it must be ahead of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    job: str
    batch: int
    busy: str

    @property
    def name(self) -> str:
        return f"{self.job}_{self.batch}_{self.busy}"

    @property
    def size(self) -> str:
        return self.job.partition("_")[2]


CELLS = tuple(
    Cell(job=job, batch=batch, busy=busy)
    for batch, jobs in ((256, JOBS), (1024, JOBS))
    for busy in BUSY
    for job in jobs
)
"""In the order in which they are run."""


def base_scenario(cell: Cell, seed: int) -> Scenario:
    """The cell before any search."""
    changes = [
        f"seed={seed}",
        f"duration_s={LIMIT_S}",
        f"num_steps={NUM_STEPS}",
        f"job.num_groups={BATCHES[cell.batch]}",
        "serving.daily_swing=0.0",
        *PRODUCTION.get((cell.size, cell.busy), ()),
    ]
    return load_scenario(ROOT / f"examples/scenarios/paper/{cell.job}.toml", changes)


@functools.lru_cache(maxsize=4)
def arrivals_of(cell: Cell, seed: int) -> Arrivals:
    scenario = base_scenario(cell, seed)
    return make_arrivals(scenario.serving, scenario.fleet.serving, scenario.duration_s, seed)


def scenario_of(cell: Cell, arm: str, setting: Setting, seed: int) -> tuple[Scenario, str]:
    """The run of a setting: its scenario, and the system's name."""
    what, base = ARMS[arm], base_scenario(cell, seed)
    fleet, job = base.fleet, base.job
    gpus = fleet.dedicated * fleet.rollout_gpus
    serving = fleet.serving
    if not what.serving:
        gpus += fleet.serving * fleet.serving_gpus
        serving = 0
    dedicated = gpus // setting.tensor_parallel
    if what.unlimited:
        # DAPO begins as many groups as its share of usable ones calls for.
        share = job.keep_low if job.algorithm == "dapo" else 1.0
        dedicated = math.ceil(job.num_groups / share) * job.group_size
    change = {"dedicated": dedicated, "rollout_gpus": setting.tensor_parallel, "serving": serving}
    if what.engine_levers:
        change |= {"preempt_s": 0.001, "idle_chunk_tokens": 512, "round_steps": 4}
    scheduler = base.scheduler.model_copy(
        update={
            "cap_dedicated": setting.cap,
            "cap_harvested": setting.cap_harvested,
            "longest_first_s": setting.longest_first_s,
            "tail_fraction": setting.tail_fraction,
        }
    )
    job = job.model_copy(update={"streamed": what.streamed})
    gate = base.gate.model_copy(update={"first_token_reserve": RESERVE if what.engine_levers else 0.0})
    changed = {"fleet": fleet.model_copy(update=change), "scheduler": scheduler, "job": job, "gate": gate}
    scenario = base.model_copy(update=changed)
    if not serving:
        scenario = scenario.model_copy(update={"heartbeat_s": 1.0})
    return scenario, setting.system


def coordinates(cell: Cell, arm: str, system: str) -> Iterator[tuple[str, tuple[float, ...]]]:
    """What the search moves along, in order: each once, the best of it kept, everything else as it is then."""
    gpus = {"8b": 8, "32b": 16}[cell.size]
    yield "tensor_parallel", tuple(n for n in TENSOR_PARALLEL[cell.size] if n <= gpus)
    if not ARMS[arm].unlimited:
        yield "cap", CAPS
    if system in ("paper", "rose"):
        yield "cap_harvested", HARVESTED_CAPS
    if ARMS[arm].levers and system not in ("fixed_sync", "paper"):
        yield "longest_first_s", LONGEST_S
        if system == "rose":
            yield "tail_fraction", TAIL


def start_of(cell: Cell, arm: str, system: str) -> Setting:
    """Where the search begins: the scenario's own tensor parallel, and room, so that widths are compared by their speed and not by their slots."""
    cap = 1 if ARMS[arm].unlimited else 256
    return Setting(system=system, tensor_parallel=1 if cell.size == "8b" else 4, cap=cap)


def moved(setting: Setting, name: str, value: float) -> Setting:
    old = getattr(setting, name)
    return replace(setting, **{name: type(old)(value)})
