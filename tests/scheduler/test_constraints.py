"""What a turn was drawn under is in its record, in its trace and in the batch."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rose.scheduler.records import TurnRecord
from tests.scheduler.conftest import World, user

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "look"}}


async def constraints(world: World, session: str) -> list[list[str]]:
    trace = await world.ok("GET", f"/rose/v1/trajectories/{session}")
    return [turn["constraints"] for turn in trace["turns"]]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, []),
        ({"temperature": 0.7, "seed": 1, "stop": ["x"], "top_p": 1.0, "top_k": -1, "min_tokens": 0}, []),
        ({"response_format": {"type": "text"}, "tools": [TOOL], "tool_choice": "auto"}, []),
        ({"response_format": FORM}, ["structured_outputs"]),
        ({"tools": [TOOL], "tool_choice": NAMED}, ["structured_outputs"]),
        ({"tools": [TOOL], "tool_choice": "required"}, ["structured_outputs"]),
        ({"bad_words": ["no"]}, ["bad_words"]),
        ({"logit_bias": {"7": 1.0}}, ["logit_bias"]),
        ({"allowed_token_ids": [100, 101]}, ["allowed_token_ids"]),
        ({"min_tokens": 2, "top_p": 0.9, "presence_penalty": 0.5}, ["min_tokens", "top_p", "presence_penalty"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
async def test_a_turn_is_recorded_with_what_it_was_drawn_under(
    world: World, fields: dict[str, Any], names: list[str]
) -> None:
    await world.start()
    await world.add("a")
    session = await world.trajectory()
    await world.chat(session, [user("x")], max_tokens=4, **fields)
    assert await constraints(world, session) == [names]


async def test_a_batch_and_a_restart_know_it_and_of_what_the_log_probs_are(world: World) -> None:
    await world.start()
    await world.add("a")
    world.engines["a"].logprobs_mode = "raw_logprobs"
    await world.nodes["a"].register()
    session = await world.trajectory()
    await world.chat(session, [user("x")], max_tokens=4, bad_words=["no"])
    params = {"max_tokens": 4, "structured_outputs": {"json": {}}}
    body = {"token_ids": [10, 11], "sampling_params": params}
    await world.ok("POST", "/rose/v1/generate", body, headers={"X-Session-ID": session})
    await world.scheduler.stop(drain_s=0)
    await world.start()
    assert await constraints(world, session) == [["bad_words"], ["structured_outputs"]]
    await world.ok("POST", f"/rose/v1/trajectories/{session}/finish", {"reward": 1.0})
    body = {"job": "job", "num_groups": 1, "version": "0.0"}
    (leased,) = (await world.ok("PUT", "/rose/v1/batches/b", body, role="trainer"))["trajectories"]
    assert [turn["constraints"] for turn in leased["turns"]] == [["bad_words"], ["structured_outputs"]]
    modes = [segment["logprobs_mode"] for turn in leased["turns"] for segment in turn["segments"]]
    assert modes == ["raw_logprobs"] * 2


def test_a_record_of_an_older_journal_names_none() -> None:
    fields = {"trajectory_id": "t", "turn": 0, "kind": "chat", "finish_reason": "stop", "versions": []}
    data = dict.fromkeys(("suffix_ids", "token_ids", "logprobs"), b"")
    rest = {"segments": [], "usage": {}, "timing": {}, "sampling": {"top_p": 0.5}}
    record = msgspec.msgpack.decode(
        msgspec.msgpack.encode({"type": "turn", **fields, **data, **rest}), type=TurnRecord
    )
    assert record.constraints == ()
