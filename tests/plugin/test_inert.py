"""The plugin is installed in every test environment: switched off it must not exist."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROBE = """
import sys
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor.abstract import Executor
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.distributed.device_communicators import shm_broadcast
import vllm.model_executor.layers.utils as layer_utils
import vllm.plugins

def functions():
    return {
        "config": EngineArgs.create_engine_config,
        "loop": EngineCoreProc.run_busy_loop,
        "executor": Executor.__init__,
        "schedule": Scheduler.schedule,
        "queue wait": shm_broadcast.SpinCondition.wait,
        "queue word": shm_broadcast.SpinCondition.notify,
        "gemm": layer_utils.dispatch_cpu_unquantized_gemm,
    }

before = functions()
vllm.plugins.load_general_plugins()
after = functions()
print("loaded", "vllm_plugin" in sys.modules, "compat", "vllm_plugin.compat" in sys.modules)
print("changed", sorted(name for name in before if after[name] is not before[name]))
print("added", hasattr(EngineCore, "rose_call"))
"""


def probe(**env: str) -> list[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ROSE_", "VLLM_"))}
    result = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=clean | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()[-3:]


@pytest.mark.engine
def test_without_a_role_no_function_of_vllm_is_replaced() -> None:
    assert probe() == ["loaded True compat False", "changed []", "added False"]


@pytest.mark.engine
def test_with_a_role_the_probe_does_see_the_patches(tmp_path: os.PathLike[str]) -> None:
    lines = probe(ROSE_ROLE="serving", ROSE_DIR=str(tmp_path))

    assert lines == ["loaded True compat True", "changed ['config', 'executor', 'loop']", "added True"]


@pytest.mark.engine
def test_a_misspelt_role_leaves_vllm_stock(tmp_path: os.PathLike[str]) -> None:
    lines = probe(ROSE_ROLE="servign", ROSE_DIR=str(tmp_path))

    assert lines == ["loaded True compat True", "changed []", "added False"]
