"""How far behind the weights a sample is, of a trainer that may have begun anew."""

from __future__ import annotations

import random

from rose.policy.staleness import ends, is_spent, worst_lag


def test_the_ends_of_attempts_say_all_that_their_versions_do() -> None:
    rng = random.Random(1)
    for _ in range(300):
        sampled = [(rng.randint(1, 3), rng.randint(0, 20)) for _ in range(rng.randint(0, 6))]
        trainer, alpha = (rng.randint(1, 3), rng.randint(0, 20)), rng.randint(0, 5)
        kept = ends(sampled)
        assert set(kept) <= set(sampled)
        assert ends(kept) == kept
        assert len(kept) <= 2 * len({attempt for attempt, _ in sampled})
        assert worst_lag(trainer, kept) == worst_lag(trainer, sampled)
        spent = [any(is_spent(trainer, version, alpha) for version in each) for each in (kept, sampled)]
        assert spent[0] == spent[1]


def test_the_first_end_is_the_oldest_of_the_first_attempt() -> None:
    assert ends([(2, 3), (1, 12), (1, 10), (2, 3), (1, 11)]) == ((1, 10), (1, 12), (2, 3))
