"""Run turns: the thin shell around the turn book.

:class:`Dispatcher` feeds the book with what happens (submissions, engine output, heartbeats, the clock) and
carries out what it answers: start an attempt, abort one, hand a result to whoever waits.  It decides
nothing about *where* or *whether*; that is ``rose.policy.turns``.

One attempt is one engine request; it has a task of its own where it streams, or a connection has to be opened first.  All books live in the event loop's thread, so an event and
its actions are never interleaved with another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rose.clock import Clock
from rose.decisions.log import DecisionLog
from rose.errors import CapacityError, EngineError, Gone, NotFound, PolicyError, RequestError, RoseError
from rose.lineage import Version
from rose.policy import turn_events as te
from rose.policy.assigning import Switching
from rose.policy.routing import RoutingPolicy
from rose.policy.turns import TurnBook
from rose.policy.worker import Duty, Health, Tier, Worker
from rose.scheduler.engine import (
    NO_HEADERS,
    Endpoint,
    EngineClient,
    EngineFailure,
    Output,
    TokenLogprob,
    is_too_long,
)
from rose.wire.pool import PendingRequest
from rose.wire.turns import ASKED_RUN

log = logging.getLogger("rose.scheduler")


@dataclass(kw_only=True, slots=True)
class TurnHandle:
    """A running turn as its waiters see it."""

    turn_id: str
    prompt_ids: list[int]
    sampling_params: dict[str, Any]
    tier: str = ""
    worker_id: str = ""
    queued_s: float = 0.0
    keep_entries: bool = False
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """W3C trace context; goes to every engine that the turn meets."""
    entries: list[TokenLogprob] = field(default_factory=list)
    watchers: list[asyncio.Event] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    done: asyncio.Future[te.TurnEnded] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    on_unavailable: Callable[[], None] = lambda: None
    hold: str = "capacity"
    """Why no worker took it in time."""
    routed_from: int | None = None
    """The first position whose routing to experts is not recorded yet; None: none is wanted."""
    routed: list[tuple[int, bytes]] = field(default_factory=list)
    """``(first position, what an engine returned)``, one for each attempt that gave tokens."""
    logprobs_modes: dict[int, str] = field(default_factory=dict)
    """By attempt, of the engines that said it."""

    def notify(self) -> None:
        for watcher in self.watchers:
            watcher.set()


class ServedModel(NamedTuple):
    """The least of what the workers of one model can do, dead ones included: they may come back within a turn."""

    max_model_len: int
    vocab_size: int | None
    alive: bool


NO_MODEL = ServedModel(2**62, None, False)


UNSTAMPED = (
    "its answers do not say whose weights sampled them (weight_versions), so no job that names a run is given to it; start the "
    "engine with the plugin, under a node agent"
)


class Dispatcher:
    """Args:
    book: The turn book; owned from here on.
    engines: To reach workers.
    clock: Monotonic.
    max_running: Bound on turns that have not ended.
    on_action: Told of every action, for metrics; must not raise.
    decisions: Told of every event with its actions; None records nothing.
    """

    def __init__(
        self,
        book: TurnBook,
        engines: EngineClient,
        clock: Clock,
        *,
        max_running: int,
        stream_upstream: bool = False,
        seed: int = 0,
        on_action: Callable[[te.Action], None] = lambda action: None,
        decisions: DecisionLog | None = None,
    ) -> None:
        self.book = book
        self.engines = engines
        self.endpoints: dict[str, Endpoint] = {}
        self.handles: dict[str, TurnHandle] = {}
        self.switching: dict[str, Switching] = {}
        """By worker: what its node last said of its changes of run."""
        self._clock = clock
        self.max_running = max_running
        self.stream_upstream = stream_upstream
        self._rng = random.Random(seed)
        self._on_action = on_action
        self._decisions = decisions
        self._attempts: dict[tuple[str, int], asyncio.Task[None] | PendingRequest] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._ready = asyncio.Event()
        self._models: dict[str, ServedModel] = {}
        self._models_as_of = -1
        self._helpers_of: dict[str | None, list[Worker]] = {}
        self._helpers_as_of = -1
        self.draining = False

    def now_s(self) -> float:
        return self._clock.now_s()

    # --- turns -----------------------------------------------------------------------------------------

    def submit(
        self,
        spec: te.TurnSubmitted,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        *,
        keep_entries: bool = False,
        trace_headers: Mapping[str, str] = NO_HEADERS,
        routed_from: int | None = None,
    ) -> TurnHandle:
        """Start a turn.

        Raises:
            CapacityError: 429, too many turns; 503, we are shutting down.
        """
        if self.draining:
            raise CapacityError("rose-scheduler is shutting down", retry_after_s=5.0)
        if len(self.handles) >= self.max_running:
            raise CapacityError("too many turns are running", status=429, code="queue_full")
        handle = TurnHandle(
            turn_id=spec.turn_id,
            prompt_ids=prompt_ids,
            sampling_params=sampling_params,
            keep_entries=keep_entries,
            trace_headers=trace_headers,
            routed_from=routed_from,
        )
        self.handles[spec.turn_id] = handle
        try:
            self.feed(spec)
        except PolicyError as error:
            del self.handles[spec.turn_id]
            raise CapacityError(str(error), status=429, code="queue_full") from error
        return handle

    def attach(self, handle: TurnHandle) -> None:
        """Somebody waits for this turn (again)."""
        if handle.turn_id in self.book.turns:
            self.feed(te.ClientBack(at_s=self.now_s(), turn_id=handle.turn_id))

    def detach(self, handle: TurnHandle) -> None:
        """Nobody waits any more; the turn runs on for a while, for a retry to join."""
        if handle.turn_id in self.book.turns:
            self.feed(te.ClientGone(at_s=self.now_s(), turn_id=handle.turn_id))

    def cancel_trajectory(self, trajectory_id: str, reason: str) -> None:
        """Stop every turn of a trajectory, in the engines too."""
        now_s = self.now_s()
        for turn_id in self.book.turns_of(trajectory_id):
            self.feed(te.TurnCancelled(at_s=now_s, turn_id=turn_id, reason=reason))
        self.feed(te.TrajectoryClosed(at_s=now_s, trajectory_id=trajectory_id))

    def cancel_turn(self, turn_id: str, reason: str) -> None:
        if turn_id in self.book.turns:
            self.feed(te.TurnCancelled(at_s=self.now_s(), turn_id=turn_id, reason=reason))

    def stop(self, turn_id: str, stop_reason: str) -> None:
        if turn_id in self.book.turns:
            self.feed(te.TurnStopped(at_s=self.now_s(), turn_id=turn_id, stop_reason=stop_reason))

    # --- settings --------------------------------------------------------------------------------------

    def set_policy(self, policy: RoutingPolicy) -> None:
        """Route by another policy from now on."""
        self.book.policy = policy
        self._settings_changed()

    def set_cap(self, tier: Tier, cap: int) -> None:
        """Turns per worker of this tier from now on; a worker that registered with its own cap keeps it."""
        self.book.fleet.set_cap(tier, cap)
        self._settings_changed()

    def assign(self, worker_id: str, job: str | None) -> None:
        """Give a worker to one job; see :class:`~rose.policy.turn_events.WorkerAssigned`."""
        self.feed(te.WorkerAssigned(at_s=self.now_s(), worker_id=worker_id, job=job))

    def _settings_changed(self) -> None:
        # No event says so, so the decision log goes on from the book as it is now.
        if self._decisions is not None:
            self._decisions.roll()

    # --- workers ---------------------------------------------------------------------------------------

    def register(self, event: te.WorkerRegistered, endpoint: Endpoint) -> None:
        self.endpoints[event.worker_id] = endpoint
        self._models_as_of = self._helpers_as_of = -1  # the same worker may have come with another endpoint
        self.feed(event)

    def heartbeat(self, event: te.WorkerHeartbeat) -> bool:
        worker = self.book.fleet.workers.get(event.worker_id)
        if worker is None or worker.incarnation != event.incarnation or event.worker_id not in self.endpoints:
            return False
        self.feed(event)
        return True

    def remove(self, worker_id: str) -> None:
        if worker_id not in self.book.fleet.workers:
            raise NotFound(f"worker '{worker_id[:64]}' is not registered", field="worker_id")
        self.feed(te.WorkerLost(at_s=self.now_s(), worker_id=worker_id, reason="lost", forget=True))
        self.endpoints.pop(worker_id, None)
        self.switching.pop(worker_id, None)

    def set_duty(self, worker_id: str, duty: Duty) -> None:
        if worker_id not in self.book.fleet.workers:
            raise NotFound(f"worker '{worker_id[:64]}' is not registered", field="worker_id")
        self.feed(te.WorkerDuty(at_s=self.now_s(), worker_id=worker_id, duty=duty))

    def require(self, job: str, version: Version, run: str = "") -> None:
        self.feed(te.VersionRequired(at_s=self.now_s(), job=job, version=version, run=run))

    def models(self) -> dict[str, ServedModel]:
        """What living workers serve.  Every request asks, so it is put together once per change of the fleet."""
        fleet = self.book.fleet
        if self._models_as_of != fleet.changes:
            self._models_as_of = fleet.changes
            self._models.clear()
            for worker in fleet:
                endpoint = self.endpoints.get(worker.worker_id)
                known = self._models.get(worker.model, NO_MODEL)
                vocab_size = None if endpoint is None else endpoint.vocab_size
                sizes = [size for size in (known.vocab_size, vocab_size) if size is not None]
                self._models[worker.model] = ServedModel(
                    max_model_len=min(known.max_model_len, worker.max_model_len),
                    vocab_size=min(sizes, default=None),
                    alive=known.alive or worker.health is not Health.DEAD,
                )
        return self._models

    async def helper(self, model: str | None, tried: set[str], max_wait_s: float) -> Endpoint:
        """A living worker for a render or derender call, dedicated ones first, waiting for one if need be.

        Raises:
            CapacityError: None came up in time.
        """
        deadline_s = self.now_s() + max_wait_s
        while True:
            usable = self._helpers(model)
            if tried:
                usable = [worker for worker in usable if worker.worker_id not in tried]
            if usable:
                # The less busy of two drawn ones: nearly as even as the least busy of all, at no cost that grows with the fleet.
                drawn = [usable[int(self._rng.random() * len(usable))] for _ in range(2)]
                return self.endpoints[min(drawn, key=_inflight).worker_id]
            left_s = deadline_s - self.now_s()
            if left_s <= 0:
                raise CapacityError("no worker is ready", retry_after_s=5.0)
            tried = set()
            self._ready.clear()
            try:
                await asyncio.wait_for(self._ready.wait(), min(left_s, 1.0))
            except TimeoutError:
                pass

    def _helpers(self, model: str | None) -> list[Worker]:
        """Who can render: workers in health, dedicated ones where there are any.  Put together once per change of the fleet."""
        fleet = self.book.fleet
        if self._helpers_as_of != fleet.changes:
            self._helpers_as_of = fleet.changes
            self._helpers_of.clear()
        found = self._helpers_of.get(model)
        if found is None:
            usable = [w for w in fleet if w.health is Health.READY and model in (None, w.model)]
            found = [w for w in usable if w.tier is Tier.DEDICATED] or usable
            if found:  # names that nobody serves come from clients, without end
                self._helpers_of[model] = found
        return found

    # --- events and actions ----------------------------------------------------------------------------

    def tick(self) -> None:
        self.feed(te.ClockTicked(at_s=self.now_s()))
        if self._decisions is not None:
            self._decisions.flush()
        workers = self.book.fleet.workers
        if len(self.endpoints) > len(workers):
            self.endpoints = {name: item for name, item in self.endpoints.items() if name in workers}
            self.switching = {name: item for name, item in self.switching.items() if name in workers}

    def feed(self, event: te.Event, output: Output | None = None) -> list[te.Action]:
        """Give the book an event and carry out its actions.  ``output``: the engine's answer, for an event that carries tokens."""
        actions = self.book.handle(event)
        if self._decisions is not None:
            self._decisions.record(event, actions)
        for action in actions:
            self._execute(action, output)
            self._on_action(action)
        if isinstance(event, te.WorkerHeartbeat):
            self._ready.set()
        return actions

    def _execute(self, action: te.Action, output: Output | None) -> None:
        match action:
            case te.Dispatch():
                handle = self.handles[action.turn_id]
                worker = self.book.fleet.workers[action.worker_id]
                handle.worker_id, handle.tier = worker.worker_id, worker.tier.value
                if action.attempt == 1:
                    handle.queued_s = action.queued_s
                self._begin(action, handle, self.endpoints[action.worker_id])
            case te.AbortAttempt():
                running = self._attempts.get((action.turn_id, action.attempt))
                if isinstance(running, PendingRequest):
                    del self._attempts[action.turn_id, action.attempt]
                if running is not None:
                    running.cancel()
                endpoint = self.endpoints.get(action.worker_id)
                if endpoint is not None:
                    self._spawn(self.engines.abort(endpoint, f"{action.turn_id}-{action.attempt}"))
            case te.StopAttempt():
                endpoint = self.endpoints.get(action.worker_id)
                if endpoint is not None:
                    self._spawn(self.engines.abort(endpoint, f"{action.turn_id}-{action.attempt}"))
            case te.TokensDropped():
                handle = self.handles[action.turn_id]
                handle.entries.clear()
                handle.tokens.clear()
                handle.logprobs.clear()
                if handle.routed:
                    handle.routed_from = handle.routed[0][0]
                    handle.routed.clear()
            case te.AnswerUnavailable():
                handle = self.handles[action.turn_id]
                handle.hold = action.hold
                handle.on_unavailable()
            case te.TurnEnded():
                handle = self.handles.pop(action.turn_id)
                if not handle.done.done():
                    handle.done.set_result(action)
                handle.notify()
            case te.TokensKept():
                assert output is not None
                handle, count = self.handles[action.turn_id], action.num_tokens
                handle.tokens.extend(output.token_ids[:count])
                handle.logprobs.extend(output.logprobs[:count])
                if handle.keep_entries:
                    handle.entries.extend(output.entries[:count])
                handle.notify()
            case te.Requeued() | te.Fenced():
                pass

    def _forget_attempt(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        del self._attempts[key]

    def _begin(self, action: te.Dispatch, handle: TurnHandle, engine: Endpoint) -> None:
        """Run one attempt and report how it went: without a task where its answer comes at once, over a connection that is open."""
        key = (action.turn_id, action.attempt)
        streamed = self.book.turns[action.turn_id].spec.shows_tokens
        body = self._request(action, handle, streamed=streamed)
        if not streamed:

            def done(found: Output | EngineFailure) -> None:
                del self._attempts[key]
                if isinstance(found, EngineFailure):
                    self._spawn(self._attempt_failed(*key, engine, found))
                    return
                try:
                    self._accept(handle, key[1], found, engine)
                except EngineFailure as failure:
                    self._spawn(self._attempt_failed(*key, engine, failure))
                except RoseError as error:
                    self._attempt_refused(*key, error)

            asked = self.engines.ask(
                engine, body, handle.trace_headers, done=done, entries=handle.keep_entries
            )
            if asked is not None:
                self._attempts[key] = asked
                return
        task = asyncio.create_task(self._attempt(*key, handle, engine, body, streamed=streamed))
        self._attempts[key] = task
        task.add_done_callback(functools.partial(self._forget_attempt, key))

    def _request(self, action: te.Dispatch, handle: TurnHandle, *, streamed: bool) -> dict[str, Any]:
        turn = self.book.turns[action.turn_id]
        params = {**handle.sampling_params, "max_tokens": action.max_tokens}
        kept = tuple(turn.token_ids[: action.num_kept_tokens])
        if turn.dispatch_run:
            params["extra_args"] = {ASKED_RUN: turn.dispatch_run}
        if kept and params.get("min_tokens"):
            params["min_tokens"] = max(0, params["min_tokens"] - len(kept))
        if handle.routed_from is not None:
            params["routed_experts_prompt_start"] = handle.routed_from
        body = {
            "request_id": f"{action.turn_id}-{action.attempt}",
            "token_ids": [*handle.prompt_ids, *kept] if kept else handle.prompt_ids,
            "sampling_params": params,
            "stream": streamed,
        }
        if streamed:
            body["stream_options"] = {"include_usage": True}
        return body

    async def _attempt(
        self,
        turn_id: str,
        attempt: int,
        handle: TurnHandle,
        engine: Endpoint,
        body: dict[str, Any],
        *,
        streamed: bool,
    ) -> None:
        """Run one attempt and report how it went; never raises but for cancellation."""
        try:
            if not streamed:
                output = await self.engines.generate(
                    engine, body, handle.trace_headers, entries=handle.keep_entries
                )
                self._accept(handle, attempt, output, engine)
                return
            async with contextlib.aclosing(
                self.engines.stream(engine, body, handle.trace_headers, entries=handle.keep_entries)
            ) as outputs:
                async for output in outputs:
                    self._accept(handle, attempt, output, engine)
                    if output.finish_reason is not None:
                        return
        except EngineFailure as failure:
            await self._attempt_failed(turn_id, attempt, engine, failure)
        except RoseError as error:
            self._attempt_refused(turn_id, attempt, error)

    def _attempt_refused(self, turn_id: str, attempt: int, error: RoseError) -> None:
        log.error("attempt %s-%d: %s", turn_id, attempt, error)
        self._report_failure(turn_id, attempt, "bad", str(error))

    def _accept(self, handle: TurnHandle, attempt: int, output: Output, engine: Endpoint) -> None:
        if handle.routed_from is not None:
            _keep_routing(handle, output, engine)
        if engine.logprobs_mode is not None:
            handle.logprobs_modes[attempt] = engine.logprobs_mode
        if output.finish_reason is None:
            event: te.TokensArrived | te.AttemptEnded = te.TokensArrived(
                at_s=self.now_s(),
                turn_id=handle.turn_id,
                attempt=attempt,
                token_ids=output.token_ids,
                logprobs=output.logprobs,
            )
        else:
            event = te.AttemptEnded(
                at_s=self.now_s(),
                turn_id=handle.turn_id,
                attempt=attempt,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                num_cached_tokens=output.num_cached_tokens,
                versions=output.versions,
                kv_mixed=output.kv_mixed,
                token_ids=output.token_ids,
                logprobs=output.logprobs,
                run=output.run,
            )
        worker = None if output.run else self.book.fleet.workers.get(engine.worker_id)
        was_unstamped = worker is None or worker.unstamped
        self.feed(event, output)
        if worker is not None and worker.unstamped and not was_unstamped:
            log.error("worker %s: %s", engine.worker_id, UNSTAMPED)

    async def _attempt_failed(
        self, turn_id: str, attempt: int, engine: Endpoint, failure: EngineFailure
    ) -> None:
        if failure.unreachable and not await self.engines.is_alive(engine):
            # Refused or reset, and no answer to a probe: the process is gone, all its turns move at once.
            worker = self.book.fleet.workers.get(engine.worker_id)
            if worker is not None and self.endpoints.get(engine.worker_id) is engine:
                log.warning("worker %s is gone: %s", engine.worker_id, failure)
                # This moves the failed turn too, so there is nothing more to report about it.
                self.feed(te.WorkerLost(at_s=self.now_s(), worker_id=engine.worker_id, reason="lost"))
                return
        self._report_failure(turn_id, attempt, failure.kind, failure.message)

    def _report_failure(self, turn_id: str, attempt: int, kind: str, message: str) -> None:
        self.feed(
            te.AttemptFailed(at_s=self.now_s(), turn_id=turn_id, attempt=attempt, kind=kind, message=message)
        )

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Abort what still runs and wait for the tasks."""
        tasks = [running for running in self._attempts.values() if isinstance(running, asyncio.Task)]
        for running in self._attempts.values():
            running.cancel()
        await asyncio.gather(*tasks, *self._background, return_exceptions=True)


def _keep_routing(handle: TurnHandle, output: Output, engine: Endpoint) -> None:
    """Record which experts an attempt's tokens went to.  An attempt that was lost leaves none, and the next one covers its tokens.

    Raises:
        EngineFailure: The engine returns none.
    """
    assert handle.routed_from is not None
    if output.routed_experts is not None:
        handle.routed.append((handle.routed_from, output.routed_experts))
        # The last token has not gone through the model yet.
        num_tokens = len(handle.tokens) + len(output.token_ids)
        handle.routed_from = len(handle.prompt_ids) + num_tokens - 1
    elif output.finish_reason is not None and (output.token_ids or output.finish_reason != "abort"):
        raise EngineFailure(
            f"worker {engine.worker_id} returns no routed experts, which this trajectory is to record "
            "(start its engine with --enable-return-routed-experts)",
            kind="data",
        )


def _inflight(worker: Worker) -> int:
    return worker.inflight


def no_worker(handle: TurnHandle) -> CapacityError:
    """The error a client gets for a turn that goes on waiting."""
    because = te.HOLDS.get(handle.hold, handle.hold)
    return CapacityError(f"no worker could take the turn in time: {because}", retry_after_s=5.0)


def turn_error(ended: te.TurnEnded) -> RoseError:
    """The error a client gets for a turn that did not end well."""
    if ended.outcome is te.TurnState.CANCELLED:
        text = f"the turn was cancelled ({ended.reason})"
        return Gone(text, code="trajectory_cancelled", reason=ended.reason)
    match ended.reason:
        case "deadline":
            return CapacityError(
                "the turn's deadline passed", status=504, code="deadline_exceeded", retry_after_s=None
            )
        case "data":
            text = ended.message
            code = "context_length_exceeded" if is_too_long(text) else "invalid_request"
            return RequestError(text, code=code)
        case _:
            return EngineError(f"the engines failed: {ended.message}")
