"""What a rollout engine beside production is started with, and how soon it is started again after it ended.

By default vLLM takes 92 % of the device, which is not there beside production.  :class:`EngineSize` takes the sizes from
production's lease where the operator gave none.  :class:`Restarts` spaces the starts: each costs half a minute of
production's cores, so an engine that does not come up is tried less and less often.

Pure: time arrives as ``at_s``.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from rose.errors import ConfigError
from rose.policy.lending_events import ALL_PAGES
from rose.units import format_bytes

WEIGHT_COPIES = 3
"""A whole version is staged beside the weights, and the old bits are kept until the new ones are proved."""
ACTIVATION_BYTES = 2 << 30
"""What a step of a rollout engine may take of a GPU beside its weights, with the kernels it loads.  Not measured: give
``--gpu-memory-utilization`` where it does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSize:
    """Of an engine beside production.

    Args:
        kv_bytes: Range of *addresses* of its KV cache: all that could ever be lent.  Nothing behind it is taken at the start.
        memory_share: Part of the device that everything else of it may take; None: main memory has no such limit.
    """

    kv_bytes: int
    memory_share: float | None = None


def kv_pages(*, total_pages: int, compute_only: bool, max_lend_pages: int) -> int | None:
    """How many pages could ever be lent to the engine; None where only the operator knows.

    Floor, headroom and limit of an elastic device change while the engine runs, and addresses cost nothing: all of production's pages.
    """
    if not compute_only:
        return total_pages
    return max_lend_pages if max_lend_pages < ALL_PAGES else None


WORTH_A_START = 1.05
"""Production sizes its cache anew at each of its starts; a few pages more are not worth an engine's start."""


def is_outgrown(*, pages: int, made_for: int) -> bool:
    """Could so much more be lent than the engine has addresses for that it should be started anew?  Fewer do no harm."""
    return pages > WORTH_A_START * made_for


def memory_share(*, weights_bytes: int | None, device_bytes: int, free_bytes: int) -> float:
    """The part of a GPU that a policy with these weights needs beside its KV memory.

    Args:
        weights_bytes: Of the checkpoint; None: it is not at hand.
        device_bytes, free_bytes: Of the GPU; free is what production leaves, the reserve taken off.

    Raises:
        ConfigError: Its size is not known, or it does not fit beside production.
    """
    if weights_bytes is None:
        raise ConfigError(
            "how large the policy is cannot be seen from here",
            field="engine.model",
            fix="name a folder with its weights, or give --gpu-memory-utilization in engine.args",
        )
    needed = WEIGHT_COPIES * weights_bytes + ACTIVATION_BYTES
    if needed > free_bytes:
        raise ConfigError(
            f"a policy of {format_bytes(weights_bytes)} needs {format_bytes(needed)} of the device, production leaves "
            f"{format_bytes(max(0, free_bytes))}",
            field="engine.model",
            fix="give production a smaller --gpu-memory-utilization, or --gpu-memory-utilization of your own in engine.args",
        )
    return min(1.0, math.ceil(100 * needed / device_bytes) / 100)


REFUSED_ROLE = "ROSE_ROLE=rollout"
"""Field of the error with which a rollout engine ends where the compatibility table refuses its configuration."""


class Restarts:
    """When the engine may be started (again).

    The pause after an end doubles with each end of the last ``window_s``.  It begins with ``first_pause_s``; for an
    engine that never came up, with the time that the attempt took, if that is more.  It is at most ``window_s``.

    Args:
        most: So many restarts within ``window_s``, and no more.
    """

    def __init__(self, most: int, window_s: float, first_pause_s: float) -> None:
        self._window_s, self._first_pause_s = window_s, first_pause_s
        self._starts_s: deque[float] = deque(maxlen=most + 1)
        self._ends_s: deque[float] = deque(maxlen=most + 1)
        self._came_up = False
        self.is_refused = False
        self.next_start_s = -math.inf
        """No start before."""

    def started(self, at_s: float) -> None:
        self._starts_s.append(at_s)
        self._came_up = False

    def came_up(self) -> None:
        """It answers."""
        self._came_up = True

    def ended(self, at_s: float) -> None:
        """It has ended by itself, was killed, or could not be started."""
        self._ends_s.append(at_s)
        recent = sum(at_s - end_s <= self._window_s for end_s in self._ends_s)
        took_s = at_s - self._starts_s[-1] if self._starts_s and not self._came_up else 0.0
        pause_s = max(self._first_pause_s, took_s) * 2 ** (recent - 1)
        self.next_start_s = at_s + min(pause_s, self._window_s)

    def refused(self) -> None:
        """Its configuration is one that it does not run with: another start would end as this one did."""
        self.is_refused = True

    def exhausted(self, at_s: float) -> bool:
        """Was it started too often lately, or refused?"""
        starts = self._starts_s
        return self.is_refused or (len(starts) == starts.maxlen and at_s - starts[0] <= self._window_s)

    def forgive(self) -> None:
        """An operator has looked at it."""
        self._starts_s.clear()
        self._ends_s.clear()
        self.is_refused = False
        self.next_start_s = -math.inf
