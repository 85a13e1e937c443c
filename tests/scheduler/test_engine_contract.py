"""What the scheduler needs of an engine, checked on the fake one and on a real ``vllm serve``.

Any engine: set ``ROSE_CONTRACT_ENGINE_URL`` (and ``ROSE_CONTRACT_ENGINE_TOKEN``) to run the same tests against it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from rose.auth import Tokens, bearer
from rose.scheduler.app import Scheduler
from rose.scheduler.engine import Endpoint, EngineClient, EngineFailure, Output, refused_request
from rose.scheduler.scheduler_config import SchedulerConfig
from tests.scheduler.conftest import user

GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0, "n": 1}
PROMPT = list(range(20, 36))


@pytest.fixture(scope="module", params=["fake", pytest.param("vllm", marks=pytest.mark.engine)])
def engine_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    given = os.environ.get("ROSE_CONTRACT_ENGINE_URL")
    if given:
        if request.param != "fake":
            pytest.skip("ROSE_CONTRACT_ENGINE_URL names the engine")
        yield given
    elif request.param == "fake":
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rose.testing.fake_node",
                "--token-s",
                "0.002",
                "--max-model-len",
                "512",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.kill()
        process.wait()
    else:
        pytest.importorskip("vllm")
        from tests.engine_launcher import EngineServer
        from tests.tiny_model import write_tiny_model

        folder = tmp_path_factory.mktemp("contract") / "policy"
        write_tiny_model(folder)
        template = Path(folder) / "template.jinja"
        template.write_text(
            "{% for m in messages %}w3 {{ m.content }} w4 {% endfor %}"
            "{% if add_generation_prompt %}w3 w5 {% endif %}"
        )
        args = ("--enable-scale-out", "--logprobs-mode=processed_logprobs", f"--chat-template={template}")
        with EngineServer(folder, args=(*args, "--enable-prompt-tokens-details")) as server:
            yield server.url


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    made = EngineClient(connect_s=30, attempt_s=300, render_s=60)
    yield made
    made.close()


@pytest.fixture
def engine(engine_url: str) -> Endpoint:
    return Endpoint(worker_id="e", url=engine_url, token=os.environ.get("ROSE_CONTRACT_ENGINE_TOKEN"))


async def model_of(engine: Endpoint) -> tuple[str, int]:
    async with (
        aiohttp.ClientSession(headers=engine.headers) as session,
        session.get(f"{engine.url}/v1/models") as response,
    ):
        model = (await response.json())["data"][0]
        return model["id"], model["max_model_len"]


async def run(client: EngineClient, engine: Endpoint, prompt: list[int], **fields: Any) -> list[Output]:
    sampling = {**GREEDY, "max_tokens": 16, **fields.pop("sampling", {})}
    body = {"request_id": fields.pop("request_id", "r1"), "token_ids": prompt, "sampling_params": sampling}
    if fields.get("stream"):
        return [output async for output in client.stream(engine, {**body, **fields}, entries=True)]
    return [await client.generate(engine, {**body, **fields}, entries=True)]


async def test_generate_gives_tokens_with_their_logprobs(client: EngineClient, engine: Endpoint) -> None:
    (output,) = await run(client, engine, PROMPT)
    assert len(output.token_ids) == len(output.logprobs) == len(output.entries) == 16
    assert output.finish_reason == "length"
    assert all(logprob <= 0 for logprob in output.logprobs)


async def test_a_turn_continued_from_its_tokens_equals_an_uninterrupted_one(
    client: EngineClient, engine: Endpoint
) -> None:
    (whole,) = await run(client, engine, PROMPT)
    for cut in (1, 7, 15):
        (rest,) = await run(
            client, engine, [*PROMPT, *whole.token_ids[:cut]], sampling={"max_tokens": 16 - cut}
        )
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids


async def test_a_stream_equals_the_whole(client: EngineClient, engine: Endpoint) -> None:
    (whole,) = await run(client, engine, PROMPT)
    pieces = await run(client, engine, PROMPT, stream=True, stream_options={"include_usage": True})
    assert sum((piece.token_ids for piece in pieces), ()) == whole.token_ids
    assert sum((piece.logprobs for piece in pieces), ()) == pytest.approx(whole.logprobs, abs=2e-2)
    assert [piece.finish_reason for piece in pieces][-1] == "length"


async def test_an_abort_gives_what_was_sampled_so_far(client: EngineClient, engine: Endpoint) -> None:
    seen: list[Output] = []
    for attempt in range(10):  # on a busy machine the turn may end before the word arrives
        request_id, seen = f"to-abort-{attempt}", []
        body = {
            "request_id": request_id,
            "token_ids": PROMPT,
            "sampling_params": {**GREEDY, "max_tokens": 450},
            "stream": True,
        }
        async for output in client.stream(engine, body):
            seen.append(output)
            if len(seen) == 3:
                await client.abort(engine, request_id)
        if seen[-1].finish_reason == "abort":
            break
    assert seen[-1].finish_reason == "abort"
    assert 3 <= sum(len(output.token_ids) for output in seen) < 450


async def test_an_abort_of_what_is_not_streamed_gives_it_too(client: EngineClient, engine: Endpoint) -> None:
    body = {
        "token_ids": PROMPT,
        "sampling_params": {**GREEDY, "max_tokens": 450, "logprobs": 0},
        "stream": False,
    }
    whole = await client.generate(engine, {**body, "request_id": "whole"})
    for attempt in range(10):  # on a busy machine the turn may end before the word arrives
        request_id = f"whole-to-abort-{attempt}"
        asked = asyncio.create_task(client.generate(engine, {**body, "request_id": request_id}))
        while not asked.done():
            await client.abort(engine, request_id)  # an engine that does not know it yet says nothing
            await asyncio.sleep(0.02)
        output = await asked
        if output.finish_reason == "abort" and output.token_ids:
            break
    assert output.finish_reason == "abort"
    assert 0 < len(output.token_ids) == len(output.logprobs) < 450
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]


async def test_allowed_token_ids_bind_and_normalise(client: EngineClient, engine: Endpoint) -> None:
    allowed = [30, 31, 32, 33]
    (output,) = await run(
        client, engine, PROMPT, sampling={"allowed_token_ids": allowed, "temperature": 0.7, "max_tokens": 40}
    )
    assert set(output.token_ids) <= set(allowed)


async def test_a_prompt_that_is_too_long_is_the_clients_fault(client: EngineClient, engine: Endpoint) -> None:
    _, limit = await model_of(engine)
    with pytest.raises(EngineFailure) as failure:
        await run(client, engine, [5] * (limit + 1))
    assert failure.value.kind == "data"
    refused = refused_request(failure.value)
    assert refused is not None
    assert refused.code == "context_length_exceeded"


@pytest.mark.parametrize("beyond", [0, 1])
async def test_a_render_that_leaves_no_room_for_a_token_is_too_long(
    client: EngineClient, engine: Endpoint, beyond: int
) -> None:
    model, limit = await model_of(engine)
    body = {"model": model, "prompt": [5] * (limit + beyond), "max_tokens": 1}
    with pytest.raises(EngineFailure) as failure:
        await client.call(engine, "/v1/completions/render", body)
    refused = refused_request(failure.value)
    assert refused is not None
    assert refused.code == "context_length_exceeded"
    assert "context length" in refused.message


async def test_rendered_sampling_parameters_are_accepted_by_generate(
    client: EngineClient, engine: Endpoint
) -> None:
    model, _ = await model_of(engine)
    body = {
        "model": model,
        "messages": [user("w10 w11")],
        "max_tokens": 1,
        "temperature": 0.5,
        "stop": ["zz"],
    }
    rendered = msgspec.json.decode(await client.call(engine, "/v1/chat/completions/render", body))
    assert rendered["token_ids"]
    params = {k: v for k, v in rendered["sampling_params"].items() if k not in ("skip_clone", "output_kind")}
    assert params["temperature"] == 0.5
    (output,) = await run(
        client, engine, rendered["token_ids"], sampling={**params, "logprobs": 0, "max_tokens": 4}
    )
    assert 1 <= len(output.token_ids) <= 4


async def test_a_least_length_above_the_limit_is_refused(client: EngineClient, engine: Endpoint) -> None:
    model, _ = await model_of(engine)
    body = {"model": model, "messages": [user("w10")], "max_tokens": 1, "min_tokens": 2}
    with pytest.raises(EngineFailure, match="min_tokens"):
        await client.call(engine, "/v1/chat/completions/render", body)
    with pytest.raises(EngineFailure, match="min_tokens"):
        await run(client, engine, PROMPT, sampling={"max_tokens": 1, "min_tokens": 2})


async def test_derendering_pieces_equals_derendering_the_whole(
    client: EngineClient, engine: Endpoint
) -> None:
    model, _ = await model_of(engine)
    (output,) = await run(client, engine, PROMPT)
    request = {"model": model, "messages": [user("w10")]}
    choice = {
        "index": 0,
        "token_ids": output.token_ids,
        "finish_reason": "length",
        "stop_reason": None,
        "logprobs": {"content": output.entries},
    }
    whole = msgspec.json.decode(
        await client.call(
            engine,
            "/v1/chat/completions/derender",
            {
                "model": model,
                "generate_response": {"request_id": "r", "prompt_token_ids": PROMPT, "choices": [choice]},
                "prompt_tokens": len(PROMPT),
                "chat_request": request,
            },
        )
    )
    message = whole["choices"][0]["message"]
    assert len(whole["choices"][0]["logprobs"]["content"]) == 16
    text, state = "", None
    for at in range(0, 16, 3):
        last = at + 3 >= 16
        piece = {**choice, "token_ids": output.token_ids[at : at + 3], "logprobs": None}
        piece["finish_reason"] = "length" if last else None
        answer = msgspec.json.decode(
            await client.call(
                engine,
                "/v1/chat/completions/derender",
                {
                    "stream": True,
                    "model": model,
                    "generate_chunk": {"request_id": "r", "choices": [piece]},
                    "stream_state": state,
                    "prompt_tokens": len(PROMPT),
                    "prompt_token_ids": PROMPT,
                    "chat_request": request,
                },
            )
        )
        state = answer["stream_state"]
        text += answer["chunk"]["choices"][0]["delta"].get("content") or ""
    assert text == message["content"]


@pytest.fixture
async def daemon(engine: Endpoint, tmp_path: Path, tokens: Tokens) -> AsyncIterator[Scheduler]:
    """The scheduler in front of this engine, taken as a plain one."""
    model, limit = await model_of(engine)
    worker = {
        "worker_id": "e",
        "url": engine.url,
        "model": model,
        "max_model_len": limit,
        "token": engine.token,
    }
    config = SchedulerConfig.model_validate({"port": 0, "workers": [worker]})
    scheduler = Scheduler(config, tokens, tmp_path)
    await scheduler.start()
    async with asyncio.timeout(60):
        while not any(item.may_take_turns for item in scheduler.book.fleet):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    yield scheduler
    await scheduler.stop(drain_s=0)


async def test_a_conversation_through_the_daemon(daemon: Scheduler, engine: Endpoint, tokens: Tokens) -> None:
    model, _ = await model_of(engine)
    name = daemon.store.create(job="j", group_id=None, group_size=1, task=None, sampling={})
    messages: list[Any] = [user("w10 w11")]
    async with openai.AsyncOpenAI(base_url=f"{daemon.url}/s/{name}/v1", api_key=tokens.agent) as api:
        for number in range(3):
            streamed = number == 1
            create = api.chat.completions.create
            kwargs: dict[str, Any] = {
                "model": model,
                "messages": messages,
                "temperature": 0.0,
                "max_tokens": 12,
                "logprobs": True,
            }
            if streamed:
                text = ""
                async for chunk in await create(**kwargs, stream=True):
                    text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            else:
                text = (await create(**kwargs)).choices[0].message.content
            messages += [{"role": "assistant", "content": text}, user(f"w{number}")]
    trajectory = daemon.store.trajectories[name]
    assert [(turn.parent, turn.fork) for turn in trajectory.turns] == [(None, None), (0, None), (1, None)]
    for turn in (1, 2):
        history = trajectory.full_ids(turn - 1)
        assert trajectory.prompt_ids(turn)[: len(history)] == history


async def test_the_routes_of_other_engines_give_what_the_engine_sampled(
    daemon: Scheduler, engine: Endpoint, client: EngineClient, tokens: Tokens
) -> None:
    (expected,) = await run(client, engine, PROMPT, sampling={"max_tokens": 12})
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True, "skip_special_tokens": False}
    asks = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    asked = {"token_ids": PROMPT, "sampling_params": {**GREEDY, "max_tokens": 12, "logprobs": 1}}
    async with aiohttp.ClientSession(daemon.url, headers=bearer(tokens.agent), raise_for_status=True) as http:
        whole = await (await http.post("/generate", json=asks)).json()
        stream = await (await http.post("/generate", json={**asks, "stream": True})).read()
        plain = await (await http.post("/inference/v1/generate", json=asked)).json()
    last = msgspec.json.decode(stream.split(b"data: ")[-2])
    for answer in (whole, last):
        assert tuple(answer["output_ids"]) == expected.token_ids
        entries = answer["meta_info"]["output_token_logprobs"]
        assert [entry[0] for entry in entries] == pytest.approx(expected.logprobs, abs=1e-4)
        assert answer["text"] == whole["text"] != ""
    (choice,) = plain["choices"]
    assert tuple(choice["token_ids"]) == expected.token_ids
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(
        expected.logprobs, abs=1e-4
    )


async def test_a_least_length_holds_for_both_routes_and_for_streams(
    daemon: Scheduler, engine: Endpoint, tokens: Tokens
) -> None:
    model, limit = await model_of(engine)
    async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key=tokens.agent) as api:
        kwargs: dict[str, Any] = {"model": model, "max_tokens": 60, "extra_body": {"min_tokens": 60}}
        chat = await api.chat.completions.create(**kwargs, messages=[user("w10")])
        text = await api.completions.create(**kwargs, prompt=PROMPT)
        for answer in (chat, text):
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 60
        usage = None
        options = {"include_usage": True}
        stream = await api.chat.completions.create(
            **kwargs, messages=[user("w10")], stream=True, stream_options=options
        )
        async for chunk in stream:
            usage = chunk.usage or usage
        assert usage.completion_tokens == 60
        # More than there may be, because the request says so or because the context ends.
        for most, least in ((2, 3), (limit, limit - 1), (4, -1), (4, "2")):
            with pytest.raises(openai.BadRequestError, match="must be a whole number") as refused:
                await api.chat.completions.create(
                    model=model, messages=[user("w10")], max_tokens=most, extra_body={"min_tokens": least}
                )
            assert refused.value.param == "min_tokens"


async def test_first_answers_equal_the_engines_own(
    daemon: Scheduler, engine: Endpoint, tokens: Tokens, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["engine_url"] == "fake":
        pytest.skip("the fake engine has no chat route of its own")
    model, _ = await model_of(engine)
    kwargs: dict[str, Any] = {
        "model": model,
        "messages": [user("w10 w11 w12")],
        "temperature": 0.0,
        "max_tokens": 20,
        "logprobs": True,
        "top_logprobs": 2,
    }
    answers = []
    for base in (f"{daemon.url}/v1", f"{engine.url}/v1"):
        async with openai.AsyncOpenAI(base_url=base, api_key=tokens.agent) as api:
            whole = await api.chat.completions.create(**kwargs)
            stream = await api.chat.completions.create(**kwargs, stream=True)
            text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
            content = whole.choices[0].logprobs.content  # type: ignore[union-attr]
            answers.append(
                (
                    whole.choices[0].message.content,
                    whole.choices[0].finish_reason,
                    text,
                    [item.token for item in content or []],
                    [len(item.top_logprobs) for item in content or []],
                )
            )
    assert answers[0] == answers[1]
