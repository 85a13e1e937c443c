"""Publish weights from any trainer, and follow them: the whole of what a training script needs.

    rose tokens tokens.toml
    export ROSE_TOKEN_FILE=$PWD/tokens.toml
    rose relay --directory /dev/shm/weights --no-fsync &
    python examples/publish_weights.py http://127.0.0.1:8470

Any store will do: a folder, ``s3://bucket/path``, a relay.  Versions are signed with ``tokens.key``, which ``rose tokens`` made
beside the token file, and the reader takes nothing that its ``public_key`` did not sign; ``--unsigned`` goes without both, where nobody
else can write to the store.  Started with ``torchrun --nproc-per-node N``, the model is
cut by FSDP2 and every rank publishes its own shard; nothing else changes.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist

from rose.auth import Tokens
from rose.signatures import PublicKeys
from rose.weights.params import WeightsParams
from rose.weights.publisher import PublishReport, WeightPublisher
from rose.weights.ranks import TorchRanks
from rose.weights.stores import open_store, trainer_store
from rose.weights.subscriber import WeightSubscriber


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", help="where versions go")
    parser.add_argument("--run-id", default="example", help="name of this lineage of weights")
    parser.add_argument("--attempt", type=int, default=1, help="one more at every restart of the trainer")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--unsigned", action="store_true", help="for a store that nobody else can write to")
    args = parser.parse_args()
    distributed = "RANK" in os.environ
    needs = ["publish"] if args.store.startswith("http") else []
    signs = not args.unsigned and int(os.environ.get("RANK", "0")) == 0  # the others need no key
    needs += ["public_key", "publish_key"] if signs else []
    known = Tokens.load(None, needs) if needs else None

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(512, 64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 512)
    )
    if distributed:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-6)
    publisher = WeightPublisher(  # masters in fp32, engines in bf16: `cast` is what engines compute in
        model,
        trainer_store(args.store, known, signs=signs),
        args.run_id,
        args.attempt,
        WeightsParams(cast="BF16", anchor_every=20),
        ranks=TorchRanks() if distributed else None,
    )

    tokens = torch.randint(0, 512, (8, 32))
    report = publisher.publish(0)
    show(report)
    for step in range(1, args.steps + 1):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report = publisher.publish_async(
            step, step=step, lr=5e-6
        ).result()  # or let it run beside the next step
        show(report)
    publisher.close()

    if not distributed or dist.get_rank() == 0:  # what a node does with it
        with tempfile.TemporaryDirectory() as folder:
            trusted = PublicKeys.parse(known.public_key) if known is not None and signs else None
            store = open_store(args.store, "" if known is None else known.publish, trusted=trusted)
            subscriber = WeightSubscriber(store, args.run_id, folder)
            version = subscriber.poll(timeout_s=10)
            same = subscriber.state() == dict(report.state)
            print(f"a reader is at {version}; its weights are {'bit-identical' if same else 'DIFFERENT'}")
            subscriber.close()
    if distributed:
        dist.barrier()
        dist.destroy_process_group()


def show(report: PublishReport) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{report.version} {report.kind:<6} {report.bytes_sent:>9} bytes, {report.density:.2%} changed")


if __name__ == "__main__":
    main()
