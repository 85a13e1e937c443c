"""A rollout engine without a model: the same command line, environment, routes, files and memory as the real one.

It holds real pages (``HostPagePool``), obeys ``allowed_pages``, and reports what the kernel says.  ``FAKE_MODE``:
``stubborn`` never gives a page back, ``die`` ends at once, ``deaf`` is stubborn and ignores SIGTERM, ``mute`` never listens, ``leaves`` listens until it is told to
leave, ``segments`` makes
shared memory as vLLM's message queues do.  The standard library's server: a hundred of them are started, and an import of aiohttp would be
most of what each costs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from rose.coserve.engine_keeper import REFUSED
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

    def run(self) -> None:
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
            time.sleep(0.01)

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


class Refusal(Exception):
    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "param": "base", "code": code}}


class Hangs(Exception):
    """The connection ends without an answer."""


class Routes(BaseHTTPRequestHandler):
    """Of one engine, :attr:`engine`."""

    protocol_version = "HTTP/1.1"
    engine: FakeEngine

    def do_GET(self) -> None:
        match self.path:
            case "/health":
                self.answer(200, None)
            case "/rose/status":
                self.guarded(lambda: (200, self.engine.status()))
            case _:
                self.answer(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        match self.path:
            case "/rose/weights/stage":
                self.guarded(lambda: self.stage(body))
            case "/rose/weights/commit":
                self.guarded(lambda: self.commit(body))
            case _:
                self.answer(404, {})

    def guarded(self, route: Callable[[], tuple[int, object]]) -> None:
        if self.headers.get("Authorization") != f"Bearer {os.environ['ROSE_NODE_TOKEN']}":
            return self.answer(401, {"error": {"message": "token", "param": "Authorization"}})
        try:
            self.answer(*route())
        except Refusal as refusal:
            self.answer(refusal.status, refusal.body)
        except Hangs:
            self.close_connection = True

    def stage(self, body: dict[str, Any]) -> tuple[int, object]:
        engine = self.engine
        update = json.loads(Path(body["path"]).read_text())
        if update["base"] not in (None, engine.version):
            raise Refusal(409, f"is for {update['base']}, not {engine.version}", "wrong_base")
        target = f"{body['attempt']}.{body['version']}"
        engine.fault = update.get("fault", "")
        if engine.fault == "busy":
            raise Refusal(409, "another weight call is in progress", "busy")
        if engine.fault == "die in stage":
            os.kill(os.getpid(), signal.SIGKILL)
        if engine.staged != target:
            engine.staged = target
            return 202, {"state": "staging", "version": target}
        return 200, {"state": "staged", "version": target, "num_changed": 5}

    def commit(self, body: dict[str, Any]) -> tuple[int, object]:
        engine = self.engine
        target = f"{body['attempt']}.{body['version']}"
        if engine.staged != target:
            raise Refusal(409, "is not staged", "not_staged")
        if engine.fault == "die in commit":
            os.kill(os.getpid(), signal.SIGKILL)
        if engine.fault:
            engine.broken = True
            if engine.fault == "silent":
                raise Hangs
            raise Refusal(500, "rank 0: does not hold its old values after an undo", "weights_broken")
        engine.version, engine.weights_run, engine.staged = target, body["run"], None
        return 200, {"version": target, "pause_s": 0.001}

    def answer(self, status: int, body: object) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(engine: FakeEngine, host: str, port: int) -> Callable[[], None]:
    """The routes, in threads of their own; what ends them and gives up the port."""

    class Server(ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        allow_reuse_address = True
        daemon_threads = True
        request_queue_size = 64

        def process_request(self, request: Any, client_address: Any) -> None:
            connections.append(request)
            super().process_request(request, client_address)

    connections: list[socket.socket] = []
    server = Server((host, port), type("Own", (Routes,), {"engine": engine}))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def leave() -> None:
        server.shutdown()
        server.server_close()
        for one in connections:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    return leave


def leave_when_told(leave: Callable[[], None]) -> None:
    """Once there is a file of that name beside the report."""
    told = Path(os.environ["FAKE_REPORT"]).with_name("leave")
    while not told.exists():
        time.sleep(0.02)
    leave()


def main() -> None:
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
    if mode == "refused":
        sys.exit(f"rose.errors.{REFUSED}Mamba-1: the plugin has no way to divide it")
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = FakeEngine(mode, os.environ.get("FAKE_VERSION", "0.0"))
    if mode != "mute":
        leave = serve(engine, args.host, args.port)
        if mode == "leaves":
            threading.Thread(target=leave_when_told, args=(leave,), daemon=True).start()
    print("fake engine is up", flush=True)
    engine.run()


if __name__ == "__main__":
    main()
