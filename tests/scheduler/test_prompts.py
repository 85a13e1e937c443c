"""Prompts: appending to a conversation, against real tokenizers and chat templates.

The tokenizer is a real byte-level BPE, trained here on a few lines; the templates are the shapes of the common
families, the reasoning-stripping one included.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.errors import RequestError
from rose.scheduler.ids import pack_ids, unpack_ids
from rose.scheduler.messages import chain, context_digest, extend
from rose.scheduler.prompts import Prompt, Prompts, continuation, overlap
from rose.scheduler.records import CreateRecord, TurnRecord
from rose.scheduler.trajectory import Trajectory
from rose.testing.toy_tokenizer import HFTokenizer, Tokenizer, ToyTokenizer
from tests.scheduler.conftest import user

transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    # Drops the reasoning of all answers before the last user message, as Qwen3 does.
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set c = m.content or '' %}"
    "{% if m.role == 'assistant' %}{% if loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ c.split('</think>')[-1].lstrip('\n') }}{% else %}{{ c }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
LLAMA = (
    "<|bos|>{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ (m.content or '') | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
MISTRAL = (
    # Wants every tool message announced by a call, and has no generation prompt.
    "<|bos|>{% set ns = namespace(calls=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}{% if ns.calls == 0 %}{{ raise_exception('tool without call') }}{% endif %}"
    "[TOOL_RESULTS] {{ m.content }} [/TOOL_RESULTS]"
    "{% else %}{% if m.tool_calls %}{% set ns.calls = 1 %}[TOOL_CALLS] {{ m.tool_calls | tojson }}"
    "{% else %}{{ m.content or '' }}{% endif %}<|eot|>{% endif %}{% endfor %}"
)
FIRST_ONLY = (
    # Writes what any system message says in front.
    "{% for m in messages %}{% if m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_OF_TWO = (
    # Of system messages one behind the other the last alone is written.
    "{% for m in messages %}{% if m.role != 'system' or loop.last or loop.nextitem.role != 'system' %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "llama": LLAMA, "mistral": MISTRAL}
SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]


@pytest.fixture(scope="session", params=["toy", *TEMPLATES])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return ToyTokenizer() if request.param == "toy" else hf(request.param)


def hf(name: str) -> HFTokenizer:
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, pre_tokenizers, trainers

    raw = Raw(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    corpus = ["you are standing on a frozen lake, go left or right, up or down. \n\n user assistant tool"] * 9
    raw.train_from_iterator(corpus, trainer)
    eos = "<|eot|>" if name in ("llama", "mistral") else "<|im_end|>"
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos)
    wrapped.add_special_tokens({"additional_special_tokens": SPECIAL})
    wrapped.chat_template = (
        TEMPLATES | {"first_only": FIRST_ONLY, "refusing": REFUSING, "last_of_two": LAST_OF_TWO}
    )[name]
    return HFTokenizer(wrapped)


def as_vllm_reads(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """vLLM 0.32: once there is a developer message, it and all system messages are one in front."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    said = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    rest = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(said)}, *rest]


class Bench:
    """A trajectory driven by hand: what the routes do, without HTTP."""

    def __init__(self, tokenizer: Tokenizer, history: str = "append") -> None:
        self.tokenizer = tokenizer
        self.num_renders = 0
        self.prompts = Prompts(self._call, history=history)
        self.trajectory = Trajectory(
            CreateRecord(id="t", job="j", group_id="g", group_size=1, created_at=0.0)
        )

    async def _call(self, path: str, model: str | None, body: bytes) -> bytes:
        self.num_renders += 1
        decoded = msgspec.json.decode(body)
        if decoded.get("add_generation_prompt") is None:
            decoded["add_generation_prompt"] = True
        decoded["messages"] = as_vllm_reads(decoded["messages"])
        try:
            ids = self.tokenizer.chat(decoded)
        except Exception as error:
            raise RequestError(str(error)) from error
        return msgspec.json.encode(
            {"token_ids": ids, "sampling_params": {"temperature": 1.0, "skip_clone": True}}
        )

    async def turn(
        self, messages: list[dict[str, Any]], output: Sequence[int], answer: dict[str, Any], **body: Any
    ) -> Prompt:
        """One turn: its prompt, then pretend that the model said ``output``."""
        prompt = await self.prompts.chat(self.trajectory, {"messages": messages, **body})
        self.trajectory.add(
            TurnRecord(
                trajectory_id="t",
                turn=len(self.trajectory.turns),
                kind="chat",
                parent=prompt.parent,
                fork=prompt.fork,
                suffix_ids=pack_ids(prompt.token_ids[prompt.num_inherited :]),
                token_ids=pack_ids(output),
                logprobs=b"",
                finish_reason="stop",
                versions=[],
                segments=[],
                usage={},
                timing={},
                sampling={},
                tip=extend(prompt.tip_base, answer),
                context=prompt.context,
            )
        )
        return prompt


WORDS = st.text(alphabet="abcdefgh ijkl.,!?\n<>[]{}é世", min_size=1, max_size=24).map(str.strip).filter(bool)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(texts=st.lists(st.tuples(WORDS, WORDS), min_size=2, max_size=4), data=st.data())
@pytest.mark.asyncio
async def test_sampled_ids_stay_in_place_whatever_the_template_does(
    tokenizer: Tokenizer, texts: list[tuple[str, str]], data: st.DataObject
) -> None:
    bench = Bench(tokenizer)
    messages: list[dict[str, Any]] = []
    history: list[int] = []
    for question, said in texts:
        messages.append(user(question))
        # Any ids at all: a model does not sample what its tokenizer would encode.
        words = data.draw(st.lists(st.sampled_from(list(tokenizer.word_ids)), max_size=6))
        output = [*words, *data.draw(st.sampled_from([[], [tokenizer.eos_id]]))] or [tokenizer.eos_id]
        answer = {"role": "assistant", "content": said}
        prompt = await bench.turn(messages, output, answer)
        assert prompt.fork is None
        assert prompt.token_ids[: len(history)] == history
        history = prompt.token_ids + output
        messages.append(answer)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(texts=st.lists(st.tuples(WORDS, WORDS), min_size=2, max_size=4))
@pytest.mark.asyncio
async def test_accumulated_ids_equal_a_full_render_where_they_must(
    tokenizer: Tokenizer, texts: list[tuple[str, str]]
) -> None:
    """For templates that do not rewrite history, when the model samples what would be encoded."""
    if getattr(getattr(tokenizer, "_tokenizer", None), "chat_template", None) == THINKING:
        return  # false by construction there
    bench = Bench(tokenizer)
    messages: list[dict[str, Any]] = []
    for question, said in texts:
        messages.append(user(question))
        whole = tokenizer.chat({"messages": messages})
        answer = {"role": "assistant", "content": said}
        closed = tokenizer.chat({"messages": [*messages, answer], "add_generation_prompt": False})
        if closed[: len(whole)] != whole or tokenizer.eos_id not in closed[len(whole) :]:
            return  # this text merges with the template's own: not a well-behaved case
        output = closed[len(whole) : len(whole) + closed[len(whole) :].index(tokenizer.eos_id) + 1]
        prompt = await bench.turn(messages, output, answer)
        assert prompt.token_ids == whole
        messages.append(answer)


async def test_one_render_per_turn_once_the_template_is_known(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    messages: list[dict[str, Any]] = []
    for number in range(5):
        messages.append(user(f"say {number}"))
        answer = {"role": "assistant", "content": "ok"}
        await bench.turn(messages, [*tokenizer.encode("ok"), tokenizer.eos_id], answer)
        messages.append(answer)
    assert bench.num_renders == 1 + 2 + 3  # the first prompt, learning, then one each


async def test_a_missing_end_token_is_inserted_in_every_turn() -> None:
    tokenizer = hf("chatml")
    bench = Bench(tokenizer)
    messages: list[dict[str, Any]] = []
    text = ""
    for number in range(4):  # the first learns the template, the later ones use what was learnt
        messages.append(user(f"q{number}"))
        answer = {"role": "assistant", "content": "cut of"}
        prompt = await bench.turn(messages, tokenizer.encode("cut of"), answer)
        text += f"<|im_start|>user\nq{number}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer._tokenizer.decode(prompt.token_ids) == text
        text += "cut of<|im_end|>\n"
        messages.append(answer)


async def test_a_vocabulary_that_knows_no_random_word_is_bridged() -> None:
    class WordLevel(ToyTokenizer):
        """``w0`` .. ``w99`` and specials; anything else is one unknown token, both sentinels included."""

        words = ("<unk>", "<eos>", "<user>", "<assistant>", *(f"w{n}" for n in range(100)))
        eos_id = 1

        def encode(self, text: str) -> list[int]:
            return [self.words.index(word) if word in self.words else 0 for word in text.split()]

        def chat(self, body: Any) -> list[int]:
            text = "".join(f" <{m['role']}> {m['content']} <eos>" for m in body["messages"])
            return self.encode(text + (" <assistant>" if body.get("add_generation_prompt", True) else ""))

    tokenizer = WordLevel()
    bench = Bench(tokenizer)
    messages: list[dict[str, Any]] = []
    for number in range(4):
        messages.append(user(f"w{number} odd w7" if number == 2 else f"w{number} w7"))
        answer = {"role": "assistant", "content": "w5"}
        prompt = await bench.turn(messages, [*tokenizer.encode("w5"), 1], answer)
        assert prompt.fork is None
        assert prompt.token_ids == tokenizer.chat({"messages": messages})
        messages.append(answer)


async def test_the_templates_separator_between_turns_is_never_lost() -> None:
    tokenizer = hf("chatml")
    bench = Bench(tokenizer)
    answer = {"role": "assistant", "content": "ok"}
    await bench.turn([user("a")], [*tokenizer.encode("ok"), tokenizer.eos_id], answer)
    prompt = await bench.turn([user("a"), answer, user("b")], [tokenizer.eos_id], answer)
    text = tokenizer._tokenizer.decode(prompt.token_ids)
    assert text == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", ["chatml", "llama", "mistral"])
async def test_tool_calls_come_back_reordered_and_still_append(name: str) -> None:
    tokenizer = hf(name)
    bench = Bench(tokenizer)
    call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "move", "arguments": '{"a": 1, "b": [2]}'},
    }
    sent = {"role": "assistant", "content": None, "tool_calls": [call]}
    output = [*tokenizer.encode('{"a": 1, "b": [2]}'), tokenizer.eos_id]
    first = await bench.turn([user("go")], output, sent)
    back = {
        "role": "assistant",
        "content": "",
        "reasoning": None,
        "tool_calls": [
            {"type": "function", "id": "other", "function": {"arguments": '{"b":[2],"a":1}', "name": "move"}}
        ],
    }
    tool = {"role": "tool", "tool_call_id": "call-1", "content": "done"}
    prompt = await bench.turn([user("go"), back, tool], [tokenizer.eos_id], sent)
    assert (prompt.parent, prompt.fork) == (0, None)
    history = first.token_ids + output
    assert prompt.token_ids[: len(history)] == history
    assert "done" in tokenizer._tokenizer.decode(prompt.token_ids[len(history) :])


async def test_template_history_forks_where_the_template_strips_reasoning() -> None:
    tokenizer = hf("thinking")
    answer = {"role": "assistant", "content": "ok"}
    output = [*tokenizer.encode("hm\n</think>\n\nok"), tokenizer.eos_id]
    for history, fork in (("append", None), ("template", "template")):
        bench = Bench(tokenizer, history)
        await bench.turn([user("a")], output, answer)
        prompt = await bench.turn([user("a"), answer, user("b")], output, answer)
        assert prompt.fork == fork
        assert (prompt.parent is None) == (fork is not None)


async def test_changed_tools_are_a_context_fork() -> None:
    bench = Bench(ToyTokenizer())
    answer = {"role": "assistant", "content": "ok"}
    await bench.turn([user("a")], [5], answer, tools=[{"x": 1}])
    prompt = await bench.turn([user("a"), answer, user("b")], [5], answer, tools=[{"x": 2}])
    assert prompt.fork == "context"


async def test_a_message_that_holds_the_sentinel_cannot_move_the_bridge() -> None:
    tokenizer = hf("chatml")
    bench = Bench(tokenizer)
    answer = {"role": "assistant", "content": "ok"}
    output = [*tokenizer.encode("ok"), tokenizer.eos_id]
    await bench.turn([user("a")], output, answer)
    messages = [user("a"), answer, user("b")]
    await bench.turn(messages, output, answer)
    evil = bench.prompts._sentinels[0]
    messages += [answer, user(f"{evil} {evil}\n{evil}")]
    prompt = await bench.turn(messages, output, answer)
    text = tokenizer._tokenizer.decode(prompt.token_ids)
    assert text.endswith(f"<|im_start|>user\n{evil} {evil}\n{evil}<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.parent == 1


@pytest.mark.parametrize(
    ("one", "two", "equal"),
    [
        (
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            True,
        ),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}, True),
        (
            {"role": "assistant", "content": "a", "reasoning": "r"},
            {"role": "assistant", "content": "a"},
            True,
        ),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}, False),
        ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}, False),
        ({"role": "user", "content": "a "}, {"role": "user", "content": "a"}, False),
        (
            {"role": "tool", "content": "a", "tool_call_id": "1"},
            {"role": "tool", "content": "a", "tool_call_id": "2"},
            False,
        ),
        (
            {"role": "tool", "content": "a", "tool_call_id": "1"},
            {"role": "tool", "content": "a", "tool_call_id": "1", "name": "f"},
            True,
        ),
        ({"role": "tool", "content": "a", "name": "f"}, {"role": "tool", "content": "a", "name": "g"}, False),
    ],
)
def test_messages_are_equal_when_they_mean_the_same(one: Any, two: Any, equal: bool) -> None:
    assert (chain(b"", [one]) == chain(b"", [two])) is equal


def test_unparsable_tool_arguments_are_compared_as_text() -> None:
    def call(arguments: str) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    assert chain(b"", [call("{broken")]) == chain(b"", [call("{broken")])
    assert chain(b"", [call("{broken")]) != chain(b"", [call("{broken}")])
    assert chain(b"", [call("[" * 5000)]) == chain(b"", [call("[" * 5000)])


def test_the_context_ignores_what_does_not_shape_history() -> None:
    base = {"model": "m", "messages": []}
    assert context_digest(base) == context_digest(
        {**base, "temperature": 1, "tools": [], "tool_choice": "auto"}
    )
    assert context_digest(base) != context_digest({**base, "tools": [json.loads('{"a":1}')]})


@given(output=st.lists(st.integers(0, 2), max_size=8), after=st.lists(st.integers(0, 2), max_size=8))
def test_overlap_is_the_longest(output: list[int], after: list[int]) -> None:
    found = overlap(output, after)
    sizes = [n for n in range(1, min(len(output), len(after)) + 1) if output[-n:] == after[:n]]
    assert found == max(sizes, default=0)


class Counted(int):
    """An id that counts how often ids are compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.num_compared += 1
        return int.__eq__(self, int(other)) if isinstance(other, int) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def test_overlap_takes_steps_in_proportion_to_the_ids() -> None:
    """A long answer that looks like the start of what comes after it, but for its last id."""
    output, after = [Counted(1)] * 3999 + [Counted(2)], [Counted(1)] * 4000
    Counted.num_compared = 0

    assert overlap(output, after) == 0
    assert Counted.num_compared < 6 * len(output)


# What vLLM 0.32 renders of a message with an image (its own classes wrote this).
WITH_IMAGE = (
    b'{"request_id":"r","token_ids":[5,9,9,6],"token_offsets":null,"features":{"mm_hashes":{"image":["a1"]},'
    b'"mm_placeholders":{"image":[{"offset":1,"length":2}]},"kwargs_data":{"image":["AAAA"]},"mm_metadata":null},'
    b'"content_parts":null,"sampling_params":{"stop":[],"stop_token_ids":[],"max_tokens":1,"bad_words":[],'
    b'"skip_reading_prefix_cache":false},"model":null}'
)


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_a_prompt_that_is_not_all_tokens_is_refused_by_name(kind: str) -> None:
    async def call(path: str, model: str | None, body: bytes) -> bytes:
        return WITH_IMAGE if kind == "chat" else b"[" + WITH_IMAGE + b"]"

    prompts = Prompts(call)
    made = (
        prompts.chat(None, {"messages": [user("see")]})
        if kind == "chat"
        else prompts.render_completion({}, "see")
    )
    with pytest.raises(RequestError, match=r"image.*text") as refused:
        await made
    assert (refused.value.status, refused.value.code) == (400, "multimodal_unsupported")
    assert refused.value.field == ("messages" if kind == "chat" else "prompt")


MIDDLE = [
    [{"role": "developer", "content": "remember"}],
    [{"role": "system", "content": "remember"}],
    [{"role": "developer", "content": "be brief"}, {"role": "system", "content": "remember"}],
]


@pytest.mark.parametrize("middle", MIDDLE, ids=["developer", "system", "both"])
@pytest.mark.parametrize("name", ["chatml", "llama", "first_only"])
async def test_what_is_said_to_the_model_in_the_middle_reaches_it(
    name: str, middle: list[dict[str, Any]]
) -> None:
    bench = Bench(hf(name))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "you"}, user("left or right")]
    answer = {"role": "assistant", "content": "left"}
    await bench.turn(messages, bench.tokenizer.encode("left"), answer)
    prompt = await bench.turn([*messages, answer, *middle, user("up")], [5], answer)
    text = bench.tokenizer.decode(prompt.token_ids)
    assert all(message["content"] in text for message in middle)
    assert text.count("remember") == 1
    if name == "first_only":  # the whole is rendered anew
        assert (prompt.parent, prompt.fork) == (None, "unbridgeable")
    else:
        assert (prompt.parent, prompt.fork) == (0, None)
        assert text.index("left") < text.index("remember") < text.index("up")


async def test_a_template_that_drops_one_of_two_forks() -> None:
    bench = Bench(hf("last_of_two"))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "you"}, user("left or right")]
    answer = {"role": "assistant", "content": "left"}
    await bench.turn(messages, bench.tokenizer.encode("left"), answer)
    both = [{"role": "system", "content": "remember"}, {"role": "system", "content": "be brief"}]
    prompt = await bench.turn([*messages, answer, *both, user("up")], [5], answer)
    assert (prompt.parent, prompt.fork) == (None, "unbridgeable")


async def test_a_template_that_takes_it_only_in_front_gets_the_developers_word_there() -> None:
    bench = Bench(hf("refusing"))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "you"}, user("left or right")]
    answer = {"role": "assistant", "content": "left"}
    await bench.turn(messages, bench.tokenizer.encode("left"), answer)
    said = {"role": "developer", "content": "remember"}
    prompt = await bench.turn([*messages, answer, said, user("up")], [5], answer)
    assert (prompt.parent, prompt.fork) == (None, "unbridgeable")
    assert "remember" in bench.tokenizer.decode(prompt.token_ids)


async def test_a_group_that_asks_for_one_prompt_at_once_leaves_one_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rose.scheduler.prompts._MAX_CACHED_TOKENS", 40)

    async def call(path: str, model: str | None, body: bytes) -> bytes:
        await asyncio.sleep(0)  # meanwhile the others ask, too
        return msgspec.json.encode([{"token_ids": [5] * 10, "sampling_params": {}}])

    prompts = Prompts(call)
    for group in range(20):
        await asyncio.gather(*(prompts.render_completion({}, f"group {group}") for _ in range(16)))
    before = prompts.num_cache_hits
    for group in range(16, 20):
        await prompts.render_completion({}, f"group {group}")
    assert prompts.num_cache_hits - before == 4  # of 10 tokens each


def grown(parents: Sequence[int | None], parts: Sequence[tuple[list[int], list[int]]]) -> Trajectory:
    """A tree of turns, each with what its prompt adds and what it said."""
    trajectory = Trajectory(CreateRecord(id="t", job="j", group_id="g", group_size=1, created_at=0.0))
    for turn, (parent, (suffix, output)) in enumerate(zip(parents, parts, strict=True)):
        trajectory.add(
            TurnRecord(
                trajectory_id="t",
                turn=turn,
                kind="tokens",
                parent=parent,
                suffix_ids=pack_ids(suffix),
                token_ids=pack_ids(output),
                logprobs=b"",
                finish_reason="stop",
                versions=[],
                segments=[],
                usage={},
                timing={},
                sampling={},
            )
        )
    return trajectory


@pytest.mark.parametrize("seed", range(20))
def test_tokens_continue_the_longest_turn_that_they_begin_with_the_newest_of_equals(seed: int) -> None:
    rng = random.Random(seed)
    parents = [rng.choice([None, *range(turn)]) if turn else None for turn in range(30)]
    parts = [([rng.randrange(2)] * rng.randint(1, 2), [rng.randrange(2)]) for _ in parents]
    trajectory = grown(parents, parts)
    for _ in range(50):
        asked = [*trajectory.full_ids(rng.randrange(30)), *(rng.randrange(2) for _ in range(3))]
        asked = asked[rng.randrange(2) :]
        begun = [turn for turn in range(30) if asked[: trajectory.lengths[turn]] == trajectory.full_ids(turn)]
        longest = max(begun, key=lambda turn: (trajectory.lengths[turn], turn), default=None)
        length = 0 if longest is None else trajectory.lengths[longest]
        assert continuation(trajectory, asked) == (longest, length)


def test_tokens_that_continue_nothing_are_compared_where_they_differ_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trajectory = grown([None] * 50, [([turn, *range(200)], [1, 2]) for turn in range(50)])
    asked = [99, *range(400)]
    unpacked: list[int] = []

    def count(data: bytes) -> list[int]:
        unpacked.append(len(data))
        return unpack_ids(data)

    monkeypatch.setattr("rose.scheduler.trajectory.unpack_ids", count)
    assert continuation(trajectory, asked) == (None, 0)
    assert unpacked == []
