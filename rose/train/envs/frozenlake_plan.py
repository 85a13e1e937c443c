"""FrozenLake in one answer: the agent is shown the board and writes one move for every cell, row by row.

The moves are then followed from ``@``, as many as the board has cells; reward 1 on the goal, 0 otherwise.  An answer of a
board of 5x5 is 25 tokens of four possible ones, all written at once: a turn that takes time, as turns of real agents do, where
``frozenlake`` takes one token a turn.  Set ``rollout.max_tokens`` to the number of cells.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rose.errors import TrainError
from rose.train.envs.base import Environment, Observation, Task
from rose.train.envs.frozenlake import ACTIONS, FrozenLakeFamily, FrozenLakeParams, check_map, show_map

MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Row and column of each of :data:`~rose.train.envs.frozenlake.ACTIONS`."""
_WORDS = re.compile("|".join(ACTIONS))


class LakePlanFamily(FrozenLakeFamily):
    """Boards as of ``frozenlake``; ``max_turns`` has no meaning, every episode is one turn."""

    def __init__(self, params: FrozenLakeParams) -> None:
        super().__init__(params)
        self._size = params.size

    def make(self) -> Environment:
        return LakePlan(self._size)


class LakePlan:
    """One episode; see the module's docstring."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rows: list[str] | None = None

    async def reset(self, task: Task) -> Observation:
        self._rows = check_map(task, self._size)
        return Observation(
            messages=({"role": "user", "content": show_map(self._rows, start_of(self._rows))},)
        )

    async def step(self, text: str) -> Observation:
        if self._rows is None:
            raise TrainError("step() before reset() or after the end of the episode", field="env")
        plan = [ACTIONS.index(word) for word in _WORDS.findall(text)]
        walked, reached = follow(self._rows, plan)
        self._rows = None
        return Observation(done=True, reward=float(reached), success=reached, info={"moves": walked})

    async def close(self) -> None:
        self._rows = None


def start_of(rows: Sequence[str]) -> int:
    """The cell of ``S``; the first where there is none."""
    return max(0, "".join(rows).find("S"))


def follow(rows: Sequence[str], plan: Sequence[int]) -> tuple[int, bool]:
    """Moves made and whether they end on the goal.  A cell that the plan has no move for ends the walk, as a hole does."""
    size = len(rows)
    cell = start_of(rows)
    for walked in range(size * size):
        row, column = divmod(cell, size)
        if rows[row][column] in "GH" or cell >= len(plan):
            return walked, rows[row][column] == "G"
        down, right = MOVES[plan[cell]]
        if 0 <= row + down < size and 0 <= column + right < size:
            cell = (row + down) * size + column + right
    return size * size, rows[cell // size][cell % size] == "G"


def shortest_plan(rows: Sequence[str]) -> list[int]:
    """A move for every cell that is on a shortest way to the goal; ``down`` where there is no way."""
    size = len(rows)
    goal = "".join(rows).index("G")
    distance = {goal: 0}
    frontier = [goal]
    for cell in frontier:  # breadth first: the list grows while it is walked
        for near in _neighbours(cell, size):
            if near is not None and near not in distance and rows[near // size][near % size] != "H":
                distance[near] = distance[cell] + 1
                frontier.append(near)
    plan: list[int] = []
    for cell in range(size * size):
        ways = [
            move
            for move, near in enumerate(_neighbours(cell, size))
            if near in distance and cell in distance and distance[near] < distance[cell]
        ]
        plan.append(ways[0] if ways else ACTIONS.index("down"))
    return plan


def _neighbours(cell: int, size: int) -> list[int | None]:
    """By move: the cell that it leads to; None outside."""
    row, column = divmod(cell, size)
    inside = [(row + down, column + right) for down, right in MOVES]
    return [r * size + c if 0 <= r < size and 0 <= c < size else None for r, c in inside]
