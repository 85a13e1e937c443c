"""What Prometheus is told of each node, by its heartbeats: production's broken promises, what is lent and held, and what ended the lending.

Series have the label ``node`` and live as long as the node is registered, so there are at most as many as ``limits.max_workers`` lets in.  Counts
begin at a node's first heartbeat to this scheduler.  What an older node does not say has no series.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from rose.wire.workers import Heartbeat

CAUSES = ("slo", "audit")
"""Why a node switches its lending off by itself: promises of production's that broke, books that do not agree with the kernel."""
PLUGIN = "plugin"
"""Production itself has switched the plugin off, after an error."""


class NodeMetrics(Collector):
    """Fed by the daemon; not thread-safe.

    Args:
        now_s: The clock that ``heard`` is told by.
    """

    def __init__(self, registry: CollectorRegistry, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._last: dict[str, tuple[float, Heartbeat]] = {}
        self._breaches: dict[str, Counter[str]] = {}
        """Node -> while lending (``yes``, ``no``, ``unknown``) -> so far."""
        self._kills: Counter[str] = Counter()
        registry.register(self)

    def heard(self, name: str, body: Heartbeat) -> None:
        _, before = self._last.get(name, (0.0, body))
        self._last[name] = self._now_s(), body
        counts = self._breaches.setdefault(name, Counter())
        new = _new(before.slo_breaches, body.slo_breaches)
        if body.slo_breaches_while_lending is None:
            counts["unknown"] += new
        else:
            lending = _new(before.slo_breaches_while_lending, body.slo_breaches_while_lending)
            counts["yes"] += lending
            counts["no"] += max(0, new - lending)
        if body.engine_kills is not None:
            self._kills[name] += _new(before.engine_kills, body.engine_kills)

    def gone(self, name: str) -> None:
        for book in (self._last, self._breaches, self._kills):
            book.pop(name, None)

    def collect(self) -> Iterator[Metric]:
        breaches = CounterMetricFamily(
            "rose_slo_breaches",
            "Promises of production's SLO that were broken, while its rollout engine held memory (yes) or without (no)",
            labels=("node", "lending"),
        )
        kills = CounterMetricFamily(
            "rose_node_engine_kills",
            "Rollout engines that had to be killed for their memory",
            labels=("node",),
        )
        mode = GaugeMetricFamily("rose_node_mode", "1: its operator has it so", labels=("node", "mode"))
        switched_off = GaugeMetricFamily(
            "rose_node_switched_off", "1: it ended its lending by itself", labels=("node", "cause")
        )
        fleet_held = _gauge(
            "rose_node_fleet_held", "1: it lends nothing, whatever its mode, for the fleet's sake"
        )
        lent = _gauge("rose_node_lent_pages", "That its rollout engine may have, of 2 MiB")
        held = _gauge("rose_node_held_pages", "That its rollout engine has, of 2 MiB")
        stranded = _gauge(
            "rose_node_stranded_pages", "Of production's, that a frozen holder does not give back, of 2 MiB"
        )
        silent = _gauge("rose_node_silent_seconds", "Since its last heartbeat")
        for name, (heard_s, body) in self._last.items():
            for lending, count in self._breaches[name].items():
                breaches.add_metric((name, lending), count)
            silent.add_metric((name,), max(0.0, self._now_s() - heard_s))
            if body.mode is not None:
                mode.add_metric((name, body.mode), 1)
            for family, value in (
                (fleet_held, body.held),
                (lent, body.lent_pages),
                (held, body.held_pages),
                (stranded, body.stranded_pages),
            ):
                if value is not None:
                    family.add_metric((name,), int(value))
            if body.engine_kills is not None:
                kills.add_metric((name,), self._kills[name])
                for cause in CAUSES:
                    switched_off.add_metric((name, cause), int(body.switched_off == cause))
            if body.plugin_errors is not None:
                switched_off.add_metric((name, PLUGIN), int(body.plugin_errors > 0))
        yield from (breaches, kills, mode, switched_off, fleet_held, lent, held, stranded, silent)


def _new(before: int | None, now: int) -> int:
    """How far a node's count has come; a smaller one than before is that of a process that was started again."""
    return 0 if before is None else max(0, now - before)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=("node",))
