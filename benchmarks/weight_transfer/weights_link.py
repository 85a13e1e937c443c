"""Weights over a link of a given rate: a trainer beside its relay, a relay at the other end of the link, two real engines there.

Every version is timed from the beginning of publish to the acknowledgement of both engines, in two arms that take turns (in the
order A B B A): readers that begin when the head moves, and readers that pull what the trainer is still sending.  Versions are
deltas, or whole; the link holds 1 or 10 gigabits a second, or whatever the machine carries (``open``).  The link is a process that
counts what passes (:mod:`benchmarks.lib.held_link`); trainer, relays, link, nodes and engines share the machine's cores.

* ``transfer alone``: the objects of a version, read through the same link by somebody who does nothing else.
* ``over_transfer``: publish to acknowledged, over the transfer alone.  Written before the run: at most 1.2.
* ``overlap_ratio``: the share of the transfer that publish to acknowledged does not show: 1 less what the link adds to it, over the
  transfer alone.
* ``equal``: both engines' memory has the state hashes of what was published, at the end of each cell.

    python benchmarks/weight_transfer/weights_link.py --json FILE [--trace FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from benchmarks.lib.held_link import HeldLink
from benchmarks.lib.report import Report
from benchmarks.weight_transfer import weights_data as data
from benchmarks.weight_transfer.weights_nodes import RUN, Marks, Node, Run
from benchmarks.weight_transfer.weights_parts import large_pairs
from rose.shared_memory import SharedMemorySweep
from rose.weights import stored_manifests
from rose.weights.http_store import HttpStore
from rose.weights.params import WeightsParams
from rose.weights.publisher import PublishReport, WeightPublisher
from rose.weights.source import RawBits
from rose.weights.warmup import warm_up
from tests.engine_launcher import EngineServer
from tests.tiny_model import write_tiny_model, write_weights
from tests.weights.relay_process import RelayProcess

OPEN_GBPS = 1000.0
BAR_OVER_TRANSFER = 1.2
ARMS = {"at_head": False, "ahead": True}
PULLS = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One link and one kind of version."""

    kind: str
    gbps: float

    @property
    def name(self) -> str:
        return f"{self.kind}_{'open' if self.gbps == OPEN_GBPS else f'{self.gbps:g}gbps'}"


class World:
    """Relay, link, relay, and two engines that stay up through all cells.

    Args:
        states: Two states of the model, which versions alternate between.
    """

    def __init__(self, run: Run, servers: list[EngineServer], states: list[dict[str, RawBits]]) -> None:
        self._run, self._servers, self._states = run, servers, states
        self._attempt = 0
        self.events: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def linked(self, gbps: float, folder: Path) -> Iterator[str]:
        """The URL of a relay behind a link."""
        with HeldLink(self._run.relay.url, gbps) as link:
            tokens = self._run.relay.tokens
            with RelayProcess(folder, tokens, f"--upstream={link.url}", signed=True) as leaf:
                self._far = link.url
                yield leaf.url

    def versions(self, kind: str, url: str, num_pairs: int) -> dict[str, Any]:
        """Rows of one cell."""
        self._attempt += 1
        density = 1.0 if kind == "delta" else 0.0
        params = WeightsParams(anchor_density=density, anchor_every=1000)
        number = 0
        publisher = WeightPublisher(
            lambda: self._states[number % 2], self._run.store, RUN, self._attempt, params
        )
        rows: list[dict[str, Any]] = []
        report = publisher.publish(number)
        with self._nodes(url, ahead=False) as nodes:
            for node in nodes:
                node.wait_for(str(report.version))
        for pair in range(num_pairs):
            for arm in list(ARMS) if pair % 2 == 0 else list(reversed(ARMS)):
                with self._nodes(url, ahead=ARMS[arm]) as nodes:
                    time.sleep(0.5)  # readers wait for news
                    number += 1
                    began_s = time.monotonic()
                    report = publisher.publish(number)
                    published_s = time.monotonic()
                    marks = [node.wait_for(str(report.version)) for node in nodes]
                    last = max(marks, key=lambda mark: mark["acknowledged_at"])
                    name = f"{report.version} {kind} {arm}"
                    self.events += timeline(
                        name, began_s, self._run.timed.head_at[str(report.version)], marks
                    )
                    rows.append(
                        {
                            "arm": arm,
                            "kind": report.kind,
                            "acknowledged_s": last["acknowledged_at"] - began_s,
                            "published_s": published_s - began_s,
                            "copied_s": max(mark["copied_at"] for mark in marks) - began_s,
                            "bytes_sent": report.bytes_sent,
                        }
                    )
                    equal = all(node.hashes() == dict(report.state) for node in nodes)
        alone = [self._transfer_alone(report) for _ in range(3)]
        publisher.close()
        return {"rows": rows, "equal": equal, "transfer_alone_s": alone, "bytes": report.bytes_sent}

    @contextlib.contextmanager
    def _nodes(self, url: str, *, ahead: bool) -> Iterator[list[Node]]:
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(self._run.node(server, name, relay_url=url, pull_ahead=ahead))
                for server, name in zip(self._servers, "ab", strict=True)
            ]

    def _transfer_alone(self, report: PublishReport) -> float:
        record = stored_manifests.read(self._run.store, RUN, report.version, report.kind)
        store = HttpStore(self._far, self._run.relay.tokens.relay)
        with ThreadPoolExecutor(PULLS) as pulls:
            list(pulls.map(lambda each: store.stat(each.key), record.objects))  # connections are open
            began_s = time.monotonic()
            list(pulls.map(lambda each: len(store.get(each.key)), record.objects))
            seconds = time.monotonic() - began_s
        store.close()
        return seconds


def timeline(name: str, began_s: float, head_s: float, marks: list[Marks]) -> list[dict[str, Any]]:
    """One version in Chrome's trace format: the trainer's row, and one of each engine."""
    events = [("trainer", f"publish {name}", began_s, head_s)]
    for number, mark in enumerate(marks):
        points = [
            ("copy", head_s),
            ("file", mark["copied_at"]),
            ("stage", mark["written_at"]),
            ("commit", mark["staged_at"]),
        ]
        ends = [*(at for _, at in points[1:]), mark["acknowledged_at"]]
        events += [
            (f"engine {number}", f"{phase} {name}", begin, max(begin, end))
            for (phase, begin), end in zip(points, ends, strict=True)
        ]
    return [
        {"name": what, "ph": "X", "pid": 1, "tid": row, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
        for row, what, begin, end in events
    ]


def summary_of(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Medians of each cell; ``overlap_ratio`` against the open link of its kind."""

    def median(cell: dict[str, Any], arm: str, key: str = "acknowledged_s") -> float:
        return float(np.median([row[key] for row in cell["rows"] if row["arm"] == arm]))

    summary: dict[str, Any] = {}
    for name, cell in cells.items():
        alone = float(np.median(cell["transfer_alone_s"]))
        summary[f"{name}_mb"] = cell["bytes"] / 1e6
        summary[f"{name}_transfer_alone_s"] = alone
        for arm in ARMS:
            seconds = median(cell, arm)
            summary[f"{name}_{arm}_s"] = seconds
            summary[f"{name}_{arm}_over_transfer"] = seconds / alone
            bare = cells.get(f"{cell['kind']}_open")
            if bare is not None and cell is not bare:
                summary[f"{name}_{arm}_overlap_ratio"] = 1 - (seconds - median(bare, arm)) / alone
        summary[f"{name}_speedup"] = median(cell, "at_head") / median(cell, "ahead")
    summary["all_equal"] = all(cell["equal"] for cell in cells.values())
    over = [
        value
        for key, value in summary.items()
        if key.endswith("_ahead_over_transfer") and "_open_" not in key
    ]
    summary["worst_over_transfer"] = max(over, default=None)
    summary["bar_met"] = bool(over) and max(over) <= BAR_OVER_TRANSFER and summary["all_equal"]
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write summary and details here")
    parser.add_argument(
        "--trace", type=Path, help="write every version's timeline here, for chrome://tracing or Perfetto"
    )
    parser.add_argument("--size", choices=sorted(data.SHAPES), default="200M")
    parser.add_argument(
        "--lr", default="5e-06", help="of the fitted step: how much of the model a delta changes"
    )
    parser.add_argument("--gbps", type=float, nargs="+", default=[OPEN_GBPS, 10.0, 1.0])
    parser.add_argument("--kinds", nargs="+", choices=("delta", "whole"), default=["delta", "whole"])
    parser.add_argument("--pairs", type=int, default=6, help="versions of each arm in each cell")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()
    report = Report("weights_link")
    report.progress("making a step of the model", 0, 1)
    dimensions, pairs = large_pairs(args.lr, args.size)
    sides = [
        {pair.name: each.reshape(pair.shape) for pair in pairs for each in [getattr(pair, side)]}
        for side in ("old", "new")
    ]
    cells: dict[str, dict[str, Any]] = {}
    with (
        SharedMemorySweep(),
        tempfile.TemporaryDirectory(prefix="rose-weights-link-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        model = folder / "model"
        write_tiny_model(model, **dimensions)
        write_weights(
            model,
            {
                key: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
                for key, bits in sides[0].items()
            },
        )
        run = stack.enter_context(Run(folder))
        servers = [stack.enter_context(run.server(model, name)) for name in "ab"]
        states = [{key: RawBits(bits, "BF16") for key, bits in side.items()} for side in sides]
        world = World(run, servers, states)
        total = len(args.gbps) * len(args.kinds)
        for gbps in args.gbps:
            with world.linked(gbps, folder / f"leaf-{gbps:g}") as url:
                for kind in args.kinds:
                    cell = Cell(kind, gbps)
                    found = world.versions(kind, url, args.pairs)
                    cells[cell.name] = {"kind": kind, "gbps": gbps, **found}
                    report.progress(cell.name, len(cells), total)
    if args.trace:
        args.trace.write_text(json.dumps({"traceEvents": world.events}))
    summary = summary_of(cells)
    report.finish(summary, {"size": args.size, "lr": args.lr, "cells": cells}, args.json)
    return 0 if summary["bar_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
