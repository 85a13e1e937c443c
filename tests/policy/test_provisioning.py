"""Provisioning: which device works for which job, and when it is worth the switch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rose.errors import PolicyError
from rose.policy import provisioning as pv
from rose.policy.worker import Tier

PARAMS = pv.ProvisioningParams(switch_s=4.0, idle_s=30.0, min_active_s=20.0, rest_s=10.0)


@pytest.fixture
def book() -> Iterator[pv.Provisioning]:
    """Job ``j`` may hold 1 dedicated and 2 harvested hosts; ``d``, ``h1`` (40 % used), ``h2`` (10 %) are free."""
    book = pv.Provisioning(params=PARAMS)
    job(book, "j", 1, 2)
    seen(book, "d", Tier.DEDICATED)
    seen(book, "h1", serving_use=0.4)
    seen(book, "h2", serving_use=0.1)
    yield book
    book.check()


def job(
    book: pv.Provisioning, name: str, own: int, shared: int, at_s: float = 0.0, weight: float = 1.0
) -> list[pv.Action]:
    return book.handle(pv.JobSeen(at_s=at_s, job=name, n_dedicated=own, n_harvested=shared, weight=weight))


def seen(
    book: pv.Provisioning, name: str, tier: Tier = Tier.HARVESTED, at_s: float = 0.0, **fields: object
) -> None:
    book.handle(pv.HostSeen(at_s=at_s, host=name, tier=tier, **fields))  # type: ignore[arg-type]


def tick(
    book: pv.Provisioning, at_s: float, backlog_s: float | None = None, name: str = "j"
) -> list[pv.Action]:
    """One decision after three equal reports."""
    if backlog_s is not None:
        for _ in range(3):
            book.handle(pv.BacklogSeen(at_s=at_s, job=name, backlog_s=backlog_s))
    return book.handle(pv.Tick(at_s=at_s))


def test_dedicated_first_then_the_serving_gpu_with_the_lowest_kv_use(book: pv.Provisioning) -> None:
    assert tick(book, 1.0, math.inf) == [pv.Activate(host="d", job="j")]
    assert tick(book, 2.0, 100.0) == [pv.Activate(host="h2", job="j")]
    assert tick(book, 3.0, 100.0) == [pv.Activate(host="h1", job="j")]
    assert tick(book, 4.0, 100.0) == []  # nothing is left, and the caps are reached


def test_between_equal_use_the_one_that_is_reclaimed_less(book: pv.Provisioning) -> None:
    tick(book, 1.0, math.inf)
    seen(book, "h1", at_s=1.0, serving_use=0.1, reclaim_rate=0.01)
    seen(book, "h2", at_s=1.0, serving_use=0.1, reclaim_rate=0.2)
    assert tick(book, 2.0, 100.0) == [pv.Activate(host="h1", job="j")]


def test_a_switch_must_gain_more_than_it_costs(book: pv.Provisioning) -> None:
    tick(book, 1.0, math.inf)
    # One held: a second saves 12 / 2 = 6 s, which is not above 1.5 * 4 s; 13 / 2 is.
    assert tick(book, 2.0, 12.0) == []
    assert tick(book, 3.0, 13.0) == [pv.Activate(host="h2", job="j")]
    # A third saves 17 / 3 s only.
    assert tick(book, 4.0, 17.0) == []
    # A host that starts slower costs more.
    seen(book, "h1", at_s=5.0, switch_s=60.0)
    assert tick(book, 5.0, 100.0) == []


def test_one_spike_activates_nothing(book: pv.Provisioning) -> None:
    tick(book, 1.0, math.inf)
    tick(book, 2.0, 0.0)
    book.handle(pv.BacklogSeen(at_s=3.0, job="j", backlog_s=30.0))  # mean of (0, 0, 30) / 2 = 5 s
    assert tick(book, 3.0) == []


def test_a_full_serving_gpu_is_not_taken_and_is_let_go(book: pv.Provisioning) -> None:
    seen(book, "h2", serving_use=0.9)
    tick(book, 1.0, math.inf)
    assert tick(book, 2.0, 100.0) == [pv.Activate(host="h1", job="j")]
    seen(book, "h1", at_s=3.0, serving_use=0.95)
    assert tick(book, 21.9, 100.0) == []  # a burst alone is the lending policy's to handle
    assert tick(book, 23.1, 100.0) == [pv.Release(host="h1", job="j", reason="pressure")]


def test_an_idle_device_is_released_after_a_while_and_rests(book: pv.Provisioning) -> None:
    tick(book, 1.0, math.inf)
    tick(book, 2.0, 100.0)
    seen(book, "h2", at_s=10.0, serving_use=0.1, busy=True)
    assert tick(book, 39.9, 0.0) == []
    assert tick(book, 40.0, 0.0) == [pv.Release(host="h2", job="j", reason="idle")]
    seen(book, "h1", at_s=41.0, serving_use=0.9)
    assert tick(book, 49.0, 100.0) == []  # released 9 s ago
    assert tick(book, 50.1, 100.0) == [pv.Activate(host="h2", job="j")]


def test_the_last_dedicated_device_stays(book: pv.Provisioning) -> None:
    tick(book, 1.0, math.inf)
    assert tick(book, 500.0, 0.0) == []
    assert book.held("j") == ["d"]


def test_a_lowered_cap_releases_at_once(book: pv.Provisioning) -> None:
    for at_s in (1.0, 2.0, 3.0):
        tick(book, at_s, 1000.0)
    assert job(book, "j", 1, 1, at_s=4.0) == [pv.Release(host="h1", job="j", reason="cap")]
    assert book.handle(pv.JobGone(at_s=5.0, job="j")) == [
        pv.Release(host="d", job="j", reason="job_gone"),
        pv.Release(host="h2", job="j", reason="job_gone"),
    ]


def test_two_jobs_share_by_weighted_device_seconds() -> None:
    book = pv.Provisioning(params=PARAMS)
    for index in range(4):
        seen(book, f"h{index}")
    job(book, "a", 0, 4, weight=1.0)
    for at_s in (1.0, 2.0, 3.0, 4.0):
        tick(book, at_s, 1e6, "a")
    assert len(book.held("a")) == 4
    job(book, "b", 0, 4, at_s=5.0, weight=3.0)
    now_s = 5.0
    while now_s < 400.0:
        now_s += 1.0
        for index in range(4):
            seen(book, f"h{index}", at_s=now_s, busy=True)
        tick(book, now_s, 1e6, "a")
        tick(book, now_s, 1e6, "b")
        book.check()
    used = {name: book.jobs[name].used_s for name in "ab"}
    # ``b`` started level; after a transient, it gets three times what ``a`` gets.
    start = now_s
    before = dict(used)
    while now_s < start + 2000.0:
        now_s += 1.0
        for index in range(4):
            seen(book, f"h{index}", at_s=now_s, busy=True)
        tick(book, now_s, 1e6, "a")
        tick(book, now_s, 1e6, "b")
    gained = {name: book.jobs[name].used_s - before[name] for name in "ab"}
    assert 2.5 < gained["b"] / gained["a"] < 3.5


def test_refused_events_change_nothing(book: pv.Provisioning) -> None:
    tick(book, 5.0, math.inf)
    before = ({name: host.job for name, host in book.hosts.items()}, sorted(book.jobs))
    with pytest.raises(PolicyError, match="time went back"):
        seen(book, "x", at_s=4.0)
    with pytest.raises(PolicyError, match="unknown"):
        book.handle(pv.BacklogSeen(at_s=6.0, job="ghost", backlog_s=1.0))
    with pytest.raises(PolicyError, match="weight"):
        job(book, "x", 1, 1, at_s=6.0, weight=0.0)
    assert before == ({name: host.job for name, host in book.hosts.items()}, sorted(book.jobs))


class AnySequence(RuleBasedStateMachine):
    """The actions alone tell who holds what; caps and hysteresis hold after any sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.book = pv.Provisioning(params=PARAMS)
        self.now_s = 0.0
        self.holds: dict[str, str] = {}
        self.changed: dict[str, float] = {}

    def feed(self, event: pv.Event) -> None:
        try:
            actions = self.book.handle(event)
        except PolicyError:
            return
        for action in actions:
            last_s = self.changed.get(action.host, -math.inf)
            self.changed[action.host] = self.now_s
            match action:
                case pv.Activate():
                    assert action.host not in self.holds
                    assert self.now_s - last_s >= PARAMS.rest_s
                    self.holds[action.host] = action.job
                case pv.Release():
                    assert self.holds.pop(action.host) == action.job
                    if action.reason in ("idle", "pressure", "fair_share"):
                        assert self.now_s - last_s >= PARAMS.min_active_s

    @rule(host=st.sampled_from("pqrs"), use=st.sampled_from([0.0, 0.5, 0.9]), busy=st.booleans())
    def host(self, host: str, use: float, busy: bool) -> None:
        tier = Tier.DEDICATED if host in "pq" else Tier.HARVESTED
        self.feed(pv.HostSeen(at_s=self.now_s, host=host, tier=tier, serving_use=use, busy=busy))

    @rule(host=st.sampled_from("pqrs"))
    def gone(self, host: str) -> None:
        self.feed(pv.HostGone(at_s=self.now_s, host=host))
        self.holds.pop(host, None)
        self.changed.pop(host, None)

    @rule(
        job=st.sampled_from("ab"), own=st.integers(0, 2), shared=st.integers(0, 2), weight=st.integers(1, 3)
    )
    def job(self, job: str, own: int, shared: int, weight: int) -> None:
        self.feed(pv.JobSeen(at_s=self.now_s, job=job, n_dedicated=own, n_harvested=shared, weight=weight))

    @rule(
        job=st.sampled_from("ab"), backlog_s=st.sampled_from([0.0, 5.0, 50.0, math.inf]), over=st.booleans()
    )
    def load(self, job: str, backlog_s: float, over: bool) -> None:
        self.feed(
            pv.JobGone(at_s=self.now_s, job=job)
            if over and backlog_s == 0
            else pv.BacklogSeen(at_s=self.now_s, job=job, backlog_s=backlog_s)
        )

    @rule(step=st.sampled_from([0.5, 5.0, 25.0]))
    def time(self, step: float) -> None:
        self.now_s += step
        self.feed(pv.Tick(at_s=self.now_s))

    @invariant()
    def books_hold(self) -> None:
        self.book.check()
        assert self.holds == {
            name: host.job for name, host in self.book.hosts.items() if host.job is not None
        }


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
