"""A scheduler and its stand-by: the active one is killed again and again under load; what is lost, what is doubled, how long nobody answers.

``python -m benchmarks.scheduling.standby --json FILE [--quick]``

Two ``rose-scheduler --standby`` on one journal and two fake engines, each a process of its own; in this process agents, of whom each has one
trajectory of several turns after the other, and two trainers, who lease and acknowledge batches.  All of them know both schedulers'
addresses, and nothing else of what happens.  The active one gets a SIGKILL at a seeded moment, and is started again as the stand-by.

- ``lost``: trajectories whose finish was answered and which no trainer got; tokens of answered turns that the trainer did not get.
- ``doubled``: trajectories that were acknowledged twice, or turns that stand twice in one.
- ``wrong_turns``: whose tokens are not those that the model samples from their prompt.
- ``failed_calls``: that agents or trainers were told of.
- ``takeover_s``: from the SIGKILL to the first turn that an agent was answered; ``ready_s``: until the stand-by said that it answers.

Bar: lost, doubled, wrong and failed 0; every takeover under 5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.arms import Arm, end_all
from benchmarks.lib.report import Report
from rose.auth import Tokens
from rose.errors import RoseError
from rose.proc import free_port
from rose.testing.fake_engine import FakeEngine
from rose.train.client import SchedulerClient

SEED = 11
JOB = "standby"
MAX_TOKENS = 32
TOKEN_S = 0.2
RETRY_S = 600.0
"""A client gives up when its connection broke again and again for this long: with 500 agents a turn takes longer than from one kill to the next."""
GROUPS = 16
"""Of a batch."""


class Pair:
    """The two schedulers, of which ``active`` answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = (free_port(), free_port())
        self.active = self.start(0)
        self.other = self.start(1)

    @property
    def urls(self) -> str:
        return ",".join(f"http://127.0.0.1:{port}" for port in self.ports)

    def start(self, index: int) -> Arm:
        command = [sys.executable, "-m", "rose.scheduler.cli", "--standby", "--port", str(self.ports[index])]
        command += [
            "--token-file",
            str(self.folder / "tokens.toml"),
            "--journal",
            str(self.folder / "journal"),
        ]
        command += ["--set", "cap_dedicated=512", "--set", "limits.retained_finals=0", "--log-level", "error"]
        return Arm(f"scheduler {index}", command, ready="rose-scheduler ")

    async def kill(self) -> tuple[float, float]:
        """``(when, when the other one said that it answers)``; the killed one stands by again when this returns."""
        killed, taker = self.active, self.other
        killed_at_s = time.monotonic()
        killed.process.send_signal(signal.SIGKILL)
        line = await asyncio.to_thread(taker.process.stdout.readline)  # type: ignore[union-attr]
        ready_at_s = time.monotonic()
        if "ready at" not in line:
            raise RuntimeError(f"the stand-by did not take over: {line!r} {taker.last_words()}")
        index = self.ports.index(killed.port)
        killed.end()
        self.active, self.other = taker, await asyncio.to_thread(self.start, index)
        return killed_at_s, ready_at_s


class Load:
    def __init__(self, client: SchedulerClient, report: Report) -> None:
        self.client, self.report = client, report
        self.finished: set[str] = set()
        self.num_turns: dict[str, int] = {}
        self.acked: Counter[str] = Counter()
        self.answered_at_s: list[float] = []
        self.failed: list[str] = []
        self.num_wrong = self.num_repeated = self.num_missing = 0
        self.model = FakeEngine()
        self.is_ending = asyncio.Event()
        self.is_over = asyncio.Event()

    async def agent(self, number: int, num_turns: int) -> None:
        count = 0
        while not self.is_ending.is_set():
            count += 1
            try:
                begun = await self.client.create_trajectory(
                    job=JOB, group_id=f"{number}-{count}", group_size=1, task={}
                )
                messages: list[Any] = [{"role": "user", "content": f"task {number}.{count}"}]
                for turn in range(num_turns):
                    said = await self.client.chat(
                        begun.key,
                        turn,
                        model="policy",
                        messages=messages,
                        temperature=1.0,
                        max_tokens=MAX_TOKENS,
                    )
                    self.answered_at_s.append(time.monotonic())
                    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "next"}]
                await self.client.finish(begun.id, reward=1.0, success=True, info={})
            except RoseError as error:
                self.failed.append(f"agent: {error}")
                continue
            self.finished.add(begun.id)
            self.num_turns[begun.id] = num_turns

    async def trainer(self, name: str) -> None:
        step = 0
        while not self.is_over.is_set():
            step += 1
            try:
                leased = await self.client.lease(
                    job=JOB,
                    num_groups=1 if self.is_ending.is_set() else GROUPS,
                    attempt=0,
                    version=0,
                    ttl_s=600.0,
                    wait_s=0.5,
                    name=f"{name}-{step}",
                    consumer=name,
                )
                if leased is None:
                    continue
                batch, trajectories = leased
                await self.client.ack(batch, step=step, attempt=0)
            except RoseError as error:
                self.failed.append(f"{name}: {error}")
                continue
            for trajectory in trajectories:
                self.acked[trajectory["id"]] += 1
                self._look_at(trajectory)

    def _look_at(self, trajectory: dict[str, Any]) -> None:
        held: list[int] = []
        turns = trajectory["turns"]
        self.num_missing += max(0, self.num_turns.get(trajectory["id"], len(turns)) - len(turns))
        for at, turn in enumerate(turns):
            # Each turn has the end of its prompt: what its parent holds comes in front.
            if turn["parent"] != (at - 1 if at else None):
                self.num_repeated += 1
            prompt = held + turn.get("suffix_token_ids", turn.get("prompt_token_ids"))
            expected, _, _ = self.model.greedy(prompt, {"max_tokens": MAX_TOKENS})
            self.num_wrong += turn["token_ids"] != expected
            held = prompt + turn["token_ids"]


async def measure(
    pair: Pair, tokens: Tokens, args: argparse.Namespace, report: Report
) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = random.Random(SEED)
    kills: list[dict[str, float]] = []
    async with SchedulerClient(
        pair.urls,
        environment_token=tokens.environment,
        trainer_token=tokens.trainer,
        retry_s=RETRY_S,
    ) as client:
        load = Load(client, report)
        agents = [asyncio.create_task(load.agent(number, args.turns)) for number in range(args.trajectories)]
        trainers = [asyncio.create_task(load.trainer(name)) for name in ("first", "second")]
        async with asyncio.timeout(120):
            while len(load.finished) < args.trajectories // 4:  # noqa: ASYNC110 - any of many
                await asyncio.sleep(0.05)
        for number in range(args.kills):
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            killed_at_s, ready_at_s = await pair.kill()
            async with asyncio.timeout(60):
                while not load.answered_at_s or load.answered_at_s[-1] <= ready_at_s:  # noqa: ASYNC110 - the same
                    await asyncio.sleep(0.005)
            first = next(at_s for at_s in load.answered_at_s if at_s > ready_at_s)
            kills.append({"ready_s": ready_at_s - killed_at_s, "takeover_s": first - killed_at_s})
            report.progress("kills", number + 1, args.kills)
            for each in (*agents, *trainers):
                if each.done():
                    each.result()  # they end when they are told to, or for a reason
        load.is_ending.set()
        await asyncio.gather(*agents)
        async with asyncio.timeout(120):
            while len(load.acked) < len(load.finished) and not all(each.done() for each in trainers):
                report.progress("consumed", len(load.acked), len(load.finished))
                await asyncio.sleep(0.2)
        load.is_over.set()
        await asyncio.gather(*trainers)
    takeovers = sorted(one["takeover_s"] for one in kills)
    summary = {
        "trajectories_at_once": args.trajectories,
        "trainers": len(trainers),
        "kills": len(kills),
        "trajectories": len(load.finished),
        "turns": len(load.answered_at_s),
        "lost": len(load.finished - load.acked.keys()) + load.num_missing,
        "doubled": sum(count > 1 for count in load.acked.values()) + load.num_repeated,
        "wrong_turns": load.num_wrong,
        "failed_calls": len(load.failed),
        "takeover_s_median": statistics.median(takeovers),
        "takeover_s_max": takeovers[-1],
        "ready_s_median": statistics.median(one["ready_s"] for one in kills),
        "ready_s_max": max(one["ready_s"] for one in kills),
    }
    return summary, {"seed": SEED, "kills": kills, "failures": load.failed[:20]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--trajectories", type=int, default=500, help="at once")
    parser.add_argument("--turns", type=int, default=4, help="of a trajectory")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--quick", action="store_true", help="60 trajectories at once, 4 kills; under a minute"
    )
    args = parser.parse_args()
    if args.quick:
        args.trajectories, args.kills = 60, 4
    signal.signal(signal.SIGTERM, end_all)
    report = Report("standby")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = Tokens.generate()
        tokens.save(folder / "tokens.toml")
        pair = Pair(folder)
        fake = [sys.executable, "-m", "rose.testing.fake_node", "--scheduler", pair.urls]
        fake += ["--token-file", str(folder / "tokens.toml"), "--token-s", str(TOKEN_S)]
        engines = [Arm(f"engine {index}", [*fake, "--worker-id", f"w{index}"]) for index in range(2)]
        try:
            summary, details = asyncio.run(measure(pair, tokens, args, report))
        finally:
            for arm in (pair.active, pair.other, *engines):
                arm.end()
    report.finish(summary, details, args.json)


if __name__ == "__main__":
    main()
