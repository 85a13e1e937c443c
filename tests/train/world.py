"""Everything around the train loop, in one thread: the real scheduler, and engines that run the policy in torch.

:class:`TorchEngine` is the fake engine with a real model inside: it samples from the policy
and reports its log-probs, so that a loop on top of it truly learns.  The weight path is a folder
(:mod:`tests.train.file_publisher`); an engine loads the version that the scheduler asks its worker for.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from rose.auth import Tokens
from rose.scheduler.app import Scheduler
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.testing.fake_engine import FakeEngine, serve_engine
from rose.testing.fake_node import FakeNode
from rose.testing.toy_tokenizer import HFTokenizer
from tests.train.file_publisher import RUN


class TorchEngine(FakeEngine):
    """Samples from a Hugging Face model."""

    def __init__(self, model_path: Path, versions: Path, *, seed: int) -> None:
        super().__init__(tokenizer=HFTokenizer(AutoTokenizer.from_pretrained(model_path)), max_model_len=1024)
        self._versions = versions
        self.policy: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        # The model has more rows than its tokenizer has entries, and samples them all.
        self.tokenizer.vocab_size = self.policy.config.vocab_size
        self._generator = torch.Generator().manual_seed(seed)
        self.num_sampled = 0

    def load(self, version: str) -> None:
        tensors = load_file(self._versions / f"{version}.safetensors")
        self.policy.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
        self.version = version

    def _sample(self, prompt: Sequence[int], params: Mapping[str, Any]) -> Any:
        ids = list(prompt)
        allowed = params.get("allowed_token_ids")
        cache, num_read, read_by = DynamicCache(), 0, self.version
        while True:
            if read_by != self.version:  # as an engine that resets its KV at an update: exact log-probs
                cache, num_read, read_by = DynamicCache(), 0, self.version
            with torch.inference_mode():
                new = torch.tensor([ids[num_read:]])
                found = self.policy(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits, num_read = found.logits[0, -1], len(ids)
            greedy = params.get("temperature", 1.0) == 0.0
            logits = logits / (params.get("temperature") or 1.0)
            if allowed:
                kept = torch.full_like(logits, float("-inf"))
                kept[allowed] = logits[allowed]
                logits = kept
            log_probs = torch.log_softmax(logits, -1)
            if greedy:
                token = int(log_probs.argmax())
            else:
                token = int(torch.multinomial(log_probs.exp(), 1, generator=self._generator))
            self.num_sampled += 1
            ids.append(token)
            yield token, float(log_probs[token])


class World:
    """A running scheduler with its engines.  ``call`` runs a coroutine in their thread."""

    def __init__(self, root: Path, model_path: Path, num_engines: int, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self.root, self.model_path = root, model_path
        self.tokens = Tokens.generate()
        self.versions = root / "versions"
        self.versions.mkdir(parents=True)
        self.engines = [TorchEngine(model_path, self.versions, seed=seed) for seed in range(num_engines)]
        self.nodes: list[FakeNode] = []
        """One per engine; the first is dedicated, the others are harvested."""
        self.loop = asyncio.new_event_loop()
        self.url = ""
        self.scheduler: Scheduler | None = None
        self._stack = contextlib.AsyncExitStack()

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(200)

    async def start(self) -> None:
        config = SchedulerConfig.model_validate({**self._settings, "port": 0})
        self.scheduler = Scheduler(config, self.tokens, self.root / "journal")
        await self.scheduler.start()
        self._stack.push_async_callback(self.scheduler.stop, drain_s=0.0)
        self.url = self.scheduler.url
        session = await self._stack.enter_async_context(aiohttp.ClientSession())
        for index, engine in enumerate(self.engines):
            runner, url = await serve_engine(engine)
            self._stack.push_async_callback(runner.cleanup)
            tier = "dedicated" if index == 0 else "harvested"
            node = FakeNode(
                session,
                self.url,
                self.tokens.node,
                engine,
                url,
                worker_id=f"w{index}",
                tier=tier,
                period_s=0.05,
            )
            await node.register()
            self.nodes.append(node)
            beating = asyncio.create_task(keep_up(node, engine, self.versions))
            self._stack.callback(beating.cancel)

    async def stop(self) -> None:
        await self._stack.aclose()


async def keep_up(node: FakeNode, engine: TorchEngine, versions: Path) -> None:
    """What a node agent does: heartbeat, register again where that is asked for, and take the newest version."""
    while True:
        newest = max(
            (path.stem for path in versions.glob("*.safetensors")),
            key=lambda name: tuple(int(part) for part in name.split(".")),
            default=engine.version,
        )
        if newest != engine.version:
            engine.load(newest)
        node.engine.weights_run = RUN
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # the scheduler may be away
            if not await node.beat():
                await node.register()
                await node.beat()
        await asyncio.sleep(0.05)


@contextlib.contextmanager
def running_world(root: Path, model_path: Path, *, num_engines: int = 2, **settings: Any) -> Iterator[World]:
    """Args:
    settings: Of the scheduler.
    """
    world = World(root, model_path, num_engines, settings)
    thread = threading.Thread(target=world.loop.run_forever, daemon=True)
    thread.start()
    try:
        world.call(world.start())
        yield world
    finally:
        world.call(world.stop())
        world.loop.call_soon_threadsafe(world.loop.stop)
        thread.join(60)
        world.loop.close()
