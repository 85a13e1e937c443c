"""From raw numbers to the figures of a stage, and from stages to what they say together.  Pure: no device, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.models import Shape
from rose.errors import LedgerError
from rose.evaluation.statistics import percentile
from rose.proc import ProcSpec
from rose.units import PAGE_BYTES

GIB = 1 << 30
MOONSHOT_USABLE_MS_PER_GIB = 20.0
MOONSHOT_ACTIVATION_S = 1.0
MOONSHOT_P99_RATIO = 1.05
PAPER_P99_RATIO = (1.07, 1.27)
FREE_LIMIT_S = 0.5
GUARD_S = ProcSpec(name="", argv=()).before_kill_s
LOAD_SHARE = 0.9
"""Of the load that an arm asks for: with less its ratio says too little."""
BF16_FLOP_S: Mapping[str, float] = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
}
"""Dense bf16 products, by the name that CUDA has for the device: half of what the data sheets give with sparsity.  A slice (MIG) has another name."""


def steps(arms: Mapping[str, Sequence[float]], alone: str = "alone", again: str = "again") -> dict[str, Any]:
    """P50 and P99 of each arm in milliseconds, and P99 over that of ``alone``; ``again`` is the noise."""
    found: dict[str, Any] = {}
    for name, values in arms.items():
        found[f"{name}_p50_ms"] = percentile(values, 0.5)
        found[f"{name}_p99_ms"] = percentile(values, 0.99)
    base = found[f"{alone}_p99_ms"]
    for name in arms:
        if name == again:
            found["aa_p99_ratio"] = found[f"{name}_p99_ms"] / base
        elif name != alone:
            suffix = "" if len(arms) <= 3 else f"_{name}"
            found[f"p99_ratio{suffix}"] = found[f"{name}_p99_ms"] / base
    return found


def load(rate_bytes_s: float, wanted_bytes_s: float) -> dict[str, Any]:
    """What really ran beside the loaded arm."""
    share = rate_bytes_s / wanted_bytes_s
    return {"load_gib_s": rate_bytes_s / GIB, "load_share_of_wanted": share, "load_met": share >= LOAD_SHARE}


def contract(junit: str, files: Sequence[str]) -> dict[str, Any]:
    """What pytest's report says of ``files``.

    Raises:
        LedgerError: A test failed, or a file had none that ran.
    """
    passed: dict[str, int] = dict.fromkeys(files, 0)
    skipped: list[str] = []
    failed: list[str] = []
    for case in ElementTree.fromstring(junit).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif case.find("skipped") is not None:
            skipped.append(name)
        else:
            for file in files:
                passed[file] += name.startswith(file.removesuffix(".py").replace("/", ".") + "::")
    if failed:
        raise LedgerError(f"{len(failed)} tests failed: {', '.join(failed)[:500]}")
    idle = [file for file, count in passed.items() if not count]
    if idle:
        raise LedgerError(f"no test ran of {', '.join(idle)}")
    return {"passed": sum(passed.values()), "skipped": len(skipped), "skipped_names": skipped}


def vmm(rounds: Mapping[tuple[int, str], tuple[Sequence[float], Sequence[float], int]]) -> dict[str, Any]:
    """Microseconds per 2 MiB page of map and unmap, by handle size in MiB and way of calling.

    Args:
        rounds: ``(handle MiB, way) -> (map us per call, unmap us per call, bytes per call)``.  The first quarter of each is left
            out: it creates what a pool with retained handles keeps.
    """
    found: dict[str, Any] = {}
    for (handle_mib, way), (mapped, unmapped, size) in rounds.items():
        pages = size / PAGE_BYTES
        for what, values in (("map", mapped), ("unmap", unmapped)):
            later = [value / pages for value in values[len(values) // 4 :]]
            key = f"{what}_us_per_page_{handle_mib}mib_{way}"
            found[f"{key}_p50"], found[f"{key}_p99"] = percentile(later, 0.5), percentile(later, 0.99)
    return found


def handover(rounds: Sequence[tuple[float, float]], size: int) -> dict[str, Any]:
    """Memory from one process to another: ``(peer's unmap us, our map us)`` of each round, for ``size`` bytes."""
    per_gib = [(a + b) / 1e3 * GIB / size for a, b in rounds]
    return {
        "peer_unmap_ms_per_gib": percentile([a / 1e3 * GIB / size for a, _ in rounds], 0.5),
        "map_and_zero_ms_per_gib": percentile([b / 1e3 * GIB / size for _, b in rounds], 0.5),
        "usable_ms_per_gib_p50": percentile(per_gib, 0.5),
        "usable_ms_per_gib_max": max(per_gib),
        "moonshot_20_ms_per_gib_met": percentile(per_gib, 0.5) <= MOONSHOT_USABLE_MS_PER_GIB,
    }


def after_kill(seconds: Sequence[float]) -> dict[str, Any]:
    return {"free_after_kill_s_max": max(seconds), "limit_500_ms_met": max(seconds) <= FREE_LIMIT_S}


def lending(
    free_bytes: Mapping[str, int], lent_pages: int, seconds: Mapping[str, float], tokens: Mapping[str, Any]
) -> dict[str, Any]:
    """One engine that lent memory and took it back.

    Args:
        free_bytes: Of the device: ``before``, ``lent``, ``after``.
        seconds: ``lend`` and ``take_back``, from the wish to the last rank's word.
        tokens: Answers to the same requests: ``alone``, ``again`` (nothing was lent either time: the control), ``lend``, ``take_back``.
    """
    lent = lent_pages * PAGE_BYTES
    control = tokens["again"] == tokens["alone"]
    same = all(tokens[name] == tokens["alone"] for name in ("lend", "take_back"))
    return {
        "lent_pages": lent_pages,
        "free_rose_share": (free_bytes["lent"] - free_bytes["before"]) / lent if lent else None,
        "free_came_back_share": (free_bytes["lent"] - free_bytes["after"]) / lent if lent else None,
        "lend_s": seconds["lend"],
        "take_back_s": seconds["take_back"],
        "take_back_ms_per_gib": seconds["take_back"] * 1e3 * GIB / lent if lent else None,
        "control_same_tokens": control,
        "same_tokens": same if control else None,
        "distinct_answers": len({tuple(one) for one in tokens["alone"]}),
        "requests": len(tokens["alone"]),
    }


def updates(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Versions that an engine took over: the first is whole, the others are deltas.

    Args:
        rows: Of each: ``kind``, ``bytes_sent``, ``bytes_dense``, ``proved``, and its phases in seconds.
    """
    found: dict[str, Any] = {"versions": len(rows), "all_proved": all(row["proved"] for row in rows)}
    for name, chosen in (("whole", rows[:1]), ("delta", rows[1:])):
        for key in chosen[0] if chosen else ():
            if key.endswith("_s"):
                found[f"{name}_{key}"] = percentile([row[key] for row in chosen], 0.5)
        if chosen:
            found[f"{name}_bytes_sent"] = percentile([row["bytes_sent"] for row in chosen], 0.5)
            found[f"{name}_acknowledged_s_per_gb"] = (
                found[f"{name}_acknowledged_s"] / rows[0]["bytes_dense"] * 1e9
            )
    return found


def codec(
    name: str,
    size: int,
    num_bytes: int,
    num_changed: int,
    encode_s: float,
    apply_s: float,
    cpu_encode_s: float,
) -> dict[str, Any]:
    """One case of the codec's kernels; ``size`` elements of 2 bytes.

    ``encode_gb_s`` is of new weights, the way of the payload to the host included.
    """
    return {
        f"{name}_encode_gb_s": 2e-9 * size / encode_s,
        f"{name}_apply_gb_s": 2e-9 * size / apply_s,
        f"{name}_apply_changes_per_us": num_changed / apply_s / 1e6,
        f"{name}_cpu_encode_gb_s": 2e-9 * size / cpu_encode_s,
        f"{name}_payload_bits": 8 * num_bytes,
        f"{name}_over_2_31_bits": 8 * num_bytes > 2**31,
    }


def update_flop(shape: Shape, lengths: Iterable[tuple[int, int]]) -> float:
    """FLOP of the forward and backward pass of one update: what MFU counts, and no more.

    6 for each weight of a layer and token, and for each weight of the output layer and *sampled* token, which alone meet it; of attention
    ``6 * layers * heads * head_size * tokens**2`` a sequence, for a causal one needs half of its square.  What is computed twice (activation
    checkpointing) and the forward passes beside it (log-probs before the update, the guard's measure after it) take their time and are not counted.

    Args:
        lengths: Of each sequence: all tokens, sampled tokens.
    """
    attention = shape.num_layers * shape.num_heads * shape.head_size
    output = shape.vocab_size * shape.hidden_size
    return 6.0 * sum(
        shape.num_layer_parameters * tokens + output * sampled + attention * tokens**2
        for tokens, sampled in lengths
    )


def training(
    rows: Sequence[Mapping[str, Any]],
    shape: Shape,
    lengths: Sequence[tuple[int, int]],
    peak_flop_s: float | None,
) -> dict[str, Any]:
    """Steps of one update each, the first of which warms up, and the version after each; medians.

    Args:
        rows: Of each step: ``step_s``, ``publish_s``, ``bytes_sent``, and ``density``, the share of bf16 elements that changed.
        lengths: Of its batch, see :func:`update_flop`.
        peak_flop_s: Of the device; None: nobody knows it, and there is no MFU.
    """
    found: dict[str, Any] = {"first_step_s": rows[0]["step_s"], "steps": len(rows) - 1}
    if len(rows) == 1:
        return found
    middle = {
        key: percentile([row[key] for row in rows[1:]], 0.5)
        for key in ("step_s", "publish_s", "bytes_sent", "density")
    }
    flop_s = update_flop(shape, lengths) / middle["step_s"]
    found |= {
        "step_s": middle["step_s"],
        "tokens_per_s": sum(tokens for tokens, _ in lengths) / middle["step_s"],
        "tflop_s": flop_s / 1e12,
        "mfu": None if peak_flop_s is None else flop_s / peak_flop_s,
        "delta_publish_s": middle["publish_s"],
        "delta_bytes": middle["bytes_sent"],
        "delta_changed_fraction": middle["density"],
    }
    return found | ({"no_mfu": "the device's bf16 peak is not known here"} if peak_flop_s is None else {})


def activation(inactive_bytes: int, seconds: Sequence[float], left_bytes: int) -> dict[str, Any]:
    """A deployed engine that holds nothing: what it costs, from ``on`` to a first token, and what ``off`` leaves.

    Args:
        seconds: From ``on`` to a first token.  The first time stands apart: kernels that are made at their first use are in it.
    """
    first, *again = seconds
    found: dict[str, Any] = {
        "inactive_gib": inactive_bytes / GIB,
        "first_s": first,
        "activation_1_s_met_at_first": first <= MOONSHOT_ACTIVATION_S,
        "left_after_off_gib": left_bytes / GIB,
    }
    if again:
        found |= {
            "again_s_p50": percentile(again, 0.5),
            "again_s_max": max(again),
            "activation_1_s_met": max(again) <= MOONSHOT_ACTIVATION_S,
        }
    return found


def table_1(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The paper's table 1 from several repeats' summaries: the median of each figure, and their spread for the P99 ratios.

    Args:
        repeats: ``summary`` of ``coserving.analysis.analyse``, one per repeat.
    """
    if not repeats:
        return {}
    found: dict[str, Any] = {"repeats": len(repeats)}
    for key in repeats[0]:
        values = [one.get(key) for one in repeats]
        numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) == len(repeats):
            found[key] = percentile(numbers, 0.5)
            if key.startswith(("p99_ttft_ratio", "p99_itl_ratio", "aa_")):
                found[f"{key}_min"], found[f"{key}_max"] = min(numbers), max(numbers)
    ratios = [found[key] for key in ("p99_ttft_ratio", "p99_itl_ratio") if key in found]
    if len(ratios) == 2:
        found["p99_cost_under_5_percent"] = max(ratios) <= MOONSHOT_P99_RATIO
        found["better_than_the_papers_best"] = max(ratios) < PAPER_P99_RATIO[0]
    return found


def mps(arms: Mapping[str, Sequence[float]], survived: bool, free_s: float) -> dict[str, Any]:
    """A client beside another, and what its end by ``terminate_client`` with kernels in flight did to that other."""
    return {**steps(arms), "other_client_survived": survived, "free_after_kill_s": free_s}


def termination(*, listed: bool, left: bool, seconds: float, timed_out: bool) -> dict[str, Any]:
    """What was seen of a client's end: whether the daemon listed it, and did not any more before the kill.

    Args:
        seconds: That the program took which the guard runs; the guard kills after ``ProcSpec.before_kill_s``, done or not.
    """
    return {
        "client_was_listed": listed,
        "client_left_before_kill": left,
        "terminate_s": seconds,
        "terminate_timed_out": timed_out,
        "terminate_in_the_guards_time": not timed_out and seconds <= GUARD_S,
    }
