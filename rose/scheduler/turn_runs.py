"""Run the turns of one request: a turn for each choice, all of them or none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rose.errors import RoseError
from rose.scheduler.dispatch import Dispatcher, TurnHandle
from rose.scheduler.inflight import InflightRequests
from rose.scheduler.inflight_request import Finished, Inflight
from rose.scheduler.prompts import Prompt, continuation
from rose.scheduler.streams import wants_logprobs
from rose.scheduler.trajectory import Trajectory


class TurnRuns:
    """Holds no state of its own."""

    def __init__(self, dispatcher: Dispatcher, inflight: InflightRequests) -> None:
        self._dispatcher = dispatcher
        self._inflight = inflight

    async def run(
        self,
        inflight: Inflight,
        plan: list[tuple[Prompt, dict[str, Any]]],
        body: Mapping[str, Any],
        model: str,
    ) -> list[Finished]:
        """Submit every choice, wait for all; if one fails, the others are stopped."""
        streamed = bool(body.get("stream"))
        entries = wants_logprobs(body)
        handles: list[TurnHandle] = []
        submit = self._inflight.submit
        try:
            for prompt, params in plan:  # the queue may be full for one of them
                handles.append(
                    submit(inflight, prompt, params, model=model, streamed=streamed, entries=entries)
                )
            inflight.started.set()
            if len(handles) == 1:
                return [await self._inflight.finish(inflight, handles[0], plan[0][0])]
            return list(
                await asyncio.gather(
                    *(
                        self._inflight.finish(inflight, handle, prompt)
                        for handle, (prompt, _) in zip(handles, plan, strict=True)
                    )
                )
            )
        except (RoseError, asyncio.CancelledError):
            for handle in handles:
                self._dispatcher.cancel_turn(handle.turn_id, "sibling_failed")
            raise

    def raw_prompt(
        self, trajectory: Trajectory | None, token_ids: list[int], params: Mapping[str, Any]
    ) -> Prompt:
        parent, inherited = (None, 0) if trajectory is None else continuation(trajectory, token_ids)
        forked = trajectory is not None and bool(trajectory.turns) and parent is None
        return Prompt(
            token_ids=token_ids,
            num_inherited=inherited,
            sampling_params=dict(params),
            parent=parent,
            fork="prompt" if forked else None,
        )


def answer_headers(done: list[Finished]) -> dict[str, str]:
    if not done:
        return {}
    item = done[0]
    return {
        "X-ROSE-Worker": item.handle.worker_id,
        "X-ROSE-Tier": item.handle.tier,
        "X-ROSE-Queue-Ms": str(round(item.handle.queued_s * 1e3)),
        "X-ROSE-Attempts": str(item.ended.result.num_attempts),
        "X-ROSE-Cached-Tokens": str(item.ended.result.num_cached_tokens),
        "X-ROSE-Versions": ",".join(version for version, _, _ in item.summary["versions"]),
    }
