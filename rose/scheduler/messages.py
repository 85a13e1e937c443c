"""When is a message list the continuation of an earlier one?

Agents send the whole history with every turn, but rarely byte for byte: JSON arguments come back with other
spacing, empty content becomes null, reasoning is dropped, text becomes a list of one part.  This module
gives each message list a chain of hashes over a canonical form in which all of these are equal, so that "does
it extend what we answered" is one dictionary look-up per message and works for any branch of a trajectory.

Not equal, on purpose: any other text, role, tool, template argument or system prompt.  Those are forks.

Callers: ``rose.scheduler.prompts``.
"""

from __future__ import annotations

import hashlib
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

_NOT_HISTORY = ("tool_choice", "response_format")


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
        # Ours to compare as sent.  An assistant's own name or call ids are made up by whoever parsed it.
        for field in ("name", "tool_call_id"):
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
