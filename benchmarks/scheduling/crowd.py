"""A thousand trajectories at once, and far fewer slots: who waits how long, beside a plain queue.

``python -m benchmarks.scheduling.crowd --json FILE [--quick]``

A real ``rose-scheduler`` and four fake engines (``rose.testing.fake_node``: 20 ms per token, no model), each a process of its own, over
HTTP.  1,000 agents begin within a second, 8 to a group; each has six turns of ``/rose/v1/generate`` whose prompt is all
of its tokens so far, and its environment takes its time between them.  Groups are of three kinds, drawn by the seed, members alike but for
what is drawn for each:

========  ==============  ================  =====================
kind      new per turn    output per turn   environment, mean
========  ==============  ================  =====================
short     16 tokens       4 to 12 tokens    0.1 s
medium    64 tokens       12 to 32 tokens   0.5 s
long      200 tokens      32 to 80 tokens   2.0 s (exponential)
========  ==============  ================  =====================

Arms, interleaved, of the same draws: ``rose`` as it comes; ``by_age`` the same with each turn's own age (``oldest_first_s = 0``);
``plain``: a queue by age and engines in turn (``policy = round_robin``, nothing waits for its prefix).  32 slots to an engine.

- ``turn_s``: from a turn's submission to its answer: p50, p99, max.
- ``groups_half_s``: when half of the groups were ready for a trainer; ``end_s``: when all were.
- ``fairness``: Jain's index, over groups, of how many times longer each took (from its first beginning to its last answer) than its
  slowest member would have taken alone; 1: all alike.  Within a kind: ``fairness_short`` and so on.

Bar, of medians of three rounds: no turn fails or is lost; ``rose`` has half of the groups ready no later than ``plain`` (at most 1.0 times),
all of them at most 1.05 times as late, and its p99 of a turn is at most 1.5 times ``plain``'s: turns of groups that began later
wait for those of earlier ones, on purpose.  Fairness is reported, and has no bar: ``rose`` serves groups in their order, which is not evenly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.arms import Arm, end_all, ok, run_load, scheduler_command, worker_table
from benchmarks.lib.report import Report
from benchmarks.lib.wire import connect, request
from rose.auth import Tokens
from rose.evaluation.statistics import percentile

SEED = 29
TOKEN_S = 0.02
GROUP = 8
TURNS = 6
NUM_ENGINES = 4
SLOTS = 32
KINDS: dict[str, tuple[int, tuple[int, int], float]] = {
    "short": (16, (4, 12), 0.1),
    "medium": (64, (12, 32), 0.5),
    "long": (200, (32, 80), 2.0),
}
ARMS = {
    "rose": "",
    "by_age": "oldest_first_s = 0\n",
    "plain": 'policy = "round_robin"\noldest_first_s = 0\naffine_wait_s = 0\n',
}


@dataclass(frozen=True)
class Agent:
    group: str
    kind: str
    start_s: float
    turns: tuple[tuple[int, int, float], ...]
    """New prompt tokens, output, and seconds that the environment takes afterwards."""

    @property
    def alone_s(self) -> float:
        return sum(output * TOKEN_S for _, output, _ in self.turns) + sum(t[2] for t in self.turns[:-1])


def agents(count: int, seed: int) -> list[Agent]:
    rng = random.Random(seed)
    found: list[Agent] = []
    for number in range(count // GROUP):
        kind = rng.choice(list(KINDS))
        fresh, (least, most), tool_s = KINDS[kind]
        for _ in range(GROUP):
            turns = tuple(
                (fresh, rng.randint(least, most), rng.expovariate(1 / tool_s)) for _ in range(TURNS)
            )
            found.append(Agent(f"g{number}", kind, rng.random(), turns))
    return found


def jain(values: Sequence[float]) -> float:
    """Jain, Chiu and Hawe 1984: ``(sum x)^2 / (n * sum x^2)``."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


class World:
    """One arm: engines and a scheduler, for one round."""

    def __init__(self, folder: Path, settings: str) -> None:
        tokens = Tokens.generate()
        tokens.save(folder / "tokens.toml")
        self.auth = f"Authorization: Bearer {tokens.environment}"
        fake = [sys.executable, "-m", "rose.testing.fake_node", "--token-s", str(TOKEN_S)]
        fake += ["--mean-tokens", "1000000000", "--max-model-len", "100000"]
        self.engines = [Arm(f"engine {at}", fake) for at in range(NUM_ENGINES)]
        workers = "".join(
            worker_table(f"w{at}", engine.url, "policy") for at, engine in enumerate(self.engines)
        )
        command = scheduler_command(folder, f"cap_dedicated = {SLOTS}\n{settings}{workers}")
        self.scheduler = Arm("scheduler", command)

    def end(self) -> None:
        for arm in (self.scheduler, *self.engines):
            arm.end()

    async def play(self, crowd: list[Agent], report: Report) -> dict[str, Any]:
        """All of them; what each turn and each group took."""
        begun_s = time.monotonic()
        turn_s: list[float] = []
        ends: dict[str, list[float]] = defaultdict(list)
        begins: dict[str, list[float]] = defaultdict(list)

        async def one(agent: Agent) -> None:
            await asyncio.sleep(agent.start_s)
            begins[agent.group].append(time.monotonic())
            client = await connect(self.scheduler.port)
            body = {"job": "crowd", "group_id": agent.group, "group_size": GROUP, "task_kind": agent.kind}
            made = json.loads(
                await ok(client, request("/rose/v1/trajectories", json.dumps(body).encode(), self.auth))
            )
            client.close()
            client = await connect(self.scheduler.port)  # agents have connections of their own
            ids: list[int] = []
            for turn, (fresh, output, tool_s) in enumerate(agent.turns):
                ids += [100 + (turn * 7 + at) % 50 for at in range(fresh)]
                asked = {"token_ids": ids, "sampling_params": {"max_tokens": output, "temperature": 1.0}}
                asked_s = time.monotonic()
                answer = await ok(
                    client,
                    request(
                        "/rose/v1/generate",
                        json.dumps(asked).encode(),
                        self.auth,
                        f"X-Session-ID: {made['id']}",
                    ),
                )
                turn_s.append(time.monotonic() - asked_s)
                found = json.loads(answer)
                if len(found["token_ids"]) != output or found["turn"] != turn:
                    raise RuntimeError(f"turn {turn} gave {len(found['token_ids'])} tokens of {output}")
                ids += found["token_ids"]
                report.progress("turns", len(turn_s), len(crowd) * TURNS)
                if turn + 1 < TURNS:
                    await asyncio.sleep(tool_s)
            ends[agent.group].append(time.monotonic())
            client.close()

        await asyncio.gather(*map(one, crowd))
        alone: dict[str, float] = defaultdict(float)
        kinds = {agent.group: agent.kind for agent in crowd}
        for agent in crowd:
            alone[agent.group] = max(alone[agent.group], agent.alone_s)
        slower = {name: (max(ends[name]) - min(begins[name])) / alone[name] for name in ends}
        ready = sorted(max(each) - begun_s for each in ends.values())
        return {
            "turn_p50_s": percentile(turn_s, 0.5),
            "turn_p99_s": percentile(turn_s, 0.99),
            "turn_max_s": max(turn_s),
            "num_turns": len(turn_s),
            "groups_half_s": ready[len(ready) // 2],
            "end_s": ready[-1],
            "fairness": jain(list(slower.values())),
            **{
                f"fairness_{kind}": jain([slower[name] for name in slower if kinds[name] == kind])
                for kind in KINDS
                if kind in kinds.values()
            },
            "slower_median": statistics.median(slower.values()),
            "slower_max": max(slower.values()),
            "cpu_s": self.scheduler.cpu_s(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of 160; half a minute")
    args = parser.parse_args()
    if args.quick:
        args.agents, args.rounds = 160, 1
    signal.signal(signal.SIGTERM, end_all)
    report = Report("crowd")
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    for number in range(args.rounds):
        crowd = agents(args.agents, SEED + number)
        for name, settings in ARMS.items():
            with tempfile.TemporaryDirectory() as folder:
                world = World(Path(folder), settings)
                try:
                    found = run_load(name, lambda world=world, crowd=crowd: world.play(crowd, report))
                finally:
                    world.end()
            rounds[name].append(found)
            print(
                f"{number} {name:7} " + " ".join(f"{key} {value:.3g}" for key, value in found.items()),
                flush=True,
            )
    mid = {
        name: {key: statistics.median(each[key] for each in found) for key in found[0]}
        for name, found in rounds.items()
    }
    plain, rose = mid["plain"], mid["rose"]
    summary: dict[str, Any] = {
        "agents": args.agents,
        "half_ratio": rose["groups_half_s"] / plain["groups_half_s"],
        "end_ratio": rose["end_s"] / plain["end_s"],
        "p99_ratio": rose["turn_p99_s"] / plain["turn_p99_s"],
    }
    summary |= {f"{name}_{key}": value for name, found in mid.items() for key, value in found.items()}
    report.finish(summary, {"rounds": rounds}, args.json)


if __name__ == "__main__":
    main()
