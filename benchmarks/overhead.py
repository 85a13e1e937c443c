#!/usr/bin/env python
"""What the plugin costs production when nothing is harvested: CPU time per step, system calls, pages.

vLLM's real scheduler with 256 running requests, without a model: a model's step would only hide what is looked for.  In
one process, in alternating blocks: the stock scheduler twice (the A/A arm), the one with ROSE's hooks and no rollout engine on
the device (nothing can be harvested), and the one beside a living rollout engine (``beside``), which is told of every step.

- ``hook_p99_us``: CPU time of ROSE's three hooks in one step, by the thread's own clock.  Limit: 100 us.  ``beside_p99_us``: the
  same beside a rollout engine.  ``clock_p99_us``: three hooks that do nothing, at the same places of a stock scheduler: what the
  clock, the machine and its other work put into these figures.
- ``step_ratio``: CPU time of a whole scheduler step with the hooks over without, paired by block; ``aa_ratio`` beside it.
- ``faults_per_step``: page faults inside the hooks (``getrusage`` of the thread): a page that is touched for the first time.
- ``waits``: how often the thread gave up the processor inside a hook because it had to wait, in all steps, by the kernel's count.
- ``blocking_calls``, ``calls_per_step``: every system call between entering and leaving a hook, as ``strace`` sees it.
  Waking a futex does not block; waiting on one, reading a pipe, or sleeping does.  pread and pwrite of the small files of the
  node directory, which is on tmpfs, copy a page that is in memory: they count as calls, and ``waits`` proves them.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import numpy as np  # noqa: E402

from benchmarks.report import percentile, write  # noqa: E402

LIMIT_US = 100.0
BLOCK_STEPS = 25
HOOKS = ("before_schedule", "after_schedule", "after_update")
MAYBE_BLOCKING = re.compile(
    r"futex\([^,]*, FUTEX_(WAIT|LOCK_PI)|^(read|poll|ppoll|select|pselect6|epoll_wait|epoll_pwait|nanosleep|"
    r"clock_nanosleep|fsync|fdatasync|flock|wait4|recv\w*|connect|accept\w*|open|openat)\("
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("out/overhead.json"))
    parser.add_argument("--steps", type=int, default=3000, help="steps per arm")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--traced", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    # tmpfs, as in production: on a disk a write may wait for the disk.
    with tempfile.TemporaryDirectory(prefix="rose-overhead-", dir="/dev/shm") as folder:
        if args.traced:
            _traced(Path(folder), args.requests, args.traced)
            return 0
        summary, details = _measure(Path(folder), args.requests, args.steps)
        calls = _system_calls(args.requests)
    summary |= calls.pop("summary")
    details |= calls
    for name, value in summary.items():
        print(f"{name:28} {value if not isinstance(value, float) else round(value, 4)}")
    print(f"limit: hook_p99_us <= {LIMIT_US:.0f}, blocking_calls 0, waits 0, faults_per_step 0")
    write(args.json, "overhead", summary, details)
    print(args.json)
    return 0


class Bench:
    """One scheduler, full of decoding requests, and its steps."""

    def __init__(self, cls: Any, config: Any, num_requests: int) -> None:
        from tests.plugin import harness

        self._harness, self._count = harness, num_requests
        self.scheduler = harness.build(cls, config)
        self._number = 0
        self.fill()

    def fill(self) -> None:
        while len(self.scheduler.requests) < self._count:
            self._number += 1
            self.scheduler.add_request(
                self._harness.request(f"r{self._number}", num_tokens=20, max_tokens=100)
            )

    def step(self) -> int:
        """CPU nanoseconds of one step of the engine thread, the made-up model excluded from neither arm."""
        self.fill()
        begun = time.thread_time_ns()
        self._harness.step(self.scheduler)
        return time.thread_time_ns() - begun


def _config(folder: Path, num_requests: int) -> Any:
    from tests.plugin import harness
    from tests.tiny_model import write_tiny_model

    model = folder / "model"
    model.mkdir()
    write_tiny_model(model)
    harness.NUM_BLOCKS = 4 * num_requests
    config = harness.engine_config(model)
    config.scheduler_config.max_num_seqs = num_requests
    config.scheduler_config.max_num_batched_tokens = 64 * num_requests
    return config


def _rose(folder: Path, config: Any, num_requests: int, *, peer: bool = False) -> tuple[Any, list[Any]]:
    """A scheduler with the serving side on, and a node agent's file; ``peer``: beside a rollout engine."""
    from rose.coserve.ledger import Mode, NodeDir, NodeState, RolloutLease
    from tests.plugin import harness
    from vllm_plugin.scheduler import ServingScheduler

    path = folder / ("beside" if peer else "alone")
    os.environ |= {"ROSE_ROLE": "serving", "ROSE_DIR": str(path)}
    keep: list[Any] = [
        harness.write_rank(path, "serving", mapped=True, num_chunks=harness.NUM_BLOCKS // 32),
        NodeDir(path).node_writer(),
    ]
    now_ns = time.monotonic_ns()
    keep[1].write(
        NodeState(mode=Mode.OBSERVE, has_serving=1, slo_ttft_ns=10**9, slo_tpot_ns=10**8, heartbeat_ns=now_ns)
    )
    if peer:
        keep.append(NodeDir(path).rollout_lease_writer())
        keep[-1].write(RolloutLease(heartbeat_ns=now_ns))
    bench = Bench(ServingScheduler, config, num_requests)
    if bench.scheduler.rose is None:
        raise SystemExit("the serving side did not come up; see the log above")
    bench.scheduler.rose._round()  # what its background thread would have read by now
    return bench, keep


class Idle:
    """Three hooks that do nothing."""

    def before_schedule(self) -> None:
        return

    def after_schedule(self, _output: Any) -> None:
        return

    def after_update(self) -> None:
        return


def _with_idle_hooks(bench: Bench) -> Idle:
    """Call hooks that do nothing where ROSE's would be called."""
    idle, scheduler = Idle(), bench.scheduler
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        idle.before_schedule()
        output = schedule(*args, **kwargs)
        idle.after_schedule(output)
        return output

    def updated(*args: Any, **kwargs: Any) -> Any:
        result = update(*args, **kwargs)
        idle.after_update()
        return result

    scheduler.schedule, scheduler.update_from_output = scheduled, updated
    return idle


def _measure(folder: Path, num_requests: int, num_steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    from vllm.v1.core.sched.scheduler import Scheduler

    config = _config(folder, num_requests)
    rose, keep = _rose(folder, config, num_requests)
    beside, keep_beside = _rose(folder, config, num_requests, peer=True)
    arms = {
        "stock": Bench(Scheduler, config, num_requests),
        "again": Bench(Scheduler, config, num_requests),
        "rose": rose,
        "beside": beside,
    }
    hooks = {
        "clock": _count_hooks(_with_idle_hooks(arms["again"])),
        "hook": _count_hooks(rose.scheduler.rose),
        "beside": _count_hooks(beside.scheduler.rose),
    }
    for bench in arms.values():
        for _ in range(2 * BLOCK_STEPS):
            bench.step()
    for spent in hooks.values():
        spent.clear()
    step_ns: dict[str, list[list[int]]] = {name: [] for name in arms}
    for number in range(num_steps // BLOCK_STEPS):
        names = list(arms)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            step_ns[name].append([arms[name].step() for _ in range(BLOCK_STEPS)])
    means = {name: np.array([np.mean(block) for block in blocks]) for name, blocks in step_ns.items()}
    summary: dict[str, Any] = {"requests": num_requests, "steps": len(hooks["hook"]) // len(HOOKS)}
    for name, spent in hooks.items():
        calls = np.array(spent).reshape(-1, len(HOOKS), 3).sum(axis=1)
        for what, share in (("p50", 0.5), ("p99", 0.99)):
            summary[f"{name}_{what}_us"] = percentile((calls[:, 0] / 1e3).tolist(), share)
        if name == "hook":
            summary["faults_per_step"] = float(calls[:, 1].mean())
            summary["waits"] = int(calls[:, 2].sum())
        elif name == "beside":
            summary["beside_waits"] = int(calls[:, 2].sum())
    summary["stock_step_us"] = float(np.median(means["stock"]) / 1e3)
    for name, above in (("step_ratio", "rose"), ("beside_ratio", "beside"), ("aa_ratio", "again")):
        value, low, high = _paired(means[above], means["stock"])
        summary |= {name: value, f"{name}_low": low, f"{name}_high": high}
    summary["limit_met"] = summary["hook_p99_us"] <= LIMIT_US and summary["beside_p99_us"] <= LIMIT_US
    for side in (rose.scheduler.rose, beside.scheduler.rose):
        if side.failed:
            raise SystemExit(f"the serving side went off: {side.failed}")
    del keep, keep_beside
    return summary, {"block_steps": BLOCK_STEPS}


def _count_hooks(side: Any) -> list[tuple[int, int, int]]:
    """Wrap the three hooks; CPU nanoseconds, page faults and waits of each call, in order."""
    spent: list[tuple[int, int, int]] = []

    def timed(call: Any) -> Any:
        def hook(*args: Any) -> Any:
            before = resource.getrusage(resource.RUSAGE_THREAD)
            begun = time.thread_time_ns()
            try:
                return call(*args)
            finally:
                took_ns = time.thread_time_ns() - begun
                after = resource.getrusage(resource.RUSAGE_THREAD)
                faults = after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt
                spent.append((took_ns, faults, after.ru_nvcsw - before.ru_nvcsw))

        return hook

    for name in HOOKS:
        setattr(side, name, timed(getattr(side, name)))
    return spent


def _paired(above: Any, below: Any) -> tuple[float, float, float]:
    """Ratio of medians over pairs of blocks, with a bootstrap interval."""
    rng = np.random.default_rng(0)
    ratios = above / below
    draws = np.median(ratios[rng.integers(0, len(ratios), (2000, len(ratios)))], axis=1)
    return float(np.median(ratios)), float(np.quantile(draws, 0.025)), float(np.quantile(draws, 0.975))


# --- system calls


def _traced(folder: Path, num_requests: int, num_steps: int) -> None:
    """Under strace: mark every hook by a write to a descriptor that does not exist."""
    rose, _keep = _rose(folder, _config(folder, num_requests), num_requests, peer=True)
    side = rose.scheduler.rose

    def marked(call: Any) -> Any:
        def hook(*args: Any) -> Any:
            _mark(b"rose-in")
            try:
                return call(*args)
            finally:
                _mark(b"rose-out")

        return hook

    for _ in range(50):
        rose.step()
    for name in HOOKS:
        setattr(side, name, marked(getattr(side, name)))
    for _ in range(num_steps):
        rose.step()


def _mark(text: bytes) -> None:
    try:
        os.write(-1, text)
    except OSError:
        pass


def _system_calls(num_requests: int, num_steps: int = 300) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".strace") as trace:
        command = [
            "strace",
            "-f",
            "-qq",
            "-o",
            trace.name,
            sys.executable,
            __file__,
            "--requests",
            str(num_requests),
        ]
        try:
            subprocess.run(
                [*command, "--traced", str(num_steps)],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no strace: system calls were not counted ({error})")
            return {"summary": {"calls_per_step": None, "blocking_calls": None}}
        lines = Path(trace.name).read_text(errors="replace").splitlines()
    inside: set[str] = set()
    calls: Counter[str] = Counter()
    blocking: Counter[str] = Counter()
    hooks = 0
    for line in lines:
        thread, _, call = line.partition(" ")
        call = call.strip()
        if "rose-in" in call:
            inside.add(thread)
            hooks += 1
        elif "rose-out" in call:
            inside.discard(thread)
        elif thread in inside and "(" in call and not call.startswith("<..."):
            name = call.partition("(")[0]
            calls[name] += 1
            if MAYBE_BLOCKING.search(call):
                blocking[name] += 1
    steps = max(1, hooks // len(HOOKS))
    return {
        "summary": {
            "calls_per_step": sum(calls.values()) / steps,
            "blocking_calls": sum(blocking.values()),
        },
        "calls": dict(calls),
        "blocking": dict(blocking),
        "traced_steps": steps,
    }


if __name__ == "__main__":
    sys.exit(main())
