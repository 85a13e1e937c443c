"""Every order of events in a small device, one by one: two books, their pagers, and processes that stop and die anywhere.

The device is :mod:`tests.policy.coserving.world`.  What may happen in it, and how often, are its bounds; ``make test`` looks at two chunks
and one of: a death of the rollout engine, one of production, one silence of the agent, any one file deleted (and a wake lost), late
reports, two ranks, a rollout engine slow to act on what it read, a peer that is waited for.  Larger ones, and several of these together, by hand (:data:`LARGER`).

Safety, in every state: memory that is really mapped, of both engines, is at most what the device has; no step meets memory that is not
there; what an engine holds it has said.  Liveness: from every state in which nothing is lent any more (or the agent, who lends, is
silent), without any further fault, production gets all of it back on some path (``home``), that is, nothing is stranded for good.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tests.policy.coserving.bounds import Bounds, Broken, Mutant
from tests.policy.coserving.world import World


@dataclass(frozen=True, kw_only=True)
class Explored:
    """What an exploration saw."""

    num_states: int
    num_steps: int


FAULTS = (
    "clock: ",
    "agent: lend ",
    "agent: falls",
    "agent: speaks",
    "traffic: ",
    "kill: rollout core",
    "kill: serving core",
    "unlink: ",
    "lose: ",
    "serving: release",
)
"""What need not happen: production must come home without any of it (an engine whose core is dead is reaped, though, and production
started again)."""


def explore(bounds: Bounds, mutant: Mutant | None = None) -> Explored:
    """Look at every state that can be reached.

    Raises:
        Broken: An invariant does not hold; the steps that lead there are in the message.
        AssertionError: There are more than ``bounds.max_states``.
    """
    first = World(bounds, mutant or Mutant())
    number = {first.key(): 0}
    worlds: list[World | None] = [first]
    came: list[tuple[int, str]] = [(-1, "")]
    back: list[list[int]] = [[]]
    """Of each state those from which a step that is no fault leads there."""
    must_come_home, home = [], []
    queue, num_steps = deque([0]), 0
    while queue:
        index = queue.popleft()
        world = worlds[index]
        assert world is not None
        worlds[index] = None
        if world.must_come_home():
            must_come_home.append(index)
            if world.is_home():
                home.append(index)
        for step in list(world.steps()):
            num_steps += 1
            then = world.clone()
            try:
                then.do(step)
            except (AssertionError, ValueError) as error:
                raise Broken(f"{error}\n  " + "\n  ".join([*_story(came, index), step])) from error
            key = then.key()
            found = number.get(key)
            if found is None:
                found = number[key] = len(worlds)
                assert found < bounds.max_states, f"more than {bounds.max_states} states"
                worlds.append(then)
                came.append((index, step))
                back.append([])
                queue.append(found)
            if not step.startswith(FAULTS):
                back[found].append(index)
    comes_home, look = set(home), list(home)
    while look:
        for before in back[look.pop()]:
            if before not in comes_home:
                comes_home.add(before)
                look.append(before)
    for index in must_come_home:
        if index not in comes_home:
            raise Broken("production's memory never comes home\n  " + "\n  ".join(_story(came, index)))
    return Explored(num_states=len(worlds), num_steps=num_steps)


def _story(came: list[tuple[int, str]], index: int) -> list[str]:
    steps: list[str] = []
    while index > 0:
        index, step = came[index]
        steps.append(step)
    return steps[::-1]


LARGER = (
    Bounds(chunks=3),
    Bounds(ranks=2, kills=1),
    Bounds(kills=2, lost_wakes=1, delayed=True),
    Bounds(kills=1, production_kills=1, silences=1, max_states=4_000_000),
    Bounds(kills=1, unlinks=2, max_states=4_000_000),
    Bounds(production_kills=2, unlinks=1, max_states=4_000_000),
    Bounds(chunks=3, silences=1),
    Bounds(chunks=3, production_kills=1),
    Bounds(chunks=3, lost_wakes=1, delayed=True),
)
"""A quarter of an hour: ``python -m tests.policy.coserving.explorer``.  Three chunks and a death of the rollout engine are more than four million states."""

if __name__ == "__main__":
    for each in LARGER:
        print(each, end=": ", flush=True)
        print(explore(each), flush=True)
