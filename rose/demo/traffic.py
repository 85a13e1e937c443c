"""The production traffic sender: one process, open loop, one JSON line per finished request.

``python -m rose.demo.traffic PLAN.json`` replays the plan's period again and again against a vLLM
``/v1/completions`` endpoint (streaming, token-id prompts) until SIGTERM or ``MAX_RECORDS``.  It is a process
of its own so that the demo can pin and prioritise it: a load generator that competes with what it measures
measures itself.

* **Open loop.** Every request is sent at its scheduled moment whether or not earlier ones have ended,
  and every latency counts from the *scheduled* moment, so a late sender shows up in the figures
  instead of hiding in them (`late_s` says how late).
* **Phases.** The phase file holds ``{"phase": NAME, "restart": bool}``; the name in force when a cycle begins
  labels every request of that cycle.  ``restart`` begins a new cycle at once.  Replace the file atomically.
* **Pairs.** Request ``index`` has the same moment and lengths in every cycle.  Its tokens differ each time:
  equal prompts would hit the prefix cache and make the later arm look faster.

Output lines: ``{"type": "cycle", cycle, phase, at_s}`` and ``{"type": "request", ...}``
(:class:`RequestRecord`).
Times are seconds on CLOCK_MONOTONIC, comparable with every other process of this machine.
A failed request is a record with ``error`` set, never an exception; nothing is retried.

aiohttp, not httpx: a load generator takes CPU time from production's machine, and httpx needs a multiple of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import numpy as np
from pydantic import Field

from rose.auth import bearer
from rose.config import Section, validate
from rose.errors import ConfigError, RoseError
from rose.evaluation.arrivals import MAX_ARRIVALS, Arrival

MAX_RECORDS = 200_000
MAX_IN_FLIGHT = 512
"""Beyond it a request is recorded as an error: the endpoint is dead, and our memory must stay bounded."""
MAX_PLAN_BYTES = 16 * 2**20
MAX_LINE_BYTES = 1 << 20
FIRST_START_DELAY_S = 0.2
DRAIN_S = 5.0
MAX_PREFIX_TOKENS = 4096
KEEPALIVE_S = 2.0
"""Below the 5 s after which vLLM's server closes an idle connection: a request that goes out on a connection
which the server is just closing fails, and would count as production's failure."""
ENV_API_KEY = "ROSE_PRODUCTION_API_KEY"


class TrafficPlan(Section):
    """What one sender process does; written as JSON by the orchestrator."""

    url: str
    model: str
    period_s: float
    arrivals: list[tuple[float, int, int]]
    """``(at_s, prompt_tokens, output_tokens)`` of one period."""
    prefixes: list[tuple[int, int, int, int]] = Field(default_factory=list[tuple[int, int, int, int]])
    """``(stream, tokens, stream, tokens)`` of each arrival, or empty: its prompt begins with tokens of the first
    stream, then of the second.  Arrivals that name the same streams share those tokens: turns of one session."""
    models: list[str] = Field(default_factory=list[str])
    """What each arrival asks for, or empty: ``model``.  An engine with adapters answers to their names too."""
    seed: int
    token_id_low: int
    token_id_high: int
    """Prompt token ids are drawn from ``[low, high)``: keep special tokens out."""
    phase_file: str
    out_file: str
    request_timeout_s: float = 60.0

    def to_arrivals(self) -> list[Arrival]:
        return [Arrival(at_s=at, prompt_tokens=p, output_tokens=o) for at, p, o in self.arrivals]


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """One request as the client saw it.

    ``ttft_s`` and ``end_s`` count from the scheduled moment.  ``itl_s`` are the gaps between streamed
    chunks, which is what a reader of the stream notices; the longest of them is the stall.
    """

    phase: str
    cycle: int
    index: int
    at_s: float
    late_s: float
    prompt_tokens: int
    output_tokens: int
    num_tokens: int = 0
    ttft_s: float | None = None
    end_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    error: str | None = None


class PhaseFile:
    """The phase in force.  :meth:`current` costs one ``stat`` while nothing changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._phase = "startup"

    def current(self) -> tuple[str, bool]:
        """The phase, and whether a new cycle shall begin now.  A missing or torn file changes nothing."""
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp == self._stamp:
                return self._phase, False
            content = json.loads(self._path.read_bytes()[:4096])
            self._phase, restart = str(content["phase"])[:64], bool(content.get("restart", False))
            self._stamp = stamp
            return self._phase, restart
        except (OSError, ValueError, KeyError, TypeError):
            return self._phase, False


def write_phase(path: Path, phase: str, *, restart: bool = False) -> None:
    """Set the phase for the sender; atomic."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"phase": phase, "restart": restart}))
    os.replace(temporary, path)


class LoadGenerator:
    """Replays one plan.  ``run`` returns when :meth:`stop` was called and requests in flight have ended."""

    def __init__(self, plan: TrafficPlan, out: TextIO) -> None:
        self._plan = plan
        self._arrivals = plan.to_arrivals()
        self._out = out
        self._phases = PhaseFile(Path(plan.phase_file))
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_records = 0

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        # A proxy of the environment must not sit between us and the loopback endpoint: trust_env stays off.
        timeout = aiohttp.ClientTimeout(total=self._plan.request_timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        headers = bearer(os.environ[ENV_API_KEY]) if os.environ.get(ENV_API_KEY) else {}
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, headers=headers, read_bufsize=MAX_LINE_BYTES
        ) as http:
            start_s = time.monotonic() + FIRST_START_DELAY_S
            cycle = 0
            while not self._stopping.is_set() and self._num_records < MAX_RECORDS:
                start_s = await self._run_cycle(http, cycle, start_s)
                cycle += 1
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=DRAIN_S)
            for task in self._tasks:
                task.cancel()  # a request cut by our own end is no failure of production: no record
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run_cycle(self, http: aiohttp.ClientSession, cycle: int, start_s: float) -> float:
        """Send one period; return the start of the next."""
        phase, _ = self._phases.current()
        self._write({"type": "cycle", "cycle": cycle, "phase": phase, "at_s": start_s})
        for index, arrival in enumerate(self._arrivals):
            if await self._sleep_until(start_s + arrival.at_s):
                return time.monotonic()
            if self._phases.current()[1]:
                return time.monotonic() + FIRST_START_DELAY_S
            record = RequestRecord(
                phase=phase,
                cycle=cycle,
                index=index,
                at_s=start_s + arrival.at_s,
                late_s=max(0.0, time.monotonic() - start_s - arrival.at_s),
                prompt_tokens=arrival.prompt_tokens,
                output_tokens=arrival.output_tokens,
            )
            if len(self._tasks) >= MAX_IN_FLIGHT:
                record.error = f"not sent: {MAX_IN_FLIGHT} requests are in flight"
                self._finish(record)
                continue
            task = asyncio.create_task(self._send(http, record))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        end_s = start_s + self._plan.period_s
        await self._sleep_until(end_s)
        return end_s

    async def _sleep_until(self, at_s: float) -> bool:
        """True when the sender was told to stop."""
        delay_s = at_s - time.monotonic()
        if delay_s > 0 and not self._stopping.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
        return self._stopping.is_set()

    async def _send(self, http: aiohttp.ClientSession, record: RequestRecord) -> None:
        plan = self._plan
        body = {
            "model": plan.models[record.index] if plan.models else plan.model,
            "prompt": prompt_tokens(plan, record.cycle, record.index, record.prompt_tokens),
            "max_tokens": record.output_tokens,
            "ignore_eos": True,  # equal lengths in every arm
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with http.post(f"{plan.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    text = (await response.content.read(300)).decode(errors="replace")
                    record.error = f"HTTP {response.status}: {' '.join(text.split())[:200]}"
                else:
                    await self._read_stream(response, record)
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            record.error = f"no answer within {plan.request_timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"[:200]
        except (AttributeError, KeyError, TypeError) as error:  # JSON of another shape than ours
            record.error = f"not a stream of completions: {type(error).__name__}: {error}"[:200]
        self._finish(record)

    async def _read_stream(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        last_s: float | None = None
        done = False
        async for line in response.content:
            now_s = time.monotonic()
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                done = True
                break
            chunk: dict[str, Any] = json.loads(payload)
            if chunk.get("error"):
                record.error = f"in stream: {str(chunk['error'])[:180]}"
                return
            if usage := chunk.get("usage"):
                record.num_tokens = int(usage["completion_tokens"])
            if not chunk.get("choices"):
                continue
            if last_s is None:
                record.ttft_s = now_s - record.at_s
            else:
                record.itl_s.append(round(now_s - last_s, 6))
            last_s = now_s
        record.end_s = time.monotonic() - record.at_s
        if not done or last_s is None:
            record.error = "the stream ended early"
        elif record.num_tokens != record.output_tokens:
            record.error = f"{record.num_tokens} tokens, asked for {record.output_tokens}"

    def _finish(self, record: RequestRecord) -> None:
        self._write({"type": "request", **asdict(record)})
        self._num_records += 1

    def _write(self, line: dict[str, Any]) -> None:
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()


def prompt_tokens(plan: TrafficPlan, cycle: int, index: int, num_tokens: int) -> list[int]:
    """The token ids of one request; distinct in every cycle (see the module's note on pairs)."""
    head: list[int] = []
    if plan.prefixes:
        first, num_first, second, num_second = plan.prefixes[index]
        head = _stream_tokens(plan, 2 * first, num_first) + _stream_tokens(plan, 2 * second + 1, num_second)
    rng = np.random.default_rng([plan.seed, cycle, index])
    rest = rng.integers(plan.token_id_low, plan.token_id_high, max(0, num_tokens - len(head)))
    return head[:num_tokens] + rest.tolist()


def _stream_tokens(plan: TrafficPlan, stream: int, num_tokens: int) -> list[int]:
    """The first tokens of an endless stream: a longer request of the same stream begins with a shorter one."""
    rng = np.random.default_rng([plan.seed, 0x57EA, stream])
    block = rng.integers(plan.token_id_low, plan.token_id_high, MAX_PREFIX_TOKENS)
    return block[:num_tokens].tolist()


def load_plan(path: Path) -> TrafficPlan:
    """Read and check a plan file.

    Raises:
        ConfigError: Not readable, too large, or a field is wrong.
    """
    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_PLAN_BYTES} bytes", field="plan")
        plan = validate(TrafficPlan, json.loads(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field="plan") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", field="plan") from error
    times = [at for at, _, _ in plan.arrivals]
    if not 1 <= len(times) <= MAX_ARRIVALS:
        raise ConfigError(f"must hold 1 to {MAX_ARRIVALS} requests, got {len(times)}", field="arrivals")
    if times != sorted(times) or times[0] < 0 or times[-1] >= plan.period_s:
        raise ConfigError("times must rise from 0 and end before period_s", field="arrivals")
    if any(prompt < 1 or output < 1 for _, prompt, output in plan.arrivals):
        raise ConfigError("lengths must be 1 or more", field="arrivals")
    if plan.prefixes and len(plan.prefixes) != len(times):
        raise ConfigError(f"must be one per arrival or none, got {len(plan.prefixes)}", field="prefixes")
    if plan.models and len(plan.models) != len(times):
        raise ConfigError(f"must be one per arrival or none, got {len(plan.models)}", field="models")
    if any(not 0 <= tokens <= MAX_PREFIX_TOKENS for _, a, _, b in plan.prefixes for tokens in (a, b)):
        raise ConfigError(f"lengths must be 0 to {MAX_PREFIX_TOKENS}", field="prefixes")
    if not 0 <= plan.token_id_low < plan.token_id_high:
        raise ConfigError("must lie above token_id_low, which must be 0 or more", field="token_id_high")
    return plan


async def send_forever(plan: TrafficPlan) -> None:
    """Replay ``plan`` until SIGTERM or SIGINT."""
    with Path(plan.out_file).open("a") as out:  # noqa: ASYNC230 - a local file, opened once
        sender = LoadGenerator(plan, out)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, sender.stop)
        await sender.run()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rose.demo.traffic", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("plan", type=Path, help="TrafficPlan as JSON")
    try:
        asyncio.run(send_forever(load_plan(parser.parse_args().plan)))
    except RoseError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
