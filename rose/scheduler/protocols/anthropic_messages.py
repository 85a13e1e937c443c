"""Anthropic's ``/v1/messages``: blocks of content in, blocks out.

Cache marks say nothing to the model and are not read, like the names of sessions and betas.  Claude Code puts a line
``x-anthropic-billing-header: ...`` with a number of this very request in front of its system prompt; it is cut off, since no turn could
continue another behind it.  The signature of a thinking block is the turn's id, so an answer that comes back says which it was.

Tools that Anthropic's servers run have nobody to run them here: the model is not told of them, and ``rose.left_out`` names them.  A
budget of thinking is not enforced.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rose.errors import RequestError, RoseError
from rose.scheduler.protocols import (
    VLLM_SAMPLING,
    AnswerDelta,
    Body,
    Message,
    StreamForm,
    Unbroken,
    as_list,
    as_object,
    as_text,
    encode,
    no_media,
    not_here,
    one_answer,
    one_content,
    sse,
)
from rose.wire.errors import anthropic_error_body

_SAME = {
    "max_tokens": "max_tokens",
    "stop_sequences": "stop",
    "temperature": "temperature",
    "top_p": "top_p",
    "model": "model",
    "stream": "stream",
    "session_id": "session_id",
    **{name: name for name in VLLM_SAMPLING},
}
"""Field -> field of a chat completion of the same meaning."""
_HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp", "advisor")
_PER_REQUEST = re.compile(r"\A(?:\s*x-anthropic-[a-z-]+:[^\n]*(?:\n|\Z))+")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_OURS = re.compile(r"n-[0-9a-f]{16}\Z")
_SAYS_ERROR = re.compile(r"\s*(?:error\b|<tool_use_error>)", re.IGNORECASE)
_MAX_TRIES = 64
_MAX_DEPTH = 200
"""Of brackets in arguments that were cut; the clients' parser goes no deeper."""
_MAX_EXACT = 2**53
"""Up to which JavaScript has every whole number."""


class MessagesRequest:
    """Args:
    request: As it was sent, to ``/v1/messages`` or its ``count_tokens``.

    Raises:
        RequestError: Names the field.
    """

    names: Mapping[str, str] = {"stop": "stop_sequences"}

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._left_out: list[str] = []
        one_answer(request)
        body: Body = {ours: request[name] for name, ours in _SAME.items() if request.get(name) is not None}
        body |= self._read_tools(request)
        output = as_object(request.get("output_config") or {}, "output_config")
        if output.get("effort") is not None:
            body["reasoning_effort"] = as_text(output["effort"], "output_config.effort")
        if as_object(request.get("thinking") or {}, "thinking").get("type") == "disabled":
            body["reasoning_effort"] = "none"
        schema = as_object(output.get("format") or {}, "output_config.format").get("schema")
        if schema is not None:
            made = {"name": "answer", "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": made}
        messages: list[Message] = []
        system = _without_request_lines(_texts(request.get("system"), "system"))
        if system:
            messages.append({"role": "system", "content": system})
        for at, message in enumerate(as_list(request.get("messages"), "messages")):
            _read_message(messages, as_object(message, f"messages[{at}]"), f"messages[{at}]")
        if messages and messages[-1]["role"] == "assistant":
            raise not_here("an answer that is begun in the request", "messages")
        body["messages"] = messages
        self.body = body

    def kept(self, num_continued: int) -> list[Message] | None:
        return None

    def whole(self, answer: bytes) -> tuple[bytes, Message | None]:
        chat = msgspec.json.decode(answer)
        choice = chat["choices"][0]
        message = choice["message"]
        calls = [{**call, "index": at} for at, call in enumerate(message.get("tool_calls") or ())]
        writer = _Writer(chat["rose"]["ids"][0])
        deque(writer.add({**message, "tool_calls": calls}), maxlen=0)
        deque(writer.close(), maxlen=0)
        content = writer.blocks or [{"type": "text", "text": ""}]
        reason, stop = _stop(choice["finish_reason"], choice.get("stop_reason"), called=bool(calls))
        made = self.head(chat["rose"]["ids"][0], chat["model"]) | {
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage_of(chat["usage"]),
            "rose": self.origin(chat),
        }
        return encode(made), writer.message()

    def stream(self) -> StreamForm:
        return MessagesStream(self)

    def head(self, turn_id: str, model: str) -> dict[str, Any]:
        return {"id": f"msg_{turn_id}", "type": "message", "role": "assistant", "model": model}

    def origin(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        return {**chat["rose"], **({"left_out": self._left_out} if self._left_out else {})}

    def _read_tools(self, request: Mapping[str, Any]) -> Body:
        tools: list[dict[str, Any]] = []
        for at, tool in enumerate(as_list(request.get("tools") or [], "tools")):
            field = f"tools[{at}]"
            kind = as_object(tool, field).get("type") or "custom"
            if as_text(kind, f"{field}.type").startswith(_HOSTED):
                self._left_out.append(kind)
                continue
            if kind != "custom":
                raise not_here(f"a tool of type {kind[:64]}, whose schema is not sent,", f"{field}.type")
            function: dict[str, Any] = {"name": as_text(tool.get("name"), f"{field}.name")}
            if tool.get("description") is not None:
                function["description"] = as_text(tool["description"], f"{field}.description")
            schema = as_object(tool.get("input_schema"), f"{field}.input_schema")
            function["parameters"] = schema if "type" in schema else {"type": "object", **schema}
            tools.append({"type": "function", "function": function})
        read: Body = {"tools": tools} if tools else {}
        choice = request.get("tool_choice")
        if choice is None:
            return read
        kind = as_text(as_object(choice, "tool_choice").get("type"), "tool_choice.type")
        if kind == "tool":
            name = as_text(choice.get("name"), "tool_choice.name")
            read["tool_choice"] = {"type": "function", "function": {"name": name}}
        elif kind not in _CHOICES:
            raise RequestError("must be auto, any, tool or none", field="tool_choice.type")
        elif tools or kind == "any":
            read["tool_choice"] = _CHOICES[kind]
        if choice.get("disable_parallel_tool_use"):
            read["parallel_tool_calls"] = False
        return read


class MessagesStream:
    """The events of one message."""

    ping = sse("ping", {"type": "ping"})

    def __init__(self, asked: MessagesRequest) -> None:
        self._asked = asked
        self._writer = _Writer("")
        self._num_prompt = 0
        self._begun = False

    def begin(self, turn_id: str, num_prompt: int, created: int) -> None:
        self._writer.turn_id = turn_id
        self._num_prompt = num_prompt

    def piece(self, index: int, delta: Mapping[str, Any], logprobs: Any) -> Iterable[bytes]:
        yield from self._opening()
        for event in self._writer.add(delta):
            yield sse(event["type"], event)

    def message(self, index: int) -> Message:
        return self._writer.message()

    def end(self, answer: Mapping[str, Any], finishes: Sequence[str]) -> Iterable[bytes]:
        yield from self._opening()
        for event in self._writer.close():
            yield sse(event["type"], event)
        stopped_by = answer["choices"][0].get("stop_reason")
        reason, stop = _stop(finishes[0], stopped_by, called=self._writer.has_called)
        last = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": usage_of(answer["usage"]),
            "rose": self._asked.origin(answer),
        }
        yield sse("message_delta", last)
        yield sse("message_stop", {"type": "message_stop"})

    def failed(self, error: RoseError) -> Iterable[bytes]:
        yield sse("error", anthropic_error_body(error))

    def _opening(self) -> Iterable[bytes]:
        if not self._begun:
            self._begun = True
            message = self._asked.head(self._writer.turn_id, self._asked.body.get("model", "")) | {
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"input_tokens": self._num_prompt, "output_tokens": 0},
            }
            yield sse("message_start", {"type": "message_start", "message": message})


class _Writer:
    """Blocks from deltas, with the events that say so.  One block is open at a time."""

    def __init__(self, turn_id: str) -> None:
        self.turn_id = turn_id
        self.blocks: list[dict[str, Any]] = []
        self._unbroken = Unbroken()
        self._open: str | int | None = None
        """``thinking``, ``text``, or a call's index."""
        self._texts: list[str] = []
        self._is_object: bool | None = None
        """Whether the open call's arguments begin as one; None: they have not begun."""

    @property
    def has_called(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, delta: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
        for part in self._unbroken.add(delta):
            yield from self._add(part)

    def close(self) -> Iterable[dict[str, Any]]:
        """All has been said."""
        for part in self._unbroken.rest():
            yield from self._add(part)
        yield from self._close()

    def _add(self, part: AnswerDelta) -> Iterable[dict[str, Any]]:
        if part.call is None:
            kind = "thinking" if part.kind == "reasoning" else "text"
            yield from self._turn_to(kind)
            self._texts.append(part.text)
            yield self._delta({"type": f"{kind}_delta", kind: part.text})
            return
        function = part.call.get("function") or {}
        yield from self._turn_to(part.call["index"], part.call.get("id"), function.get("name"))
        text = function.get("arguments")
        if text:
            self._texts.append(text)
            # Clients read each piece at once, and give up on all of an answer over arguments that are no object.
            if self._is_object is None:
                text = "".join(self._texts).lstrip()
                self._is_object = text.startswith("{") if text else None
            if self._is_object:
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _close(self) -> Iterable[dict[str, Any]]:
        """The open block is done."""
        if self._open is None:
            return
        block, text = self.blocks[-1], "".join(self._texts)
        if block["type"] != "tool_use":
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = self.turn_id
            yield self._delta({"type": "signature_delta", "signature": self.turn_id})
        elif block["type"] == "tool_use":
            block["input"] = _as_javascript_has_it(readable(text))
        self._open, self._texts, self._is_object = None, [], None
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def message(self) -> Message:
        """What the blocks say, as it is read when they come back."""
        messages: list[Message] = []
        _read_message(messages, {"role": "assistant", "content": self.blocks}, "content")
        return messages[0]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _turn_to(
        self, part: str | int, call_id: str | None = None, name: str | None = None
    ) -> Iterable[dict[str, Any]]:
        if self._open == part:
            return
        yield from self._close()
        block: dict[str, Any]
        if part == "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif part == "text":
            block = {"type": "text", "text": ""}
        else:
            block = {"type": "tool_use", "id": call_id or "", "name": name or "", "input": {}}
        self.blocks.append(block)
        self._open = part
        yield {
            "type": "content_block_start",
            "index": len(self.blocks) - 1,
            "content_block": dict(block),
        }


def usage_of(usage: Mapping[str, Any]) -> dict[str, int]:
    """Chat's usage in Anthropic's words, where cached tokens are no input tokens."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _as_javascript_has_it(value: Any) -> Any:
    """``1.0`` as ``1``: a client in JavaScript sends it back so, whatever it was sent."""
    if isinstance(value, dict):
        return {name: _as_javascript_has_it(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_as_javascript_has_it(part) for part in value]
    whole = isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT
    return int(value) if whole else value


def readable(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; of a text that was cut, what is whole of it, as clients read such a stream."""
    if not arguments.strip():
        return {}
    for text in _endings(arguments):
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            continue
        return value if isinstance(value, dict) else {}
    return {}


def _endings(text: str) -> Iterable[str]:
    """``text``, then shorter and shorter starts of it that are closed where they end; not many of them."""
    yield text
    closers: _Closers | None = None
    cuts: deque[tuple[int, _Closers | None]] = deque(maxlen=_MAX_TRIES)
    inside = escaped = False
    for at, char in enumerate(text):
        if inside:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                inside = False
        elif char == '"':
            inside = True
        elif char in "{[":
            closers = _Closers("}" if char == "{" else "]", closers)
            if closers.depth > _MAX_DEPTH:
                return
            cuts.append((at + 1, closers))
        elif char in "}]" and closers is not None:
            closers = closers.below
            cuts.append((at + 1, closers))
        elif char == ",":
            cuts.append((at, closers))
    if not inside:
        cuts.append((len(text), closers))
    for at, open_there in reversed(cuts):
        yield text[:at] + _closing(open_there)


class _Closers:
    """What closes the innermost bracket that is open; shared between places of a text, so that each costs nothing of its own."""

    __slots__ = ("below", "char", "depth")

    def __init__(self, char: str, below: _Closers | None) -> None:
        self.char = char
        self.below = below
        self.depth: int = 1 if below is None else below.depth + 1


def _closing(closers: _Closers | None) -> str:
    chars: list[str] = []
    while closers is not None:
        chars.append(closers.char)
        closers = closers.below
    return "".join(chars)


def _stop(finish: str, stop: str | int | None, *, called: bool) -> tuple[str, str | None]:
    """``(stop_reason, stop_sequence)``.

    Args:
        stop: The string that ended the turn, where one did.
        called: It calls a tool.
    """
    if finish == "length":
        return "max_tokens", None
    if finish == "tool_calls" or (called and not isinstance(stop, str)):
        return "tool_use", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return "end_turn", None


def _without_request_lines(texts: list[str]) -> str:
    return "".join(_PER_REQUEST.sub("", text) for text in texts)


def _texts(given: Any, field: str) -> list[str]:
    """The texts of a string, or of a list of text blocks."""
    if given is None or isinstance(given, str):
        return [given] if given else []
    texts: list[str] = []
    for at, block in enumerate(as_list(given, field)):
        kind = as_object(block, f"{field}[{at}]").get("type")
        if kind != "text":
            raise _refused(kind, f"{field}[{at}]")
        texts.append(as_text(block.get("text"), f"{field}[{at}].text"))
    return texts


def _refused(kind: Any, field: str) -> RequestError:
    if kind in ("image", "document"):
        return no_media(kind, field)
    return not_here(f"a block of type {str(kind)[:64]}", f"{field}.type")


def _read_message(messages: list[Message], message: Mapping[str, Any], field: str) -> None:
    """Add what chat makes of a message: several, where results of tools are in it."""
    role, content = message.get("role"), message.get("content")
    field += ".content"
    if role == "assistant":
        messages.append(_read_said(content, field))
    elif role == "system":
        text = _without_request_lines(_texts(content, field))
        if text:
            messages.append({"role": "system", "content": text})
    elif role != "user":
        raise RequestError("must be user, assistant or system", field=field.replace(".content", ".role"))
    elif isinstance(content, str):
        messages.append({"role": "user", "content": content})
    else:
        _read_user(messages, as_list(content, field), field)


def _read_user(messages: list[Message], blocks: list[Any], field: str) -> None:
    texts: list[str] = []
    num_before = len(messages)

    def text_so_far() -> None:
        if texts:
            messages.append({"role": "user", "content": one_content(texts.copy())})
            texts.clear()

    for at, block in enumerate(blocks):
        where = f"{field}[{at}]"
        kind = as_object(block, where).get("type")
        if kind == "text":
            texts.append(as_text(block.get("text"), f"{where}.text"))
        elif kind == "tool_result":
            text_so_far()
            result = _result(block, where)
            call_id = as_text(block.get("tool_use_id"), f"{where}.tool_use_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        else:
            raise _refused(kind, where)
    text_so_far()
    if len(messages) == num_before:
        messages.append({"role": "user", "content": ""})


def _result(block: Mapping[str, Any], where: str) -> str:
    """What a tool gave.  Templates have no place for a failure, so it is said in the text, where that does not begin by saying so."""
    text = "\n".join(_texts(block.get("content"), f"{where}.content"))
    failed = block.get("is_error")
    if failed not in (None, True, False):
        raise RequestError("must be true or false", field=f"{where}.is_error")
    return f"Error: {text}" if failed and not _SAYS_ERROR.match(text) else text


def _read_said(content: Any, field: str) -> Message:
    """What an assistant said."""
    said: Message = {"role": "assistant", "content": content}
    if isinstance(content, str):
        return said
    texts: list[str] = []
    thoughts: list[str] = []
    for at, block in enumerate(as_list(content, field)):
        where = f"{field}[{at}]"
        kind = as_object(block, where).get("type")
        if kind == "text":
            texts.append(as_text(block.get("text"), f"{where}.text"))
        elif kind == "thinking":
            thoughts.append(as_text(block.get("thinking"), f"{where}.thinking"))
            signature = block.get("signature")
            if isinstance(signature, str) and _OURS.match(signature):
                said["id"] = signature
        elif kind == "tool_use":
            arguments = encode(as_object(block.get("input"), f"{where}.input")).decode()
            function = {"name": as_text(block.get("name"), f"{where}.name"), "arguments": arguments}
            call = {"id": as_text(block.get("id"), f"{where}.id"), "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            raise _refused(kind, where)
    said["content"] = "".join(texts)
    if thoughts:
        said["reasoning"] = "".join(thoughts)
    return said
