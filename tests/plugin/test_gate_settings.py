"""What the rollout engine's gate takes from the node agent's file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState
from rose.policy.admission import Rule
from tests.plugin import harness
from tests.tiny_model import write_tiny_model


def test_rule_serialise_and_delay_are_obeyed_and_nonsense_is_the_careful_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tmp_path / "node"
    node.mkdir(mode=0o700)
    monkeypatch.setenv("ROSE_DIR", str(node))
    monkeypatch.setenv("ROSE_ROLE", "rollout")
    write_tiny_model(tmp_path / "model")
    from vllm_plugin.scheduler import RolloutScheduler

    rank, agent = harness.write_rank(node, "rollout", mapped=False), NodeDir(node).node_writer()
    scheduler = harness.build(RolloutScheduler, harness.engine_config(tmp_path / "model"))
    side = scheduler.rose
    scheduler.rose_attach(harness.engine())
    seen = []
    for rule, serialise, delay_pct in ((0, 0, 10), (1, 1, 100), (77, 0, 0), (0, 0, 101), (0, 0, -5)):
        agent.write(
            NodeState(
                mode=Mode.ON,
                rule=rule,
                serialise=serialise,
                delay_pct=delay_pct,
                heartbeat_ns=time.monotonic_ns(),
            )
        )
        side.permit.pages()
        params = side.permit.params
        seen.append((params.rule, params.serialise, params.delay))

    careful = (Rule.SLACK, False, 1.0)
    assert seen == [(Rule.SLACK, False, 0.1), (Rule.PAPER, True, 1.0), careful, careful, careful]
    side.stop()
    for writer in (rank, agent):
        writer.close()
