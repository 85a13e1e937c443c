"""When is a message list the continuation of an earlier one?

Agents send the whole history with every turn, but rarely byte for byte: JSON arguments come back with other
spacing, empty content becomes null, reasoning is dropped, text becomes a list of one part.  This module
gives each message list a chain of hashes over a canonical form in which all of these are equal, so that "does
it extend what we answered" is one dictionary look-up per message and works for any branch of a trajectory.

Not equal, on purpose: any other text, role, tool, template argument or system prompt.  Those are forks.

An answer has a name (a *tip*) for each form in which it was delivered: a stream of it says other words than the whole
(:class:`Deltas`).  Clients trim white space at its ends, so each form has a *loose* name, too, which is asked for where
the exact one is not known.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_sorted_json = msgspec.json.Encoder(order="sorted").encode

CONTEXT_FIELDS = (
    "model",
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
)
"""What changes the rendered text besides the messages.  ``tool_choice`` and ``response_format`` are left
out of
the context hash below: they change what may be sampled, not the history."""

TIP_BYTES = 16
_REASONING = ("reasoning", "reasoning_content")
_DRAWN = re.compile(r"(?:chatcmpl-tool-|call_)?[0-9a-f]{16,32}\Z")
_DRAWN_SHORT = re.compile(r"[0-9A-Za-z]{9}\Z")


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys: equal values give equal bytes."""
    return _sorted_json(value)


def digest(value: Any) -> bytes:
    """16 bytes that name a JSON value."""
    return hashlib.blake2b(canonical_json(value), digest_size=16).digest()


def context_digest(body: Mapping[str, Any]) -> bytes:
    """Names everything but the messages that shapes the prompt."""
    return digest({field: body[field] for field in CONTEXT_FIELDS if body.get(field) not in (None, [], {})})


def canonical_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a message that history is made of."""
    role = message.get("role")
    canonical: dict[str, Any] = {"role": role, "content": _content(message.get("content"))}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        canonical["tool_calls"] = [_call(call) for call in calls]
    if role != "assistant":
        # Ours to compare as sent.  An assistant's own name or call ids are made up by whoever parsed it.  The id of a call says which
        # tool has answered: some clients add its name to that when they send their history again.
        for field in ("tool_call_id",) if message.get("tool_call_id") else ("name",):
            if message.get(field):
                canonical[field] = message[field]
    return canonical


def chain(context: bytes, messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """``hashes[i]`` names ``messages[: i + 1]`` in this context."""
    hashes: list[bytes] = []
    for message in messages:
        context = extend(context, message)
        hashes.append(context)
    return hashes


def extend(previous: bytes, message: Mapping[str, Any]) -> bytes:
    payload = canonical_json(canonical_message(message))
    return hashlib.blake2b(previous + payload, digest_size=16).digest()


def tips(base: bytes, answer: Mapping[str, Any]) -> bytes:
    """Two names, ``TIP_BYTES`` each, of the message list that ``base`` and this answer make: exact and loose."""
    return extend(base, answer) + loose(base, answer)


def loose(base: bytes, answer: Mapping[str, Any]) -> bytes:
    """A name that says nothing of white space at the ends of the answer's text."""
    content = _content(answer.get("content"))
    text = content.strip() if isinstance(content, str) else content
    return extend(b"loose" + base, {**answer, "content": text})


def thought(message: Mapping[str, Any]) -> bytes:
    """Names a message's reasoning; empty where it has none."""
    for field in _REASONING:
        text = message.get(field)
        if isinstance(text, str) and text.strip():
            return hashlib.blake2b(
                text.strip().encode(errors="surrogatepass"), digest_size=TIP_BYTES
            ).digest()
    return b""


def call_id(turn_id: str, index: int, drawn: str) -> str:
    """The id of a turn's ``index``-th tool call.

    A parser draws one at random each time it reads the call; ours follows from the turn, so that each form of an answer
    and each repeat has the same, and it tells answers that are otherwise equal apart.  Ids that a model chose stay.
    """
    if _DRAWN.match(drawn):
        size, prefix = 16, "chatcmpl-tool-"
    elif _DRAWN_SHORT.match(drawn):
        size, prefix = 9, ""
    else:
        return drawn
    return prefix + hashlib.blake2b(f"{turn_id}:{index}".encode(), digest_size=16).hexdigest()[:size]


class Deltas:
    """An answer put together from the pieces of a stream, the way clients do it."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, delta: Mapping[str, Any]) -> None:
        """A ``delta`` as it is sent."""
        self._content.append(delta.get("content") or "")
        self._reasoning.append(next((delta[field] for field in _REASONING if delta.get(field)), ""))
        for piece in delta.get("tool_calls") or ():
            call = self._calls.setdefault(piece.get("index", 0), {"name": "", "arguments": ""})
            for field, text in (piece.get("function") or {}).items():
                if isinstance(text, str):
                    call[field] = call.get(field, "") + text

    def message(self) -> dict[str, Any]:
        calls = [{"function": self._calls[index]} for index in sorted(self._calls)]
        return {
            "role": "assistant",
            "content": "".join(self._content),
            "reasoning": "".join(self._reasoning),
            "tool_calls": calls,
        }


def _content(content: Any) -> Any:
    if content is None:
        return ""
    if isinstance(content, list):
        texts = [
            part.get("text")
            if isinstance(part, dict) and part.get("type") in ("text", "input_text")
            else None
            for part in content
        ]
        if all(isinstance(text, str) for text in texts):
            # How templates join several text parts differs; one part is the common case and exact.
            return texts[0] if len(texts) == 1 else texts or ""
    return content


def _call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    if not isinstance(function, dict):
        return {key: value for key, value in call.items() if key != "id"}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            pass  # a model may write anything; then the text itself is compared
    return {"name": function.get("name"), "arguments": {} if arguments in (None, "") else arguments}
