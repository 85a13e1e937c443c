#!/usr/bin/env python
"""What the plugin costs production when nothing is harvested: CPU time per step, system calls, pages, and end to end.

**The step** (``hook``, ``beside``, ``step``): vLLM's real scheduler with 256 running requests, which come and go, without a model: a model's
step would only hide what is looked for.  All arms step *the same scheduler object*, in alternating blocks: as vLLM's own class (twice: A/A),
and as ours with a serving side whose background threads run.  (With one object per arm the same code differs by several per cent from object to
object: where its requests lie in memory decides that.)  ``alone``: no rollout engine on the device, nothing can be harvested.  ``beside``: a living
one that may run, so that production tells it of every step.

- ``hook_p99_us``: CPU time of ROSE's three hooks in one step, by the thread's own clock.  Limit: 100 us.  ``beside_p99_us``: the
  same beside a rollout engine.  ``clock_p99_us``: three hooks that do nothing, at the same places: what the clock, the machine and its other
  work put into these figures.  ``cold_p99_us``, ``cold_beside_p99_us``: with 64 MiB of other memory read before each hook, as a model's step
  does: next to nothing of ours is in any cache.
- ``step_ratio``: CPU time of a whole scheduler step with the hooks over without, paired by block, no clock inside; ``aa_ratio`` beside it.
- ``faults_per_step``: page faults inside the hooks (``getrusage`` of the thread): a page that is touched for the first time.
- ``waits``: how often the thread gave up the processor inside a hook because it had to wait, in all steps, by the kernel's count.
- ``blocking_calls``, ``calls_per_step``: every system call between entering and leaving a hook, as ``strace`` sees it.
  Waking a futex does not block; waiting on one, reading a pipe, or sleeping does.  pread and pwrite of the small files of the
  node directory, which is on tmpfs, copy a page that is in memory: they count as calls, and ``waits`` proves them.

``--engine KIND``: of a scheduler, and of servers, that have more switched on (``benchmarks/lib/engine_kinds.py``): drafts that every step
verifies, adapters, groups of sliding windows, or several engine cores, of which each has a scheduler as a plain one's (the first is stepped).

**End to end** (``end``): see :mod:`benchmarks.coserving.overhead_end`, with its bar and its number of servers; ``--no-end`` leaves it out::

    python benchmarks/coserving/overhead.py --engine lora --json out/overhead-lora.json    # eight servers with ROSE and eight without
    python benchmarks/coserving/overhead.py --engine lora --quick --json out/overhead-lora.json    # does it run?
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.coserving.overhead_end import SERVERS, end_to_end
from benchmarks.lib.engine_kinds import KINDS, PLAIN, Kind
from benchmarks.lib.report import write
from rose.evaluation.statistics import median_ratio, percentile

LIMIT_US = 100.0
NEVER_S = 1000.0
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
    parser.add_argument("--engine", choices=KINDS, default=PLAIN, help="what production has switched on")
    parser.add_argument("--no-end", action="store_true", help="leave out the servers (end to end)")
    parser.add_argument("--servers", type=int, default=SERVERS, help="with ROSE, and as many without: even")
    parser.add_argument("--rounds", type=int, default=8, help="of four servers, each serving once per round")
    parser.add_argument(
        "--quick", action="store_true", help="does it run: 100 steps, two servers of each kind, two rounds"
    )
    parser.add_argument("--traced", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.servers < 2 or args.servers % 2:
        parser.error("--servers: two are up at once")
    if args.quick:
        args.steps, args.servers, args.rounds = 100, 2, 2
    # tmpfs, as in production: on a disk a write may wait for the disk.
    with tempfile.TemporaryDirectory(prefix="rose-overhead-", dir="/dev/shm") as folder:
        if args.traced:
            _traced(Path(folder), args.engine, args.requests, args.traced)
            return 0
        summary, details = _measure(Path(folder), args.engine, args.requests, args.steps)
    _keep(args.json, summary, details, summary)
    calls = _system_calls(args.engine, args.requests)
    counted = calls.pop("summary")
    details |= calls
    _keep(args.json, summary, details, counted)
    if not args.no_end:
        end, details["end"] = end_to_end(args.requests, args.servers, args.rounds, KINDS[args.engine])
        _keep(args.json, summary, details, end)
    print(f"limit: hook_p99_us, cold_p99_us <= {LIMIT_US:.0f}, blocking_calls 0, waits 0, faults_per_step 0")
    print(args.json)
    return 0


def _keep(path: Path, summary: dict[str, Any], details: dict[str, Any], new: dict[str, Any]) -> None:
    """Say what a part has found and write all that is known: a run that is stopped later has not been for nothing."""
    for name, value in new.items():
        print(f"{name:28} {value if not isinstance(value, float) else round(value, 4)}", flush=True)
    summary |= new
    write(path, "overhead", summary, details)


class Bench:
    """One scheduler, full of decoding requests, and its steps."""

    def __init__(self, cls: Any, config: Any, cache: Any, num_requests: int, kind: Kind) -> None:
        from tests.plugin import harness

        self._harness, self._count, self._kind = harness, num_requests, kind
        self.scheduler = harness.build(cls, config, cache)
        self._number = 0
        self.fill()

    def fill(self) -> None:
        while len(self.scheduler.requests) < self._count:
            self._number += 1
            # Of many lengths, so that at every step a few end and others begin; all within one block.
            length = 20 + 37 * self._number % 87
            adapter = self._number % (self._kind.num_adapters + 1)
            self.scheduler.add_request(
                self._harness.request(f"r{self._number}", num_tokens=20, max_tokens=length, adapter=adapter)
            )

    def become(self, cls: Any, rose: Any) -> None:
        """Step as ``cls`` from now on, with ``rose`` for its serving side.  Between two steps."""
        self.scheduler.__class__ = cls
        self.scheduler.rose = rose

    def step(self) -> int:
        """CPU nanoseconds of one step of the engine thread, the made-up model excluded from no arm."""
        self.fill()
        if self._kind.num_drafts:
            self._draft()
        begun = time.thread_time_ns()
        self._harness.step(self.scheduler)
        return time.thread_time_ns() - begun

    def _draft(self) -> None:
        """As the worker has done it behind the last step; none of the drafts will be right."""
        from vllm.v1.outputs import DraftTokenIds

        ids = [one.request_id for one in self.scheduler.running]
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [[8] * self._kind.num_drafts for _ in ids]))


def stock_class() -> Any:
    """vLLM's own scheduler, as a class that an object of ours can change to: Python wants as many bases."""
    from vllm.v1.core.sched.scheduler import Scheduler

    class Nothing:
        pass

    return type("StockScheduler", (Nothing, Scheduler), {})


def _config(folder: Path, engine: str, num_requests: int) -> tuple[Any, Any]:
    """Configuration and KV cache of such an engine, of one of its cores where there are several."""
    from tests.plugin import harness
    from tests.tiny_model import write_tiny_model
    from vllm_plugin.doctor import predicted_cache

    kind = KINDS[engine]
    write_tiny_model(folder / "plain")
    model, _ = kind.prepare(folder / "plain", folder)
    # A request has a block of each of the windows' groups; of fewer blocks nothing could be lent.
    harness.NUM_BLOCKS = max(256, (4 if kind.shape is None else 16) * num_requests)
    config = harness.engine_config(model, **kind.options)
    config.scheduler_config.max_num_seqs = num_requests
    config.scheduler_config.max_num_batched_tokens = 64 * num_requests
    if kind.num_cores > 1:
        config.parallel_config.data_parallel_index = 0
        config.parallel_config.reconfigure_for_independent_dp_rank()
    if kind.shape is None:
        return config, harness.kv_cache_config(config)
    config.cache_config.num_gpu_blocks_override = harness.NUM_BLOCKS
    made = predicted_cache(config)
    assert made is not None
    return config, made[0]


def _bench(folder: Path, config: Any, cache: Any, num_requests: int, kind: Kind) -> tuple[Bench, list[Any]]:
    """A scheduler with the serving side on, and what has to stay alive beside it."""
    from tests.plugin import harness
    from vllm_plugin.scheduler import ServingScheduler

    keep = _node(folder / "alone", cache, peer=False)
    bench = Bench(ServingScheduler, config, cache, num_requests, kind)
    if bench.scheduler.rose is None:
        raise SystemExit("the serving side did not come up; see the log above")
    bench.scheduler.rose_attach(harness.engine())
    return bench, keep


def _beside(folder: Path, cache: Any, bench: Bench) -> tuple[Any, list[Any]]:
    """A second serving side of the same scheduler, beside a rollout engine that may run but holds nothing."""
    from tests.plugin import harness
    from vllm_plugin.serving import ServingSide

    keep = _node(folder / "beside", cache, peer=True)
    side = ServingSide(bench.scheduler, cache, 1)
    side.attach(harness.engine())
    return side, keep


def _node(path: Path, cache: Any, *, peer: bool) -> list[Any]:
    """The files of a worker, a node agent and, ``peer``, a rollout engine; their writers."""
    from rose.coserve.node_dir import NodeDir
    from rose.coserve.records import Mode, NodeState, RolloutLease
    from tests.plugin import harness
    from tests.plugin.stand_in import Beating
    from vllm_plugin.compat import OS_PAGE_BYTES
    from vllm_plugin.memory import ChunkPlan

    os.environ |= {"ROSE_ROLE": "serving", "ROSE_DIR": str(path)}
    node = NodeDir(path)
    keep: list[Any] = [
        harness.write_rank(
            path, "serving", mapped=True, num_chunks=ChunkPlan.of(cache, OS_PAGE_BYTES).num_chunks
        ),
        Beating(node.node_writer()),
    ]
    keep[1].write(
        NodeState(
            mode=Mode.ON if peer else Mode.OBSERVE,
            has_serving=1,
            slo_ttft_ns=10**9,
            slo_tpot_ns=10**8,
        )
    )
    if peer:
        keep.append(Beating(node.rollout_lease_writer()))
        keep[-1].write(RolloutLease())
    return keep


class Idle:
    """A serving side that does nothing."""

    failed = None
    balloon = SimpleNamespace(inflated=())

    def usage(self) -> float:
        return 0.0

    def before_add(self, _request: Any) -> None:
        return

    def before_schedule(self) -> None:
        return

    def after_schedule(self, _output: Any) -> None:
        return

    def after_update(self, _output: Any) -> None:
        return


def _measure(
    folder: Path, engine: str, num_requests: int, num_steps: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    from vllm_plugin.scheduler import ServingScheduler

    stock = stock_class()
    config, cache = _config(folder, engine, num_requests)
    bench, keep = _bench(folder, config, cache, num_requests, KINDS[engine])
    alone = bench.scheduler.rose
    beside, keep_beside = _beside(folder, cache, bench)
    junk = np.ones(8 << 20)  # 64 MiB, twice the largest cache here
    timed = {
        "clock": Timed(Idle()),
        "hook": Timed(alone),
        "beside": Timed(beside),
        "cold_clock": Timed(Idle(), junk),
        "cold": Timed(alone, junk),
        "cold_beside": Timed(beside, junk),
    }
    sides = {"stock": None, "again": None, "rose": alone, "rose_beside": beside, **timed}
    step_ns: dict[str, list[list[int]]] = {name: [] for name in sides}

    interval_s = sys.getswitchinterval()

    def block(name: str, num: int) -> list[int]:
        bench.become(stock if sides[name] is None else ServingScheduler, sides[name])
        # Where waits are counted nobody takes the interpreter from us: who loses it gave it away.
        sys.setswitchinterval(NEVER_S if name in ("hook", "beside") else interval_s)
        try:
            return [bench.step() for _ in range(num)]
        finally:
            sys.setswitchinterval(interval_s)

    for side in sides:
        block(side, 2 if side.startswith("cold") else 2 * BLOCK_STEPS)
    time.sleep(1.0)  # the background threads have seen everything by now
    for each in timed.values():
        each.spent.clear()
    for number in range(num_steps // BLOCK_STEPS):
        names = list(sides)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            step_ns[name].append(block(name, 3 if name.startswith("cold") else BLOCK_STEPS))
    for side in (alone, beside):
        if side.failed:
            raise SystemExit(f"the serving side went off: {side.failed}")
    if alone._board.watched or not beside._board.watched:
        raise SystemExit("the arms are not what they are called: who is told of every step?")
    bench.become(ServingScheduler, alone)
    for side in (alone, beside):
        side.stop()
    del keep, keep_beside
    means = {name: np.array([np.mean(each) for each in blocks]) for name, blocks in step_ns.items()}
    summary: dict[str, Any] = {"requests": num_requests, "steps": len(timed["hook"].spent) // len(HOOKS)}
    for name, each in timed.items():
        calls = np.array(each.spent).reshape(-1, len(HOOKS), 3).sum(axis=1)
        for what, share in (("p50", 0.5), ("p99", 0.99)):
            summary[f"{name}_{what}_us"] = percentile((calls[:, 0] / 1e3).tolist(), share)
        if name == "hook":
            summary["faults_per_step"] = float(calls[:, 1].mean())
            summary["waits"] = int(calls[:, 2].sum())
        elif name == "beside":
            summary["beside_waits"] = int(calls[:, 2].sum())
    summary["stock_step_us"] = float(np.median(means["stock"]) / 1e3)
    for name, above in (("step_ratio", "rose"), ("beside_ratio", "rose_beside"), ("aa_ratio", "again")):
        value, low, high = median_ratio(means[above], means["stock"])
        summary |= {name: value, f"{name}_low": low, f"{name}_high": high}
    summary["limit_met"] = summary["hook_p99_us"] <= LIMIT_US and summary["cold_p99_us"] <= LIMIT_US
    summary["beside_limit_met"] = summary["beside_p99_us"] <= LIMIT_US
    return summary, {
        "engine": engine,
        "block_steps": BLOCK_STEPS,
        "cold_steps": len(timed["cold"].spent) // len(HOOKS),
    }


class Timed:
    """A serving side with its three hooks under the clock.

    Attributes:
        spent: CPU nanoseconds, page faults and waits of each call, in order.
    """

    def __init__(self, side: Any, junk: Any = None) -> None:
        self.failed, self.balloon = None, side.balloon
        self.usage, self.before_add = side.usage, side.before_add
        self.spent: list[tuple[int, int, int]] = []
        for name in HOOKS:
            setattr(self, name, self._timed(getattr(side, name), junk))

    def fail(self, error: BaseException) -> None:
        raise SystemExit(f"a hook has failed: {error!r}")

    def _timed(self, call: Any, junk: Any) -> Any:
        def hook(*args: Any) -> Any:
            if junk is not None:
                junk.sum()
            before = resource.getrusage(resource.RUSAGE_THREAD)
            begun = time.thread_time_ns()
            try:
                return call(*args)
            finally:
                took_ns = time.thread_time_ns() - begun
                after = resource.getrusage(resource.RUSAGE_THREAD)
                faults = after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt
                self.spent.append((took_ns, faults, after.ru_nvcsw - before.ru_nvcsw))

        return hook


# --- system calls


def _traced(folder: Path, engine: str, num_requests: int, num_steps: int) -> None:
    """Under strace: mark every hook by a write to a descriptor that does not exist; first alone, then beside."""
    config, cache = _config(folder, engine, num_requests)
    rose, _keep = _bench(folder, config, cache, num_requests, KINDS[engine])
    beside, _keep_beside = _beside(folder, cache, rose)

    def marked(call: Any) -> Any:
        def hook(*args: Any) -> Any:
            _mark(b"rose-in")
            try:
                return call(*args)
            finally:
                _mark(b"rose-out")

        return hook

    interval_s = sys.getswitchinterval()
    for number, side in enumerate((rose.scheduler.rose, beside)):
        rose.scheduler.rose = side
        for _ in range(50):
            rose.step()
        time.sleep(1.0)  # the background threads have seen everything by now
        sys.setswitchinterval(NEVER_S)
        _mark(b"rose-arm" + str(number).encode())
        for name in HOOKS:
            setattr(side, name, marked(getattr(side, name)))
        for _ in range(num_steps):
            rose.step()
        sys.setswitchinterval(interval_s)
        side.stop()


def _mark(text: bytes) -> None:
    # os.write would give up the interpreter's lock, and wait for it between the marks.
    _libc.write(-1, text, len(text))


_libc = ctypes.PyDLL(None)


def _system_calls(engine: str, num_requests: int, num_steps: int = 300) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".strace") as trace:
        command = [
            "strace",
            "-f",
            "-qq",
            "-o",
            trace.name,
            sys.executable,
            __file__,
            f"--requests={num_requests}",
            f"--engine={engine}",
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
    arms = [_Calls(), _Calls()]
    arm = arms[0]
    for line in lines:
        thread, _, call = line.partition(" ")
        call = call.strip()
        if "rose-arm" in call:
            arm = arms["rose-arm1" in call]
        elif "rose-in" in call:
            inside.add(thread)
            arm.hooks += 1
        elif "rose-out" in call:
            inside.discard(thread)
        elif thread in inside and "(" in call and not call.startswith("<..."):
            name = call.partition("(")[0]
            arm.calls[name] += 1
            if MAYBE_BLOCKING.search(call):
                arm.blocking[name] += 1
    alone, beside = arms
    return {
        "summary": {
            "calls_per_step": alone.per_step(),
            "beside_calls_per_step": beside.per_step(),
            "blocking_calls": sum(alone.blocking.values()) + sum(beside.blocking.values()),
        },
        "calls": dict(alone.calls),
        "beside_calls": dict(beside.calls),
        "blocking": dict(alone.blocking + beside.blocking),
        "traced_steps": num_steps,
    }


class _Calls:
    def __init__(self) -> None:
        self.hooks = 0
        self.calls: Counter[str] = Counter()
        self.blocking: Counter[str] = Counter()

    def per_step(self) -> float:
        return sum(self.calls.values()) / max(1, self.hooks // len(HOOKS))


if __name__ == "__main__":
    sys.exit(main())
