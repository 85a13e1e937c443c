"""Production of ``benchmarks/sim_paper.py``'s cells: fitted to the paper's P99s alone and to a busy share, residuals printed.   (simulated)

    python benchmarks/sim/paper_production.py

Free parameters and what is tried stand in ``benchmarks/sim/paper_cells.py`` (``FREE``).  Seed 1000, which no cell is judged on; no rollouts.
Prints what ``PRODUCTION`` there holds, and how far each published figure is from it.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.sim.paper_cells import BUSY, FREE, P99_ALONE_MS  # noqa: E402
from rose.evaluation.statistics import percentile  # noqa: E402
from rose.sim.cells import CellResult, run_cell  # noqa: E402
from rose.sim.scenario_file import load_scenario  # noqa: E402

SEED = 1000
SECONDS = 600.0
ROUNDS = 3
"""Of moving the rate to the busy share: steps grow less than in proportion to it."""


def run(size: str, changes: tuple[str, ...], busy: float) -> tuple[float, CellResult]:
    """Rate at which production takes ``busy`` of the time, and that run."""
    path = ROOT / f"examples/scenarios/paper/grpo_{size}.toml"
    cells = (f"cells.seconds={SECONDS}", "cells.warm_s=30", "cells.in_flight_per_engine=1")
    scenario = load_scenario(path, ["serving.daily_swing=0.0", *cells, *changes])
    rate = scenario.serving.requests_per_s
    for number in itertools.count():
        found = run_cell(scenario, "fixed_async", rate, SEED, serving=scenario.fleet.serving, dedicated=1)
        if number == ROUNDS:
            return rate, found
        rate *= min(4.0, max(0.1, busy / max(found.serving_busy, 1e-3)))
    raise AssertionError


def residuals(size: str, found: CellResult) -> tuple[float, float]:
    """Logarithms of simulated over published: first token, between tokens."""
    made = (percentile(found.ttft_s, 0.99) * 1e3, percentile(found.tpot_s, 0.99) * 1e3)
    first, between = (math.log(mine / theirs) for mine, theirs in zip(made, P99_ALONE_MS[size], strict=True))
    return first, between


def main() -> None:
    for size in P99_ALONE_MS:
        tried: list[tuple[float, tuple[str, ...]]] = []
        for values in itertools.product(*FREE.values()):
            changes = tuple(f"{name}={value}" for name, value in zip(FREE, values, strict=True))
            rate, found = run(size, changes, BUSY["quiet"])
            errors = residuals(size, found)
            tried.append((sum(error * error for error in errors), changes))
            print(
                f"# {size} {' '.join(changes)}: {rate:.3f} requests/s, x{math.exp(errors[0]):.2f} x{math.exp(errors[1]):.2f}",
                flush=True,
            )
        _, best = min(tried)
        for setting, busy in BUSY.items():
            rate, found = run(size, best, busy)
            first, between = residuals(size, found)
            missed = found.missed / max(1, found.requests)
            print(f"# {size} {setting}: busy {found.serving_busy:.3f}; P99 first token x{math.exp(first):.2f} of the published one, "
                  f"between tokens x{math.exp(between):.2f}; {missed:.3%} of {found.requests} over a limit")  # fmt: skip
            print(
                f'    ("{size}", "{setting}"): {(*best, f"serving.requests_per_s={rate:.3f}")!r},', flush=True
            )


if __name__ == "__main__":
    main()
