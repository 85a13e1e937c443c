"""A relay whose store is another relay: it pulls an object once and serves it to as many as ask.

A tree of them grows a fan-out: nobody serves more than its own children.  Above it may be any store that
:func:`rose.weights.stores.open_store` opens: a relay, several in order of preference (the parent, then its parent), an S3 bucket.

* **Objects.**  The first who asks starts the pull; who asks meanwhile waits for the same one, and all of them are sent
  its bytes as they arrive.  What has arrived whole stays in the folder, the most recently used first
  (:mod:`rose.weights.cache`).  A reader that found damage asks with ``Cache-Control: no-cache``: the copy is pulled anew, and
  so is the one above it.
* **Heads.**  One long poll upwards for each run that somebody asks for, however many wait here.  While nobody above answers,
  readers hear 503 and go to their next address; versions that are here already are served on.
* **What comes** is asked for upwards in the same way; an object that a reader here pulls ahead is passed on while the trainer still sends it.
* **Leases.**  One upwards for each version that somebody here holds, longer than any of theirs; it ends soon after the last of them.
* **Writes** are refused: a trainer publishes at the root.

It knows no more of contents than any relay: readers check every byte.  Its state is a cache: it may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

from aiohttp import web

from rose.auth import Tokens
from rose.errors import CapacityError, Conflict, NotFound, RequestError, RoseError
from rose.lineage import WeightVersion
from rose.weights.cache import CacheBook
from rose.weights.file_store import FileStore, Upload
from rose.weights.leases import MAX_LEASE_S, LeaseBook, holder_name
from rose.weights.manifest import Head, check_run_id
from rose.weights.relay import Relay
from rose.weights.sending import Arriving, OpenObject
from rose.weights.store import ObjectStat, ObjectStore, check_prefix
from rose.weights.upcoming import Upcoming

T = TypeVar("T")
_log = logging.getLogger(__name__)

MAX_RUNS = 64
"""Followed at a time; a thread and a connection upwards each."""
MAX_PULLS = 1024
_PULL_THREADS = 16
_PIECE_BYTES = 8 << 20  # from a store that does not stream
_WAIT_S = 25.0
_RETRY_S = 0.5
_UNUSED_S = 300.0  # a run that nobody has asked for is not followed any more
_LEASE_SLACK_S = 60.0
_MAX_LEASES_ABOVE = 1024
_RENEWALS, _RENEWALS_S = 3, 60.0  # how often an object is pulled again because readers say so


@runtime_checkable
class _Streams(Protocol):
    def stream(self, key: str, begin: Callable[[int], None], write: Callable[[memoryview], None]) -> None: ...


class _Run:
    """What is known of a run: its head, or what comes.  In the event loop only."""

    def __init__(self, now_s: float) -> None:
        self.head: Head | None = None
        self.upcoming: Upcoming | None = None
        self.error: RoseError | None = None
        self.heard = asyncio.Event()
        """Set with the first answer, or error."""
        self.used_at_s = now_s
        self.task: asyncio.Task[None] | None = None


class PullThroughRelay(Relay):
    """See the module.

    Args:
        store: Of its own: the cache, from an earlier process too.
        tokens: Who may; the role is as at any relay.
        above: The store that it copies from; closed with the relay.
        limit_bytes: Of objects that are kept.
        name: What is copied, in words: for refusals.
    """

    def __init__(
        self, store: FileStore, tokens: Tokens, above: ObjectStore, limit_bytes: int, *, name: str
    ) -> None:
        super().__init__(store, tokens)
        self._above, self._name = above, name
        self._pulls: dict[str, Arriving] = {}
        self._runs: dict[str, _Run] = {}
        self._ahead: dict[str, _Run] = {}
        self._book_lock = threading.Lock()
        self._book = CacheBook(limit_bytes)
        self._renewed: dict[str, deque[float]] = {}
        self._leases = LeaseBook()
        self._leases_above: dict[tuple[str, WeightVersion], float] = {}
        self._lease_lock = asyncio.Lock()
        self._holder = f"relay-{holder_name(store.directory)}"
        self._pull_threads = ThreadPoolExecutor(_PULL_THREADS, thread_name_prefix="rose-pull")
        self._head_threads = ThreadPoolExecutor(2 * MAX_RUNS + 8, thread_name_prefix="rose-head")

    def application(self) -> web.Application:
        app = super().application()
        app.cleanup_ctx.append(self._above_while_running)
        return app

    # -- objects

    async def _source(self, key: str, request: web.Request) -> OpenObject:
        if "no-cache" in request.headers.get("Cache-Control", ""):
            self._renew(key)
        for _ in range(
            3
        ):  # what was there may be evicted, and what arrives may have arrived, before it is opened
            with contextlib.suppress(NotFound):
                file = self.store.open(key)
                with self._book_lock:
                    self._book.used(key)
                return OpenObject(file, os.fstat(file.fileno()).st_size)
            pull = self._pulls.get(key) or self._start(key)
            with contextlib.suppress(FileNotFoundError):
                return await pull.source()
        raise CapacityError("objects are evicted as fast as they arrive", field=key)

    async def _stat(self, key: str) -> ObjectStat:
        try:
            return self.store.stat(key)
        except NotFound:
            return await self._ask(self._above.stat, key)

    def _renew(self, key: str) -> None:
        """A reader found damage.  What is here may be damaged, or what it was pulled from."""
        now_s = time.monotonic()
        times = self._renewed.setdefault(key, deque(maxlen=_RENEWALS))
        if key in self._pulls or (len(times) == _RENEWALS and now_s - times[0] < _RENEWALS_S):
            return
        times.append(now_s)
        if len(self._renewed) > MAX_PULLS:
            self._renewed.pop(next(iter(self._renewed)))
        self._forget(key)
        self._above.distrust(key)

    def _start(self, key: str) -> Arriving:
        if len(self._pulls) >= MAX_PULLS:
            raise CapacityError(f"{MAX_PULLS} objects are being pulled", status=429)
        pull = self._pulls[key] = Arriving()
        loop = asyncio.get_running_loop()

        def tell(what: Callable[..., None], *args: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone: nobody listens
                loop.call_soon_threadsafe(what, *args)

        def ended(error: RoseError | None) -> None:
            self._pulls.pop(key, None)
            if error is not None:
                pull.failed(error)

        self._pull_threads.submit(self._pull, key, pull, tell, ended)
        return pull

    def _pull(
        self, key: str, pull: Arriving, tell: Callable[..., None], ended: Callable[[RoseError | None], None]
    ) -> None:
        """In a thread: bring one object."""
        upload: Upload | None = None

        def begin(nbytes: int) -> None:
            nonlocal upload
            with self._book_lock:
                gone = self._book.admit(key, nbytes)
            for old in gone:
                self.store.delete(old)
            upload = self.store.begin(key, nbytes)
            upload.write(b"")
            tell(pull.begun, nbytes, upload.path)

        def write(piece: memoryview) -> None:
            assert upload is not None
            upload.write(piece)
            tell(pull.arrived, len(piece))

        error: RoseError | None = None
        try:
            _read_whole(self._above, key, begin, write)
            assert upload is not None
            with contextlib.suppress(Conflict):
                upload.commit()
            with self._book_lock:
                self._book.landed(key)
            self._bytes.labels("in").inc(pull.nbytes or 0)
        except RoseError as caught:
            error = caught
            if upload is not None:
                self._make_room(caught)
        except Exception as caught:  # noqa: BLE001 - the boundary of a thread: its readers must not wait for ever
            _log.exception("pull of %s", key)
            error = CapacityError(f"{type(caught).__name__} while it was pulled", field=key)
        finally:
            if error is not None:
                with self._book_lock:
                    self._book.drop(key)
            tell(ended, error)
            if upload is not None:
                upload.discard()

    def _make_room(self, error: RoseError) -> None:
        """The disk has less than we may take: half of it goes, and whoever asks again may fare better."""
        if not isinstance(error, CapacityError) or error.status != 507:
            return
        with self._book_lock:
            gone = self._book.shrink(self._book.num_bytes // 2)
        for key in gone:
            self.store.delete(key)
        error.status = 503
        _log.warning("%s; %d objects of the cache went", error, len(gone))

    def _forget(self, key: str) -> None:
        with self._book_lock:
            self._book.drop(key)
        self.store.delete(key)

    async def _put_object(self, request: web.Request) -> web.StreamResponse:
        raise self._refusal()

    async def _delete_object(self, request: web.Request) -> web.StreamResponse:
        raise self._refusal()

    async def _put_head(self, request: web.Request) -> web.StreamResponse:
        raise self._refusal()

    def _refusal(self) -> RequestError:
        return RequestError(
            "this relay keeps copies only", field="relay", fix=f"publish at {self._name}", status=405
        )

    async def _keys(self, prefix: str) -> list[str]:
        return await self._ask(self._above.list, check_prefix(prefix))

    # -- heads

    async def _names(self) -> list[str]:
        return await self._ask(self._above.runs)

    async def _head_of(self, run_id: str) -> Head | None:
        return (await self._known(self._runs, run_id, self._follow)).head

    async def _upcoming_of(self, run_id: str) -> Upcoming:
        found = (await self._known(self._ahead, run_id, self._look_ahead)).upcoming
        if found is None:
            raise NotFound(f"{self._name} does not tell what comes", field="upcoming")
        return found

    async def _known(
        self, runs: dict[str, _Run], run_id: str, follow: Callable[[str, _Run], Coroutine[Any, Any, None]]
    ) -> _Run:
        run = runs.get(run_id)
        if run is None:
            if len(runs) >= MAX_RUNS:
                raise CapacityError(f"{MAX_RUNS} runs are followed", status=429, field="run_id")
            run = runs[run_id] = _Run(time.monotonic())
            run.task = asyncio.create_task(follow(check_run_id(run_id), run))
        run.used_at_s = time.monotonic()
        await run.heard.wait()
        if run.error is not None:
            raise CapacityError(f"{self._name} does not answer: {run.error}", field="relay")
        return run

    async def _follow(self, run_id: str, run: _Run) -> None:
        """Keep ``run`` at what the store above says, until nobody has asked for it for a while."""
        try:
            while time.monotonic() - run.used_at_s < _UNUSED_S:
                try:
                    known = run.head
                    # Also after a poll that found nothing newer: a store that went back in time must be seen as it is.
                    run.head = await self._ask(self._above.get_head, run_id)
                    run.error = None
                    if known != run.head or not run.heard.is_set():
                        run.heard.set()
                        self._wake_waiters()
                    after = None if run.head is None else run.head.identity
                    newer = await self._ask(self._above.wait_head, run_id, after, _WAIT_S)
                    if newer is not None:
                        run.head = newer
                        self._wake_waiters()
                except RoseError as error:
                    if run.error is None:
                        _log.warning("head of %s: %s", run_id, error)
                    run.error = error
                    run.heard.set()
                    self._wake_waiters()
                    await asyncio.sleep(_RETRY_S)
        finally:
            del self._runs[run_id]

    async def _look_ahead(self, run_id: str, run: _Run) -> None:
        """The same of what comes."""
        try:
            while time.monotonic() - run.used_at_s < _UNUSED_S:
                mark = "" if run.upcoming is None else run.upcoming.mark
                pause_s = 0.0
                try:
                    found = await self._ask(self._above.upcoming, run_id, mark, _WAIT_S)
                    run.upcoming, run.error = found or run.upcoming, None
                except NotFound:  # a store that does not tell may be another one tomorrow
                    run.upcoming, run.error, pause_s = None, None, _UNUSED_S / 10
                except RoseError as error:
                    run.error, pause_s = error, _RETRY_S
                run.heard.set()
                self._stir()
                await asyncio.sleep(pause_s)
        finally:
            del self._ahead[run_id]

    # -- leases

    async def _hold(self, run_id: str, holder: str, version: WeightVersion | None, ttl_s: float) -> None:
        now_s = time.monotonic()
        self._leases.hold(run_id, holder, version, now_s + ttl_s, now_s)
        if version is None:
            return
        async with self._lease_lock:
            if self._leases_above.get((run_id, version), 0.0) >= now_s + ttl_s:
                return
            if len(self._leases_above) >= _MAX_LEASES_ABOVE:
                raise CapacityError(f"{_MAX_LEASES_ABOVE} versions are held", status=429, field="version")
            longer_s = min(MAX_LEASE_S, ttl_s + _LEASE_SLACK_S)
            await self._hold_above(run_id, version, longer_s)

    async def _hold_above(self, run_id: str, version: WeightVersion, ttl_s: float) -> None:
        """``ttl_s`` 0: let go."""
        held, name = version if ttl_s else None, f"{self._holder}-{version}"
        try:
            await self._ask(self._above.lease, run_id, name, held, ttl_s or 1.0)
        except RoseError as error:  # a lease is a wish: what is here can be read without one
            _log.info("no lease on %s: %s", version, error)
            return
        if ttl_s:
            self._leases_above[run_id, version] = time.monotonic() + ttl_s
        else:
            self._leases_above.pop((run_id, version), None)

    async def _let_go(self) -> None:
        """Ends leases above on what nobody here holds any more."""
        while True:
            await asyncio.sleep(_LEASE_SLACK_S / 30)
            now_s = time.monotonic()
            for (run_id, version), until_s in list(self._leases_above.items()):
                if until_s <= now_s:
                    del self._leases_above[run_id, version]
                    continue
                async with self._lease_lock:  # whoever takes one is in the book before
                    if version not in self._leases.held(run_id, now_s):
                        await self._hold_above(run_id, version, 0.0)

    async def _held(self, run_id: str) -> list[WeightVersion]:
        return self._leases.held(run_id, time.monotonic())

    # -- the rest

    async def _ask(self, call: Callable[..., T], *args: Any) -> T:
        """A call of the store above, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._head_threads, call, *args)

    async def _above_while_running(self, app: web.Application) -> AsyncIterator[None]:
        found = [(path.stat(), path) for path in self.store.paths()]
        for stat, path in sorted(found, key=lambda each: each[0].st_mtime):
            self._book.found(self.store.key_of(path), stat.st_size)
        for key in self._book.shrink(self._book.limit_bytes):
            self.store.delete(key)
        lets_go = asyncio.create_task(self._let_go())
        yield
        tasks = [
            lets_go,
            *(run.task for run in (*self._runs.values(), *self._ahead.values()) if run.task is not None),
        ]
        for task in tasks:
            task.cancel()
        self._above.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        for threads in (self._pull_threads, self._head_threads):
            threads.shutdown(wait=False, cancel_futures=True)


def _read_whole(
    store: ObjectStore, key: str, begin: Callable[[int], None], write: Callable[[memoryview], None]
) -> None:
    if isinstance(store, _Streams):
        store.stream(key, begin, write)
        return
    nbytes = store.stat(key).nbytes
    begin(nbytes)
    for offset in range(0, nbytes, _PIECE_BYTES):
        write(memoryview(store.get_range(key, offset, min(_PIECE_BYTES, nbytes - offset))))
