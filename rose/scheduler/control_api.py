"""Routes of environments (trajectories), trainers (batches, versions) and nodes (workers).

Thin: read the body, call the store or the dispatcher, wait for the disk where the answer is a promise.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from aiohttp import web

from rose.auth import Tokens
from rose.errors import NotFound, RequestError
from rose.policy import samples as sp
from rose.policy import turn_events as te
from rose.policy.fleet import Duty, Tier, Worker
from rose.policy.staleness import Version, format_version, parse_version
from rose.scheduler.config import SchedulerConfig
from rose.scheduler.dispatch import Dispatcher
from rose.scheduler.engine import Endpoint
from rose.scheduler.http import Fields, bounded_json, json_response, read_object
from rose.scheduler.journal import FinishRecord, packed
from rose.scheduler.pool import Target
from rose.scheduler.store import Store
from rose.scheduler.timeline import Promise, Timeline

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "min_tokens",
    "allowed_token_ids",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "skip_special_tokens",
    "chat_template_kwargs",
)
"""What a trajectory may fix for all its turns."""

MIN_RATIO = 1e-6
"""Of new prompt tokens to sampled ones; the inverse of the largest."""


class ControlRoutes:
    def __init__(
        self,
        config: SchedulerConfig,
        tokens: Tokens,
        store: Store,
        dispatcher: Dispatcher,
        timeline: Timeline,
    ) -> None:
        self._tokens = tokens
        self._timeline = timeline
        self._config = config
        self._store = store
        self._dispatcher = dispatcher
        self._group_ready = asyncio.Event()
        self._compacting: asyncio.Task[None] | None = None
        self._swept_at_s = 0.0

    # --- trajectories (environment) --------------------------------------------------------------------------

    async def create(self, request: web.Request) -> web.Response:
        body = await read_object(request)
        fields = Fields(body)
        max_bytes = self._config.limits.max_info_bytes
        job = fields.text("job")
        group_id = None if fields.raw("group_id") is None else fields.text("group_id")
        group_size = fields.integer("group_size", default=1, least=1, most=4096)
        if group_id is None and group_size != 1:
            raise RequestError("is required when group_size is over 1", field="group_id")
        task = bounded_json(fields.raw("task"), field="task", max_bytes=max_bytes)
        sampling = fields.raw("sampling")
        sampling = {} if sampling is None else sampling
        if not isinstance(sampling, dict):
            raise RequestError("must be an object", field="sampling")
        for name in sampling:
            if name not in SAMPLING_FIELDS:
                raise RequestError("unknown field", field=f"sampling.{name[:64]}")
        bounded_json(sampling, field="sampling", max_bytes=max_bytes)
        task_kind = "" if fields.raw("task_kind") is None else fields.text("task_kind")
        ratio = fields.optional_number("prefill_per_decode", least=MIN_RATIO, most=1 / MIN_RATIO)
        most_s = self._config.timeouts.max_trajectory_s
        deadline_s = fields.optional_number("deadline_s", least=0.001, most=most_s)
        fields.done()
        key = request.headers.get("Idempotency-Key", "")
        if len(key) > 256:
            raise RequestError("must have at most 256 characters", field="Idempotency-Key")
        name = self._store.create(
            job=job,
            group_id=group_id,
            group_size=group_size,
            task=task,
            sampling=sampling,
            key=key,
            task_kind=task_kind,
            prefill_per_decode=ratio,
            deadline_s=deadline_s,
        )
        await self._store.journal.commit()
        return json_response({"id": name, "key": self._tokens.key_of(name)})

    async def get(self, request: web.Request) -> web.Response:
        trajectory = self._store.get(request.match_info["id"])
        return json_response(trajectory.trace(*self._store.state(trajectory.id)))

    async def list(self, request: web.Request) -> web.Response:
        job, state = request.query.get("job"), request.query.get("state")
        if state is not None and state not in [s.value for s in sp.SampleState]:
            options = ", ".join(s.value for s in sp.SampleState)
            raise RequestError(f"must be one of {options}", field="state")
        found: list[dict[str, Any]] = []
        for name, trajectory in self._store.trajectories.items():
            now, reason = self._store.state(name)
            if (job is None or trajectory.created.job == job) and (state is None or now == state):
                found.append(
                    {
                        "id": name,
                        "job": trajectory.created.job,
                        "group_id": trajectory.created.group_id,
                        "state": now,
                        "reason": reason,
                        "reward": None if trajectory.finish is None else trajectory.finish.reward,
                        "num_turns": len(trajectory.turns),
                    }
                )
                if len(found) == 10_000:
                    break
        return json_response({"trajectories": found})

    async def finish(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        fields = Fields(await read_object(request))
        reward = fields.number("reward", least=-1e30, most=1e30)
        if not math.isfinite(reward):
            raise RequestError("must be finite", field="reward")
        success = fields.boolean("success", default=None)
        max_bytes = self._config.limits.max_info_bytes
        info = bounded_json(fields.raw("info"), field="info", max_bytes=max_bytes)
        fields.done()
        fresh = self._store.get(name).finish is None
        actions = self._store.finish(FinishRecord(id=name, reward=reward, success=success, info=packed(info)))
        self._timeline.num_finished += fresh
        self._carry_out(actions)
        # A finished trajectory takes no more turns; what still runs would be recorded nowhere.
        self._dispatcher.cancel_trajectory(name, "finished")
        await self._store.journal.commit()
        state, reason = self._store.state(name)
        return json_response({"id": name, "state": state, "reason": reason})

    async def cancel(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        self._carry_out(self._store.cancel(name, "cancelled"))
        await self._store.journal.commit()
        state, reason = self._store.state(name)
        return json_response({"id": name, "state": state, "reason": reason})

    # --- batches (trainer) -----------------------------------------------------------------------------

    async def lease(self, request: web.Request) -> web.Response:
        return await self._lease(request, "")

    async def put_batch(self, request: web.Request) -> web.Response:
        """The same name again, at any time and from any connection, gives the same batch."""
        return await self._lease(request, _batch_id(request))

    async def _lease(self, request: web.Request, name: str) -> web.Response:
        fields = Fields(await read_object(request))
        job = fields.text("job")
        num_groups = fields.integer("num_groups", least=1, most=65_536)
        version = parse_version(fields.raw("version", required=True))
        ttl_s = fields.number("ttl_s", default=600.0, least=0.001, most=self._config.batches.max_ttl_s)
        wait_s = fields.number("wait_s", default=0.0, least=0, most=1e9)
        alpha, on_stale = _staleness(fields)
        prompts = fields.text("prompts", default="suffix")
        consumer = fields.text("consumer", default="")
        fields.done()
        if prompts not in ("whole", "suffix"):
            raise RequestError("is 'whole' or 'suffix'", field="prompts")
        deadline_s = self._dispatcher.now_s() + min(wait_s, self._config.timeouts.max_wait_s)
        while True:
            changed = self._group_ready
            leased, actions = self._store.lease(
                job=job,
                num_groups=num_groups,
                version=version,
                ttl_s=ttl_s,
                alpha=alpha,
                on_stale=on_stale,
                name=name,
                consumer=consumer,
            )
            self._carry_out(actions)
            if leased is not None:
                await self._store.journal.commit()
                if leased.is_new:
                    oldest = [self._store.trajectories[name].oldest for name in leased.trajectory_ids]
                    self._timeline.on_leased(
                        version[1] - old[1] for old in oldest if old is not None and old[0] == version[0]
                    )
                return json_response(
                    {"batch_id": leased.batch_id, "trajectories": self._traces(leased, prompts)}
                )
            left_s = deadline_s - self._dispatcher.now_s()
            if left_s <= 0 or self._dispatcher.draining:
                return web.Response(status=204)
            try:
                await asyncio.wait_for(changed.wait(), min(left_s, 1.0))
            except TimeoutError:
                pass

    def _traces(self, leased: sp.Leased, prompts: str) -> list[dict[str, Any]]:
        return [
            self._store.trajectories[name].trace(*self._store.state(name), whole_prompts=prompts == "whole")
            for name in leased.trajectory_ids
        ]

    async def ack(self, request: web.Request) -> web.Response:
        fields = Fields(await read_object(request))
        step = fields.integer("step")
        attempt = fields.integer("attempt")
        fields.done()
        self._carry_out(self._store.ack(request.match_info["id"], step, attempt))
        await self._store.journal.commit()
        return json_response({})

    async def give_back(self, request: web.Request) -> web.Response:
        self._carry_out(self._store.give_back(_batch_id(request)))
        await self._store.journal.commit()
        return json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        fields = Fields(await read_object(request))
        attempt = fields.integer("attempt")
        consumed = fields.raw("consumed", required=True)
        consumer = fields.text("consumer", default="")
        fields.done()
        if not isinstance(consumed, list) or not all(isinstance(name, str) for name in consumed):
            raise RequestError("must be a list of trajectory ids", field="consumed")
        actions = self._store.resume(request.match_info["job"], attempt, consumed, consumer)
        self._carry_out(actions)
        await self._store.journal.commit()
        returned = [
            name for action in actions if isinstance(action, sp.Returned) for name in action.group_ids
        ]
        dropped = [
            name for action in actions if isinstance(action, sp.Consumed) for name in action.trajectory_ids
        ]
        return json_response({"returned_groups": len(set(returned)), "consumed": len(dropped)})

    async def version(self, request: web.Request) -> web.Response:
        fields = Fields(await read_object(request))
        job = fields.text("job")
        version: Version = (fields.integer("attempt"), fields.integer("version"))
        alpha, on_stale = _staleness(fields)
        fields.done()
        if self._store.require(job, version):
            # Before the workers hear of the version: no engine carries over the update what is of no use after it.
            live = self._dispatcher.book.oldest_live(job)
            spent = self._store.drop_spent(
                job=job, version=version, alpha=alpha, on_stale=on_stale, live=live
            )
            self._carry_out(spent)
            self._dispatcher.require(job, version)
            self._timeline.on_step(job, format_version(version))
            await self._store.journal.commit()
        return json_response({"job": job, "version": format_version(version)})

    # --- workers (node) --------------------------------------------------------------------------------

    async def register(self, request: web.Request) -> web.Response:
        fields = Fields(await read_object(request))
        worker_id = fields.text("worker_id", max_chars=128)
        url = fields.text("url", max_chars=512).rstrip("/")
        try:
            if "?" in url or "#" in url:
                raise ValueError("a query or a fragment")
            Target.of(url, {})
        except ValueError:
            raise RequestError("must be http://host:port", field="url") from None
        tier = fields.choice("tier", tuple(tier.value for tier in Tier))
        model = fields.text("model")
        max_model_len = fields.integer("max_model_len", least=2, most=2**24)
        incarnation = fields.text("incarnation", max_chars=128)
        token = None if fields.raw("engine_token") is None else fields.text("engine_token", max_chars=512)
        vocab_size = fields.optional_integer("vocab_size", least=1, most=2**32)
        cap = fields.optional_integer("cap", least=1, most=65_536)
        max_num_seqs = fields.optional_integer("max_num_seqs", least=1, most=65_536)
        fields.done()
        workers = self._dispatcher.book.fleet.workers
        if worker_id not in workers and len(workers) >= self._config.limits.max_workers:
            raise RequestError("too many workers", field="worker_id", status=429, code="queue_full")
        self._dispatcher.register(
            te.WorkerRegistered(
                at_s=self._dispatcher.now_s(),
                worker_id=worker_id,
                incarnation=incarnation,
                tier=Tier(tier),
                model=model,
                max_model_len=max_model_len,
                cap=cap,
                max_num_seqs=max_num_seqs,
            ),
            Endpoint(worker_id=worker_id, url=url, token=token, vocab_size=vocab_size),
        )
        return json_response({"worker_id": worker_id, "required_version": self._required()})

    async def heartbeat(self, request: web.Request) -> web.Response:
        fields = Fields(await read_object(request))
        version = fields.raw("version")
        known = self._dispatcher.heartbeat(
            te.WorkerHeartbeat(
                at_s=self._dispatcher.now_s(),
                worker_id=request.match_info["id"],
                incarnation=fields.text("incarnation", max_chars=128),
                seq=fields.integer("seq"),
                version=None if version is None else parse_version(version),
                state=fields.choice("state", ("ready", "starting", "stopping")),
                kv_budget_tokens=fields.optional_integer("kv_budget_tokens"),
                kv_used_tokens=fields.optional_integer("kv_used_tokens"),
                running=fields.integer("running", default=0),
                gated=bool(fields.boolean("gated")),
                reclaim_seq=fields.integer("reclaim_seq", default=0),
                slack_s=fields.optional_number("slack_s", least=-1e9, most=1e9),
                waiting=fields.integer("waiting", default=0),
                num_preemptions=fields.integer("num_preemptions", default=0),
                serving_use=fields.number("serving_use", default=0.0, least=0.0, most=1.0),
            )
        )
        breaches = fields.integer("slo_breaches", default=0)
        promises = _promises(fields)
        if known:
            self._timeline.on_breaches(request.match_info["id"], breaches)
            self._timeline.on_promises(request.match_info["id"], promises)
        # Unknown fields are let through: a newer node may say more than we read.
        worker = self._dispatcher.book.fleet.workers.get(request.match_info["id"])
        # ``active`` false: no job wants this device now, its engine may give its memory back.
        active = worker is None or worker.job != ""
        return json_response({"known": known, "required_version": self._required(), "active": active})

    async def remove(self, request: web.Request) -> web.Response:
        self._dispatcher.remove(request.match_info["id"])
        return json_response({})

    async def duty(self, request: web.Request) -> web.Response:
        duties = {"drain": Duty.DRAINING, "cordon": Duty.CORDONED, "uncordon": Duty.ACTIVE}
        verb = request.match_info["verb"]
        if verb not in duties:
            raise NotFound(f"no such action: {verb[:32]}", field="path")
        self._dispatcher.set_duty(request.match_info["id"], duties[verb])
        return json_response({"worker_id": request.match_info["id"], "duty": duties[verb].value})

    async def workers(self, request: web.Request) -> web.Response:
        now_s = self._dispatcher.now_s()
        fleet = self._dispatcher.book.fleet
        return json_response({"workers": [worker_status(worker, now_s) for worker in fleet]})

    # --- shared ----------------------------------------------------------------------------------------

    def housekeep(self) -> None:
        """Return expired leases, cancel late and abandoned trajectories, keep the journal bounded."""
        now_s = self._dispatcher.now_s()
        self._carry_out(self._store.expire(now_s))
        self._carry_out(self._store.expire_late(time.time()))
        if now_s >= self._swept_at_s + 10.0:
            self._swept_at_s = now_s
            busy = {turn.spec.trajectory_id for turn in self._dispatcher.book.turns.values()}
            self._carry_out(self._store.expire_idle(self._config.timeouts.trajectory_idle_s, busy))
        if self._store.is_journal_large and (self._compacting is None or self._compacting.done()):
            self._compacting = asyncio.create_task(self._store.compact())

    async def close(self) -> None:
        """What was begun beside the routes is done."""
        if self._compacting is not None:
            await self._compacting

    def _carry_out(self, actions: list[sp.Action]) -> None:
        for action in actions:
            match action:
                case sp.Discard():
                    for name in action.trajectory_ids:
                        self._dispatcher.cancel_trajectory(name, action.reason)
                case sp.GroupReady() | sp.Returned():
                    self._group_ready.set()
                    self._group_ready = asyncio.Event()
                case sp.Consumed() | sp.Leased():
                    pass

    def _required(self) -> str | None:
        required = self._dispatcher.book.required.values()
        return format_version(max(required)) if required else None


def _batch_id(request: web.Request) -> str:
    name = request.match_info["id"]
    if len(name) > 256 or not name.isprintable():
        raise RequestError("must be text of 1 to 256 printable characters", field="batch_id")
    return name


def _staleness(fields: Fields) -> tuple[int | None, str | None]:
    """``alpha`` and ``on_stale``, where a trainer names its own."""
    alpha = fields.optional_integer("alpha")
    return alpha, fields.choice("on_stale", sp.STALE_RULES) if fields.raw("on_stale") is not None else None


def _promises(fields: Fields) -> dict[str, Promise]:
    """Production's P99 beside what it promises, for what the node knows both of."""
    found: dict[str, Promise] = {}
    for kind in ("ttft", "tpot"):
        p99_s = fields.optional_number(f"serving_{kind}_p99_s", least=0.0, most=1e9)
        slo_s = fields.optional_number(f"slo_{kind}_s", least=1e-6, most=1e9)
        if p99_s is not None and slo_s is not None:
            found[kind] = Promise(p99_s, slo_s)
    return found


def worker_status(worker: Worker, now_s: float) -> dict[str, Any]:
    """A worker for people and for the page.  No token, no address."""
    return {
        "worker_id": worker.worker_id,
        "tier": worker.tier.value,
        "model": worker.model,
        "health": worker.health.value,
        "lending": worker.lending.value,
        "duty": worker.duty.value,
        "incarnation": worker.incarnation,
        "version": None if worker.version is None else format_version(worker.version),
        "inflight": worker.inflight,
        "cap": worker.cap,
        "reserved_tokens": worker.reserved_tokens,
        "kv_budget_tokens": worker.kv_budget_tokens,
        "kv_used_tokens": worker.kv_used_tokens,
        "running": worker.running,
        "waiting": worker.waiting,
        "num_preemptions": worker.num_preemptions,
        "gated": worker.gated,
        "resting": worker.rests_until_s is not None,
        "slack_s": worker.slack_s,
        "reclaim_seq": worker.reclaim_seq,
        "silent_s": round(now_s - worker.heard_at_s, 3),
        "max_model_len": worker.max_model_len,
    }
