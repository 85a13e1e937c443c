"""Pipeline parallelism on vLLM's real scheduler: several steps in flight, and deadlines of what a token takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.units import NS_PER_S
from tests.plugin import harness
from tests.plugin.test_board_turns import Device
from tests.tiny_model import write_tiny_model
from vllm_plugin import serving

MS = 1_000_000


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    write_tiny_model(tmp_path / "model")
    config = harness.engine_config(tmp_path / "model", pipeline_parallel_size=2)  # before there is a role
    node = tmp_path / "n"
    node.mkdir(mode=0o700)
    monkeypatch.setenv("ROSE_DIR", str(node))
    monkeypatch.setenv("ROSE_ROLE", "serving")
    device = Device(config, node)
    yield device
    device.close()


def test_two_batches_in_flight_are_timed_each_by_itself(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take turns: one ends every 10 ms, and each takes 15."""
    clock = itertools.count(NS_PER_S, 5 * MS)
    scheduler, side = device.scheduler, device.side
    side._board.slo_tpot_ns = NS_PER_S
    now = [0]
    monkeypatch.setattr(serving.time, "monotonic_ns", lambda: now[0])

    def put_together(name: str = "") -> Any:
        now[0] = next(clock)
        if name:
            scheduler.add_request(harness.request(name, max_tokens=20))
        return scheduler.schedule()

    def ended(output: Any) -> None:
        now[0] = next(clock)
        harness.answer(scheduler, output)

    first, second = put_together("a"), put_together("b")
    assert [list(one.num_scheduled_tokens) for one in (first, second)] == [["a"], ["b"]]
    for _ in range(6):
        ended(first)
        first, second = second, put_together()

    steps = side.steps
    assert [seconds for *_, seconds in side.learner.measured][1:] == pytest.approx([0.015] * 5)
    # Whoever comes next had its last token just before its step was put together, not when the other's ended.
    assert steps.due_since_ns == steps.started_ns == steps.last_token_ns - 5 * MS
    side._board.write(busy=True)
    board = device.node.serving_board().read()
    assert board is not None
    decode_ns = int(side.learner.model.predict(*steps.expects(2)) * NS_PER_S)
    assert board.tpot_deadline_ns == steps.started_ns + NS_PER_S - decode_ns
    assert (board.busy, board.running) == (1, 2)
    assert side.failed is None
