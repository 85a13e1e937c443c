"""The dashboard in a real browser while the scheduler is busy: does the page keep up?   (needs Chromium)

``python benchmarks/scheduling/dashboard.py --json FILE [--png docs/dashboard.png]``

A scheduler process, ``--workers`` registered workers (half of them harvested, all served by two fake engines of this
process), ``--trajectories`` agents with a turn each in flight, reclaims, and a trainer that leases batches and publishes
versions.  Headless Chromium watches for ``--seconds`` and is measured from inside the page:

- ``draw_p50_ms``, ``draw_max_ms``: canvases and tables of one update (there is one a second; bar: at most 250 ms).
- ``lag_p99_ms``: how late a timer of 50 ms fires, which is what a click would feel.
- ``viewer_ms``: from a click on a trajectory to its tokens on the screen.
- ``kb_per_update``: what one watcher costs the wire.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.arms import Arm, end_all
from benchmarks.lib.report import Report
from rose.auth import Tokens, bearer
from rose.evaluation.statistics import percentile
from rose.testing.fake_engine import FakeEngine, Fault, serve_engine
from rose.testing.fake_node import FakeNode
from tests.scheduler.browser import CHROMIUM, Browser

ROOT = Path(__file__).resolve().parents[2]
MEASURE = """(() => {
  window.draws = []; window.lags = []; let at = performance.now();
  new MutationObserver(() => draws.push(+document.body.dataset.drawMs))
    .observe(document.body, { attributes: true, attributeFilter: ["data-draws"] });
  setInterval(() => { const now = performance.now(); lags.push(Math.max(0, now - at - 50)); at = now; }, 50);
})()"""


class Load:
    """Everything that is not the scheduler: engines, nodes, agents, a trainer."""

    def __init__(
        self, url: str, tokens: Tokens, session: aiohttp.ClientSession, args: argparse.Namespace
    ) -> None:
        self.url, self.tokens, self.session, self.args = url, tokens, session, args
        self.rng = random.Random(args.seed)
        self.tasks: list[asyncio.Task[None]] = []
        self.runners: list[web.AppRunner] = []
        self.num_turns = 0

    async def call(self, method: str, path: str, role: str, body: Any = None, **headers: str) -> Any:
        async with self.session.request(
            method, self.url + path, json=body, headers={**bearer(getattr(self.tokens, role)), **headers}
        ) as response:
            if response.status == 204:
                return None
            answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{path}: {response.status} {answer}")
            return answer

    async def start(self) -> None:
        self.engines = [FakeEngine(token_s=self.args.token_s, mean_tokens=20) for _ in range(2)]
        served = [await serve_engine(engine) for engine in self.engines]
        self.runners = [runner for runner, _ in served]
        self.nodes: list[FakeNode] = []
        for number in range(self.args.workers):
            harvested = number % 2
            node = FakeNode(
                self.session,
                self.url,
                self.tokens.node,
                self.engines[harvested],
                served[harvested][1],
                worker_id=f"{'serving' if harvested else 'gpu'}-{number // 2:03d}",
                tier="harvested" if harvested else "dedicated",
                period_s=2.0,
            )
            node.kv_budget_tokens = 200_000
            await node.register()
            await node.beat()
            self.nodes.append(node)
            self.tasks.append(asyncio.create_task(self._beat(node)))
        self.tasks.extend(asyncio.create_task(self._agent(n)) for n in range(self.args.trajectories))
        if self.args.learning_png is not None:
            self.tasks.extend(asyncio.create_task(self._pupil(n)) for n in range(8))
        self.tasks.append(asyncio.create_task(self._train()))
        self.tasks.append(asyncio.create_task(self._reclaim()))

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        for ended in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(ended, Exception) and not isinstance(ended, aiohttp.ClientError):
                print(f"load: {ended!r}", file=sys.stderr)
        for runner in self.runners:
            await runner.cleanup()

    async def _beat(self, node: FakeNode) -> None:
        await asyncio.sleep(self.rng.uniform(0, 2.0))
        while True:
            node.kv_used_tokens = self.rng.randrange(20_000, 180_000)
            if node.worker_id.startswith("serving"):
                node.serving_use = 0.5 + 0.4 * math.sin(time.monotonic() / 20)
                node.slack_s = self.rng.uniform(0.01, 0.2)
                node.gated = self.rng.random() < 0.05
                swing = 1.0 + math.sin(time.monotonic() / 20)
                node.serving_p99_s = {"ttft": (0.12 + 0.15 * swing, 0.5), "tpot": (0.05 + 0.03 * swing, 0.15)}
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                await node.beat()
            await asyncio.sleep(2.0)

    async def _agent(self, number: int) -> None:
        await asyncio.sleep(5.0 * number / self.args.trajectories)
        rng, encode = random.Random(number), self.engines[0].tokenizer.encode
        while True:
            body = {"job": "math", "group_id": f"g{rng.randrange(10**9)}", "group_size": 1}
            name = (await self.call("POST", "/rose/v1/trajectories", "environment", body))["id"]
            ids = encode("You play a game on a frozen lake. " * rng.randrange(1, 6) + "What is your move? ")
            try:
                for _ in range(rng.randrange(2, 6)):
                    ask = {"token_ids": ids, "sampling_params": {"max_tokens": 40}}
                    headers = {"X-Session-ID": name}
                    answer = await self.call("POST", "/rose/v1/generate", "agent", ask, **headers)
                    self.num_turns += 1
                    ids = [
                        *ids,
                        *answer["token_ids"],
                        *encode(f" You moved. You stand at {rng.randrange(9)}, {rng.randrange(9)}. "),
                    ]
                await self.call(
                    "POST", f"/rose/v1/trajectories/{name}/finish", "environment", {"reward": rng.random()}
                )
            except RuntimeError as error:
                if "trajectory_" not in str(error):  # cancelled as stale
                    raise

    async def _pupil(self, number: int) -> None:
        """Groups of four whose rewards rise as if they learned: for the page of jobs."""
        rng, encode = random.Random(number), self.engines[0].tokenizer.encode
        begun_s, job = time.monotonic(), ("maze", "sums")[number % 2]
        for group in itertools.count():
            body = {"job": job, "group_id": f"{job}-{number}-{group}", "group_size": 4}
            body["metadata"] = {"split": "train", "level": str(rng.randrange(3))}
            learned = 1.0 - math.exp((begun_s - time.monotonic()) / (80.0 if job == "maze" else 200.0))

            async def play(body: dict[str, Any] = body, learned: float = learned) -> None:
                name = (await self.call("POST", "/rose/v1/trajectories", "environment", body))["id"]
                ids = encode("You stand in a maze. Where do you go? ")
                for _ in range(rng.randrange(2, 4)):
                    ask = {"token_ids": ids, "sampling_params": {"max_tokens": 16}}
                    answer = await self.call(
                        "POST", "/rose/v1/generate", "agent", ask, **{"X-Session-ID": name}
                    )
                    ids = [*ids, *answer["token_ids"], *encode(" A wall. ")]
                won = rng.random() < 0.15 + 0.75 * learned
                body = {"reward": round((0.7 + 0.3 * rng.random()) * won, 2), "success": won}
                await self.call("POST", f"/rose/v1/trajectories/{name}/finish", "environment", body)

            await asyncio.gather(*(play() for _ in range(4)))

    async def _train(self) -> None:
        version = 0
        while True:
            ask = {"job": "math", "num_groups": 100, "version": [1, version], "wait_s": 10}
            leased = await self.call("PUT", f"/rose/v1/batches/step-{version}", "trainer", ask)
            if leased is None:
                continue
            await self.call(
                "POST",
                f"/rose/v1/batches/{leased['batch_id']}/ack",
                "trainer",
                {"step": version, "attempt": 1},
            )
            version += 1
            for engine in self.engines:
                engine.version = f"1.{version}"
            await asyncio.sleep(3.0)
            body = {"job": "math", "attempt": 1, "version": version}
            await self.call("POST", "/rose/v1/versions", "trainer", body)

    async def _reclaim(self) -> None:
        harvested = [node for node in self.nodes if node.worker_id.startswith("serving")]
        while True:
            await asyncio.sleep(0.5)
            node = self.rng.choice(harvested)
            node.reclaim_seq += 1
            self.engines[1].faults.append(Fault(kind="reclaim", after=self.rng.randrange(1, 10)))
            await node.beat()


async def watch(page: Browser, load: Load, args: argparse.Namespace) -> dict[str, Any]:
    await page.open(f"{load.url}/#token={load.tokens.environment}")
    await page.until("document.body.dataset.draws >= 1")
    await page.run(MEASURE)
    events = page.num_bytes
    await asyncio.sleep(args.seconds)
    draws, lags = await page.run("draws"), await page.run("lags")
    received = page.num_bytes - events
    if args.png is not None:
        await page.picture(args.png)
    await page.run("document.getElementById('turns').scrollIntoView()")  # tables out of sight are not filled
    await page.until("document.querySelector('#turns a') !== null")
    begun_s = time.monotonic()
    await page.run("document.querySelector('#turns a').click()")
    await page.until("document.querySelectorAll('#tokens .s').length > 0", period_s=0.02)
    viewer_ms = (time.monotonic() - begun_s) * 1e3
    if args.viewer_png is not None:
        await page.picture(args.viewer_png)
    lanes, spans = await page.run("[+document.body.dataset.lanes, +document.body.dataset.spans]")
    if args.learning_png is not None:
        await page.open(f"{load.url}/learning")
        await page.until("document.body.dataset.jobs > 1 && document.body.dataset.found > 0")
        await page.run(
            "f = document.getElementById('search'), f.job.value = 'maze', f.state.value = 'finished', "
            "f.meta.value = 'split=train', document.body.dataset.found = '', f.requestSubmit()"
        )
        await page.until("document.body.dataset.found > 0")
        await page.picture(args.learning_png)
        await page.run("document.querySelector('#trajectories a').click()")
        await page.until("document.body.dataset.siblings > 1")
        await page.run("scrollTo(0, 0)")
        await page.picture(args.learning_png.with_stem(args.learning_png.stem + "-siblings"))
    return {
        "draw_p50_ms": round(statistics.median(draws), 1),
        "draw_max_ms": round(max(draws), 1),
        "updates": len(draws),
        "lag_p50_ms": round(percentile(lags, 0.5), 1),
        "lag_p99_ms": round(percentile(lags, 0.99), 1),
        "lag_max_ms": round(max(lags), 1),
        "viewer_ms": round(viewer_ms),
        "kb_per_update": round(received / 1024 / max(1, len(draws)), 1),
        "lanes": lanes,
        "spans": spans,
        "page_errors": len(page.errors),
        "foreign_requests": sum(
            not url.startswith((load.url, "about:", "data:", "chrome")) for url in page.requests
        ),
    }


async def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    tokens = Tokens.generate()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens.save(folder / "tokens.toml")
        rose = Arm(
            "rose",
            [
                *(sys.executable, "-m", "rose.scheduler.cli", "--port", "0", "--log-level", "error"),
                *("--token-file", str(folder / "tokens.toml"), "--journal", str(folder / "journal")),
                *("--set", "timeouts.suspect_s=10", "--set", "timeouts.dead_s=30"),
            ],
        )
        try:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                load = Load(rose.url, tokens, session, args)
                try:
                    await load.start()
                    await asyncio.sleep(args.warm_s)
                    before, turns, at_s = rose.cpu_s(), load.num_turns, time.monotonic()
                    await asyncio.sleep(args.seconds)
                    alone = (rose.cpu_s() - before) / (time.monotonic() - at_s)
                    rate = (load.num_turns - turns) / (time.monotonic() - at_s)
                    async with Browser() as page:
                        found = await watch(page, load, args)
                    status = await load.call("GET", "/status", "environment")
                finally:
                    rose.stop()
                    await load.stop()
        finally:
            rose.end()
    found |= {
        "turns_per_s": round(rate, 1),
        "scheduler_cpu_share": round(alone, 3),
        "trajectories_running": status["trajectories"]["running"],
        "turns_running": status["turns"]["running"],
    }
    return found, {
        "workers": args.workers,
        "trajectories": args.trajectories,
        "status": {"reroutes": status["reroutes"]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--png", type=Path, help="where a picture of the page goes")
    parser.add_argument("--viewer-png", type=Path, help="where a picture of the trajectory viewer goes")
    parser.add_argument("--learning-png", type=Path, help="where pictures of the page of jobs go")
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--warm-s", type=float, default=40.0, help="load before anything is measured")
    parser.add_argument("--token-s", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if CHROMIUM is None:
        print("no chromium on this machine: nothing measured", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, end_all)
    report = Report("dashboard")
    try:
        summary, details = asyncio.run(measure(args))
    except KeyboardInterrupt:
        return 130
    report.finish(summary, details, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
