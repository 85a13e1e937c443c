"""Two real sides on one node directory: they must not keep each other awake."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState
from tests.plugin import harness
from tests.plugin.stand_in import Beating, eventually
from tests.tiny_model import write_tiny_model
from vllm_plugin.serving_lease import HEARTBEAT_S
from vllm_plugin.watch import Notifier


def test_engines_at_rest_write_heartbeats_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each watches the other's lease: an unconditional write would be answered for ever."""
    node = tmp_path / "node"
    node.mkdir(mode=0o700)
    monkeypatch.setenv("ROSE_DIR", str(node))
    write_tiny_model(tmp_path / "model")
    config = harness.engine_config(tmp_path / "model")
    from vllm_plugin.scheduler import RolloutScheduler, ServingScheduler

    ranks = [harness.write_rank(node, role, mapped=role == "serving") for role in ("serving", "rollout")]
    agent = Beating(NodeDir(node).node_writer())
    agent.write(NodeState(mode=Mode.ON, has_serving=1))
    monkeypatch.setenv("ROSE_ROLE", "serving")
    serving = harness.build(ServingScheduler, config)
    monkeypatch.setenv("ROSE_ROLE", "rollout")
    rollout = harness.build(RolloutScheduler, config)
    rounds = {"serving": 0, "rollout": 0}

    def counted(name: str, side: Any) -> None:
        original = side.rounds.round

        def count(*args: Any) -> None:
            rounds[name] += 1
            original(*args)

        side.rounds.round = count

    counted("serving", serving.rose)
    counted("rollout", rollout.rose)

    serving.rose_attach(harness.engine())
    rollout.rose_attach(harness.engine())
    eventually(lambda: rounds["serving"] > 3 and rounds["rollout"] > 3, "both sides run")
    before = dict(rounds)
    began = time.monotonic()
    eventually(lambda: rounds["rollout"] >= before["rollout"] + 10, "ten more rounds")
    elapsed = time.monotonic() - began

    # A timer round every 0.1 s (rollout) and 0.25 s (serving), plus a few rings: an echo makes thousands.
    assert rounds["rollout"] - before["rollout"] < 30 + 30 * elapsed
    assert rounds["serving"] - before["serving"] < 30 + 30 * elapsed
    for side in (serving.rose, rollout.rose):
        side.stop()
    for writer in (*ranks, agent):
        writer.close()


def test_a_file_that_is_not_there_is_not_looked_for_many_times_a_second() -> None:
    """Each look takes the interpreter from the engine thread; that a peer has come is seen at the next heartbeat."""
    notifier, asked = Notifier(), queue.SimpleQueue[float]()

    class Missing:
        def wait(self, word: int, timeout_s: float, missing_s: float) -> bool:
            notifier.stop()
            asked.put(min(timeout_s, missing_s))
            return False

    notifier.watch(Missing(), "peer")  # type: ignore[arg-type]
    assert asked.get(timeout=20.0) >= HEARTBEAT_S
