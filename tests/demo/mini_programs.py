"""Small stand-ins for the demo's programs: ``python mini_programs.py serve PORT``, ``python mini_programs.py train STEPS_PATH UNTIL``.

Apart from :mod:`tests.demo.mini_demo`: six of them start, and none has to import the demo for it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def serve(port: int) -> None:
    """Any of the servers: answers as production, as an engine, and as the scheduler."""
    import asyncio

    from aiohttp import web

    num_turns = 0

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
        nonlocal num_turns
        num_turns += 30
        return web.json_response(
            {
                "turns": {"by_tier": {"dedicated": num_turns * 2 // 3, "harvested": num_turns // 3}},
                "tokens": {"by_tier": {"dedicated": num_turns, "harvested": num_turns // 2}},
                "resumed_turns": num_turns // 60,
            }
        )

    app = web.Application()
    app.router.add_post("/v1/completions", production)
    app.router.add_get("/health", health)
    app.router.add_get("/healthz", health)
    app.router.add_get("/status", status)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def train(steps_path: Path, until: Path, step_s: float = 0.1) -> None:
    """Steps until the file ``until`` says that the blocks are over, and two more."""
    left = 2
    with steps_path.open("a") as file:
        for number in range(10_000):
            time.sleep(step_s)
            left -= '"rest"' in until.read_text()
            record = {
                "step": number,
                "success_rate": min(1.0, 0.1 + 0.02 * number),
                "end_s": time.monotonic(),
                "step_s": step_s,
                "lr": 1e-3,
                "tiers": {"dedicated": {"turns": 20, "tokens": 20}},
                "update": {"kind": "delta", "bytes_dense": 1000, "bytes_sent": 300, "density": 0.9},
            }
            file.write(json.dumps(record) + "\n")
            file.flush()
            if left <= 0:
                return


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", port]:
            serve(int(port))
        case ["train", steps_path, until]:
            train(Path(steps_path), Path(until))
