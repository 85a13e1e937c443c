"""The cheapest cases of the fault matrix (benchmarks/faults.py), on real engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.faults import Case, Run
from tests.pair.pair import Pair

pytestmark = [pytest.mark.engine, pytest.mark.conformance, pytest.mark.timeout(500)]
CASES = [("unlink", "rollout.lease"), ("truncate", "rollout.chunks"), ("unlink", "serving.rank0")]
CASES += [("chmod", "node.state"), ("kill", "sentinel"), ("stop", "agent"), ("rmdir", ""), ("full", "")]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with Pair(tmp_path, seed=0) as pair:
        yield pair


async def test_production_loses_nothing_and_gets_all_back_whatever_is_done(pair: Pair) -> None:
    run = Run(pair, seed=0)
    for what, whom in CASES:
        found = await run.case(Case(what=what, whom=whom, number=0))
        # How late is a measurement: the machine may be shared.
        assert [one for one in found.failures if one != "late"] == [], found
