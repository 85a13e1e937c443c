"""The node agent's two links outward: to rose-scheduler (turns) and to the relay (weights).

:class:`SchedulerUplink` registers the engine once per incarnation and then sends a heartbeat twice a second; a
scheduler that was restarted says ``known: false`` and gets the registration again.  :class:`WeightLoop` brings
the engine to the newest published version: fetch in a thread, stage while requests run, commit between two steps.

Neither stops the node when the other side is away: they log the change, back off, and go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from rose.auth import Tokens, bearer
from rose.coserve.engine import RolloutEngine, check_update_path
from rose.coserve.node_config import NodeConfig, SchedulerLink, WeightsLink
from rose.coserve.policies import PolicyCopies, WeightSource
from rose.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    RequestError,
    RoseError,
    SectionCorrupt,
    WeightsError,
)
from rose.lineage import Lineage, WeightVersion
from rose.signatures import PublicKeys
from rose.wire.addresses import Addresses
from rose.wire.errors import NOT_ACTIVE, read_refusal
from rose.wire.hosts import host_name
from rose.wire.http_client import HttpAnswer, ask, open_client
from rose.wire.reading import read
from rose.wire.workers import Heartbeat, HeartbeatAnswer, Registered, Registration

A = TypeVar("A", bound=msgspec.Struct)
logger = logging.getLogger("rose.node")

_MAX_ANSWER_BYTES = 1 << 16
_BACK_OFF_S = (0.5, 1.0, 2.0, 5.0)
_NO_ENGINE_S = 0.1
_MOVED_S = 0.1
"""To the next try, at another address."""
NO_ROOM = 507


class SchedulerUplink:
    """Keeps rose-scheduler informed.

    Args:
        heartbeat: Builds a heartbeat of this incarnation, with this number.
        assigned: Told of each answer: whom the scheduler wants this device to serve.
        refused: Told why this node may not be registered: another one has its ``node_id``.
    """

    def __init__(
        self,
        config: NodeConfig,
        link: SchedulerLink,
        tokens: Tokens,
        engine: RolloutEngine,
        heartbeat: Callable[[str, int], Heartbeat],
        assigned: Callable[[HeartbeatAnswer], None] = lambda answer: None,
        refused: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._config, self._link, self._engine, self._heartbeat = config, link, engine, heartbeat
        self._assigned, self._refused = assigned, refused
        self._tokens = tokens
        self._addresses = Addresses(link.url)
        self._registered: str | None = None
        self._seq = 0
        self.connected = False
        self.error = "not asked yet: the rollout engine is not ready"

    async def run(self) -> None:
        """Until cancelled; takes the worker off the registry on the way out."""
        async with open_client(bearer(self._tokens.node)) as client:
            try:
                while True:
                    url = self._addresses.current
                    await self._beat(client)
                    moved = self._addresses.current != url
                    await asyncio.sleep(
                        min(_MOVED_S, self._link.heartbeat_s) if moved else self._link.heartbeat_s
                    )
            finally:
                await self._leave(client)

    async def _beat(self, client: httpx.AsyncClient) -> None:
        engine = self._engine
        try:
            if engine.state == "ready" and self._registered != engine.incarnation:
                await self._register(client)
            if self._registered is None:
                return
            answer = await self._say(client, self._registered)
            if not answer.known:
                self._registered = None
            else:
                self._assigned(answer)
        except RequestError as error:
            if error.status == 404:
                self._registered = None
            self._note(str(error), logging.ERROR if error.status == 409 else logging.WARNING)
        except EngineError as error:
            self._note(str(error))
        else:
            self._note("")

    async def _register(self, client: httpx.AsyncClient) -> None:
        incarnation = self._engine.incarnation
        try:
            await self._post(client, "/workers", self._registration(), Registered)
        except RequestError as error:
            if error.status == 409:
                self._registered = None
                self._refused(str(error))
                await self._say(
                    client, incarnation
                )  # what it holds, until it holds nothing, is counted all the same
            raise
        self._registered = incarnation
        logger.info("registered at the scheduler as %s", self._config.node_id)

    async def _say(self, client: httpx.AsyncClient, incarnation: str) -> HeartbeatAnswer:
        """A heartbeat."""
        self._seq += 1
        path = f"/workers/{self._config.node_id}/heartbeat"
        return await self._post(client, path, self._heartbeat(incarnation, self._seq), HeartbeatAnswer)

    def _registration(self) -> Registration:
        config = self._config
        return Registration(
            worker_id=config.node_id,
            url=config.engine_url,
            tier=config.tier,
            model=config.engine.served_model_name or config.engine.model,
            max_model_len=config.engine.max_model_len,
            incarnation=self._engine.incarnation,
            engine_token=self._engine.token,
            vocab_size=self._engine.vocab_size,
            max_num_seqs=self._engine.max_num_seqs,
            logprobs_mode=self._engine.logprobs_mode,
            host=host_name() or None,
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
    ) -> HttpAnswer:
        url = self._addresses.current
        try:
            answer = await ask(
                client,
                method,
                url + path,
                body,
                timeout_s=timeout_s,
                max_bytes=_MAX_ANSWER_BYTES,
                field="scheduler",
            )
        except EngineError:
            self._addresses.leave(url)
            raise
        if answer.status == 503 and read_refusal(answer.body).code == NOT_ACTIVE:
            self._addresses.leave(url)
        return answer

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

    def _note(self, error: str, level: int = logging.WARNING) -> None:
        """Log a change of the link's state, not every beat of it."""
        if (not error) != self.connected or (error and error != self.error):
            level = level if error else logging.INFO
            logger.log(level, "scheduler %s: %s", self._addresses.current, error or "connected")
        self.connected, self.error = not error, error


class WeightLoop:
    """Brings the engine to the newest version of the run that it serves, again after each of its restarts.

    Attributes:
        own: The run that the node's configuration names.
        serves: The run whose policy the engine is to have; the configured one until the scheduler says otherwise (:meth:`follow`).
        commit_s: What the last change of the run took once its policy was on the host: bringing the copy into the engine; None = none yet.
        pull_s: What the last policy took to arrive of which nothing was on the host; None = there was none yet, or it had to be waited for.
    """

    def __init__(
        self, link: WeightsLink, directory: Path, engine: RolloutEngine, source: WeightSource | PolicyCopies
    ) -> None:
        self._link, self._directory, self._engine = link, directory, engine
        self._copies = (
            source
            if isinstance(source, PolicyCopies)
            else PolicyCopies(link.run_id, directory, lambda run, folder: source, most=1)
        )
        self.own = self.serves = link.run_id
        self.num_commits = 0
        self.num_switches = 0
        self.commit_s: float | None = None
        self.pull_s: float | None = None
        self.error = ""
        self.last: dict[str, Any] = {}
        self._newest: dict[str, WeightVersion] = {}
        self._polls: dict[str, asyncio.Task[tuple[WeightVersion | None, float | None]]] = {}
        """In progress, of runs that are not served any more too: a long poll ends when it ends."""
        self._ordered = asyncio.Event()

    @property
    def newest(self) -> WeightVersion | None:
        """Of the run that is served."""
        return self._newest.get(self.serves)

    def copies(self) -> list[str]:
        """Runs whose policy is on this host: the one that is served first, then the others by name."""
        there = self._newest.keys() & self._copies.opened()
        return sorted(there, key=lambda run: (run != self.serves, run))

    def follow(self, run: str) -> None:
        """Serve another run from now on."""
        if run != self.serves:
            logger.info("the engine is to serve run %s, after %s", run, self.serves)
            self.serves = run
            self._ordered.set()

    def follow_own(self) -> None:
        """Serve the configured run again."""
        self.follow(self.own)

    def require(self, run: str, version: WeightVersion) -> None:
        """What the trainer of ``run`` has published."""
        self._copies.require(run, version)

    async def run(self) -> None:
        """Until cancelled; closes the sources on the way out."""
        try:
            await self._follow()
        finally:
            await asyncio.to_thread(
                self._copies.close
            )  # it waits for whoever opens or removes a copy just now
            await asyncio.gather(*self._polls.values(), return_exceptions=True)

    async def _follow(self) -> None:
        failures = 0
        while True:
            if (
                not self._engine.running
            ):  # nobody would take them, and what production runs on is not ours to use
                await asyncio.sleep(_NO_ENGINE_S)
                continue
            run, ordered = self.serves, self._ordered.is_set()
            self._ordered.clear()
            try:
                unpolled = await self._poll(run, at_once=ordered)
                if run != self.serves:
                    continue
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
                if not await self._made_room(error, run):
                    await asyncio.sleep(_BACK_OFF_S[min(failures, len(_BACK_OFF_S)) - 1])

    async def _poll(self, run: str, *, at_once: bool) -> Exception | None:
        """Look for news, until there are some or another run is ordered; why that was not possible."""
        poll = self._polls.get(run)
        if poll is None:
            if run not in self._copies.opened():
                self._newest.pop(run, None)  # the copy that this was of is gone
            timeout_s = 0.0 if at_once else self._poll_s()
            poll = asyncio.create_task(asyncio.to_thread(self._polled, run, timeout_s), name=f"poll {run}")
            self._polls[run] = poll
        elif at_once and run in self._newest and not poll.done():
            return None  # what the node holds is good, and a long poll of it is still under way
        ordered = asyncio.create_task(self._ordered.wait())
        try:
            await asyncio.wait((poll, ordered), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ordered.cancel()
        if not poll.done():
            return None
        del self._polls[run]
        try:
            newest, pull_s = poll.result()
        except Exception as error:  # noqa: BLE001 - raised later, by our caller
            return error
        if newest is not None:
            self._newest[run] = newest
            self.pull_s = self.pull_s if pull_s is None else pull_s
        return None

    def _polled(self, run: str, timeout_s: float) -> tuple[WeightVersion | None, float | None]:
        """The news of a run, if there are any; and what they took to arrive, where that was a whole policy and nothing was waited for.
        Called in a thread."""
        was_here = run in self._copies.runs()
        began_s = time.monotonic()
        newest = self._copies.source(run).poll(timeout_s)
        is_measured = newest is not None and timeout_s == 0 and not was_here
        return newest, time.monotonic() - began_s if is_measured else None

    async def _made_room(self, error: Exception, run: str) -> bool:
        """Room on the disk, where that was short and another policy's copy is there."""
        if not isinstance(error, CapacityError) or error.status != NO_ROOM:
            return False
        return await asyncio.to_thread(self._copies.make_room, run)

    def _poll_s(self) -> float:
        # An engine that is starting may become ready during a long poll, and must not wait for its end.
        return self._link.poll_s if self._engine.state == "ready" else min(1.0, self._link.poll_s)

    async def _catch_up(self) -> bool:
        """Bring a ready engine to the newest version; False when there is nothing to do."""
        engine, newest = self._engine, self.newest
        if newest is None or engine.state != "ready":
            return False
        target, has = Lineage(self.serves, newest), engine.lineage
        if has == target:
            return False
        # Of another run's weights no delta starts; of a checkpoint's, the run's own first version may.
        base = has.version if has is not None and has.run in ("", target.run) else None
        began_s = time.monotonic()
        try:
            await self._update(target, base)
        except (WeightsError, RequestError) as error:
            if error.code == "weights_broken":
                await engine.kill_broken()
                raise
            # Busy: somebody else's call about its weights was under way, which says nothing of what it has.
            if isinstance(error, SectionCorrupt) or has is None or error.code == "busy":
                raise
            # The engine is not what the delta is for (restarted, or another lineage): from scratch.
            logger.warning("update to %s refused (%s), taking the whole version", target, error)
            await engine.refresh_status()
            await self._update(target, None)
        if has is not None and has.run not in ("", target.run):
            self.commit_s = time.monotonic() - began_s
            self.num_switches += 1
        return True

    async def _update(self, target: Lineage, base: WeightVersion | None) -> None:
        engine, version = self._engine, target.version
        source = await asyncio.to_thread(self._copies.source, target.run)
        path = await asyncio.to_thread(source.fetch, version, base)
        check_update_path(path, self._directory)
        name = {"run": target.run, "attempt": version.attempt, "version": version.version}
        staged = {"state": "staging"}
        try:
            async with asyncio.timeout(self._link.timeout_s):
                while staged.get("state") == "staging":
                    staged = await engine.call(
                        "POST", "/rose/weights/stage", name | {"path": str(path)}, timeout_s=60.0
                    )
        except TimeoutError:
            raise EngineError(f"staging {target} took over {self._link.timeout_s:.0f} s") from None
        done = await engine.call("POST", "/rose/weights/commit", name, timeout_s=120.0)
        engine.lineage = target
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


def open_copies(config: NodeConfig, link: WeightsLink, tokens: Tokens) -> PolicyCopies:
    """What this node has of the runs that it may be told to serve.

    Raises:
        ConfigError: See :func:`open_weight_source`.
    """

    def opened(run: str, directory: Path) -> WeightSource:
        return open_weight_source(config, link, tokens, run, directory)

    copies = PolicyCopies(link.run_id, config.weights_dir, opened, most=link.max_policies)
    copies.source(link.run_id)  # what is wrong with the directory is said at the start
    return copies


def trusted_keys(link: WeightsLink, tokens: Tokens) -> PublicKeys:
    """Whose weights the engine may have.

    Raises:
        ConfigError: No key is pinned, or what is pinned is none.
    """
    text, name = link.public_key or tokens.public_key, "weights.public_key"
    if not text:
        raise ConfigError(
            "is needed: whose weights are these to be?",
            field=name,
            fix="the line public_key of the trainer's token file (rose tokens --upgrade), here or in this node's; for a store that nobody "
            "else can write to: weights.signed = false",
        )
    return PublicKeys.load(text, what=name)


def open_weight_source(
    config: NodeConfig,
    link: WeightsLink,
    tokens: Tokens,
    run: str | None = None,
    directory: Path | None = None,
) -> WeightSource:
    """The copy of this node's own run, or of the one that is named; shared with every node that names the same directory.

    Raises:
        ConfigError: ``rose.weights`` cannot be used with these settings.
    """
    from rose.weights.params import WeightsParams
    from rose.weights.shared_copy import make_own, open_shared

    make_own(config.weights_dir, field="weights.directory")
    return open_shared(
        link.relay_url,
        run or link.run_id,
        directory or config.weights_dir,
        token=tokens.relay,
        trusted=trusted_keys(link, tokens) if link.signed else None,
        params=WeightsParams(num_threads=link.threads),
    )
