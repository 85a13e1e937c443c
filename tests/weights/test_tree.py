"""Relays above relays, as processes: pulled once, passed on at once, and nobody stuck when one of them is killed."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import httpx
import pytest

from rose.errors import CapacityError, NotFound, RequestError
from rose.weights.file_store import FileStore
from rose.weights.http_store import HttpStore
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from tests.weights.relay_process import ForkedRelay, RelayProcess
from tests.weights.subscriber.kit import copy_of, same
from tests.weights.test_relay import wait_until
from tests.weights.test_stores import V, head
from tests.weights.toy import ToyTrainer

DATA = bytes(range(256)) * (8 << 12)  # 8 MiB: many pieces


class Gate:
    """A TCP proxy that lets so many bytes of answers through, and the rest when it is opened."""

    def __init__(self, url: str, nbytes: int) -> None:
        self._target = int(url.rsplit(":", 1)[1])
        self._left = nbytes
        self.opened = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                upstream = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._ends += [client, upstream]
            threading.Thread(target=self._pass, args=(client, upstream, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(upstream, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if counts:
                    self._left -= len(data)
                    if self._left < 0:
                        self.opened.wait(30)
                sink.sendall(data)
        except OSError:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.set()
        self._listener.close()
        for end in self._ends:
            end.close()


def metric(relay: RelayProcess, name: str) -> float:
    for line in httpx.get(f"{relay.url}/metrics", timeout=10).text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def sent(relay: RelayProcess) -> float:
    return metric(relay, 'rose_relay_bytes_total{direction="out"}')


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    with ForkedRelay(tmp_path_factory.mktemp("root")) as relay:
        yield relay


@pytest.fixture
def below(root: RelayProcess, tmp_path: Path) -> Iterator[Callable[..., RelayProcess]]:
    """Starts relays that copy from the root, or from what ``upstream`` names."""
    started: list[RelayProcess] = []

    def start(*options: str, upstream: str = "") -> RelayProcess:
        folder = tmp_path / f"relay-{len(started)}"
        relay = ForkedRelay(folder, root.tokens, f"--upstream={upstream or root.url}", *options)
        relay.__enter__()
        started.append(relay)
        return relay

    yield start
    for relay in started:
        relay.__exit__()


@pytest.fixture
def open_url(root: RelayProcess) -> Iterator[Callable[..., HttpStore]]:
    opened: list[HttpStore] = []

    def open_it(*urls: str, patience_s: float = 20.0) -> HttpStore:
        opened.append(HttpStore(",".join(urls), root.tokens.publish, patience_s=patience_s))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


Below = Callable[..., RelayProcess]
Open = Callable[..., HttpStore]


def test_an_object_is_pulled_once_for_all_who_ask(root: RelayProcess, below: Below, open_url: Open) -> None:
    open_url(root.url).put_new("once/a", DATA)
    middle = below()
    before = sent(root)
    reader = open_url(below(upstream=middle.url).url)
    with ThreadPoolExecutor(12) as readers:
        results = list(readers.map(lambda _: reader.get("once/a") == DATA, range(12)))
        parts = list(readers.map(lambda n: reader.get_range("once/a", n * 1000, 777), range(12)))
    assert results == [True] * 12
    assert parts == [DATA[n * 1000 : n * 1000 + 777] for n in range(12)]
    assert sent(root) - before == sent(middle) == len(DATA)


def test_bytes_are_passed_on_before_the_last_has_come(
    root: RelayProcess, below: Below, open_url: Open
) -> None:
    open_url(root.url).put_new("early/a", DATA)
    with Gate(root.url, len(DATA) // 2) as gate:
        relay = below(upstream=gate.url)
        connection = http.client.HTTPConnection("127.0.0.1", int(relay.url.rsplit(":", 1)[1]), timeout=20)
        connection.request(
            "GET", "/objects/early/a", headers={"Authorization": f"Bearer {root.tokens.publish}"}
        )
        answer = connection.getresponse()
        first = answer.read(len(DATA) // 4)
        assert not gate.opened.is_set()
        gate.opened.set()
        assert first + answer.read() == DATA
        connection.close()


def test_a_head_is_passed_on_at_once_over_one_poll_for_all(
    root: RelayProcess, below: Below, open_url: Open
) -> None:
    trainer = open_url(root.url)
    leaf = below(upstream=below().url)
    reader = open_url(leaf.url)
    trainer.set_head(head("1.5", "polled"), expected=None)
    assert reader.get_head("polled") == head("1.5", "polled")
    with ThreadPoolExecutor(20) as readers:
        waiting = [readers.submit(reader.wait_head, "polled", V("1.5"), 60) for _ in range(20)]
        wait_until(lambda: metric(leaf, "rose_relay_waiting_readers") == 20)
        wait_until(lambda: metric(root, "rose_relay_waiting_readers") >= 1)  # through two relays
        assert metric(root, "rose_relay_waiting_readers") == 1
        trainer.set_head(head("1.6", "polled"), expected=V("1.5"))
        assert [each.result(20) for each in waiting] == [head("1.6", "polled")] * 20


def test_leases_become_one_above_and_end_with_the_last(
    root: RelayProcess, below: Below, open_url: Open
) -> None:
    trainer = open_url(root.url)
    reader = open_url(below().url)
    posted = 'rose_relay_requests_total{method="POST",status="204"}'
    before = metric(root, posted)
    for number in range(50):
        reader.lease("leased", f"node-{number}", V("1.5"), 30)
    reader.lease("leased", "other", V("1.7"), 30)
    assert trainer.leases("leased") == [V("1.5"), V("1.7")]
    assert metric(root, posted) - before == 2
    for number in range(50):
        reader.lease("leased", f"node-{number}", None, 30)
    wait_until(lambda: trainer.leases("leased") == [V("1.7")])


def test_what_is_kept_is_bounded_and_survives_the_process(
    root: RelayProcess, below: Below, open_url: Open, tmp_path: Path
) -> None:
    trainer = open_url(root.url)
    relay = below("--max-total-gib=0.001")
    reader = open_url(relay.url)
    for number in range(8):
        trainer.put_new(f"kept/{number}", bytes([number]) * 300_000)
        assert reader.get(f"kept/{number}") == bytes([number]) * 300_000
    kept = FileStore(tmp_path / "relay-0/relay")
    # A relay writes what it has sent, so its last copy may come a moment after the reader has its bytes.
    wait_until(lambda: kept.list("kept/") == ["kept/5", "kept/6", "kept/7"])
    relay.kill()
    relay.restart()
    before = sent(root)
    assert reader.get("kept/7") == bytes([7]) * 300_000
    assert sent(root) == before
    assert reader.get("kept/0") == bytes(300_000)
    trainer.put_new("kept/large", DATA)
    with pytest.raises(CapacityError):
        open_url(relay.url, patience_s=0.1).get("kept/large")
    assert open_url(relay.url, root.url).get("kept/large") == DATA


def test_a_damaged_copy_is_pulled_again_when_a_reader_says_so(
    root: RelayProcess, below: Below, open_url: Open, tmp_path: Path
) -> None:
    open_url(root.url).put_new("damaged/a", DATA)
    leaf = below(upstream=below().url)
    reader = open_url(leaf.url)
    assert reader.get("damaged/a") == DATA
    for number in range(2):
        path = FileStore(tmp_path / f"relay-{number}/relay").path_of("damaged/a")
        path.write_bytes(bytes(len(DATA)))
    assert reader.get("damaged/a") != DATA
    reader.distrust("damaged/a")
    assert reader.get("damaged/a") == DATA


def test_missing_objects_and_writes_are_refused_with_the_reason(
    root: RelayProcess, below: Below, open_url: Open
) -> None:
    reader = open_url(below().url)
    with pytest.raises(NotFound):
        reader.get("none/a")
    with pytest.raises(NotFound):
        reader.stat("none/a")
    for call in (
        lambda: reader.put_new("none/a", b"x"),
        lambda: reader.delete("none/a"),
        lambda: reader.set_head(head("1.0", "none"), expected=None),
    ):
        with pytest.raises(RequestError, match=f"publish at {root.url}") as caught:
            call()
        assert caught.value.status == 405
    open_url(root.url).put_new("none/a", b"x")
    assert reader.get("none/a") == b"x"  # that it was missing is not remembered
    assert reader.stat("none/a").nbytes == 1
    assert reader.list("none/") == ["none/a"]


def test_a_relay_that_lost_what_is_above_sends_its_readers_on(
    root: RelayProcess, below: Below, open_url: Open
) -> None:
    trainer = open_url(root.url)
    trainer.put_new("lost/a", DATA)
    trainer.set_head(head("1.5", "lost"), expected=None)
    middle = below()
    leaf = below(upstream=middle.url)
    reader = open_url(leaf.url, root.url)
    alone = open_url(leaf.url, patience_s=0.2)
    assert alone.get_head("lost") == head("1.5", "lost")
    assert alone.get("lost/a") == DATA
    middle.kill()
    trainer.set_head(head("1.6", "lost"), expected=V("1.5"))
    assert reader.wait_head("lost", V("1.5"), 60) == head("1.6", "lost")
    assert alone.get("lost/a") == DATA  # what it has, it serves
    middle.restart()
    wait_until(lambda: answers(alone), timeout_s=30)
    assert alone.get_head("lost") == head("1.6", "lost")


def answers(store: HttpStore) -> bool:
    try:
        return store.get_head("lost") is not None
    except CapacityError:
        return False


def test_a_folder_can_be_above(below: Below, open_url: Open, tmp_path: Path) -> None:
    files = FileStore(tmp_path / "store", durable=False)
    files.put_new("folder/a", DATA * 2)
    files.set_head(head("1.0", "folder"), expected=None)
    reader = open_url(below(upstream=f"file://{tmp_path / 'store'}").url)
    assert reader.get_head("folder") == head("1.0", "folder")
    assert reader.get("folder/a") == DATA * 2


def test_a_killed_relay_leaves_no_reader_stuck(
    root: RelayProcess, below: Below, open_url: Open, tmp_path: Path
) -> None:
    """Readers behind a relay that is killed for good, and one whose relay comes back, get every version that follows."""
    trainer = ToyTrainer(5)
    params = WeightsParams(anchor_every=100)
    publisher = WeightPublisher(trainer.tensors, open_url(root.url), "tree", 1, params)
    publisher.publish(0)
    middle, other = below(), below()
    leaf = below(upstream=f"{middle.url},{root.url}")
    ways = {"leaf": (leaf.url,), "middle": (middle.url, root.url), "other": (other.url, middle.url)}
    readers = {
        name: WeightSubscriber(open_url(*urls), "tree", tmp_path / name) for name, urls in ways.items()
    }

    def follow(version: int) -> None:
        for name, reader in readers.items():
            until_s = time.monotonic() + 60
            while reader.version != V(f"1.{version}"):
                assert time.monotonic() < until_s, f"{name} is at {reader.version}"
                with contextlib.suppress(CapacityError):  # both of its relays may be on their way up
                    reader.poll(5)
            assert same(copy_of(reader), trainer.bits())

    follow(0)
    for version in range(1, 7):
        if version == 2:
            middle.kill()
        if version == 3:
            other.kill()
        if version == 4:
            other.restart()
        trainer.step()
        publisher.publish(version)
        if version == 3:
            middle.restart()  # its address is other's reader's second
        follow(version)
    for reader in readers.values():
        reader.close()
    publisher.close()
