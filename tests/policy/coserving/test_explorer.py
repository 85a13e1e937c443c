"""The co-serving protocol in every order of events, and that what is broken on purpose is found."""

from __future__ import annotations

import pytest

from tests.policy.coserving.explorer import Bounds, Broken, Mutant, explore


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(chunks=2, ranks=1, kills=1),
        Bounds(chunks=2, ranks=2, kills=0),
        Bounds(chunks=2, ranks=1, kills=0, delayed=True),
        Bounds(chunks=2, ranks=1, kills=0, unlinks=1, lost_wakes=1),
        Bounds(chunks=2, ranks=1, kills=0, waits=2),
    ],
    ids=str,
)
def test_no_page_is_there_twice_and_production_gets_all_of_it_back(bounds: Bounds) -> None:
    assert explore(bounds).num_states > 100


@pytest.mark.parametrize(
    ("bounds", "mutant"),
    [
        (Bounds(kills=0), Mutant(believes_old_reports=True, maps_unannounced=True)),
        (Bounds(kills=0, delayed=True), Mutant(believes_old_reports=True)),
        (Bounds(kills=1), Mutant(maps_unannounced=True)),
        (Bounds(kills=0), Mutant(takes_what_is_held=True)),
        (Bounds(kills=0, waits=1), Mutant(takes_what_is_stranded=True)),
        (Bounds(kills=0), Mutant(reads_first=True)),
        (Bounds(kills=1), Mutant(keeps_a_dead_file=True)),
    ],
    ids=str,
)
def test_what_puts_a_page_there_twice_is_found(bounds: Bounds, mutant: Mutant) -> None:
    with pytest.raises(Broken, match=r"are mapped on the device|that is not mapped"):
        explore(bounds, mutant)


@pytest.mark.parametrize(
    ("bounds", "mutant"),
    [
        (Bounds(kills=0, unlinks=1), Mutant(follows_the_name=True)),
        (Bounds(kills=0, lost_wakes=1), Mutant(no_heartbeat=True)),
        (Bounds(kills=0, waits=1), Mutant(stays_stranded=True)),
    ],
    ids=str,
)
def test_what_strands_productions_memory_is_found(bounds: Bounds, mutant: Mutant) -> None:
    with pytest.raises(Broken, match="never comes home"):
        explore(bounds, mutant)


def test_a_peer_that_is_waited_for_in_silence_is_found() -> None:
    with pytest.raises(Broken, match="are not said to be stranded"):
        explore(Bounds(kills=0, waits=1), Mutant(waits_in_silence=True))
