"""The fleet as rose-scheduler and the node agents see it: the thin shell around the real policies.

Feeds :class:`rose.policy.turns.TurnBook` what engines do, carries out its actions on simulated devices, and runs one
:class:`rose.policy.lending.Lending` per serving device on what that device reports.  Decides nothing itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from rose.lineage import Version
from rose.policy import turn_events as te
from rose.policy.assigning import NOTHING_SAID, Switching
from rose.policy.copies import CopyParams
from rose.policy.coserving.timing import is_late
from rose.policy.lending_events import (
    KillRollout,
    Mode,
    ModeSet,
    Phase,
    RlStepStarted,
    RolloutReported,
    ServingReported,
    SetLend,
)
from rose.policy.stop_reasons import OTHER_RUN, RECLAIMED
from rose.policy.turns import TurnBook
from rose.policy.worker import Tier
from rose.sim.copying import SimCopies
from rose.sim.device import SimDevice
from rose.sim.engine import Request
from rose.sim.events import EventDigest, EventQueue
from rose.sim.live import Configs
from rose.sim.node import Counters, SimNode
from rose.sim.scenario import Scenario
from rose.sim.systems import System

SWITCH_LOOK_S = 0.05
REPORT_PERIOD_S = 0.5
"""How often a busy serving engine's memory is looked at (agents do it every 0.05 s); a claim is heard at once."""
HELD_STEP = 0.01
"""Share of the device by which what the rollout engine holds must change to be reported."""
ZEROS = tuple([0] * 65536)
JOB = "job"
"""The only one of most scenarios; it names no run."""


class SimCluster:
    """See the module.  ``on_turn`` hears of every turn that ended; ``is_training``: of a job, whether its trainer has a batch."""

    def __init__(
        self,
        scenario: Scenario,
        system: System,
        queue: EventQueue,
        journal: EventDigest,
        on_turn: Callable[[te.TurnEnded, float], None],
        is_training: Callable[[str], bool],
        configs: Configs,
    ) -> None:
        self.scenario, self.system = scenario, system
        self.queue, self.journal = queue, journal
        self.on_turn = on_turn
        self.nodes: dict[str, SimNode] = {}
        self.counters = Counters()
        self.ttft_s: list[tuple[float, float]] = []
        """(when, seconds) of each production request."""
        self.tpot_s: list[tuple[float, float]] = []
        self.late: dict[int, float] = {}
        """Requests of production that missed one of their two limits, by number -> when they came."""
        self.configs = configs
        config = configs.scheduler
        fleet = config.fleet_params()
        self.book = TurnBook(
            config.routing_policy(),
            # Agents wait as long as it takes, and the clock ticks with the heartbeats: see rose.sim.live.
            replace(config.turn_params(), max_queued=1 << 20, max_queue_s=1e9),
            replace(fleet, clock_gap_s=max(fleet.clock_gap_s, 1.5 * self.heartbeat_s)),
        )
        self.provisioning = config.provisioning
        self.assigner = config.provisioning.assigner(self.book, is_training)
        self._assigned_s = -math.inf
        most = 0 if system.plain_queue else scenario.job.copies
        self.copies = SimCopies(self, CopyParams(most=most, ratio=scenario.job.copy_ratio)) if most else None
        self.num_switches = 0
        self._switching: dict[str, Switching] = {}
        self.targets: dict[str, tuple[int, int, str, str]] = {}
        """Turn -> (tokens it will sample, prompt, trajectory, group): what the engine knows and no policy does."""
        self._actions: deque[te.Action] = deque()
        self._draining = False

    @property
    def heartbeat_s(self) -> float:
        link = self.configs.dedicated.scheduler
        assert link is not None
        return link.heartbeat_s

    def num_slots(self, job: str) -> int:
        """Turns that all engines of a job together may run at once."""
        config = self.configs.scheduler
        own, shared = config.cap_dedicated, config.cap_harvested
        return sum(
            node.cap or (shared if node.tier is Tier.HARVESTED else own)
            for node in self.nodes.values()
            if node.run in ("", job)
        )

    # --- fleet -----------------------------------------------------------------------------------------

    def join(
        self,
        name: str,
        device: SimDevice,
        tier: Tier,
        *,
        version: Version | None,
        cap: int | None = None,
        run: str = "",
        for_tail: bool = False,
    ) -> SimNode:
        config = self.configs.dedicated if device.serving is None else self.configs.harvested
        node = SimNode(device=device, tier=tier, config=config, cap=cap, run=run, for_tail=for_tail)
        self.nodes[name] = node
        if device.memory is not None:
            device.memory.steps.fixed = config.lending.policy == "static"
            node.lending = config.lending.make()
            node.lending.handle(self._mode_set(node))
        if version is not None:
            self.start(name, version)
        return node

    def start(self, name: str, version: Version | None) -> None:
        """The node's rollout engine is up; without a version it waits for weights."""
        node, now_s = self.nodes[name], self.queue.now_s
        node.incarnation += 1
        node.version = version
        node.registered = True
        node.device.start(now_s)
        self.feed(
            te.WorkerRegistered(
                at_s=now_s,
                worker_id=name,
                incarnation=str(node.incarnation),
                tier=node.tier,
                model="policy",
                max_model_len=node.config.engine.max_model_len,
                cap=node.cap,
                for_tail=node.for_tail,
            )
        )
        self.report(name, node, now_s)
        self.heartbeat(name, node, now_s)

    def lend(self, name: str, seconds: float) -> None:
        """The owner of a borrowed device leaves it for so long from now; 0: it wants it back."""
        node, now_s = self.nodes[name], self.queue.now_s
        node.lent_until_s = now_s + seconds
        if node.registered:
            self.heartbeat(name, node, now_s)

    def stop(self, name: str, *, keep_tokens: bool, reason: str) -> None:
        """The node's rollout engine is taken away; with ``keep_tokens`` what it had sampled was streamed before."""
        if self._end(name, keep_tokens=keep_tokens, reason=reason):
            self.feed(te.WorkerLost(at_s=self.queue.now_s, worker_id=name, reason="drain", forget=True))

    def _end(self, name: str, *, keep_tokens: bool, reason: str) -> bool:
        """Whether it ran."""
        node, now_s = self.nodes[name], self.queue.now_s
        if not node.registered:
            return False
        for request, produced in node.device.stop(now_s):
            turn_id, attempt = _turn_of(request.key)
            if keep_tokens and produced:
                self._sampled(node, produced)
                self.feed(_tokens(now_s, turn_id, attempt, produced))
            else:
                self.counters.lost += produced
        node.registered = False
        self.journal.write(now_s, "stop", name, reason)
        return True

    def commit(self, name: str, version: Version, *, recompute: bool) -> None:
        """New weights are in force; cached prefixes are of the old ones."""
        node = self.nodes[name]
        rollout = node.device.rollout
        assert rollout is not None
        if not node.registered or (node.version is not None and node.version >= version):
            return
        node.version = version
        rollout.drop_cache()
        if recompute:
            while rollout.running:
                rollout.preempt()
        self.journal.write(self.queue.now_s, "commit", name, version)
        self.heartbeat(name, node, self.queue.now_s)

    def require(self, job: str, version: Version) -> None:
        run = job if self.scenario.num_jobs > 1 else ""
        self.feed(te.VersionRequired(at_s=self.queue.now_s, job=job, version=version, run=run))

    def step_started(self) -> None:
        for name, node in self.nodes.items():
            if node.lending is not None:
                self._lend(name, node, node.lending.handle(RlStepStarted(at_s=self.queue.now_s)))

    def sweep(self, now_s: float) -> None:
        """What happens every heartbeat: reports, ticks, heartbeats, the scheduler's clock."""
        for name, node in self.nodes.items():
            if node.registered:
                if now_s - node.reported_s >= REPORT_PERIOD_S:
                    self.report(name, node, now_s)
                self.heartbeat(name, node, now_s)
        self.feed(te.ClockTicked(at_s=now_s))
        self._provision(now_s)
        if self.copies is not None:
            self.copies.look(now_s)

    def _provision(self, now_s: float) -> None:
        """As ``rose.scheduler.provision`` does."""
        if self.provisioning.mode == "off" or now_s < self._assigned_s + self.provisioning.period_s:
            return
        self._assigned_s = now_s
        for action in self.assigner.step(now_s, self._switching):
            job = (action.job,) if self.scenario.num_jobs > 1 else ()
            self.journal.write(now_s, "provision", action.host, type(action).__name__.lower(), *job)
        if self.provisioning.mode == "on":
            for event in self.assigner.assignments(now_s):
                self._assign(event)

    def _assign(self, event: te.WorkerAssigned) -> None:
        """The scheduler gives a device to a job, or to none; the node lends its engine something, or nothing."""
        self.feed(event)
        node = self.nodes[event.worker_id]
        if node.lending is not None:
            self._lend(event.worker_id, node, node.lending.handle(self._mode_set(node, on=event.job != "")))
        if event.job and node.run and node.run != event.job:
            wait_s = self.scenario.fleet.switch_s
            self.queue.at(self.queue.now_s + wait_s, self._switch, (event.worker_id, event.job))

    def _switch(self, now_s: float, word: tuple[str, str]) -> None:
        """Another job's weights are there: what samples under the old ones ends, with its tokens, and then they are in force."""
        name, job = word
        node = self.nodes[name]
        if not node.registered or self.book.fleet.workers[name].job != job or node.run == job:
            return
        rollout = node.device.rollout
        assert rollout is not None
        if rollout.requests:
            node.is_switching = True
            for key in list(rollout.requests):
                node.device.end(key, now_s)
            if rollout.requests:  # at the next step boundary
                self.queue.at(now_s + SWITCH_LOOK_S, self._switch, word)
                return
        node.is_switching = False
        left, node.run, node.version = node.run, job, self.book.required.get(job, (0, 0))
        rollout.drop_cache()
        self.num_switches += 1
        before = self._switching.get(name, NOTHING_SAID)
        self._switching[name] = Switching(
            commit_s=self.scenario.fleet.switch_s,
            num_switches=before.num_switches + 1,
            copies=tuple(sorted({*before.copies, left, job})),
        )
        self.journal.write(now_s, "switch", name, job)
        self.heartbeat(name, node, now_s)

    def _mode_set(self, node: SimNode, *, on: bool = True) -> ModeSet:
        config = node.config
        assert config.serving is not None
        return ModeSet(
            at_s=self.queue.now_s,
            mode=Mode[config.mode.upper()] if on else Mode.OFF,
            floor_pages=config.serving.floor_pages,
            max_lend_pages=config.lending.max_lend_pages,
        )

    def heartbeat(self, name: str, node: SimNode, now_s: float) -> None:
        device = node.device
        rollout = device.rollout
        assert rollout is not None
        node.seq += 1
        self.feed(
            te.WorkerHeartbeat(
                at_s=now_s,
                worker_id=name,
                incarnation=str(node.incarnation),
                seq=node.seq,
                version=node.version,
                state="ready" if node.version is not None else "starting",
                kv_budget_tokens=device.rollout_budget_tokens,
                kv_used_tokens=int(rollout.used_tokens),
                running=rollout.running + len(rollout.prefilling),
                waiting=len(rollout.requests) - rollout.running - len(rollout.prefilling),
                num_preemptions=rollout.num_preempted,
                decoded_tokens=int(rollout.decoded),
                gated=device.closed,
                run=node.run,
                lent_s=max(0.0, node.lent_until_s - now_s) if node.tier is Tier.BORROWED else None,
                reclaim_seq=device.reclaim_seq,
                slack_s=device.slack_s,
                serving_use=device.serving_pages / device.total_pages if device.serving is not None else 0.0,
            )
        )

    # --- lending ---------------------------------------------------------------------------------------

    def report(self, name: str, node: SimNode, now_s: float) -> None:
        """Tell the device's lending policy what is, and do what it says."""
        lending, device = node.lending, node.device
        memory = device.memory
        if lending is None or memory is None:
            return
        node.reported_s = now_s
        actions = lending.handle(
            ServingReported(
                at_s=now_s,
                alive=True,
                phase=Phase.READY,
                total_pages=device.total_pages,
                reserved_pages=memory.reserved_pages,
                used_pages=device.serving_pages,
                needed_pages=memory.needed_pages,
                pressure_seq=memory.steps.pressure_seq,
            )
        )
        if actions:
            self._lend(name, node, actions)
        held = lending.held_pages
        if (
            node.cut_due
            or not lending.lend_pages
            or abs(device.rollout_pages - held) > HELD_STEP * device.total_pages
        ):
            self._rollout_report(name, node, now_s)

    def _rollout_report(self, name: str, node: SimNode, now_s: float) -> None:
        assert node.lending is not None
        device = node.device
        actions = node.lending.handle(
            RolloutReported(
                at_s=now_s,
                alive=device.rollout_up,
                phase=Phase.READY if device.rollout_up else Phase.ABSENT,
                reserved_pages=device.rollout_pages,
                reclaim_seq=device.reclaim_seq,
                step_s=device.longest_step_s(),
            )
        )
        self._lend(name, node, actions)

    def _lend(self, name: str, node: SimNode, actions: list[SetLend | KillRollout]) -> None:
        now_s = self.queue.now_s
        for action in actions:
            if isinstance(action, SetLend):
                self.journal.write(now_s, "lend", name, action.pages)
                cut = node.device.rollout_pages > action.pages
                if cut:
                    self.counters.cuts += (
                        action.pages != node.device.lend_pages
                    )  # else it has only become due
                    node.cut_due = True
                if action.deadline_s is not None:
                    self.queue.at(action.deadline_s + 1e-6, self._deadline, name)
                node.device.lend(action.pages, now_s)
                if cut and node.device.rollout_pages <= action.pages:
                    node.cut_due = False
                    self._rollout_report(name, node, now_s)
            else:
                self.counters.kills += 1
                self.journal.write(now_s, "kill", name)
                self.queue.at(now_s, self.kill, name)

    def _deadline(self, now_s: float, name: str) -> None:
        node = self.nodes[name]
        if node.cut_due and node.lending is not None and node.registered:
            self._rollout_report(name, node, now_s)

    def kill(self, now_s: float, name: str) -> None:
        """Its agent ends the rollout engine for a late cut."""
        node = self.nodes[name]
        if node.registered:
            self._lose(name, "killed")
            self.report(name, node, now_s)

    def fail(self, name: str) -> None:
        """The rollout engine crashed."""
        self._lose(name, "crash")

    def _lose(self, name: str, reason: str) -> None:
        """What the engine had not answered is lost.  The scheduler finds its connections broken."""
        if self._end(name, keep_tokens=False, reason=reason):
            self.feed(te.WorkerLost(at_s=self.queue.now_s, worker_id=name, reason="lost"))
            self.queue.at(self.queue.now_s + self.scenario.fleet.restart_s, self._restart, name)

    def _restart(self, now_s: float, name: str) -> None:
        if not self.nodes[name].registered:
            node = self.nodes[name]
            node.is_switching = False
            self.start(name, self.book.required.get(node.run or JOB, (0, 0)))
            job = self.book.fleet.workers[name].job
            if job and node.run and node.run != job:
                self.queue.at(now_s + self.scenario.fleet.switch_s, self._switch, (name, job))

    # --- Host: what devices say --------------------------------------------------------------------------

    def served(self, device: SimDevice, request: Request, now_s: float) -> None:
        first_s = request.first_s if request.first_s is not None else now_s
        self.counters.asked += request.prompt
        self.counters.found += request.cached
        self.ttft_s.append((request.arrived_s, first_s - request.arrived_s))
        late = is_late(first_s - request.arrived_s, device.slo_ttft_s)
        each_s = request.token_s(now_s)
        if each_s is not None:
            self.tpot_s.append((request.arrived_s, each_s))
            late = late or is_late(each_s, device.slo_tpot_s)
        if late:
            self.late[int(request.key[1:])] = request.arrived_s

    def turn_done(self, device: SimDevice, request: Request, now_s: float) -> None:
        node = self.nodes[device.name]
        turn_id, attempt = _turn_of(request.key)
        produced = request.kept + request.target
        self._sampled(node, produced)
        self._prefilled(request, attempt)
        self.feed(
            te.AttemptEnded(
                at_s=now_s,
                turn_id=turn_id,
                attempt=attempt,
                finish_reason="stop",
                token_ids=ZEROS[:produced],
                num_cached_tokens=request.cached,
                run=node.run or None,
            )
        )

    def turn_cut(
        self, device: SimDevice, request: Request, produced: int, now_s: float, reason: str | None = RECLAIMED
    ) -> None:
        node = self.nodes[device.name]
        turn_id, attempt = _turn_of(request.key)
        produced += request.kept
        self._sampled(node, produced)
        self._prefilled(request, attempt)
        if not self.system.resumable:
            self.counters.lost += produced
        self.feed(
            te.AttemptEnded(
                at_s=now_s,
                turn_id=turn_id,
                attempt=attempt,
                finish_reason="abort",
                token_ids=ZEROS[:produced],
                stop_reason=OTHER_RUN if node.is_switching else reason,
                num_cached_tokens=request.cached,
                run=node.run or None,
            )
        )

    def claimed(self, device: SimDevice, now_s: float) -> None:
        node = self.nodes.get(device.name)
        if node is not None:
            self.report(device.name, node, now_s)

    def boundary(self, device: SimDevice, now_s: float) -> None:
        node = self.nodes.get(device.name)
        if node is None or node.lending is None or not node.registered:
            return
        if device.reclaim_seq != node.reclaim_seen:
            # A reclaim is pushed at once, it does not wait for the heartbeat.
            node.reclaim_seen = device.reclaim_seq
            node.cut_due = False
            self._rollout_report(device.name, node, now_s)
            self.heartbeat(device.name, node, now_s)
        elif now_s - node.reported_s >= REPORT_PERIOD_S:
            self.report(device.name, node, now_s)

    def _sampled(self, node: SimNode, tokens: int) -> None:
        self.counters.sampled[node.tier.value] += tokens

    def _prefilled(self, request: Request, attempt: int) -> None:
        counters = self.counters
        fresh = max(0, request.prompt - request.cached)
        counters.prefilled += fresh
        counters.cached += request.cached
        if attempt > 1:
            counters.recomputed += fresh

    # --- turns -----------------------------------------------------------------------------------------

    def submit(
        self,
        turn_id: str,
        trajectory: str,
        group: str,
        num_prompt: int,
        target: int,
        *,
        first: bool,
        job: str = JOB,
    ) -> None:
        """A turn of ``num_prompt`` tokens that will sample ``target``; no policy sees the latter."""
        self.targets[turn_id] = (target, num_prompt, trajectory, group if first else "")
        self.feed(
            te.TurnSubmitted(
                at_s=self.queue.now_s,
                turn_id=turn_id,
                trajectory_id=trajectory,
                job=job,
                model="policy",
                num_prompt_tokens=num_prompt,
                max_tokens=self.scenario.job.output_max,
                group_id=group,
                resumable=self.system.resumable,
            )
        )

    def cancel(self, turn_id: str, reason: str) -> None:
        if turn_id in self.book.turns:
            self.feed(te.TurnCancelled(at_s=self.queue.now_s, turn_id=turn_id, reason=reason))

    def close(self, trajectory: str) -> None:
        self.feed(te.TrajectoryClosed(at_s=self.queue.now_s, trajectory_id=trajectory))

    def feed(self, event: te.Event) -> None:
        """One event through the turn book; its actions are carried out in order, also when they cause events."""
        actions = self.book.handle(event)
        if not actions:
            return
        self._actions.extend(actions)
        if self._draining:
            return
        self._draining = True
        while self._actions:
            self._execute(self._actions.popleft())
        self._draining = False

    def _execute(self, action: te.Action) -> None:
        now_s = self.queue.now_s
        match action:
            case te.Dispatch():
                target, prompt, trajectory, group = self.targets[action.turn_id]
                request = Request(
                    f"{action.turn_id}/{action.attempt}",
                    prompt + action.num_kept_tokens,
                    target - action.num_kept_tokens,
                    now_s,
                    attempt=action.attempt,
                    trajectory=trajectory,
                    group=group,
                )
                self.journal.write(now_s, "dispatch", action.turn_id, action.attempt, action.worker_id)
                self.nodes[action.worker_id].device.add(request, now_s)
            case te.TokensKept() | te.AnswerUnavailable():
                pass
            case te.AbortAttempt():
                node = self.nodes.get(action.worker_id)
                if node is not None and node.registered:
                    key = f"{action.turn_id}/{action.attempt}"
                    if self.copies is not None:
                        self.copies.given_up(node.device.made(key, now_s))
                    node.device.remove(key, now_s)
            case te.StopAttempt():
                node = self.nodes.get(action.worker_id)
                if node is not None and node.registered:
                    self.journal.write(now_s, "leave", action.turn_id, action.attempt, action.worker_id)
                    node.device.end(f"{action.turn_id}/{action.attempt}", now_s)
            case te.TurnEnded():
                del self.targets[action.turn_id]
                self.counters.turns += action.outcome is te.TurnState.DONE
                self.counters.failed += action.outcome is te.TurnState.FAILED
                self.counters.delivered += len(action.result.token_ids)
                self.journal.write(now_s, "end", action.turn_id, action.outcome, action.reason)
                if self.copies is None or self.copies.stands(action):
                    self.on_turn(action, now_s)
            case te.Requeued():
                self.counters.requeued += 1
                if self.copies is not None:
                    self.copies.requeued(action.turn_id)
            case te.TokensDropped():
                self.counters.dropped += action.num_tokens
            case te.Fenced():
                self.counters.fenced += action.num_tokens

    def check(self) -> None:
        """The turn book's invariants, and: every sampled token is delivered, dropped, fenced or in a live turn."""
        self.book.check()
        self.assigner.policy.check()
        counters = self.counters
        live = sum(len(turn.token_ids) for turn in self.book.turns.values())
        sampled = sum(counters.sampled.values())
        assert sampled == counters.delivered + counters.dropped + counters.fenced + live
        assert set(self.targets) == set(self.book.turns)


def _turn_of(key: str) -> tuple[str, int]:
    turn_id, _, attempt = key.rpartition("/")
    return turn_id, int(attempt)


def _tokens(now_s: float, turn_id: str, attempt: int, count: int) -> te.TokensArrived:
    return te.TokensArrived(at_s=now_s, turn_id=turn_id, attempt=attempt, token_ids=ZEROS[:count])
