"""The identity of one set of policy weights: ``(attempt, version)``.

A trainer counts versions; every restart of a trainer is a new attempt.  Versions are ordered by attempt
first, so that a trainer which published 1.120 and restarts from step 100 leads every engine to 2.100.
Written ``attempt.version`` everywhere a person or a header sees it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rose.errors import RequestError

_TEXT = re.compile(r"(0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,9})")
LIMIT = 10**10
"""Attempt and version stay below this: ten digits, far below what JSON readers hold exactly."""


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """One published state of the policy.  ``WeightVersion(2, 17)`` prints as ``2.17``."""

    attempt: int
    version: int

    def __post_init__(self) -> None:
        for field in ("attempt", "version"):
            value = getattr(self, field)
            if type(value) is not int or not 0 <= value < LIMIT:
                raise RequestError(f"must be a whole number of 0..{LIMIT - 1}, got {value!r}", field=field)

    def __str__(self) -> str:
        return f"{self.attempt}.{self.version}"

    @classmethod
    def parse(cls, text: str, *, field: str = "version") -> WeightVersion:
        """Read ``"2.17"``.

        Raises:
            RequestError: Anything else, leading zeros and signs included: one version has one spelling.
        """
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise RequestError(f"'{str(text)[:40]}' is not of the form ATTEMPT.VERSION", field=field)
        return cls(int(match[1]), int(match[2]))
