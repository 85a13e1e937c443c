"""NVIDIA's MPS beside a rollout engine: is a daemon there, what the engine's environment says of it, and who ends a client's work.

MPS puts both engines into one fault domain, so it is used only where the operator says ``engine.allow_mps = true``.  Without that word the engine
is kept away from a daemon that happens to run: CUDA would connect to it unasked.  **Nothing here has met a real MPS yet.**
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rose.coserve.node_config import NodeConfig

CONTROL = "nvidia-cuda-mps-control"
ASK_S = 2.0
_PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
_STOP = Path(__file__).with_name("mps_stop.py")


def find_control(config: NodeConfig) -> str | None:
    """The control program, where the operator allows MPS and its daemon answers.  Takes up to ``ASK_S``."""
    program = shutil.which(CONTROL) if config.engine.allow_mps else None
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program],
            input="get_server_list\n",
            env={**os.environ, **_where(config)},
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return program if done.returncode == 0 else None


def environment(config: NodeConfig, control: str | None) -> dict[str, str | None]:
    """What the engine is told: a client below normal priority on a part of the SMs, or no client at all."""
    if control is None:
        return {_PIPE_DIRECTORY: str(config.dir / "no-mps"), "ROSE_ALLOW_MPS": None}
    share = config.engine.sm_share
    if config.engine.compute_rung == "green-context":
        share = 1.0  # the green context takes its share of what a client has
    return {
        **_where(config),
        "CUDA_MPS_CLIENT_PRIORITY": "1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(max(1, round(100 * share))),
        "ROSE_ALLOW_MPS": "1",
    }


def before_kill(control: str | None) -> tuple[str, ...]:
    """For ``ProcSpec.before_kill``."""
    return (sys.executable, "-I", "-S", str(_STOP), control) if control is not None else ()


def _where(config: NodeConfig) -> dict[str, str]:
    given = config.engine.mps_pipe_directory
    return {_PIPE_DIRECTORY: str(given)} if given is not None else {}
