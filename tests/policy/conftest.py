"""A turn book with two workers; a device whose lending is on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rose.policy.lending_events import Mode, ModeSet
from rose.policy.lending_policy import LendingPolicy
from rose.policy.turns import TurnBook
from rose.policy.worker import Tier
from tests.policy.lending_world import PARAMS, World
from tests.policy.turn_kit import book_of, join


@pytest.fixture
def book() -> Iterator[TurnBook]:
    """Workers ``d`` (dedicated) and ``h`` (harvested), both ready at version 1.0; books checked at the end."""
    book = book_of()
    join(book, "d", Tier.DEDICATED)
    join(book, "h", Tier.HARVESTED)
    yield book
    book.check()


@pytest.fixture
def world() -> Iterator[World]:
    world = World(LendingPolicy(PARAMS))
    world.policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
    yield world
    world.policy.check()
