"""A rollout engine without a model: the same command line, environment, routes, files and memory as the real one.

It holds real pages (``HostPagePool``), obeys ``allowed_pages``, and reports what the kernel says.  ``FAKE_MODE``:
``stubborn`` never gives a page back, ``die`` ends at once, ``deaf`` is stubborn and ignores SIGTERM, ``segments`` makes
shared memory as vLLM's message queues do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from aiohttp import web

from rose.coserve.node_dir import NodeDir
from rose.coserve.pages import HostPagePool
from rose.coserve.records import Phase, RankState, RolloutLease
from rose.policy.coserving.rollout import allowed_pages
from rose.units import PAGE_BYTES

TOTAL_PAGES = 16


class FakeEngine:
    def __init__(self, mode: str, version: str) -> None:
        node = NodeDir(os.environ["ROSE_DIR"])
        self.stubborn = mode in ("stubborn", "deaf")
        self.version = version
        self.weights_run = ""
        self.staged: str | None = None
        self.fault = ""
        self.broken = False
        self.arena = HostPagePool().reserve(TOTAL_PAGES * PAGE_BYTES, guard=True)
        self.held = 0
        self.steps = 0
        self.cuts = 0
        self.lease = node.rollout_lease_writer()
        self.rank = node.rank_writer("rollout", 0, TOTAL_PAGES)
        self.node, self.serving, self.board = node.node(), node.serving_lease(), node.serving_board()
        self.publish(0)

    def allowed(self) -> int:
        node, serving, board = self.node.read(), self.serving.read(), self.board.read()
        if node is None or not self.node.alive():
            return 0
        now_ns = time.monotonic_ns()
        pages, _ = allowed_pages(
            mode=node.mode,
            lend_pages=node.lend_pages,
            has_serving=node.has_serving,
            serving_phase=serving.phase if serving else 0,
            serving_alive=self.serving.alive(),
            serving_total=serving.total_pages if serving else 0,
            serving_reserved=serving.reserved_pages if serving else 0,
            serving_needed=board.needed_pages if board else 0,
            node_age_s=(now_ns - node.heartbeat_ns) / 1e9,
            serving_age_s=(now_ns - serving.heartbeat_ns) / 1e9 if serving else 1e9,
        )
        return min(pages, TOTAL_PAGES)

    def publish(self, reserved: int) -> None:
        now_ns = time.monotonic_ns()
        # What is there first, then what it may be: who takes over what is given up finds it gone.
        resident = self.arena.resident_bytes() // PAGE_BYTES
        self.rank.write(RankState(resident_pages=resident, heartbeat_ns=now_ns))
        self.lease.write(
            RolloutLease(
                phase=Phase.READY,
                reserved_pages=reserved,
                gate_open=self.held > 0,
                steps=self.steps,
                reclaim_seq=self.cuts,
                heartbeat_ns=now_ns,
            )
        )

    async def run(self) -> None:
        while True:
            allowed = self.allowed()
            if allowed > self.held:
                self.publish(allowed)  # reserve first, look again second
                allowed = max(self.held, min(allowed, self.allowed()))
                if allowed > self.held:  # what was on offer may be gone at the second look
                    self.arena.map([(self.held * PAGE_BYTES, (allowed - self.held) * PAGE_BYTES)])
                    self.held = allowed
            elif allowed < self.held and not self.stubborn:
                self.arena.unmap([(allowed * PAGE_BYTES, (self.held - allowed) * PAGE_BYTES)])
                self.held = allowed
                self.cuts += 1
            self.steps += self.held > 0
            self.publish(self.held)
            await asyncio.sleep(0.01)

    def status(self) -> dict[str, object]:
        return {
            "role": "rollout",
            "run": self.weights_run,
            "version": self.version,
            "paused": self.broken,
            "vocab_size": 1000,
            "max_num_seqs": 32,
            "logprobs_mode": "processed_logprobs",
            "ranks": [{"phase": "broken" if self.broken else "idle"}],
            "scheduler": {
                "usable_pages": self.held,
                "budget_tokens": self.held * 100,
                "used_tokens": 7,
                "running": 3,
                "resident_bytes": self.arena.resident_bytes(),
            },
        }


@web.middleware
async def guard(request: web.Request, handler: object) -> web.StreamResponse:
    token = os.environ["ROSE_NODE_TOKEN"]
    if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {token}":
        return web.json_response({"error": {"message": "token", "param": "Authorization"}}, status=401)
    return await handler(request)  # type: ignore[operator]


def refusal(status: int, message: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": message, "param": "base", "code": code}}, status=status)


def build(engine: FakeEngine) -> web.Application:
    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def status(_: web.Request) -> web.Response:
        return web.json_response(engine.status())

    async def stage(request: web.Request) -> web.Response:
        body = await request.json()
        update = json.loads(Path(body["path"]).read_text())
        if update["base"] not in (None, engine.version):
            return refusal(409, f"is for {update['base']}, not {engine.version}", "wrong_base")
        target = f"{body['attempt']}.{body['version']}"
        engine.fault = update.get("fault", "")
        if engine.fault == "busy":
            return refusal(409, "another weight call is in progress", "busy")
        if engine.fault == "die in stage":
            os.kill(os.getpid(), signal.SIGKILL)
        if engine.staged != target:
            engine.staged = target
            return web.json_response({"state": "staging", "version": target}, status=202)
        return web.json_response({"state": "staged", "version": target, "num_changed": 5})

    async def commit(request: web.Request) -> web.Response:
        body = await request.json()
        target = f"{body['attempt']}.{body['version']}"
        if engine.staged != target:
            return refusal(409, "is not staged", "not_staged")
        if engine.fault == "die in commit":
            os.kill(os.getpid(), signal.SIGKILL)
        if engine.fault:
            engine.broken = True
            if engine.fault == "silent" and request.transport is not None:
                request.transport.abort()
            return refusal(500, "rank 0: does not hold its old values after an undo", "weights_broken")
        engine.version, engine.weights_run, engine.staged = target, body["run"], None
        return web.json_response({"version": target, "pause_s": 0.001})

    app = web.Application(middlewares=[guard])  # type: ignore[list-item]
    app.router.add_get("/health", health)
    app.router.add_get("/rose/status", status)
    app.router.add_post("/rose/weights/stage", stage)
    app.router.add_post("/rose/weights/commit", commit)
    return app


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    args, _ = parser.parse_known_args()
    report = {
        "argv": sys.argv,
        "env": {key: value for key, value in os.environ.items() if "ROSE" in key or "VLLM" in key},
        "idle_class": os.sched_getscheduler(0) == os.SCHED_IDLE,
        "pid": os.getpid(),
    }
    mode = os.environ.get("FAKE_MODE", "")
    if mode == "segments":
        segment = SharedMemory(create=True, size=4096)
        resource_tracker.unregister(
            f"/{segment.name}", "shared_memory"
        )  # killed with us, it may be faster or not
        report["segment"] = segment.name
    Path(os.environ["FAKE_REPORT"]).write_text(json.dumps(report))
    if mode == "die":
        sys.exit("no such model")
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = FakeEngine(mode, os.environ.get("FAKE_VERSION", "0.0"))
    runner = web.AppRunner(build(engine))
    await runner.setup()
    await web.TCPSite(runner, args.host, args.port).start()
    print("fake engine is up", flush=True)
    await engine.run()


if __name__ == "__main__":
    asyncio.run(main())
