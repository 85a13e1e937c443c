"""The protocols that agents speak, over one form of a conversation.

Inside the scheduler a request is a chat completion's (:mod:`rose.scheduler.messages` compares such histories, vLLM renders them, its
parsers answer in them).  A protocol reads its own requests as one and writes answers and streams in its own shapes:

- :mod:`rose.scheduler.protocols.chat`: OpenAI's chat completions and completions, which are that form already.
- :mod:`rose.scheduler.protocols.responses`: OpenAI's ``/v1/responses``.
- :mod:`rose.scheduler.protocols.anthropic_messages`: Anthropic's ``/v1/messages``.

Pure: no I/O.  A stream is written from deltas of a chat answer, one :class:`StreamForm` per client; whoever sends it is
:mod:`rose.scheduler.streams`.

What a client is sent it sends back with its next turn, as its protocol has it.  So each protocol also says which message its client will
send back (:meth:`StreamForm.message`, :meth:`ProtocolRequest.whole`): that is the name by which the next turn finds this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rose.errors import RequestError, RoseError

Body = dict[str, Any]
"""A chat completion's request."""
Message = dict[str, Any]
"""Of a chat completion."""
encode = msgspec.json.Encoder().encode


class StreamForm(Protocol):
    """How one client's stream is written.  Every method gives whole server-sent events, to be sent in this order."""

    ping: bytes
    """Keeps a stream open that has begun."""

    def begin(self, turn_id: str, num_prompt: int, created: int) -> None:
        """Before everything else: the first choice's turn, tokens of its prompt, seconds since 1970."""
        ...

    def piece(self, index: int, delta: Mapping[str, Any], logprobs: Any) -> Iterable[bytes]:
        """More of a choice: a chat delta without its role, or ``{"text"}``."""
        ...

    def message(self, index: int) -> Message:
        """The choice as its client has it, after :meth:`end`."""
        ...

    def end(self, answer: Mapping[str, Any], finishes: Sequence[str]) -> Iterable[bytes]:
        """Args:
        answer: The whole, as chat has it.
        finishes: Why each choice ended, as a stream says it.
        """
        ...

    def failed(self, error: RoseError) -> Iterable[bytes]:
        """Instead of :meth:`end`."""
        ...


class ProtocolRequest(Protocol):
    """A request, read by its protocol."""

    body: Body
    names: Mapping[str, str]
    """What fields of a chat completion are called in this protocol, where they are called otherwise."""

    def whole(self, answer: bytes) -> tuple[bytes, Message | None]:
        """The answer in this protocol, from chat's; and as which message it comes back, where that is another than the answer's own."""
        ...

    def stream(self) -> StreamForm: ...

    def kept(self, num_continued: int) -> list[Message] | None:
        """What a later request may refer to without sending it again: messages behind the first ``num_continued`` of the body's; None: nothing."""
        ...


class AnswerDelta(msgspec.Struct, frozen=True):
    """A piece of one part of an answer.

    Args:
        kind: ``reasoning``, ``content`` or ``call``.
        text: Of the first two.
        logprobs: Entries of the text's tokens.
        call: A piece of a call, as chat's delta has it.
    """

    kind: str
    text: str = ""
    logprobs: Sequence[Any] = ()
    call: Mapping[str, Any] | None = None


class Unbroken:
    """An answer's pieces, each call's in one run.

    A parser may find text (a line break between two calls) before a call's last piece.  Where parts are ended one before the next
    begins, no call could be gone back to: such text is held back until the call's end.
    """

    def __init__(self) -> None:
        self._call: int | None = None
        self._held: list[AnswerDelta] = []

    def add(self, delta: Mapping[str, Any], logprobs: Sequence[Any] = ()) -> Iterator[AnswerDelta]:
        """Args:
        logprobs: Entries of the content's tokens.
        """
        for kind, entries in (("reasoning", ()), ("content", logprobs)):
            if delta.get(kind):
                self._held.append(AnswerDelta(kind, delta[kind], entries))
        if self._call is None:
            yield from self._let_go()
        for call in delta.get("tool_calls") or ():
            if call["index"] != self._call:
                yield from self._let_go()
                self._call = call["index"]
            yield AnswerDelta("call", call=call)

    def rest(self) -> Iterator[AnswerDelta]:
        """There are no more pieces."""
        self._call = None
        yield from self._let_go()

    def _let_go(self) -> Iterator[AnswerDelta]:
        held, self._held = self._held, []
        yield from held


@contextlib.contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals name the field that the client knows."""
    try:
        yield
    except RoseError as error:
        error.field = names.get(error.field or "", error.field)
        raise


def sse(name: str, value: Any) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


def as_list(value: Any, field: str, *, most: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (most is not None and len(value) > most):
        bound = "" if most is None else f" of at most {most}"
        raise RequestError(f"must be a list{bound}", field=field)
    return value


def as_object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError("must be an object", field=field)
    return value


def as_text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise RequestError("must be text", field=field)
    return value


def one_content(parts: list[str]) -> Any:
    """A message's content: text, or several texts, which a template joins in its own way."""
    if len(parts) < 2:
        return parts[0] if parts else ""
    return [{"type": "text", "text": text} for text in parts]


def no_media(kind: str, field: str) -> RequestError:
    return RequestError(
        f"holds {kind} input, which is not recorded and so not sampled on; send text only",
        field=field,
        code="multimodal_unsupported",
    )


VLLM_SAMPLING = (
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    "thinking_token_budget",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "chat_template_kwargs",
)
"""vLLM's own fields of a chat completion, which are of the same name in every protocol."""


def one_answer(request: Mapping[str, Any]) -> None:
    """Raises RequestError where more than one is asked for: these protocols have no place for it."""
    if request.get("n") not in (None, 1):
        raise RequestError("is not supported here", field="n", fix="ask n times, or by /v1/chat/completions")


def not_here(what: str, field: str) -> RequestError:
    return RequestError(f"{what} is not supported here", field=field)
