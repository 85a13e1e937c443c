#!/usr/bin/env python
"""Does the simulator predict live runs?   Calibrated on one workload, tested on others that it has not seen.

    python benchmarks/sim/sim_predict.py --calibrate A.json --test B=B.json --test C=C1.json,C2.json --json F [--trace CSV]

A, B and C are results of ``benchmarks/coserve.py`` (single runs, not pooled): two real engines on one core.  From A come
five numbers: a step of production (base, per prompt token, per decode), a step of rollouts, production's time outside
its steps, and the wait between two turns; with ``--policy-profile`` the rollout step is ``rose profile``'s instead.  They
are fixed then.  For B and C only the requests are read (when, how long), the same seconds are simulated, and the
figures compared: within 15 %, or within twice what the live figure varied by itself, whichever is more.  What prompts have in
common is part of the requests, and production's cache finds it by blocks of 128 tokens, as vLLM's does on CPU.  Machines
drift: ``NAME.own_speed`` is the same with every time scaled by one number, how fast rollouts alone were in that run over A.

``step_s`` is the time to sample 10,000 rollout tokens, the sampling part of an RL step of that size.  ``spread`` of a latency
is between the two arms of production alone, ``spread`` of a rate between rollouts alone before and after a run (0 where a
run has them once), and both between several files of one workload.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.coserving.plan import RETIMED, SOLO, Prefix, Timing, make_segments, retime  # noqa: E402
from benchmarks.coserving.rollouts import NUM_TURNS, OBSERVATION_TOKENS, OUTPUT_TOKENS, PROMPT_TOKENS  # noqa: E402
from benchmarks.coserving.world import POLICY_RECIPE, PRODUCTION_RECIPE  # noqa: E402
from benchmarks.lib.report import Report  # noqa: E402
from rose.coserve.step_profile import Profile, load_profile  # noqa: E402
from rose.errors import ConfigError, RoseError  # noqa: E402
from rose.evaluation.arrivals import Arrival, TrafficShape, load_trace  # noqa: E402
from rose.evaluation.statistics import percentile  # noqa: E402
from rose.sim.arrivals import Arrivals, Prefixes  # noqa: E402
from rose.sim.scenario import Scenario  # noqa: E402
from rose.sim.world import SimResult, simulate  # noqa: E402
from rose.units import PAGE_BYTES  # noqa: E402

NUM_TRAJECTORIES = 16
BLOCK_TOKENS = 128
"""vLLM's own choice where the device is a CPU."""
MAX_SEGMENTS = 64
MAX_SESSIONS = 1_000_000
REPEATS = 8
"""Times that a workload is simulated in one run, so that turns in flight at its end count for little."""
STEP_TOKENS = 10_000
ALLOWED = 0.15
RECLAIM = {"reclaim_deadline_s": 3.0}
"""As ``coserving/world.py`` sets it for the live node."""
SYSTEMS = {
    "idle": ("static", "priority"),
    "paper": ("paper", "priority"),
    "rose": ("rose", "priority"),
    "paper_serial": ("paper", "turns"),
    "rose_serial": ("rose", "turns"),
}
"""Arm of the live benchmark -> system of the simulator, and how its two engines share the core."""
ALONE = ("alone_1", "alone_2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """One run of ``coserve.py``: its requests by segment, and what each arm measured."""

    name: str
    settings: dict[str, Any]
    timing: Timing
    segments: tuple[tuple[Arrival, ...], ...]
    prefixes: tuple[tuple[Prefix, ...], ...]
    """What the prompts of each segment have in common."""
    samples: tuple[tuple[str, int, int, float, float, int, tuple[float, ...]], ...]
    """(arm, segment, request of the segment, TTFT s, end s, tokens, gaps s), failed requests left out."""
    blocks: tuple[dict[str, Any], ...]

    def total(self, arms: Sequence[str], counter: str) -> float:
        return sum(block["counters"][counter] for block in self.blocks if block["arm"] in arms)

    def rate(self, arms: Sequence[str], counter: str) -> float:
        return self.total(arms, counter) / self.total(arms, "seconds")


def read_live(path: Path, traces: Sequence[Path] = ()) -> Live:
    """Raises:
    ConfigError: Not a single run of ``coserve.py``, or its requests cannot be made again.
    """
    try:
        details = json.loads(path.read_text())["details"]
        settings, blocks, rows = details["settings"], details["blocks"], details["samples"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "pass the runs, not what --pool made of them"
        raise ConfigError(f"is not one run of coserve.py: {error}", field=str(path), fix=fix) from error
    timing = Timing(**details["timing"])
    run, workload = blocks[0]["run"], details["workload"]
    excerpt = None
    if workload not in ("generated", "multiturn"):
        found = [trace for trace in traces if trace.name == workload]
        if not found:
            raise ConfigError(f"was measured with {workload}", field=str(path), fix="--trace FILE")
        excerpt, workload = load_trace(found[0]), "trace"
    shape = TrafficShape(**settings["traffic"])
    seed = settings["seed"] + 1000 * run
    samples = [
        (arm, key // 10_000 - run * 1000, key % 10_000, ttft_s, end_s, tokens, tuple(gaps))
        for arm, key, ttft_s, end_s, tokens, _, error, gaps in rows
        if error is None
    ]
    # Runs of before do not say of how many segments their excerpt was: the lengths of its answers do.  And until 2026-11-23 each run of a
    # trace served its busiest stretch.
    told = details.get("stretch")
    first = 1 + max(sample[1] for sample in samples)
    counts = range(first, MAX_SEGMENTS) if told is None else [told["segments"]]
    rate = shape.mean_rate_hz
    if told is not None:
        shape = replace(shape, mean_rate_hz=told["rate"])
    for count, stretch in itertools.product(counts, sorted({run, 0}, reverse=True)):
        segments = make_segments(workload, shape, timing, count, seed, excerpt, stretch)
        if told is not None and rate != told["rate"] and workload in RETIMED:
            segments = retime(segments, timing, rate / told["rate"])
        if all(
            index < len(segments[segment]) and segments[segment][index][0].output_tokens == tokens
            for _, segment, index, _, _, tokens, _ in samples
        ):
            break
    else:
        raise ConfigError("its requests cannot be made again from its settings", field=str(path))
    measured = sorted({sample[1] for sample in samples})
    return Live(
        name=path.name,
        settings=settings,
        timing=timing,
        segments=tuple(tuple(one for one, _ in segments[number]) for number in measured),
        prefixes=tuple(tuple(prefix for _, prefix in segments[number]) for number in measured),
        samples=tuple((a, measured.index(s), *rest) for a, s, *rest in samples),  # pyright: ignore[reportArgumentType]
        blocks=tuple(blocks),
    )


# --- calibration


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    serving: Profile
    rollout: Profile
    frontend_s: float
    """From a request's moment to its first token, less its step."""
    between_turns_s: float


def _profile(model: str, base_s: float, prefill_s: float, decode_s: float, error: float, num: int) -> Profile:
    return Profile(
        model=model,
        base_s=base_s,
        prefill_token_s=prefill_s,
        decode_s=decode_s,
        context_token_s=0.0,
        mae_fraction=error,
        median_error_fraction=error,
        num_steps=num,
        num_held_out=0,
    )


def calibrate(live: Live, policy: Profile | None) -> Calibration:
    """Five numbers from production alone and rollouts alone."""
    gaps: list[tuple[float, float]] = []  # (requests that decode, seconds)
    firsts: list[tuple[float, float]] = []  # (prompt tokens, seconds)
    for arm in ALONE:
        for number, segment in enumerate(live.segments):
            spans = [
                (
                    segment[i].at_s,
                    segment[i].at_s + ttft,
                    segment[i].at_s + end,
                    segment[i].prompt_tokens,
                    seen,
                )
                for a, s, i, ttft, end, _, seen in live.samples
                if a == arm and s == number
            ]
            for at_s, first_s, _, prompt, seen in spans:
                others = [span for span in spans if span[0] != at_s]
                if not any(a < first_s and e > at_s for a, _, e, _, _ in others):
                    firsts.append((prompt, first_s - at_s))
                moment = first_s
                for gap in seen:
                    middle, moment = moment + gap / 2, moment + gap
                    if not any(a < moment and f > moment - gap for a, f, _, _, _ in others):
                        gaps.append((1 + sum(f < middle < e for _, f, e, _, _ in others), gap))
    decode_s, base_s = _line(gaps)
    prefill_s, first_s = _line(firsts)
    steps = live.total([SOLO], "steps")
    step_s = live.total([SOLO], "seconds") / steps
    per_step = live.total([SOLO], "decoded") / steps
    wait_s = OUTPUT_TOKENS * step_s * max(0.0, NUM_TRAJECTORIES / per_step - 1.0)
    predicted = np.array([base_s + decode_s * count for count, _ in gaps])
    error = float(np.mean(np.abs(predicted / np.array([gap for _, gap in gaps]) - 1.0)))
    return Calibration(
        serving=_profile("production", base_s, prefill_s, decode_s, error, len(gaps)),
        # One mix of prompt and sampled tokens was measured, so one coefficient is all it can give.
        rollout=policy or _profile("policy", step_s, 0.0, 0.0, 0.0, int(steps)),
        frontend_s=max(0.0, first_s - base_s),
        between_turns_s=wait_s,
    )


def at_speed(found: Calibration, factor: float) -> Calibration:
    """The same machine when it takes ``factor`` times as long for everything."""
    names = ("base_s", "prefill_token_s", "decode_s", "context_token_s")
    serving, rollout = (
        replace(profile, **{name: getattr(profile, name) * factor for name in names})
        for profile in (found.serving, found.rollout)
    )
    return Calibration(
        serving=serving,
        rollout=rollout,
        frontend_s=found.frontend_s * factor,
        between_turns_s=found.between_turns_s * factor,
    )


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, intercept), neither negative; the worst tenth is left out, then fitted again."""
    if len(points) < 5:
        raise ConfigError(f"only {len(points)} undisturbed requests or gaps", field="--calibrate")
    data = np.array(points, dtype=float)
    for _ in range(2):
        slope = 0.0
        if np.ptp(data[:, 0]) > 0:
            slope = max(0.0, float(np.polyfit(data[:, 0], data[:, 1], 1)[0]))
        intercept = max(1e-6, float(np.median(data[:, 1] - slope * data[:, 0])))
        wrong = np.abs(data[:, 1] - intercept - slope * data[:, 0])
        data = data[wrong <= np.quantile(wrong, 0.9)]
    return slope, intercept


# --- the same seconds, simulated


def scenario_of(live: Live, found: Calibration, folder: Path, duration_s: float) -> Scenario:
    """Two engines on one core; device and models described so that the memory is the live one's."""
    models = {"production": PRODUCTION_RECIPE, "policy": POLICY_RECIPE}
    # Weights are resident elsewhere: 1 byte of them, so that the pages are those of the KV cache.
    pages = live.settings["production"]["kv_cache_bytes"] / PAGE_BYTES
    for name, profile in (("production", found.serving), ("policy", found.rollout)):
        (folder / f"{name}.json").write_text(profile.to_json())
    return Scenario.model_validate(
        {
            "name": "live",
            "duration_s": duration_s,
            "trajectories_in_flight": NUM_TRAJECTORIES,
            "heartbeat_s": 0.5,
            "efficiency": {"overlap": 0.0},
            "devices": {
                "core": {"memory_gb": (pages + 0.5) * PAGE_BYTES / 1e9, "bandwidth_tb_s": 1, "tflops": 1}
            },
            "models": {
                name: {
                    "params_billion": 1e-9,
                    "layers": recipe.num_layers,
                    "heads": recipe.num_heads,
                    "kv_heads": recipe.num_kv_heads,
                    "head_dim": recipe.head_size,
                }
                for name, recipe in models.items()
            },
            "fleet": {
                "device": "core",
                "sharing": "priority",
                "dedicated": 0,
                "serving": 1,
                "trainers": 1,
                "memory_use": 1.0,
                "reserve_gb": 0.0,
            },
            "lending": RECLAIM,
            "serving": {
                "model": "production",
                "profile": folder / "production.json",
                "block_tokens": BLOCK_TOKENS,
                "slo_ttft_ms": live.settings["production"]["slo_ttft_s"] * 1e3,
                "slo_tpot_ms": live.settings["production"]["slo_tpot_s"] * 1e3,
            },
            "job": {
                "model": "policy",
                "profile": folder / "policy.json",
                "num_groups": 65536,  # no batch is ever complete: nobody trains
                "group_size": 1,
                "prompt_tokens": PROMPT_TOKENS,
                "turns_median": NUM_TURNS,
                "turns_log_std": 0.0,
                "output_median": OUTPUT_TOKENS,
                "output_log_std": 0.0,
                "output_max": OUTPUT_TOKENS,
                "observation_median": OBSERVATION_TOKENS,
                "observation_log_std": 0.0,
                "env_median_s": found.between_turns_s,
                "env_log_std": 0.0,
                "max_model_len": live.settings["rollout"]["max_model_len"],
            },
            "scheduler": {"cap_harvested": live.settings["rollout"]["max_num_seqs"]},
        }
    )


def arrivals_of(live: Live) -> tuple[Arrivals, float]:
    """Every segment in a block as the live one had it, ``REPEATS`` times over; and the seconds of all blocks.

    A block's prompts have nothing in common with those of another block: between two blocks of one arm lie one of each other
    arm, whose prompts are others and fill the cache.
    """
    block_s, lead_s = live.timing.block_s, live.timing.lead_s
    rows: list[tuple[float, int, int]] = []
    common: list[tuple[int, int, int, int]] = []
    for number in range(REPEATS * len(live.segments)):
        which = number % len(live.segments)
        for one, prefix in zip(live.segments[which], live.prefixes[which], strict=True):
            rows.append((number * block_s + lead_s + one.at_s, one.prompt_tokens, one.output_tokens))
            head = prefix.system_tokens + prefix.history_tokens
            conversation = number * MAX_SESSIONS + prefix.session if prefix.history_tokens else -1
            common.append((conversation, head, number if head else -1, prefix.system_tokens))
    columns = np.array(rows, dtype=float).reshape(-1, 3)
    conversation, repeated, group, shared = np.array(common, dtype=np.int64).reshape(-1, 4).T
    return (
        Arrivals(
            at_s=columns[:, 0],
            engine=np.zeros(len(rows), dtype=np.int64),
            prompt=columns[:, 1].astype(np.int64),
            output=columns[:, 2].astype(np.int64),
            prefixes=Prefixes(conversation=conversation, repeated=repeated, group=group, shared=shared),
        ),
        block_s * REPEATS * len(live.segments),
    )


def predict(live: Live, found: Calibration) -> dict[str, dict[str, float]]:
    """Figures of production alone and of every arm, as the live benchmark defines them."""
    arrivals, duration_s = arrivals_of(live)
    windows = REPEATS * len(live.segments)
    calm_s = windows * (live.timing.block_s - live.timing.traffic_s)
    with tempfile.TemporaryDirectory(prefix="rose-predict-") as folder:
        scenario = scenario_of(live, found, Path(folder), duration_s)
        nobody = Arrivals(
            at_s=arrivals.at_s[:0],
            engine=arrivals.engine[:0],
            prompt=arrivals.prompt[:0],
            output=arrivals.output[:0],
        )
        solo = simulate(scenario, "static", arrivals=nobody, asynchronous=True)
        solo_rate = _sampled(solo) / duration_s
        rows: dict[str, dict[str, float]] = {SOLO: {"tokens_per_s": solo_rate}}
        # Nobody else on the device: the same run with the engines apart.
        apart = scenario.model_copy(update={"fleet": scenario.fleet.model_copy(update={"dedicated": 1})})
        alone = simulate(apart, "fixed_async", arrivals=arrivals)
        busy = alone.busy["serving"] / (windows * live.timing.traffic_s)
        rows["alone"] = {**_latencies(alone, found.frontend_s), "busy_fraction": busy}
        if any(any(prefix.history_tokens for prefix in segment) for segment in live.prefixes):
            rows["cache"] = {"hit_rate": alone.counters.found / alone.counters.asked}
        for arm, (system, sharing) in SYSTEMS.items():
            if not any(block["arm"] == arm for block in live.blocks):
                continue
            fleet = scenario.fleet.model_copy(update={"sharing": sharing})
            shared = scenario.model_copy(update={"fleet": fleet})
            run = simulate(shared, system, arrivals=arrivals, asynchronous=True)
            rate = (_sampled(run) - solo_rate * calm_s) / (duration_s - calm_s)
            rows[arm] = {
                **_latencies(run, found.frontend_s),
                "harvested_share": rate / (solo_rate * (1.0 - busy)),
                "step_s": STEP_TOKENS / rate,
            }
    return rows


def _sampled(run: SimResult) -> float:
    return float(sum(run.counters.sampled.values()))


def _latencies(run: SimResult, frontend_s: float) -> dict[str, float]:
    ttft = [value + frontend_s for _, value in run.ttft_s]
    tpot = [value for _, value in run.tpot_s]
    return {
        "ttft_p50_ms": percentile(ttft, 0.5) * 1e3,
        "ttft_p99_ms": percentile(ttft, 0.99) * 1e3,
        "tpot_p50_ms": percentile(tpot, 0.5) * 1e3,
        "tpot_p99_ms": percentile(tpot, 0.99) * 1e3,
    }


# --- beside the live ones


def measured(live: Live) -> dict[str, dict[str, float]]:
    """What :func:`predict` predicts, as it was."""
    solo_rate = live.rate([SOLO], "decoded")
    busy = live.rate(ALONE, "serving_busy_s")
    rows = {SOLO: {"tokens_per_s": solo_rate}, "alone": {**_seen(live, ALONE), "busy_fraction": busy}}
    if live.total(ALONE, "prefix_hits"):
        rows["cache"] = {"hit_rate": _hit_rate(live, ALONE)}
    for arm in SYSTEMS:
        if any(block["arm"] == arm for block in live.blocks):
            rate = live.rate([arm], "decoded")
            rows[arm] = {
                **_seen(live, [arm]),
                "harvested_share": rate / (solo_rate * (1.0 - busy)),
                "step_s": STEP_TOKENS / rate,
            }
    return rows


def _hit_rate(live: Live, arms: Sequence[str]) -> float:
    return live.total(arms, "prefix_hits") / live.total(arms, "prefix_queries")


def _seen(live: Live, arms: Sequence[str]) -> dict[str, float]:
    chosen = [sample for sample in live.samples if sample[0] in arms]
    ttft = [sample[3] for sample in chosen]
    tpot = [(sample[4] - sample[3]) / (sample[5] - 1) for sample in chosen if sample[5] > 1]
    return {
        "ttft_p50_ms": percentile(ttft, 0.5) * 1e3,
        "ttft_p99_ms": percentile(ttft, 0.99) * 1e3,
        "tpot_p50_ms": percentile(tpot, 0.5) * 1e3,
        "tpot_p99_ms": percentile(tpot, 0.99) * 1e3,
    }


def own_spread(live: Live, figure: str) -> float:
    """By how much a live figure differs from itself, as a share of its mean."""
    if figure.startswith(("ttft", "tpot")):
        values = [_seen(live, [arm])[figure] for arm in ALONE]
    elif figure == "busy_fraction":
        values = [live.rate([arm], "serving_busy_s") for arm in ALONE]
    elif figure == "hit_rate":
        values = [_hit_rate(live, [arm]) for arm in ALONE]
    else:
        solo = [b["counters"] for b in live.blocks if b["arm"] == SOLO]
        values = [counters["decoded"] / counters["seconds"] for counters in solo]
    return (max(values) - min(values)) / (sum(values) / len(values))


def compare(
    name: str, lives: Sequence[Live], found: Sequence[Calibration], summary: dict[str, Any]
) -> dict[str, Any]:
    """One workload: simulated, live (mean of its runs), and whether it is within what is allowed.

    Args:
        found: The calibration to use for each of ``lives``.
    """
    simulated = [predict(live, one) for live, one in zip(lives, found, strict=True)]
    real = [measured(live) for live in lives]
    rows: dict[str, Any] = {}
    for arm in real[0]:
        for figure in real[0][arm]:
            values = [row[arm][figure] for row in real if arm in row]
            live_value = sum(values) / len(values)
            guess = sum(row[arm][figure] for row in simulated if arm in row) / len(values)
            spread = max(own_spread(live, figure) for live in lives)
            spread = max(spread, (max(values) - min(values)) / live_value)
            error = guess / live_value - 1.0
            key = f"{name}.{arm}.{figure}"
            rows[key] = {
                "live": round(live_value, 4),
                "simulated": round(guess, 4),
                "error": round(error, 4),
                "spread": round(spread, 4),
                "within": abs(error) <= max(ALLOWED, 2 * spread),
            }
            for part, value in rows[key].items():
                summary[f"{key}.{part}"] = value
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calibrate", type=Path, required=True, metavar="A.json")
    parser.add_argument("--test", action="append", required=True, metavar="NAME=FILE[,FILE]")
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        help="a trace that a run was measured with; repeatable",
    )
    parser.add_argument(
        "--policy-profile", type=Path, help="what `rose profile` measured of the policy engine"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = Report("sim_predict")
    try:
        base = read_live(args.calibrate, args.trace)
        found = calibrate(base, load_profile(args.policy_profile) if args.policy_profile else None)
        summary: dict[str, Any] = {
            "calibration.file": base.name,
            "calibration.serving_base_ms": round(found.serving.base_s * 1e3, 3),
            "calibration.serving_prefill_token_us": round(found.serving.prefill_token_s * 1e6, 2),
            "calibration.serving_decode_ms": round(found.serving.decode_s * 1e3, 3),
            "calibration.serving_gap_error": round(found.serving.mae_fraction, 4),
            "calibration.frontend_ms": round(found.frontend_s * 1e3, 2),
            "calibration.rollout_step_ms": round(found.rollout.base_s * 1e3, 3),
            "calibration.between_turns_ms": round(found.between_turns_s * 1e3, 2),
        }
        rows: dict[str, Any] = compare("A", [base], [found], {})
        tested: dict[str, Any] = {}
        own_speed: dict[str, Any] = {}
        for number, text in enumerate(args.test):
            report.progress("workloads", number, len(args.test))
            name, _, files = text.partition("=")
            lives = [read_live(Path(file), args.trace) for file in files.split(",")]
            tested.update(compare(name, lives, [found] * len(lives), summary))
            speeds = [base.rate([SOLO], "decoded") / live.rate([SOLO], "decoded") for live in lives]
            scaled = [at_speed(found, speed) for speed in speeds]
            own_speed.update(compare(f"{name}.own_speed", lives, scaled, summary))
            summary[f"{name}.own_speed.factor"] = round(sum(speeds) / len(speeds), 3)
    except RoseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for key, row in {**rows, **tested, **own_speed}.items():
        print(f"{key:40} live {row['live']:10.4g}  simulated {row['simulated']:10.4g}  {row['error']:+7.1%}  "
              f"spread {row['spread']:6.1%}  {'ok' if row['within'] else 'MISSED'}")  # fmt: skip
    for title, found_rows in (("figures", tested), ("own_speed_figures", own_speed)):
        summary[title] = len(found_rows)
        summary[f"{title}_within"] = sum(row["within"] for row in found_rows.values())
    tests = [
        text.partition("=")[0] + "=" + ",".join(Path(f).name for f in text.partition("=")[2].split(","))
        for text in args.test
    ]
    report.finish(
        summary,
        {"calibrated_on_itself": rows, "tested": tested, "own_speed": own_speed, "tests": tests},
        args.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
