"""``rose sim``: compare systems on a scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rose.errors import ConfigError
from rose.evaluation.page import make_folder
from rose.progress import Bars
from rose.sim.arrivals import make_arrivals
from rose.sim.fleet import simulate_fleet, write_fleet_report
from rose.sim.report import document, write_reports
from rose.sim.scenario import Scenario
from rose.sim.scenario_file import load_scenario
from rose.sim.summary import missing_steps
from rose.sim.systems import SYSTEMS
from rose.sim.world import SimResult, simulate

SHOWN = (
    ("speedup", "speed-up", "{:.2f}x"),
    ("step_s", "s/step", "{:.1f}"),
    ("rollout_s", "rollout", "{:.1f}"),
    ("harvested_share", "harvested", "{:.0%}"),
    ("ttft_p99_ms", "TTFT P99 ms", "{:.0f}"),
    ("tpot_p99_ms", "TPOT P99 ms", "{:.0f}"),
    ("misses_added", "made late", "{:+.2%}"),
    ("gpu_hours_per_step", "GPU h/step", "{:.2f}"),
)


def sim(
    scenario: Annotated[Path, typer.Option(help="The scenario, as TOML; see examples/scenarios/.")],
    system: Annotated[
        list[str] | None, typer.Option(help="Only these systems; repeatable.  Default: the scenario's.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the reports go.")] = Path("out/sim"),
    seed: Annotated[int | None, typer.Option(help="Another seed than the scenario's.")] = None,
    journal: Annotated[
        Path | None, typer.Option(help="Write every decision here; needs a single --system.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="START:END in seconds, for the Chrome trace.  Default: all.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Assert all books at the end.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting: a.b=value; repeatable.")
    ] = None,
) -> None:
    """Simulate systems on one workload with the daemons' own policies, and compare them.

    Writes [bold]sim.html[/bold] (plots), sim.json, sim.csv and trace.json (open it in Perfetto); in mode "fleet" fleet.html and fleet.json.

    Nothing here is a measurement: step times follow from datasheets and the assumptions of the scenario.
    One seed gives one run, byte for byte.
    """
    changes = list(overrides or [])
    if seed is not None:
        changes.append(f"seed={seed}")
    for name in system or ():
        if name not in SYSTEMS:
            raise ConfigError(
                f"'{name}' is not a system", field="--system", fix=f"one of {', '.join(SYSTEMS)}"
            )
    config = load_scenario(scenario, changes, tuple(system or ()))
    names = tuple(system or config.systems)
    if journal is not None and len(names) != 1:
        raise ConfigError("needs a single system", field="--journal", fix="add --system NAME")
    span = _window(window)
    if span is not None and span[0] >= config.duration_s:
        raise ConfigError(
            f"{window} begins behind the end of the run",
            field="--window",
            fix=f"within 0:{config.duration_s:g}",
        )
    make_folder(out)
    if config.mode == "fleet":
        for field, given in (("--journal", journal), ("--window", window), ("--check", check)):
            if given:
                raise ConfigError(
                    "there is none of a fleet, which is no run of single steps",
                    field=field,
                    fix='mode = "exact"',
                )
        _fleet(config, names, out)
        return
    if system and config.baseline not in names:
        if config.baseline:
            Console(stderr=True).print(
                f"compared with {names[0]}: the scenario's baseline, {config.baseline}, is not among --system",
                soft_wrap=True,
            )
        config = config.model_copy(update={"baseline": names[0]})
    runs = run_systems(config, names, journal=journal, check=check)
    paths = write_reports(runs, out, span)
    print_runs(runs)
    Console().print("wrote " + ", ".join(str(path) for path in paths), soft_wrap=True)


def run_systems(
    config: Scenario, names: tuple[str, ...], *, journal: Path | None = None, check: bool = False
) -> list[SimResult]:
    """Each system in turn, with progress on stderr."""
    runs: list[SimResult] = []
    arrivals = None
    if config.fleet.serving:
        arrivals = make_arrivals(config.serving, config.fleet.serving, config.duration_s, config.seed)
    with Bars(20) as progress:
        for name in names:
            task = progress.add_task(name, total=1.0)
            runs.append(
                simulate(
                    config,
                    name,
                    journal_path=journal,
                    digest=True,
                    check=check,
                    arrivals=arrivals,
                    progress=lambda share, task=task: progress.update(task, completed=share),
                )
            )
            progress.update(task, completed=1.0)
    return runs


def print_runs(runs: list[SimResult]) -> None:
    summary = document(runs)["summary"]
    table = Table(title=f"{runs[0].scenario.name}: simulated, seed {runs[0].seed}")
    table.add_column("system", no_wrap=True)
    for _, title, _ in SHOWN:
        table.add_column(title, justify="right", no_wrap=True)
    for run in runs:
        cells: list[str] = []
        for key, _, text in SHOWN:
            value = summary[f"{run.system.name}.{key}"]
            cells.append("-" if value is None else text.format(value))
        table.add_row(run.system.name, *cells)
    Console(width=max(120, Console().width)).print(table)
    for run in runs:
        if kills := run.counters.kills:
            Console(stderr=True).print(
                f"{run.system.name}: {kills} rollout engine{'s' if kills > 1 else ''} killed for a cut that came too late; a longer lending.reclaim_deadline_s, "
                "if production's steps allow it, or a larger lending.min_headroom_fraction",
                soft_wrap=True,
            )
        if missing := missing_steps(run):
            Console(stderr=True).print(
                f"{run.system.name}: {missing} within duration_s = {run.scenario.duration_s:g}, so there is no speed-up of it or over it",
                soft_wrap=True,
            )


def _fleet(config: Scenario, names: tuple[str, ...], out: Path) -> None:
    with Bars(20) as progress:
        task = progress.add_task("cells", total=1.0)
        result = simulate_fleet(config, names, progress=lambda share: progress.update(task, completed=share))
    paths = write_fleet_report(result, out)
    Console().print(result.text)
    Console().print("wrote " + ", ".join(str(path) for path in paths), soft_wrap=True)


def _window(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    low, colon, high = text.partition(":")
    try:
        span = (float(low), float(high)) if colon else None
    except ValueError:
        span = None
    if span is None or not 0 <= span[0] < span[1]:
        raise ConfigError(f"'{text}' is not START:END in seconds", field="--window")
    return span
