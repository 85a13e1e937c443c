#!/usr/bin/env python
"""On and off, again and again, under load: does production's memory come back to where it was, and are its answers vLLM's own?

1. *Stock*: vLLM without the plugin answers the requests of as many cycles as the longest life of production has, and its resident memory after
   each is noted: what vLLM alone keeps of them.  Then seeded prompts, one after the other: greedy tokens and their log-probs.
2. The same model as production beside a rollout engine that generates all the time (``tests/pair``).  Each cycle: ``on``; once
   memory is lent, requests of every kind at once (streams that are read to their end, streams that are left in the middle or
   before their first token, ``n=3``, structured output, prompts of most of the context); then a part of the prompts of 1, one after
   the other, *while rollouts generate*; then ``off``, and production's processes are measured.
3. In some of the cycles production is killed or ended while most of its memory is lent, and starts again.

Limits: no error; every token equal to stock vLLM's, log-probs within 1e-3; after every ``off`` all of the KV memory is
production's by the kernel's word; never more than the device has; and production's resident memory (``Rss`` of ``smaps_rollup``, all
its processes, without the KV memory) is back where it was: the median of the last five cycles is at most 16 MiB above the median of
five at the beginning (the very first left out), in each life of production of ten cycles or more, or not more above it than stock vLLM's and
16 MiB.  All engines run without oneDNN's cache of compiled primitives (1,024 of them, one for each length of a step): it alone makes the worker of
stock vLLM on the CPU grow by 5 to 10 MiB in each of the first thirty cycles.

    python benchmarks/cycles.py --json FILE          # 50 cycles, about 20 minutes on two quiet cores
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import aiohttp  # noqa: E402
import httpx  # noqa: E402

from benchmarks.lib.report import Report  # noqa: E402
from rose.shared_memory import SharedMemorySweep  # noqa: E402
from tests.engine_launcher import EngineServer  # noqa: E402
from tests.pair.load import Load  # noqa: E402
from tests.pair.memory import KV_BYTES, TOTAL_PAGES, present_bytes  # noqa: E402
from tests.pair.pair import PRODUCTION_ARGS, Pair, write_production  # noqa: E402

NAME = "cycles"
SEED = 51
MAX_MODEL_LEN = 2048
ARGS = (f"--max-model-len={MAX_MODEL_LEN}",)
NUM_PROMPTS, NUM_ASKED, ANSWER_TOKENS = 250, 5, 16
RESTARTS = {30: "ended", 37: "killed", 44: "killed"}
"""Cycles in which production starts again while memory is lent: late, so that one life is long enough to show growth."""
STOCK_CYCLES = min(RESTARTS)
TOLERANCE = 1e-3
GROWTH_BYTES = 16 << 20
NO_PRIMITIVES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
KINDS = ("Pss_Anon", "Pss_File", "Pss_Shmem")
STRUCTURED = ("w1", "w2", "w3")
"""Single words of the tiny tokenizer, none of which begins with another of its words: behind ``w1`` no token could go on to ``w10``."""


def prompt_of(number: int, seed: int) -> list[int]:
    rng = random.Random(f"{seed} prompt {number}")
    return [rng.randrange(5, 240) for _ in range(rng.randrange(8, 300))]


@dataclass(kw_only=True)
class Said:
    """A greedy answer: tokens as text, and the log-prob of each."""

    tokens: list[str]
    logprobs: list[float]


def ask(url: str, model: str, prompt: Sequence[int]) -> Said:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 1,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0)
    answer.raise_for_status()
    said = answer.json()["choices"][0]["logprobs"]
    return Said(tokens=said["tokens"], logprobs=said["token_logprobs"])


@dataclass(kw_only=True)
class Cycle:
    number: int
    held_pages: int = 0
    rollout_tokens: int = 0
    requests: int = 0
    errors: list[str] = field(default_factory=list)
    compared: int = 0
    different: int = 0
    logprob_diff: float = 0.0
    kv_pages_after: float = 0.0
    resident_bytes_after: int = 0
    """Of all production's processes together, without the KV memory."""
    kinds_after: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of each of its processes, with the KV memory, by kind (``Pss_Anon``, ``Pss_File``, ``Pss_Shmem``)."""
    restarted: str = ""


class Mix:
    """One request of each kind and several of the common ones, at once."""

    def __init__(self, url: str, model: str, rng: random.Random) -> None:
        self._url, self._model, self._rng = url, model, rng
        self.requests = 0
        self.errors: list[str] = []

    async def run(self) -> None:
        rng = self._rng
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=180.0)) as http:
            kinds = [self._whole(http, rng.randrange(8, 400)) for _ in range(6)]
            kinds += [self._left(http, tokens) for tokens in (0, 0, 1, rng.randrange(2, 30))]
            kinds += [self._several(http), self._structured(http), self._structured(http)]
            kinds += [self._whole(http, rng.randrange(1700, MAX_MODEL_LEN - 64)) for _ in range(2)]
            rng.shuffle(kinds)
            self.requests += len(kinds)
            for end in await asyncio.gather(*kinds, return_exceptions=True):
                if isinstance(end, BaseException):
                    self.errors.append(f"{type(end).__name__}: {end}")

    def _body(self, num_tokens: int, **more: Any) -> dict[str, Any]:
        prompt = [self._rng.randrange(5, 240) for _ in range(num_tokens)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": 32, "ignore_eos": True}
        # Without a seed of its own: vLLM 0.32 on the CPU dies of one whose prompt is read in several steps ("CPU Generator does not
        # use offset") in vLLM's sampler.
        return body | {"temperature": 1.0} | more

    async def _post(self, http: aiohttp.ClientSession, body: dict[str, Any]) -> list[dict[str, Any]]:
        async with http.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {(await response.text())[:200]}")
            return (await response.json())["choices"]

    async def _whole(self, http: aiohttp.ClientSession, num_tokens: int) -> None:
        choices = await self._post(http, self._body(num_tokens))
        if [choice["finish_reason"] for choice in choices] != ["length"]:
            raise RuntimeError(f"a whole answer ended with {choices[0]['finish_reason']!r}")

    async def _several(self, http: aiohttp.ClientSession) -> None:
        choices = await self._post(http, self._body(100, n=3))
        if [choice["finish_reason"] for choice in choices] != ["length"] * 3:
            raise RuntimeError("not three answers")

    async def _structured(self, http: aiohttp.ClientSession) -> None:
        structured = {"choice": list(STRUCTURED)}
        body = self._body(60, structured_outputs=structured, ignore_eos=False)
        (choice,) = await self._post(http, body)
        if choice["text"].strip() not in STRUCTURED:
            raise RuntimeError(f"structured output: {choice['text']!r}")

    async def _left(self, http: aiohttp.ClientSession, num_tokens: int) -> None:
        """A client that goes away after so many tokens."""
        body = self._body(300, stream=True, max_tokens=64)
        async with http.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}")
            seen = 0
            while seen < num_tokens and (line := await response.content.readline()):
                seen += line.startswith(b"data: {")


def look(found: Cycle, pids: Sequence[int], kv_bytes: int) -> None:
    """Note the resident memory of production's processes, of which ``kv_bytes`` are the KV memory."""
    found.resident_bytes_after = -kv_bytes
    for pid in pids:
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
            found.resident_bytes_after += sizes["Rss"]
            found.kinds_after[f"{name} {pid}"] = {kind: sizes[kind] for kind in KINDS}


async def cycle(pair: Pair, number: int, stock: Sequence[Said], seed: int) -> Cycle:
    found, rng = Cycle(number=number), random.Random(f"{seed} cycle {number}")
    await pair.until(lambda: pair.set_mode("on"), "the agent listens")
    await pair.lend()
    held = pair.rollout()
    found.held_pages = held.reserved_pages if held is not None else 0
    before = pair.rollouts.tokens
    mix = Mix(pair.url, str(pair.model), rng)
    first = len(pair.load.answers)
    await mix.run()
    await pair.load.pause()
    await pair.until(pair.is_lent, "memory is lent again after the burst")
    for index in rng.sample(range(len(stock)), NUM_ASKED):
        said = await asyncio.to_thread(ask, pair.url, str(pair.model), prompt_of(index, seed))
        found.compared += 1
        found.different += said.tokens != stock[index].tokens
        differences = [abs(a - b) for a, b in zip(said.logprobs, stock[index].logprobs, strict=True)]
        found.logprob_diff = max(found.logprob_diff, *differences)
    found.rollout_tokens = pair.rollouts.tokens - before
    pair.load.go_on()
    found.restarted = RESTARTS.get(number, "")
    if found.restarted:
        await pair.restart_production(kill=found.restarted == "killed")
    await pair.until(pair.off, "off is heard")
    await pair.until(pair.all_back, "all memory is back")
    await pair.load.pause()
    found.kv_pages_after = pair.memory.serving_pages
    await asyncio.to_thread(look, found, pair.production_pids(), present_bytes(found.kv_pages_after))
    pair.load.go_on()
    found.requests = mix.requests + len(pair.load.answers) - first
    found.errors = [*mix.errors, *(one.error for one in pair.load.answers[first:] if one.error)]
    return found


def growth_bytes(done: Sequence[Cycle]) -> list[int]:
    """Of each life of production of ten cycles or more: the median of its last five over that of its first five (the first left out,
    in which vLLM makes what it keeps)."""
    lives: list[list[int]] = [[]]
    for one in done:
        if one.restarted:
            lives.append([])
            continue
        lives[-1].append(one.resident_bytes_after)
    return [
        int(statistics.median(life[-5:]) - statistics.median(life[1:6])) for life in lives if len(life) >= 10
    ]


def summarise(done: Sequence[Cycle], stock: Sequence[Cycle], pair: Pair, wrong: int) -> dict[str, Any]:
    growths = growth_bytes(done)
    return {
        "cycles": len(done),
        "requests": sum(one.requests for one in done),
        "errors": sum(len(one.errors) for one in done),
        "errors_stock": sum(len(one.errors) for one in stock),
        "compared_with_stock": sum(one.compared for one in done),
        "different_from_stock": sum(one.different for one in done),
        "logprob_diff_max": max(one.logprob_diff for one in done),
        "answers_that_changed_under_load": wrong,
        "rollout_tokens": sum(one.rollout_tokens for one in done),
        "rollout_tokens_least_in_a_cycle": min(one.rollout_tokens for one in done),
        "held_pages_least": min(one.held_pages for one in done),
        "kv_pages_after_least": min(one.kv_pages_after for one in done),
        "worst_pages": pair.memory.worst_pages,
        "total_pages": TOTAL_PAGES,
        "memory_samples": pair.memory.num_samples,
        "resident_bytes_growth_max": max(growths, default=None),
        "resident_bytes_growth_stock": max(growth_bytes(stock), default=None),
        "restarts_while_lent": sum(bool(one.restarted) for one in done),
    }


def is_met(summary: dict[str, Any]) -> bool:
    growth, stock = (summary[f"resident_bytes_growth_{name}"] for name in ("max", "stock"))
    return (
        summary["errors"] == 0
        and summary["different_from_stock"] == 0
        and summary["logprob_diff_max"] <= TOLERANCE
        and summary["kv_pages_after_least"] == TOTAL_PAGES
        and summary["worst_pages"] <= TOTAL_PAGES
        and growth is not None  # too few cycles to say
        and growth <= GROWTH_BYTES + max(0, stock or 0)
    )


def ask_stock(folder: Path, seed: int, cycles: int, report: Report) -> tuple[list[Said], list[Cycle]]:
    """What vLLM says without the plugin, and its resident memory after the requests of each cycle."""
    write_production(folder)
    said: list[Said] = []
    with EngineServer(folder, env={"VLLM_PLUGINS": ""}, args=[*PRODUCTION_ARGS, *ARGS]) as server:
        done = asyncio.run(_cycles_of_stock(server, str(folder), seed, cycles, report))
        for number in range(NUM_PROMPTS):
            said.append(ask(server.url, str(folder), prompt_of(number, seed)))
            report.progress("stock", number + 1, NUM_PROMPTS)
    return said, done


async def _cycles_of_stock(
    server: EngineServer, model: str, seed: int, cycles: int, report: Report
) -> list[Cycle]:
    done: list[Cycle] = []
    async with Load(model, lambda: server.url, random.Random(f"load {seed}")) as load:
        await load.learn()
        for number in range(cycles):
            found, rng = Cycle(number=number), random.Random(f"{seed} cycle {number}")
            first = len(load.answers)
            mix = Mix(server.url, model, rng)
            await mix.run()
            await load.pause()
            for index in rng.sample(range(NUM_PROMPTS), NUM_ASKED):
                await asyncio.to_thread(ask, server.url, model, prompt_of(index, seed))
            answers = load.answers[first:]
            found.requests = mix.requests + len(answers)
            found.errors = [*mix.errors, *(one.error for one in answers if one.error)]
            look(found, [one.pid for one in server.processes()], KV_BYTES)
            done.append(found)
            load.go_on()
            report.progress("stock's cycles", number + 1, cycles)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("out/cycles.json"))
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cycle later than that")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    try:
        return asyncio.run(_main(args))
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130


async def _main(args: argparse.Namespace) -> int:
    until_s = time.monotonic() + args.minutes * 60.0
    report, logs = Report(NAME), args.json.parent / "cycles-logs"
    os.environ.setdefault(*NO_PRIMITIVES)  # every engine inherits it
    with SharedMemorySweep():
        control = min(args.cycles, STOCK_CYCLES)
        stock, stock_cycles = await asyncio.to_thread(
            ask_stock, logs / "production", args.seed, control, report
        )
        sizes = ", ".join(f"{one.resident_bytes_after / 2**20:.0f}" for one in stock_cycles)
        print(f"stock: resident {sizes} MiB", flush=True)
        done: list[Cycle] = []
        async with Pair(logs, seed=args.seed, args=ARGS) as pair:
            for number in range(args.cycles):
                began_s = time.monotonic()
                if done and began_s > until_s:
                    break
                done.append(await cycle(pair, number, stock, args.seed))
                one = done[-1]
                print(
                    f"{number + 1:3} of {args.cycles}  {time.monotonic() - began_s:5.1f} s  held {one.held_pages}, back "
                    f"{one.kv_pages_after:.0f} of {TOTAL_PAGES} resident {one.resident_bytes_after / 2**20:.0f} MiB  "
                    f"{one.requests} requests, {len(one.errors)} errors, {one.different} of {one.compared} differ, "
                    f"log-probs within {one.logprob_diff:.1e}, rollouts made {one.rollout_tokens} tokens {one.restarted}",
                    flush=True,
                )
            summary = summarise(done, stock_cycles, pair, pair.load.wrong)
    summary["bar_met"] = is_met(summary)
    details = {
        "seeds": [args.seed],
        "kv_bytes": KV_BYTES,
        "cycles": [asdict(one) for one in done],
        "stock_cycles": [asdict(one) for one in stock_cycles],
    }
    report.finish(summary, details, args.json)
    return 0 if summary["bar_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
