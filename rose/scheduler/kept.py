"""Messages that are recorded with a turn, for clients that name an earlier answer and do not send again what led to it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rose.scheduler.http import check_storable
from rose.scheduler.prompts import Prompt
from rose.scheduler.protocols import ProtocolRequest
from rose.scheduler.records import packed
from rose.scheduler.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    messages: list[dict[str, Any]]
    after: int | None
    """The turn whose messages are in front of them; None: they are all."""

    @classmethod
    def of(cls, sent: ProtocolRequest, prompt: Prompt, trajectory: Trajectory) -> Kept | None:
        """Raises:
        RequestError: They cannot be recorded.
        """
        parent = prompt.parent
        if parent is not None:
            known = trajectory.first_messages(parent)
            # Instructions are kept with no request, and equal system messages with theirs: what is continued may hold either.
            if known is None or _leading(known) != _leading(sent.kept(0) or []):
                parent = None
        messages = sent.kept(0 if parent is None else prompt.num_continued)
        if messages is None:
            return None
        check_storable(messages, field="input")
        return cls(messages=messages, after=parent)

    def with_answer(self, answer: Mapping[str, Any], turn_id: str) -> bytes:
        """As it is recorded.  The answer is named: others may say the same."""
        said = {field: answer[field] for field in ("content", "reasoning", "tool_calls") if answer.get(field)}
        return bytes(packed([*self.messages, {"role": "assistant", "content": "", **said, "id": turn_id}]))


def _leading(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(itertools.takewhile(lambda message: message["role"] == "system", messages))
