"""What a new version costs, term by term: CPU seconds of one core per GB, of each part by itself and of what divides.

``weights_live.py`` times whole phases on one engine of one rank.  This takes them apart, through the same code: a publisher, a
relay in a process of its own, a subscriber, its update files, and the plugin's ranks on plain modules that are cut as
tensor parallelism cuts (every other matrix by rows, by columns).  ``weights_expected.py`` adds the terms up.

CPU seconds, of the thread or process that does the work: what else runs on the machine is not in them, nor is waiting.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from benchmarks.lib.report import Report
from rose.lineage import WeightVersion
from rose.weights import subscriber as subscriber_module
from rose.weights.http_store import HttpStore
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.source import RawBits
from rose.weights.spec import TensorSpec
from rose.weights.spool import PULL_BYTES
from rose.weights.subscriber import WeightSubscriber
from rose.weights.warmup import warm_up
from tests.weights.relay_process import RelayProcess
from vllm_plugin.plan_recorder import record
from vllm_plugin.rank_weights import RankWeights

RANKS = (1, 2, 4, 8)
ROWS, COLUMNS = 4096, 1536
RUN = "terms"


class Slices(torch.nn.Module):
    """What one of ``world`` ranks holds of every matrix: rows of the even ones, columns of the odd ones."""

    def __init__(self, names: list[str], rank: int, world: int) -> None:
        super().__init__()
        self.cut = {name: (number % 2, rank, world) for number, name in enumerate(names)}
        for name in names:
            shape = self.part(name, torch.empty(ROWS, COLUMNS, device="meta")).shape
            value = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
            self.register_parameter(name, value)

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim, rank, world = self.cut[name]
        count = tensor.shape[dim] // world
        return tensor.narrow(dim, rank * count, count)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(self.part(name, tensor))


class Timers:
    """CPU seconds of this thread inside functions of ours, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - began_s

        return timed


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def relay_terms(store: HttpStore, pid: int) -> dict[str, float]:
    """CPU seconds of the relay per GB taken in, and per GB given out in the subscriber's ranges."""
    nbytes, count = 64 << 20, 16
    data = np.random.default_rng(0).bytes(nbytes)
    began_s = cpu_of(pid)
    for number in range(count):
        store.put_new(f"bytes/1.0/{number:04d}", data)
    in_s = cpu_of(pid) - began_s
    began_s = cpu_of(pid)
    for number in range(count):
        for offset in range(0, nbytes, PULL_BYTES):
            store.get_range(f"bytes/1.0/{number:04d}", offset, PULL_BYTES)
    out_s = cpu_of(pid) - began_s
    for number in range(count):
        store.delete(f"bytes/1.0/{number:04d}")
    gigabytes = nbytes * count / 1e9
    return {"relay_in_s_per_gb": in_s / gigabytes, "relay_out_s_per_gb": out_s / gigabytes}


def staged(
    names: list[str], path: Path, old: dict[str, np.ndarray], world: int, target: WeightVersion
) -> float:
    """CPU seconds in which rank 0 of ``world`` stages an update file; other ranks do the same beside it."""
    model = Slices(names, 0, world)
    specs = [TensorSpec(name, "BF16", (ROWS, COLUMNS)) for name in names]
    model.load_weights(
        (name, torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)) for name, bits in old.items()
    )
    rank = RankWeights(record(model, specs), WeightVersion(1, target.version - 1))
    timers = Timers()
    rank._stage = timers.around("stage", rank._stage)  # type: ignore[method-assign]
    rank.prefetch(str(path), target)
    rank.join()
    report = rank.report()
    if report["phase"] != "staged":
        raise RuntimeError(report["error"])
    return timers.seconds["stage"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--matrices", type=int, default=16, help="of 6.3 M elements each, as the experts of a model of 235 B"
    )
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument(
        "--density", type=float, default=0.031, help="share of weights that change per version"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warm_up()
    report = Report("weights_terms")
    rng = np.random.default_rng(1)
    names = [f"w{number}" for number in range(args.matrices)]
    held = {
        name: (rng.standard_normal((ROWS, COLUMNS)).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
        for name in names
    }
    gigabytes = sum(bits.nbytes for bits in held.values()) / 1e9
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        folder = Path(scratch)
        with RelayProcess(folder) as relay:
            store = HttpStore(relay.url, relay.tokens.publish)
            summary: dict[str, Any] = relay_terms(store, relay.process.pid)
            publisher = WeightPublisher(
                lambda: {name: RawBits(bits, "BF16") for name, bits in held.items()}, store, RUN, 1,
                WeightsParams(anchor_every=1000),
            )  # fmt: skip
            reader = WeightSubscriber(store, RUN, folder / "reader")
            timers = Timers()
            for name in ("_stage", "_commit", "_tensor_updates"):
                setattr(reader, name, timers.around(name, getattr(reader, name)))
            reader._spool.pull = timers.around("pull", reader._spool.pull)  # type: ignore[method-assign]
            subscriber_module.write_update = timers.around("write_update", subscriber_module.write_update)
            at: WeightVersion | None = None
            before = held
            for version in range(args.versions + 1):
                before = {name: bits.copy() for name, bits in held.items()}
                if version:
                    for bits in held.values():
                        flat = bits.reshape(-1)
                        changed = rng.choice(flat.size, int(args.density * flat.size), replace=False)
                        flat[changed] ^= 1
                began_s = time.thread_time()
                published = publisher.publish(version)
                publish_s = time.thread_time() - began_s
                timers.seconds.clear()
                newest = reader.poll(0)
                assert newest is not None
                assert newest == published.version
                path = reader.fetch(newest, at)
                found = timers.seconds
                row = {
                    "publish": publish_s,
                    "pull": found["pull"],
                    "decode": found["_stage"] - found["pull"] + found["_commit"],
                    "collect": found["_tensor_updates"],
                    "file": found["write_update"],
                    "sent": published.bytes_sent / 1e9,
                    "update": path.stat().st_size / 1e9,
                }
                if version:
                    row |= {f"stage_{t}": staged(names, path, before, t, newest) for t in RANKS}
                    rows.append(row)
                at = newest
                report.progress("versions", version, args.versions)
            assert at is not None
            timers.seconds.clear()
            path = reader.fetch(at, None)
            summary["activation_collect_s_per_gb"] = timers.seconds["_tensor_updates"] / gigabytes
            summary["activation_file_s_per_gb"] = timers.seconds["write_update"] / gigabytes
            for t in RANKS:
                summary[f"activation_stage_{t}_s_per_gb"] = staged(names, path, before, t, at) / gigabytes
            reader.close()
            publisher.close()
    for key in rows[0]:
        summary[f"{key}_s_per_gb" if key not in ("sent", "update") else f"{key}_share"] = (
            statistics.median(row[key] for row in rows) / gigabytes
        )
    summary |= {"dense_gb": gigabytes, "density": args.density, "versions": args.versions}
    report.finish(summary, {"rows": rows}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
