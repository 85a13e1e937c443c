"""An engine that runs the policy, with its node, in a process of its own: ``python -m tests.train.engine_process SPEC.json``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import torch

from rose.auth import Tokens
from rose.testing.fake_engine import serve_engine
from rose.testing.fake_node import FakeNode
from tests.train.world import TorchEngine, keep_up


async def serve(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    versions = Path(spec["versions"])
    engine = TorchEngine(Path(spec["model"]), versions, seed=spec["seed"])
    _, url = await serve_engine(engine, spec["port"])
    token = Tokens.load(Path(spec["token_file"])).node
    async with aiohttp.ClientSession() as session:
        node = FakeNode(
            session, spec["scheduler"], token, engine, url, worker_id=spec["worker_id"], tier=spec["tier"]
        )
        print(f"ready {url}", flush=True)
        await keep_up(node, engine, versions)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(Path(sys.argv[1]).read_text())))
