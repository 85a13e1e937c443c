"""Other engines' own routes for tokens: SGLang's ``/generate``, as slime asks and reads it, and vLLM's, as prime-rl's client does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rose.auth import bearer
from rose.testing.fake_engine import Fault
from tests.scheduler.conftest import PROMPT, World

SLIME: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 40,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
"""What slime's rollout sends, at its defaults but for the length."""


async def slime(world: World, session: str | None, prompt: list[int], **params: Any) -> Any:
    """One call of slime's ``generate``: its body, and its header of a sample."""
    body = {"sampling_params": {**SLIME, **params}, "return_logprob": True, "input_ids": prompt}
    headers = {"X-SMG-Routing-Key": session} if session else {}
    return await world.ok("POST", "/generate", body, headers=headers, role="agent")


def read_by_slime(output: Any) -> tuple[list[int], list[float], str]:
    """Tokens, log-probs, and what ended them."""
    entries = output["meta_info"]["output_token_logprobs"]
    return (
        [entry[1] for entry in entries],
        [entry[0] for entry in entries],
        output["meta_info"]["finish_reason"]["type"],
    )


async def test_slime_samples_a_recorded_trajectory_of_two_turns(world: World) -> None:
    await world.start()
    engine = await world.add("a", version="2.17")
    session = await world.trajectory()
    prompt = list(PROMPT)
    for _ in range(2):
        output = await slime(world, session, prompt)
        tokens, logprobs, why = read_by_slime(output)
        expected, reason, _ = engine.greedy(prompt, {"max_tokens": 40})
        assert (tokens, why) == (expected, reason)
        assert output["output_ids"] == tokens
        assert output["text"] == engine.tokenizer.decode(tokens)
        meta = output["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), len(tokens))
        assert meta["weight_version"] == "2.17"
        trace = await world.ok("GET", f"/rose/v1/trajectories/{session}")
        assert trace["turns"][-1]["token_ids"] == tokens
        assert trace["turns"][-1]["logprobs"] == logprobs
        prompt += [*tokens, 14, 15]
    assert [(turn["parent"], turn["fork"]) for turn in trace["turns"]] == [(None, None), (0, None)]


async def test_a_cut_is_not_seen(world: World) -> None:
    await world.start()
    engine = await world.add("a", mean_tokens=10_000)
    await world.add("b", mean_tokens=10_000, tier="harvested")
    for each in world.engines.values():
        each.faults.append(Fault(kind="reclaim", after=7))
    output = await slime(world, None, PROMPT)
    assert output["output_ids"] == engine.greedy(PROMPT, {"max_tokens": 40})[0]
    assert output["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert output["rose"]["attempts"] == 3


async def test_without_a_limit_the_context_is_one(world: World) -> None:
    await world.start()
    await world.add("a", mean_tokens=10_000, max_model_len=200)
    output = await slime(world, None, PROMPT, max_new_tokens=None, ignore_eos=True)
    assert output["meta_info"]["completion_tokens"] == 200 - len(PROMPT)


async def test_a_lost_answer_comes_again_after_a_restart(world: World) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    body = {"input_ids": PROMPT, "sampling_params": SLIME, "return_logprob": True}
    headers = {"X-Session-ID": session, "Idempotency-Key": "sample 3"}
    first = await world.ok("POST", "/generate", body, headers=headers)
    again = await world.ok("POST", "/generate", body, headers=headers)
    await world.scheduler.stop(drain_s=0)
    await world.start()
    await world.add("b")
    after = await world.ok("POST", "/generate", body, headers=headers)
    assert read_by_slime(again) == read_by_slime(after) == read_by_slime(first)
    assert again["text"] == after["text"] == first["text"]
    trace = await world.ok("GET", f"/rose/v1/trajectories/{session}")
    assert len(trace["turns"]) == 1


@pytest.mark.parametrize("keep", [False, True])
async def test_text_ends_at_a_stop_string_with_or_without_it(world: World, keep: bool) -> None:
    await world.start()
    engine = await world.add("a", mean_tokens=10_000)
    whole = engine.tokenizer.decode(engine.greedy(PROMPT, {"max_tokens": 40})[0])
    stop = whole[12:15]
    output = await slime(world, None, PROMPT, stop=[stop], no_stop_trim=keep)
    end = whole.index(stop)
    assert output["text"] == whole[: end + len(stop) * keep]
    assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_a_stream_says_all_so_far_and_ends_as_the_whole(world: World) -> None:
    await world.start()
    await world.add("a", mean_tokens=10_000)
    body = {"input_ids": PROMPT, "sampling_params": SLIME, "return_logprob": True, "rid": "mine"}
    whole = await world.ok("POST", "/generate", body)
    headers = bearer(world.tokens.agent)
    async with world.session.post(
        world.url + "/generate", json={**body, "stream": True}, headers=headers
    ) as response:
        lines = [line[6:] async for line in response.content if line.startswith(b"data: ")]
    assert lines.pop().strip() == b"[DONE]"
    events = [json.loads(line) for line in lines]
    last = events.pop()
    assert events
    assert read_by_slime(last) == read_by_slime(whole)
    assert last["text"] == whole["text"]
    assert last["meta_info"]["id"] == "mine"
    so_far = 0
    for event in events:
        tokens = [entry[1] for entry in event["meta_info"]["output_token_logprobs"]]
        assert event["output_ids"] == tokens == last["output_ids"][: len(tokens)]
        assert last["text"].startswith(event["text"])
        assert len(tokens) > so_far
        assert event["meta_info"]["finish_reason"] is None
        so_far = len(tokens)


async def test_several_samples_of_a_text_come_as_a_list(world: World) -> None:
    await world.start()
    engine = await world.add("a")
    text = engine.tokenizer.decode(PROMPT)
    outputs = await world.ok("POST", "/generate", {"text": text, "sampling_params": {"n": 2}})
    assert [output["index"] for output in outputs] == [0, 1]
    assert len({output["meta_info"]["id"] for output in outputs}) == 2
    assert all("output_token_logprobs" not in output["meta_info"] for output in outputs)
    assert all(output["meta_info"]["completion_tokens"] <= 128 for output in outputs)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {}, "input_ids"),
        ("/generate", {"text": "a", "input_ids": [1]}, "input_ids"),
        ("/generate", {"input_ids": [[1]]}, "input_ids[0]"),
        ("/generate", {"input_ids": [1], "image_data": "x"}, "image_data"),
        ("/generate", {"input_ids": [1], "return_routed_experts": True}, "return_routed_experts"),
        ("/generate", {"input_ids": [1], "top_logprobs_num": 4}, "top_logprobs_num"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_tokens": 4}}, "sampling_params.max_tokens"),
        (
            "/generate",
            {"input_ids": [1], "sampling_params": {"min_new_tokens": 200}},
            "sampling_params.min_new_tokens",
        ),
        (
            "/generate",
            {"input_ids": [1], "sampling_params": {"sampling_seed": 2**70}},
            "sampling_params.sampling_seed",
        ),
        ("/generate", {"input_ids": [1], "sampling_params": {"n": 1000}}, "sampling_params.n"),
        ("/generate", {"input_ids": [2**31]}, "input_ids"),
        ("/generate", {"input_ids": [1] * 5000}, "input_ids"),
        ("/inference/v1/generate", {"sampling_params": {}}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}, "features": {}}, "features"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"logprobs": 10}},
            "sampling_params.logprobs",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"extra_args": {}}},
            "sampling_params.extra_args",
        ),
    ],
)
async def test_what_is_not_here_is_refused_by_the_name_that_the_client_knows(
    world: World, path: str, body: dict[str, Any], field: str
) -> None:
    await world.start()
    await world.add("a")
    status, answer = await world.call("POST", path, body)
    assert (status, answer["error"]["param"]) == (400, field), answer


@pytest.mark.parametrize("by", ["header", "path"])
async def test_prime_rls_client_finds_a_log_prob_for_each_token_id(world: World, by: str) -> None:
    await world.start()
    engine = await world.add("a", version="1.3")
    session = await world.trajectory()
    path = "/inference/v1/generate" if by == "header" else f"/s/{session}/inference/v1/generate"
    body = {
        "model": "policy",
        "token_ids": PROMPT,
        "sampling_params": {
            "max_tokens": 12,
            "logprobs": 1,
            "stop_token_ids": [],
            "skip_special_tokens": False,
        },
        "cache_salt": "3",
    }
    headers = {"X-Session-ID": session} if by == "header" else {}
    answer = await world.ok("POST", path, body, headers=headers)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == engine.greedy(PROMPT, {"max_tokens": 12})[0]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert answer["usage"]["completion_tokens"] == len(content)
    assert answer["request_id"]
    (turn,) = (await world.ok("GET", f"/rose/v1/trajectories/{session}"))["turns"]
    assert [entry["logprob"] for entry in content] == turn["logprobs"]
