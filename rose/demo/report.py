"""Write what a run found: ``report.json`` for programs, ``report.html`` for people.

``report.json``: a flat ``summary`` (:data:`rose.demo.result.SUMMARY_KEYS`, always all of them; null = not
measured) and ``details``.  ``report.html`` (:mod:`rose.demo.page`) is one self-contained file.  Both say the
same numbers: they are made from the same :class:`~rose.demo.result.DemoResult`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rose.demo.page import render_html
from rose.demo.result import DemoResult, summarize
from rose.evaluation.page import write_whole


def write_report(result: DemoResult, directory: Path) -> tuple[Path, Path]:
    """Write both files (each atomically) and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    details = asdict(result)
    details["latency"].pop("distributions")
    document = {"schema": 1, "summary": summarize(result), "details": finite(details)}
    json_path, html_path = directory / "report.json", directory / "report.html"
    write_whole(json_path, json.dumps(document, indent=2, allow_nan=False) + "\n")
    write_whole(html_path, render_html(result))
    return json_path, html_path


def finite(value: Any) -> Any:
    """The same tree with NaN and infinities as null: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
