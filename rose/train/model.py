"""The policy's weights: fp32 masters for the optimiser, and the model that computes with them.

The optimiser moves *masters* in fp32.  The forward pass uses them rounded to ``policy_dtype``, the type in which the
engine holds them, so that trainer and engine compute the same policy; gradients pass the rounding unchanged.  What the model's folder
holds in fp32 although the rest is in bf16 (routers), engines hold in fp32 too: it is not rounded.
Products are computed in ``compute_dtype``: bf16 on GPUs and fp32 on CPUs unless told otherwise (there as near to the engine as bf16 products
are, and faster).

On more than one rank both copies are sharded, the computing one by torch's FSDP2; no rank ever holds a whole model.  Each reads
its own part of the checkpoint (``rose.train.loading``), and publishing and checkpoints go by shards too.  Gradients are reduced by SUM, in
fp32, and the loss divides by the tokens of all ranks: an average over ranks would be another gradient where ranks hold unequal
numbers of tokens, and AVG is not among gloo's reductions.

Every method with "all ranks" in its docstring is a collective: each rank calls it, in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Set
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rose.errors import ConfigError
from rose.train.adapter import LoraParams, inject, merge_into, parameters_of, write_adapter
from rose.train.batch import Minibatch
from rose.train.checkpoint import Checkpoint, read_into
from rose.train.checkpoint_folder import Trained, check_fits
from rose.train.loading import (
    computed_in_fp32,
    empty_modules,
    export_module,
    export_shards,
    fill_shards,
    frozen_in,
    kept_in,
    load_module,
    master_of,
    sharded_masters,
)
from rose.train.logprobs import token_log_probs
from rose.train.model_folder import identity_of
from rose.train.packing import check_rows, row_tokens

Dtype = Literal["bfloat16", "float32"]
Device = Literal["cpu", "cuda"]

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW."""


class ComputingModel:
    """Takes part in torch's default process group where one exists."""

    def __init__(self, policy_dtype: Dtype, compute_dtype: Dtype, device: Device) -> None:
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.device = torch.device(device)
        self._policy_dtype = getattr(torch, policy_dtype)
        self._compute_dtype = getattr(torch, compute_dtype)
        self._policy: Any = None

    def log_probs(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and entropies, ``[N]`` each, fp32.  All ranks, each with its own batch."""
        return self._policy(batch)


class FrozenModel(ComputingModel):
    """A policy that nobody trains: one copy, in ``compute_dtype``.

    Args:
        model_path: Hugging Face folder.
        policy_dtype: What its weights are rounded to, as an engine would hold them.
        compute_dtype: What matrices are multiplied in.
        device: Where it computes.

    Raises:
        ConfigError: The folder holds no model that can be loaded.
    """

    def __init__(
        self, model_path: Path, *, policy_dtype: Dtype, compute_dtype: Dtype, device: Device
    ) -> None:
        super().__init__(policy_dtype, compute_dtype, device)
        if self.world_size > 1:
            _, computing = empty_modules(model_path, self._compute_dtype)
            computing.requires_grad_(False)
            self._policy = shard(_Policy(computing), computing, self.device)
            fill_shards(parameters_of(computing)[0], model_path)
        else:
            computing = load_module(model_path).requires_grad_(False)
            self._policy = _Policy(computing)
        kept = kept_in(computing, model_path, self._policy_dtype)
        for name, tensor in computing.named_parameters():
            if name not in kept:
                local_of(tensor).copy_(local_of(tensor).to(self._policy_dtype))
        if self.world_size == 1:
            _in_dtype(computing, self._compute_dtype, computed_in_fp32(computing, kept)).to(self.device)
        computing.eval()


class PolicyModel(ComputingModel):
    """One that is trained; see the module's docstring.

    Args:
        model_path: Hugging Face folder.
        policy_dtype: What the engine holds.
        compute_dtype: What matrices are multiplied in.
        activation_checkpointing: Recompute each layer in the backward pass instead of keeping its activations.
        device: Where it computes; ``cuda`` is the process's current device.
        offload: Masters, and with them the optimiser's moments, stay in host memory.
        lora: Train adapters (:mod:`rose.train.adapter`); masters are these alone, and :attr:`module` is merged of them.
        packing: It will be given packed minibatches.

    Raises:
        ConfigError: The folder holds no model that can be loaded, or one that does more with its logits than its output layer, or that may not be packed.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        policy_dtype: Dtype,
        compute_dtype: Dtype,
        device: Device,
        activation_checkpointing: bool = False,
        offload: bool = False,
        lora: LoraParams | None = None,
        packing: bool = False,
    ) -> None:
        super().__init__(policy_dtype, compute_dtype, device)
        self._path = model_path
        masters_on = torch.device("cpu") if offload else self.device
        self._lora = lora
        if self.world_size > 1:
            skeleton, computing = empty_modules(model_path, self._compute_dtype)
            if lora is not None:
                inject(computing, lora)
            self._policy = shard(_Policy(computing), computing, self.device)
            base, adapters = parameters_of(computing)
            self.module: Any = sharded_masters(skeleton, base, model_path, masters_on)
        else:
            self.module = load_module(model_path).to(masters_on)
        kept = kept_in(self.module, model_path, self._policy_dtype)
        if self.world_size == 1:
            computing = copy.deepcopy(self.module)
            if lora is not None:  # what the engine holds is what adapters are added to
                _in_dtype(computing, self._policy_dtype, kept)
            _in_dtype(computing, self._compute_dtype, computed_in_fp32(computing, kept)).to(self.device)
            if lora is not None:
                inject(computing, lora)
            self._policy = _Policy(computing)
            base, adapters = parameters_of(computing)
        """Under the checkpoint's names: fp32 masters, or what adapters are merged to.  What a publisher reads; on several ranks the tensors are sharded."""
        self.base = identity_of(model_path)
        """What training begins with, as checkpoints say it."""
        config = computing.config
        self.vocab_size = _size_of(config, "vocab_size")
        self.max_tokens = _size_of(config, "max_position_embeddings")
        self.row_tokens = row_tokens(config, model_path) if packing else None
        """The most tokens of a packed row of several sequences; None = no bound of its own."""
        # No dropout: proximal and current must be the same function.
        computing.eval()
        if activation_checkpointing:
            _silence_dropout(computing)
            computing.train()  # the library checkpoints in training mode only
            computing.gradient_checkpointing_enable({"use_reentrant": False})
        self.computing: Any = computing
        """The model as the engine holds it."""
        self._named: list[tuple[str, Any]] = list(self.module.named_parameters())
        """What is trained.  Tied tensors come once."""
        if lora is not None:
            for (name, whole), tensor in zip(self._named, base.values(), strict=True):
                rounding = torch.float32 if name in kept else self._policy_dtype
                local_of(tensor).detach().copy_(local_of(whole.detach()).to(rounding))
            frozen_in(self.module, model_path, self._policy_dtype)
            self._named = [(name, master_of(tensor, masters_on)) for name, tensor in adapters.items()]
        trained = base if lora is None else adapters
        self.masters: list[Any] = [tensor for _, tensor in self._named]
        self._pairs = list(zip(self.masters, trained.values(), strict=True))
        # Engines never hold an adapter: it is not rounded to their type.
        roundings = {name: torch.float32 if name in kept else self._policy_dtype for name, _ in self._named}
        self._roundings = [self._compute_dtype if lora else roundings[name] for name, _ in self._named]
        self.round_weights()
        self.merge()
        _check_output_layer(self._policy, model_path, self.device)
        if packing:
            check_rows(lambda batch: self.log_probs(batch.to(self.device)), self.vocab_size, model_path)

    # --- computing -------------------------------------------------------------------------------------

    def collect_gradients(self) -> None:
        """Move what the last backward pass left behind to the masters, adding up in fp32."""
        for master, tensor in self._pairs:
            if tensor.grad is None:
                continue
            gradient = local_of(tensor.grad).to(local_of(master.detach()).device, torch.float32)
            if master.grad is None:
                master.grad = _sharded_as(gradient, master)
            else:
                local_of(master.grad).add_(gradient)
            tensor.grad = None

    @torch.no_grad()
    def round_weights(self) -> None:
        """Compute with the masters as they are now."""
        for (master, tensor), rounding in zip(self._pairs, self._roundings, strict=True):
            local_of(tensor).copy_(local_of(master).to(rounding))

    def merge(self) -> None:
        """Bring :attr:`module` up to the adapters, where there are any.  All ranks."""
        if self._lora is not None:
            merge_into(dict(self.module.named_parameters()), self.computing, dict(self._named))

    # --- state -----------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Masters by name: this rank's part of them."""
        return {name: tensor.detach() for name, tensor in self._named}

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients of the masters by name; those without one are left out.  All ranks."""
        return {name: whole_of(tensor.grad) for name, tensor in self._named if tensor.grad is not None}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, float]]:
        """This rank's part of AdamW's moments by ``NAME/KEY``, and each weight's number of updates."""
        states = {name: optimizer.state.get(tensor, {}) for name, tensor in self._named}
        moments = {f"{name}/{key}": one[key] for name, one in states.items() for key in MOMENTS if key in one}
        return moments, {name: float(one["step"]) for name, one in states.items() if "step" in one}

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Take what a checkpoint holds, each rank its part; without ``optimizer`` the weights alone.  All ranks.

        Raises:
            TrainError: It is of another model or of other adapters, and nothing was changed; or it cannot be read.
        """
        assert checkpoint.path is not None
        trained = Trained(
            folder=self._path,
            base=self.base,
            rank=0 if self._lora is None else self._lora.rank,
            shapes={name: tuple(tensor.shape) for name, tensor in self._named},
        )
        check_fits(checkpoint.shapes, checkpoint.base, checkpoint.path, trained)
        if optimizer is not None:
            optimizer.state.clear()
        targets: dict[str, Tensor] = {}
        for name, tensor in self._named:
            targets[f"weights/{name}"] = tensor.detach()
            if optimizer is not None and name in checkpoint.optimizer_steps:
                moments = {key: torch.zeros_like(tensor.detach()) for key in MOMENTS}
                targets |= {f"optimizer/{name}/{key}": moment for key, moment in moments.items()}
                optimizer.state[tensor] = {"step": torch.tensor(checkpoint.optimizer_steps[name]), **moments}
        read_into(targets, checkpoint.path)
        self.round_weights()
        self.merge()

    def export(self, target: Path) -> None:
        """Write a Hugging Face checkpoint in ``policy_dtype``, with the tokenizer it came with; an adapter beside it, as ``TARGET-adapter``.  All ranks."""
        write = export_module if self.world_size == 1 else export_shards
        write(self.module, self._path, target, self._policy_dtype)
        if self._lora is not None:
            wholes = {name: whole_of(tensor.detach()).cpu() for name, tensor in self._named}
            if self.rank == 0:
                write_adapter(wholes, self._lora, self._path, target.with_name(f"{target.name}-adapter"))


class _Policy(torch.nn.Module):
    """Tokens to log-probs and entropies.  Only sampled positions meet the output layer, and a chunk of them at a time."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Minibatch | Tensor) -> tuple[Tensor, Tensor]:
        """Of mere ids ``[1, T]``: the logits that log-probs are taken of, and the model's own, ``[T, V]`` each."""
        ids_BT, positions_BT = (
            (batch, None) if isinstance(batch, Tensor) else (batch.input_ids_BT, batch.position_ids_BT)
        )
        found = self.model.base_model(input_ids=ids_BT, position_ids=positions_BT, use_cache=False)
        hidden_BTD = found.last_hidden_state
        output = self.model.get_output_embeddings()
        if isinstance(batch, Tensor):
            ours_TV = torch.nn.functional.linear(hidden_BTD[0], output.weight, output.bias)
            return ours_TV.float(), self.model(input_ids=batch, use_cache=False).logits[0].float()
        return token_log_probs(
            hidden_BTD[batch.rows_N, batch.columns_N],
            output.weight,
            output.bias,
            targets_N=batch.targets_N,
            temperature_N=batch.temperature_N,
            allowed_KV=batch.allowed_KV,
            allowed_index_N=batch.allowed_index_N,
        )


@torch.no_grad()
def _check_output_layer(policy: Any, model_path: Path, device: torch.device) -> None:
    """Some families scale or cap what the output layer gives (Gemma 2, Granite, Cohere); without it we would train another policy
    than the engines sample from.  All ranks.

    Raises:
        ConfigError: ``model_path`` is of such a family, or computes something else each time.
    """
    model: Any = policy.model
    ids_BT = torch.arange(2, 6, device=device).unsqueeze(0) % model.config.vocab_size
    ours_NV, whole_NV = policy(ids_BT)
    if model.training and not _alike(ours_NV, policy(ids_BT)[0]):
        raise ConfigError(
            f"{model_path} ({model.config.model_type}) draws at random in training mode, which ROSE cannot switch off",
            field="trainer.activation_checkpointing",
            fix="leave it out",
        )
    if not _alike(ours_NV, whole_NV):
        raise ConfigError(
            f"{model_path} ({model.config.model_type}) scales or caps its logits, which ROSE's trainer does not",
            field="model",
            fix="train a model of another family, or bring your own trainer (rose.train.workers.Parts)",
        )


def _alike(ours_NV: Tensor, others_NV: Tensor) -> bool:
    return torch.allclose(ours_NV, others_NV, rtol=1e-3, atol=1e-3 * float(others_NV.abs().max()))


def whole_of(tensor: Any) -> Tensor:
    """A sharded tensor put together (a collective); any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_of(tensor: Any) -> Any:
    """This rank's part of a sharded tensor; any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _sharded_as(local: Tensor, like: Any) -> Any:
    if not hasattr(like, "to_local"):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _in_dtype(module: Any, dtype: torch.dtype, but: Set[str]) -> Any:
    """Parameters alone, and of these not ``but``: what a model computes its positions from stays in fp32, as in the engine."""
    for name, tensor in module.named_parameters():
        if name not in but:
            tensor.data = tensor.data.to(dtype)
    return module


def shard(root: Any, model: Any, device: torch.device) -> Any:
    """Share the layers of ``model``, and what else there is in ``root``, among all ranks.

    Raises:
        ConfigError: It keeps its layers under another name than most.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        raise ConfigError(
            f"models of type {model.config.model_type} are not shared among ranks: ROSE does not find their layers",
            field="trainer.num_ranks",
            fix="set it to 1, or train a model of another family",
        )
    # Else bf16 products would be summed in bf16, where every rank beyond the second adds a rounding.
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # Resharding the root too: its parameters are read between a forward and the next.
    fully_shard(root, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in root.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _size_of(config: Any, name: str) -> int:
    """A number of the model's configuration.

    Raises:
        ConfigError: It has none: a model of another kind than those that are trained here.
    """
    found = getattr(config, name, None)
    if isinstance(found, int):
        return found
    if hasattr(config, "text_config"):
        raise ConfigError(
            f"{config.model_type} is a model of several modalities",
            field="model",
            fix="give the folder of its text model",
        )
    raise ConfigError(
        f"{config.model_type} has no {name}: models without it are not trained here", field="model"
    )


def _silence_dropout(model: Any) -> None:
    """Families keep what they draw with under many names: in modules of torch's (``p``), in numbers of their own, and in the configuration alone."""
    for module in model.modules():
        is_torchs = isinstance(module, torch.nn.modules.dropout._DropoutNd)
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if isinstance(value, float) and (is_torchs or "drop" in name or "jitter" in name):
                    setattr(holder, name, 0.0)
