"""A tokenizer and chat template small enough to read: one id per character, ChatML around messages.

What the fake engine speaks when it is not given a real tokenizer.  Ids below ``FIRST_CHAR`` are special.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

BOS, IM_START, IM_END = 0, 1, 2
FIRST_CHAR = 3
VOCAB_SIZE = 512


class Tokenizer(Protocol):
    """What the fake engine needs; transformers tokenizers are adapted in :class:`HFTokenizer`."""

    vocab_size: int
    eos_id: int
    word_ids: Sequence[int]
    """Ids that the fake model may sample."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def chat(self, body: Mapping[str, Any]) -> list[int]: ...


class ToyTokenizer:
    vocab_size = VOCAB_SIZE
    eos_id = IM_END
    word_ids: Sequence[int] = [FIRST_CHAR + ord(char) for char in "abcdefghijklmnopqrstuvwxyz .,"]

    def encode(self, text: str) -> list[int]:
        """One id per character; what the alphabet lacks becomes ``?``."""
        size = VOCAB_SIZE - FIRST_CHAR
        return [FIRST_CHAR + (ord(char) if ord(char) < size else ord("?")) for char in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token - FIRST_CHAR) for token in token_ids if token >= FIRST_CHAR)

    def chat(self, body: Mapping[str, Any]) -> list[int]:
        ids = [BOS]
        if body.get("tools"):
            ids += [IM_START, *self.encode(f"tools\n{body['tools']}"), IM_END, *self.encode("\n")]
        for message in body["messages"]:
            content = message.get("content")
            if isinstance(content, list):
                content = "".join(part.get("text", "") for part in content)
            text = f"{message['role']}\n{content or ''}"
            for call in message.get("tool_calls") or []:
                text += f"<tool_call>{call['function']['name']}{call['function']['arguments']}</tool_call>"
            ids += [IM_START, *self.encode(text), IM_END, *self.encode("\n")]
        if body.get("add_generation_prompt", True):
            ids += [IM_START, *self.encode("assistant\n")]
        return ids


class HFTokenizer:
    """A transformers tokenizer with a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.eos_id = int(tokenizer.eos_token_id)
        special = set(tokenizer.all_special_ids)
        self.word_ids: Sequence[int] = [token for token in range(self.vocab_size) if token not in special]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def chat(self, body: Mapping[str, Any]) -> list[int]:
        encoded = self._tokenizer.apply_chat_template(
            [dict(message) for message in body["messages"]],
            tools=body.get("tools"),
            add_generation_prompt=body.get("add_generation_prompt", True),
            tokenize=True,
            return_dict=False,
            **(body.get("chat_template_kwargs") or {}),
        )
        return list(encoded)
