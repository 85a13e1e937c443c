"""Environments: what an agent sees, says and is paid for, one conversation at a time.

An :class:`Environment` is one running episode; a :class:`Family` makes them and lists their tasks.
A *task* is plain JSON data and holds everything that an episode depends on, so that an episode can be
started again anywhere (after a lost actor, for example) and is the same episode.

The protocol is async because real environments wait (for a browser, a sandbox, a judge); those here do
not.  An environment never sees token ids, engines or weights: messages in, messages out.  It owns the
reward: ``reward`` counts on the last observation of an episode only, and is finite.

Text that is no legal action is the agent's mistake, not an error: the episode goes on (and its turns run
out).  :class:`~rose.errors.TrainError` is for what the run cannot absorb: a task of another family, or a
step after the end.

Callers: ``rose.train.rollout`` (episodes), ``rose.train.loop`` (tasks of a step).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rose.errors import ConfigError, TrainError

if TYPE_CHECKING:
    from gymnasium import Env

Message = dict[str, str]
"""``{"role": ..., "content": ...}``, as in the OpenAI API."""

Task = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the agent is shown next.  When ``done``, ``messages`` is empty and ``reward`` is final."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float = 0.0
    success: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One episode.  Life: ``reset`` -> ``step``... until ``done`` -> ``close``; ``close`` is always safe."""

    async def reset(self, task: Task) -> Observation: ...

    async def step(self, text: str) -> Observation: ...

    async def close(self) -> None: ...


class Family(Protocol):
    """A kind of environment with its settings."""

    @property
    def allowed_texts(self) -> tuple[str, ...] | None:
        """The only answers that make sense, each one token; None = free text."""
        ...

    def tasks(self) -> Sequence[Task]:
        """The training tasks, in a fixed order that depends on the settings alone."""
        ...

    def held_out_tasks(self, count: int) -> Sequence[Task]:
        """Up to ``count`` tasks for evaluation, none of them among the training tasks."""
        ...

    def make(self) -> Environment: ...


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Time that each ``reset`` and ``step`` is made to take: lognormal, seeded by the task and the turn."""

    median_s: float
    sigma: float

    def draw_s(self, task: Task, turn: int) -> float:
        seed = json.dumps([dict(task), turn], sort_keys=True)
        return self.median_s * math.exp(random.Random(seed).gauss(0.0, self.sigma))


class DelayedFamily:
    """A family whose environments are slow, for benchmarks of stragglers."""

    def __init__(self, family: Family, latency: Latency) -> None:
        self._family = family
        self._latency = latency

    @property
    def allowed_texts(self) -> tuple[str, ...] | None:
        return self._family.allowed_texts

    def tasks(self) -> Sequence[Task]:
        return self._family.tasks()

    def held_out_tasks(self, count: int) -> Sequence[Task]:
        return self._family.held_out_tasks(count)

    def make(self) -> Environment:
        return _Delayed(self._family.make(), self._latency)


class _Delayed:
    def __init__(self, environment: Environment, latency: Latency) -> None:
        self._environment = environment
        self._latency = latency
        self._task: Task = {}
        self._turn = 0

    async def reset(self, task: Task) -> Observation:
        self._task, self._turn = task, 0
        await asyncio.sleep(self._latency.draw_s(task, 0))
        return await self._environment.reset(task)

    async def step(self, text: str) -> Observation:
        self._turn += 1
        await asyncio.sleep(self._latency.draw_s(self._task, self._turn))
        return await self._environment.step(text)

    async def close(self) -> None:
        await self._environment.close()


def _math_tools(**settings: Any) -> Family:
    from rose.train.math_env import MathFamily, MathParams

    return MathFamily(MathParams(**settings))


def _text_game(**settings: Any) -> Family:
    from rose.train.text_env import TextGameFamily, TextGameParams

    return TextGameFamily(TextGameParams(**settings))


def _lake_plan(**settings: Any) -> Family:
    from rose.train.lake_plan import LakePlanFamily

    return LakePlanFamily(FrozenLakeParams(**settings))


FAMILIES: dict[str, Callable[..., Family]] = {
    "frozenlake": lambda **settings: FrozenLakeFamily(FrozenLakeParams(**settings)),
    "frozenlake_plan": _lake_plan,
    "math_tools": _math_tools,
    "text_game": _text_game,
}
"""Kinds known by name."""


def make_family(kind: str, settings: Mapping[str, Any], latency: Latency | None = None) -> Family:
    """Build a family from configuration.

    Args:
        kind: A name of :data:`FAMILIES`, or ``module:factory`` of your own, importable where the environments run.

    Raises:
        ConfigError: Unknown kind, or settings that the kind does not know.
    """
    factory: Any = FAMILIES.get(kind)
    if factory is None and ":" in kind:
        module, _, name = kind.partition(":")
        try:
            factory = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"{kind} cannot be imported: {error}", field="env.kind") from error
    if factory is None:
        known = [*sorted(FAMILIES), "module:factory"]
        raise ConfigError(f"unknown environment '{kind}'", field="env.kind", fix=f"one of {known}")
    try:
        family = factory(**settings)
    except TypeError as error:
        raise ConfigError(f"{error}", field="env.settings") from error
    return family if latency is None or latency.median_s == 0.0 else DelayedFamily(family, latency)
