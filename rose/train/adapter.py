"""LoRA (Hu et al. 2021) with PEFT: the base is frozen, and of each chosen matrix ``W`` a part ``scaling * B @ A`` of small rank is trained.

What is published is the *merged* matrix, ``W + scaling * B @ A``, rounded to the engines' type under the base's own names.  An engine then serves a version
as any other: it needs no LoRA kernels, no room for adapters, and nothing of how it takes versions or keys its caches changes.  The version is small all the
same where it counts: only weights whose rounded value has changed travel, and small steps change few.  What is lost by it: the engine holds
``W + scaling * B @ A`` rounded as a whole, the trainer computes with the adapter unrounded, so the two differ by up to half a last bit of ``W`` (told as
``mismatch_kl``, and corrected as any mismatch).

An adapter's checkpoint holds the adapter alone: it is of the model folder that training began with, and says which that is.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rose.errors import ConfigError, TrainError

ADAPTER = "default"
"""PEFT's name of the only adapter."""
_PEFT_PREFIX = "base_model.model."
"""Of names in a PEFT folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraParams:
    rank: int
    alpha: float
    """``scaling`` is this over the rank."""
    targets: tuple[str, ...] = ()
    """Last parts of the names of linear layers; none = all but the output layer."""
    seed: int = 0
    """Of ``A``'s first values; ``B`` begins at 0."""


def inject(model: Any, params: LoraParams) -> None:
    """Put adapters into ``model``, in place; nothing else of it is trained from now on.

    Raises:
        ConfigError: PEFT is not installed, or a target is in no layer, or in one that cannot have an adapter.
    """
    config = _config(params, layers_of(model, params.targets))
    try:
        from peft import inject_adapter_in_model

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(params.seed)  # the same on every rank
            inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        raise ConfigError(str(error).splitlines()[0], field="trainer.lora.targets") from error
    for name, tensor in model.named_parameters():
        tensor.requires_grad_(".lora_" in name)


def layers_of(model: Any, targets: Sequence[str] = ()) -> list[str]:
    """Names of the linear layers that get adapters.

    Not the output layer: log-probs are taken from its weight without it.  Not fused experts, embeddings and transposed layers either: what is merged
    is ``W + B @ A`` of a matrix ``W`` that is applied as ``x @ W.T``.

    Raises:
        ConfigError: A target names no layer, or one of those; or there is none.
    """
    output = model.get_output_embeddings()
    modules = {name: module for name, module in model.named_modules() if name}
    linear = [
        name
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear) and module is not output
    ]
    for target in targets:
        named = [name for name in modules if _is_called(name, target)]
        if not named:
            raise ConfigError(f"no layer is called '{target}'", field="trainer.lora.targets")
        if others := [name for name in named if name not in linear]:
            kind = "the output layer" if modules[others[0]] is output else type(modules[others[0]]).__name__
            raise ConfigError(
                f"'{target}' is {others[0]}, which is {kind}: only linear layers, but for the output layer, can have an adapter",
                field="trainer.lora.targets",
            )
    found = [name for name in linear if not targets or any(_is_called(name, target) for target in targets)]
    if not found:
        raise ConfigError(
            "this model has no linear layers that could have an adapter", field="trainer.lora.rank"
        )
    return found


def _is_called(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _config(params: LoraParams, layers: Sequence[str]) -> Any:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(
            "needs peft", field="trainer.lora.rank", fix="pip install '.[train]' from a checkout of ROSE"
        ) from error
    return LoraConfig(
        r=params.rank,
        lora_alpha=params.alpha,  # pyright: ignore[reportArgumentType] - a float is as good
        target_modules=list(layers),
        lora_dropout=0.0,  # proximal and current must be the same function
        task_type="CAUSAL_LM",
    )


@contextmanager
def left_out(model: Any) -> Iterator[None]:
    """Inside, ``model`` computes as if it had no adapters.  They go on through it, times 0: the collectives of a sharded one stay as they are."""
    scalings: list[dict[str, float]] = [one.scaling for one in model.modules() if hasattr(one, "lora_A")]
    before = [dict(one) for one in scalings]
    for one in scalings:
        one[ADAPTER] = 0.0
    try:
        yield
    finally:
        for one, was in zip(scalings, before, strict=True):
            one.update(was)


def parameters_of(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The base's parameters under the checkpoint's names, and the adapters' under PEFT's without its prefix; tied ones once."""
    base: dict[str, Any] = {}
    adapters: dict[str, Any] = {}
    for name, tensor in model.named_parameters():
        if ".lora_" in name:
            adapters[name.replace(f".{ADAPTER}.", ".")] = tensor
        else:
            base[name.replace(".base_layer.", ".")] = tensor
    return base, adapters


@torch.no_grad()
def merge_into(merged: Mapping[str, Any], model: Any, masters: Mapping[str, Any]) -> None:
    """Fill ``merged`` with what engines are to hold, rounded to its type.  All ranks; each makes its own rows, and sees ``A`` whole.

    Args:
        merged: By the base's names; sharded as the base is.
        masters: Adapters, as :func:`parameters_of` names them.
    """
    base, _ = parameters_of(model)
    scalings = {
        name: module.scaling[ADAPTER] for name, module in model.named_modules() if hasattr(module, "lora_A")
    }
    for name, scaling in scalings.items():
        lower, upper = masters[f"{name}.lora_A.weight"].detach(), masters[f"{name}.lora_B.weight"].detach()
        lower = lower.full_tensor() if hasattr(lower, "full_tensor") else lower
        start, target = _local(base[f"{name}.weight"]), _local(merged[f"{name}.weight"])
        # Rows of B are sharded as those of W are: both have as many.
        part = (_local(upper).float() @ lower.float()).mul_(scaling).to(start.device)
        target.copy_(part.add_(start.float()))


def write_adapter(tensors: Mapping[str, Tensor], params: LoraParams, base: Path, target: Path) -> None:
    """Write a PEFT folder that ``PeftModel.from_pretrained`` reads, whole or not at all; replaces what was there.

    Raises:
        TrainError: The disk refused.
    """
    staging = target.with_name(f".{target.name}.writing")
    config = _config(params, sorted({name.partition(".lora_")[0] for name in tensors}))
    config.base_model_name_or_path = str(base)
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        config.save_pretrained(str(staging))
        named = {f"{_PEFT_PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}
        save_file(named, staging / "adapter_model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise TrainError(f"{target} cannot be written: {error}", field="export") from error


def _local(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
