"""What the plugin leaves alone in production, and what a rollout engine does otherwise, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.engine_launcher import run_module
from vllm_plugin import compat


@pytest.mark.parametrize(("role", "stock"), [("serving", True), ("rollout", False)])
def test_productions_message_queue_is_vllms_own_until_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, role: str, stock: bool
) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    before = SpinCondition.wait, SpinCondition.notify
    for name, function in zip(("wait", "notify"), before, strict=True):
        monkeypatch.setattr(SpinCondition, name, function)  # taken back at the end
    monkeypatch.setattr(compat, "_applied", {})
    monkeypatch.setattr(compat, "_spins", False)
    monkeypatch.setenv("ROSE_ROLE", role)
    compat.patch_spin()
    assert ((SpinCondition.wait, SpinCondition.notify) == before) == stock


@pytest.mark.parametrize("how", ["stock", "ours"])
def test_a_reader_that_parks_at_once_needs_a_writer_that_drops_no_word(how: str) -> None:
    done = run_module("tests.plugin.queue_probe", how)
    assert done.returncode == 0, done.stdout
    num_missed = int(done.stdout.splitlines()[-1].removeprefix("without a word: "))
    assert (num_missed > 0) == (how == "stock")


@pytest.mark.parametrize("role", ["serving", "rollout"])
def test_a_rollout_engines_cache_may_be_larger_than_what_is_free_now(
    monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    from vllm.config import CompilationMode

    from vllm_plugin.worker import RoseCPUWorker

    monkeypatch.setenv("ROSE_ROLE", role)
    worker = object.__new__(RoseCPUWorker)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=1 << 50)  # type: ignore[assignment]
    worker.compilation_config = SimpleNamespace(mode=CompilationMode.NONE)  # type: ignore[assignment]
    if role == "rollout":
        assert worker.determine_available_memory() == 1 << 50
    else:  # production backs all of it at once
        with pytest.raises(ValueError, match="less than requested memory"):
            worker.determine_available_memory()
