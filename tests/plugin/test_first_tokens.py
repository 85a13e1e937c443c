"""Production's own count of late first tokens, in vLLM's scheduler: that of the simulator for the same requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.sim.engine import Request
from rose.sim.events import EventDigest
from rose.sim.scenario import Scenario
from rose.sim.systems import SYSTEMS
from rose.sim.world import SimWorld
from tests.plugin import harness
from vllm_plugin import first_token_watch

LIMIT_S = 1.0


class Clock:
    """What the watch reads of the two clocks, moved by hand: ``wall_s`` is how far the wall clock is off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.wall_s = 1e9, 0.0
        hooks_time = SimpleNamespace(
            time=lambda: self.now_s + self.wall_s,
            monotonic=lambda: self.now_s,
            monotonic_ns=lambda: int(self.now_s * 1e9),
        )
        monkeypatch.setattr(first_token_watch, "time", hooks_time)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(params=["ServingScheduler", "ServingAsyncScheduler"])
def scheduler(
    request: pytest.FixtureRequest, config: Any, node_dir: Path, rank: Any, clock: Clock
) -> Iterator[Any]:
    """Attached to no engine: nothing of it runs but what a test calls."""
    from vllm_plugin import scheduler as schedulers

    scheduler = harness.build(getattr(schedulers, request.param), config)
    assert scheduler.rose is not None
    scheduler.rose._board.slo_ttft_ns = int(LIMIT_S * 1e9)
    yield scheduler
    assert scheduler.rose.failed is None
    for writer in (scheduler.rose._lease, scheduler.rose._board.file, scheduler.rose._pagers):
        writer.close()


def add(scheduler: Any, clock: Clock, request_id: str, **more: Any) -> Any:
    request = harness.request(request_id, **more)
    request.arrival_time = clock.now_s + clock.wall_s
    scheduler.add_request(request)
    return request


def breaches(scheduler: Any, node_dir: Path) -> int:
    """After one more round of the background thread."""
    scheduler.rose.first_tokens.look(scheduler.rose._board.slo_ttft_ns / 1e9)
    scheduler.rose._board.write(busy=False)
    record = NodeDir(node_dir).serving_board().read()
    assert record is not None
    return record.breaches


def simulated_late(requests: list[tuple[float, float]]) -> int:
    """What the simulator's count comes to for requests of these arrivals and first tokens."""
    scenario = Scenario.model_validate({"name": "late", "fleet": {"dedicated": 1, "serving": 1}})
    world = SimWorld(scenario, SYSTEMS["rose"], EventDigest(None), None)
    device = world.serving_devices[0]
    device.slo_ttft_s, device.slo_tpot_s = LIMIT_S, 0.0
    for number, (arrived_s, first_s) in enumerate(requests):
        request = Request(f"p{number}", 20, 4, arrived_s)
        request.first_s = first_s
        world.cluster.served(device, request, first_s)
    return len(world.cluster.late)


def step(
    scheduler: Any, clock: Clock, step_s: float, requests: dict[str, Any], first_s: dict[str, float]
) -> None:
    """One step that takes so long; notes when each request's first token came."""
    output = scheduler.schedule()
    clock.now_s += step_s
    harness.answer(scheduler, output)
    for name, request in requests.items():
        if request.num_output_tokens:
            first_s.setdefault(name, clock.now_s)


@pytest.mark.parametrize("step_s", [0.1, 0.4, 1.5])
def test_every_late_first_token_counts_as_in_the_simulator(
    scheduler: Any, clock: Clock, node_dir: Path, step_s: float
) -> None:
    """Two new prompts each step and room for one: the queue grows, and whoever stands first in it has company that is as late."""
    scheduler.max_num_scheduled_tokens = 18
    requests: dict[str, Any] = {}
    first_s: dict[str, float] = {}
    for number in range(60):
        if number < 16:
            for name in (f"{number}a", f"{number}b"):
                requests[name] = add(scheduler, clock, name, num_tokens=16, max_tokens=1 + number % 3)
        step(scheduler, clock, step_s, requests, first_s)

    assert len(first_s) == 32
    expected = simulated_late([(requests[name].arrival_time, at_s) for name, at_s in first_s.items()])
    assert 4 < expected <= 32
    assert breaches(scheduler, node_dir) == expected
    assert not scheduler.rose.steps.first_tokens


def test_who_still_waits_counts_when_its_limit_has_passed_and_not_again_with_its_token(
    scheduler: Any, clock: Clock, node_dir: Path
) -> None:
    scheduler.max_num_scheduled_tokens = 16
    for name in ("a", "b", "c"):
        add(scheduler, clock, name, num_tokens=64)
    output = scheduler.schedule()
    clock.now_s += 1.1
    harness.answer(scheduler, output)
    assert breaches(scheduler, node_dir) == 3  # one reads, two wait
    scheduler.max_num_scheduled_tokens = 512
    for _ in range(3):
        harness.step(scheduler)

    assert breaches(scheduler, node_dir) == 3


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_step_of_the_wall_clock_makes_nobody_late_and_hides_nobody_who_is(
    scheduler: Any, clock: Clock, node_dir: Path, jump_s: float
) -> None:
    scheduler.max_num_scheduled_tokens = 16
    for name in ("a", "b"):
        add(scheduler, clock, name, num_tokens=64)
    clock.wall_s = jump_s
    assert breaches(scheduler, node_dir) == 0
    output = scheduler.schedule()
    clock.now_s += 1.1
    harness.answer(scheduler, output)
    assert breaches(scheduler, node_dir) == 2


def test_many_that_are_late_at_once_are_counted_in_several_looks(
    scheduler: Any, clock: Clock, node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a round does for them stays small."""
    monkeypatch.setattr(first_token_watch, "LOOKED_AT", 16)
    scheduler.max_num_scheduled_tokens = 16
    for number in range(35):
        add(scheduler, clock, str(number), num_tokens=512 if number == 0 else 16)
    counted = []
    for _ in range(4):
        output = scheduler.schedule()
        clock.now_s += 1.1
        harness.answer(scheduler, output)
        counted.append(breaches(scheduler, node_dir))

    assert counted == [16, 32, 35, 35]


def test_a_client_that_gave_up_is_late_if_it_waited_longer_than_promised(
    scheduler: Any, clock: Clock, node_dir: Path
) -> None:
    from vllm.v1.request import RequestStatus

    scheduler.max_num_scheduled_tokens = 16
    for name in ("reads", "patient", "hasty"):
        add(scheduler, clock, name, num_tokens=64)
    scheduler.finish_requests(["hasty"], RequestStatus.FINISHED_ABORTED)
    output = scheduler.schedule()
    clock.now_s += 1.1
    harness.answer(scheduler, output)
    breaches(scheduler, node_dir)
    scheduler.finish_requests(["patient"], RequestStatus.FINISHED_ABORTED)

    assert breaches(scheduler, node_dir) == 2
    assert not scheduler.rose.steps.first_tokens


def test_a_session_that_waits_for_its_client_is_not_late(
    scheduler: Any, clock: Clock, node_dir: Path
) -> None:
    from vllm.v1.request import RequestStatus

    session = add(scheduler, clock, "session")
    scheduler.waiting.remove_request(session)
    session.status = RequestStatus.WAITING_FOR_STREAMING_REQ
    scheduler.kv_holding_waiting.add_request(session)
    clock.now_s += 0.5
    add(scheduler, clock, "behind", num_tokens=64)
    scheduler.max_num_scheduled_tokens = 16
    output = scheduler.schedule()
    clock.now_s += 1.1
    harness.answer(scheduler, output)

    assert breaches(scheduler, node_dir) == 1  # who came behind it


def test_where_nothing_is_promised_nothing_is_kept(scheduler: Any, clock: Clock, node_dir: Path) -> None:
    scheduler.rose._board.slo_ttft_ns = 0
    add(scheduler, clock, "a")
    clock.now_s += 60.0
    for _ in range(2):
        harness.step(scheduler)

    assert breaches(scheduler, node_dir) == 0
    assert not scheduler.rose.first_tokens._noted


@pytest.mark.parametrize("step_s", [0.1, 1.5])
@pytest.mark.parametrize("every", [1, 3, 20])
def test_the_count_hangs_on_when_steps_ended_and_not_on_when_somebody_looked(
    scheduler: Any, clock: Clock, node_dir: Path, step_s: float, every: int
) -> None:
    """Prompts of one step and of several, some preempted in the middle; a look every so many steps."""
    scheduler.max_num_scheduled_tokens = 24
    requests = {}
    first_s: dict[str, float] = {}
    for number in range(60):
        if number < 10:
            name = str(number)
            requests[name] = add(scheduler, clock, name, num_tokens=16 + 30 * (number % 3), max_tokens=3)
        step(scheduler, clock, step_s, requests, first_s)
        if number % 7 == 3 and scheduler.running and not scheduler.running[-1].num_output_tokens:
            scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
        if number % every == 0:
            breaches(scheduler, node_dir)

    assert len(first_s) == len(requests)
    expected = simulated_late([(requests[name].arrival_time, at_s) for name, at_s in first_s.items()])
    assert expected > 0
    assert breaches(scheduler, node_dir) == expected
    assert not scheduler.rose.first_tokens._starting


def session_answers(scheduler: Any, session: Any) -> None:
    """The end of a session's turn, as vLLM goes on with it: its client's next turn is a prompt of the same request."""
    from vllm.v1.request import RequestStatus

    if session in scheduler.running:
        scheduler.running.remove(session)
    session._output_token_ids.clear()
    session.status = RequestStatus.WAITING


def test_a_sessions_turns_between_two_looks_are_two(scheduler: Any, clock: Clock, node_dir: Path) -> None:
    """The first is in time and the second late, though both began before anybody looked."""
    book, watch = scheduler.rose.steps.first_tokens, scheduler.rose.first_tokens
    session = add(scheduler, clock, "session", max_tokens=5)
    output = scheduler.schedule()
    clock.now_s += 0.3
    harness.answer(scheduler, output)
    session_answers(scheduler, session)
    session.arrival_time = clock.now_s
    watch.arrived(session)

    assert breaches(scheduler, node_dir) == 0
    assert len(book) == 1
    clock.now_s += 1.5
    assert breaches(scheduler, node_dir) == 1


def test_a_token_that_has_come_but_was_not_noted_yet_is_waited_for(
    scheduler: Any, clock: Clock, node_dir: Path
) -> None:
    """A look in the middle of the end of a step."""
    request = add(scheduler, clock, "a", max_tokens=5)
    output = scheduler.schedule()
    clock.now_s += 1.1
    request.append_output_token_ids(9)

    assert breaches(scheduler, node_dir) == 0
    scheduler.rose.first_tokens.ended(output)
    assert breaches(scheduler, node_dir) == 1
    assert not scheduler.rose.steps.first_tokens


def test_a_late_last_token_stands_on_the_board_of_an_idle_engine(
    scheduler: Any, clock: Clock, node_dir: Path
) -> None:
    """Beside a rollout engine only the engine thread writes, and an idle one makes no step that would."""
    asked: list[Any] = []
    scheduler.rose.seam.call_when_idle = asked.append
    add(scheduler, clock, "a", max_tokens=1)
    output = scheduler.schedule()
    clock.now_s += 1.1
    harness.answer(scheduler, output)
    assert not scheduler.running
    scheduler.rose._board.watched = True
    scheduler.rose.rounds.round()

    assert asked == [scheduler.rose.hooks.idle]
