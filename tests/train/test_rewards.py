"""The reward pool: it shares, grows, survives its workers, and never makes a number of a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rose.auth import Tokens
from rose.config import load_config
from rose.errors import ConfigError, TrainError
from rose.train.env_manager import EnvManager
from rose.train.envs.base import Observation
from rose.train.rewards import PoolParams, RewardPool, RewardWorker, make_reward
from rose.train.train_config import TrainConfig
from tests.train.local_actors import LocalActor, LocalActors

EXAMPLES = Path(__file__).parents[2] / "examples"
FINAL = Observation(done=True, info={"turns": 2})


class Fake:
    """A worker whose answers are given; an exception among them is raised, ``wait`` never answers.

    Args:
        up: Set when it has started; None: it has.
    """

    def __init__(self, answers: list[Any], up: asyncio.Event | None = None) -> None:
        self._answers = answers
        self._up = up
        self.killed = False

    async def ready(self) -> None:
        if self._up is not None:
            await self._up.wait()

    async def score(self, task: Any, messages: Any, info: Any) -> float:
        await self.ready()  # what is asked of an actor that starts waits for its start
        answer = self._answers.pop(0) if self._answers else 1.0
        if answer == "wait":
            await asyncio.Event().wait()
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            return 1.0
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        self.killed = True


def pool_of(
    answers: list[Any], up: asyncio.Event | None = None, **params: Any
) -> tuple[RewardPool, list[Fake]]:
    made: list[Fake] = []

    def spawn() -> Fake:
        made.append(Fake(answers, up))
        return made[-1]

    return RewardPool(spawn, PoolParams(**params)), made


async def test_a_worker_that_dies_or_hangs_is_replaced_and_the_request_goes_on() -> None:
    pool, made = pool_of([ConnectionError("actor died"), "wait", 0.5], timeout_s=0.01)
    assert await pool.score({}, [], FINAL) == 0.5
    assert [one.killed for one in made] == [True, True, False]
    assert (pool.num_workers, pool.num_replaced, pool.num_scored) == (1, 2, 1)


async def many_turns() -> None:
    """Every limit of nothing that is waited for is over, and all who can go on have."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_worker_that_ray_has_lost_is_replaced_and_not_asked_again() -> None:
    pool, made = pool_of([TrainError("Ray failed: ObjectLostError", field="ray"), 0.5])
    assert await pool.score({}, [], FINAL) == 0.5
    assert [one.killed for one in made] == [True, False]
    assert (pool.num_replaced, pool.num_failures) == (1, 0)


async def test_the_start_of_a_worker_is_not_of_the_time_of_a_request() -> None:
    up = asyncio.Event()
    pool, made = pool_of([0.5], up, timeout_s=0.0, max_retries=0)
    scoring = asyncio.create_task(pool.score({}, [], FINAL))
    await many_turns()
    up.set()
    assert await scoring == 0.5
    assert (len(made), pool.num_replaced) == (1, 0)


async def test_a_worker_that_does_not_start_is_replaced_and_both_limits_are_named() -> None:
    pool, made = pool_of([], asyncio.Event(), start_timeout_s=0.01, max_retries=1)
    with pytest.raises(TrainError, match=r"failed 2 times: a reward worker did not start within 0\.01 s"):
        await pool.score({}, [], FINAL)
    assert [one.killed for one in made] == [True, True]
    pool, _ = pool_of(["wait"] * 2, timeout_s=0.01, max_retries=1)
    with pytest.raises(TrainError, match=r"failed 2 times: no answer within 0\.01 s \(reward\.timeout_s\)"):
        await pool.score({}, [], FINAL)


async def test_a_worker_goes_on_starting_when_the_request_that_waits_for_it_is_cancelled() -> None:
    up = asyncio.Event()
    pool, made = pool_of([0.5], up)
    straggler = asyncio.create_task(pool.score({}, [], FINAL))
    await many_turns()
    straggler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await straggler
    up.set()
    assert await pool.score({}, [], FINAL) == 0.5
    assert (len(made), made[0].killed) == (1, False)


async def test_what_keeps_rewards_from_coming_is_told_until_they_come() -> None:
    up = asyncio.Event()
    pool, _ = pool_of([TrainError("no sandbox"), TrainError("no disk"), 1.0], up, max_retries=1)
    assert pool.trouble(slow_s=0.0) == {}  # nobody waits for the worker that starts
    scoring = asyncio.create_task(pool.score({}, [], FINAL))
    await many_turns()
    assert list(pool.trouble(slow_s=0.0)) == ["start"]
    assert pool.trouble(slow_s=3600.0) == {}
    up.set()
    with pytest.raises(TrainError):
        await scoring
    assert pool.trouble() == {"tries": "2 tries in a row came to nothing, the last: no disk"}
    await pool.score({}, [], FINAL)
    assert pool.trouble() == {}


class Waiting(EnvManager):
    """Its group waits for a reward, and no more."""

    async def run(self, plans: Any) -> Any:
        (task,) = self._tasks.values()
        pool = self._rewarder(task)
        assert pool is not None
        await pool.score({}, [], FINAL)


async def test_who_waits_for_a_slow_reward_worker_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rose.train.actors.TROUBLE_EVERY_S", 0.0)
    monkeypatch.setattr("rose.train.rewards.SLOW_START_S", 0.0)
    config = load_config(TrainConfig, EXAMPLES / "frozenlake_grpo.toml", ['reward.kind="exact_match"'])
    up, looks = asyncio.Event(), 0

    class Looked(Waiting):
        async def trouble(self) -> Any:
            nonlocal looks
            looks += 1
            if looks == 3:
                up.set()
            return await super().trouble()

    tokens = Tokens.generate()
    actors = LocalActors(config, tokens, None)
    manager = Looked(config, tokens, lambda _: Fake([], up))
    actors._managers = [LocalActor(manager)]
    async with asyncio.timeout(10):
        await actors.run_on(0, [])
    told = [one.getMessage() for one in caplog.records if one.name == "rose.train.actors"]
    assert len(told) == 1
    assert "a reward worker is still starting after" in told[0]
    assert looks >= 3
    await manager.close()


async def test_a_function_that_fails_is_tried_again_and_then_named_never_zero() -> None:
    pool, made = pool_of([TrainError("no sandbox")] * 5, max_retries=1)
    with pytest.raises(TrainError, match="failed 2 times: no sandbox"):
        await pool.score({}, [], FINAL)
    assert (len(made), made[0].killed, pool.num_failures) == (1, False, 2)


async def test_the_pool_grows_while_requests_wait_and_shrinks_when_idle() -> None:
    gate = asyncio.Event()
    pool, made = pool_of([gate] * 8, max_workers=3, idle_s=0.0)
    scoring = [asyncio.create_task(pool.score({}, [], FINAL)) for _ in range(8)]
    for _ in range(20):  # every request gets its turn to ask
        await asyncio.sleep(0)
    assert pool.num_workers == 3
    gate.set()
    assert await asyncio.gather(*scoring) == [1.0] * 8
    for _ in range(3):
        await pool.score({}, [], FINAL)
    assert pool.num_workers == 1
    assert sum(not one.killed for one in made) == 1


async def test_a_cancelled_request_does_not_leave_its_worker_to_the_next() -> None:
    pool, made = pool_of(["wait"])
    scoring = asyncio.create_task(pool.score({}, [], FINAL))
    await asyncio.sleep(0)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert made[0].killed
    assert await pool.score({}, [], FINAL) == 1.0
    assert not made[1].killed


async def test_a_wake_up_that_meets_a_cancelled_request_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a group is complete: its straggler is cancelled just as a worker comes free for it."""
    gate = asyncio.Event()
    pool, _ = pool_of([gate], max_workers=1)
    first, straggler, last = [asyncio.create_task(pool.score({}, [], FINAL)) for _ in range(3)]
    give_back = pool._give_back

    async def give_back_and_cancel(worker: Any) -> None:
        await give_back(worker)
        straggler.cancel()

    monkeypatch.setattr(pool, "_give_back", give_back_and_cancel)
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(5):
        assert await first == await last == 1.0
    assert straggler.cancelled()


async def test_exact_match_reads_the_last_line_of_the_last_message() -> None:
    worker = RewardWorker("exact_match", {})
    messages = [
        {"role": "assistant", "content": "84"},
        {"role": "assistant", "content": "let me think\n 85 "},
    ]
    assert await worker.score({"answer": 85}, messages, {}) == 1.0
    assert await worker.score({"answer": 84}, messages, {}) == 0.0
    assert await worker.score({"answer": 84}, [], {}) == 0.0
    with pytest.raises(TrainError, match="no answer to compare"):
        await worker.score({}, messages, {})


async def very_large_reward(task: Any, messages: Any, info: Any) -> float:
    return 10**5000


async def one_argument_reward(task: Any) -> float:
    return 1.0


async def nan_reward(task: Any, messages: Any, info: Any) -> float:
    return float("nan")


async def test_a_function_of_ones_own_must_give_a_number() -> None:
    worker = RewardWorker(f"{__name__}:nan_reward", {})
    with pytest.raises(TrainError, match="nan is not finite"):
        await worker.score({}, [], {})
    with pytest.raises(TrainError, match="beyond every float is not finite"):
        await RewardWorker(f"{__name__}:very_large_reward", {}).score({}, [], {})


@pytest.fixture
async def judge() -> AsyncIterator[Callable[[Any, int], str]]:
    """A reward endpoint whose next answer is given."""
    answers: list[tuple[Any, int]] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        assert body == {"task": {"n": 1}, "messages": [], "info": {"turns": 2}}
        assert request.headers["Authorization"] == "Bearer secret"
        answer, status = answers.pop()
        return web.json_response(answer, status=status)

    app = web.Application()
    app.router.add_post("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    def url(answer: Any, status: int = 200) -> str:
        answers.append((answer, status))
        return f"http://127.0.0.1:{runner.addresses[0][1]}/"

    yield url
    await runner.cleanup()


async def test_an_endpoint_is_asked_and_its_failures_are_failures(judge: Callable[..., str]) -> None:
    async def ask(answer: Any, status: int = 200) -> float:
        url = judge(answer, status)
        return await RewardWorker("endpoint", {"url": url, "token": "secret"}).score({"n": 1}, [], FINAL.info)

    assert await ask({"reward": 0.25}) == 0.25
    for answer, status in [
        ({"reward": None}, 200),
        ({}, 200),
        ([], 200),
        ({"reward": 1}, 500),
        ({"reward": "1"}, 200),
    ]:
        with pytest.raises(TrainError) as caught:
            await ask(answer, status)
        assert "secret" not in str(caught.value)


async def test_an_answer_in_pieces_is_read_to_its_end() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().splitlines() if line.startswith(b"content-length"))
        await reader.readexactly(int(length.partition(b":")[2]))
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"rewa')
        await writer.drain()
        await asyncio.sleep(0.05)  # the peer reads the first piece alone
        writer.write(b'rd": 0.5}')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        assert await RewardWorker("endpoint", {"url": url}).score({}, [], {}) == 0.5


async def test_a_worker_that_cannot_be_made_leaves_its_place_to_the_next() -> None:
    pool, made = pool_of([ConnectionError("dead")], max_workers=1, max_retries=0)
    with pytest.raises(TrainError, match="dead"):
        await pool.score({}, [], FINAL)  # the only worker is gone
    spawn, pool._spawn = pool._spawn, lambda: 1 / 0  # type: ignore[assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        await pool.score({}, [], FINAL)
    pool._spawn = spawn
    async with asyncio.timeout(5):
        assert await pool.score({}, [], FINAL) == 1.0
    assert len(made) == 2


def test_a_module_that_is_not_found_is_told_where_python_looks() -> None:
    with pytest.raises(ConfigError, match="cannot be imported") as refused:
        make_reward("no_such_module_of_mine:reward", {})
    assert refused.value.fix is not None
    assert "PYTHONPATH=FOLDER rose train" in refused.value.fix


def test_unknown_rewards_and_settings_are_named() -> None:
    for kind, settings, match in [
        ("oracle", {}, "unknown reward 'oracle'"),
        ("exact_match", {"strict": True}, "strict"),
        ("endpoint", {"url": "file:///etc/passwd"}, "must be http"),
        ("nowhere:function", {}, "cannot be imported"),
        (f"{__name__}:nan_reward", {"scale": 2.0}, r"reward\.settings: .*nan_reward takes none"),
        (f"{__name__}:FINAL", {}, r"reward\.kind: .*FINAL is not async \(task, messages, info\)"),
        (f"{__name__}:pool_of", {}, r"pool_of is not async"),
        (f"{__name__}:one_argument_reward", {}, "one_argument_reward is not async"),
        (f"{__name__}:Fake", {}, "Fake is not async"),
    ]:
        with pytest.raises(ConfigError, match=match):
            make_reward(kind, settings)
