"""What is simulated: one TOML file, checked whole before anything starts.  See ``examples/scenarios/``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rose.config import Section
from rose.coserve.node_config import GateConfig, LendingConfig, SchedulerLink, ServingConfig
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.sim.systems import SYSTEMS

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_CELL_S = 86_400
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME)]


def _default(section: type[Section], name: str) -> float:
    """The daemon's own default: one that changes there changes here."""
    return section.model_fields[name].default


class Efficiency(Section):
    """How much of a datasheet an engine gets.  Assumptions; vary them before you believe a result."""

    compute: float = Field(default=0.5, gt=0, le=1)
    """Prefill, of the dense bf16 peak."""
    bandwidth: float = Field(default=0.7, gt=0, le=1)
    link: float = Field(default=0.7, gt=0, le=1)
    """Share of the datasheet's one-way bandwidth that all-reduces between the GPUs of an engine reach."""
    all_reduce_s: NotNegative = 1e-5
    """Latency of one of them; there are two in each layer."""
    training: float = Field(default=0.35, gt=0, le=1)
    """Model FLOPs utilisation of a training step."""
    step_overhead_s: NotNegative = 0.002
    """Scheduling and launch, each step."""
    decode_hidden: float = Field(default=0.0, ge=0, le=1)
    """Share of the operations for one-token requests that runs while weights, keys and values are read: 0 adds the two up, 1 leaves the
    reading alone, as a roofline does below its ridge (some hundred requests)."""
    overlap: float = Field(default=0.2, ge=0, le=1)
    """Two engines on one GPU: 0 = strict time slices, 1 = the shorter step is free."""


class DeviceSection(Section):
    """A device that is not in the table, from its datasheet."""

    memory_gb: Positive
    bandwidth_tb_s: Positive
    tflops: Positive
    """Dense bf16."""
    link_gb_s: Positive = 32.0
    """To the other GPUs of an engine, in one direction; a PCIe 4.0 x16 slot unless said."""


class ModelSection(Section):
    """A model that is not in the table: a dense decoder with grouped-query attention, in bf16."""

    params_billion: Positive
    layers: int = Field(ge=1, le=1024)
    heads: int = Field(ge=1, le=4096)
    kv_heads: int = Field(ge=1, le=1024)
    head_dim: int = Field(default=128, ge=1, le=4096)
    hidden: int | None = Field(default=None, ge=1, le=1 << 20)
    """Size of the hidden state; None = heads x head_dim."""


class FleetSection(Section):
    device: str = "h100"
    sharing: Literal["turns", "priority"] = "turns"
    """Two engines on one device: a step of each in turn, where admission allows it; or rollouts only while serving stands still,
    because the device or the system's scheduler preempts them (``SCHED_IDLE``)."""
    preempt_s: Positive | None = None
    """With ``turns``: a request of production that arrives stops the rollout step in progress at its next layer, at most this much later; the
    step goes on where it was.  None = it waits for the step's end, as on today's nodes."""
    idle_chunk_tokens: int | None = Field(default=None, ge=16)
    """Prompt tokens of a harvested engine's step while serving stands still, at most: what a request that then arrives waits for.  None =
    ``job.chunk_tokens``."""
    round_steps: int = Field(default=1, ge=1, le=64)
    """With ``turns``, and admission by slack: rollout steps for each of production's, at most.  As many as its slack holds, fewer once a request's own
    tokens come further apart than ``round_tpot`` allows, and one while a first token is owed (``rose.policy.rounds``)."""
    round_tpot: float = Field(default=0.5, gt=0, le=1)
    """Share of ``serving.slo_tpot_ms`` that the tokens of a request may lie apart on average."""
    dedicated: int = Field(default=8, ge=0, le=16384)
    """Rollout engines that the job owns."""
    serving: int = Field(default=16, ge=0, le=16384)
    """Serving engines that may lend."""
    trainers: int = Field(default=8, ge=1, le=65536)
    """GPUs of the trainer."""
    rollout_gpus: int = Field(default=1, ge=1, le=64)
    """GPUs per rollout engine (tensor parallel); on a serving host it shares those of the serving engine."""
    wide: int = Field(default=0, ge=0, le=1024)
    """Rollout engines that the job owns besides, each of ``wide_gpus``: the first choice for the longest trajectories (``scheduler.tail_fraction``)."""
    wide_gpus: int = Field(default=4, ge=1, le=64)
    serving_gpus: int = Field(default=1, ge=1, le=64)
    memory_use: float = Field(default=0.9, gt=0, le=1)
    reserve_gb: NotNegative = 4.0
    """Per GPU: activations, graphs, communication."""
    mean_hours_between_failures: NotNegative = 0.0
    """Per rollout engine; 0 = none."""
    restart_s: Positive = 60.0
    spot: int = Field(default=0, ge=0, le=16384)
    """Rollout engines of the spot or serverless systems, at most."""
    spot_up_s: Positive = 1800.0
    """Mean life of a spot engine."""
    spot_down_s: Positive = 600.0
    """Mean wait for the next one."""
    cold_start_s: NotNegative = 60.0
    """From allocation to an engine without weights."""
    activation_s: NotNegative = 5.0
    """Switching a training GPU to rollouts and back, once each."""
    switch_s: Positive = 3.0
    """Bringing another job's weights, of the same base model, into a running engine."""
    lend_s: Positive = 60.0
    """For how long a training GPU is lent at a time, renewed after a third of it while rollouts run."""


class ServingSection(Section):
    model: str = "qwen2.5-7b"
    profile: Path | None = None
    """Step times that ``rose profile`` measured; None = a roofline.  Relative to the scenario's folder."""
    slo_ttft_ms: Positive = _default(ServingConfig, "slo_ttft_ms")
    slo_tpot_ms: Positive = _default(ServingConfig, "slo_tpot_ms")
    trace: Path | None = None
    """Azure-format CSV; None = the generator below.  Relative to the scenario's folder."""
    trace_start_s: NotNegative = 0.0
    """Where in the trace a run begins; after its end the trace begins again."""
    requests_per_s: Positive = 0.5
    """Mean per serving engine."""
    prompt_median: int = Field(default=1020, ge=1)
    prompt_log_std: NotNegative = 0.99
    prompt_max: int = Field(default=14050, ge=1)
    output_median: int = Field(default=129, ge=1)
    output_log_std: NotNegative = 0.86
    output_max: int = Field(default=1000, ge=1)
    start_hour: float = Field(default=12.0, ge=0, lt=24)
    daily_swing: Share = 0.5
    """Peak at 14:00 is ``1 + swing`` times the mean, trough ``1 - swing``."""
    burst_every_s: Positive = 120.0
    burst_length_s: Positive = 2.0
    burst_factor: float = Field(default=3.5, ge=1)
    """Rate inside a burst over the mean; all engines see the burst together."""
    noise: NotNegative = 0.3
    """Standard deviation of the rate from second to second, over its mean."""
    chunk_tokens: int = Field(default=2048, ge=16)
    block_tokens: int = Field(default=16, ge=1, le=4096)
    """A prompt is found in the prefix cache by whole blocks of so many tokens (vLLM's; 128 on CPU)."""

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        for kind in ("prompt", "output"):
            if getattr(self, f"{kind}_median") > getattr(self, f"{kind}_max"):
                raise ValueError(f"{kind}_median is above {kind}_max")
        return self


class JobSection(Section):
    model: str = "qwen3-8b"
    profile: Path | None = None
    """As ``serving.profile``."""
    algorithm: Literal["grpo", "dapo"] = "grpo"
    num_groups: int = Field(default=16, ge=1, le=65536)
    group_size: int = Field(default=16, ge=1, le=4096)
    prompt_tokens: int = Field(default=800, ge=1)
    """Of the first turn; members of a group share it."""
    turns_median: Positive = 8.0
    turns_log_std: NotNegative = 0.5
    turns_max: int = Field(default=40, ge=1)
    output_median: Positive = 120.0
    """Sampled tokens per turn."""
    output_log_std: NotNegative = 0.6
    output_max: int = Field(default=4096, ge=1)
    """Also the limit a turn is submitted with."""
    observation_median: Positive = 350.0
    observation_log_std: NotNegative = 0.6
    env_median_s: NotNegative = 0.5
    env_log_std: NotNegative = 0.8
    keep_low: float = Field(default=0.2, gt=0, le=1)
    """DAPO: share of groups with a usable reward, drawn for each step between low and high."""
    keep_high: float = Field(default=0.9, gt=0, le=1)
    streamed: bool = False
    """Forward and backward of a group begin when it is complete and the trainer is free, while the others still sample; one
    optimiser step follows the last.  False: they begin with the whole batch."""
    copies: int = Field(default=0, ge=0, le=4096)
    """Turns that run on harvested engines and hold the step back, at most so many at once, are sampled a second time elsewhere while nobody waits for
    an engine; the first to end stands (``rose.policy.copies``).  Where ROSE's scheduler places turns."""
    copy_ratio: Positive = 1.0
    """A copy may be expected to take so many times as long as the turn's own rest."""
    tail_groups: int = Field(default=0, ge=0, le=65536)
    """Groups that a short round begins beyond its batch; those that are not complete with it wait for a long round (``rose.policy.tail_batching``).  0: all
    rounds are alike."""
    tail_members: int = Field(default=0, ge=0, le=4096)
    """Members that a group of a short round has beyond ``group_size``; the first to end are taken, which favours short ones."""
    adaptive_alpha: bool = False
    """Asynchronous training begins with the bound of ``batches`` and lets it follow mismatch and waiting (``rose.policy.adaptive_alpha``)."""
    mismatch_kl: NotNegative = 0.0
    """Assumed, in nats per token, of samples one version behind; it grows with the square of the versions.  Only ``adaptive_alpha`` asks."""
    fixed_slots: Literal["trajectory", "turn"] = "trajectory"
    """What holds a slot of the fixed systems' engines; see :class:`rose.sim.systems.System`."""
    max_model_len: int = Field(default=32768, ge=64)
    changed_fraction: float = Field(default=0.03, gt=0, le=1)
    """Share of bf16 weights that an update changes."""
    chunk_tokens: int = Field(default=2048, ge=16)

    @model_validator(mode="after")
    def _keep(self) -> Self:
        if self.keep_low > self.keep_high:
            raise ValueError("keep_low is above keep_high")
        if self.tail_members and not self.tail_groups:
            raise ValueError("tail_members is of short rounds, which tail_groups makes")
        if self.prompt_tokens + 1 >= self.max_model_len:
            raise ValueError("prompt_tokens leaves no room in max_model_len")
        return self


class LinksSection(Section):
    relay_gbps: Positive = 200.0
    """Trainer to relay, and relay to all serving hosts together."""
    host_gbps: Positive = 25.0
    """Into one serving host."""
    cluster_gbps: Positive = 400.0
    """Trainer to dedicated engines, a broadcast."""
    host_path_gb_s: Positive = 3.1
    """GB of dense weights per second at which one rank of an engine encodes or applies its part of an update."""


class CellsSection(Section):
    """Mode ``fleet`` and ``rose plan``: small exact fleets at several loads stand for the large one."""

    serving: int = Field(default=8, ge=1, le=256)
    dedicated: int = Field(default=2, ge=1, le=256)
    warm_s: float = Field(default=60.0, gt=0, le=MAX_CELL_S)
    """Not counted."""
    seconds: float = Field(default=180.0, gt=0, le=MAX_CELL_S)
    loads: int = Field(default=6, ge=2, le=64)
    """Points between the quietest and the busiest hour."""
    in_flight_per_engine: int = Field(default=12, ge=1, le=256)


class Scenario(Section):
    name: str = Field(pattern=NAME)
    title: str = Field(default="", max_length=300)
    seed: int = Field(default=0, ge=0, lt=2**31)
    duration_s: Positive = 3600.0
    num_steps: int | None = Field(default=None, ge=1)
    """Ends the run earlier; None = the duration alone."""
    num_jobs: int = Field(default=1, ge=1, le=16)
    """Equal jobs, each with ``fleet.dedicated`` engines and ``fleet.trainers`` GPUs of its own; they share the harvested engines, by the
    scheduler's ``provisioning`` or, where that is off, each its part for good."""
    jobs_apart_s: NotNegative = 0.0
    """How much later each further one begins."""
    systems: tuple[str, ...] = ("fixed_sync", "rose")
    baseline: str | None = None
    """Ratios are against it; None = the first system."""
    mode: Literal["exact", "fleet"] = "exact"
    heartbeat_s: float = Field(default=_default(SchedulerLink, "heartbeat_s"), gt=0, le=1.0)
    """Of the nodes; also how often the scheduler looks at its clock."""
    trajectories_in_flight: int | None = Field(default=None, ge=1)
    """Keeps this many running whatever the algorithm would do: for load tests."""
    efficiency: Efficiency = Efficiency()
    devices: dict[Name, DeviceSection] = Field(default_factory=dict)
    models: dict[Name, ModelSection] = Field(default_factory=dict)
    fleet: FleetSection = FleetSection()
    serving: ServingSection = ServingSection()
    job: JobSection = JobSection()
    links: LinksSection = LinksSection()
    cells: CellsSection = CellsSection()
    scheduler: SchedulerConfig = SchedulerConfig()
    """These three: the daemons' own sections (``rose-scheduler``, ``rose node``); :mod:`rose.sim.live` says what of them has an effect."""
    lending: LendingConfig = LendingConfig()
    gate: GateConfig = GateConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        unknown = [name for name in self.systems if name not in SYSTEMS]
        if unknown or not self.systems:
            raise ValueError(f"unknown system '{''.join(unknown[:1])}'; known: {', '.join(SYSTEMS)}")
        if self.baseline is not None and self.baseline not in self.systems:
            raise ValueError(f"baseline '{self.baseline}' is not among the systems")
        if self.mode == "fleet" and self.fleet.wide:
            raise ValueError(
                "a cell of a large fleet has engines of one width: fleet.wide is for mode 'exact'"
            )
        if self.fleet.dedicated + self.fleet.wide + self.fleet.serving + self.fleet.spot == 0:
            raise ValueError("the fleet has no engine")
        return self
