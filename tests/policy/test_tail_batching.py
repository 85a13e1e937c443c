"""Short and long rounds: what each begins, and that every group has its turn."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.policy.tail_batching import RoundPlan, TailBatching


def test_short_rounds_begin_more_until_what_they_put_by_fills_a_long_one() -> None:
    batching = TailBatching(num_groups=4, extra_groups=2, extra_members=1)
    short = RoundPlan(again=(), num_new=6, extra_members=1)
    assert batching.begin() == short
    batching.end([3, 5])
    assert batching.begin() == short
    batching.end([0, 7])
    assert batching.begin() == RoundPlan(again=(3, 5, 0, 7), num_new=0, extra_members=0)
    assert batching.begin() == short


def test_every_group_is_trained_on_once() -> None:
    """A third of each short round is put by, whichever; after as many rounds as that takes all have had their turn."""
    batching = TailBatching(num_groups=4, extra_groups=2)
    begun, trained = 0, []
    for step in range(9):
        this = batching.begin()
        groups = [*this.again, *range(begun, begun + this.num_new)]
        begun += this.num_new
        slow = [] if this.is_long else sorted(groups, key=lambda group: (group * 7919) % 13)[-2:]
        trained += [group for group in groups if group not in slow]
        assert len(groups) - len(slow) == 4, step
        batching.end(slow)

    assert sorted(trained) == list(range(36))


def test_more_than_a_batch_put_by_waits_for_the_next_long_round() -> None:
    batching = TailBatching(num_groups=2, extra_groups=3)
    batching.end([9, 8, 7])
    assert batching.begin().again == (9, 8)
    assert list(batching.put_by) == [7]


@settings(max_examples=200, deadline=None)
@given(
    num_groups=st.integers(1, 6),
    extra_groups=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    patience=st.integers(1, 5),
)
def test_no_group_is_lost_none_is_trained_on_twice_and_none_waits_for_ever(
    num_groups: int, extra_groups: int, seed: int, patience: int
) -> None:
    """Whichever are slow, and however many of a short round are complete before the rest is given up."""
    draw = random.Random(seed)
    batching = TailBatching(num_groups=num_groups, extra_groups=extra_groups, patience=patience)
    begun, trained, complete = 0, list[int](), list[int]()
    put_by_in: dict[int, int] = {}
    longest = patience + 2 + math.ceil((num_groups + extra_groups) / num_groups)
    for step in range(30):
        this = batching.begin(len(complete))
        assert all(step - put_by_in[group] <= longest for group in this.again)
        started = [*this.again, *range(begun, begun + this.num_new)]
        begun += this.num_new
        draw.shuffle(started)
        batch = [*complete, *started][:num_groups]
        assert len(batch) == num_groups
        left = [*complete, *started][num_groups:]
        assert not (this.is_long and left), "a long round begins what it takes"
        complete = left[: draw.randint(0, len(left))]
        slow = left[len(complete) :]
        trained += batch
        put_by_in |= dict.fromkeys(slow, step)
        batching.end(slow)
        assert all(step - put_by_in[group] <= longest for group in batching.put_by)
    assert sorted([*trained, *complete, *batching.put_by]) == list(range(begun))


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"num_groups": 0, "extra_groups": 1}, "num_groups"),
        ({"num_groups": 1, "extra_groups": 0}, "extra_groups"),
        ({"num_groups": 1, "extra_groups": 1, "extra_members": -1}, "extra_members"),
        ({"num_groups": 1, "extra_groups": 1, "patience": -1}, "patience"),
    ],
)
def test_what_is_out_of_range_is_refused(params: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TailBatching(**params)
    assert caught.value.field == field
