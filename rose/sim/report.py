"""What people and programs read of a comparison: one HTML page, one CSV, one JSON, one Chrome trace."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rose.evaluation.charts import Series, bar_chart, legend, line_chart, linear_axis
from rose.evaluation.page import whole_page, write_whole
from rose.sim.summary import COLUMNS, Row, added_misses, missing_steps, percentiles_over_time, summarize
from rose.sim.world import SimResult

PARTS = (
    ("rollout", "rollout", "rollout_s"),
    ("train", "training", "train_s"),
    ("publish", "weights", "weights_s"),
)
COLOURS = ("production", "harvested", "dedicated", "policy", "lent", "pressure", "again", "slo")


def document(runs: Sequence[SimResult], extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """``{"schema", "summary", "details"}``; the summary's keys are ``system.metric``.  No speed-up of or over a run whose steps did not all end."""
    rows = {run.system.name: summarize(run) for run in runs}
    base = runs[0].scenario.baseline or runs[0].system.name
    missing = {run.system.name: missing_steps(run) for run in runs}
    reference = None if missing[base] else rows[base]["step_s"]
    summary: dict[str, Any] = {f"{name}.misses_added": share for name, share in added_misses(runs).items()}
    for name, row in rows.items():
        summary.update({f"{name}.{key}": value for key, value in row.items()})
        own = row["step_s"]
        summary[f"{name}.speedup"] = (
            round(reference / own, 4) if reference and own and not missing[name] else None
        )
    scenario = runs[0].scenario.model_dump(mode="json")
    details = {
        "scenario": scenario,
        "baseline": base,
        "missing_steps": {name: words for name, words in missing.items() if words},
        "labels": {run.system.name: run.system.label for run in runs},
        "seed": runs[0].seed,
        "digests": {run.system.name: run.digest for run in runs if run.digest},
        "cpu_s": {run.system.name: round(run.cpu_s, 2) for run in runs},
        "engine_steps": {run.system.name: run.num_steps for run in runs},
        **(extra or {}),
    }
    return {"schema": 1, "summary": summary, "details": details}


def write_reports(
    runs: Sequence[SimResult], directory: Path, window: tuple[float, float] | None
) -> list[Path]:
    """All four files, each replaced as a whole."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / name for name in ("sim.json", "sim.csv", "sim.html", "trace.json")]
    write_whole(paths[0], json.dumps(document(runs), indent=1) + "\n")
    temporary = paths[1].with_name("sim.csv.new")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["system", *COLUMNS])
        for run in runs:
            row = summarize(run)
            writer.writerow([run.system.name, *("" if row[key] is None else row[key] for key in COLUMNS)])
    os.replace(temporary, paths[1])
    write_whole(paths[2], render(runs))
    write_whole(paths[3], json.dumps(chrome_trace(runs, window)))
    return paths


def chrome_trace(runs: Sequence[SimResult], window: tuple[float, float] | None) -> dict[str, Any]:
    """Trace Event Format: steps as spans, fleet counts as counters; opens in Perfetto or chrome://tracing."""
    low, high = window or (0.0, float("inf"))
    events: list[dict[str, Any]] = []
    for number, run in enumerate(runs):
        events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": run.system.label}})
        for mark in run.marks:
            if mark.end_s >= low and mark.start_s <= high and mark.end_s >= mark.start_s:
                span_us = (mark.end_s - mark.start_s) * 1e6
                events.append(
                    {
                        "ph": "X",
                        "pid": number,
                        "tid": 0,
                        "name": mark.name,
                        "ts": mark.start_s * 1e6,
                        "dur": span_us,
                    }
                )
        for one in run.samples:
            if low <= one.at_s <= high:
                counts = {
                    "turns": {"dedicated": one.dedicated_turns, "harvested": one.harvested_turns},
                    "queued": {"turns": one.queued_turns},
                    "serving": {"running": one.serving_running},
                    "memory": {"lent": round(one.lent_share, 4), "held": round(one.held_share, 4)},
                }
                events.extend(
                    {"ph": "C", "pid": number, "name": name, "ts": one.at_s * 1e6, "args": args}
                    for name, args in counts.items()
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def render(runs: Sequence[SimResult]) -> str:
    """The page; nothing in it is fetched from elsewhere."""
    scenario = runs[0].scenario
    doc = document(runs)
    rows = {run.system.name: summarize(run) for run in runs}
    base = doc["details"]["baseline"]
    parts = [
        f"<h1>{escape(scenario.title or scenario.name)}</h1>",
        f'<p class="lead">Simulated, not measured. {len(runs)} systems, the same workload and seed ({scenario.seed}). '
        f"Speed-up is in time per RL step, against <b>{escape(base)}</b>.</p>",
        _tiles(runs, rows, doc["summary"]),
        '<div class="grid2">',
        _section("Time per RL step", "Shorter is better; from batch to batch.", _step_chart(runs, rows)),
        _section(
            "Production's first token, P99 over time",
            "The dotted line is its limit.",
            _slo_chart(runs, "ttft"),
        ),
        _section(
            "Production's time per token, P99 over time",
            "The dotted line is its limit.",
            _slo_chart(runs, "tpot"),
        ),
        _section("Turns in flight outside the job's own engines", "", _turns_chart(runs)),
        "</div>",
        _section(
            "All figures",
            "slo_missed is of each run's own time, so runs of other lengths are not compared by it; misses_added compares the same requests.",
            _table(runs, rows, doc["summary"]),
        ),
        _section("Scenario", "", f"<pre>{escape(scenario.model_dump_json(indent=1))}</pre>"),
    ]
    return whole_page(f"{scenario.name}: simulation", "".join(parts))


def _tiles(runs: Sequence[SimResult], rows: dict[str, Row], summary: dict[str, Any]) -> str:
    tiles: list[str] = []
    for run in runs:
        name = run.system.name
        missed, added = rows[name]["slo_missed"], summary[f"{name}.misses_added"]
        speedup = summary[f"{name}.speedup"]
        note = "" if missed is None else f"{missed:.2%} of production over its limits, in this run's own time"
        if added is not None:
            note = f"{added:+.2%} of production's requests made late by it"
        value = f"{speedup:.2f}x" if speedup is not None else missing_steps(run) or "no baseline"
        tiles.append(
            f'<div class="tile"><div class="label">{escape(run.system.label)}</div>'
            f'<div class="value">{value}</div><div class="note">{note}</div></div>'
        )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _step_chart(runs: Sequence[SimResult], rows: dict[str, Row]) -> str:
    stacks = [
        Series(
            name=label,
            css=css,
            points=[(float(index), rows[run.system.name][key] or 0.0) for index, run in enumerate(runs)],
        )
        for css, label, key in PARTS
    ]
    most = max((rows[run.system.name]["step_s"] or 0.0 for run in runs), default=1.0)
    names = [run.system.name for run in runs]
    x = linear_axis(
        len(runs) - 0.5,
        lambda value: names[round(value)][:11] if 0 <= round(value) < len(names) else "",
        low=-0.5,
    )
    x = type(x)(low=-0.5, high=len(runs) - 0.5, ticks=list(range(len(runs))), format=x.format)
    chart = bar_chart(
        stacks, [float(i) for i in range(len(runs))], x, linear_axis(most, _seconds), title="Time per RL step"
    )
    return chart + legend([(css, label) for css, label, _ in PARTS])


def _slo_chart(runs: Sequence[SimResult], kind: str) -> str:
    series: list[Series] = []
    entries: list[tuple[str, str]] = []
    scenario = runs[0].scenario
    limit_ms = scenario.serving.slo_ttft_ms if kind == "ttft" else scenario.serving.slo_tpot_ms
    duration_s = max(run.duration_s for run in runs)
    for run, css in zip(runs, _cycle(), strict=False):
        values = run.ttft_s if kind == "ttft" else run.tpot_s
        points = [(at, value * 1e3) for at, value in percentiles_over_time(values, duration_s, 0.99)]
        if points:
            series.append(Series(name=run.system.label, css=css, points=points))
            entries.append((css, run.system.name))
    if not series:
        return '<p class="absent">no production traffic</p>'
    most = max(limit_ms * 1.1, *(value for one in series for _, value in one.points))
    series.append(Series(name="limit", css="slo", points=[(0.0, limit_ms), (duration_s, limit_ms)]))
    x = linear_axis(duration_s, _minutes, "minutes")
    y = linear_axis(most, lambda value: f"{value:.0f} ms")
    return line_chart(series, x, y, title=f"P99 {kind.upper()}", dots=False) + legend(entries)


def _turns_chart(runs: Sequence[SimResult]) -> str:
    series: list[Series] = []
    entries: list[tuple[str, str]] = []
    duration_s = max(run.duration_s for run in runs)
    for run, css in zip(runs, _cycle(), strict=False):
        points = [(one.at_s, float(one.harvested_turns)) for one in run.samples]
        if any(value for _, value in points):
            series.append(Series(name=run.system.label, css=css, points=points))
            entries.append((css, run.system.name))
    if not series:
        return '<p class="absent">none</p>'
    y = linear_axis(max(value for one in series for _, value in one.points), lambda value: f"{value:.0f}")
    x = linear_axis(duration_s, _minutes, "minutes")
    return line_chart(series, x, y, title="Turns on extra engines", dots=False) + legend(entries)


def _table(runs: Sequence[SimResult], rows: dict[str, Row], summary: dict[str, Any]) -> str:
    head = "".join(f"<th>{escape(run.system.name)}</th>" for run in runs)
    body = [
        _line("speed-up", [summary[f"{run.system.name}.speedup"] for run in runs]),
        _line(
            "misses_added <span class='ci'>production's requests late beside its rollouts and not without, less those late only without</span>",
            [summary[f"{run.system.name}.misses_added"] for run in runs],
        ),
    ]
    body.extend(
        _line(f"{key} <span class='ci'>{escape(text)}</span>", [rows[run.system.name][key] for run in runs])
        for key, text in COLUMNS.items()
    )
    return f'<div class="scroll"><table><tr><th></th>{head}</tr>{"".join(body)}</table></div>'


def _line(name: str, values: Sequence[float | int | None]) -> str:
    cells = "".join(f"<td>{'' if value is None else f'{value:,.4g}'}</td>" for value in values)
    return f"<tr><td>{name}</td>{cells}</tr>"


def _section(title: str, hint: str, body: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="hint">{escape(hint)}</p>{body}</section>'


def _cycle() -> list[str]:
    return [COLOURS[index % (len(COLOURS) - 1)] for index in range(64)]


def _seconds(value: float) -> str:
    return f"{value:.0f} s"


def _minutes(value: float) -> str:
    return f"{value / 60:.0f}"
