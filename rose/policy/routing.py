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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rose.errors import ConfigError
from rose.policy.packed import Eligible
from rose.policy.worker import Tier, Worker


class Rng(Protocol):
    """What a policy needs of ``random.Random``."""

    def random(self) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The turn to place.

    ``affine`` is the worker that ran this trajectory last, eligible or not; ``resident_tokens`` is what of
    the prompt is believed to be in its cache.  ``group_worker`` took the last first turn of this group;
    its members share ``group_tokens`` of their prompts.  ``remaining_tokens``: expected of the whole rest of the
    trajectory, this turn's ``expected_tokens`` included; None while nothing is known.  ``drains``: its job does
    (:mod:`rose.policy.draining`).
    """

    num_prompt_tokens: int
    expected_tokens: int
    remaining_tokens: float | None = None
    at_s: float = 0.0
    drains: bool = False
    affine: Worker | None = None
    resident_tokens: int = 0
    group_worker: Worker | None = None
    group_tokens: int = 0

    @property
    def cached(self) -> tuple[tuple[Worker, int], ...]:
        """Workers believed to hold some of the prompt, with how much."""
        if self.affine is not None:
            return ((self.affine, self.resident_tokens),)
        if self.group_worker is not None:
            return ((self.group_worker, self.group_tokens),)
        return ()


class RoutingPolicy(Protocol):
    def choose(self, turn: Candidate, eligible: Eligible) -> Worker | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CostParams:
    """Weights of the terms; tuned by ``benchmarks/scheduling/policies.py`` on its workloads A and B."""

    social: float = 0.3
    """How much the delay that a turn's decoding causes to those beside it counts, against its own."""
    social_read: float = 1.0
    """The same for reading its prompt, during which all of them wait."""
    hysteresis: float = 1.0
    """Times the re-prefill, on top of the cost difference, before affinity is broken."""
    horizon_turns: float = 2.0
    """A context that moves is read once and is then resident for the rest of the trajectory: its price is shared by
    the turns that are expected to follow, at most so many (what is known of a worker's load does not last)."""
    roomy_horizon_turns: float = 2.0
    """The same while the dedicated workers have slots for every turn that runs, where their load does last."""
    home_horizon_turns: float = 16.0
    """The same for a move from a worker that can be taken back to a dedicated one, while the job drains: it lasts, and the load there only falls."""
    home_speedup: float = 2.0
    """A move home pays for that long only where dedicated workers at large make a token so many times faster: what lasts is the machine, and not a burst of production."""
    own_while_roomy: bool = False
    """Place on dedicated workers alone while they have slots for every turn that runs."""
    floor_s: float = 0.02
    gated_s: float = 0.5
    """Expected wait at a worker that says it has no slack now."""
    risk: float = 1.0
    """Weight of what a reclaim would cost: reading the prompt again elsewhere."""
    fade_s: float = 30.0
    """Time in which an unused worker's learned speed fades to its tier's."""


def _least_loaded(workers: Eligible, rng: Rng) -> Worker:
    # Ties are drawn, never taken in order: the first worker would get every new session.
    return workers.least(workers.column("inflight"), rng.random())


@dataclass(kw_only=True, slots=True)
class RandomPolicy:
    rng: Rng

    def choose(self, turn: Candidate, eligible: Eligible) -> Worker | None:
        if not eligible:
            return None
        return eligible[min(int(self.rng.random() * len(eligible)), len(eligible) - 1)]


@dataclass(kw_only=True, slots=True)
class RoundRobinPolicy:
    _next: int = 0

    def choose(self, turn: Candidate, eligible: Eligible) -> Worker | None:
        if not eligible:
            return None
        ordered = sorted(eligible, key=lambda worker: worker.worker_id)
        self._next += 1
        return ordered[(self._next - 1) % len(ordered)]


@dataclass(kw_only=True, slots=True)
class StickyLeastLoadedPolicy:
    rng: Rng
    gap: int = 2

    def choose(self, turn: Candidate, eligible: Eligible) -> Worker | None:
        if not eligible:
            return None
        affine = turn.affine
        if (
            affine is not None
            and affine in eligible
            and affine.inflight - int(eligible.column("inflight").min()) <= self.gap
        ):
            return affine
        return _least_loaded(eligible, self.rng)


@dataclass(kw_only=True, slots=True)
class PaperPolicy:
    rng: Rng

    def choose(self, turn: Candidate, eligible: Eligible) -> Worker | None:
        affine = turn.affine
        if affine is not None and affine in eligible and _slo_safe(affine):
            return affine
        dedicated = eligible.column("dedicated")
        safe = dedicated | eligible.column("safe")
        if affine is not None and affine.tier is Tier.DEDICATED and affine not in eligible:
            serving = eligible.where(safe & ~dedicated)
            if serving:
                return _least_loaded(serving, self.rng)
        usable = eligible.where(safe)
        return _least_loaded(usable, self.rng) if usable else None


def _slo_safe(worker: Worker) -> bool:
    return worker.tier is Tier.DEDICATED or worker.serving_holds_slo


@dataclass(kw_only=True, slots=True)
class CostPolicy:
    rng: Rng
    params: CostParams = field(default_factory=CostParams)

    def choose(self, turn: Candidate, eligible: Eligible) -> Worker | None:
        if not eligible:
            return None
        if self.params.own_while_roomy and eligible.table.is_roomy():
            eligible = eligible.where(eligible.column("dedicated")) or eligible
        affine = turn.affine
        if (
            len(eligible) == 1
        ):  # as in any full fleet, where a worker that ended a turn has the only free slot
            if eligible[0] is not affine:
                self.rng.random()  # as many draws as the long way takes
            return eligible[0]
        costs_s = self.costs_s(turn, eligible)
        if affine is not None and affine in eligible:
            params = self.params
            stay = self._stay_turns(turn, eligible)
            reprefill_s = turn.resident_tokens * affine.speed.prefill_s / stay
            margin_s = max(params.hysteresis * reprefill_s, params.floor_s)
            if costs_s[eligible.index_of(affine)] - costs_s.min() <= margin_s:
                return affine
        return eligible.least(costs_s, self.rng.random())

    def _stay_turns(self, turn: Candidate, eligible: Eligible) -> float:
        """Turns that share the price of a move."""
        if turn.remaining_tokens is None:
            return 1.0
        params = self.params
        most = params.horizon_turns
        if params.roomy_horizon_turns != most and eligible.table.is_roomy():
            most = params.roomy_horizon_turns
        return max(1.0, min(most, turn.remaining_tokens / turn.expected_tokens))

    def costs_s(self, turn: Candidate, eligible: Eligible) -> Any:
        """Expected seconds until the turn is done on each worker, ``[len(eligible)]``, others' delay included.

        ``own = wait + fresh * prefill_s + tokens * (token_s + inflight * crowd_s)``; the others, ``inflight``
        of them, wait while its prompt is read and share each of its tokens' steps.
        """
        if len(eligible) < len(eligible.mask) <= 2 * len(eligible):
            return self.costs_s(turn, eligible.widened())[eligible.rows]
        params = self.params
        token_s, crowd_s, prefill_s = eligible.speeds(turn.at_s, params.fade_s)
        inflight = 1.0 * eligible.column("inflight")
        read_s = prefill_s * turn.num_prompt_tokens
        again = turn.resident_tokens / turn.num_prompt_tokens if turn.affine is not None else 0.0
        # What is resident would be read once and serve the turns that follow; what is new is read anyway.
        stay = self._stay_turns(turn, eligible)
        fresh_s = read_s * (1.0 - again + again / stay)
        affine = turn.affine
        if (
            turn.drains
            and affine is not None
            and affine.tier is not Tier.DEDICATED
            and turn.remaining_tokens is not None
            and eligible.table.home_speedup(affine.tier.value) >= params.home_speedup
        ):
            home = max(stay, min(params.home_horizon_turns, turn.remaining_tokens / turn.expected_tokens))
            if home > stay:
                fresh_s -= eligible.column("dedicated") * read_s * (again / stay - again / home)
        for worker, num_tokens in turn.cached:
            if worker in eligible:
                at = eligible.index_of(worker)
                fresh_s[at] = read_s[at] * (1.0 - num_tokens / turn.num_prompt_tokens)
        # In place: a decision over a thousand workers is the time of its array operations.
        token_s *= turn.expected_tokens
        crowd_s *= turn.expected_tokens
        crowd_s *= inflight
        run_s = token_s
        run_s += fresh_s
        run_s += crowd_s
        costs_s = run_s + params.gated_s * ~eligible.column("safe")
        crowd_s *= params.social
        costs_s += crowd_s
        inflight *= fresh_s
        inflight *= params.social_read
        costs_s += inflight
        if eligible.table.any_reclaims:
            read_s *= eligible.column("reclaim_rate")
            read_s *= run_s
            read_s *= params.risk
            costs_s += read_s
        return costs_s


_POLICIES: dict[str, Callable[[Rng], RoutingPolicy]] = {
    "cost": lambda rng: CostPolicy(rng=rng),
    "paper": lambda rng: PaperPolicy(rng=rng),
    "sticky_least_loaded": lambda rng: StickyLeastLoadedPolicy(rng=rng),
    "round_robin": lambda rng: RoundRobinPolicy(),
    "random": lambda rng: RandomPolicy(rng=rng),
}
POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str, rng: Rng, cost: CostParams | None = None) -> RoutingPolicy:
    """``cost``: weights of the policy of that name.

    Raises:
        ConfigError: No policy has this name.
    """
    if name not in _POLICIES:
        raise ConfigError(
            f"'{name}' is not a routing policy", field="policy", fix=f"one of {', '.join(POLICY_NAMES)}"
        )
    if name == "cost" and cost is not None:
        return CostPolicy(rng=rng, params=cost)
    return _POLICIES[name](rng)
