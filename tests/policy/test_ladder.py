"""The compute ladder: the best rung that a device offers, never MPS unasked, host gating as the floor."""

from __future__ import annotations

import dataclasses

import pytest

from rose.policy.ladder import DeviceFacts, Rung, choose, green_sms

GPU = DeviceFacts(
    cuda=True,
    green_contexts=True,
    driver=(13, 0),
    one_launching_thread=True,
    mps_programs=True,
    same_user=True,
)


@pytest.mark.parametrize(("idle_share", "rung"), [(True, Rung.IDLE_SHARE), (False, Rung.BUDGET)])
def test_a_cpu_gets_an_idle_share_where_the_kernel_gives_one(idle_share: bool, rung: Rung) -> None:
    choice = choose(DeviceFacts(cuda=False, idle_share=idle_share))
    assert (choice.rung, choice.serialise) == (rung, False)


def test_without_mps_steps_are_serialised_however_well_the_device_splits() -> None:
    choice = choose(GPU)
    assert (choice.rung, choice.serialise) == (Rung.HOST_GATE, True)
    assert "MPS is not allowed" in choice.reason
    assert "time slices" in choice.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mig": True}, "MIG"),
        ({"mps_programs": False}, "no MPS control daemon"),
        ({"same_user": False}, "different users"),
    ],
)
def test_mps_is_taken_only_where_allowed_and_possible(change: dict[str, object], reason: str) -> None:
    allowed = choose(GPU, allow_mps=True)
    assert (allowed.rung, allowed.serialise) == (Rung.MPS, False)
    choice = choose(dataclasses.replace(GPU, **change), allow_mps=True)  # type: ignore[arg-type]
    assert (choice.rung, choice.serialise) == (Rung.HOST_GATE, True)
    assert reason in choice.reason


def test_a_green_context_is_in_force_only_when_asked_for() -> None:
    under_mps = choose(GPU, allow_mps=True, force=Rung.GREEN_CONTEXT)
    assert (under_mps.rung, under_mps.serialise) == (Rung.GREEN_CONTEXT, False)
    assert "time slices" not in under_mps.reason
    without = choose(GPU, force=Rung.GREEN_CONTEXT)
    assert (without.rung, without.serialise) == (Rung.GREEN_CONTEXT, False)
    assert "time slices" in without.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"green_contexts": False}, "no green contexts"),
        ({"driver": (12, 3)}, "CUDA 12.3"),
        ({"one_launching_thread": False}, "several threads"),
        ({"replays_graphs": True}, "CUDA graphs"),
        ({"mig": True}, "MIG"),
    ],
)
def test_a_green_context_that_cannot_be_had_is_the_host_gate_and_the_reason_is_said(
    change: dict[str, object], reason: str
) -> None:
    facts = dataclasses.replace(GPU, **change)  # type: ignore[arg-type]
    choice = choose(facts, allow_mps=True, force=Rung.GREEN_CONTEXT)
    assert (choice.rung, choice.serialise) == (Rung.HOST_GATE, True)
    assert reason in choice.reason


def test_the_host_gate_can_be_asked_for_under_mps() -> None:
    choice = choose(GPU, allow_mps=True, force=Rung.HOST_GATE)
    assert (choice.rung, choice.serialise) == (Rung.HOST_GATE, True)


def test_nobody_forces_mps_where_it_is_not_allowed() -> None:
    assert choose(GPU, force=Rung.MPS).rung is Rung.HOST_GATE
    assert choose(GPU, allow_mps=True, force=Rung.MPS).rung is Rung.MPS


@pytest.mark.parametrize(
    ("total", "share", "step", "least", "sms"),
    [
        (132, 0.5, 8, 8, 64),
        (132, 1.0, 8, 8, 128),  # never all of them
        (132, 0.01, 8, 8, 8),
        (108, 0.5, 2, 4, 54),
        (16, 0.9, 8, 8, 8),
        (40, 0.1, 8, 12, 16),
    ],
)
def test_a_share_of_the_sms_is_what_the_device_can_split_off(
    total: int, share: float, step: int, least: int, sms: int
) -> None:
    assert green_sms(total, share, step, least) == sms


@pytest.mark.parametrize(("total", "step", "least"), [(8, 8, 8), (0, 8, 8), (20, 8, 17)])
def test_a_device_that_cannot_be_split_says_so(total: int, step: int, least: int) -> None:
    with pytest.raises(ValueError, match="cannot be split"):
        green_sms(total, 0.5, step, least)
