"""Real engines of two tensor-parallel ranks: what one lease lends and gives back is the same on both, and usable is the minimum.

Both ranks' KV memory is on this one host; on GPUs each rank has a device of its own, and pages are per rank here as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, Phase
from tests.engine_launcher import EngineServer
from tests.plugin.conftest import newest_only
from tests.plugin.stand_in import Host, S, eventually
from tests.plugin.test_rollout_engine import Turn, settled, standing, status
from tests.plugin.test_serving_engine import Agent, complete
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(240)]

ARGS = ["--tensor-parallel-size=2", "--worker-extension-cls=tests.plugin.pager_faults.HeldPager"]
ENV = {"ROSE_GUARD": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "rose"}
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def start(tmp_path_factory: pytest.TempPathFactory, role: Any) -> tuple[EngineServer, Path]:
    model, node = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("node")
    node.chmod(0o700)
    write_tiny_model(model)
    return EngineServer(model, role=role, env={**ENV, "ROSE_DIR": str(node)}, args=ARGS), node


@pytest.fixture(scope="module")
def rollout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineServer, Host]]:
    engine, node = start(tmp_path_factory, "rollout")
    with engine as server:
        host = Host(node)
        yield server, host
        host.close()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineServer, Agent]]:
    engine, node = start(tmp_path_factory, "serving")
    with engine as server:
        agent = Agent(node)
        eventually(lambda: agent.lease().phase == Phase.READY, "serving is ready")
        yield server, agent
        agent.close()


def on_ranks(node: NodeDir, role: Any) -> list[int]:
    """Pages that each rank has mapped."""
    records = [node.rank(role, rank).read() for rank in node.ranks(role)]
    return [record.resident_pages if record is not None else -1 for record in records]


def hold(server: EngineServer, rank: int, held: bool) -> None:
    answer = server.post("/collective_rpc", {"method": "hold_pager", "args": [rank, held]})
    answer.raise_for_status()
    assert sorted(answer.json()["results"]) == ["False", "True"]  # exactly one rank is meant


@newest_only
def test_a_rollout_engine_takes_and_gives_back_on_both_ranks(rollout: tuple[EngineServer, Host]) -> None:
    server, host = rollout
    host.lend(8)
    settled(server, 8)
    assert on_ranks(host.dir, "rollout") == [8, 8]
    before = Turn(server, PROMPT, 40).choice()["token_ids"]
    full = status(server)["resident_bytes"]

    host.set(node={"lend_pages": 2})
    small = settled(server, 2)["resident_bytes"]
    assert on_ranks(host.dir, "rollout") == [2, 2]
    assert full - small == 2 * 6 * 2 * 1024 * 1024  # by the kernel's count, over both ranks
    assert Turn(server, PROMPT, 40).choice()["token_ids"] == before


@newest_only
@pytest.mark.conformance
def test_a_step_of_two_ranks_waits_between_two_layers_and_its_tokens_are_the_same(
    rollout: tuple[EngineServer, Host],
) -> None:
    server, host = rollout
    host.lend(8)
    settled(server, 8)
    before = Turn(server, PROMPT, 400).choice()["token_ids"]
    host.set(node={"serialise": 1, "stop_at_layers": 1, "slo_ttft_ns": 60 * S})
    eventually(lambda: status(server)["layer_stops"]["on"], "steps may stop")
    turn = standing(server, host, 400)
    assert turn.is_alive()
    host.set(busy=0, waiting=0, owes_first=0)
    assert turn.choice()["token_ids"] == before
    host.set(node={"serialise": 0, "stop_at_layers": 0})


@newest_only
def test_what_a_rollout_engine_can_use_is_what_its_slowest_rank_has(
    rollout: tuple[EngineServer, Host],
) -> None:
    server, host = rollout
    host.lend(2)
    settled(server, 2)
    hold(server, 1, True)
    try:
        host.lend(8)
        eventually(lambda: on_ranks(host.dir, "rollout") == [8, 2], "rank 0 has mapped")
        now = status(server)
        assert (now["usable_pages"], now["reserved_pages"]) == (2, 8)
        assert Turn(server, PROMPT, 20).choice()["finish_reason"] == "length"
    finally:
        hold(server, 1, False)
    settled(server, 8)

    hold(server, 1, True)
    try:
        host.set(node={"lend_pages": 1})
        eventually(lambda: on_ranks(host.dir, "rollout") == [1, 8], "rank 0 has given back")
        now = status(server)
        assert (now["usable_pages"], now["reserved_pages"]) == (1, 8)  # production may have none of it yet
    finally:
        hold(server, 1, False)
    assert settled(server, 1)
    assert on_ranks(host.dir, "rollout") == [1, 1]


def test_production_lends_on_both_ranks_and_gets_everything_back(serving: tuple[EngineServer, Agent]) -> None:
    server, agent = serving
    before = complete(server, PROMPT, 40)
    agent.write(lend_pages=10)
    eventually(lambda: agent.lease().lent_pages == 10, "10 pages lent")
    assert on_ranks(agent.dir, "serving") == [agent.total - 10] * 2
    assert complete(server, PROMPT, 40) == before

    agent.write(lend_pages=0)
    eventually(lambda: on_ranks(agent.dir, "serving") == [agent.total] * 2, "both ranks have it back")
    assert agent.lease().reserved_pages == agent.total
    assert complete(server, PROMPT, 40) == before


def test_production_lends_only_what_both_ranks_gave_up(serving: tuple[EngineServer, Agent]) -> None:
    server, agent = serving
    hold(server, 1, True)
    try:
        agent.write(lend_pages=10)
        eventually(
            lambda: on_ranks(agent.dir, "serving") == [agent.total - 10, agent.total], "rank 0 has unmapped"
        )
        complete(server, PROMPT)
        assert agent.lease().lent_pages == 0
    finally:
        hold(server, 1, False)
    eventually(lambda: agent.lease().lent_pages == 10, "10 pages lent")
    agent.write(mode=int(Mode.OFF))
    eventually(lambda: on_ranks(agent.dir, "serving") == [agent.total] * 2, "both ranks have it back")
