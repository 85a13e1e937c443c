"""Time as an object, for the shells.  Policies never see it: their events carry ``at_s``."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a clock that never goes back; comparable between processes of one machine."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """CLOCK_MONOTONIC."""

    def now_s(self) -> float:
        return time.monotonic()
