"""Where a turn's text ends, and the reason that its client reads.

An engine ends a turn at a stop string but returns every token.  Our endpoint plugin cuts the text as ``vllm serve`` does; for
engines without it, it is cut here.  :class:`StopMatcher` watches streamed text, and holds back what may be the start of a stop
string; one may lie across the seam of two attempts, where no engine could see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def chat_finish(request: Mapping[str, Any], reason: str, *, called: bool, streamed: bool) -> str:
    """The ``finish_reason`` of a chat choice, as ``vllm serve`` 0.32 says it.

    Args:
        request: The client's.
        reason: Why the turn ended.
        called: The answer calls a tool; on a stream, one was begun.
    """
    choice = request.get("tool_choice")
    if isinstance(choice, dict):  # a call by name is no choice of the model's
        return reason
    if streamed:
        called = called and reason == "stop"
    elif choice == "required":
        called = reason == "stop"
    return "tool_calls" if called else reason


def cut_at_stop(text: str, stop: str, *, min_tokens: int, keep: bool) -> str:
    """``text`` up to the ``stop`` that ended it; with it when ``keep``.

    The first one; with a least length an earlier one may not have counted, so the last one, or the first of those that
    follow each other without anything between: one token may hold several.
    """
    at = text.rfind(stop) if min_tokens else text.find(stop)
    while min_tokens and stop and at >= len(stop) and text.startswith(stop, at - len(stop)):
        at -= len(stop)
    if at < 0:
        return text
    return text[: at + len(stop)] if keep else text[:at]


def visible_ids(
    token_ids: Sequence[int], finish_reason: str, stop_reason: str | int | None, *, keep: bool
) -> list[int]:
    """What of an ended turn has text: all but the end token that stopped it.

    A parser keeps special tokens to see its markup, so an end token would show up in the content.
    """
    by_token = finish_reason == "stop" and not isinstance(stop_reason, str)
    return list(token_ids[:-1] if by_token and not keep else token_ids)


class StopMatcher:
    """Args:
    stops: Stop strings.
    keep: Whether the matched one is part of the output.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool) -> None:
        self._stops = [stop for stop in stops if stop]
        self._keep = keep
        self._held = ""
        self._free = 0
        """How many of the held characters cannot end a stop string."""
        self.matched: str | None = None

    def feed(self, text: str, *, counts: bool = True) -> str:
        """Text that is safe to show now; nothing after a match.

        Args:
            counts: Whether a stop string may end in ``text``; it may begin in text that does not count.
        """
        if self.matched is not None or not text:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        if not counts:
            self._free = len(text)
        starts = [(text.find(stop, max(0, self._free - len(stop) + 1)), stop) for stop in self._stops]
        hits = [hit for hit in starts if counts and hit[0] >= 0]
        if hits:
            at, self.matched = min(hits)
            self._held = ""
            return text[: at + len(self.matched)] if self._keep else text[:at]
        hold = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), hold, -1):
                if text.endswith(stop[:size]):
                    hold = size
                    break
        self._held = text[len(text) - hold :]
        self._free = max(0, self._free - len(text) + hold)
        return text[: len(text) - hold]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return "" if self.matched is not None else held
