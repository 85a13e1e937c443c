"""OpenAI's ``/v1/responses``: items in, items out.

A conversation is a list of *items*; what an assistant said in one turn is several of them (reasoning, a message, calls), one after the
other, and becomes one message here.  Ids of our items carry the turn's, so an answer that comes back says which it was.

Tools: :mod:`rose.scheduler.protocols.response_tools`.
``previous_response_id`` continues a turn of the same trajectory that was not sent with ``store: false``: its messages are kept once,
with the turn that brought them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rose.errors import NotFound, RoseError
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
from rose.scheduler.protocols.response_tools import CUSTOM_INPUT, Tools, custom_input, model_name
from rose.scheduler.trajectory import Trajectory

_SAMPLING = (
    *VLLM_SAMPLING,
    "temperature",
    "top_p",
    "stop",
    "parallel_tool_calls",
    "model",
    "stream",
    "session_id",
)
"""Of the same name and meaning in a chat completion."""
_REFUSED = ("background", "conversation", "prompt")
_OUR_ID = re.compile(r"[a-z]{2,4}_(?P<turn>n-[0-9a-f]{16})(?:_\d+)?\Z")
_CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why a turn ended before its model had it end."""


class ResponsesRequest:
    """Args:
    request: As it was sent.
    trajectory: Where ``previous_response_id`` is looked up.

    Raises:
        RequestError: Names the field.
        NotFound: ``previous_response_id`` names no turn that was kept.
    """

    names: Mapping[str, str] = {"messages": "input", "max_tokens": "max_output_tokens"}

    def __init__(self, request: Mapping[str, Any], trajectory: Trajectory | None) -> None:
        for field in _REFUSED:
            if request.get(field):
                raise not_here(field, field)
        one_answer(request)
        self._request = request
        self._tools = Tools(request)
        body: Body = {field: request[field] for field in _SAMPLING if request.get(field) is not None}
        body |= self._tools.body
        if request.get("max_output_tokens") is not None:
            body["max_tokens"] = request["max_output_tokens"]
        reasoning = as_object(request.get("reasoning") or {}, "reasoning")
        if reasoning.get("effort") is not None:
            body["reasoning_effort"] = as_text(reasoning["effort"], "reasoning.effort")
        response_format = _format(as_object(request.get("text") or {}, "text"))
        if response_format is not None:
            body["response_format"] = response_format
        include = as_list(request.get("include") or [], "include")
        self._wants_logprobs = "message.output_text.logprobs" in include
        self._wants_encrypted = "reasoning.encrypted_content" in include
        if self._wants_logprobs:
            body["logprobs"], body["top_logprobs"] = True, request.get("top_logprobs") or 0
        self._earlier: list[Message] = []
        if request.get("previous_response_id") is not None:
            self._earlier = _earlier(request["previous_response_id"], trajectory)
        self._messages = self._earlier + _read_items(request.get("input"))
        head: list[Message] = []
        if request.get("instructions"):
            head = [{"role": "system", "content": as_text(request["instructions"], "instructions")}]
        body["messages"] = _one_system(head + self._messages)
        self.body = body

    def kept(self, num_continued: int) -> list[Message] | None:
        if self._request.get("store") is False:
            return None
        # Instructions are of one request, and system messages at the start are one: both are in front of what is continued.
        folded = len(self.body["messages"]) - len(self._messages)
        return self._messages[max(0, num_continued - folded) if num_continued else 0 :]

    def whole(self, answer: bytes) -> tuple[bytes, Message | None]:
        chat = msgspec.json.decode(answer)
        choice = chat["choices"][0]
        writer = _Writer(chat["rose"]["ids"][0], self._tools, self._wants_encrypted)
        message = choice["message"]
        logprobs = (choice.get("logprobs") or {}).get("content") if self._wants_logprobs else None
        finish = choice["finish_reason"]
        deque(writer.add(_as_delta(message), logprobs), maxlen=0)
        deque(writer.close(_status(finish)), maxlen=0)
        return encode(self.response(chat, finish, writer.items)), writer.message()

    def stream(self) -> StreamForm:
        return ResponsesStream(self, _Writer("", self._tools, self._wants_encrypted))

    def response(self, chat: Mapping[str, Any], finish: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        """The response object of an ended turn.

        Args:
            chat: The chat answer, for its usage and origin.
            finish: Why it ended.
            items: What it says.
        """
        cut = _CUT.get(finish)
        usage, left_out = chat["usage"], self._tools.left_out
        return self.head(chat["rose"]["ids"][0], chat["created"], chat["model"]) | {
            "status": _status(finish),
            "completed_at": None if cut else chat["created"],
            "incomplete_details": {"reason": cut} if cut else None,
            "output": items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {
                    "reasoning_tokens": (usage.get("completion_tokens_details") or {}).get(
                        "reasoning_tokens", 0
                    )
                },
                "total_tokens": usage["total_tokens"],
            },
            "rose": {**chat["rose"], **({"left_out": left_out} if left_out else {})},
        }

    def head(self, turn_id: str, created: int, model: str) -> dict[str, Any]:
        """The response object of a turn that runs."""
        request = self._request
        return {
            "id": f"resp_{turn_id}",
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": request.get("instructions"),
            "max_output_tokens": request.get("max_output_tokens"),
            "metadata": request.get("metadata") or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
            "previous_response_id": request.get("previous_response_id"),
            "prompt_cache_key": request.get("prompt_cache_key"),
            "reasoning": {"effort": None, "summary": None, **(request.get("reasoning") or {})},
            "service_tier": "default",
            "store": request.get("store") is not False,
            "temperature": self.body.get("temperature"),
            "text": {"format": {"type": "text"}, **(request.get("text") or {})},
            "tool_choice": request.get("tool_choice") or "auto",
            "tools": request.get("tools") or [],
            "top_p": self.body.get("top_p"),
            "truncation": request.get("truncation") or "disabled",
            "usage": None,
            "user": request.get("user"),
        }


class ResponsesStream:
    """The events of one response, numbered."""

    ping = b": held\n\n"

    def __init__(self, asked: ResponsesRequest, writer: _Writer) -> None:
        self._asked = asked
        self._writer = writer
        self._created = 0
        self._number = 0

    def begin(self, turn_id: str, num_prompt: int, created: int) -> None:
        self._writer.turn_id = turn_id
        self._created = created

    def piece(self, index: int, delta: Mapping[str, Any], logprobs: Any) -> Iterable[bytes]:
        yield from self._opening()
        entries = (logprobs or {}).get("content") if isinstance(logprobs, dict) else None
        for event in self._writer.add(delta, entries):
            yield self._event(event)

    def message(self, index: int) -> Message:
        return self._writer.message()

    def end(self, answer: Mapping[str, Any], finishes: Sequence[str]) -> Iterable[bytes]:
        yield from self._opening()
        for event in self._writer.close(_status(finishes[0])):
            yield self._event(event)
        response = self._asked.response(answer, finishes[0], self._writer.items)
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: RoseError) -> Iterable[bytes]:
        if not self._writer.turn_id:  # there is no response yet that could have failed
            said = {"code": error.code, "message": error.message, "param": error.field}
            yield self._event({"type": "error", **said})
            return
        yield from self._opening()
        response = self._head() | {
            "status": "failed",
            "error": {"code": error.code or "server_error", "message": error.message},
        }
        yield self._event({"type": "response.failed", "response": response})

    def _opening(self) -> Iterable[bytes]:
        if self._number == 0:
            for kind in ("response.created", "response.in_progress"):
                yield self._event({"type": kind, "response": self._head()})

    def _head(self) -> dict[str, Any]:
        return self._asked.head(self._writer.turn_id, self._created, self._asked.body.get("model", ""))

    def _event(self, event: dict[str, Any]) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return sse(event["type"], event)


class _Writer:
    """Items from deltas, with the events that say so.  One item is open at a time."""

    def __init__(self, turn_id: str, tools: Tools, wants_encrypted: bool) -> None:
        self.turn_id = turn_id
        self.items: list[dict[str, Any]] = []
        self._tools = tools
        self._wants_encrypted = wants_encrypted
        self._unbroken = Unbroken()
        self._open: str | int | None = None
        """``reasoning``, ``content``, or a call's index."""
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def add(self, delta: Mapping[str, Any], logprobs: list[Any] | None = None) -> Iterable[dict[str, Any]]:
        for part in self._unbroken.add(delta, logprobs or ()):
            yield from self._add(part)

    def close(self, status: str = "completed") -> Iterable[dict[str, Any]]:
        """All has been said.  An answer of nothing is an empty message: its client has something to send back."""
        for part in self._unbroken.rest():
            yield from self._add(part)
        if not self.items:
            yield from self._turn_to("content")
        yield from self._close(status)

    def _add(self, part: AnswerDelta) -> Iterable[dict[str, Any]]:
        if part.kind == "reasoning":
            yield from self._turn_to("reasoning")
            yield self._text("response.reasoning_text.delta", part.text, content_index=0)
        elif part.call is None:
            yield from self._turn_to("content")
            self._logprobs += part.logprobs
            yield self._text(
                "response.output_text.delta", part.text, content_index=0, logprobs=list(part.logprobs)
            )
        else:
            function = part.call.get("function") or {}
            yield from self._turn_to(part.call["index"], part.call.get("id"), function.get("name"))
            text = function.get("arguments")
            if text and self._current["type"] == "custom_tool_call":
                self._texts.append(text)
            elif text:
                yield self._text("response.function_call_arguments.delta", text)

    def _close(self, status: str = "completed") -> Iterable[dict[str, Any]]:
        """The open item is done."""
        if self._open is None:
            return
        item, text = self._current, "".join(self._texts)
        self._open, self._texts = None, []
        where = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if item["type"] in ("reasoning", "message"):
            part: dict[str, Any] = {"type": "reasoning_text", "text": text}
            done: dict[str, Any] = {"type": "response.reasoning_text.done", "text": text}
            if item["type"] == "message":
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
                done = {
                    "type": "response.output_text.done",
                    "text": text,
                    "logprobs": self._logprobs,
                }
                self._logprobs = []
            item["content"] = [part]
            yield {**done, **where, "content_index": 0}
            yield {"type": "response.content_part.done", **where, "content_index": 0, "part": part}
        elif item["type"] == "custom_tool_call":
            item["input"] = custom_input(text)
            yield {"type": "response.custom_tool_call_input.delta", **where, "delta": item["input"]}
            yield {"type": "response.custom_tool_call_input.done", **where, "input": item["input"]}
        else:
            item["arguments"] = text
            done = {"type": "response.function_call_arguments.done", "arguments": text, "name": item["name"]}
            yield {**done, **where}
        if "status" in item:
            item["status"] = status
        yield {"type": "response.output_item.done", "output_index": where["output_index"], "item": dict(item)}

    def message(self) -> Message:
        """What the items say, as it is read when they come back."""
        return _read_items(self.items)[0]

    @property
    def _current(self) -> dict[str, Any]:
        return self.items[-1]

    def _text(self, kind: str, text: str, **fields: Any) -> dict[str, Any]:
        self._texts.append(text)
        where = {"item_id": self._current["id"], "output_index": len(self.items) - 1}
        return {"type": kind, **where, **fields, "delta": text}

    def _turn_to(
        self, part: str | int, call_id: str | None = None, name: str | None = None
    ) -> Iterable[dict[str, Any]]:
        """Have this part open; a part that was left is not gone back to, but begun again."""
        if self._open == part:
            return
        yield from self._close()
        index = len(self.items)

        def item_id(prefix: str) -> str:
            return f"{prefix}_{self.turn_id}_{index}"

        item: dict[str, Any]
        opened: dict[str, Any] | None = None
        if part == "reasoning":
            item = {"type": "reasoning", "id": item_id("rs"), "summary": [], "status": "in_progress"}
            if self._wants_encrypted:
                item["encrypted_content"] = item_id(
                    "rs"
                )  # opaque to the client; names the turn when it comes back
            opened = {"type": "reasoning_text", "text": ""}
        elif part == "content":
            item = {
                "type": "message",
                "id": item_id("msg"),
                "role": "assistant",
                "content": [],
                "status": "in_progress",
            }
            opened = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        elif name in self._tools.custom:
            item = {
                "type": "custom_tool_call",
                "id": item_id("ctc"),
                "call_id": call_id,
                **self._tools.client_name(name),
                "input": "",
            }
        else:
            item = {
                "type": "function_call",
                "id": item_id("fc"),
                "call_id": call_id,
                **self._tools.client_name(name or ""),
                "arguments": "",
                "status": "in_progress",
            }
        self.items.append(item)
        self._open = part
        yield {"type": "response.output_item.added", "output_index": index, "item": dict(item)}
        if opened is not None:
            yield {
                "type": "response.content_part.added",
                "item_id": item["id"],
                "output_index": index,
                "content_index": 0,
                "part": opened,
            }


def _status(finish: str) -> str:
    return "incomplete" if finish in _CUT else "completed"


def _as_delta(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [{**call, "index": at} for at, call in enumerate(message.get("tool_calls") or ())]
    return {**message, "tool_calls": calls}


def _format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """``text.format`` as chat's ``response_format``."""
    made = as_object(text.get("format") or {"type": "text"}, "text.format")
    kind = made.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise not_here(f"the format {str(kind)[:64]}", "text.format.type")
    named = {field: made[field] for field in ("name", "description", "schema", "strict") if field in made}
    return {"type": "json_schema", "json_schema": named}


def _earlier(response_id: Any, trajectory: Trajectory | None) -> list[Message]:
    """The messages up to and with the answer of this response."""
    field = "previous_response_id"
    name = as_text(response_id, field).removeprefix("resp_")
    messages = None
    if trajectory is not None:
        turn = next((record.turn for record in reversed(trajectory.turns) if record.id == name), None)
        messages = None if turn is None else trajectory.messages_of(turn)
    if messages is None:
        raise NotFound(
            f"response '{response_id[:64]}' is not known here",
            field=field,
            code="previous_response_not_found",
            fix="one of this trajectory's own, sent without store: false; or send the whole conversation as input",
        )
    return messages


def _read_items(given: Any) -> list[Message]:
    """Messages of ``input``; what an assistant said in one turn is one."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for at, item in enumerate(as_list([] if given is None else given, "input")):
        field = f"input[{at}]"
        kind = as_object(item, field).get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            role = as_text(item.get("role"), f"{field}.role")
            messages.append(
                {"role": "system" if role == "developer" else role, "content": _content(item, field)}
            )
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": as_text(item.get("call_id"), f"{field}.call_id"),
                    "content": _joined(item.get("output"), f"{field}.output"),
                }
            )
        else:
            _add_said(messages, item, kind, field)
    for message in messages:
        if message["role"] == "assistant":
            for name in ("content", "reasoning"):
                if name in message:
                    message[name] = "".join(message[name])
    return messages


def _add_said(messages: list[Message], item: Mapping[str, Any], kind: Any, field: str) -> None:
    """Add what an assistant said to its message, whose texts are lists until all items are read."""
    named = item.get("encrypted_content") if kind == "reasoning" else None
    ours = _OUR_ID.match(str(named or item.get("id") or ""))
    turn = ours["turn"] if ours else None
    last: Message | None = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is None or (turn is not None and last.get("id", turn) != turn):
        last = {"role": "assistant", "content": []}
        messages.append(last)
    if turn is not None:
        last["id"] = turn
    if kind == "message":
        last["content"] += _texts(item.get("content"), f"{field}.content")
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        texts = [as_text(as_object(part, field).get("text"), field) for part in as_list(parts, field)]
        last.setdefault("reasoning", []).extend(texts)
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments")
        if kind == "custom_tool_call":
            arguments = encode({CUSTOM_INPUT: as_text(item.get("input"), f"{field}.input")}).decode()
        function = {
            "name": model_name(item, field),
            "arguments": as_text(arguments, f"{field}.arguments"),
        }
        call_id = as_text(item.get("call_id"), f"{field}.call_id")
        call = {"id": call_id, "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
    else:
        raise not_here(f"an item of type {str(kind)[:64]}", f"{field}.type")


def _texts(given: Any, field: str) -> list[str]:
    if given is None or isinstance(given, str):
        return [given] if given else []
    texts: list[str] = []
    for at, part in enumerate(as_list(given, field)):
        kind = as_object(part, f"{field}[{at}]").get("type")
        if kind in ("input_text", "output_text", "text"):
            texts.append(as_text(part.get("text"), f"{field}[{at}].text"))
        elif kind == "refusal":
            texts.append(as_text(part.get("refusal"), f"{field}[{at}].refusal"))
        else:
            raise no_media(str(kind)[:64], f"{field}[{at}]")
    return texts


def _content(item: Mapping[str, Any], field: str) -> Any:
    return one_content(_texts(item.get("content"), f"{field}.content"))


def _joined(given: Any, field: str) -> str:
    return "".join(_texts(given, field))


def _one_system(messages: list[Message]) -> list[Message]:
    """Instructions and the developer messages behind them as one: many templates take one system message, and take it first."""
    count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    texts: list[str] = []
    for message in messages[:count]:
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part["text"] for part in content]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[count:]]
