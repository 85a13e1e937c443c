"""OpenAI's chat completions and completions: the form that everything else is made of, so only streams need writing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rose.errors import RoseError
from rose.scheduler.messages import Deltas
from rose.scheduler.protocols import Body, Message, StreamForm, encode
from rose.wire.errors import error_body

DONE = b"data: [DONE]\n\n"


class ChatRequest:
    """Args:
    body: The request.
    text: It is ``/v1/completions``'.
    """

    names: Mapping[str, str] = {}

    def __init__(self, body: Body, *, text: bool = False) -> None:
        self.body = body
        self._text = text

    def whole(self, answer: bytes) -> tuple[bytes, Message | None]:
        return answer, None

    def stream(self) -> StreamForm:
        options = self.body.get("stream_options")
        usage = isinstance(options, dict) and bool(options.get("include_usage"))
        kind = TextStream if self._text else ChatStream
        return kind(self.body.get("model"), include_usage=usage)

    def kept(self, num_continued: int) -> list[Message] | None:
        return None


class TextStream:
    """Chunks of ``/v1/completions``."""

    ping = b": held\n\n"
    _prefix, _object = "cmpl", "text_completion"

    def __init__(self, model: Any, *, include_usage: bool) -> None:
        self._model = model
        self._include_usage = include_usage
        self._base: dict[str, Any] = {}

    def begin(self, turn_id: str, num_prompt: int, created: int) -> None:
        self._base = {
            "id": f"{self._prefix}-{turn_id}",
            "object": self._object,
            "created": created,
            "model": self._model,
        }

    def piece(self, index: int, delta: Mapping[str, Any], logprobs: Any) -> Iterable[bytes]:
        text = delta.get("text") or ""
        if text or logprobs:
            yield self._chunk(index, {"text": text}, logprobs)

    def message(self, index: int) -> Message:
        return {}

    def end(self, answer: Mapping[str, Any], finishes: Sequence[str]) -> Iterable[bytes]:
        for index, reason in enumerate(finishes):
            yield self._chunk(index, self._last(index), None, reason, answer["rose"])
        if self._include_usage:
            yield self._event({"choices": [], "usage": answer["usage"], "rose": answer["rose"]})
        yield DONE

    def failed(self, error: RoseError) -> Iterable[bytes]:
        yield b"data: " + encode(error_body(error)) + b"\n\n"
        yield DONE

    def _last(self, index: int) -> dict[str, Any]:
        return {"text": ""}

    def _chunk(
        self, index: int, said: dict[str, Any], logprobs: Any, reason: str | None = None, rose: Any = None
    ) -> bytes:
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        return self._event({"choices": [choice], **({} if rose is None else {"rose": rose})})

    def _event(self, fields: dict[str, Any]) -> bytes:
        return b"data: " + encode({**self._base, **fields}) + b"\n\n"


class ChatStream(TextStream):
    """Chunks of ``/v1/chat/completions``."""

    _prefix, _object = "chatcmpl", "chat.completion.chunk"

    def __init__(self, model: Any, *, include_usage: bool) -> None:
        super().__init__(model, include_usage=include_usage)
        self._said: dict[int, Deltas] = {}

    def piece(self, index: int, delta: Mapping[str, Any], logprobs: Any) -> Iterable[bytes]:
        said = self._said.get(index)
        if said is None:
            said = self._said[index] = Deltas()
            delta = {"role": "assistant", "content": "", **delta}
        said.add(delta)
        if delta or logprobs:
            yield self._chunk(index, {"delta": delta}, logprobs)

    def message(self, index: int) -> Message:
        return self._said.get(index, Deltas()).message()

    def _last(self, index: int) -> dict[str, Any]:
        return {"delta": {} if index in self._said else {"role": "assistant", "content": ""}}
