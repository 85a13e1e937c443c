"""What the gateway costs: turns per CPU-second of its process, added latency, many streams.

``python -m benchmarks.gateway --json FILE [--rivals VENV]``

Every arm sits between the same load generator and the same upstream, which answers from memory, so that the gateway is
what is measured.  Throughput is per second of CPU time of the gateway's process tree, not of the clock: other work on the
machine does not enter.  Arms are interleaved and repeated; medians.

- ``bare``: an aiohttp proxy that copies bytes; what ``/rose/v1/generate`` is compared with (bar: 0.7).  rose-scheduler
  runs on uvloop; ``bare_uvloop`` is the same proxy on it.
- ``chat_proxy``: an aiohttp proxy that makes the same render, generate and derender calls, decodes and journals the same
  record; what chat is compared with (bar: 0.5).
- ``rose``: this tree, as Python (``ROSE_COMPILED=0``), whatever was built in it.
- ``rose:NAME``: the same scheduler of another tree, ``--tree NAME=FOLDER``; compiled where a build lies in it
  (``scripts/compile_policies.py``), and then it must fit (``ROSE_COMPILED=1``).  ``--tree compiled=.`` is this tree with its own
  build.  ``compiled`` of the details says which were.
- ``litellm``, ``vllm_router``, ``sglang_router``: from ``--rivals``, an environment that has them; null where they do not start.

Latency: open loop at half of what the bare proxy could do in this run, or of what rose can, whichever is less; ``added`` is
the p99 through an arm less the p99 without one (bar: at most 3 times the bare proxy's).
Streams: 1,000 at 5 chunks a second (bar: no gap over 1 s), token streams and parsed chat streams apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.arms import (
    ROOT,
    Arm,
    closed_loop,
    end_all,
    ok,
    open_loop,
    run_load,
    scheduler_command,
    streams,
    worker_table,
)
from benchmarks.lib.report import Report
from benchmarks.lib.wire import connect, request
from benchmarks.scheduling.gateway_fakes import MODEL, NUM_NEW, NUM_PROMPT, TEXT, new_ids
from rose.auth import Tokens
from rose.evaluation.statistics import percentile


def check_answers(arm: str, kind: str, answers: list[bytes]) -> None:
    """Every answer holds the upstream's tokens, or the text they stand for.

    Raises:
        RuntimeError: One does not.
    """
    for body in answers:
        answer = msgspec.json.decode(body)
        if kind == "chat":
            good = answer["choices"][0]["message"]["content"] == TEXT
            good = good and answer["usage"]["completion_tokens"] == NUM_NEW
        else:
            source = answer if is_rose(arm) else answer["choices"][0]
            good = source["token_ids"] == new_ids(NUM_NEW) and source["finish_reason"] == "length"
        if not good:
            raise RuntimeError(f"{arm} answers something else: {body[:300]!r}")


def is_rose(arm: str) -> bool:
    return arm == "rose" or arm.startswith("rose:")


def rose_arms(trees: dict[str, Path]) -> dict[str, tuple[Path, bool]]:
    """Tree of each arm of ours, and whether it runs compiled: said, not left to what somebody built there."""
    others = {f"rose:{name}": (tree, (tree / "rose" / "_compiled").is_dir()) for name, tree in trees.items()}
    return {"rose": (ROOT, False), **others}


class Bench:
    def __init__(self, folder: Path, rivals: Path | None, num_chunks: int, trees: dict[str, Path]) -> None:
        self.folder, self.rivals, self.num_chunks, self.trees = folder, rivals, num_chunks, trees
        self.tokens = Tokens.generate()
        self.tokens.save(folder / "tokens.toml")
        self.auth = f"Authorization: Bearer {self.tokens.environment}"
        self.arms: dict[str, Arm] = {}
        self.counter = 0

    def start(self) -> None:
        me = [sys.executable, "-m", "benchmarks.scheduling.gateway_fakes"]
        self.up = Arm("upstream", [*me, "upstream", str(self.num_chunks)])
        self.arms["bare"] = Arm("bare", [*me, "proxy", self.up.url])
        self.arms["bare_uvloop"] = Arm("bare_uvloop", [*me, "proxy", self.up.url, "--uvloop"])
        self.arms["chat_proxy"] = Arm(
            "chat_proxy", [*me, "proxy", self.up.url, "--journal", str(self.folder / "proxy")]
        )
        settings = "cap_dedicated = 4096\n" + worker_table("w", self.up.url, MODEL)
        for name, (tree, compiled) in rose_arms(self.trees).items():
            command = scheduler_command(self.folder, settings, name.replace(":", "-"))
            self.arms[name] = Arm(name, command, folder=tree, compiled=compiled)
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
        commands = {"litellm": [python, "-m", "litellm.proxy.proxy_cli", "--config", str(config), *address]}
        commands |= {
            name: [python, "-m", f"{name}.launch_router", *router, "--prometheus-port", str(free_port())]
            for name in ("vllm_router", "sglang_router")
        }
        for name, command in commands.items():
            port = free_port()
            arm = Arm(name, [part.format(port=port) for part in command], url=f"http://127.0.0.1:{port}")
            try:
                asyncio.run(self._wait_for(arm))
                self.arms[name] = arm
            except (RuntimeError, OSError) as error:
                print(f"{name} does not start: {error}; {arm.last_words()}", file=sys.stderr)
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
        if is_rose(arm):
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
        headers = [self.auth, *([f"X-Session-ID: {session}"] if session else [])] if is_rose(arm) else []
        return request("/v1/chat/completions", json.dumps(body, separators=(",", ":")).encode(), *headers)

    async def trajectories(self, arm: str, count: int) -> list[str]:
        client = await connect(self.arms[arm].port)
        body = json.dumps({"job": "bench"}).encode()
        names = []
        for _ in range(count):
            answer = await ok(client, request("/rose/v1/trajectories", body, self.auth))
            names.append(json.loads(answer)["id"])
        client.close()
        return names

    async def throughput(self, arm: str, kind: str, count: int) -> tuple[float, float]:
        """``(turns per CPU-second of the arm, turns per second)``."""
        if kind == "generate":
            requests = [self.generate_body(arm)] * count
        elif is_rose(arm):
            requests = [self.chat_body(arm, name) for name in await self.trajectories(arm, count)]
        else:
            requests = [self.chat_body(arm) for _ in range(count)]
        target = self.arms[arm]
        await closed_loop(target.port, requests[:20], 4) if kind == "generate" or not is_rose(arm) else None
        before, begun_s = target.cpu_s(), time.monotonic()
        answers = await closed_loop(target.port, requests, 64)
        cpu_s, seconds = target.cpu_s() - before, time.monotonic() - begun_s
        check_answers(arm, kind, answers)
        return count / cpu_s, count / seconds

    def end(self) -> None:
        for arm in (*self.arms.values(), self.up):
            arm.end()


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), args.rivals, num_chunks=args.chunks, trees=dict(args.tree))
        try:
            bench.start()
            return _measure(bench, args)
        finally:
            bench.end()


def _measure(bench: Bench, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    chat_arms = [arm for arm in bench.arms if not arm.startswith("bare")]
    ours = [arm for arm in bench.arms if is_rose(arm)]
    plan = [("generate", arm) for arm in ("bare", "bare_uvloop", *ours)]
    plan += [("chat", arm) for arm in chat_arms]
    per_cpu: dict[tuple[str, str], list[float]] = {each: [] for each in plan}
    per_s: dict[tuple[str, str], list[float]] = {each: [] for each in plan}
    for round_ in range(args.repeats):
        for kind, arm in plan:
            slow = arm in ("litellm",)
            count = args.turns // (6 if slow else 1)
            turns, rate = run_load(
                f"{kind} through {arm}",
                lambda arm=arm, kind=kind, count=count: bench.throughput(arm, kind, count),
            )
            per_cpu[(kind, arm)].append(turns)
            per_s[(kind, arm)].append(rate)
            print(f"{round_} {kind:9} {arm:14} {turns:8.0f} turns/CPU-s {rate:8.0f} turns/s", flush=True)
    mid = {each: statistics.median(values) for each, values in per_cpu.items()}
    rates = {each: statistics.median(values) for each, values in per_s.items()}

    def ratio(kind: str, arm: str, to: str) -> float | None:
        return round(mid[(kind, arm)] / mid[(kind, to)], 3) if (kind, to) in mid else None

    half = 0.5 * min(rates[("generate", "bare")], rates[("generate", "rose")])
    p99s: dict[str, list[float]] = {arm: [] for arm in ("direct", "bare", *ours)}
    for _ in range(args.repeats):
        for arm in p99s:
            port = bench.up.port if arm == "direct" else bench.arms[arm].port
            body = bench.generate_body(arm)
            latencies = run_load(
                f"open loop through {arm}",
                lambda port=port, body=body: open_loop(port, lambda: body, half, args.seconds),
            )
            p99s[arm].append(percentile(latencies, 0.99) * 1e3)
    at99 = {arm: statistics.median(values) for arm, values in p99s.items()}
    added = {arm: at99[arm] - at99["direct"] for arm in ("bare", *ours)}
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
        found[kind] = run_load(
            f"{kind} streams",
            lambda port=rose.port, body=body: streams(port, body, args.streams, ramp_s=args.streams / 200),
        )
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
        **{
            f"{what}_ratio:{arm.removeprefix('rose:')}": ratio(what, arm, to)
            for arm in ours[1:]
            for what, to in (("generate", "bare"), ("chat", "chat_proxy"))
        },
        **{
            f"added_p99_ratio:{arm.removeprefix('rose:')}": round(added[arm] / added["bare"], 2)
            for arm in ours[1:]
            if added["bare"] > 0
        },
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
        "compiled": {name: compiled for name, (_, compiled) in rose_arms(bench.trees).items()},
        "streams": found,
    }
    return summary, details


def _tree(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    path = Path(folder).resolve()
    if not name or not (path / "rose").is_dir():
        raise argparse.ArgumentTypeError("must be NAME=FOLDER, of a folder with rose in it")
    return name, path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--rivals", type=Path, help="an environment with litellm, vllm-router, sglang-router")
    parser.add_argument(
        "--tree", action="append", default=[], type=_tree, metavar="NAME=FOLDER", help="measure this one too"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1500, help="per arm and repeat")
    parser.add_argument("--seconds", type=float, default=4.0, help="of open-loop load per arm and repeat")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--chunks", type=int, default=50, help="per stream, 5 a second")
    parser.add_argument(
        "--quick", action="store_true", help="one short repeat, 200 streams; about half a minute"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, end_all)
    if args.quick:
        args.repeats, args.turns, args.seconds, args.streams, args.chunks = 1, 400, 1.0, 200, 10
    report = Report("gateway")
    summary, details = measure(args)
    report.finish(summary, details, args.json)


if __name__ == "__main__":
    main()
