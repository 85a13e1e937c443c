"""Settings of ``rose train``: one job, one TOML file.  See ``examples/frozenlake_grpo.toml``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rose.config import REQUIRED, FiniteSection
from rose.policy.streaming import StepShape, Streamed, chosen
from rose.train.envs.base import MAX_REWARD
from rose.train.trainer_settings import TrainerSettings

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
URL = r"^https?://[^\s]+$"
STORE_URL = r"^[a-z][a-z0-9+.-]*://[^\s]+$"
PLACES = "weights.relay_url, the relay that engines fetch from, or weights.directory, a folder that all of them see"
AbsolutePath = Annotated[Path, AfterValidator(Path.absolute)]
"""Relative ones are to where the job is started: an actor has a folder of its own."""


class SchedulerSettings(FiniteSection):
    """Where turns are sampled and batches leased."""

    url: str = Field(default="http://127.0.0.1:8800", pattern=URL, max_length=512)
    """Or several with commas between them: the scheduler's and its stand-by's."""
    model: str = Field(default="policy", min_length=1, max_length=256)
    """The name under which the rollout engines serve the policy."""
    turn_timeout_s: float = Field(default=600.0, gt=0)
    """One turn, waiting for a worker included; then its episode begins anew.  The scheduler holds turns while engines change
    weights, and while production has them all."""
    retry_s: float = Field(default=60.0, ge=0)
    """How long to go on trying while the scheduler cannot be reached: it may be restarting."""
    lease_ttl_s: float = Field(default=1800.0, gt=0)
    """Longer than any training step: a lease that runs out is handed out again."""


class WeightSettings(FiniteSection):
    """Where versions are published.  Exactly one of ``relay_url`` and ``directory``."""

    relay_url: str | None = Field(default=None, pattern=STORE_URL, max_length=512)
    """A relay, or any store that ``rose.weights.stores`` opens."""
    directory: AbsolutePath | None = None
    run_id: str | None = Field(default=None, pattern=NAME)
    """Name of the lineage in the relay; None = the job's name."""
    signed: bool = True
    """Sign what is published, with the key beside the token file: nodes take nothing else.  False: for a store that nobody else can
    write to; the nodes need ``weights.signed = false`` too."""
    publish_key: AbsolutePath | None = None
    """File of the private key; None = beside the token file, with its name and the ending ``.key``."""
    patience_s: float = Field(default=600.0, ge=0)
    """How long to go on publishing while the store cannot be reached.  Episodes wait meanwhile, and nothing is lost."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.relay_url is None and self.directory is None:
            raise PydanticCustomError(REQUIRED, PLACES)
        if self.relay_url is not None and self.directory is not None:
            raise ValueError("needs exactly one of relay_url and directory")
        return self


def _seen_from_here(settings: dict[str, Any], others: ValidationInfo) -> dict[str, Any]:
    """A ``path`` of an environment that comes with ROSE, made absolute: Ray's workers run where ``ray start`` ran, not where the job was started."""
    path = settings.get("path")
    if ":" in others.data.get("kind", ":") or not isinstance(path, str):
        return settings
    return {**settings, "path": str(Path(path).absolute())}


class LatencySettings(FiniteSection):
    """Time that an environment is made to take, for benchmarks: lognormal, so that its tail is long."""

    median_s: float = Field(default=0.0, ge=0)
    sigma: float = Field(default=0.0, ge=0, le=4)
    """Of the logarithm: 1 makes one step in a hundred ten times as long as the median."""


class EnvSettings(FiniteSection):
    kind: str = "frozenlake"
    settings: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment, which names what it does not know; as they are, but for a relative ``path``, which is one from the
    folder that the job is started in."""
    num_managers: int | None = Field(default=None, ge=1, le=1024)
    """Ray actors; each runs hundreds of environments.  None follows the cluster: one for each of its nodes, as far as
    it has CPUs and the step has groups for them; counted when the run starts, and when a lost node's room is nowhere to be had."""
    concurrency: int = Field(default=512, ge=1, le=65536)
    """Training episodes in flight per manager; held-out ones have as many places of their own."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    max_retries: int = Field(default=3, ge=0, le=100)
    """New starts of an episode whose environment or reward failed; then its group is given up for this time."""
    retry_pause_s: float = Field(default=1.0, ge=0, le=60)
    """Before the first new start, give or take a half; four times as long before each further one, a minute at most."""
    max_failed_groups: int = Field(default=16, ge=0)
    """Groups given up without a finished step between them; one more ends the run."""
    reward_range: tuple[float, float] = (-1e6, 1e6)
    """A reward outside is a failure of the episode, never a number that is trained on."""
    latency: LatencySettings = LatencySettings()

    _settings = field_validator("settings")(_seen_from_here)

    @model_validator(mode="after")
    def _range(self) -> Self:
        _check_range(self.reward_range)
        return self


class RewardSettings(FiniteSection):
    """Who scores an episode."""

    kind: str = "environment"
    """``environment`` (its own reward), ``exact_match``, ``endpoint``, or ``module:function`` of your own."""
    settings: dict[str, Any] = Field(default_factory=dict)
    min_workers: int = Field(default=1, ge=1, le=1024)
    max_workers: int = Field(default=4, ge=1, le=1024)
    """Ray actors per environment manager; they come and go with the queue."""
    timeout_s: float = Field(default=30.0, gt=0)
    max_retries: int = Field(default=3, ge=0, le=100)
    idle_s: float = Field(default=30.0, gt=0)

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError("min_workers exceeds max_workers")
        return self


class TaskSettings(FiniteSection):
    """One of the tasks of a job that trains on several: its environments, its rewards, and how often it comes."""

    name: str = Field(pattern=NAME)
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Of its groups, against the other tasks'."""
    kind: str = Field(min_length=1, max_length=256)
    """As ``env.kind``."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """As ``env.settings``."""
    reward: RewardSettings = RewardSettings()
    max_tokens: int | None = Field(default=None, ge=1, le=65536)
    """Sampled per turn; None = ``rollout.max_tokens``."""
    step_timeout_s: float | None = Field(default=None, gt=0)
    """None = ``env.step_timeout_s``, and so on."""
    reward_range: tuple[float, float] | None = None
    latency: LatencySettings | None = None

    _settings = field_validator("settings")(_seen_from_here)

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.reward_range is not None:
            _check_range(self.reward_range)
        return self


def _check_range(reward_range: tuple[float, float]) -> None:
    low, high = reward_range
    if not -MAX_REWARD <= low < high <= MAX_REWARD:
        raise ValueError(f"reward_range needs low < high, both within {MAX_REWARD:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTask:
    """A task of a job with nothing left open; see :attr:`TrainConfig.all_tasks`."""

    name: str
    weight: float
    kind: str
    settings: Mapping[str, Any]
    reward: RewardSettings
    max_tokens: int
    step_timeout_s: float
    reward_range: tuple[float, float]
    latency: LatencySettings


class AdaptiveAlphaSettings(FiniteSection):
    """Bound of staleness that follows the mismatch of engine and trainer and the time that the trainer waits (``rose.policy.adaptive_alpha``).  For asynchronous
    runs with a rule in ``on_stale``."""

    enabled: bool = False
    """``rollout.alpha`` is then what the run begins with."""
    least: int = Field(default=1, ge=0, le=64)
    most: int = Field(default=8, ge=1, le=64)
    kl_target: float = Field(default=0.01, gt=0)
    """Nats per token of ``mismatch_kl``; above it the bound is halved."""
    idle_target: float = Field(default=0.1, gt=0, lt=1)
    """Share of a step that the trainer waits.  Above it the bound is raised, at a quarter of it lowered."""
    window: int = Field(default=4, ge=1, le=64)
    """Steps over whose means it is decided."""

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.least > self.most:
            raise ValueError("least exceeds most")
        return self


class TailBatchingSettings(FiniteSection):
    """Short and long rounds (after RollPacker, ``rose.policy.tail_batching``): a step begins more groups than it takes and trains on those that are complete
    first; the others begin anew together, in a step that begins no more than it takes.  Over the rounds all prompts are trained on; within one, an
    update sees short groups or long ones.  For synchronous runs."""

    extra_groups: int = Field(default=0, ge=0, le=65536)
    """That a short round begins beyond ``num_groups``.  0: off."""
    patience: int = Field(default=8, ge=1, le=1024)
    """Steps after which a group that was put by begins again although too few others wait with it."""


class RolloutSettings(FiniteSection):
    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """Whether episodes go on while the trainer trains."""
    alpha: int | None = Field(default=None, ge=0, le=64)
    """Versions a token may lie behind the step that trains on it.  None = 1 for answers of one token, 4 for all others.  A
    synchronous run is at 0, but for what a restart or a refill of dynamic sampling left over."""
    on_stale: Literal["wait", "mask", "cancel"] | None = None
    """What becomes of a group with a token older than ``alpha`` versions: ``cancel`` drops it before it is leased, ``mask`` keeps
    its old trajectories out of the update, ``wait`` holds the trainer so that there is none.  None = as the scheduler is
    configured, with its bound; the trainer then leaves out what is beyond ``alpha``."""
    adaptive_alpha: AdaptiveAlphaSettings = AdaptiveAlphaSettings()
    tail_batching: TailBatchingSettings = TailBatchingSettings()
    num_groups: int = Field(default=8, ge=1, le=65536)
    redundant_episodes: int = Field(default=0, ge=0, le=4096)
    """Started per group beyond ``group_size``; the slowest are dropped, which favours short episodes."""
    group_size: int = Field(default=16, ge=2, le=4096)
    temperature: float = Field(default=1.0, ge=0.01, le=10.0)
    max_tokens: int | None = Field(default=None, ge=1, le=65536)
    """Sampled per turn, at most.  None = 1, for environments with a list of allowed answers; of free text it has to be said, here or by the task."""


class RaySettings(FiniteSection):
    address: str | None = None
    """A cluster to join, ``host:port``.  None joins the one that ``RAY_ADDRESS`` names (as under ``ray job submit``), or that ``ray
    start`` has started on this machine, and starts a private one where there is none; ``auto`` never starts one, ``local`` always
    does, and removes it at the end.  A cluster that was joined stays as it was."""
    when_too_small: Literal["fail", "wait"] = "fail"
    """What a job does that finds no room for its actors in a cluster: ends after some seconds and says what is missing, or says it
    and waits for room, which an autoscaling cluster makes."""
    num_cpus: int = Field(default=2, ge=1)
    """Logical CPUs of a private cluster; the actors take one each, and it has as many as they take at least."""
    object_store_bytes: int = Field(default=100 * 2**20, ge=80 * 2**20)
    temp_dir: Path | None = None
    """Sockets and logs of a private cluster; None = a directory that is removed at the end.  Unix sockets live
    in it, so the path must be short."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts of actors in a row without a finished step between them."""


class LendSettings(FiniteSection):
    """The trainer's device, left to a rollout engine while rollouts run.  For synchronous runs."""

    node_dir: AbsolutePath | None = None
    """Directory of that engine's node (``dir`` of its node.toml, with ``borrowed = true``), on the machine of this program.  None: the
    device is not lent."""
    hold_s: float = Field(default=60.0, ge=1.0, le=3600.0)
    """For how long at a time, renewed after a third of it.  No turn that is expected to take longer is placed there."""
    wait_s: float = Field(default=10.0, ge=0, le=600.0)
    """For the engine's memory, before the trainer goes on."""


class EvalSettings(FiniteSection):
    """Held-out tasks, and training tasks beside them, played by one version between two steps.  Nobody trains on these episodes."""

    every_steps: int = Field(default=0, ge=0)
    """0 = only where asked for by ``at_end``."""
    at_end: bool = False
    num_tasks: int = Field(default=32, ge=1)
    """Held-out ones, of each task of a job that has several."""
    num_training_tasks: int = Field(default=0, ge=0)
    """Training tasks that are played on the same weights: the first ones, the same each time.  0 = none, and no gap is told."""
    episodes_per_task: int = Field(default=1, ge=1, le=1024)
    sampled_episodes: int = Field(default=0, ge=0, le=1024)
    """Episodes of each of these tasks that are also played at ``rollout.temperature``, as training samples.  0 = none."""
    average_over: int = Field(default=10, ge=1, le=1000)
    """Evaluated versions, the newest included, over which means are told beside each evaluation."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(), max_length=16)
    """Values of ``k`` for which pass@k is reported, the chance that one of ``k`` episodes succeeds; at most ``episodes_per_task`` or
    ``sampled_episodes``, and told of the episodes that are enough for it."""
    temperature: float = Field(default=0.0, ge=0, le=10)
    """0 = greedy, where all episodes of a task are alike unless its environment plays dice."""
    background: bool = False
    """Play them beside the next step's episodes, on the same weights, instead of between two steps.  Training waits only for what takes longer.  For
    synchronous runs: others publish meanwhile."""

    @model_validator(mode="after")
    def _episodes_for_pass(self) -> Self:
        if self.pass_at and max(self.pass_at) > max(self.episodes_per_task, self.sampled_episodes):
            k = max(self.pass_at)
            raise ValueError(f"pass_at {k} needs episodes_per_task or sampled_episodes of {k} at least")
        return self


class LogSettings(FiniteSection):
    page: bool = True
    """``output_dir/run.html``, a page with pictures of the run so far, written anew every few seconds."""
    tensorboard: bool = True
    """Event files in ``output_dir/tensorboard``."""
    wandb_project: str | None = None
    """Also log to Weights & Biases; needs ``pip install wandb``."""
    mlflow_experiment: str | None = Field(default=None, min_length=1)
    """Also log to MLflow, in the experiment of this name; needs ``pip install '.[mlflow]'``, from a checkout."""
    mlflow_uri: str | None = Field(default=None, min_length=1)
    """Its tracking server or store.  None = as ``MLFLOW_TRACKING_URI`` says."""

    @model_validator(mode="after")
    def _an_experiment(self) -> Self:
        if self.mlflow_uri is not None and self.mlflow_experiment is None:
            raise ValueError("mlflow_uri needs mlflow_experiment")
        return self


class TrainConfig(FiniteSection):
    job: str = Field(default="rose", pattern=NAME)
    seed: int = Field(default=0, ge=0, lt=2**31)
    num_steps: int = Field(default=20, ge=1)
    model: AbsolutePath
    """Hugging Face folder: where training starts, and whose tokenizer names the allowed answers."""
    output_dir: AbsolutePath = Field(default=Path("out/train"), validate_default=True)
    """``metrics.jsonl`` and ``checkpoints/``.  A job that finds checkpoints here goes on from them."""
    token_file: Path | None = None
    """None = the file named by ``ROSE_TOKEN_FILE``."""
    scheduler: SchedulerSettings = SchedulerSettings()
    weights: WeightSettings = Field(default_factory=dict, validate_default=True)  # pyright: ignore[reportAssignmentType]
    """Demands a place."""
    env: EnvSettings = EnvSettings()
    tasks: tuple[TaskSettings, ...] = Field(default=(), max_length=64)
    """Several tasks, mixed by weight; ``env`` then says what they share.  Empty = one task, ``env`` and ``reward``."""
    rollout: RolloutSettings = RolloutSettings()
    trainer: TrainerSettings = Field(default_factory=dict, validate_default=True)  # pyright: ignore[reportAssignmentType]
    """Demands ``learning_rate``."""
    reward: RewardSettings = RewardSettings()
    eval: EvalSettings = EvalSettings()
    lend: LendSettings = LendSettings()
    log: LogSettings = LogSettings()
    export: bool | Literal["last", "best"] = False
    """Write ``output_dir/model``, a Hugging Face checkpoint, when the last step is done: of the last weights (``true`` too), or of the best checkpoint
    (``trainer.guard.keep_best``), and of the last where none was noted as such."""
    ray: RaySettings = RaySettings()

    @model_validator(mode="after")
    def _one_way_to_name_environments(self) -> Self:
        if len({task.name for task in self.tasks}) < len(self.tasks):
            raise ValueError("tasks need different names")
        for section, names in (
            ("env", {"kind", "settings", "latency"}),
            ("reward", set(RewardSettings.model_fields)),
        ):
            doubled = sorted(getattr(self, section).model_fields_set & names) if self.tasks else []
            if doubled:
                raise ValueError(f"{section}.{doubled[0]} is each task's own where there are tasks")
        return self

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Self:
        if self.trainer.warmup_steps > self.num_steps:
            raise ValueError(
                f"trainer.warmup_steps ({self.trainer.warmup_steps}) exceeds num_steps ({self.num_steps})"
            )
        return self

    @model_validator(mode="after")
    def _best_is_kept(self) -> Self:
        if self.export == "best" and not self.trainer.guard.keep_best:
            raise ValueError('export = "best" needs trainer.guard.keep_best = true')
        return self

    @property
    def all_tasks(self) -> tuple[JobTask, ...]:
        """Every task with nothing left open; the only one of a job without ``tasks`` has no name."""
        env, rollout = self.env, self.rollout
        only = {"kind": env.kind, "settings": env.settings, "reward": self.reward, "name": "", "weight": 1.0}
        return tuple(
            JobTask(
                name=task.name,
                weight=task.weight,
                kind=task.kind,
                settings=task.settings,
                reward=task.reward,
                max_tokens=task.max_tokens or rollout.max_tokens or 1,
                step_timeout_s=task.step_timeout_s or env.step_timeout_s,
                reward_range=task.reward_range or env.reward_range,
                latency=task.latency or env.latency,
            )
            for task in self.tasks or (TaskSettings.model_construct(**only),)
        )

    @property
    def alpha(self) -> int:
        """Bound of staleness; where it adapts, that which a run begins with."""
        if self.rollout.alpha is not None:
            return self.rollout.alpha
        return 1 if all(task.max_tokens == 1 for task in self.all_tasks) else 4

    @property
    def most_alpha(self) -> int:
        """The highest bound that may ever be in force."""
        adaptive = self.rollout.adaptive_alpha
        return max(self.alpha, adaptive.most) if adaptive.enabled else self.alpha

    @property
    def step_shape(self) -> StepShape:
        """What decides how much of a step may begin before its batch is complete."""
        return StepShape(
            num_epochs=self.trainer.num_epochs,
            minibatch_sequences=self.trainer.minibatch_sequences,
            batch_sequences=self.rollout.num_groups * self.rollout.group_size,
            scale_advantages=self.trainer.recipe.scale_advantages,
            on_stale=self.rollout.on_stale or ("mask" if self.trainer.stream_groups == "auto" else None),
            lends_device=self.lend.node_dir is not None,
        )

    @property
    def streamed(self) -> Streamed:
        """What begins before the batch is complete, where the trainer can (``rose.train.protocol.Trainer.begin``)."""
        synchronous = self.rollout.mode == "synchronous"
        return chosen(self.trainer.stream_groups, self.step_shape, is_synchronous=synchronous)

    @property
    def stale_rule(self) -> Literal["wait", "mask", "cancel"] | None:
        """``rollout.on_stale``.  Without it, a run that streams has ``mask``: what the trainer itself does with what is beyond ``alpha``."""
        return self.rollout.on_stale or (None if self.streamed == "off" else "mask")

    @property
    def has_dynamic_sampling(self) -> bool:
        enabled = self.trainer.dynamic_sampling.enabled
        return self.trainer.recipe.dynamic_sampling if enabled is None else enabled

    @property
    def min_informative_groups(self) -> int:
        """Groups with unequal rewards that a step needs, see ``trainer.guard``; 0 where any number will do."""
        guard = self.trainer.guard
        if guard.starved == "train":
            return 0
        return math.ceil(guard.min_informative * self.rollout.num_groups - 1e-9)

    @property
    def sum_tokens(self) -> int:
        """What stands for the tokens of a sequence where the loss is a sum: see ``trainer.sum_tokens``."""
        if self.trainer.sum_tokens is not None:
            return self.trainer.sum_tokens
        return 1 if self.trainer.algorithm == "rloo" else max(task.max_tokens for task in self.all_tasks)

    @property
    def run_id(self) -> str:
        return self.weights.run_id or self.job

    def is_fine_tuning(self, step: int) -> bool:
        """Whether step ``step`` (0-based) is one of the last ``fine_tuning_steps``."""
        return step >= self.num_steps - self.trainer.fine_tuning_steps

    def learning_rate_at(self, step: int) -> float:
        """Of step ``step`` (0-based); above 0 in every one."""
        settings = self.trainer
        if self.is_fine_tuning(step) and settings.fine_tuning_learning_rate is not None:
            return settings.fine_tuning_learning_rate
        if step < settings.warmup_steps:
            return settings.learning_rate * (step + 1) / settings.warmup_steps
        num_decaying = self.num_steps - settings.fine_tuning_steps - settings.warmup_steps
        done = (step - settings.warmup_steps) / num_decaying
        share = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}
        return settings.learning_rate * share[settings.decay]
