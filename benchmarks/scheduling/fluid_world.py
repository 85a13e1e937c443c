"""A small deterministic world around the real turn book: engines, production traffic, agents, failures.

Discrete events.  Between two events an engine is a fluid: every running turn gets a token per step, and a
step takes ``step_s + decode_s * turns (+ prefill_s * chunk while a prompt is read)``, stretched where
production leaves only a share of the device.  Caches are LRU over trajectories inside the KV budget.

Everything that *decides* is :class:`rose.policy.turns.TurnBook`; this file only lets time pass.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from rose.policy import turn_events as te
from rose.policy.fleet import FleetParams
from rose.policy.routing import RoutingPolicy
from rose.policy.stop_reasons import RECLAIMED
from rose.policy.turns import TurnBook
from rose.policy.worker import Tier

CHUNK = 512


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    tier: Tier
    step_s: float = 0.012
    decode_s: float = 0.0004
    prefill_s: float = 5e-5
    kv_tokens: int = 400_000
    quiet_share: float = 1.0
    """Share of the device that rollouts get, when production is quiet and when it is busy."""
    busy_share: float = 1.0
    quiet_s: float = 30.0
    busy_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``group`` members share their first prompt; ``concurrency`` trajectories run at any time."""

    name: str
    engines: tuple[EngineSpec, ...]
    concurrency: int
    total: int
    group: int
    turns: tuple[float, int]
    """Mean (geometric) and most turns."""
    prompt: tuple[float, float]
    """First prompt: median tokens and sigma (log-normal); likewise the next three."""
    suffix: tuple[float, float]
    output: tuple[float, float]
    tool_s: tuple[float, float]
    max_tokens: int = 8192


@dataclass
class _Turn:
    fresh: int
    output: int
    tool_s: float


@dataclass
class Trajectory:
    name: str
    group: str
    turns: list[_Turn]
    started_s: float = 0.0
    ended_s: float = 0.0
    at: int = 0
    num_tokens: int = 0
    """Prompt of the turn at :attr:`at`."""


@dataclass
class _Run:
    turn_id: str
    attempt: int
    trajectory: Trajectory
    num_prompt: int
    left: float
    """Prompt tokens still to read."""
    want: int
    cached: int
    start_v: float = 0.0
    reported: int = 0
    stamp: str | None = None
    """Whose weights sample it; None: nobody asks."""


@dataclass
class Engine:
    name: str
    spec: EngineSpec
    share: float = 1.0
    at_s: float = 0.0
    v: float = 0.0
    """Tokens that a turn running since the start would have."""
    reading: deque[_Run] = field(default_factory=deque)
    decoding: dict[str, _Run] = field(default_factory=dict)
    ends: list[tuple[float, str, int]] = field(default_factory=list)
    cache: OrderedDict[str, int] = field(default_factory=OrderedDict)
    budget: int = 0
    alive: bool = True
    incarnation: int = 1
    seq: int = 0
    reclaim_seq: int = 0
    epoch: int = 0
    busy_s: float = 0.0
    alive_s: float = 0.0
    decoded: float = 0.0

    def runs(self) -> list[_Run]:
        return [*self.reading, *self.decoding.values()]

    def step_s(self) -> float:
        reading = self.spec.prefill_s * min(CHUNK, self.reading[0].left) if self.reading else 0.0
        return self.spec.step_s + self.spec.decode_s * len(self.decoding) + reading

    def advance(self, at_s: float) -> None:
        spent_s, self.at_s = at_s - self.at_s, at_s
        if not self.alive:
            return
        self.alive_s += spent_s
        if not (self.reading or self.decoding):
            return
        self.busy_s += spent_s
        steps = spent_s * self.share / self.step_s()
        self.v += steps
        self.decoded += steps * len(self.decoding)
        if self.reading:
            head = self.reading[0]
            head.left -= steps * min(CHUNK, head.left)

    def next_s(self) -> float | None:
        """When something is next done here, if nothing else happens."""
        if not self.alive or self.share <= 0:
            return None
        steps = []
        if self.reading:
            steps.append(max(self.reading[0].left, 0.0) / min(CHUNK, max(self.reading[0].left, 1e-9)))
        while self.ends and self._gone(self.ends[0]):
            heapq.heappop(self.ends)
        if self.ends:
            steps.append(max(self.ends[0][0] - self.v, 0.0))
        return self.at_s + min(steps) * self.step_s() / self.share if steps else None

    def _gone(self, entry: tuple[float, str, int]) -> bool:
        run = self.decoding.get(entry[1])
        return run is None or run.attempt != entry[2]

    def resident(self, trajectory: Trajectory) -> int:
        return max(self.cache.get(trajectory.name, 0), self.cache.get(trajectory.group, 0))

    def keep(self, key: str, num_tokens: int) -> None:
        self.cache[key] = num_tokens
        self.cache.move_to_end(key)
        used = sum(self.cache.values())
        while used > self.budget and len(self.cache) > 1:
            used -= self.cache.popitem(last=False)[1]

    def num_made(self, run: _Run) -> int:
        return 0 if run.turn_id not in self.decoding else min(int(self.v - run.start_v), run.want)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    mean_s: float
    p90_s: float
    makespan_s: float
    recomputed: int
    """Tokens read or made again, per thousand tokens that were needed."""
    idle: float
    harvested: float
    num_failed: int


def draw(rng: random.Random, shape: tuple[float, float], least: float = 1.0) -> float:
    median, sigma = shape
    return max(least, median * rng.lognormvariate(0.0, sigma))


def trajectories(load: Workload, seed: int) -> list[Trajectory]:
    """The same for every policy."""
    rng = random.Random(f"{load.name}/{seed}")
    made: list[Trajectory] = []
    for number in range(load.total):
        if number % load.group == 0:
            prompt = int(draw(rng, load.prompt))
        mean, most = load.turns
        count = 1
        while count < most and rng.random() > 1 / mean:
            count += 1
        turns = [
            _Turn(
                fresh=prompt if turn == 0 else int(draw(rng, load.suffix)),
                output=min(int(draw(rng, load.output)), load.max_tokens),
                tool_s=draw(rng, load.tool_s, 0.0),
            )
            for turn in range(count)
        ]
        made.append(Trajectory(name=f"t{number}", group=f"g{number // load.group}", turns=turns))
    return made


class World:
    """One run of one policy on one workload; ``run()`` once."""

    def __init__(
        self,
        load: Workload,
        policy: RoutingPolicy,
        seed: int,
        churn_per_min: float,
        fleet: FleetParams | None = None,
        turns: te.TurnParams | None = None,
    ) -> None:
        self.load = load
        self.churn_per_s = churn_per_min / 60.0
        self.rng = random.Random(f"{load.name}/{seed}/world")
        self.book = TurnBook(policy, turns or te.TurnParams(max_queued=10**6), fleet or FleetParams())
        self.engines = {
            f"{spec.tier.value[0]}{index}": Engine(name=f"{spec.tier.value[0]}{index}", spec=spec)
            for index, spec in enumerate(load.engines)
        }
        self.waiting = deque(trajectories(load, seed))
        self.running: dict[str, Trajectory] = {}
        self.done: list[Trajectory] = []
        self.now_s = 0.0
        self.recomputed = self.needed = self.num_failed = 0
        self.tokens = dict.fromkeys(Tier, 0)
        self._events: list[tuple[float, int, str, str, int]] = []
        self._numbers = itertools.count()

    # --- time ------------------------------------------------------------------------------------------

    def at(self, at_s: float, kind: str, name: str, epoch: int = 0) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), kind, name, epoch))

    def run(self, limit_s: float = 1e5) -> Outcome:
        for engine in self.engines.values():
            engine.budget = engine.spec.kv_tokens
            engine.share = engine.spec.quiet_share
            self.register(engine)
            self.at(self.rng.expovariate(1 / engine.spec.quiet_s), "busy", engine.name)
            if engine.spec.tier is Tier.HARVESTED and self.churn_per_s:
                self.at(self.rng.expovariate(self.churn_per_s), "cut", engine.name)
                self.at(self.rng.expovariate(self.churn_per_s / 10), "die", engine.name)
        self.at(0.0, "tick", "")
        while self.waiting and len(self.running) < self.load.concurrency:
            self.start(self.waiting.popleft())
        while self.running and self.now_s < limit_s:
            self.now_s, _, kind, name, epoch = heapq.heappop(self._events)
            getattr(self, f"on_{kind}")(name, epoch)
        for engine in self.engines.values():
            engine.advance(self.now_s)
        self.book.check()
        times = sorted(item.ended_s - item.started_s for item in self.done)
        busy_s = sum(engine.busy_s for engine in self.engines.values())
        alive_s = sum(engine.alive_s for engine in self.engines.values())
        total = sum(self.tokens.values())
        return Outcome(
            mean_s=sum(times) / len(times),
            p90_s=times[int(0.9 * (len(times) - 1))],
            makespan_s=self.now_s,
            recomputed=round(1000 * self.recomputed / self.needed),
            idle=1 - busy_s / alive_s,
            harvested=self.tokens[Tier.HARVESTED] / max(total, 1),
            num_failed=self.num_failed,
        )

    def feed(self, event: te.Event) -> None:
        for action in self.book.handle(event):
            match action:
                case te.Dispatch():
                    self.dispatch(action)
                case te.AbortAttempt():
                    self.drop(self.engines[action.worker_id], action.turn_id, action.attempt)
                case te.StopAttempt():
                    self.stop(self.engines[action.worker_id], action.turn_id, action.attempt)
                case te.TurnEnded():
                    self.ended(action)
                case _:
                    pass

    # --- agents ----------------------------------------------------------------------------------------

    def start(self, item: Trajectory) -> None:
        item.started_s = self.now_s
        self.running[item.name] = item
        self.submit(item)

    def job_of(self, item: Trajectory) -> str:
        return "j"

    def submit(self, item: Trajectory) -> None:
        turn = item.turns[item.at]
        item.num_tokens += turn.fresh
        self.needed += turn.fresh + turn.output
        self.feed(
            te.TurnSubmitted(
                at_s=self.now_s,
                turn_id=f"{item.name}.{item.at}",
                trajectory_id=item.name,
                job=self.job_of(item),
                model="m",
                group_id=item.group,
                num_prompt_tokens=item.num_tokens,
                max_tokens=turn.output,
            )
        )

    def ended(self, action: te.TurnEnded) -> None:
        item = self.running[action.result.trajectory_id]
        for segment in action.result.segments:
            self.tokens[segment.tier] += segment.num_tokens
        self.num_failed += action.outcome is not te.TurnState.DONE
        turn = item.turns[item.at]
        item.num_tokens += turn.output
        item.at += 1
        if item.at < len(item.turns):
            self.at(self.now_s + turn.tool_s, "tool", item.name)
            return
        item.ended_s = self.now_s
        del self.running[item.name]
        self.done.append(item)
        self.feed(te.TrajectoryClosed(at_s=self.now_s, trajectory_id=item.name))
        if self.waiting:
            self.start(self.waiting.popleft())

    def on_tool(self, name: str, epoch: int) -> None:
        self.submit(self.running[name])

    # --- engines ---------------------------------------------------------------------------------------

    def register(self, engine: Engine) -> None:
        self.feed(
            te.WorkerRegistered(
                at_s=self.now_s,
                worker_id=engine.name,
                incarnation=str(engine.incarnation),
                tier=engine.spec.tier,
                model="m",
                max_model_len=10**7,
            )
        )
        self.on_beat(engine.name, engine.incarnation)

    def on_beat(self, name: str, epoch: int) -> None:
        engine = self.engines[name]
        if not engine.alive or epoch != engine.incarnation:
            return
        engine.seq += 1
        runs = engine.runs()
        self.feed(
            te.WorkerHeartbeat(
                at_s=self.now_s,
                worker_id=name,
                incarnation=str(engine.incarnation),
                seq=engine.seq,
                version=(1, 0),
                state="ready",
                kv_budget_tokens=engine.budget,
                kv_used_tokens=min(sum(run.num_prompt + run.want for run in runs), engine.budget),
                running=len(runs),
                gated=engine.share < 0.05,
                reclaim_seq=engine.reclaim_seq,
                slack_s=0.1 if engine.share >= 0.05 else -0.1,
                decoded_tokens=int(engine.decoded),
            )
        )
        self.at(self.now_s + 1.0, "beat", name, engine.incarnation)

    def on_tick(self, name: str, epoch: int) -> None:
        self.feed(te.ClockTicked(at_s=self.now_s))
        self.at(self.now_s + 0.5, "tick", "")

    def plan(self, engine: Engine) -> None:
        """Wake this engine when it next has something to say."""
        engine.epoch += 1
        next_s = engine.next_s()
        if next_s is not None:
            self.at(next_s, "work", engine.name, engine.epoch)

    def dispatch(self, action: te.Dispatch) -> None:
        engine = self.engines[action.worker_id]
        item = self.running[action.turn_id.split(".")[0]]
        if not engine.alive:
            self.at(self.now_s + 0.01, "refused", f"{action.turn_id}/{action.attempt}")
            return
        engine.advance(self.now_s)
        num_prompt = item.num_tokens + action.num_kept_tokens
        cached = min(engine.resident(item), num_prompt - 1)
        read = num_prompt - cached
        fresh = item.turns[item.at].fresh if action.attempt == 1 else 0
        self.recomputed += max(0, read - fresh)
        run = _Run(action.turn_id, action.attempt, item, num_prompt, read, action.max_tokens, cached)
        run.stamp = self.stamp_of(engine)
        engine.reading.append(run)
        self.plan(engine)

    def on_refused(self, name: str, epoch: int) -> None:
        turn_id, attempt = name.split("/")
        self.feed(
            te.AttemptFailed(
                at_s=self.now_s, turn_id=turn_id, attempt=int(attempt), kind="lost", message="refused"
            )
        )

    def on_work(self, name: str, epoch: int) -> None:
        engine = self.engines[name]
        if epoch != engine.epoch:
            return
        engine.advance(self.now_s)
        if engine.reading and engine.reading[0].left < 0.5:
            run = engine.reading.popleft()
            run.start_v = engine.v
            engine.decoding[run.turn_id] = run
            heapq.heappush(engine.ends, (engine.v + run.want, run.turn_id, run.attempt))
        ready: list[_Run] = []
        while engine.ends and (engine._gone(engine.ends[0]) or engine.ends[0][0] <= engine.v + 1e-6):
            entry = heapq.heappop(engine.ends)
            if not engine._gone(entry):
                ready.append(engine.decoding.pop(entry[1]))
        self.plan(engine)
        for run in ready:
            engine.keep(run.trajectory.name, run.num_prompt + run.want)
            if run.trajectory.at == 0:
                engine.keep(run.trajectory.group, run.trajectory.turns[0].fresh)
            self.answer(run, run.want, "stop", None)

    def stamp_of(self, engine: Engine) -> str | None:
        """The run whose weights it has; None: nobody asks."""
        return None

    def answer(self, run: _Run, count: int, reason: str, stop: str | None) -> None:
        if count:
            self.feed(
                te.TokensArrived(
                    at_s=self.now_s, turn_id=run.turn_id, attempt=run.attempt, token_ids=(0,) * count
                )
            )
        self.feed(
            te.AttemptEnded(
                at_s=self.now_s,
                turn_id=run.turn_id,
                attempt=run.attempt,
                finish_reason=reason,
                stop_reason=stop,
                num_cached_tokens=run.cached,
                run=run.stamp,
            )
        )

    def stop(self, engine: Engine, turn_id: str, attempt: int) -> None:
        """An abort: the engine answers with what it made."""
        if not engine.alive:
            return
        engine.advance(self.now_s)
        for run in [run for run in engine.runs() if (run.turn_id, run.attempt) == (turn_id, attempt)]:
            count = engine.num_made(run)
            engine.decoding.pop(turn_id, None)
            engine.reading = deque(other for other in engine.reading if other is not run)
            self.plan(engine)
            self.answer(run, count, "abort", None)

    def drop(self, engine: Engine, turn_id: str, attempt: int) -> None:
        """An abort: whatever it made is lost."""
        engine.advance(self.now_s)
        run = engine.decoding.get(turn_id)
        if run is not None and run.attempt == attempt:
            self.recomputed += engine.num_made(run)
            del engine.decoding[turn_id]
        engine.reading = deque(r for r in engine.reading if (r.turn_id, r.attempt) != (turn_id, attempt))
        self.plan(engine)

    # --- production and failures -----------------------------------------------------------------------

    def on_busy(self, name: str, epoch: int) -> None:
        engine = self.engines[name]
        engine.advance(self.now_s)
        engine.share = engine.spec.busy_share
        self.plan(engine)
        self.at(self.now_s + self.rng.expovariate(1 / engine.spec.busy_s), "quiet", name)

    def on_quiet(self, name: str, epoch: int) -> None:
        engine = self.engines[name]
        engine.advance(self.now_s)
        engine.share = engine.spec.quiet_share
        self.plan(engine)
        self.at(self.now_s + self.rng.expovariate(1 / engine.spec.quiet_s), "busy", name)

    def on_cut(self, name: str, epoch: int) -> None:
        """Production takes half of the KV memory back for half a minute."""
        engine = self.engines[name]
        self.at(self.now_s + self.rng.expovariate(self.churn_per_s), "cut", name)
        if not engine.alive:
            return
        engine.advance(self.now_s)
        engine.budget = engine.spec.kv_tokens // 2
        engine.reclaim_seq += 1
        engine.cache.clear()
        victims = engine.runs()[len(engine.runs()) // 2 :] or engine.runs()
        engine.reading = deque(run for run in engine.reading if run not in victims)
        made = [(run, engine.num_made(run)) for run in victims]
        for run in victims:
            engine.decoding.pop(run.turn_id, None)
        self.plan(engine)
        self.at(self.now_s + 30.0, "restored", name, engine.incarnation)
        for run, count in made:
            self.answer(run, min(count, run.want), "abort", RECLAIMED)

    def on_restored(self, name: str, epoch: int) -> None:
        engine = self.engines[name]
        if epoch == engine.incarnation:
            engine.budget = engine.spec.kv_tokens

    def on_die(self, name: str, epoch: int) -> None:
        """The process ends; half of the time nobody says so."""
        engine = self.engines[name]
        engine.advance(self.now_s)
        engine.alive = False
        self.recomputed += sum(engine.num_made(run) for run in engine.runs())
        engine.reading.clear()
        engine.decoding.clear()
        engine.cache.clear()
        self.at(self.now_s + 20.0, "back", name)
        if self.rng.random() < 0.5:
            self.feed(te.WorkerLost(at_s=self.now_s, worker_id=name, reason="lost"))

    def on_back(self, name: str, epoch: int) -> None:
        engine = self.engines[name]
        engine.advance(self.now_s)
        engine.alive = True
        engine.incarnation += 1
        engine.seq = engine.reclaim_seq = 0
        engine.budget = engine.spec.kv_tokens
        self.register(engine)
        self.at(self.now_s + self.rng.expovariate(self.churn_per_s / 10), "die", name)
