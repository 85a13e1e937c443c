"""What is too old for a trainer: told from a trajectory's turns, the same now and when the journal is read again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rose.scheduler.journal import Journal
from rose.scheduler.records import FinishRecord, TurnRecord
from rose.scheduler.store import TrajectoryStore, sp
from tests.scheduler.test_restart import turn_of


def store_of(folder: Path, **params: object) -> TrajectoryStore:
    return TrajectoryStore(
        Journal(folder),
        sp.SampleParams(**params),  # type: ignore[arg-type]
        max_trajectories=100,
        retained_finals=100,
        compact_bytes=2**30,
    )


def turn_over(name: str, *versions: str) -> TurnRecord:
    """A first turn with a token of each of ``versions``."""
    count = len(versions)
    return msgspec.structs.replace(
        turn_of(name, versions[0]),
        token_ids=b"\2\0\0\0" * count,
        logprobs=b"\0" * 8 * count,
        versions=[(version, at, 1) for at, version in enumerate(versions)],
    )


def begun(store: TrajectoryStore) -> str:
    return store.create(job="j", group_id=None, group_size=1, task=None, sampling={})


def played(store: TrajectoryStore, *versions: str) -> str:
    name = begun(store)
    store.add_turn(turn_over(name, *versions))
    store.finish(FinishRecord(id=name, reward=1.0))
    return name


TOO_OLD = [
    pytest.param(("1.10", "2.3"), id="2.3 is seven versions behind 2.10; 1.10 is none"),
    pytest.param(("1.3", "2.10"), id="so is 1.3, of an abandoned attempt"),
    pytest.param(("1.10", "1.17"), id="1.17 is as far from 2.10, in the other direction"),
]


@pytest.mark.parametrize("versions", TOO_OLD)
@pytest.mark.parametrize("is_restarted", [False, True], ids=["now", "from the journal"])
def test_tokens_of_each_attempt_count(tmp_path: Path, versions: tuple[str, ...], is_restarted: bool) -> None:
    store = store_of(tmp_path, alpha=4, on_stale="mask")
    name = played(store, *versions)
    if is_restarted:
        store.journal.close()
        store = store_of(tmp_path, alpha=4, on_stale="mask")
    leased, _ = store.lease(job="j", num_groups=1, version=(2, 10), ttl_s=60)
    assert leased is not None
    assert leased.stale_ids == (name,)
    store.journal.close()


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        (("1.10", "1.17"), [1]),  # its oldest is not what it is dropped for
        (("1.3", "1.12"), []),  # for being behind; 1.12 alone would be near enough
    ],
)
def test_who_began_anew_hears_of_what_was_dropped_for_being_ahead(
    tmp_path: Path, versions: tuple[str, ...], told: list[int]
) -> None:
    store, heard = store_of(tmp_path, alpha=4, on_stale="cancel"), list[int]()
    store.on_ahead = heard.append
    name = played(store, *versions)
    _, actions = store.lease(job="j", num_groups=1, version=(2, 10), ttl_s=60)
    assert actions == [sp.Discard(trajectory_ids=(name,), reason="stale")]
    assert heard == told
    store.journal.close()


def test_tokens_near_enough_in_each_attempt_are_fresh(tmp_path: Path) -> None:
    store = store_of(tmp_path, alpha=4, on_stale="mask")
    played(store, "1.8", "1.12", "2.7", "2.10")
    leased, _ = store.lease(job="j", num_groups=1, version=(2, 10), ttl_s=60)
    assert leased is not None
    assert leased.stale_ids == ()
    store.journal.close()


@pytest.mark.parametrize("is_known_first", [False, True], ids=["by the version", "by the turn"])
def test_what_runs_is_given_up_for_its_oldest_token_of_any_attempt(
    tmp_path: Path, is_known_first: bool
) -> None:
    store = store_of(tmp_path, alpha=4, on_stale="cancel")
    name = begun(store)

    def publish() -> list[sp.Action]:
        return store.drop_spent(job="j", version=(2, 10), alpha=None, on_stale=None, live={})

    def play() -> list[sp.Action]:
        return store.add_turn(turn_over(name, "1.10", "2.3"))

    first, then = (publish, play) if is_known_first else (play, publish)
    assert first() == []
    assert then() == [sp.Discard(trajectory_ids=(name,), reason="stale")]
    store.journal.close()


@pytest.mark.parametrize("is_restarted", [False, True], ids=["now", "from the journal"])
def test_a_mark_is_of_the_lease_that_set_it(tmp_path: Path, is_restarted: bool) -> None:
    store = store_of(tmp_path, alpha=0, on_stale="mask")
    name = played(store, "1.0")
    leased, _ = store.lease(job="j", num_groups=1, version=(1, 2), ttl_s=60, name="strict")
    assert leased is not None
    assert store.get(name).stale
    store.give_back("strict")
    leased, _ = store.lease(job="j", num_groups=1, version=(1, 2), ttl_s=60, name="wide", alpha=2)
    assert leased is not None
    assert leased.stale_ids == ()
    if is_restarted:
        store.journal.close()
        store = store_of(tmp_path, alpha=0, on_stale="mask")
    assert not store.get(name).stale
    store.journal.close()
