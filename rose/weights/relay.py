"""The embedded relay: a folder of weight objects behind HTTP, one process per cluster.

It moves bytes: uploads stream to a temporary file and appear whole, downloads go out by ``sendfile`` with Range
(:mod:`rose.weights.sending`), a reader may wait for a newer head (long poll).  It understands no manifest and decides nothing about versions beyond
the store's rules (:mod:`rose.weights.store`), which it inherits from :class:`FileStore`.

Routes, all behind a bearer token but the last two: of role ``relay`` or ``publish`` to read and to lease, of role ``publish`` to write::

    PUT GET HEAD DELETE /objects/{key}      201, 409 exists; Range; X-Rose-Xxh3 is checked on the way in
    GET    /objects?prefix=RUN/             {"keys": [...]}
    GET    /runs                            {"runs": [...]} that have a head
    PUT    /runs/{run_id}/head?expected=A.V|none
    GET    /runs/{run_id}/head?after=A.V&wait_s=S     204 when nothing newer
    GET    /runs/{run_id}/upcoming?mark=M&wait_s=S    {"mark", "objects": [[key, nbytes]]} that no head names yet; 204 when nothing since M
    POST   /leases  {run_id, holder, version|null, ttl_s};  GET /leases?run_id=
    GET    /healthz, /metrics

Errors are JSON in OpenAI's shape.  State is the folder: a relay may be killed at any moment and started again, and
readers and writers go on where they were.  One relay owns a folder (``flock``).  A relay that keeps copies of another's
objects is :mod:`rose.weights.pull_through`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, BinaryIO

import msgspec
import xxhash
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from rose.auth import Tokens
from rose.errors import (
    CapacityError,
    ConfigError,
    NotFound,
    RequestError,
    RoseError,
    SectionCorrupt,
    TooLarge,
)
from rose.lineage import WeightVersion
from rose.open_files import raise_limit
from rose.signatures import PublicKeys
from rose.weights import manifest
from rose.weights.file_store import FileStore
from rose.weights.manifest import Head, check_key, check_run_id
from rose.weights.sealed import believer, check_head
from rose.weights.sending import OBJECT_TYPE, Arriving, OpenObject, Sender
from rose.weights.store import MAX_HEAD_BYTES, ObjectStat, check_lease, check_prefix
from rose.weights.upcoming import Upcoming, UpcomingBook, version_of
from rose.wire.errors import error_body

MAX_WAIT_S = 60.0
MAX_WAITERS = 1 << 16
_WRITE_BYTES, _WRITE_S = (
    4 << 20,
    0.02,
)  # of an upload, gathered before a thread writes them: readers may wait for them
_STALL_S = 60.0  # an upload that brings nothing for this long is dropped
_SHUTDOWN_S = 2.0  # transfers resume elsewhere or later; nothing is worth a slow stop
_METHODS = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})
_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Lease(msgspec.Struct):
    """Of a node, which may be newer than this relay: what else it says is passed over."""

    run_id: str
    holder: str
    version: str | None
    ttl_s: float


class Relay:
    """The aiohttp application around one :class:`FileStore`; see the module's docstring.

    Args:
        store: Owned by this relay from :meth:`open` to :meth:`close`.
        tokens: Who may read (role ``relay``) and write (role ``publish``).
        trusted: Take only heads that one of these keys signed, and show no others.  Readers check for themselves; this keeps a
            stranger with the token from standing in the trainer's way.
    """

    def __init__(self, store: FileStore, tokens: Tokens, trusted: PublicKeys | None = None) -> None:
        self.store = store
        self._tokens, self._trusted = tokens, trusted
        if trusted is not None:
            store.believes = believer(trusted)
        self._moved = asyncio.Event()  # set and replaced whenever some head moves
        self._stirred = asyncio.Event()  # and whenever there is news of what comes
        self._upcoming = UpcomingBook()
        self._arriving: dict[str, Arriving] = {}
        self._stopping = asyncio.Event()
        self._num_waiters = 0
        self._sender = Sender()
        self._lock_file: BinaryIO | None = None
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rose_relay_requests", "Requests answered", ["method", "status"], registry=self._registry
        )
        self._bytes = Counter("rose_relay_bytes", "Object bytes", ["direction"], registry=self._registry)
        gauge = Gauge("rose_relay_stored_bytes", "Bytes of objects held", registry=self._registry)
        gauge.set_function(lambda: self.store.total_bytes)
        gauge = Gauge("rose_relay_waiting_readers", "Open long polls", registry=self._registry)
        gauge.set_function(lambda: self._num_waiters)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._boundary], client_max_size=MAX_HEAD_BYTES)
        app.router.add_put("/objects/{key:.+}", self._put_object)
        app.router.add_get("/objects/{key:.+}", self._get_object)  # and HEAD
        app.router.add_delete("/objects/{key:.+}", self._delete_object)
        app.router.add_get("/objects", self._list_objects)
        app.router.add_get("/runs", self._list_runs)
        app.router.add_put("/runs/{run_id}/head", self._put_head)
        app.router.add_get("/runs/{run_id}/head", self._get_head)
        app.router.add_get("/runs/{run_id}/upcoming", self._get_upcoming)
        app.router.add_post("/leases", self._post_lease)
        app.router.add_get("/leases", self._get_leases)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/metrics", self._metrics)
        app.cleanup_ctx.append(self._own_folder)
        app.on_response_prepare.append(self._account)
        app.on_shutdown.append(self._stop_waiters)
        return app

    # -- objects

    async def _put_object(self, request: web.Request) -> web.StreamResponse:
        key = check_key(request.match_info["key"])
        nbytes = request.content_length
        if nbytes is None:
            raise RequestError("is needed", field="Content-Length", status=411)
        checksum = xxhash.xxh3_128()
        upload = self.store.begin(key, nbytes)
        arriving = Arriving()
        try:
            upload.write(b"")
            arriving.begun(nbytes, upload.path)
            await self._announce(key, nbytes, arriving)
            async for chunk in _gathered(request, nbytes):
                checksum.update(chunk)
                await asyncio.to_thread(upload.write, chunk)
                arriving.arrived(len(chunk))
            expected = request.headers.get("X-Rose-Xxh3")
            if expected is not None and checksum.hexdigest() != expected:
                raise SectionCorrupt("bytes do not match X-Rose-Xxh3", field=key, fix="send it again")
            await asyncio.to_thread(upload.commit)
            arriving.committed = True
        except (ConnectionError, TimeoutError) as error:
            raise RequestError("upload ended early", field=key, status=408) from error
        finally:
            upload.discard()
            self._ended(key, arriving)
        self._bytes.labels("in").inc(nbytes)
        return web.Response(status=201)

    async def _announce(self, key: str, nbytes: int, arriving: Arriving) -> None:
        owner = version_of(key)
        if owner is None or key in self._arriving:
            return
        head = await self._head_of(owner[0])
        if self._upcoming.begun(key, nbytes, None if head is None else head.identity):
            self._arriving[key] = arriving
            self._stir()

    def _ended(self, key: str, arriving: Arriving) -> None:
        if not arriving.committed:
            arriving.failed(RequestError("upload ended early", field=key, status=408))
        if self._arriving.get(key) is arriving:
            del self._arriving[key]
            if not arriving.committed and self._upcoming.gone(key):
                self._stir()

    async def _get_object(self, request: web.Request) -> web.StreamResponse:
        key = check_key(request.match_info["key"])
        if request.method == "HEAD":
            response = web.StreamResponse(headers={"Content-Type": OBJECT_TYPE, "Accept-Ranges": "bytes"})
            response.content_length = (await self._stat(key)).nbytes
            await response.prepare(request)
            return response
        return await self._sender.send(request, await self._source(key, request))

    async def _stat(self, key: str) -> ObjectStat:
        return self.store.stat(key)

    async def _source(self, key: str, request: web.Request) -> OpenObject:
        """Where the bytes of an object come from; raises NotFound."""
        with contextlib.suppress(NotFound):
            return self._whole(key)
        arriving = self._arriving.get(key)
        if arriving is not None:
            with contextlib.suppress(FileNotFoundError):
                return await arriving.source()
        return self._whole(key)

    def _whole(self, key: str) -> OpenObject:
        file = self.store.open(key)
        return OpenObject(file, os.fstat(file.fileno()).st_size)

    async def _delete_object(self, request: web.Request) -> web.StreamResponse:
        key = request.match_info["key"]
        if not self.store.delete(key):
            raise NotFound("no such object", field=key)
        if self._upcoming.gone(key):
            self._stir()
        return web.Response(status=204)

    async def _list_objects(self, request: web.Request) -> web.StreamResponse:
        prefix = check_prefix(request.query.get("prefix", ""))
        return _json({"keys": await self._keys(prefix)})

    async def _keys(self, prefix: str) -> list[str]:
        return await asyncio.to_thread(self.store.list, prefix)

    # -- heads

    async def _list_runs(self, request: web.Request) -> web.StreamResponse:
        return _json({"runs": await self._names()})

    async def _names(self) -> list[str]:
        return await asyncio.to_thread(self.store.runs)

    async def _put_head(self, request: web.Request) -> web.StreamResponse:
        run_id = check_run_id(request.match_info["run_id"])
        text = request.query.get("expected", "")
        expected = None if text == "none" else WeightVersion.parse(text, field="expected")
        head = manifest.decode_head(await request.read(), run_id)
        if self._trusted is not None:
            check_head(head, self._trusted)
        await asyncio.to_thread(self.store.set_head, head, expected=expected)
        self._wake_waiters()
        if self._upcoming.moved(run_id, head.identity):
            self._stir()
        _log.info("run %s is at %s", run_id, head.identity)
        return web.Response(status=200)

    async def _get_head(self, request: web.Request) -> web.StreamResponse:
        run_id = check_run_id(request.match_info["run_id"])
        after = request.query.get("after")
        newer_than = None if after is None else WeightVersion.parse(after, field="after")
        deadline_s = asyncio.get_running_loop().time() + _number(request, "wait_s", MAX_WAIT_S)
        while True:
            moved = self._moved  # taken before the read: no wake-up is lost
            head = await self._head_of(run_id)
            if head is not None and (newer_than is None or head.identity > newer_than):
                return web.Response(body=manifest.encode(head), content_type="application/json")
            if not await self._wait(moved, deadline_s):
                return web.Response(status=204)

    async def _wait(self, event: asyncio.Event, deadline_s: float) -> bool:
        """Until ``event``, or nearly ``deadline_s``; False where that is over, or the relay ends."""
        left_s = deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0 or self._stopping.is_set():
            return False
        if self._num_waiters >= MAX_WAITERS:
            raise CapacityError(f"{MAX_WAITERS} readers wait already", status=429)
        self._num_waiters += 1
        try:
            async with asyncio.timeout(left_s):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            self._num_waiters -= 1
        return True

    async def _get_upcoming(self, request: web.Request) -> web.StreamResponse:
        run_id = check_run_id(request.match_info["run_id"])
        mark = request.query.get("mark", "")
        deadline_s = asyncio.get_running_loop().time() + _number(request, "wait_s", MAX_WAIT_S)
        while True:
            stirred = self._stirred  # taken before the read: no wake-up is lost
            found = await self._upcoming_of(run_id)
            if found.mark != mark:
                return web.Response(body=msgspec.json.encode(found), content_type="application/json")
            if not await self._wait(stirred, deadline_s):
                return web.Response(status=204)

    async def _upcoming_of(self, run_id: str) -> Upcoming:
        return self._upcoming.of(run_id)

    async def _head_of(self, run_id: str) -> Head | None:
        return self.store.believed_head(run_id)

    # -- leases

    async def _post_lease(self, request: web.Request) -> web.StreamResponse:
        try:
            lease = msgspec.json.decode(await request.read(), type=_Lease)
        except msgspec.DecodeError as error:
            raise RequestError(str(error), field="body") from None
        version = None if lease.version is None else WeightVersion.parse(lease.version)
        check_lease(lease.run_id, lease.holder, lease.ttl_s)
        await self._hold(lease.run_id, lease.holder, version, lease.ttl_s)
        return web.Response(status=204)

    async def _hold(self, run_id: str, holder: str, version: WeightVersion | None, ttl_s: float) -> None:
        await asyncio.to_thread(self.store.lease, run_id, holder, version, ttl_s)

    async def _get_leases(self, request: web.Request) -> web.StreamResponse:
        run_id = check_run_id(request.query.get("run_id", ""))
        held = await self._held(run_id)
        return _json({"versions": [str(version) for version in held]})

    async def _held(self, run_id: str) -> list[WeightVersion]:
        return await asyncio.to_thread(self.store.leases, run_id)

    # -- the rest

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return _json({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")

    @web.middleware
    async def _boundary(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """The one place where requests are let in and errors become answers."""
        try:
            if request.path not in ("/healthz", "/metrics"):
                self._tokens.check(request.headers.get("Authorization"), *_roles_for(request))
            response = await handler(request)
        except RoseError as error:
            response = _error(error.status if isinstance(error, RequestError) else 400, error)
        except web.HTTPException as error:
            response = _error(error.status, RequestError(error.reason, field=request.path))
        except OSError as error:
            # The folder was taken from under us, or the disk failed; a reader may try another relay.
            _log.warning("%s %s: %s", request.method, request.path, error)
            response = _error(503, CapacityError(f"storage: {error.strerror}"))
        return response

    async def _account(self, request: web.Request, response: web.StreamResponse) -> None:
        """Called when the headers go out: only then does a file's answer know its status and length."""
        method = (
            request.method if request.method in _METHODS else "other"
        )  # a caller must not name our series
        self._requests.labels(method, str(response.status)).inc()
        if response.content_type == OBJECT_TYPE and request.method == "GET" and response.status < 300:
            self._bytes.labels("out").inc(response.content_length or 0)

    async def _own_folder(self, app: web.Application) -> AsyncIterator[None]:
        with (self.store.directory / "relay.lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{self.store.directory} is in use by another relay", field="directory"
                ) from None
            self.store.remove_temporaries()
            yield
            self._sender.close()

    async def _stop_waiters(self, app: web.Application) -> None:
        self._stopping.set()
        self._wake_waiters()
        self._stir()

    def _wake_waiters(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def _stir(self) -> None:
        self._stirred.set()
        self._stirred = asyncio.Event()


def _roles_for(request: web.Request) -> tuple[str, ...]:
    """Reading and holding what one reads takes less than writing."""
    reads = request.method in ("GET", "HEAD") or request.path == "/leases"
    return ("relay", "publish") if reads else ("publish",)


async def _gathered(request: web.Request, nbytes: int) -> AsyncIterator[bytes]:
    """The body in pieces of some megabytes; a body that is longer or shorter than announced is refused."""
    buffer = bytearray()
    total = 0
    now_s = asyncio.get_running_loop().time
    written_s = now_s()
    while True:
        async with asyncio.timeout(_STALL_S):
            chunk = await request.content.readany()
        total += len(chunk)
        if total > nbytes:
            raise TooLarge(f"more than the announced {nbytes} bytes", field=request.path)
        buffer += chunk
        if buffer and (len(buffer) >= _WRITE_BYTES or now_s() - written_s >= _WRITE_S or not chunk):
            yield bytes(buffer)
            buffer.clear()
            written_s = now_s()
        if not chunk:
            return


def _number(request: web.Request, name: str, limit: float) -> float:
    text = request.query.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        raise RequestError(f"'{text[:40]}' is not a number", field=name) from None
    if not 0 <= value <= limit:  # NaN fails too
        raise RequestError(f"must be within 0..{limit:.0f}, got {text[:40]}", field=name)
    return value


def _json(table: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(table), content_type="application/json")


def _error(status: int, error: RoseError) -> web.Response:
    headers = {"Retry-After": "1"} if isinstance(error, CapacityError) else {}
    body = msgspec.json.encode(error_body(error, status))
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


async def serve(relay: Relay, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Start listening; returns the runner (``await runner.cleanup()`` stops it) and the port taken.

    Raises:
        ConfigError: The port is in use, or the folder belongs to another relay.
    """
    runner = web.AppRunner(
        relay.application(), access_log=None, shutdown_timeout=_SHUTDOWN_S, lingering_time=_SHUTDOWN_S
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", field="relay.port") from error
    return runner, runner.addresses[0][1]


def run_relay(
    make: Callable[[], Relay], *, host: str, port: int, started: Callable[[int], None] = lambda port: None
) -> None:
    """Serve until SIGTERM or SIGINT; waiting readers are answered, open transfers get two seconds.

    Args:
        make: The relay, made where its event loop runs.
    """

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        runner, taken = await serve(make(), host, port)
        try:
            started(taken)
            await stop.wait()
        finally:
            await runner.cleanup()

    raise_limit(MAX_WAITERS // 16)
    asyncio.run(main())
