"""Expected times of large models, **derived** from two committed results; nothing of it was run.

    python benchmarks/weight_transfer/weights_expected.py      # the table, term by term

``weights_live/2026-11-24.json`` has the seconds per GB of dense weights of each phase, with real engines;
``weights_terms/2026-11-24.json`` what the phases consist of, and what the relay takes.  Each term, and what is assumed of it:

=============  ==========================================================================================================
fixed          publish to acknowledged of a model so small that only waits, calls and polls are left: measured
publish        diff and encode, in proportion to size; divided by trainer ranks, which each diff their own shard: derived
relay in       bytes into the relay, times its CPU seconds per byte (measured): one process, whatever the ranks
wire           the bytes at the link's rate, twice: to the relay, and from it to the node
relay out      as relay in, for one node; every further node adds as much, for the relay serves all
pull           bytes into the node, hashed: divided by the node agent's threads, eight at most (``rose/weights/subscriber.py``)
decode         the rest of it, and what is left of collecting the update's changes: divided by the node agent's threads, which assumes that
               they gain in proportion (two threads on two virtual cores gained 1.5x)
file           writing the update file: one thread; not divided
stage          **not** divided by the engine's ranks alone: what is measured is how much less a rank of T takes than a rank alone.  Divided by
               the rank's share of the node agent's threads, as if they gained in proportion (two on two virtual cores gained 1.3x)
pause          writing, in proportion to size; divided by the ranks, which each write their own part: derived
=============  ==========================================================================================================

Publish to pull run side by side, object by object (``rose/weights/ahead.py``; that they do is measured by ``weights_link.py``): of those five
what counts is the slowest, and the last object's way through the others.  The rest is added up, as the code runs it one after
another.  Measured on CPUs: on a GPU, staging and commit are other figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.weights.params import WeightsParams
from rose.weights.subscriber import MOST_PULLS

RESULTS = Path(__file__).resolve().parents[1] / "results" / "weight_transfer"
GBPS = (10, 200)
TERMS = (
    "fixed", "publish", "relay_in", "wire", "relay_out", "pull", "decode", "file", "stage", "pause",
)  # fmt: skip


BESIDE = ("publish", "relay_in", "wire_in", "wire_out", "relay_out", "pull")
"""Side by side; the wire counts on each side of the relay by itself."""
BUCKET_GB = WeightsParams().bucket_bytes / 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Parameters in billions, and over how many ranks and threads the work is assumed to be divided."""

    billions: float
    trainer_ranks: int
    engine_ranks: int
    node_threads: int

    @property
    def gigabytes(self) -> float:
        return 2 * self.billions


MODELS = {
    "8B": Model(billions=8.2, trainer_ranks=8, engine_ranks=1, node_threads=8),
    "32B": Model(billions=32.8, trainer_ranks=32, engine_ranks=4, node_threads=16),
    "235B": Model(billions=235.0, trainer_ranks=128, engine_ranks=8, node_threads=32),
}


def measured() -> tuple[dict[str, Any], dict[str, Any]]:
    """Summaries of the two committed results: real engines, and the terms."""
    live, terms = (
        json.loads((RESULTS / name).read_text())["summary"]
        for name in ("weights_live/2026-11-24.json", "weights_terms/2026-11-24.json")
    )
    return live, terms


def seconds(
    model: Model, gbps: float, threads: int, live: Mapping[str, Any], terms: Mapping[str, Any]
) -> dict[str, float]:
    """Publish to acknowledged by one engine, by term."""
    dense_gb = model.gigabytes
    sent_gb = sent_gigabytes(model, live)
    copy_s, write_s = dense_gb * live["large_copy_cpu_s_per_gb"], dense_gb * live["large_write_cpu_s_per_gb"]
    pulled = terms["pull_s_per_gb"] / (terms["pull_s_per_gb"] + terms["decode_s_per_gb"])
    filed = terms["file_s_per_gb"] / (terms["file_s_per_gb"] + terms["collect_s_per_gb"])
    staged = terms[f"stage_{model.engine_ranks}_s_per_gb"] / terms["stage_1_s_per_gb"]
    return {
        "fixed": live["acknowledged_s_median_idle"],
        "publish": dense_gb * live["large_publish_cpu_s_per_gb"] / model.trainer_ranks,
        "relay_in": sent_gb * terms["relay_in_s_per_gb"],
        "wire": 2 * sent_gb * 8 / gbps,
        "relay_out": sent_gb * terms["relay_out_s_per_gb"],
        "pull": copy_s * pulled / min(threads, MOST_PULLS),
        "decode": (copy_s * (1 - pulled) + write_s * (1 - filed)) / threads,
        "file": write_s * filed,
        "stage": dense_gb
        * live["large_stage_in_engine_s_per_gb"]
        * staged
        / max(1, threads // model.engine_ranks),
        "pause": dense_gb * live["large_commit_in_pause_s_per_gb"] / model.engine_ranks,
    }


def sent_gigabytes(model: Model, live: Mapping[str, Any]) -> float:
    """Of one delta."""
    return model.gigabytes * live["bytes_sent_median"] / live["bytes_dense"]


def total(by_term: Mapping[str, float], sent_gb: float) -> float:
    """Publish to acknowledged."""
    half = by_term["wire"] / 2
    each = {**by_term, "wire_in": half, "wire_out": half}
    beside = [each[term] for term in BESIDE]
    last = min(1.0, BUCKET_GB / sent_gb)
    rest = sum(each[term] for term in TERMS if term not in BESIDE and term != "wire")
    return rest + max(beside) + last * (sum(beside) - max(beside))


def activation_seconds(
    model: Model, threads: int, live: Mapping[str, Any], terms: Mapping[str, Any]
) -> float:
    """An engine that takes every tensor from a current host copy: no relay, no link."""
    dense_gb = model.gigabytes
    write_s = dense_gb * live["activation_write_cpu_s_per_gb"]
    filed_s, collected_s = terms["activation_file_s_per_gb"], terms["activation_collect_s_per_gb"]
    filed = filed_s / (filed_s + collected_s)
    staged = terms[f"activation_stage_{model.engine_ranks}_s_per_gb"] / terms["activation_stage_1_s_per_gb"]
    return (
        live["acknowledged_s_median_idle"]
        + write_s * filed
        + write_s * (1 - filed) / threads
        + dense_gb * live["activation_stage_in_engine_s_per_gb"] * staged
        + dense_gb * live["activation_commit_in_pause_s_per_gb"] / model.engine_ranks
    )


def _short(value: float) -> str:
    """Two digits, and no exponent."""
    return f"{value:.0f}" if value >= 9.5 else f"{value:.2g}"


def lines() -> list[str]:
    """The table of ``docs/weights.md``, seconds: one line per model and link."""
    live, terms = measured()
    found = [
        "| model | Gbps | "
        + " | ".join(TERMS).replace("_", " ")
        + " | **total** | one thread | activation |",
        "|---" * (len(TERMS) + 5) + "|",
    ]
    for name, model in MODELS.items():
        ranks = f"{name} ({model.trainer_ranks}, {model.engine_ranks}, {model.node_threads})"
        for gbps in GBPS:
            by_term = seconds(model, gbps, model.node_threads, live, terms)
            sent_gb = sent_gigabytes(model, live)
            alone = total(seconds(model, gbps, 1, live, terms), sent_gb)
            active = activation_seconds(model, model.node_threads, live, terms)
            cells = [_short(by_term[term]) for term in TERMS]
            totals = [f"**{_short(total(by_term, sent_gb))}**", _short(alone), _short(active)]
            found.append(f"| {ranks} | {gbps} | " + " | ".join([*cells, *totals]) + " |")
    return found


if __name__ == "__main__":
    print("\n".join(lines()))
    sys.exit(0)
