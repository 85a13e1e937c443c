"""Runs in several processes: every result comes once, and nothing begins once time is up."""

from __future__ import annotations

import math
import operator
import time

import pytest

from benchmarks.lib.pool import each_result, processes

ASKED = {number: (operator.mul, number, number) for number in range(20)}


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_run_has_its_result(jobs: int) -> None:
    pool = processes(jobs)
    found = dict(each_result(pool, ASKED, math.inf))
    if pool is not None:
        pool.shutdown()

    assert found == {number: number * number for number in range(20)}


@pytest.mark.parametrize("jobs", [1, 2])
def test_time_that_is_up_ends_it_and_loses_no_result(jobs: int) -> None:
    pool = processes(jobs)
    asked = dict.fromkeys(range(40), (time.sleep, 0.05)) if jobs > 1 else ASKED
    found: list[int] = []

    def go() -> None:
        for key, _ in each_result(pool, asked, time.monotonic()):
            found.append(key)

    with pytest.raises(TimeoutError):
        go()
    if pool is not None:
        pool.shutdown()
    assert len(found) < len(asked)
    assert len(found) == len(set(found))


def test_a_run_that_fails_is_not_passed_over() -> None:
    with pytest.raises(ZeroDivisionError):
        dict(each_result(None, {0: (operator.truediv, 1, 0)}, math.inf))
