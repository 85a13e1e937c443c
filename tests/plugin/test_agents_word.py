"""Agents whose word production must not take: one that was not told of it, whose engine holds nothing there either, and one that is dead."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState, Phase, ServingLease
from rose.policy.lending_events import ALL_PAGES
from tests.plugin import harness
from vllm_plugin.permit import Permit

LENT = 4
HOLDS_ALL = (ALL_PAGES, "no serving on this device")
LIVES_HERE = (0, "production lives here, and the agent has no [serving]")


@pytest.fixture
def scheduler(config: Any, node_dir: Path, rank: Any) -> Iterator[Any]:
    """Production's, attached to no engine: nothing of it runs but what a test calls."""
    from vllm_plugin.scheduler import ServingScheduler

    scheduler = harness.build(ServingScheduler, config)
    assert scheduler.rose is not None
    yield scheduler
    for writer in (scheduler.rose._lease, scheduler.rose._board.file, scheduler.rose._pagers):
        writer.close()


@pytest.fixture
def say(node_dir: Path) -> Iterator[Callable[..., None]]:
    """What the agent says, which beats when it does."""
    with NodeDir(node_dir).node_writer() as writer:

        def write(**fields: int) -> None:
            writer.write(NodeState(mode=Mode.ON, heartbeat_ns=time.monotonic_ns(), **fields))

        yield write


def test_production_lends_nothing_to_an_agent_that_does_not_know_of_it(
    scheduler: Any, say: Callable[..., None]
) -> None:
    rounds = scheduler.rose.rounds

    def lendable() -> int:
        return rounds._lendable(rounds._read_node())

    say(lend_pages=LENT, has_serving=1)
    assert lendable() == LENT
    say(lend_pages=LENT, has_serving=0)
    assert lendable() == 0


def test_production_lends_nothing_by_what_an_agent_left_before_the_machine_started_anew(
    scheduler: Any, node_dir: Path
) -> None:
    """On a disk its file outlives a loss of power, and its times are of a clock that had run for longer."""
    rounds = scheduler.rose.rounds
    with NodeDir(node_dir).node_writer() as agent:
        future_ns = time.monotonic_ns() + 10**12
        agent.write(NodeState(mode=Mode.ON, has_serving=1, lend_pages=LENT, fixed=1, heartbeat_ns=future_ns))
    assert rounds._lendable(rounds._read_node()) == 0
    assert not scheduler.rose.steps.fixed


def test_a_rollout_engine_holds_nothing_where_production_lives_that_its_agent_does_not_know_of(
    node_dir: Path, say: Callable[..., None]
) -> None:
    permit = Permit(NodeDir(node_dir))
    say(lend_pages=ALL_PAGES, has_serving=0)
    assert permit.pages() == HOLDS_ALL
    with NodeDir(node_dir).serving_lease_writer() as lease:
        lease.write(ServingLease(phase=Phase.STARTING))
        assert permit.pages() == LIVES_HERE
        lease.path.unlink()
        assert permit.pages() == LIVES_HERE, "it lives on without its name"
    assert permit.pages() == HOLDS_ALL


def test_a_lease_that_cannot_be_read_counts_for_as_long_as_it_has_a_writer(
    node_dir: Path, say: Callable[..., None]
) -> None:
    permit = Permit(NodeDir(node_dir))
    say(lend_pages=ALL_PAGES, has_serving=0)
    with NodeDir(node_dir).serving_lease_writer() as lease:
        os.truncate(lease.path, 64)
        assert permit.pages() == LIVES_HERE
    assert permit.pages() == HOLDS_ALL
