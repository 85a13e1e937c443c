"""Expected times of large models, **derived** from what the end-to-end benchmark measured; nothing of it was run.

The derivation, all of it::

    seconds to acknowledge = fixed + G * (publish / R + (copy + write) / N + stage / T + pause / T) + bytes / link
    seconds to activate    = fixed + G * (write / N + stage / T + pause / T), of a whole model (no link: the host copy is there)

with ``G`` GB of dense bf16, ``R`` trainer ranks that each diff their own shard, ``T`` engine ranks that each stage their
own part, and ``N`` threads of the node agent beside the engine, given for one and for more (``weights.py`` measures what
two gain; that more go on like that is assumed).  Measured on one core: seconds per GB of each phase on the largest
model (of its own thread, so that the other processes on that core do not count; staging and commit as the engine tells
them), the fixed part (waits, calls, polls) from publish to acknowledged on the smallest model, bytes per GB in the real
run.  The link is crossed once, at its full rate.  Phases are added up, though they overlap in part.  Measured on a CPU:
on a GPU, staging and commit are other figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GBPS = (10, 20, 200)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Parameters in billions, and over how many ranks trainer and engine are assumed to be divided."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Seconds per GB of dense weights on one core, at the density of the run, unless said otherwise."""

    fixed_s: float
    """Publish to acknowledged of a model so small that only the fixed costs are left."""
    share_of_dense: float
    """Bytes sent, of a full copy."""
    publish_s_per_gb: float
    copy_s_per_gb: float
    write_s_per_gb: float
    stage_s_per_gb: float
    pause_s_per_gb: float
    activation_write_s_per_gb: float
    activation_stage_s_per_gb: float
    activation_pause_s_per_gb: float


def expected(found: Measured) -> list[dict[str, Any]]:
    """One row per model and link; every time in seconds."""
    rows: list[dict[str, Any]] = []
    for name, model in MODELS.items():
        g, r, t = model.gigabytes, model.trainer_ranks, model.engine_ranks
        engine_s = g * (found.stage_s_per_gb + found.pause_s_per_gb) / t
        activate_s = g * (found.activation_stage_s_per_gb + found.activation_pause_s_per_gb) / t
        for gbps in GBPS:
            wire_s = g * found.share_of_dense * 8 / gbps
            row: dict[str, Any] = {
                "derived": True,
                "model": name,
                "gbps": gbps,
                "trainer_ranks": r,
                "engine_ranks": t,
                "node_threads": model.node_threads,
                "sent_gb": g * found.share_of_dense,
                "wire_s": wire_s,
                "dense_wire_s": g * 8 / gbps,
                "publish_s": g * found.publish_s_per_gb / r,
                "engine_s": engine_s,
                "pause_s": g * found.pause_s_per_gb / t,
            }
            for suffix, threads in (("one_thread", 1), ("threads", model.node_threads)):
                node_s = g * (found.copy_s_per_gb + found.write_s_per_gb) / threads
                row[f"node_{suffix}_s"] = node_s
                row[f"acknowledged_{suffix}_s"] = (
                    found.fixed_s + row["publish_s"] + node_s + engine_s + wire_s
                )
                row[f"activation_{suffix}_s"] = (
                    found.fixed_s + g * found.activation_write_s_per_gb / threads + activate_s
                )
            rows.append(row)
    return rows
