"""Gymnasium's FrozenLake as a conversation: one action per turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rose.errors import ConfigError, TrainError
from rose.train.envs.base import Environment, Message, Observation, Task

if TYPE_CHECKING:
    from gymnasium import Env

ACTIONS = ("left", "down", "right", "up")
"""FrozenLake's actions in gymnasium's numbering."""

AGENT_MARK = "@"


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenLakeParams:
    """Which lakes, and how they are shown."""

    size: int = 4
    num_maps: int = 8
    frozen_fraction: float = 0.8
    max_turns: int = 10
    is_slippery: bool = False
    random_start: bool = True
    """Start on a seeded cell from which the goal can be reached, not always in the far corner.  From the corner an
    untrained policy reaches the goal in 1-2 % of its episodes, and most groups teach nothing at first."""
    min_start_distance: int = 2
    max_start_distance: int = 4
    """Moves from a random start to the goal.  With four or fewer an untrained policy succeeds in about one
    episode of seven, so that most groups of 16 have something to learn from at once."""
    seed: int = 0


class FrozenLakeFamily:
    """Gymnasium's FrozenLake as a conversation: the board with the agent on it, one action per turn.

    A board is shown as its rows, the agent's cell replaced by ``@``::

        SFFF
        FHFH
        F@FH
        HFFG

    Reward 1 on the goal and 0 otherwise.  Maps are drawn by gymnasium's own generator (each has a path),
    all different; map ``i`` of a seed is the same map for any larger ``num_maps``.  The task is all an episode needs.
    """

    allowed_texts = ACTIONS

    def __init__(self, params: FrozenLakeParams) -> None:
        self._params = params
        if params.size < 2 or params.num_maps < 1 or params.max_turns < 1:
            raise ConfigError("size needs 2 or more, num_maps and max_turns 1 or more", field="env")
        if not 0.0 < params.frozen_fraction <= 1.0:
            raise ConfigError("must lie in (0, 1]", field="env.frozen_fraction")

    def tasks(self) -> Sequence[Task]:
        # The stride keeps the streams of neighbouring seeds apart.
        return self._draw(self._params.num_maps, self._params.seed * 1_000_003, [], "env.num_maps")

    def held_out_tasks(self, count: int) -> Sequence[Task]:
        seen = [tuple(task["map"]) for task in self.tasks()]
        # Half a stride away: training never draws that far.
        return self._draw(count, self._params.seed * 1_000_003 + 500_000, seen, "eval.num_tasks")

    def _draw(self, count: int, first_seed: int, seen: list[tuple[str, ...]], field: str) -> list[Task]:
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        params = self._params
        boards: list[tuple[str, ...]] = []
        # The bound stops a request for more different maps than exist.
        for map_seed in range(first_seed, first_seed + 100 * count):
            if len(boards) == count:
                break
            board = tuple(generate_random_map(params.size, params.frozen_fraction, seed=map_seed))
            if params.random_start:
                board = _move_start(board, params, random.Random(map_seed))
            if board not in boards and board not in seen:
                boards.append(board)
        if len(boards) < count:
            raise ConfigError(
                f"only {len(boards)} different maps of size {params.size} were found",
                field=field,
                fix="ask for fewer, or lower env.frozen_fraction",
            )
        return [{"env": "frozenlake", "map": list(board), "seed": params.seed} for board in boards]

    def make(self) -> Environment:
        return FrozenLake(self._params)


class FrozenLake:
    """One FrozenLake episode; see :class:`FrozenLakeFamily`."""

    def __init__(self, params: FrozenLakeParams) -> None:
        self._params = params
        self._env: Env[Any, Any] | None = None
        self._rows: list[str] = []
        self._position = 0
        self._turns = 0
        self._num_illegal = 0

    async def reset(self, task: Task) -> Observation:
        import gymnasium

        self._rows = check_map(task, self._params.size)
        await self.close()
        self._env = gymnasium.make(
            "FrozenLake-v1",
            desc=self._rows,
            is_slippery=self._params.is_slippery,
            max_episode_steps=self._params.max_turns,
            disable_env_checker=True,
        )
        position, _ = self._env.reset(seed=int(task.get("seed", 0)))
        self._position, self._turns, self._num_illegal = int(position), 0, 0
        return Observation(messages=(self._show(),))

    async def step(self, text: str) -> Observation:
        if self._env is None:
            raise TrainError("step() before reset() or after the end of the episode", field="env")
        self._turns += 1
        reward, fallen, out_of_turns = 0.0, False, self._turns >= self._params.max_turns
        action = text.strip().lower()
        if action in ACTIONS:
            position, paid, fallen, _, _ = self._env.step(ACTIONS.index(action))
            self._position, reward = int(position), float(paid)
        else:
            self._num_illegal += 1
        if not (fallen or out_of_turns):
            return Observation(messages=(self._show(),))
        await self.close()
        return Observation(
            done=True,
            reward=reward,
            success=reward > 0.0,
            info={"turns": self._turns, "illegal": self._num_illegal, "truncated": not fallen},
        )

    async def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _show(self) -> Message:
        return {"role": "user", "content": show_map(self._rows, self._position)}


def show_map(rows: Sequence[str], cell: int) -> str:
    """The board as text, with the agent on ``cell``."""
    row, column = divmod(cell, len(rows[0]))
    shown = list(rows)
    shown[row] = shown[row][:column] + AGENT_MARK + shown[row][column + 1 :]
    return "\n".join(shown)


def check_map(task: Task, size: int) -> list[str]:
    """The rows of a task.

    Raises:
        TrainError: It is of another family or size.
    """
    if task.get("env") != "frozenlake":
        raise TrainError(f"not a frozenlake task: {task.get('env')!r}", field="task.env")
    rows = task.get("map")
    if (
        not isinstance(rows, list)
        or len(rows) != size
        or not all(isinstance(row, str) and len(row) == size and set(row) <= set("SFHG") for row in rows)
    ):
        raise TrainError(f"needs {size} rows of {size} letters of S, F, H, G", field="task.map")
    return list(rows)


def _move_start(board: tuple[str, ...], params: FrozenLakeParams, rng: random.Random) -> tuple[str, ...]:
    """Put ``S`` on a cell within the allowed distances from the goal; leave it where there is none."""
    size = len(board)
    goal = (size - 1, size - 1)
    distance = {goal: 0}
    frontier = [goal]
    for row, column in frontier:  # breadth first: the list grows while it is walked
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            inside = 0 <= cell[0] < size and 0 <= cell[1] < size
            if inside and cell not in distance and board[cell[0]][cell[1]] != "H":
                distance[cell] = distance[row, column] + 1
                frontier.append(cell)
    allowed = range(params.min_start_distance, params.max_start_distance + 1)
    starts = [cell for cell in frontier if distance[cell] in allowed]
    if not starts:
        return board
    row, column = rng.choice(starts)
    rows = [line.replace("S", "F") for line in board]
    rows[row] = rows[row][:column] + "S" + rows[row][column + 1 :]
    return tuple(rows)
