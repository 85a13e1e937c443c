"""An exception in any hook of ours on the serving side ends in state off; vLLM schedules on as without us."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.coserve.ledger import NodeDir, Phase
from tests.plugin import harness
from tests.plugin.stand_in import eventually
from tests.tiny_model import write_tiny_model

HOOKS = [
    "before_schedule",
    "after_schedule",
    "after_update",
    "usage",
    "reset_prefix_cache",
    "_write_board",
    "_round",
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return harness.engine_config(folder)


@pytest.fixture
def node_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "node"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("ROSE_DIR", str(path))
    monkeypatch.setenv("ROSE_ROLE", "serving")
    return path


@pytest.fixture
def scheduler(config: Any, node_dir: Path) -> Iterator[Any]:
    from vllm_plugin.scheduler import ServingScheduler

    rank = harness.write_rank(node_dir, "serving", mapped=True)
    scheduler = harness.build(ServingScheduler, config)
    assert scheduler.rose is not None
    # Boundary: of the engine our side uses the input queue and the idle callbacks only.
    engine = SimpleNamespace(input_queue=queue.Queue(), _idle_state_callbacks=[], is_running=lambda: True)
    scheduler.rose_attach(engine)
    yield scheduler
    scheduler.rose.stop()
    rank.close()


def run(scheduler: Any) -> list[dict[str, int]]:
    """Three requests to their end; what was scheduled, step by step."""
    for number in range(3):
        scheduler.add_request(harness.request(f"r{number}", num_tokens=100 + number))
    steps = []
    while scheduler.requests:
        steps.append(dict(harness.step(scheduler).num_scheduled_tokens))
        scheduler.make_stats()
        assert len(steps) < 100
    return steps


def stock_steps(config: Any) -> list[dict[str, int]]:
    from vllm.v1.core.sched.scheduler import Scheduler

    return run(harness.build(Scheduler, config))


def test_switched_on_it_schedules_what_vllm_schedules(scheduler: Any, config: Any) -> None:
    assert run(scheduler) == stock_steps(config)
    assert scheduler.rose.failed is None


@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_a_hook_switches_off_and_vllm_goes_on(
    scheduler: Any, config: Any, node_dir: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("injected")

    if hook == "reset_prefix_cache":  # called only while something is lent
        assert scheduler.rose.balloon.inflate_free(1, budget_s=1.0)
    monkeypatch.setattr(scheduler.rose, hook, broken)

    assert run(scheduler) == stock_steps(config)
    scheduler.reset_prefix_cache()

    assert "injected" in eventually(lambda: scheduler.rose.failed, "the failure is noted")
    monkeypatch.undo()
    lease = NodeDir(node_dir).serving_lease()
    eventually(lambda: lease.read().phase == Phase.OFF, "phase is off")  # type: ignore[union-attr]


def scribble(path: Path, at: int) -> None:
    """What a program that does not own the file might do to it: it holds no lock and asks nobody."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_strangers_write_to_the_board_is_noticed_at_the_next_step(
    scheduler: Any, config: Any, node_dir: Path
) -> None:
    scheduler.add_request(harness.request("a"))
    harness.step(scheduler)
    assert scheduler.rose.failed is None
    for slot in range(2):
        scribble(node_dir / "serving.board", 128 + slot * 128 + 16)
    harness.step(scheduler)
    assert "written by another process" in scheduler.rose.failed
    lease = NodeDir(node_dir).serving_lease()
    eventually(lambda: lease.read().phase == Phase.OFF, "phase is off")  # type: ignore[union-attr]
    harness.step(scheduler)  # vLLM goes on


@pytest.mark.parametrize("name", ["serving.lease", "serving.chunks"])
def test_a_strangers_write_to_what_the_memory_hangs_on_is_noticed(
    scheduler: Any, node_dir: Path, name: str
) -> None:
    path = node_dir / name
    scribble(path, path.stat().st_size - 1 if name == "serving.chunks" else 64)  # a chunk's mark; the number
    eventually(lambda: scheduler.rose.failed, f"the write to {name} is noticed")
    assert "written by another process" in scheduler.rose.failed


def test_without_elastic_workers_the_scheduler_is_stock(config: Any, node_dir: Path) -> None:
    from vllm_plugin.scheduler import ServingScheduler

    scheduler = harness.build(ServingScheduler, config)  # no rank file: the worker has no page pool

    assert scheduler.rose is None
    assert run(scheduler) == stock_steps(config)
