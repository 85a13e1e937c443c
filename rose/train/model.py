"""The policy's weights: fp32 masters for the optimiser, and the model that computes with them.

The optimiser moves *masters* in fp32.  The forward pass uses them rounded to ``policy_dtype``, the type in which the
engine holds them, so that trainer and engine compute the same policy; gradients pass the rounding unchanged.
Products are computed in ``compute_dtype``: fp32 unless told otherwise (on CPUs as near to the engine as bf16 products are,
and faster).

On more than one rank both copies are sharded by torch's FSDP2.  Gradients are reduced by SUM, in fp32, and the loss
divides by the tokens of all ranks: an average over ranks would be another gradient where ranks hold unequal numbers of
tokens, and AVG is not among gloo's reductions.

Every method with "all ranks" in its docstring is a collective: each rank calls it, in the same order.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rose.errors import ConfigError, TrainError
from rose.train.batch import Minibatch
from rose.train.logprobs import token_log_probs

Dtype = Literal["bfloat16", "float32"]


class PolicyModel:
    """See the module's docstring.  Takes part in torch's default process group where one exists.

    Args:
        model_path: Hugging Face folder.
        policy_dtype: What the engine holds.
        compute_dtype: What matrices are multiplied in.
        activation_checkpointing: Recompute each layer in the backward pass instead of keeping its activations.

    Raises:
        ConfigError: The folder holds no model that can be loaded, or one that does more with its logits than its output layer.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        policy_dtype: Dtype = "bfloat16",
        compute_dtype: Dtype = "float32",
        activation_checkpointing: bool = False,
    ) -> None:
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._path = model_path
        self._policy_dtype = getattr(torch, policy_dtype)
        self._compute_dtype = getattr(torch, compute_dtype)
        self.module: Any = load_module(model_path)
        """Whole fp32 masters under the checkpoint's names: what a publisher reads.  On several ranks a copy,
        as new as the last :meth:`gather`."""
        config = self.module.config
        self.vocab_size: int = config.vocab_size
        self.max_tokens: int = config.max_position_embeddings
        computing = copy.deepcopy(self.module).to(self._compute_dtype)
        # No dropout: proximal and current must be the same function.
        computing.eval()
        if activation_checkpointing:
            _silence_dropout(computing)
            computing.train()  # the library checkpoints in training mode only
            computing.gradient_checkpointing_enable({"use_reentrant": False})
        self.computing: Any = computing
        """The model as the engine holds it."""
        self._policy: Any = _Policy(computing)
        _check_output_layer(computing, model_path)
        masters: Any = self.module
        if self.world_size > 1:
            masters = copy.deepcopy(self.module)
            self._policy = _shard(self._policy, computing)
            _shard(masters, masters)
        self._named = list(masters.named_parameters())
        """Tied tensors come once."""
        self.masters: list[Any] = [tensor for _, tensor in self._named]
        self._pairs = list(zip(self.masters, computing.parameters(), strict=True))
        self.round_weights()

    # --- computing -------------------------------------------------------------------------------------

    def log_probs(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and entropies, ``[N]`` each, fp32.  All ranks, each with its own batch."""
        return self._policy(batch)

    def collect_gradients(self) -> None:
        """Move what the last backward pass left behind to the masters, adding up in fp32."""
        for master, tensor in self._pairs:
            if tensor.grad is None:
                continue
            if master.grad is None:
                master.grad = tensor.grad.to(torch.float32)
            else:
                master.grad += tensor.grad
            tensor.grad = None

    @torch.no_grad()
    def round_weights(self) -> None:
        for master, tensor in self._pairs:
            tensor.copy_(master.to(self._policy_dtype))

    # --- whole tensors ---------------------------------------------------------------------------------

    def gather(self) -> None:
        """Bring :attr:`module` up to date.  All ranks."""
        if self.world_size == 1:
            return
        with torch.no_grad():
            for (_, master), whole in zip(self._named, self.module.parameters(), strict=True):
                whole.copy_(master.full_tensor())

    def weights(self) -> dict[str, Tensor]:
        """Whole masters by name.  All ranks."""
        return {name: whole_of(tensor.detach()) for name, tensor in self._named}

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients of the masters by name; those without one are left out.  All ranks."""
        return {name: whole_of(tensor.grad) for name, tensor in self._named if tensor.grad is not None}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Whole optimiser tensors by ``NAME/KEY``.  All ranks."""
        return {
            f"{name}/{key}": whole_of(value)
            for name, tensor in self._named
            for key, value in optimizer.state.get(tensor, {}).items()
        }

    def check_names(self, weights: Mapping[str, Tensor]) -> None:
        """Raises TrainError: ``weights`` are of another model."""
        for name, tensor in self._named:
            saved = weights.get(name)
            if saved is None or saved.shape != tensor.shape:
                raise TrainError(f"tensor {name} is not the model's", field="checkpoint")
        if unknown := set(weights) - {name for name, _ in self._named}:
            raise TrainError(f"tensor {min(unknown)} is not in the model", field="checkpoint")

    @torch.no_grad()
    def restore(
        self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        """Take whole tensors back, each rank its share.  Call :meth:`check_names` first.  All ranks."""
        optimizer.state.clear()
        for name, tensor in self._named:
            tensor.copy_(_share_of(weights[name], tensor))
            slots = {
                key: (whole.clone() if whole.ndim == 0 else _share_of(whole, tensor))
                for key in ("step", "exp_avg", "exp_avg_sq")
                if (whole := state.get(f"{name}/{key}")) is not None
            }
            if slots:
                optimizer.state[tensor] = slots
        self.gather()
        self.round_weights()

    def export(self, target: Path) -> None:
        """Write :attr:`module` as a Hugging Face checkpoint in ``policy_dtype``, with the tokenizer it came with."""
        export_module(self.module, self._path, target, self._policy_dtype)


class _Policy(torch.nn.Module):
    """Tokens to log-probs and entropies.  Only sampled positions meet the output layer, and a chunk of them at a time."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        hidden_BTD = self.model.base_model(input_ids=batch.input_ids_BT, use_cache=False).last_hidden_state
        output = self.model.get_output_embeddings()
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
def _check_output_layer(model: Any, model_path: Path) -> None:
    """Some families scale or cap what the output layer gives (Gemma 2, Granite, Cohere); without it we would train another policy
    than the engines sample from.

    Raises:
        ConfigError: ``model_path`` is of such a family.
    """
    ids_BT = torch.arange(2, 6).unsqueeze(0) % model.config.vocab_size
    hidden_TD = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state[0]
    output = model.get_output_embeddings()
    ours_NV = torch.nn.functional.linear(hidden_TD, output.weight, output.bias).float()
    whole_NV = model(input_ids=ids_BT, use_cache=False).logits[0].float()
    if not torch.allclose(ours_NV, whole_NV, rtol=1e-3, atol=1e-3 * float(whole_NV.abs().max())):
        raise ConfigError(
            f"{model_path} ({model.config.model_type}) scales or caps its logits, which ROSE's trainer does not",
            field="model",
            fix="train a model of another family, or bring your own trainer (rose.train.workers.Parts)",
        )


def load_module(model_path: Path) -> Any:
    """A causal language model in fp32.

    Raises:
        ConfigError: No model, or none that can be loaded.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not (model_path / "config.json").is_file():
        raise ConfigError(f"{model_path} is not a model folder", field="model")
    try:
        return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_path} cannot be loaded: {error}", field="model") from error


def export_module(module: Any, source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write ``module`` to ``target`` so that it is there whole or not at all; replaces what was there.

    Raises:
        TrainError: The disk refused.
    """
    staging = target.with_name(f".{target.name}.writing")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        copy.deepcopy(module).to(dtype).save_pretrained(staging)
        for path in source.iterdir():
            # Tokenizer, chat template, generation settings: all but what the model itself has just written.
            beside = path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model")
            if beside and "safetensors" not in path.name and not (staging / path.name).exists():
                shutil.copy2(path, staging / path.name)
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    except OSError as error:
        raise TrainError(f"{target} cannot be written: {error}", field="export") from error


def whole_of(tensor: Any) -> Tensor:
    """A sharded tensor put together (a collective); any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _share_of(whole: Tensor, like: Any) -> Any:
    if not hasattr(like, "full_tensor"):
        return whole.clone()
    from torch.distributed.tensor import distribute_tensor

    # Every rank has read the same file, so nothing needs to be sent.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _shard(root: Any, model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Else bf16 products would be summed in bf16, where every rank beyond the second adds a rounding.
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # Resharding the root too: its parameters are read between a forward and the next.
    fully_shard(root, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in root.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _silence_dropout(model: Any) -> None:
    module: Any
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            setattr(module, "p", 0.0)  # noqa: B010 - the stubs know no such attribute once narrowed
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010
