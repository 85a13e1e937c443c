"""The node agent's two links outward: to rose-scheduler (turns) and to the relay (weights).

:class:`SchedulerUplink` registers the engine once per incarnation and then sends a heartbeat twice a second; a
scheduler that was restarted says ``known: false`` and gets the registration again.  :class:`WeightLoop` brings
the engine to the newest published version: fetch in a thread, stage while requests run, commit between two steps.

Neither stops the node when the other side is away: they log the change, back off, and go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import msgspec

from rose.auth import Tokens, bearer
from rose.coserve.engine import RolloutEngine, check_update_path
from rose.coserve.node_config import NodeConfig, SchedulerLink, WeightsLink
from rose.errors import (
    ConfigError,
    EngineError,
    LedgerError,
    RequestError,
    RoseError,
    SectionCorrupt,
    WeightsError,
)
from rose.private_dir import private_dir
from rose.weights.version import WeightVersion
from rose.wire.errors import read_refusal
from rose.wire.http_client import Answer, ask, open_client
from rose.wire.reading import read
from rose.wire.workers import Heartbeat, HeartbeatAnswer, Registered, Registration

A = TypeVar("A", bound=msgspec.Struct)
logger = logging.getLogger("rose.node")

_MAX_ANSWER_BYTES = 1 << 16
_BACK_OFF_S = (0.5, 1.0, 2.0, 5.0)
_NO_ENGINE_S = 0.1


class SchedulerUplink:
    """Keeps rose-scheduler informed.

    Args:
        heartbeat: Builds a heartbeat of this incarnation, with this number.
    """

    def __init__(
        self,
        config: NodeConfig,
        link: SchedulerLink,
        tokens: Tokens,
        engine: RolloutEngine,
        heartbeat: Callable[[str, int], Heartbeat],
    ) -> None:
        self._config, self._link, self._engine, self._heartbeat = config, link, engine, heartbeat
        self._tokens = tokens
        self._registered: str | None = None
        self._seq = 0
        self.connected = False
        self.error = "not tried yet"
        self.required_version: str | None = None

    async def run(self) -> None:
        """Until cancelled; takes the worker off the registry on the way out."""
        async with open_client(bearer(self._tokens.node)) as client:
            try:
                while True:
                    await self._beat(client)
                    await asyncio.sleep(self._link.heartbeat_s)
            finally:
                await self._leave(client)

    async def _beat(self, client: httpx.AsyncClient) -> None:
        engine = self._engine
        try:
            if engine.state == "ready" and self._registered != engine.incarnation:
                await self._post(client, "/workers", self._registration(), Registered)
                self._registered = engine.incarnation
                logger.info("registered at the scheduler as %s", self._config.node_id)
            if self._registered is None:
                return
            self._seq += 1
            path = f"/workers/{self._config.node_id}/heartbeat"
            body = self._heartbeat(self._registered, self._seq)
            answer = await self._post(client, path, body, HeartbeatAnswer)
            if not answer.known:
                self._registered = None
            required = answer.required_version
            self.required_version = required[:32] if required is not None else None
        except RequestError as error:
            if error.status == 404:
                self._registered = None
            self._note(str(error))
        except EngineError as error:
            self._note(str(error))
        else:
            self._note("")

    def _registration(self) -> Registration:
        config = self._config
        return Registration(
            worker_id=config.node_id,
            url=config.engine.advertise_url or self._engine.url,
            tier=config.tier,
            model=config.engine.served_model_name or config.engine.model,
            max_model_len=config.engine.max_model_len,
            incarnation=self._engine.incarnation,
            engine_token=self._engine.token,
            vocab_size=self._engine.vocab_size,
            max_num_seqs=self._engine.max_num_seqs,
        )

    async def _leave(self, client: httpx.AsyncClient) -> None:
        if self._registered is None:
            return
        try:
            await self._ask(client, "DELETE", f"/workers/{self._config.node_id}", timeout_s=1.0)
        except EngineError:
            pass  # it will notice the silence

    async def _ask(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        timeout_s: float,
    ) -> Answer:
        url = self._link.url.rstrip("/") + path
        return await ask(
            client, method, url, body, timeout_s=timeout_s, max_bytes=_MAX_ANSWER_BYTES, field="scheduler"
        )

    async def _post(self, client: httpx.AsyncClient, path: str, body: msgspec.Struct, answer: type[A]) -> A:
        data = msgspec.json.encode(body)
        found = await self._ask(client, "POST", path, data, timeout_s=self._link.timeout_s)
        if found.status >= 400:
            said = read_refusal(found.body)
            because = f": {said.field or ''} {said.message}".rstrip() if said.message else ""
            raise RequestError(
                f"{path} answered {found.status}{because}", field="scheduler", status=found.status
            )
        try:
            return read(answer, found.body)
        except RequestError as error:
            raise EngineError(f"{path} answered nonsense: {error}", field="scheduler") from None

    def _note(self, error: str) -> None:
        """Log a change of the link's state, not every beat of it."""
        if (not error) != self.connected or (error and error != self.error):
            log = logger.info if not error else logger.warning
            log("scheduler %s: %s", self._link.url, error or "connected")
        self.connected, self.error = not error, error


class WeightSource(Protocol):
    """What ``rose.weights.subscriber.WeightSubscriber`` offers; blocking, called from a thread."""

    def poll(self, timeout_s: float) -> WeightVersion | None:
        """Newest published version, waiting for one newer than known; None when there is none."""
        ...

    def fetch(self, version: WeightVersion, engine_version: WeightVersion | None) -> Path:
        """Update file that leads from ``engine_version`` (None: from anything) to ``version``."""
        ...

    def close(self) -> None:
        """End a ``poll`` in progress and give up what is held."""
        ...


class WeightLoop:
    """Brings the engine to the newest version, again after each of its restarts."""

    def __init__(
        self, link: WeightsLink, directory: Path, engine: RolloutEngine, source: WeightSource
    ) -> None:
        self._link, self._directory, self._engine, self._source = link, directory, engine, source
        self.newest: WeightVersion | None = None
        self.num_commits = 0
        self.error = ""
        self.last: dict[str, Any] = {}

    async def run(self) -> None:
        """Until cancelled; closes the source on the way out."""
        try:
            await self._follow()
        finally:
            self._source.close()

    async def _follow(self) -> None:
        failures = 0
        while True:
            if (
                not self._engine.running
            ):  # nobody would take them, and what production runs on is not ours to use
                await asyncio.sleep(_NO_ENGINE_S)
                continue
            try:
                unpolled = await self._poll()
                if await self._catch_up():  # also without the relay: what the node holds is good
                    self.num_commits += 1
                if unpolled is not None:
                    raise unpolled
                failures = 0
                self._note("")
            except Exception as error:
                # A link never ends the node: a full disk, say, or no more file descriptors.
                if not isinstance(error, RoseError):
                    logger.exception("weights")
                failures += 1
                self._note(str(error) or type(error).__name__)
                await asyncio.sleep(_BACK_OFF_S[min(failures, len(_BACK_OFF_S)) - 1])

    async def _poll(self) -> Exception | None:
        """Look for news; why that was not possible."""
        try:
            newest = await asyncio.to_thread(self._source.poll, self._poll_s())
        except Exception as error:  # noqa: BLE001 - raised later, by our caller
            return error
        if newest is not None:
            self.newest = newest
        return None

    def _poll_s(self) -> float:
        # An engine that is starting may become ready during a long poll, and must not wait for its end.
        return self._link.poll_s if self._engine.state == "ready" else min(1.0, self._link.poll_s)

    async def _catch_up(self) -> bool:
        """Bring a ready engine to the newest version; False when there is nothing to do."""
        engine, target = self._engine, self.newest
        if target is None or engine.state != "ready" or engine.version == str(target):
            return False
        try:
            base = None if engine.version is None else WeightVersion.parse(engine.version)
            await self._update(target, base)
        except (WeightsError, RequestError) as error:
            if error.code == "weights_broken":
                await engine.kill_broken()
                raise
            if isinstance(error, SectionCorrupt) or engine.version is None:
                raise
            # The engine is not what the delta is for (restarted, or another lineage): from scratch.
            logger.warning("update to %s refused (%s), taking the whole version", target, error)
            await engine.refresh_status()
            await self._update(target, None)
        return True

    async def _update(self, target: WeightVersion, base: WeightVersion | None) -> None:
        engine = self._engine
        path = await asyncio.to_thread(self._source.fetch, target, base)
        check_update_path(path, self._directory)
        body = {"path": str(path), "attempt": target.attempt, "version": target.version}
        staged = {"state": "staging"}
        try:
            async with asyncio.timeout(self._link.timeout_s):
                while staged.get("state") == "staging":
                    staged = await engine.call("POST", "/rose/weights/stage", body, timeout_s=60.0)
        except TimeoutError:
            raise EngineError(f"staging {target} took over {self._link.timeout_s:.0f} s") from None
        done = await engine.call(
            "POST",
            "/rose/weights/commit",
            {"attempt": target.attempt, "version": target.version},
            timeout_s=120.0,
        )
        engine.version = str(target)
        self.last = {
            key: value
            for key, value in {**staged, **done}.items()
            if isinstance(value, (int, float, str)) and len(str(value)) <= 64
        }
        logger.info("engine runs version %s", target)

    def _note(self, error: str) -> None:
        if error != self.error:
            logger.log(logging.WARNING if error else logging.INFO, "weights: %s", error or "well again")
        self.error = error


def open_weight_source(config: NodeConfig, link: WeightsLink, tokens: Tokens) -> WeightSource:
    """The subscriber of this node.

    Raises:
        ConfigError: ``rose.weights`` cannot be used with these settings.
    """
    from rose.weights.params import WeightsParams
    from rose.weights.stores import open_store
    from rose.weights.subscriber import WeightSubscriber

    directory = config.weights_dir
    try:
        private_dir(directory).make()  # what lies there becomes the policy
    except LedgerError as error:
        raise ConfigError(
            f"{error.field}: {error.message}",
            field="weights.directory",
            fix=error.fix or "name one of your own",
        ) from error
    store = open_store(link.relay_url, tokens.relay)
    params = WeightsParams(num_threads=link.threads)
    return WeightSubscriber(store, link.run_id, directory, params, owns_store=True)
