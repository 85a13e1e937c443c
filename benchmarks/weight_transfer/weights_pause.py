"""How long an engine's rank stands still while it takes a new version, and what it does meanwhile.

A rank of the plugin (:class:`vllm_plugin.rank_weights.RankWeights`) over live torch parameters, without the engine
around it: fused qkv and gate/up projections, loaded and recorded as vLLM's are.  A version is staged from an update
file; then the commit is timed, and beside it the *bare scatter*: the same values at the same places by the compiled
loop alone.  What the commit calls is recorded by a profiler in a further run, and what it reads and writes by the
kernel's counters.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from benchmarks.weight_transfer.weights_data import SHAPES, Pair, Shape, generate
from rose.lineage import WeightVersion
from rose.weights import indexed, statehash
from rose.weights.spec import TensorSpec, model_digest
from rose.weights.update import TensorUpdate, Update, write_update
from vllm_plugin.plan_recorder import record
from vllm_plugin.rank_weights import RankWeights
from vllm_plugin.staged_update import UpdatePhase

FORBIDDEN = ("codec", "statehash", "update", "hash_", "zstd", "xxh", "open", "read", "safetensors", "json")
"""Parts of a name that would mean decoding, hashing or reading.  ``put`` and ``equal`` compare bits."""


class FusedModel(torch.nn.Module):
    """Parameters of a decoder in vLLM's layout; ``load_weights`` copies slices of checkpoint tensors into them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.places: dict[str, tuple[torch.Tensor, int, int]] = {}
        tensors = shape.tensors()
        fused: dict[str, list[str]] = {}
        for name in tensors:
            merged = name
            for part, whole in (
                ("q", "qkv"),
                ("k", "qkv"),
                ("v", "qkv"),
                ("gate", "gate_up"),
                ("up", "gate_up"),
            ):
                merged = merged.replace(f".{part}_proj.", f".{whole}_proj.")
            fused.setdefault(merged, []).append(name)
        for merged, names in fused.items():
            rows = sum(tensors[name][0] for name in names)
            parameter = torch.nn.Parameter(
                torch.zeros((rows, *tensors[names[0]][1:]), dtype=torch.bfloat16), requires_grad=False
            )
            self.register_parameter(merged.replace(".", "_"), parameter)
            begin = 0
            for name in names:
                self.places[name] = (parameter, begin, tensors[name][0])
                begin += tensors[name][0]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            parameter, begin, rows = self.places[name]
            parameter.data.narrow(0, begin, rows).copy_(tensor)


def load(model: FusedModel, pairs: list[Pair]) -> None:
    model.load_weights(
        (pair.name, torch.from_numpy(pair.old.view(np.int16)).view(torch.bfloat16).reshape(pair.shape))
        for pair in pairs
    )


def write(path: Path, pairs: list[Pair], base: WeightVersion, target: WeightVersion) -> int:
    """The update file from ``old`` to ``new``; returns the number of changes."""
    tensors = {}
    for pair in pairs:
        index = np.flatnonzero(pair.old != pair.new).astype(np.uint32)
        tensors[pair.name] = TensorUpdate(
            spec=TensorSpec(pair.name, "BF16", pair.shape),
            h_before=statehash.hash_bits(pair.old),
            h_after=statehash.hash_bits(pair.new),
            idx=index if index.size else None,
            val=pair.new[index] if index.size else None,
        )
    update = Update(
        run_id="benchmark",
        target=target,
        base=base,
        model=model_digest(tensor.spec for tensor in tensors.values()),
        tensors=tensors,
    )
    write_update(path, update)
    return update.num_changed


def io_counters() -> tuple[int, int]:
    """(read calls, write calls) of this thread so far, by the kernel's count; this very read is in the next one."""
    rows = dict(
        line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines()
    )  # fmt: skip
    return int(rows["syscr"]), int(rows["syscw"])


def calls_inside(work: Callable[[], Any]) -> Counter[str]:
    """Names of every Python and C function called by ``work`` in this thread, with counts."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            found[f"{getattr(argument, '__module__', None)}.{argument.__qualname__}"] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def bare_scatter(rank: RankWeights) -> float:
    """Seconds to write the staged values where they already go, by the compiled loop and nothing else."""
    staged = rank._slot.staged
    assert staged is not None
    work = [
        (
            rank._bits(piece.box).numpy().view(np.uint16),
            piece.storage.numpy(),
            piece.new.numpy().view(np.uint16),
            piece.old.numpy().view(np.uint16),
        )
        for piece in staged.pieces
        if piece.storage is not None
    ]
    began_s = time.thread_time()
    for bits, places, new, _ in work:
        indexed.scatter(bits, places, new)
    seconds = time.thread_time() - began_s
    for bits, places, _, old in work:
        indexed.scatter(bits, places, old)
    return seconds


def measure(size: str, density: float, fit: dict[str, Any], *, repeats: int) -> dict[str, Any]:
    """Commit and bare scatter of one model and one density, interleaved; medians in seconds of thread time."""
    pairs = generate(SHAPES[size], fit, density=density)
    model = FusedModel(SHAPES[size])
    load(model, pairs)
    plan = record(model, [TensorSpec(pair.name, "BF16", pair.shape) for pair in pairs])
    assert not plan.fallback
    base = WeightVersion(1, 0)
    commits, scatters, walls, io_calls = [], [], [], []
    calls: Counter[str] = Counter()
    num_changed, stage_s = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "update.safetensors"
        target = WeightVersion(1, 1)
        num_changed = write(path, pairs, base, target)
        rank = RankWeights(plan, base)
        for repeat in range(repeats + 1):
            rank.prefetch(str(path), target)
            rank.join()
            report = rank.report()
            assert report["phase"] == UpdatePhase.STAGED, report
            stage_s = report["stage_s"]
            flush_caches()
            scatters.append(bare_scatter(rank))
            flush_caches()
            if repeat == repeats:  # the traced run; its times would be the profiler's
                calls = calls_inside(lambda: rank.commit(target))
            else:
                # Two reads in a row first: what the second one costs itself is taken off.
                first, idle = io_counters(), io_counters()
                began, began_wall = time.thread_time(), time.perf_counter()
                rank.commit(target)
                commits.append(time.thread_time() - began)
                walls.append(time.perf_counter() - began_wall)
                after = io_counters()
                io_calls.append(sum(after) - sum(idle) - (sum(idle) - sum(first)))
            rank.undo()
            rank.discard() if rank.report()["phase"] == UpdatePhase.FAILED else None
            rank.finish()
        forbidden = sorted(name for name in calls if any(part in name.lower() for part in FORBIDDEN))
    return {
        "size": size,
        "density": num_changed / sum(pair.old.size for pair in pairs),
        "num_changed": num_changed,
        "changed_bytes": 2 * num_changed,
        "commit_s": float(np.median(commits)),
        "commit_wall_s": float(np.median(walls)),
        "bare_scatter_s": float(np.median(scatters)),
        "stage_s": stage_s,
        "io_calls": max(io_calls),
        "calls": dict(calls.most_common()),
        "forbidden_calls": forbidden,
    }


_flush = np.zeros(0, np.uint64)


def flush_caches() -> None:
    """Read 64 MB, so that neither of the two finds its lines in cache because staging or the other just used them."""
    global _flush
    if not _flush.size:
        _flush = np.ones(8 << 20, np.uint64)
    _flush.sum()


def run(fit: dict[str, Any], *, sizes: list[str], densities: list[float], repeats: int) -> dict[str, Any]:
    """All points, and the straight lines through them: seconds = fixed + slope * changed bytes."""
    points = [
        measure(size, density, fit, repeats=repeats) for size in sizes for density in densities
    ]  # fmt: skip
    changed = np.array([point["changed_bytes"] for point in points], float)

    def line(key: str) -> dict[str, float]:
        slope, fixed = np.polyfit(changed, [point[key] for point in points], 1)
        return {"fixed_ms": 1e3 * float(fixed), "ns_per_changed_byte": 1e9 * float(slope)}

    return {"points": points, "commit": line("commit_s"), "bare_scatter": line("bare_scatter_s")}
