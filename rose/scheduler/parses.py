"""Text of a streamed turn, piece by piece.

Our endpoint plugin keeps a parse open per stream (``vllm_plugin/parses.py``): prompt and request are sent once, then only new tokens.
A parse stays on the engine where it was opened, whichever engine the turn runs on.  Where that engine fails or has dropped it, it
is opened again from all tokens so far, in the pieces they came in, and what the client has already is left out.

An engine without the plugin, or with no room for another parse, is asked by vLLM's own streaming route, which wants prompt and
history again with every piece; stop strings are then looked for here, in reasoning and content, but not in tool arguments.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from rose.errors import EngineError
from rose.scheduler.engine import Endpoint, EngineFailure, TokenLogprob, refused_request
from rose.scheduler.renderer import Renderer, source_of
from rose.scheduler.stops import StopMatcher, visible_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """New tokens; ``finish_reason`` is set on the last ones."""

    token_ids: Sequence[int]
    entries: Sequence[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """``delta``: a chat delta without its role, or ``{"text"}``.  ``stop``: the stop string that was found."""

    delta: dict[str, Any]
    logprobs: Any = None
    stop: str | None = None


class StreamParse:
    """One choice of a stream.

    Args:
        request: The client's, as an engine may see it.
        min_tokens: No stop string ends the turn before.
    """

    def __init__(
        self,
        renderer: Renderer,
        request: Mapping[str, Any],
        *,
        chat: bool,
        turn_id: str,
        prompt_ids: Sequence[int],
        min_tokens: int,
    ) -> None:
        self._renderer = renderer
        self._request = request
        self._chat = chat
        self._turn_id = turn_id
        self._prompt_ids = prompt_ids
        self._min_tokens = min_tokens
        self._name = ""
        self._engine: Endpoint | None = None
        self._plain: _PlainParse | None = None
        """On an engine that keeps nothing between calls."""
        self._tokens: list[int] = []
        self._pieces: list[int] = []
        """How many tokens each piece had: parsers look at where one ends."""
        self._said = _Said()

    async def feed(self, piece: Piece) -> Parsed:
        """The text of new tokens.

        Raises:
            RequestError: An engine refuses the request.
            EngineError: Several engines failed.
            CapacityError: No engine came up in time.
        """
        parsed: Parsed | None = None
        if self._engine is not None:
            try:
                parsed = await self._fed(self._engine, piece)
            except EngineFailure as error:
                refused = refused_request(error)
                if refused is not None:
                    raise refused from error
                self.close()
        if parsed is None:
            begin = functools.partial(self._begun, piece)
            parsed = await self._renderer.somewhere("/rose/parse", self._request.get("model"), begin)
        self._tokens += piece.token_ids
        self._pieces.append(len(piece.token_ids))
        if piece.finish_reason is not None:
            self._engine = self._plain = None  # the engine has closed it
        return replace(parsed, delta=self._said.new(parsed.delta))

    def close(self) -> None:
        """Let go of the engine; safe to call at any time, and again."""
        engine, plain = self._engine, self._plain
        self._engine = self._plain = None
        if engine is not None and plain is None:
            self._renderer.close_parse(engine, self._name)

    async def _fed(self, engine: Endpoint, piece: Piece) -> Parsed:
        if self._plain is not None:
            return await self._plain.feed(engine, piece)
        body = self._body(piece, at=len(self._tokens))
        answer = await self._renderer.ask_plugin(engine, "/rose/parse", body)
        if answer is None:
            raise EngineFailure(f"worker {engine.worker_id} has no parse route any more", kind="lost")
        return self._read(engine, answer)

    async def _begun(self, piece: Piece, engine: Endpoint) -> Parsed:
        """Open on ``engine`` from the first token on; what was said is left out."""
        # Set before the call: one that is cancelled has perhaps opened it.
        self._engine, self._plain = engine, None
        self._name = f"{self._turn_id}-{secrets.token_hex(4)}"
        try:
            answer = await self._opened(engine, piece)
            if answer is not None:
                parsed = self._read(engine, answer)
            else:
                self._plain = _PlainParse(
                    self._renderer,
                    self._request,
                    chat=self._chat,
                    turn_id=self._turn_id,
                    prompt_ids=self._prompt_ids,
                    min_tokens=self._min_tokens,
                )
                earlier: dict[str, Any] = {}
                if self._tokens:
                    earlier = (await self._plain.feed(engine, Piece(token_ids=self._tokens))).delta
                parsed = await self._plain.feed(engine, piece)
                parsed = replace(parsed, delta=joined(earlier, parsed.delta))
        except EngineError:
            self.close()
            raise
        self._said.begin()
        return parsed

    async def _opened(self, engine: Endpoint, piece: Piece) -> dict[str, Any] | None:
        body = self._body(piece, at=0)
        body["open"] = source_of(
            "chat" if self._chat else "completion", self._request, self._prompt_ids, self._min_tokens
        )
        body["token_ids"] = [*self._tokens, *piece.token_ids]
        body["pieces"] = [*self._pieces, len(piece.token_ids)]
        try:
            return await self._renderer.ask_plugin(engine, "/rose/parse", body)
        except EngineFailure as error:
            if error.http_status != 429:
                raise
            return None  # too many are open there

    def _body(self, piece: Piece, *, at: int) -> dict[str, Any]:
        return {
            "parse": self._name,
            "at": at,
            "token_ids": piece.token_ids,
            "logprobs": None if piece.entries is None else {"content": piece.entries},
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _read(self, engine: Endpoint, answer: dict[str, Any]) -> Parsed:
        delta = answer.get("delta") if self._chat else {"text": answer.get("text")}
        stop = answer.get("stop")
        if not is_delta(delta) or not isinstance(stop, str | None):
            raise EngineFailure(f"worker {engine.worker_id} sent no delta", kind="bad")
        return Parsed(delta=delta, logprobs=answer.get("logprobs"), stop=stop)


class _PlainParse:
    """By vLLM's streaming derender route; the state it answers goes back with the next call."""

    def __init__(
        self,
        renderer: Renderer,
        request: Mapping[str, Any],
        *,
        chat: bool,
        turn_id: str,
        prompt_ids: Sequence[int],
        min_tokens: int,
    ) -> None:
        self._renderer = renderer
        self._request = request
        self._chat = chat
        self._turn_id = turn_id
        self._prompt_ids = prompt_ids
        stop = request.get("stop") or []
        stops = [stop] if isinstance(stop, str) else stop
        self._keep = bool(request.get("include_stop_str_in_output"))
        self._matchers = {
            name: StopMatcher(stops, keep=self._keep) for name in ("reasoning", "content", "text")
        }
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stop: str | None = None
        self._state: Any = None

    async def feed(self, engine: Endpoint, piece: Piece) -> Parsed:
        token_ids = list(piece.token_ids)
        if piece.finish_reason is not None:
            token_ids = visible_ids(token_ids, piece.finish_reason, piece.stop_reason, keep=self._keep)
        piece = replace(piece, token_ids=token_ids)
        free = self._min_tokens - self._num_tokens
        if not 0 < free < len(token_ids):
            return await self._fed(engine, piece, counts=free <= 0)
        entries = piece.entries
        first = Piece(token_ids=token_ids[:free], entries=None if entries is None else entries[:free])
        second = replace(
            piece, token_ids=token_ids[free:], entries=None if entries is None else entries[free:]
        )
        one = await self._fed(engine, first, counts=False)
        two = await self._fed(engine, second, counts=True)
        return replace(two, delta=joined(one.delta, two.delta), logprobs=_both(one.logprobs, two.logprobs))

    async def _fed(self, engine: Endpoint, piece: Piece, *, counts: bool) -> Parsed:
        """``counts``: whether a stop string in these tokens ends the turn."""
        self._num_tokens += len(piece.token_ids)
        if not piece.token_ids and self._state is None:
            return Parsed(delta={})  # ended without a token that has text
        choice, self._state = await self._renderer.derender_chunk(
            engine,
            self._request,
            chat=self._chat,
            turn_id=self._turn_id,
            prompt_ids=self._prompt_ids,
            token_ids=piece.token_ids,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            entries=piece.entries,
            state=self._state,
        )
        delta = choice.get("delta") if self._chat else {"text": choice.get("text")}
        if not is_delta(delta):
            raise EngineFailure(f"worker {engine.worker_id} sent no delta", kind="bad")
        delta = self._cut(delta, counts=counts, finished=piece.finish_reason is not None)
        return Parsed(delta=delta, logprobs=choice.get("logprobs"), stop=self._stop)

    def _cut(self, delta: dict[str, Any], *, counts: bool, finished: bool) -> dict[str, Any]:
        """``delta`` up to a stop string, without what may be the start of one."""
        if self._stop is not None:
            return {}
        for name, matcher in self._matchers.items():
            text = delta.pop(name, None)
            shown = matcher.feed(text, counts=counts) if isinstance(text, str) else ""
            if finished:
                shown += matcher.flush()
            if shown:
                delta[name] = shown
            if matcher.matched is not None:
                self._stop = matcher.matched
                return {key: value for key, value in delta.items() if key == name or key == "reasoning"}
        return delta


class _Said:
    """What a client has, against what the parse that is open now has said since its beginning: none may be ahead of the other."""

    def __init__(self) -> None:
        self._said: dict[str | int, int] = {}
        """Characters by field; of arguments by the call's index."""
        self._heard: dict[str | int, int] = {}

    def begin(self) -> None:
        """Another parse, from the turn's first token on."""
        self._heard.clear()

    def new(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        """What ``delta`` says that the client has not."""
        fresh: dict[str, Any] = {}
        for name in ("content", "reasoning", "text"):
            text = self._take(name, delta.get(name) or "")
            if text:
                fresh[name] = text
        calls = []
        for call in joined({}, delta).get("tool_calls", ()):
            begun = call["index"] in self._said
            text = self._take(call["index"], _arguments(call))
            if not begun:
                calls.append(call)
            elif text:
                calls.append({"index": call["index"], "function": {"arguments": text}})
        if calls:
            fresh["tool_calls"] = calls
        return fresh

    def _take(self, key: str | int, text: str) -> str:
        heard, said = self._heard.get(key, 0), self._said.get(key, 0)
        self._heard[key] = heard + len(text)
        self._said[key] = max(said, heard + len(text))
        return text[max(0, said - heard) :]


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two deltas as one, with one entry per call."""
    both: dict[str, Any] = {
        name: (first.get(name) or "") + (second.get(name) or "")
        for name in ("content", "reasoning", "text")
        if first.get(name) or second.get(name)
    }
    calls: dict[int, dict[str, Any]] = {}
    for call in (*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())):
        index = call.get("index", 0)
        begun = calls.get(index)
        if begun is None:
            calls[index] = {**call, "index": index, "function": dict(call.get("function") or {})}
        else:
            begun["function"]["arguments"] = _arguments(begun) + _arguments(call)
    if calls:
        both["tool_calls"] = list(calls.values())
    return both


def _both(first: Any, second: Any) -> Any:
    """The log-probs of two pieces as one: OpenAI's objects, whose lists have an entry per token."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return first or second
    return {
        key: first[key] + value if isinstance(first.get(key), list) and isinstance(value, list) else value
        for key, value in second.items()
    }


def is_delta(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether an engine's answer has the types that are read here."""
    if not isinstance(value, dict):
        return False
    calls = value.get("tool_calls") or []
    return all(isinstance(value.get(name), str | None) for name in ("content", "reasoning", "text")) and (
        isinstance(calls, list)
        and all(
            isinstance(call, dict)
            and type(call.get("index", 0)) is int
            and isinstance(call.get("function"), dict | None)
            and isinstance((call.get("function") or {}).get("arguments"), str | None)
            for call in calls
        )
    )


def _arguments(call: Mapping[str, Any]) -> str:
    return (call.get("function") or {}).get("arguments") or ""
