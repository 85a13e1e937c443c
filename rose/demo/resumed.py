"""Turns that lost their engine and went on at another, as the scheduler recorded them, while it still has them.

The scheduler's event stream names every span of a turn on an engine; one that ends a later attempt is a turn that moved.  Its
tokens are asked for at once: a trajectory is forgotten when the step that trained on it is done.  Watches and starts nothing;
whatever it cannot get is missing in the report and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from itertools import groupby
from typing import Any
from urllib.parse import quote

import httpx

from rose.auth import bearer
from rose.demo.result import ResumedTurn, SampledToken, shorter_side
from rose.errors import EngineError
from rose.wire.http_client import BROKEN, ask, open_client

MAX_SEEN = 2000
MAX_AT_ONCE = 16
"""Asked for per event: the scheduler has turns to place."""
AGAIN_S = 1.0
FIRST_ATTEMPT = 1
MAX_LINE_BYTES = 8 * 2**20
MAX_ANSWER_BYTES = 64 * 2**20
ANSWER_S = 30.0


class ResumedTurns:
    """``found``: tokens by engine of every such turn; ``best``: the one whose cut lies nearest to its middle."""

    def __init__(self) -> None:
        self.found: list[tuple[int, ...]] = []
        self.best: ResumedTurn | None = None
        self._asked: set[str] = set()

    async def watch(self, url: str, token: str) -> None:
        """Follow the scheduler at ``url`` until cancelled."""
        timeout = httpx.Timeout(None, connect=2.0, read=30.0)
        async with open_client(bearer(token)) as client:
            while True:
                # Absent while it starts or restarts.
                with suppress(*BROKEN, EngineError, ValueError):
                    async with client.stream("GET", f"{url}/events", timeout=timeout) as stream:
                        if stream.status_code == 200:
                            async for line in lines_of(stream.aiter_raw()):
                                if line.startswith(b"data:"):
                                    await self._take(client, url, json.loads(line[5:]))
                await asyncio.sleep(AGAIN_S)

    async def _take(self, client: httpx.AsyncClient, url: str, event: Mapping[str, Any]) -> None:
        for trajectory in moved(event)[:MAX_AT_ONCE]:
            if trajectory in self._asked or len(self.found) >= MAX_SEEN:
                continue
            self._asked.add(trajectory)
            answer = await ask(
                client,
                "GET",
                f"{url}/rose/v1/trajectories/{quote(trajectory, safe='')}/tokens",
                timeout_s=ANSWER_S,
                max_bytes=MAX_ANSWER_BYTES,
                field="scheduler",
            )
            if answer.status == 200:
                self.see(json.loads(answer.body))

    def see(self, answer: Mapping[str, Any]) -> None:
        """Take one answer of ``/rose/v1/trajectories/{id}/tokens``."""
        turn = turn_of(answer)
        if turn is None:
            return
        self.found.append(turn.parts)
        if self.best is None or shorter_side(turn.parts) > shorter_side(self.best.parts):
            self.best = turn


async def lines_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines of a stream without their ends.

    Raises:
        ValueError: One is longer than :data:`MAX_LINE_BYTES`.
    """
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line is longer than {MAX_LINE_BYTES} bytes")


def moved(event: Mapping[str, Any]) -> list[str]:
    """Trajectories of an event whose turn has ended well at a later attempt than its first."""
    found: dict[str, None] = {}
    spans = event.get("spans")
    for span in spans if isinstance(spans, list) else ():
        match span:
            case [_, _, _, str(trajectory), int(attempt), _, float(), "done"] if attempt > FIRST_ATTEMPT:
                found[trajectory] = None
            case _:
                pass
    return list(found)


def turn_of(answer: Mapping[str, Any]) -> ResumedTurn | None:
    """The last turn of an answer, if more than one engine sampled it."""
    rows = [row for row in answer.get("tokens") or () if isinstance(row, Mapping)]
    tokens = [
        SampledToken(
            text=str(row.get("text") or "?"),
            logprob=float(row.get("logprob") or 0.0),
            worker=str(row.get("worker", "")),
            tier=str(row.get("tier", "")),
            version=str(row.get("version", "")),
        )
        for row in rows
        if row.get("sampled") and row.get("turn") == answer.get("turn")
    ]
    attempts = [
        row.get("attempt") for row in rows if row.get("sampled") and row.get("turn") == answer.get("turn")
    ]
    parts = tuple(len(list(group)) for _, group in groupby(attempts))
    if len(parts) < 2:
        return None
    prompt = "".join(str(row.get("text") or "?") for row in rows if not row.get("sampled"))
    return ResumedTurn(
        trajectory_id=str(answer.get("id", "")), prompt=prompt, parts=parts, tokens=tuple(tokens)
    )
