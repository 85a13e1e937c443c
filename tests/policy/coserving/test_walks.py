"""The co-serving protocol beyond what can be explored: larger devices than the explorer's, and every kind of fault in one life.

The world, its steps and what has to hold in each state are the explorer's (:mod:`tests.policy.coserving.explorer`).  Here seeded orders are
tried, not all there are; one that breaks something is told without the steps that it breaks without as well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.policy.coserving.bounds import Bounds, Broken, Mutant
from tests.policy.coserving.explorer import FAULTS
from tests.policy.coserving.world import World

STEPS = 400
HOME_STEPS = 2_000
"""Ten times the longest of the first 4,800."""
RARE = ("kill: rollout core", "kill: serving core", "unlink: ", "lose: ", "agent: falls")
"""As likely together as :data:`RARELY` says: else all that may happen had happened before there is a loan."""
RARELY = 0.03
MOODS = ("agent: lend ", "traffic: ", "clock: ")
OFTEN = 0.1


def bounds_of(rng: random.Random) -> Bounds:
    return Bounds(
        chunks=rng.randint(2, 6),
        ranks=rng.randint(1, 3),
        kills=rng.randint(0, 4),
        production_kills=rng.randint(0, 4),
        silences=rng.randint(0, 3),
        unlinks=rng.randint(0, 6),
        lost_wakes=rng.randint(0, 2),
        waits=rng.randint(0, 3),
        slow_reads=rng.random() < 0.5,
        delayed=rng.random() < 0.5,
    )


def choose(steps: Sequence[str], rng: random.Random) -> str:
    lot = rng.random()
    kind = RARE if lot < RARELY else MOODS if lot < RARELY + OFTEN else None
    some = [step for step in steps if (step.startswith(kind) if kind else not step.startswith(RARE + MOODS))]
    return rng.choice(some or steps)


def go_home(world: World) -> None:
    """Nothing is lent any more, no further fault comes, and everybody gets his turn, in an order that chance makes fair."""
    rng = random.Random(0)
    if not world.must_come_home():
        world.do("agent: lend 0")
    for _ in range(HOME_STEPS):
        if world.is_home():
            return
        world.do(rng.choice([step for step in world.steps() if not step.startswith(FAULTS)]))
    raise Broken("production's memory never comes home")


def breaks(bounds: Bounds, mutant: Mutant, order: Sequence[str], *, on_the_way_home: bool) -> bool:
    """Is something broken by these steps, of which those are left out that are not possible where they come?"""
    world = World(bounds, mutant)
    try:
        for step in order:
            if step in world.steps():
                world.do(step)
        if on_the_way_home:
            go_home(world)
    except (AssertionError, ValueError):
        return True
    return False


def walk(seed: int, mutant: Mutant, *, shorten: bool = True) -> None:
    """Raises:
    Broken: An invariant does not hold; the steps that lead there are in the message.
    """
    rng = random.Random(seed)
    bounds = bounds_of(rng)
    world, story, is_over = World(bounds, mutant), list[str](), False
    try:
        for _ in range(STEPS):
            story.append(choose(list(world.steps()), rng))
            world.do(story[-1])
        is_over = True
        go_home(world)
    except (AssertionError, ValueError) as error:
        if shorten:
            story = shortened(bounds, mutant, story, on_the_way_home=is_over)
        raise Broken(f"{error}\n  seed {seed}: {bounds}\n  " + "\n  ".join(story)) from error


def shortened(bounds: Bounds, mutant: Mutant, story: list[str], *, on_the_way_home: bool) -> list[str]:
    """Without the steps that it breaks without as well."""
    size, before = len(story), -1
    while size > 1 or len(story) != before:  # one by one until none can be left out
        before = len(story)
        for at in range(len(story) - size, -1, -size):
            less = story[:at] + story[at + size :]
            if breaks(bounds, mutant, less, on_the_way_home=on_the_way_home):
                story = less
        size = max(1, size // 2)
    return story


@pytest.mark.parametrize(
    "seeds", [range(200), pytest.param(range(200, 50_000), marks=pytest.mark.conformance)]
)
def test_no_page_is_there_twice_and_production_gets_all_of_it_back_in_large_devices(seeds: range) -> None:
    for seed in seeds:
        walk(seed, Mutant())


@pytest.mark.parametrize(
    ("mutant", "seeds"),
    [
        (Mutant(believes_old_reports=True), 20),
        (Mutant(takes_what_is_held=True), 5),
        (Mutant(takes_what_is_stranded=True), 80),
        (Mutant(keeps_a_dead_file=True), 10),
        (Mutant(starts_with_all=True), 20),
        (Mutant(waits_in_silence=True), 5),
        (Mutant(stays_stranded=True), 5),
    ],
    ids=str,
)
def test_what_is_broken_on_purpose_is_met_on_the_first_of_these_walks(mutant: Mutant, seeds: int) -> None:
    with pytest.raises(Broken):  # noqa: PT012  # one of them does
        for seed in range(seeds):
            walk(seed, mutant, shorten=False)


def test_what_breaks_is_told_in_few_steps() -> None:
    with pytest.raises(Broken, match="are mapped on the device") as found:
        walk(0, Mutant(takes_what_is_held=True))
    assert len(str(found.value).splitlines()) < 40
