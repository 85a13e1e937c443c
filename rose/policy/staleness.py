"""Weight versions: how they are written, ordered, and how far behind a sample may be.

A version is ``(attempt, version)``, written ``attempt.version`` (``2.17``): attempt counts the starts
of the trainer, version its steps.  Ordered first by attempt, because a restarted trainer may publish
again a number that an earlier attempt had already used for other weights.

Decides: whether a worker may take a turn, and how stale a sample is when a trainer takes it.
Does not decide what happens to a stale sample (``rose.policy.samples``).
"""

from __future__ import annotations

from collections.abc import Iterable

from rose.errors import RequestError

Version = tuple[int, int]

MAX_PART = 2**53
"""Both parts survive a JSON number in any client."""


def parse_version(text: object, field: str = "version") -> Version:
    """``'2.17'`` or ``[2, 17]`` -> ``(2, 17)``.

    Raises:
        RequestError: Anything else; ``field`` is named in it.
    """
    parts: list[object]
    if isinstance(text, str) and len(text) <= 40:
        parts = [int(part) if part.isascii() and part.isdigit() else part for part in text.split(".")]
    elif isinstance(text, list | tuple):
        parts = list(text)  # pyright: ignore[reportUnknownArgumentType]
    else:
        parts = []
    if len(parts) == 2:
        attempt, version = parts
        if (
            isinstance(attempt, int)
            and isinstance(version, int)
            and not isinstance(attempt, bool)
            and not isinstance(version, bool)
            and 0 <= attempt < MAX_PART
            and 0 <= version < MAX_PART
        ):
            return attempt, version
    raise RequestError("is not a version like '2.17'", field=field, fix="write attempt.version")


def format_version(version: Version) -> str:
    """``(2, 17)`` -> ``'2.17'``."""
    return f"{version[0]}.{version[1]}"


def lag(consuming: Version, sampled: Version) -> int:
    """Versions between a sample and the trainer that takes it.

    Within one attempt this is the plain difference, never below 0.  Across attempts both numbers are
    steps of the same schedule, so the distance counts in either direction: a sample of a *later* step
    of an abandoned attempt is just as far from the weights being trained.
    """
    if consuming[0] == sampled[0]:
        return max(0, consuming[1] - sampled[1])
    return abs(consuming[1] - sampled[1])


def is_spent(newest: Version, sampled: Version, alpha: int) -> bool:
    """Whether a sample is too old for a trainer at ``newest`` and will be for each later version.

    A sample of a *later* step of an abandoned attempt is not: the schedule is still to get there.
    """
    return newest[1] - sampled[1] > alpha


def worst_lag(consuming: Version, sampled: Iterable[Version]) -> int:
    """The lag of the stalest of ``sampled``; 0 when there is none."""
    return max((lag(consuming, version) for version in sampled), default=0)
