"""Our cheap metrics say what the client library's own would have said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from rose.scheduler.tallies import Durations, Tally

BOUNDS = (0.01, 0.1, 1, 30)


def lines(registry: CollectorRegistry) -> list[str]:
    """All but when a metric was made, which only the library's own remember."""
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


@given(st.lists(st.sampled_from([0.0, 0.01, 0.0100001, 0.5, 1.0, 29.0, 30.0, 1e6])))
def test_durations_are_a_histogram(seconds: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Durations("wait_seconds", "Wait", BOUNDS, registry=ours)
    other = Histogram("wait_seconds", "Wait", buckets=BOUNDS, registry=theirs)
    for each in seconds:
        mine.observe(each)
        other.observe(each)
    assert lines(ours) == lines(theirs)


def test_tallies_are_counters() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    Tally("plain", "None yet", registry=ours)
    Counter("plain", "None yet", registry=theirs)
    one, other = (
        Tally("one", "By kind", ["kind"], registry=ours),
        Counter("one", "By kind", ["kind"], registry=theirs),
    )
    two, another = (
        Tally("two", "By both", ["a", "b"], registry=ours),
        Counter("two", "By both", ["a", "b"], registry=theirs),
    )
    for kind, count in (("x", 3), ('quote"\n', 2)):
        one.counts[kind] += count
        other.labels(kind).inc(count)
        two.counts[kind, "z"] += count
        another.labels(kind, "z").inc(count)
    assert lines(ours) == lines(theirs)
