"""How long a rollout engine gets to obey a cut, and to be gone after it was killed: one formula for all who wait.

A cut waits for the step in progress, so its time is twice the longest step that the engine has lately made, and what it takes to
hear of the cut.  A killed engine is gone when the last process of its tree is: twice the longest of its last exits.  Both have
bounds, because production waits: beyond them there is no patience, whatever was measured.  A value that the operator
configured counts instead, as it is.

Pure.
"""

from __future__ import annotations

NOTICE_S = 0.1
"""The engine's background thread looks that often, if nothing wakes it."""
MIN_RECLAIM_S, MAX_RECLAIM_S = 0.1, 5.0
UNMEASURED_RECLAIM_S = 1.0
"""Before the engine's first step."""
MIN_BACKSTOP_S, MAX_BACKSTOP_S = 0.5, 30.0
MARGIN = 2.0
STEP_WINDOW_S = 300.0
"""A long step is remembered that long."""
EXITS_REMEMBERED = 8
"""One that took long, on a machine that had a bad moment, is no promise for ever."""


def reclaim_s(step_s: float, configured_s: float | None = None) -> float:
    """What an engine has to obey a cut.  ``step_s``: its longest step lately; 0 = none was made."""
    if configured_s is not None:
        return configured_s
    if step_s <= 0:
        return UNMEASURED_RECLAIM_S
    return min(MAX_RECLAIM_S, max(MIN_RECLAIM_S, MARGIN * step_s + NOTICE_S))


def backstop_s(exit_s: float, configured_s: float | None = None) -> float:
    """From a kill to usable memory.  ``exit_s``: the longest that a whole tree lately took to be gone; 0 = none was killed."""
    if configured_s is not None:
        return configured_s
    return min(MAX_BACKSTOP_S, max(MIN_BACKSTOP_S, MARGIN * exit_s))
