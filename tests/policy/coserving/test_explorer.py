"""The co-serving protocol in every order of events, and that what is broken on purpose is found."""

from __future__ import annotations

import pytest

from tests.policy.coserving.bounds import FILES, Bounds, Broken, Mutant
from tests.policy.coserving.explorer import explore


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(kills=1),
        Bounds(production_kills=1),
        Bounds(silences=1),
        Bounds(unlinks=1),
        Bounds(lost_wakes=1),
        Bounds(ranks=2),
        Bounds(delayed=True),
        Bounds(slow_reads=True),
        Bounds(waits=1),
        Bounds(production_kills=1, waits=1),
        Bounds(production_kills=1, slow_reads=True),
        pytest.param(Bounds(waits=2), marks=pytest.mark.conformance),
        pytest.param(Bounds(kills=1, silences=1), marks=pytest.mark.conformance),
        pytest.param(Bounds(kills=1, production_kills=1), marks=pytest.mark.conformance),
    ],
    ids=str,
)
def test_no_page_is_there_twice_and_production_gets_all_of_it_back(bounds: Bounds) -> None:
    assert explore(bounds).num_states > 100


@pytest.mark.parametrize(
    ("bounds", "mutant"),
    [
        (Bounds(), Mutant(believes_old_reports=True, maps_unannounced=True)),
        (Bounds(delayed=True), Mutant(believes_old_reports=True)),
        (Bounds(kills=1), Mutant(maps_unannounced=True)),
        (Bounds(), Mutant(takes_what_is_held=True)),
        (Bounds(waits=1), Mutant(takes_what_is_stranded=True)),
        (Bounds(), Mutant(reads_first=True)),
        (Bounds(slow_reads=True), Mutant(grows_unasked=True)),
        (Bounds(kills=1), Mutant(keeps_a_dead_file=True)),
        (Bounds(production_kills=1), Mutant(starts_with_all=True)),
        (Bounds(production_kills=1, kills=1), Mutant(forgets_workers=True)),
    ],
    ids=str,
)
def test_what_puts_a_page_there_twice_is_found(bounds: Bounds, mutant: Mutant) -> None:
    with pytest.raises(Broken, match=r"are mapped on the device|that is not mapped"):
        explore(bounds, mutant)


@pytest.mark.parametrize(
    ("bounds", "mutant"),
    [
        (Bounds(lost_wakes=1), Mutant(no_heartbeat=True)),
        (Bounds(waits=1), Mutant(stays_stranded=True)),
        (Bounds(silences=1), Mutant(trusts_the_silent=True)),
    ],
    ids=str,
)
def test_what_strands_productions_memory_is_found(bounds: Bounds, mutant: Mutant) -> None:
    with pytest.raises(Broken, match="never comes home"):
        explore(bounds, mutant)


HARMLESS = {"node.state", "serving.lease", "serving.board"}
"""Who cannot read these takes it that nothing is lent, or that nothing is claimed: production waits for what is given back anyway."""


QUICK = ("serving.rank0", "rollout.lease")
"""One that strands, one that puts a page there twice; the others in ``make conformance``."""


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=() if file in QUICK else pytest.mark.conformance)
        for file in FILES
        if file not in HARMLESS
    ],
)
def test_whoever_follows_a_name_that_is_gone_is_found_by_every_file_that_counts(file: str) -> None:
    with pytest.raises(Broken, match=r"never comes home|are mapped on the device|has not mapped"):
        explore(Bounds(unlinks=1, files=(file,)), Mutant(follows_the_name=True))


def test_a_peer_that_is_waited_for_in_silence_is_found() -> None:
    with pytest.raises(Broken, match="are not said to be stranded"):
        explore(Bounds(waits=1), Mutant(waits_in_silence=True))
