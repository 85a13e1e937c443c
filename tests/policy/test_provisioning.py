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
from tests.policy.provisioning_kit import MANY, job, seen

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


def tick(
    book: pv.Provisioning, at_s: float, num_turns: int | None = None, name: str = "j"
) -> list[pv.Action]:
    """One decision after three equal reports."""
    if num_turns is not None:
        for _ in range(3):
            book.handle(pv.LoadSeen(at_s=at_s, job=name, num_turns=num_turns))
    return book.handle(pv.DecideNow(at_s=at_s))


def taken(actions: list[pv.Action]) -> list[str]:
    assert all(isinstance(action, pv.Activate) for action in actions)
    return [action.host for action in actions]


def test_dedicated_first_then_the_serving_gpu_with_the_lowest_kv_use(book: pv.Provisioning) -> None:
    assert taken(tick(book, 1.0, MANY)) == ["d"]
    assert taken(tick(book, 2.0, MANY)) == ["h2"]
    assert taken(tick(book, 3.0, MANY)) == ["h1"]
    assert tick(book, 4.0, MANY) == []  # nothing is left, and the caps are reached


def test_between_equal_use_the_one_that_is_reclaimed_less(book: pv.Provisioning) -> None:
    tick(book, 1.0, MANY)
    seen(book, "h1", at_s=1.0, serving_use=0.1, reclaim_rate=0.01)
    seen(book, "h2", at_s=1.0, serving_use=0.1, reclaim_rate=0.2)
    assert taken(tick(book, 2.0, MANY)) == ["h1"]


def test_a_host_that_has_a_copy_of_the_weights_comes_before_one_that_is_emptier() -> None:
    book = pv.Provisioning(params=PARAMS)
    book.handle(pv.JobSeen(at_s=0.0, job="j", n_dedicated=0, n_harvested=2, run="run-j"))
    seen(book, "empty", serving_use=0.1)
    seen(book, "warm", serving_use=0.4, copies=("run-j",))
    assert taken(tick(book, 1.0, MANY)) == ["warm"]


def test_a_switch_must_gain_more_than_it_costs(book: pv.Provisioning) -> None:
    tick(book, 1.0, MANY)
    # Two turns on one engine are sampled nearly as fast as on two; of 64, half on each saves a third of the time.
    assert tick(book, 2.0, 2) == []
    assert taken(tick(book, 3.0, 64)) == ["h2"]
    # A host that takes longer to get the weights costs more than a minute of it can gain.
    book.handle(pv.JobSeen(at_s=4.0, job="j", n_dedicated=1, n_harvested=2, run="run-j"))
    seen(book, "h1", at_s=4.0, pull_s=55.0, commit_s=4.0)
    assert tick(book, 5.0, MANY) == []


def test_a_host_with_a_copy_of_the_weights_is_worth_less_gain(book: pv.Provisioning) -> None:
    """The same demand, of which a pull would cost more than it brings."""
    job(book, "j", 1, 2, run="run-j")
    tick(book, 1.0, MANY)
    assert tick(book, 2.0, 10) == []
    seen(book, "h1", at_s=3.0, copies=("run-j",))
    assert taken(tick(book, 4.0, 10)) == ["h1"]


def test_where_dedicated_engines_have_room_for_every_turn_no_other_is_taken(book: pv.Provisioning) -> None:
    tick(book, 1.0, MANY)
    seen(book, "h1", at_s=2.0, speed=0.3)
    assert tick(book, 3.0, 1) == []


def test_the_tail_of_a_job_lets_harvested_devices_go(book: pv.Provisioning) -> None:
    """One long trajectory is left, and the dedicated engine has it: nothing that is held besides shortens it."""
    for at_s in (1.0, 2.0, 3.0):
        tick(book, at_s, MANY)
    assert tick(book, 4.0, 1) == []  # held for a while yet
    released = tick(book, 40.0, 1)
    assert {(action.host, action.reason) for action in released if isinstance(action, pv.Release)} == {
        ("h1", "idle"),
        ("h2", "idle"),
    }
    assert book.held("j") == ["d"]


def test_a_device_that_slows_a_job_is_released() -> None:
    """Of what is left, more is done without it: each of the last turns is quicker on the fast device."""
    book = pv.Provisioning(params=PARAMS)
    job(book, "j", 1, 1)
    seen(book, "d", Tier.DEDICATED)
    seen(book, "h", speed=0.3)
    tick(book, 1.0, MANY)
    assert taken(tick(book, 2.0, MANY)) == ["h"]
    facts = book.jobs["j"]
    tick(book, 3.0, 2)
    assert facts.rate(2, 1.3) < facts.rate(1, 1.0)
    assert tick(book, 35.0, 2) == [pv.Release(host="h", job="j", reason="idle")]


def test_a_borrowed_device_comes_before_a_serving_gpu_and_is_worth_the_time_that_it_is_lent() -> None:
    book = pv.Provisioning(params=PARAMS)
    job(book, "j", 0, 1, n_borrowed=1, run="run-j")
    seen(book, "h")
    seen(book, "b", Tier.BORROWED, left_s=7.0)
    assert taken(tick(book, 1.0, MANY)) == ["h"]  # in 7 s a switch of 4 s has not paid
    seen(book, "b", Tier.BORROWED, at_s=2.0, left_s=60.0)
    assert taken(tick(book, 3.0, MANY)) == ["b"]
    assert book.handle(pv.HostSeen(at_s=40.0, host="b", tier=Tier.BORROWED, left_s=0.0)) == [
        pv.Release(host="b", job="j", reason="returned")
    ]
    assert tick(book, 41.0, MANY) == []
    seen(book, "b", Tier.BORROWED, at_s=42.0, left_s=60.0)
    assert taken(tick(book, 43.0, MANY)) == ["b"]  # it needs no rest


def test_a_job_takes_no_more_borrowed_devices_than_it_may() -> None:
    book = pv.Provisioning(params=PARAMS)
    book.handle(pv.JobSeen(at_s=0.0, job="j", n_dedicated=0, n_harvested=9, n_borrowed=1))
    for name in ("a", "b"):
        seen(book, name, Tier.BORROWED, left_s=600.0)
    assert taken([*tick(book, 1.0, MANY), *tick(book, 2.0, MANY)]) == ["a"]


def test_a_job_that_went_away_with_turns_waiting_gets_no_device_that_comes_then() -> None:
    book = pv.Provisioning(params=PARAMS)
    book.handle(pv.JobSeen(at_s=0.0, job="j", n_dedicated=1, n_harvested=0))
    tick(book, 1.0, MANY)
    away_s = 2.0 + PARAMS.job_idle_s
    tick(book, away_s)
    seen(book, "d", at_s=away_s, tier=Tier.DEDICATED)
    assert tick(book, away_s + 1.0) == []
    assert taken(tick(book, away_s + 2.0, MANY)) == ["d"]


def test_one_spike_activates_nothing(book: pv.Provisioning) -> None:
    job(book, "j", 1, 2, run="run-j")
    tick(book, 1.0, MANY)
    tick(book, 2.0, 0)
    book.handle(pv.LoadSeen(at_s=3.0, job="j", num_turns=20))  # of (0, 0, 20) a third counts
    assert tick(book, 3.0) == []


def test_a_full_serving_gpu_is_not_taken_and_is_let_go(book: pv.Provisioning) -> None:
    seen(book, "h2", serving_use=0.9)
    tick(book, 1.0, MANY)
    assert taken(tick(book, 2.0, MANY)) == ["h1"]
    seen(book, "h1", at_s=3.0, serving_use=0.95)
    assert tick(book, 21.9, MANY) == []  # a burst alone is the lending policy's to handle
    assert tick(book, 23.1, MANY) == [pv.Release(host="h1", job="j", reason="pressure")]


def test_what_production_will_need_before_the_switch_has_paid_is_not_taken(book: pv.Provisioning) -> None:
    """Its use grows by a point a second: in 20 s it is full."""
    job(book, "j", 1, 2, run="run-j")
    tick(book, 1.0, MANY)
    seen(book, "h1", at_s=1.0, serving_use=0.9)
    for second in range(40):
        seen(book, "h2", at_s=2.0 + second, serving_use=0.3 + 0.01 * second)
    assert tick(book, 42.0, 64) == []
    for second in range(60):
        seen(book, "h2", at_s=43.0 + second, serving_use=0.69)
    assert taken(tick(book, 103.0, 64)) == ["h2"]


def of_run(book: pv.Provisioning, name: str, at_s: float = 0.0, **caps: int) -> None:
    """A job whose weights are those of the run of its name."""
    least = {"n_dedicated": 0, "n_harvested": 9, **caps}
    book.handle(pv.JobSeen(at_s=at_s, job=name, run=name, **least))  # type: ignore[arg-type]


def test_a_slow_first_pull_is_no_part_of_what_it_costs_to_come_back() -> None:
    """90 s, of which the commit took one: with a copy on the host the next switch to this run costs that one."""
    book = pv.Provisioning(params=PARAMS)
    of_run(book, "a")
    seen(book, "h", run="b", pull_s=90.0, commit_s=1.5)
    assert tick(book, 1.0, MANY, "a") == []
    seen(book, "h", at_s=20.0, run="b", pull_s=90.0, commit_s=1.5, copies=("a", "b"))
    assert taken(tick(book, 21.0, MANY, "a")) == ["h"]


def test_a_measured_cost_fades_and_a_new_one_of_the_same_size_counts_in_full_again() -> None:
    """Else a device that was slow once stays with its job for good, and nobody ever measures it again."""
    book = pv.Provisioning(params=PARAMS)
    of_run(book, "a")
    said = {"run": "b", "copies": ("a",), "commit_s": 70.0}
    seen(book, "h", **said, num_switches=1)
    assert tick(book, 20.0, MANY, "a") == []
    seen(book, "h", at_s=1200.0, **said, num_switches=2)
    assert tick(book, 1201.0, MANY, "a") == []
    seen(book, "h", at_s=2400.0, **said, num_switches=2)
    assert taken(tick(book, 2401.0, MANY, "a")) == ["h"]


def test_a_device_that_has_measured_nothing_any_more_costs_what_is_usual() -> None:
    """Its node has started again; the old figure was of another process."""
    book = pv.Provisioning(params=PARAMS)
    of_run(book, "a")
    seen(book, "h", run="b", pull_s=90.0, commit_s=80.0)
    assert tick(book, 20.0, MANY, "a") == []
    seen(book, "h", at_s=21.0, run="b")
    assert taken(tick(book, 22.0, MANY, "a")) == ["h"]


def test_a_job_that_asks_for_no_weights_pays_for_no_switch() -> None:
    book = pv.Provisioning(params=PARAMS)
    job(book, "j", 0, 1)
    seen(book, "h", pull_s=90.0, commit_s=80.0)
    assert taken(tick(book, 1.0, MANY)) == ["h"]


def test_a_device_whose_weights_do_not_come_is_released_and_left_alone_for_longer_each_time() -> None:
    book = pv.Provisioning(params=PARAMS)
    of_run(book, "a")
    seen(book, "h")
    found: list[tuple[float, pv.Action]] = []
    for second in map(float, range(1, 700)):
        seen(book, "h", at_s=second)
        found += [(second, action) for action in tick(book, second, MANY, "a")]
        book.check()
    assert [second for second, _ in found] == [1, 121, 181, 301, 421, 541]
    assert {action.reason for _, action in found if isinstance(action, pv.Release)} == {"no_weights"}


def test_a_device_whose_weights_come_late_after_all_may_be_taken_at_once() -> None:
    book = pv.Provisioning(params=PARAMS)
    of_run(book, "a")
    seen(book, "h")
    tick(book, 1.0, MANY, "a")
    (released,) = tick(book, 122.0, MANY, "a")
    assert released == pv.Release(host="h", job="a", reason="no_weights")
    seen(book, "h", at_s=140.0, run="a")
    assert taken(tick(book, 141.0, MANY, "a")) == ["h"]


def test_a_device_that_loses_its_weights_in_between_has_the_same_time_to_get_them_again() -> None:
    """Its engine has started again."""
    book = pv.Provisioning(params=PARAMS)
    of_run(book, "a")
    seen(book, "h", run="a")
    tick(book, 1.0, MANY, "a")
    seen(book, "h", at_s=200.0, run="")
    assert tick(book, 201.0, MANY, "a") == []
    assert tick(book, 320.0, MANY, "a") == []
    assert [action.reason for action in tick(book, 321.0, MANY, "a") if isinstance(action, pv.Release)] == [
        "no_weights"
    ]


def test_two_jobs_take_turns_on_the_only_device_by_their_shares() -> None:
    """It is the last dedicated device of whoever has it, which else would keep it for good."""
    book = pv.Provisioning(params=PARAMS)
    for name in "ab":
        of_run(book, name, n_dedicated=1)
    had = {"a": 0, "b": 0}
    owner = ""
    for second in range(1, 2000):
        seen(book, "d", Tier.DEDICATED, at_s=float(second), run=owner)
        for name in "ab":
            book.handle(pv.LoadSeen(at_s=float(second), job=name, num_turns=MANY))
        book.handle(pv.DecideNow(at_s=float(second)))
        owner = book.hosts["d"].job or owner
        had[owner] += 1
        book.check()
    assert abs(had["a"] - had["b"]) < 200


def test_the_last_dedicated_device_of_a_job_that_trains_goes_to_one_that_has_none() -> None:
    book = pv.Provisioning(params=PARAMS)
    for name in "ab":
        of_run(book, name, n_dedicated=1)
    seen(book, "d", Tier.DEDICATED, run="a")
    tick(book, 1.0, MANY, "a")
    assert book.held("a") == ["d"]
    tick(book, 25.0, 0, "a")
    found = tick(book, 26.0, MANY, "b")
    assert found[0] == pv.Release(host="d", job="a", reason="value")
    assert book.held("b") == ["d"]


def test_devices_that_are_new_here_go_on_for_the_jobs_whose_weights_they_have() -> None:
    """A scheduler that starts again: all at once, not one a second, and nobody is parked."""
    book = pv.Provisioning(params=PARAMS)
    for name in "ab":
        of_run(book, name, n_harvested=3)
    for index in range(5):
        seen(book, f"h{index}", run="a" if index < 2 else "b", serving_use=0.9)
    assert tick(book, 1.0) == [
        pv.Adopt(host=f"h{index}", job="a" if index < 2 else "b") for index in range(5)
    ]
    book.check()


def test_no_more_devices_are_adopted_than_a_job_may_have() -> None:
    book = pv.Provisioning(params=PARAMS)
    of_run(book, "a", n_harvested=1)
    for index in range(2):
        seen(book, f"h{index}", run="a")
    tick(book, 1.0)
    assert book.held("a") == ["h0"]


def test_what_was_adopted_may_go_to_a_needier_job_at_once() -> None:
    book = pv.Provisioning(params=PARAMS)
    for name in "ab":
        of_run(book, name)
    for index in range(3):
        seen(book, f"h{index}", run="a")
    tick(book, 1.0, 0, "a")
    tick(book, 2.0, MANY, "b")
    assert len(book.held("b")) >= 1


def test_a_device_with_the_weights_of_a_job_that_is_not_back_yet_is_left_alone_for_a_moment() -> None:
    book = pv.Provisioning(params=PARAMS)
    of_run(book, "a")
    seen(book, "h", run="b")
    assert tick(book, 1.0, MANY, "a") == []
    assert tick(book, 9.0, MANY, "a") == []
    assert taken(tick(book, 11.0, MANY, "a")) == ["h"]


def test_engines_that_are_everybodys_count_for_what_one_more_would_gain() -> None:
    book = pv.Provisioning(params=PARAMS)
    of_run(book, "a")
    seen(book, "h")
    for num_open, is_worth_it in ((8.0, False), (0.0, True)):
        now_s = 1.0 + is_worth_it
        for _ in range(3):
            book.handle(
                pv.LoadSeen(at_s=now_s, job="a", num_turns=40, num_open=num_open, open_speed=num_open)
            )
        assert bool(book.handle(pv.DecideNow(at_s=now_s))) is is_worth_it


def test_an_idle_device_is_released_after_a_while_and_rests(book: pv.Provisioning) -> None:
    tick(book, 1.0, MANY)
    tick(book, 2.0, MANY)
    tick(book, 10.0, MANY)  # takes h1, and h2 gains something until here
    assert tick(book, 39.9, 0) == []
    assert {action.host for action in tick(book, 40.1, 0)} == {"h1", "h2"}
    seen(book, "h1", at_s=41.0, serving_use=0.9)
    assert tick(book, 49.0, MANY) == []  # released 9 s ago
    assert taken(tick(book, 50.2, MANY)) == ["h2"]


def test_the_last_dedicated_device_stays(book: pv.Provisioning) -> None:
    tick(book, 1.0, MANY)
    assert tick(book, 100.0, 0) == []
    assert book.held("j") == ["d"]


def test_a_lowered_cap_releases_at_once(book: pv.Provisioning) -> None:
    for at_s in (1.0, 2.0, 3.0):
        tick(book, at_s, MANY)
    assert job(book, "j", 1, 1, at_s=4.0) == [pv.Release(host="h1", job="j", reason="cap")]
    assert book.handle(pv.JobGone(at_s=5.0, job="j")) == [
        pv.Release(host="d", job="j", reason="job_gone"),
        pv.Release(host="h2", job="j", reason="job_gone"),
    ]


def test_a_job_gets_no_host_of_another_base_model() -> None:
    book = pv.Provisioning(params=PARAMS)
    book.handle(pv.JobSeen(at_s=0.0, job="j", n_dedicated=9, n_harvested=9, model="small"))
    seen(book, "large", model="large")
    assert tick(book, 1.0, MANY) == []
    seen(book, "small", at_s=1.0, model="small")
    assert taken(tick(book, 2.0, MANY)) == ["small"]


def test_a_host_goes_from_a_job_that_trains_to_one_that_samples() -> None:
    """While one trains its devices gain it nothing: it lends them, and borrows back when it samples."""
    book = pv.Provisioning(params=PARAMS)
    for name in ("a", "b"):
        job(book, name, 0, 2)
    for index in range(2):
        seen(book, f"h{index}")
    tick(book, 1.0, 200, "a")
    tick(book, 2.0, 200, "a")
    assert len(book.held("a")) == 2

    moved = [*tick(book, 25.0, 0, "a"), *tick(book, 25.0, 200, "b"), *tick(book, 26.0, 200, "b")]

    assert [(action.host, action.reason) for action in moved if isinstance(action, pv.Release)] == [
        ("h1", "value"),
        ("h0", "value"),
    ]
    assert len(book.held("b")) == 2
    tick(book, 50.0, 0, "b")
    tick(book, 50.0, 200, "a")
    tick(book, 51.0, 200, "a")
    assert len(book.held("a")) == 2


def test_what_a_job_uses_is_not_taken_for_a_little_more_gain() -> None:
    book = pv.Provisioning(params=PARAMS)
    for name in ("a", "b"):
        job(book, name, 0, 2)
    for index in range(2):
        seen(book, f"h{index}")
    tick(book, 1.0, 200, "a")
    tick(book, 2.0, 220, "b")
    assert [len(book.held(name)) for name in "ab"] == [1, 1]

    for second in range(20):
        assert tick(book, 25.0 + second, 220, "b") == []


def test_two_jobs_share_by_weighted_device_seconds() -> None:
    book = pv.Provisioning(params=PARAMS)
    for index in range(4):
        seen(book, f"h{index}")
    job(book, "a", 0, 4, weight=1.0)
    for at_s in (1.0, 2.0, 3.0, 4.0):
        tick(book, at_s, MANY, "a")
    assert len(book.held("a")) == 4
    job(book, "b", 0, 4, at_s=5.0, weight=3.0)
    now_s = 5.0
    while now_s < 400.0:
        now_s += 1.0
        for name in "ab":
            tick(book, now_s, MANY, name)
        book.check()
    before = {name: book.jobs[name].used_s for name in "ab"}
    start = now_s
    while now_s < start + 2000.0:
        now_s += 1.0
        for name in "ab":
            tick(book, now_s, MANY, name)
    gained = {name: book.jobs[name].used_s - before[name] for name in "ab"}
    assert 2.0 < gained["b"] / gained["a"] < 4.0


@pytest.mark.parametrize(("num_turns", "wanted"), [(0, 0), (1, 1), (4, 1), (64, 3)])
def test_engines_that_a_job_would_pay_for(book: pv.Provisioning, num_turns: int, wanted: int) -> None:
    tick(book, 1.0, num_turns)
    assert book.wanted("j") == wanted


def test_refused_events_change_nothing(book: pv.Provisioning) -> None:
    tick(book, 5.0, MANY)
    before = ({name: host.job for name, host in book.hosts.items()}, sorted(book.jobs))
    with pytest.raises(PolicyError, match="time went back"):
        seen(book, "x", at_s=4.0)
    with pytest.raises(PolicyError, match="unknown"):
        book.handle(pv.LoadSeen(at_s=6.0, job="ghost", num_turns=1))
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
        self.adopted: set[str] = set()
        self.handed: set[str] = set()
        """Taken from one job for another in this moment."""

    def feed(self, event: pv.Event) -> None:
        try:
            actions = self.book.handle(event)
        except PolicyError:
            return
        for action in actions:
            last_s = self.changed.get(action.host, -math.inf)
            self.changed[action.host] = self.now_s
            match action:
                case pv.Adopt():
                    assert action.host not in self.holds
                    self.adopted.add(action.host)
                    self.holds[action.host] = action.job
                case pv.Activate():
                    assert action.host not in self.holds
                    assert self.now_s - last_s >= PARAMS.rest_s or action.host in self.handed
                    self.handed.discard(action.host)
                    self.holds[action.host] = action.job
                case pv.Release():
                    assert self.holds.pop(action.host) == action.job
                    if action.reason in ("turn", "value", "fair_share"):
                        self.handed.add(action.host)
                    if action.reason == "returned":
                        del self.changed[action.host]  # it needs no rest
                    if action.reason in ("idle", "pressure", "turn", "value", "fair_share"):
                        assert self.now_s - last_s >= PARAMS.min_active_s or action.host in self.adopted
                    self.adopted.discard(action.host)

        assert not self.handed

    @rule(
        host=st.sampled_from("pqrst"),
        use=st.sampled_from([0.0, 0.5, 0.9]),
        model=st.sampled_from(["", "", "other"]),
        run=st.sampled_from(["", "a", "b"]),
        left_s=st.sampled_from([0.0, 30.0]),
    )
    def host(self, host: str, use: float, model: str, run: str, left_s: float) -> None:
        tier = Tier.DEDICATED if host in "pq" else Tier.BORROWED if host == "t" else Tier.HARVESTED
        if tier is not Tier.BORROWED:
            left_s = math.inf
        self.feed(
            pv.HostSeen(
                at_s=self.now_s,
                host=host,
                tier=tier,
                serving_use=use,
                model=model,
                run=run,
                left_s=left_s,
            )
        )

    @rule(host=st.sampled_from("pqrst"))
    def gone(self, host: str) -> None:
        self.feed(pv.HostGone(at_s=self.now_s, host=host))
        self.holds.pop(host, None)
        self.changed.pop(host, None)

    @rule(
        job=st.sampled_from("ab"), own=st.integers(0, 2), shared=st.integers(0, 2), weight=st.integers(1, 3)
    )
    def job(self, job: str, own: int, shared: int, weight: int) -> None:
        self.feed(
            pv.JobSeen(
                at_s=self.now_s,
                job=job,
                n_dedicated=own,
                n_harvested=shared,
                n_borrowed=shared,
                weight=weight,
                run=job,
            )
        )

    @rule(job=st.sampled_from("ab"), num_turns=st.sampled_from([0, 3, 50, MANY]), over=st.booleans())
    def load(self, job: str, num_turns: int, over: bool) -> None:
        self.feed(
            pv.JobGone(at_s=self.now_s, job=job)
            if over and num_turns == 0
            else pv.LoadSeen(at_s=self.now_s, job=job, num_turns=num_turns)
        )

    @rule(step=st.sampled_from([0.5, 5.0, 25.0]))
    def time(self, step: float) -> None:
        self.now_s += step
        self.feed(pv.DecideNow(at_s=self.now_s))

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
