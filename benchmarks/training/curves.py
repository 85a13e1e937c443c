"""Learning curves of paired runs over each other, as one HTML page without scripts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rose.evaluation.charts import Axis, Series, legend, line_chart

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --muted: #66707e; --grid: #d9dee5; --page: #fff;
  --dedicated: #2563a8; --harvested: #c2571a; --uncut: #3f7f4f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --muted: #9aa5b3; --grid: #333c48; --page: #14181d;
  --dedicated: #6fa8e6; --harvested: #f0935a; --uncut: #7fc28f; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; }
.s-dedicated { --c: var(--dedicated); } .s-harvested { --c: var(--harvested); } .s-uncut { --c: var(--uncut); }
.line { fill: none; stroke: var(--c); stroke-width: 1; opacity: .45; }
.line.mean { stroke-width: 3; opacity: 1; }
.grid { stroke: var(--grid); fill: none; } .tick { fill: var(--muted); font-size: 11px; }
.key { display: inline-block; width: 1.2em; height: 3px; background: var(--c); margin: 0 .4em .25em 1em; }
p { color: var(--muted); }
"""

FLEETS = {
    "dedicated": "dedicated engine alone",
    "harvested": "with a harvested engine",
    "uncut": "the same, never cut",
}

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Learning with and without harvested engines</title>
<style>
{style}</style></head><body>
<h1>Learning with and without harvested engines</h1>
<p>Success of the episodes of each step, in training. Thin: one seed. Thick: their mean. A pair of runs shares its seed.</p>
{body}
</body></html>
"""


def page(runs: Sequence[Mapping[str, Any]], bar: float) -> str:
    """All runs, one chart per task.  ``bar``: lowest difference in final success that counts as none, for the caption."""
    drawn, parts = charts(runs), []
    for task, chart in drawn.items():
        mine = [run for run in runs if run["task"] == task]
        seeds = len({run["seed"] for run in mine})
        parts.append(
            f"<h2>{escape(task)}</h2><p>{len(mine)} runs of {seeds} seeds; the bar for the paired difference at the end is {bar:+.2f}.</p>"
            + legend([(name, FLEETS[name]) for name in FLEETS if any(run["fleet"] == name for run in mine)])
            + chart
        )
    return _PAGE.format(style=STYLE, body="\n".join(parts))


def charts(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Success by step of all runs, as SVG by task: thin a seed, thick the mean."""
    drawn: dict[str, str] = {}
    for task in sorted({run["task"] for run in runs}):
        mine = [run for run in runs if run["task"] == task]
        length = max(len(run["success"]) for run in mine)
        series: list[Series] = []
        for fleet in FLEETS:
            own = [run for run in mine if run["fleet"] == fleet]
            series += [
                Series(name=f"{fleet}, seed {run['seed']}", css=fleet, points=_points(run["success"]))
                for run in own
            ]
            whole = [run["success"] for run in own if len(run["success"]) == length]
            if whole:
                means = [statistics.fmean(values) for values in zip(*whole, strict=True)]
                series.append(Series(name=f"{fleet}, mean", css=f"{fleet} mean", points=_points(means)))
        x = Axis(
            low=0,
            high=max(1, length - 1),
            ticks=_ticks(length),
            format=lambda value: f"{value:g}",
            label="step",
        )
        y = Axis(
            low=0,
            high=1,
            ticks=[0, 0.25, 0.5, 0.75, 1.0],
            format=lambda value: f"{value:.0%}",
            label="success",
        )
        drawn[task] = line_chart(
            series, x, y, title=f"{task}: success by step", dots=False, width=960, height=380
        )
    return drawn


def _points(values: Sequence[float]) -> list[tuple[float, float]]:
    return list(enumerate(values))


def _ticks(length: int) -> list[float]:
    every = max(1, (length - 1) // 8)
    return [float(step) for step in range(0, length, every)]
