"""Chat and completions: histories, forks, sampling, stop strings."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from rose.testing.fake_engine import Fault
from tests.scheduler.conftest import World, user


async def test_a_conversation_appends_and_never_encodes_sampled_text_again(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    session = await world.trajectory(sampling={"temperature": 0.7})
    messages: list[dict[str, Any]] = [user("hello")]
    for number in range(4):
        answer = await world.chat(session, messages, max_tokens=30)
        messages += [answer["choices"][0]["message"], user(f"go on {number}")]
    trace = await world.ok("GET", f"/rose/v1/trajectories/{session}")
    turns = trace["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, 1, 2]
    assert [turn["fork"] for turn in turns] == [None] * 4
    for before, after in pairwise(turns):
        history = before["prompt_token_ids"] + before["token_ids"]
        assert after["prompt_token_ids"][: len(history)] == history
    last = turns[-1]
    assert last["sampled"][-1] == [len(last["prompt_token_ids"]), len(last["token_ids"]), 3]
    ids = last["prompt_token_ids"] + last["token_ids"]
    for start, count, turn in last["sampled"]:
        assert ids[start : start + count] == turns[turn]["token_ids"]
    # Well-behaved tokenizer: what was accumulated is what rendering the whole would give, wherever the
    # model ended its turns itself.
    if all(turn["finish_reason"] == "stop" for turn in turns[:-1]):
        assert last["prompt_token_ids"] == engine.tokenizer.chat({"messages": messages[:-2]})
    assert last["sampling"]["temperature"] == 0.7
    assert trace["branches"] == [3]


async def test_a_turn_cut_by_length_gets_its_missing_end_token(world: World) -> None:
    await world.start()
    await world.add("a", mean_tokens=10_000)
    session = await world.trajectory()
    first = await world.chat(session, [user("hi")], max_tokens=3)
    message = first["choices"][0]["message"]
    await world.chat(session, [user("hi"), message, user("more")], max_tokens=3)
    turns = (await world.ok("GET", f"/rose/v1/trajectories/{session}"))["turns"]
    whole = turns[1]["prompt_token_ids"]
    bridge = whole[len(turns[0]["prompt_token_ids"]) + 3 :]
    assert bridge[0] == 2  # IM_END, with mask 0
    assert turns[1]["sampled"][0] == [len(turns[0]["prompt_token_ids"]), 3, 0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: [user("HELLO"), *m[1:]], "history"),
        (lambda m: [{"role": "system", "content": "date"}, *m], "history"),
        (lambda m: [m[0], {"role": "assistant", "content": "not what was said"}, m[2]], "history"),
    ],
)
async def test_rewritten_history_forks_with_a_reason(world: World, change: Any, reason: str) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    first = await world.chat(session, [user("hello")], max_tokens=8)
    messages = [user("hello"), first["choices"][0]["message"], user("next")]
    answer = await world.chat(session, change(messages), max_tokens=8)
    assert answer["rose"]["fork"] == reason
    turns = (await world.ok("GET", f"/rose/v1/trajectories/{session}"))["turns"]
    assert turns[1]["parent"] is None
    assert turns[1]["fork"] == reason


async def test_a_second_continuation_of_one_answer_is_a_branch(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    first = await world.chat(session, [user("hello")], max_tokens=8)
    base = [user("hello"), first["choices"][0]["message"]]
    for text in ("left", "right"):
        await world.chat(session, [*base, user(text)], max_tokens=8)
    trace = await world.ok("GET", f"/rose/v1/trajectories/{session}")
    assert [turn["parent"] for turn in trace["turns"]] == [None, 0, 0]
    assert [turn["fork"] for turn in trace["turns"]] == [None, None, "branch"]
    assert trace["branches"] == [1, 2]


async def test_a_prompt_that_is_sampled_again_is_a_branch(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    first = await world.chat(session, [user("hello")], max_tokens=8)
    await world.chat(session, [user("hello"), first["choices"][0]["message"], user("on")], max_tokens=8)
    again = await world.chat(session, [user("hello")], max_tokens=8)
    await world.chat(session, [user("hello")], max_tokens=8, n=2)
    other = await world.chat(session, [user("another")], max_tokens=8)
    assert (again["rose"]["fork"], other["rose"]["fork"]) == ("branch", "history")
    trace = await world.ok("GET", f"/rose/v1/trajectories/{session}")
    assert [turn["parent"] for turn in trace["turns"]] == [None, 0, None, None, None, None]
    assert [turn["fork"] for turn in trace["turns"]] == [None, None, "branch", "branch", "branch", "history"]
    assert world.scheduler.status.forks == {"branch": 3, "history": 1}


async def test_equal_prompts_are_rendered_once(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    for _ in range(5):
        session = await world.trajectory()
        await world.chat(session, [user("the same map")], max_tokens=4)
    assert engine.num_renders == 1


async def test_the_trajectory_sampling_wins_over_the_agents(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    session = await world.trajectory(sampling={"allowed_token_ids": [100, 101], "max_tokens": 3})
    await world.chat(session, [user("x")], max_completion_tokens=50, temperature=0)
    params = engine.requests[-1]["sampling_params"]
    assert (params["allowed_token_ids"], params["max_tokens"]) == ([100, 101], 3)
    turn = (await world.ok("GET", f"/rose/v1/trajectories/{session}"))["turns"][0]
    assert set(turn["token_ids"]) <= {100, 101}
    assert turn["sampling"]["allowed_token_ids"] == [100, 101]
    assert all(logprob <= 0 for logprob in turn["logprobs"])


async def test_a_base_url_alone_binds_a_trajectory(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    body = {"model": "gpt-4o", "messages": [user("x")], "max_tokens": 4}
    await world.ok("POST", f"/s/{session}/v1/chat/completions", body)
    assert len((await world.ok("GET", f"/rose/v1/trajectories/{session}"))["turns"]) == 1


async def test_n_choices_are_n_turns(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    answer = await world.chat(session, [user("x")], max_tokens=4, n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["rose"]["turns"] == [0, 1, 2]


async def test_logprobs_are_parsed_when_asked_for(world: World) -> None:
    await world.start()
    await world.add("a")
    plain = await world.chat(None, [user("x")], max_tokens=4)
    assert not plain["choices"][0]["logprobs"]
    asked = await world.chat(None, [user("x")], max_tokens=4, logprobs=True, return_token_ids=True)
    content = asked["choices"][0]["logprobs"]["content"]
    assert len(content) == asked["usage"]["completion_tokens"] == len(asked["choices"][0]["token_ids"])


async def test_text_ends_before_the_stop_string(world: World) -> None:
    await world.start()
    engine = await world.add("a", mean_tokens=10_000)
    text = (await world.chat(None, [user("x")], max_tokens=60))["choices"][0]["message"]["content"]
    stop = text[20:23]
    answer = await world.chat(None, [user("x")], max_tokens=60, stop=[stop])
    assert answer["choices"][0]["message"]["content"] == text[: text.find(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    # Across a cut the whole turn starts again, so that no engine can miss it.
    engine.faults.append(Fault(kind="reclaim", after=text.find(stop) + 1))
    again = await world.chat(None, [user("x")], max_tokens=60, stop=[stop])
    assert again["choices"][0]["message"] == answer["choices"][0]["message"]


async def test_completions_take_text_and_token_ids(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    body: dict[str, Any] = {"model": "policy", "prompt": "abc", "max_tokens": 6}
    text = await world.ok("POST", "/v1/completions", body)
    ids = engine.tokenizer.encode("abc")
    same = await world.ok("POST", "/v1/completions", {**body, "prompt": ids})
    assert text["choices"][0]["text"] == same["choices"][0]["text"]
    assert text["choices"][0]["text"] == engine.tokenizer.decode(engine.greedy(ids, {"max_tokens": 6})[0])
    both = await world.ok("POST", "/v1/completions", {**body, "prompt": ["abc", "xyz"]})
    assert len(both["choices"]) == 2
