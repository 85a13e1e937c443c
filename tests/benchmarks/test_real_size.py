"""The benchmark of real sizes, at a tiny one: both trainers take every step that they are asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install '.[trl]' from a checkout of ROSE")

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "training" / "real_size.py"
ARGUMENTS = ("--shape", "tiny", "--steps", "2", "--arms", "1,trl")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real-size") / "result.json"


@pytest.fixture(scope="module")
def taken(result: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROGRAM, *ARGUMENTS, "--json", result]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_our_trainer_and_trl_take_the_same_batches(
    result: Path, taken: subprocess.CompletedProcess[str]
) -> None:
    assert taken.returncode == 0, taken.stderr[-2000:]
    summary = json.loads(result.read_text())["summary"]
    assert summary["1_state_bytes"] == summary["trl_state_bytes"] > 0
    assert [line.count('"step"') for line in taken.stdout.splitlines() if '"step"' in line] == [1] * 4


def test_an_arm_that_is_in_the_file_is_not_taken_again(
    result: Path,
    taken: subprocess.CompletedProcess[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nor is one of other arguments mixed with it."""
    from benchmarks.training import real_size

    assert taken.returncode == 0, taken.stderr[-2000:]
    command = [str(PROGRAM), *ARGUMENTS, "--json", str(result)]
    monkeypatch.setattr(sys, "argv", command)
    real_size.main()
    assert '"step"' not in capsys.readouterr().out

    monkeypatch.setattr(sys, "argv", [*command, "--prompt", "64"])
    with pytest.raises(SystemExit) as ended:
        real_size.main()
    assert (ended.value.code, "other arguments" in capsys.readouterr().err) == (2, True)
