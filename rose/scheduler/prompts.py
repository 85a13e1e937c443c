"""What token ids a turn starts with.

The first turn of a history is rendered by vLLM's own render route.  A later one *appends*: the ids of the
turn it continues (prompt and sampled output, exactly as they were) plus the *bridge*, the rendered text
between that turn's answer and the point where the next one starts.  Sampled text is never encoded again.

**The bridge.**  Render the new message list with our answer's content replaced by a sentinel, a random
word.  What follows the sentinel in the rendered ids is ``closing + new messages + generation prompt``,
whatever the template does to earlier history (some drop reasoning).  Where the sentinel ends is found by
rendering with two different sentinels (or, where a vocabulary knows neither, with a word of the messages):
their longest common suffix is what follows.  Once a template is known, one render and a search for the
sentinel's ids is enough.  The output may already end with the start of the closing (an end-of-turn token
that was sampled): the longest overlap is left out; a missing end-of-turn token is thereby inserted, with
mask 0.

A system or developer message among the new ones has to show in the bridge: where the template writes it elsewhere, the turn forks.
A template that refuses an answer without its tool calls is bridged by its own growth: the render of the
history, which ends as every answer of this template ends, is a prefix of the render of the whole.  Otherwise the turn *forks*:
it is rendered afresh and starts a branch of its own.  Reasons: ``context`` (tools, template arguments or
model changed), ``history`` (messages rewritten, truncated or reordered, or others from the start), ``branch`` (an answer
continued, or a prompt sampled, a second time), ``ambiguous`` (answers of several turns that nothing in the messages tells apart), ``unbridgeable``,
``template`` (``history = template`` and the template strips what was sampled), ``prompt`` (raw prompts).

Invariant: the ids of a continued turn start with its parent's prompt and output.
Tested against real chat templates in ``tests/scheduler/test_prompts.py``.
"""

from __future__ import annotations

import hashlib
import secrets
import string
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rose.errors import EngineError, RequestError
from rose.scheduler.ids import MAX_TOKEN_ID, pack_ids
from rose.scheduler.lineage import continued
from rose.scheduler.messages import chain, context_digest
from rose.scheduler.trajectory import Trajectory

CallEngine = Callable[[str, str | None, bytes], Awaitable[bytes]]
"""``(path, model, body) -> answer`` on any worker that renders for this model."""

_INSTRUCTS = ("system", "developer")
_MAX_CACHED_TOKENS = 4_000_000
_MAX_CONTEXTS = 1024
_ENGINE_SETS = ("skip_clone", "output_kind")
"""Fields of the rendered sampling parameters that the generate route sets itself."""
NOT_RENDERED = (
    "stream",
    "stream_options",
    "n",
    "user",
    "session_id",
    "metadata",
    "store",
    "request_id",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",  # above the one token that a prompt is rendered with; set on what is sent
    "nvext",
    "cache_salt",
    "priority",
)


# Keys stay in the agent's order: templates write tools out as they came.
_encode = msgspec.json.Encoder().encode


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = {}


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    sampling_params: dict[str, Any]
    features: _Features | None = None
    """Of images, audio or video: their tensors are no tokens, and the prompt is nothing without them."""


@dataclass(frozen=True, slots=True)
class _Route:
    """A render route of an engine, and what it answers: one prompt, or a list with one."""

    path: str
    decode: Callable[[bytes], _Rendered | list[_Rendered]]
    field: str
    """Of the client's request, that the prompt is made of."""

    def read(self, answer: bytes) -> _Rendered:
        try:
            decoded = self.decode(answer)
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineError(f"the render route answered nonsense: {error}") from error
        if not isinstance(decoded, list):
            return _checked(decoded, self.field)
        if len(decoded) != 1:
            raise EngineError(f"the render route made {len(decoded)} prompts of one")
        return _checked(decoded[0], self.field)


_CHAT = _Route("/v1/chat/completions/render", msgspec.json.Decoder(_Rendered).decode, "messages")
_COMPLETION = _Route("/v1/completions/render", msgspec.json.Decoder(list[_Rendered]).decode, "prompt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Where a turn starts.  ``tip_base`` and ``context`` name the message list for the turns to come."""

    token_ids: list[int]
    num_inherited: int
    sampling_params: dict[str, Any]
    parent: int | None = None
    fork: str | None = None
    tip_base: bytes = b""
    context: bytes = b""
    num_continued: int = 0
    """How many of the messages lead up to and include the parent's answer."""


class Prompts:
    """Args:
    call: Reaches an engine's render routes.
    history: ``append`` or ``template``.
    cache_entries: Rendered prompts kept: the members of a group all start with the same one.
    """

    def __init__(self, call: CallEngine, *, history: str = "append", cache_entries: int = 512) -> None:
        self._call = call
        self._history = history
        self._cache: OrderedDict[bytes, _Rendered] = OrderedDict()
        self._cache_entries = cache_entries
        self._cached_tokens = 0
        self._sentinel_ids: OrderedDict[bytes, list[int]] = OrderedDict()
        self._closings: OrderedDict[bytes, list[int]] = OrderedDict()
        self._collapsing: set[bytes] = set()
        """Contexts whose tokenizer makes one unknown token of both sentinels."""
        # Random, so that no agent can put it into its messages; letters, so that no tokenizer merges it
        # with the punctuation or newline of a template; different first and last letters, so that two
        # sentinels share no token at either end.
        alphabet = string.ascii_lowercase[1:-1]
        middle = "".join(secrets.choice(alphabet) for _ in range(10))
        self._sentinels = (f"a{middle}a", f"z{middle[::-1]}z")
        self.num_cache_hits = 0

    # --- chat ------------------------------------------------------------------------------------------

    async def chat(self, trajectory: Trajectory | None, body: Mapping[str, Any]) -> Prompt:
        """The prompt of a chat turn.

        Raises:
            RequestError: The engine refuses the messages.
            EngineError: No engine could render them.
        """
        messages: list[dict[str, Any]] = body["messages"]
        if trajectory is None:
            rendered = await self.render_chat(body)
            return Prompt(
                token_ids=rendered.token_ids, num_inherited=0, sampling_params=dict(rendered.sampling_params)
            )
        context = context_digest(body)
        hashes = chain(context, messages)
        found = continued(trajectory, context, hashes, messages)
        base, parent = found.num_messages, found.turns[0] if len(found.turns) == 1 else None
        fork: str | None = None
        if parent is not None:
            bridged = await self._bridge(trajectory, parent, body, base, context)
            if bridged is not None:
                suffix, params = bridged
                inherited = trajectory.full_ids(parent)
                return Prompt(
                    token_ids=inherited + suffix,
                    num_inherited=len(inherited),
                    sampling_params=params,
                    parent=parent,
                    tip_base=hashes[-1],
                    context=context,
                    num_continued=base,
                )
            fork = "template" if self._history == "template" else "unbridgeable"
        elif found.turns:
            fork = "ambiguous"
        elif trajectory.turns:
            known = any(record.context == context for record in trajectory.turns)
            fork = "history" if known else "context"
            if any(record.tip == b"" for record in trajectory.turns) and not trajectory.tips:
                fork = "prompt"
        rendered = await self.render_chat(body)
        if fork == "history" and _was_sampled(trajectory, context, rendered.token_ids):
            fork = "branch"
        return Prompt(
            token_ids=rendered.token_ids,
            num_inherited=0,
            sampling_params=dict(rendered.sampling_params),
            fork=fork,
            tip_base=hashes[-1],
            context=context,
        )

    async def render_chat(self, body: Mapping[str, Any]) -> _Rendered:
        return await self._rendered(_CHAT, _payload(body))

    async def render_completion(self, body: Mapping[str, Any], prompt: str | Sequence[int]) -> _Rendered:
        return await self._rendered(_COMPLETION, _payload(body) | {"prompt": prompt})

    async def _rendered(self, route: _Route, payload: Mapping[str, Any]) -> _Rendered:
        """What an engine makes of ``payload``, or made of its equal before."""
        data = _encode(payload)
        key = hashlib.blake2b(data, digest_size=16).digest()
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            self.num_cache_hits += 1
            return found
        rendered = route.read(await self._call(route.path, payload.get("model"), data))
        self._remember(key, rendered)
        return rendered

    # --- the bridge ------------------------------------------------------------------------------------

    async def _bridge(
        self, trajectory: Trajectory, parent: int, body: Mapping[str, Any], base: int, context: bytes
    ) -> tuple[list[int], dict[str, Any]] | None:
        """Ids that follow the parent's output, and the sampling parameters; None to fork."""
        messages: list[dict[str, Any]] = body["messages"]
        full = trajectory.full_ids(parent)
        output = full[len(full) - len(trajectory.turns[parent].token_ids) // 4 :]
        if self._history == "template":
            rendered = await self.render_chat(body)
            if rendered.token_ids[: len(full)] != full:
                return None
            return rendered.token_ids[len(full) :], dict(rendered.sampling_params)
        instructs = [at for at in range(base, len(messages)) if messages[at].get("role") in _INSTRUCTS]
        try:
            after, params = await self._after_answer(messages, base, body, context)
            for at in instructs if after is not None else ():
                # A template may write each of them elsewhere, or nowhere: then the whole is rendered, as for a first turn.
                said = [*messages[:at], {**messages[at], "content": self._sentinels[1]}, *messages[at + 1 :]]
                other, _ = await self._after_answer(said, base, body, context)
                if other == after:
                    return None
        except RequestError:
            if instructs:
                return None
            # Some templates want every tool message announced by the call that it answers.
            if not messages[base - 1].get("tool_calls"):
                raise
            after, params = await self._after_calls(messages, base, body, context)
        if after is None:
            return None
        return after[overlap(output, after) :], params

    async def _after_answer(
        self, messages: list[dict[str, Any]], base: int, body: Mapping[str, Any], context: bytes
    ) -> tuple[list[int] | None, dict[str, Any]]:
        def with_answer(word: str) -> dict[str, Any]:
            changed = [*messages[: base - 1], {"role": "assistant", "content": word}, *messages[base:]]
            return {**body, "messages": [_in_place(message) for message in changed]}

        # These prompts are never sent, so the cache would only fill up with them.
        one = await self._render_uncached(with_answer(self._sentinels[0]))
        known = self._sentinel_ids.get(context)
        if known is not None:
            at = _only_index(one.token_ids, known)
            if at is not None:
                return one.token_ids[at + len(known) :], dict(one.sampling_params)
        others = [] if context in self._collapsing else [self._sentinels[1]]
        for word in [*others, *_words(messages)]:
            two = await self._render_uncached(with_answer(word))
            suffix = _common_suffix(one.token_ids, two.token_ids)
            prefix = _common_prefix(one.token_ids, two.token_ids)
            middle = one.token_ids[prefix : len(one.token_ids) - suffix]
            if suffix and middle:
                self._sentinel_ids[context] = middle
                while len(self._sentinel_ids) > _MAX_CONTEXTS:
                    self._sentinel_ids.popitem(last=False)
                return one.token_ids[len(one.token_ids) - suffix :], dict(one.sampling_params)
            if len(self._collapsing) < _MAX_CONTEXTS:
                self._collapsing.add(context)
        return None, {}

    async def _after_calls(
        self, messages: list[dict[str, Any]], base: int, body: Mapping[str, Any], context: bytes
    ) -> tuple[list[int] | None, dict[str, Any]]:
        """For an answer that must keep its tool calls: how this template closes any answer, then what it adds
        to the history when the new messages come."""
        closing = await self._closing(body, context)
        whole = await self._render_uncached(body)
        history = await self._render_uncached(
            {**body, "messages": messages[:base], "add_generation_prompt": False}
        )
        end = len(history.token_ids)
        if not closing or whole.token_ids[:end] != history.token_ids:
            return None, {}
        if history.token_ids[end - len(closing) :] != closing:
            return None, {}
        return closing + whole.token_ids[end:], dict(whole.sampling_params)

    async def _closing(self, body: Mapping[str, Any], context: bytes) -> list[int]:
        """The ids between the last word of an answer and its end; empty where they cannot be told."""
        known = self._closings.get(context)
        if known is not None:
            return known
        one, two = [
            await self._render_uncached(
                {
                    **body,
                    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": word}],
                    "add_generation_prompt": False,
                }
            )
            for word in self._sentinels
        ]
        suffix = _common_suffix(one.token_ids, two.token_ids)
        closing = one.token_ids[len(one.token_ids) - suffix :] if suffix < len(one.token_ids) else []
        self._closings[context] = closing
        while len(self._closings) > _MAX_CONTEXTS:
            self._closings.popitem(last=False)
        return closing

    async def _render_uncached(self, body: Mapping[str, Any]) -> _Rendered:
        payload = _payload(body)
        return _CHAT.read(await self._call(_CHAT.path, payload.get("model"), _encode(payload)))

    def _remember(self, key: bytes, rendered: _Rendered) -> None:
        if self._cache_entries == 0:
            return
        # The members of a group ask for it at once, and each brings it.
        before = self._cache.pop(key, None)
        self._cache[key] = rendered
        self._cached_tokens += len(rendered.token_ids) - (0 if before is None else len(before.token_ids))
        while len(self._cache) > self._cache_entries or self._cached_tokens > _MAX_CACHED_TOKENS:
            _, old = self._cache.popitem(last=False)
            self._cached_tokens -= len(old.token_ids)


def _in_place(message: dict[str, Any]) -> dict[str, Any]:
    """vLLM 0.32 puts what a developer says in front of the conversation, and with it all that a system message says; system messages
    alone it leaves to the template."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _words(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """A few words that this tokenizer may know, unlike a sentinel: a word-level vocabulary has no random
    words."""
    words: list[str] = []
    for message in reversed(messages):
        content = message.get("content")
        if isinstance(content, str):
            for word in content[:2000].split():
                if word not in words and not word.endswith("a") and len(word) < 40:
                    words.append(word)
                    if len(words) == 4:
                        return words
    return words


def _was_sampled(trajectory: Trajectory, context: bytes, token_ids: Sequence[int]) -> bool:
    """Did a turn that continues none begin with this very prompt?"""
    packed = pack_ids(token_ids)
    return any(
        record.parent is None and record.context == context and record.suffix_ids == packed
        for record in trajectory.turns
    )


def continuation(trajectory: Trajectory, token_ids: Sequence[int]) -> tuple[int | None, int]:
    """The turn whose prompt and output ``token_ids`` extends furthest, and how many ids that is."""
    best: tuple[int | None, int] = (None, 0)
    data = pack_ids(token_ids)
    ends: dict[int, int] = {}
    """Of each turn that ``token_ids`` begins with: where, in bytes.  What continues none of these need not be looked at."""
    for record in trajectory.turns:
        start = 0 if record.parent is None else ends.get(record.parent)
        if start is None or not data.startswith(record.suffix_ids, start):
            continue
        start += len(record.suffix_ids)
        if data.startswith(record.token_ids, start):
            ends[record.turn] = start + len(record.token_ids)
            length = trajectory.lengths[record.turn]
            if length >= best[1]:
                best = (record.turn, length)
    return best


def overlap(output: Sequence[int], after: Sequence[int]) -> int:
    """The most ids at the start of ``after`` with which ``output`` already ends.

    Knuth, Morris and Pratt (1977): as many steps as there are ids, for both are long where an agent's tools say much.
    """
    size = min(len(output), len(after))
    back = [0] * size
    """Of each end of a start of ``after``: how long a start of it ends there, too."""
    count = 0
    for at in range(1, size):
        while count and after[at] != after[count]:
            count = back[count - 1]
        count += after[at] == after[count]
        back[at] = count
    count = 0
    for token in output[len(output) - size :]:
        while count and token != after[count]:
            count = back[count - 1]
        count += token == after[count]
    return count


def _common_suffix(one: Sequence[int], two: Sequence[int]) -> int:
    count = 0
    while count < min(len(one), len(two)) and one[-1 - count] == two[-1 - count]:
        count += 1
    return count


def _common_prefix(one: Sequence[int], two: Sequence[int]) -> int:
    count = 0
    while count < min(len(one), len(two)) and one[count] == two[count]:
        count += 1
    return count


def _only_index(ids: Sequence[int], part: Sequence[int]) -> int | None:
    """Where ``part`` occurs in ``ids``, if it does exactly once."""
    found: int | None = None
    size = len(part)
    at = -1
    while True:
        try:
            at = ids.index(part[0], at + 1)
        except ValueError:
            return found
        if list(ids[at : at + size]) == list(part):
            if found is not None:
                return None
            found = at


def _payload(body: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked of a render route.

    Our own limit is set later, on the ids that are really sent; 1 keeps the engine from refusing a prompt whose rendered form is
    longer than what we send, and equal prompts equal in the cache.
    """
    return {key: value for key, value in body.items() if key not in NOT_RENDERED} | {"max_tokens": 1}


def _checked(rendered: _Rendered, field: str) -> _Rendered:
    if rendered.features is not None:
        # Not passed on: a later turn appends to sampled ids, where no render says which range belongs to which picture, and
        # the generate route loses sparse ranges (vLLM 0.32).  A trace without them could not be trained on.
        kinds = ", ".join(sorted(rendered.features.mm_hashes))[:80] or "other"
        raise RequestError(
            f"holds {kinds} input, which is not recorded and so not sampled on; send text only",
            field=field,
            code="multimodal_unsupported",
        )
    if not rendered.token_ids or not 0 <= min(rendered.token_ids) <= max(rendered.token_ids) <= MAX_TOKEN_ID:
        raise EngineError("the render route answered no token ids, or some out of range")
    for field in _ENGINE_SETS:
        rendered.sampling_params.pop(field, None)
    return rendered
