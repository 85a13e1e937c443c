"""When a job drains: the trajectories that run end, and no new ones begin."""

from __future__ import annotations

from collections import Counter

import pytest

from rose.policy.draining import LEAST_TURNS, Draining
from rose.policy.routing import Candidate, RoutingPolicy
from rose.policy.worker import Tier
from tests.policy.turn_kit import book_of, end, join, submit


class Seen:
    """A policy that keeps what it was asked."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self.policy, self.asked = policy, list[Candidate]()

    def choose(self, turn: Candidate, eligible: object) -> object:
        self.asked.append(turn)
        return self.policy.choose(turn, eligible)  # type: ignore[arg-type]


@pytest.mark.parametrize("running", [0, 40])
def test_a_job_drains_once_more_turns_have_come_since_the_last_beginning_than_are_under_way(
    running: int,
) -> None:
    draining = Draining(Counter({"j": running}))
    most = max(LEAST_TURNS, running)
    draining.submitted("j", begins=True)
    for _ in range(most):
        draining.submitted("j", begins=False)
    assert not draining.drains("j")
    draining.submitted("j", begins=False)
    assert draining.drains("j")
    assert not draining.drains("other")
    draining.submitted("j", begins=True)
    assert not draining.drains("j")


def test_a_job_that_was_forgotten_begins_anew() -> None:
    draining = Draining({})
    for _ in range(LEAST_TURNS + 1):
        draining.submitted("j", begins=False)
    assert draining.drains("j")
    draining.forget("j")
    assert not draining.drains("j")


def test_placement_is_told_that_a_job_drains() -> None:
    book = book_of(max_queued=100)
    seen = Seen(book.policy)
    book.policy = seen  # type: ignore[assignment]
    join(book, "d", Tier.DEDICATED)
    for number in range(LEAST_TURNS + 3):
        submit(book, f"u{number}", at_s=float(number), trajectory_id="t")
        end(book, f"u{number}", 1, at_s=number + 0.5, token_ids=(1,))

    assert [turn.drains for turn in seen.asked] == [False] * (LEAST_TURNS + 1) + [True, True]
