"""Devices and models by name, and the step times that follow from them.

Every figure has a public source; a scenario may describe a device or a model of its own.  Step times are a roofline: a step reads all weights once, computes two operations per
parameter and token, and reads the keys and values of every token it attends to.  The three efficiencies are assumptions
(:class:`rose.sim.scenario.Efficiency`), not measurements; ``docs/simulator.md`` compares the result with a published one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rose.errors import ConfigError
from rose.policy.admission import StepModel
from rose.units import PAGE_BYTES

GB = 10**9
MIN_PAGES = 16
"""Fewer hold no request worth the name; a test model on a laptop has as many."""
BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU: memory in bytes, its bandwidth in bytes/s, dense bf16 operations/s."""

    name: str
    memory_bytes: int
    bandwidth_bytes_s: float
    flops: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A dense decoder with grouped-query attention, in bf16."""

    name: str
    num_params: float
    num_layers: int
    num_kv_heads: int
    head_dim: int
    source: str

    @property
    def weight_bytes(self) -> float:
        return self.num_params * BF16_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BF16_BYTES


def make_device(name: str, memory_gb: float, tb_s: float, tflops: float, source: str) -> Device:
    return Device(
        name=name,
        memory_bytes=int(memory_gb * GB),
        bandwidth_bytes_s=tb_s * 1e12,
        flops=tflops * 1e12,
        source=source,
    )


def make_model(
    name: str, billions: float, layers: int, kv_heads: int, source: str, head_dim: int = 128
) -> Model:
    return Model(
        name=name,
        num_params=billions * 1e9,
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        source=source,
    )


DEVICES = {
    device.name: device
    for device in (
        make_device("a100-80g", 80, 2.039, 312, "NVIDIA A100 datasheet (SXM, 80 GB)"),
        make_device("h100", 80, 3.35, 989, "NVIDIA H100 datasheet (SXM, dense bf16)"),
        make_device("h200", 141, 4.8, 989, "NVIDIA H200 datasheet (SXM, dense bf16)"),
        make_device("l40s", 48, 0.864, 362, "NVIDIA L40S datasheet (dense bf16)"),
    )
}
MODELS = {
    model.name: model
    for model in (
        make_model("qwen3-0.6b", 0.6, 28, 8, "huggingface.co/Qwen/Qwen3-0.6B"),
        make_model("qwen3-8b", 8.2, 36, 8, "huggingface.co/Qwen/Qwen3-8B"),
        make_model("qwen3-32b", 32.8, 64, 8, "huggingface.co/Qwen/Qwen3-32B"),
        make_model("qwen2.5-7b", 7.61, 28, 4, "huggingface.co/Qwen/Qwen2.5-7B-Instruct"),
        make_model("qwen2.5-32b", 32.5, 64, 8, "huggingface.co/Qwen/Qwen2.5-32B-Instruct"),
    )
}


def find_device(name: str, field: str, own: Mapping[str, Device] | None = None) -> Device:
    """A device of the table above, or of the scenario's ``own``.

    Raises:
        ConfigError: No such device; names those that are known.
    """
    known = {**DEVICES, **(own or {})}
    if name not in known:
        fix = f"one of {', '.join(known)}, or describe yours as [devices.{name}]"
        raise ConfigError(f"'{name}' is not a known device", field=field, fix=fix)
    return known[name]


def find_model(name: str, field: str, own: Mapping[str, Model] | None = None) -> Model:
    """The same for models."""
    known = {**MODELS, **(own or {})}
    if name not in known:
        fix = f"one of {', '.join(known)}, or describe yours as [models.{name}]"
        raise ConfigError(f"'{name}' is not a known model", field=field, fix=fix)
    return known[name]


def step_model(
    device: Device,
    model: Model,
    num_gpus: int,
    *,
    compute_efficiency: float,
    bandwidth_efficiency: float,
    parallel_efficiency: float,
    overhead_s: float,
) -> StepModel:
    """Step length of ``model`` on ``num_gpus`` devices in tensor parallel."""
    scale = num_gpus * (parallel_efficiency if num_gpus > 1 else 1.0)
    token_s = 2.0 * model.num_params / (device.flops * compute_efficiency * scale)
    bandwidth = device.bandwidth_bytes_s * bandwidth_efficiency * scale
    return StepModel(
        base_s=overhead_s + model.weight_bytes / bandwidth,
        prefill_token_s=token_s,
        decode_s=token_s,
        context_token_s=model.kv_bytes_per_token / bandwidth,
    )


def kv_pages(memory_bytes: float, resident_bytes: float, field: str) -> int:
    """Pages of 2 MiB that are left for keys and values.

    Raises:
        ConfigError: Nothing is left: the fleet cannot hold these models.
    """
    pages = int((memory_bytes - resident_bytes) // PAGE_BYTES)
    if pages < MIN_PAGES:
        raise ConfigError(
            f"{resident_bytes / GB:.0f} GB of weights and reserves do not fit {memory_bytes / GB:.0f} GB",
            field=field,
            fix="use more GPUs per engine or a larger device",
        )
    return pages
