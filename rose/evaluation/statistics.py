"""The statistics that every figure of this project is made with: one definition each.

A percentile is the smallest value that at least that share of the values does not exceed.  Nothing is interpolated: P99 of few values is
their largest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""Two-sided 95 % of Student's t, by degrees of freedom from 1."""


def percentile(values: Iterable[float] | Floats, fraction: float) -> float:
    """Inverse of the empirical distribution; NaN for no values."""
    ordered = np.sort(values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=np.float64))
    return weighted_percentile(ordered, np.ones(len(ordered)), fraction)


def weighted_percentile(ordered: Floats, weights: Floats, fraction: float) -> float:
    """The same of values in rising order, each with a weight; NaN where all of them together weigh nothing."""
    cumulative = np.cumsum(weights)
    total = float(cumulative[-1]) if len(cumulative) else 0.0
    if total <= 0:
        return math.nan
    # The small slack keeps 0.99 * 100 = 99.00000000000001 from skipping to the next value.
    position = np.searchsorted(cumulative, fraction * total * (1 - 1e-12), side="left")
    return float(ordered[min(int(position), len(ordered) - 1)])


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval by Student's t: infinite for one value, for more than 20 that of 20 (wider)."""
    if len(values) < 2:
        return values[0], math.inf
    t95 = _T95[min(len(values) - 1, len(_T95)) - 1]
    return statistics.fmean(values), t95 * statistics.stdev(values) / math.sqrt(len(values))


def median_ratio(above: Floats, below: Floats) -> tuple[float, float, float]:
    """Median of the ratios of pairs, with its 95 % interval: a bootstrap over pairs, from a fixed seed."""
    rng = np.random.default_rng(0)
    ratios = above / below
    draws = np.median(ratios[rng.integers(0, len(ratios), (2000, len(ratios)))], axis=1)
    return float(np.median(ratios)), float(np.quantile(draws, 0.025)), float(np.quantile(draws, 0.975))
