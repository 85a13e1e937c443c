"""Settings of ``rose-scheduler``: one typed tree, checked whole before anything starts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from rose.config import Section
from rose.decisions.decision_config import DecisionConfig
from rose.policy.assigning import Assigner, Share
from rose.policy.fleet import FleetParams
from rose.policy.provisioning import Provisioning, ProvisioningParams
from rose.policy.routing import CostParams, RoutingPolicy, make_policy
from rose.policy.samples import JobParams, SampleParams
from rose.policy.turn_events import TurnParams
from rose.policy.turns import TurnBook
from rose.wire import samples


class StaticWorker(Section):
    """A plain ``vllm serve --enable-scale-out`` without a node agent: probed, and taken as version 0.0."""

    worker_id: str = Field(min_length=1, max_length=128)
    url: str = Field(pattern=r"^https?://[^\s]+$", max_length=512)
    model: str = Field(min_length=1, max_length=256)
    max_model_len: int = Field(gt=0)
    vocab_size: int | None = Field(default=None, gt=0)
    cap: int | None = Field(default=None, gt=0)
    token: str | None = Field(default=None, repr=False)


class Limits(Section):
    """Bounds on what a peer can make us hold."""

    max_body_bytes: int = Field(default=16 * 2**20, gt=0)
    max_intake_bytes: int = Field(default=512 * 2**20, gt=0)
    """Bodies of all requests that are being worked on."""
    max_connections: int = Field(default=16_384, gt=0)
    requests_per_s: float | None = Field(default=None, gt=0)
    """Per address, with bursts of twice as many; None for no limit."""
    max_messages: int = Field(default=4096, gt=0)
    max_trajectories: int = Field(default=200_000, gt=0)
    max_turns_per_trajectory: int = Field(default=1024, gt=0)
    max_workers: int = Field(default=4096, gt=0)
    max_queued: int = Field(default=4096, gt=0)
    max_running: int = Field(default=8192, gt=0)
    """Turns accepted and not ended, queued ones included; beyond it 429."""
    max_n: int = Field(default=16, gt=0)
    max_info_bytes: int = Field(default=256 * 2**10, gt=0)
    max_job_bytes: int = Field(default=8 * 2**30, gt=0)
    """Of memory, for one job's trajectories that are neither consumed nor cancelled.  Beyond it 429."""
    max_held_bytes: int = Field(default=16 * 2**30, gt=0)
    """The same for all jobs together."""
    retained_finals: int = Field(default=2000, ge=0)
    """Consumed and cancelled trajectories that stay readable."""
    retained_bytes: int = Field(default=2**30, ge=0)
    """Of them together."""


class Timeouts(Section):
    """All in seconds."""

    connect_s: float = Field(default=5.0, gt=0)
    attempt_s: float = Field(default=3600.0, gt=0)
    """One engine request that is not streamed; it has no other sign of life."""
    render_s: float = Field(default=30.0, gt=0)
    read_s: float = Field(default=30.0, gt=0)
    """For a request's head and body to arrive."""
    turn_s: float = Field(default=3600.0, gt=0)
    max_queue_s: float = Field(default=300.0, gt=0)
    trajectory_idle_s: float = Field(default=14_400.0, gt=0)
    """A running trajectory without a turn for this long is cancelled: its agent is gone."""
    unleased_s: float = Field(default=86_400.0, gt=0)
    """What has finished and that no trainer has leased for this long is given up, by whole groups: else a job that nobody trains stays full."""
    max_trajectory_s: float = Field(default=604_800.0, gt=0)
    """Longest ``deadline_s`` that a trajectory may be begun with."""
    detach_s: float = Field(default=30.0, ge=0)
    stall_s: float = Field(default=30.0, gt=0)
    suspect_s: float = Field(default=2.0, gt=0)
    dead_s: float = Field(default=10.0, gt=0)
    device_return_s: float = Field(default=2.0, ge=0)
    """So long before a borrowed device goes back to its owner, its turns leave it; a turn is placed there only if it is expected to
    have ended by then."""
    backoff_s: float = Field(default=1.0, gt=0)
    """A worker that cut a turn, or failed it, is left alone by that turn for this long; doubling to 8
    times."""
    keepalive_s: float = Field(default=15.0, gt=0)
    """A held stream gets an SSE comment this often, or proxies cut it."""
    drain_s: float = Field(default=20.0, ge=0)
    tick_s: float = Field(default=0.25, gt=0, le=1.0)
    max_wait_s: float = Field(default=60.0, ge=0)
    """Longest long poll of a lease."""


class JobBatches(Section):
    """How a job's groups reach its trainer."""

    alpha: int = Field(default=4, ge=0)
    """Versions a sample may lie behind the trainer that leases it."""
    on_stale: Literal["wait", "mask", "cancel"] = "cancel"
    """``cancel`` drops the group, ``mask`` marks its old members, ``wait`` holds the trainer for them."""
    filter_equal: bool = False
    """Drop complete groups whose rewards are all equal."""
    order: Literal["ready", "submitted"] = "ready"
    """``submitted``: no group is leased before those that were begun earlier."""


class Batches(JobBatches):
    jobs: dict[str, JobBatches] = Field(default_factory=dict)
    """Settings of single jobs, by name; whole, not on top of the others."""
    max_ttl_s: float = Field(default=86_400.0, gt=0)

    def params(self) -> SampleParams:
        def of(section: JobBatches) -> dict[str, Any]:
            return {name: getattr(section, name) for name in JobBatches.model_fields}

        return SampleParams(
            **of(self), jobs={name: JobParams(**of(section)) for name, section in self.jobs.items()}
        )


class JournalConfig(Section):
    compact_bytes: int = Field(default=256 * 2**20, gt=0)
    """At start, a journal beyond this size is rewritten with the live state only."""


class StandbyConfig(Section):
    dead_s: float = Field(default=5.0, ge=1.0)
    """With ``--standby``: an active scheduler whose process lives and has not moved for this long is taken for dead, and fenced."""


class TracingConfig(Section):
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")
    """Where spans go, over HTTP: ``http://collector:4318/v1/traces``.  None: nowhere."""


class JobShare(Section):
    """What one job may hold."""

    n_dedicated: int = Field(default=65_536, ge=0)
    n_harvested: int = Field(default=65_536, ge=0)
    n_borrowed: int = Field(default=65_536, ge=0)
    weight: float = Field(default=1.0, gt=0)
    """Of its share of device-seconds, where jobs compete."""


class ProvisioningConfig(Section):
    """Which worker works for which job; see ``rose.policy.provisioning``."""

    mode: Literal["off", "observe", "on"] = "observe"
    """``off``: every worker takes turns of every job whose run it follows.  ``observe``: the same, and says what ``on`` would do.
    ``on``: so it is as long as jobs do not compete; where they do, a worker works for one of them at a time.  Not the default: it has
    not been shown to beat a fixed split (`benchmarks/scheduling/provisioning.py`)."""
    default: JobShare = JobShare()
    jobs: dict[str, JobShare] = Field(default_factory=dict)
    period_s: float = Field(default=1.0, gt=0)
    gain_factor: float = Field(default=1.5, gt=0)
    hold_s: float = Field(default=60.0, gt=0)
    """How long the demand of now is believed to last."""
    switch_s: float = Field(default=5.0, ge=0)
    """To bring another policy in, where a device has not measured it."""
    arrive_s: float = Field(default=120.0, gt=0)
    """A device that has not got a job's weights after this long does not work for it."""
    idle_s: float = Field(default=30.0, gt=0)
    min_active_s: float = Field(default=20.0, ge=0)
    rest_s: float = Field(default=10.0, ge=0)
    job_idle_s: float = Field(default=120.0, gt=0)
    """A job without a turn for this long, whose trainer has no batch, gives its devices back; one whose phases are known, after three
    times its longest."""
    job_forget_s: float = Field(default=21_600.0, ge=0)
    """What was learned of it (its phases, what it has used) is kept for so long."""
    phases: bool = ProvisioningParams().phases
    """Heed the phases that jobs have been seen to alternate in: devices come in time, and two jobs that fit take turns on them."""

    def share_of(self, job: str) -> Share:
        share = self.jobs.get(job, self.default)
        return Share(**share.model_dump())

    def assigner(self, book: TurnBook, is_training: Callable[[str], bool]) -> Assigner:
        """What gives the workers of ``book`` to jobs: the daemon's and the simulator's."""
        params = ProvisioningParams(
            gain_factor=self.gain_factor,
            hold_s=self.hold_s,
            switch_s=self.switch_s,
            arrive_s=self.arrive_s,
            idle_s=self.idle_s,
            min_active_s=self.min_active_s,
            rest_s=self.rest_s,
            phases=self.phases,
            job_idle_s=self.job_idle_s,
        )
        policy = Provisioning(params=params)
        return Assigner(
            book=book,
            policy=policy,
            share_of=self.share_of,
            job_forget_s=self.job_forget_s,
            is_training=is_training,
            is_carried_out=self.mode == "on",
        )


class CostConfig(Section):
    """Of the policy ``cost``: over how many of the turns that follow the price of moving a context is shared, at most."""

    horizon_turns: float = Field(default=CostParams().horizon_turns, ge=1, le=64)
    roomy_horizon_turns: float = Field(default=CostParams().roomy_horizon_turns, ge=1, le=64)
    """The same while dedicated workers have slots for every turn that runs."""
    home_horizon_turns: float = Field(default=CostParams().home_horizon_turns, ge=1, le=64)
    """The same for a move from a harvested worker to a dedicated one, while the job begins no new trajectories."""
    home_speedup: float = Field(default=CostParams().home_speedup, ge=1, le=100)
    """And only where dedicated workers at large make a token so many times faster than harvested ones."""
    own_while_roomy: bool = CostParams().own_while_roomy
    """While they have, place on them alone."""


class SchedulerConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8800, ge=0, le=65535)
    policy: samples.RoutingName = "cost"
    cost: CostConfig = CostConfig()
    seed: int = 0
    """Of the draws between equal workers."""
    history: Literal["append", "template"] = "append"
    """``append`` keeps sampled ids when a template would strip them; ``template`` forks there."""
    stream_upstream: bool = False
    """Stream every turn from its engine: a dead engine then costs no token, for more CPU here."""
    render_url: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")
    """A render sidecar; None uses the workers."""
    render_cache_entries: int = Field(default=512, ge=0)
    cap_dedicated: int = Field(default=64, gt=0)
    cap_harvested: int = Field(default=64, gt=0)
    adaptive_cap: bool = False
    """Lower a worker's limit when its engine is short of KV memory, and raise it again, inside the cap."""
    oldest_first_s: float = Field(default=60.0, ge=0)
    """How much of the age of its group counts for a turn in the queue, at most: groups end in about the order of their start.
    0 is each turn's own age."""
    oldest_first_share: float = Field(default=0.75, ge=0, le=1)
    """A turn is queued as if it had come earlier by this share of its group's age.  At 1 groups that began together are served one
    after the other, so the last of them wait for all; at 0 nobody is preferred."""
    affine_wait_s: float = Field(default=0.5, ge=0, le=60)
    """While more turns wait than workers are open, one whose prefix is on a worker waits for a slot there instead of reading
    its prompt again elsewhere: this long, and no longer than to read it takes.  Where there are slots for all it does nothing; 0 is off."""
    longest_first_s: float = Field(default=0.0, ge=0)
    """How much age the longest predicted rest of a trajectory is worth in the queue; 0 is plain age."""
    tail_fraction: float = Field(default=0.0, ge=0, le=1)
    """This share of trajectories, the longest expected, goes to dedicated workers when one is free."""
    migrate_ratio: float = Field(default=1.5, ge=0)
    """A running turn of a harvested worker goes on at a dedicated one with room when its rest takes more than this many times as long
    where it is; 0 leaves turns where they are."""
    metrics_public: bool = False
    """Answer ``/metrics`` to peers that are not on this machine."""
    workers: tuple[StaticWorker, ...] = ()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    batches: Batches = Batches()
    journal: JournalConfig = JournalConfig()
    standby: StandbyConfig = StandbyConfig()
    decisions: DecisionConfig = DecisionConfig()
    tracing: TracingConfig = TracingConfig()
    provisioning: ProvisioningConfig = ProvisioningConfig()

    # What the policies get of it: the daemon and the simulator build their turn books from these.

    def routing_policy(self) -> RoutingPolicy:
        return self.policy_named(self.policy)

    def policy_named(self, name: str) -> RoutingPolicy:
        """One that this scheduler may change to."""
        return make_policy(name, random.Random(self.seed), CostParams(**self.cost.model_dump()))

    def turn_params(self) -> TurnParams:
        return TurnParams(
            max_queue_s=self.timeouts.max_queue_s,
            max_queued=self.limits.max_queued,
            detach_s=self.timeouts.detach_s,
            stall_s=self.timeouts.stall_s,
            backoff_s=self.timeouts.backoff_s,
            max_backoff_s=8 * self.timeouts.backoff_s,
            longest_first_s=self.longest_first_s,
            oldest_first_s=self.oldest_first_s,
            oldest_first_share=self.oldest_first_share,
            affine_wait_s=self.affine_wait_s,
            tail_fraction=self.tail_fraction,
            migrate_ratio=self.migrate_ratio,
        )

    def fleet_params(self) -> FleetParams:
        return FleetParams(
            suspect_s=self.timeouts.suspect_s,
            dead_s=self.timeouts.dead_s,
            # A sleep of tick_s takes a little more: every tick would be taken for our own stop, and no silence would count.
            clock_gap_s=max(FleetParams().clock_gap_s, 4 * self.timeouts.tick_s),
            drain_s=self.timeouts.device_return_s,
            cap_dedicated=self.cap_dedicated,
            cap_harvested=self.cap_harvested,
            adaptive_cap=self.adaptive_cap,
        )
