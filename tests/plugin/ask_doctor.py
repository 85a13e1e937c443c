"""Ask ``python -m vllm_plugin.doctor`` about many command lines in one process: importing vLLM is most of what it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engine_launcher import BASE_ENV, ROOT, SCRUBBED, EngineServer, run_module

Question = Mapping[str, Any]
DOCTOR = "vllm_plugin.doctor"
NOT_TOLD = "only the engine's start tells the kinds of its KV cache"
"""Its note where a command line alone does not decide."""


def ask(
    questions: Sequence[Question], python: str = sys.executable, timeout_s: float = 400
) -> list[dict[str, Any]]:
    """An answer for each ``{"role": ..., "args": [...]}``, of a new interpreter."""
    with tempfile.TemporaryFile("w+") as answers:
        done = subprocess.run(
            [python, "-P", "-m", DOCTOR, str(answers.fileno())],
            input=json.dumps(list(questions)),
            env=_environment(),
            cwd=ROOT,
            pass_fds=(answers.fileno(),),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        answers.seek(0)
        found = [json.loads(line) for line in answers]
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(found) == len(questions)
    return found


def ask_about(server: EngineServer) -> dict[str, Any]:
    """The answer about the command line that ``server`` was started with, of a process forked as that was."""
    question = {"role": server.role, "args": server.argv[1:]}
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers"
        done = run_module(DOCTOR, "3", env=_environment(), stdin=json.dumps([question]), files={3: answers})
        assert done.returncode == 0, done.stdout[-2000:]
        return json.loads(answers.read_text())


def _environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED)}
    return clean | BASE_ENV | {"PYTHONPATH": str(ROOT)}
