"""Routing policies: each does what its name says; ``paper`` is the paper's order on every input."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.policy.packed import Eligible
from rose.policy.routing import (
    POLICY_NAMES,
    Candidate,
    CostParams,
    CostPolicy,
    PaperPolicy,
    StickyLeastLoadedPolicy,
    make_policy,
)
from rose.policy.speed import Speed
from rose.policy.worker import Health, Tier, Worker
from tests.policy import reference


def worker(name: str, *, tier: Tier = Tier.DEDICATED, inflight: int = 0, **fields: object) -> Worker:
    made = Worker(
        worker_id=name,
        incarnation="1",
        tier=tier,
        model="m",
        max_model_len=100,
        cap=16,
        registered_at_s=0.0,
        heard_at_s=0.0,
        inflight=inflight,
    )
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def turn(**fields: object) -> Candidate:
    return Candidate(**{"num_prompt_tokens": 1000, "expected_tokens": 100, **fields})  # type: ignore[arg-type]


fleets = st.lists(
    st.builds(
        lambda tier, inflight, gated, slack_s: {
            "tier": tier,
            "inflight": inflight,
            "gated": gated,
            "slack_s": slack_s,
        },
        tier=st.sampled_from(list(Tier)),
        inflight=st.integers(0, 4),
        gated=st.booleans(),
        slack_s=st.sampled_from([None, -0.1, 0.2]),
    ),
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@given(fleet=fleets, affine=st.one_of(st.none(), st.integers(0, 6)), seed=st.integers(0, 3))
def test_paper_gives_the_papers_order_on_every_input(
    fleet: list[dict[str, object]], affine: int | None, seed: int
) -> None:
    workers = [worker(f"w{index}", **fields) for index, fields in enumerate(fleet)]  # type: ignore[arg-type]
    full = worker("full", inflight=16)
    chosen = None if affine is None else workers[affine] if affine < len(workers) else full
    candidate = turn(affine=chosen)
    found = PaperPolicy(rng=random.Random(seed)).choose(candidate, Eligible.of(workers))
    allowed = reference.paper(candidate, workers)
    assert (found is None and not allowed) or (found is not None and found.worker_id in allowed)


def test_sticky_breaks_affinity_only_beyond_the_gap() -> None:
    policy = StickyLeastLoadedPolicy(rng=random.Random(0))
    home, other = worker("home", inflight=2), worker("other", inflight=0)
    assert policy.choose(turn(affine=home), Eligible.of([home, other])) is home
    home.inflight = 3
    assert policy.choose(turn(affine=home), Eligible.of([home, other])) is other


def test_cost_keeps_a_long_prefix_and_leaves_a_short_one() -> None:
    policy = CostPolicy(rng=random.Random(0))
    home = worker("home", inflight=3)
    other = worker("other", inflight=2)
    long = turn(num_prompt_tokens=8000, affine=home, resident_tokens=8000)
    short = turn(num_prompt_tokens=20, affine=home, resident_tokens=20)
    assert policy.choose(long, Eligible.of([home, other])) is home
    assert policy.choose(short, Eligible.of([home, other])) is other


def test_cost_moves_a_long_context_only_for_a_trajectory_that_has_long_to_go() -> None:
    policy = CostPolicy(rng=random.Random(0))
    slow = worker("slow", tier=Tier.HARVESTED)
    fast = worker("fast")
    slow.speed.token_s, fast.speed.token_s = 0.026, 0.01
    # To read it again costs 0.8 s, with hysteresis 1.6 s; a turn of 60 tokens is 1 s quicker at the other.
    context = {"num_prompt_tokens": 8000, "resident_tokens": 8000, "expected_tokens": 60, "affine": slow}
    for remaining, home in ((None, slow), (60.0, slow), (600.0, fast)):
        candidate = turn(**context, remaining_tokens=remaining)
        assert policy.choose(candidate, Eligible.of([slow, fast])) is home


@pytest.mark.parametrize(
    ("tier", "drains", "tier_s", "goes"),
    [
        (Tier.DEDICATED, True, 0.021, True),
        (Tier.DEDICATED, False, 0.021, False),
        (Tier.HARVESTED, True, 0.021, False),
        (Tier.DEDICATED, True, 0.019, False),  # dedicated ones at large are not twice as fast
    ],
)
def test_cost_shares_a_move_to_a_faster_dedicated_worker_over_more_turns_while_the_job_drains(
    tier: Tier, drains: bool, tier_s: float, goes: bool
) -> None:
    params = CostParams(horizon_turns=2.0, home_horizon_turns=16.0, home_speedup=2.0, hysteresis=0.0)
    policy = CostPolicy(rng=random.Random(0), params=params)
    # To read its context again takes 0.8 s; a turn of 60 tokens is 0.3 s quicker there, by what was learned of these two.
    here, there = worker("here", tier=Tier.HARVESTED), worker("there", tier=tier)
    here.speed.token_s, there.speed.token_s = 0.015, 0.010
    both = Eligible.of([here, there])
    both.table.set_tier("harvested", Speed(token_s=tier_s))
    both.table.set_tier("dedicated", Speed(token_s=0.010))
    candidate = turn(
        num_prompt_tokens=8000,
        resident_tokens=8000,
        expected_tokens=60,
        affine=here,
        remaining_tokens=960.0,
        drains=drains,
    )
    assert (policy.choose(candidate, both) is there) is goes


@pytest.mark.parametrize(("elsewhere", "home"), [(15, "fast"), (16, "slow")])
def test_cost_looks_further_ahead_while_dedicated_slots_are_left_for_every_turn(
    elsewhere: int, home: str
) -> None:
    policy = CostPolicy(
        rng=random.Random(0), params=CostParams(horizon_turns=1.0, roomy_horizon_turns=8.0, social=0.0)
    )
    # The fast one has 16 free slots; a turn of 60 tokens is 1 s quicker there, to read its context again takes 0.8 s.
    slow = worker("slow", tier=Tier.HARVESTED, health=Health.READY)
    other = worker("other", tier=Tier.HARVESTED, health=Health.READY, inflight=elsewhere)
    fast = worker("fast", health=Health.READY)
    slow.speed.token_s, other.speed.token_s, fast.speed.token_s = 0.026, 9.0, 0.01
    candidate = turn(
        num_prompt_tokens=8000, resident_tokens=8000, expected_tokens=60, affine=slow, remaining_tokens=600.0
    )
    chosen = policy.choose(candidate, Eligible.of([slow, other, fast]))
    assert chosen is not None
    assert chosen.worker_id == home


@pytest.mark.parametrize(("elsewhere", "tier"), [(15, Tier.DEDICATED), (16, Tier.HARVESTED)])
def test_cost_keeps_to_dedicated_workers_where_they_have_slots_for_every_turn(
    elsewhere: int, tier: Tier
) -> None:
    policy = CostPolicy(rng=random.Random(0), params=CostParams(own_while_roomy=True))
    idle = worker("idle", tier=Tier.HARVESTED, health=Health.READY)
    busy = worker("busy", tier=Tier.HARVESTED, health=Health.READY, inflight=elsewhere)
    own = worker("own", health=Health.READY)
    own.speed.token_s = 1.0  # whatever it costs
    chosen = policy.choose(turn(), Eligible.of([idle, busy, own]))
    assert chosen is not None
    assert chosen.tier is tier


def test_cost_avoids_a_worker_without_slack() -> None:
    policy = CostPolicy(rng=random.Random(0))
    gated = worker("gated", tier=Tier.HARVESTED, gated=True)
    free = worker("free", tier=Tier.HARVESTED, inflight=0)
    assert policy.choose(turn(expected_tokens=5, num_prompt_tokens=50), Eligible.of([gated, free])) is free


def test_cost_follows_the_group_to_the_worker_that_holds_its_prompt() -> None:
    policy = CostPolicy(rng=random.Random(0))
    workers = [worker("a"), worker("b")]
    assert policy.choose(turn(group_worker=workers[1], group_tokens=1000), Eligible.of(workers)) is workers[1]


@pytest.mark.parametrize("name", ["cost", "paper", "sticky_least_loaded", "random"])
def test_ties_are_drawn_not_taken_in_order(name: str) -> None:
    policy = make_policy(name, random.Random(1))
    workers = [worker(f"w{index}") for index in range(4)]
    counts = Counter(policy.choose(turn(), Eligible.of(workers)).worker_id for _ in range(400))  # type: ignore[union-attr]
    assert min(counts.values()) > 60
    assert len(counts) == 4


def test_a_seed_gives_one_run() -> None:
    workers = [worker(f"w{index}") for index in range(4)]

    def run() -> list[str]:
        policy = make_policy("cost", random.Random(7))
        return [policy.choose(turn(), Eligible.of(workers)).worker_id for _ in range(50)]  # type: ignore[union-attr]

    assert run() == run()


def test_round_robin_takes_turns() -> None:
    policy = make_policy("round_robin", random.Random(0))
    workers = [worker("b"), worker("a")]
    assert [policy.choose(turn(), Eligible.of(workers)).worker_id for _ in range(4)] == ["a", "b", "a", "b"]  # type: ignore[union-attr]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="sticky_least_loaded"):
        make_policy("hash", random.Random(0))


@pytest.mark.parametrize(
    "seeds", [range(500), pytest.param(range(500, 2000), marks=pytest.mark.conformance)], ids=len
)
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_decisions_equal_a_brute_force_choice_on_random_fleets(policy: str, seeds: range) -> None:
    found = [reference.disagreement(policy, seed) for seed in seeds]
    assert [text for text in found if text is not None] == []
