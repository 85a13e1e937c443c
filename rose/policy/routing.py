"""Choose the worker that runs one turn, among those that may and can.

A policy gets the turn and the workers that are *eligible*: healthy, on duty, at an allowed version, with a
free slot and KV room (``rose.policy.turns`` tests all that).  It returns one of them, or None to keep the
turn queued.  It never looks at the clock and draws ties from the ``rng`` it was given, so that a seed gives
one run.

=====================  ====================================================================================
``cost``               seconds until done: waiting, prefill of what is not resident, decoding, risk of a cut
``paper``              (1) affine worker; (2) affine is dedicated and full: a harvested one whose SLO holds;
                       (3) least loaded of dedicated and SLO-safe harvested ones; (4) queue
``sticky_least_loaded``  affine worker unless it runs over 2 turns more than the least loaded
``round_robin``        in turn
``random``             any
=====================  ====================================================================================

Callers: ``rose.policy.turns`` in the daemon, the simulator, the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rose.errors import ConfigError
from rose.policy.fleet import Tier, Worker


class Rng(Protocol):
    """What a policy needs of ``random.Random``."""

    def random(self) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The turn to place.

    ``affine`` is the worker that ran this trajectory last, eligible or not; ``resident_tokens`` is what of
    the prompt is believed to be in its cache.  ``group_worker`` took the last first turn of this group.
    """

    num_prompt_tokens: int
    expected_tokens: int
    affine: Worker | None = None
    resident_tokens: int = 0
    group_worker: str | None = None


class RoutingPolicy(Protocol):
    def choose(self, turn: Candidate, eligible: Sequence[Worker]) -> Worker | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CostParams:
    prefill_tokens_per_unit: float = 50.0
    """How many prompt tokens cost as much as one decoded token."""
    contention: float = 1.0
    """1: an engine's speed per turn falls with every turn it runs more than usual; 0: batching is free."""
    hysteresis: float = 1.0
    """Times the re-prefill, on top of the cost difference, before affinity is broken."""
    floor_s: float = 0.02
    cold_gap: int = 2
    """In-flight gap that breaks affinity while speeds are not known."""
    gated_s: float = 0.5
    """Expected wait at a worker that says it has no slack now."""


def _least_loaded(workers: Sequence[Worker], rng: Rng) -> Worker:
    least = min(worker.inflight for worker in workers)
    return _any([worker for worker in workers if worker.inflight == least], rng)


def _any(workers: Sequence[Worker], rng: Rng) -> Worker:
    # Ties are drawn, never taken in order: the first worker would get every new session.
    return workers[min(int(rng.random() * len(workers)), len(workers) - 1)]


@dataclass(kw_only=True, slots=True)
class RandomPolicy:
    rng: Rng

    def choose(self, turn: Candidate, eligible: Sequence[Worker]) -> Worker | None:
        return _any(eligible, self.rng) if eligible else None


@dataclass(kw_only=True, slots=True)
class RoundRobinPolicy:
    _next: int = 0

    def choose(self, turn: Candidate, eligible: Sequence[Worker]) -> Worker | None:
        if not eligible:
            return None
        ordered = sorted(eligible, key=lambda worker: worker.worker_id)
        self._next += 1
        return ordered[(self._next - 1) % len(ordered)]


@dataclass(kw_only=True, slots=True)
class StickyLeastLoadedPolicy:
    rng: Rng
    gap: int = 2

    def choose(self, turn: Candidate, eligible: Sequence[Worker]) -> Worker | None:
        if not eligible:
            return None
        affine = turn.affine
        if affine is not None and affine in eligible:
            least = min(worker.inflight for worker in eligible)
            if affine.inflight - least <= self.gap:
                return affine
        return _least_loaded(eligible, self.rng)


@dataclass(kw_only=True, slots=True)
class PaperPolicy:
    rng: Rng

    def choose(self, turn: Candidate, eligible: Sequence[Worker]) -> Worker | None:
        affine = turn.affine
        if affine is not None and affine in eligible and _slo_safe(affine):
            return affine
        safe = [worker for worker in eligible if _slo_safe(worker)]
        if affine is not None and affine.tier is Tier.DEDICATED and affine not in eligible:
            serving = [worker for worker in safe if worker.tier is Tier.HARVESTED]
            if serving:
                return _least_loaded(serving, self.rng)
        return _least_loaded(safe, self.rng) if safe else None


def _slo_safe(worker: Worker) -> bool:
    return worker.tier is Tier.DEDICATED or worker.serving_holds_slo


@dataclass(kw_only=True, slots=True)
class CostPolicy:
    rng: Rng
    params: CostParams = field(default_factory=CostParams)

    def choose(self, turn: Candidate, eligible: Sequence[Worker]) -> Worker | None:
        if not eligible:
            return None
        costs = [(self.cost_s(turn, worker), worker) for worker in eligible]
        best_s = min(cost for cost, _ in costs)
        affine = turn.affine
        if affine is not None and affine in eligible:
            reprefill_s = self._prefill_s(turn.resident_tokens, affine)
            margin_s = max(self.params.hysteresis * reprefill_s, self.params.floor_s)
            if self.cost_s(turn, affine) - best_s <= margin_s:
                return affine
        ties = [worker for cost, worker in costs if cost <= best_s * (1 + 1e-9)]
        for worker in ties:
            if worker.worker_id == turn.group_worker:
                return worker
        return _any(ties, self.rng)

    def cost_s(self, turn: Candidate, worker: Worker) -> float:
        """Expected seconds until the turn is done on ``worker``."""
        resident = turn.resident_tokens if worker is turn.affine else 0
        fresh = max(turn.num_prompt_tokens - resident, 0)
        if worker.worker_id == turn.group_worker:
            fresh //= 2  # group members share the prompt's prefix; how much of it is not known here
        busy = 1.0 + self.params.contention * (worker.inflight - worker.mean_inflight) / (
            worker.mean_inflight + 1.0
        )
        run_s = self._prefill_s(fresh, worker) + turn.expected_tokens * worker.unit_s * max(busy, 0.1)
        wait_s = 0.0 if worker.serving_holds_slo else self.params.gated_s
        risk_s = worker.reclaim_rate * run_s * self._prefill_s(turn.num_prompt_tokens, worker)
        return wait_s + run_s + risk_s

    def _prefill_s(self, num_tokens: int, worker: Worker) -> float:
        return num_tokens / self.params.prefill_tokens_per_unit * worker.unit_s


_POLICIES: dict[str, Callable[[Rng], RoutingPolicy]] = {
    "cost": lambda rng: CostPolicy(rng=rng),
    "paper": lambda rng: PaperPolicy(rng=rng),
    "sticky_least_loaded": lambda rng: StickyLeastLoadedPolicy(rng=rng),
    "round_robin": lambda rng: RoundRobinPolicy(),
    "random": lambda rng: RandomPolicy(rng=rng),
}
POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str, rng: Rng) -> RoutingPolicy:
    """Raises:
    ConfigError: No policy has this name.
    """
    if name not in _POLICIES:
        raise ConfigError(
            f"'{name}' is not a routing policy", field="policy", fix=f"one of {', '.join(POLICY_NAMES)}"
        )
    return _POLICIES[name](rng)
