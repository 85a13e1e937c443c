"""Which weights: ``(run, attempt, version)``, how it is written, read and ordered.  The one definition of it.

A *run* is the name under which a trainer publishes.  A trainer counts versions, and every restart of it is a new
*attempt*: a restarted one may publish again a number that an earlier attempt had used for other weights, so within a run
versions are ordered by attempt first (1.120 comes before 2.100).  Across runs a version number says nothing: policies of two
runs are never compared, only told apart.

Written ``attempt.version`` where the run is clear from its place (``2.17``), else ``run@attempt.version``
(``math-7b@2.17``): what an engine stamps on the tokens that it samples.  Each has one spelling.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rose.errors import RequestError

LIMIT = 10**10
"""Attempt and version stay below this: ten digits, far below what JSON readers hold exactly."""
RUN_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Runs are folders of a store, so their names can be neither hidden nor a way out of one."""
VERSION_PATTERN = r"(?:0|[1-9][0-9]{0,9})\.(?:0|[1-9][0-9]{0,9})"
_RUN = re.compile(RUN_PATTERN)
_VERSION_TEXT = re.compile(VERSION_PATTERN)

Version = tuple[int, int]
"""``(attempt, version)`` as policies compute with it; :class:`WeightVersion` is the same with its rules checked."""


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """One published state of a run's policy.  ``WeightVersion(2, 17)`` prints as ``2.17``.

    Raises:
        RequestError: A part is no whole number from 0 to :data:`LIMIT` - 1.
    """

    attempt: int
    version: int

    def __post_init__(self) -> None:
        for field in ("attempt", "version"):
            value = getattr(self, field)
            if type(value) is not int or not 0 <= value < LIMIT:
                raise RequestError(f"must be a whole number of 0..{LIMIT - 1}, got {value!r}", field=field)

    def __str__(self) -> str:
        return f"{self.attempt}.{self.version}"

    @property
    def pair(self) -> Version:
        """``(attempt, version)``: of two, the greater was published later."""
        return self.attempt, self.version

    @classmethod
    def parse(cls, text: object, *, field: str = "version") -> WeightVersion:
        """Read ``"2.17"``.

        Raises:
            RequestError: Anything else, leading zeros and signs included.
        """
        if not isinstance(text, str) or _VERSION_TEXT.fullmatch(text) is None:
            raise RequestError(
                f"'{str(text)[:40]}' is not of the form ATTEMPT.VERSION",
                field=field,
                fix="write it like '2.17'",
            )
        attempt, _, version = text.partition(".")
        return cls(int(attempt), int(version))


@dataclass(frozen=True, slots=True)
class Lineage:
    """Weights of a run; no run (the empty name): what a checkpoint brought, of which nobody has said whose it is."""

    run: str
    version: WeightVersion

    def __str__(self) -> str:
        return f"{self.run}@{self.version}" if self.run else str(self.version)

    @classmethod
    def parse(cls, text: object, *, field: str = "version") -> Lineage:
        """Read ``"math-7b@2.17"`` or ``"2.17"``.

        Raises:
            RequestError: Anything else.
        """
        run, at, version = text.rpartition("@") if isinstance(text, str) else ("", "", text)
        return cls(check_run(run, field=field) if at else "", WeightVersion.parse(version, field=field))


def check_run(run: object, *, field: str = "run") -> str:
    """``run``, if it can be the name of one: letters, digits, dot, dash, underscore; at most 64; begins with a letter or digit.

    Raises:
        RequestError: It cannot.
    """
    if not isinstance(run, str) or _RUN.fullmatch(run) is None:
        raise RequestError(f"{str(run)[:80]!r} needs 1..64 of A-Z a-z 0-9 . _ -", field=field)
    return run


def parse_version(value: object, field: str = "version") -> Version:
    """``"2.17"`` or ``[2, 17]`` -> ``(2, 17)``.

    Raises:
        RequestError: Anything else.
    """
    if isinstance(value, list | tuple) and len(value) == 2:  # pyright: ignore[reportUnknownArgumentType]
        try:
            return WeightVersion(*value).pair  # pyright: ignore[reportUnknownArgumentType]
        except RequestError as error:
            raise RequestError(error.message, field=field) from None
    return WeightVersion.parse(value, field=field).pair


def format_version(version: Version) -> str:
    """``(2, 17)`` -> ``"2.17"``."""
    return f"{version[0]}.{version[1]}"
