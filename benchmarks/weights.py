"""Size, speed and pause of the weight transfer's codec, beside the formats it competes with.

Three parts, each of which can be run alone (``--parts``):

* ``size``: bytes per changed weight on consecutive checkpoints of real RL runs (``--rl``, folders made by
  ``rl_checkpoints.py``) and on the generator fitted to them; against the iid Shannon bound, against what the old exponents would
  tell a coder that knew them (``context_bound_ratio``: a bound, no such coder is built; decision 0002), and against five rivals.
* ``speed``: encode and decode + stage + commit at 1 % density, interleaved with numpy's compare + flatnonzero and
  with dense XOR + zstd.  Thread time of one core, so that other load distorts little; scaling over cores is wall
  time and only measured where the process may use more than one.
* ``pause``: what a commit into live parameters takes at 5, 50 and 200 M parameters, against a bare scatter.

    python benchmarks/weights.py --json FILE [--rl out/rl out/rl-moe] [--parts size speed pause]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import zstandard

from benchmarks.lib.report import write
from benchmarks.weight_transfer import weights_data as data
from benchmarks.weight_transfer import weights_rivals as rivals
from rose.weights import codec

PARTS = ("size", "speed", "pause")
BARS = {
    "shannon_ratio": ("<=", 1.03),
    "coo_ratio": (">=", 4.0),
    "encode_vs_numpy": (">=", 1.4),
    "decode_vs_xor": (">=", 2.0),
    "pause_over_bar": ("<=", 1.0),
}


# --- size -------------------------------------------------------------------------------------------------


def measure_sizes(rl: list[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(summary, details)."""
    sets: dict[str, dict[str, float]] = {}
    folders = [folder for each in rl for folder in sorted(each.glob("lr-*"))]
    for folder in folders:
        of = f"{folder.parent.name}_" if len(rl) > 1 else ""
        late: list[dict[str, float]] = []
        for step, before, after in data.checkpoint_pairs(folder):
            found = rivals.sizes(data.load_pair(before, after))
            sets[f"{of}{folder.name}_step_{step}"] = found
            if step >= data.RAMP_UP_STEPS:
                late.append(found)
        if late:
            sets[f"rl_{of}{folder.name.removeprefix('lr-')}"] = {
                key: sum(each[key] for each in late) for key in late[0]
            }
    for lr in json.loads(data.FIT_FILE.read_text())["fits"]:
        sets[f"fitted_{lr}"] = rivals.sizes(data.generate(data.SHAPES["50M"], data.load_fit(lr)))
    print(
        "\nBytes per changed weight (density; then each format)\n"
        f"{'set':28s}{'%':>7s}{'bound':>7s}{'side':>7s}{'planes':>8s}{'x bound':>8s}{'COO':>7s}"
        f"{'vLLM':>7s}{'gaps+zstd':>10s}{'XOR+zstd':>9s}{'% dense':>8s}"
    )
    for name, row in sets.items():
        per = {key: value / row["changes"] for key, value in row.items()}
        print(
            f"{name:28s}{100 * row['changes'] / row['elements']:7.3f}{per['shannon']:7.3f}{per['side_information']:7.3f}"
            f"{per['planes']:8.3f}{row['planes'] / row['shannon']:8.3f}{per['coo_int32']:7.2f}{per['vllm_sparse']:7.2f}"
            f"{per['gaps_u16_zstd']:10.2f}{per['xor_zstd']:9.2f}{100 * row['planes'] / row['dense']:8.2f}"
        )
    judged = {name: row for name, row in sets.items() if name.startswith(("rl_", "fitted_"))}
    summary: dict[str, Any] = {
        # The worst of the sets after the ramp-up.
        "bytes_per_change": max(row["planes"] / row["changes"] for row in judged.values()),
        "shannon_ratio": max(row["planes"] / row["shannon"] for row in judged.values()),
        "coo_ratio": min(row["coo_int32"] / row["planes"] for row in judged.values()),
    }
    for name, row in judged.items():
        summary[f"bytes_per_change_{name}"] = row["planes"] / row["changes"]
        summary[f"shannon_ratio_{name}"] = row["planes"] / row["shannon"]
        summary[f"context_bound_ratio_{name}"] = row["side_information"] / row["shannon"]
        summary[f"density_{name}"] = row["changes"] / row["elements"]
    return summary, {"sets": sets, "runs": [run_of(folder) for folder in folders]}


def run_of(folder: Path) -> dict[str, Any]:
    """What an RL run was: steps done, tokens a step, reward and density along the way."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {
        "run": f"{folder.parent.name}/{folder.name}",
        "steps": len(rows),
        "loss_tokens_per_step": rows[0]["num_tokens"],
        "at_steps": [
            {key: row[key] for key in ("step", "reward", "density", "entropy", "mismatch_kl")}
            for row in rows
            if row["step"] in (1, 2, 5, 10, 25, 50) or row["step"] % 50 == 0 or row is rows[-1]
        ],
    }


# --- speed ------------------------------------------------------------------------------------------------


def interleaved(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median thread time in seconds of each work, taken in turns.  A work may return a function: its clean-up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            gc.collect()
            began_s = time.thread_time()
            after = work()
            seconds = time.thread_time() - began_s
            if repeat:  # the first round warms up
                times[name].append(seconds)
            if callable(after):
                after()
    return {name: float(np.median(values)) for name, values in times.items()}


def measure_speed(lr: str, density: float, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(summary, details) on a 50 M model; all figures GB of *dense* bf16 per second, one core."""
    pairs = data.generate(data.SHAPES["50M"], data.load_fit(lr), density=density)
    pairs = [pair for pair in pairs if pair.old.size > 4096]
    held = [pair.old.copy() for pair in pairs]
    gigabytes = sum(pair.old.nbytes for pair in pairs) / 1e9
    encoded = [codec.encode(pair.old, pair.new) for pair in pairs]
    payloads = [each.data for each in encoded if each is not None]
    frames = [rivals.compress(pair.old ^ pair.new) for pair in pairs]
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    flat = np.concatenate([pair.old for pair in pairs]).view(np.uint64)
    places = [np.flatnonzero(pair.old != pair.new).astype(np.uint32) for pair in pairs]
    values = [pair.old[place] for pair, place in zip(pairs, places, strict=True)]
    changed_lines = sum(np.unique(place // 32).size for place in places) * 64 / 1e9
    spare = np.empty_like(flat)

    def encode() -> None:
        for pair in pairs:
            codec.encode(pair.old, pair.new, max_changes=pair.old.size // 5)

    def numpy_detect() -> None:
        for pair in pairs:
            np.flatnonzero(pair.old != pair.new)

    def xor_encode() -> None:
        for pair in pairs:
            compressor.compress((pair.old ^ pair.new).data.cast("B"))

    def decode() -> Callable[[], None]:
        """Everything from the payload to changed weights: staged whole before anything is written."""
        staged = []
        for pair, payload, target in zip(pairs, payloads, held, strict=True):
            delta = codec.decode(payload, pair.old.size)
            staged.append((target, delta, codec.stage(target, delta)))
        for target, delta, (_, values, _) in staged:
            codec.scatter(target, delta.idx, values)

        def put_back() -> None:
            for (target, delta, (before, _, _)), pair in zip(staged, pairs, strict=True):
                assert np.array_equal(target, pair.new)
                codec.scatter(target, delta.idx, before)

        return put_back

    def xor_decode() -> None:
        for frame, target in zip(frames, held, strict=True):
            difference = np.frombuffer(decompressor.decompress(frame), np.uint16)
            np.bitwise_xor(target, difference, out=target)

    def restore() -> None:
        for pair, target in zip(pairs, held, strict=True):
            target[:] = pair.old

    def gather() -> None:
        """Read what changes and nothing else: with :func:`scatter`, the least that a staged commit does to memory."""
        for target, place, value in zip(held, places, values, strict=True):
            rivals.gather(target, place, value)

    def scatter() -> None:
        for target, place, value in zip(held, places, values, strict=True):
            codec.scatter(target, place, value)

    works: dict[str, Callable[[], Any]] = {
        "gather": gather,
        "scatter": scatter,
        "read": lambda: np.add.reduce(flat) and None,
        "copy": lambda: np.copyto(spare, flat),
        "encode": encode,
        "numpy_detect": numpy_detect,
        "xor_encode": xor_encode,
        "decode": decode,
        "xor_decode": lambda: (xor_decode(), restore)[1],
    }
    seconds = interleaved(works, repeats)
    rate = {name: gigabytes / value for name, value in seconds.items()}
    read_gbps = rate["read"]
    payload_gb = sum(map(len, payloads)) / 1e9
    # The least an encoder must move: both states read, the payload written.
    least = (2 * gigabytes + payload_gb) / read_gbps
    least_decode = (payload_gb + 3 * changed_lines) / read_gbps  # lines read, read again and written back
    peaks = peak_memory(pairs[0] if pairs[0].old.size > 1 << 22 else pairs[1])
    sweep = {
        f"{100 * share:g} %": sweep_point(lr, share, repeats) for share in (0.0025, 0.01, 0.026, 0.07, 0.2)
    }
    print(
        f"\nGB/s of dense bf16, one core, at {100 * density:g} % changed ({gigabytes:.2f} GB, lr {lr} steps)"
    )
    for name, value in rate.items():
        print(f"{name:16s}{value:8.2f}")
    print(
        f"encode / numpy {rate['encode'] / rate['numpy_detect']:.2f}x, "
        f"decode / XOR {rate['decode'] / rate['xor_decode']:.2f}x; of the memory's limit: encode "
        f"{100 * least / seconds['encode']:.0f} %, decode + stage + commit {100 * least_decode / seconds['decode']:.0f} %\n"
        f"a bare gather and scatter of the changes take {100 * (seconds['gather'] + seconds['scatter']) / seconds['decode']:.0f} % "
        f"of decode + stage + commit: lines that lie apart come at {changed_lines / seconds['gather']:.1f} GB/s, "
        f"in order at {read_gbps:.1f}"
    )
    for share, row in sweep.items():
        print(f"{share:>8s} changed: encode {row['encode_gbps']:.2f}, decode {row['decode_gbps']:.2f} GB/s")
    scaled = scaling(pairs, payloads, gigabytes, repeats)
    summary = {
        "encode_vs_numpy": rate["encode"] / rate["numpy_detect"],
        "decode_vs_xor": rate["decode"] / rate["xor_decode"],
        "encode_gbps_core": rate["encode"],
        "decode_gbps_core": rate["decode"],
        "encode_share_of_bandwidth": least / seconds["encode"],
        "decode_share_of_bandwidth": least_decode / seconds["decode"],
        "decode_share_of_bare_gather_and_scatter": (seconds["gather"] + seconds["scatter"])
        / seconds["decode"],
        "read_gbps": read_gbps,
        "changed_line_gbps": changed_lines / seconds["gather"],
        **{name: value for name, value in scaled.items() if name != "cores"},
        "encode_peak_mb": peaks["encode_mb"],
        "decode_peak_mb": peaks["decode_mb"],
    }
    details = {
        "gbps": rate,
        "seconds": seconds,
        "density_sweep": sweep,
        "peak": peaks,
        "scaling": scaled,
    }
    return summary, details


def sweep_point(lr: str, density: float, repeats: int) -> dict[str, float]:
    """Encode and decode + stage + commit of one 9 M embedding-free slice at another density."""
    pairs = data.generate(data.Shape(512, 3, 1024), data.load_fit(lr), density=density)
    pairs = [pair for pair in pairs if pair.old.size > 4096]
    gigabytes = sum(pair.old.nbytes for pair in pairs) / 1e9
    made = [codec.encode(pair.old, pair.new) for pair in pairs]
    payloads = [each.data for each in made if each is not None]
    held = [pair.old.copy() for pair in pairs]

    def decode() -> Callable[[], None]:
        for pair, payload, target in zip(pairs, payloads, held, strict=True):
            codec.apply(target, codec.decode(payload, pair.old.size))

        def put_back() -> None:
            for target, pair in zip(held, pairs, strict=True):
                target[:] = pair.old

        return put_back

    seconds = interleaved(
        {"encode": lambda: [codec.encode(p.old, p.new) for p in pairs] and None, "decode": decode}, repeats
    )
    return {
        "encode_gbps": gigabytes / seconds["encode"],
        "decode_gbps": gigabytes / seconds["decode"],
        "share_of_dense": sum(map(len, payloads)) / 1e9 / gigabytes,
    }


def peak_memory(pair: data.Pair) -> dict[str, float]:
    """Memory allocated at the highest while one tensor is encoded and applied, MB, and the tensor's own size.

    In a new thread, because a thread keeps its scratch.  The encoder reserves room for the worst case and touches what
    it writes, so what becomes resident is less.
    """

    def added(work: Callable[[], Any]) -> float:
        gc.collect()
        tracemalloc.start()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak_bytes / 2**20

    payload = codec.encode(pair.old, pair.new)
    assert payload is not None
    target = pair.old.copy()
    return {
        "tensor_mb": pair.old.nbytes / 2**20,
        "encode_mb": added(lambda: codec.encode(pair.old, pair.new, max_changes=pair.old.size // 5)),
        "decode_mb": added(lambda: codec.apply(target, codec.decode(payload.data, target.size))),
    }


def scaling(pairs: list[data.Pair], payloads: list[bytes], gigabytes: float, repeats: int) -> dict[str, Any]:
    """Encode, and decode + stage + commit, on 1, 2, 4 ... threads: wall time, in turns; with one core not measured."""
    cores = len(os.sched_getaffinity(0))
    found: dict[str, Any] = {"cores": cores}
    if cores == 1:
        print("over threads: not measured, this process may use one core")
        return found
    held = [pair.old.copy() for pair in pairs]

    def encode(pair: data.Pair) -> None:
        codec.encode(pair.old, pair.new, max_changes=pair.old.size // 5)

    def stage(
        item: tuple[bytes, data.Bits],
    ) -> tuple[data.Bits, codec.Delta, tuple[data.Bits, data.Bits, int]]:
        payload, target = item
        delta = codec.decode(payload, target.size)
        return target, delta, codec.stage(target, delta)

    def scatter(staged: tuple[data.Bits, codec.Delta, tuple[data.Bits, data.Bits, int]], side: int) -> None:
        target, delta, (old, new, _) = staged
        codec.scatter(target, delta.idx, new if side else old)

    counts = [1 << n for n in range(cores.bit_length()) if 1 << n <= cores]
    walls: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        pools = {count: stack.enter_context(ThreadPoolExecutor(count)) for count in counts}
        for _ in range(repeats + 1):
            for count, pool in pools.items():
                began_s = time.perf_counter()
                list(pool.map(encode, pairs))
                encoded_s = time.perf_counter()
                staged = list(pool.map(stage, zip(payloads, held, strict=True)))
                list(pool.map(lambda each: scatter(each, 1), staged))
                ended_s = time.perf_counter()
                for each in staged:
                    scatter(each, 0)
                walls[f"encode_gbps_{count}_threads"].append(encoded_s - began_s)
                walls[f"decode_gbps_{count}_threads"].append(ended_s - encoded_s)
    found |= {name: gigabytes / float(np.median(values[1:])) for name, values in walls.items()}
    print(
        "over threads, GB/s of wall time:",
        ", ".join(f"{k} {v:.2f}" for k, v in found.items() if k != "cores"),
    )
    return found


# --- pause ------------------------------------------------------------------------------------------------


def measure_pause(lr: str, sizes: list[str], repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(summary, details)."""
    from benchmarks.weight_transfer import weights_pause

    found = weights_pause.run(
        data.load_fit(lr), sizes=sizes, densities=[0.0025, 0.01, 0.026], repeats=repeats
    )
    print(
        f"\nCommit into live parameters, ms of thread time\n{'model':8s}{'%':>6s}{'changed MB':>11s}{'stage':>9s}"
        f"{'commit':>9s}{'scatter':>9s}{'ratio':>7s}{'of the bar':>11s}{'I/O calls':>10s}"
    )
    worst = 0.0
    for point in found["points"]:
        bar_s = 1.5 * point["bare_scatter_s"] + 0.010
        worst = max(worst, point["commit_s"] / bar_s)
        print(
            f"{point['size']:8s}{100 * point['density']:6.2f}{point['changed_bytes'] / 1e6:11.2f}"
            f"{1e3 * point['stage_s']:9.1f}{1e3 * point['commit_s']:9.2f}{1e3 * point['bare_scatter_s']:9.2f}"
            f"{point['commit_s'] / point['bare_scatter_s']:7.2f}{point['commit_s'] / bar_s:11.2f}{point['io_calls']:10d}"
        )
    print(f"fit: commit {found['commit']}, bare scatter {found['bare_scatter']}")
    forbidden = sorted({name for point in found["points"] for name in point["forbidden_calls"]})
    print("called inside a commit:", ", ".join(found["points"][-1]["calls"]))
    print("of these decode, hash or I/O:", forbidden or "none")
    summary = {
        "pause_over_bar": worst,
        "pause_fixed_ms": found["commit"]["fixed_ms"],
        "pause_ns_per_changed_byte": found["commit"]["ns_per_changed_byte"],
        "pause_slope_vs_scatter": found["commit"]["ns_per_changed_byte"]
        / found["bare_scatter"]["ns_per_changed_byte"],
        "pause_io_calls": max(point["io_calls"] for point in found["points"]),
        "pause_forbidden_calls": len(forbidden),
    }
    for point in found["points"]:
        if abs(point["density"] - 0.01) < 0.002:
            summary[f"pause_ms_{point['size']}_1pct"] = 1e3 * point["commit_s"]
    return summary, found


# --- all --------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write summary and details here")
    parser.add_argument(
        "--rl",
        type=Path,
        nargs="+",
        default=[],
        help="folders made by rl_checkpoints.py; without any only the fit is used",
    )
    parser.add_argument(
        "--fit", action="store_true", help="make weights_fit.json anew from the first of --rl"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="others that the --json file has are kept"
    )
    parser.add_argument("--lr", default="5e-06", help="whose step sizes the speed and pause parts use")
    parser.add_argument("--density", type=float, default=0.01, help="of the speed part (default 0.01)")
    parser.add_argument("--sizes", nargs="+", choices=sorted(data.SHAPES), default=["5M", "50M", "200M"])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.fit:
        fits = {
            folder.name.removeprefix("lr-"): data.fit_of(folder) for folder in sorted(args.rl[0].glob("lr-*"))
        }
        data.FIT_FILE.write_text(json.dumps({"fits": fits}, indent=1) + "\n")
    details: dict[str, Any] = {}
    if args.json and args.json.exists():
        details = json.loads(args.json.read_text())["details"]
    summary: dict[str, Any] = {}
    for part in args.parts:
        print(f"... {part}", file=sys.stderr, flush=True)
        if part == "size":
            found = measure_sizes(args.rl)
        elif part == "speed":
            found = measure_speed(args.lr, args.density, args.repeats)
        else:
            found = measure_pause(args.lr, args.sizes, args.repeats)
        details[part] = {**found[1], "summary": found[0]}
        summary = {
            key: value for name in PARTS if name in details for key, value in details[name]["summary"].items()
        }
        if args.json:  # after every part: an interrupted run keeps what it measured
            write(args.json, "weights", summary, {name: details[name] for name in PARTS if name in details})
    print()
    for key, (sense, bar) in BARS.items():
        if key in summary:
            kept = summary[key] <= bar if sense == "<=" else summary[key] >= bar
            print(f"{key:18s}{summary[key]:8.3f}   bar {sense} {bar}: {'kept' if kept else 'MISSED'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
