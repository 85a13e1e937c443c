"""A real rollout engine against stand-ins for its node agent and its neighbour: gate, cut, budget, dead-man.

One server for the file; released memory is inaccessible in it, so a use after release would be a crash.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.coserve import record_layout
from rose.coserve.records import Mode, RolloutLease
from tests.engine_launcher import EngineServer
from tests.plugin.stand_in import Host, S, eventually
from tests.tiny_model import write_tiny_model
from vllm_plugin.step_tally import STEPS_TOLD

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
TOTAL_PAGES = 64
LONG = 240
"""Tokens of a turn that something happens to."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def node_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, node_dir: Path) -> Iterator[EngineServer]:
    env = {"ROSE_DIR": str(node_dir), "ROSE_GUARD": "1"}
    with EngineServer(model, role="rollout", env=env) as server:
        yield server


@pytest.fixture
def host(server: EngineServer, node_dir: Path) -> Iterator[Host]:
    """Production idle, 8 pages lent, gate open; memory settled."""
    host = Host(node_dir, total_pages=TOTAL_PAGES)
    host.lend(8)
    settled(server, 8)
    yield host
    host.close()
    settled(server, 0)  # nobody writes any more: the engine gives everything back by itself


def status(server: EngineServer) -> dict[str, Any]:
    answer = server.get("/rose/status")
    answer.raise_for_status()
    return answer.json()["scheduler"]


def settled(server: EngineServer, pages: int) -> dict[str, Any]:
    """Wait until the engine uses exactly ``pages``; its status then."""

    def probe() -> dict[str, Any] | None:
        now = status(server)
        return now if now["usable_pages"] == pages == now["reserved_pages"] else None

    return eventually(probe, f"{pages} usable pages, last {status(server)}")


class Turn(threading.Thread):
    """One greedy turn in the background."""

    def __init__(self, server: EngineServer, tokens: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._call = lambda: server.generate(tokens, max_tokens=max_tokens)
        self.answer: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        self.answer = self._call()

    def choice(self, timeout_s: float = 60.0) -> dict[str, Any]:
        self.join(timeout_s)
        assert not self.is_alive(), "the turn does not end"
        return self.answer["choices"][0]


@functools.cache
def undisturbed(server: EngineServer) -> list[int]:
    """Tokens of a turn of :data:`LONG` that nothing happens to."""
    return Turn(server, PROMPT, LONG).choice()["token_ids"]


def busy_without_slack(host: Host) -> None:
    """Production runs requests whose next tokens are due now."""
    host.set(running=4, busy=1, tpot_deadline_ns=1)


def idle(host: Host) -> None:
    host.set(running=0, busy=0, tpot_deadline_ns=0)


def test_a_turn_runs_inside_the_budget(server: EngineServer, host: Host) -> None:
    assert Turn(server, PROMPT, 20).choice()["finish_reason"] == "length"


def standing(server: EngineServer, host: Host, max_tokens: int) -> Turn:
    """A turn of which a step stands between two layers.

    Production may become busy between two steps, of which then none begins, and on a fast machine a turn may end before: once more.
    """
    layers = host.dir.layers()
    turn: Turn | None = None
    for _ in range(40):
        if turn is None or not turn.is_alive():
            turn = Turn(server, PROMPT, max_tokens)
        host.set(busy=1, waiting=1, owes_first=1)
        until = time.monotonic() + 1.0
        while time.monotonic() < until and turn.is_alive():
            state = layers.read()
            if state is not None and state.waiting:
                return turn
        host.set(busy=0, waiting=0, owes_first=0)
        steps = status(server)["steps"]
        done = functools.partial(
            lambda steps, turn: status(server)["steps"] > steps or not turn.is_alive(), steps, turn
        )
        eventually(done, "the turn goes on")
    raise AssertionError("never: a step stands")


def test_a_step_under_way_waits_between_two_layers_for_a_prompt_and_its_tokens_are_the_same(
    server: EngineServer, host: Host
) -> None:
    before = undisturbed(server)

    def told() -> Any:
        state = host.dir.layers().read()
        assert state is not None
        return state

    host.set(node={"serialise": 1, "stop_at_layers": 1, "slo_ttft_ns": 60 * S})
    eventually(lambda: status(server)["layer_stops"]["on"], "steps may stop")
    stops = told().stops
    turn = standing(server, host, LONG)
    assert turn.is_alive()
    host.set(busy=0, waiting=0, owes_first=0)
    assert turn.choice()["token_ids"] == before
    assert told().stops > stops
    assert told().given_up == 0
    host.set(node={"serialise": 0, "stop_at_layers": 0})


def test_its_lease_tells_the_longest_of_its_last_steps(server: EngineServer, host: Host) -> None:
    lease = host.dir.rollout_lease()
    before = lease.read()
    begun_ns = time.monotonic_ns()
    assert Turn(server, PROMPT, STEPS_TOLD + 10).choice()["finish_reason"] == "length"
    took_ns = time.monotonic_ns() - begun_ns

    def told() -> RolloutLease | None:
        now = lease.read()
        done = now is not None and before is not None and now.steps >= before.steps + STEPS_TOLD
        return now if done else None

    step_ns = eventually(told, "the lease tells the turn's steps").step_ns
    assert 0 < step_ns < took_ns, "of this turn alone: all that are told are its"


def test_a_closed_gate_calls_no_schedule_and_an_event_opens_it(server: EngineServer, host: Host) -> None:
    opened_by: list[str] = []
    while (
        "event" not in opened_by and len(opened_by) < 5
    ):  # one that is late may find the timer there before it
        opened_by.append(closed_and_opened(server, host))
    assert opened_by[-1] == "event"


def closed_and_opened(server: EngineServer, host: Host) -> str:
    """Close the gate before a turn, and open it: who did."""
    busy_without_slack(host)
    eventually(lambda: not status(server)["gate_open"], "gate closed")
    turn = Turn(server, PROMPT, 5)
    eventually(lambda: status(server)["waiting"] == 1, "the turn has arrived in the engine")
    before = status(server)["schedules"]
    for _ in range(5):  # status calls run on the engine thread: the engine is awake and still does not step
        assert status(server)["schedules"] == before
    assert turn.is_alive()

    idle(host)

    assert turn.choice()["finish_reason"] == "length"
    after = status(server)
    assert after["schedules"] > before
    return after["gate_opened_by"]


def test_an_abort_is_served_while_the_gate_is_closed(server: EngineServer, host: Host) -> None:
    busy_without_slack(host)
    eventually(lambda: not status(server)["gate_open"], "gate closed")
    turn = Turn(server, PROMPT, 5)
    internal_id = eventually(lambda: status(server)["request_ids"], "the turn has arrived")[0]
    request_id = internal_id.rpartition("-")[0]  # vLLM appends a suffix of its own to the client's id

    server.post("/rose/abort", {"request_ids": [request_id]}).raise_for_status()

    assert turn.choice()["finish_reason"] == "abort"


def cut_turn(server: EngineServer, host: Host, max_tokens: int) -> dict[str, Any]:
    """A turn under which all memory goes, and comes back behind it.  On a fast machine it may be over before."""
    turn = Turn(server, PROMPT, max_tokens)
    eventually(lambda: status(server)["running"] == 1 or not turn.is_alive(), "the turn runs")
    host.set(node={"lend_pages": 0})
    choice = turn.choice()
    settled(server, 0)
    host.lend(8)
    settled(server, 8)
    return choice


def test_a_cut_returns_partial_tokens_and_the_continued_turn_is_the_uninterrupted_one(
    server: EngineServer, host: Host
) -> None:
    whole = undisturbed(server)

    cut = next(c for c in (cut_turn(server, host, LONG) for _ in range(20)) if c["finish_reason"] != "length")

    assert cut["finish_reason"] == "abort"
    assert cut["stop_reason"] == "rose:kv_reclaimed"
    partial = cut["token_ids"]
    assert len(partial) < LONG
    assert whole[: len(partial)] == partial
    rest = Turn(server, PROMPT + partial, LONG - len(partial)).choice()["token_ids"]
    assert partial + rest == whole


def test_reclaimed_memory_is_given_back_to_the_machine(server: EngineServer, host: Host) -> None:
    Turn(server, PROMPT, 20).choice()
    full = status(server)["resident_bytes"]

    host.set(node={"lend_pages": 2})
    small = settled(server, 2)["resident_bytes"]

    assert full - small == 6 * 2 * 1024 * 1024


def test_tokens_and_log_probs_are_identical_after_reclaim_and_regrowth(
    server: EngineServer, host: Host
) -> None:
    def turn() -> tuple[list[int], list[float]]:
        choice = server.generate(PROMPT, max_tokens=60, logprobs=1)["choices"][0]
        return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]

    before = turn()
    assert len(before[1]) == 60
    for pages in (1, 8, 3, 8):
        host.lend(pages)
        settled(server, pages)

    assert turn() == before


def test_production_claims_memory_directly_without_the_agent(server: EngineServer, host: Host) -> None:
    host.silence(node=False)

    host.set(needed_pages=host.lease.total_pages - 2, pressure_seq=1)

    assert settled(server, 2)["reclaim_seq"] > 0


def test_a_request_larger_than_the_budget_is_answered_at_once(server: EngineServer, host: Host) -> None:
    host.set(node={"lend_pages": 0})
    settled(server, 0)

    choice = Turn(server, PROMPT, 5).choice()

    assert choice["finish_reason"] == "abort"
    assert choice["token_ids"] == []


def test_off_gives_everything_back_and_stops_every_step(server: EngineServer, host: Host) -> None:
    host.set(node={"mode": int(Mode.OFF)})

    now = settled(server, 0)

    assert not now["gate_open"]
    assert now["resident_bytes"] == 0
    assert "off" in now["reason"]


def test_a_silent_node_agent_is_a_dead_one(server: EngineServer, host: Host) -> None:
    host.silence(node=True)

    settled(server, 0)


def test_silent_production_is_dead_production(server: EngineServer, host: Host) -> None:
    host.silence(serving=True)

    settled(server, 0)


@pytest.mark.parametrize("name", ["serving.lease", "serving.board"])
def test_where_a_file_of_production_cannot_be_read_everything_is_given_back(
    server: EngineServer, host: Host, node_dir: Path, name: str
) -> None:
    """Production of another build, say.  A turn is under way, and ends with its tokens."""
    turn = Turn(server, PROMPT, 4000)
    eventually(lambda: status(server)["running"] == 1, "the turn runs")
    host.silence(serving=True)
    path = node_dir / name
    content = path.read_bytes()
    with path.open("r+b") as file:  # its records, and not what says how they are laid out
        file.seek(record_layout.HEADER_BYTES)
        file.write(b"\xff" * (record_layout.WORD_AT - record_layout.HEADER_BYTES))
    try:
        settled(server, 0)
        assert turn.choice()["finish_reason"] == "abort"
        assert "shared files" in status(server)["reason"]
    finally:
        with path.open("r+b") as file:
            file.write(content)


def test_starting_production_gets_everything(server: EngineServer, host: Host) -> None:
    from rose.coserve.records import Phase

    host.set(phase=int(Phase.STARTING))

    settled(server, 0)


def test_it_tells_how_many_turns_it_put_back_for_want_of_memory(server: EngineServer, host: Host) -> None:
    host.lend(1)  # 4,096 tokens less one block, and eight turns that grow to 512 each
    before = settled(server, 1)["num_preemptions"]

    busy_without_slack(host)
    turns = [Turn(server, [*PROMPT, 20 + number], 500) for number in range(8)]
    eventually(lambda: (now := status(server))["running"] + now["waiting"] == 8, "eight turns are there")
    idle(host)  # so they grow side by side

    assert {turn.choice()["finish_reason"] for turn in turns} == {"length"}
    assert status(server)["num_preemptions"] > before


def test_a_deadline_far_away_leaves_the_gate_open(server: EngineServer, host: Host) -> None:
    import time

    host.set(running=4, busy=1, tpot_deadline_ns=time.monotonic_ns() + 3600 * S)

    assert Turn(server, PROMPT, 10).choice()["finish_reason"] == "length"
