"""Two jobs that take turns on the same devices."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rose.policy import provisioning as pv
from rose.policy.pairing import PATIENCE, Pairing
from rose.policy.phases import Phases
from rose.policy.worker import Tier

DEVICES = 4
MANY = 1000


def alternating(work: float, away_s: float, *, sampling: bool = True, since_s: float = 0.0) -> Phases:
    phases = Phases(is_sampling=sampling, since_s=since_s)
    phases.work.extend([work] * 3)
    phases.away_s.extend([away_s] * 3)
    return phases


def paired(**jobs: Phases) -> Pairing:
    pairing = Pairing()
    pairing.match(jobs, dict.fromkeys(jobs, "m"), lambda job, partner: float(DEVICES))
    pairing.check(jobs)
    return pairing


def test_jobs_whose_phases_fit_take_turns_and_those_that_sample_most_of_the_time_do_not() -> None:
    assert paired(a=alternating(120, 60), b=alternating(120, 60)).partner_of == {"a": "b", "b": "a"}
    assert paired(a=alternating(400, 10), b=alternating(400, 10)).partner_of == {}


def test_the_pair_that_leaves_the_devices_idle_least_is_made_first() -> None:
    found = paired(
        a=alternating(200, 50), b=alternating(190, 50), c=alternating(20, 80), d=alternating(40, 80)
    )
    assert found.partner_of == {"a": "b", "b": "a", "c": "d", "d": "c"}


def test_jobs_of_different_models_share_no_device() -> None:
    pairing, jobs = Pairing(), {"a": alternating(120, 60), "b": alternating(120, 60)}
    pairing.match(jobs, {"a": "m", "b": "n"}, lambda job, partner: float(DEVICES))
    assert pairing.partner_of == {}


def test_the_one_that_began_first_has_the_devices_until_it_trains_or_has_had_its_time_twice() -> None:
    first, second = alternating(120, 60, since_s=1.0), alternating(120, 60, since_s=2.0)
    jobs = {"a": second, "b": first}
    pairing = paired(**jobs)
    assert (pairing.has_turn("a", jobs), pairing.has_turn("b", jobs)) == (False, True)
    first.done = PATIENCE * 120 + 1
    assert (pairing.has_turn("a", jobs), pairing.has_turn("b", jobs)) == (True, False)
    first.done, first.is_sampling = 0.0, False
    assert (pairing.has_turn("a", jobs), pairing.has_turn("b", jobs)) == (True, False)


phase = st.builds(
    alternating,
    st.floats(1.0, 500.0),
    st.floats(1.0, 500.0),
    sampling=st.booleans(),
    since_s=st.sampled_from([0.0, 1.0, 2.0]),
)


@settings(max_examples=300, deadline=None)
@given(jobs=st.dictionaries(st.sampled_from("abcde"), phase), done=st.floats(0.0, 2000.0))
def test_of_two_that_are_paired_one_always_has_its_turn_and_nobody_waits_for_one_that_trains(
    jobs: dict[str, Phases], done: float
) -> None:
    pairing = paired(**jobs)
    for job in sorted(jobs)[:1]:
        jobs[job].done = done
    for one, other in pairing.partner_of.items():
        turns = pairing.has_turn(one, jobs), pairing.has_turn(other, jobs)
        assert any(turns)
        if not turns[0]:
            assert jobs[other].is_sampling
    assert all(pairing.has_turn(job, jobs) for job in jobs if job not in pairing.partner_of)


class Play:
    """Jobs that sample ``work`` engine-seconds and then train ``away_s``, on devices that provisioning gives them; a second a round."""

    def __init__(self, phases: bool, jobs: dict[str, tuple[float, float]]) -> None:
        params = pv.ProvisioningParams(
            phases=phases, switch_s=2.0, min_active_s=2.0, rest_s=0.0, idle_s=2.0, unfair_s=1e9
        )
        self.book = pv.Provisioning(params=params)
        self.jobs, self.now_s = jobs, 0.0
        self.left = {name: work for name, (work, _) in jobs.items()}
        self.trains_until_s = dict.fromkeys(jobs, 0.0)
        self.steps = dict.fromkeys(jobs, 0)
        self.alive = dict.fromkeys(jobs, True)
        for name in jobs:
            self.join(name)

    def join(self, name: str) -> None:
        self.book.handle(pv.JobSeen(at_s=self.now_s, job=name, n_dedicated=0, n_harvested=DEVICES, run=name))

    def second(self) -> None:
        self.now_s += 1.0
        for index in range(DEVICES):
            self.book.handle(pv.HostSeen(at_s=self.now_s, host=f"h{index}", tier=Tier.HARVESTED))
        for name, (work, away_s) in self.jobs.items():
            samples = self.alive[name] and self.now_s >= self.trains_until_s[name]
            if samples:
                self.left[name] -= len(self.book.held(name))
                if self.left[name] <= 0:
                    self.left[name], self.trains_until_s[name] = work, self.now_s + away_s
                    self.steps[name] += 1
                    samples = False
            self.book.handle(pv.LoadSeen(at_s=self.now_s, job=name, num_turns=MANY if samples else 0))
        self.book.handle(pv.DecideNow(at_s=self.now_s))
        self.book.check()


def test_two_equal_jobs_that_begin_together_take_turns_and_both_do_more_steps() -> None:
    """60 s on all devices, 70 s of training: in step with each other a cycle takes 190 s, in turn 130 s."""
    steps = {}
    for phases in (False, True):
        play = Play(phases, {"a": (60.0 * DEVICES, 70.0), "b": (60.0 * DEVICES, 70.0)})
        for _ in range(4000):
            play.second()
        steps[phases] = play.steps
    assert all(steps[True][job] > 1.2 * steps[False][job] for job in "ab")
    assert abs(steps[True]["a"] - steps[True]["b"]) <= 2


def test_a_job_whose_trainer_died_gives_its_devices_back_and_its_partner_does_not_wait_for_it() -> None:
    play = Play(True, {"a": (60.0 * DEVICES, 70.0), "b": (60.0 * DEVICES, 70.0)})
    for _ in range(1500):
        play.second()
    assert play.book.pairing.partner_of
    play.alive["a"] = False
    for _ in range(70 * 3 + 60 + 60):
        play.second()
    assert play.book.held("a") == []
    before = play.steps["b"]
    for _ in range(1300):
        play.second()
    assert play.steps["b"] - before >= 9  # 130 s each


def test_a_device_that_is_free_is_there_in_time_for_the_phase_that_comes() -> None:
    play = Play(True, {"a": (20.0 * DEVICES, 60.0)})
    seen: list[bool] = []
    for _ in range(900):
        play.second()
        if play.book.jobs["a"].is_next and play.now_s >= play.trains_until_s["a"] - 1.0:
            seen.append(len(play.book.held("a")) > 0)
    assert seen
    assert all(seen)


def test_of_two_jobs_the_one_that_would_miss_its_deadline_gets_more_devices() -> None:
    book = pv.Provisioning(params=pv.ProvisioningParams(min_active_s=0.0, rest_s=0.0))
    now_s = 0.0
    for name in "ab":
        book.handle(pv.JobSeen(at_s=0.0, job=name, n_dedicated=0, n_harvested=DEVICES, run=name))
    for index in range(DEVICES):
        book.handle(pv.HostSeen(at_s=0.0, host=f"h{index}", tier=Tier.HARVESTED))
    for name in "ab":
        phases = book.jobs[name].phases
        phases.work.extend([400.0, 400.0])
        phases.away_s.extend([50.0, 50.0])
    for _ in range(40):
        now_s += 1.0
        for name, deadline_s in (("a", 10.0), ("b", 1e6)):
            book.handle(pv.LoadSeen(at_s=now_s, job=name, num_turns=200, deadline_s=deadline_s))
        book.handle(pv.DecideNow(at_s=now_s))
    assert len(book.held("a")) > len(book.held("b"))
