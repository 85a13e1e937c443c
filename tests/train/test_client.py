"""The training side's client, against servers that behave as no real scheduler can be made to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rose.auth import Tokens
from rose.config import load_config
from rose.errors import CapacityError, EngineError, TrainError
from rose.train.client import SchedulerClient, error_of
from rose.train.env_manager import EnvManager
from rose.train.train_config import TrainConfig
from tests.train.local_actors import LocalActor, LocalActors


@asynccontextmanager
async def answering(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """The URL of a server that gives every request to ``handle``: a scheduler that misbehaves as the real one cannot be made to."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_proxy_that_has_lost_the_scheduler_for_a_moment_is_asked_again(status: int) -> None:
    answers = [web.Response(status=status, text="<html>bad gateway</html>", content_type="text/html")]
    answers.append(web.json_response({"trajectories": [], "versions": {"j": "7.3"}}))

    async def handle(request: web.Request) -> web.Response:
        return answers.pop(0)

    async with answering(handle) as url:
        async with SchedulerClient(url, trainer_token="x" * 20, retry_s=5.0) as client:
            assert await client.latest_attempt("j") == 7
        assert answers == []


async def test_a_scheduler_that_cannot_be_reached_is_named_after_the_retries() -> None:
    async with SchedulerClient("http://127.0.0.1:9", environment_token="x" * 20, retry_s=0.0) as client:
        with pytest.raises(CapacityError, match=r"http://127\.0\.0\.1:9 did not answer"):
            await client.list_trajectories(job="j", state="running")


@pytest.mark.parametrize("first", ["stands by", "is dead"])
async def test_of_two_addresses_the_one_that_is_active_is_asked(first: str) -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.host)
        if len(asked) == 1 and first == "stands by":
            error = {"error": {"message": "stands by", "code": "not_active"}}
            return web.json_response(error, status=503, headers={"Retry-After": "60"})
        return web.json_response({"trajectories": [], "versions": {"j": "7.3"}})

    async with answering(handle) as one, answering(handle) as two:
        urls = f"{one}, {two}/" if first == "stands by" else f"http://127.0.0.1:9,{two}"
        async with SchedulerClient(urls, trainer_token="x" * 20, retry_s=5.0) as client:
            async with asyncio.timeout(30):  # half of what it is told to wait
                assert await client.latest_attempt("j") == 7
            assert await client.latest_attempt("j") == 7
    hosts = [url.removeprefix("http://") for url in ((one, two, two) if first == "stands by" else (two, two))]
    assert asked == hosts


async def test_one_that_hangs_is_left_for_the_one_that_took_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.train.client.PATIENCE_S", 0.5)
    retries: list[str] = []

    async def hang(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def handle(request: web.Request) -> web.Response:
        retries.append(request.headers["x-stainless-retry-count"])
        return web.json_response({"choices": [{"message": {"content": "ok"}}]})

    async with (
        answering(hang) as one,
        answering(handle) as two,
        SchedulerClient(f"{one},{two}", turn_timeout_s=60.0) as client,
    ):
        said = await client.chat("key", 0, model="m", messages=[], temperature=1.0, max_tokens=1)
    assert said == "ok"
    assert {int(retry) % 2 for retry in retries} == {1}  # one after each that the other did not answer


async def test_an_answer_that_never_arrives_whole_is_given_up() -> None:
    """Its headers do arrive, every time: that is no sign that the next try will do better."""
    num_asked = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"trajectories": [')
        assert request.transport is not None
        request.transport.abort()
        return response

    async with (
        answering(handle) as url,
        SchedulerClient(url, environment_token="a" * 16, retry_s=0.3) as client,
    ):
        with pytest.raises(CapacityError, match="did not answer"):
            async with asyncio.timeout(10):
                await client.list_trajectories(job="j", state="running")
    assert num_asked > 1


async def test_a_call_under_way_ends_when_its_client_is_closed() -> None:
    """And opens no further connection, which nobody would close."""
    num_asked = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        await asyncio.sleep(3600)  # its connection's end ends it
        raise AssertionError

    async with answering(handle) as url, asyncio.timeout(10):
        client = SchedulerClient(url, environment_token="a" * 16, retry_s=60.0)
        call = asyncio.create_task(client.list_trajectories(job="j", state="running"))
        while not num_asked:  # noqa: ASYNC110 - in this process
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(TrainError, match="closed"):
            await call
    assert num_asked == 1


async def test_a_turn_without_an_answer_has_run_out_of_time_and_the_scheduler_is_not_away() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)  # its connection's end ends it
        raise AssertionError

    async with (
        answering(handle) as url,
        SchedulerClient(url, environment_token="a" * 16, retry_s=0.0, turn_timeout_s=0.2) as client,
    ):
        with pytest.raises(
            CapacityError, match=r"scheduler\.turn_timeout_s: no answer within 0\.2 s"
        ) as caught:
            await client.chat("t", 0, model="m", messages=[], temperature=1.0, max_tokens=1)
    assert caught.value.status == 504


async def test_a_turn_that_finds_no_worker_waits_in_line_until_its_time_is_over() -> None:
    num_asked = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        error = {"error": {"message": "no worker could take the turn", "code": "no_capacity"}}
        return web.json_response(error, status=503, headers={"Retry-After": "0"})

    async with (
        answering(handle) as url,
        SchedulerClient(url, environment_token="a" * 16, retry_s=0.0, turn_timeout_s=0.5) as client,
    ):
        with pytest.raises(CapacityError, match="no answer within") as late:
            await client.chat("t", 0, model="m", messages=[], temperature=1.0, max_tokens=1)
    assert (late.value.status, num_asked > 1) == (504, True)


NO_RUN = "no worker could take the turn in time: no engine follows the run that trains this job"


def no_run() -> web.Response:
    body = {"error": {"message": NO_RUN, "code": "no_capacity"}}
    return web.json_response(body, status=503, headers={"Retry-After": "0"})


async def test_a_turn_that_was_refused_until_its_time_was_over_says_why() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return no_run()

    async with (
        answering(handle) as url,
        SchedulerClient(url, environment_token="a" * 16, retry_s=0.0, turn_timeout_s=0.3) as client,
    ):
        with pytest.raises(CapacityError, match="no answer within") as late:
            await client.chat("t", 0, model="m", messages=[], temperature=1.0, max_tokens=1)
    assert NO_RUN in late.value.message


class Asking(EnvManager):
    """Its group is one turn, and no more."""

    async def run(self, plans: Any) -> Any:
        await self._client.chat("t", 0, model="m", messages=[], temperature=1.0, max_tokens=1)


async def test_who_waits_for_an_engine_is_told_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the driver: nobody reads the log of an actor of a private cluster."""
    monkeypatch.setattr("rose.train.actors.TROUBLE_EVERY_S", 0.0)

    def told() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name == "rose.train.actors"]

    async def handle(request: web.Request) -> web.StreamResponse:
        if told():
            return web.json_response({"choices": [{"message": {"content": "ok"}}]})
        return no_run()

    async with answering(handle) as url:
        job = Path(__file__).parents[2] / "examples" / "frozenlake_grpo.toml"
        config = load_config(TrainConfig, job, [f'scheduler.url="{url}"'])
        tokens = Tokens.generate()
        actors, manager = LocalActors(config, tokens, None), Asking(config, tokens)
        actors._managers = [LocalActor(manager)]
        async with asyncio.timeout(10):
            await actors.run_on(0, [])
        assert await manager.trouble() == []  # it has an engine now
        await manager.close()
    assert told() == [f"turns: {NO_RUN}"]


async def test_a_reward_of_numpy_s_and_text_that_is_no_unicode_are_sent() -> None:
    """Gymnasium's rewards, and what a tool printed: the scheduler says what it does not take, and the run goes on."""
    bodies: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({})

    async with answering(handle) as url, SchedulerClient(url, environment_token="a" * 16) as client:
        info = {"score": np.float64(0.5), "said": "\udc80"}
        await client.finish("t", reward=np.float64(1.0), success=True, info=info)

    assert bodies == [{"reward": 1.0, "success": True, "info": {"score": 0.5, "said": "\udc80"}}]


@pytest.mark.parametrize("num_logprobs", [2, 1])
async def test_a_turn_of_tokens_is_of_the_models_whole_distribution_and_has_its_log_probs(
    num_logprobs: int,
) -> None:
    asked: list[tuple[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append((request.headers["X-ROSE-Turn"], await request.json()))
        answer = {"token_ids": [7, 8], "logprobs": [-0.5] * num_logprobs, "finish_reason": "stop"}
        return web.json_response({**answer, "versions": [["1.0", 0, 2]]})

    async with answering(handle) as url, SchedulerClient(url) as client:
        turn = client.generate("key", 3, token_ids=(1, 2), sampling_params={"max_tokens": 4, "top_k": -1})
        if num_logprobs == 2:
            assert (await turn)["token_ids"] == [7, 8]
        else:
            with pytest.raises(EngineError, match="logprobs"):
                await turn
    ((number, body),) = asked
    assert (number, body["token_ids"]) == ("3", [1, 2])
    sampling = {"max_tokens": 4, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert body["sampling_params"] == {**sampling, "presence_penalty": 0, "frequency_penalty": 0}


async def test_a_lost_lease_is_asked_for_by_its_name() -> None:
    """The answer was lost on the way: under another name that batch would be locked until its lease ran out."""
    calls: list[tuple[str, str]] = []

    async def handle(request: web.Request) -> web.Response:
        calls.append((request.method, request.raw_path))
        if len(calls) == 1:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"batch_id": "b", "trajectories": []})

    async with (
        answering(handle) as url,
        SchedulerClient(url, environment_token="a" * 16, trainer_token="t" * 16, retry_s=5.0) as client,
    ):
        leased = await client.lease(job="j", num_groups=1, attempt=1, version=0, ttl_s=60, wait_s=0)
        assert leased == ("b", [])
        assert calls[0] == calls[1]
        assert calls[0][0] == "PUT"
        await client.lease(job="j", num_groups=1, attempt=1, version=0, ttl_s=60, wait_s=0)
        assert calls[2] != calls[1]
        await client.lease(job="j", num_groups=1, attempt=1, version=0, ttl_s=60, wait_s=0, name="a/b c")
        assert calls[3] == ("PUT", "/rose/v1/batches/a%2Fb%20c")


async def test_a_batch_beyond_all_bounds_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.train.client.MAX_BATCH_BYTES", 1000)

    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"batch_id": "b", "trajectories": [{"id": "x" * 1000}]})

    async with (
        answering(handle) as url,
        SchedulerClient(url, environment_token="a" * 16, trainer_token="t" * 16, retry_s=0.0) as client,
    ):
        with pytest.raises(EngineError, match="the answer exceeds 1000 bytes"):
            await client.lease(job="j", num_groups=1, attempt=1, version=0, ttl_s=60, wait_s=0)


def test_http_errors_become_ours_with_field_and_retry() -> None:
    busy = error_of(503, {"error": {"message": "full", "code": "no_capacity"}}, "7")
    assert isinstance(busy, CapacityError)
    assert busy.retry_after_s == 7.0
    late = error_of(504, {"error": {"message": "late"}})
    assert isinstance(late, CapacityError)
    assert late.retry_after_s is None
    assert isinstance(error_of(502, None), EngineError)
    assert error_of(400, {"error": {"message": "bad", "param": "reward"}}).field == "reward"
