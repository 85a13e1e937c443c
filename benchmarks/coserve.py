#!/usr/bin/env python
"""What sharing one core costs production, and what rollouts get from it, for every way to share it.

Two vLLM engines on one core: production under open-loop traffic, and a rollout engine that always has more to do than it
can.  The arms (see ``coserving/plan.py``) alternate in blocks of some ten seconds in one run of the same two
engines, because machines drift; every arm serves the same requests.  ``--quick`` is five arms and ends within
four minutes, eight with two engine cores; a long measurement is several runs, pooled::

    python benchmarks/coserve.py --quick --json out/coserve.json
    python benchmarks/coserve.py --segments 1 --run 0 --json out/c0.json     # all arms; then --run 1, 2, ...
    python benchmarks/coserve.py --workload burst --trace azure_llm_2023_code.csv --rate 0.08    # its busiest second, 26x the mean
    python benchmarks/coserve.py --workload tight --arms rose_serial,rose_serial_layers --segments 12 --rate 0.8    # docs/gpu.md
    python benchmarks/coserve.py --trace azure_llm_2023_code.csv --rate 0.4 --busy 0.65 --pairs 400 --run 1    # docs/evidence.md
    python benchmarks/coserve.py --engine lora --segments 6 --json out/lora.json    # production with adapters, drafts, windows, two engine cores
    python benchmarks/coserve.py --pool out/c0.json out/c1.json --json out/coserve.json --html out/coserve.html

What each kind of production (``--engine``: lora, sliding, ngram, dp2) shows is one run of each, written down before the first: ``--segments 14
--rate 0.9 --seed 21 --arms alone_1,alone_2,paper,rose``, some hundred pairs, judged by ``bar_met``; every run is kept.  A second one, written down
after the first three: ngram as it was, with nothing else on the engines' core; lora with ``--rate 0.2``, for a step with adapters takes four plain ones
on a CPU, and at 0.9 production alone was overloaded.

``--busy`` looks for the rate at which production alone is busy for that share of its time: up to three short stretches of it alone, on the run's own
traffic, the first at ``--rate`` (``coserving/busy.py``).  What it then was in the run is ``serving_busy_fraction``.

Latencies count from the scheduled moment of each request.  Ratios are to production alone in the same run, with
95 % bootstrap intervals over requests; ``aa_ratio`` is alone against itself, the noise.  ``harvested_share`` is
rollout tokens/s over (rollout tokens/s alone on that core x (1 - busy fraction of serving alone)), busy
time from step times; ``used_share``, which cannot exceed 1, is the rollout engine's CPU
seconds over those that production left in the same blocks.  Of ``--engine dp2`` the steps of two engine cores overlap on the one core:
there production's busy time is its CPU time, in which the spinning of cores that wait is counted: its harvested share is too high, also above 1.  Alone, production waits for its workers' messages as vLLM does; beside rollouts it parks (``compat.patch_spin``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks.coserving import busy, plot
from benchmarks.coserving.analysis import BlockRecord, analyse, busy_share, label, unanswered
from benchmarks.coserving.plan import (
    ALONE_1,
    ARMS,
    BURST_TRAFFIC_S,
    QUICK_ARMS,
    RETIMED,
    SOLO,
    SOLO_ARM,
    TIGHT_SHARE,
    USUAL_ARMS,
    WORKLOADS,
    Schedule,
    Segment,
    Timing,
    make_schedule,
    make_segments,
    retime,
)
from benchmarks.coserving.rollouts import Registry, Trajectories
from benchmarks.coserving.world import PORTS, VOCAB, BenchPlan, World, answered, delta, traffic_start_s
from benchmarks.lib.engine_kinds import KINDS, PLAIN
from benchmarks.lib.report import write
from rose.auth import Tokens
from rose.demo import programs
from rose.demo.demo_config import DemoConfig, ProductionSettings, RolloutEngineSettings, TrafficSettings
from rose.demo.supervisor import ProcessSupervisor
from rose.demo.ui import Stages
from rose.demo.workplace import Workplace
from rose.errors import ConfigError, RoseError
from rose.evaluation.arms import RequestLatency, read_records, to_samples
from rose.evaluation.arrivals import busiest_second_ratio, load_trace
from rose.shared_memory import SharedMemorySweep

SOLO_LEAD_S = 2.5
"""More than the lead of other blocks: until the whole loan has come."""
SOLO_PATIENCE_S = 4.0
"""Into a block of rollouts alone, for the last answers of the block before; without them it is left out."""
NUM_TRAJECTORIES = 16
KV_CACHE_BYTES = 192 * 2**20
"""Of each engine: 96 blocks.  As in a fleet, a burst that production serves alone does not fill its cache."""
SLO_TTFT_MS = 1000.0
QUICK_MINUTES = 3.5
"""For each engine core of production: on a loaded machine most of it is their start."""
MAX_LATE_S = 0.5
"""A block in which this process did not run for longer is no measurement of that arm."""


def main() -> int:
    args = _arguments()
    console = Console()
    try:
        result = _pool(args.pool) if args.pool else asyncio.run(_measure(args, Stages(console)))
    except RoseError as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 2
    except KeyboardInterrupt:
        return 130
    _show(console, result)
    write(args.json, "coserve", result["summary"], {k: v for k, v in result.items() if k != "summary"})
    if args.html:
        args.html.write_text(_page(result))
        console.print(f"{args.html}", highlight=False)
    console.print(f"{args.json}", highlight=False)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="coserve.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, default=Path("out/coserve.json"), help="where the result goes")
    add("--html", type=Path, help="also the Pareto page")
    add("--quick", action="store_true", help=f"only {', '.join(QUICK_ARMS)}, two segments")
    add("--arms", help=f"comma-separated, of {', '.join(ARMS)}")
    add("--engine", choices=KINDS, default=PLAIN, help="what production has switched on")
    add("--segments", type=int, default=1, help="stretches of traffic; each is served once by every arm")
    add("--workload", choices=WORKLOADS, default="generated")
    add("--trace", type=Path, help="Azure LLM inference trace (CSV); implies --workload trace unless burst")
    add("--rate", type=float, default=0.6, help="production requests per second, on average of a whole trace")
    add(
        "--busy",
        type=float,
        help="share of its time that production alone is to be busy: the rate that does it is looked for, from --rate on",
    )
    add("--pairs", type=int, help="as many segments as have so many requests, in place of --segments")
    add("--slo-ttft-ms", type=float, help="default 1000; tight: what its prompts take alone, over 0.87")
    add("--slo-tpot-ms", type=float, default=150.0)
    add("--seed", type=int, default=0)
    add(
        "--minutes",
        type=float,
        help="start no further block after this long, engines' start included (--quick: 3.5 for each engine core)",
    )
    add(
        "--run",
        type=int,
        default=0,
        help="number of this run in a pool: other traffic (of a trace: its run-th busiest stretch), other pairs",
    )
    add("--base-port", type=int, default=18570)
    add("--keep", action="store_true", help="keep the run's private directory")
    add("--pool", type=Path, nargs="+", help="do not measure: put results of several runs together")
    args = parser.parse_args()
    if args.trace and args.workload != "burst":
        args.workload = "trace"
    elif not args.trace and args.workload in ("trace", "burst"):
        parser.error(f"--workload {args.workload} needs --trace FILE")
    if args.busy is not None and not 0.05 <= args.busy <= 0.95:
        parser.error("--busy must be between 0.05 and 0.95")
    if args.busy is not None and KINDS[args.engine].num_cores > 1:
        parser.error(
            f"--busy: engine cores that wait by spinning look busy: leave it out with --engine {args.engine}"
        )
    if args.pairs is not None and args.pairs < 1:
        parser.error("--pairs must be 1 or more")
    given = args.arms.split(",") if args.arms else list(QUICK_ARMS if args.quick else USUAL_ARMS)
    unknown = set(given) - set(ARMS)
    if unknown:
        parser.error(f"unknown arms: {', '.join(sorted(unknown))}")
    # Alone twice is what everything else is measured against.
    args.arms = ["alone_1", "alone_2", *(arm for arm in given if not arm.startswith("alone"))]
    if args.quick:
        args.segments = max(args.segments, 2)
        args.minutes = args.minutes or QUICK_MINUTES * KINDS[args.engine].num_cores
    return args


async def _measure(args: argparse.Namespace, stages: Stages) -> dict[str, Any]:
    traffic_seed = args.seed + 1000 * args.run
    config = DemoConfig(
        seed=args.seed,
        base_port=args.base_port,
        traffic=TrafficSettings(
            mean_rate_hz=args.rate, output_median_tokens=12, output_max_tokens=48, prompt_max_tokens=400
        ),
        production=ProductionSettings(
            kv_cache_bytes=KV_CACHE_BYTES,
            slo_ttft_s=(args.slo_ttft_ms or SLO_TTFT_MS) / 1e3,
            slo_tpot_s=args.slo_tpot_ms / 1e3,
        ),
        rollout=RolloutEngineSettings(kv_cache_bytes=KV_CACHE_BYTES),
        out=args.json.parent / "coserve-logs",
        start_timeout_s=240.0 * KINDS[args.engine].num_cores,
    )
    timing = Timing(traffic_s=BURST_TRAFFIC_S) if args.workload == "burst" else Timing()
    rows = load_trace(args.trace) if args.trace else None

    def made(count: int, rate: float) -> Sequence[Segment]:
        shape = replace(config.shape(), mean_rate_hz=rate)
        return make_segments(args.workload, shape, timing, count, traffic_seed, rows, args.run)

    def whole(rate: float) -> Sequence[Segment]:
        return busy.enough(lambda n: made(n, rate), args.pairs) if args.pairs else made(args.segments, rate)

    stretch = segments = whole(args.rate)

    def traffic(rate: float) -> Sequence[Segment]:
        if rate == args.rate:
            return stretch
        return retime(stretch, timing, rate / args.rate) if args.workload in RETIMED else whole(rate)

    schedule = make_schedule(segments, args.arms, timing, args.run)
    if sum(map(len, segments)) < 2:
        raise ConfigError("the excerpt holds no traffic", field="--rate", fix="raise it")
    probes: list[dict[str, float]] = []
    with SharedMemorySweep(), Workplace(keep=args.keep) as workplace:
        Tokens.generate().save(workplace.path / programs.TOKEN_FILE)
        plan = BenchPlan(config=config, cores=config.cores(), root=workplace.path, logs=config.out / "logs")
        plan.kind = KINDS[args.engine]
        plan.prepare(schedule.arrivals)
        plan.write_traffic(schedule)
        with stages.stage("Making two models (once)"):
            plan.make_models()
        async with AsyncExitStack() as stack:
            ports = PORTS[0][: plan.kind.num_cores]
            registries = [await stack.enter_async_context(Registry(config.port(one))) for one in ports]
            supervisor = await stack.enter_async_context(ProcessSupervisor(lambda _, t: stages.note(t)))
            world = World(config, plan, *registries)
            with stages.stage("Starting both engines on one core"):
                await world.start(supervisor, lambda s: stages.update(f"{s:.0f} s"))
            os.sched_setaffinity(0, {config.cores()[1]})  # from here on core 0 is the engines' alone
            if args.workload == "tight" and args.slo_ttft_ms is None:
                ttft_s = await world.first_token_s(config.traffic.prompt_max_tokens) / TIGHT_SHARE
                await world.promise(ttft_s)
                production = config.production.model_copy(update={"slo_ttft_s": ttft_s})
                config = config.model_copy(update={"production": production})
                stages.note(f"first tokens are promised within {1e3 * ttft_s:.0f} ms")
            if args.busy is not None:
                rate = await _rate(args, world, supervisor, traffic, timing, stages, probes)
                shape = config.traffic.model_copy(update={"mean_rate_hz": rate})
                config = config.model_copy(update={"traffic": shape})
                segments = traffic(rate)
                schedule = make_schedule(segments, args.arms, timing, args.run)
                plan.write_traffic(schedule)
            rollouts = [
                await stack.enter_async_context(Trajectories(one, NUM_TRAJECTORIES, VOCAB, args.seed))
                for one in registries
            ]
            blocks = await _run(args, world, supervisor, schedule, stages)
            counts = {
                name: sum(getattr(one, name) for one in rollouts) for name in ("turns", "cut", "failed")
            }
        measured = {block.number for block in blocks}
        samples = label(to_samples(read_records(plan.records_path)), schedule, measured)
    details = {
        "workload": f"{args.trace.name}{', burst' * (args.workload == 'burst')}"
        if args.trace
        else args.workload,
        "busiest_second_ratio": _burst(args, config.traffic.mean_rate_hz, segments, timing),
        "engine": args.engine,
        "engine_args": list(plan.kind_args),
        "dtype": plan.dtype,
        "busy_wanted": args.busy,
        "rates_tried": probes,
        "stretch": {"rate": args.rate, "segments": len(stretch)},
        "settings": config.model_dump(mode="json", include={"seed", "traffic", "production", "rollout"}),
        "timing": asdict(timing),
        "rollouts": counts,
        "unanswered": unanswered(samples, schedule, measured),
        "arms_measured": args.arms,
        "samples": [_pack(sample) for sample in samples],
        "blocks": [asdict(block) for block in blocks],
    }
    found = analyse(samples, blocks, config.slo(), args.arms, unanswered_by_arm=details["unanswered"])
    return {**found, **details}


def _burst(args: argparse.Namespace, rate: float, segments: Any, timing: Timing) -> float | None:
    """Requests in the busiest second over the mean: of all traffic served, or of the trace that the burst is from."""
    if args.workload == "burst":
        seconds = [[int(a.at_s) for a, _ in segment] for segment in segments]
        return statistics.fmean(max(map(found.count, found)) for found in seconds) / rate
    moved = [
        type(a)(at_s=number * timing.traffic_s + a.at_s, prompt_tokens=1, output_tokens=1)
        for number, segment in enumerate(segments)
        for a, _ in segment
    ]
    return busiest_second_ratio(moved, len(segments) * timing.traffic_s) if moved else None


async def _rate(
    args: argparse.Namespace,
    world: World,
    supervisor: ProcessSupervisor,
    traffic: Callable[[float], Sequence[Segment]],
    timing: Timing,
    stages: Stages,
    probes: list[dict[str, float]],
) -> float:
    """Requests per second at which production alone is as busy as is wanted; what was tried goes to ``probes``."""
    rate = args.rate
    for number in range(busy.MOST_PROBES):
        tried = busy.spread(traffic(rate))
        schedule = make_schedule(tried, [ALONE_1], timing, args.run, solo=False)
        world.plan.write_traffic(schedule, probe=number + 1)
        blocks = await _run(
            argparse.Namespace(minutes=None, run=args.run), world, supervisor, schedule, stages
        )
        world.plan.records_path.unlink()
        found = busy_share(blocks) or 0.0
        probes.append({"rate": rate, "busy": found})
        stages.note(f"at {rate:.3g} requests per second production alone is {100 * found:.0f} % busy")
        if abs(found - args.busy) <= busy.CLOSE:
            return rate
        measured = [tried[block.segment] for block in blocks]
        rate = busy.next_rate(traffic, timing, rate, busy.fit(measured, timing, found), args.busy)
    stages.note(f"{rate:.3g} requests per second are served")
    return rate


async def _run(
    args: argparse.Namespace, world: World, supervisor: ProcessSupervisor, schedule: Schedule, stages: Stages
) -> list[BlockRecord]:
    """Every block in its turn; the counters of each."""
    blocks: list[BlockRecord] = []
    timing = schedule.timing
    with stages.stage(f"{len(schedule.blocks)} blocks of {timing.block_s:.0f} s"):
        await supervisor.start(world.plan.traffic())
        zero_s = await traffic_start_s(world.plan.records_path)
        passed = len(schedule.blocks)
        for number, block in enumerate(schedule.blocks):
            stages.update(f"{number + 1} of {len(schedule.blocks)}: {block.arm}")
            if args.minutes and stages.elapsed_s() > 60.0 * args.minutes:
                stages.note(f"time is up: {number} of {len(schedule.blocks)} blocks have passed")
                passed = number
                break
            start_s = zero_s + block.start_s
            lead_s = timing.lead_s
            late_s = [await _until(start_s)]
            if block.arm == SOLO:
                # Rollouts have all the memory then: who is still being answered would wait for as long, as a request of that other arm.
                begun_s = start_s + lead_s
                if await answered(world.plan.records_path, block.first, SOLO_PATIENCE_S) < block.first:
                    stages.note(f"block {number + 1} is left out: production had not answered")
                    continue
                lead_s += SOLO_LEAD_S + max(0.0, time.monotonic() - begun_s)
                await world.enter(SOLO_ARM)
            else:
                await world.enter(ARMS[block.arm])
            late_s.append(await _until(start_s + lead_s))
            before = await world.read()
            late_s.append(await _until(start_s + timing.lead_s + timing.traffic_s))
            counters = delta(before, await world.read())
            if max(late_s) > MAX_LATE_S:
                stages.note(f"block {number + 1} is left out: this process was {max(late_s):.1f} s late")
                continue
            blocks.append(
                BlockRecord(
                    arm=block.arm, segment=block.segment, run=args.run, number=number, counters=counters
                )
            )
        # What is in flight when the sender ends has no record, and the slowest requests are what is asked about.
        await _until(zero_s + passed * timing.block_s)
        await world.enter(ARMS[ALONE_1])  # no request waits for rollouts that nobody measures
        await answered(world.plan.records_path, schedule.num_requests(passed))
        await supervisor.stop("traffic")
    if not blocks:
        raise ConfigError(
            "no block was measured: time was up, or this machine late", field="--minutes", fix="raise it"
        )
    return blocks


async def _until(at_s: float) -> float:
    """Sleep until then; how late we are."""
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))
    return time.monotonic() - at_s


def _pack(sample: RequestLatency) -> list[Any]:
    gaps = [round(gap, 5) for gap in sample.itl_s]
    return [
        sample.phase, sample.index, round(sample.ttft_s, 5), round(sample.end_s, 5), sample.num_tokens,
        round(sample.late_s, 5), sample.error, gaps,
    ]  # fmt: skip


def _unpack(row: list[Any]) -> RequestLatency:
    phase, index, ttft_s, end_s, num_tokens, late_s, error, gaps = row
    return RequestLatency(
        index=index, phase=phase, at_s=0.0, ttft_s=ttft_s, end_s=end_s, itl_s=tuple(gaps),
        num_tokens=num_tokens, late_s=late_s, error=error,
    )  # fmt: skip


def _pool(paths: list[Path]) -> dict[str, Any]:
    """Several runs as one.  Their pairs and settings must not contradict each other."""
    documents = [json.loads(path.read_text()) for path in paths]
    documents = [{**d["details"], "machine": d["machine"]} for d in documents]
    slos = {
        (d["settings"]["production"]["slo_ttft_s"], d["settings"]["production"]["slo_tpot_s"])
        for d in documents
    }
    runs = [d["blocks"][0]["run"] for d in documents]
    tight = all(d["workload"] == "tight" for d in documents)  # each has a limit of its own
    if (len(slos) != 1 and not tight) or len(set(runs)) != len(runs):
        raise ConfigError("runs of different objectives, or the same --run twice", field="--pool")
    engines = {
        (d.get("engine", PLAIN), d.get("dtype", "bfloat16")) for d in documents
    }  # runs of before knew one
    if len(engines) != 1:
        raise ConfigError(f"runs of different engines: {sorted(engines)}", field="--pool")
    ((engine, dtype),) = engines
    samples = [_unpack(row) for d in documents for row in d["samples"]]
    blocks = [BlockRecord(**block) for d in documents for block in d["blocks"]]
    arms = [a for a in ARMS if all(a in d["arms_measured"] for d in documents)]
    settings = DemoConfig.model_validate({"production": documents[0]["settings"]["production"]})
    lost = dict(sum((Counter(d.get("unanswered", {})) for d in documents), Counter[str]()))
    return {
        **analyse(samples, blocks, settings.slo(), arms, _promised(documents), lost),
        **{key: documents[0][key] for key in ("settings", "timing")},
        "workload": sorted({d["workload"] for d in documents}),
        "engine": engine,
        "dtype": dtype,
        "unanswered": lost,
        "busiest_second_ratio": max(d["busiest_second_ratio"] for d in documents),
        "arms_measured": arms,
        "runs": [d["machine"] for d in documents],
    }


def _promised(documents: list[dict[str, Any]]) -> dict[int, float]:
    """First tokens of each run, by its number."""
    return {d["blocks"][0]["run"]: d["settings"]["production"]["slo_ttft_s"] for d in documents}


def _rows(result: dict[str, Any]) -> list[list[str]]:
    head = [
        "arm", "n", "TTFT p50 ms", "p99 ms", "ratio p99", "ITL p99 ms", "ratio p99", "stall max ms", "TPOT p99 ms",
        "viol. added", "tokens/s", "harvested", "hits", "cuts", "kills",
    ]  # fmt: skip
    rows = [head]

    def ratio(found: dict[str, float] | None) -> str:
        return "-" if found is None else f"{found['value']:.2f} ({found['low']:.2f}-{found['high']:.2f})"

    for arm, row in result["arms"].items():
        rows.append(
            [
                ARMS[arm].label,
                str(row["num_requests"]),
                plot.cell(row["ttft_p50_s"], 0, 1e3),
                plot.cell(row["ttft_p99_s"], 0, 1e3),
                ratio(row["ttft_p99_ratio"]) if arm != "alone_1" else "1",
                plot.cell(row["itl_p99_s"], 0, 1e3),
                ratio(row["itl_p99_ratio"]) if arm != "alone_1" else "1",
                plot.cell(row["stall_max_s"], 0, 1e3),
                plot.cell(row["tpot_p99_s"], 0, 1e3),
                plot.cell(row["extra_violations"], 1),
                plot.cell(row["rollout_tokens_per_s"], 0),
                plot.cell(row["harvested_share"], 0, 100, " %") + _span(row.get("harvested_interval")),
                plot.cell(row["hit_rate"], 0, 100, " %"),
                plot.cell(row["cut_requests"], 0),
                plot.cell(row["engine_kills"], 0),
            ]
        )
    return rows


def _span(interval: list[float] | None) -> str:
    return "" if interval is None else f" ({100 * interval[0]:.0f}-{100 * interval[1]:.0f})"


def _notes(result: dict[str, Any]) -> list[str]:
    s = result["summary"]
    burst = result["busiest_second_ratio"]
    notes = _tight_notes(result)
    return [
        f"Production: {result['engine']}, {result['dtype']}.",
        f"Workload {result['workload']}, busiest second {plot.cell(burst, 1)}x the mean; {s['num_pairs']} pairs. "
        f"Serving alone is {plot.cell(s['serving_busy_fraction'], 0, 100)} % busy, others take {plot.cell(s['others_share'], 0, 100)} % of the core, its mean step "
        f"{plot.cell(s['serving_step_ms'], 1)} ms; violations alone {plot.cell(s['violations_alone'], 1)}; rollouts "
        f"alone {plot.cell(s['solo_rollout_tokens_per_s'], 0)} tokens/s.",
        f"Bar: P99 ratios' upper bounds within the noise or 1.05, no added violation, 85 % harvested: "
        f"{'met' if s.get('bar_met') else 'not met'}.",
        *[
            f"Without an answer that was seen: {n} requests of {arm}."
            for arm, n in result["unanswered"].items()
        ],
        *notes,
    ]


def _tight_notes(result: dict[str, Any]) -> list[str]:
    s, rows = result["summary"], result["arms"]
    if "stop_bar_met" not in s:
        return []
    missed = ", ".join(f"{arm} {row['tight_misses']}" for arm, row in rows.items())
    stopped = rows["rose_serial_layers"]
    return [
        f"Prompts over 80 % of their limit alone: {s['tight_requests']}; late: {missed}.",
        f"Steps stopped at layers {plot.cell(stopped['stops'], 0)} times, {plot.cell(stopped['stops_late_ms'], 2)} ms behind production's "
        f"word, {plot.cell(s['stops_quick_share'], 0, 100)} % within 2 ms; rollout tokens/s with them over without "
        f"{plot.cell(s['stop_rollout_tokens_ratio'], 2)}. Bar (docs/gpu.md): "
        f"{ {True: 'met', False: 'not met', None: 'too few misses without to tell'}[s['stop_bar_met']] }.",
    ]


def _show(console: Console, result: dict[str, Any]) -> None:
    head, *rows = _rows(result)
    table = Table(show_edge=False, pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=max(200, console.width)).print(table)
    for note in _notes(result):
        console.print(note, highlight=False, markup=False)


def _page(result: dict[str, Any]) -> str:
    labels = {name: arm.label for name, arm in ARMS.items()}
    return plot.page(result, labels, _notes(result), _rows(result))


if __name__ == "__main__":
    sys.exit(main())
