"""Programs under measurement and the load that is put on them.

Only for benchmarks.  Nothing here waits for ever: a program that does not start, and a load that gets no byte for
:data:`SILENCE_S`, end the benchmark with the state of every program (:class:`Stuck`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.wire import Client, connect

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
SILENCE_S = 60.0
"""A gateway that sends nothing for this long, with requests waiting, never will."""

T = TypeVar("T")


class Stuck(RuntimeError):
    """Nothing moves any more."""


class Arm:
    """A program between load and upstream."""

    running: ClassVar[list[Arm]] = []

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        ready: str = "ready",
        url: str = "",
        folder: Path = ROOT,
        compiled: bool | None = None,
    ) -> None:
        self.name = name
        chosen = {} if compiled is None else {"ROSE_COMPILED": str(int(compiled))}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by end()
        self.process = subprocess.Popen(
            command,
            stdout=self.log if url else subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=folder,
            # LiteLLM would look for prices on the network.
            env={
                **os.environ,
                **chosen,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            },
            start_new_session=True,
        )
        self.url = url
        self.running.append(self)
        if not url:
            assert self.process.stdout is not None
            late = threading.Timer(START_S, self.process.kill)
            late.start()
            try:
                for line in self.process.stdout:
                    if ready in line:
                        self.url = line.split()[-1]
                        break
                else:
                    raise RuntimeError(f"{name} did not start in {START_S:g} s: {self.last_words()}")
            finally:
                late.cancel()
        self.port = int(self.url.rsplit(":", 1)[1])

    def cpu_s(self) -> float:
        """Of the process tree, threads that have ended included, in nanoseconds and not in clock ticks."""
        top = psutil.Process(self.process.pid)
        # The CPU clock of another process: clock_getcpuclockid(3) makes the same number.
        return sum(time.clock_gettime((~each.pid << 3) | 2) for each in (top, *top.children(recursive=True)))

    def memory_mb(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 2**20

    def last_words(self) -> str:
        self.log.seek(0)
        return self.log.read()[-400:].strip()

    def state(self) -> str:
        """One line for people: does it live, does it run, how many connections has it."""
        try:
            process = psutil.Process(self.process.pid)
            num = sum(each.status == "ESTABLISHED" for each in process.net_connections("tcp"))
            return f"{self.name} ({process.pid}): {process.status()}, {self.cpu_s():.1f} CPU-s, {num} connections"
        except (psutil.Error, OSError):
            return f"{self.name}: ended with {self.process.poll()}: {self.last_words()}"

    def stop(self) -> None:
        if self.process.poll() is None:
            try:
                os.killpg(self.process.pid, 15)
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, 9)
                self.process.wait()

    def end(self) -> None:
        self.stop()
        self.log.close()
        if self in self.running:
            self.running.remove(self)


def end_all(*_: object) -> None:
    """On SIGTERM: arms are sessions of their own, which nobody else would end."""
    for arm in Arm.running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(arm.process.pid, 9)
    os._exit(143)


def run_load(what: str, work: Callable[[], Coroutine[Any, Any, T]], *, silence_s: float = SILENCE_S) -> T:
    """Run ``work`` to its end.

    Raises:
        Stuck: No byte came from any gateway for ``silence_s``.
    """

    async def watched() -> T:
        task = asyncio.ensure_future(work())
        while True:
            before = Client.num_reads
            done, _ = await asyncio.wait({task}, timeout=silence_s)
            if done:
                return task.result()
            if Client.num_reads == before:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                states = "\n  ".join(arm.state() for arm in Arm.running)
                raise Stuck(f"{what}: nothing came for {silence_s:g} s\n  {states}")

    return asyncio.run(watched())


async def closed_loop(port: int, requests: list[bytes], num_clients: int) -> list[bytes]:
    """All ``requests``, ``num_clients`` at a time; their answers in any order.  Raises on any that is not 200."""
    left = iter(requests)
    answers: list[bytes] = []

    async def one() -> None:
        client = await connect(port)
        answers.extend([await ok(client, each) for each in left])
        client.close()

    await asyncio.gather(*(one() for _ in range(num_clients)))
    return answers


async def ok(client: Client, request: bytes) -> bytes:
    status, body = await client.ask(request)
    if status != 200:
        raise RuntimeError(f"{status}: {body[:300]!r}")
    return body


async def open_loop(port: int, make: Callable[[], bytes], rate_hz: float, seconds: float) -> list[float]:
    """Latencies in seconds, from the time a request was due."""
    free: list[Client] = []
    latencies: list[float] = []
    tasks: list[asyncio.Task[None]] = []

    async def one(due_s: float) -> None:
        client = free.pop() if free else await connect(port)
        await ok(client, make())
        latencies.append(time.monotonic() - due_s)
        free.append(client)

    begun_s = time.monotonic()
    for index in range(int(rate_hz * seconds)):
        due_s = begun_s + index / rate_hz
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        tasks.append(asyncio.create_task(one(due_s)))
    await asyncio.gather(*tasks)
    for client in free:
        client.close()
    return latencies


async def streams(port: int, make: Callable[[], bytes], count: int, ramp_s: float) -> dict[str, float]:
    """Open ``count`` streams over ``ramp_s``; the longest silence of each after its first bytes."""
    gaps: list[float] = []
    chunks = 0

    async def one(index: int) -> None:
        nonlocal chunks
        await asyncio.sleep(ramp_s * index / count)
        client = await connect(port)
        last, worst = 0.0, 0.0

        def seen(data: bytes) -> None:
            nonlocal last, worst, chunks
            now = time.monotonic()
            if last:
                worst = max(worst, now - last)
            last = now
            chunks += data.count(b"data:")

        client.on_data = seen
        body = await ok(client, make())
        client.close()
        if b"data: [DONE]" not in body or b'"error"' in body:
            raise RuntimeError(f"a stream ended badly: {body[-300:]!r}")
        gaps.append(worst)

    begun_s = time.monotonic()
    await asyncio.gather(*(one(index) for index in range(count)))
    gaps.sort()
    return {
        "streams": count,
        "events": chunks,
        "seconds": round(time.monotonic() - begun_s, 2),
        "gap_median_s": round(statistics.median(gaps), 3),
        "gap_max_s": round(gaps[-1], 3),
        "stalled_over_1s": sum(gap > 1.0 for gap in gaps),
    }


def worker_table(worker_id: str, url: str, model: str) -> str:
    """Of a scheduler's configuration: one engine that does not have to register."""
    return (
        f'[[workers]]\nworker_id = "{worker_id}"\nurl = "{url}"\nmodel = "{model}"\nmax_model_len = 100000\n'
    )


def scheduler_command(folder: Path, settings: str, journal: str = "journal") -> list[str]:
    """A ``rose-scheduler`` on a free port, with ``tokens.toml`` of ``folder``; it outwaits engines that stand while others are measured.

    Args:
        settings: Of its configuration; top-level keys first, tables after them.
        journal: Folder of its journal, below ``folder``.
    """
    config = folder / "scheduler.toml"
    config.write_text(f"port = 0\n{settings}[timeouts]\nstall_s = 120.0\n")
    command = [sys.executable, "-m", "rose.scheduler.cli", "--config", str(config), "--log-level", "warning"]
    return [*command, "--token-file", str(folder / "tokens.toml"), "--journal", str(folder / journal)]
