"""Production and a rollout engine, two processes with real memory, under a loan that changes all the time and kills.

The two sides, the pagers and the memory are the product's, on vLLM's own schedulers; there is no model, and no request: an engine
thread that has nothing to do but what the sides ask of it.  Who looks is the parent, at the kernel's own figure (which pages of
both allocations are present), never at the books.

By hand, ten thousand changes, the rollout engine killed twenty times and production five times on the way; a few minutes:

    python -m tests.plugin.churn --json benchmarks/results/coserving/churn/DATE.json

Limits: never a page more than the device has, memory really moves, and production has all of it at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState
from rose.units import PAGE_BYTES
from tests.engine_launcher import Forked, fork_piped
from tests.pair.memory import TORN_S, resident_pages

TOTAL_PAGES = 16
"""``harness.kv_cache_config``."""
MODULE = "tests.plugin.churn"
OBEYED_EVERY = 8
OBEYED_S = 0.5
"""Some are never: production keeps what it needs."""


def engine(role: str, model: str) -> None:
    """A child: says ``PID ADDRESS`` once it is up, and lives until it is killed."""
    os.environ.update(ROSE_ROLE=role, ROSE_ENGINE="0")
    from tests.plugin import harness
    from vllm_plugin import compat
    from vllm_plugin.memory import ChunkPlan, Pager
    from vllm_plugin.scheduler import RolloutScheduler, ServingScheduler

    config = harness.engine_config(Path(model))
    plan = ChunkPlan.of(harness.kv_cache_config(config))
    if role == "serving":
        compat._take_everything_back()  # as its core does before it starts its workers
    pager = Pager(NodeDir(os.environ["ROSE_DIR"]), role, 0, plan, guard=True)
    scheduler = harness.build(RolloutScheduler if role == "rollout" else ServingScheduler, config)
    core = harness.engine()
    scheduler.rose_attach(core)
    print(f"up {os.getpid()} {pager.arena.address:x} {plan.num_chunks * plan.chunk_pages}", flush=True)
    while True:
        core.input_queue.get()
        while core._idle_state_callbacks:
            core._idle_state_callbacks.pop(0)(core)


@dataclass
class Child:
    """One engine process and where its KV memory is.

    ``interpreter``: a new one, which a build in another folder needs; else the process is forked from an image that has vLLM imported.
    """

    role: str
    model: Path
    interpreter: bool = False
    process: subprocess.Popen[str] | Forked = field(init=False)
    pid: int = 0
    address: str = ""
    output: IO[str] = field(init=False)

    def start(self) -> None:
        argv = ["--engine", self.role, "--model", str(self.model)]
        if self.interpreter:
            command = [sys.executable, "-m", MODULE, *argv]
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            output = self.process.stdout
            assert output is not None
        else:
            self.process, output = fork_piped(MODULE, argv, os.environ)
        for line in output:  # vLLM logs there too
            if line.startswith("up "):
                _, pid, self.address, pages = line.split()
                self.pid, self.output = int(pid), output
                assert int(pages) == TOTAL_PAGES
                return
        raise RuntimeError(f"the {self.role} engine ended with {self.process.wait()}")

    def resident_pages(self) -> float:
        """Of its KV allocation, by the kernel; 0 when it is dead."""
        return resident_pages(self.pid, int(self.address, 16), TOTAL_PAGES * PAGE_BYTES) or 0.0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.output.close()


@dataclass
class Seen:
    """What the kernel said, and what came back at the end."""

    num_samples: int = 0
    num_torn_samples: int = 0
    num_kills: int = 0
    worst_pages: float = 0.0
    most_lent: float = 0.0
    left_pages: float = -1.0
    num_changes: int = 0


def churn(
    folder: Path,
    *,
    changes: int,
    kills: int,
    seed: int,
    production_kills: int = 0,
    say: Callable[[int, int], None] = lambda done, total: None,
) -> Seen:
    """Change the loan ``changes`` times; SIGKILL the rollout engine ``kills`` times on the way, and start another; the same with
    production.

    Args:
        say: Told how many changes are done, of how many.
    """
    from tests.tiny_model import write_tiny_model

    node, model = folder / "node", folder / "model"
    node.mkdir(mode=0o700)
    write_tiny_model(model)
    os.environ["ROSE_DIR"] = str(node)
    rng, seen = random.Random(seed), Seen()
    agent = NodeDir(node).node_writer()
    serving, rollout = Child("serving", model), Child("rollout", model)

    def lend(pages: int) -> None:
        agent.write(
            NodeState(mode=Mode.ON, has_serving=1, lend_pages=pages, heartbeat_ns=time.monotonic_ns())
        )
        agent.wake()

    def look() -> None:
        # Memory that goes from one to the other between two looks must not be counted in both: the rollout engine's
        # is looked at before and after.
        began_s = time.monotonic()
        before, held, after = rollout.resident_pages(), serving.resident_pages(), rollout.resident_pages()
        seen.num_samples += 1
        if time.monotonic() - began_s > TORN_S:
            seen.num_torn_samples += 1
            return
        seen.worst_pages = max(seen.worst_pages, held + min(before, after))
        seen.most_lent = max(seen.most_lent, min(before, after))

    lease = NodeDir(node).serving_lease()

    def obeyed(pages: int) -> None:
        """Let this wish live until it is: on a quick machine hardly one would."""
        until_s = time.monotonic() + OBEYED_S
        while time.monotonic() < until_s:
            look()
            record = lease.read()
            if record is not None and record.lent_pages == pages:
                return
            time.sleep(0.002)  # the cores are theirs

    try:
        lend(0)
        serving.start()
        rollout.start()
        at = rng.sample(range(changes), kills + production_kills)
        victims = dict.fromkeys(at[:kills], rollout) | dict.fromkeys(at[kills:], serving)
        for number in range(changes):
            pages = rng.choice((0, 0, 1, 3, 7, 15, rng.randrange(TOTAL_PAGES)))
            lend(pages)
            seen.num_changes += 1
            if number in victims:
                victims[number].kill()
                seen.num_kills += 1
                look()
                starting = threading.Thread(target=victims[number].start)
                starting.start()
                while starting.is_alive():  # the agent lives on, and so does the other engine
                    lend(rng.randrange(TOTAL_PAGES))
                    look()
                    starting.join(0.05)
            say(number + 1, changes)
            time.sleep(rng.choice((0.0, 0.0, 0.0, 0.002, 0.02)))
            if number % OBEYED_EVERY == 0:
                obeyed(pages)
            for _ in range(rng.choice((1, 1, 2, 6))):
                look()
        lend(0)
        until_s = time.monotonic() + 30.0
        while serving.resident_pages() < TOTAL_PAGES and time.monotonic() < until_s:
            lend(0)
            time.sleep(0.02)
        seen.left_pages = TOTAL_PAGES - serving.resident_pages()
    finally:
        for child in (serving, rollout):
            with contextlib.suppress(AttributeError):
                child.kill()
        agent.close()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine")
    parser.add_argument("--model")
    parser.add_argument("--changes", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--production-kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.engine:
        engine(args.engine, args.model)
        return
    from benchmarks.lib.report import Report  # here: an engine of another build runs without benchmarks

    report = Report("churn")
    with tempfile.TemporaryDirectory() as folder:
        seen = churn(
            Path(folder),
            changes=args.changes,
            kills=args.kills,
            production_kills=args.production_kills,
            seed=args.seed,
            say=lambda done, total: report.progress("changes", done, total),
        )
    met = seen.worst_pages <= TOTAL_PAGES and seen.left_pages == 0 and seen.most_lent > 2
    summary = {**asdict(seen), "total_pages": TOTAL_PAGES, "bar_met": met}
    report.finish(summary, {"seeds": [args.seed]}, args.json)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
