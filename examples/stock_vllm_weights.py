"""A trainer that publishes to a stock ``vllm serve``: ROSE's weight transfer and nothing else of ROSE.

    rose tokens tokens.toml
    rose relay --directory /dev/shm/weights --token-file tokens.toml --no-fsync &
    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "rose"}' &
    python examples/stock_vllm_weights.py MODEL --token-file tokens.toml --directory ~/.cache/rose-copy

Here the trainer is noise on the checkpoint's own tensors.  Yours gives its module, or a function that returns its tensors by the
checkpoint's names (``docs/weights.md``); the four calls of ``update`` stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file

from rose.auth import Tokens
from rose.weights.publisher import WeightPublisher
from rose.weights.stores import trainer_store


def post(server: str, path: str, body: object = None, **query: str) -> None:
    answer = httpx.post(server + path, json=body, params=query, timeout=600)
    if answer.is_error:
        raise SystemExit(f"{path}: {answer.text}")


def update(server: str, run: str, attempt: int, version: int) -> None:
    """Bring the server to a version: all of it or, with the reason, nothing."""
    post(server, "/pause", mode="wait")  # requests in flight end first, and cached prefixes are forgotten
    try:
        post(server, "/start_weight_update")
        post(server, "/update_weights", {"update_info": {"attempt": attempt, "version": version}})
        post(server, "/finish_weight_update", {"weight_version": f"{run}@{attempt}.{version}"})
    finally:
        post(server, "/resume")


def main() -> None:
    parser = argparse.ArgumentParser(description="publish to a stock vLLM server")
    parser.add_argument("model", type=Path, help="folder of the checkpoint that the server was started with")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--store", default="http://127.0.0.1:8470")
    parser.add_argument("--token-file", type=Path, required=True, help="tokens.key lies beside it")
    parser.add_argument("--directory", type=Path, required=True, help="on the server's machine, for its copy")
    parser.add_argument("--run", default="example")
    parser.add_argument("--attempt", type=int, default=1, help="one more at every restart of the trainer")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--save", type=Path, help="write the last weights here")
    args = parser.parse_args()

    torch.manual_seed(0)
    tokens = Tokens.load(args.token_file, ["publish", "public_key", "publish_key"])
    store = trainer_store(args.store, tokens)
    masters = {name: each.float() for name, each in load_file(args.model / "model.safetensors").items()}
    publisher = WeightPublisher(lambda: masters, store, args.run, args.attempt)  # fp32 here, bf16 there
    info = {"store": args.store, "run": args.run, "public_key": tokens.public_key}
    files = {"directory": str(args.directory.resolve()), "token_file": str(args.token_file.resolve())}
    post(args.server, "/init_weight_transfer_engine", {"init_info": info | files})
    for step in range(args.steps + 1):
        for each in masters.values() if step else ():  # a step of training: every twentieth weight
            each += torch.randn(each.shape) * (torch.rand(each.shape) < 0.05)
        report = publisher.publish(step)
        update(args.server, args.run, args.attempt, step)
        print(f"{report.version} {report.kind} {report.bytes_sent} bytes, {report.density:.1%} changed")
    publisher.close()
    if args.save:
        save_file({name: each.bfloat16() for name, each in masters.items()}, args.save)


if __name__ == "__main__":
    main()
