"""Routes of environments (trajectories), trainers (batches, versions) and nodes (workers).

Thin: read the body, call the store or the dispatcher, wait for the disk where the answer is a promise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import cast

from aiohttp import web

from rose.auth import Tokens
from rose.errors import NotFound, RequestError
from rose.lineage import format_version, parse_version
from rose.policy import samples as sp
from rose.policy import turn_events as te
from rose.policy.assigning import Switching
from rose.policy.staleness import set_back, worst_lag
from rose.policy.worker import Duty, Tier, Worker
from rose.scheduler.dispatch import UNSTAMPED, Dispatcher
from rose.scheduler.engine import Endpoint
from rose.scheduler.fleet_api import FleetRoutes
from rose.scheduler.http import bounded_json, encode, json_response, name_in, read_report, read_wire
from rose.scheduler.protocols import named_as
from rose.scheduler.records import FinishRecord, ScoreRecord, packed
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.scheduler.search import Search
from rose.scheduler.slices import Slices
from rose.scheduler.store import TrajectoryStore
from rose.scheduler.timeline import Promise, Timeline
from rose.scheduler.trajectory import Trajectory
from rose.wire.answers import (
    Empty,
    GroupSummary,
    RequiredVersion,
    ResumedJob,
    TrajectoryEnded,
    TrajectoryKey,
    TrajectorySummary,
    TrajectoryTrace,
    TurnTrace,
    WorkerDutyStatus,
    WorkerList,
    WorkerStatus,
)
from rose.wire.pool import HttpTarget
from rose.wire.reading import Reports
from rose.wire.samples import Ack, Finish, Lease, NewTrajectory, NewVersion, Resume, Score, Scored
from rose.wire.sampling import OfTrajectory, check_sampling
from rose.wire.workers import Heartbeat, HeartbeatAnswer, Registered, Registration

log = logging.getLogger("rose.scheduler")

DEFAULT_TTL_S = 600.0
"""Of a lease."""


class ControlRoutes:
    def __init__(
        self,
        config: SchedulerConfig,
        tokens: Tokens,
        store: TrajectoryStore,
        dispatcher: Dispatcher,
        timeline: Timeline,
        fleet: FleetRoutes,
        looking: asyncio.Lock,
        reports: Reports,
    ) -> None:
        self._reports = reports
        self._looking = looking
        self._tokens = tokens
        self._fleet = fleet
        self._timeline = timeline
        self._config = config
        self._store = store
        self._dispatcher = dispatcher
        self._group_ready = asyncio.Event()
        self._compacting: asyncio.Task[None] | None = None
        self._swept_at_s = 0.0

    # --- trajectories (environment) --------------------------------------------------------------------------

    async def create(self, request: web.Request) -> web.Response:
        body = await read_wire(request, NewTrajectory)
        max_bytes, most_s = self._config.limits.max_info_bytes, self._config.timeouts.max_trajectory_s
        group_size = body.group_size or 1
        if body.group_id is None and group_size != 1:
            raise RequestError("is required when group_size is over 1", field="group_id")
        sampling = body.sampling or {}
        check_sampling(sampling, OfTrajectory, "sampling.")
        if body.deadline_s is not None and body.deadline_s > most_s:
            raise RequestError(f"must be at most {most_s:g}", field="deadline_s")
        name = self._store.create(
            job=body.job,
            group_id=body.group_id,
            group_size=group_size,
            task=bounded_json(body.task, field="task", max_bytes=max_bytes),
            sampling=bounded_json(sampling, field="sampling", max_bytes=max_bytes),
            key=name_in(request.headers, "Idempotency-Key"),
            task_kind=body.task_kind or "",
            prefill_per_decode=body.prefill_per_decode,
            deadline_s=body.deadline_s,
            metadata=body.metadata,
            record=body.record or [],
            trains_side=body.train_side_requests or False,
        )
        await self._store.journal.commit()
        return json_response(TrajectoryKey(id=name, key=self._tokens.key_of(name)))

    async def get(self, request: web.Request) -> web.Response:
        trajectory = self._named(request)
        async with self._looking:
            state = self._store.state(trajectory.id)
            return json_response(await _trace(trajectory, state, Slices(), whole_prompts=True))

    async def list(self, request: web.Request) -> web.Response:
        wanted = Search.of(request)
        found: list[bytes] = []
        async with self._looking:
            async for trajectory, state, reason in self._found(wanted, Slices()):
                listed: TrajectorySummary = {
                    "id": trajectory.id,
                    "job": trajectory.created.job,
                    "group_id": trajectory.created.group_id,
                    "state": state,
                    "reason": reason,
                    "reward": None if trajectory.finish is None else trajectory.finish.reward,
                    "success": None if trajectory.finish is None else trajectory.finish.success,
                    "created_at": trajectory.created.created_at,
                    "num_turns": len(trajectory.turns),
                    "num_tokens": trajectory.num_tokens,
                    "num_side_turns": sum(map(trajectory.is_side, trajectory.turns)),
                    "metadata": trajectory.created.metadata,
                }
                found.append(encode(listed))
                if len(found) == wanted.limit:
                    break
        return json_response(b'{"trajectories":[' + b",".join(found) + b"]}")

    async def groups(self, request: web.Request) -> web.Response:
        """Groups with a trajectory that is searched for; counted are all of its trajectories that are known."""
        wanted, slices = Search.of(request), Slices()
        found: dict[tuple[str, str], GroupSummary] = {}
        async with self._looking:
            async for trajectory, _, _ in self._found(wanted, slices):
                job, group_id = trajectory.created.job, trajectory.created.group_id
                if len(found) < wanted.limit and (job, group_id) not in found:
                    found[job, group_id] = {
                        "job": job,
                        "group_id": group_id,
                        "group_size": 0,
                        "states": {},
                        "rewards": [],
                        "metadata": {},
                    }
            async for trajectory, state, _ in self._found(Search(), slices):
                created = trajectory.created
                group = found.get((created.job, created.group_id))
                if group is None:
                    continue
                group["states"][state] = group["states"].get(state, 0) + 1
                if trajectory.finish is not None:
                    group["rewards"].append(trajectory.finish.reward)
                both = group["metadata"].items() & created.metadata.items()
                group["metadata"] = dict(both) if group["group_size"] else created.metadata
                group["group_size"] = created.group_size
            return json_response({"groups": await slices.json_list(found.values())})

    def _named(self, request: web.Request) -> Trajectory:
        """Raises NotFound that names the path's id: no header says which trajectory is meant here."""
        with named_as({"X-Session-ID": "id"}):
            return self._store.get(request.match_info["id"])

    async def _found(self, wanted: Search, slices: Slices) -> AsyncIterator[tuple[Trajectory, str, str]]:
        async for trajectory in slices.over(list(self._store.trajectories.values())):
            if trajectory.id not in self._store.trajectories:
                continue  # forgotten meanwhile
            state, reason = self._store.state(trajectory.id)
            if wanted.fits(trajectory.created, state):
                yield trajectory, state, reason

    async def finish(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        body = await read_wire(request, Finish)
        info = bounded_json(body.info, field="info", max_bytes=self._config.limits.max_info_bytes)
        trajectory = self._named(request)
        fresh = trajectory.finish is None
        if body.reward is not None:
            actions = self._store.finish(
                FinishRecord(id=name, reward=body.reward, success=body.success, info=packed(info))
            )
        elif body.success is not None or info is not None:
            raise RequestError("is required with success or info", field="reward")
        else:
            actions = self._store.close(name)
        # A finished trajectory takes no more turns; what still runs would be recorded nowhere.
        return await self._scored(trajectory, actions, fresh=fresh)

    async def score(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        body = await read_wire(request, Score)
        info = bounded_json(body.info, field="info", max_bytes=self._config.limits.max_info_bytes)
        if body.reward is None and (body.success is not None or info is not None):
            raise RequestError("is required with success or info", field="reward")
        trajectory = self._named(request)
        fresh = trajectory.finish is None
        actions = self._store.add_scores(
            ScoreRecord(
                id=name,
                reward=body.reward,
                success=body.success,
                info=packed(info),
                turns=_numbered(trajectory, body.turns, "turns"),
                branches=_numbered(trajectory, body.branches, "branches"),
            )
        )
        return await self._scored(trajectory, actions, fresh=fresh)

    async def _scored(self, trajectory: Trajectory, actions: list[sp.Action], *, fresh: bool) -> web.Response:
        if fresh and trajectory.finish is not None:
            self._timeline.on_finished(
                trajectory.created.job, trajectory.finish.reward, trajectory.finish.success
            )
        self._carry_out(actions)
        if trajectory.closed or trajectory.finish is not None:
            self._dispatcher.cancel_trajectory(trajectory.id, "finished")
        return await self._ended(trajectory.id, actions)

    async def cancel(self, request: web.Request) -> web.Response:
        name = self._named(request).id
        actions = self._store.cancel(name, "cancelled")
        self._carry_out(actions)
        return await self._ended(name, actions)

    async def _ended(self, name: str, actions: list[sp.Action]) -> web.Response:
        """What became of a trajectory; one that is final may be forgotten already."""
        await self._store.journal.commit()
        discards = (each for each in actions if isinstance(each, sp.Discard) and name in each.trajectory_ids)
        reason = next((each.reason for each in discards), "")
        state = sp.SampleState.STALE if reason == "stale" else sp.SampleState.CANCELLED
        told = (state.value, reason) if name not in self._store.trajectories else self._store.state(name)
        return json_response(TrajectoryEnded(id=name, state=told[0], reason=told[1]))

    # --- batches (trainer) -----------------------------------------------------------------------------

    async def lease(self, request: web.Request) -> web.Response:
        return await self._lease(request, "")

    async def put_batch(self, request: web.Request) -> web.Response:
        """The same name again, at any time and from any connection, gives the same batch."""
        return await self._lease(request, _batch_id(request))

    async def _lease(self, request: web.Request, name: str) -> web.Response:
        body = await read_wire(request, Lease)
        self._store.check_run(body.job, body.run or "")
        version = parse_version(body.version)
        ttl_s = DEFAULT_TTL_S if body.ttl_s is None else body.ttl_s
        if ttl_s > self._config.batches.max_ttl_s:
            raise RequestError(f"must be at most {self._config.batches.max_ttl_s:g}", field="ttl_s")
        prompts = body.prompts or "suffix"
        deadline_s = self._dispatcher.now_s() + min(body.wait_s or 0.0, self._config.timeouts.max_wait_s)
        while True:
            changed = self._group_ready
            leased, actions = self._store.lease(
                job=body.job,
                num_groups=body.num_groups,
                version=version,
                ttl_s=ttl_s,
                alpha=body.alpha,
                on_stale=body.on_stale,
                name=name,
                consumer=body.consumer or "",
            )
            self._carry_out(actions)
            if leased is not None:
                await self._store.journal.commit()
                whole, slices = prompts == "whole", Slices()
                held = [self._store.trajectories[name] for name in leased.trajectory_ids]
                if leased.is_new:
                    self._timeline.on_leased(
                        worst_lag(version, each.versions) for each in held if each.versions
                    )
                states = [self._store.state(name) for name in leased.trajectory_ids]
                traces = [
                    await _trace(trajectory, state, slices, whole_prompts=whole)
                    for trajectory, state in zip(held, states, strict=True)
                ]
                return json_response({"batch_id": leased.batch_id, "trajectories": traces})
            left_s = deadline_s - self._dispatcher.now_s()
            if left_s <= 0 or self._dispatcher.draining:
                return web.Response(status=204)
            try:
                await asyncio.wait_for(changed.wait(), min(left_s, 1.0))
            except TimeoutError:
                pass

    async def ack(self, request: web.Request) -> web.Response:
        body, name = await read_wire(request, Ack), request.match_info["id"]
        book = self._store.book
        batch = book.batches.get(name) or book.expired.get(name)
        if batch is not None:
            self._store.check_run(batch.job, body.run or "")
        self._carry_out(self._store.ack(name, body.step, body.attempt))
        await self._store.journal.commit()
        return json_response(Empty())

    async def give_back(self, request: web.Request) -> web.Response:
        self._carry_out(self._store.give_back(_batch_id(request)))
        await self._store.journal.commit()
        return json_response(Empty())

    async def resume(self, request: web.Request) -> web.Response:
        body = await read_wire(request, Resume)
        job = request.match_info["job"]
        self._store.check_run(job, body.run or "")
        actions = self._store.resume(job, body.attempt, body.consumed, body.consumer or "")
        self._carry_out(actions)
        num_waited = num_running = 0
        if body.afresh:
            num_waited, num_running, given_up = self._store.begin_afresh(job)
            self._carry_out(given_up)
        await self._store.journal.commit()
        returned = [
            name for action in actions if isinstance(action, sp.Returned) for name in action.group_ids
        ]
        dropped = [
            name for action in actions if isinstance(action, sp.Consumed) for name in action.trajectory_ids
        ]
        return json_response(
            ResumedJob(
                returned_groups=len(set(returned)),
                consumed=len(dropped),
                dropped_groups=num_waited,
                cancelled=num_running,
            )
        )

    async def version(self, request: web.Request) -> web.Response:
        body = await read_wire(request, NewVersion)
        job, version = body.job, (body.attempt, body.version)
        before = self._store.versions.get(job, version)
        alpha = self._store.book.params.of(job).alpha if body.alpha is None else body.alpha
        steps = set_back(version, before)
        warning = (
            f"job {job}: attempt {version[0]} begins at step {version[1]}, {steps} below step {before[1]} of attempt {before[0]}; what "
            f"was sampled more than {alpha} versions away is lost to it. If it was to go on, stop it and start it from its checkpoint"
            if steps > alpha
            else ""
        )
        if warning:
            log.error("%s", warning)
        if self._store.require(job, version, body.run or ""):
            self._timeline.on_step(job, format_version(version))
        # Also when the version is known: the call before may have got no further.
        # Before the workers hear of the version: no engine carries over the update what is of no use after it.
        live = self._dispatcher.book.oldest_live(job)
        spent = self._store.drop_spent(
            job=job, version=version, alpha=body.alpha, on_stale=body.on_stale, live=live
        )
        self._carry_out(spent)
        self._dispatcher.require(job, version, self._store.runs[job])
        await self._store.journal.commit()
        told = RequiredVersion(job=job, version=format_version(version))
        if warning:
            told["warning"] = warning
        return json_response(told)

    # --- workers (node) --------------------------------------------------------------------------------

    async def register(self, request: web.Request) -> web.Response:
        body = await read_report(request, Registration, self._reports)
        worker_id, url = body.worker_id, body.url.rstrip("/")
        try:
            if "?" in url or "#" in url:
                raise ValueError("a query or a fragment")
            HttpTarget.of(url, {})
        except ValueError:
            raise RequestError("must be http://host:port", field="url") from None
        workers = self._dispatcher.book.fleet.workers
        if worker_id not in workers and len(workers) >= self._config.limits.max_workers:
            raise RequestError("too many workers", field="worker_id", status=429, code="queue_full")
        self._fleet.check_name(body, url)
        self._dispatcher.register(
            te.WorkerRegistered(
                at_s=self._dispatcher.now_s(),
                worker_id=worker_id,
                incarnation=body.incarnation,
                tier=Tier(body.tier),
                model=body.model,
                max_model_len=body.max_model_len,
                cap=body.cap,
                max_num_seqs=body.max_num_seqs,
            ),
            Endpoint(
                worker_id=worker_id,
                url=url,
                token=body.engine_token,
                vocab_size=body.vocab_size,
                logprobs_mode=body.logprobs_mode,
                host=body.host or "",
            ),
        )
        return json_response(encode(Registered(worker_id=worker_id)))

    async def heartbeat(self, request: web.Request) -> web.Response:
        worker_id = request.match_info["id"]
        body = await read_report(request, Heartbeat, self._reports)
        known = self._dispatcher.heartbeat(
            te.WorkerHeartbeat(
                at_s=self._dispatcher.now_s(),
                worker_id=worker_id,
                incarnation=body.incarnation,
                seq=body.seq,
                version=None if body.version is None else parse_version(body.version),
                state=body.state,
                kv_budget_tokens=body.kv_budget_tokens,
                kv_used_tokens=body.kv_used_tokens,
                running=body.running,
                gated=body.gated,
                reclaim_seq=body.reclaim_seq,
                slack_s=body.slack_s,
                waiting=body.waiting,
                num_preemptions=body.num_preemptions,
                serving_use=body.serving_use,
                run=body.run or "",
                lent_s=body.lent_s,
                decoded_tokens=body.decoded_tokens,
            )
        )
        if known:
            # All of it, also what is not measured any more: the node may have started again.
            self._dispatcher.switching[worker_id] = Switching(
                pull_s=body.pull_s,
                commit_s=body.commit_s,
                num_switches=body.num_switches,
                copies=tuple(body.copies),
            )
            self._timeline.on_breaches(worker_id, body.slo_breaches)
            self._timeline.on_promises(worker_id, _promises(body))
        worker = self._dispatcher.book.fleet.workers.get(worker_id)
        answer = HeartbeatAnswer(known=known)
        if known:
            answer.held = self._fleet.heard(worker_id, body)
            answer.own_run = self._config.provisioning.mode != "on"
        else:
            self._fleet.heard_unknown(worker_id, body)
        if worker is not None and worker.job is not None:
            answer.active = worker.job != ""
            answer.job = worker.job or None
            answer.run = self._store.runs.get(worker.job) or None
        if body.follows is not None:
            published = self._store.published(body.follows)
            if published is not None:
                answer.floor_run, answer.floor = body.follows, format_version(published)
        return json_response(encode(answer))

    async def remove(self, request: web.Request) -> web.Response:
        self._dispatcher.remove(request.match_info["id"])
        return json_response(Empty())

    async def duty(self, request: web.Request) -> web.Response:
        duties = {"drain": Duty.DRAINING, "cordon": Duty.CORDONED, "uncordon": Duty.ACTIVE}
        verb = request.match_info["verb"]
        if verb not in duties:
            raise NotFound(f"no such action: {verb[:32]}", field="path")
        self._dispatcher.set_duty(request.match_info["id"], duties[verb])
        return json_response(WorkerDutyStatus(worker_id=request.match_info["id"], duty=duties[verb].value))

    async def workers(self, request: web.Request) -> web.Response:
        now_s = self._dispatcher.now_s()
        fleet = self._dispatcher.book.fleet
        return json_response(WorkerList(workers=[worker_status(worker, now_s) for worker in fleet]))

    # --- shared ----------------------------------------------------------------------------------------

    def housekeep(self) -> None:
        """Return expired leases, cancel late and abandoned trajectories and groups that nobody leases, keep the journal bounded."""
        now_s = self._dispatcher.now_s()
        self._carry_out(self._store.expire(now_s))
        self._carry_out(self._store.expire_late(time.time()))
        if now_s >= self._swept_at_s + 10.0:
            self._swept_at_s = now_s
            busy = {turn.spec.trajectory_id for turn in self._dispatcher.book.turns.values()}
            self._carry_out(self._store.expire_idle(self._config.timeouts.trajectory_idle_s, busy))
            self._carry_out(self._store.expire_unleased(self._config.timeouts.unleased_s))
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


async def _trace(
    trajectory: Trajectory, state: tuple[str, str], slices: Slices, *, whole_prompts: bool
) -> TrajectoryTrace:
    """Every turn of now: those that come meanwhile are not in it."""
    head = trajectory.trace(*state, turns=[])
    turns = (trajectory.trace_turn(record, whole_prompts=whole_prompts) for record in list(trajectory.turns))
    head["turns"] = cast("list[TurnTrace]", await slices.json_list(turns))
    return head


def _numbered(trajectory: Trajectory, scored: list[Scored], field: str) -> list[tuple[int, float]]:
    if len(scored) > len(trajectory.turns):
        raise RequestError(
            f"names {len(scored)} of a trajectory's {len(trajectory.turns)} turns", field=field
        )
    named = trajectory.turn_numbers() if any(isinstance(each.turn, str) for each in scored) else {}
    found: list[tuple[int, float]] = []
    seen: set[int] = set()
    for at, each in enumerate(scored):
        turn = named.get(each.turn) if isinstance(each.turn, str) else each.turn
        if turn is None or turn >= len(trajectory.turns):
            raise RequestError("is no turn of this trajectory", field=f"{field}[{at}].turn")
        if field == "branches" and turn in trajectory.parents:
            raise RequestError(
                "ends no branch: another turn continues it",
                field=f"{field}[{at}].turn",
                fix="name the branch by its last turn, or score the turn under turns",
            )
        if turn in seen:
            raise RequestError("is named twice", field=f"{field}[{at}].turn")
        seen.add(turn)
        found.append((turn, each.reward))
    return found


def _batch_id(request: web.Request) -> str:
    name = request.match_info["id"]
    if len(name) > 256 or not name.isprintable():
        raise RequestError("must be text of 1 to 256 printable characters", field="batch_id")
    return name


def _promises(body: Heartbeat) -> dict[str, Promise]:
    """Production's P99 beside what it promises, for what the node knows both of."""
    both = {
        "ttft": (body.serving_ttft_p99_s, body.slo_ttft_s),
        "tpot": (body.serving_tpot_p99_s, body.slo_tpot_s),
    }
    return {
        kind: Promise(p99_s, slo_s)
        for kind, (p99_s, slo_s) in both.items()
        if p99_s is not None and slo_s is not None
    }


def worker_status(worker: Worker, now_s: float) -> WorkerStatus:
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
        "run": worker.run,
        "refused": UNSTAMPED if worker.unstamped else "",
        "job": worker.job,
        "lent_s": max(0.0, round(worker.until_s - now_s, 3)) if worker.tier is Tier.BORROWED else None,
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
