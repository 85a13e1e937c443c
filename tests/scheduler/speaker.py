"""A fake engine whose derender routes parse: what it sampled is reasoning, text and tool calls, as a test says.

Like vLLM's parsers it says the same tokens in other words when they are streamed: white space before a tool call is content
there and none in a whole answer, arguments have other spacing, and the ids of calls are drawn anew each time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rose.testing.fake_engine import FakeEngine, _json


@dataclass(frozen=True, kw_only=True)
class Speech:
    """What some tokens say; ``calls`` are names with arguments, as a model wrote them."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, str]] = ()
    streamed_content: str | None = None
    """None: as the whole one."""
    streamed_calls: Sequence[tuple[str, str]] | None = None


class Speaker(FakeEngine):
    """Args:
    says: What the sampled tokens of a turn are.
    """

    def __init__(self, says: Callable[[list[int]], Speech], **engine: Any) -> None:
        super().__init__(**engine, plugin=False)
        self._says = says

    def speech(self, asked: dict[str, Any], token_ids: list[int]) -> Speech:
        """What ``token_ids`` say in answer to the chat request ``asked``."""
        return self._says(token_ids)

    async def _derender_chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.num_derenders += 1
        if body.get("stream"):
            return self._streamed_piece(body)
        choice = body["generate_response"]["choices"][0]
        speech = self.speech(body["chat_request"], choice["token_ids"])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": speech.content or None,
            "reasoning": speech.reasoning or None,
            "tool_calls": [_call(*call) for call in speech.calls],
        }
        answer = {
            "index": 0,
            "message": message,
            "logprobs": self._openai_logprobs(choice),
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        return _json({"id": "x", "choices": [answer]})

    def _streamed_piece(self, body: dict[str, Any]) -> web.Response:
        choice = body["generate_chunk"]["choices"][0]
        state = body.get("stream_state") or {"ids": [], "begun": False}
        state["ids"] = [*state["ids"], *(choice["token_ids"] or [])]
        delta: dict[str, Any] = {} if state["begun"] else {"role": "assistant"}
        state["begun"] = True
        if choice["finish_reason"] is not None:
            speech = self.speech(body["chat_request"], state["ids"])
            content = speech.content if speech.streamed_content is None else speech.streamed_content
            calls = speech.calls if speech.streamed_calls is None else speech.streamed_calls
            delta |= {
                "reasoning": speech.reasoning or None,
                "content": content or None,
                "tool_calls": [piece for at, call in enumerate(calls) for piece in _pieces(at, *call)],
            }
        piece = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": choice["finish_reason"]}
        return _json({"chunk": {"id": "x", "choices": [piece]}, "stream_state": state})


def _pieces(index: int, name: str, arguments: str) -> list[dict[str, Any]]:
    """A call as a stream has it: what is not said is null."""
    half = len(arguments) // 2
    rest = {
        "index": index,
        "id": None,
        "type": None,
        "function": {"name": None, "arguments": arguments[half:]},
    }
    return [_call(name, arguments[:half]) | {"index": index}, rest]


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-tool-{secrets.token_hex(8)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
