"""Leases: the rule by itself, and the file that several processes share."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import CapacityError
from rose.lineage import WeightVersion
from rose.weights import file_store
from rose.weights.file_store import FileStore
from rose.weights.leases import MAX_LEASE_S, LeaseBook, LeaseLog
from tests.weights.test_stores import head

ONE, TWO = WeightVersion(1, 1), WeightVersion(1, 2)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.sampled_from("xyz"),
            st.sampled_from([None, ONE, TWO]),
            st.floats(0.1, 50.0),
            st.floats(0.0, 20.0),
        ),
        max_size=60,
    )
)
def test_the_book_is_a_table_of_the_last_word_of_every_holder(ops: list) -> None:
    book = LeaseBook()
    table: dict[tuple[str, str], tuple[WeightVersion, float]] = {}
    now_s = 100.0
    for run_id, holder, version, ttl_s, passed_s in ops:
        now_s += passed_s
        book.hold(run_id, holder, version, now_s + ttl_s, now_s)
        table.pop((run_id, holder), None)
        if version is not None:
            table[run_id, holder] = (version, now_s + ttl_s)
        for run in "ab":
            wanted = {v for (r, _), (v, until) in table.items() if r == run and until > now_s}
            assert book.held(run, now_s) == sorted(wanted)


def test_renewals_leave_nothing_behind_in_memory() -> None:
    book = LeaseBook()
    for step in range(20_000):
        book.hold("run", f"node-{step % 10}", ONE, 1e6 + step, float(step))
    assert len(book) == 10
    assert len(book._due) < 5_000


def test_a_full_book_refuses_a_new_holder_and_renews_an_old_one() -> None:
    book = LeaseBook(most=2)
    book.hold("run", "a", ONE, 10.0, 0.0)
    book.hold("run", "b", ONE, 20.0, 0.0)
    with pytest.raises(CapacityError, match="2 leases"):
        book.hold("run", "c", ONE, 10.0, 0.0)
    book.hold("run", "a", TWO, 15.0, 1.0)
    book.hold("run", "c", ONE, 30.0, 16.0)  # a's is over
    assert book.held("run", 16.0) == [ONE]


def test_a_clock_that_goes_back_does_not_hold_versions_for_ever() -> None:
    book = LeaseBook()
    book.hold("run", "a", ONE, 1e9 + 600, 1e9)
    assert book.held("run", 1e6) == []


def test_processes_with_one_folder_see_each_others_leases(tmp_path: Path) -> None:
    one, two = LeaseLog(tmp_path), LeaseLog(tmp_path)
    one.hold("a", ONE, 50.0, 0.0)
    two.hold("b", TWO, 50.0, 0.0)
    assert one.held(1.0) == two.held(1.0) == [ONE, TWO]
    two.hold("a", None, 50.0, 1.0)
    assert one.held(2.0) == LeaseLog(tmp_path).held(2.0) == [TWO]


def test_a_lease_is_one_line_however_many_there_are(tmp_path: Path) -> None:
    log = LeaseLog(tmp_path)
    path = tmp_path / "leases.log"
    grown = []
    for number in range(3000):
        before = path.stat().st_size if path.exists() else 0
        log.hold(f"node-{number:06d}", ONE, 5e3, 0.0)
        grown.append(path.stat().st_size - before)
    assert set(grown) == {grown[0]}


@pytest.mark.parametrize("other", ["follows", "is new"])
def test_the_file_is_written_anew_before_it_grows_without_end(tmp_path: Path, other: str) -> None:
    log, second = LeaseLog(tmp_path), LeaseLog(tmp_path)
    for step in range(5000):
        log.hold(f"node-{step % 7}", WeightVersion(1, step), 6e3 + step, float(step))
        if other == "follows" and step % 900 == 0:
            second.held(float(step))
    assert (tmp_path / "leases.log").stat().st_size < 100_000
    assert second.held(5000.0) == log.held(5000.0) == [WeightVersion(1, v) for v in range(4993, 5000)]


@pytest.mark.parametrize(
    "damage", [b'["half', b"nonsense\n", b'["c", "1.x", 9]\n', b"\xff\xfe\n", b"[]\n[\n"]
)
def test_a_damaged_line_costs_that_line(tmp_path: Path, damage: bytes) -> None:
    LeaseLog(tmp_path).hold("a", ONE, 50.0, 0.0)
    with (tmp_path / "leases.log").open("ab") as file:
        file.write(damage)
    log = LeaseLog(tmp_path)
    assert log.held(1.0) == [ONE]
    log.hold("b", TWO, 50.0, 1.0)
    assert LeaseLog(tmp_path).held(2.0) == log.held(2.0) == [ONE, TWO]


def test_a_full_disk_is_said_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LeaseLog(tmp_path)
    log.hold("a", ONE, 50.0, 0.0)
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
        with pytest.raises(CapacityError) as caught:
            log.hold("b", TWO, 50.0, 1.0)
    assert caught.value.status == 507
    log.hold("c", TWO, 50.0, 2.0)
    assert log.held(3.0) == LeaseLog(tmp_path).held(3.0) == [ONE, TWO]


def test_runs_that_only_readers_name_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease may come before the first head, and costs a folder: a reading token is good for so many."""
    monkeypatch.setattr(file_store, "MAX_HEADLESS_RUNS", 3, raising=False)
    store = FileStore(tmp_path, durable=False)
    store.set_head(head("1.1", "led"), expected=None)
    for number in range(3):
        store.lease(f"run-{number}", "node", ONE, 60)

    with pytest.raises(CapacityError, match="'run-3'"):
        store.lease("run-3", "node", ONE, 60)

    assert not (tmp_path / "runs" / "run-3").exists()
    store.lease("run-1", "other", TWO, 60)
    assert store.leases("run-1") == [ONE, TWO]
    store.set_head(head("1.1", "run-3"), expected=None)
    store.lease("run-3", "node", ONE, 60)
    assert store.leases("run-3") == [ONE]


def test_a_run_that_never_had_a_head_makes_room_when_its_leases_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "MAX_HEADLESS_RUNS", 2, raising=False)
    store = FileStore(tmp_path, durable=False)
    for name in ("over", "held"):
        store.lease(name, "node", ONE, 60)
    log = tmp_path / "runs" / "over" / "leases.log"
    long_ago_s = time.time() - 2 * MAX_LEASE_S
    os.utime(log, (long_ago_s, long_ago_s))

    store.lease("new", "node", ONE, 60)

    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["held", "new"]
    assert (store.leases("held"), store.leases("over")) == ([ONE], [])


def test_who_lets_go_of_a_run_that_nobody_knows_makes_none(tmp_path: Path) -> None:
    store = FileStore(tmp_path, durable=False)
    store.lease("run", "node", None, 60)
    assert list((tmp_path / "runs").iterdir()) == []
