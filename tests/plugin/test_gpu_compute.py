"""The compute ladder inside a GPU's rollout worker: which rung, what it does, and what the engine makes of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import NodeState
from rose.errors import LedgerError
from tests.coserve.memory_driver import MemoryDriver
from tests.plugin import harness
from vllm_plugin import compute

ENV = {"ROSE_SM_SHARE": "0.25"}
GREEN = {**ENV, "ROSE_COMPUTE_RUNG": "green-context"}


def put_in_force(
    driver: MemoryDriver, env: dict[str, str], **engine: Any
) -> tuple[dict[str, Any], list[int]]:
    used: list[int] = []
    found = compute.facts(driver, **{"world_size": 1, "eager": True, **engine}, env=env)
    return compute.enforce(driver, found, used.append, env=env), used


@pytest.mark.parametrize("asked", ["", "host-gate", "nonsense", "budget"])
def test_without_mps_steps_are_serialised_and_no_stream_is_made(asked: str) -> None:
    driver = MemoryDriver()
    rung, used = put_in_force(driver, {**ENV, "ROSE_COMPUTE_RUNG": asked})
    assert (rung["rung"], rung["serialise"], rung["sms"]) == ("host-gate", True, None)
    assert (driver.green, used) == ([], [])


def test_steps_are_launched_on_a_stream_of_the_share_that_was_asked_for() -> None:
    driver = MemoryDriver()
    rung, used = put_in_force(driver, GREEN)
    assert (rung["rung"], rung["sms"], rung["serialise"]) == ("green-context", 32, False)
    assert driver.green == [32]
    assert used == [1001]


@pytest.mark.parametrize(
    ("engine", "reason"),
    [({"eager": False}, "CUDA graphs"), ({"world_size": 2}, "several threads")],
)
def test_where_no_green_context_can_be_had_steps_are_serialised_and_no_stream_is_made(
    engine: dict[str, Any], reason: str
) -> None:
    driver = MemoryDriver()
    rung, used = put_in_force(driver, GREEN, **engine)
    assert (rung["rung"], rung["serialise"], rung["sms"]) == ("host-gate", True, None)
    assert reason in rung["reason"]
    assert (driver.green, used) == ([], [])


def test_an_old_driver_has_none() -> None:
    driver = MemoryDriver()
    driver.speaks = (12, 2)
    assert "12.2" in put_in_force(driver, GREEN)[0]["reason"]
    driver.fail_at = {"sm_split": 1}
    driver.calls.clear()
    assert "on offer" in put_in_force(driver, GREEN)[0]["reason"]


def test_a_green_context_that_cannot_be_had_after_all_is_the_next_rung() -> None:
    driver = MemoryDriver()
    driver.fail_at = {"green_stream": 1}
    rung, used = put_in_force(driver, GREEN)
    assert (rung["rung"], rung["serialise"], used) == ("host-gate", True, [])
    assert "OUT_OF_MEMORY" in rung["reason"]
    driver.sms = (8, 8, 8)
    assert "cannot be split" in put_in_force(driver, GREEN)[0]["reason"]


def test_mps_only_with_the_agents_word() -> None:
    driver = MemoryDriver()
    rung, used = put_in_force(driver, {**ENV, "ROSE_ALLOW_MPS": "1"})
    assert (rung["rung"], used) == ("mps", [])
    assert put_in_force(driver, {**ENV, "ROSE_COMPUTE_RUNG": "mps"})[0]["rung"] == "host-gate"


def test_a_green_context_under_mps_is_one_too() -> None:
    rung, used = put_in_force(MemoryDriver(), {**GREEN, "ROSE_ALLOW_MPS": "1"})
    assert (rung["rung"], rung["serialise"], len(used)) == ("green-context", False, 1)


@pytest.mark.parametrize(
    ("text", "share"), [("0.3", 0.3), ("", 0.5), ("x", 0.5), ("0", 0.5), ("7", 0.5), ("nan", 0.5)]
)
def test_a_share_that_is_none_is_the_default(text: str, share: float) -> None:
    assert compute.share_of({"ROSE_SM_SHARE": text}) == share


@pytest.fixture
def rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rollout engine's scheduler on a configuration for a GPU."""
    from tests.tiny_model import write_tiny_model
    from vllm_plugin import compat
    from vllm_plugin.scheduler import RolloutScheduler

    write_tiny_model(tmp_path)
    config = harness.engine_config(tmp_path)  # without a role: vLLM loads the plugin here
    monkeypatch.setenv("ROSE_DIR", str(tmp_path / "n"))
    monkeypatch.setenv("ROSE_ROLE", "rollout")
    monkeypatch.setenv("ROSE_ALLOW_UNMEASURED", "1")
    monkeypatch.setattr(compat, "device", lambda: "cuda")
    config.parallel_config.worker_cls = compat.GPU_WORKER
    with NodeDir(tmp_path / "n").node_writer() as node:
        node.write(NodeState(mode=1))
        scheduler: Any = harness.build(RolloutScheduler, config)
        yield scheduler
        scheduler.rose.stop()


@pytest.mark.parametrize(("serialise", "expected"), [((False, False), False), ((False, True), True)])
def test_one_rank_that_must_be_serialised_serialises_the_engine(
    rollout: Any, serialise: tuple[bool, bool], expected: bool
) -> None:
    rungs = [{"rung": "r", "reason": "", "serialise": one, "sms": None} for one in serialise]
    engine = harness.engine()
    engine.model_executor = SimpleNamespace(
        collective_rpc=lambda name: rungs if name == "rose_ladder" else None
    )
    rollout.rose.attach(engine)
    rollout.rose.permit.pages()
    assert rollout.rose.permit.params.serialise is expected
    assert rollout.rose.ladder["serialise"] is expected


def test_a_driver_that_says_no_is_an_error_of_ours() -> None:
    driver = MemoryDriver()
    driver.fail_at = {"sm_split": 1}
    with pytest.raises(LedgerError):
        driver.sm_split()


# --- nothing compiles later


def test_an_eager_rollout_worker_compiles_nothing_at_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's log-prob functions are under ``torch.compile`` in eager mode too: seconds in which a reclaim ends in a kill."""
    import torch
    import torch._dynamo
    from vllm.config import CompilationMode
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_plugin import selfcheck
    from vllm_plugin.gpu_worker import RoseGPUWorker

    compiled: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def init_device(self: Any) -> None:
        self.device = torch.device("cpu")

    monkeypatch.setenv("ROSE_ROLE", "rollout")
    monkeypatch.setattr(Worker, "init_device", init_device)
    for module, name in (
        (selfcheck, "require"),
        (compute, "cap_torch_memory"),
        (compute, "facts"),
        (compute, "enforce"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    worker: Any = object.__new__(RoseGPUWorker)
    worker._rose_driver = object()
    worker.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(mode=CompilationMode.NONE))
    worker.cache_config = SimpleNamespace(gpu_memory_utilization=0.5)
    worker.parallel_config = SimpleNamespace(world_size=1)
    worker.model_config = SimpleNamespace(enforce_eager=True)
    with torch._dynamo.config.patch(disable=False):
        logprobs = torch.compile(lambda x: x + 1, backend=backend)
        worker.init_device()
        logprobs(torch.ones(1))
    assert compiled == []
