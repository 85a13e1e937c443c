"""The benchmark of real sizes, at a tiny one: both trainers take every step that they are asked for."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.training import real_size
from tests.engine_launcher import fork_piped

pytest.importorskip("trl", reason="TRL is not installed: pip install '.[trl]' from a checkout of ROSE")

ARGUMENTS = ("--shape", "tiny", "--steps", "2", "--arms", "1,trl")


class FromImage:
    """What the program uses of a :class:`subprocess.Popen`: the same program, forked from an image that has torch imported."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> None:
        self._process, self.stdout = fork_piped("benchmarks.training.real_size", command[2:], env)

    def wait(self) -> int:
        return self._process.wait(250)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self.stdout.close()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real-size") / "result.json"


@pytest.fixture(scope="module")
def said(result: Path) -> str:
    """By the program, whose arms are processes of their own."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", ["real_size.py", *ARGUMENTS, "--json", str(result)])
        patch.setattr(real_size, "subprocess", SimpleNamespace(Popen=FromImage, PIPE=subprocess.PIPE))
        real_size.main()
    return out.getvalue()


def test_our_trainer_and_trl_take_the_same_batches(result: Path, said: str) -> None:
    summary = json.loads(result.read_text())["summary"]
    assert summary["1_state_bytes"] == summary["trl_state_bytes"] > 0
    assert [line.count('"step"') for line in said.splitlines() if '"step"' in line] == [1] * 4


@pytest.mark.usefixtures("said")
def test_an_arm_that_is_in_the_file_is_not_taken_again(
    result: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is one of other arguments mixed with it."""
    command = ["real_size.py", *ARGUMENTS, "--json", str(result)]
    monkeypatch.setattr(sys, "argv", command)
    real_size.main()
    assert '"step"' not in capsys.readouterr().out

    monkeypatch.setattr(sys, "argv", [*command, "--prompt", "64"])
    with pytest.raises(SystemExit) as ended:
        real_size.main()
    assert (ended.value.code, "other arguments" in capsys.readouterr().err) == (2, True)
