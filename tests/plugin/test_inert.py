"""The plugin is installed in every test environment: switched off it must not exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from vllm_plugin.roles import weights_asked

pytestmark = pytest.mark.timeout(300)  # vLLM is imported, and cores may be taken

PROBE = """
import json, os, sys
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
for number, line in enumerate(sys.stdin):  # vLLM is imported once, each case looks at a copy of this process
    argv, env = json.loads(line)
    if os.fork() == 0:
        break
    os.wait()
else:
    sys.exit()
sys.argv[1:] = argv
os.environ.update(env)
vllm.plugins.load_general_plugins()
after = functions()
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory
print(number, json.dumps([
    f"backend {'rose' in factory._registry}",
    f"loaded {'vllm_plugin' in sys.modules} compat {'vllm_plugin.compat' in sys.modules}",
    f"changed {sorted(name for name in before if after[name] is not before[name])}",
    f"added {hasattr(EngineCore, 'rose_call')}",
]), flush=True)
os._exit(0)
"""


ASKED = """--weight-transfer-config={"backend": "rose"}"""
OFF = ["backend False", "loaded True compat False", "changed []", "added False"]
CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    "nothing": ([], {}),
    "another back end": (['--weight-transfer-config={"backend": "nccl"}'], {}),
    "asked by an option": ([ASKED], {}),
    "asked by a variable": ([], {"ROSE_WEIGHTS": "1"}),
    "a role": ([], {"ROSE_ROLE": "serving"}),
    "a misspelt role": ([], {"ROSE_ROLE": "servign"}),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ROSE_", "VLLM_"))}
    clean["ROSE_DIR"] = str(tmp_path_factory.mktemp("node"))
    result = subprocess.run(
        [sys.executable, "-c", PROBE],
        input="".join(f"{json.dumps(case)}\n" for case in CASES.values()),
        env=clean,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = re.findall(r"^(\d) (\[.*\])$", result.stdout, re.M)
    assert [int(number) for number, _ in found] == list(range(len(CASES))), result.stderr[-2000:]
    return {name: json.loads(text) for name, (_, text) in zip(CASES, found, strict=True)}


@pytest.mark.engine
def test_without_a_role_no_function_of_vllm_is_replaced(seen: dict[str, list[str]]) -> None:
    assert seen["nothing"] == OFF
    assert seen["another back end"] == OFF


@pytest.mark.engine
def test_a_stock_server_that_asks_for_our_weights_gets_a_name_and_on_cpu_plain_layers(
    seen: dict[str, list[str]],
) -> None:
    expected = ["backend True", "loaded True compat True", "changed ['gemm']", "added False"]
    assert seen["asked by an option"] == seen["asked by a variable"] == expected


@pytest.mark.engine
def test_with_a_role_the_probe_does_see_the_patches(seen: dict[str, list[str]]) -> None:
    assert seen["a role"][1:] == [
        "loaded True compat True",
        "changed ['config', 'executor', 'loop']",
        "added True",
    ]


@pytest.mark.engine
def test_a_misspelt_role_leaves_vllm_stock(seen: dict[str, list[str]]) -> None:
    assert seen["a misspelt role"][1:] == ["loaded True compat True", "changed []", "added False"]


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
