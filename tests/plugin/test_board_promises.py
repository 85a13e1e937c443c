"""What the board says of tokens that production owes: first ones, next ones, and while a second step is in flight."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from tests.plugin import harness


@pytest.fixture(params=["ServingScheduler"])
def scheduler(request: pytest.FixtureRequest, config: Any, node_dir: Path, rank: Any) -> Iterator[Any]:
    """Of that class, and attached to no engine: nothing of it runs but what a test calls."""
    from vllm_plugin import scheduler as schedulers

    scheduler = harness.build(getattr(schedulers, request.param), config)
    assert scheduler.rose is not None
    yield scheduler
    for writer in (scheduler.rose._lease, scheduler.rose._board.file, scheduler.rose._pagers):
        writer.close()


def test_a_preempted_request_breaks_no_promise_of_a_first_token(scheduler: Any, node_dir: Path) -> None:
    """It has had its first token; it waits for a next one."""
    board_of = scheduler.rose._board
    board_of.slo_ttft_ns, board_of.slo_tpot_ns = 10**9, 10**8
    scheduler.add_request(harness.request("old", max_tokens=50))
    for _ in range(3):
        harness.step(scheduler)
    request = scheduler.running.pop()
    request.arrival_time -= 60.0
    scheduler.rose.first_tokens.look(board_of.slo_ttft_ns / 1e9)
    scheduler._preempt_request(request, time.monotonic())
    board = NodeDir(node_dir).serving_board()
    scheduler.rose.hooks.tell_step()
    record = board.read()
    assert record is not None
    assert (record.waiting, record.breaches, record.ttft_deadline_ns) == (1, 0, 0)
    assert record.tpot_deadline_ns > 0  # but its next token is due
    fresh = harness.request("late")
    fresh.arrival_time -= 60.0
    scheduler.add_request(fresh)
    scheduler.rose.first_tokens.look(board_of.slo_ttft_ns / 1e9)
    scheduler.rose.hooks.tell_step()
    record = board.read()
    assert record is not None
    assert record.breaches == 1
    assert record.ttft_deadline_ns > 0


def test_a_prompt_that_is_read_in_several_steps_keeps_the_promise_of_its_first_token(
    scheduler: Any, node_dir: Path
) -> None:
    """After its first chunk it runs, as vLLM counts; it is as late as one that waits."""
    board_of = scheduler.rose._board
    board_of.slo_ttft_ns, board_of.slo_tpot_ns = 10**9, 10**8
    scheduler.max_num_scheduled_tokens = 16
    board = NodeDir(node_dir).serving_board()
    scheduler.add_request(harness.request("long", max_tokens=8))
    seen = []
    for _ in range(2):  # 20 tokens: 16, then 4
        output = scheduler.schedule()
        scheduler.rose._board.write(busy=True)
        record = board.read()
        assert record is not None
        seen.append((output.total_num_scheduled_tokens, record.waiting, record.ttft_deadline_ns > 0))
    assert seen == [(16, 0, True), (4, 0, False)]


def test_the_board_says_from_a_prompts_arrival_to_its_first_token_that_one_is_owed(
    scheduler: Any, node_dir: Path
) -> None:
    """In the queue, between its two steps, in the second of them; and not in a step of other tokens."""
    scheduler.max_num_scheduled_tokens = 16
    board = NodeDir(node_dir).serving_board()

    def owed() -> int:
        assert scheduler.rose is not None
        scheduler.rose._board.write(busy=True)
        record = board.read()
        assert record is not None
        return record.owes_first

    assert owed() == 0
    scheduler.add_request(harness.request("long", max_tokens=8))
    seen = [owed()]
    for _ in range(2):  # 20 tokens: 16, then 4
        output = scheduler.schedule()
        seen.append(owed())
        harness.answer(scheduler, output)
        seen.append(owed())
    assert seen == [1, 1, 1, 1, 0]
    scheduler.schedule()
    assert owed() == 0


def test_no_first_token_is_owed_to_who_has_had_it_or_to_a_session_that_waits_for_its_client(
    scheduler: Any, node_dir: Path
) -> None:
    from vllm.v1.request import RequestStatus

    board = NodeDir(node_dir).serving_board()
    preempted, session = harness.request("preempted"), harness.request("session")
    preempted.append_output_token_ids(9)
    preempted.status = RequestStatus.PREEMPTED
    session.status = RequestStatus.WAITING_FOR_STREAMING_REQ
    scheduler.waiting.add_request(preempted)
    scheduler.kv_holding_waiting.add_request(session)
    scheduler.rose._board.write(busy=False)
    record = board.read()
    assert record is not None
    assert (record.waiting, record.owes_first) == (2, 0)
    scheduler.add_request(harness.request("new"))
    scheduler.rose._board.write(busy=False)
    record = board.read()
    assert record is not None
    assert record.owes_first == 1


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_step_of_the_wall_clock_moves_no_promise_and_breaks_none(
    scheduler: Any, node_dir: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """A machine that was resumed, or whose clock was set: nobody has waited longer for that, nor shorter."""
    board_of = scheduler.rose._board
    board_of.slo_ttft_ns = 600 * 10**9
    scheduler.add_request(harness.request("a"))
    board = NodeDir(node_dir).serving_board()

    def told() -> Any:
        scheduler.rose.first_tokens.look(board_of.slo_ttft_ns / 1e9)
        board_of.write(busy=False)
        record = board.read()
        assert record is not None
        return record

    before = told()
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + jump_s)
    after = told()
    assert after.breaches == 0
    assert abs(after.ttft_deadline_ns - before.ttft_deadline_ns) < 10**9


# --- asynchronous scheduling: the next step is scheduled before the one before it has ended


@pytest.mark.parametrize("scheduler", ["ServingAsyncScheduler"], indirect=True)
def test_the_board_stays_busy_while_a_second_step_is_in_flight(scheduler: Any, node_dir: Path) -> None:
    board = NodeDir(node_dir).serving_board()
    scheduler.add_request(harness.request("a", max_tokens=8))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert [o.total_num_scheduled_tokens for o in (first, second)] == [20, 1]
    scheduler.rose.after_update(first)
    record = board.read()
    assert record is not None
    assert (record.busy, record.step) == (1, 2)
    assert [step[:2] for step in scheduler.rose.learner.measured] == [(20, 0)]
    scheduler.rose.after_update(second)
    record = board.read()
    assert record is not None
    assert record.busy == 0
