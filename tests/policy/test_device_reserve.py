"""What a device has free, by its own word, against its reserve: less of it is a cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rose.errors import PolicyError
from rose.policy.baselines import make_lending
from rose.policy.lending import Lending, LendingParams
from rose.policy.lending_events import (
    ALL_PAGES,
    Action,
    KillRollout,
    Mode,
    ModeSet,
    Phase,
    RolloutReported,
    ServingReported,
    SetLend,
    Tick,
)
from rose.policy.lending_policy import LendingPolicy
from rose.units import PAGE_BYTES

RESERVE = 40 * PAGE_BYTES
PARAMS = LendingParams(
    use_window_s=1e-6, grow_period_s=0.1, grow_step_fraction=1.0, cool_down_s=1.0, max_cuts=99
)


class Device:
    """100 pages of an idle serving engine and a rollout engine that obeys when it is told to."""

    def __init__(self, policy: Lending, has_serving: bool = True) -> None:
        self.policy, self.has_serving = policy, has_serving
        self.at_s = 0.0
        self.held = 0
        policy.handle(ModeSet(at_s=0.0, mode=Mode.ON, has_serving=has_serving))

    def look(
        self, free_pages: int | None = 1000, after_s: float = 0.05, *, reserve: int = RESERVE
    ) -> list[Action]:
        """One round of a node agent."""
        self.at_s += after_s
        actions: list[Action] = []
        if self.has_serving:
            actions += self.policy.handle(
                ServingReported(
                    at_s=self.at_s, alive=True, phase=Phase.READY, total_pages=100,
                    reserved_pages=100 - self.held, used_pages=0,
                )
            )  # fmt: skip
        actions += self.policy.handle(
            RolloutReported(at_s=self.at_s, alive=True, phase=Phase.READY, reserved_pages=self.held)
        )
        free = None if free_pages is None else free_pages * PAGE_BYTES
        actions += self.policy.handle(
            Tick(at_s=self.at_s, device_free_bytes=free, device_reserve_bytes=reserve)
        )
        self.policy.check()
        return actions

    def grow(self) -> None:
        for _ in range(60):
            self.look()
            self.held = min(self.policy.lend_pages, 90)


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device(LendingPolicy(PARAMS))
    device.grow()
    assert device.held == 90
    yield device
    device.policy.check()


def test_free_memory_at_the_reserve_cuts_nothing(device: Device) -> None:
    assert device.look(free_pages=40) == []
    assert not device.policy.short_of_reserve


def test_a_breach_is_a_cut_by_what_is_missing_with_a_deadline(device: Device) -> None:
    [cut] = device.look(free_pages=33)
    assert cut == SetLend(
        pages=83, deadline_s=device.at_s + 0.1, reason="less than the reserve of 80.0 MiB is free"
    )
    assert (device.policy.num_cuts, device.policy.num_reserve_breaches) == (1, 1)


def test_a_breach_that_is_not_answered_is_a_kill(device: Device) -> None:
    device.look(free_pages=33)
    actions = [action for _ in range(4) for action in device.look(free_pages=33)]
    assert [type(action) for action in actions] == [KillRollout]


def test_what_is_on_its_way_back_is_not_asked_for_twice(device: Device) -> None:
    device.look(free_pages=30)
    assert device.look(free_pages=30, after_s=0.02) == []
    assert (
        device.look(free_pages=36, after_s=0.02) == []
    )  # part of it is free, and still in the engine's number
    device.held = 80
    assert device.look(free_pages=40, after_s=0.02) == []
    assert device.policy.lend_pages == 80


def test_a_breach_that_goes_on_cuts_further_until_nothing_is_held(device: Device) -> None:
    lent = []
    for _ in range(5):  # somebody else takes what comes back
        device.look(free_pages=20)
        device.held = device.policy.lend_pages
        lent.append(device.held)
    assert lent == [70, 50, 30, 10, 0]
    assert device.policy.num_reserve_breaches == 1


def test_a_loan_grows_again_only_with_a_margin_above_the_reserve(device: Device) -> None:
    device.look(free_pages=30)
    device.held = 80
    for _ in range(100):
        device.look(free_pages=49)
    assert (device.policy.lend_pages, device.policy.short_of_reserve) == (80, True)
    device.look(free_pages=50)
    assert not device.policy.short_of_reserve
    for _ in range(100):
        device.look(free_pages=50)
    assert device.policy.lend_pages == 90


def test_growth_after_a_breach_waits_for_the_cool_down(device: Device) -> None:
    device.look(free_pages=30)
    device.held = 80
    cut_s = device.at_s
    while device.policy.lend_pages == 80:
        device.look()
    assert device.at_s == pytest.approx(cut_s + PARAMS.cool_down_s, abs=0.11)


def test_a_loan_that_nobody_has_taken_yet_is_withdrawn_too() -> None:
    device = Device(LendingPolicy(PARAMS))
    device.look()
    device.look()
    assert device.policy.lend_pages == 90
    device.look(free_pages=39)
    assert device.policy.lend_pages == 0


@pytest.mark.parametrize("name", ["rose", "paper", "static"])
def test_every_policy_obeys_the_reserve(name: str) -> None:
    device = Device(make_lending(name, PARAMS))
    device.grow()
    held = device.held
    assert held >= 80
    device.look(free_pages=15)
    assert device.policy.lend_pages == held - 25


def test_a_dedicated_device_has_a_reserve_too() -> None:
    device = Device(LendingPolicy(PARAMS), has_serving=False)
    device.look()
    assert device.policy.lend_pages == ALL_PAGES
    device.held = 500
    device.look(free_pages=30)
    assert device.policy.lend_pages == 490
    device.held = 490
    device.look(free_pages=41)
    assert device.policy.lend_pages == 490
    device.look()
    assert device.policy.lend_pages == ALL_PAGES


def test_a_device_that_stops_saying_what_is_free_gets_everything_back(device: Device) -> None:
    for _ in range(30):
        device.look(free_pages=None)
    assert device.policy.lend_pages == 90
    for _ in range(20):
        device.look(free_pages=None)
    assert (device.policy.lend_pages, device.policy.blocked) == (
        0,
        "the device does not say what it has free",
    )


def test_an_agent_that_did_not_run_for_a_while_cuts_nothing_when_the_device_answers_again(
    device: Device,
) -> None:
    assert device.look(after_s=60.0) == []


def test_a_device_that_never_said_anything_is_lent_nothing() -> None:
    device = Device(LendingPolicy(PARAMS))
    for _ in range(100):
        device.look(free_pages=None)
    assert device.policy.lend_pages == 0


def test_a_world_that_never_asks_is_not_blocked() -> None:
    device = Device(LendingPolicy(PARAMS))
    for _ in range(100):
        device.look(free_pages=None, reserve=0)
    assert device.policy.lend_pages == 90


def test_a_new_policy_goes_on_with_the_limit(device: Device) -> None:
    device.look(free_pages=30)
    other = make_lending("static", PARAMS)
    other.take_over(device.policy)
    device.policy = other
    device.held = 80
    device.look(free_pages=41)
    assert (other.lend_pages, other.num_reserve_breaches) == (80, 1)


@pytest.mark.parametrize(
    "change", [{"device_free_bytes": -1}, {"device_free_bytes": 0, "device_reserve_bytes": -1}]
)
def test_negative_figures_are_refused(device: Device, change: dict[str, int]) -> None:
    with pytest.raises(PolicyError, match=list(change)[-1]):
        device.policy.handle(Tick(at_s=device.at_s, **change))
