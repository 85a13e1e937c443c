#!/usr/bin/env python
"""What each lever for the tail of a step adds, to a tuned job by itself and to ROSE on it.   (simulated)

    python benchmarks/sim/levers.py --settings SIM_PAPER.json --json benchmarks/results/sim/levers/DATE.json [--cell CELL] [--seconds 500]

The cells are those of ``benchmarks/sim_paper.py``, with batches of 256.  ``fixed`` and ``rose`` stand in each as its search left them, and are not
tuned again for a lever.  Levers, each alone, and in ``all`` those that cost no time on the seeds that settings were tried on (1000 and 1001):

- ``streamed``: forward and backward of a group begin when it is complete (``job.streamed``);
- ``stops``: rollout steps stop at a layer for a prompt of production, and read 512 tokens at a time while it stands still (``fleet.preempt_s``,
  ``fleet.idle_chunk_tokens``); ROSE alone has such steps;
- ``rounds``: up to four rollout steps for each of production's, fewer where its requests' tokens come further apart than half of their limit
  (``fleet.round_steps = 4``), ROSE alone;
- ``longest``: the longest predicted rest goes first in the queue (``scheduler.longest_first_s = 60``), on both, where ROSE's scheduler places the job's turns;
- ``tail``: a tenth of the trajectories, the longest expected, goes to dedicated engines (``scheduler.tail_fraction = 0.1``), ROSE alone;
- ``wide``: half of the job's GPUs are one engine, which is the first choice for the longest tenth, the others engines as narrow as production's (``fleet.wide``); the
  fixed job's turns are then placed by ROSE's scheduler, which knows the longest;
- ``copies``: up to 16 turns on harvested engines at once have a second copy on another engine that is expected to end no later (``job.copies = 16``), ROSE alone;
- ``batching``: short rounds begin 24 groups and train on the first 16 that are complete, and after two of them a long one has the other 16 (``job.tail_groups = 8``).  Judged over two
  such cycles, six steps, beside ``longer``: six steps without a lever.  ``length``: mean tokens of a trajectory that is trained on, over those of ``longer``; ``short_length``: of short rounds over
  all rounds of the run;
- ``reserve``: rollout steps leave a fifth of the first token's limit unspent (``gate.first_token_reserve = 0.2``), ROSE alone: it is for ``misses_added``, at
  what its gain says;
- ``surplus``: the same as ``batching``, and each group of a short round has four members more than it takes, the first to end (``job.tail_members = 4``): it trains on shorter samples.  Neither is in the DAPO cells, whose steps begin more groups than they take as it is.

Gain: step time without a lever over with it, same seed, on ``fixed`` and on ``rose``.  ``harvest``: step time of ``fixed`` over ``rose``'s, both with the
lever: what is left of it is harvesting's; ``over_tuned``: of ``fixed`` without the lever over ``rose``'s with it, since a lever that ``fixed`` is worse off with flatters
``harvest``.  ``misses_added``: requests of production that are late beside ``rose`` with the lever less those late without rollouts,
of all, request by request.  ``tpot_p99_ms``: production's 99th percentile between tokens beside ``rose`` with the lever, which ``rounds`` spends.  Mean over 14 seeds, 200 to 213, of two steps each, with 95 % intervals by Student's t.

**Bar**, written before the first run on these seeds: a lever *pays* on a system where the lower end of its gain is above 1; on ``rose`` it must also leave the upper end of
``misses_added`` no higher than without it, or at most 0.0002.  One that chooses what is trained on must leave the lower end of ``length`` at
0.98 or more.  What pays in every cell that was run may be a default once it was measured live.

Results are kept in FILE as they come: start it again and it goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.lib.pool import NUM_CORES, each_result, processes  # noqa: E402
from benchmarks.lib.report import Report, write  # noqa: E402
from benchmarks.sim.paper_cells import CELLS, MOST_ADDED, RESERVE, Cell, Setting, arrivals_of, scenario_of  # noqa: E402
from rose.errors import ConfigError  # noqa: E402
from rose.evaluation.statistics import mean_interval  # noqa: E402
from rose.sim.job import SimStep  # noqa: E402
from rose.sim.scenario import Scenario  # noqa: E402
from rose.sim.summary import compare_misses, summarize  # noqa: E402
from rose.sim.world import simulate  # noqa: E402

SEEDS = tuple(range(200, 214))
LEVERS: dict[str, dict[str, dict[str, float | bool]]] = {
    "none": {},
    "streamed": {"job": {"streamed": True}},
    "stops": {"fleet": {"preempt_s": 0.001, "idle_chunk_tokens": 512}},
    "rounds": {"fleet": {"round_steps": 4}},
    "longest": {"scheduler": {"longest_first_s": 60.0}},
    "tail": {"scheduler": {"tail_fraction": 0.1}},
}
LEVERS["all"] = {
    section: {name: value for each in LEVERS.values() for name, value in each.get(section, {}).items()}
    for section in ("job", "fleet", "scheduler")
}
LEVERS["wide"] = {"scheduler": {"tail_fraction": 0.1}}
"""And the engines of :func:`half_wide`; this and those below are none of ``all``."""
LEVERS["copies"] = {"job": {"copies": 16}}
LEVERS["reserve"] = {"gate": {"first_token_reserve": RESERVE}}
LEVERS["longer"] = {}
LEVERS["batching"] = {"job": {"tail_groups": 8}}
LEVERS["surplus"] = {"job": {"tail_groups": 8, "tail_members": 4}}
SAME_LENGTH = 0.98
STEPS = {"longer": 6, "batching": 6, "surplus": 6}
"""Where not as many as without a lever: short and long rounds are fairly judged over whole cycles."""
BESIDE = {"batching": "longer", "surplus": "longer"}
"""What a lever is compared with, where not with ``none``."""
OF_ROSE = ("stops", "rounds", "tail", "copies", "reserve")
"""Levers that do nothing to a job by itself."""
SYSTEMS = ("fixed", "rose")
BATCH = 256

Row = dict[str, Any]


def levers_of(cell: Cell) -> list[str]:
    return [lever for lever in LEVERS if lever not in STEPS or not cell.job.startswith("dapo")]


def with_lever(scenario: Scenario, lever: str) -> Scenario:
    sections = {
        section: getattr(scenario, section).model_copy(update=changes)
        for section, changes in LEVERS[lever].items()
    }
    scenario = scenario.model_copy(update={**sections, "num_steps": STEPS.get(lever, scenario.num_steps)})
    return half_wide(scenario) if lever == "wide" else scenario


def half_wide(scenario: Scenario) -> Scenario:
    """The same GPUs of the job: half of them one engine, the others engines as narrow as production's."""
    fleet = scenario.fleet
    gpus = fleet.dedicated * fleet.rollout_gpus
    narrow = min(fleet.serving_gpus, gpus - gpus // 2)
    change = {
        "wide": 1,
        "wide_gpus": gpus // 2,
        "dedicated": (gpus - gpus // 2) // narrow,
        "rollout_gpus": narrow,
    }
    return scenario.model_copy(update={"fleet": fleet.model_copy(update=change)})


def run(cell: Cell, system: str, setting: Setting, lever: str, seed: int) -> Row:
    """One run: step time (s; None where not all steps ended), and which requests were late."""
    scenario, name = scenario_of(cell, system, setting, seed)
    if system == "fixed" and lever == "wide":
        name = "fixed_ours"
    done = simulate(with_lever(scenario, lever), name, arrivals=arrivals_of(cell, seed))
    row = summarize(done)
    length = mean_length(done.steps)
    return {
        "step_s": row["step_s"] if row["steps"] == done.scenario.num_steps else None,
        "length": length,
        "short_length": mean_length([step for step in done.steps if not step.long]) / length,
        "end_s": done.duration_s,
        "tpot_p99_ms": row["tpot_p99_ms"],
        "late": sorted((number, round(at_s, 6)) for number, at_s in done.late.items()),
    }


def mean_length(steps: list[SimStep]) -> float:
    """Tokens of a trajectory that was trained on; no number where none was."""
    num = sum(step.trajectories for step in steps)
    return sum(step.tokens for step in steps) / num if num else math.nan


def key_of(system: str, lever: str) -> str:
    return f"{system}/none" if system == "fixed" and lever in OF_ROSE else f"{system}/{lever}"


def conclude(data: dict[str, dict[str, Row]]) -> dict[str, Any]:
    """The flat summary of the cells that are whole."""
    summary: dict[str, Any] = {}
    for cell in CELLS:
        rows = data.get(cell.name, {})
        wanted = {
            f"{key_of(system, lever)}/{seed}"
            for system in SYSTEMS
            for lever in levers_of(cell)
            for seed in SEEDS
        }
        if not wanted <= rows.keys():
            continue

        def step_s(system: str, lever: str, seed: int, rows: dict[str, Row] = rows) -> float:
            found = rows[f"{key_of(system, lever)}/{seed}"]["step_s"]
            return math.nan if found is None else found

        def add(name: str, values: list[float], digits: int = 4, cell: Cell = cell) -> tuple[float, float]:
            mean, half = mean_interval(values)
            summary[f"{cell.name}.{name}"] = round(mean, digits)
            summary[f"{cell.name}.{name}_low"] = round(mean - half, digits)
            summary[f"{cell.name}.{name}_high"] = round(mean + half, digits)
            return mean - half, mean + half

        most_without = math.inf
        for lever in levers_of(cell):
            beside = BESIDE.get(lever, "none")
            add(
                f"{lever}.harvest",
                [step_s("fixed", lever, seed) / step_s("rose", lever, seed) for seed in SEEDS],
            )
            add(
                f"{lever}.over_tuned",
                [step_s("fixed", beside, seed) / step_s("rose", lever, seed) for seed in SEEDS],
            )
            missed = []
            for seed in SEEDS:
                mine, alone = rows[f"rose/{lever}/{seed}"], rows[f"fixed/none/{seed}"]
                end_s = min(row["end_s"] for name, row in rows.items() if name.endswith(f"/{seed}"))
                found = compare_misses(
                    dict(mine["late"]), dict(alone["late"]), arrivals_of(cell, seed).at_s, end_s
                )
                missed.append(found.share or 0.0)
            _, most = add(f"{lever}.misses_added", missed, 6)
            add(f"{lever}.tpot_p99_ms", [rows[f"rose/{lever}/{seed}"]["tpot_p99_ms"] for seed in SEEDS], 1)
            if lever in ("none", *BESIDE.values()):
                most_without = most
                continue
            if lever in BESIDE:
                own, its = ([rows[f"rose/{name}/{seed}"] for seed in SEEDS] for name in (lever, beside))
                same, _ = add(
                    f"{lever}.length", [a["length"] / b["length"] for a, b in zip(own, its, strict=True)]
                )
                add(f"{lever}.short_length", [row["short_length"] for row in own])
            else:
                same = 1.0
            for system in SYSTEMS:
                if system == "fixed" and lever in OF_ROSE:
                    continue
                gains = [step_s(system, beside, seed) / step_s(system, lever, seed) for seed in SEEDS]
                low, _ = add(f"{lever}.{system}_gain", gains)
                safe = system == "fixed" or most <= max(most_without, MOST_ADDED)
                summary[f"{cell.name}.{lever}.pays_on_{system}"] = low > 1 and safe and same >= SAME_LENGTH
    return summary


def settings_of(path: Path) -> dict[str, dict[str, Setting]]:
    """Of ``benchmarks/sim_paper.py``'s file: by cell, the settings of the systems that it has searched.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        cells = json.loads(path.read_text())["details"]["cells"]
        return {
            name: {system: Setting(**cell["settings"][system]) for system in SYSTEMS}
            for name, cell in cells.items()
            if all(system in cell["settings"] for system in SYSTEMS)
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"is no result of benchmarks/sim_paper.py: {error}", field=str(path)) from error


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", type=Path, required=True, help="result of benchmarks/sim_paper.py")
    parser.add_argument("--json", type=Path, required=True, help="where results are, and go")
    names = [cell.name for cell in CELLS if cell.batch == BATCH]
    parser.add_argument("--cell", action="append", choices=names, help="repeatable; all that were searched")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop after this long; start again to go on"
    )
    parser.add_argument("--jobs", type=int, default=NUM_CORES, help="processes")
    args = parser.parse_args()
    report = Report("levers")
    try:
        settings = settings_of(args.settings)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    data: dict[str, dict[str, Row]] = {}
    if args.json.exists():
        data = json.loads(args.json.read_text())["details"]["cells"]
    end_s, cells = (
        time.monotonic() + args.seconds,
        [c for c in CELLS if c.name in (args.cell or names) and c.name in settings],
    )
    asked = {
        (c.name, f"{s}/{lever}/{seed}"): (run, c, s, settings[c.name][s], lever, seed)
        for c in cells
        for seed in SEEDS
        for lever in levers_of(c)
        for s in SYSTEMS
        if key_of(s, lever) == f"{s}/{lever}"
    }
    asked = {key: what for key, what in asked.items() if key[1] not in data.get(key[0], {})}
    with processes(args.jobs) or nullcontext() as pool:
        try:
            for number, ((name, key), row) in enumerate(each_result(pool, asked, end_s), 1):
                data.setdefault(name, {})[key] = row
                report.progress("runs", number, len(asked))
                if number % 20 == 0:
                    write(args.json, report.name, conclude(data), {"cells": data})
        except TimeoutError:
            print("time is up: start it again to go on")
    report.finish(conclude(data), {"cells": data}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
