"""Kills and stops of agent, guard, rollout engine and sentinel at any moment: no page is there twice, and everybody comes home."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.builds import ROOT
from tests.plugin.scripted_vllm import TOTAL_PAGES
from tests.policy.coserving import live_logs


@dataclass
class Storm:
    num_faults: int
    seen: dict[str, Any]
    logs: Path


@pytest.fixture(
    scope="module",
    params=[40, pytest.param(3000, marks=[pytest.mark.conformance, pytest.mark.timeout(7200)])],
)
def storm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Storm:
    logs = tmp_path_factory.mktemp("storm") / "logs"
    args = [f"--faults={request.param}", "--seed=15", f"--logs={logs}"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.plugin.storm", *args],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Storm(request.param, json.loads(done.stdout), logs)


def test_no_page_is_there_twice_and_all_comes_back_whoever_is_killed_or_stopped(storm: Storm) -> None:
    seen = storm.seen
    assert seen["worst_pages"] <= TOTAL_PAGES
    assert seen["most_lent"] > 2, "memory really moved"
    assert seen["num_faults"] == storm.num_faults
    victims = {fault.split()[1] for fault in seen["faults"]}
    assert len(victims) > 3, "who lived at those moments"
    assert seen["errors"] == 0, "production noticed nothing"
    assert seen["left"] == [], "nobody stays behind"


def test_the_logs_of_all_its_engines_replay_and_agree_with_the_model(storm: Storm) -> None:
    assert len(live_logs.lives(storm.logs, "rollout")) > 2, "engines that were killed, and their successors"

    looked = live_logs.check(storm.logs, total_pages=TOTAL_PAGES, chunk_pages=1)

    assert looked["reports"] > 20, looked
    assert looked["peers"], looked
    assert looked["allowed"], looked
