"""The relay over real sockets: who gets in, what is refused, and that a cut connection or a restart costs nothing."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from rose.auth import Tokens
from rose.errors import (
    CapacityError,
    ConfigError,
    Conflict,
    NotFound,
    RequestError,
    SectionCorrupt,
    Unauthorized,
)
from rose.lineage import WeightVersion
from rose.testing.relay_thread import RelayThread
from rose.weights.file_store import FileStore
from rose.weights.http_store import HttpStore
from tests.weights.relay_process import RelayProcess
from tests.weights.test_stores import head

DATA = bytes(range(256)) * 4096  # 1 MiB


class CuttingProxy:
    """A TCP proxy to the relay that cuts connections after some bytes of answer, as often as told."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.cut_after: list[int] = []
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            limit = self.cut_after.pop(0) if self.cut_after else None
            try:
                upstream = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client.close()
                continue
            self._open += [client, upstream]
            threading.Thread(target=self._pump, args=(client, upstream, None), daemon=True).start()
            threading.Thread(target=self._pump, args=(upstream, client, limit), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        passed = 0
        try:
            while data := source.recv(1 << 16 if limit is None else max(1, min(1 << 16, limit - passed))):
                sink.sendall(data)
                passed += len(data)
                if limit is not None and passed >= limit:
                    break
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for end in self._open:
            end.close()


@pytest.fixture
def tokens() -> Tokens:
    return Tokens.generate()


@pytest.fixture
def files(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "relay", durable=False)


@pytest.fixture
def relay(files: FileStore, tokens: Tokens) -> Iterator[RelayThread]:
    with RelayThread(files, tokens) as relay:
        yield relay


@pytest.fixture
def client(relay: RelayThread, tokens: Tokens) -> Iterator[HttpStore]:
    client = HttpStore(relay.url, tokens.publish, patience_s=2)
    yield client
    client.close()


def port_of(relay: RelayThread) -> int:
    return int(relay.url.rsplit(":", 1)[1])


def ask(
    relay: RelayThread, method: str, path: str, token: str | None, body: Any = None, **headers: str
) -> tuple[int, Any]:
    """One plain request; returns status and parsed body."""
    connection = http.client.HTTPConnection("127.0.0.1", port_of(relay), timeout=10)
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    connection.request(method, path, body=body, headers=headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    kind = answer.headers.get("Content-Type", "")
    return answer.status, json.loads(data) if data and "json" in kind else data


# --- who gets in ------------------------------------------------------------------------------------------

ROUTES = [
    ("PUT", "/objects/run/a"),
    ("GET", "/objects/run/a"),
    ("HEAD", "/objects/run/a"),
    ("DELETE", "/objects/run/a"),
    ("GET", "/objects?prefix=run/"),
    ("PUT", "/runs/run/head?expected=none"),
    ("GET", "/runs/run/head"),
    ("POST", "/leases"),
    ("GET", "/leases?run_id=run"),
    ("GET", "/nothing"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_wants_the_relays_token(
    relay: RelayThread, tokens: Tokens, files: FileStore, method: str, path: str
) -> None:
    files.put_new("run/a", b"x")
    for token in (None, "", "wrong" * 8, tokens.agent, tokens.trainer, tokens.node):
        status, body = ask(relay, method, path, token, b"{}" if method in ("PUT", "POST") else None)
        assert status == 401
        if method != "HEAD":
            assert body["error"]["param"] == "Authorization"
            assert not token or token not in json.dumps(body)
    assert files.get("run/a") == b"x"
    assert ask(relay, method, path, tokens.admin)[0] != 401


def test_a_wrong_token_is_unauthorized_to_the_client_and_not_retried(
    relay: RelayThread, tokens: Tokens
) -> None:
    client = HttpStore(relay.url, tokens.agent, patience_s=60)
    started_s = time.monotonic()
    with pytest.raises(Unauthorized) as caught:
        client.put_new("run/a", DATA)
    assert time.monotonic() - started_s < 10
    assert tokens.agent not in str(caught.value)
    assert tokens.agent not in repr(client)


def test_health_and_metrics_are_open_and_hold_no_names(relay: RelayThread, client: HttpStore) -> None:
    client.put_new("run/secretname", DATA)
    client.get("run/secretname")
    assert ask(relay, "GET", "/healthz", None) == (200, {"status": "ok"})
    status, text = ask(relay, "GET", "/metrics", None)
    assert status == 200
    values = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if line[0] != "#")
    assert float(values['rose_relay_bytes_total{direction="in"}']) == len(DATA)
    assert float(values['rose_relay_bytes_total{direction="out"}']) == len(DATA)
    assert float(values['rose_relay_requests_total{method="PUT",status="201"}']) == 1
    assert float(values["rose_relay_stored_bytes"]) == len(DATA)
    assert b"secretname" not in text


# --- hostile requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/objects/../../../../etc/passwd",
        "/objects/%2e%2e/%2e%2e/etc/passwd",
        "/objects/run/%2e%2e/%2e%2e/runs/run/head.json",
        "/objects//etc/passwd",
        "/objects/run%2f..%2f..%2fx",
        "/objects/run/a%00",
        "/objects/.hidden",
        "/objects/" + "a/" * 9,
        "/runs/../head",
        "/runs/%2e%2e/head",
    ],
)
def test_no_path_leads_out_of_the_store(
    relay: RelayThread, tokens: Tokens, path: str, tmp_path: Path
) -> None:
    (tmp_path / "passwd").write_text("secret")
    for method in ("GET", "PUT", "DELETE"):
        status, body = ask(relay, method, path, tokens.publish, b"x" if method == "PUT" else None)
        assert status in (400, 404, 405)
        assert b"secret" not in json.dumps(body if isinstance(body, dict) else str(body)).encode()
    assert (tmp_path / "passwd").read_text() == "secret"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("GET", "/objects", None, 400, "prefix"),
        ("GET", "/objects?prefix=../", None, 400, "key"),
        ("PUT", "/runs/run/head", b"{}", 400, "expected"),
        ("PUT", "/runs/run/head?expected=x", b"{}", 400, "expected"),
        ("PUT", "/runs/run/head?expected=none", b"{}", 400, "head"),
        ("PUT", "/runs/run/head?expected=none", b"[" * 60_000, 400, "head"),
        ("PUT", "/runs/run/head?expected=none", b"x" * 100_000, 413, "/runs/run/head"),
        ("GET", "/runs/run/head?after=1", None, 400, "after"),
        ("GET", "/runs/run/head?wait_s=nan", None, 400, "wait_s"),
        ("GET", "/runs/run/head?wait_s=-1", None, 400, "wait_s"),
        ("GET", "/runs/run/head?wait_s=1e9", None, 400, "wait_s"),
        ("GET", "/runs/run/head?wait_s=soon", None, 400, "wait_s"),
        ("POST", "/leases", b"", 400, "body"),
        ("POST", "/leases", b'{"run_id": "run"}', 400, "body"),
        ("POST", "/leases", b'{"run_id": "run", "holder": "h", "version": "1", "ttl_s": 1}', 400, "version"),
        ("POST", "/leases", b'{"run_id": "run", "holder": "h", "version": null, "ttl_s": 1e9}', 400, "ttl_s"),
        ("GET", "/leases", None, 400, "run_id"),
        ("GET", "/nothing", None, 404, "/nothing"),
        ("PATCH", "/objects/run/a", None, 405, "/objects/run/a"),
    ],
)
def test_bad_requests_name_the_field(
    relay: RelayThread, tokens: Tokens, method: str, path: str, body: bytes | None, status: int, param: str
) -> None:
    got, answer = ask(relay, method, path, tokens.publish, body)
    assert got == status
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"


def test_an_upload_without_a_length_is_refused(relay: RelayThread, tokens: Tokens, files: FileStore) -> None:
    status, answer = ask(relay, "PUT", "/objects/run/a", tokens.publish, iter([b"x"]))
    assert (status, answer["error"]["param"]) == (411, "Content-Length")
    assert files.list("run/") == []


def test_an_upload_over_the_limit_is_refused_unread(tmp_path: Path, tokens: Tokens) -> None:
    store = FileStore(tmp_path / "small", max_object_bytes=1000)
    with RelayThread(store, tokens) as relay:
        client = HttpStore(relay.url, tokens.publish, patience_s=2)
        with pytest.raises(RequestError, match="at most 1000") as caught:
            client.put_new("run/a", DATA)
        assert caught.value.status == 413
        status, _ = ask(
            relay, "PUT", "/objects/run/a", tokens.publish, b"", **{"Content-Length": str(10**15)}
        )
        assert status == 413
    assert store.total_bytes == 0


def test_an_upload_with_the_wrong_checksum_leaves_nothing(
    relay: RelayThread, tokens: Tokens, files: FileStore
) -> None:
    status, answer = ask(relay, "PUT", "/objects/run/a", tokens.publish, b"abc", **{"X-Rose-Xxh3": "0" * 32})
    assert (status, answer["error"]["code"]) == (400, "section_corrupt")
    assert files.list("run/") == []
    assert files.total_bytes == 0


def test_a_cut_upload_leaves_nothing(relay: RelayThread, tokens: Tokens, files: FileStore) -> None:
    with socket.create_connection(("127.0.0.1", port_of(relay))) as connection:
        connection.sendall(
            b"PUT /objects/run/a HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
            b"Authorization: Bearer " + tokens.publish.encode() + b"\r\n\r\n" + b"x" * 5000
        )
        wait_until(lambda: files.total_bytes == 1_000_000)
    wait_until(lambda: files.total_bytes == 0)
    assert not list((files.directory / "tmp").iterdir())
    assert files.list("run/") == []


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for another thread's effect that has no handle to wait on."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s
        threading.Event().wait(0.002)


def test_readers_that_do_not_read_hold_up_nobody(
    relay: RelayThread, client: HttpStore, tokens: Tokens, files: FileStore
) -> None:
    files.put_new("run/large", DATA * 16)
    request = f"GET /objects/run/large HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {tokens.relay}\r\n\r\n"
    stalled = [socket.create_connection(("127.0.0.1", port_of(relay))) for _ in range(20)]
    for reader in stalled:
        reader.sendall(request.encode())
        assert reader.recv(4) == b"HTTP"  # it is being sent to
    assert client.get("run/large") == DATA * 16
    for reader in stalled[:10]:
        reader.close()
    rest = b""
    while len(rest.partition(b"\r\n\r\n")[2]) < len(DATA) * 16:
        more = stalled[-1].recv(4 << 20)
        assert more
        rest += more
    assert rest.partition(b"\r\n\r\n")[2] == DATA * 16
    for reader in stalled[10:]:
        reader.close()


# --- broken connections -----------------------------------------------------------------------------------


def test_a_cut_download_goes_on_by_range(relay: RelayThread, tokens: Tokens, files: FileStore) -> None:
    files.put_new("run/a", DATA)
    with CuttingProxy(port_of(relay)) as proxy:
        client = HttpStore(proxy.url, tokens.publish, patience_s=60)
        proxy.cut_after = [300_000, 1, 400_000]
        assert client.get("run/a") == DATA
        assert proxy.num_connections == 4
        client = HttpStore(proxy.url, tokens.publish, patience_s=60)
        proxy.cut_after = [200_000, 200_000]
        assert client.get_range("run/a", 100, 900_000) == DATA[100:900_100]


def test_an_upload_whose_answer_was_lost_is_not_a_conflict(
    relay: RelayThread, tokens: Tokens, files: FileStore
) -> None:
    with CuttingProxy(port_of(relay)) as proxy:
        client = HttpStore(proxy.url, tokens.publish, patience_s=60)
        proxy.cut_after = [1]
        client.put_new("run/a", DATA)
        assert files.get("run/a") == DATA
        # But bytes that are really others' are.
        files.put_new("run/b", bytes(len(DATA)))
        client = HttpStore(proxy.url, tokens.publish, patience_s=60)
        proxy.cut_after = [1]
        with pytest.raises(Conflict):
            client.put_new("run/b", DATA)


def test_a_head_whose_answer_was_lost_is_set_once(
    relay: RelayThread, tokens: Tokens, files: FileStore
) -> None:
    with CuttingProxy(port_of(relay)) as proxy:
        client = HttpStore(proxy.url, tokens.publish, patience_s=60)
        proxy.cut_after = [1]
        client.set_head(head("1.0"), expected=None)
        assert files.get_head("run") == head("1.0")


def test_a_relay_that_is_away_is_a_capacity_error_in_bounded_time(tokens: Tokens) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = HttpStore(f"http://127.0.0.1:{port}", tokens.publish, patience_s=0.2)
    for call in (
        lambda: client.get("run/a"),
        lambda: client.put_new("run/a", b"x"),
        lambda: client.get_head("run"),
        lambda: client.wait_head("run", None, 0.1),
    ):
        started_s = time.monotonic()
        with pytest.raises(CapacityError, match="cannot be reached"):
            call()
        assert time.monotonic() - started_s < 5


@pytest.mark.parametrize("call", ["wait", "unreachable"])
def test_closing_the_store_ends_calls_that_wait(relay: RelayThread, tokens: Tokens, call: str) -> None:
    client = HttpStore(relay.url, tokens.publish, patience_s=60)
    if call == "unreachable":
        relay.stop()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.wait_head("run", None, 60)
        except CapacityError as error:
            errors.append(error)

    reader = threading.Thread(target=wait)
    reader.start()
    if call == "wait":
        wait_until(lambda: b"waiting_readers 1.0" in ask(relay, "GET", "/metrics", None)[1])
    started_s = time.monotonic()
    client.close()
    reader.join(30)
    assert time.monotonic() - started_s < 30
    assert [str(error) for error in errors] == ["store is closed"]
    with pytest.raises(CapacityError, match="closed"):
        client.get_head("run")


def test_a_restarted_relay_is_not_noticed(tmp_path: Path, tokens: Tokens) -> None:
    store = FileStore(tmp_path / "relay", durable=False)
    first = RelayThread(store, tokens).start()
    client = HttpStore(first.url, tokens.publish, patience_s=60)
    client.put_new("run/a", DATA)
    client.set_head(head("1.0"), expected=None)
    first.stop()
    results: list[Any] = []
    reader = threading.Thread(target=lambda: results.append(client.get("run/a")))
    reader.start()  # while nobody listens
    with RelayThread(FileStore(tmp_path / "relay", durable=False), tokens, port=port_of(first)):
        reader.join(60)
        assert results == [DATA]
        assert client.get_head("run") == head("1.0")
        client.set_head(head("1.1"), expected=WeightVersion(1, 0))
    client.close()


def test_a_stopping_relay_answers_waiting_readers_at_once(files: FileStore, tokens: Tokens) -> None:
    relay = RelayThread(files, tokens).start()
    results: list[Any] = []

    def wait() -> None:
        results.append(ask(relay, "GET", "/runs/run/head?wait_s=60", tokens.publish)[0])

    reader = threading.Thread(target=wait)
    reader.start()
    wait_until(lambda: b"rose_relay_waiting_readers 1.0" in ask(relay, "GET", "/metrics", None)[1])
    started_s = time.monotonic()
    relay.stop()
    reader.join(30)
    assert results == [204]
    assert time.monotonic() - started_s < 30


def test_leftovers_of_a_killed_relay_are_removed(tmp_path: Path, tokens: Tokens) -> None:
    store = FileStore(tmp_path / "relay")
    upload = store.begin("run/a", 100)
    upload.write(b"half")
    assert list((tmp_path / "relay/tmp").iterdir())
    with RelayThread(FileStore(tmp_path / "relay"), tokens):
        assert not list((tmp_path / "relay/tmp").iterdir())


def test_one_relay_owns_a_folder(relay: RelayThread, files: FileStore, tokens: Tokens) -> None:
    with pytest.raises(ConfigError, match="in use by another relay"):
        RelayThread(FileStore(files.directory), tokens).start()


def test_a_port_in_use_is_one_clear_line(relay: RelayThread, tmp_path: Path, tokens: Tokens) -> None:
    with pytest.raises(ConfigError, match=r"^relay\.port: cannot listen on 127\.0\.0\.1:\d+: "):
        RelayThread(FileStore(tmp_path / "other"), tokens, port=port_of(relay)).start()


@pytest.mark.parametrize("url", ["", "relay", "ftp://x", "http://", "http://user:pw@host", "http://x?y=1"])
def test_a_bad_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^relay\.url: "):
        HttpStore(url, "token")


class Nonsense:
    """A server that answers every request with fixed bytes."""

    def __init__(self, answer: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._answer = answer
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                client.recv(65_536)
                client.sendall(self._answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nxyz", SectionCorrupt),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 100_000, SectionCorrupt),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", RequestError),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope", NotFound),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", CapacityError),
        (b"nonsense\r\n\r\n", CapacityError),
        (b"", CapacityError),
    ],
)
def test_a_server_that_is_no_relay_is_survived(answer: bytes, error: type[Exception]) -> None:
    with Nonsense(answer) as server, pytest.raises(error):
        HttpStore(server.url, "token", timeout_s=2, patience_s=0.2).get_head("run")


def answer_of(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize(
    ("answer", "ask", "error"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", lambda store: store.stat("run/a"), CapacityError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", lambda store: store.stat("run/a"), CapacityError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", lambda store: store.stat("run/a"), CapacityError),
        (answer_of(b"{}"), lambda store: store.list("run/"), SectionCorrupt),
        (answer_of(b'{"keys": [1]}'), lambda store: store.list("run/"), SectionCorrupt),
        (answer_of(b"{}"), lambda store: store.runs(), SectionCorrupt),
        (answer_of(b"{}"), lambda store: store.leases("run"), SectionCorrupt),
        (answer_of(b'{"versions": ["new"]}'), lambda store: store.leases("run"), SectionCorrupt),
    ],
)  # fmt: skip
def test_an_answer_that_makes_no_sense_is_an_error_of_the_stores_own(
    answer: bytes, ask: Callable[[HttpStore], object], error: type[Exception]
) -> None:
    with Nonsense(answer) as server, pytest.raises(error):
        ask(HttpStore(server.url, "token", timeout_s=2, patience_s=0.2))


# --- the process ------------------------------------------------------------------------------------------


def test_the_relay_process_survives_sigkill_and_ends_on_sigterm(tmp_path: Path) -> None:
    with RelayProcess(tmp_path) as relay:
        client = HttpStore(relay.url, relay.tokens.publish, patience_s=20)
        client.put_new("run/a", DATA)
        client.set_head(head("1.0"), expected=None)
        relay.kill()
        relay.restart()
        assert client.get("run/a") == DATA
        assert client.get_head("run") == head("1.0")
        client.close()
        relay.process.send_signal(signal.SIGTERM)
        assert relay.process.wait(60) == 0
