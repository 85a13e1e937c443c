"""One contract for every store: in memory, in a folder, over HTTP, in an S3 bucket."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.auth import Tokens
from rose.errors import CapacityError, ConfigError, Conflict, NotFound, RequestError, SectionCorrupt, TooLarge
from rose.lineage import WeightVersion
from rose.proc import free_port
from rose.testing.memory_store import MemoryStore
from rose.testing.relay_thread import RelayThread
from rose.weights import manifest
from rose.weights.file_store import FileStore
from rose.weights.fsspec_store import FsspecStore
from rose.weights.http_store import HttpStore
from rose.weights.manifest import Head, Kind, ObjectRef
from rose.weights.mooncake_store import MooncakeStore
from rose.weights.store import ObjectStore
from rose.weights.stores import open_store
from tests.weights.mooncake_kit import mooncake_cluster
from tests.weights.s3_server import BUCKET, s3_server

MAX_OBJECT_BYTES = 1 << 20


def V(text: str) -> WeightVersion:
    return WeightVersion.parse(text)


def head(version: str, run_id: str = "run", kind: Kind = "delta", nbytes: int = 1) -> Head:
    identity = V(version)
    reference = ObjectRef(key=manifest.manifest_key(run_id, identity, kind), nbytes=nbytes, xxh3="0" * 32)
    return Head(
        schema=manifest.SCHEMA,
        run_id=run_id,
        attempt=identity.attempt,
        version=identity.version,
        kind=kind,
        manifest=reference,
    )


@pytest.fixture(
    params=[
        "memory",
        "file",
        "http",
        "fsspec-memory",
        "fsspec-local",
        "s3",
        pytest.param("mooncake", marks=pytest.mark.slow),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "memory":
        yield MemoryStore(max_object_bytes=MAX_OBJECT_BYTES)
        return
    if request.param.startswith("fsspec"):
        place = str(tmp_path / "store") if request.param == "fsspec-local" else f"rose{tmp_path}"
        scheme = request.param.removeprefix("fsspec-")
        store = FsspecStore(f"{scheme}://{place}", max_object_bytes=MAX_OBJECT_BYTES)
        yield store
        store.close()
        return
    if request.param == "s3":
        options = request.getfixturevalue("s3")
        place = f"s3://{BUCKET}/{secrets.token_hex(4)}"
        bucket = FsspecStore(place, options=options, max_object_bytes=MAX_OBJECT_BYTES)
        yield bucket
        bucket.close()
        return
    if request.param == "mooncake":
        yield request.getfixturevalue("mooncake")
        return
    files = FileStore(tmp_path / "store", max_object_bytes=MAX_OBJECT_BYTES, durable=False)
    if request.param == "file":
        yield files
        return
    tokens = Tokens.generate()
    with RelayThread(files, tokens) as relay:
        # A closed store's poll ends by itself, half of timeout_s after it began.
        client = HttpStore(relay.url, tokens.publish, timeout_s=6.0, patience_s=2)
        yield client
        client.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, Any]]:
    """Options for fsspec, to a real S3 server."""
    with s3_server() as options:
        yield options


@pytest.fixture(scope="session")
def mooncake_master() -> Iterator[str]:
    """Address of a Mooncake master of our own; skipped where Mooncake is not installed."""
    with mooncake_cluster() as address:
        yield address


@pytest.fixture
def mooncake(mooncake_master: str) -> Iterator[ObjectStore]:
    store = MooncakeStore(mooncake_master, max_object_bytes=MAX_OBJECT_BYTES, namespace=secrets.token_hex(4))
    yield store
    store.close()


# --- objects ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 65_536, MAX_OBJECT_BYTES])
def test_what_is_put_is_read_back(store: ObjectStore, size: int) -> None:
    data = bytes(i * 7 % 251 for i in range(1024)) * (size // 1024) + b"x" * (size % 1024)
    store.put_new("run/1.0/object", memoryview(data))
    assert store.get("run/1.0/object") == data
    assert store.stat("run/1.0/object").nbytes == size


def test_put_new_fails_where_the_key_exists_and_keeps_the_old_bytes(store: ObjectStore) -> None:
    store.put_new("run/a", b"old")
    with pytest.raises(Conflict):
        store.put_new("run/a", b"new")
    with pytest.raises(Conflict):
        store.put_new("run/a", b"old")
    assert store.get("run/a") == b"old"


def test_one_of_many_concurrent_writers_wins(store: ObjectStore) -> None:
    outcomes: list[bytes | None] = []

    def write(data: bytes) -> None:
        try:
            store.put_new("run/contended", data)
            outcomes.append(data)
        except Conflict:
            outcomes.append(None)

    threads = [threading.Thread(target=write, args=(bytes([n]) * 50_000,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [data for data in outcomes if data is not None]
    assert len(outcomes) == 8
    assert [store.get("run/contended")] == winners


def test_ranges_are_exact(store: ObjectStore) -> None:
    store.put_new("run/a", b"0123456789")
    assert store.get_range("run/a", 0, 10) == b"0123456789"
    assert store.get_range("run/a", 3, 4) == b"3456"
    assert store.get_range("run/a", 9, 1) == b"9"
    assert store.get_range("run/a", 10, 0) == b""
    for offset, nbytes in [(0, 11), (10, 1), (5, 6), (-1, 2), (3, -1), (100, 1)]:
        with pytest.raises(RequestError) as caught:
            store.get_range("run/a", offset, nbytes)
        assert caught.value.status == 416


def test_missing_objects_are_not_found(store: ObjectStore) -> None:
    for call in (store.get, store.stat, lambda key: store.get_range(key, 0, 1)):
        with pytest.raises(NotFound) as caught:
            call("run/ghost")
        assert "run/ghost" in str(caught.value.field)
    assert store.delete("run/ghost") is False


def test_sizes_are_bounded_both_ways(store: ObjectStore) -> None:
    with pytest.raises(TooLarge):
        store.put_new("run/big", bytes(MAX_OBJECT_BYTES + 1))
    store.put_new("run/a", b"0123456789")
    with pytest.raises(TooLarge):
        store.get("run/a", max_bytes=9)
    assert store.list("run/") == ["run/a"]


def test_list_is_sorted_and_stays_below_whole_segments(store: ObjectStore) -> None:
    for key in ("run/1.0/b", "run/1.0/a", "run/1.1/c", "run2/1.0/d"):
        store.put_new(key, b"")
    assert store.list("run/") == ["run/1.0/a", "run/1.0/b", "run/1.1/c"]
    assert store.list("run/1.0/") == ["run/1.0/a", "run/1.0/b"]
    assert store.list("none/") == []
    with pytest.raises(RequestError, match="must end with"):
        store.list("run")


def test_deleted_objects_are_gone_and_the_key_is_free(store: ObjectStore) -> None:
    store.put_new("run/1.0/a", b"one")
    assert store.delete("run/1.0/a") is True
    assert store.list("run/") == []
    with pytest.raises(NotFound):
        store.get("run/1.0/a")
    store.put_new("run/1.0/a", b"two")
    assert store.get("run/1.0/a") == b"two"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/passwd",
        "../x",
        "run/../../x",
        "run/..",
        "run//a",
        "run/.hidden",
        "run/a/",
        "run/a\0b",
        "run/é",
        "run/a b",
        "run\\a",
        "run/%2e%2e/x",
        "a/" * 8 + "a",
        "x" * 129,
        "run/a\n",
    ],
)
def test_keys_outside_the_grammar_are_refused_everywhere(
    store: ObjectStore, key: str, tmp_path: Path
) -> None:
    calls = [
        lambda: store.put_new(key, b"x"),
        lambda: store.get(key),
        lambda: store.get_range(key, 0, 1),
        lambda: store.stat(key),
        lambda: store.delete(key),
        lambda: store.list(key + "/"),
    ]
    for call in calls:
        with pytest.raises(RequestError):
            call()


# --- heads ------------------------------------------------------------------------------------------------


def test_a_head_moves_forward_from_what_the_writer_expects(store: ObjectStore) -> None:
    assert store.get_head("run") is None
    store.set_head(head("1.0"), expected=None)
    store.set_head(head("1.1"), expected=V("1.0"))
    store.set_head(head("2.0"), expected=V("1.1"))
    assert store.get_head("run") == head("2.0")
    assert store.get_head("other") is None


@pytest.mark.parametrize(
    ("version", "expected"),
    [("1.6", None), ("1.6", "1.4"), ("1.4", "1.5"), ("1.5", "1.5"), ("0.9", "1.5")],
)
def test_a_head_elsewhere_or_going_back_is_refused(
    store: ObjectStore, version: str, expected: str | None
) -> None:
    store.set_head(head("1.5"), expected=None)
    with pytest.raises(Conflict):
        store.set_head(head(version, nbytes=2), expected=None if expected is None else V(expected))
    assert store.get_head("run") == head("1.5")


def test_the_runs_that_have_a_head_are_named(store: ObjectStore) -> None:
    assert store.runs() == []
    store.lease("held", "reader", V("1.0"), 60)
    store.put_new("begun/1.0/0.0", b"x")
    for run_id in ("b", "a"):
        store.set_head(head("1.0", run_id), expected=None)
    assert store.runs() == ["a", "b"]


def test_setting_the_same_head_again_is_a_retry_not_a_conflict(store: ObjectStore) -> None:
    store.set_head(head("1.5"), expected=None)
    store.set_head(head("1.5"), expected=None)
    with pytest.raises(Conflict):
        store.set_head(head("1.5", nbytes=2), expected=None)


def test_waiting_returns_at_once_when_the_head_is_newer(store: ObjectStore) -> None:
    store.set_head(head("1.5"), expected=None)
    assert store.wait_head("run", None, 30) == head("1.5")
    assert store.wait_head("run", V("1.4"), 30) == head("1.5")
    assert store.wait_head("run", V("1.5"), 0) is None
    assert store.wait_head("run", V("2.0"), 0.01) is None


def test_a_waiting_reader_wakes_when_the_head_moves(store: ObjectStore) -> None:
    store.set_head(head("1.5"), expected=None)
    found: list[Head | None] = []
    reader = threading.Thread(target=lambda: found.append(store.wait_head("run", V("1.5"), 30)))
    reader.start()
    store.set_head(head("1.6"), expected=V("1.5"))
    reader.join(60)
    assert found == [head("1.6")]


def test_closing_ends_a_wait(store: ObjectStore) -> None:
    store.set_head(head("1.5"), expected=None)
    ended: list[object] = []

    def wait() -> None:
        try:
            ended.append(store.wait_head("run", V("1.5"), 600))
        except CapacityError as error:
            ended.append(str(error))

    reader = threading.Thread(target=wait, daemon=True)
    reader.start()
    store.close()
    reader.join(60)
    assert ended == ["store is closed"]


@pytest.mark.parametrize("run_id", ["", "..", "a/b", ".x", "x" * 65, "run?x=1", "a b"])
def test_bad_run_ids_are_refused_everywhere(store: ObjectStore, run_id: str) -> None:
    calls = [
        lambda: store.get_head(run_id),
        lambda: store.wait_head(run_id, None, 0),
        lambda: store.lease(run_id, "me", V("1.0"), 1),
        lambda: store.leases(run_id),
    ]
    for call in calls:
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.field == "run_id"


# --- leases -----------------------------------------------------------------------------------------------


def test_a_lease_is_held_replaced_and_let_go(store: ObjectStore) -> None:
    assert store.leases("run") == []
    store.lease("run", "node-a", V("1.5"), 60)
    store.lease("run", "node-b", V("1.3"), 60)
    store.lease("other", "node-a", V("9.9"), 60)
    assert store.leases("run") == [V("1.3"), V("1.5")]
    store.lease("run", "node-b", V("1.10"), 60)
    assert store.leases("run") == [V("1.5"), V("1.10")]
    store.lease("run", "node-a", None, 60)
    store.lease("run", "ghost", None, 60)
    assert store.leases("run") == [V("1.10")]


def test_a_lease_expires(store: ObjectStore) -> None:
    store.lease("run", "node", V("1.5"), 1e-9)
    assert store.leases("run") == []


def test_a_fleet_larger_than_a_thousand_holds_leases(store: ObjectStore) -> None:
    count = 30 if repr(store).startswith("FsspecStore('s3") else 1100  # a request for each, both ways
    for number in range(count):
        store.lease("run", f"node-{number}", V(f"1.{number % 3}"), 60)
    assert store.leases("run") == [V("1.0"), V("1.1"), V("1.2")]


@pytest.mark.parametrize(("holder", "ttl_s"), [("../x", 1.0), ("", 1.0), ("a", 0.0), ("a", -1.0), ("a", 1e9)])
def test_bad_leases_are_refused(store: ObjectStore, holder: str, ttl_s: float) -> None:
    with pytest.raises(RequestError):
        store.lease("run", holder, V("1.0"), ttl_s)


# --- what only a folder can do ----------------------------------------------------------------------------


def test_two_file_stores_on_one_folder_see_each_other(tmp_path: Path) -> None:
    one, two = FileStore(tmp_path), FileStore(tmp_path)
    one.put_new("run/a", b"x")
    assert two.get("run/a") == b"x"
    with pytest.raises(Conflict):
        two.put_new("run/a", b"y")
    found: list[Head | None] = []
    reader = threading.Thread(target=lambda: found.append(two.wait_head("run", None, 30)))
    reader.start()
    one.set_head(head("1.0"), expected=None)
    reader.join(60)
    assert found == [head("1.0")]


def test_a_folder_has_a_size_limit_that_deletes_give_back(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_total_bytes=100)
    store.put_new("run/a", bytes(60))
    with pytest.raises(CapacityError) as caught:
        store.put_new("run/b", bytes(60))
    assert caught.value.status == 507
    store.delete("run/a")
    store.put_new("run/b", bytes(60))
    assert store.total_bytes == FileStore(tmp_path).total_bytes == 60


def test_symlinks_in_the_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    store = FileStore(tmp_path / "store")
    store.put_new("run/a", b"x")
    (tmp_path / "store/objects/run/link").symlink_to(tmp_path / "secret")
    with pytest.raises(NotFound):
        store.get("run/link")
    assert store.list("run/") == ["run/a"]


def test_an_upload_that_is_not_committed_leaves_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    upload = store.begin("run/a", 10)
    upload.write(b"12345")
    with pytest.raises(RequestError, match="5 bytes came, 10 were announced"):
        upload.commit()
    upload.discard()
    upload.discard()
    assert store.total_bytes == 0
    assert store.list("run/") == []
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_of_two_uploads_of_one_key_the_first_to_finish_wins(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    first, second = store.begin("run/a", 1), store.begin("run/a", 1)
    first.write(b"1")
    second.write(b"2")
    second.commit()
    with pytest.raises(Conflict):
        first.commit()
    first.discard()
    second.discard()
    assert store.get("run/a") == b"2"
    assert store.total_bytes == 1


def test_a_folder_that_another_process_deletes_meanwhile_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path, durable=False)
    for version in ("1.0", "1.1"):
        store.put_new(f"run/{version}/a", b"x")
    lists = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("/run/1.0"):
            store.delete("run/1.0/a")
        return lists(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert store.list("run/") == ["run/1.1/a"]
    store.put_new("run/1.0/a", b"x")
    assert FileStore(tmp_path).total_bytes == 1


def test_an_object_cannot_be_a_folder_too(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_new("run/a", b"x")
    with pytest.raises(Conflict, match="itself an object"):
        store.put_new("run/a/b", b"y")
    assert store.total_bytes == 1


def test_a_corrupt_head_file_is_named(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.set_head(head("1.0"), expected=None)
    (tmp_path / "runs/run/head.json").write_text("{}")
    with pytest.raises(SectionCorrupt, match=r"^head: "):
        store.get_head("run")


@pytest.mark.parametrize("url", ["relay:8470", "127.0.0.1:8470"])
def test_an_address_without_its_scheme_is_no_folder(url: str) -> None:
    with pytest.raises(ConfigError, match=f"http://{url}"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http:/relay:8470", "lacks the //"),
        ("http:relay:8470", "lacks the //"),
        ("relay:8470/below", "http://relay:8470/below"),
        ("~no-such-user/store", "nobody's home"),
        ("localhost", "is no folder here"),
        ("my-store", r"\./my-store"),
    ],
)
def test_what_may_be_meant_as_an_address_is_no_folder(
    url: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_store(url)
    assert list(tmp_path.iterdir()) == []


def test_folders_may_be_named_as_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for url in ("./new", "~/store"):
        open_store(url).close()
    open_store("new").close()  # it is there now
    assert {path.name for path in tmp_path.iterdir()} == {"new", "home"}
    for url in ("HTTP://127.0.0.1:1", "MEMORY://here", f"FILE://{tmp_path}/new"):
        open_store(url).close()


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^directory: /proc/x.* cannot be made"):
        FileStore("/proc/x")


def test_a_poll_of_a_relay_that_is_away_ends_when_its_caller_said() -> None:
    store = open_store(f"http://127.0.0.1:{free_port()}", "secret-secret-secret", patience_s=3600)
    with pytest.raises(CapacityError, match="cannot be reached"):
        store.wait_head("run", None, 0.1)
    store.close()


@pytest.mark.parametrize("token", ["secret\n", "sec ret", "sécret"])
def test_a_token_that_is_none_is_refused_and_not_told(token: str) -> None:
    with pytest.raises(ConfigError, match="token") as caught:
        open_store("http://127.0.0.1:1", token)
    assert token.strip() not in str(caught.value)
