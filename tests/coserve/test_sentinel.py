"""The sentinel: an engine that owes memory ends although its node agent is stopped; nobody else is touched."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.coserve.ledger import Mode, NodeDir, NodeState, Phase, RolloutLease, ServingBoard, ServingLease
from rose.coserve.sentinel import GRACE_S, Sentinel, owed_pages
from rose.policy.compat import Support
from tests.coserve.conftest import Device, until

NODE = NodeState(mode=Mode.ON, lend_pages=10, has_serving=1)
SERVING = ServingLease(phase=Phase.READY, support=Support.ELASTIC, total_pages=20, reserved_pages=8)
ROLLOUT = RolloutLease(phase=Phase.READY, reserved_pages=10)


@pytest.mark.parametrize(
    ("change", "owed"),
    [
        ({}, 0),
        ({"node": dataclasses.replace(NODE, lend_pages=4)}, 6),
        ({"board": ServingBoard(needed_pages=13)}, 3),  # 20 - 13 = 7 are left
        ({"serving": dataclasses.replace(SERVING, reserved_pages=15)}, 5),
        ({"serving": dataclasses.replace(SERVING, phase=Phase.STARTING)}, 10),
        ({"serving_alive": False}, 10),
        ({"serving": None}, 10),
        ({"serving": dataclasses.replace(SERVING, support=Support.COMPUTE_ONLY, reserved_pages=20)}, 0),
        ({"rollout": None}, 0),
        ({"node": None}, 0),
        ({"node": dataclasses.replace(NODE, has_serving=0), "serving_alive": False}, 0),
    ],
)
def test_what_is_owed_follows_from_the_files_alone(change: dict[str, object], owed: int) -> None:
    calm: dict[str, object] = {
        "node": NODE,
        "serving": SERVING,
        "serving_alive": True,
        "board": ServingBoard(),
        "rollout": ROLLOUT,
    }
    assert owed_pages(**{**calm, **change}) == owed  # type: ignore[arg-type]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[NodeDir]:
    node = NodeDir(tmp_path / "n")
    writers = [node.node_writer(), node.serving_lease_writer(), node.rollout_lease_writer()]
    for writer, record in zip(writers, (NODE, SERVING, ROLLOUT), strict=True):
        writer.write(record)  # type: ignore[arg-type]
    node.writers = writers  # type: ignore[attr-defined]
    yield node
    for writer in writers:
        writer.close()


def test_it_waits_for_the_deadline_and_the_agents_turn_and_gives_time_to_one_that_obeys(
    files: NodeDir,
) -> None:
    kills: list[int] = []
    sentinel = Sentinel(files, lambda: kills.append(1), deadline_s=0.1)
    node, _, rollout = files.writers  # type: ignore[attr-defined]
    assert not sentinel.look(0.0)
    node.write(dataclasses.replace(NODE, lend_pages=2))
    patience_s = 0.1 + GRACE_S
    assert not sentinel.look(1.0)
    assert not sentinel.look(1.0 + patience_s - 0.01)
    rollout.write(dataclasses.replace(ROLLOUT, reserved_pages=5))  # it gives back, slowly
    assert not sentinel.look(1.0 + patience_s + 0.01)
    assert not sentinel.look(1.0 + 2 * patience_s)
    assert sentinel.look(1.0 + 2 * patience_s + 0.02)
    assert kills == [1]


def test_an_engine_that_obeys_in_time_is_left_alone(files: NodeDir) -> None:
    sentinel = Sentinel(files, lambda: pytest.fail("killed"), deadline_s=0.1)
    node, _, rollout = files.writers  # type: ignore[attr-defined]
    for cycle in range(20):
        node.write(dataclasses.replace(NODE, lend_pages=2))
        assert not sentinel.look(cycle * 1.0)
        rollout.write(dataclasses.replace(ROLLOUT, reserved_pages=2))
        assert not sentinel.look(cycle * 1.0 + 0.3)
        rollout.write(ROLLOUT)
        node.write(NODE)
        assert not sentinel.look(cycle * 1.0 + 0.6)


def test_without_a_configured_deadline_its_own_steps_say_how_long_the_engine_may_take(files: NodeDir) -> None:
    kills: list[int] = []
    sentinel = Sentinel(files, lambda: kills.append(1), deadline_s=None)
    node, _, rollout = files.writers  # type: ignore[attr-defined]
    rollout.write(dataclasses.replace(ROLLOUT, step_ns=1_000_000_000))
    node.write(dataclasses.replace(NODE, lend_pages=2))
    assert not sentinel.look(1.0)
    assert not sentinel.look(1.0 + 2.1 + GRACE_S - 0.01)
    assert sentinel.look(1.0 + 2.1 + GRACE_S + 0.01)
    assert kills == [1]


async def test_with_the_agent_and_the_engine_stopped_the_memory_comes_back(device: Device) -> None:
    """The agent runs in this process: it is stopped by not letting its loop run, the engine by SIGSTOP."""
    production = device.produce()
    agent = device.agent(lending={"reclaim_deadline_s": 0.2})
    await until(lambda: device.resident_pages() == 16, "16 pages lent")
    pid = int(device.report()["pid"])
    rank = NodeDir(device.dir).rank("rollout", 0)
    os.kill(pid, signal.SIGSTOP)
    production.needed = 20
    production.publish()
    deadline = 400
    while rank.alive() and deadline:  # blocks the loop: neither the agent nor production takes a step
        deadline -= 1
        signal.sigtimedwait([], 0.05)
    assert not rank.alive()
    assert agent.engine.num_kills == 0  # it was not the agent
    production.needed = 0
