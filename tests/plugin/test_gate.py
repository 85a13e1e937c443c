"""The gate of a rollout engine: who opens it, who closes it, and when vLLM's loop has to be woken."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.policy.admission import AdmissionParams, StepModel
from vllm_plugin.gate import Gate

NO_BOARD: Any = SimpleNamespace(read=lambda: None, path=Path("serving.board"))


@pytest.fixture
def permit() -> Any:
    """On a device without production every step fits."""
    return SimpleNamespace(has_serving=False, params=AdmissionParams())


@pytest.fixture
def gate(permit: Any) -> Gate:
    running = [SimpleNamespace(num_tokens=5, num_computed_tokens=4)]
    scheduler = SimpleNamespace(running=running, waiting=deque(), kv_holding_waiting=[])
    return Gate(scheduler, permit, StepModel())


def test_it_opens_once_and_only_then_the_loop_is_woken(gate: Gate) -> None:
    assert gate.look(NO_BOARD, 3, notified=True)
    assert (gate.is_open, gate.opened_by) == (True, "event")
    assert not gate.look(NO_BOARD, 3, notified=False), "it is open"
    assert gate.opened_by == "event"


def test_without_memory_it_closes_and_opens_again_when_there_is_some(gate: Gate) -> None:
    gate.look(NO_BOARD, 3, notified=True)
    assert not gate.look(NO_BOARD, 0, notified=True)
    assert not gate.is_open
    assert gate.look(NO_BOARD, 1, notified=False)
    assert gate.opened_by == "timer"


def test_a_step_without_memory_or_of_which_nobody_knows_whether_it_fits_closes_it(
    gate: Gate, permit: Any
) -> None:
    gate.is_open = True
    assert gate.next_step(NO_BOARD, 3) > 0
    assert gate.is_open
    assert gate.next_step(NO_BOARD, 0) == 0
    assert not gate.is_open
    gate.is_open, permit.has_serving = True, True
    assert gate.next_step(NO_BOARD, 3) == 0
    assert not gate.is_open
    assert "no board" in gate.reason
