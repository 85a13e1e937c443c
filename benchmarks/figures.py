"""The figures of README and docs, drawn from committed result files by ``benchmarks/run.py --render``.

Each is one SVG file that stands alone: its own style, light and dark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.coserving import plot
from benchmarks.coserving.plan import ARMS
from benchmarks.scheduling import device_shares
from benchmarks.training import curves

MIN_ARMS = 3
"""Ways to share a device, for a comparison of them to be drawn."""


def figures(paths: Iterable[Path]) -> dict[str, str]:
    """SVG text by file name, from result files: a Pareto front per co-serving trace and learning curves per task."""
    drawn: dict[str, str] = {}
    for path in paths:
        if path.parent.name.startswith("coserve-live-"):  # what the simulator was compared with
            continue
        document = json.loads(path.read_text())
        details, stem = document.get("details"), path.parent.name
        match document.get("benchmark"):
            case "coserve" if len(_shared(details["arms"])) >= MIN_ARMS:
                for metric, title in plot.METRICS.items():
                    labels = {name: arm.label for name, arm in ARMS.items()}
                    svg = plot.pareto_svg(details["arms"], labels, metric, title)
                    drawn[f"{stem}-{metric}.svg"] = _alone(svg, plot.STYLE)
            case "learning":
                for task, svg in curves.charts(details["runs"]).items():
                    drawn[f"{stem}-{task}.svg"] = _alone(svg, curves.STYLE)
            case "device_shares":
                drawn[f"{stem}.svg"] = _alone(device_shares.picture(details["shown"]), device_shares.STYLE)
            case _:
                pass
    return drawn


def _shared(arms: dict[str, Any]) -> list[str]:
    return [name for name in arms if not name.startswith("alone")]


def _alone(svg: str, style: str) -> str:
    """An SVG of a page as a file of its own."""
    head, _, rest = svg.partition(">")
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return f"{head}><style>{escape(style)}svg {{ background: var(--page); font-family: system-ui, sans-serif; }}</style>{rest}\n"
