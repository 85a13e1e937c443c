"""Why a try of an episode comes to nothing, and what foreign code may answer at its end."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import numpy as np

from rose.errors import CapacityError, Conflict, Gone, NotFound, RequestError, Unauthorized
from rose.train.envs.base import Observation, unusable


class Cause(StrEnum):
    """Whose fault a failed try of an episode was."""

    ENVIRONMENT = "environment"
    REWARD = "reward"
    ENGINE = "engine"
    """502: the engines failed its turn as often as a turn may fail."""
    DEADLINE = "deadline"
    """504: a turn took longer than the scheduler lets it."""
    CANCELLED = "cancelled"
    """410, 404, 409, 422: the scheduler has given the trajectory up, or does not take it."""
    REFUSED = "refused"
    """400, 413: the scheduler does not take what the environment said, its answers or their size."""


class EpisodeFailed(Exception):
    """One try of an episode came to nothing; it is tried again."""

    def __init__(self, cause: Cause, why: object) -> None:
        super().__init__(str(why))
        self.cause = cause


def failure_of(error: EpisodeFailed | RequestError) -> EpisodeFailed:
    """What an answer of the scheduler means for the episode that got it.

    Raises:
        RequestError: It is none of the episode's business: the scheduler does not know us, or is away.
    """
    if isinstance(error, EpisodeFailed):
        return error
    if isinstance(error, CapacityError) and error.status == 504:
        return EpisodeFailed(Cause.DEADLINE, error)
    if isinstance(error, CapacityError | Unauthorized):
        raise error
    lost = isinstance(error, Gone | NotFound | Conflict)
    return EpisodeFailed(Cause.CANCELLED if lost else Cause.REFUSED, error)


def checked_reward(final: Observation, reward_range: tuple[float, float]) -> Observation:
    """``final``, whose reward is a number within ``reward_range``.

    Raises:
        EpisodeFailed: It is none, or outside.
    """
    reward, (low, high) = final.reward, reward_range
    if (found := unusable(reward)) is not None:
        raise EpisodeFailed(Cause.REWARD, f"reward {found}")
    if not low <= reward <= high:
        raise EpisodeFailed(Cause.REWARD, f"reward {reward} is outside env.reward_range {low:g}..{high:g}")
    return final


def success_of(final: Observation) -> bool:
    """Numpy's too: what ``reward > 0`` is of a reward of its own.

    Raises:
        EpisodeFailed: It is no bool.
    """
    if not isinstance(final.success, bool | np.bool_):
        text = f"gave {type(final.success).__name__} for success, not a bool"
        raise EpisodeFailed(Cause.ENVIRONMENT, text)
    return bool(final.success)


def info_of(last: Observation) -> dict[str, Any]:
    """Asked for at the end alone: before it nobody reads what is there.

    Raises:
        EpisodeFailed: No dict, or no JSON.
    """
    if not isinstance(last.info, dict):
        text = f"gave {type(last.info).__name__} for info, not a dict"
        raise EpisodeFailed(Cause.ENVIRONMENT, text)
    try:
        json.dumps(last.info)
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeFailed(Cause.ENVIRONMENT, f"info is not JSON: {error}") from error
    return last.info
