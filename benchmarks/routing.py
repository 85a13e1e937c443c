"""What one placement decision costs at full size, and that it is the right one.

Sets up 1,000 workers and 100,000 live trajectories of 2,000 tokens (in the store and its journal), 40,000 of
them with a turn on an engine, then plays turns ending and starting and times every event of the turn book.
Then restarts from the journal.

    python benchmarks/routing.py --json routing.json        # about two minutes, 3 GB of memory and of disk
    python benchmarks/routing.py --quick                    # a tenth of it

    python benchmarks/routing.py --quick --compiled 5       # five pairs of processes besides: as Python, and compiled (`make compiled`)

``decision_p99_us`` is wall-clock, so a busy machine makes it worse; ``decision_cpu_p99_us`` counts only this
thread's time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.report import Report
from rose.evaluation.statistics import percentile
from rose.policy import turn_events as te
from rose.policy.fleet import FleetParams
from rose.policy.routing import POLICY_NAMES, make_policy
from rose.policy.samples import SampleParams
from rose.policy.turns import TurnBook
from rose.policy.worker import Tier
from rose.scheduler.cli import restrain_collector
from rose.scheduler.journal import Journal
from rose.scheduler.records import CreateRecord, TurnRecord
from rose.scheduler.store import TrajectoryStore
from tests.policy import reference

TURNS = 2
TOKENS_PER_TURN = 1000
OUTPUT_TOKENS = 300


def rss_gb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def quantiles_us(times_ns: array[int]) -> dict[str, float]:
    at = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
    return {name: round(percentile(times_ns, q) / 1e3, 1) for name, q in at.items()}


def brute_force(num_fleets: int, report: Report) -> int:
    """Decisions that differ from a brute-force choice."""
    wrong: list[str] = []
    for number in range(num_fleets):
        text = reference.disagreement(POLICY_NAMES[number % len(POLICY_NAMES)], 1_000_000 + number)
        if text is not None:
            wrong.append(text)
        report.progress("random fleets", number + 1, num_fleets)
    for text in wrong[:10]:
        print(text)
    return len(wrong)


def turn_record(name: str, turn: int, rng: random.Random) -> TurnRecord:
    return TurnRecord(
        trajectory_id=name,
        turn=turn,
        kind="chat",
        parent=turn - 1 if turn else None,
        suffix_ids=rng.randbytes(4 * (TOKENS_PER_TURN - OUTPUT_TOKENS)),
        token_ids=rng.randbytes(4 * OUTPUT_TOKENS),
        logprobs=rng.randbytes(8 * OUTPUT_TOKENS),
        finish_reason="stop",
        versions=[("1.7", 0, OUTPUT_TOKENS)],
        segments=[
            {"worker": "w1", "tier": "harvested", "attempt": 1, "start": 0, "n": OUTPUT_TOKENS},
        ],
        usage={
            "prompt": 1000 * turn + 700,
            "cached": 1000 * turn,
            "generated": OUTPUT_TOKENS,
            "recomputed": 0,
        },
        timing={"queue_ms": 0.1, "ttft_ms": 20.0, "total_ms": 900.0},
        sampling={"temperature": 1.0},
        tip=rng.randbytes(16),
        context=rng.randbytes(16),
        digest=rng.randbytes(16).hex(),
    )


def fill_store(directory: Path, num_trajectories: int, report: Report) -> tuple[TrajectoryStore, float]:
    """The store, and the time of one journalled turn in microseconds."""
    store = open_store(directory)
    rng = random.Random(1)
    spent_ns = 0
    for number in range(num_trajectories):
        name = f"t{number}"
        store._write(  # the public way draws a random name
            CreateRecord(id=name, job="j", group_id=f"g{number // 16}", group_size=16, created_at=0.0)
        )
        for turn in range(TURNS):
            record = turn_record(name, turn, rng)
            start_ns = time.perf_counter_ns()
            store.add_turn(record)
            spent_ns += time.perf_counter_ns() - start_ns
        report.progress("trajectories stored", number + 1, num_trajectories)
    return store, spent_ns / 1e3 / (num_trajectories * TURNS)


def open_store(directory: Path) -> TrajectoryStore:
    return TrajectoryStore(
        Journal(directory), SampleParams(), max_trajectories=10**7, retained_finals=0, compact_bytes=2**40
    )


class Fleet:
    """A turn book with a full fleet, and its turns."""

    def __init__(self, policy: str, num_workers: int, num_trajectories: int, num_live: int) -> None:
        self.rng = random.Random(2)
        params = te.TurnParams(max_queued=10**6)
        self.book = TurnBook(make_policy(policy, random.Random(3)), params, FleetParams())
        self.now_s = 0.0
        self.num_turns = 0
        self.lengths = dict.fromkeys(range(num_trajectories), 2000)
        self.live: list[str] = []
        self.trajectory: dict[str, int] = {}
        self.places: list[te.Dispatch] = []
        for index in range(num_workers):
            tier = Tier.DEDICATED if index % 5 == 0 else Tier.HARVESTED
            self.book.handle(
                te.WorkerRegistered(
                    at_s=0.0,
                    worker_id=f"w{index}",
                    incarnation="1",
                    tier=tier,
                    model="m",
                    max_model_len=32768,
                    cap=64,
                )
            )
            self.beat(index, 0)
        for number in range(num_trajectories):  # each has run before: its prefix is somewhere
            worker = self.book.fleet.workers[f"w{self.rng.randrange(num_workers)}"]
            self.book.affinity.finished(f"t{number}", "j", worker, num_prompt=1850, num_new=150)
        for number in self.rng.sample(range(num_trajectories), num_live):
            self.submit(number)

    def beat(self, index: int, seq: int) -> None:
        self.book.handle(
            te.WorkerHeartbeat(
                at_s=self.now_s,
                worker_id=f"w{index}",
                incarnation="1",
                seq=seq,
                version=(1, 7),
                state="ready",
                kv_budget_tokens=400_000,
                kv_used_tokens=self.rng.randrange(200_000),
                running=40,
                gated=self.rng.random() < 0.1,
                slack_s=0.05,
            )
        )

    def submit(self, number: int) -> tuple[int, int]:
        """Nanoseconds of the event, on the wall and of this thread's CPU time."""
        self.num_turns += 1
        turn_id = f"n{self.num_turns}"
        event = te.TurnSubmitted(
            at_s=self.now_s,
            turn_id=turn_id,
            trajectory_id=f"t{number}",
            job="j",
            model="m",
            num_prompt_tokens=self.lengths[number],
            max_tokens=512,
            group_id=f"g{number // 16}",
            deadline_at_s=self.now_s + 3600,
            streamed=True,
        )
        start_ns, start_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        actions = self.book.handle(event)
        spent_cpu_ns = time.thread_time_ns() - start_cpu_ns
        spent_ns = time.perf_counter_ns() - start_ns
        assert any(isinstance(action, te.Dispatch) for action in actions)
        self.live.append(turn_id)
        self.trajectory[turn_id] = number
        return spent_ns, spent_cpu_ns

    def play(self, num_events: int, report: Report, title: str) -> dict[str, array[int]]:
        """Turns end and others start; each kind of event with its times."""
        times = {
            "decide": array("q"),
            "decide_cpu": array("q"),
            "end": array("q"),
            "heartbeat": array("q"),
            "tick": array("q"),
        }
        idle = sorted(set(self.lengths) - set(self.trajectory.values()))
        for step in range(num_events):
            self.now_s += 0.002
            index = self.rng.randrange(len(self.live))
            self.live[index], self.live[-1] = self.live[-1], self.live[index]
            turn_id = self.live.pop()
            number = self.trajectory.pop(turn_id)
            start_ns = time.perf_counter_ns()
            self.book.handle(
                te.TokensArrived(at_s=self.now_s, turn_id=turn_id, attempt=1, token_ids=(5,) * 20)
            )
            self.book.handle(
                te.AttemptEnded(at_s=self.now_s, turn_id=turn_id, attempt=1, finish_reason="stop")
            )
            times["end"].append(time.perf_counter_ns() - start_ns)
            place = self.rng.randrange(len(idle))
            idle[place], number = number, idle[place]
            wall_ns, cpu_ns = self.submit(number)
            times["decide"].append(wall_ns)
            times["decide_cpu"].append(cpu_ns)
            for _ in range(4):  # 1,000 workers, twice a second each
                worker = self.rng.randrange(len(self.book.fleet.workers))
                start_ns = time.perf_counter_ns()
                self.beat(worker, step + 1)
                times["heartbeat"].append(time.perf_counter_ns() - start_ns)
            if step % 125 == 0:
                start_ns = time.perf_counter_ns()
                self.book.handle(te.ClockTicked(at_s=self.now_s))
                times["tick"].append(time.perf_counter_ns() - start_ns)
            report.progress(title, step + 1, num_events)
        return times


async def commit_ms(store: TrajectoryStore) -> float:
    """A turn made durable, median."""
    rng = random.Random(9)
    times: list[float] = []
    for number in range(20):
        store.add_turn(turn_record("t0", TURNS + number, rng))
        start_s = time.perf_counter()
        await store.journal.commit()
        times.append((time.perf_counter() - start_s) * 1e3)
    return statistics.median(times)


def compiled_against_python(rounds: int, policy: str, size: tuple[int, int, int, int]) -> dict[str, Any]:
    """CPU time of one decision, median in microseconds, of fresh processes in turn: the sources as Python, and the build."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from benchmarks.routing import Fleet, quantiles_us;"
        "from benchmarks.lib.report import Report; from rose.scheduler.cli import restrain_collector;"
        "size = [int(word) for word in sys.argv[3:]]; fleet = Fleet(sys.argv[2], *size[:3]); restrain_collector();"
        "print(json.dumps(quantiles_us(fleet.play(size[3], Report('routing'), '')['decide_cpu'])))"
    )
    root = str(Path(__file__).resolve().parents[1])
    found: dict[str, list[float]] = {"python": [], "compiled": []}
    for _ in range(rounds):
        for arm, choice in (("python", "0"), ("compiled", "1")):
            command = [sys.executable, "-c", code, root, policy, *map(str, size)]
            env = {**os.environ, "ROSE_COMPILED": choice}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
            found[arm].append(json.loads(done.stdout.splitlines()[-1])["p50"])
    ratio = statistics.median(found["compiled"]) / statistics.median(found["python"])
    return {"decision_cpu_p50_us": found, "compiled_to_python": round(ratio, 3)}


def restart(directory: Path) -> dict[str, float]:
    """A fresh process that opens the journal: seconds, and its memory."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path;"
        "from benchmarks.routing import open_store, rss_gb; start_s = time.perf_counter();"
        "store = open_store(Path(sys.argv[2])); print(time.perf_counter() - start_s, rss_gb(),"
        " len(store.trajectories))"
    )
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code, root, str(directory)], capture_output=True, text=True, check=True
    )
    seconds, rss, count = done.stdout.split()
    return {"restart_s": round(float(seconds), 2), "rss_gb": round(float(rss), 2), "trajectories": int(count)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--events", type=int, default=3000, help="turn ends and starts per policy")
    parser.add_argument("--fleets", type=int, default=10_000, help="random fleets against brute force")
    parser.add_argument("--policies", default="cost,paper,sticky_least_loaded", help="which to time")
    parser.add_argument(
        "--compiled", type=int, default=0, metavar="PAIRS", help="also as Python against `make compiled`"
    )
    arguments = parser.parse_args()
    scale = 10 if arguments.quick else 1
    num_workers, num_trajectories = 1000 // scale, 100_000 // scale
    num_live, num_events = 40_000 // scale, arguments.events // scale
    report = Report("routing")
    wrong = brute_force(arguments.fleets // scale, report)
    details: dict[str, Any] = {"policies": {}}
    if arguments.compiled:
        size = (num_workers, num_trajectories, num_live, num_events)
        details["compiled"] = compiled_against_python(
            arguments.compiled, arguments.policies.split(",")[0], size
        )
        print(f"compiled: {details['compiled']}")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        store, append_us = fill_store(directory, num_trajectories, report)
        commit = asyncio.run(commit_ms(store))
        rss = 0.0
        for policy in arguments.policies.split(","):
            fleet = Fleet(policy, num_workers, num_trajectories, num_live)
            restrain_collector()  # as the daemon does
            times = fleet.play(num_events, report, f"events under {policy}")
            fleet.book.check()
            details["policies"][policy] = {kind: quantiles_us(values) for kind, values in times.items()}
            rss = max(rss, rss_gb())
            del fleet
        journal_gb = store.journal.size_bytes / 2**30
        store.journal.close()
        del store
        gc.collect()
        again = restart(directory)
    rows = [
        (policy, kind, values["p50"], values["p99"], values["p999"])
        for policy, kinds in details["policies"].items()
        for kind, values in kinds.items()
    ]
    report.table(("policy", "event", "p50 us", "p99 us", "p99.9 us"), rows)
    worst = max(values["decide"]["p99"] for values in details["policies"].values())
    worst_cpu = max(values["decide_cpu"]["p99"] for values in details["policies"].values())
    details.update(
        num_workers=num_workers,
        num_trajectories=num_trajectories,
        tokens_per_trajectory=TURNS * TOKENS_PER_TURN,
        num_live_turns=num_live,
        journal_gb=round(journal_gb, 3),
        restart=again,
    )
    report.finish(
        {
            "decision_p99_us": worst,
            "decision_p50_us": max(values["decide"]["p50"] for values in details["policies"].values()),
            "decision_cpu_p99_us": worst_cpu,
            "decision_p99_us_limit": 200,
            "brute_force_differences": wrong,
            "brute_force_fleets": arguments.fleets // scale,
            "rss_gb": round(rss, 2),
            "rss_gb_limit": 4,
            "restart_s": again["restart_s"],
            "journal_append_us": round(append_us, 1),
            "journal_commit_ms": round(commit, 2),
            "journal_gb": round(journal_gb, 3),
        },
        details,
        arguments.json,
    )


if __name__ == "__main__":
    main()
