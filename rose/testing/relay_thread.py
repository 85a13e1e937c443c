"""A relay in a thread of this process: for tests, and for programs that hold trainer and engine in one process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Self

from aiohttp import web

from rose.auth import Tokens
from rose.signatures import PublicKeys
from rose.weights.file_store import FileStore
from rose.weights.relay import Relay, serve


class RelayThread:
    """A relay in a thread of this process; a context manager.  ``url`` is where it listens.

    For tests and for programs that hold trainer and engine in one process; a deployment runs ``rose relay``.
    """

    def __init__(
        self,
        store: FileStore,
        tokens: Tokens,
        *,
        trusted: PublicKeys | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._store, self._tokens, self._host, self._port = store, tokens, host, port
        self._trusted = trusted
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rose-relay", daemon=True)
        self._runner: web.AppRunner | None = None
        self.url = ""

    def start(self) -> Self:
        self._thread.start()

        async def begin() -> tuple[web.AppRunner, int]:
            return await serve(Relay(self._store, self._tokens, self._trusted), self._host, self._port)

        try:
            self._runner, port = asyncio.run_coroutine_threadsafe(begin(), self._loop).result(30)
        except BaseException:
            self.stop()
            raise
        self.url = f"http://{self._host}:{port}"
        return self

    def stop(self) -> None:
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
            self._runner = None
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            with contextlib.suppress(RuntimeError):
                self._loop.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
