"""Settings of ``rose train``: one job, one TOML file.  See ``examples/frozenlake_grpo.toml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from rose.config import Section

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
URL = r"^https?://[^\s]+$"
STORE_URL = r"^[a-z][a-z0-9+.-]*://[^\s]+$"


class SchedulerSettings(Section):
    """Where turns are sampled and batches leased."""

    url: str = Field(default="http://127.0.0.1:8800", pattern=URL, max_length=512)
    model: str = Field(default="policy", min_length=1, max_length=256)
    """The name under which the rollout engines serve the policy."""
    turn_timeout_s: float = Field(default=600.0, gt=0)
    """One turn, waiting for a worker included.  The scheduler holds turns while engines change weights."""
    retry_s: float = Field(default=60.0, ge=0)
    """How long to go on trying while the scheduler cannot be reached: it may be restarting."""
    lease_ttl_s: float = Field(default=1800.0, gt=0)
    """Longer than any training step: a lease that runs out is handed out again."""


class WeightSettings(Section):
    """Where versions are published.  Exactly one of ``relay_url`` and ``directory``."""

    relay_url: str | None = Field(default=None, pattern=STORE_URL, max_length=512)
    """A relay, or any store that ``rose.weights.stores`` opens."""
    directory: Path | None = None
    run_id: str | None = Field(default=None, pattern=NAME)
    """Name of the lineage in the relay; None = the job's name."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.relay_url is None) == (self.directory is None):
            raise ValueError("needs exactly one of relay_url and directory")
        return self


class EnvSettings(Section):
    kind: str = "frozenlake"
    settings: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment as they are; it names what it does not know."""
    num_managers: int = Field(default=1, ge=1, le=1024)
    """Ray actors; each runs hundreds of environments."""
    concurrency: int = Field(default=512, ge=1, le=65536)
    """Episodes in flight per manager."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    max_retries: int = Field(default=3, ge=0, le=100)
    """New starts of an episode whose environment failed."""


class RolloutSettings(Section):
    num_groups: int = Field(default=8, ge=1, le=65536)
    group_size: int = Field(default=16, ge=2, le=4096)
    temperature: float = Field(default=1.0, ge=0.01, le=10.0)
    max_tokens: int = Field(default=1, ge=1, le=65536)
    """Sampled per turn.  Environments with one-token answers need 1."""


class TrainerSettings(Section):
    learning_rate: float = Field(default=1e-3, gt=0, le=1)
    fine_tuning_learning_rate: float = Field(default=5e-6, gt=0, le=1)
    fine_tuning_steps: int = Field(default=3, ge=0)
    """The last steps are as in real fine-tuning, one update at a small rate: most bf16 weights do not change."""
    num_epochs: int = Field(default=2, ge=1, le=64)
    minibatch_sequences: int = Field(default=16, ge=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    scale_advantages: bool = True
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    truncation: float = Field(default=2.0, ge=1)
    entropy_weight: float = Field(default=0.01, ge=0, le=1)
    num_threads: int = Field(default=1, ge=1, le=1024)
    """Threads of torch."""
    keep_checkpoints: int = Field(default=3, ge=1)


class RaySettings(Section):
    address: str | None = None
    """A cluster to join; None starts a private one and stops it at the end."""
    num_cpus: int = Field(default=2, ge=1)
    """Logical CPUs of a private cluster; the actors take one each."""
    object_store_bytes: int = Field(default=100 * 2**20, ge=80 * 2**20)
    temp_dir: Path | None = None
    """Sockets and logs of a private cluster; None = a directory that is removed at the end.  Unix sockets live
    in it, so the path must be short."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts of actors in a row without a finished step between them."""


class TrainConfig(Section):
    job: str = Field(default="rose", pattern=NAME)
    seed: int = Field(default=0, ge=0, lt=2**31)
    num_steps: int = Field(default=20, ge=1)
    model: Path
    """Hugging Face folder: where training starts, and whose tokenizer names the allowed answers."""
    output_dir: Path = Path("out/train")
    """``metrics.jsonl`` and ``checkpoints/``.  A job that finds checkpoints here goes on from them."""
    token_file: Path | None = None
    """None = the file named by ``ROSE_TOKEN_FILE``."""
    scheduler: SchedulerSettings = SchedulerSettings()
    weights: WeightSettings
    env: EnvSettings = EnvSettings()
    rollout: RolloutSettings = RolloutSettings()
    trainer: TrainerSettings = TrainerSettings()
    ray: RaySettings = RaySettings()

    @property
    def run_id(self) -> str:
        return self.weights.run_id or self.job

    def is_fine_tuning(self, step: int) -> bool:
        """Whether step ``step`` (0-based) is one of the last ``fine_tuning_steps``."""
        return step >= self.num_steps - self.trainer.fine_tuning_steps

    def learning_rate_at(self, step: int) -> float:
        settings = self.trainer
        return settings.fine_tuning_learning_rate if self.is_fine_tuning(step) else settings.learning_rate
