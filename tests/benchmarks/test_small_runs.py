"""A training run of the benchmarks in one process: its turns are played, whatever the benchmark calls its job."""

from __future__ import annotations

from pathlib import Path

from benchmarks.training import small_runs
from rose.demo.models import POLICY, ensure_model
from rose.testing.toy_recipe import TOY_RECIPE


def test_a_run_ends_with_its_steps_and_says_what_it_trained_on(tmp_path: Path) -> None:
    job = {
        "num_steps": 2,
        "env": {"settings": {"num_maps": 2, "max_turns": 3}},
        "rollout": {"mode": "asynchronous", "alpha": 1, "num_groups": 2, "group_size": 2, "max_tokens": 1},
        "trainer": {**TOY_RECIPE, "keep_checkpoints": 1},
    }
    found = small_runs.train(tmp_path, ensure_model(POLICY), job, num_engines=2, seed=0)

    assert [record["step"] for record in found["records"]] == [0, 1]
    assert sum(one["trained"] for one in found["trajectories"]) >= 4
