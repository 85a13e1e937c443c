"""The Pareto page: what each arm harvests against what it costs production.  One self-contained HTML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rose.evaluation.charts import linear_axis, log_axis

METRICS = {
    "ttft": "P99 time to first token, over production alone",
    "itl": "P99 time between tokens, over production alone",
}
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 420, 70, 50, 20, 170


def on_front(points: Mapping[str, tuple[float, float]]) -> set[str]:
    """Names that no other point beats: as much harvested for a smaller ratio, or more for the same."""
    return {
        name
        for name, (share, cost) in points.items()
        if not any(
            (other_share >= share and other_cost <= cost) and (other_share, other_cost) != (share, cost)
            for other, (other_share, other_cost) in points.items()
            if other != name
        )
    }


def pareto_svg(
    rows: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str], metric: str, title: str
) -> str:
    """Harvested share to the right (more is better), P99 ratio upwards on a log scale (1 is free)."""
    points: dict[str, tuple[float, float]] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for arm, row in rows.items():
        found, share = row[f"{metric}_p99_ratio"], row["harvested_share"]
        if found is not None and share is not None and not arm.startswith("alone"):
            points[arm] = (share, found["value"])
            intervals[arm] = (found["low"], found["high"])
    x = linear_axis(max([1.0, *(share for share, _ in points.values())]), lambda v: f"{v:.0%}")
    low = min([0.8, *(each for each, _ in intervals.values())])
    high = max([2.0, *(each for _, each in intervals.values())])
    y = log_axis(low, high, lambda v: f"{v:g}x")

    def at(share: float, cost: float) -> tuple[float, float]:
        return (
            LEFT + x.fraction(share) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - y.fraction(cost) * (HEIGHT - BOTTOM - TOP),
        )

    body: list[str] = []
    for tick in y.ticks:
        _, py = at(0, tick)
        body.append(f'<path class="grid" d="M{LEFT} {py:.1f}H{WIDTH - RIGHT}"/>')
        body.append(
            f'<text x="{LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{escape(y.format(tick))}</text>'
        )
    for tick in x.ticks:
        px, _ = at(tick, low)
        body.append(
            f'<text x="{px:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(x.format(tick))}</text>'
        )
    _, one = at(0, 1.0)
    body.append(f'<path class="one" d="M{LEFT} {one:.1f}H{WIDTH - RIGHT}"/>')
    body.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">share of the idle time harvested</text>'
    )
    body.append(f'<text x="{LEFT}" y="{TOP - 6}">{escape(title)}; lower is better</text>')
    front = on_front(points)
    line = sorted((points[name] for name in front), key=lambda point: point[0])
    if len(line) > 1:
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in (at(*point) for point in line))
        body.append(f'<path class="front" d="{path}"/>')
    for name, point in points.items():
        px, py = at(*point)
        _, top = at(point[0], intervals[name][1])
        _, bottom = at(point[0], max(intervals[name][0], 1e-9))
        css = "ours" if name.startswith("rose") else "theirs"
        tip = (
            f"{labels.get(name, name)}: {point[0]:.0%} harvested, P99 {metric} {point[1]:.2f}x "
            f"({intervals[name][0]:.2f} to {intervals[name][1]:.2f})"
        )
        body.append(
            f'<g class="{css}"><path d="M{px:.1f} {top:.1f}V{bottom:.1f}"/>'
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5"/><title>{escape(tip)}</title>'
            f'<text x="{px + 9:.1f}" y="{py + 4:.1f}">{escape(name)}</text></g>'
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    )


STYLE = """
:root { color-scheme: light dark; --ink: #16181d; --soft: #5b606b; --page: #fff; --line: #e3e3de; --ours: #d9572a;
  --theirs: #2a6fd0; }
@media (prefers-color-scheme: dark) { :root { --ink: #eceef2; --soft: #a0a5b1; --page: #16181c; --line: #2e3138;
  --ours: #ef7d50; --theirs: #639ff0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1000px;
  margin: 24px auto; padding: 0 16px; }
svg { width: 100%; height: auto; } svg text { font-size: 13px; fill: var(--soft); }
.grid { stroke: var(--line); } .one { stroke: var(--soft); stroke-dasharray: 4 3; }
.front { stroke: var(--soft); fill: none; stroke-width: 1.5; }
g.ours path, g.theirs path { stroke-width: 2; } g.ours path { stroke: var(--ours); } g.ours circle { fill: var(--ours); }
g.theirs path { stroke: var(--theirs); } g.theirs circle { fill: var(--theirs); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 4px 8px; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } .scroll { overflow-x: auto; }
"""


def page(
    result: Mapping[str, Any], labels: Mapping[str, str], notes: Sequence[str], table: Sequence[Sequence[str]]
) -> str:
    rows = result["arms"]
    plots = "".join(
        f"<h2>{escape(title)}</h2>{pareto_svg(rows, labels, metric, title)}"
        for metric, title in METRICS.items()
    )
    head, *body = table
    cells = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in line) + "</tr>" for line in body)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>ROSE: co-serving</title><style>{STYLE}</style></head><body>'
        "<h1>What rollouts harvest, and what production pays</h1>"
        "<p>Each point is one way to share the device. Right is more harvested, down is cheaper for production; 1x is "
        "production alone. Bars are 95 % intervals, the line joins what nothing else beats.</p>"
        f"{plots}<h2>All arms</h2><div class='scroll'><table><tr>"
        + "".join(f"<th>{escape(cell)}</th>" for cell in head)
        + f"</tr>{cells}</table></div>"
        + "".join(f"<p>{escape(note)}</p>" for note in notes)
        + "</body></html>\n"
    )


def cell(value: float | None, digits: int = 2, scale: float = 1.0, unit: str = "") -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value * scale:.{digits}f}{unit}"
