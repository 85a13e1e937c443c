"""Publish Hugging Face's names from Megatron's tensors: each rank its own, nothing gathered, nothing copied.

    rose tokens tokens.toml
    export ROSE_TOKEN_FILE=$PWD/tokens.toml
    rose relay --directory /dev/shm/weights --no-fsync &
    torchrun --nproc-per-node 8 examples/megatron_weights.py http://127.0.0.1:8470 --tp 2 --pp 2

What Megatron Core holds is not what the checkpoint has: queries, keys and values are one matrix, interleaved by group of key-value
heads; gate and up are one; tensor parallelism cuts rows or columns; a stage numbers its layers from 0, and an expert-parallel rank
its experts; the vocabulary is padded.  :func:`checkpoint_tensors` says of each tensor where it belongs, by views.  Take it with your
own sizes, ``dict(model.named_parameters())`` and a :class:`Place` out of ``megatron.core.parallel_state``; here the tensors are
made by the program itself: a decoder whose first layer is dense and whose others have experts.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rose.auth import Tokens
from rose.weights.publisher import WeightPublisher
from rose.weights.ranks import TorchRanks
from rose.weights.source import Shard
from rose.weights.stores import trainer_store

LAYERS, HIDDEN, INNER, EXPERTS = 4, 32, 48, 4
HEADS, KV_HEADS, HEAD_SIZE = 8, 4, 8
VOCAB, PADDED = 250, 256
DECAY = 1 - 1e-4
"""What a step of this toy's training multiplies every weight with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Of this rank: in its tensor-parallel group, the pipeline, its expert-parallel group; and their sizes."""

    tp: int
    pp: int
    ep: int
    tp_size: int
    pp_size: int
    ep_size: int

    def whole(self, tensor: torch.Tensor, dim: int = 0) -> Shard:
        """A matrix that tensor parallelism cuts along ``dim``."""
        shape, offset = list(tensor.shape), [0, 0]
        offset[dim] = self.tp * shape[dim]
        shape[dim] *= self.tp_size
        return Shard(tensor, tuple(shape), tuple(offset))


def qkv(fused: torch.Tensor, layer: str, groups: range) -> dict[str, list[Shard]]:
    """Queries, keys and values of the groups that a rank has: [groups * (heads per group + 2) * head size, hidden]."""
    table: dict[str, list[Shard]] = {}
    per_group, row = HEADS // KV_HEADS, 0
    for g in groups:
        for name, heads, first, count in (
            ("q_proj", HEADS, g * per_group, per_group),
            ("k_proj", KV_HEADS, g, 1),
            ("v_proj", KV_HEADS, g, 1),
        ):
            rows = count * HEAD_SIZE
            part = Shard(fused[row : row + rows], (heads * HEAD_SIZE, HIDDEN), (first * HEAD_SIZE, 0))
            table.setdefault(f"{layer}.self_attn.{name}.weight", []).append(part)
            row += rows
    return table


def checkpoint_tensors(held: Mapping[str, torch.Tensor], at: Place) -> dict[str, Any]:
    """What a rank holds, by Megatron Core's names, as parts of the checkpoint's tensors."""
    table: dict[str, Any] = {}
    for name, tensor in held.items():
        match name.split("."):
            case ["embedding", *_]:
                table["model.embed_tokens.weight"] = vocabulary(tensor, at)
            case ["output_layer", _]:
                table["lm_head.weight"] = vocabulary(tensor, at)
            case ["decoder", "final_layernorm", _]:
                table["model.norm.weight"] = tensor
            case ["decoder", "layers", number, *rest]:
                layer = at.pp * (LAYERS // at.pp_size) + int(number)
                table |= of_layer(f"model.layers.{layer}", rest, tensor, at)
            case _:
                raise ValueError(f"{name} has no place in the checkpoint")
    return table


def of_layer(layer: str, name: list[str], tensor: torch.Tensor, at: Place) -> dict[str, Any]:
    match name:
        case ["self_attention", "linear_qkv", "layer_norm_weight"]:
            return {f"{layer}.input_layernorm.weight": tensor}
        case ["self_attention", "linear_qkv", "weight"]:
            count = KV_HEADS // at.tp_size
            return qkv(tensor, layer, range(at.tp * count, (at.tp + 1) * count))
        case ["self_attention", ("q_layernorm" | "k_layernorm") as norm, "weight"]:
            return {f"{layer}.self_attn.{norm[0]}_norm.weight": tensor}
        case ["self_attention", "linear_proj", "weight"]:
            return {f"{layer}.self_attn.o_proj.weight": at.whole(tensor, 1)}
        case ["mlp", "linear_fc1", "layer_norm_weight"] | ["pre_mlp_layernorm", "weight"]:
            return {f"{layer}.post_attention_layernorm.weight": tensor}
        case ["mlp", "router", "weight"]:
            return {f"{layer}.mlp.gate.weight": tensor}
        case ["mlp", ("linear_fc1" | "linear_fc2") as part, "weight"]:
            return mlp(f"{layer}.mlp", part, tensor, at)
        case ["mlp", "experts", part, weight]:  # weight0, weight1, ...: those of this rank
            expert = at.ep * (EXPERTS // at.ep_size) + int(weight.removeprefix("weight"))
            return mlp(f"{layer}.mlp.experts.{expert}", part, tensor, at)
    raise ValueError(f"{'.'.join(name)} has no place in {layer}")


def mlp(prefix: str, part: str, tensor: torch.Tensor, at: Place) -> dict[str, Any]:
    """``linear_fc1`` is a rank's rows of gate over its rows of up."""
    if part == "linear_fc2":
        return {f"{prefix}.down_proj.weight": at.whole(tensor, 1)}
    gate, up = tensor.chunk(2)
    return {f"{prefix}.gate_proj.weight": at.whole(gate), f"{prefix}.up_proj.weight": at.whole(up)}


def vocabulary(tensor: torch.Tensor, at: Place) -> Shard:
    """Without the rows that pad it."""
    first = at.tp * tensor.shape[0]
    return Shard(tensor[: max(0, VOCAB - first)], (VOCAB, HIDDEN), (min(first, VOCAB), 0))


# -- the toy -----------------------------------------------------------------------------------------


def made(at: Place) -> dict[str, torch.Tensor]:
    """What Megatron Core would hold on this rank, with the checkpoint loaded into it."""
    tp, layers = at.tp_size, LAYERS // at.pp_size
    shapes: dict[str, tuple[int, ...]] = {}
    if at.pp == 0:
        shapes["embedding.word_embeddings.weight"] = (PADDED // tp, HIDDEN)
    for number in range(layers):
        layer = f"decoder.layers.{number}"
        shapes[f"{layer}.self_attention.linear_qkv.layer_norm_weight"] = (HIDDEN,)
        shapes[f"{layer}.self_attention.linear_qkv.weight"] = (
            (HEADS + 2 * KV_HEADS) * HEAD_SIZE // tp,
            HIDDEN,
        )
        for norm in ("q_layernorm", "k_layernorm"):
            shapes[f"{layer}.self_attention.{norm}.weight"] = (HEAD_SIZE,)
        shapes[f"{layer}.self_attention.linear_proj.weight"] = (HIDDEN, HEADS * HEAD_SIZE // tp)
        is_dense = at.pp * layers + number == 0
        if is_dense:
            shapes[f"{layer}.mlp.linear_fc1.layer_norm_weight"] = (HIDDEN,)
        else:
            shapes[f"{layer}.pre_mlp_layernorm.weight"] = (HIDDEN,)
            shapes[f"{layer}.mlp.router.weight"] = (EXPERTS, HIDDEN)
        for end in (
            ("mlp.{}.weight",)
            if is_dense
            else (f"mlp.experts.{{}}.weight{n}" for n in range(EXPERTS // at.ep_size))
        ):
            shapes[f"{layer}.{end.format('linear_fc1')}"] = (2 * INNER // tp, HIDDEN)
            shapes[f"{layer}.{end.format('linear_fc2')}"] = (HIDDEN, INNER // tp)
    if at.pp == at.pp_size - 1:
        shapes["decoder.final_layernorm.weight"] = (HIDDEN,)
        shapes["output_layer.weight"] = (PADDED // tp, HIDDEN)
    held = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, parts in checkpoint_tensors(held, at).items():
        for part in parts if isinstance(parts, list) else [parts]:
            if isinstance(part, Shard):
                where = [slice(o, o + n) for o, n in zip(part.offset, part.tensor.shape, strict=True)]
                part.tensor.copy_(initial(name, part.shape)[tuple(where)])
            else:
                part.copy_(initial(name, tuple(part.shape)))
    return held


def initial(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of the checkpoint: random, and the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", help="where versions go")
    parser.add_argument("--tp", type=int, default=2, help="ranks of a tensor-parallel group")
    parser.add_argument(
        "--pp", type=int, default=2, help="stages of the pipeline; what is left is expert parallel"
    )
    parser.add_argument("--run-id", default="example", help="name of this lineage of weights")
    parser.add_argument("--attempt", type=int, default=1, help="one more at every restart of the trainer")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--unsigned", action="store_true", help="for a store that nobody else can write to")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ep = dist.get_rank(), dist.get_world_size() // args.tp // args.pp
    if args.tp * args.pp * ep != dist.get_world_size():
        parser.error(f"--tp {args.tp} and --pp {args.pp} do not divide {dist.get_world_size()} ranks")
    at = Place(  # as Megatron numbers them: tensor parallel ranks beside each other, stages farthest apart
        tp=rank % args.tp,
        ep=rank // args.tp % ep,
        pp=rank // args.tp // ep,
        tp_size=args.tp,
        pp_size=args.pp,
        ep_size=ep,
    )
    signs = not args.unsigned and rank == 0  # the others need no key
    needs = ["publish"] if args.store.startswith("http") else []
    needs += ["publish_key"] if signs else []
    store = trainer_store(args.store, Tokens.load(None, needs) if needs else None, signs=signs)

    held = made(at)
    publisher = WeightPublisher(
        lambda: checkpoint_tensors(held, at), store, args.run_id, args.attempt, ranks=TorchRanks()
    )
    for step in range(args.steps + 1):
        for tensor in held.values() if step else ():
            tensor.mul_(DECAY)
        report = publisher.publish(step)
        if rank == 0:
            print(f"{report.version} {report.kind} {report.bytes_sent} bytes, {report.density:.2%} changed")
    publisher.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
