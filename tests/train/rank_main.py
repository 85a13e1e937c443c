"""One rank of ``test_ranks.py``: two steps, then gradients of each update, weights, reports and a checkpoint in files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rose.train import checkpoint as checkpoints
from rose.train.adapter import LoraParams
from rose.train.batch import in_order, samples_of, share_of
from rose.train.guard import GuardParams
from rose.train.loss import LossParams
from rose.train.model import whole_of
from rose.train.trainer import TorchTrainer, TrainerParams
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.ranks import TorchRanks
from rose.weights.stores import open_store
from tests.train.traces import random_batch


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    sharded: Any = tensor.detach()
    return sharded.to_local() if hasattr(sharded, "to_local") else sharded


class RecordingTrainer(TorchTrainer):
    def __init__(self, model_path: Path, params: TrainerParams) -> None:
        super().__init__(model_path, params)
        self.gradients: dict[str, torch.Tensor] = {}
        self.num_updates = 0

    def _update(self, limit: float) -> float:
        for name, tensor in self._policy.gradients().items():
            self.gradients[f"{self.num_updates}/{name}"] = tensor.clone()
        self.num_updates += 1
        return super()._update(limit)


def run_steps(
    model_path: Path,
    out: Path,
    *,
    resume: Path | None = None,
    num_steps: int = 2,
    in_background: bool = False,
    lora: bool = False,
    one_update: bool = False,
    streamed: bool = False,
    packing: bool = False,
) -> None:
    # Minibatches of 5 over ranks: unequal shares, one of them empty in the smallest part; masters are compared, so the
    # rounding to bf16 is left out: it turns a last bit into a whole step.
    params = TrainerParams(
        learning_rate=1e-3,
        minibatch_sequences=64 if one_update else 5,
        num_epochs=1,
        max_part_tokens=200,
        packing=packing,
        policy_dtype="float32",
        loss=LossParams(kl_weight=0.02, aggregation="sequence", entropy_weight=0.01),
        # Of whole models one that nothing reaches, which only has to be measured alike; of adapters one that takes updates back.
        guard=GuardParams(kl_target=2e-4 if lora else 100.0, adapt_rate=True),
        streamed="gradients" if streamed else "off",
        lora=LoraParams(rank=3, alpha=6.0) if lora else None,
    )
    trainer = RecordingTrainer(model_path, params)
    if resume is not None:
        found, _ = checkpoints.load_latest(resume / "checkpoints")
        assert found is not None
        trainer.restore(found)
    reports = []
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for seed in range(1, 1 + num_steps):
        batch = [
            sample
            for one in random_batch(seed, num_groups=2, group_size=4)
            for sample in samples_of(one, vocab_size=trainer.vocab_size, max_tokens=trainer.max_tokens)
        ]
        groups = {sample.group_id: None for sample in reversed(batch)} if streamed else {}
        for group_id in groups:
            group = in_order(sample for sample in batch if sample.group_id == group_id)
            trainer.begin(share_of(group, rank, world_size) if rank else group)
        # As the actors are told: the first rank has all of it, the others their share.
        batch = share_of(in_order(batch), rank, world_size) if rank else batch
        reports.append(trainer.step(batch).to_dict())
    consumed = {0: ("t1", "t2")}
    told: dict[str, Any] = {"attempt": 1, "version": trainer.step_index, "consumed": consumed, "keep": 3}
    if in_background:
        trainer.begin_save(out / "checkpoints", **told)
        trainer.step(batch)  # nothing of it may be in the checkpoint
        trainer.finish_save()
    else:
        trainer.save(out / "checkpoints", **told)
    trainer.export(out / "model")
    publisher = WeightPublisher(
        trainer.module,
        open_store(str(out / "store")),
        "run",
        1,
        WeightsParams(cast="F32"),
        ranks=TorchRanks() if dist.is_initialized() else None,
    )
    published = publisher.publish(trainer.step_index)
    local = sum(local_part(tensor).numel() for tensor in trainer.module.parameters())
    weights = {
        name: whole_of(tensor.detach()).contiguous() for name, tensor in trainer.module.named_parameters()
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_file(trainer.gradients, out / "gradients.safetensors")
        save_file(weights, out / "weights.safetensors")
        (out / "reports.json").write_text(json.dumps(reports))
        (out / "published.json").write_text(json.dumps(dict(published.state)))
    (out / f"held-{rank}.json").write_text(json.dumps(local))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    run_steps(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        resume=Path(sys.argv[3]) if len(sys.argv) > 3 and sys.argv[3] else None,
        num_steps=int(sys.argv[4]) if len(sys.argv) > 4 else 2,
        in_background="in_background" in sys.argv,
        lora="lora" in sys.argv,
        one_update="streamed" in sys.argv,
        streamed="streamed" in sys.argv,
        packing="packed" in sys.argv,
    )
    if dist.is_initialized():
        dist.destroy_process_group()
    # Gloo's own threads may still hold tensors, and freeing one while the interpreter ends aborts the process
    # (pytorch pull request 179291): everything is in files, so leave without that ending.
    os._exit(0)
