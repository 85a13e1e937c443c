"""Placement written down once more, one worker at a time: what the packed columns must agree with."""

from __future__ import annotations

import math
import random

from rose.policy import turn_events as te
from rose.policy.fleet import FleetParams
from rose.policy.packed import Eligible
from rose.policy.routing import Candidate, CostParams, RoutingPolicy, make_policy
from rose.policy.turn import Turn
from rose.policy.turns import TurnBook
from rose.policy.worker import Duty, Health, Tier, Worker


def eligible(book: TurnBook, turn: Turn, worker: Worker, at_s: float) -> bool:
    """Invariant 5 of the turn book, clause by clause."""
    spec = turn.spec
    num_tokens = spec.num_prompt_tokens + len(turn.token_ids)
    own = turn.spans[-1].version if turn.spans else None
    floors = [v for v in (book.required.get(spec.job), spec.min_version, own) if v is not None]
    pinned = turn.num_reclaims >= book.params.pin_after_reclaims and any(
        w.tier is Tier.DEDICATED and w.health is not Health.DEAD for w in book.fleet
    )
    budget = worker.kv_budget_tokens
    run = book.runs.get(spec.job) or (turn.segments[-1].run if turn.segments else spec.run or None)
    return (
        worker.may_take_turns
        and worker.inflight < worker.slots
        and worker.model == spec.model
        and (worker.job is None or worker.job == spec.job != "")
        and run in (None, worker.run)
        and num_tokens < worker.max_model_len
        and not ((spec.dedicated_only or pinned) and worker.tier is not Tier.DEDICATED)
        and all(worker.version is not None and worker.version >= floor for floor in floors)
        and turn.backoff_until_s.get(worker.worker_id, at_s) <= at_s
        and (budget is None or worker.reserved_tokens + num_tokens + turn.expected_tokens <= budget)
        and ends_in_time(book, turn, worker, at_s)
    )


def ends_in_time(book: TurnBook, turn: Turn, worker: Worker, at_s: float) -> bool:
    """Is the turn expected to be over by the time when turns leave the device?"""
    if worker.tier is not Tier.BORROWED:
        return True
    home, resident = book.affinity.where(turn.spec.trajectory_id)
    num_tokens = turn.spec.num_prompt_tokens + len(turn.token_ids)
    fresh = num_tokens - (min(resident, num_tokens) if home is worker else 0)
    speed = worker.speed
    takes_s = fresh * speed.prefill_s + turn.expected_tokens * (
        speed.token_s + worker.inflight * speed.crowd_s
    )
    return at_s + takes_s <= worker.until_s - book.fleet.params.drain_s + 1e-9


def safe(worker: Worker) -> bool:
    return not worker.gated and (worker.slack_s is None or worker.slack_s > 0)


def least_loaded(workers: list[Worker]) -> set[str]:
    least = min((worker.inflight for worker in workers), default=0)
    return {worker.worker_id for worker in workers if worker.inflight == least}


def paper(turn: Candidate, workers: list[Worker]) -> set[str]:
    """Workers that the paper's order allows; empty: the turn stays queued."""
    affine = turn.affine
    usable = [item for item in workers if item.tier is Tier.DEDICATED or safe(item)]
    if affine in usable:
        return {affine.worker_id}  # type: ignore[union-attr]
    pool = usable
    if affine is not None and affine.tier is Tier.DEDICATED and affine not in workers:
        pool = [item for item in usable if item.tier is not Tier.DEDICATED] or usable
    return least_loaded(pool)


def sticky(turn: Candidate, workers: list[Worker], gap: int = 2) -> set[str]:
    least = min((worker.inflight for worker in workers), default=0)
    if turn.affine in workers and turn.affine.inflight - least <= gap:  # type: ignore[union-attr]
        return {turn.affine.worker_id}  # type: ignore[union-attr]
    return least_loaded(workers)


def cost_s(turn: Candidate, worker: Worker, base: tuple[float, float, float], params: CostParams) -> float:
    """Seconds that ``turn`` costs on ``worker``; ``base`` is what workers of its tier are like."""
    speed = worker.speed
    trust = math.exp(-(turn.at_s - speed.observed_at_s) / params.fade_s)
    token_s, crowd_s, prefill_s = (
        mean + trust * (own - mean) for own, mean in zip(speed.coefficients(), base, strict=True)
    )
    cached = sum(tokens for held_by, tokens in turn.cached if held_by is worker)
    read_s = turn.num_prompt_tokens * prefill_s
    crowding_s = turn.expected_tokens * worker.inflight * crowd_s
    fresh_s = read_s * (1 - cached / turn.num_prompt_tokens)
    run_s = fresh_s + turn.expected_tokens * token_s + crowding_s
    wait_s = 0.0 if safe(worker) else params.gated_s
    others_s = params.social * crowding_s + params.social_read * worker.inflight * fresh_s
    return run_s + wait_s + others_s + params.risk * worker.reclaim_rate * run_s * read_s


def cost(
    turn: Candidate, workers: list[Worker], base: dict[Tier, tuple[float, float, float]], params: CostParams
) -> set[str]:
    costs = {worker.worker_id: cost_s(turn, worker, base[worker.tier], params) for worker in workers}
    best_s = min(costs.values(), default=0.0)
    if turn.affine in workers:
        margin_s = max(params.hysteresis * turn.resident_tokens * turn.affine.speed.prefill_s, params.floor_s)  # type: ignore[union-attr]
        if costs[turn.affine.worker_id] - best_s <= margin_s:  # type: ignore[union-attr]
            return {turn.affine.worker_id}  # type: ignore[union-attr]
    return {name for name, value in costs.items() if value <= best_s * (1 + 1e-12)}


def allowed(policy: str, turn: Candidate, workers: list[Worker], book: TurnBook) -> set[str]:
    """The workers that ``policy`` may choose; more than one only where it draws."""
    match policy:
        case "paper":
            return paper(turn, workers)
        case "sticky_least_loaded":
            return sticky(turn, workers)
        case "cost":
            base = {tier: speed.coefficients() for tier, speed in book.fleet.tier_speed.items()}
            return cost(turn, workers, base, CostParams())
        case _:
            return {worker.worker_id for worker in workers}


def random_book(rng: random.Random, policy: RoutingPolicy, num_workers: int) -> TurnBook:
    """A fleet in any state at time 10, with trajectories ``x0`` to ``x9`` known to it, and turns that run."""
    params = te.TurnParams(pin_after_reclaims=1, expected_tokens=40)
    book = TurnBook(policy, params, FleetParams(cap_dedicated=6, cap_harvested=4))
    for index in range(num_workers):
        tier, name = rng.choice(list(Tier)), f"w{index}"
        book.handle(
            te.WorkerRegistered(
                at_s=0.0,
                worker_id=name,
                incarnation="1",
                tier=tier,
                model=rng.choice("mmmo"),
                max_model_len=rng.choice([400, 4000]),
            )
        )
        reclaims = rng.choice([0, 0, 0, 1])
        for seq in range(1 + reclaims):
            book.handle(
                te.WorkerHeartbeat(
                    at_s=0.0,
                    worker_id=name,
                    incarnation="1",
                    seq=seq,
                    version=(1, rng.randint(0, 2)),
                    state=rng.choice(["ready"] * 5 + ["starting"]),
                    kv_budget_tokens=rng.choice([None, 900, 9000]),
                    kv_used_tokens=rng.choice([0, 1000]),
                    gated=rng.random() < 0.2,
                    reclaim_seq=seq,
                    slack_s=rng.choice([None, -0.1, 0.3]),
                )
            )
        if rng.random() < 0.1:
            book.handle(te.WorkerDuty(at_s=0.0, worker_id=name, duty=Duty.CORDONED))
        if rng.random() < 0.2:
            book.handle(te.WorkerAssigned(at_s=0.0, worker_id=name, job=rng.choice(["j", "other", ""])))
    at_s = 1.0
    for index in range(rng.randint(0, 2 * num_workers)):
        at_s += 0.01
        actions = submit(book, rng, f"r{index}", at_s)
        sent = [action for action in actions if isinstance(action, te.Dispatch)]
        for action in sent if rng.random() < 0.7 else ():
            at_s += 0.05
            count = rng.randint(1, 30)
            book.handle(
                te.TokensArrived(at_s=at_s, turn_id=action.turn_id, attempt=1, token_ids=(1,) * count)
            )
            book.handle(te.AttemptEnded(at_s=at_s, turn_id=action.turn_id, attempt=1, finish_reason="stop"))
    return book


def submit(book: TurnBook, rng: random.Random, name: str, at_s: float) -> list[te.Action]:
    return book.handle(
        te.TurnSubmitted(
            at_s=at_s,
            turn_id=name,
            trajectory_id=f"x{rng.randrange(10)}",
            job="j",
            model="m",
            group_id=rng.choice([None, "g"]),
            num_prompt_tokens=rng.choice([50, 300, 800]),
            max_tokens=60,
            min_version=rng.choice([None, None, (1, 1)]),
            dedicated_only=rng.random() < 0.1,
        )
    )


class Spy:
    """Passes choices on to ``policy``, and remembers what was asked."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self.policy = policy
        self.asked: Candidate | None = None

    def choose(self, turn: Candidate, eligible: Eligible) -> Worker | None:
        self.asked = turn
        return self.policy.choose(turn, eligible)


def disagreement(policy: str, seed: int) -> str | None:
    """One decision on a random fleet against the brute-force one; None when they agree."""
    rng = random.Random(seed)
    spy = Spy(make_policy(policy, random.Random(seed)))
    book = random_book(rng, spy, rng.randint(1, 8))
    probe = te.TurnSubmitted(
        at_s=10.0,
        turn_id="probe",
        trajectory_id=f"x{rng.randrange(10)}",
        job="j",
        model="m",
        group_id="g",
        num_prompt_tokens=rng.choice([50, 300, 800]),
        max_tokens=60,
    )
    before = {turn_id for _, turn_id, _ in book.queue}
    loads = {worker.worker_id: (worker.inflight, worker.reserved_tokens) for worker in book.fleet}
    spy.asked = None
    actions = book.handle(probe)
    sent = {a.turn_id: a.worker_id for a in actions if isinstance(a, te.Dispatch)}
    assert not before & set(sent)  # what waited, waited for a reason
    for worker in book.fleet:  # as they were when the choice was made
        worker.inflight, worker.reserved_tokens = loads[worker.worker_id]
    turn = book.turns["probe"]
    able = [worker for worker in book.fleet if eligible(book, turn, worker, 10.0)]
    if not able:
        return (
            None if "probe" not in sent else f"{policy}/{seed}: sent to {sent['probe']}, nobody may take it"
        )
    if spy.asked is None:
        return f"{policy}/{seed}: not offered, {[worker.worker_id for worker in able]} may take it"
    may = allowed(policy, spy.asked, able, book)
    chosen = sent.get("probe")
    good = chosen in may if may else chosen is None
    return None if good else f"{policy}/{seed}: chose {chosen}, brute force says {sorted(may)}"
