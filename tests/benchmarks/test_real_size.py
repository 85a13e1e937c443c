"""The benchmark of real sizes, at a tiny one: both trainers take every step that they are asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install '.[trl]' from a checkout of ROSE")

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "training" / "real_size.py"


def test_our_trainer_and_trl_take_the_same_batches(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [
        sys.executable,
        PROGRAM,
        "--shape",
        "tiny",
        "--steps",
        "2",
        "--arms",
        "1,trl",
        "--json",
        result,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-2000:]
    summary = json.loads(result.read_text())["summary"]
    assert summary["1_state_bytes"] == summary["trl_state_bytes"] > 0
    assert [line.count('"step"') for line in ran.stdout.splitlines() if '"step"' in line] == [1] * 4


def test_an_arm_that_is_in_the_file_is_not_taken_again(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, PROGRAM, "--shape", "tiny", "--steps", "1", "--arms", "1", "--json", result]
    first = subprocess.run(command, capture_output=True, text=True, timeout=140)
    again = subprocess.run(command, capture_output=True, text=True, timeout=140)
    other = subprocess.run([*command, "--prompt", "64"], capture_output=True, text=True, timeout=140)
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert ('"step"' in first.stdout, '"step"' in again.stdout) == (True, False)
    assert (other.returncode, "other arguments" in other.stderr) == (2, True)
