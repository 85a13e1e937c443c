"""What the rollout engine's gate takes from the node agent's file, and its books from its own steps' stops."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import LayerState, Mode, NodeState
from rose.policy.admission import Rule
from rose.units import NS_PER_S
from tests.plugin import harness
from tests.tiny_model import write_tiny_model
from vllm_plugin.step_tally import StepTally


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

    kept = []
    for reserve_pct in (20, 0, -5, 10**9):
        agent.write(
            NodeState(
                mode=Mode.ON,
                slo_ttft_ns=2 * NS_PER_S,
                reserve_pct=reserve_pct,
                heartbeat_ns=time.monotonic_ns(),
            )
        )
        side.permit.pages()
        kept.append(side.permit.params.first_token_reserve_s)

    assert kept == [0.4, 0.0, 0.0, 2.0]
    careful = (Rule.SLACK, False, 1.0)
    assert seen == [(Rule.SLACK, False, 0.1), (Rule.PAPER, True, 1.0), careful, careful, careful]
    side.stop()
    for writer in (rank, agent):
        writer.close()


def test_time_that_a_step_stood_is_taken_off_that_step_and_a_damaged_file_hides_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tmp_path / "node"
    node.mkdir(mode=0o700)
    monkeypatch.setenv("ROSE_DIR", str(node))
    monkeypatch.setenv("ROSE_ROLE", "rollout")
    write_tiny_model(tmp_path / "model")
    from vllm_plugin.scheduler import RolloutScheduler

    rank = harness.write_rank(node, "rollout", mapped=False)
    side = harness.build(RolloutScheduler, harness.engine_config(tmp_path / "model")).rose
    with NodeDir(node).layers_writer() as layers:
        layers.write(LayerState(waited_ns=5))
        assert not side.permit.may_stop
        assert side.layers.stood_ns() == 5, "the step began when it might still stop"
        side.permit.may_stop = True
        layers.write(LayerState(waited_ns=7))
        assert side.layers.stood_ns() == 2
        layers.path.write_bytes(b"\xff" * layers.path.stat().st_size)
        assert side.layers.stood_ns() is None
        assert "rollout.layers" in side.layers.status(side.permit.may_stop)["error"]
        layers.mend()
        layers.write(LayerState(waited_ns=9))
        assert side.layers.stood_ns() is None, "of how many steps, nobody knows"
        assert side.layers.stood_ns() == 0
        assert side.layers.status(side.permit.may_stop)["waited_ns"] == 9
    for writer in (side._lease, side._pagers, rank):
        writer.close()


@pytest.mark.parametrize("stood_ns", [None, 1 << 60])
def test_a_step_whose_time_is_not_known_counts_and_teaches_nothing(stood_ns: int | None) -> None:
    tally = StepTally()
    tally.begin(
        SimpleNamespace(num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1, preempted_req_ids=None),
        [],
    )
    tally.end(stood_ns)
    assert (tally.num_steps, tally.num_decoded) == (1, 1)
    assert (tally.model.num_observed, tally.longest_ns) == (0, 0)
