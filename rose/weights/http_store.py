"""The client side of the relay: a :class:`~rose.weights.store.ObjectStore` over HTTP.

A read that breaks goes on by Range from the byte where it broke; a relay that restarts in between is not noticed.
Of several relays the first that answers is asked (:mod:`rose.weights.addresses`): a transfer that one of them breaks off goes on at another.
A write is repeated whole; when the answer to an earlier try was lost, a Conflict is checked against the bytes that
are there before it is reported.  Only transport faults and 5xx are retried, with growing pauses, until
``patience_s`` has passed without progress; then CapacityError says that the relay cannot be reached.

Blocking; one kept-alive connection per thread.  The standard library's client: gigabytes go from and into buffers that are given,
without a copy, which a general client would make.  The token travels in a header and is in no message.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from rose.errors import (
    CapacityError,
    ConfigError,
    Conflict,
    Gone,
    NotFound,
    RequestError,
    SectionCorrupt,
    TooLarge,
    Unauthorized,
)
from rose.lineage import WeightVersion
from rose.weights import ending, manifest, upcoming
from rose.weights.addresses import Preference
from rose.weights.manifest import MAX_OBJECT_BYTES, Head, check_key, check_run_id
from rose.weights.store import (
    MAX_HEAD_BYTES,
    Buffer,
    Content,
    ObjectStat,
    check_lease,
    check_prefix,
    check_range,
)
from rose.weights.upcoming import Upcoming
from rose.wire.errors import read_refusal

T = TypeVar("T")
MAX_LIST_BYTES = 64 << 20
_MAX_ERROR_BYTES = 64 << 10
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0
_LEAST_PATIENCE_S = 1.0
"""Of a poll that is over sooner: a relay that is started again is not away."""
_CONNECT_S = 5.0
_PIECE_BYTES = 256 << 10
_MAX_DISTRUSTED = 1000
_BROKEN = (OSError, http.client.HTTPException)
_ERRORS: dict[int, type[RequestError]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: TooLarge,
}


class _Retry(Exception):
    """A fault that another try may cure."""


class _Stale(_Retry):
    """A kept connection that the relay had closed meanwhile: it says nothing of how the relay is."""


class _Keys(msgspec.Struct):
    keys: list[str]


class _Runs(msgspec.Struct):
    runs: list[str]


class _Held(msgspec.Struct):
    versions: list[str]


@dataclass(frozen=True, slots=True)
class _Address:
    host: str
    port: int | None
    path: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> _Address:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"{url!r} is not of the form http://HOST:PORT", field="relay.url")
        return cls(parts.hostname, parts.port, parts.path.rstrip("/"), parts.scheme == "https")


class HttpStore:
    """See the module's docstring.

    Args:
        url: ``http://host:port`` or ``https://...`` of a relay, with an optional path prefix; or several with commas between them,
            the preferred first: the nearest relay, its parent, the root.
        token: Bearer token of role relay to read, of role publish to write too.
        timeout_s: Of one socket operation, not of a transfer.
        patience_s: How long to go on trying without progress.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = 30.0, patience_s: float = 20.0) -> None:
        urls = [each.strip().rstrip("/") for each in url.split(",") if each.strip()] or [url]
        self.url = ",".join(urls)
        self._preference = Preference([_Address.parse(each) for each in urls])
        self._preference_lock = threading.Lock()
        self._distrusted: set[str] = set()
        if not token.isascii() or any(char.isspace() or not char.isprintable() for char in token):
            raise ConfigError(
                "has a space or a line break in it", field="token", fix="strip what was read of a file"
            )
        self._token = token
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._local = threading.local()
        self._closed = threading.Event()
        self._open: weakref.WeakSet[http.client.HTTPConnection] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"

    def close(self) -> None:
        """End for good: calls that wait in other threads fail at once with CapacityError, as do later ones."""
        self._closed.set()
        for connection in list(self._open):
            sock = connection.sock
            if sock is not None:
                try:
                    sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads it; close alone does not
                except OSError:
                    pass

    # -- objects

    def put_new(self, key: str, data: Buffer) -> None:
        path = f"/objects/{check_key(key)}"
        body = memoryview(data).cast("B")
        headers = {"X-Rose-Xxh3": manifest.digest(body), "Content-Type": "application/octet-stream"}
        lost_answer = False
        patience = self._patience()
        while True:
            try:
                self._send("PUT", path, body=body, headers=headers)
                return
            except Conflict:
                # Our own earlier try may have arrived though its answer did not.
                if lost_answer and self.get(key, max_bytes=len(body)) == body:
                    return
                raise
            except _Retry as error:
                lost_answer = True
                patience.pause(self.url, error)

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> Content:
        return self._read(key, 0, None, max_bytes)

    def get_range(self, key: str, offset: int, nbytes: int) -> Content:
        if offset < 0 or nbytes < 0:
            check_range(key, offset, nbytes, 0)
        if nbytes == 0:
            check_range(key, offset, 0, self.stat(key).nbytes)
            return b""
        return self._read(key, offset, nbytes, nbytes)

    def _read(self, key: str, offset: int, nbytes: int | None, max_bytes: int) -> bytearray:
        """``nbytes`` from ``offset`` (None: to the end), however often the connection breaks."""
        path = f"/objects/{check_key(key)}"
        buffer: bytearray | None = None if nbytes is None else bytearray(nbytes)
        done = 0
        patience = self._patience()
        while buffer is None or done < len(buffer):
            headers = self._past_caches(key) if offset + done == 0 else {}
            if buffer is not None:
                headers["Range"] = f"bytes={offset + done}-{offset + len(buffer) - 1}"
            try:
                with self._request("GET", path, headers=headers) as response:
                    length = response.length
                    if length is None:
                        raise _Retry("answer without a length")
                    if buffer is None:
                        if length > max_bytes:
                            raise TooLarge(f"{length} bytes, at most {max_bytes}", field=key)
                        buffer = bytearray(length)
                    elif response.status != 206 or length != len(buffer) - done:
                        raise RequestError(
                            f"bytes {offset}+{len(buffer)} are not all there", field=key, status=416
                        )
                    view = memoryview(buffer)
                    while done < len(buffer):
                        count = response.readinto(view[done:])
                        if not count:
                            raise _Retry(f"connection ended {len(buffer) - done} bytes early")
                        done += count
                        patience.progress()
            except (_Retry, *_BROKEN) as error:
                patience.pause(self.url, error)
        return buffer

    def stream(self, key: str, begin: Callable[[int], None], write: Callable[[memoryview], None]) -> None:
        """Read a whole object in pieces, as they arrive; what ``begin`` and ``write`` raise ends it.

        Args:
            begin: Told the object's size before the first piece.
            write: Given the pieces in order; the memory is used again.
        """
        path = f"/objects/{check_key(key)}"
        piece = memoryview(bytearray(_PIECE_BYTES))
        total: int | None = None
        done = 0
        patience = self._patience()
        while total is None or done < total:
            headers = {"Range": f"bytes={done}-{total - 1}"} if total is not None else self._past_caches(key)
            try:
                with self._request("GET", path, headers=headers) as response:
                    if response.length is None:
                        raise _Retry("answer without a length")
                    if total is None:
                        total = response.length
                        begin(total)
                    elif response.status != 206 or response.length != total - done:
                        raise RequestError("is of another size now", field=key, status=416)
                    while done < total:
                        count = response.readinto(piece[: total - done])
                        if not count:
                            raise _Retry(f"connection ended {total - done} bytes early")
                        write(piece[:count])
                        done += count
                        patience.progress()
            except (_Retry, *_BROKEN) as error:
                patience.pause(self.url, error)

    def distrust(self, key: str) -> None:
        """What was read of ``key`` is damaged: the next read from its start asks relays not to answer from what they keep."""
        if len(self._distrusted) < _MAX_DISTRUSTED:
            self._distrusted.add(check_key(key))

    def _past_caches(self, key: str) -> dict[str, str]:
        if key not in self._distrusted:
            return {}
        self._distrusted.discard(key)
        return {"Cache-Control": "no-cache"}

    def stat(self, key: str) -> ObjectStat:
        length = self._call("HEAD", f"/objects/{check_key(key)}", 0, is_measured=True)[1]["Content-Length"]
        return ObjectStat(nbytes=int(length))

    def list(self, prefix: str) -> list[str]:
        query = urlencode({"prefix": check_prefix(prefix)})
        data, _ = self._call("GET", f"/objects?{query}", MAX_LIST_BYTES)
        return _decode(data, _Keys).keys

    def delete(self, key: str) -> bool:
        try:
            self._call("DELETE", f"/objects/{check_key(key)}", 0)
        except NotFound:
            return False
        return True

    # -- heads and leases

    def set_head(self, head: Head, *, expected: WeightVersion | None) -> None:
        query = urlencode({"expected": "none" if expected is None else str(expected)})
        path = f"/runs/{check_run_id(head.run_id)}/head?{query}"
        self._call(
            "PUT", path, 0, body=manifest.encode(head)
        )  # bit-equal retries succeed by the store's rule

    def get_head(self, run_id: str) -> Head | None:
        return self._head(run_id, {})

    def runs(self) -> list[str]:
        data, _ = self._call("GET", "/runs", MAX_LIST_BYTES)
        return _decode(data, _Runs).runs

    def wait_head(self, run_id: str, after: WeightVersion | None, timeout_s: float) -> Head | None:
        query = {} if after is None else {"after": str(after)}
        return self._polled(timeout_s, lambda wait, patience_s: self._head(run_id, query | wait, patience_s))

    def upcoming(self, run_id: str, mark: str, timeout_s: float) -> Upcoming | None:
        path = f"/runs/{check_run_id(run_id)}/upcoming"

        def ask(wait: dict[str, str], patience_s: float) -> Upcoming | None:
            url = f"{path}?{urlencode({'mark': mark} | wait)}"
            data, _ = self._call("GET", url, upcoming.MAX_BYTES, patience_s=patience_s)
            return upcoming.decode(data, run_id) if data else None

        return self._polled(timeout_s, ask)

    def _polled(self, timeout_s: float, ask: Callable[[dict[str, str], float], T | None]) -> T | None:
        """The first answer that says something."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            # A poll stays below the socket's own timeout, so that a dead relay is told from a quiet one.
            patience_s = max(_LEAST_PATIENCE_S, left_s)  # the caller's own end comes first
            found = ask({"wait_s": f"{min(left_s, self._timeout_s / 2):.3f}"}, patience_s)
            if found is not None or left_s <= 0:
                return found

    def _head(self, run_id: str, query: Mapping[str, str], patience_s: float | None = None) -> Head | None:
        path = f"/runs/{check_run_id(run_id)}/head"
        url = f"{path}?{urlencode(query)}" if query else path
        data, _ = self._call("GET", url, MAX_HEAD_BYTES, patience_s=patience_s)
        return manifest.decode_head(data, run_id) if data else None

    def lease(self, run_id: str, holder: str, version: WeightVersion | None, ttl_s: float) -> None:
        check_lease(run_id, holder, ttl_s)
        record = {
            "run_id": run_id,
            "holder": holder,
            "version": None if version is None else str(version),
            "ttl_s": ttl_s,
        }
        self._call("POST", "/leases", 0, body=msgspec.json.encode(record))

    def leases(self, run_id: str) -> list[WeightVersion]:
        data, _ = self._call("GET", f"/leases?{urlencode({'run_id': check_run_id(run_id)})}", MAX_LIST_BYTES)
        texts = _decode(data, _Held).versions
        try:
            return [WeightVersion.parse(text) for text in texts]
        except RequestError as error:
            raise _nonsense(error) from None

    # -- transport

    def _patience(self, most_s: float | None = None) -> _Patience:
        patience_s = self._patience_s if most_s is None else min(self._patience_s, most_s)
        return _Patience(patience_s, self._closed, len(self._preference.all))

    def _call(
        self,
        method: str,
        path: str,
        max_bytes: int,
        body: Buffer | None = None,
        *,
        patience_s: float | None = None,
        is_measured: bool = False,
    ) -> tuple[bytes, Mapping[str, str]]:
        """A request that may simply be repeated, with a small answer.  ``is_measured``: one that says no length is none."""
        patience = self._patience(patience_s)
        while True:
            try:
                data, headers = self._send(method, path, body=body, max_bytes=max_bytes)
                if is_measured and not (headers["Content-Length"] or "").isdecimal():
                    raise _Retry("answer without a length")
                return data, headers
            except _Retry as error:
                patience.pause(self.url, error)

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: Buffer | None = None,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = 0,
    ) -> tuple[bytes, Mapping[str, str]]:
        try:
            with self._request(method, path, body=body, headers=headers or {}) as response:
                data = response.read(max_bytes + 1)
                if len(data) > max_bytes and method != "HEAD":
                    raise SectionCorrupt(f"an answer of more than {max_bytes} bytes", field=path)
                if response.length:  # less came than was announced
                    raise _Retry("answer cut short")
                return data, response.headers
        except _BROKEN as error:
            raise _Retry(str(error)) from error

    def _request(
        self, method: str, path: str, *, body: Buffer | None = None, headers: Mapping[str, str]
    ) -> _Response:
        """Send, and raise the error that the status means.  Raises _Retry or a transport error when broken."""
        if self._closed.is_set():
            raise CapacityError("store is closed", retry_after_s=None)
        with self._preference_lock:
            number = self._preference.current(time.monotonic())
        try:
            response = self._ask(number, method, path, body, headers)
        except _Stale:
            raise
        except (_Retry, *_BROKEN):
            self._heard(number, False)
            raise
        self._heard(number, True)
        response.broke = lambda: self._heard(number, False)
        return response

    def _heard(self, number: int, well: bool) -> None:
        with self._preference_lock:
            if well:
                self._preference.answered(number)
            else:
                self._preference.failed(number, time.monotonic())

    def _ask(
        self, number: int, method: str, path: str, body: Buffer | None, headers: Mapping[str, str]
    ) -> _Response:
        address = self._preference.all[number]
        connection = self._connection(number)
        response = _Response(connection)
        with response.on_error_close():
            is_kept = connection.sock is not None
            if not is_kept:
                # A host that is gone is told from one that is slow: there may be another.
                connection.timeout = min(_CONNECT_S, self._timeout_s)
                connection.connect()
                connection.sock.settimeout(self._timeout_s)
            all_headers = {"Authorization": f"Bearer {self._token}", **headers}
            try:
                try:
                    connection.request(method, quote(address.path) + path, body=body, headers=all_headers)
                except (BrokenPipeError, ConnectionResetError):
                    # A relay may refuse an upload before its end; the answer is then waiting to be read.
                    if body is None:
                        raise
                response.start()
            except ConnectionError as error:
                raise _Stale(str(error)) if is_kept else error from error
            if response.status >= 300:
                raise response.error(path, method)
        return response

    def _connection(self, number: int) -> http.client.HTTPConnection:
        """This thread's, to that address."""
        connections = getattr(self._local, "connections", None)
        if connections is None:
            connections = self._local.connections = {}
        connection = connections.get(number)
        if connection is None:
            address = self._preference.all[number]
            kind = http.client.HTTPSConnection if address.tls else http.client.HTTPConnection
            connection = connections[number] = kind(address.host, address.port)
            self._open.add(connection)
        return connection


class _Response:
    """One answer; leaves the connection reusable only when it was read to its end."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._response: Any = None
        self.broke: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._response = self._connection.getresponse()
        self.status: int = self._response.status
        self.headers = self._response.headers

    @property
    def length(self) -> int | None:
        """Bytes still to come."""
        return self._response.length

    def read(self, nbytes: int) -> bytes:
        return self._response.read(nbytes)

    def readinto(self, view: memoryview) -> int:
        return self._response.readinto(view)

    def error(self, path: str, method: str) -> Exception:
        """What this failure means, in our words; the relay's message is kept, bounded."""
        text = self.read(_MAX_ERROR_BYTES)
        said = read_refusal(text)
        message = said.message or f"relay answered {self.status}"
        field, code = said.field or path.partition("?")[0], said.code
        if (
            self.status == 507 and method != "GET"
        ):  # one whose cache is too small is no obstacle at its parent
            return CapacityError(message, status=507, field=field)
        if self.status >= 500:
            return _Retry(message)
        if self.status == 429:
            return CapacityError(message, status=429, field=field)
        if code == SectionCorrupt.code:
            return SectionCorrupt(message, field=field)
        kind = _ERRORS.get(self.status)
        if kind is not None:
            return kind(message, field=field)
        return RequestError(message, field=field, status=self.status)

    def on_error_close(self) -> _CloseOnError:
        return _CloseOnError(self._connection)

    def __enter__(self) -> _Response:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, (_Retry, *_BROKEN)):
            self.broke()
        if error is not None or not self._response.isclosed():
            self._connection.close()


class _CloseOnError:
    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self._connection.close()


class _Patience:
    """Pauses between tries, and the end of them; each address is tried before the first."""

    def __init__(self, patience_s: float, closed: threading.Event, num_addresses: int) -> None:
        self._patience_s, self._closed, self._num_addresses = patience_s, closed, num_addresses
        self.progress()

    def progress(self) -> None:
        self._until_s = time.monotonic() + self._patience_s
        self._pause_s = _FIRST_PAUSE_S
        self._num_tries = 0

    def pause(self, url: str, error: Exception) -> None:
        """Wait before the next try, or give up."""
        if self._closed.is_set():
            raise CapacityError("store is closed", retry_after_s=None) from error
        self._num_tries += 1
        if self._num_tries < self._num_addresses:
            return
        if time.monotonic() + self._pause_s > ending.bounded(self._until_s):
            raise CapacityError(
                f"relay {url} cannot be reached: {str(error) or type(error).__name__}"
            ) from error
        self._closed.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise _nonsense(error) from None


def _nonsense(error: Exception) -> SectionCorrupt:
    return SectionCorrupt(f"relay answered nonsense: {error}", field="relay")
