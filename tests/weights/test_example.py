"""The example that any trainer could copy runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rose.auth import Tokens

pytest.importorskip("torch")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "publish_weights.py"


@pytest.mark.parametrize("signed", [True, False])
def test_the_publishing_example_ends_bit_identical(tmp_path: Path, signed: bool) -> None:
    Tokens.generate().save(tmp_path / "tokens.toml")
    env = {**os.environ, "ROSE_TOKEN_FILE": str(tmp_path / "tokens.toml") if signed else ""}
    command = [sys.executable, str(EXAMPLE), f"file://{tmp_path}/store", "--steps", "2"]
    command += [] if signed else ["--unsigned"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["1.0", "anchor"], ["1.1", "delta"], ["1.2", "delta"]]
    assert lines[3] == "a reader is at 1.2; its weights are bit-identical"
