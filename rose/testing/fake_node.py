"""A node agent without a node: it registers a fake engine with a scheduler and sends its heartbeats.

``python -m rose.testing.fake_node`` starts a fake engine; with ``--scheduler URL --token-file FILE`` one that registers itself.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Annotated, Literal, cast

import aiohttp
import msgspec
import typer

from rose.auth import Tokens, bearer
from rose.testing.fake_engine import FakeEngine, serve_engine
from rose.testing.toy_tokenizer import HFTokenizer, Tokenizer, ToyTokenizer
from rose.wire.addresses import Addresses
from rose.wire.reading import read
from rose.wire.workers import Heartbeat, HeartbeatAnswer, Registration

_CONFLICT = 409
_PATIENCE = aiohttp.ClientTimeout(total=5.0)
"""With a scheduler that hangs; a node agent's."""


class FakeNode:
    """Registers a fake engine with a scheduler and sends its heartbeats, as a node agent does."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        scheduler_url: str,
        token: str,
        engine: FakeEngine,
        engine_url: str,
        *,
        worker_id: str,
        tier: str = "dedicated",
        period_s: float = 0.5,
        engine_token: str | None = None,
    ) -> None:
        self.engine = engine
        self.worker_id = worker_id
        self.reclaim_seq = 0
        self.answer: HeartbeatAnswer | None = None
        """Of the last heartbeat: whom the scheduler wants it to serve."""
        self.kv_budget_tokens: int | None = None
        self.kv_used_tokens = 0
        self.slack_s: float | None = None
        self.gated = False
        self.lent_s: float | None = None
        """What every heartbeat says of a borrowed device."""
        self.waiting = 0
        self.num_preemptions = 0
        self.serving_use = 0.0
        self.slo_breaches = 0
        self.serving_p99_s: dict[str, tuple[float, float]] = {}
        """``ttft`` and ``tpot`` of production: what it does, what it promised."""
        self._session = session
        self._addresses = Addresses(scheduler_url)
        self._headers = bearer(token)
        self._engine_url = engine_url
        self._engine_token = engine_token
        self._tier = tier
        self._period_s = period_s
        self._incarnation = f"{os.getpid()}-{time.monotonic_ns()}"
        self._seq = 0

    def report_to(self, scheduler_url: str) -> None:
        """To another scheduler from now on."""
        self._addresses = Addresses(scheduler_url)

    async def register(self) -> None:
        body = Registration(
            worker_id=self.worker_id,
            url=self._engine_url,
            tier=cast("Literal['dedicated', 'harvested', 'borrowed']", self._tier),
            model=self.engine.model,
            max_model_len=self.engine.max_model_len,
            incarnation=self._incarnation,
            vocab_size=self.engine.tokenizer.vocab_size,
            engine_token=self._engine_token,
            logprobs_mode=self.engine.logprobs_mode,
        )
        data = msgspec.json.encode(body)
        url = f"{self._addresses.current}/workers"
        while True:
            async with self._session.post(
                url, data=data, headers=self._headers, timeout=_PATIENCE
            ) as response:
                if response.status != _CONFLICT:
                    response.raise_for_status()
                    return
            # Somebody of this name was heard a moment ago, at another port most likely, and may be gone.
            await asyncio.sleep(self._period_s)

    async def beat(self, state: Literal["ready", "starting", "stopping"] = "ready") -> bool:
        """One heartbeat; False when the scheduler does not know us."""
        self._seq += 1
        ttft, tpot = (self.serving_p99_s.get(kind, (None, None)) for kind in ("ttft", "tpot"))
        body = Heartbeat(
            incarnation=self._incarnation,
            seq=self._seq,
            version=self.engine.version,
            run=self.engine.weights_run or None,
            state=state,
            kv_budget_tokens=self.kv_budget_tokens,
            kv_used_tokens=self.kv_used_tokens,
            running=self.engine.num_running,
            decoded_tokens=self.engine.num_decoded,
            gated=self.gated,
            lent_s=self.lent_s,
            reclaim_seq=self.reclaim_seq + self.engine.num_reclaims,
            slack_s=self.slack_s,
            waiting=self.waiting,
            num_preemptions=self.num_preemptions,
            serving_use=self.serving_use,
            slo_breaches=self.slo_breaches,
            serving_ttft_p99_s=ttft[0],
            serving_tpot_p99_s=tpot[0],
            slo_ttft_s=ttft[1],
            slo_tpot_s=tpot[1],
        )
        url = f"{self._addresses.current}/workers/{self.worker_id}/heartbeat"
        data = msgspec.json.encode(body)
        async with self._session.post(url, data=data, headers=self._headers, timeout=_PATIENCE) as response:
            response.raise_for_status()
            self.answer = read(HeartbeatAnswer, await response.read())
            return self.answer.known

    async def run(self) -> None:
        """Beat until cancelled; outlives restarts of the scheduler, and goes to its stand-by when that takes over."""
        while True:
            url, moved = self._addresses.current, False
            try:
                if not await self.beat():
                    await self.register()
                    await self.beat()
            except (aiohttp.ClientError, TimeoutError):
                moved = self._addresses.leave(url)
            await asyncio.sleep(min(0.1, self._period_s) if moved else self._period_s)


def main(
    port: Annotated[int, typer.Option(help="0 picks a free one.")] = 0,
    scheduler: Annotated[str | None, typer.Option(help="URL to register at.")] = None,
    advertise: Annotated[
        str | None, typer.Option(help="URL to register, if it is reached by another.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option()] = None,
    worker_id: Annotated[str, typer.Option()] = "fake",
    tier: Annotated[str, typer.Option()] = "dedicated",
    token_s: Annotated[float, typer.Option(help="Seconds per token.")] = 0.0,
    mean_tokens: Annotated[int, typer.Option()] = 24,
    max_model_len: Annotated[int, typer.Option()] = 4096,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of a transformers tokenizer.")] = None,
) -> None:
    """Run a fake engine until it is killed; prints its URL."""

    async def run() -> None:
        loaded: Tokenizer = ToyTokenizer()
        if tokenizer is not None:
            from transformers import AutoTokenizer

            loaded = HFTokenizer(AutoTokenizer.from_pretrained(str(tokenizer)))
        engine = FakeEngine(
            tokenizer=loaded, token_s=token_s, mean_tokens=mean_tokens, max_model_len=max_model_len
        )
        _, url = await serve_engine(engine, port)
        typer.echo(f"fake engine ready at {url}")
        if scheduler is None:
            await asyncio.Event().wait()
            return
        async with aiohttp.ClientSession() as session:
            await FakeNode(
                session,
                scheduler,
                Tokens.load(token_file, ["node"]).node,
                engine,
                advertise or url,
                worker_id=worker_id,
                tier=tier,
            ).run()

    asyncio.run(run())


if __name__ == "__main__":
    typer.run(main)
