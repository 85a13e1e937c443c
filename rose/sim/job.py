"""The RL job: groups of trajectories, batches, training steps, weight versions.

Synchronous: sample a batch with the current weights, train, hand the weights out, start again.  Asynchronous: sample all the
time, at most ``alpha`` versions ahead of what is trained.  Batches, leases and staleness are
:class:`rose.policy.samples.SampleBook`'s.  Under DAPO a group whose rewards are all alike is thrown away and replaced; as
many are started as the running share of usable groups calls for.

With ``job.streamed`` the trainer works on groups as they end (:meth:`SimJob._trained_s`), and what is left when the batch is complete is
the last of them.

With ``job.tail_groups`` short and long rounds take turns (:mod:`rose.policy.tail_batching`).

Where trajectories hold slots (:class:`rose.sim.systems.System`), no more of them are under way than the engines have slots.

Invariants: each trajectory is created once and ends once (finished, cancelled or still running); at most one batch trains.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rose.errors import ConfigError
from rose.lineage import Version
from rose.policy import turn_events as te
from rose.policy.adaptive_alpha import AdaptiveAlpha, AlphaParams, StepTaken
from rose.policy.samples import (
    Action,
    BatchAcked,
    BatchAsked,
    Discard,
    Leased,
    SampleBook,
    SampleParams,
    TrajectoryCancelled,
    TrajectoryCreated,
    TrajectoryFinished,
    TurnAdded,
    VersionPublished,
)
from rose.policy.staleness import ends, worst_lag
from rose.policy.tail_batching import TailBatching
from rose.sim.cluster import SimCluster
from rose.sim.events import EventDigest, EventQueue
from rose.sim.scenario import Scenario
from rose.sim.systems import System
from rose.sim.tables import GpuSpec, ModelSpec
from rose.sim.workload import Script, make_script, rewards_differ

TRAIN_FLOPS_PER_PARAM = 8.0
"""Forward and backward (6), and one more forward for the old log-probs (2), per parameter and token."""
_EWMA = 0.2


@dataclass(kw_only=True, slots=True)
class SimStep:
    """One RL step, times in seconds of the run; ``ready_s``: the batch was complete, ``trained_s``: the optimiser was."""

    number: int
    start_s: float
    ready_s: float = math.nan
    trained_s: float = math.nan
    end_s: float = math.nan
    tokens: int = 0
    trajectories: int = 0
    filtered_groups: int = 0
    cancelled: int = 0
    sampled: int = 0
    """While it lasted, by all jobs; likewise the next."""
    harvested: int = 0
    lag: int = 0
    """Versions that the stalest trained token lay behind."""
    long: bool = False
    """A long round of tail batching."""
    alpha: int = 0
    """By how many they might; asynchronous training alone."""
    tail_s: float = math.nan
    """From 75 % of the batch's trajectories to the batch."""


@dataclass(slots=True)
class _Group:
    number: int
    name: str
    running: int
    members: list[str] = field(default_factory=lambda: list[str]())
    done: list[tuple[str, tuple[Version, ...], int]] = field(
        default_factory=lambda: list[tuple[str, tuple[Version, ...], int]]()
    )


@dataclass(slots=True)
class _Trajectory:
    name: str
    script: Script
    group: _Group
    turn: int = 0
    prompt: int = 0
    versions: tuple[Version, ...] = ()
    num_sampled: int = 0
    turn_id: str = ""
    begun: bool = False
    alive: bool = True


class Hooks:
    """What the world does at the seams of a step (extra engines come and go there)."""

    def rollouts_begin(self, job: str, step: int) -> None: ...

    def rollouts_end(self, job: str, step: int) -> float:
        """Seconds before training may start."""
        return 0.0

    def publish(self, job: str, version: Version) -> float:
        """Hand out new weights; seconds until dedicated engines have them."""
        return 0.0


class SimJob:
    """See the module.  ``prefix``: of its trajectories' names, which are unique among all jobs."""

    def __init__(
        self,
        scenario: Scenario,
        system: System,
        queue: EventQueue,
        journal: EventDigest,
        hooks: Hooks,
        model: ModelSpec,
        gpu: GpuSpec,
        params: SampleParams,
        name: str,
        prefix: str,
        seed: int,
    ) -> None:
        self.name, self.prefix, self.seed = name, prefix, seed
        self.scenario, self.system = scenario, system
        self.config = scenario.job
        self.queue, self.journal, self.hooks = queue, journal, hooks
        self.model, self.gpu = model, gpu
        self.cluster: SimCluster
        self.asynchronous = system.training == "async"
        self.book = SampleBook(params=params)
        self.params = params.of(name)
        self.version: Version = (0, 0)
        self.steps: list[SimStep] = []
        self.done = False
        self._running: dict[str, _Trajectory] = {}
        self._waiting: deque[_Trajectory] = deque()
        """For a slot, in the order of their groups; only where trajectories hold slots."""
        self._num_begun = 0
        self._by_trajectory = system.slots == "trajectory" and self.config.fixed_slots == "trajectory"
        self._groups: dict[int, _Group] = {}
        self._num_groups = 0
        self._accepted = (
            1.0 if self.config.algorithm == "grpo" else (self.config.keep_low + self.config.keep_high) / 2
        )
        if self.config.streamed and system.extra == "trainers":
            raise ConfigError(
                "the training GPUs sample while the batch is not complete",
                field="job.streamed",
                fix="false, or a system that does not borrow them",
            )
        self._batching = self._tail_batching()
        self._adaptive = (
            AdaptiveAlpha(AlphaParams(), self.params.alpha)
            if self.config.adaptive_alpha and self.asynchronous
            else None
        )
        self._training = False
        self._trainer_free_s = 0.0
        """When the last optimiser step ended: gradients of the next are of its weights."""
        self._tokens: dict[str, int] = {}
        self._finished_s: dict[str, float] = {}
        self._mismatch_kl = math.nan
        """Of the batch that is trained on."""
        self._next_turn = 0
        self._sampled_before: dict[str, int] = {}
        self.num_cancelled = 0

    def _tail_batching(self) -> TailBatching | None:
        config = self.config
        if not config.tail_groups:
            return None
        if self.asynchronous or config.algorithm == "dapo" or self.scenario.trajectories_in_flight:
            raise ConfigError(
                "short and long rounds are of synchronous steps that begin what they take",
                field="job.tail_groups",
                fix="0, or GRPO with synchronous training",
            )
        return TailBatching(
            num_groups=config.num_groups,
            extra_groups=config.tail_groups,
            extra_members=config.tail_members,
        )

    # --- a step ----------------------------------------------------------------------------------------

    def begin(self, now_s: float, _: object = None) -> None:
        """Start the first or next step."""
        number = len(self.steps)
        limit = self.scenario.num_steps
        if limit is not None and number >= limit:
            self.done = True
            return
        self.steps.append(SimStep(number=number, start_s=now_s))
        sampled = self.cluster.counters.sampled
        self._sampled_before = dict(sampled)
        self.journal.write(now_s, "step", number)
        self.cluster.step_started()
        self.hooks.rollouts_begin(self.name, number)
        if self._batching is None:
            self._fill()
            return
        this = self._batching.begin()
        self.steps[-1].long = this.is_long
        for group in this.again:
            self._start_group(group)
        for _ in range(this.num_new):
            self._start_group(extra_members=this.extra_members)

    def _fill(self) -> None:
        """Start as many groups as this moment calls for."""
        if self._batching is not None:
            return  # a round begins with all that it has
        config = self.config
        load = self.scenario.trajectories_in_flight
        if load is not None:
            while len(self._running) + config.group_size <= load:
                self._start_group()
            return
        ready = len(self.book.ready.get(self.name, []))
        if not self.asynchronous:
            missing = config.num_groups - ready
            want = math.ceil(missing / max(0.1, self._accepted)) if missing > 0 else 0
            while len(self._groups) < want:
                self._start_group()
            return
        # Staleness bounds how far ahead sampling may be of training.
        alpha = self.params.alpha if self._adaptive is None else self._adaptive.alpha
        room = (alpha + 1) * config.num_groups - ready - (config.num_groups if self._training else 0)
        while len(self._groups) < room / max(0.1, self._accepted):
            self._start_group()

    def _start_group(self, again: int | None = None, extra_members: int = 0) -> None:
        """A new one, or the one of this number ``again``, from its beginning."""
        number, name = self._num_groups, f"{self.prefix}g{self._num_groups}"
        if again is None:
            self._num_groups += 1
        else:
            number, name = again, f"{self.prefix}g{again}again"
        group = _Group(number, name, self.config.group_size + extra_members)
        self._groups[number] = group
        for member in range(group.running):
            name = f"{group.name}.{member}"
            script = make_script(self.config, self.seed, number, member)
            trajectory = _Trajectory(name, script, group, prompt=script.prompt_tokens)
            self._running[name] = trajectory
            group.members.append(name)
            self._create(name, group)
        for name in list(group.members):
            if name in self._running:
                self._waiting.append(self._running[name])
        self._begin_waiting()

    def _create(self, name: str, group: _Group) -> None:
        self.book.handle(
            TrajectoryCreated(
                trajectory_id=name,
                job=self.name,
                group_id=group.name,
                group_size=self.config.group_size,
                floor=self.cluster.book.required.get(self.name),
            )
        )

    def _begin_waiting(self) -> None:
        """First turns of those whose turn it is."""
        while self._waiting and not (
            self._by_trajectory and self._num_begun >= self.cluster.num_slots(self.name)
        ):
            trajectory = self._waiting.popleft()
            if trajectory.alive:
                trajectory.begun = True
                self._num_begun += 1
                self._submit(trajectory)

    def _submit(self, trajectory: _Trajectory) -> None:
        self._next_turn += 1
        trajectory.turn_id = f"{trajectory.name}.{trajectory.turn}"
        self.cluster.submit(
            trajectory.turn_id,
            trajectory.name,
            trajectory.group.name,
            trajectory.prompt,
            trajectory.script.outputs[trajectory.turn],
            first=trajectory.turn == 0,
            job=self.name,
        )

    # --- turns and trajectories ------------------------------------------------------------------------

    def turn_ended(self, ended: te.TurnEnded, now_s: float) -> None:
        trajectory = self._running.get(ended.result.trajectory_id)
        if trajectory is None or not trajectory.alive:
            return
        if ended.outcome is not te.TurnState.DONE:
            self._drop(trajectory, "failed")
            return
        trajectory.versions = ends((*trajectory.versions, *(span.version for span in ended.result.spans)))
        script, turn = trajectory.script, trajectory.turn
        trajectory.num_sampled += script.outputs[turn]
        trajectory.prompt += script.outputs[turn] + script.observations[turn]
        trajectory.turn = turn + 1
        added = TurnAdded(
            trajectory_id=trajectory.name, versions=trajectory.versions, num_tokens=trajectory.num_sampled
        )
        if dropped := self.book.handle(added):
            self._carry_out(dropped, now_s)
            self._refill()
            return
        self.queue.at(now_s + script.env_s[turn], self._observed, trajectory)

    def _observed(self, now_s: float, trajectory: _Trajectory) -> None:
        if not trajectory.alive:
            return
        if trajectory.turn < len(trajectory.script.outputs):
            self._submit(trajectory)
            return
        self._end(trajectory)
        group = trajectory.group
        self._finished_s[trajectory.name] = now_s
        self._tokens[trajectory.name] = trajectory.prompt
        group.done.append((trajectory.name, trajectory.versions, trajectory.prompt))
        if len(group.done) == self.config.group_size:
            for surplus in [other for other in self._running.values() if other.group is group]:
                self.steps[-1].cancelled += 1
                self._drop(surplus, "surplus")
                self.cluster.cancel(surplus.turn_id, "surplus")
            self._group_done(group, now_s)
        self._begin_waiting()

    def _group_done(self, group: _Group, now_s: float) -> None:
        del self._groups[group.number]
        differ = rewards_differ(self.config, self.seed, len(self.steps) - 1, group.number)
        kept = True
        for index, (name, versions, _) in enumerate(group.done):
            reward = float(differ and index % 2)
            finished = TrajectoryFinished(
                trajectory_id=name, versions=versions, reward=reward, filter_equal=self.params.filter_equal
            )
            for action in self.book.handle(finished):
                kept = kept and not (isinstance(action, Discard) and action.reason == "filtered")
        self.journal.write(now_s, "group", group.number, kept)
        if self.params.filter_equal:
            self._accepted += _EWMA * (float(kept) - self._accepted)
        if not kept:
            self.steps[-1].filtered_groups += 1
            for name, _, _ in group.done:
                self.book.forget(name)
        self._try_train(now_s)
        if not self.done and not (self._training and not self.asynchronous):
            self._fill()

    def _drop(self, trajectory: _Trajectory, reason: str) -> None:
        """A member failed for good: another takes its place, so that the group stays whole."""
        self._end(trajectory)
        self._cancel_sample(trajectory.name, reason)
        group = trajectory.group
        if reason == "failed" and group.number in self._groups:
            name = f"{trajectory.name}r"
            again = _Trajectory(name, trajectory.script, group, prompt=trajectory.script.prompt_tokens)
            self._running[name] = again
            group.running += 1
            group.members.append(name)
            self._create(name, group)
            self._waiting.appendleft(again)
            self._begin_waiting()

    def _carry_out(self, actions: list[Action], now_s: float) -> None:
        """What the book has dropped as too old is given up."""
        names = [
            name
            for action in actions
            if isinstance(action, Discard) and action.reason == "stale"
            for name in action.trajectory_ids
        ]
        if not names:
            return
        self.journal.write(now_s, "stale", len(names))
        self.steps[-1].cancelled += len(names)
        for name in names:
            trajectory = self._running.get(name)
            if trajectory is not None:
                self._groups.pop(trajectory.group.number, None)
                self._end(trajectory)
                self.cluster.cancel(trajectory.turn_id, "stale")
            self._tokens.pop(name, None)
            self._finished_s.pop(name, None)
            self.book.forget(name)

    def _refill(self) -> None:
        """Others are begun for what was given up."""
        if not self.done:
            self._fill()
            self._begin_waiting()

    def _end(self, trajectory: _Trajectory) -> None:
        trajectory.alive = False
        self._num_begun -= trajectory.begun
        trajectory.group.running -= 1
        del self._running[trajectory.name]
        self.cluster.close(trajectory.name)

    def _cancel_sample(self, name: str, reason: str) -> None:
        self.num_cancelled += 1
        self.book.handle(TrajectoryCancelled(trajectory_id=name, reason=reason))
        self.book.forget(name)

    # --- training --------------------------------------------------------------------------------------

    def _try_train(self, now_s: float) -> None:
        config = self.config
        if self._training or self.done or len(self.book.ready.get(self.name, [])) < config.num_groups:
            return
        step = self.steps[-1]
        answers = self.book.handle(
            BatchAsked(
                at_s=now_s,
                batch_id=f"b{step.number}",
                job=self.name,
                num_groups=config.num_groups,
                version=self.version,
                ttl_s=1e9,
                alpha=None if self._adaptive is None else self._accepted_lag,
            )
        )
        leased = next((answer for answer in answers if isinstance(answer, Leased)), None)
        self._training = leased is not None
        self._carry_out(answers, now_s)
        if len(answers) > (leased is not None):
            self._refill()
        if leased is None:
            return
        ids = leased.trajectory_ids
        step.ready_s = now_s
        step.trajectories = len(ids)
        sampled = [self.book.samples[name].versions for name in ids]
        step.lag = max((worst_lag(self.version, versions) for versions in sampled), default=0)
        step.alpha = self._accepted_lag
        if self._adaptive is not None:
            lags = [worst_lag(self.version, versions) for versions in sampled if versions]
            self._mismatch_kl = config.mismatch_kl * sum(lag**2 for lag in lags) / max(1, len(lags))
        tokens = [self._tokens.pop(name) for name in ids]
        step.tokens = sum(tokens)
        finished = [self._finished_s.pop(name) for name in ids]
        times = sorted(finished)
        step.tail_s = now_s - times[max(0, math.ceil(0.75 * len(times)) - 1)]
        wait_s = 0.0
        if not self.asynchronous:
            wait_s = self.hooks.rollouts_end(self.name, step.number)
            for trajectory in list(self._running.values()):
                step.cancelled += 1
                self._drop(trajectory, "redundant")
                self.cluster.cancel(trajectory.turn_id, "redundant")
            for group in list(self._groups.values()):
                for name, _, _ in group.done:
                    step.cancelled += 1
                    self._cancel_sample(name, "redundant")
            if self._batching is not None:
                self._batching.end(self._groups)
            self._groups.clear()
            self._waiting.clear()
        self.journal.write(now_s, "train", step.number, step.tokens)
        size = self.config.group_size
        groups = [
            (max(finished[at : at + size]), sum(tokens[at : at + size])) for at in range(0, len(ids), size)
        ]
        self.queue.at(self._trained_s(groups, now_s + wait_s), self._trained, step)

    def _trained_s(self, groups: list[tuple[float, int]], ready_s: float) -> float:
        """When the optimiser has stepped.

        Args:
            groups: When each was complete, and its tokens.
            ready_s: When the trainer may begin with a whole batch.
        """
        fleet, efficiency = self.scenario.fleet, self.scenario.efficiency
        flops = fleet.trainers * self.gpu.flops * efficiency.training
        token_s = TRAIN_FLOPS_PER_PARAM * self.model.num_params / flops
        if not self.config.streamed:
            return ready_s + token_s * sum(num_tokens for _, num_tokens in groups)
        end_s = self._trainer_free_s
        for complete_s, num_tokens in sorted(groups):
            end_s = max(end_s, complete_s) + token_s * num_tokens
        return end_s

    @property
    def _accepted_lag(self) -> int:
        """Beyond which a sample is too old."""
        return self.params.alpha if self._adaptive is None else self._adaptive.accepted

    def _trained(self, now_s: float, step: SimStep) -> None:
        self._training = False
        self._trainer_free_s = step.trained_s = now_s
        for action in self.book.handle(BatchAcked(batch_id=f"b{step.number}", step=step.number, attempt=0)):
            for name in getattr(action, "trajectory_ids", ()):
                self.book.forget(name)
        self.version = (0, self.version[1] + 1)
        if self.scenario.trajectories_in_flight is None:  # else a load without a bound on staleness
            self._carry_out(
                self.book.handle(
                    VersionPublished(
                        job=self.name,
                        version=self.version,
                        alpha=None if self._adaptive is None else self._accepted_lag,
                        live=self.cluster.book.oldest_live(self.name),
                    )
                ),
                now_s,
            )
        step.end_s = now_s + self.hooks.publish(self.name, self.version)
        sampled = self.cluster.counters.sampled
        step.sampled = sum(sampled.values()) - sum(self._sampled_before.values())
        step.harvested = sampled["harvested"] - self._sampled_before.get("harvested", 0)
        if self._adaptive is not None:
            whole_s, waited_s = now_s - step.start_s, max(0.0, step.ready_s - step.start_s)
            idle = waited_s / whole_s if whole_s > 0 else math.nan
            self._adaptive.handle(StepTaken(mismatch_kl=self._mismatch_kl, idle=idle))
        if self.asynchronous:
            has_bound = self.scenario.trajectories_in_flight is None
            self.cluster.require(self.name, self.version if has_bound else (0, 0))
            self.begin(now_s)
            self._try_train(now_s)
        else:
            self.cluster.require(self.name, self.version)
            self.queue.at(step.end_s, self.begin)

    def check(self) -> None:
        """Every trajectory is in exactly one place."""
        self.book.check()
        counts = self.book.counts()
        assert counts["cancelled"] == self.num_cancelled
        assert sum(counts.values()) == sum(self.book.num_created.values())
        waiting = sum(len(group.done) for group in self._groups.values())
        assert counts["running"] == len(self._running) + waiting
