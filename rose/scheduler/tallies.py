"""Counters and histograms that cost a dictionary look-up per event, and are made Prometheus' only when it asks.

The scheduler counts a dozen things per turn and is read every few seconds; the client library's own metrics take a
lock, and walk all buckets, for each of them.  Not thread-safe; owned by the event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry


class Tally(Collector):
    """A counter with labels: ``tally.counts[label] += 1``, with a tuple of labels where there are several.

    Args:
        name: Without ``_total``.
        labels: Their names; none for a plain counter, whose key is the empty tuple.
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.counts: Counter[str | tuple[str, ...]] = Counter()
        if not labels:
            self.counts[()] = 0
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for key, count in self.counts.items():
            family.add_metric((key,) if isinstance(key, str) else key, count)
        yield family


class Durations(Collector):
    """A histogram of seconds.

    Args:
        bounds: Upper bounds of the buckets, inclusive and rising; one more takes the rest.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], *, registry: CollectorRegistry) -> None:
        self._name, self._text, self._bounds = name, text, tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, self._sum)
        yield family
