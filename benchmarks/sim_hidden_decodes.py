#!/usr/bin/env python
"""What the judged cells would say if decode steps were as short as published ones.   (simulated)

    python benchmarks/sim_hidden_decodes.py --settings SIM_PAPER.json --json benchmarks/results/sim/hidden_decodes/DATE.json [--only CELL] [--seconds 1500]

Against published tables the simulator's decode steps on one GPU are 1.1 to 1.54 times too long, because it adds up what a step computes and what it reads
(``benchmarks/sim/latency_tables.py``); all cells of ``benchmarks/sim_paper.py`` were judged with these steps.  Here each of them is run twice on the same seeds,
*as judged* and *hidden* (``HIDDEN`` of the latency tables: one-token requests compute while memory is read, and no time goes to scheduling), with the settings that
its search found for the steps as judged; production's requests are the same, so it is less busy with shorter steps.

Figures of a cell, of seeds 400 to 402, each with both kinds of steps (``judged.*``, ``hidden.*``): gain over ``fixed``, gain over ``paper``, and what is reached
of the ceiling, of means; added misses (mean; seed by seed over one window), and how busy production is alone.  ``ARM.gain_ratio``: gain with hidden over gain as judged, seed by seed; mean and 95 %
interval by Student's t.

**No bar**: it is no new verdict, and nothing was tuned for it.  Written before the first run: it is said in which cells a mean comes to lie on the other side of
what ``sim_paper`` asks for (above 1 over ``fixed``, above 1 over ``paper``, 0.85 reached, 0.0002 added), in either direction.

Results are kept in FILE as they come: start it again and it goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.lib.report import Report, write  # noqa: E402
from benchmarks.sim.latency_tables import HIDDEN  # noqa: E402
from benchmarks.sim.paper_cells import ARMS, CELLS, JUDGED, MOST_ADDED, OURS, Cell, Setting  # noqa: E402
from benchmarks.sim_paper import REACHED, Row, added_misses, run  # noqa: E402
from rose.evaluation.statistics import mean_interval  # noqa: E402

SEEDS = (400, 401, 402)
KINDS: Mapping[str, Mapping[str, float]] = {"judged": {}, "hidden": HIDDEN}
RUN = tuple(arm for arm in ARMS if arm != "unlimited")


def conclude(cells: Mapping[str, Mapping[str, Row]]) -> dict[str, Any]:
    """The flat summary, of cells all of whose runs are there and ended; ``not_ended``: cells of which one did not.

    Args:
        cells: Name -> ``KIND/ARM/SEED`` -> row.
    """
    summary: dict[str, Any] = {}
    not_ended = 0
    for cell in CELLS:
        rows = cells.get(cell.name, {})
        keys = [f"{kind}/{arm}/{seed}" for kind in KINDS for arm in RUN for seed in SEEDS]
        if any(key not in rows for key in keys):
            continue
        if any(rows[key]["step_s"] is None for key in keys):
            not_ended += 1
        else:
            found = conclude_cell(cell, rows)
            summary |= {f"{cell.name}.{name}": value for name, value in found.items()}
    summary["cells"] = sum(name.endswith(".other_side") for name in summary)
    summary["not_ended"] = not_ended
    summary["other_side"] = sum(
        len(value.split()) for name, value in summary.items() if name.endswith(".other_side")
    )
    return summary


def conclude_cell(cell: Cell, rows: Mapping[str, Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sides: dict[str, dict[str, bool]] = {}
    for kind in KINDS:
        runs = {key.removeprefix(f"{kind}/"): row for key, row in rows.items() if key.startswith(f"{kind}/")}

        def mean_gain(arm: str, over: str, runs: Mapping[str, Row] = runs) -> float:
            return statistics.fmean(gains_of(runs, arm, over))

        found[f"{kind}.busy"] = round(statistics.fmean(runs[f"fixed/{seed}"]["busy"] for seed in SEEDS), 4)
        for arm in JUDGED:
            what, key = ARMS[arm], f"{kind}.{arm}"
            found[f"{kind}.{what.ceiling}.gain"] = round(mean_gain(what.ceiling, what.over), 4)
            found[f"{key}.gain"] = round(mean_gain(arm, what.over), 4)
            found[f"{key}.misses_added"] = round(
                statistics.fmean(added_misses(cell, runs, arm, seed) for seed in SEEDS), 6
            )
            sides.setdefault(f"{arm}.gain", {})[kind] = found[f"{key}.gain"] > 1.0
            sides.setdefault(f"{arm}.misses_added", {})[kind] = found[f"{key}.misses_added"] <= MOST_ADDED
            if arm not in OURS:
                continue
            found[f"{key}.over_paper"] = round(mean_gain(arm, what.rival), 4)
            sides.setdefault(f"{arm}.over_paper", {})[kind] = found[f"{key}.over_paper"] > 1.0
            top = found[f"{kind}.{what.ceiling}.gain"]
            if top > 1.0:
                found[f"{key}.reached"] = round((found[f"{key}.gain"] - 1.0) / (top - 1.0), 3)
            sides.setdefault(f"{arm}.reached", {})[kind] = found.get(f"{key}.reached", 0.0) >= REACHED
    for arm in JUDGED:
        judged, hidden = (
            gains_of(rows, f"{kind}/{arm}", f"{kind}/{ARMS[arm].over}") for kind in ("judged", "hidden")
        )
        mean, half = mean_interval([new / old for new, old in zip(hidden, judged, strict=True)])
        found[f"{arm}.gain_ratio"] = round(mean, 4)
        found[f"{arm}.gain_ratio_low"], found[f"{arm}.gain_ratio_high"] = (
            round(mean - half, 4),
            round(mean + half, 4),
        )
    found["other_side"] = " ".join(name for name, side in sides.items() if side["judged"] != side["hidden"])
    return found


def gains_of(rows: Mapping[str, Row], arm: str, over: str) -> list[float]:
    """Step time of ``over`` over that of ``arm``, seed by seed."""
    return [rows[f"{over}/{seed}"]["step_s"] / rows[f"{arm}/{seed}"]["step_s"] for seed in SEEDS]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--settings", type=Path, required=True, help="a result of sim_paper: what its search found"
    )
    parser.add_argument("--json", type=Path, required=True, help="where results are, and go")
    parser.add_argument("--only", action="append", metavar="CELL", help="repeatable")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop after this long; start again to go on"
    )
    args = parser.parse_args(arguments)
    judged = json.loads(args.settings.read_text())["details"]["cells"]
    cells: dict[str, dict[str, Row]] = {}
    if args.json.exists():
        cells = json.loads(args.json.read_text())["details"]["cells"]
    report, began_s = Report("hidden_decodes"), time.monotonic()

    def save() -> None:
        details = {"settings": str(args.settings.name), "cells": cells}
        write(args.json, "hidden_decodes", conclude(cells), details, seconds=time.monotonic() - began_s)

    for cell in CELLS:
        if cell.name not in judged or (args.only and cell.name not in args.only):
            continue
        rows = cells.setdefault(cell.name, {})
        for seed in SEEDS:
            for arm in RUN:
                for kind, efficiency in KINDS.items():
                    key = f"{kind}/{arm}/{seed}"
                    if key in rows:
                        continue
                    if time.monotonic() - began_s > args.seconds:
                        save()
                        print("time is up: start it again to go on")
                        return 0
                    setting = Setting(**judged[cell.name]["settings"][arm])
                    rows[key] = run(cell, arm, setting, seed, efficiency)
                    print(f"{cell.name} {key}: {rows[key]['step_s']} s a step", flush=True)
        save()
    report.table(("key", "value"), conclude(cells).items(), title="hidden_decodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
