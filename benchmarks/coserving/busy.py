"""How much traffic keeps production alone so busy: a rate that follows from what the host can do, not from the host before.  Pure.

A stretch of traffic of ``r`` requests per second keeps production busy for a share ``1 - exp(-k r)`` of its time: for few requests in
proportion to them, and never for more than all of it (requests that come by themselves find it idle in so much of the time, and those that
find it busy share its steps).  ``k`` is measured, and with it the rate is looked for at which the mean over the stretches is what is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from benchmarks.coserving.plan import Segment, Timing
from rose.errors import ConfigError

CLOSE = 0.02
"""A measured share so near to the wanted one is it."""
MOST_PROBES = 3
PROBE_SEGMENTS = 8
MOST_SEGMENTS = 60
MOST_BUSY = 0.98
"""More than this is saturated: how far over, it does not say."""
MOST_FACTOR = 4.0
"""From one rate to the next: what is measured at one says little of a far one."""


def share(segments: Sequence[Segment], timing: Timing, k: float) -> float:
    """Of the time of all segments, production busy."""
    rates = [len(segment) / timing.traffic_s for segment in segments]
    return sum(1.0 - math.exp(-k * rate) for rate in rates) / len(rates)


def fit(segments: Sequence[Segment], timing: Timing, busy: float) -> float:
    """The ``k`` (seconds) at which these segments have this share.

    Raises:
        ConfigError: Production had nothing to do.
    """
    if busy <= 0.0 or not any(segments):
        raise ConfigError(
            "production was never busy", field="--rate", fix="raise it: it is where the search begins"
        )
    return _halve(lambda k: share(segments, timing, k), min(busy, MOST_BUSY), (1e-6, 1e4))


def next_rate(
    traffic: Callable[[float], Sequence[Segment]], timing: Timing, rate: float, k: float, busy: float
) -> float:
    """Requests per second, not far from ``rate``, at which what ``traffic`` makes of them keeps production busy for this share."""
    return _halve(
        lambda tried: share(traffic(tried), timing, k), busy, (rate / MOST_FACTOR, rate * MOST_FACTOR)
    )


def _halve(value: Callable[[float], float], wanted: float, within: tuple[float, float]) -> float:
    """Where an increasing function has this value, by ratios of its argument; the nearer end where it has it nowhere."""
    low, high = within
    for _ in range(20):
        middle = math.sqrt(low * high)
        if value(middle) < wanted:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def enough(traffic: Callable[[int], Sequence[Segment]], pairs: int) -> Sequence[Segment]:
    """The fewest segments that have so many requests; ``MOST_SEGMENTS`` where they have fewer."""
    segments: Sequence[Segment] = []
    for count in range(1, MOST_SEGMENTS + 1):
        segments = traffic(count)
        if sum(map(len, segments)) >= pairs:
            break
    return segments


def spread(segments: Sequence[Segment], count: int = PROBE_SEGMENTS) -> list[Segment]:
    """Some of them, from everywhere."""
    most = min(count, len(segments))
    return [segments[number * len(segments) // most] for number in range(most)]
