"""Put ``rose-scheduler`` together: books, journal, routes, clock; and take it down cleanly.

Start: recover the journal (a stand-by has it in memory, ``rose.scheduler.standby``), listen, tick.  Stop: answer 503 to new turns, let running ones end for
``drain_s``, abort the rest in their engines, close the journal.  Nothing is lost by a stop or a kill:
finished turns are in the journal, and the client of an unfinished one asks again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from pathlib import Path
from typing import cast

from aiohttp import web

from rose.auth import Tokens
from rose.clock import Clock, MonotonicClock
from rose.decisions.event_format import TURNS
from rose.decisions.log import DecisionLog
from rose.errors import CapacityError, PolicyError, RoseError, Unauthorized
from rose.policy import turn_events as te
from rose.policy.turns import TurnBook
from rose.policy.worker import Tier
from rose.scheduler.control_api import ControlRoutes
from rose.scheduler.count_api import CountRoutes
from rose.scheduler.dispatch import Dispatcher
from rose.scheduler.engine import Endpoint, EngineClient
from rose.scheduler.fleet_api import FleetRoutes
from rose.scheduler.front import Front, Run
from rose.scheduler.guard import Guard
from rose.scheduler.http import BY_KEY, Handler, errors_middleware, json_response, requires
from rose.scheduler.inflight import InflightRequests
from rose.scheduler.journal import Journal
from rose.scheduler.node_metrics import NodeMetrics
from rose.scheduler.openai_api import OpenAIRoutes
from rose.scheduler.openapi import describe
from rose.scheduler.prompts import Prompts
from rose.scheduler.provision import Provisioner
from rose.scheduler.renderer import Renderer
from rose.scheduler.scheduler_config import SchedulerConfig, StaticWorker
from rose.scheduler.settings_api import SettingsRoutes
from rose.scheduler.standby import not_listening, url_of
from rose.scheduler.status import Status
from rose.scheduler.store import TrajectoryStore
from rose.scheduler.timeline import Timeline
from rose.scheduler.token_api import TokenRoutes
from rose.scheduler.tracing import Tracing
from rose.scheduler.turn_requests import TurnRequests
from rose.scheduler.turn_runs import TurnRuns
from rose.scheduler.watch_api import PERIOD_S, WatchRoutes
from rose.wire.answers import HealthStatus, ReadyStatus
from rose.wire.reading import Reports
from rose.wire.status import SchedulerStatus

log = logging.getLogger("rose.scheduler")

PROBE_S = 0.5
FRESH_S = 0.25
TRACES_S = 5.0
MAY_CHAT = ("agent", "environment", BY_KEY)
MAY_WATCH = ("environment", "trainer", "node")


class Scheduler:
    """One daemon.

    ::

        scheduler = Scheduler(config, tokens, journal_dir)
        await scheduler.start()      # scheduler.url
        ...
        await scheduler.stop()

    Args:
        store: Of a stand-by; its journal is ours already.  None: recovered from ``journal_dir``.
        listener: Where to listen; None: at ``config.host`` and ``config.port``.

    Raises (constructor):
        ConfigError: The journal directory is in use or cannot be written.
        LedgerError: The journal is damaged.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tokens: Tokens,
        journal_dir: Path,
        clock: Clock | None = None,
        *,
        store: TrajectoryStore | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self.config = config
        self.tokens = tokens
        self.clock = clock or MonotonicClock()
        if not tokens.has_environment:
            log.warning(
                "token_file.environment: has no token of its own, so that of role agent also sets rewards, and cancels "
                "and reads every trajectory (rose tokens FILE --upgrade adds one)"
            )
        self.status = Status()
        if store is None:
            journal = Journal(journal_dir)
            try:
                store = open_store(config, journal)
            except RoseError:
                journal.close()
                raise
        self.store, self.journal = store, store.journal
        store.on_stale = self.status.on_stale
        self.status.on_stale(store.num_stale)
        store.on_unleased = self.status.on_unleased
        self.status.on_unleased(store.num_unleased)
        store.on_ahead = self.status.on_ahead
        self.deposed = asyncio.Event()
        """Another has taken over: nothing here is promised any more."""
        self._listener = listener
        self._journal_dir = journal_dir
        self.book = TurnBook(config.routing_policy(), config.turn_params(), config.fleet_params())
        self.decisions = DecisionLog(
            journal_dir,
            "decisions",
            TURNS,
            self.book,
            max_bytes=config.decisions.max_bytes,
            max_files=config.decisions.max_files,
        )
        self.tracing = Tracing.make(config.tracing.otlp_endpoint)
        self.url = ""
        self._watched: tuple[float, SchedulerStatus] | None = None
        self._sampled_at_s = float("-inf")
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen and serve.

        Raises:
            ConfigError: The port is taken.
        """
        config, times = self.config, self.config.timeouts
        self._started_at_s = self.clock.now_s()
        self.engines = EngineClient(
            connect_s=times.connect_s, attempt_s=times.attempt_s, render_s=times.render_s
        )
        self.dispatcher = Dispatcher(
            self.book,
            self.engines,
            self.clock,
            max_running=config.limits.max_running,
            stream_upstream=config.stream_upstream,
            seed=config.seed,
            on_action=self._on_action,
            decisions=self.decisions,
        )
        self.decisions.roll()
        self.provisioner = Provisioner.make(config, self.dispatcher, self.store.book, self._journal_dir)
        self.provisioner.decisions.roll()
        self.timeline = Timeline(
            self.clock.now_s,
            self.book.fleet,
            self._trajectory_of,
            self.status.on_rerouted,
        )
        for job, version in self.store.versions.items():
            self.dispatcher.require(job, version, self.store.runs.get(job, ""))
        self.renderer = Renderer(
            self.dispatcher, self.engines, max_wait_s=times.max_queue_s, sidecar=config.render_url
        )
        prompts = Prompts(
            self.renderer.call, history=config.history, cache_entries=config.render_cache_entries
        )
        self.inflight = InflightRequests(
            store=self.store,
            dispatcher=self.dispatcher,
            turn_s=times.turn_s,
            max_turns=config.limits.max_turns_per_trajectory,
            max_running=config.limits.max_running,
            tracing=self.tracing,
            on_duplicate=self.status.on_duplicate,
            on_fork=self.status.on_fork,
            on_finished=self.status.on_finished,
        )
        self.guard = Guard(config.limits, read_s=times.read_s, on_refused=self.status.on_refused)
        self.settings = SettingsRoutes(config, self.dispatcher)
        self.fleet_routes = FleetRoutes(
            self.journal, self.dispatcher, NodeMetrics(self.status.registry, self.clock.now_s)
        )
        self.looking = asyncio.Lock()
        self.control = ControlRoutes(
            config,
            self.tokens,
            self.store,
            self.dispatcher,
            self.timeline,
            self.fleet_routes,
            self.looking,
            Reports(log, self.status.on_unread),
        )
        self.watch = WatchRoutes(
            self.store,
            self.timeline,
            self.renderer,
            self._recent_snapshot,
            lambda: self.dispatcher.draining,
            self.looking,
        )
        requests = TurnRequests(config, self.store, self.dispatcher, is_traced=self.tracing is not None)
        turns = TurnRuns(self.dispatcher, self.inflight)
        openai = OpenAIRoutes(config, self.dispatcher, self.inflight, turns, prompts, self.renderer, requests)
        tokens = TokenRoutes(config, self.inflight, turns, requests)
        counts = CountRoutes(self.dispatcher, prompts, self.renderer, requests)
        app = web.Application(
            client_max_size=config.limits.max_body_bytes, middlewares=[errors_middleware, self._guarded]
        )
        self._add_routes(app, openai, tokens, counts)
        # Cancelling a handler whose client has gone is how a turn learns that nobody waits for it.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        self.front = Front(self._runner_server, self._hot_routes(openai, tokens), read_s=times.read_s)
        loop = asyncio.get_running_loop()
        try:
            if self._listener is None:
                self._listening = await loop.create_server(self.front, config.host, config.port, backlog=1024)
            else:
                self._listening = await loop.create_server(self.front, sock=self._listener, backlog=1024)
        except OSError as error:
            await self.stop(drain_s=0)
            raise not_listening(config, error) from error
        self.url = url_of(self._listening.sockets[0].getsockname())
        assert self.journal.claim is not None
        self.journal.claim.announce(self.url)
        self._tasks.append(asyncio.create_task(self._tick()))
        self._tasks.extend(asyncio.create_task(self._probe(worker)) for worker in config.workers)

    async def stop(self, drain_s: float | None = None) -> None:
        """Drain, then stop.  Safe to call at any point of the start."""
        drain_s = self.config.timeouts.drain_s if drain_s is None else drain_s
        if self._runner is not None and self.url:
            self.dispatcher.draining = True
            until_s = asyncio.get_running_loop().time() + drain_s
            num_left = await self.inflight.drain(drain_s)
            left_s = max(0.0, until_s - asyncio.get_running_loop().time())
            num_left = max(num_left, await self.front.drain(left_s))
            if num_left:
                log.warning("%d requests still ran and were stopped", num_left)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._runner is not None:
            if self.url:
                await self.inflight.close()
                await self.dispatcher.close()
                self.provisioner.close()
            if self._listening is not None:
                self._listening.close()
                await self.front.close()
            await self._runner.cleanup()
            await self.renderer.close()
            self.engines.close()
            await self.control.close()
        self.decisions.close()
        if self.tracing is not None:
            await self.tracing.stop(TRACES_S)
        if self.journal.healthy:
            try:
                await self.journal.commit()
            except CapacityError as error:
                log.error("%s", error)
        self.journal.close()

    # --- routes ----------------------------------------------------------------------------------------

    def _add_routes(
        self, app: web.Application, openai: OpenAIRoutes, tokens: TokenRoutes, counts: CountRoutes
    ) -> None:
        control = self.control

        def add(method: str, path: str, handler: Handler, *roles: str) -> None:
            app.router.add_route(method, path, requires(self.tokens, *roles)(handler) if roles else handler)

        for base in ("", "/s/{session}"):
            add("POST", f"{base}/v1/chat/completions", openai.chat, *MAY_CHAT)
            add("POST", f"{base}/v1/completions", openai.completions, *MAY_CHAT)
            add("POST", f"{base}/v1/responses", openai.responses, *MAY_CHAT)
            add("POST", f"{base}/v1/responses/input_tokens", counts.responses, *MAY_CHAT)
            add("POST", f"{base}/v1/messages", openai.messages, *MAY_CHAT)
            add("POST", f"{base}/v1/messages/count_tokens", counts.messages, *MAY_CHAT)
            add("GET", f"{base}/v1/models", counts.models, *MAY_CHAT)
            add("GET", base + "/v1/models/{model:.+}", counts.model, *MAY_CHAT)
            add("POST", f"{base}/tokenize", counts.tokenize, *MAY_CHAT)
            add("POST", f"{base}/generate", openai.sglang, *MAY_CHAT)
            add("POST", f"{base}/inference/v1/generate", tokens.engine_generate, *MAY_CHAT)
        add("POST", "/rose/v1/generate", tokens.generate, *MAY_CHAT)
        add("POST", "/rose/v1/trajectories", control.create, "environment")
        add("GET", "/rose/v1/trajectories", control.list, "environment", "trainer")
        add("GET", "/rose/v1/trajectories/{id}", control.get, "environment", "trainer")
        add("POST", "/rose/v1/trajectories/{id}/finish", control.finish, "environment")
        add("POST", "/rose/v1/trajectories/{id}/score", control.score, "environment")
        add("DELETE", "/rose/v1/trajectories/{id}", control.cancel, "environment")
        add("GET", "/rose/v1/groups", control.groups, "environment", "trainer")
        add("POST", "/rose/v1/batches/lease", control.lease, "trainer")
        add("PUT", "/rose/v1/batches/{id}", control.put_batch, "trainer")
        add("DELETE", "/rose/v1/batches/{id}", control.give_back, "trainer")
        add("POST", "/rose/v1/batches/{id}/ack", control.ack, "trainer")
        add("POST", "/rose/v1/jobs/{job}/resume", control.resume, "trainer")
        add("POST", "/rose/v1/versions", control.version, "trainer")
        add("POST", "/workers", control.register, "node")
        add("POST", "/workers/{id}/heartbeat", control.heartbeat, "node")
        add("POST", "/workers/{id}/{verb}", control.duty, "node")
        add("DELETE", "/workers/{id}", control.remove, "node")
        add("GET", "/workers", control.workers, *MAY_WATCH)
        add("GET", "/status", self._status, *MAY_WATCH)
        add("GET", "/fleet", self.fleet_routes.get, *MAY_WATCH)
        add("POST", "/fleet/off", self.fleet_routes.off, "admin")
        add("POST", "/fleet/on", self.fleet_routes.on, "admin")
        add("GET", "/admin/settings", self.settings.get, "admin")
        add("POST", "/admin/settings", self.settings.change, "admin")
        add("GET", "/openapi.json", self._openapi)
        add("GET", "/metrics", self._metrics)
        add("GET", "/healthz", self._healthz)
        add("GET", "/health", self._healthz)
        add("GET", "/readyz", self._readyz)
        watch = self.watch
        add("GET", "/rose/v1/trajectories/{id}/tokens", watch.tokens, "environment", "trainer")
        add("GET", "/events", watch.events, *MAY_WATCH)
        add("GET", "/debug/trace", watch.trace, *MAY_WATCH)
        add("GET", "/rose/v1/history", watch.history, *MAY_WATCH)
        add("GET", "/", watch.page)
        add("HEAD", "/", watch.page)  # Claude Code looks whether anybody is here
        add("GET", "/learning", watch.learning)

    @property
    def _runner_server(self) -> web.Server:
        assert self._runner is not None
        assert self._runner.server is not None
        return self._runner.server

    def _hot_routes(self, openai: OpenAIRoutes, tokens: TokenRoutes) -> dict[str, Run]:
        """The routes of turns, served without the router and its bookkeeping; everything else goes the usual way.

        The same handlers behind the same checks in the same order.  What is no plain request for a plain answer comes by aiohttp's
        server; one that asks for ``100-continue`` is left to the router, which knows what that means.
        """
        server = self._runner_server
        routed = server.request_handler

        def behind(handler: Handler) -> Handler:
            checked = requires(self.tokens, *MAY_CHAT)(handler)

            async def guarded(request: web.Request) -> web.StreamResponse:
                return await self.guard.serve(request, checked)

            async def whole(request: web.Request) -> web.StreamResponse:
                return await errors_middleware(request, guarded)

            return whole

        hot = {
            "/rose/v1/generate": behind(tokens.generate),
            "/inference/v1/generate": behind(tokens.engine_generate),
            "/generate": behind(openai.sglang),
            "/v1/chat/completions": behind(openai.chat),
            "/v1/completions": behind(openai.completions),
            "/v1/responses": behind(openai.responses),
            "/v1/messages": behind(openai.messages),
        }

        async def long_way(request: web.BaseRequest) -> web.StreamResponse:
            handler = hot.get(request.rel_url.raw_path) if request.method == "POST" else None
            if handler is None or "Expect" in request.headers:
                return await routed(request)
            return await handler(cast("web.Request", request))

        server.request_handler = long_way
        return cast("dict[str, Run]", hot)

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        return await self.guard.serve(request, handler)

    async def _status(self, request: web.Request) -> web.Response:
        return json_response(self._snapshot())

    def _snapshot(self) -> SchedulerStatus:
        return self.status.snapshot(
            self.dispatcher,
            self.store,
            self.timeline.worst_promises(),
            self.provisioner,
            started_at_s=self._started_at_s,
        )

    def _recent_snapshot(self) -> SchedulerStatus:
        """For any number of watchers: made at most once in ``FRESH_S``."""
        now_s = self.clock.now_s()
        if self._watched is None or now_s > self._watched[0] + FRESH_S:
            self._watched = (now_s, self._snapshot())
        return self._watched[1]

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.config.metrics_public and not _is_local(request.remote):
            raise Unauthorized("metrics are for this machine only", field="metrics_public")
        return web.Response(
            body=self.status.metrics(
                self.dispatcher, self.store, self.timeline.worst_promises(), self.provisioner
            ),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _openapi(self, request: web.Request) -> web.Response:
        return json_response(describe())

    async def _healthz(self, request: web.Request) -> web.Response:
        return json_response(HealthStatus(status="ok"))

    async def _readyz(self, request: web.Request) -> web.Response:
        """Ready: the journal can be written, we are not stopping, and a worker can take a turn."""
        problems = [
            name
            for name, wrong in (
                ("draining", self.dispatcher.draining),
                ("journal", not self.journal.healthy),
                ("no_worker", not any(worker.may_take_turns for worker in self.book.fleet)),
            )
            if wrong
        ]
        return json_response(
            ReadyStatus(status="not ready" if problems else "ok", problems=problems),
            status=503 if problems else 200,
        )

    def _on_action(self, action: te.Action) -> None:
        self.status.on_action(action)
        self.timeline.on_action(action)
        if self.tracing is not None:
            self.tracing.on_action(action)

    def _trajectory_of(self, turn_id: str) -> str:
        turn = self.book.turns.get(turn_id)
        return "" if turn is None else turn.spec.trajectory_id

    # --- time ------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.timeouts.tick_s)
            if not self.journal.is_ours():
                self.deposed.set()
                return
            try:
                self.journal.beat()
                self.dispatcher.tick()
                self.provisioner.step()
                self.control.housekeep()
                self.fleet_routes.tick()
                if self.clock.now_s() >= self._sampled_at_s + PERIOD_S:
                    self._sampled_at_s = self.clock.now_s()
                    self.timeline.sample(self._recent_snapshot())
                if self._runner is not None and self._runner.server is not None:
                    self.guard.sweep([*self._runner.server.connections, *self.front.connections])
            except RoseError as error:
                log.error("tick: %s", error)
            except Exception:
                # Deadlines, leases and liveness hang on the next one.
                log.exception("tick")

    async def _probe(self, settings: StaticWorker) -> None:
        """Stand in for the node agent of a plain ``vllm serve``: probe it, and report what is seen."""
        endpoint = Endpoint(
            worker_id=settings.worker_id,
            url=settings.url.rstrip("/"),
            token=settings.token,
            vocab_size=settings.vocab_size,
        )
        seq = 0
        while True:
            if await self.engines.is_alive(endpoint):
                now_s = self.clock.now_s()
                worker = self.book.fleet.workers.get(settings.worker_id)
                try:
                    if worker is None or worker.health.value == "dead":
                        self.dispatcher.register(
                            te.WorkerRegistered(
                                at_s=now_s,
                                worker_id=settings.worker_id,
                                incarnation=f"static-{seq}",
                                tier=Tier.DEDICATED,
                                model=settings.model,
                                max_model_len=settings.max_model_len,
                                cap=settings.cap,
                            ),
                            endpoint,
                        )
                    seq += 1
                    worker = self.book.fleet.workers[settings.worker_id]
                    self.dispatcher.heartbeat(
                        te.WorkerHeartbeat(
                            at_s=now_s,
                            worker_id=settings.worker_id,
                            incarnation=worker.incarnation,
                            seq=seq,
                            version=(0, 0),
                            state="ready",
                        )
                    )
                except PolicyError as error:
                    log.error("worker %s: %s", settings.worker_id, error)
            await asyncio.sleep(PROBE_S)


def open_store(config: SchedulerConfig, journal: Journal) -> TrajectoryStore:
    """The books of a journal.

    Raises:
        LedgerError: It is damaged.
    """
    limits = config.limits
    return TrajectoryStore(
        journal,
        config.batches.params(),
        max_trajectories=limits.max_trajectories,
        retained_finals=limits.retained_finals,
        retained_bytes=limits.retained_bytes,
        max_job_bytes=limits.max_job_bytes,
        max_held_bytes=limits.max_held_bytes,
        compact_bytes=config.journal.compact_bytes,
    )


def _is_local(remote: str | None) -> bool:
    try:
        return remote is not None and ipaddress.ip_address(remote).is_loopback
    except ValueError:
        return False
