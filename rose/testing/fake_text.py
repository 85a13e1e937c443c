"""How a fake engine turns tokens into text: vLLM's derender routes, and the parse routes of our plug-in.

Text is what the tokenizer says; there is no reasoning and there are no tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from rose.testing.toy_tokenizer import Tokenizer

encode = msgspec.json.Encoder().encode


class FakeText:
    """Args:
    tokenizer: Of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_derenders = 0
        self.open_parses: dict[str, dict[str, Any]] = {}
        self.max_parses = 2048
        """More are refused, as by an engine that has no room."""

    # --- derender --------------------------------------------------------------------------------------

    async def _derender_chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.num_derenders += 1
        if body.get("stream"):
            text, choice, state = self._delta(body)
            delta = {"content": text} if text else {}
            if not state["role_sent"]:
                delta["role"] = "assistant"
                state["role_sent"] = True
            piece = {"index": 0, "delta": delta, "logprobs": self._openai_logprobs(choice)}
            piece["finish_reason"] = choice["finish_reason"]
            return _json({"chunk": {"id": "x", "choices": [piece]}, "stream_state": state})
        choice = body["generate_response"]["choices"][0]
        if not choice["token_ids"]:
            return _error(400, "choice 0 has empty or null token_ids")
        message: dict[str, Any] = {"role": "assistant", "content": self.tokenizer.decode(choice["token_ids"])}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._openai_logprobs(choice),
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        return _json({"id": "x", "choices": [choice]})

    async def _derender_completion(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.num_derenders += 1
        if body.get("stream"):
            text, choice, state = self._delta(body)
            piece = {"index": 0, "text": text, "logprobs": None, "finish_reason": choice["finish_reason"]}
            return _json({"chunk": {"id": "x", "choices": [piece]}, "stream_state": state})
        choice = body["generate_responses"][0]["choices"][0]
        answer = {
            "index": 0,
            "text": self.tokenizer.decode(choice["token_ids"]),
            "logprobs": self._completion_logprobs(choice["token_ids"], choice),
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        return _json({"id": "x", "choices": [answer]})

    # --- our plug-in's routes --------------------------------------------------------------------------

    async def _parse(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, fed = body["parse"], body["token_ids"]
        if body.get("open") is not None:
            if len(self.open_parses) >= self.max_parses:
                return _error(429, "too many parses are open")
            self.open_parses[name] = {"source": body["open"], "ids": [], "num_shown": 0, "ended": False}
        parse = self.open_parses.get(name)
        if parse is None or len(parse["ids"]) != body["at"]:
            return _error(410, "no such parse with these tokens")
        parse["ids"] += fed
        shown, stop = self._shown(parse["ids"], parse["source"]["request"], body)
        text = "" if parse["ended"] else shown[parse["num_shown"] :]
        parse["num_shown"] = max(parse["num_shown"], len(shown))
        parse["ended"] = parse["ended"] or stop is not None
        if body["finish_reason"] is not None:
            del self.open_parses[name]
        last = (body.get("pieces") or [len(fed)])[-1]
        logprobs = self._openai_logprobs(body)
        if parse["source"]["kind"] == "completion":
            return _json(
                {"text": text, "logprobs": self._completion_logprobs(fed[-last:], body), "stop": stop}
            )
        return _json({"delta": {"content": text} if text else {}, "logprobs": logprobs, "stop": stop})

    async def _parse_whole(self, request: web.Request) -> web.Response:
        body = await request.json()
        text, _ = self._shown(body["token_ids"], body["source"]["request"], body)
        message = {"role": "assistant", "content": text}
        return _json({"message": message, "logprobs": self._openai_logprobs(body), "reasoning_tokens": None})

    async def _parse_close(self, request: web.Request) -> web.Response:
        for name in (await request.json())["parses"]:
            self.open_parses.pop(name, None)
        return _json({})

    def _shown(
        self, ids: list[int], request: Mapping[str, Any], body: Mapping[str, Any]
    ) -> tuple[str, str | None]:
        """Text that may be shown, and the stop string that ends it."""
        by_token = body["finish_reason"] == "stop" and not isinstance(body["stop_reason"], str)
        keep = bool(request.get("include_stop_str_in_output"))
        text = self.tokenizer.decode(ids[:-1] if by_token and not keep else ids)
        stop = request.get("stop") or []
        stops = [stop] if isinstance(stop, str) else stop
        ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
        if ends:
            end, stop = min(ends)
            return text[: end if keep else end - len(stop)], stop
        held = max(map(len, stops), default=1) - 1
        return text[: len(text) - held] if body["finish_reason"] is None and not keep else text, None

    def _delta(self, body: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
        choice = body["generate_chunk"]["choices"][0]
        state = body.get("stream_state") or {"ids": [], "role_sent": False}
        before = self.tokenizer.decode(state["ids"])
        state["ids"] = [*state["ids"], *(choice["token_ids"] or [])]
        after = self.tokenizer.decode(state["ids"])
        return after[len(before) :], choice, state

    def _completion_logprobs(self, ids: Sequence[int], choice: Mapping[str, Any]) -> dict[str, Any] | None:
        if not choice.get("logprobs"):
            return None
        return {
            "tokens": [self.tokenizer.decode([entry["token_id"]]) for entry in choice["logprobs"]["content"]],
            "token_logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
            "top_logprobs": [None] * len(ids),
            "text_offset": [0] * len(ids),
        }

    def _openai_logprobs(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        if not choice.get("logprobs"):
            return None
        content = [
            self._alternative(entry)
            | {"top_logprobs": [self._alternative(other) for other in entry.get("top_logprobs") or ()]}
            for entry in choice["logprobs"]["content"]
        ]
        return {"content": content}

    def _alternative(self, entry: dict[str, Any]) -> dict[str, Any]:
        text = self.tokenizer.decode([entry["token_id"]])
        return {"token": text, "logprob": entry["logprob"], "bytes": list(text.encode())}


def _json(value: Any) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}
    return web.Response(body=encode(body), status=status, content_type="application/json")
