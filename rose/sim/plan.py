"""``rose plan``: what rollouts a serving fleet can lend, at what risk to production, worth how many GPUs.

1. *Sweep*: at three stretches of the traffic (quietest, average, busiest) and several headrooms, a few engines of the fleet are
   simulated with ROSE's own policies, and the same engines with the same requests without rollouts.  The headroom that harvests
   most within the allowed risk is recommended.
2. *Judgement*: that headroom again, on requests that the choice has not seen.  Every figure that is shown comes from here.
3. *Assumptions*: each is set low and high by itself, and worth and risk are simulated again.

Worth is in dedicated engines: how many the job would need, more than it has, to sample as much, where each samples what one does when the
same job has as many engines, all of them dedicated.  Over the day it is read off the three stretches by the rate of requests.  Everything is a list of :class:`Task`, which do not
know each other: they run on all cores, and one result is the same wherever it ran.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from rose.errors import ConfigError
from rose.evaluation.statistics import percentile
from rose.sim.arrivals import Floats
from rose.sim.cells import CellResult, run_cell, run_dedicated
from rose.sim.metrics_source import MeteredTraffic
from rose.sim.scenario import Scenario
from rose.sim.summary import SETTLE_S, Misses, compare_misses
from rose.sim.traffic import Traffic

HEADROOMS = (0.05, 0.1, 0.2, 0.3)
SAFE_EXTRA = 0.001
"""Recommended is the headroom that harvests most while at most this share more of production misses its limits."""
SAME_WORTH = 0.99
"""Of headrooms that harvest as much, but for this, the largest: memory that rollouts do not miss costs nothing to leave."""
FRESH = 2
"""Draws of each stretch by which the recommended headroom is judged."""
HOURS_A_MONTH = 730.0
GPU_HOUR_PRICE = 2.5
"""What a GPU hour is taken to cost unless said otherwise: near the market's price of an H100 by the hour, in dollars; a guess."""
WINDOWS = ("quiet", "mean", "busy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """Something that the figures rest on and nobody has measured here."""

    name: str
    """For people."""
    low: str
    high: str
    low_changes: Mapping[str, Any]
    """Dotted setting of the scenario -> value; ``*setting`` multiplies; ``load`` multiplies production's requests."""
    high_changes: Mapping[str, Any]
    measure: str
    """How to replace it by a measurement."""
    is_risky: bool
    """Whether production feels it: then its ends are judged at the busiest stretch too."""


_PROFILE = "measure step times on one GPU of the fleet: `rose profile`, then serving.profile and job.profile"
_JOB = "take the lengths from your job's own trajectories: `rose traj ls`, then [job]"


def assumptions(scenario: Scenario, traffic: Traffic) -> list[Assumption]:
    """Those that matter for this fleet; what was measured is none."""
    found: list[Assumption] = []

    def add(
        name: str,
        setting: str,
        low: float,
        high: float,
        measure: str,
        *,
        times: bool = False,
        risky: bool = False,
    ) -> None:
        key, word = (f"*{setting}", "x ") if times else (setting, "")
        found.append(
            Assumption(
                name=name,
                low=f"{word}{low:g}",
                high=f"{word}{high:g}",
                low_changes={key: low},
                high_changes={key: high},
                measure=measure,
                is_risky=risky,
            )
        )

    if scenario.serving.profile is None or scenario.job.profile is None:
        add("share of peak FLOPs that prompts reach", "efficiency.compute", 0.35, 0.65, _PROFILE, risky=True)
        add("share of memory bandwidth that decoding reaches", "efficiency.bandwidth", 0.5, 0.85, _PROFILE)
    overlap = "compare both engines' steps alone and together on one GPU: `python benchmarks/gpu_check.py`"
    add("overlap of two engines on a GPU", "efficiency.overlap", 0.0, 0.4, overlap, risky=True)
    if traffic.knows_engines:
        load = "watch a longer stretch, and the next release of your product"
        add("production's traffic grows or shrinks", "load", 0.7, 1.3, load, times=True, risky=True)
    else:
        load = "say how many engines served this traffic: --engines, or read --scrapes or --prometheus"
        add("traffic per engine", "load", 0.5, 2.0, load, times=True, risky=True)
    if not traffic.knows_bursts:
        bursts = "scrape every 15 s, or log arrival times for an hour and use --trace"
        add(
            "bursts between two scrapes (deviation of a second's rate)",
            "serving.noise",
            0.0,
            1.0,
            bursts,
            risky=True,
        )
    if traffic.hit_share is None or traffic.hit_share > 0.05:
        prompts = (
            "log prompt lengths without the cached part; the prefix cache of production is not simulated"
        )
        add("production's prompt lengths", "prompts", 0.6, 1.3, prompts, times=True)
    add("tokens that a turn samples", "job.output_median", 0.5, 2.0, _JOB, times=True)
    add("tokens of an observation", "job.observation_median", 0.5, 2.0, _JOB, times=True)
    running = "count your job's concurrent trajectories: batch x group size, over all engines"
    add("trajectories under way per engine", "cells.in_flight_per_engine", 0.5, 2.0, running, times=True)
    add(
        "GB per GPU for activations and graphs",
        "fleet.reserve_gb",
        2.0,
        8.0,
        "`rose doctor --config node.toml`",
    )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One simulated cell."""

    scenario: Scenario
    traffic: Traffic
    system: str
    start_s: float
    seed: int
    load: float = 1.0
    prompts: float = 1.0
    """Factors on production's requests, and on their prompts."""
    is_yardstick: bool = False
    """No serving engine is there."""

    def run(self) -> CellResult:
        cells = self.scenario.cells
        if self.is_yardstick:
            return run_dedicated(self.scenario, self.seed)
        length_s = cells.warm_s + cells.seconds
        arrivals = self.traffic.arrivals(
            self.scenario.serving, self.start_s, length_s, cells.serving, self.seed, self.load
        )
        if self.prompts != 1.0:
            most = self.scenario.serving.prompt_max
            arrivals.prompt[:] = np.clip(np.rint(arrivals.prompt * self.prompts), 1, most)
        scenario = self.scenario
        if self.system != "rose":  # only production is looked at
            scenario = changed(scenario, {"cells.in_flight_per_engine": 1})
        rate = max(1e-3, len(arrivals.at_s) / length_s / cells.serving)
        return run_cell(scenario, self.system, rate, self.seed, arrivals=arrivals)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One stretch at one headroom, on one draw of requests or several."""

    window: str
    headroom: float
    load: float
    """Requests per second and engine."""
    worth: float
    """Dedicated engines that one serving engine's harvest replaces."""
    tokens_s: float
    """Harvested, of one engine."""
    misses: Misses
    ttft_p99_ms: float
    alone_ttft_p99_ms: float
    tpot_p99_ms: float
    alone_tpot_p99_ms: float
    cuts_per_min: float
    busy: float
    """Share of the time that production's own steps take, without rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Swing:
    """What one assumption does to the GPUs, and to the added misses at the busiest; None where such a fleet cannot run, nothing is
    harvested as assumed, no request was judged, or production does not feel it."""

    assumption: Assumption
    low_gpus: float | None
    high_gpus: float | None
    low_added: float | None
    high_added: float | None

    @property
    def width(self) -> float:
        ends = [end for end in (self.low_gpus, self.high_gpus) if end is not None]
        return abs(ends[0] - ends[1]) if len(ends) == 2 else float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that the page says; see :func:`rose.sim.plan_page.write_plan`."""

    scenario: Scenario
    traffic: Traffic
    sweep: tuple[Cell, ...]
    judged: tuple[Cell, ...]
    """The recommended headroom, on fresh requests; one per window, quietest first."""
    headroom: float
    safe: bool
    at_s: Floats
    load: Floats
    """Requests per second and engine over the stretch that was read."""
    gpus: Floats
    """What could be harvested then, in GPUs, of the whole fleet."""
    tokens_s: Floats
    swings: tuple[Swing, ...]
    price: float

    @property
    def mean_gpus(self) -> float:
        return float(np.mean(self.gpus))

    @property
    def gpu_hours_a_month(self) -> float:
        return self.mean_gpus * HOURS_A_MONTH

    @property
    def money_a_month(self) -> float:
        return self.gpu_hours_a_month * self.price

    @property
    def tokens_a_day(self) -> float:
        return float(np.mean(self.tokens_s)) * 86400.0

    @property
    def misses(self) -> Misses:
        """Of all stretches together: a third of the requests' time is the busiest there was."""
        return sum((cell.misses for cell in self.judged), Misses(num=0, added=0, mended=0))

    @property
    def range_gpus(self) -> tuple[float, float]:
        """Lowest and highest that one assumption alone makes of it."""
        ends = [self.mean_gpus]
        ends += [end for one in self.swings for end in (one.low_gpus, one.high_gpus) if end is not None]
        return min(ends), max(ends)


class Pool:
    """Tasks on all cores; with one worker, in this process.  A context manager: leaving it ends the workers, and they end by themselves
    when this process is gone."""

    def __init__(self, workers: int | None = None) -> None:
        workers = workers or min(8, len(os.sched_getaffinity(0)))
        self._pool: ProcessPoolExecutor | None = None
        if workers > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(
        self, tasks: Sequence[Task], done: Callable[[], None], *, required: bool = False
    ) -> list[CellResult | None]:
        """Results in the order of ``tasks``; None for one whose fleet cannot exist.

        Raises:
            ConfigError: A fleet cannot exist, where all are ``required``.
        """
        found: list[CellResult | None] = [None] * len(tasks)
        if self._pool is None:
            for index, task in enumerate(tasks):
                found[index] = _run(task, required)
                done()
            return found
        futures = {self._pool.submit(_run, task, required): index for index, task in enumerate(tasks)}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            done()
        return found


def _run(task: Task, required: bool) -> CellResult | None:
    try:
        return task.run()
    except ConfigError:
        if required:
            raise
        return None


def _begin_worker() -> None:
    """Ctrl-C is the parent's; a parent that was killed takes its workers along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def make_plan(
    scenario: Scenario,
    traffic: Traffic,
    *,
    price: float = GPU_HOUR_PRICE,
    progress: Callable[[float, str], None] = lambda share, what: None,
    workers: int | None = None,
) -> Plan:
    """See the module.

    Args:
        progress: Told which share of the work is done, and what comes now.

    Raises:
        ConfigError: The fleet cannot exist, or could not have served such traffic, or the cells are too short to judge a request.
    """
    with Pool(workers) as pool:
        return _make_plan(scenario, traffic, price, progress, pool)


def _make_plan(
    scenario: Scenario, traffic: Traffic, price: float, progress: Callable[[float, str], None], pool: Pool
) -> Plan:
    cells = scenario.cells
    if cells.seconds <= SETTLE_S:
        raise ConfigError(
            f"must be above {SETTLE_S:g}, got {cells.seconds:g}: requests of the last {SETTLE_S:g} s are not judged",
            field="cells.seconds",
            fix="--set cells.seconds=330",
        )
    starts = traffic.windows(cells.warm_s + cells.seconds)
    varied = assumptions(scenario, traffic)
    total = len(WINDOWS) * (len(HEADROOMS) + 1) + 1 + len(WINDOWS) * FRESH * 2 + 2
    total += sum(4 + 4 * one.is_risky for one in varied)
    finished = 0
    stage = ""

    def done() -> None:
        nonlocal finished
        finished += 1
        progress(min(1.0, finished / total), stage)

    def run(tasks: Sequence[Task], what: str) -> list[CellResult]:
        nonlocal stage
        stage = what
        progress(min(1.0, finished / total), stage)
        found = [each for each in pool.run(tasks, done, required=True) if each is not None]
        assert len(found) == len(tasks)
        return found

    def task(system: str, window: str, seed: int, headroom: float | None = None) -> Task:
        config = scenario
        if headroom is not None:
            config = changed(scenario, {"lending.min_headroom_fraction": headroom})
        return Task(scenario=config, traffic=traffic, system=system, start_s=starts[window], seed=seed)

    # Sweep.
    seed = scenario.seed
    tasks = [yardstick_task(task("fixed_async", "mean", seed))]
    for window in WINDOWS:
        tasks.append(task("fixed_async", window, seed))
        tasks += [task("rose", window, seed, headroom) for headroom in HEADROOMS]
    yardstick, *results = run(tasks, "which headroom")
    per_engine = yardstick.dedicated_tokens_s or 1.0
    sweep: list[Cell] = []
    for number, window in enumerate(WINDOWS):
        alone, *with_rose = results[number * (1 + len(HEADROOMS)) :][: 1 + len(HEADROOMS)]
        for headroom, rose in zip(HEADROOMS, with_rose, strict=True):
            sweep.append(_cell(window, headroom, [(rose, alone)], per_engine, cells.warm_s))
    headroom, safe = recommend(sweep)

    # Judgement.
    tasks = [
        task(system, window, seed + 1 + draw, headroom if system == "rose" else None)
        for window in WINDOWS
        for draw in range(FRESH)
        for system in ("rose", "fixed_async")
    ]
    results = run(tasks, "on fresh requests")
    judged: list[Cell] = []
    for number, window in enumerate(WINDOWS):
        mine = results[number * 2 * FRESH :][: 2 * FRESH]
        pairs = list(zip(mine[::2], mine[1::2], strict=True))
        judged.append(_cell(window, headroom, pairs, per_engine, cells.warm_s))
    at_s, load = traffic.profile()
    order = sorted(judged, key=lambda cell: cell.load)
    loads = [cell.load for cell in order]
    engines = np.interp(load, loads, [cell.worth for cell in order])
    tokens = np.interp(load, loads, [cell.tokens_s for cell in order])
    serving = scenario.fleet.serving * traffic.engine_share()
    gpus = engines * serving * scenario.fleet.rollout_gpus

    # Assumptions: worth on half a cell at the average stretch, risk on a whole one at the busiest.
    stage = "assumptions"

    def worth_tasks(changes: Mapping[str, Any]) -> list[Task]:
        pair = (yardstick_task(task("fixed_async", "mean", seed)), task("rose", "mean", seed, headroom))
        return [altered(halved(each), changes) for each in pair]

    ends = [(one, changes) for one in varied for changes in (one.low_changes, one.high_changes)]
    tasks = worth_tasks({})
    for one, changes in ends:
        tasks += worth_tasks(changes)
        if one.is_risky:
            pair = (task("rose", "busy", seed, headroom), task("fixed_async", "busy", seed))
            tasks += [altered(each, changes) for each in pair]
    outcomes = iter(pool.run(tasks, done))
    base_worth = _worth(next(outcomes), next(outcomes))
    shown: list[tuple[float | None, float | None]] = []
    for one, _ in ends:
        worth_now = _worth(next(outcomes), next(outcomes))
        added = None
        if one.is_risky:
            rose, alone = next(outcomes), next(outcomes)
            added = None if rose is None or alone is None else _misses([(rose, alone)], cells.warm_s).share
        shown.append((worth_now, added))
    swings = swings_of(varied, shown, base_worth, float(np.mean(gpus)))
    return Plan(
        scenario=scenario,
        traffic=traffic,
        sweep=tuple(sweep),
        judged=tuple(judged),
        headroom=headroom,
        safe=safe and any(each.misses.num for each in judged),
        at_s=at_s,
        load=load,
        gpus=gpus,
        tokens_s=tokens * serving,
        swings=tuple(sorted(swings, key=lambda swing: -swing.width)),
        price=price,
    )


def swings_of(
    varied: Sequence[Assumption],
    ends: Sequence[tuple[float | None, float | None]],
    base_worth: float | None,
    mean_gpus: float,
) -> list[Swing]:
    """
    Args:
        ends: Worth of an engine and added misses, at the low end of each assumption and at the high one.
        base_worth: As assumed; where it is nothing, nothing can be said of the GPUs at an end.
        mean_gpus: What ``base_worth`` is over the day.
    """

    def gpus(worth: float | None) -> float | None:
        return worth / base_worth * mean_gpus if worth is not None and base_worth else None

    return [
        Swing(
            assumption=one,
            low_gpus=gpus(low[0]),
            high_gpus=gpus(high[0]),
            low_added=low[1],
            high_added=high[1],
        )
        for one, low, high in zip(varied, ends[::2], ends[1::2], strict=True)
    ]


def recommend(cells: Iterable[Cell]) -> tuple[float, bool]:
    """The headroom to lend with, and whether it is safe; the safest where none is.  One of which no request was judged is not."""
    shares: dict[float, list[float]] = {}
    worth: dict[float, float] = {}
    for cell in cells:
        judged = shares.setdefault(cell.headroom, [])
        if cell.misses.share is not None:
            judged.append(cell.misses.share)
        worth[cell.headroom] = worth.get(cell.headroom, 0.0) + cell.worth
    risk = {headroom: max(judged, default=math.inf) for headroom, judged in shares.items()}
    safe = [headroom for headroom, share in risk.items() if share <= SAFE_EXTRA]
    if not safe:
        return min(risk, key=lambda headroom: (risk[headroom], -headroom)), False
    most = max(worth[headroom] for headroom in safe)
    return max(headroom for headroom in safe if worth[headroom] >= SAME_WORTH * most), True


def changed(scenario: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """With other settings; ``*table.key`` multiplies, and keeps whole numbers whole."""
    for name, value in changes.items():
        table, _, key = name.lstrip("*").partition(".")
        section = getattr(scenario, table)
        if name.startswith("*"):
            old = getattr(section, key)
            value = max(1, round(old * value)) if isinstance(old, int) else old * value
        scenario = scenario.model_copy(update={table: section.model_copy(update={key: value})})
    return scenario


def altered(task: Task, changes: Mapping[str, Any]) -> Task:
    """With one end of an assumption."""
    factors = {name.lstrip("*"): value for name, value in changes.items() if "." not in name}
    settings = {name: value for name, value in changes.items() if "." in name}
    scenario, traffic = changed(task.scenario, settings), task.traffic
    if "serving.noise" in settings and isinstance(traffic, MeteredTraffic):
        traffic = replace(traffic, noise=settings["serving.noise"])
    return replace(task, scenario=scenario, traffic=traffic, **factors)


def halved(task: Task) -> Task:
    """On half the engines for half the time: for differences, not for figures."""
    return replace(
        task,
        scenario=changed(
            task.scenario, {"*cells.serving": 0.5, "*cells.dedicated": 0.5, "*cells.seconds": 0.5}
        ),
    )


def yardstick_task(task: Task) -> Task:
    """What worth is counted in: see :func:`rose.sim.cells.run_dedicated`."""
    return replace(task, is_yardstick=True)


def _cell(
    window: str,
    headroom: float,
    pairs: Sequence[tuple[CellResult, CellResult]],
    per_engine: float,
    warm_s: float,
) -> Cell:
    """Of (with ROSE, alone) on the same requests, one pair or several."""

    def p99_ms(which: int, name: str) -> float:
        values = [value for pair in pairs for value in getattr(pair[which], name)]
        return percentile(values, 0.99) * 1e3 if values else 0.0

    return Cell(
        window=window,
        headroom=headroom,
        load=float(np.mean([rose.load for rose, _ in pairs])),
        worth=float(np.mean([worth_of(rose, per_engine) for rose, _ in pairs])),
        tokens_s=float(np.mean([rose.harvested_tokens_s for rose, _ in pairs])),
        misses=_misses(pairs, warm_s),
        ttft_p99_ms=p99_ms(0, "ttft_s"),
        alone_ttft_p99_ms=p99_ms(1, "ttft_s"),
        tpot_p99_ms=p99_ms(0, "tpot_s"),
        alone_tpot_p99_ms=p99_ms(1, "tpot_s"),
        cuts_per_min=float(np.mean([rose.cuts_per_min for rose, _ in pairs])),
        busy=float(np.mean([alone.serving_busy for _, alone in pairs])),
    )


def worth_of(rose: CellResult, per_engine: float) -> float:
    """Dedicated engines that one serving engine replaces.  Turns go to dedicated engines first, so harvested ones have fewer: what they
    sample by themselves is less than what they are worth.

    Args:
        per_engine: Tokens per second of an engine where all are dedicated.
    """
    tokens_s = rose.dedicated_tokens_s * rose.num_dedicated + rose.harvested_tokens_s * rose.num_serving
    return max(0.0, tokens_s / (per_engine or 1.0) - rose.num_dedicated) / max(1, rose.num_serving)


def _misses(pairs: Iterable[tuple[CellResult, CellResult]], warm_s: float) -> Misses:
    found = Misses(num=0, added=0, mended=0)
    for rose, alone in pairs:
        end_s = min(rose.duration_s, alone.duration_s)
        found += compare_misses(rose.late, alone.late, rose.arrived_s, end_s, warm_s)
    return found


def _worth(yardstick: CellResult | None, rose: CellResult | None) -> float | None:
    """Dedicated engines that one serving engine's harvest replaces; None where a fleet cannot exist."""
    if yardstick is None or rose is None:
        return None
    return worth_of(rose, yardstick.dedicated_tokens_s)
