"""What a fleet serves is remembered between requests, and follows every change of the fleet."""

from __future__ import annotations

from rose.policy import turn_events as te
from tests.scheduler.conftest import World


async def served(world: World) -> dict[str, int]:
    answer = await world.ok("GET", "/v1/models")
    return {model["id"]: model["max_model_len"] for model in answer["data"]}


async def test_the_least_length_of_a_models_workers_counts_while_they_are_registered(world: World) -> None:
    await world.start()
    await world.add("a", max_model_len=512)
    assert await served(world) == {"policy": 512}
    await world.add("b", max_model_len=64)
    assert await served(world) == {"policy": 64}
    await world.ok("DELETE", "/workers/b", role="node")
    world.silence("b")
    assert await served(world) == {"policy": 512}


async def test_a_worker_that_comes_back_with_another_vocabulary_is_believed(world: World) -> None:
    await world.start()
    await world.add("a")
    dispatcher = world.scheduler.dispatcher
    body = {
        "worker_id": "a",
        "url": dispatcher.endpoints["a"].url,
        "tier": "dedicated",
        "model": "policy",
        "max_model_len": 4096,
        "incarnation": dispatcher.book.fleet.workers["a"].incarnation,
    }
    for vocab_size, status in ((100, 400), (1000, 200)):
        await world.ok("POST", "/workers", body | {"vocab_size": vocab_size}, role="node")
        ask = {"token_ids": [500], "sampling_params": {"max_tokens": 1}}
        got, answer = await world.call("POST", "/rose/v1/generate", ask)
        assert got == status, answer


async def test_a_model_whose_last_worker_is_gone_is_not_alive(world: World) -> None:
    await world.start()
    await world.add("a")
    dispatcher = world.scheduler.dispatcher
    assert dispatcher.models()["policy"].alive
    dispatcher.feed(te.WorkerLost(at_s=dispatcher.now_s(), worker_id="a", reason="lost"))
    assert not dispatcher.models()["policy"].alive
