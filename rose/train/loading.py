"""A Hugging Face folder in, a Hugging Face folder out: whole for a trainer of one process, by shards for one of several.

By shards means that no rank ever holds a whole model: parameters are made as memory that is never touched (:func:`empty_modules`), FSDP2 takes
each rank's part of it, and each rank reads that part of the folder's safetensors files (:func:`sharded_masters`).
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rose.errors import ConfigError, TrainError
from rose.train.checkpoint import read_into
from rose.train.model_folder import check_ranks, kept_names

FILE_BYTES = 4 * 2**30
"""Of one file of an export: what the first rank holds of a model when it is written by shards."""


def load_module(model_path: Path) -> Any:
    """A causal language model in fp32.

    Raises:
        ConfigError: No model, or none that can be loaded.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    _check_folder(model_path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{model_path} cannot be loaded: {error}", field="model") from error
    model, told = loaded
    if missing := sorted(told["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(
            f"{model_path} has no weights for {', '.join(missing[:3])}{more}: they would be random",
            field="model",
        )
    return model


def empty_modules(model_path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The same model twice: its skeleton (parameters on ``meta``), and one whose parameters, in ``dtype``, hold nothing yet.

    Memory that nobody has written to is not taken from the system.  Buffers are there, as ``model_path`` has them.  All ranks.

    Raises:
        ConfigError: No model, or a mixture of experts, or the folder's safetensors files lack a buffer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    _check_folder(model_path)
    check_ranks(model_path)
    try:
        config = AutoConfig.from_pretrained(model_path, local_files_only=True)
        with _parameters_on_meta():
            skeleton: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{model_path} cannot be loaded: {error}", field="model") from error
    skeleton.tie_weights()
    module = copy.deepcopy(skeleton)
    empty = {
        name: torch.nn.Parameter(torch.empty(tensor.shape, dtype=dtype))
        for name, tensor in module.named_parameters()
    }
    _replace(module, empty)
    for one in (skeleton, module):
        fill_shards(_buffers_of(one), model_path)
    return skeleton, module


def sharded_masters(skeleton: Any, like: Mapping[str, Any], model_path: Path, device: torch.device) -> Any:
    """``skeleton`` with fp32 masters, sharded as ``like`` is, read from ``model_path``.  All ranks.

    Args:
        like: Sharded tensors by the names of the skeleton's parameters.
        device: Where the masters are.

    Raises:
        ConfigError: The folder's safetensors files lack a tensor, or have it in another shape.
    """
    masters = {name: _empty_master(tensor, device) for name, tensor in like.items()}
    _replace(skeleton, masters)
    fill_shards(masters, model_path)
    return skeleton


def _buffers_of(module: Any) -> dict[str, Tensor]:
    """What a checkpoint holds beside parameters: numbers that nobody trains."""
    held = module.state_dict().keys()
    named = module.named_buffers()
    return {name: one for name, one in named if name in held and one.is_floating_point()}


def fill_shards(tensors: Mapping[str, Any], model_path: Path) -> None:
    """Read this rank's part of each tensor from ``model_path``, into its own type.  All ranks.

    Raises:
        ConfigError: The folder's safetensors files lack a tensor, or have it in another shape.
    """
    if not tensors:
        return
    try:
        read_into({name: tensor.detach() for name, tensor in tensors.items()}, model_path)
    except TrainError as error:
        raise ConfigError(
            error.message,
            field="model",
            fix="several ranks read safetensors files with the model's own names: save it anew with transformers",
        ) from error


@torch.no_grad()
def master_of(tensor: Any, device: torch.device) -> torch.nn.Parameter:
    """An fp32 copy of ``tensor``, sharded as it is."""
    master: Any = _empty_master(tensor, device)
    local = master.to_local() if hasattr(master, "to_local") else master
    local.copy_(tensor.to_local() if hasattr(tensor, "to_local") else tensor)
    return master


def _empty_master(like: Any, device: torch.device) -> torch.nn.Parameter:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    if not hasattr(like, "to_local"):
        return torch.nn.Parameter(torch.empty(like.shape, dtype=torch.float32, device=device))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    local = torch.empty(like.to_local().shape, dtype=torch.float32, device=device)
    whole: Any = DTensor.from_local(
        local, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return torch.nn.Parameter(whole)


def frozen_in(module: Any, source: Path, dtype: torch.dtype) -> None:
    """Hold ``module`` in ``dtype``, for nobody to train; what the folder ``source`` holds in fp32 stays as it is."""
    kept = kept_in(module, source, dtype)
    _replace(
        module,
        {
            name: torch.nn.Parameter(
                tensor.detach().to(tensor.dtype if name in kept else dtype), requires_grad=False
            )
            for name, tensor in module.named_parameters()
        },
    )


def export_module(module: Any, source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write ``module`` to ``target`` so that it is there whole or not at all; replaces what was there.  In ``dtype``, but for what ``source`` holds in fp32.

    Raises:
        TrainError: The disk refused.
    """
    from transformers import GenerationConfig

    def write(staging: Path) -> None:
        ours = copy.deepcopy(module)
        kept = kept_in(module, source, dtype)
        for name, tensor in (*ours.named_parameters(), *ours.named_buffers()):
            if tensor.is_floating_point() and name not in kept:
                tensor.data = tensor.data.to(dtype)
        # The source's own file is taken as it is: the library writes none that it finds fault with, and its faults are not ours.
        ours.generation_config = GenerationConfig()
        ours.save_pretrained(staging)
        (staging / "generation_config.json").unlink(missing_ok=True)

    _export(source, target, write)


def export_shards(module: Any, source: Path, target: Path, dtype: torch.dtype) -> None:
    """The same for sharded tensors.  All ranks; the first holds :data:`FILE_BYTES` at most, the others a tensor at a time.

    Raises:
        TrainError: The disk refused.  The other ranks do not hear of it.
    """
    from transformers import AutoConfig

    named = dict(module.named_parameters())
    kept = kept_in(module, source, dtype)
    types = {name: torch.float32 if name in kept else dtype for name in named}
    files: list[list[str]] = [[]]
    size = 0
    for name, tensor in named.items():
        num_bytes = tensor.numel() * types[name].itemsize
        if files[-1] and size + num_bytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += num_bytes

    def wholes(names: list[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in names:
            whole = named[name].detach().full_tensor().to(types[name]).cpu()
            if dist.get_rank() == 0:
                found[name] = whole.contiguous()
        return found

    def write(staging: Path) -> None:
        staging.mkdir(parents=True)
        where: dict[str, str] = {}
        for number, names in enumerate(files, start=1):
            single = len(files) == 1
            file = "model.safetensors" if single else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            save_file(wholes(names), staging / file, metadata={"format": "pt"})
            where |= dict.fromkeys(names, file)
        if len(files) > 1:
            total = sum(tensor.numel() * types[name].itemsize for name, tensor in named.items())
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (staging / "model.safetensors.index.json").write_text(json.dumps(index))
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        config.dtype = dtype
        config.save_pretrained(staging)

    if dist.get_rank() == 0:
        _export(source, target, write)
    else:
        for names in files:
            wholes(names)


def _export(source: Path, target: Path, write: Callable[[Path], None]) -> None:
    staging = target.with_name(f".{target.name}.writing")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        write(staging)
        for path in source.iterdir():
            # Tokenizer, chat template, generation settings: all but what the model itself has just written, and lists of other files of weights.
            beside = path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model")
            if beside and ".index." not in path.name and not (staging / path.name).exists():
                shutil.copy2(path, staging / path.name)
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)  # a disk may be full of it
        raise TrainError(f"{target} cannot be written: {error}", field="export") from error


def kept_in(module: Any, source: Path, dtype: torch.dtype) -> set[str]:
    """Names in ``module`` of what its folder holds in fp32 although it is in ``dtype``."""
    kept = set(kept_names(source, str(dtype).removeprefix("torch.")))
    if not kept:
        return set()
    from transformers.core_model_loading import revert_weight_conversion

    def in_folder(name: str, tensor: Any) -> set[str]:
        return set(revert_weight_conversion(module, {name: torch.empty(tensor.shape, device="meta")}))

    return {name for name, tensor in module.state_dict().items() if kept & in_folder(name, tensor)}


def computed_in_fp32(module: Any, names: Set[str]) -> set[str]:
    """Those of ``names`` that the family's own code computes with in fp32 whatever type the rest has.  Elsewhere types may not be mixed: a norm in fp32
    gives its layer's products what they do not take."""
    patterns = [re.compile(one) for one in getattr(module, "_keep_in_fp32_modules_strict", None) or ()]
    return {name for name in names if any(one.search(name) for one in patterns)}


def _check_folder(model_path: Path) -> None:
    if not (model_path / "config.json").is_file():
        raise ConfigError(f"{model_path} is not a model folder", field="model")


def _replace(module: Any, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Give ``module`` other parameters, by name; what was one tensor under two names stays one."""
    new = {id(tensor): parameters[name] for name, tensor in module.named_parameters()}
    for owner in module.modules():
        for key, tensor in owner._parameters.items():
            if tensor is not None:
                owner._parameters[key] = new[id(tensor)]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that are made inside take no memory.  Buffers do: they are small, and nothing would fill them later."""
    original = torch.nn.Module.register_parameter

    def register(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    torch.nn.Module.register_parameter = register
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original
