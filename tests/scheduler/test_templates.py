"""Histories as agents really send them back, against the templates of four families.

An agent drops reasoning, writes tool arguments in another order and spacing, says null for empty content, wraps text
in parts, and adds fields of its own client.  None of it may fork, move or double a token; the trainer must then see
every sampled token exactly once.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from tests.scheduler.chat_templates import TEMPLATES, TemplateTokenizer
from tests.scheduler.conftest import user
from tests.scheduler.test_prompts import Bench

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "parameters": {"type": "object", "properties": {"to": {"type": "string"}}},
        },
    }
]
FAMILIES = [("hermes", None), ("qwen3", True), ("qwen3", False), ("llama3", None), ("mistral", None)]
TOKENIZERS: dict[str, TemplateTokenizer] = {}


def tokenizer_of(name: str) -> TemplateTokenizer:
    if name not in TOKENIZERS:
        TOKENIZERS[name] = TemplateTokenizer(name)
    return TOKENIZERS[name]


class Agent:
    """A seeded model and the agent around it; ``messages`` is what the agent sends next."""

    def __init__(self, name: str, thinking: bool | None, seed: int) -> None:
        self.rng = random.Random(seed)
        self.name, self.thinking = name, thinking
        self.tokenizer = tokenizer_of(name)
        self.messages: list[dict[str, Any]] = []
        if self.rng.random() < 0.5 and name != "mistral":
            self.messages.append({"role": "system", "content": "you play"})
        self.messages.append(user("start"))

    def sample(self) -> tuple[list[int], dict[str, Any], bool]:
        """What the model says: its ids, the message that a parser makes of them, and whether it ended its turn."""
        rng = self.rng
        text = rng.choice(["go left", "ok", "world é 世", "a\n\nb", "I see."])
        message: dict[str, Any] = {"role": "assistant", "content": text}
        said = text
        if rng.random() < 0.5:
            num_calls = 1 if self.name == "llama3" else rng.choice([1, 1, 2])
            calls = [
                {
                    "id": f"call{rng.randrange(10_000):05d}",
                    "type": "function",
                    "function": {
                        "name": "move",
                        "arguments": json.dumps({"to": rng.choice("lrud"), "n": [1, {"k": 2}]}),
                    },
                }
                for _ in range(num_calls)
            ]
            said = rng.choice(["", text]) if self.name in ("hermes", "qwen3") else ""
            message = {"role": "assistant", "content": said or None, "tool_calls": calls}
            said += "".join(f"\n<tool_call>\n{json.dumps(c['function'])}\n</tool_call>" for c in calls)
        if self.thinking:
            message["reasoning"] = "hm, let me see"
            said = f"<think>\nhm, let me see\n</think>\n\n{said}"
        ended = rng.random() < 0.7
        ids = self.drifted(said)
        return [*ids, self.tokenizer.eos_id] if ended else ids, message, ended

    def drifted(self, text: str) -> list[int]:
        """``text`` in ids that no tokenizer would choose: cut at random places first."""
        ids: list[int] = []
        while text:
            size = self.rng.randint(1, 6)
            ids += self.tokenizer.encode(text[:size])
            text = text[size:]
        return ids

    def resend(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as agents give it back."""
        rng = self.rng
        back = json.loads(json.dumps(message))
        if rng.random() < 0.5:
            back.pop("reasoning", None)
        elif "reasoning" in back and rng.random() < 0.5:
            back["reasoning_content"] = back.pop("reasoning")
        if not back.get("content"):
            back["content"] = rng.choice([None, ""])
            if rng.random() < 0.3:
                del back["content"]
        elif rng.random() < 0.3:
            back["content"] = [{"type": "text", "text": back["content"]}]
        for call in back.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            shuffled = dict(rng.sample(list(arguments.items()), len(arguments)))
            call["function"]["arguments"] = json.dumps(shuffled, indent=rng.choice([None, 1]))
        if rng.random() < 0.5:
            back |= {"refusal": None, "annotations": [], "audio": None, "function_call": None}
        return dict(rng.sample(list(back.items()), len(back)))

    def go_on(self, message: dict[str, Any]) -> None:
        self.messages.append(self.resend(message))
        for call in message.get("tool_calls", []):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": '{"at": "2, 1"}'})
        if not message.get("tool_calls"):
            self.messages.append(user(self.rng.choice(["more", "and now?", "é 世"])))

    def body(self) -> dict[str, Any]:
        kwargs = {} if self.thinking is None else {"chat_template_kwargs": {"enable_thinking": self.thinking}}
        return {"tools": TOOLS, **kwargs}


async def play(agent: Agent, bench: Bench, num_turns: int) -> list[bool]:
    """Run a conversation; whether each turn ended by itself."""
    ended_by_itself: list[bool] = []
    for _ in range(num_turns):
        output, message, ended = agent.sample()
        await bench.turn(agent.messages, output, message, **agent.body())
        ended_by_itself.append(ended)
        agent.go_on(message)
    return ended_by_itself


def trained_tokens(bench: Bench) -> Counter[tuple[int, ...]]:
    """How often the trainer's own code trains each sampled token; named by all ids up to it."""
    batch = pytest.importorskip("rose.train.batch")
    trace = bench.trajectory.trace("finished")
    for turn in trace["turns"]:
        turn |= {
            "logprobs": [-1.0] * len(turn["token_ids"]),
            "versions": [["0.0", 0, len(turn["token_ids"])]],
        }
        turn["sampling"] = {"temperature": 1.0}
    samples = batch.samples_of({**trace, "reward": 1.0}, vocab_size=10_000, max_tokens=100_000)
    counted: Counter[tuple[int, ...]] = Counter()
    for sample in samples:
        for position in sample.positions:
            counted[tuple(sample.token_ids[: position + 1])] += 1
    return counted


def sampled_tokens(bench: Bench) -> Counter[tuple[int, ...]]:
    counted: Counter[tuple[int, ...]] = Counter()
    for record in bench.trajectory.turns:
        full, start = bench.trajectory.full_ids(record.turn), len(bench.trajectory.prompt_ids(record.turn))
        for position in range(start, len(full)):
            counted[tuple(full[: position + 1])] += 1
    return counted


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("name", "thinking"), FAMILIES)
async def test_resent_histories_append_and_every_token_is_trained_once(
    name: str, thinking: bool | None, seed: int
) -> None:
    agent = Agent(name, thinking, seed)
    bench = Bench(agent.tokenizer)
    ended = await play(agent, bench, 6)

    trajectory = bench.trajectory
    assert [turn.fork for turn in trajectory.turns] == [None] * 6
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1, 2, 3, 4]
    for turn in range(1, 6):
        history, prompt = trajectory.full_ids(turn - 1), trajectory.prompt_ids(turn)
        assert prompt[: len(history)] == history
        # One end of turn between an answer and what follows it: the model's own, or ours with mask 0.
        eos = agent.tokenizer.eos_id
        assert (prompt[len(history)] == eos) is not ended[turn - 1]
    assert trained_tokens(bench) == sampled_tokens(bench)
    assert set(sampled_tokens(bench).values()) == {1}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_new_messages_follow_as_the_template_writes_them(name: str, seed: int) -> None:
    """Text of the suffix = the end of a full render, from the end of the answer on."""
    agent = Agent(name, True if name == "qwen3" else None, seed)
    bench = Bench(agent.tokenizer)
    await play(agent, bench, 4)
    trajectory = bench.trajectory
    output, message, _ = agent.sample()
    prompt = await bench.turn(agent.messages, output, message, **agent.body())
    suffix = agent.tokenizer.text(prompt.token_ids[prompt.num_inherited :])
    whole = agent.tokenizer.text(
        agent.tokenizer.chat({"messages": agent.messages, "add_generation_prompt": True, **agent.body()})
    )
    assert whole.endswith(suffix)
    new = agent.messages[max(i for i, m in enumerate(agent.messages) if m["role"] == "assistant") + 1 :]
    assert all(m["content"] in suffix.replace('\\"', '"') for m in new)
    assert trajectory.turns[-1].fork is None


@pytest.mark.parametrize("seed", range(6))
async def test_template_history_forks_only_where_reasoning_is_stripped(seed: int) -> None:
    agent = Agent("qwen3", True, seed)
    bench = Bench(agent.tokenizer, history="template")
    await play(agent, bench, 6)
    for record in bench.trajectory.turns:
        assert (record.parent is None) == (record.fork is not None or record.turn == 0)
        assert record.fork in (None, "template")
    assert any(record.fork == "template" for record in bench.trajectory.turns)
    assert trained_tokens(bench) == sampled_tokens(bench)
