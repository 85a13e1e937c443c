"""What the scheduler shows: Prometheus metrics, ``/status``, and the last turns for the page.

Counters only ever count what the turn book's actions and the job's ends say; nothing is sampled.
``rose_turns_total`` counts a turn under the tier of its last segment; tokens are counted per segment, so a
turn that moved counts in both tiers.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import cast

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from rose.lineage import format_version
from rose.policy import samples as sp
from rose.policy import turn_events as te
from rose.policy.worker import Tier
from rose.scheduler.control_api import worker_status
from rose.scheduler.dispatch import Dispatcher
from rose.scheduler.inflight_request import Finished, TurnRequest
from rose.scheduler.provision import Provisioner
from rose.scheduler.store import TrajectoryStore
from rose.scheduler.tallies import Durations, Tally
from rose.scheduler.timeline import Promise
from rose.wire.status import EndedTurn, SchedulerStatus, TokenCounts

RECENT_TURNS = 50
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TIERS = tuple(tier.value for tier in Tier)


class Status:
    """One per process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._turns = Tally("rose_turns", "Ended turns", ["tier", "outcome"], registry=registry)
        self._reroutes = Tally("rose_reroutes", "Turns sent elsewhere", ["reason"], registry=registry)
        self._tokens = Tally("rose_tokens", "Tokens by kind", ["kind"], registry=registry)
        self._tier_tokens = Tally(
            "rose_generated_tokens", "Generated tokens by tier", ["tier"], registry=registry
        )
        self._affinity = Tally("rose_affinity", "Placements", ["result"], registry=registry)
        self._cancelled = Tally("rose_cancelled", "Cancelled turns", ["reason"], registry=registry)
        self._fenced = Tally("rose_fenced_results", "Late results dropped", registry=registry)
        self._duplicates = Tally("rose_duplicate_requests", "Requests joined", registry=registry)
        self._stale = Tally("rose_dropped_stale", "Stale trajectories dropped", registry=registry)
        self._unleased = Tally(
            "rose_dropped_unleased", "Finished trajectories dropped that no trainer leased", registry=registry
        )
        self._ahead = Tally(
            "rose_dropped_ahead", "Stale trajectories of later steps than their trainer's", registry=registry
        )
        self._unread = Tally(
            "rose_unread_reports", "Reports of nodes with fields unknown here", ["body"], registry=registry
        )
        self._forks = Tally("rose_token_forks", "Histories started afresh", ["reason"], registry=registry)
        self._queue_s = Durations("rose_queue_seconds", "Wait for a worker", _SECONDS, registry=registry)
        self._ttft_s = Durations("rose_ttft_seconds", "To the first token", _SECONDS, registry=registry)
        self._turn_s = Durations("rose_turn_seconds", "Whole turns", _SECONDS, registry=registry)
        self._reroute_s = Durations(
            "rose_reroute_seconds", "Worker lost to next token", _SECONDS, registry=registry
        )
        self._workers = Gauge("rose_workers", "Workers", ["tier", "state"], registry=registry)
        self._inflight = Gauge("rose_inflight_turns", "Turns on engines", ["tier"], registry=registry)
        self._wanted = Gauge(
            "rose_wanted_engines",
            "Dedicated engines that would pay for its demand",
            ["job"],
            registry=registry,
        )
        self._held = Gauge(
            "rose_job_workers",
            "Workers that it has, or would have (mode observe); everybody's count for each job",
            ["job"],
            registry=registry,
        )
        self._decisions = Gauge(
            "rose_provisioning_decisions", "So far, by kind", ["decision"], registry=registry
        )
        self._lent_s = Gauge(
            "rose_borrowed_seconds", "Least time until a borrowed device goes back", registry=registry
        )
        self._depth = Gauge("rose_queue_depth", "Turns that wait", registry=registry)
        self._kv_budget = Gauge("rose_kv_budget_tokens", "Advertised", ["tier"], registry=registry)
        self._kv_used = Gauge("rose_kv_used_tokens", "In use", ["tier"], registry=registry)
        self._serving_use = Gauge(
            "rose_serving_kv_use", "Share of KV memory that production uses, mean", registry=registry
        )
        self._slack_s = Gauge(
            "rose_serving_slack_seconds", "Least time left under production's SLO", registry=registry
        )
        self._p99 = Gauge(
            "rose_serving_p99_seconds", "Production, worst engine", ["promise"], registry=registry
        )
        self._slo = Gauge("rose_serving_slo_seconds", "Promised by it", ["promise"], registry=registry)
        self._refused = Tally(
            "rose_refused_requests", "Requests beyond a bound of [limits]", ["bound"], registry=registry
        )
        self._groups = Gauge("rose_trajectories", "Trajectories", ["state"], registry=registry)
        self.turns_by_tier: Counter[str] = Counter(dict.fromkeys(_TIERS, 0))
        self.tokens_by_tier: Counter[str] = Counter(dict.fromkeys(_TIERS, 0))
        self.outcomes: Counter[str] = Counter()
        self.reroutes: Counter[str] = Counter()
        self.forks: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.num_resumed_turns = 0
        """Done turns that lost an engine on the way: to a cut, a closed gate, a dead or switched-off host."""
        self.num_continued_turns = 0
        """Those of them that had tokens already, and went on from them."""
        self.num_fenced = 0
        self.num_duplicates = 0
        self.num_stale = 0
        self.num_unleased = 0
        self.recent: deque[EndedTurn] = deque(maxlen=RECENT_TURNS)

    # --- what happened ---------------------------------------------------------------------------------

    def on_action(self, action: te.Action) -> None:
        match action:
            case te.Dispatch():
                self._affinity.counts[action.affinity] += 1
                if action.attempt == 1:
                    self._queue_s.observe(action.queued_s)
            case te.Requeued():
                self.reroutes[action.reason] += 1
                self._reroutes.counts[action.reason] += 1
            case te.Fenced():
                self.num_fenced += 1
                self._fenced.counts[()] += 1
                self._count_tokens("fenced", action.num_tokens)
            case te.TokensDropped():
                self._count_tokens("discarded", action.num_tokens)
            case te.TurnEnded():
                self._ended(action)
            case te.AbortAttempt() | te.StopAttempt() | te.TokensKept() | te.AnswerUnavailable():
                pass

    def _ended(self, action: te.TurnEnded) -> None:
        result = action.result
        tier = result.segments[-1].tier.value if result.segments else "none"
        outcome = action.outcome.value
        self._turns.counts[tier, outcome] += 1
        self.outcomes[outcome] += 1
        if outcome == "done":
            self.turns_by_tier[tier] += 1
            self.num_resumed_turns += result.num_attempts > 1
            self.num_continued_turns += len(result.segments) > 1
            self._turn_s.observe(result.ended_at_s - result.submitted_at_s)
            if result.first_token_at_s is not None:
                self._ttft_s.observe(result.first_token_at_s - result.submitted_at_s)
        else:
            self._cancelled.counts[action.reason] += 1
            self._count_tokens("discarded", len(result.token_ids))
        for segment in result.segments:
            self.tokens_by_tier[segment.tier.value] += segment.num_tokens
            self._tier_tokens.counts[segment.tier.value] += segment.num_tokens

    def on_finished(self, done: Finished, asked: TurnRequest) -> None:
        usage = done.summary["usage"]
        for kind in ("prompt", "cached", "generated", "recomputed"):
            self._count_tokens(kind, usage[kind])
        self.recent.append(
            {
                "turn_id": done.ended.turn_id,
                "trajectory": None if asked.trajectory is None else asked.trajectory.id,
                "turn": done.turn,
                "finish_reason": done.ended.reason,
                "versions": done.summary["versions"],
                "kv_mixed": done.summary["kv_mixed"],
                "segments": done.summary["segments"],
                "usage": usage,
                "timing": done.summary["timing"],
            }
        )

    def on_duplicate(self) -> None:
        self.num_duplicates += 1
        self._duplicates.counts[()] += 1

    def on_fork(self, reason: str) -> None:
        self.forks[reason] += 1
        self._forks.counts[reason] += 1

    def on_unleased(self, count: int) -> None:
        self.num_unleased += count
        self._unleased.counts[()] += count

    def on_stale(self, count: int) -> None:
        self.num_stale += count
        self._stale.counts[()] += count

    def on_ahead(self, count: int) -> None:
        self._ahead.counts[()] += count

    def on_refused(self, bound: str) -> None:
        self._refused.counts[bound] += 1

    def on_unread(self, body: str) -> None:
        self._unread.counts[body] += 1

    def on_rerouted(self, seconds: float) -> None:
        self._reroute_s.observe(seconds)

    def _count_tokens(self, kind: str, count: int) -> None:
        self.tokens[kind] += count
        self._tokens.counts[kind] += count

    # --- what is ---------------------------------------------------------------------------------------

    def metrics(
        self,
        dispatcher: Dispatcher,
        store: TrajectoryStore,
        promises: dict[str, Promise],
        provisioner: Provisioner,
    ) -> bytes:
        """The Prometheus text."""
        for gauge, values in (
            (self._wanted, provisioner.wanted()),
            (self._held, provisioner.held()),
            (self._decisions, provisioner.decided),
        ):
            gauge.clear()
            for name, value in values.items():
                gauge.labels(name).set(value)
        now_s = dispatcher.now_s()
        left = [w.until_s - now_s for w in dispatcher.book.fleet if w.tier is Tier.BORROWED]
        self._lent_s.set(max(0.0, min(left)) if left else math.nan)
        self._workers.clear()
        for tier in Tier:
            mine = [worker for worker in dispatcher.book.fleet if worker.tier is tier]
            for worker in mine:
                self._workers.labels(tier.value, worker.health.value).inc()
            self._inflight.labels(tier.value).set(sum(worker.inflight for worker in mine))
            self._kv_budget.labels(tier.value).set(sum(worker.kv_budget_tokens or 0 for worker in mine))
            self._kv_used.labels(tier.value).set(sum(worker.kv_used_tokens or 0 for worker in mine))
        self._depth.set(len(dispatcher.book.queue))
        use = [worker.serving_use for worker in dispatcher.book.fleet if worker.tier is Tier.HARVESTED]
        self._serving_use.set(sum(use) / len(use) if use else math.nan)
        slack = [worker.slack_s for worker in dispatcher.book.fleet if worker.slack_s is not None]
        self._slack_s.set(min(slack, default=math.nan))
        for gauge in (self._p99, self._slo):
            gauge.clear()
        for kind, promise in promises.items():
            self._p99.labels(kind).set(promise.p99_s)
            self._slo.labels(kind).set(promise.slo_s)
        counts = store.book.counts()
        for state in sp.SampleState:
            self._groups.labels(state.value).set(counts[state.value])
        return generate_latest(self.registry)

    def snapshot(
        self,
        dispatcher: Dispatcher,
        store: TrajectoryStore,
        promises: dict[str, Promise],
        provisioner: Provisioner,
        *,
        started_at_s: float,
    ) -> SchedulerStatus:
        """``/status``."""
        now_s = dispatcher.now_s()
        book = dispatcher.book
        queued = [book.turns[turn_id] for _, turn_id, _ in book.queue]
        held = Counter(turn.hold for turn in queued)
        by_job: dict[str, Counter[str]] = {}
        for turn in queued:
            by_job.setdefault(turn.spec.job, Counter())[turn.hold] += 1
        oldest = sorted(book.turns.values(), key=lambda turn: turn.spec.at_s)[:20]
        return {
            "uptime_s": round(now_s - started_at_s, 3),
            "draining": dispatcher.draining,
            "workers": [worker_status(worker, now_s) for worker in book.fleet],
            "provisioning": {
                "mode": provisioner.mode,
                "wanted": provisioner.wanted(),
                "held": provisioner.held(),
                "decisions": dict(provisioner.decided),
                "partners": dict(provisioner.assigner.policy.pairing.partner_of),
            },
            "turns": {
                "running": len(book.turns) - len(queued),
                "queued": len(queued),
                "done": self.outcomes["done"],
                "failed": self.outcomes["failed"],
                "cancelled": self.outcomes["cancelled"],
                "by_tier": dict(self.turns_by_tier),
            },
            "tokens": cast("TokenCounts", {"by_tier": dict(self.tokens_by_tier), **self.tokens}),
            "reroutes": dict(self.reroutes),
            "resumed_turns": self.num_resumed_turns,
            "continued_turns": self.num_continued_turns,
            "serving_p99": {
                kind: {"p99_s": promise.p99_s, "slo_s": promise.slo_s} for kind, promise in promises.items()
            },
            "fenced_results": self.num_fenced,
            "duplicate_requests": self.num_duplicates,
            "forks": dict(self.forks),
            "queue": {
                "depth": len(queued),
                "held": dict(held),
                "held_by_job": {job: dict(holds) for job, holds in by_job.items()},
                "oldest_s": round(max((now_s - t.spec.at_s for t in queued), default=0.0), 3),
            },
            "trajectories": dict(store.book.counts()),
            "groups_ready": {job: len(names) for job, names in store.book.ready.items()},
            "batches_leased": len(store.book.batches),
            "batches_acked": len(store.book.acked),
            "dropped_stale": self.num_stale,
            "dropped_unleased": self.num_unleased,
            "discards": {job: store.book.discards.report(job) for job in store.book.discards.jobs()},
            "versions": {job: format_version(version) for job, version in store.versions.items()},
            "attempts": store.book.latest_attempts(),
            "held_bytes": dict(store.holdings.jobs),
            "journal_bytes": store.journal.size_bytes,
            "recovered_records": store.num_recovered,
            "stuck": [
                {
                    "turn_id": turn.spec.turn_id,
                    "trajectory": turn.spec.trajectory_id,
                    "state": turn.state.value,
                    "hold": turn.hold if turn.state is te.TurnState.QUEUED else None,
                    "worker": None if turn.worker is None else turn.worker.worker_id,
                    "age_s": round(now_s - turn.spec.at_s, 3),
                    "num_tokens": len(turn.token_ids),
                }
                for turn in oldest
            ],
            "last_turns": list(self.recent),
        }
