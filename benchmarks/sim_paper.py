"""The paper's setting, founded anew: what harvesting adds to a tuned job, beside the most that it could add.   (simulated)

    python benchmarks/sim_paper.py --json benchmarks/results/sim/sim_paper/DATE.json [--only grpo_8b_256_quiet] [--seconds 1500]
    python benchmarks/sim_paper.py --cost          # one run of each arm of each cell: what the whole takes

Sixteen cells (``benchmarks/sim/paper_cells.py``): GRPO and DAPO, 8B and 32B, batches of 256 and 1,024 trajectories, production about 19 % and 60 % busy
(fitted by ``benchmarks/sim/paper_production.py``).  Arms: ``fixed``, the job's own engines; ``paper``, the paper's policies; ``rose``, the daemons'
defaults; ``ceiling``: the harvestable GPUs are the job's own; ``unlimited``: an engine for every trajectory.  The same four with steps that are streamed, which is the user's gain with and
without harvesting: ``fixed_tail``, ``paper_tail``, ``ceiling_tail``, and ``rose_tail``, *ROSE with the tail engine*, which has the scheduler's two levers for the tail, rollout steps that stop at a layer,
chunks of 512 tokens while production stands still, up to four rollout steps for each of production's, and a fifth of the first token's limit that they leave unspent (each by itself: ``benchmarks/sim/levers.py``, which has wide engines, copies and tail
batching too; none of them pays, so they are not here; speculative decoding is not simulated).

**Search**, the same for every arm, on seeds 1000 and 1001, mean step time: one pass over the coordinates in ``coordinates()``, each value
tried with the others as they are then, the best kept.  Tensor parallel of the dedicated engines, their cap, the cap of harvested ones, the levers where an arm has
them.  ``fixed``, ``ceiling`` and ``unlimited`` search twice, with trajectories that hold slots as ROLL has it, and with ROSE's own scheduler, and take the faster.
A setting whose steps do not end within 7,200 s, or whose engines cannot exist, is out.

**Judged** on seeds 714 to 727, never on those of the search, two steps each (files of 2026-11-21 to 27: seeds 0 to 13; ``sim_paper-no-reserve``, which is
without the reserve and with a cut's deadline that left out the cycle of its peer: 700 to 713).  Gain: step time of ``fixed`` over the arm's, of the ``tail`` arms of ``fixed_tail``, seed by seed; mean, 95 %
interval by Student's t.  Reached: (gain - 1) / (ceiling - 1), of the means, with the ceiling of the same levers.  ``over_plain``: of a ``tail`` arm, step time of ``fixed`` over its.  Added misses: requests of production, each beside itself in the ``fixed``
run, over one window, which ends with the shortest run of the seed (less the last minute): late with rollouts less late without, of all; mean over seeds and
interval as above.

**Bar**, for each cell and for ``rose`` (and for ``rose_tail``, some of which is no default): the lower ends of its gain and of that over ``paper`` (``paper_tail``) are above 1;
reached is 0.85 or more; the upper end of added misses is 0.0002 or less.  What does not meet it is said, and no number is added afterwards.

Results are kept in FILE as they come: start it again and it goes on.  ``details.commits``: of all the code that added to it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.lib.pool import NUM_CORES, each_result, processes  # noqa: E402
from benchmarks.lib.report import machine  # noqa: E402
from benchmarks.sim.paper_cells import (  # noqa: E402
    ARMS,
    CELLS,
    JUDGED,
    MOST_ADDED,
    OURS,
    PRODUCTION,
    PUBLISHED,
    Cell,
    Setting,
    arrivals_of,
    coordinates,
    moved,
    scenario_of,
    start_of,
)
from rose.errors import ConfigError  # noqa: E402
from rose.evaluation.statistics import mean_interval  # noqa: E402
from rose.sim.hardware import Hardware  # noqa: E402
from rose.sim.summary import compare_misses, summarize  # noqa: E402
from rose.sim.world import simulate  # noqa: E402

SEEDS = tuple(range(714, 728))
TUNING_SEEDS = (1000, 1001)
REACHED = 0.85
SCHEMA = 4
GOAL = 3.5

Row = dict[str, Any]


def run(
    cell: Cell, arm: str, setting: Setting, seed: int, efficiency: Mapping[str, float] | None = None
) -> Row:
    """One run; ``step_s`` None where no step ended, or no such fleet can exist.  ``efficiency``: what is not as the cell has it."""
    scenario, system = scenario_of(cell, arm, setting, seed)
    if efficiency:
        changed = scenario.efficiency.model_copy(update=efficiency)
        scenario = scenario.model_copy(update={"efficiency": changed})
    try:
        Hardware(scenario).check([system])
        done = simulate(scenario, system, arrivals=arrivals_of(cell, seed) if ARMS[arm].serving else None)
    except ConfigError as error:
        return {"step_s": None, "why": str(error), "cpu_s": 0.0}
    row = summarize(done)
    ended = row["steps"] == scenario.num_steps
    busy = done.busy["serving"] / done.duration_s / max(1, scenario.fleet.serving)
    return {
        "step_s": row["step_s"] if ended else None,
        **{name: row[name] for name in ("rollout_s", "harvested_share", "cached_share", "slo_missed", "ttft_p99_ms", "tpot_p99_ms")},
        "busy": round(busy, 4),
        "cpu_s": round(done.cpu_s, 1),
        "end_s": done.duration_s,
        "late": sorted((number, round(at_s, 6)) for number, at_s in done.late.items()),
    }  # fmt: skip


def search(
    cell: Cell, arm: str, system: str, steps_s: Callable[[list[Setting]], list[float]]
) -> tuple[Setting, float]:
    """The declared search of one arm with one system.

    Args:
        steps_s: Of each setting, the mean over the tuning seeds; infinite where it is out.
    """
    best, took_s = start_of(cell, arm, system), math.inf
    for name, values in coordinates(cell, arm, system):
        tried = [best, *(moved(best, name, value) for value in values)]
        times_s = steps_s(tried)
        # What the search stands on wins a tie.
        took_s = min(times_s)
        best = tried[times_s.index(took_s)]
    return best, took_s


class Book:
    """All that was run so far, kept in a file."""

    def __init__(self, path: Path, seconds: float, pool: Executor | None = None) -> None:
        self._path, self._end_s, self._pool = path, time.monotonic() + seconds, pool
        self.data: dict[str, Any] = {"cells": {}}
        if path.exists():
            document = json.loads(path.read_text())
            if document["schema"] != SCHEMA:
                raise ConfigError(
                    "was begun by another version of this program", field=str(path), fix="choose another file"
                )
            self.data = document["details"]
        self._saved_s = time.monotonic()
        self._concluded: dict[str, dict[str, Any]] = {}
        commits = self.data.setdefault("commits", [])
        if (commit := machine()["commit"]) not in commits:
            commits.append(commit)

    def of(self, cell: Cell) -> dict[str, Any]:
        return self.data["cells"].setdefault(cell.name, {"tuning": {}, "settings": {}, "runs": {}})

    def rows(self, cell: Cell, where: str, asked: Mapping[str, tuple[str, Setting, int]]) -> list[Row]:
        """What is known, or is run now; of the search without what nothing is judged on.

        Args:
            asked: By key: arm, setting, seed.
        """
        rows = self.of(cell)[where]
        missing = {key: what for key, what in asked.items() if key not in rows}
        for key, row in each_result(
            self._pool, {key: (run, cell, *what) for key, what in missing.items()}, self._end_s
        ):
            rows[key] = row if where == "runs" else without_late(row)
            print(f"{cell.name} {key}: {row['step_s']} s a step, {row['cpu_s']} s of CPU", flush=True)
            if time.monotonic() - self._saved_s > 30:
                self.save()
        return [rows[key] for key in asked]

    def save(self) -> None:
        document = {
            "schema": SCHEMA,
            "benchmark": "sim_paper",
            "summary": conclude(self.data, self._concluded),
            "details": self.data,
            "machine": machine(),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(self._path.name + ".new")
        temporary.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(temporary, self._path)
        self._saved_s = time.monotonic()


def run_cell(book: Book, cell: Cell) -> None:
    """Search each arm, then judge it."""
    settings = book.of(cell)["settings"]
    for arm, what in ARMS.items():
        if arm in settings:
            continue

        def steps_s(tried: list[Setting], arm: str = arm) -> list[float]:
            asked = {
                f"{arm}/{setting.key}/{seed}": (arm, setting, seed)
                for setting in tried
                for seed in TUNING_SEEDS
            }
            found = dict(zip(asked, book.rows(cell, "tuning", asked), strict=True))
            return [
                mean_step_s([found[f"{arm}/{setting.key}/{seed}"] for seed in TUNING_SEEDS])
                for setting in tried
            ]

        best, took_s = min(
            (search(cell, arm, system, steps_s) for system in what.systems), key=lambda pair: pair[1]
        )
        if math.isinf(took_s):
            print(f"{cell.name} {arm}: no setting ends")
        settings[arm] = {name: getattr(best, name) for name in Setting.__dataclass_fields__}
        book.save()
    asked = {f"{arm}/{seed}": (arm, Setting(**settings[arm]), seed) for seed in SEEDS for arm in ARMS}
    book.rows(cell, "runs", asked)
    book.save()


def mean_step_s(rows: list[Row]) -> float:
    """Of both seeds of a setting; infinite where the steps of one do not end."""
    steps_s = [row["step_s"] for row in rows]
    return math.inf if None in steps_s else statistics.fmean(steps_s)


def without_late(row: Row) -> Row:
    """Of a run that nothing is judged on."""
    return {name: value for name, value in row.items() if name != "late"}


def conclude(data: Mapping[str, Any], known: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """The flat summary: of cells all of whose seeds are there.  ``known``: of cells that were concluded before, which draws all their arrivals anew."""
    known = {} if known is None else known
    summary: dict[str, Any] = {}
    for cell in CELLS:
        runs = data["cells"].get(cell.name, {}).get("runs", {})
        if any(f"{arm}/{seed}" not in runs for arm in ARMS for seed in SEEDS):
            continue
        if cell.name not in known:
            known[cell.name] = conclude_cell(cell, runs)
        summary |= {f"{cell.name}.{name}": value for name, value in known[cell.name].items()}
    return summary


def conclude_cell(cell: Cell, runs: Mapping[str, Row], seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def gains(arm: str, over: str) -> list[float] | None:
        pairs = [(runs[f"{over}/{seed}"]["step_s"], runs[f"{arm}/{seed}"]["step_s"]) for seed in seeds]
        if any(mine is None or its is None for its, mine in pairs):
            return None
        return [its / mine for its, mine in pairs]

    def interval(name: str, values: list[float] | None, digits: int) -> None:
        if values is None:
            return
        mean, half = mean_interval(values)
        found[name] = round(mean, digits)
        found[f"{name}_low"], found[f"{name}_high"] = round(mean - half, digits), round(mean + half, digits)

    interval("unlimited.gain", gains("unlimited", "fixed"), 4)
    for arm in JUDGED:
        what = ARMS[arm]
        interval(f"{what.ceiling}.gain", gains(what.ceiling, what.over), 4)
        top = found.get(f"{what.ceiling}.gain")
        interval(f"{arm}.gain", gains(arm, what.over), 4)
        if what.streamed:
            interval(f"{arm}.over_plain", gains(arm, "fixed"), 4)
        if what.rival:
            interval(f"{arm}.over_paper", gains(arm, what.rival), 4)
        if f"{arm}.gain" in found and top is not None and top > 1:
            found[f"{arm}.reached"] = round((found[f"{arm}.gain"] - 1) / (top - 1), 3)
        interval(f"{arm}.misses_added", [added_misses(cell, runs, arm, seed) for seed in seeds], 6)
        if arm in OURS:
            found[f"{arm}.meets_bar"] = (
                found.get(f"{arm}.gain_low", 0.0) > 1
                and found.get(f"{arm}.over_paper_low", 0.0) > 1
                and found.get(f"{arm}.reached", 0.0) >= REACHED
                and found[f"{arm}.misses_added_high"] <= MOST_ADDED
            )
    fixed = [runs[f"fixed/{seed}"] for seed in seeds]
    found["busy"] = round(statistics.fmean(row["busy"] for row in fixed), 3)
    for name in ("slo_missed", "ttft_p99_ms", "tpot_p99_ms"):
        found[f"alone.{name}"] = round(statistics.fmean(row[name] for row in fixed), 5)
    found["published_gain"] = PUBLISHED[cell.job]
    return found


def added_misses(cell: Cell, runs: Mapping[str, Row], arm: str, seed: int) -> float:
    """Of all requests of the seed's window, which is the same for every arm."""
    end_s = min(runs[f"{name}/{seed}"]["end_s"] for name, what in ARMS.items() if what.serving)
    late, alone = (dict(runs[f"{name}/{seed}"]["late"]) for name in (arm, "fixed"))
    return compare_misses(late, alone, arrivals_of(cell, seed).at_s, end_s).share or 0.0


def table(summary: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown: each gain beside its cell's ceiling."""
    lines = [
        "| cell; production busy | ceiling; unlimited | arm | over tuned fixed (95 %) | over `paper` | reached | misses added (95 %) | bar |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in CELLS:
        if f"{cell.name}.busy" not in summary:
            continue
        own = {
            key.removeprefix(f"{cell.name}."): value
            for key, value in summary.items()
            if key.startswith(f"{cell.name}.")
        }
        for arm in JUDGED:
            tops = "; ".join(
                f"{own[f'{name}.gain']:.2f}x" if f"{name}.gain" in own else "-"
                for name in (ARMS[arm].ceiling, *(() if ARMS[arm].streamed else ("unlimited",)))
            )
            gain, over = (
                f"{own[key]:.2f}x ({own[f'{key}_low']:.2f}-{own[f'{key}_high']:.2f})" if key in own else "-"
                for key in (f"{arm}.gain", f"{arm}.over_paper")
            )
            reached = f"{own[f'{arm}.reached']:.0%}" if f"{arm}.reached" in own else "-"
            added = f"{own[f'{arm}.misses_added']:+.3%} ({own[f'{arm}.misses_added_low']:+.3%} to {own[f'{arm}.misses_added_high']:+.3%})"
            bar = "" if arm not in OURS else "met" if own[f"{arm}.meets_bar"] else "**missed**"
            lines.append(
                f"| {cell.name}; {own['busy']:.0%} | {tops} | {arm} | {gain} | {over} | {reached} | {added} | {bar} |"
            )
    best = max(
        ((summary[key], key) for key in summary if key.endswith(tuple(f".{arm}.gain" for arm in OURS))),
        default=None,
    )
    if best is not None:
        cell, arm = best[1].split(".")[:2]
        top, most = summary.get(f"{cell}.{ARMS[arm].ceiling}.gain"), summary.get(f"{cell}.unlimited.gain")
        lines += ["", f"Best: {arm} in {cell}, {best[0]:.2f}x. With the harvestable GPUs as its own it would be {top}x, with an engine for every trajectory "
                  f"{most}x: {GOAL}x is {'within' if most and most >= GOAL else 'beyond'} what more engines alone can give there."]  # fmt: skip
    lines += [
        "",
        *(
            f"- {cell}: " + "; ".join(f"{arm} {Setting(**own).key}" for arm, own in arms.items())
            for cell, arms in settings.items()
        ),
    ]
    return lines


def cost(cells: tuple[Cell, ...]) -> None:
    """One run of each arm at the start of its search, and what that makes of the whole."""
    whole_s = 0.0
    for cell in cells:
        own_s = 0.0
        for arm, what in ARMS.items():
            for system in what.systems:
                row = run(cell, arm, start_of(cell, arm, system), TUNING_SEEDS[0])
                tried = sum(len(values) for _, values in coordinates(cell, arm, system))
                own_s += row["cpu_s"] * (len(TUNING_SEEDS) * tried + len(SEEDS) / len(what.systems))
                print(
                    f"{cell.name} {arm} {system}: {row['step_s']} s a step, {row['cpu_s']} s of CPU",
                    flush=True,
                )
        whole_s += own_s
        print(f"{cell.name}: about {own_s / 60:.0f} minutes", flush=True)
    print(f"all: about {whole_s / 3600:.1f} hours of one core")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where results are, and go")
    parser.add_argument(
        "--only", action="append", choices=[cell.name for cell in CELLS], metavar="CELL", help="repeatable"
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop after this long; start again to go on"
    )
    parser.add_argument("--jobs", type=int, default=NUM_CORES, help="processes")
    parser.add_argument("--cost", action="store_true", help="one run of each arm, and what the whole takes")
    args = parser.parse_args()
    cells = tuple(cell for cell in CELLS if not args.only or cell.name in args.only)
    if args.cost:
        cost(cells)
        return
    if args.json is None:
        parser.error("--json is required")
    lacking = sorted({(cell.size, cell.busy) for cell in cells} - set(PRODUCTION))
    if lacking:
        parser.error(
            f"production is not fitted for {lacking}: put what benchmarks/sim/paper_production.py prints into "
            "PRODUCTION of benchmarks/sim/paper_cells.py, and commit it first"
        )
    with processes(args.jobs) or nullcontext() as pool:
        book = Book(args.json, args.seconds, pool)
        try:
            for cell in cells:
                run_cell(book, cell)
        except TimeoutError:
            print("time is up: start it again to go on")
        finally:
            book.save()
    settings = {name: own["settings"] for name, own in book.data["cells"].items()}
    print("\n".join(table(conclude(book.data), settings)))


if __name__ == "__main__":
    main()
