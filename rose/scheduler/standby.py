"""A second rose-scheduler: it follows the journal of the active one, refuses everybody by name, and takes over when that one is gone.

*Gone* is: its process has ended (the kernel let go of its lock), or it has not moved for ``standby.dead_s`` (it is stopped or
hangs) and is fenced then: should it wake up, it can promise nothing more (``rose.scheduler.claim``).  What the journal says is in
memory already, so that a takeover takes as long as reading the last records and one start of the routes.

The socket listens from the beginning to the end: connections that come between the two wait in its backlog.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from rose.auth import ROLES, Tokens
from rose.errors import CapacityError, ConfigError
from rose.scheduler.claim import Claim, EpochOwner, check_shared, owner_of
from rose.scheduler.http import error_response, errors_middleware, json_response
from rose.scheduler.journal import Journal, Replaced
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.scheduler.store import TrajectoryStore
from rose.wire.errors import NOT_ACTIVE
from rose.wire.hosts import in_url

log = logging.getLogger("rose.scheduler")

LOOK_S = 0.1
RETRY_AFTER_S = 1.0
ACTIVE = "X-ROSE-Active"
"""Header of a refusal: where the active one answers."""


def not_listening(config: SchedulerConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"{config.host}:{config.port} cannot be listened on: {error.strerror}",
        field="port",
        fix="choose another --port",
    )


def listening(config: SchedulerConfig) -> socket.socket:
    """One socket, for refusals and then for answers.

    Raises:
        ConfigError: The port is taken.
    """
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise not_listening(config, error) from error


def url_of(address: tuple[Any, ...]) -> str:
    host, port = address[:2]
    return f"http://{in_url(host)}:{port}"


class StandBy:
    """Args:
    open_store: Makes the books from a journal.
    listener: Where refusals are given.

    Raises:
        ConfigError: The folder is on a file system on which this has not been tried.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tokens: Tokens,
        directory: Path,
        listener: socket.socket,
        open_store: Callable[[Journal], TrajectoryStore],
    ) -> None:
        self._config, self._tokens, self._directory = config, tokens, directory
        self._listener, self._open_store = listener, open_store
        self._owner: EpochOwner | None = None
        self._quiet_s = 0.0
        self._looked_at_s = float("-inf")
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_shared(directory)

    async def wait(self, on_following: Callable[[], None] = lambda: None) -> TrajectoryStore:
        """The books, when they are ours to write.

        Args:
            on_following: Called once, if there is somebody to stand by for.
        """
        claim = Claim.take(self._directory)
        if claim is not None:
            return await asyncio.to_thread(self._begin, None, claim)
        app = web.Application(middlewares=[errors_middleware])
        app.router.add_route("*", "/{path:.*}", self._refuse)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        store: TrajectoryStore | None = None
        try:
            await web.SockSite(runner, self._listener.dup()).start()
            claim = self._look()
            on_following()
            while claim is None:
                try:
                    if store is None:
                        store = await asyncio.to_thread(self._follow)
                    else:
                        await asyncio.to_thread(store.catch_up)
                except Replaced:
                    self._leave(store)
                    store = None
                claim = self._look()
                if claim is None:
                    await asyncio.sleep(LOOK_S)
            return await asyncio.to_thread(self._begin, store, claim)
        except BaseException:
            self._leave(store)
            raise
        finally:
            await runner.cleanup()

    def _follow(self) -> TrajectoryStore:
        journal = Journal(self._directory, follows=True)
        try:
            return self._open_store(journal)
        except BaseException:
            journal.close()
            raise

    def _begin(self, store: TrajectoryStore | None, claim: Claim) -> TrajectoryStore:
        """Be the one that writes, with what was followed so far or from the beginning."""
        try:
            while True:
                try:
                    if store is None:
                        journal = Journal(self._directory, follows=True)
                        journal.take_over(claim)
                        return self._open_store(journal)
                    store.journal.take_over(claim)
                    store.begin()
                    return store
                except Replaced:  # by a compaction, under its last writer's hands
                    if store is not None:
                        store.journal.claim = None
                        store.journal.close()
                    store = None
        except BaseException:
            claim.close()
            raise

    def _leave(self, store: TrajectoryStore | None) -> None:
        if store is not None:
            store.journal.close()

    def _look(self) -> Claim | None:
        """Is the active one still there?  If not, what it had is ours, unless another stand-by was first."""
        owner, now_s = owner_of(self._directory), time.monotonic()
        if owner is None or not owner.is_locked:
            return self._take("has ended", None)
        # What we did not see does not count: it may be we who hung.
        passed_s, self._looked_at_s = min(now_s - self._looked_at_s, 10 * LOOK_S), now_s
        before, self._owner = self._owner, owner
        if before is None or (before.epoch, before.beat) != (owner.epoch, owner.beat):
            self._quiet_s = 0.0
            return None
        self._quiet_s += passed_s
        if self._quiet_s < max(self._config.standby.dead_s, 4 * self._config.timeouts.tick_s):
            return None
        return self._take(f"has not moved for {self._quiet_s:.1f} s", owner.epoch)

    def _take(self, why: str, over: int | None) -> Claim | None:
        where = "" if self._owner is None else f" at {self._owner.url}"
        claim = Claim.take(self._directory, over=over)
        if claim is not None:
            log.warning("the active rose-scheduler%s %s: taking over, epoch %d", where, why, claim.epoch)
        return claim

    async def _refuse(self, request: web.Request) -> web.StreamResponse:
        if request.path in ("/healthz", "/health"):
            return json_response({"status": "ok", "role": "standby"})
        if request.path == "/readyz":
            return json_response({"status": "not ready", "problems": ["standby"]}, status=503)
        authorization = request.headers.get("Authorization")
        if authorization is None and "x-api-key" in request.headers:
            authorization = f"Bearer {request.headers['x-api-key']}"
        if self._tokens.trajectory_of(authorization) is None:
            self._tokens.check(authorization, *ROLES)
        url = "" if self._owner is None else self._owner.url
        active = f" for the one at {url}" if url else ""
        refusal = CapacityError(
            f"this rose-scheduler stands by{active}", code=NOT_ACTIVE, retry_after_s=RETRY_AFTER_S
        )
        response = error_response(request, refusal)
        if url:
            response.headers[ACTIVE] = url
        return response
