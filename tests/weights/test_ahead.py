"""Objects that a trainer is still sending are told, served while they arrive, pulled ahead of the head, and believed no more for it."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from rose.errors import NotFound, SectionCorrupt
from rose.lineage import WeightVersion
from rose.weights import manifest, upcoming
from rose.weights.file_store import FileStore
from rose.weights.http_store import HttpStore
from rose.weights.manifest import Head
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.source import RawBits
from rose.weights.subscriber import WeightSubscriber
from rose.weights.upcoming import MOST_OBJECTS, UpcomingBook
from tests.weights.relay_process import ForkedRelay, RelayProcess
from tests.weights.subscriber.kit import V, copy_of, same
from tests.weights.test_relay import wait_until
from tests.weights.test_tree import sent
from tests.weights.toy import ToyTrainer

PARAMS = WeightsParams(fragment_elements=1 << 20, bucket_bytes=2 << 20, collect=False)
DATA = bytes(range(256)) * (64 << 10)  # 16 MiB: several pieces of an upload
BIG = upcoming.LEAST_BYTES
LIMIT_S = 30.0


def key(version: str, data: bytes = DATA, number: int = 0) -> str:
    return manifest.object_key("run", V(version), 0, number, manifest.digest(data))


# -- the book


def test_what_no_head_names_is_told_until_one_does() -> None:
    book = UpcomingBook()
    assert book.begun(key("1.1"), BIG, None)
    assert book.begun(key("1.2"), BIG + 1, V("1.0"))
    assert book.of("run").objects == ((key("1.1"), BIG), (key("1.2"), BIG + 1))
    assert book.moved("run", V("1.1"))
    assert book.of("run").objects == ((key("1.2"), BIG + 1),)


@pytest.mark.parametrize(
    "name", ["run/1.1/delta.json", "run/1.1", "run/1.1/a/b", "run/one/0000.00000-x", ".x/1.1/a"]
)
def test_what_is_no_object_of_a_version_is_not_told(name: str) -> None:
    assert not UpcomingBook().begun(name, BIG, None)


def test_what_is_pulled_as_fast_as_one_hears_of_it_is_not_told() -> None:
    assert not UpcomingBook().begun(key("1.1"), BIG - 1, None)


def test_what_a_head_has_passed_is_not_told() -> None:
    assert not UpcomingBook().begun(key("1.1"), BIG, V("1.1"))


def test_a_mark_changes_with_every_news_and_only_then() -> None:
    book = UpcomingBook()
    marks = [book.of("run").mark]
    book.begun(key("1.1"), BIG, None)
    marks.append(book.of("run").mark)
    book.gone(key("1.1"))
    marks.append(book.of("run").mark)
    assert len(set(marks)) == 3
    book.gone(key("1.1"))
    book.moved("run", V("1.0"))
    book.begun("other/1.1/0000.00000-x", BIG, None)
    assert book.of("run").mark == marks[-1]


def test_a_run_that_sends_without_end_is_told_in_part() -> None:
    book = UpcomingBook()
    told = [book.begun(key("1.1", number=number), BIG, None) for number in range(MOST_OBJECTS + 5)]
    assert sum(told) == MOST_OBJECTS
    assert len(upcoming.msgspec.json.encode(book.of("run"))) < upcoming.MAX_BYTES


@pytest.mark.parametrize(
    "answer",
    [
        b"{",
        b'{"mark": "", "objects": []}',
        b'{"mark": "a", "objects": [["other/1.1/x", 5]]}',
        b'{"mark": "a", "objects": [["run/1.1/../../x", 5]]}',
        b'{"mark": "a", "objects": [["run/1.1/x", 0]]}',
        b'{"mark": "a", "objects": [["run/1.1/x", 999999999999]]}',
        b'{"mark": "a", "objects": [["run/1.1/delta.json", 5]]}',
    ],
)  # fmt: skip
def test_an_answer_that_names_anything_else_is_refused(answer: bytes) -> None:
    with pytest.raises(SectionCorrupt):
        upcoming.decode(answer, "run")


# -- relays


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    with ForkedRelay(tmp_path_factory.mktemp("root")) as relay:
        yield relay


@pytest.fixture(scope="module")
def leaf(root: RelayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    with ForkedRelay(tmp_path_factory.mktemp("leaf"), root.tokens, f"--upstream={root.url}") as relay:
        yield relay


@pytest.fixture(params=["root", "leaf"])
def relay(request: pytest.FixtureRequest) -> RelayProcess:
    """What readers ask."""
    return request.getfixturevalue(request.param)


class Sending:
    """An upload that stands half-way."""

    def __init__(self, relay: RelayProcess, name: str, data: bytes) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(relay.url).netloc, timeout=LIMIT_S)
        self._connection.putrequest("PUT", f"/objects/{name}")
        self._connection.putheader("Authorization", f"Bearer {relay.tokens.publish}")
        self._connection.putheader("Content-Length", str(len(data)))
        self._connection.endheaders()
        self._rest = data[len(data) // 2 :]
        self._connection.send(data[: len(data) // 2])

    def finish(self) -> int:
        self._connection.send(self._rest)
        return self._connection.getresponse().status

    def break_off(self) -> None:
        self._connection.close()


def told(store: HttpStore, run: str) -> list[str]:
    found = store.upcoming(run, "", 0)
    return [] if found is None else [name for name, _ in found.objects]


@pytest.fixture
def store(relay: RelayProcess) -> Iterator[HttpStore]:
    store = HttpStore(relay.url, relay.tokens.publish, patience_s=2.0)
    yield store
    store.close()


def test_an_object_is_told_and_served_while_it_arrives(
    root: RelayProcess, store: HttpStore, request: pytest.FixtureRequest
) -> None:
    run = f"half-{request.node.callspec.id}"
    name = key("1.1").replace("run/", f"{run}/")
    mark = store.upcoming(run, "", 0)
    assert mark is not None
    with ThreadPoolExecutor(2) as threads:
        news = threads.submit(store.upcoming, run, mark.mark, LIMIT_S)
        upload = Sending(root, name, DATA)
        found = news.result(LIMIT_S)
        assert found is not None
        assert found.objects == ((name, len(DATA)),)
        assert store.get_range(name, 0, 1 << 19) == DATA[: 1 << 19]  # half of it has been sent
        whole = threads.submit(store.get_range, name, 0, len(DATA))
        assert upload.finish() == 201
        assert whole.result(LIMIT_S) == DATA


def test_an_object_whose_sender_goes_is_told_no_more(
    root: RelayProcess, store: HttpStore, request: pytest.FixtureRequest
) -> None:
    run = f"gone-{request.node.callspec.id}"
    name = key("1.1").replace("run/", f"{run}/")
    upload = Sending(root, name, DATA)
    wait_until(lambda: told(store, run) == [name])
    with ThreadPoolExecutor(1) as threads:
        whole = threads.submit(store.get_range, name, 0, len(DATA))
        upload.break_off()
        with pytest.raises(NotFound):
            whole.result(LIMIT_S)
    wait_until(lambda: told(store, run) == [])


# -- readers


class GatedHead(HttpStore):
    """The head moves when it is let."""

    def __init__(self, relay: RelayProcess) -> None:
        super().__init__(relay.url, relay.tokens.publish)
        self.gate = threading.Event()

    def set_head(self, head: Head, *, expected: WeightVersion | None) -> None:
        assert self.gate.wait(LIMIT_S)
        super().set_head(head, expected=expected)


class Pair:
    """A trainer at the root and a reader of ``relay`` that waits for its next version."""

    def __init__(self, root: RelayProcess, relay: RelayProcess, run: str, folder: Path) -> None:
        self._rng = np.random.default_rng(1)
        self.step()
        self.store = GatedHead(root)
        self.publisher = WeightPublisher(self._tensors, self.store, run, 1, PARAMS)
        self.store.gate.set()
        self.publisher.publish(0)
        self.store.gate.clear()
        self.spool = folder / "copy" / "spool"
        self.reader = WeightSubscriber(
            HttpStore(relay.url, relay.tokens.relay), run, folder / "copy", PARAMS, owns_store=True
        )
        assert self.reader.poll(LIMIT_S) == V("1.0")
        self.threads = ThreadPoolExecutor(2)

    def _tensors(self) -> dict[str, object]:
        return {"w": RawBits(self.bits, "BF16")}

    def step(self) -> None:
        """Every weight changes: three objects of 2 MiB."""
        self.bits = self._rng.integers(0, 1 << 16, 3 << 20, dtype=np.uint16)

    def arrived(self) -> bool:
        """The reader has the trainer's weights."""
        return same(copy_of(self.reader), {"w": self.bits})

    def close(self) -> None:
        self.store.gate.set()
        self.reader.close()
        self.threads.shutdown()
        self.publisher.close()
        self.store.close()

    def pulled(self, version: str) -> list[Path]:
        """Objects that are whole."""
        return [path for path in self.spool.glob(f"{version}/*") if path.suffix != ".part"]


@pytest.fixture
def pair(
    root: RelayProcess, relay: RelayProcess, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Pair]:
    pair = Pair(
        root, relay, f"pair-{request.node.name}"[:60].translate(str.maketrans("[", "-", "]")), tmp_path
    )
    yield pair
    pair.close()


def test_a_reader_has_the_objects_before_the_head_moves(pair: Pair, relay: RelayProcess) -> None:
    pair.step()
    published = pair.threads.submit(pair.publisher.publish, 1)
    followed = pair.threads.submit(pair.reader.poll, LIMIT_S)
    wait_until(lambda: len(pair.pulled("1.1")) == 3)
    before = sent(relay)
    pair.store.gate.set()
    assert followed.result(LIMIT_S) == V("1.1")
    report = published.result(LIMIT_S)
    assert pair.arrived()
    assert sent(relay) - before < report.bytes_sent / 10  # the manifest


def test_what_came_early_and_is_damaged_is_pulled_anew(pair: Pair) -> None:
    pair.step()
    published = pair.threads.submit(pair.publisher.publish, 1)
    followed = pair.threads.submit(pair.reader.poll, LIMIT_S)
    wait_until(lambda: len(pair.pulled("1.1")) == 3)
    path = pair.pulled("1.1")[0]
    path.write_bytes(bytes(path.stat().st_size))
    pair.store.gate.set()
    assert followed.result(LIMIT_S) == V("1.1")
    published.result(LIMIT_S)
    assert pair.arrived()


def test_what_no_head_came_to_name_is_dropped(pair: Pair) -> None:
    stray = key("1.1").replace("run/", f"{pair.publisher._run_id}/")
    pair.store.put_new(stray, DATA)
    wait_until(lambda: len(pair.pulled("1.1")) == 1)
    pair.store.gate.set()
    for version in (2, 3):
        pair.step()
        pair.publisher.publish(version)
        pair.reader.poll(LIMIT_S)
    assert pair.pulled("1.1") == []
    assert pair.arrived()


def test_a_store_that_does_not_tell_is_read_as_before(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    with pytest.raises(NotFound, match="does not tell"):
        store.upcoming("run", "", 0)
    trainer = ToyTrainer(1)
    WeightPublisher(trainer.tensors, store, "run", 1, PARAMS).publish(0)
    reader = WeightSubscriber(store, "run", tmp_path / "copy", PARAMS)
    assert reader.poll(LIMIT_S) == V("1.0")
    assert same(copy_of(reader), trainer.bits())
    reader.close()
