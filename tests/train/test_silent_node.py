"""A node that is lost without a word, as by a cut cable: its connections stay open, and nobody answers."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.train.mortal import tries_of
from tests.train.ray_nodes import HEAD, Machine, Node, assert_applied_once, driver
from tests.train.world import running_world

pytest.importorskip("ray")

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]


def test_the_other_ranks_do_not_wait_for_one_whose_node_is_lost_without_a_word(
    tmp_path: Path, policy_model: Path
) -> None:
    """In the middle of a step, whose collectives alone would wait for five minutes."""
    root = Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp"))  # short: Unix sockets live in it
    machine = Machine(root)
    nodes = [Node(machine, *HEAD, num_cpus=0)]  # on which the driver hangs
    changes = {
        "rollout": {"num_groups": 2, "group_size": 4},
        "env": {"num_managers": 1, "settings": {"num_maps": 4}},
        "trainer": {"num_ranks": 2, "fine_tuning_steps": 0},
        "ray": {"address": "auto"},
    }
    try:
        head = (root / "ray" / "ray_current_cluster").read_text()
        nodes.extend(Node(machine, f"--address={head}") for _ in range(4))
        with running_world(tmp_path, policy_model) as world:
            job = driver(machine, world, head, "tests.train.mortal:silent_trainer", num_steps=2, **changes)
            out, _ = job.communicate(timeout=600)
            said = (tmp_path / "stderr").read_text()
            assert job.returncode == 0, said
            newest = assert_applied_once(world, num_steps=2)
    finally:
        for node in nodes:
            node.kill()
        shutil.rmtree(root, ignore_errors=True)
    assert "a rank is gone, and this one waits for it; ending, to go on from the checkpoint" in said
    assert newest.attempt == 2
    assert [len(tries_of(tmp_path, step)) for step in range(2)] == [1, 2]
    assert [json.loads(line)["event"] for line in out.splitlines() if line.startswith("{")].count(
        "actor_died"
    ) == 1
    places = [(tmp_path / f"nodes-{rank}").read_text().splitlines() for rank in range(2)]
    assert places[1][0] != places[1][1]
