"""Text of a turn from its tokens, by the code that ``vllm serve`` uses for its own answers; routes ``/rose/parse...``.

vLLM's derender routes keep no state between calls: a stream would have to send its prompt and history again with every token, and stop
strings would stay in the text.  Here a stream *opens* a parse once and feeds it tokens.  vLLM's own detokenizer makes the text.  It
cuts at a stop string, and holds back text that may be the start of one, before a parser sees it.  Then the configured parsers split
the text into reasoning, content and tool calls, as they do behind ``/v1/chat/completions``.

:class:`Parses` bounds what callers can leave behind: parses, their bytes, and how long an idle one is kept.  A parse may
vanish at any time (410): its caller opens it again, here or on another engine, and tells what was shown before.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Protocol

import msgspec

from rose.errors import CapacityError, Conflict, Gone, RequestError
from vllm_plugin import internals

MAX_PARSES = 2048
MAX_BYTES = 512 * 2**20
"""Of what open parses hold, by the size of the bodies that opened them and :data:`TOKEN_BYTES` for each token."""
TOKEN_BYTES = 128
IDLE_S = 120.0
MAX_CLOSED = 4096
CONTEXT_TOKENS = 4
"""Tokens of context in front of a token whose text is wanted: a token may hold only some of a character's bytes."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class ParseSource(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a turn is parsed by: the client's own request, the prompt that was sampled on, and the least length."""

    kind: Literal["chat", "completion"]
    request: dict[str, Any]
    prompt_token_ids: list[TokenId]
    min_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0


class PieceBody(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens; ``finish_reason`` is set on the last ones."""

    token_ids: list[TokenId]
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def ends_by_token(self) -> bool:
        """The last token ended the turn, and has no text."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)


class FeedBody(PieceBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``at``: how many tokens came before.  ``open`` with the first ones, which may be all so far, in ``pieces`` of so many:
    parsers look at where a piece ends.  Log-probs are those of the last piece."""

    parse: Name
    at: int
    open: ParseSource | None = None
    pieces: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None


class WholeBody(PieceBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: ParseSource


class CloseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    parses: Annotated[list[Name], msgspec.Meta(max_length=4096)]


# -- the book ----------------------------------------------------------------------------------------


class Parse(Protocol):
    """One turn's parse; driven by one call at a time."""

    num_tokens: int

    def feed(self, piece: PieceBody, sizes: Sequence[int]) -> dict[str, Any]: ...


class _Open:
    __slots__ = ("busy", "fed_at_s", "num_bytes", "parse")

    def __init__(self, parse: Parse, num_bytes: int) -> None:
        self.parse = parse
        self.num_bytes = num_bytes
        self.busy = False
        self.fed_at_s = 0.0


class Parses:
    """Open parses by name.  One event loop; the work itself runs where ``run`` says.

    Args:
        max_parses, max_bytes, idle_s: Bounds; an idle parse is dropped, one too many refused.
        now_s: The clock.
    """

    def __init__(
        self,
        *,
        max_parses: int = MAX_PARSES,
        max_bytes: int = MAX_BYTES,
        idle_s: float = IDLE_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_parses = max_parses
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._now_s = now_s
        self._open: OrderedDict[str, _Open] = OrderedDict()
        """The one that was fed longest ago first."""
        self._closed: OrderedDict[str, int] = OrderedDict()
        """Closed before they were opened: their caller left, and its two requests met on the way."""
        self.num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    async def feed(
        self,
        body: FeedBody,
        num_bytes: int,
        make: Callable[[ParseSource], Parse],
        run: Callable[[Callable[[], Any]], Any],
    ) -> dict[str, Any]:
        """Open the parse if ``body`` says so, feed it, and close it after the last piece.

        Args:
            num_bytes: Of the body.
            make: Makes a parse; called by ``run``.
            run: Awaits a function on another thread.

        Raises:
            Gone: No such parse, or it has not seen what came before this piece.
            CapacityError: 429, too many parses are open.
            Conflict: It is being fed.
        """
        self.sweep()
        opened = self._open.get(body.parse)
        if opened is not None and opened.busy:
            raise Conflict("is being fed", field="parse")
        if body.open is not None:
            if opened is not None:
                self._drop(body.parse, opened)
            if len(self._open) >= self._max_parses or self.num_bytes + num_bytes > self._max_bytes:
                raise CapacityError("too many parses are open", status=429, code="too_many_parses")
            if self._closed.pop(body.parse, 0):
                raise Gone("was closed before it was opened", field="parse", code="unknown_parse")
            opened = await self._opened(body.parse, body.open, num_bytes, make, run)
        if opened is None or opened.parse.num_tokens != body.at:
            if opened is not None:
                self._drop(body.parse, opened)
            raise Gone("no such parse with these tokens", field="parse", code="unknown_parse")
        self._grow(body.parse, opened, TOKEN_BYTES * len(body.token_ids))
        opened.busy = True
        try:
            answer = await run(
                functools.partial(opened.parse.feed, body, body.pieces or [len(body.token_ids)])
            )
        except BaseException:
            self._drop(body.parse, opened)
            raise
        finally:
            opened.busy = False
            opened.fed_at_s = self._now_s()
        if self._open.get(body.parse) is opened:
            self._open.move_to_end(body.parse)
        if body.finish_reason is not None:
            self._drop(body.parse, opened)
        return answer

    async def _opened(
        self,
        name: str,
        source: ParseSource,
        num_bytes: int,
        make: Callable[[ParseSource], Parse],
        run: Callable[[Callable[[], Any]], Any],
    ) -> _Open:
        # Counted before it is made: many may be made at once.
        opened = _Open(_Making(), num_bytes)
        opened.busy, opened.fed_at_s = True, self._now_s()
        self._open[name] = opened
        self.num_bytes += num_bytes
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._idle_s, self._tick)
        try:
            opened.parse = await run(functools.partial(make, source))
        except BaseException:
            self._drop(name, opened)
            raise
        opened.busy = False
        return opened

    def close(self, names: Sequence[str]) -> None:
        """Forget these; unknown ones are no error."""
        for name in names:
            opened = self._open.get(name)
            if opened is not None:
                self._drop(name, opened)
            else:
                self._closed[name] = 1
                if len(self._closed) > MAX_CLOSED:
                    self._closed.popitem(last=False)

    def sweep(self) -> None:
        """Forget those that nobody has fed for long."""
        idle = [
            name
            for name, opened in self._open.items()
            if not opened.busy and self._now_s() - opened.fed_at_s >= self._idle_s
        ]
        self.close(idle)

    def _tick(self) -> None:
        self._timer = None
        self.sweep()
        if self._open:
            self._timer = asyncio.get_running_loop().call_later(self._idle_s, self._tick)

    def _grow(self, name: str, opened: _Open, num_bytes: int) -> None:
        if self._open.get(name) is opened:  # it may have been closed while it was made
            opened.num_bytes += num_bytes
            self.num_bytes += num_bytes

    def _drop(self, name: str, opened: _Open) -> None:
        if self._open.get(name) is opened:
            del self._open[name]
            self.num_bytes -= opened.num_bytes
            opened.num_bytes = 0


class _Making:
    """Stands in for a parse until it is made."""

    num_tokens = -1

    def feed(self, piece: PieceBody, sizes: Sequence[int]) -> dict[str, Any]:
        raise AssertionError("not made yet")


# -- what vLLM does ----------------------------------------------------------------------------------


class TurnText:
    """The text of a turn, by vLLM's incremental detokenizer, which finds stop strings."""

    def __init__(self, tokenizer: Any, wanted: Any, source: ParseSource) -> None:
        """Args:
        wanted: The request as its parser has adjusted it: marks are not left out of the text.
        """
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        stops: list[str] = [wanted.stop] if isinstance(wanted.stop, str) else list(wanted.stop or ())
        params = SamplingParams(
            stop=stops,
            min_tokens=source.min_tokens,
            max_tokens=None,
            include_stop_str_in_output=wanted.include_stop_str_in_output,
            skip_special_tokens=wanted.skip_special_tokens,
            spaces_between_special_tokens=wanted.spaces_between_special_tokens,
        )
        # Of a whole engine request it reads these.
        request: Any = SimpleNamespace(
            request_id="parse",
            sampling_params=params,
            prompt_token_ids=source.prompt_token_ids,
            prompt_embeds=None,
        )
        self._detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer, request)
        self._held = 0
        if stops and not wanted.include_stop_str_in_output:
            self._held = max(map(len, stops)) - 1
        self._waiting: list[tuple[int, int]] = []
        """Tokens that are not shown yet, and where the text of each ends."""
        self._num_shown = 0
        self.stop: str | None = None
        """The stop string that ended the text."""

    def add(self, piece: PieceBody) -> tuple[str, list[int], int]:
        """``(new text, the tokens it is of, how many tokens of the piece count)``: none after a stop string.

        What may be the start of a stop string is held back by whole tokens: a parser that got text without its tokens would take
        half a mark for content.
        """
        num_taken = 0
        if self.stop is None:
            for at, token in enumerate(piece.token_ids, 1):
                ends = piece.ends_by_token and at == len(piece.token_ids)
                self.stop = self._detokenizer.update([token], ends)
                self._waiting.append((token, len(self._detokenizer.output_text)))
                num_taken += 1
                if self.stop is not None:
                    break
        text: str = self._detokenizer.output_text
        if self.stop is not None or piece.finish_reason is not None:
            ready, end = len(self._waiting), len(text)
        else:
            free = len(text) - self._held
            ready = sum(1 for _, end in self._waiting if end <= free)
            end = self._waiting[ready - 1][1] if ready else self._num_shown
        token_ids = [token for token, _ in self._waiting[:ready]]
        del self._waiting[:ready]
        new, self._num_shown = text[self._num_shown : end], end
        return new, token_ids, num_taken


class VllmParse:
    """A streamed turn.  ``derenderer`` is vLLM's ``OnlineDerenderer``."""

    def __init__(self, derenderer: Any, source: ParseSource) -> None:
        self._derenderer = derenderer
        self._tokenizer = derenderer.renderer.get_tokenizer()
        self._chat = source.kind == "chat"
        self._request = _request(source)
        self._parser = _parser(derenderer, self._request) if self._chat else None
        _check_length(derenderer, source, 0)
        self._room = derenderer.model_config.max_model_len - len(source.prompt_token_ids)
        self._text = TurnText(self._tokenizer, self._request, source)
        self._prompt: list[int] | None = source.prompt_token_ids
        """For the parser's first call: it settles there whether the prompt left reasoning open."""
        self._context: list[int] = []
        self._num_chars = 0
        self._ended = False
        self.num_tokens = 0

    def feed(self, piece: PieceBody, sizes: Sequence[int]) -> dict[str, Any]:
        """``{delta | text, logprobs, stop}`` of new tokens; ``stop`` names the stop string that ends the turn.

        Args:
            sizes: How many tokens each step of the turn made; the last one's have log-probs.
        """
        if sum(sizes) != len(piece.token_ids):
            raise RequestError("must add up to the number of token ids", field="pieces")
        at, answer = 0, {"delta": {}} if self._chat else {"text": ""}
        for size in sizes[:-1]:
            part = self._step(PieceBody(token_ids=piece.token_ids[at : at + size]))
            answer = _joined(answer, part)
            at += size
        last = PieceBody(
            token_ids=piece.token_ids[at:],
            logprobs=piece.logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        return _joined(answer, self._step(last))

    def _step(self, piece: PieceBody) -> dict[str, Any]:
        self.num_tokens += len(piece.token_ids)
        if self.num_tokens > self._room:
            raise RequestError("prompt and output exceed the context length", field="token_ids")
        text, token_ids, num_taken = self._text.add(piece)
        finished = piece.finish_reason is not None or self._text.stop is not None
        answer: dict[str, Any] = {"logprobs": self._logprobs(piece, num_taken), "stop": self._text.stop}
        if self._chat:
            answer["delta"] = {} if self._ended else self._delta(text, token_ids, finished=finished)
        else:
            answer["text"] = text
        self._num_chars += len(text)
        self._ended = self._ended or finished
        return answer

    def _delta(self, text: str, token_ids: list[int], *, finished: bool) -> dict[str, Any]:
        if self._parser is None:
            return {"content": text} if text else {}
        prompt, self._prompt = self._prompt, None
        delta = self._parser.parse_delta(
            text, token_ids, self._request, prompt_token_ids=prompt, finished=finished
        )
        if delta is None:
            return {}
        if self._request.parallel_tool_calls is False:
            delta.tool_calls = [call for call in delta.tool_calls if call.index == 0]
        return delta.model_dump(mode="json", exclude_none=True)

    def _logprobs(self, piece: PieceBody, num_taken: int) -> dict[str, Any] | None:
        context = self._context
        self._context = [*context, *piece.token_ids[:num_taken]][-CONTEXT_TOKENS:]
        if piece.logprobs is None or _hides_reasoning(self._parser, self._request):
            return None
        return _named_logprobs(
            piece.logprobs, num_taken, self._tokenizer, context, None if self._chat else self._num_chars
        )


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two answers as one; the log-probs are those of the second."""
    if "text" in second:
        return {**second, "text": first["text"] + second["text"]}
    delta = {**first["delta"]}
    for name, value in second["delta"].items():
        delta[name] = delta[name] + value if name in delta and name != "role" else value
    return {**second, "delta": delta}


def parse_whole(derenderer: Any, body: WholeBody, *, counts_reasoning: bool) -> dict[str, Any]:
    """A chat answer that came at once: ``{message, logprobs, reasoning_tokens}``; the last is null without a reasoning parser."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatMessage

    _check_length(derenderer, body.source, len(body.token_ids))
    tokenizer = derenderer.renderer.get_tokenizer()
    request = _request(body.source)
    parser = _parser(derenderer, request)
    last = PieceBody(
        token_ids=body.token_ids,
        finish_reason=body.finish_reason or "length",
        stop_reason=body.stop_reason,
    )
    text, token_ids, _ = TurnText(tokenizer, request, body.source).add(last)
    reasoning_tokens: int | None = None
    if parser is None:
        message = ChatMessage(role="assistant", content=text)
    else:
        parser.set_prompt_token_ids(body.source.prompt_token_ids)
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=derenderer.enable_auto_tools, model_output_token_ids=token_ids
        )
        if counts_reasoning:
            reasoning_tokens = parser.count_reasoning_tokens(token_ids)
        message = _message(derenderer, parser, request, reasoning, content, calls or [])
    logprobs = None
    if body.logprobs is not None and not _hides_reasoning(parser, request):
        logprobs = _named_logprobs(body.logprobs, len(token_ids), tokenizer, [], None)
    return {
        "message": message.model_dump(mode="json"),
        "logprobs": logprobs,
        "reasoning_tokens": reasoning_tokens,
    }


def _message(
    derenderer: Any, parser: Any, request: Any, reasoning: str | None, content: str | None, calls: list[Any]
) -> Any:
    """As ``vllm serve`` puts a parsed answer together."""
    from vllm.entrypoints.generate.base.protocol import ToolCall
    from vllm.entrypoints.openai.chat_completion.protocol import ChatMessage
    from vllm.renderers.chat_utils import make_tool_call_id

    choice = request.tool_choice
    forced = choice == "required" or choice not in (None, "none", "auto")
    if forced:
        content = content or ""
    elif choice in (None, "none") or not derenderer.enable_auto_tools or parser.tool_parser_cls is None:
        calls = []
    if request.parallel_tool_calls is False:
        calls = calls[:1]
    return ChatMessage(
        role="assistant",
        reasoning=reasoning if request.include_reasoning else None,
        content=content,
        tool_calls=[ToolCall(id=call.id or make_tool_call_id(), function=call) for call in calls],
    )


def _request(source: ParseSource) -> Any:
    from pydantic import ValidationError
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    kind = ChatCompletionRequest if source.kind == "chat" else CompletionRequest
    try:
        return kind.model_validate(source.request)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"][:4])
        raise RequestError(first["msg"][:500], field=path or "request") from None


def _parser(derenderer: Any, request: Any) -> Any:
    """A parser of this request's own, in the state that vLLM's has; None where none is configured."""
    if derenderer.parser is None:
        return None
    kwargs = internals.chat_template_kwargs(derenderer, request)
    made = [
        derenderer.parser(
            derenderer.renderer.get_tokenizer(),
            request.tools,
            chat_template_kwargs=kwargs,
            model_config=derenderer.model_config,
        )
        for _ in range(2)
    ]
    parser = made[1]
    if (
        parser.always_adjust_request
        or parser.reasoning_parser_cls is not None
        or request.tool_choice != "none"
    ):
        # As when it was rendered: its text keeps the marks, and some parsers read what they noted there.
        made[0].adjust_request(request=request)
    return parser


def _hides_reasoning(parser: Any, request: Any) -> bool:
    """Log-probs would tell what the request wants left out."""
    return parser is not None and not request.include_reasoning


def _check_length(derenderer: Any, source: ParseSource, num_tokens: int) -> None:
    limit = derenderer.model_config.max_model_len
    if len(source.prompt_token_ids) + num_tokens > limit:
        raise RequestError(f"prompt and output exceed the context length of {limit}", field="token_ids")


def _named_logprobs(
    logprobs: dict[str, Any], count: int, tokenizer: Any, context: list[int], text_offset: int | None
) -> dict[str, Any]:
    """Ids as text, in the chat shape, or from ``text_offset`` in that of completions."""
    from pydantic import ValidationError
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateLogProbs

    try:
        given = GenerateLogProbs.model_validate(logprobs)
    except ValidationError:
        raise RequestError("is not what the generate route answers", field="logprobs") from None
    if given.content is not None:
        del given.content[count:]
    return internals.named_logprobs(given, tokenizer, context, text_offset).model_dump(mode="json")
