"""``rose demo`` with small stand-ins for its programs: real processes, real signals, no engine.

``python mini_demo.py PROGRAM ...`` plays one program; ``python mini_demo.py run OUT BASE_PORT RUN_DIRECTORY``
runs the orchestrator over them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from aiohttp import web

from rose.demo import programs, run
from rose.demo.demo_config import load_demo_config
from rose.demo.supervisor import Program

TURNS = {"n": 0}


async def production(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(body["max_tokens"]):
        await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        await asyncio.sleep(0.001)
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
    await response.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
    return response


async def health(request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def status(request: web.Request) -> web.Response:
    """Turns go up with every look; the harvested tier has a third of them."""
    TURNS["n"] += 30
    turns = TURNS["n"]
    return web.json_response(
        {
            "turns": {"by_tier": {"dedicated": turns * 2 // 3, "harvested": turns // 3}},
            "tokens": {"by_tier": {"dedicated": turns, "harvested": turns // 2}},
            "resumed_turns": turns // 60,
        }
    )


def serve(port: int) -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", production)
    app.router.add_get("/health", health)
    app.router.add_get("/healthz", health)
    app.router.add_get("/status", status)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def train(steps_path: str, until: str) -> None:
    """Steps until the file ``until`` says that the blocks are over, and two more."""
    left = 2
    with Path(steps_path).open("a") as file:
        for number in range(10_000):
            time.sleep(0.3)
            left -= '"rest"' in Path(until).read_text()
            record = {
                "step": number,
                "success_rate": min(1.0, 0.1 + 0.02 * number),
                "end_s": time.monotonic(),
                "step_s": 0.3,
                "lr": 1e-3,
                "tiers": {"dedicated": {"turns": 20, "tokens": 20}},
                "update": {"kind": "delta", "bytes_dense": 1000, "bytes_sent": 300, "density": 0.9},
            }
            file.write(json.dumps(record) + "\n")
            file.flush()
            if left <= 0:
                return


class MiniPlan(programs.DemoPlan):
    """The real plan with other programs; what is not replaced is the real thing (the traffic sender)."""

    def _mine(self, program: Program, *argv: str) -> Program:
        spec = self._other(program.spec.name, (sys.executable, __file__, *argv))
        return Program(
            spec=spec, ready=program.ready, timeout_s=240.0, restarts=program.restarts, task=program.task
        )

    def models(self) -> Program:
        code = f'import pathlib; pathlib.Path({str(self._models_path)!r}).write_text(\'["/p", "/q"]\')'
        return Program(spec=self._other("models", (sys.executable, "-c", code)), task=True)

    def relay(self) -> Program:
        return self._mine(super().relay(), "serve", str(self.config.port("relay")))

    def scheduler(self) -> Program:
        return self._mine(super().scheduler(), "serve", str(self.config.port("scheduler")))

    def production(self) -> Program:
        return self._mine(super().production(), "serve", str(self.config.port("production")))

    def dedicated(self) -> Program:
        return self._mine(super().dedicated(), "serve", str(self.config.port("dedicated")))

    def harvested(self) -> Program:
        return self._mine(super().harvested(), "serve", str(self.config.port("harvested")))

    def train(self) -> Program:
        return self._mine(super().train(), "train", str(self.steps_path), str(self.phase_path))

    def node_command(self, command: str) -> Program:
        spec = self._other(f"node {command}", (sys.executable, "-c", "pass"))
        return Program(spec=spec, timeout_s=10.0, task=True)


def main() -> int:
    match sys.argv[1:]:
        case ["serve", port]:
            serve(int(port))
        case ["train", steps_path, until]:
            train(steps_path, until)
        case ["run", out, base_port, run_directory]:
            programs.DemoPlan = MiniPlan  # type: ignore[misc]
            given = {
                "out": Path(out),
                "base_port": int(base_port),
                "run_directory": Path(run_directory),
                "num_pairs": 2,
                "traffic.period_s": 8.0,
                "traffic.mean_rate_hz": 5.0,
            }
            return run.run_demo(load_demo_config(None, given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
