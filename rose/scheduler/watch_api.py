"""Routes for people: the dashboard, its live events, one trajectory token by token, a trace for Perfetto."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from importlib.resources import files
from itertools import islice
from typing import Any, cast

from aiohttp import web

from rose.errors import CapacityError, EngineError, RequestError
from rose.scheduler.http import encode, json_response, whole_number
from rose.scheduler.ids import unpack_ids, unpack_logprobs
from rose.scheduler.renderer import Renderer
from rose.scheduler.slices import Slices
from rose.scheduler.store import TrajectoryStore
from rose.scheduler.timeline import Timeline
from rose.scheduler.trajectory import Trajectory
from rose.wire.answers import Branch, BranchToken
from rose.wire.status import SchedulerStatus, WatchHistory, WatchNow

PERIOD_S = 1.0
_FIRST_SPANS = 12_000
_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class WatchRoutes:
    """Args:
    status: Gives ``/status``, hardly old.
    stopping: Ends the event streams.
    looking: Held while a long answer is built: turns wait for a slice of one, however many people look.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        timeline: Timeline,
        renderer: Renderer,
        status: Callable[[], SchedulerStatus],
        stopping: Callable[[], bool],
        looking: asyncio.Lock,
    ) -> None:
        self._store = store
        self._timeline = timeline
        self._renderer = renderer
        self._status = status
        self._stopping = stopping
        self._looking = looking

    async def page(self, request: web.Request) -> web.Response:
        return _html("page.html")

    async def learning(self, request: web.Request) -> web.Response:
        return _html("learning.html")

    async def history(self, request: web.Request) -> web.Response:
        async with self._looking:
            return json_response(await self._timeline.history())

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: first ``history``, then ``now`` once a second."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        timeline = self._timeline
        seen = timeline.num_changes
        history: WatchHistory = {
            "samples": list(timeline.samples),
            "spans": timeline.spans()[-_FIRST_SPANS:],
            "marks": list(timeline.marks),
            "steps": list(timeline.steps),
        }
        await response.write(b"event: history\ndata: " + encode(history) + b"\n\n")
        while not self._stopping():
            changed = timeline.changes_since(seen)
            seen = timeline.num_changes
            now: WatchNow = {
                "status": self._status(),
                "sample": timeline.samples[-1] if timeline.samples else None,
                "spans": changed,
                "marks": list(islice(reversed(timeline.marks), 100))[::-1],
                "steps": list(timeline.steps)[-2:],
                "staleness": sorted(timeline.staleness.items()),
            }
            await response.write(b"event: now\ndata: " + encode(now) + b"\n\n")
            await asyncio.sleep(PERIOD_S)
        return response

    async def trace(self, request: web.Request) -> web.Response:
        return json_response(
            self._timeline.chrome_trace(),
            headers={"Content-Disposition": 'attachment; filename="rose-trace.json"'},
        )

    async def tokens(self, request: web.Request) -> web.Response:
        """One branch of a trajectory, token by token; ``?turn=N`` names its last turn (default: the newest)."""
        trajectory = self._store.get(request.match_info["id"])
        asked = request.query.get("turn")
        if not trajectory.turns:
            return json_response(Branch(id=trajectory.id, turn=None, branches=[], tokens=[]))
        last = len(trajectory.turns) - 1
        turn = last if asked is None else whole_number(asked, field="turn", least=0, most=last)
        branches = [record.turn for record in trajectory.turns if record.turn not in trajectory.parents]
        texts = await self._texts(trajectory.full_ids(turn))
        async with self._looking:
            rows = zip(branch_tokens(trajectory, turn), texts, strict=True)
            tokens = await Slices().json_list(row | {"text": text} for row, text in rows)
        found = cast("list[BranchToken]", tokens)
        return json_response(Branch(id=trajectory.id, turn=turn, branches=branches, tokens=found))

    async def _texts(self, token_ids: list[int]) -> list[str | None]:
        """Each token's text, from any engine; None where there is none to ask."""
        try:
            return list(await self._renderer.token_texts(token_ids))
        except (CapacityError, EngineError, RequestError):
            return [None] * len(token_ids)


def _html(name: str) -> web.Response:
    text = files("rose.scheduler").joinpath(name).read_text()
    return web.Response(text=text, content_type="text/html", headers=_SECURITY)


def branch_tokens(trajectory: Trajectory, turn: int) -> Iterator[dict[str, Any]]:
    """Every token of the branch that ends with ``turn``; prompt tokens carry ``sampled: false`` and nothing more."""
    for _, _, number in trajectory.sampled(turn):
        record = trajectory.turns[number]
        for token in unpack_ids(record.suffix_ids):
            yield {"id": token, "sampled": False}
        sampled = zip(unpack_ids(record.token_ids), unpack_logprobs(record.logprobs), strict=True)
        rows: list[dict[str, Any]] = [
            {"id": token, "sampled": True, "turn": number, "logprob": logprob} for token, logprob in sampled
        ]
        for version, at, size in record.versions:
            for row in rows[at : at + size]:
                row["version"] = version
        for segment in record.segments:
            where = {name: segment[name] for name in ("worker", "tier", "attempt")}
            for row in rows[segment["start"] : segment["start"] + segment["n"]]:
                row |= where
        yield from rows
