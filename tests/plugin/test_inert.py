"""The plugin is installed in every test environment: switched off it must not exist."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_plugin.roles import weights_asked

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
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory
print("backend", "rose" in factory._registry)
print("loaded", "vllm_plugin" in sys.modules, "compat", "vllm_plugin.compat" in sys.modules)
print("changed", sorted(name for name in before if after[name] is not before[name]))
print("added", hasattr(EngineCore, "rose_call"))
"""


ASKED = """--weight-transfer-config={"backend": "rose"}"""
OFF = ["backend False", "loaded True compat False", "changed []", "added False"]


def probe(*argv: str, **env: str) -> list[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ROSE_", "VLLM_"))}
    result = subprocess.run(
        [sys.executable, "-c", PROBE, *argv],
        env=clean | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()[-4:]


@pytest.mark.engine
def test_without_a_role_no_function_of_vllm_is_replaced() -> None:
    assert probe() == OFF
    assert probe('--weight-transfer-config={"backend": "nccl"}') == OFF


@pytest.mark.engine
def test_a_stock_server_that_asks_for_our_weights_gets_a_name_and_on_cpu_plain_layers() -> None:
    expected = ["backend True", "loaded True compat True", "changed ['gemm']", "added False"]
    assert probe(ASKED) == probe(ROSE_WEIGHTS="1") == expected


@pytest.mark.engine
def test_with_a_role_the_probe_does_see_the_patches(tmp_path: os.PathLike[str]) -> None:
    lines = probe(ROSE_ROLE="serving", ROSE_DIR=str(tmp_path))

    assert lines[1:] == ["loaded True compat True", "changed ['config', 'executor', 'loop']", "added True"]


@pytest.mark.engine
def test_a_misspelt_role_leaves_vllm_stock(tmp_path: os.PathLike[str]) -> None:
    lines = probe(ROSE_ROLE="servign", ROSE_DIR=str(tmp_path))

    assert lines[1:] == ["loaded True compat True", "changed []", "added False"]


@pytest.mark.parametrize(
    "argv",
    [
        [ASKED],
        ["--weight_transfer_config", '{"backend":"rose"}'],
        ["--weight-transfer-config.backend", "rose"],
        ["--weight-transfer-config.backend=rose"],
    ],
)
def test_every_spelling_on_vllms_command_line_asks(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSE_WEIGHTS", raising=False)
    assert weights_asked(["vllm", "serve", "model", *argv, "--port=8000"])


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--served-model-name", "rose"],
        ["--weight-transfer-config"],
        ["--weight-transfer-config", "rose"],
        ["--weight-transfer-config", '["rose"]'],
        ["--weight-transfer-config.backend", "nccl", "rose"],
    ],
)
def test_nothing_else_asks(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSE_WEIGHTS", raising=False)
    assert not weights_asked(["vllm", "serve", "model", *argv])
