"""What the names of a scenario mean: devices, models, step times, KV memory; and whether such a fleet can exist.

Step times are the roofline of :mod:`rose.sim.tables`, or what ``rose profile`` measured where the scenario names a profile.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rose.coserve.step_profile import load_profile
from rose.errors import ConfigError
from rose.policy.admission import StepModel
from rose.sim.systems import SYSTEMS
from rose.sim.tables import (
    GB,
    ModelSpec,
    attention_s,
    find_device,
    find_model,
    kv_pages,
    make_device,
    make_model,
    step_model,
)
from rose.units import PAGE_BYTES

if TYPE_CHECKING:
    from rose.sim.scenario import Scenario

OWN = "the scenario"


class Hardware:
    """Args:
        scenario: Its names are looked up here, once.

    Raises:
        ConfigError: An unknown device or model.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        fleet, job, serving = scenario.fleet, scenario.job, scenario.serving
        devices = {
            name: make_device(name, own.memory_gb, own.bandwidth_tb_s, own.tflops, own.link_gb_s, OWN)
            for name, own in scenario.devices.items()
        }
        models = {
            name: make_model(
                name,
                own.params_billion,
                own.layers,
                own.heads,
                own.kv_heads,
                own.hidden or own.heads * own.head_dim,
                OWN,
                own.head_dim,
            )
            for name, own in scenario.models.items()
        }
        self.gpu = find_device(fleet.device, "fleet.device", devices)
        self.policy_model = find_model(job.model, "job.model", models)
        self.serving_model = find_model(serving.model, "serving.model", models)

    def rollout_steps(self, num_gpus: int) -> StepModel:
        """Step times of the policy model on so many GPUs."""
        return self._steps("job.profile", self._scenario.job.profile, self.policy_model, num_gpus)

    def serving_steps(self) -> StepModel:
        """Step times of the production model."""
        profile, num_gpus = self._scenario.serving.profile, self._scenario.fleet.serving_gpus
        return self._steps("serving.profile", profile, self.serving_model, num_gpus)

    def rollout_attention_s(self, num_gpus: int) -> float:
        """See :func:`rose.sim.tables.attention_s`; 0 with a measured profile, whose price of a prompt token has it in."""
        return self._attention(self._scenario.job.profile, self.policy_model, num_gpus)

    def serving_attention_s(self) -> float:
        """The same of production."""
        return self._attention(
            self._scenario.serving.profile, self.serving_model, self._scenario.fleet.serving_gpus
        )

    def _attention(self, profile: Path | None, model: ModelSpec, num_gpus: int) -> float:
        if profile is not None:
            return 0.0
        return attention_s(self.gpu, model, num_gpus, compute_efficiency=self._scenario.efficiency.compute)

    def _steps(self, field: str, profile: Path | None, model: ModelSpec, num_gpus: int) -> StepModel:
        if profile is not None:
            try:
                return load_profile(profile).step_model()
            except ConfigError as error:
                fix = (
                    error.fix
                    or "a file that rose profile wrote; a relative path begins at the scenario's folder"
                )
                raise ConfigError(f"{error.field} {error.message}", field=field, fix=fix) from error
        e = self._scenario.efficiency
        return step_model(
            self.gpu,
            model,
            num_gpus,
            compute_efficiency=e.compute,
            bandwidth_efficiency=e.bandwidth,
            link_efficiency=e.link,
            all_reduce_latency_s=e.all_reduce_s,
            overhead_s=e.step_overhead_s,
            decode_hidden=e.decode_hidden,
        )

    def rollout_page_tokens(self) -> float:
        return PAGE_BYTES / self.policy_model.kv_bytes_per_token

    def serving_page_tokens(self) -> float:
        return PAGE_BYTES / self.serving_model.kv_bytes_per_token

    def rollout_pages(self, num_gpus: int, field: str = "fleet.rollout_gpus") -> int:
        """KV pages of an engine that runs rollouts only, over so many GPUs.

        Raises:
            ConfigError: The model does not fit, or a whole trajectory does not fit what it leaves.
        """
        job = self._scenario.job
        pages = self._pages(num_gpus, self.policy_model.weight_bytes, field)
        tokens = int(pages * self.rollout_page_tokens())
        if tokens < job.max_model_len:
            raise ConfigError(
                f"{job.max_model_len} tokens do not fit the KV memory of a rollout engine ({tokens})",
                field="job.max_model_len",
                fix="shorten it, or use more GPUs per engine or a larger device",
            )
        return pages

    def serving_pages(self, *, shared: bool) -> int:
        """KV pages of a serving engine; ``shared``: with the policy model's weights beside its own."""
        resident = self.serving_model.weight_bytes + (self.policy_model.weight_bytes if shared else 0.0)
        return self._pages(self._scenario.fleet.serving_gpus, resident, "fleet.serving_gpus")

    def _pages(self, num_gpus: int, resident_bytes: float, field: str) -> int:
        fleet = self._scenario.fleet
        memory = self.gpu.memory_bytes * fleet.memory_use * num_gpus
        return kv_pages(memory, resident_bytes + fleet.reserve_gb * GB * num_gpus, field)

    def check(self, systems: Iterable[str]) -> None:
        """Raise where one of ``systems`` cannot run on this fleet.

        Raises:
            ConfigError: Models that do not fit, or cannot be divided so, or a system without any engine to sample with.
        """
        fleet = self._scenario.fleet
        for name in systems:
            extra = SYSTEMS[name].extra
            more = {
                "none": 0,
                "harvest": fleet.serving,
                "spot": fleet.spot,
                "serverless": fleet.spot,
                "trainers": fleet.trainers // fleet.rollout_gpus,
            }[extra]
            if fleet.dedicated + fleet.wide + more == 0:
                raise ConfigError(f"{name} has no engine to sample with", field="fleet.dedicated")
            if fleet.serving:
                self.serving_pages(shared=extra == "harvest")
            if fleet.dedicated or extra != "harvest":
                self.rollout_pages(fleet.rollout_gpus)
            if fleet.wide:
                self.rollout_pages(fleet.wide_gpus, "fleet.wide_gpus")
        shared = [(self.serving_model, fleet.serving_gpus, "fleet.serving_gpus")] if fleet.serving else []
        shared.append((self.policy_model, fleet.rollout_gpus, "fleet.rollout_gpus"))
        if fleet.wide:
            shared.append((self.policy_model, fleet.wide_gpus, "fleet.wide_gpus"))
        for model, num_gpus, field in shared:
            if model.num_heads % num_gpus:  # as vLLM refuses it
                raise ConfigError(
                    f"{num_gpus} GPUs cannot share the {model.num_heads} attention heads of a model in equal parts",
                    field=field,
                    fix="a divisor of it",
                )
        self.rollout_steps(fleet.rollout_gpus)
        self.serving_steps()
