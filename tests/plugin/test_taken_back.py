"""Memory that comes back for a claim is there for the very next step, though the agent goes on asking for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState
from tests.plugin import harness
from tests.plugin.stand_in import Beating, eventually
from tests.tiny_model import write_tiny_model

LENT_PAGES = 12


def test_what_came_back_is_not_lent_again_before_a_step_could_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tmp_path / "node"
    node.mkdir(mode=0o700)
    monkeypatch.setenv("ROSE_DIR", str(node))
    monkeypatch.setenv("ROSE_ROLE", "serving")
    write_tiny_model(tmp_path / "model")
    from vllm_plugin.scheduler import ServingScheduler

    # A rank that unmaps nothing: a chunk that is claimed is back at once.
    rank, agent = harness.write_rank(node, "serving", mapped=True), Beating(NodeDir(node).node_writer())
    agent.write(NodeState(mode=Mode.ON, lend_pages=LENT_PAGES, has_serving=1))
    config = harness.engine_config(tmp_path / "model")
    config.scheduler_config.max_num_seqs = 512
    config.scheduler_config.max_num_batched_tokens = 1 << 16
    scheduler = harness.build(ServingScheduler, config)
    side: Any = scheduler.rose
    scheduler.rose_attach(harness.engine())

    def lent() -> bool:
        side.before_schedule()
        return len(side.balloon.inflated) == LENT_PAGES

    eventually(lent, "the loan is out")
    for number in range(200):
        scheduler.add_request(harness.request(f"r{number}", num_tokens=100, max_tokens=4))
    harness.step(scheduler)  # as many as fit; the rest waits for memory

    def came_back() -> bool:
        return bool(side.seam.mapped) or side.before_schedule()  # states the claim, until it is answered

    eventually(came_back, "the claim is answered")
    side.before_schedule()

    assert side.balloon.inflated, "some of the loan is out still"
    assert len(side.balloon.inflated) < LENT_PAGES
    side.stop()
    for writer in (rank, agent):
        writer.close()
