"""How an operator talks to the node agent of a device: HTTP on a unix socket in the node directory.

Routes, all with the bearer token of role ``node`` (or ``admin``); bodies are JSON objects of at most 4 KiB:

``GET /status``
    What is in force.
``POST /set {mode?, floor_pages?, max_lend_pages?, slo_ttft_ms?, slo_tpot_ms?, engine?, policy?, rule?, serialise?, stop_at_layers?, first_token_reserve?, sched?, rl_step?}``
    Change it now; answers the status.  ``engine`` false stops the engine's process, true starts it again.
    ``rl_step`` says that an RL step begins (a node with a relay knows by itself).
``POST /off {wait_s?, engine?}``
    Mode off, then wait until the rollout engine holds nothing; answers proof before and after.
``POST /lend {seconds, wait_s?}``
    A borrowed device's owner leaves it for so long from now; 0 takes it back and waits until the engine holds nothing.

The socket is readable by the owner alone and the token is asked for as well: a shared volume may have
more than one tenant.  Errors have OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from aiohttp import web
from pydantic import Field

from rose.auth import Tokens
from rose.config import Section, validate
from rose.coserve.record_layout import MODE
from rose.coserve.records import Mode
from rose.errors import ConfigError, RequestError, RoseError, TooLarge
from rose.node_client import by_descriptor
from rose.policy.admission import MOST_RESERVE, Rule
from rose.private_dir import private_dir
from rose.wire.errors import error_body

logger = logging.getLogger("rose.node")

MAX_BODY_BYTES = 4096
BEFORE_S = 0.25
"""What an engine gets to say what it holds before it is switched off: one that hangs must not keep its memory by its silence."""
LOOK_EVERY_S = 1.0
MAX_SOCKET_PATH = 100
"""The kernel's limit is 108 bytes with the end."""


class SetBody(Section):
    mode: Literal["off", "observe", "on"] | None = None
    floor_pages: int | None = None
    max_lend_pages: int | None = None
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    engine: bool | None = None
    policy: Literal["rose", "paper", "static"] | None = None
    rule: Literal["slack", "paper", "free"] | None = None
    serialise: bool | None = None
    stop_at_layers: bool | None = None
    first_token_reserve: float | None = Field(default=None, ge=0, le=MOST_RESERVE)
    sched: Literal["normal", "idle"] | None = None
    rl_step: bool = False


class OffBody(Section):
    wait_s: float = Field(default=30.0, ge=0, le=600)
    engine: bool = True
    """False also ends the engine's process."""


class LendBody(Section):
    seconds: float = Field(ge=0, le=86_400)
    wait_s: float = Field(default=10.0, ge=0, le=600)


class Engine(Protocol):
    def set_sched(self, sched: Literal["normal", "idle"], /) -> None: ...


class Agent(Protocol):
    """What an operator may do with a node agent."""

    @property
    def engine(self) -> Engine: ...

    def status(self) -> dict[str, Any]: ...

    def change(
        self,
        *,
        mode: Mode | None = None,
        floor_pages: int | None = None,
        max_lend_pages: int | None = None,
        slo_ttft_ms: float | None = None,
        slo_tpot_ms: float | None = None,
        policy: str | None = None,
        rule: Rule | None = None,
        serialise: bool | None = None,
        stop_at_layers: bool | None = None,
        first_token_reserve: float | None = None,
        rl_step: bool = False,
    ) -> None: ...

    async def set_engine(self, wanted: bool) -> None: ...

    def lend(self, seconds: float) -> None: ...

    async def wait_given_back(self, timeout_s: float) -> bool: ...

    async def proof(self, timeout_s: float = ..., /) -> dict[str, Any]: ...


class ControlServer:
    """The server side; owned by the agent."""

    def __init__(self, agent: Agent, path: Path, tokens: Tokens) -> None:
        self._agent, self._path, self._tokens = agent, path, tokens
        self._directory = private_dir(path.parent)
        self._runner: web.AppRunner | None = None
        self._site: web.SockSite | None = None
        self._identity = (0, 0)

    async def start(self) -> None:
        """Listen.  The caller owns ``node.state``, so a socket that is there belongs to a dead agent.

        Raises:
            ConfigError: The path is too long for a socket, or cannot be made.
        """
        if len(os.fsencode(self._path)) > MAX_SOCKET_PATH:
            raise ConfigError(f"{self._path} is too long for a socket", field="dir", fix="use a shorter path")
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/status", self._guarded(self._status))
        app.router.add_post("/set", self._guarded(self._set))
        app.router.add_post("/off", self._guarded(self._off))
        app.router.add_post("/lend", self._guarded(self._lend))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        self._site = await self._listen(self._runner)

    async def _listen(self, runner: web.AppRunner) -> web.SockSite:
        folder = self._directory.make()
        self._unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Nobody else reaches into a private directory, and until it listens nobody is let in: the umask is the process's, and stays.
            listener.bind(by_descriptor(folder, self._path.name))
            os.chmod(self._path.name, stat.S_IMODE(MODE), dir_fd=folder)
        except OSError as error:
            listener.close()
            raise ConfigError(f"{self._path}: {error.strerror}", field="dir") from error
        site = web.SockSite(runner, listener)
        try:
            await site.start()
        except OSError as error:
            await site.stop()
            listener.close()
            raise ConfigError(f"{self._path}: {error.strerror}", field="dir") from error
        self._identity = self._there()
        return site

    def _there(self) -> tuple[int, int]:
        try:
            info = os.stat(self._path.name, dir_fd=self._directory.fd(), follow_symlinks=False)
        except OSError:
            return 0, 0
        return info.st_dev, info.st_ino

    async def keep(self) -> None:
        """Until cancelled: listen anew where the socket's name is gone (a deleted directory), so that operators find it again."""
        said = ""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                if self._runner is None or self._there() == self._identity:
                    continue
                if self._site is not None:
                    await self._site.stop()
                    self._site = None
                self._site = await self._listen(self._runner)
                logger.warning("%s was deleted or moved; it is there again", self._path)
                said = ""
            except RoseError as error:
                if said != str(error):
                    said = str(error)
                    logger.error("%s", error)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        try:
            self._unlink()
        except RoseError as error:
            logger.warning("%s", error)

    def _unlink(self) -> None:
        try:
            os.unlink(self._path.name, dir_fd=self._directory.fd())
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be removed: {error.strerror}", field="dir", fix="remove it"
            ) from error

    async def _status(self, request: web.Request) -> dict[str, Any]:
        return self._agent.status()

    async def _set(self, request: web.Request) -> dict[str, Any]:
        body = await _body(request, SetBody)
        self._agent.change(
            mode=None if body.mode is None else Mode[body.mode.upper()],
            floor_pages=body.floor_pages,
            max_lend_pages=body.max_lend_pages,
            slo_ttft_ms=body.slo_ttft_ms,
            slo_tpot_ms=body.slo_tpot_ms,
            policy=body.policy,
            rule=None if body.rule is None else Rule[body.rule.upper()],
            serialise=body.serialise,
            stop_at_layers=body.stop_at_layers,
            first_token_reserve=body.first_token_reserve,
            rl_step=body.rl_step,
        )
        if body.sched is not None:
            self._agent.engine.set_sched(body.sched)
        if body.engine is not None:
            await self._agent.set_engine(body.engine)
        return self._agent.status()

    async def _off(self, request: web.Request) -> dict[str, Any]:
        body = await _body(request, OffBody)
        before = await self._agent.proof(BEFORE_S)
        self._agent.change(mode=Mode.OFF)
        given_back = await self._agent.wait_given_back(body.wait_s)
        if not body.engine:
            await self._agent.set_engine(False)
            given_back = True  # the kernel has it: the process is gone
        return {"given_back": given_back, "before": before, "after": await self._agent.proof()}

    async def _lend(self, request: web.Request) -> dict[str, Any]:
        body = await _body(request, LendBody)
        self._agent.lend(body.seconds)
        given_back = not body.seconds and await self._agent.wait_given_back(body.wait_s)
        return {"lent_s": body.seconds, "given_back": given_back}

    def _guarded(
        self, handler: Callable[[web.Request], Awaitable[dict[str, Any]]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def route(request: web.Request) -> web.StreamResponse:
            try:
                self._tokens.check(request.headers.get("Authorization"), "node")
                return web.json_response(await handler(request))
            except RoseError as error:
                refused = error
            except web.HTTPRequestEntityTooLarge:
                refused = TooLarge(f"more than {MAX_BODY_BYTES} bytes", field="body")
            return web.json_response(error_body(refused), status=refused.status)

        return route


async def _body(request: web.Request, kind: type[Any]) -> Any:
    raw = await request.read()
    try:
        table = json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        raise RequestError("is not JSON", field="body") from None
    if not isinstance(table, dict):
        raise RequestError("is not a JSON object", field="body")
    try:
        return validate(kind, table)
    except ConfigError as error:
        raise RequestError(error.message, field=error.field, fix=error.fix) from None
