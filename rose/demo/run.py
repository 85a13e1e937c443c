"""``rose demo``: start everything, train, and switch harvesting off and on in blocks of equal traffic all the while; report.

Main path (:func:`_measure`): programs up -> harvesting off -> RL job starts -> pairs of blocks, one without and one with harvesting,
each a period of the same traffic -> harvesting on until the job is done -> harvesting off -> report.  Every second pair begins with
harvesting (off on, on off, ...), so that what changes in the course of the job does not favour either.  Production traffic runs
from the moment production is up.  This file orders and waits; what each program is stands in :mod:`rose.demo.programs`.

Guarantees: every process that it started has ended and its private directory is gone when
:func:`run_demo` returns, whether the run succeeded, failed, or was interrupted.  What had been measured by then is
reported, marked as cut short.

Exit codes: 0 complete; 1 a program failed; 2 cannot run here (raised as ConfigError); 130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape

from rose.auth import Tokens, bearer
from rose.demo import programs
from rose.demo.demo_config import DemoConfig
from rose.demo.observe import Observer
from rose.demo.preflight import check_facts, gather_facts
from rose.demo.report import write_report
from rose.demo.result import (
    ALONE_1,
    ALONE_2,
    ARMS,
    REST,
    SHARED,
    SWITCH,
    DemoResult,
    MeasuredBlock,
    ProductionLatency,
    TrafficPhase,
)
from rose.demo.resumed import ResumedTurns
from rose.demo.supervisor import ProcessSupervisor
from rose.demo.traffic import write_phase
from rose.demo.ui import Stages, summary_table
from rose.demo.workplace import Workplace, default_parent
from rose.errors import EngineError, RoseError, RunInterrupted
from rose.evaluation.arms import Ratio, RequestLatency, arm_stats, ratio, read_records, to_samples
from rose.evaluation.arrivals import (
    Arrival,
    busiest_second_ratio,
    fit_trace,
    generate_arrivals,
    load_trace,
)
from rose.node_client import ControlClient
from rose.shared_memory import SharedMemorySweep
from rose.units import format_bytes
from rose.wire.http_client import ask, open_client

EXIT_COMPLETE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
SAMPLE_EVERY_S = 0.5
MAX_STATUS_BYTES = 16 * 2**20
NODE_EVERY_S = 2.0
STARTUP, END = "startup", "end"
MAX_ERROR_EXAMPLES = 5


@dataclass(kw_only=True, slots=True)
class Run:
    """What one run holds while it runs."""

    config: DemoConfig
    plan: programs.DemoPlan
    observer: Observer
    stages: Stages
    supervisor: ProcessSupervisor
    arrivals: list[Arrival]
    marks: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    """``(phase, CLOCK_MONOTONIC)`` of each phase's beginning; the last one has no end yet."""
    report: Callable[[str, str], None]
    started_s: float
    """CLOCK_MONOTONIC when the models were there."""
    num_job_restarts: int = 0
    harvesting: bool = False
    resumed: ResumedTurns = field(default_factory=ResumedTurns)


def run_demo(config: DemoConfig) -> int:
    """Run the whole demo; the exit code.

    Raises:
        ConfigError: This machine cannot run it, or a setting is wrong; nothing was started.
    """
    console = Console()
    parent = config.run_directory or default_parent()
    arrivals = _arrivals(config)  # first: a bad trace is wrong on every machine
    check_facts(gather_facts(config.ports(), parent))
    cores = config.cores()
    stages = Stages(console)
    with SharedMemorySweep(), Workplace(parent, keep=config.keep_run_directory) as workplace:
        Tokens.generate().save(workplace.path / programs.TOKEN_FILE)
        plan = programs.DemoPlan(config=config, cores=cores, root=workplace.path, logs=config.out / "logs")
        return asyncio.run(_supervise(config, plan, stages, arrivals))


async def _supervise(
    config: DemoConfig, plan: programs.DemoPlan, stages: Stages, arrivals: list[Arrival]
) -> int:
    """Run, clean up, then report: in this order, so that a report never delays the end of a process."""
    observer = Observer(
        start_s=stages.started_s,
        node_dir=plan.node_dir,
        records_path=plan.records_path,
        steps_path=plan.steps_path,
    )

    def report(kind: str, text: str) -> None:
        observer.note(time.monotonic(), kind, text)
        stages.note(f"[yellow]{escape(text)}[/yellow]")

    code, run = EXIT_COMPLETE, None
    try:
        with _interruptible(stages):
            async with ProcessSupervisor(report) as supervisor:
                run = Run(
                    config=config,
                    plan=plan,
                    observer=observer,
                    stages=stages,
                    supervisor=supervisor,
                    arrivals=arrivals,
                    report=report,
                    started_s=stages.started_s,
                )
                plan.prepare(arrivals)
                await supervisor.guarded(_observed(run, _measure(run)))
    except asyncio.CancelledError:
        code = EXIT_INTERRUPTED
        stages.note("[yellow]interrupted; everything is stopped[/yellow]")
    except RoseError as error:
        code = EXIT_FAILED
        stages.note(f"[bold red]error:[/bold red] [red]{escape(str(error))}[/red]")
        stages.note(f"logs: {escape(str(plan.logs))}")
    try:
        if (kept := plan.keep_decisions()) is not None:
            stages.note(
                f"every decision: {escape(str(kept))}; `rose replay` feeds them to the policies again"
            )
    except OSError as error:
        stages.note(f"[yellow]the decisions of this run are lost: {escape(str(error))}[/yellow]")
    if run is not None and run.marks:
        observer.sample(time.monotonic())
        result = _result(run, complete=code == EXIT_COMPLETE)
        json_path, html_path = write_report(result, config.out)
        stages.console.print()
        stages.console.print(summary_table(result))
        stages.console.print(f"\n{json_path}\n{html_path}", highlight=False, markup=False)
    return code


class _interruptible:
    """SIGINT and SIGTERM cancel the current task, once; later ones are told to be patient."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._seen = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, task)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _stop(self, task: asyncio.Task[Any] | None) -> None:
        self._stages.note("stopping ..." if not self._seen else "still stopping, a few seconds ...")
        if not self._seen and task is not None:
            task.cancel()
        self._seen = True


async def _observed(run: Run, work: Awaitable[None]) -> None:
    """Do ``work`` while the observer samples."""

    tokens = Tokens.load(run.plan.root / programs.TOKEN_FILE)

    async def sample() -> None:
        url = f"{run.config.url('scheduler')}/status"
        async with open_client(bearer(tokens.environment)) as client:
            while True:
                run.observer.sample(time.monotonic())
                # Absent while it starts or restarts: the next sample has it.
                with suppress(EngineError, ValueError):
                    answer = await ask(
                        client, "GET", url, timeout_s=2.0, max_bytes=MAX_STATUS_BYTES, field="scheduler"
                    )
                    status = json.loads(answer.body)
                    if answer.status == 200 and isinstance(status, dict):
                        run.observer.see_status(time.monotonic(), status)
                await asyncio.sleep(SAMPLE_EVERY_S)

    async def ask_node() -> None:
        node = ControlClient(run.plan.node_dir, tokens)
        try:
            while True:
                with suppress(RoseError):  # not there yet, or starting again
                    run.observer.see_node(await asyncio.to_thread(node.status))
                await asyncio.sleep(NODE_EVERY_S)
        finally:
            node.close()

    watching = [
        asyncio.create_task(sample()),
        asyncio.create_task(ask_node()),
        asyncio.create_task(run.resumed.watch(run.config.url("scheduler"), tokens.environment)),
    ]
    try:
        await work
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def _measure(run: Run) -> None:
    """The main path."""
    config, plan, stages, supervisor = run.config, run.plan, run.stages, run.supervisor
    with stages.stage("Making two tiny models (once)"):
        await supervisor.start(plan.models())
        if await supervisor.wait_end("models", config.start_timeout_s) != 0:
            raise EngineError(f"failed: {supervisor.log_tail('models')}", field="models")
        plan.find_models()
    # The models are made once: a run takes from here.
    run.started_s = time.monotonic()
    run.observer.start(run.started_s)
    run.marks.append((STARTUP, run.started_s))
    with stages.stage("Starting relay, scheduler, production and the dedicated engine"):
        await supervisor.start(plan.relay())
        await supervisor.start(plan.scheduler())
        # Production has core 0 and the dedicated engine core 1: together they take as long as one.
        await _together(
            _start_production(run),
            supervisor.start(plan.dedicated()),
        )
    with stages.stage("Starting the harvested engine beside production, under traffic"):
        await supervisor.start(plan.harvested(), lambda s: stages.update(f"{s:.0f} s"))
        await _node(run, "off")
    await _start_job(run)
    for number, harvesting in enumerate(block_order(config.num_pairs), start=1):
        with stages.stage(
            f"Block {number} of {2 * config.num_pairs}, harvesting {'on' if harvesting else 'off'}"
        ):
            if not await _block(run, number, harvesting):
                stages.note("the job is done before the last block")
                break
    with stages.stage("Harvesting on, to the end of the job"):
        await _switch(run, True)
        await _enter(run, REST, restart=True)
        await _job_end(run)
        run.marks.append((END, time.monotonic()))
    with stages.stage("Stopping"):
        await supervisor.stop("traffic")
        await _node(run, "off")


def block_order(num_pairs: int) -> list[bool]:
    """Harvesting in each block: off on, on off, off on, ..."""
    return [harvesting for pair in range(num_pairs) for harvesting in (pair % 2 == 1, pair % 2 == 0)]


async def _block(run: Run, number: int, harvesting: bool) -> bool:
    """One period of traffic with harvesting on or off; False when the job ended before it did."""
    # Blocks without harvesting take turns in two arms that differ in nothing: ALONE_1, ALONE_2, ALONE_2, ALONE_1, ...
    arm = SHARED if harvesting else (ALONE_1, ALONE_2)[(number // 2 + number // 4) % 2]
    if harvesting != run.harvesting:
        await _switch(run, harvesting)
        await _enter(run, arm, restart=True)
    else:
        await _enter(run, arm)
    end_s = run.marks[-1][1] + run.config.traffic.period_s
    while time.monotonic() < end_s - SAMPLE_EVERY_S:
        if not await _job_runs(run):
            return False
        _show_progress(run)
        await asyncio.sleep(SAMPLE_EVERY_S)
    return True


async def _switch(run: Run, harvesting: bool) -> None:
    """Let the running period of traffic end, then turn harvesting on or off under the next, which is not measured."""
    if harvesting == run.harvesting:
        return
    if run.marks[-1][0] != STARTUP:
        await _enter(run, SWITCH)
    await _node(run, "on" if harvesting else "off")
    run.harvesting = harvesting


async def _start_production(run: Run) -> None:
    await run.supervisor.start(run.plan.production())
    write_phase(run.plan.phase_path, STARTUP)
    await run.supervisor.start(run.plan.traffic())


async def _start_job(run: Run) -> None:
    with run.stages.stage("Starting the RL job (Ray)"):
        await run.supervisor.start(run.plan.train())
        await _until(
            run,
            lambda: any(count.num_turns for count in run.observer.tier_totals().values()),
            run.config.start_timeout_s,
            "the RL job has not made a single turn",
        )


async def _job_end(run: Run) -> None:
    """Wait for the job's end, showing its progress."""
    deadline_s = time.monotonic() + run.config.train_timeout_s
    while await _job_runs(run):
        if time.monotonic() > deadline_s:
            if (
                run.observer.steps
            ):  # every block has been measured by now; a slow machine learns on for too long
                run.stages.note(
                    f"the job had {run.config.train_timeout_s:.0f} s more, and is stopped where it is"
                )
                return
            raise EngineError(f"not done after {run.config.train_timeout_s:.0f} s", field="train")
        _show_progress(run)
        await asyncio.sleep(SAMPLE_EVERY_S)


def _show_progress(run: Run) -> None:
    steps = run.observer.steps
    last = f", success {steps[-1].success_rate:.0%}" if steps else ""
    run.stages.update(
        f"RL step {len(steps)} of {run.config.steps}{last}; {run.observer.num_requests} production requests"
    )


async def _job_runs(run: Run) -> bool:
    """False once it has done its steps.  A job that was killed goes on from its checkpoint.

    Raises:
        EngineError: It failed by itself, or was killed too often.
    """
    code = run.supervisor.returncode("train")
    if code is None or code == 0:
        return code is None
    if (code <= 128 and code != RunInterrupted.exit_code) or run.num_job_restarts >= programs.RESTARTS:
        raise EngineError(f"ended with {code}, see {run.plan.logs / 'train.log'}", field="train")
    run.num_job_restarts += 1
    how = f"was killed by signal {code - 128}" if code > 128 else "lost its Ray cluster"
    run.report("kill", f"train {how}")
    await run.supervisor.start(run.plan.train())
    run.report("restart", "train was started again, from its last checkpoint")
    return True


async def _enter(run: Run, phase: str, *, restart: bool = False) -> None:
    """Tell the sender, and wait until a period of that phase has begun."""
    write_phase(run.plan.phase_path, phase, restart=restart)
    seen = len(run.observer.cycles)

    def begun() -> bool:
        return any(name == phase for name, _ in run.observer.cycles[seen:])

    await _until(run, begun, 2 * run.config.traffic.period_s + 30, f"traffic does not enter phase '{phase}'")
    run.marks.append((phase, next(at_s for name, at_s in run.observer.cycles[seen:] if name == phase)))


async def _node(run: Run, command: str) -> None:
    """``rose node on|off`` on the harvested host, as an operator would; its own answer is the proof."""
    program = run.plan.node_command(command)
    await run.supervisor.start(program)
    if await run.supervisor.wait_end(program.spec.name, program.timeout_s) != 0:
        raise EngineError(
            f"failed: {run.supervisor.log_tail(program.spec.name)}", field=f"rose node {command}"
        )


async def _until(run: Run, condition: Callable[[], bool], timeout_s: float, failure: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if "train" in run.supervisor.names():
            await _job_runs(run)
        if time.monotonic() > deadline_s:
            raise EngineError(f"{failure} within {timeout_s:.0f} s", field="demo")
        await asyncio.sleep(0.2)


async def _together(*work: Awaitable[Any]) -> None:
    """All of it, or the first failure (plain, not in a group: the reader wants one line)."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---------------------------------------------------------------- the result


def _arrivals(config: DemoConfig) -> list[Arrival]:
    if config.trace is None:
        return generate_arrivals(config.shape(), config.seed)
    return fit_trace(load_trace(config.trace), config.shape())


def _result(run: Run, *, complete: bool) -> DemoResult:
    config, observer = run.config, run.observer
    now_s = time.monotonic()
    ends = [at_s for _, at_s in run.marks[1:]] + [now_s]
    phases = [
        TrafficPhase(name=name, start_s=observer.at(start_s), end_s=observer.at(end_s))
        for (name, start_s), end_s in zip(run.marks, ends, strict=True)
        if name != END
    ]
    samples = to_samples(read_records(run.plan.records_path)) if run.plan.records_path.exists() else []
    blocks = blocks_of(phases, observer, config.traffic.period_s)
    with_traffic = [phase for phase in phases if phase.name != STARTUP]
    failed = [sample for sample in samples if sample.error is not None]
    return DemoResult(
        seed=config.seed,
        complete=complete,
        seconds_total=now_s - run.started_s,
        traffic_source=str(config.trace) if config.trace else f"generator, seed {config.seed}",
        busiest_second_ratio=busiest_second_ratio(run.arrivals, config.traffic.period_s),
        phases=phases,
        latency=_latency(config, samples),
        production_requests=len(samples),
        production_errors=len(failed),
        error_examples=[
            f"{one.phase}, request {one.index}: {one.error}" for one in failed[:MAX_ERROR_EXAMPLES]
        ],
        steps=observer.steps,
        tiers=observer.tiers_between(with_traffic[0].start_s, with_traffic[-1].end_s) if with_traffic else {},
        blocks=blocks,
        resumed=run.resumed.found,
        longest_resumed=run.resumed.best,
        reclaim=observer.reclaim(),
        events=observer.events,
        curves=observer.curves(),
        machine=_machine(),
        settings=_settings(run),
    )


def blocks_of(phases: Sequence[TrafficPhase], observer: Observer, period_s: float) -> list[MeasuredBlock]:
    """The measured blocks that were whole, and during which the job ran to the end."""
    done_s = max((step.end_s for step in observer.steps), default=0.0)
    return [
        MeasuredBlock(
            harvesting=phase.name == SHARED,
            start_s=phase.start_s,
            end_s=phase.start_s + period_s,
            num_steps=observer.steps_between(phase.start_s, phase.start_s + period_s),
            tiers=observer.tiers_between(phase.start_s, phase.start_s + period_s),
        )
        for phase in phases
        if phase.name in ARMS and phase.start_s + period_s <= min(phase.end_s + 1.0, done_s)
    ]


def _latency(config: DemoConfig, samples: list[RequestLatency]) -> ProductionLatency:
    arms = {arm: [sample for sample in samples if sample.phase == arm] for arm in ARMS}
    alone = arms[ALONE_1] + arms[ALONE_2]
    ratios: dict[str, Ratio | None] = {}
    for metric in ("ttft", "itl", "stall"):
        for name, fraction in (("p50", 0.50), ("p99", 0.99)):
            key = f"{metric}_{name}"
            ratios[key] = ratio(arms[SHARED], alone, metric, fraction, seed=config.seed)
            ratios[f"aa_{key}"] = ratio(arms[ALONE_2], arms[ALONE_1], metric, fraction, seed=config.seed)
    found = {arm: [sample for sample in arms[arm] if sample.error is None] for arm in ARMS}
    return ProductionLatency(
        slo=config.slo(),
        arms={arm: arm_stats(arms[arm], config.slo()) for arm in ARMS if arms[arm]},
        ratios=ratios,
        distributions={
            arm: (sorted(s.ttft_s for s in some), sorted(gap for s in some for gap in s.itl_s))
            for arm, some in found.items()
            if some
        },
    )


def _machine() -> dict[str, str]:
    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "Processor": processor,
        "Cores usable": str(len(os.sched_getaffinity(0))),
        "Memory": format_bytes(psutil.virtual_memory().total),
        "Kernel": platform.release(),
        "Python": platform.python_version(),
        **{name: installed(name) for name in ("rose-rl", "vllm", "torch", "ray")},
    }


def _settings(run: Run) -> dict[str, str]:
    config = run.config
    job = config.job
    core, other = run.plan.cores
    return {
        "Seed": str(config.seed),
        "Cores": f"production and the harvested engine on {core}, everything else on {other}",
        "Traffic": f"{len(run.arrivals)} requests per {config.traffic.period_s:g} s, busiest second "
        f"{busiest_second_ratio(run.arrivals, config.traffic.period_s):.1f}x the mean",
        "SLO": f"first token {config.production.slo_ttft_s * 1e3:g} ms, "
        f"then {config.production.slo_tpot_s * 1e3:g} ms a token",
        "Harvested engine yields by": run.observer.idle_by or "unknown",
        "RL job": f"{config.steps} steps of {job.num_groups} groups of {job.group_size} answers of "
        f"{job.lake_size**2} moves, lr {job.learning_rate:g}; it begins with a policy that has read careless plans",
    }
