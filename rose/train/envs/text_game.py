"""Text games: rooms, objects and a quest, generated here by TextWorld (Côté et al. 2018) from a seed.

The agent sees where it is, what is there, what it carries and which commands are possible, and answers with one command.
Reward 1 when the quest is done, 0 otherwise.

Games are played by TextWorld's own logic on the generated game, without its Inform 7 tool chain: what the agent reads is
put together here from the facts of the game's state.  Generating one takes a second or two of CPU; it happens once per
process and task, in a thread.

Needs ``pip install '.[textgame]'``, from a checkout.
"""

from __future__ import annotations

import asyncio
import importlib
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rose.errors import ConfigError, TrainError
from rose.train.envs.base import Environment, Observation, Task

MAX_REPLY_CHARS = 4000

_generating = threading.Lock()
"""TextWorld's grammar cache is not thread-safe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextGameParams:
    """Which games are generated, and how they are shown."""

    num_games: int = 8
    num_rooms: int = 2
    num_objects: int = 3
    quest_length: int = 2
    max_turns: int = 10
    show_commands: bool = True
    """List the possible commands; without them a small model never finds one."""
    seed: int = 0


class TextGameFamily:
    """See the module's docstring."""

    allowed_texts = None

    def __init__(self, params: TextGameParams) -> None:
        self._params = params
        if min(params.num_games, params.num_rooms, params.quest_length, params.max_turns) < 1:
            raise ConfigError(
                "num_games, num_rooms, quest_length and max_turns need 1 or more", field="env.settings"
            )
        _textworld()

    def tasks(self) -> Sequence[Task]:
        return self._tasks(0, self._params.num_games)

    def held_out_tasks(self, count: int) -> Sequence[Task]:
        return self._tasks(500_000, count)

    def make(self) -> Environment:
        return TextGame(self._params)

    def _tasks(self, first: int, count: int) -> list[Task]:
        params = self._params
        shape = [params.num_rooms, params.num_objects, params.quest_length]
        base = params.seed * 1_000_003 + first
        return [{"env": "text_game", "shape": shape, "seed": base + index} for index in range(count)]


class TextGame:
    """One game."""

    def __init__(self, params: TextGameParams) -> None:
        self._params = params
        self._env: Any = None
        self._turns = self._num_illegal = 0

    async def reset(self, task: Task) -> Observation:
        if task.get("env") != "text_game":
            raise TrainError(f"not a text_game task: {task.get('env')!r}", field="task.env")
        shape, seed = task.get("shape"), task.get("seed")
        if not isinstance(shape, list) or len(shape) != 3 or not isinstance(seed, int):
            raise TrainError("needs shape (rooms, objects, quest) and seed", field="task.shape")
        rooms, objects, quest = (int(number) for number in shape)
        game = await asyncio.to_thread(_game, rooms, objects, quest, seed)
        self._env, state = _open(game)
        self._turns = self._num_illegal = 0
        return Observation(messages=({"role": "user", "content": f"{state.objective}\n{self._show(state)}"},))

    async def step(self, text: str) -> Observation:
        if self._env is None:
            raise TrainError("step() before reset() or after the end of the episode", field="env")
        self._turns += 1
        command = text.strip().splitlines()[0].strip() if text.strip() else ""
        legal = command in self._env.state.admissible_commands
        if legal:
            state, _, done = self._env.step(command)
        else:
            # TextWorld takes unknown text for "nothing happened"; saying so teaches more.
            state, done = self._env.state, False
            self._num_illegal += 1
        won = bool(state.won) if legal else False
        if not (done or won or self._turns >= self._params.max_turns):
            prefix = "" if legal else "That is not possible.\n"
            return Observation(messages=({"role": "user", "content": prefix + self._show(state)},))
        await self.close()
        info = {"turns": self._turns, "illegal": self._num_illegal, "truncated": not (done or won)}
        return Observation(done=True, reward=float(won), success=won, info=info)

    async def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _show(self, state: Any) -> str:
        """Location, things and commands, from the facts of the state."""
        names = {info.id: info.name for info in state.game.infos.values() if info.name}

        def of(kind: str) -> list[tuple[str, ...]]:
            return [
                tuple(names.get(argument.name, argument.name) for argument in fact.arguments)
                for fact in state["_facts"]
                if fact.name == kind
            ]

        here = next((place for who, place in of("at") if who == "P"), "somewhere")
        things = sorted(thing for thing, place in of("at") if place == here and thing != "P")
        things += sorted(f"{thing} on {holder}" for thing, holder in of("on") if holder in things)
        things += sorted(
            f"{thing} in {holder}"
            for thing, holder in of("in")
            if holder in things and (holder,) in of("open")
        )
        carried = sorted(thing for thing, holder in of("in") if holder == "I")
        lines = [f"You are in: {here}.", f"Here: {', '.join(things) or 'nothing'}."]
        lines.append(f"You carry: {', '.join(carried) or 'nothing'}.")
        if self._params.show_commands:
            lines.append(f"You can: {'; '.join(sorted(state.admissible_commands))}.")
        return "\n".join(lines)[:MAX_REPLY_CHARS]


def _textworld() -> Any:
    """The extra ``textgame``, found by name: type checks pass where it is not installed."""
    try:
        textworld = importlib.import_module("textworld")
        importlib.import_module("textworld.generator")
        importlib.import_module("textworld.envs")
    except ImportError as error:
        raise ConfigError(
            "textworld is not installed",
            field="env.kind",
            fix="pip install '.[textgame]' from a checkout of ROSE",
        ) from error
    return textworld


@lru_cache(maxsize=512)
def _game(num_rooms: int, num_objects: int, quest_length: int, seed: int) -> Any:
    """Generate a game; the same arguments give the same game."""
    textworld = _textworld()
    options = textworld.GameOptions()
    options.nb_rooms, options.nb_objects, options.quest_length = num_rooms, num_objects, quest_length
    options.seeds = seed
    with _generating:
        return textworld.generator.make_game(options)


def _open(game: Any) -> tuple[Any, Any]:
    textworld = _textworld()
    infos = textworld.EnvInfos(admissible_commands=True, objective=True, won=True, facts=True)
    env = textworld.envs.TextWorldEnv(infos)
    with tempfile.TemporaryDirectory(prefix="rose-game-") as folder:
        path = Path(folder) / "game.json"
        game.save(str(path))
        env.load(str(path))
    return env, env.reset()
