"""Kills and stops of agent, guard, rollout engine and sentinel at any moment: no page is there twice, and everybody comes home."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.builds import ROOT
from tests.plugin.scripted_vllm import TOTAL_PAGES


@pytest.mark.parametrize(
    "faults",
    [
        40,
        pytest.param(3000, marks=[pytest.mark.conformance, pytest.mark.timeout(7200)]),
    ],
)
def test_no_page_is_there_twice_and_all_comes_back_whoever_is_killed_or_stopped(faults: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.plugin.storm", f"--faults={faults}", "--seed=15"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout)
    assert seen["worst_pages"] <= TOTAL_PAGES
    assert seen["most_lent"] > 2, "memory really moved"
    assert seen["num_faults"] == faults
    victims = {fault.split()[1] for fault in seen["faults"]}
    assert len(victims) > 3, "who lived at those moments"
    assert seen["errors"] == 0, "production noticed nothing"
    assert seen["left"] == [], "nobody stays behind"
