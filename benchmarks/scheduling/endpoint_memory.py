"""What the endpoint holds: bytes of journal and of memory per token, while trajectories run, after they ended, and at a restart.

``python -m benchmarks.scheduling.endpoint_memory --json FILE [--quick]``

A real ``rose-scheduler`` and a fake engine, each a process of its own, over HTTP.  A round is: begin trajectories, have each its turns (in one
of 16, the last turn has 16 choices with the five likeliest tokens of each position), finish, lease and acknowledge all of them.  Rounds
are equal but for their names.

- ``journal_bytes_per_token``, ``memory_bytes_per_token``: what a round added, when all of its turns had ended and none was finished, per sampled
  token; ``prompt_tokens_per_token`` says how many tokens of prompts came with each.
- ``left_mb``: resident memory after each round, all of it consumed; the first has what is made once, and what the
  allocator keeps.  ``growth_mb_per_round`` is the slope from the second on.
  Bar, written before the first run: a round adds at most 2 % of what was left after the one before (``growth_share``).
- ``restart_s``: from a SIGKILL with everything of the last round unfinished, to the first answer of the new process, and of
  that process's own CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.arms import Arm, end_all
from benchmarks.lib.report import Report
from rose.auth import Tokens, bearer

SPREAD_EVERY = 16
SPREAD_N = 16
TOP = 5
MANY_BYTES = 2**40
AT_ONCE = 32


class World:
    def __init__(self, folder: Path, max_tokens: int) -> None:
        self.folder = folder
        self.max_tokens = max_tokens
        self.tokens = Tokens.generate()
        self.tokens.save(folder / "tokens.toml")
        fake = [sys.executable, "-m", "rose.testing.fake_node", "--mean-tokens", str(4 * max_tokens)]
        self.engine = Arm("engine", [*fake, "--max-model-len", "100000"])
        (folder / "scheduler.toml").write_text(
            "port = 0\ncap_dedicated = 4096\n"
            f"[limits]\nmax_job_bytes = {MANY_BYTES}\nmax_held_bytes = {MANY_BYTES}\nretained_finals = 0\n"
            f'[[workers]]\nworker_id = "w"\nurl = "{self.engine.url}"\nmodel = "policy"\nmax_model_len = 100000\n'
        )
        self.start()

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "rose.scheduler.cli",
            "--config",
            str(self.folder / "scheduler.toml"),
        ]
        command += [
            "--token-file",
            str(self.folder / "tokens.toml"),
            "--journal",
            str(self.folder / "journal"),
        ]
        self.scheduler = Arm("scheduler", [*command, "--log-level", "warning"])

    @property
    def journal_bytes(self) -> int:
        return (self.folder / "journal" / "journal.rose").stat().st_size

    @property
    def memory_bytes(self) -> int:
        return psutil.Process(self.scheduler.process.pid).memory_info().rss

    async def call(
        self, session: aiohttp.ClientSession, role: str, method: str, path: str, body: Any = None
    ) -> Any:
        headers = bearer(getattr(self.tokens, role))
        async with session.request(method, self.scheduler.url + path, json=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"{method} {path}: {response.status} {(await response.text())[:300]}")
            return await response.json()

    async def ready(self, session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get(f"{self.scheduler.url}/readyz") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)

    async def turns(
        self, session: aiohttp.ClientSession, name: str, num_turns: int, *, spread: bool
    ) -> tuple[int, int]:
        """``(sampled tokens, tokens of prompts that were new)``."""
        messages: list[Any] = [{"role": "user", "content": f"{name}: " + "observation " * 30}]
        sampled = fresh = held = 0
        for turn in range(num_turns):
            many = spread and turn == num_turns - 1
            body = {"model": "policy", "messages": messages, "max_tokens": self.max_tokens}
            if many:
                body |= {"n": SPREAD_N, "logprobs": True, "top_logprobs": TOP}
            answer = await self.call(session, "environment", "POST", f"/s/{name}/v1/chat/completions", body)
            usage = answer["usage"]
            fresh += usage["prompt_tokens"] - held
            held = usage["prompt_tokens"] + usage["completion_tokens"]
            sampled += usage["completion_tokens"]
            messages += [
                answer["choices"][0]["message"],
                {"role": "user", "content": "and then " * 10},
            ]
        return sampled, fresh


async def run_round(
    world: World, session: aiohttp.ClientSession, number: int, args: argparse.Namespace, report: Report
) -> dict[str, Any]:
    """Begin and talk; nothing is finished."""
    names = []
    for _ in range(args.trajectories):
        made = await world.call(
            session, "environment", "POST", "/rose/v1/trajectories", {"job": f"r{number}"}
        )
        names.append(made["id"])
    before = (world.memory_bytes, world.journal_bytes)
    done = 0
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(at: int, name: str) -> tuple[int, int]:
        nonlocal done
        async with gate:
            counts = await world.turns(session, name, args.turns, spread=at % SPREAD_EVERY == 0)
        done += 1
        report.progress(f"round {number + 1} of {args.rounds}: trajectories", done, len(names))
        return counts

    counts = await asyncio.gather(*(one(at, name) for at, name in enumerate(names)))
    sampled, fresh = (sum(column) for column in zip(*counts, strict=True))
    return {
        "names": names,
        "sampled_tokens": sampled,
        "prompt_tokens": fresh,
        "memory_bytes": world.memory_bytes - before[0],
        "journal_bytes": world.journal_bytes - before[1],
    }


async def consume(
    world: World, session: aiohttp.ClientSession, number: int, names: list[str], report: Report
) -> None:
    for at, name in enumerate(names):
        path = f"/rose/v1/trajectories/{name}/finish"
        await world.call(session, "environment", "POST", path, {"reward": 1.0})
        report.progress("finished", at + 1, len(names))
    for at in range(0, len(names), 32):
        size = min(32, len(names) - at)
        asked = {"job": f"r{number}", "num_groups": size, "version": [0, 0]}
        batch = f"r{number}-{at}"
        await world.call(session, "trainer", "PUT", f"/rose/v1/batches/{batch}", asked)
        acked = {"step": at, "attempt": 0}
        await world.call(session, "trainer", "POST", f"/rose/v1/batches/{batch}/ack", acked)


async def measure(
    world: World, args: argparse.Namespace, report: Report
) -> tuple[dict[str, Any], dict[str, Any]]:
    rounds: list[dict[str, Any]] = []
    left_mb: list[float] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=120)) as session:
        await world.ready(session)
        for number in range(args.rounds):
            found = await run_round(world, session, number, args, report)
            names = found.pop("names")
            rounds.append(found)
            if number < args.rounds - 1:
                await consume(world, session, number, names, report)
                left_mb.append(world.memory_bytes / 2**20)
        journal_bytes = world.journal_bytes
        world.scheduler.process.send_signal(signal.SIGKILL)
        world.scheduler.process.wait()
        begun_s = time.monotonic()
        world.start()
        listed = await world.call(
            session, "environment", "GET", f"/rose/v1/trajectories?job=r{args.rounds - 1}"
        )
        restart_s = time.monotonic() - begun_s
        if len(listed["trajectories"]) != args.trajectories:
            raise RuntimeError(f"{len(listed['trajectories'])} trajectories are left of {args.trajectories}")
    steps = [after - before for before, after in itertools.pairwise(left_mb[1:])]
    sampled = rounds[0]["sampled_tokens"]
    summary = {
        "trajectories": args.trajectories,
        "turns": args.turns,
        "sampled_tokens": sampled,
        "prompt_tokens_per_token": rounds[0]["prompt_tokens"] / sampled,
        "journal_bytes_per_token": rounds[0]["journal_bytes"] / sampled,
        "memory_bytes_per_token": rounds[0]["memory_bytes"] / sampled,
        "growth_mb_per_round": statistics.mean(steps) if steps else None,
        "growth_share": statistics.mean(steps) / left_mb[0] if steps else None,
        "restart_s": restart_s,
        "restart_cpu_s": world.scheduler.cpu_s(),
        "restart_journal_mb": journal_bytes / 2**20,
    }
    return summary, {"rounds": rounds, "left_mb": left_mb}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--trajectories", type=int, default=2000, help="in a round")
    parser.add_argument("--turns", type=int, default=20, help="of a trajectory")
    parser.add_argument("--tokens", type=int, default=64, help="at most, of a choice")
    parser.add_argument("--rounds", type=int, default=5, help="the last one is the restart's")
    parser.add_argument(
        "--quick", action="store_true", help="100 trajectories of 6 turns; about half a minute"
    )
    args = parser.parse_args()
    if args.quick:
        args.trajectories, args.turns, args.rounds = 100, 6, 5
    signal.signal(signal.SIGTERM, end_all)
    report = Report("endpoint_memory")
    with tempfile.TemporaryDirectory() as name:
        world = World(Path(name), args.tokens)
        try:
            summary, details = asyncio.run(measure(world, args, report))
        finally:
            for arm in (world.scheduler, world.engine):
                arm.end()
    report.finish(summary, details, args.json)


if __name__ == "__main__":
    main()
