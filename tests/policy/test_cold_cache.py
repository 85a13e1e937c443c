"""ColdCache, and LendingPolicy with it: cold prefixes are lent only while the hit rate stays within one point."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from rose.errors import ConfigError, PolicyError
from rose.policy.baselines import PaperLending
from rose.policy.cold_cache import ColdCache, ColdCacheParams
from rose.policy.lending import Lending
from rose.policy.lending_events import Mode, ModeSet
from rose.policy.lending_policy import LendingPolicy
from tests.policy.lending_world import PARAMS, World


class Engine:
    """Production with 100 pages, of which prompts query 20,000 tokens a second."""

    def __init__(self) -> None:
        self.policy = ColdCache(100, ColdCacheParams(window_s=10.0, min_tokens=10_000, grow_fraction=0.1))
        self.at_s, self.queried, self.lost = 0.0, 0, 0
        self.lent = self.cold = 0

    def second(self, loss: float = 0.0, queried: int = 20_000) -> int:
        self.at_s += 1.0
        self.queried += queried
        self.lost += int(loss * queried)
        limit = self.policy.see(
            self.at_s,
            queried_tokens=self.queried,
            lost_tokens=self.lost,
            lent_pages=self.lent,
            cold_pages=self.cold,
        )
        self.policy.check()
        return limit


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_without_a_loss_everything_may_be_lent(engine: Engine) -> None:
    engine.lent, engine.cold = 80, 60
    assert {engine.second() for _ in range(30)} == {100}


def test_a_loss_of_more_than_a_point_takes_half_of_the_cold_pages_back(engine: Engine) -> None:
    engine.lent, engine.cold = 80, 60
    engine.second()
    assert engine.second(loss=0.02) == 20 + 30
    assert engine.policy.loss_fraction == pytest.approx(0.02)


def test_a_loss_within_a_point_changes_nothing(engine: Engine) -> None:
    engine.lent, engine.cold = 80, 60
    assert {engine.second(loss=0.009) for _ in range(30)} == {100}


def test_a_loss_that_goes_on_ends_with_nothing_cold_and_leaves_the_rest(engine: Engine) -> None:
    engine.lent, engine.cold = 80, 60
    engine.second()
    for _ in range(7):
        limit = engine.second(loss=0.5)
        engine.cold -= max(0, engine.lent - limit)
        engine.lent = min(engine.lent, limit)
    assert (engine.lent, engine.cold) == (20, 0)


def test_a_verdict_needs_tokens(engine: Engine) -> None:
    engine.lent = engine.cold = 80
    assert {engine.second(loss=1.0, queried=300) for _ in range(30)} == {100}


def test_while_nothing_is_lent_a_loss_only_keeps_the_limit_from_growing(engine: Engine) -> None:
    """What was dropped before is still missed: there is nothing left to take back for it."""
    engine.lent = engine.cold = 80
    engine.second()
    assert engine.second(loss=0.02) == 40
    engine.lent = engine.cold = 0
    assert {engine.second(loss=0.5) for _ in range(30)} == {40}


def test_the_limit_grows_a_step_per_window_without_loss_and_not_on_half_a_loss(engine: Engine) -> None:
    engine.lent = engine.cold = 80
    engine.second()
    assert engine.second(loss=0.02) == 40
    assert [engine.second(loss=0.008) for _ in range(25)] == [40] * 25
    limits = [engine.second() for _ in range(90)]
    assert limits[-1] == 100
    steps = [at for at, (before, after) in enumerate(itertools.pairwise(limits)) if after > before]
    assert min(b - a for a, b in itertools.pairwise(steps)) >= 10


def test_the_next_verdict_rests_on_what_came_after_the_last(engine: Engine) -> None:
    """The loss that was answered must not be answered again."""
    engine.lent = engine.cold = 80
    engine.second()
    assert engine.second(loss=0.05) == 40
    engine.lent = engine.cold = 40
    assert [engine.second() for _ in range(5)] == [40] * 5


@pytest.mark.parametrize(
    "change",
    [
        {"at_s": 0.5},
        {"queried_tokens": 1},
        {"lost_tokens": -1},
        {"cold_pages": 81},
    ],
)
def test_nonsense_raises_and_leaves_the_books_alone(engine: Engine, change: dict[str, float]) -> None:
    engine.lent = engine.cold = 80
    engine.second()
    engine.second(loss=0.02)
    before = dict(vars(engine.policy))
    seen = {"queried_tokens": 40_000, "lost_tokens": 400, "lent_pages": 80, "cold_pages": 80}
    with pytest.raises(PolicyError):
        engine.policy.see(change.pop("at_s", 3.0), **{**seen, **change})  # type: ignore[arg-type]
    assert vars(engine.policy) == before


@pytest.mark.parametrize(
    "bad", [{"max_loss_fraction": 0.0}, {"grow_fraction": 1.5}, {"window_s": 0.0}, {"min_tokens": 0}]
)
def test_bad_parameters_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ColdCacheParams(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(30))
def test_on_any_traffic_cold_memory_is_lent_only_within_a_point(seed: int) -> None:
    """Against a plain sum over the last ten seconds that begins anew with every change of the limit."""
    rng, engine = random.Random(seed), Engine()
    seconds: list[tuple[int, int]] = []
    for _ in range(400):
        engine.lent = min(rng.randint(0, 100), engine.policy.limit_pages)
        engine.cold = rng.randint(0, engine.lent)
        queried, lost, before = engine.queried, engine.lost, engine.policy.limit_pages
        after = engine.second(
            loss=rng.choice([0.0, 0.0, 0.004, 0.02, 0.3]), queried=rng.choice([0, 500, 20_000])
        )
        if engine.at_s == 1.0:
            continue  # the first look only begins to count
        seconds = [*seconds, (engine.queried - queried, engine.lost - lost)][-10:]
        queried, lost = (sum(column) for column in zip(*seconds, strict=True))
        if engine.lent and queried >= 10_000 and lost > 0.01 * queried:
            assert after == min(before, engine.lent - engine.cold + engine.cold // 2)
            seconds = []
        else:
            assert after >= before
        if after > before:
            assert lost <= 0.005 * queried
            seconds = []


# --- the loan ---


class Serving(World):
    """An idle device of 100 pages, all but the headroom lent; its prompts query 20,000 tokens at each report."""

    def __init__(self, policy: Lending) -> None:
        super().__init__(policy)
        policy.handle(ModeSet(at_s=0.0, mode=Mode.ON))
        self.queried = self.lost = 0
        for _ in range(6):
            self.prompt()

    def prompt(self, loss: float = 0.0, cold_pages: int = 0) -> int:
        """One second later; the loan."""
        self.queried += 20_000
        self.lost += int(loss * 20_000)
        self.step(self.at_s + 1.0, queried_tokens=self.queried, lost_tokens=self.lost, cold_pages=cold_pages)
        return self.policy.lend_pages


@pytest.fixture
def serving() -> Serving:
    serving = Serving(LendingPolicy(PARAMS))
    assert serving.policy.lend_pages == 80
    return serving


def test_lost_hits_shrink_the_loan_and_say_why(serving: Serving) -> None:
    assert serving.prompt(loss=0.1, cold_pages=60) == 20 + 30
    assert serving.policy.reason == "serving's prompts miss prefixes"
    assert serving.policy.num_cuts == 1


def test_hits_that_are_not_lost_leave_the_loan(serving: Serving) -> None:
    assert {serving.prompt(loss=0.005, cold_pages=60) for _ in range(20)} == {80}


def test_what_was_lost_is_not_lent_again_before_a_window_without_loss(serving: Serving) -> None:
    serving.prompt(loss=0.1, cold_pages=80)
    loans = [serving.prompt() for _ in range(61)]
    assert loans == [40] * 59 + [45] * 2


def test_the_operators_bound_is_the_one_that_counts() -> None:
    strict, lax = (
        Serving(LendingPolicy(dataclasses.replace(PARAMS, max_hit_rate_loss=bound))) for bound in (0.001, 0.2)
    )
    assert (strict.prompt(loss=0.05, cold_pages=60), lax.prompt(loss=0.1, cold_pages=60)) == (50, 80)


def test_a_restarted_engine_counts_from_nothing(serving: Serving) -> None:
    serving.prompt(loss=0.1, cold_pages=80)
    serving.queried = serving.lost = 0
    assert max(serving.prompt() for _ in range(20)) == 80


def test_an_engine_that_does_not_count_is_lent_from_as_before(serving: Serving) -> None:
    serving.prompt(loss=0.1, cold_pages=80)
    serving.run(serving.at_s + 20.0)
    assert serving.policy.lend_pages == 80


def test_the_bound_outlives_a_change_of_policy(serving: Serving) -> None:
    assert isinstance(serving.policy, LendingPolicy)
    serving.prompt(loss=0.1, cold_pages=80)
    again = LendingPolicy(PARAMS)
    again.take_over(serving.policy)
    assert again.cache is serving.policy.cache
    paper = PaperLending(PARAMS)
    paper.take_over(serving.policy)
    assert paper.cap_pages == 80
