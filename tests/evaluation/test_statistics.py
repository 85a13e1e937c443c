"""One definition of each figure, held against its textbook form."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.evaluation.statistics import mean_interval, median_ratio, percentile, weighted_percentile

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


def test_percentile_is_the_smallest_value_not_exceeded_by_its_share() -> None:
    values = np.arange(1.0, 101.0)

    assert percentile(values, 0.50) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile(values, 1.0) == 100.0
    assert percentile([3.0], 0.99) == 3.0


def test_no_values_have_no_percentile() -> None:
    assert math.isnan(percentile([], 0.5))


@given(VALUES, st.integers(1, 100))
def test_percentile_holds_its_share_and_no_smaller_value_does(values: list[float], percent: int) -> None:
    found = percentile(values, percent / 100)

    assert found in values
    assert 100 * sum(value <= found for value in values) >= percent * len(values)
    assert 100 * sum(value < found for value in values) < percent * len(values)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 5)), min_size=1, max_size=50))
def test_a_weight_counts_a_value_so_often(pairs: list[tuple[float, int]]) -> None:
    pairs.sort()
    repeated = [value for value, times in pairs for _ in range(times)]

    values, weights = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))

    assert weighted_percentile(values, weights, 0.9) == percentile(repeated, 0.9)


def test_weights_of_nothing_have_no_percentile() -> None:
    assert math.isnan(weighted_percentile(np.array([1.0, 2.0]), np.zeros(2), 0.5))


def test_mean_interval_is_students() -> None:
    values = [1.0, 2.0, 4.0]

    mean, half = mean_interval(values)

    assert mean == statistics.fmean(values)
    assert half == pytest.approx(4.303 * statistics.stdev(values) / math.sqrt(3))


def test_one_value_says_nothing_of_its_noise() -> None:
    assert mean_interval([7.0]) == (7.0, math.inf)


def test_the_interval_of_many_values_is_never_narrower_than_students() -> None:
    values = [float(value) for value in range(30)]

    _, half = mean_interval(values)

    assert half >= 2.045 * statistics.stdev(values) / math.sqrt(30)


def test_median_ratio_of_a_constant_factor_has_no_noise() -> None:
    below = np.linspace(1.0, 2.0, 25)

    assert median_ratio(3.0 * below, below) == pytest.approx((3.0, 3.0, 3.0))
