"""Membership: who counts as alive after any sequence of registrations, heartbeats, silence and losses."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rose.policy.fleet import Fleet, FleetParams
from rose.policy.worker import Duty, Health, LendingState, Tier

PARAMS = FleetParams(mass_silence_min_workers=4, mass_silence_hold_s=30.0, clock_gap_s=100.0)


def join(
    fleet: Fleet, name: str, at_s: float = 0.0, incarnation: str = "1", tier: Tier = Tier.DEDICATED
) -> None:
    fleet.register(
        at_s=at_s, worker_id=name, incarnation=incarnation, tier=tier, model="m", max_model_len=100
    )


def beat(fleet: Fleet, name: str, at_s: float, seq: int, **fields: object) -> bool:
    said: dict[str, object] = {
        "incarnation": "1",
        "version": (1, 0),
        "state": "ready",
        "kv_budget_tokens": 100,
        "kv_used_tokens": 0,
        "running": 0,
        "gated": False,
        "reclaim_seq": 0,
        "slack_s": None,
    }
    return fleet.heartbeat(at_s=at_s, worker_id=name, seq=seq, **(said | fields))  # type: ignore[arg-type]


def test_names_that_no_worker_has_any_more_are_forgotten() -> None:
    """A node says which run and model it has, and may say another each time."""
    fleet = Fleet(params=PARAMS)
    for name in "abc":
        join(fleet, name)
    for number in range(3000):
        beat(fleet, "a", number / 100, number + 1, run=f"run-{number}")
        fleet.table.check(fleet)
    for number in range(3000):
        fleet.forget("b")
        fleet.register(
            at_s=30.0,
            worker_id="b",
            incarnation="1",
            tier=Tier.DEDICATED,
            model=f"m{number}",
            max_model_len=100,
        )
        fleet.table.check(fleet)
    beat(fleet, "c", 30.0, 1, run="run-2999")

    assert len(fleet.table._numbers) < 300
    found = fleet.table.of_run("run-2999")
    assert sorted(
        worker.worker_id for worker, is_of in zip(fleet.table.workers, found, strict=True) if is_of
    ) == ["a", "c"]
    assert not fleet.table.of_run("run-0").any()
    assert fleet.table.serves("m2999", "").sum() == 1


def test_suspect_at_two_seconds_dead_at_ten() -> None:
    fleet = Fleet(params=PARAMS)
    join(fleet, "a")
    beat(fleet, "a", 0.0, 1)
    health: dict[float, Health] = {}
    for tenth in range(1, 110):
        fleet.tick(tenth / 10)
        health[tenth / 10] = fleet.workers["a"].health
    assert (health[1.9], health[2.0], health[9.9], health[10.0]) == (
        Health.READY,
        Health.SUSPECT,
        Health.SUSPECT,
        Health.DEAD,
    )


@pytest.mark.parametrize(("num_silent", "held"), [(3, False), (4, True)])
def test_when_more_than_three_in_ten_fall_silent_together_we_suspect_ourselves(
    num_silent: int, held: bool
) -> None:
    fleet = Fleet(params=PARAMS)
    for index in range(10):
        join(fleet, f"w{index}")
        beat(fleet, f"w{index}", 0.0, 1)
    for second in range(1, 15):
        for index in range(num_silent, 10):
            beat(fleet, f"w{index}", float(second), second + 1)
        fleet.tick(float(second))
    silent = [fleet.workers[f"w{index}"].health for index in range(num_silent)]
    assert set(silent) == ({Health.READY} if held else {Health.DEAD})


def test_a_dead_worker_returns_only_with_a_version_and_its_incarnation() -> None:
    fleet = Fleet(params=PARAMS)
    join(fleet, "a")
    beat(fleet, "a", 0.0, 1)
    fleet.lost("a", None, "reset")
    assert beat(fleet, "a", 0.1, 2, version=None)
    assert fleet.workers["a"].health is Health.DEAD
    assert not beat(fleet, "a", 0.2, 3, incarnation="2")
    assert fleet.workers["a"].health is Health.DEAD
    assert beat(fleet, "a", 0.3, 4)
    assert fleet.workers["a"].health is Health.READY


@pytest.mark.parametrize(("cap", "expected"), [(None, 20), (8, 8), (300, 20)])
def test_no_worker_is_sent_more_turns_than_its_engine_runs_at_once(cap: int | None, expected: int) -> None:
    fleet = Fleet(params=PARAMS)
    fleet.register(
        at_s=0.0,
        worker_id="a",
        incarnation="1",
        tier=Tier.HARVESTED,
        model="m",
        max_model_len=100,
        cap=cap,
        max_num_seqs=20,
    )
    assert fleet.workers["a"].slots == expected
    fleet.set_cap(Tier.HARVESTED, 500)
    assert fleet.workers["a"].slots == expected


class AnySequence(RuleBasedStateMachine):
    """What may take turns has been heard of lately, knows its weights, and stands so in the packed columns."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(
            params=FleetParams(mass_silence_min_workers=100, clock_gap_s=100.0, adaptive_cap=True)
        )
        self.now_s = 0.0
        self.seq = 0

    @rule(name=st.sampled_from("abcd"), incarnation=st.sampled_from("12"), tier=st.sampled_from(list(Tier)))
    def register(self, name: str, incarnation: str, tier: Tier) -> None:
        join(self.fleet, name, self.now_s, incarnation, tier)

    @rule(
        name=st.sampled_from("abcd"),
        incarnation=st.sampled_from("12"),
        version=st.sampled_from([None, (1, 0), (1, 1)]),
        state=st.sampled_from(["ready", "ready", "starting"]),
        used=st.integers(0, 200),
        reclaims=st.integers(0, 3),
        late=st.booleans(),
    )
    def heartbeat(
        self, name: str, incarnation: str, version: object, state: str, used: int, reclaims: int, late: bool
    ) -> None:
        worker = self.fleet.workers.get(name)
        before = None if worker is None else (worker.health, worker.version, worker.seq)
        self.seq += 1
        seq = 0 if late else self.seq
        known = beat(
            self.fleet,
            name,
            self.now_s,
            seq,
            incarnation=incarnation,
            version=version,
            state=state,
            kv_used_tokens=used,
            reclaim_seq=reclaims,
        )
        assert known == (worker is not None and worker.incarnation == incarnation)
        if worker is not None and (not known or seq <= before[2]):  # type: ignore[index]
            assert before == (worker.health, worker.version, worker.seq)  # refused: nothing changed

    @rule(step=st.sampled_from([0.5, 1.5, 9.0]))
    def time(self, step: float) -> None:
        self.now_s += step
        self.fleet.tick(self.now_s)
        for worker in self.fleet:
            silence_s = self.now_s - worker.heard_at_s
            assert not (worker.may_take_turns and silence_s >= PARAMS.suspect_s)
            assert silence_s < PARAMS.dead_s or worker.health is Health.DEAD

    @rule(name=st.sampled_from("abcd"), duty=st.sampled_from(list(Duty)))
    def duty(self, name: str, duty: Duty) -> None:
        if name in self.fleet.workers:
            self.fleet.set_duty(self.fleet.workers[name], duty)

    @rule(name=st.sampled_from("abcd"), forget=st.booleans())
    def lose(self, name: str, forget: bool) -> None:
        self.fleet.lost(name, None, "reset")
        if forget:
            self.fleet.forget(name)

    @rule()
    def step(self) -> None:
        self.fleet.thaw()

    @rule(tier=st.sampled_from(list(Tier)), cap=st.integers(1, 70))
    def caps(self, tier: Tier, cap: int) -> None:
        self.fleet.set_cap(tier, cap)

    @invariant()
    def holds(self) -> None:
        self.fleet.table.check(self.fleet)
        for worker in self.fleet:
            if worker.may_take_turns:
                assert worker.health is Health.READY
                assert worker.version is not None
                assert worker.lending is not LendingState.PRESSURE
            assert 1 <= worker.slots <= worker.cap


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
