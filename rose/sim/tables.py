"""Devices and models by name, and the step times that follow from them.

Every figure has a public source; a scenario may describe a device or a model of its own.  Step times are a roofline: a step reads all weights once, computes two operations per
parameter and token, and reads the keys and values of every token it attends to; a prompt's attention is computed on top (:func:`attention_s`), and
ranks in tensor parallel add up what they computed (:func:`all_reduce_s`).  The efficiencies are assumptions (:class:`rose.sim.scenario.Efficiency`), not measurements.
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
class GpuSpec:
    """One GPU: memory in bytes, its bandwidth in bytes/s, dense bf16 operations/s, bytes/s to its peers in one direction."""

    name: str
    memory_bytes: int
    bandwidth_bytes_s: float
    flops: float
    link_bytes_s: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A dense decoder with grouped-query attention, in bf16."""

    name: str
    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    source: str

    @property
    def weight_bytes(self) -> float:
        return self.num_params * BF16_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BF16_BYTES


def make_device(
    name: str, memory_gb: float, tb_s: float, tflops: float, link_gb_s: float, source: str
) -> GpuSpec:
    return GpuSpec(
        name=name,
        memory_bytes=int(memory_gb * GB),
        bandwidth_bytes_s=tb_s * 1e12,
        flops=tflops * 1e12,
        link_bytes_s=link_gb_s * 1e9,
        source=source,
    )


def make_model(
    name: str,
    billions: float,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    source: str,
    head_dim: int = 128,
) -> ModelSpec:
    return ModelSpec(
        name=name,
        num_params=billions * 1e9,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        source=source,
    )


DEVICES = {
    device.name: device
    for device in (
        make_device(
            "a100-80g", 80, 2.039, 312, 300, "NVIDIA A100 datasheet (SXM, 80 GB; NVLink 600 GB/s both ways)"
        ),
        make_device(
            "h100", 80, 3.35, 989, 450, "NVIDIA H100 datasheet (SXM, dense bf16; NVLink 900 GB/s both ways)"
        ),
        make_device(
            "h200", 141, 4.8, 989, 450, "NVIDIA H200 datasheet (SXM, dense bf16; NVLink 900 GB/s both ways)"
        ),
        make_device(
            "l40s", 48, 0.864, 362, 32, "NVIDIA L40S datasheet (dense bf16; PCIe 4.0 x16, 64 GB/s both ways)"
        ),
    )
}
MODELS = {
    model.name: model
    for model in (
        make_model("qwen3-0.6b", 0.6, 28, 16, 8, 1024, "huggingface.co/Qwen/Qwen3-0.6B"),
        make_model("qwen3-8b", 8.2, 36, 32, 8, 4096, "huggingface.co/Qwen/Qwen3-8B"),
        make_model("qwen3-32b", 32.8, 64, 64, 8, 5120, "huggingface.co/Qwen/Qwen3-32B"),
        make_model("qwen2.5-7b", 7.61, 28, 28, 4, 3584, "huggingface.co/Qwen/Qwen2.5-7B-Instruct"),
        make_model("qwen2.5-32b", 32.5, 64, 40, 8, 5120, "huggingface.co/Qwen/Qwen2.5-32B-Instruct"),
    )
}


def find_device(name: str, field: str, own: Mapping[str, GpuSpec] | None = None) -> GpuSpec:
    """A device of the table above, or of the scenario's ``own``.

    Raises:
        ConfigError: No such device; names those that are known.
    """
    known = {**DEVICES, **(own or {})}
    if name not in known:
        fix = f"one of {', '.join(known)}, or describe yours as [devices.{name}]"
        raise ConfigError(f"'{name}' is not a known device", field=field, fix=fix)
    return known[name]


def find_model(name: str, field: str, own: Mapping[str, ModelSpec] | None = None) -> ModelSpec:
    """The same for models."""
    known = {**MODELS, **(own or {})}
    if name not in known:
        fix = f"one of {', '.join(known)}, or describe yours as [models.{name}]"
        raise ConfigError(f"'{name}' is not a known model", field=field, fix=fix)
    return known[name]


def step_model(
    device: GpuSpec,
    model: ModelSpec,
    num_gpus: int,
    *,
    compute_efficiency: float,
    bandwidth_efficiency: float,
    link_efficiency: float,
    all_reduce_latency_s: float,
    overhead_s: float,
    decode_hidden: float = 0.0,
) -> StepModel:
    """Step length of ``model`` on ``num_gpus`` devices in tensor parallel, without a prompt's attention.

    Weights, operations, keys and values are divided among the ranks; what the ranks add up is not.  ``decode_hidden``: share of the
    operations for one-token requests that costs no time, as it runs while memory is read.
    """
    operations_s = 2.0 * model.num_params / (device.flops * compute_efficiency * num_gpus)
    bandwidth = device.bandwidth_bytes_s * bandwidth_efficiency * num_gpus
    wait_s, share_s = all_reduce_s(
        device, model, num_gpus, link_efficiency=link_efficiency, latency_s=all_reduce_latency_s
    )
    return StepModel(
        base_s=overhead_s + model.weight_bytes / bandwidth + wait_s,
        prefill_token_s=operations_s + share_s,
        decode_s=operations_s * (1.0 - decode_hidden) + share_s,
        context_token_s=model.kv_bytes_per_token / bandwidth,
    )


def all_reduce_s(
    device: GpuSpec, model: ModelSpec, num_gpus: int, *, link_efficiency: float, latency_s: float
) -> tuple[float, float]:
    """What tensor parallel adds: seconds of each step, and of each token in it.

    Two all-reduces per layer, behind attention and behind the MLP (Megatron-LM, arXiv 1909.08053, section 3), of one bf16 hidden
    state per token.  Of a ring's ``n`` ranks each sends ``2 (n - 1) / n`` of the bytes (Patarasuk and Yuan, 2009; NCCL's tests count
    their bus bandwidth so).
    """
    if num_gpus == 1:
        return 0.0, 0.0
    num = 2 * model.num_layers
    sent_bytes = 2.0 * (num_gpus - 1) / num_gpus * model.hidden_size * BF16_BYTES
    return num * latency_s, num * sent_bytes / (device.link_bytes_s * link_efficiency)


def attention_s(device: GpuSpec, model: ModelSpec, num_gpus: int, *, compute_efficiency: float) -> float:
    """Seconds for one prompt token to attend to one token before it, in all layers.

    Its query times that key and its weight times that value: two products of ``heads x head_dim``, two operations each, so
    ``4 x layers x heads x head_dim`` (FlashAttention-2, arXiv 2307.08691, section 4.1, counts the same, and half of the square where
    attention is causal).  Heads are divided among ranks.
    """
    flops = 4.0 * model.num_layers * model.num_heads * model.head_dim
    return flops / (device.flops * compute_efficiency * num_gpus)


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
