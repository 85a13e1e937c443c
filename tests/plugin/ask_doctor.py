"""Ask ``python -m vllm_plugin.doctor`` about many command lines in one process: importing vLLM is most of what it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tests.engine_launcher import BASE_ENV, ROOT, SCRUBBED, EngineServer

Question = Mapping[str, Any]


def ask(
    questions: Sequence[Question], env: Mapping[str, str] | None = None, python: str = sys.executable
) -> list[dict[str, Any]]:
    """An answer for each ``{"role": ..., "args": [...]}``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED)}
    clean |= BASE_ENV | {"PYTHONPATH": str(ROOT)} | dict(env or {})
    with tempfile.TemporaryFile("w+") as answers:
        done = subprocess.run(
            [python, "-P", "-m", "vllm_plugin.doctor", str(answers.fileno())],
            input=json.dumps(list(questions)),
            env=clean,
            cwd=ROOT,
            pass_fds=(answers.fileno(),),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        answers.seek(0)
        found = [json.loads(line) for line in answers]
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(found) == len(questions)
    return found


def ask_about(server: EngineServer) -> dict[str, Any]:
    """The answer about the command line and the environment that ``server`` was started with."""
    (answer,) = ask([{"role": server.role, "args": server.argv[1:]}])
    return answer
