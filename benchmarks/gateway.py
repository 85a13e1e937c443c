"""What the gateway costs: turns per CPU-second of its process, added latency, many streams.

``python -m benchmarks.gateway --json FILE [--rivals VENV]``

Every arm sits between the same load generator and the same upstream, which answers from memory, so that the gateway is
what is measured.  Throughput is per second of CPU time of the gateway's process tree, not of the clock: other work on the
machine does not enter.  Arms are interleaved and repeated; medians.

- ``bare``: an aiohttp proxy that copies bytes; what ``/rose/v1/generate`` is compared with (bar: 0.7).  rose-scheduler
  runs on uvloop; ``bare_uvloop`` is the same proxy on it.
- ``chat_proxy``: an aiohttp proxy that makes the same render, generate and derender calls, decodes and journals the same
  record; what chat is compared with (bar: 0.5).
- ``litellm``, ``vllm_router``, ``sglang_router``: from ``--rivals``, an environment that has them; null where they do not start.

Latency: open loop at half of what the bare proxy could do in this run, or of what rose can, whichever is less; ``added`` is
the p99 through an arm less the p99 without one (bar: at most 3 times the bare proxy's).
Streams: 1,000 at 5 chunks a second (bar: no gap over 1 s), token streams and parsed chat streams apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Report
from benchmarks.wire import Client, Upstream, answer, connect, request
from rose.auth import Tokens

ROOT = Path(__file__).resolve().parent.parent
NUM_PROMPT, NUM_NEW = 1000, 64
MODEL = "policy"
STREAMS_S = 180.0
"""A stream that has not ended by then never will."""


# --- the upstream ---------------------------------------------------------------------------------------


def _choice(count: int, finish: str | None) -> dict[str, Any]:
    ids = [100 + at % 50 for at in range(count)]
    entries = [{"token_id": t, "logprob": -0.5 - t / 1000, "rank": 1, "top_logprobs": []} for t in ids]
    return {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": entries},
        "finish_reason": finish,
        "stop_reason": None,
        "weight_versions": [{"version": "0.1", "start": 0, "end": count}] if finish else None,
    }


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def upstream(num_chunks: int, period_s: float) -> None:
    usage = {"prompt_tokens": NUM_PROMPT, "completion_tokens": NUM_NEW, "total_tokens": NUM_PROMPT + NUM_NEW}
    text = "word " * NUM_NEW
    message = {"role": "assistant", "content": text}
    chat = {"id": "x", "object": "chat.completion", "created": 1, "model": MODEL, "usage": usage}
    chat["choices"] = [{"index": 0, "message": message, "finish_reason": "length", "logprobs": None}]
    rendered = {
        "request_id": "r",
        "token_ids": [7 + at % 300 for at in range(NUM_PROMPT)],
        "sampling_params": {"n": 1, "temperature": 1.0, "max_tokens": 1, "logprobs": None},
        "model": MODEL,
    }
    piece = {"index": 0, "delta": {"content": "word word "}, "finish_reason": None, "logprobs": None}
    state = {"prev_tokens": ["a"] * 6, "prefix_offset": 0, "read_offset": 6, "role_sent": True}
    answers: dict[str, Any] = {
        "*": {},
        "/v1/models": {
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "max_model_len": 100_000}],
        },
        "/inference/v1/generate": {
            "request_id": "g",
            "choices": [_choice(NUM_NEW, "length")],
            "usage": usage,
        },
        "/v1/chat/completions": chat,
        "/v1/chat/completions/render": rendered,
        "/v1/chat/completions/derender": chat,
        "/v1/chat/completions/derender?stream": {
            "chunk": {"id": "x", "choices": [piece]},
            "stream_state": state,
        },
    }
    Upstream.answers = {path: answer(json.dumps(body).encode()) for path, body in answers.items()}
    Upstream.chunks = [_event({"request_id": "g", "choices": [_choice(2, None)]})] * (num_chunks - 1)
    last = _choice(2, "length")
    last["weight_versions"] = [{"version": "0.1", "start": 0, "end": 2 * num_chunks}]
    Upstream.chunks.append(_event({"request_id": "g", "choices": [last]}) + b"data: [DONE]\n\n")
    Upstream.period_s, Upstream.delay_s = period_s, 0.0
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0, backlog=2048)
    print(f"ready http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


# --- the proxies ----------------------------------------------------------------------------------------


async def proxy(target: str, journal: Path | None) -> None:
    """``bare`` without a journal folder, ``chat_proxy`` with one."""
    import aiohttp
    import msgspec
    from aiohttp import web

    from rose.scheduler.ids import pack_ids, pack_logprobs
    from rose.scheduler.journal import Journal, TurnRecord

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    headers = {"Content-Type": "application/json"}

    async def post(path: str, body: bytes) -> bytes:
        async with session.post(target + path, data=body, headers=headers) as response:
            return await response.read()

    async def copy(incoming: web.Request) -> web.StreamResponse:
        body = await incoming.read()
        async with session.post(target + incoming.path, data=body, headers=headers) as response:
            if response.content_type == "text/event-stream":
                out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await out.prepare(incoming)
                async for part in response.content.iter_any():
                    await out.write(part)
                return out
            return web.Response(body=await response.read(), content_type="application/json")

    book = None if journal is None else Journal(journal)
    if book is not None:
        list(book.recover())
    encode, decode = msgspec.json.encode, msgspec.json.decode

    async def chat(incoming: web.Request) -> web.StreamResponse:
        assert book is not None
        body = decode(await incoming.read())
        rendered = decode(await post("/v1/chat/completions/render", encode({**body, "max_tokens": 1})))
        params = {**rendered["sampling_params"], "max_tokens": body["max_tokens"], "logprobs": 0}
        ask = {
            "request_id": "r",
            "token_ids": rendered["token_ids"],
            "sampling_params": params,
            "stream": False,
        }
        generated = decode(await post("/inference/v1/generate", encode(ask)))
        choice = generated["choices"][0]
        parsed = decode(
            await post(
                "/v1/chat/completions/derender",
                encode(
                    {
                        "model": MODEL,
                        "generate_response": {**generated, "prompt_token_ids": rendered["token_ids"]},
                        "prompt_tokens": len(rendered["token_ids"]),
                        "chat_request": body,
                    }
                ),
            )
        )
        out = encode({**parsed, "usage": generated["usage"]})
        book.append(
            TurnRecord(
                trajectory_id="t",
                turn=0,
                kind="chat",
                suffix_ids=pack_ids(rendered["token_ids"]),
                token_ids=pack_ids(choice["token_ids"]),
                logprobs=pack_logprobs([entry["logprob"] for entry in choice["logprobs"]["content"]]),
                finish_reason=choice["finish_reason"],
                versions=[("0.1", 0, NUM_NEW)],
                segments=[],
                usage={},
                timing={},
                sampling={},
                answer=out,
            )
        )
        return web.Response(body=out, content_type="application/json")

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/{path:.*}", copy if book is None else chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    print(f"ready http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


# --- arms -----------------------------------------------------------------------------------------------


class Arm:
    """A program between load and upstream."""

    running: ClassVar[list[Arm]] = []

    def __init__(self, name: str, command: list[str], *, ready: str = "ready", url: str = "") -> None:
        self.name = name
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by end()
        self.process = subprocess.Popen(
            command,
            stdout=self.log if url else subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            # LiteLLM would look for prices on the network.
            env={
                **os.environ,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            },
            start_new_session=True,
        )
        self.url = url
        self.running.append(self)
        if not url:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                if ready in line:
                    self.url = line.split()[-1]
                    break
            else:
                raise RuntimeError(f"{name} did not start")
        self.port = int(self.url.rsplit(":", 1)[1])

    def cpu_s(self) -> float:
        """Of all threads of the process tree; the scheduler's own count, in nanoseconds, not in clock ticks."""
        total_ns = 0
        top = psutil.Process(self.process.pid)
        for each in (top, *top.children(recursive=True)):
            for thread in Path(f"/proc/{each.pid}/task").iterdir():
                total_ns += int((thread / "schedstat").read_text().split()[0])
        return total_ns / 1e9

    def memory_mb(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 2**20

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


def end_all(*_: object) -> None:
    """On SIGTERM: arms are sessions of their own, which nobody else would end."""
    for arm in Arm.running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(arm.process.pid, 9)
    os._exit(143)


async def closed_loop(port: int, requests: list[bytes], num_clients: int) -> None:
    """All ``requests``, ``num_clients`` at a time; raises on any answer that is not 200."""
    left = iter(requests)

    async def one() -> None:
        client = await connect(port)
        for each in left:
            status, body = await client.ask(each)
            if status != 200:
                raise RuntimeError(f"{status}: {body[:300]!r}")
        client.close()

    await asyncio.gather(*(one() for _ in range(num_clients)))


async def open_loop(port: int, make: Any, rate_hz: float, seconds: float) -> list[float]:
    """Latencies in seconds, from the time a request was due."""
    free: list[Client] = []
    latencies: list[float] = []
    tasks: list[asyncio.Task[None]] = []

    async def one(due_s: float) -> None:
        client = free.pop() if free else await connect(port)
        status, body = await client.ask(make())
        if status != 200:
            raise RuntimeError(f"{status}: {body[:300]!r}")
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


async def streams(port: int, make: Any, count: int, ramp_s: float) -> dict[str, float]:
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
        status, body = await client.ask(make())
        client.close()
        if status != 200:
            raise RuntimeError(f"{status}: {body[:300]!r}")
        gaps.append(worst)

    begun_s = time.monotonic()
    async with asyncio.timeout(STREAMS_S):
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


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


class Bench:
    def __init__(self, folder: Path, rivals: Path | None, num_chunks: int) -> None:
        self.folder, self.rivals, self.num_chunks = folder, rivals, num_chunks
        self.tokens = Tokens.generate()
        self.tokens.save(folder / "tokens.toml")
        self.auth = f"Authorization: Bearer {self.tokens.agent}"
        self.arms: dict[str, Arm] = {}
        self.counter = 0

    def start(self) -> None:
        me = [sys.executable, "-m", "benchmarks.gateway"]
        self.up = Arm("upstream", [*me, "--upstream", str(self.num_chunks)])
        self.arms["bare"] = Arm("bare", [*me, "--proxy", self.up.url])
        self.arms["bare_uvloop"] = Arm("bare_uvloop", [*me, "--proxy", self.up.url, "--uvloop"])
        self.arms["chat_proxy"] = Arm(
            "chat_proxy", [*me, "--proxy", self.up.url, "--proxy-journal", str(self.folder / "proxy")]
        )
        config = self.folder / "scheduler.toml"
        config.write_text(
            "port = 0\ncap_dedicated = 4096\n[timeouts]\nstall_s = 120.0\n"
            f'[[workers]]\nworker_id = "w"\nurl = "{self.up.url}"\nmodel = "{MODEL}"\nmax_model_len = 100000\n'
        )
        self.arms["rose"] = Arm(
            "rose",
            [
                *(
                    sys.executable,
                    "-m",
                    "rose.scheduler.cli",
                    "--config",
                    str(config),
                    "--log-level",
                    "warning",
                ),
                *("--token-file", str(self.folder / "tokens.toml"), "--journal", str(self.folder / "rose")),
            ],
        )
        if self.rivals is not None:
            self._start_rivals(self.rivals)

    def _start_rivals(self, venv: Path) -> None:
        from tests.engine_launcher import free_port

        config = self.folder / "litellm.yaml"
        config.write_text(
            f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n      model: openai/{MODEL}\n"
            f"      api_base: {self.up.url}/v1\n      api_key: none\n"
        )
        address = ["--host", "127.0.0.1", "--port", "{port}"]
        router = ["--worker-urls", self.up.url, *address, "--policy", "round_robin"]
        python = str(venv / "bin/python")
        commands = {
            "litellm": [python, "-m", "litellm.proxy.proxy_cli", "--config", str(config), *address],
            "vllm_router": [python, "-m", "vllm_router.launch_router", *router],
            "sglang_router": [
                *(python, "-m", "sglang_router.launch_router", *router),
                *("--prometheus-port", str(free_port())),
            ],
        }
        for name, command in commands.items():
            port = free_port()
            arm = Arm(name, [part.format(port=port) for part in command], url=f"http://127.0.0.1:{port}")
            try:
                asyncio.run(self._wait_for(arm))
                self.arms[name] = arm
            except (RuntimeError, OSError) as error:
                arm.log.seek(0)
                print(f"{name} does not start: {error}; {arm.log.read()[-400:]}", file=sys.stderr)
                arm.end()

    async def _wait_for(self, arm: Arm) -> None:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            if arm.process.poll() is not None:
                raise RuntimeError("it ended")
            try:
                client = await connect(arm.port)
                status, _ = await asyncio.wait_for(client.ask(self.chat_body("rival")), 5)
                client.close()
                if status == 200:
                    return
            except (OSError, TimeoutError):
                pass
            await asyncio.sleep(0.3)
        raise RuntimeError("no answer in 60 s")

    def generate_body(self, arm: str, *, stream: bool = False) -> bytes:
        ids = [7 + at % 300 for at in range(NUM_PROMPT)]
        params = {"max_tokens": 2 * self.num_chunks if stream else NUM_NEW, "temperature": 1.0}
        if arm == "rose":
            body = {"token_ids": ids, "sampling_params": params, **({"stream": True} if stream else {})}
            return request("/rose/v1/generate", json.dumps(body).encode(), self.auth)
        body = {"request_id": "r", "token_ids": ids, "sampling_params": params, "stream": stream}
        return request("/inference/v1/generate", json.dumps(body, separators=(",", ":")).encode())

    def chat_body(self, arm: str, session: str = "", *, stream: bool = False) -> bytes:
        self.counter += 1
        messages = [{"role": "system", "content": "You play a game. " * 20}]
        messages += [{"role": "user", "content": f"{self.counter}: " + "observation " * 60}]
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": NUM_NEW}
        if stream:
            body |= {"stream": True, "max_tokens": 2 * self.num_chunks}
        headers = [self.auth, *([f"X-Session-ID: {session}"] if session else [])] if arm == "rose" else []
        return request("/v1/chat/completions", json.dumps(body, separators=(",", ":")).encode(), *headers)

    async def trajectories(self, count: int) -> list[str]:
        client = await connect(self.arms["rose"].port)
        body = json.dumps({"job": "bench"}).encode()
        names = []
        for _ in range(count):
            _, answer_ = await client.ask(request("/rose/v1/trajectories", body, self.auth))
            names.append(json.loads(answer_)["id"])
        client.close()
        return names

    async def throughput(self, arm: str, kind: str, count: int) -> tuple[float, float]:
        """``(turns per CPU-second of the arm, turns per second)``."""
        if kind == "generate":
            requests = [self.generate_body(arm)] * count
        elif arm == "rose":
            requests = [self.chat_body(arm, name) for name in await self.trajectories(count)]
        else:
            requests = [self.chat_body(arm) for _ in range(count)]
        target = self.arms[arm]
        await closed_loop(target.port, requests[:20], 4) if kind == "generate" or arm != "rose" else None
        before, begun_s = target.cpu_s(), time.monotonic()
        await closed_loop(target.port, requests, 64)
        return count / (target.cpu_s() - before), count / (time.monotonic() - begun_s)

    def end(self) -> None:
        for arm in (*self.arms.values(), self.up):
            arm.end()


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), args.rivals, num_chunks=args.chunks)
        try:
            bench.start()
            return _measure(bench, args)
        finally:
            bench.end()


def _measure(bench: Bench, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    chat_arms = [arm for arm in bench.arms if not arm.startswith("bare")]
    plan = [("generate", arm) for arm in ("bare", "bare_uvloop", "rose")]
    plan += [("chat", arm) for arm in chat_arms]
    per_cpu: dict[tuple[str, str], list[float]] = {each: [] for each in plan}
    per_s: dict[tuple[str, str], list[float]] = {each: [] for each in plan}
    for round_ in range(args.repeats):
        for kind, arm in plan:
            slow = arm in ("litellm",)
            count = args.turns // (6 if slow else 1)
            turns, rate = asyncio.run(bench.throughput(arm, kind, count))
            per_cpu[(kind, arm)].append(turns)
            per_s[(kind, arm)].append(rate)
            print(f"{round_} {kind:9} {arm:14} {turns:8.0f} turns/CPU-s {rate:8.0f} turns/s", flush=True)
    mid = {each: statistics.median(values) for each, values in per_cpu.items()}
    rates = {each: statistics.median(values) for each, values in per_s.items()}

    def ratio(kind: str, arm: str, to: str) -> float | None:
        return round(mid[(kind, arm)] / mid[(kind, to)], 3) if (kind, to) in mid else None

    half = 0.5 * min(rates[("generate", "bare")], rates[("generate", "rose")])
    p99s: dict[str, list[float]] = {"direct": [], "bare": [], "rose": []}
    for _ in range(args.repeats):
        for arm in p99s:
            port = bench.up.port if arm == "direct" else bench.arms[arm].port
            body = bench.generate_body(arm)
            latencies = asyncio.run(open_loop(port, lambda body=body: body, half, args.seconds))
            p99s[arm].append(p99(latencies) * 1e3)
    at99 = {arm: statistics.median(values) for arm, values in p99s.items()}
    added = {arm: at99[arm] - at99["direct"] for arm in ("bare", "rose")}
    print(
        f"p99 at {half:.0f}/s: " + ", ".join(f"{arm} {value:.2f} ms" for arm, value in at99.items()),
        flush=True,
    )

    found: dict[str, Any] = {}
    for kind in ("generate", "chat"):
        body = (
            (lambda: bench.generate_body("rose", stream=True))
            if kind == "generate"
            else (lambda: bench.chat_body("rose", stream=True))
        )
        rose = bench.arms["rose"]
        before, up_before = rose.cpu_s(), bench.up.cpu_s()
        found[kind] = asyncio.run(streams(rose.port, body, args.streams, ramp_s=args.streams / 200))
        found[kind]["cpu_s"] = round(rose.cpu_s() - before, 2)
        found[kind]["upstream_cpu_s"] = round(bench.up.cpu_s() - up_before, 2)
        print(f"streams {kind}: {found[kind]}", flush=True)
    summary = {
        "generate_ratio": ratio("generate", "rose", "bare"),
        "generate_ratio_uvloop": ratio("generate", "rose", "bare_uvloop"),
        "chat_ratio": ratio("chat", "rose", "chat_proxy"),
        "litellm_ratio": ratio("chat", "rose", "litellm"),
        "vllm_router_ratio": ratio("chat", "rose", "vllm_router"),
        "sglang_router_ratio": ratio("chat", "rose", "sglang_router"),
        "added_p99_ms": round(added["rose"], 3),
        "bare_added_p99_ms": round(added["bare"], 3),
        "added_p99_ratio": round(added["rose"] / added["bare"], 2) if added["bare"] > 0 else None,
        "streams_gap_max_s": found["generate"]["gap_max_s"],
        "streams_stalled": found["generate"]["stalled_over_1s"],
        "chat_streams_gap_max_s": found["chat"]["gap_max_s"],
        "chat_streams_stalled": found["chat"]["stalled_over_1s"],
        "rose_memory_mb": round(bench.arms["rose"].memory_mb(), 1),
    }
    details = {
        "prompt_tokens": NUM_PROMPT,
        "new_tokens": NUM_NEW,
        "turns_per_cpu_s": {
            f"{kind}/{arm}": [round(v) for v in values] for (kind, arm), values in per_cpu.items()
        },
        "turns_per_s": {f"{kind}/{arm}": [round(v) for v in values] for (kind, arm), values in per_s.items()},
        "p99_ms": {arm: [round(v, 2) for v in values] for arm, values in p99s.items()},
        "half_load_hz": round(half),
        "streams": found,
    }
    return summary, details


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--rivals", type=Path, help="an environment with litellm, vllm-router, sglang-router")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1500, help="per arm and repeat")
    parser.add_argument("--seconds", type=float, default=4.0, help="of open-loop load per arm and repeat")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--chunks", type=int, default=50, help="per stream, 5 a second")
    parser.add_argument(
        "--quick", action="store_true", help="one short repeat, 200 streams; about half a minute"
    )
    parser.add_argument("--upstream", type=int, metavar="CHUNKS", help=argparse.SUPPRESS)
    parser.add_argument("--proxy", help=argparse.SUPPRESS)
    parser.add_argument("--uvloop", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--proxy-journal", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, end_all)
    if args.upstream:
        asyncio.run(upstream(args.upstream, 0.2))
    elif args.proxy:
        run = uvloop.run if args.uvloop else asyncio.run
        run(proxy(args.proxy, args.proxy_journal))
    else:
        if args.quick:
            args.repeats, args.turns, args.seconds, args.streams, args.chunks = 1, 400, 1.0, 200, 10
        report = Report("gateway")
        summary, details = measure(args)
        report.finish(summary, details, args.json)


if __name__ == "__main__":
    main()
