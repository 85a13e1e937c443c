"""``rose plan``: what rollouts a serving fleet can lend, at what risk to production, worth how many GPUs.

1. *Sweep*: at three stretches of the traffic (quietest, average, busiest) and several headrooms, a few engines of the fleet are
   simulated with ROSE's own policies, and the same engines with the same requests without rollouts.  The headroom that harvests
   most within the allowed risk is recommended.
2. *Judgement*: that headroom again, on requests that the choice has not seen.  Every figure that is shown comes from here, and the
   verdict: whether lending is safe, is not, or cannot be told from so few requests.
3. *Assumptions*: each is set low and high by itself, and worth and risk are simulated again.

Worth is in dedicated engines (:mod:`rose.sim.worth`).  Over the day it is read off the three stretches by the rate of requests.
Everything is a list of :class:`Task`, which do not know each other: they run on all cores, and one result is the same wherever it ran.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from rose.errors import ConfigError
from rose.evaluation.statistics import percentile
from rose.sim.arrivals import Floats
from rose.sim.cells import CellResult, run_cell, run_dedicated
from rose.sim.metrics_source import MeteredTraffic
from rose.sim.plan_assumptions import Assumption, assumptions, changed
from rose.sim.plan_pool import ProcessPool
from rose.sim.scenario import Scenario
from rose.sim.summary import SETTLE_S, Misses, compare_misses
from rose.sim.traffic import Traffic
from rose.sim.worth import Yardstick, gpu_ratio, sizes, time_left, worth_of, yardstick_of

HEADROOMS = (0.05, 0.1, 0.2, 0.3)
SAFE_EXTRA = 0.001
"""Recommended is the headroom that harvests most while at most this share more of production misses its limits."""
SAME_WORTH = 0.99
"""Of headrooms that harvest as much, but for this, the largest: memory that rollouts do not miss costs nothing to leave."""
FRESH = (2, 6)
"""Draws of each stretch by which the recommended headroom is judged: so many at least, and at most until :data:`ENOUGH`."""
ENOUGH = 3.0
"""Times ``1 / SAFE_EXTRA`` requests without an added miss show that no more is meant (95 %)."""
HOURS_A_MONTH = 730.0
GPU_HOUR_PRICE = 2.5
"""What a GPU hour is taken to cost unless said otherwise: near the market's price of an H100 by the hour, in dollars; a guess."""
WINDOWS = ("quiet", "mean", "busy")
ONLY_BESIDE = {"load", "prompts", "serving.noise", "efficiency.overlap"}
"""What an assumption may change without any effect on dedicated engines."""


class RiskVerdict(StrEnum):
    """On the risk to production, by requests that the choice of the headroom has not seen."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    """In some stretch more is added than :data:`SAFE_EXTRA`, by more than chance would (95 %)."""
    UNCLEAR = "unclear"
    """Too few requests to tell."""


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
    dedicated: int = 0
    """So many engines and no serving one: a point of the yardstick; 0 = a cell."""

    def run(self) -> CellResult:
        cells = self.scenario.cells
        if self.dedicated:
            return run_dedicated(self.scenario, self.seed, self.dedicated)
        length_s = cells.warm_s + cells.seconds
        arrivals = self.traffic.arrivals(
            self.scenario.serving, self.start_s, length_s, cells.serving, self.seed, self.load
        )
        if self.prompts != 1.0:
            most, _ = self.traffic.longest(self.scenario.serving)
            arrivals.prompt[:] = np.clip(np.rint(arrivals.prompt * self.prompts), 1, most)
        scenario = self.scenario
        if self.system != "rose":  # only production is looked at
            scenario = changed(scenario, {"cells.in_flight_per_engine": 1})
        rate = max(1e-3, len(arrivals.at_s) / length_s / cells.serving)
        return run_cell(scenario, self.system, rate, self.seed, arrivals=arrivals)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCell:
    """One stretch at one headroom, on one draw of requests or several."""

    window: str
    headroom: float
    load: float
    """Requests per second and engine."""
    worth: float | None
    """Dedicated engines that one serving engine's harvest replaces; None where the job does not load the fleet."""
    most: float
    """What production leaves of the engine's time, in dedicated engines: worth is never more."""
    tokens_s: float
    """Harvested, of one engine."""
    misses: Misses
    ttft_p99_ms: float
    alone_ttft_p99_ms: float
    tpot_p99_ms: float
    alone_tpot_p99_ms: float
    cuts_per_min: float
    alone_kv: float
    """Share of its KV memory that production holds without rollouts, on average."""
    busy: float
    """Share of the time in which a step of production is under way, without rollouts."""
    own: float
    """Share that its steps need for themselves beside rollouts: requests that take longer share more of them."""
    alone_missed: float
    """Share of production's requests that miss a limit without rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Swing:
    """What one assumption does to the GPUs, and to the added misses at the busiest; None where such a fleet cannot run, the job then does not
    load it, nothing is harvested as assumed, no request was judged, or production does not feel it."""

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
class CapacityPlan:
    """All that the page says; see :func:`rose.sim.plan_page.write_plan`."""

    scenario: Scenario
    traffic: Traffic
    sweep: tuple[PlanCell, ...]
    judged: tuple[PlanCell, ...]
    """The recommended headroom, on fresh requests; one per window, quietest first."""
    headroom: float
    fresh: int
    """Draws of each stretch that it was judged by."""
    verdict: RiskVerdict
    yardstick: Yardstick
    at_s: Floats
    load: Floats
    """Requests per second and engine over the stretch that was read."""
    gpus: Floats | None
    """What could be harvested then, in GPUs, of the whole fleet; None where the job does not load the fleet."""
    most_gpus: float
    """What production leaves of the fleet's time, on average: never more is harvested."""
    tokens_s: Floats
    half_worth: float | None
    """Of an engine at the average stretch as assumed, on the half cell that assumptions are varied on."""
    swings: tuple[Swing, ...]
    price: float

    @property
    def lends(self) -> bool:
        """Whether lending is recommended, with a worth: it is safe, and the job makes something of it."""
        return self.verdict is RiskVerdict.SAFE and bool(self.mean_gpus)

    @property
    def mean_gpus(self) -> float | None:
        return None if self.gpus is None else float(np.mean(self.gpus))

    @property
    def gpu_hours_a_month(self) -> float | None:
        return None if self.mean_gpus is None else self.mean_gpus * HOURS_A_MONTH

    @property
    def money_a_month(self) -> float | None:
        return None if self.gpu_hours_a_month is None else self.gpu_hours_a_month * self.price

    @property
    def tokens_a_day(self) -> float:
        return float(np.mean(self.tokens_s)) * 86400.0

    @property
    def misses(self) -> Misses:
        """Of all stretches together: a third of the requests' time is the busiest there was."""
        return sum((cell.misses for cell in self.judged), Misses(num=0, added=0, mended=0))

    @property
    def chance(self) -> float:
        """By which share half a cell and a whole one differ with nothing changed: smaller swings say nothing."""
        whole = next((cell.worth for cell in self.judged if cell.window == "mean"), None)
        return abs(self.half_worth / whole - 1.0) if whole and self.half_worth is not None else 0.0

    @property
    def range_gpus(self) -> tuple[float, float] | None:
        """Lowest and highest that one assumption alone makes of it; None where nothing can be told of any."""
        told = [end for one in self.swings for end in (one.low_gpus, one.high_gpus) if end is not None]
        if self.mean_gpus is None or not told:
            return None
        return min(self.mean_gpus, *told), max(self.mean_gpus, *told)


def make_plan(
    scenario: Scenario,
    traffic: Traffic,
    *,
    price: float = GPU_HOUR_PRICE,
    progress: Callable[[float, str], None] = lambda share, what: None,
    workers: int | None = None,
) -> CapacityPlan:
    """See the module.

    Args:
        progress: Told which share of the work is done, and what comes now.

    Raises:
        ConfigError: The fleet cannot exist, or could not have served such traffic, or the cells are too short to judge a request.
    """
    with ProcessPool(workers) as pool:
        return _make_plan(scenario, traffic, price, progress, pool)


def _make_plan(
    scenario: Scenario,
    traffic: Traffic,
    price: float,
    progress: Callable[[float, str], None],
    pool: ProcessPool,
) -> CapacityPlan:
    cells = scenario.cells
    if cells.seconds <= SETTLE_S:
        raise ConfigError(
            f"must be above {SETTLE_S:g}, got {cells.seconds:g}: requests of the last {SETTLE_S:g} s are not judged",
            field="cells.seconds",
            fix="--set cells.seconds=330",
        )
    starts = traffic.windows(cells.warm_s + cells.seconds)
    fresh = draws(scenario, traffic, starts)
    varied = assumptions(scenario, traffic)
    ends = [(one, changes) for one in varied for changes in (one.low_changes, one.high_changes)]
    total = len(sizes(scenario)) + len(WINDOWS) * (len(HEADROOMS) + 1) + len(WINDOWS) * fresh * 2
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

    # Assumptions: worth on half a cell at the average stretch, risk on a whole one at the busiest.
    def swing_tasks(headroom: float) -> list[list[Task]]:
        """For what was assumed, then for each end: worth beside production, risk with rollouts and without, the yardstick if it is another."""
        half = halved(task("rose", "mean", scenario.seed, headroom))
        found = [[half, *yardstick_tasks(half)]]
        for one, changes in ends:
            mine = [altered(half, changes)]
            if one.is_risky:
                pair = (
                    task("rose", "busy", scenario.seed, headroom),
                    task("fixed_async", "busy", scenario.seed),
                )
                mine += [altered(each, changes) for each in pair]
            if not changes.keys() <= ONLY_BESIDE:
                mine += yardstick_tasks(mine[0])
            found.append(mine)
        return found

    total += sum(len(each) for each in swing_tasks(HEADROOMS[0]))

    # Sweep.
    seed = scenario.seed
    tasks = yardstick_tasks(task("fixed_async", "mean", seed))
    num_sizes = len(tasks)
    for window in WINDOWS:
        tasks.append(task("fixed_async", window, seed))
        tasks += [task("rose", window, seed, headroom) for headroom in HEADROOMS]
    results = run(tasks, "which headroom")
    yardstick, results = yardstick_of(results[:num_sizes]), results[num_sizes:]
    sweep: list[PlanCell] = []
    for number, window in enumerate(WINDOWS):
        alone, *with_rose = results[number * (1 + len(HEADROOMS)) :][: 1 + len(HEADROOMS)]
        for headroom, rose in zip(HEADROOMS, with_rose, strict=True):
            sweep.append(cell_of(window, headroom, [(rose, alone)], yardstick, scenario))
    headroom = recommend(sweep)

    # Judgement.
    tasks = [
        # Stretches of flat traffic, or of less than one, would be the same requests with one seed.
        task(system, window, seed + 1 + number * fresh + draw, headroom if system == "rose" else None)
        for number, window in enumerate(WINDOWS)
        for draw in range(fresh)
        for system in ("rose", "fixed_async")
    ]
    results = run(tasks, "on fresh requests")
    judged: list[PlanCell] = []
    for number, window in enumerate(WINDOWS):
        mine = results[number * 2 * fresh :][: 2 * fresh]
        pairs = list(zip(mine[::2], mine[1::2], strict=True))
        judged.append(cell_of(window, headroom, pairs, yardstick, scenario))
    at_s, load = traffic.profile()
    serving = scenario.fleet.serving * traffic.engine_share()
    whole = serving * scenario.fleet.rollout_gpus
    order = sorted(judged, key=lambda cell: cell.load)

    def over_time(values: Iterable[float]) -> Floats:
        return np.interp(load, [cell.load for cell in order], list(values))

    worths = [cell.worth for cell in order if cell.worth is not None]
    gpus = over_time(worths) * whole if len(worths) == len(order) else None

    # Assumptions.
    stage = "assumptions"
    groups = swing_tasks(headroom)
    outcomes = iter(pool.run([each for group in groups for each in group], done))
    base_worth: float | None = None
    base_curve: Yardstick | None = None
    shown: list[tuple[float | None, float | None]] = []
    for number, group in enumerate(groups):
        rose, *rest = [next(outcomes) for _ in group]
        added = None
        if number and ends[number - 1][0].is_risky:
            with_rose, alone, *rest = rest
            if with_rose is not None and alone is not None:
                added = _misses([(with_rose, alone)], cells.warm_s).share
        points = [each for each in rest if each is not None]
        curve = yardstick_of(points) if rest and len(points) == len(rest) else None if rest else base_curve
        worth = None if rose is None or curve is None else worth_of(rose, curve)
        if rose is not None and worth is not None:
            worth = min(worth, time_left(group[0].scenario, rose.serving_own) * gpu_ratio(scenario))
        if number:
            shown.append((worth, added))
        else:
            base_worth, base_curve = worth, curve
    all_gpus = float(np.mean(serving)) * scenario.fleet.serving_gpus
    swings = swings_of(varied, shown, base_worth, None if gpus is None else float(np.mean(gpus)), all_gpus)
    return CapacityPlan(
        scenario=scenario,
        traffic=traffic,
        sweep=tuple(sweep),
        judged=tuple(judged),
        headroom=headroom,
        fresh=fresh,
        verdict=verdict_of(judged, is_too_little=traffic.is_too_little),
        yardstick=yardstick,
        at_s=at_s,
        load=load,
        gpus=gpus,
        most_gpus=float(np.mean(over_time(cell.most for cell in order) * whole)),
        tokens_s=over_time(cell.tokens_s for cell in order) * serving,
        half_worth=base_worth,
        swings=tuple(sorted(swings, key=lambda swing: -swing.width)),
        price=price,
    )


def swings_of(
    varied: Sequence[Assumption],
    ends: Sequence[tuple[float | None, float | None]],
    base_worth: float | None,
    mean_gpus: float | None,
    all_gpus: float,
) -> list[Swing]:
    """
    Args:
        ends: Worth of an engine and added misses, at the low end of each assumption and at the high one.
        base_worth: As assumed; where it is nothing, nothing can be said of the GPUs at an end.
        mean_gpus: What ``base_worth`` is over the day.
        all_gpus: That production has: no assumption makes more of them.
    """

    def gpus(worth: float | None) -> float | None:
        if worth is None or not base_worth or mean_gpus is None:
            return None
        return min(all_gpus, worth / base_worth * mean_gpus)

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


def draws(scenario: Scenario, traffic: Traffic, starts: Mapping[str, float]) -> int:
    """Of each stretch, so that an idle fleet's few requests are judged often enough, within :data:`FRESH`."""
    cells = scenario.cells
    length_s = cells.warm_s + cells.seconds
    a_second = sum(traffic.rate(start_s, length_s) for start_s in starts.values()) * cells.serving
    wanted = ENOUGH / SAFE_EXTRA / max(1e-9, a_second * (cells.seconds - SETTLE_S))
    return math.ceil(min(FRESH[1], max(FRESH[0], wanted)))


def recommend(cells: Iterable[PlanCell]) -> float:
    """The headroom to lend with: of those that seem safe the one that harvests most; the safest where none does.  One of which no
    request was judged does not."""
    shares: dict[float, list[float]] = {}
    harvest: dict[float, float] = {}
    for cell in cells:
        judged = shares.setdefault(cell.headroom, [])
        if cell.misses.share is not None:
            judged.append(cell.misses.share)
        harvested = cell.tokens_s if cell.worth is None else cell.worth
        harvest[cell.headroom] = harvest.get(cell.headroom, 0.0) + harvested
    risk = {headroom: max(judged, default=math.inf) for headroom, judged in shares.items()}
    safe = [headroom for headroom, share in risk.items() if share <= SAFE_EXTRA]
    if not safe:
        return min(risk, key=lambda headroom: (risk[headroom], -headroom))
    most = max(harvest[headroom] for headroom in safe)
    return max(headroom for headroom in safe if harvest[headroom] >= SAME_WORTH * most)


def kept_alone(judged: Iterable[PlanCell]) -> float:
    """Requests judged that are within their limits without rollouts: what is late anyway says nothing of these."""
    return sum(cell.misses.num * (1.0 - cell.alone_missed) for cell in judged)


def verdict_of(judged: Sequence[PlanCell], *, is_too_little: bool = False) -> RiskVerdict:
    """Each stretch must be safe by itself, and all together have requests enough, kept within limits without rollouts, to show one in
    ``1 / SAFE_EXTRA``.  All of them are drawn from what was read: where that is too little, any number of draws shows nothing."""
    known = [cell.misses for cell in judged if cell.misses.num]
    if any(misses.low is not None and misses.low > SAFE_EXTRA for misses in known):
        return RiskVerdict.UNSAFE
    few = is_too_little or kept_alone(judged) * SAFE_EXTRA < 1
    if few or any(misses.share is not None and misses.share > SAFE_EXTRA for misses in known):
        return RiskVerdict.UNCLEAR
    return RiskVerdict.SAFE


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


def yardstick_tasks(task: Task) -> list[Task]:
    """What the task's worth is read off: see :class:`rose.sim.worth.Yardstick`."""
    return [replace(task, dedicated=size) for size in sizes(task.scenario)]


def cell_of(
    window: str,
    headroom: float,
    pairs: Sequence[tuple[CellResult, CellResult]],
    yardstick: Yardstick,
    scenario: Scenario,
) -> PlanCell:
    """Of (with ROSE, alone) on the same requests, one pair or several."""

    def p99_ms(which: int, name: str) -> float:
        values = [value for pair in pairs for value in getattr(pair[which], name)]
        return percentile(values, 0.99) * 1e3 if values else 0.0

    own = float(np.mean([rose.serving_own for rose, _ in pairs]))
    most = time_left(scenario, own) * gpu_ratio(scenario)
    worths = [worth for rose, _ in pairs if (worth := worth_of(rose, yardstick)) is not None]
    num = sum(alone.requests for _, alone in pairs)
    return PlanCell(
        window=window,
        headroom=headroom,
        load=float(np.mean([rose.load for rose, _ in pairs])),
        worth=min(most, float(np.mean(worths))) if worths else None,
        most=most,
        tokens_s=float(np.mean([rose.harvested_tokens_s for rose, _ in pairs])),
        misses=_misses(pairs, scenario.cells.warm_s),
        ttft_p99_ms=p99_ms(0, "ttft_s"),
        alone_ttft_p99_ms=p99_ms(1, "ttft_s"),
        tpot_p99_ms=p99_ms(0, "tpot_s"),
        alone_tpot_p99_ms=p99_ms(1, "tpot_s"),
        cuts_per_min=float(np.mean([rose.cuts_per_min for rose, _ in pairs])),
        alone_kv=float(np.mean([alone.serving_kv for _, alone in pairs])),
        busy=float(np.mean([alone.serving_busy for _, alone in pairs])),
        own=own,
        alone_missed=sum(alone.missed for _, alone in pairs) / num if num else 0.0,
    )


def _misses(pairs: Iterable[tuple[CellResult, CellResult]], warm_s: float) -> Misses:
    found = Misses(num=0, added=0, mended=0)
    for rose, alone in pairs:
        end_s = min(rose.duration_s, alone.duration_s)
        found += compare_misses(rose.late, alone.late, rose.arrived_s, end_s, warm_s)
    return found
