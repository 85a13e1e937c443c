"""SGLang's ``/generate``: a completion in other words, with its tokens and their log-probs.

As of SGLang's sources of 2026.  A stream says all that there is so far in each event, as SGLang's does by default; so that a long answer is not sent
once for each of its tokens, each event is longer than the last by a sixteenth at least.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rose.errors import RequestError, RoseError
from rose.scheduler.protocols import Body, Message, encode
from rose.scheduler.protocols.chat import DONE
from rose.wire.errors import error_body
from rose.wire.turns import SGLangGenerate, SGLangSampling

_GROWTH = 16
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
"""SGLang's name -> vLLM's; all others are the same."""


class SGLangRequest:
    """Raises RequestError where it names no prompt, or two."""

    def __init__(self, asked: SGLangGenerate) -> None:
        if (asked.text is None) == (asked.input_ids is None):
            raise RequestError("give either text or input_ids", field="input_ids")
        sampling = asked.sampling_params or SGLangSampling()
        given = {name: getattr(sampling, name) for name in SGLangSampling.__struct_fields__}
        self.body: Body = {
            _RENAMED.get(name, name): value
            for name, value in given.items()
            if value is not None or name == "max_new_tokens"
        }
        self.body["prompt"] = asked.text if asked.input_ids is None else asked.input_ids
        self.body["stream"] = asked.stream
        if asked.model is not None:
            self.body["model"] = asked.model
        prompt = "input_ids" if asked.text is None else "text"
        self.names: Mapping[str, str] = {
            **dict.fromkeys(("prompt", "messages"), prompt),
            **{_RENAMED.get(name, name): f"sampling_params.{name}" for name in given},
        }
        self._asked = asked

    def whole(self, answer: bytes) -> tuple[bytes, Message | None]:
        """One object, or a list of them where several choices were asked for."""
        chat = msgspec.json.decode(answer)
        outputs = [self._output(chat, choice) for choice in chat["choices"]]
        return encode(outputs if self._is_several else outputs[0]), None

    def stream(self) -> SGLangStream:
        return SGLangStream(self._asked.rid, logprobs=bool(self._asked.return_logprob), output=self._output)

    def kept(self, num_continued: int) -> list[Message] | None:
        return None

    @property
    def _is_several(self) -> bool:
        return (self.body.get("n") or 1) > 1

    def _output(self, answer: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
        token_ids, logprobs = choice["token_ids"], choice["token_logprobs"]
        meta: dict[str, Any] = {
            "id": self._asked.rid or choice["id"],
            "finish_reason": _finish(choice),
            "prompt_tokens": answer["rose"]["usage"]["prompt"],
            "completion_tokens": len(token_ids),
            "cached_tokens": choice["cached_tokens"],
        }
        if choice["version"] is not None:
            meta["weight_version"] = choice["version"]
        if self._asked.return_logprob:
            meta["output_token_logprobs"] = _triples(token_ids, logprobs)
        output = {"text": choice["text"], "output_ids": token_ids, "meta_info": meta, "rose": answer["rose"]}
        return {**output, "index": choice["index"]} if self._is_several else output


class SGLangStream:
    """Args:
    rid: What the client calls its request.
    logprobs: It wants them.
    output: Makes the last event of a choice, from the whole answer and the choice.
    """

    ping = b": held\n\n"

    def __init__(self, rid: str | None, *, logprobs: bool, output: Any) -> None:
        self._rid, self._logprobs, self._output = rid, logprobs, output
        self._so_far: dict[int, _SoFar] = {}

    def begin(self, turn_id: str, num_prompt: int, created: int) -> None:
        self._turn_id, self._num_prompt = turn_id, num_prompt

    def piece(self, index: int, delta: Mapping[str, Any], logprobs: Any) -> Iterable[bytes]:
        so_far = self._so_far.setdefault(index, _SoFar())
        so_far.text += delta.get("text") or ""
        so_far.token_ids += delta["token_ids"]
        so_far.logprobs += delta["token_logprobs"]
        num = len(so_far.token_ids)
        if num * _GROWTH < so_far.num_sent * (_GROWTH + 1):
            return
        so_far.num_sent = num
        meta: dict[str, Any] = {
            "id": self._rid or self._turn_id,
            "finish_reason": None,
            "prompt_tokens": self._num_prompt,
            "completion_tokens": num,
        }
        if self._logprobs:
            meta["output_token_logprobs"] = _triples(so_far.token_ids, so_far.logprobs)
        yield _event({"text": so_far.text, "output_ids": so_far.token_ids, "meta_info": meta, "index": index})

    def message(self, index: int) -> Message:
        return {}

    def end(self, answer: Mapping[str, Any], finishes: Sequence[str]) -> Iterable[bytes]:
        for choice in answer["choices"]:
            yield _event({**self._output(answer, choice), "index": choice["index"]})
        yield DONE

    def failed(self, error: RoseError) -> Iterable[bytes]:
        yield _event(error_body(error))
        yield DONE


class _SoFar(msgspec.Struct):
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[float] = msgspec.field(default_factory=list)
    num_sent: int = 0


def _finish(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Why it ended, as SGLang says it: at which text or token, or after how many tokens."""
    reason, token_ids = choice["finish_reason"], choice["token_ids"]
    if reason == "length":
        return {"type": "length", "length": len(token_ids)}
    if reason != "stop":
        return {"type": "abort", "message": reason}
    at = choice["stop_reason"]
    return {"type": "stop", "matched": at if at is not None or not token_ids else token_ids[-1]}


def _triples(token_ids: Sequence[int], logprobs: Sequence[float]) -> list[tuple[float, int, None]]:
    return [(logprob, token, None) for token, logprob in zip(token_ids, logprobs, strict=True)]


def _event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"
