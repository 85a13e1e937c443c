"""Of ``test_checkpoint_kills.py``, one of two ranks: goes on from what is there, takes steps and writes a checkpoint of each, and says what it
has come to.  It is told which one by the variables of a launcher of torch programs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rose.train import checkpoint as checkpoints
from rose.train.batch import in_order, share_of
from rose.train.trainer import TorchTrainer
from tests.train.fuse import Fuse
from tests.train.writer_main import PARAMS, samples

NUM_STEPS = 3
KILLED_AT = 2
"""Steps behind the weights of the checkpoint that is killed."""


def main(model_path: Path, directory: Path, *, in_background: bool, at: str) -> None:
    """``at``: see :class:`Fuse`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, fuse = dist.get_rank(), Fuse(at)
    trainer = TorchTrainer(model_path, PARAMS)
    found, passed_over = checkpoints.load_latest(directory)
    attempt = 1 + checkpoints.latest_attempt(directory)
    if found is not None:
        trainer.restore(found)
    ids = [] if found is None else found.consumed_ids
    print(json.dumps({"from": trainer.step_index, "ids": ids, "passed_over": passed_over}), flush=True)
    dist.barrier()  # all have looked before anyone writes
    for step in range(trainer.step_index, NUM_STEPS):
        batch = in_order(samples(step))
        trainer.step(share_of(batch, rank, 2) if rank else batch)
        consumed = {one: (f"t{one}",) for one in range(step + 1)}
        fuse.is_lit = step + 1 == KILLED_AT
        if in_background:
            trainer.begin_save(directory, attempt=attempt, version=step + 1, consumed=consumed, keep=1)
            trainer.finish_save()
        else:
            trainer.save(directory, attempt=attempt, version=step + 1, consumed=consumed, keep=1)
        fuse.is_lit = False
        print(json.dumps({"durable": step + 1}), flush=True)
    print(json.dumps({"num_events": fuse.num_seen}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), in_background=sys.argv[3] == "background", at=sys.argv[4])
    os._exit(0)  # gloo's threads may abort an interpreter that ends
