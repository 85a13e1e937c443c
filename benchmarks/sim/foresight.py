#!/usr/bin/env python
"""How much of what ROSE leaves of the ceiling is not knowing how long a trajectory gets?   (simulated)

    python benchmarks/sim/foresight.py --cells SIM_PAPER.json --json benchmarks/results/sim/foresight/DATE.json [--cell CELL] [--seconds 500]

The cells of ``benchmarks/sim_paper.py`` with batches of 256, as its search left ``rose`` in each.  Added is one arm, ``foresight``: ROSE whose prediction of what a
trajectory has left (:mod:`rose.policy.remaining`) is the truth, with ``scheduler.tail_fraction`` searched over :data:`TAILS` on seeds 1000 and 1001, because pinning the
longest to dedicated engines is what the truth is good for.  No policy can have it; what it reaches is what better prediction could add to placement as it is, and the rest of
the gap is of something else: harvested engines that are narrower, that production uses, and that hold what is lent.

Judged on the seeds of the given file, beside its runs of ``fixed``, ``rose`` and ``ceiling`` on them: ``gain`` over ``fixed`` and ``reached`` as there.  A diagnosis: no bar.
The policies run as Python, since a build's classes cannot be replaced.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ in ("__main__", "__mp_main__"):
    os.environ["ROSE_COMPILED"] = "0"  # before the policies are imported, here and in every worker
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.lib.pool import NUM_CORES, each_result, processes  # noqa: E402
from benchmarks.lib.report import Report  # noqa: E402
from benchmarks.sim.paper_cells import CELLS, Cell, Setting, arrivals_of, scenario_of  # noqa: E402
from rose.errors import ConfigError  # noqa: E402
from rose.evaluation.statistics import mean_interval  # noqa: E402
from rose.policy import turn_life  # noqa: E402
from rose.policy.remaining import Remaining  # noqa: E402
from rose.sim.scenario import JobSection  # noqa: E402
from rose.sim.summary import summarize  # noqa: E402
from rose.sim.workload import make_script  # noqa: E402
from rose.sim.world import simulate  # noqa: E402

BATCH = 256
TUNING_SEEDS = (1000, 1001)
TAILS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
NAME = re.compile(r"g(\d+)(?:again)?\.(\d+)$")
"""Of a simulated trajectory: its group and its place there."""
Rows = dict[str, dict[str, float | None]]
"""By cell and :func:`key_of`: step time (s); None where not all steps ended."""


class Foresight(Remaining):
    """Knows how much every trajectory of one job will make."""

    def __init__(self, job: JobSection, seed: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._job, self._seed = job, seed
        self._whole: dict[str, int] = {}

    def tokens(self, trajectory_id: str, history: str) -> float:
        """What is left of it."""
        if trajectory_id not in self._whole:
            named = NAME.search(trajectory_id)
            assert named is not None, trajectory_id
            script = make_script(self._job, self._seed, int(named[1]), int(named[2]))
            self._whole[trajectory_id] = sum(script.outputs)
        return max(1.0, self._whole[trajectory_id] - self._made.get(trajectory_id, (history, 0))[1])


def run(cell: Cell, setting: Setting, seed: int) -> float | None:
    """Step time with foresight (s); None where not all steps ended."""
    scenario, system = scenario_of(cell, "rose", setting, seed)
    with mock.patch.object(
        turn_life, "Remaining", lambda **settings: Foresight(scenario.job, scenario.seed, **settings)
    ):
        row = summarize(simulate(scenario, system, arrivals=arrivals_of(cell, seed)))
    return row["step_s"] if row["steps"] == scenario.num_steps else None


def judged(cell: dict[str, Any]) -> tuple[int, ...]:
    """Its seeds."""
    return tuple(sorted(int(key.removeprefix("rose/")) for key in cell["runs"] if key.startswith("rose/")))


def key_of(setting: Setting, seed: int) -> str:
    """Of a run: with all of its setting, so that runs in another one are never taken for it."""
    return f"{setting.key}/{seed}"


def conclude(known: dict[str, Any], chosen: dict[str, Setting], rows: Rows) -> dict[str, Any]:
    """Flat summary of the cells all of whose seeds are there, with steps that ended."""
    summary: dict[str, Any] = {}
    for name, setting in chosen.items():
        runs = known[name]["runs"]
        seeds = judged(known[name])
        fixed, rose, ceiling = (
            [runs[f"{arm}/{seed}"]["step_s"] for seed in seeds] for arm in ("fixed", "rose", "ceiling")
        )
        seen = [rows[name].get(key_of(setting, seed)) for seed in seeds]
        if None in (*fixed, *rose, *ceiling, *seen):
            continue
        top = mean_interval([a / b for a, b in zip(fixed, ceiling, strict=True)])[0]
        for arm, took in (("rose", rose), ("foresight", seen)):
            mean, half = mean_interval([a / b for a, b in zip(fixed, took, strict=True)])
            summary[f"{name}.{arm}.gain"] = round(mean, 4)
            summary[f"{name}.{arm}.gain_low"], summary[f"{name}.{arm}.gain_high"] = (
                round(mean - half, 4),
                round(mean + half, 4),
            )
            summary[f"{name}.{arm}.reached"] = round((mean - 1) / (top - 1), 3)
        summary[f"{name}.ceiling.gain"] = round(top, 4)
        summary[f"{name}.foresight.tail_fraction"] = setting.tail_fraction
    return summary


def cells_of(path: Path) -> dict[str, Any]:
    """By cell what was judged of it.

    Raises:
        ConfigError: The file is no result of ``benchmarks/sim_paper.py``.
    """
    try:
        cells = json.loads(path.read_text())["details"]["cells"]
        return {
            name: each for name, each in cells.items() if each["settings"].keys() >= {"rose"} and each["runs"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"is no result of benchmarks/sim_paper.py: {error}", field=str(path)) from error


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=Path, required=True, help="result of benchmarks/sim_paper.py")
    parser.add_argument("--json", type=Path, required=True, help="where results are, and go")
    names = [cell.name for cell in CELLS if cell.batch == BATCH]
    parser.add_argument("--cell", action="append", choices=names, help="repeatable; all that were judged")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop after this long; start again to go on"
    )
    parser.add_argument("--jobs", type=int, default=NUM_CORES, help="processes")
    args = parser.parse_args()
    report = Report("foresight")
    try:
        known = cells_of(args.cells)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows: Rows = {}
    if args.json.exists():
        rows = json.loads(args.json.read_text())["details"]["cells"]
    end_s = time.monotonic() + args.seconds
    cells = [cell for cell in CELLS if cell.name in (args.cell or names) and cell.name in known]
    settings = {cell.name: Setting(**known[cell.name]["settings"]["rose"]) for cell in cells}
    chosen: dict[str, Setting] = {}
    with processes(args.jobs) or nullcontext() as pool:

        def fill(asked: Iterable[tuple[Cell, Setting, tuple[int, ...]]]) -> None:
            missing = {
                (cell.name, key_of(setting, seed)): (run, cell, setting, seed)
                for cell, setting, seeds in asked
                for seed in seeds
                if key_of(setting, seed) not in rows.setdefault(cell.name, {})
            }
            for number, ((name, key), step_s) in enumerate(each_result(pool, missing, end_s), 1):
                rows[name][key] = step_s
                report.progress("runs", number, len(missing))

        def mean_s(cell: Cell, setting: Setting) -> float:
            steps_s = [rows[cell.name][key_of(setting, seed)] for seed in TUNING_SEEDS]
            return statistics.fmean(math.inf if step_s is None else step_s for step_s in steps_s)

        tried = {cell: [replace(settings[cell.name], tail_fraction=tail) for tail in TAILS] for cell in cells}
        try:
            fill((cell, setting, TUNING_SEEDS) for cell in cells for setting in tried[cell])
            for cell in cells:
                chosen[cell.name] = min(tried[cell], key=functools.partial(mean_s, cell))
            fill((cell, chosen[cell.name], judged(known[cell.name])) for cell in cells)
        except TimeoutError:
            print("time is up: start it again to go on")
    of = hashlib.sha256(args.cells.read_bytes()).hexdigest()
    report.finish(conclude(known, chosen, rows), {"cells": rows, "of_sha256": of}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
