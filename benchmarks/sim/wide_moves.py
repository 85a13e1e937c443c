"""Does it pay to share the price of a move over more turns where the job's own engine is the wider one?   (simulated)

    python benchmarks/sim/wide_moves.py --json benchmarks/results/sim/wide_moves/DATE.json

The cells of ``benchmarks/sim_paper.py`` that were judged, each with the setting that its search chose for ``rose`` (read from the newest result file);
ROSE with ``[cost] wide_horizon_turns = 2``, as it was, and 8.  Where the job's engines are no wider than the harvested ones the setting changes nothing (a test of
``tests/policy/test_routing.py``), so workloads A to D and the cells of ``never_lose.py`` are as they were.

**Bar**, written before any run on these seeds (tuned on seeds 1002 to 1005, where 4, 16 and 64 were looked at too): 14 seeds, 600 to 613, one run of each arm.  The figure of a seed is the
geometric mean over the cells of the step time with 2 over that with 8.  8 becomes the default if the lower end of the 95 % interval (Student's t over seeds) of the figure is above 1, no cell's upper end is
below 1, and in no cell the share of requests that miss a limit grows by more than 0.0001 (the mean over seeds).

Keys: ``gain`` with ``_low`` and ``_high``, the same by cell, ``CELL.missed_more``, ``bar_met``.

Results are kept in the file as they come: start it again and it goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.lib.report import Report, write  # noqa: E402
from benchmarks.sim.paper_cells import CELLS, Cell, Setting, arrivals_of, scenario_of  # noqa: E402
from rose.evaluation.statistics import mean_interval  # noqa: E402
from rose.sim.summary import summarize  # noqa: E402
from rose.sim.world import simulate  # noqa: E402

ARMS = {"2": 2.0, "8": 8.0}
SEEDS = range(600, 614)
SETTINGS = ROOT / "benchmarks" / "results" / "sim" / "sim_paper"
MOST_MISSED = 0.0001

Runs = dict[str, dict[str, float]]
"""``CELL/ARM/SEED`` -> step time in seconds, share of requests that missed a limit."""


def settings_of() -> dict[str, Setting]:
    """By cell, what the search of ``rose`` chose."""
    newest = max(SETTINGS.glob("*.json"))
    cells = json.loads(newest.read_text())["details"]["cells"]
    return {
        name: Setting(**own["settings"]["rose"]) for name, own in cells.items() if "rose" in own["settings"]
    }


def one_run(cell: Cell, setting: Setting, turns: float, seed: int) -> dict[str, float]:
    scenario, system = scenario_of(cell, "rose", setting, seed)
    cost = scenario.scheduler.cost.model_copy(update={"wide_horizon_turns": turns})
    scheduler = scenario.scheduler.model_copy(update={"cost": cost})
    done = simulate(
        scenario.model_copy(update={"scheduler": scheduler}), system, arrivals=arrivals_of(cell, seed)
    )
    row = summarize(done)
    if row["step_s"] is None:
        raise SystemExit(f"{cell.name}, seed {seed}: no step ended")
    return {"step_s": float(row["step_s"]), "missed": float(row["slo_missed"] or 0.0)}


def conclude(runs: Runs, names: list[str]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    held: list[bool] = []

    def interval(name: str, values: list[float]) -> tuple[float, float]:
        mean, half = mean_interval(values)
        ends = mean - half, mean + half
        summary[name], summary[f"{name}_low"], summary[f"{name}_high"] = (
            round(one, 4) for one in (mean, *ends)
        )
        return ends

    def gain(name: str, seed: int) -> float:
        return runs[f"{name}/2/{seed}"]["step_s"] / runs[f"{name}/8/{seed}"]["step_s"]

    whole = [seed for seed in SEEDS if all(f"{name}/{arm}/{seed}" in runs for name in names for arm in ARMS)]
    if len(whole) < 2:
        return {"bar_met": False, "seeds": len(whole)}
    held.append(
        interval("gain", [statistics.geometric_mean(gain(name, seed) for name in names) for seed in whole])[0]
        > 1
    )
    for name in names:
        held.append(interval(f"{name}.gain", [gain(name, seed) for seed in whole])[1] >= 1)
        more = statistics.fmean(
            runs[f"{name}/8/{seed}"]["missed"] - runs[f"{name}/2/{seed}"]["missed"] for seed in whole
        )
        summary[f"{name}.missed_more"] = round(more, 6)
        held.append(more <= MOST_MISSED)
    return summary | {"seeds": len(whole), "bar_met": len(whole) == len(SEEDS) and all(held)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where results are, and go")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop after this long; start again to go on"
    )
    args = parser.parse_args()
    report, started_s = Report("wide_moves"), time.monotonic()
    runs: Runs = json.loads(args.json.read_text())["details"]["runs"] if args.json.exists() else {}
    settings = settings_of()
    cells = [cell for cell in CELLS if cell.name in settings]
    names = [cell.name for cell in cells]

    def save() -> dict[str, Any]:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        summary = conclude(runs, names)
        told = {name: settings[name].key for name in names}
        write(
            args.json,
            "wide_moves",
            summary,
            {"settings": told, "runs": runs},
            seconds=time.monotonic() - started_s,
        )
        return summary

    for number, seed in enumerate(SEEDS):
        for cell in cells:
            for arm, turns in ARMS.items():
                key = f"{cell.name}/{arm}/{seed}"
                if key not in runs and time.monotonic() - started_s < args.seconds:
                    runs[key] = one_run(cell, settings[cell.name], turns, seed)
        save()
        report.progress("wide_moves", number + 1, len(SEEDS))
    report.table(("key", "value"), save().items(), title="wide_moves")


if __name__ == "__main__":
    main()
