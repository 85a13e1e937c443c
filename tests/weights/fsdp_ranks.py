"""Trainer ranks as real processes: torch.distributed over gloo, FSDP2 on the CPU, publishing into a folder.

Run by ``test_fsdp.py``: ``python -m tests.weights.fsdp_ranks FOLDER``.  Four processes are forked from one that has
loaded torch; in turn one, two and four of them train the same small model with another division, publish every
step, and write down what the whole model was (which training never does) for the test to compare.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rose.weights.file_store import FileStore
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.ranks import TorchRanks

WORLD = 4
DEADLINE_S = 100.0
VERSIONS = 3
CASES: dict[str, tuple[list[int], tuple[int, ...]]] = {
    # name: (ranks, shape of the mesh)
    "fsdp-1": ([0], (1,)),
    "fsdp-2": ([0, 1], (2,)),
    "fsdp-4": ([0, 1, 2, 3], (4,)),
    "hsdp-2x2": ([0, 1, 2, 3], (2, 2)),
    "fsdp-2-tp-2": ([0, 1, 2, 3], (2, 2)),
}


class Block(torch.nn.Module):
    """Awkward on purpose: 7 and 30 rows over 4 ranks, a norm, tied embeddings, a column-cut matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(30, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, 24, bias=False)
        self.down = torch.nn.Linear(24, 16, bias=False)
        self.odd = torch.nn.Linear(16, 7)
        self.head = torch.nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight

    _tied_weights_keys = ("head.weight",)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return self.head(hidden).square().mean() + self.odd(hidden).square().mean()


def build(case: str, mesh: DeviceMesh) -> Block:
    torch.manual_seed(7)
    model = Block()
    if case == "fsdp-2-tp-2":
        tp = mesh["tp"]
        for linear, dim in ((model.up, 0), (model.down, 1)):
            linear.weight = torch.nn.Parameter(distribute_tensor(linear.weight.detach(), tp, [Shard(dim)]))
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=mesh)
    return model


def step(model: Block, number: int) -> None:
    """An optimizer step with gradients that are the same however the model is cut."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * number + index)
        whole = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            whole = _cut_like(whole, parameter)
        parameter.grad = whole
    optimizer.step()


def _cut_like(whole: torch.Tensor, parameter: DTensor) -> Any:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    local = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].contiguous()
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def run_case(folder: Path, case: str, rank: int) -> None:
    members, shape = CASES[case]
    names = ("dp", "tp") if case == "fsdp-2-tp-2" else ("replicate", "shard")[-len(shape) :]
    group = dist.new_group(members, backend="gloo")  # every process makes every group
    mesh = DeviceMesh("cpu", torch.tensor(members).reshape(shape), mesh_dim_names=names)
    if rank not in members:
        return
    model = build(case, mesh)
    publisher = WeightPublisher(
        model,
        FileStore(folder / "store", durable=False),
        case,
        1,
        WeightsParams(fragment_elements=65_536, bucket_bytes=1 << 10),
        ranks=TorchRanks(group),
    )
    for version in range(VERSIONS):
        if version:
            step(model, version)
        publish = publisher.publish if version != 1 else lambda v: publisher.publish_async(v).result()
        report = publish(version)
        whole = {
            name: _full(value).to(torch.bfloat16).contiguous().view(torch.int16)
            for name, value in model.state_dict().items()
            if name != "head.weight"
        }
        if rank == members[0]:
            save_file(whole, str(folder / f"{case}-{version}.safetensors"))
        (folder / f"{case}-{version}-rank{rank}.txt").write_text(
            f"{publisher._baseline.num_elements} {report.num_elements} {report.kind}"
        )
    publisher.close()


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    children: list[int] = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            code = 1
            faulthandler.dump_traceback_later(
                DEADLINE_S, exit=True
            )  # says where, and leaves no process behind
            try:
                dist.init_process_group(
                    "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
                )
                for case in CASES:
                    run_case(folder, case, rank)
                    dist.barrier()
                dist.destroy_process_group()
                code = 0
            except BaseException:  # noqa: BLE001 - the last frame of a process: print and end
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    failed = 0
    for _ in children:
        pid, status = os.wait()
        if status and not failed:
            failed = 1
            for other in children:
                if other != pid:
                    try:
                        os.kill(other, 9)
                    except ProcessLookupError:
                        pass
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
