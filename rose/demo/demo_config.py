"""Settings of ``rose demo``, and the few rules that tie them together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from rose.config import Section, load_config
from rose.errors import ConfigError
from rose.evaluation.arms import Slo
from rose.evaluation.arrivals import TrafficShape
from rose.train.envs.frozenlake import FrozenLakeParams

SERVERS = ("production", "relay", "scheduler", "harvested", "dedicated")
"""What listens, in the order of its port from ``base_port``."""


class TrafficSettings(Section):
    """Production traffic; one block of the measurement is one period."""

    period_s: float = Field(default=34.0, gt=0, le=600)
    """With the other defaults there is one burst in each."""
    mean_rate_hz: float = Field(default=0.9, gt=0, le=100)
    prompt_median_tokens: int = Field(default=128, ge=1)
    prompt_max_tokens: int = Field(default=400, ge=1)
    output_median_tokens: int = Field(default=24, ge=1)
    output_max_tokens: int = Field(default=64, ge=1)
    burst_every_s: float = Field(default=30.0, gt=0)


class ProductionSettings(Section):
    """The production server and what its users are promised."""

    max_model_len: int = Field(default=1024, ge=64)
    max_num_seqs: int = Field(default=32, ge=1)
    kv_cache_bytes: int = Field(default=36 * 2**20, ge=16 * 2**20)
    """So little that a burst cannot do without what rollouts hold."""
    slo_ttft_s: float = Field(default=0.5, gt=0)
    slo_tpot_s: float = Field(default=0.15, gt=0)


class RolloutEngineSettings(Section):
    """Both rollout engines.  Harvested KV memory comes on top of nothing: it is lent by production."""

    max_model_len: int = Field(default=512, ge=64)
    max_num_seqs: int = Field(default=16, ge=1)
    """An eighth of a step's trajectories: an RL step waits for seats of engines, as it does where their KV memory is full.  With 64 it waited
    for the gateway, and a second engine added nothing (`training/demo-moving-turns/2026-11-22.json`)."""
    kv_cache_bytes: int = Field(default=128 * 2**20, ge=16 * 2**20)


class JobSettings(Section):
    """The RL job: ``num_groups * group_size`` trajectories a step, each one answer with a move for every cell of a lake."""

    num_groups: int = Field(default=8, ge=1, le=256)
    group_size: int = Field(default=16, ge=8, le=128)
    lake_size: int = Field(default=5, ge=4, le=8)
    num_lakes: int = Field(default=8, ge=1, le=64)
    learning_rate: float = Field(default=1e-3, gt=0)
    adam_epsilon: float = Field(default=1e-2, gt=0)
    """Far above the size of gradients: a weight moves as far as its gradient is large, so that most bf16 weights stay what they are
    in a step, as in real fine-tuning."""
    num_epochs: int = Field(default=1, ge=1, le=16)
    minibatch_sequences: int = Field(default=64, ge=1)


class DemoConfig(Section):
    seed: int = Field(default=0, ge=0, lt=2**31)
    steps: int = Field(default=60, ge=1, le=1000)
    num_pairs: int = Field(default=3, ge=2, le=50)
    """Of blocks with harvesting off and on, each of one period of traffic."""
    trace: Path | None = None
    out: Path = Path("out/demo")
    base_port: int = Field(default=18470, ge=1024, le=65535 - len(SERVERS))
    run_directory: Path | None = None
    """Parent of the private directory of a run; None = /dev/shm, or the temporary directory."""
    production_core: int | None = None
    """Production and the harvested engine; None = the first core that we may use."""
    other_core: int | None = None
    """Everything else; None = the second."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Of one program.  On two slow cores the harvested engine, which gets what production leaves, takes 214 s."""
    train_timeout_s: float = Field(default=900.0, gt=0)
    keep_run_directory: bool = False
    traffic: TrafficSettings = TrafficSettings()
    production: ProductionSettings = ProductionSettings()
    rollout: RolloutEngineSettings = RolloutEngineSettings()
    job: JobSettings = JobSettings()

    def ports(self) -> dict[str, int]:
        return {f"{name} port": self.base_port + offset for offset, name in enumerate(SERVERS)}

    def port(self, server: str) -> int:
        return self.base_port + SERVERS.index(server)

    def url(self, server: str) -> str:
        return f"http://127.0.0.1:{self.port(server)}"

    def slo(self) -> Slo:
        return Slo(ttft_s=self.production.slo_ttft_s, tpot_s=self.production.slo_tpot_s)

    def lakes(self) -> FrozenLakeParams:
        size = self.job.lake_size
        return FrozenLakeParams(
            size=size, num_maps=self.job.num_lakes, max_start_distance=2 * size - 2, seed=self.seed
        )

    def shape(self) -> TrafficShape:
        return TrafficShape(**self.traffic.model_dump())

    def cores(self) -> tuple[int, int]:
        """``(production_core, other_core)``.

        Raises:
            ConfigError: They are equal, or this process may not use one of them.
        """
        usable = sorted(os.sched_getaffinity(0))
        given = {"production_core": self.production_core, "other_core": self.other_core}
        for name, core in given.items():
            if core is not None and core not in usable:
                raise ConfigError(f"core {core} is not among {usable}", field=name)
        taken = {core for core in given.values() if core is not None}
        free = [core for core in usable if core not in taken]
        chosen = [core if core is not None else (free.pop(0) if free else -1) for core in given.values()]
        if chosen[0] == chosen[1] or -1 in chosen:
            raise ConfigError(f"needs two different cores of {usable}", field="other_core")
        return chosen[0], chosen[1]


def load_demo_config(
    path: Path | None, given: Mapping[str, Any] | None = None, overrides: Iterable[str] = ()
) -> DemoConfig:
    """``path`` (TOML), then named options (``given``: dotted name -> value), then ``key=value`` overrides.

    Raises:
        ConfigError: Names the field.
    """
    # JSON strings and numbers are TOML strings and numbers.
    named = [
        f"{name}={json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)}"
        for name, value in (given or {}).items()
    ]
    config = load_config(DemoConfig, path, [*named, *overrides])
    config.shape()  # its own checks
    longest = config.traffic.prompt_max_tokens + config.traffic.output_max_tokens
    if longest > config.production.max_model_len:
        raise ConfigError(
            f"prompt and output of {longest} tokens exceed production.max_model_len "
            f"({config.production.max_model_len})",
            field="traffic.prompt_max_tokens",
        )
    return config
