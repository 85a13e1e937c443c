"""What `salt`, `reset` and `keep` at a commit mean for log-probs: measured on a real engine and real steps of RL.

One vLLM engine goes from one checkpoint of the RL run (``rl_checkpoints.py``) to a later one and back, with each
setting in turn.  Every log-prob it gave after a commit is compared with that of the same tokens under the same weights
and nothing cached:

* ``cached``: turns that begin after the commit, with a prompt that the engine has cached from before it;
* ``in_flight``: turns that sample while the commit happens, the tokens after it;
* ``floor``: nothing cached and no commit: decoding token by token against one prefill.

    python benchmarks/weight_transfer/weights_kv.py --rl FOLDER [--json FILE]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.report import Report
from benchmarks.weight_transfer.rl_checkpoints import MODEL, problem
from rose.evaluation.statistics import percentile
from tests.engine_launcher import EngineServer
from tests.plugin.weights_kit import Tensors, make_update
from tests.plugin.weights_server import dedicated
from tests.tiny_model import write_tokenizer, write_weights

MODES = ("salt", "reset", "keep")
ARGS = ("--max-num-seqs=16", "--max-model-len=128", "--block-size=32", f"--kv-cache-memory-bytes={256 << 20}")
NUM_TURNS = 8
TURN_TOKENS = 100
Turn = dict[str, Any]


def sample(
    server: EngineServer, prompt: list[int], num_tokens: int, seed: int, salt: str | None = None
) -> Turn:
    """A turn at temperature 1: tokens, their log-probs, who sampled them, and what the answer says of its context."""
    sampling = {
        "max_tokens": num_tokens, "temperature": 1.0, "seed": seed, "ignore_eos": True, "logprobs": 0
    }  # fmt: skip
    body: dict[str, Any] = {"token_ids": prompt, "sampling_params": sampling}
    answer = server.post("/inference/v1/generate", body | ({"cache_salt": salt} if salt else {}))
    answer.raise_for_status()
    found = answer.json()
    (choice,) = found["choices"]
    return {
        "prompt": prompt,
        "tokens": choice["token_ids"],
        "logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
        "spans": choice["weight_versions"],
        **found["kv_transfer_params"]["rose"],
    }


def off(server: EngineServer, turn: Turn, begin: int) -> list[float]:
    """``|log-prob - exact|`` of the tokens from ``begin``; exact: one prefill without a cache, the weights in place."""
    tokens = turn["prompt"] + turn["tokens"]
    sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    answer = server.post("/inference/v1/generate", {"token_ids": tokens, "sampling_params": sampling})
    answer.raise_for_status()
    exact = answer.json()["prompt_logprobs"][len(turn["prompt"]) :]
    pairs = zip(turn["tokens"], turn["logprobs"], exact, strict=True)
    return [abs(mine - entry[str(token)]["logprob"]) for token, mine, entry in pairs][begin:]


class Pair:
    """An engine that goes to and fro between two checkpoints."""

    def __init__(self, server: EngineServer, folder: Path, states: tuple[Tensors, Tensors]) -> None:
        self.server, self._folder, self._states = server, folder, states
        self.number = 0
        self.pauses: dict[str, list[float]] = {mode: [] for mode in MODES}

    def stage(self) -> dict[str, int]:
        old, new = self._states[self.number % 2], self._states[(self.number + 1) % 2]
        base = "0.0" if self.number == 0 else f"1.{self.number}"
        self.number += 1
        path = make_update(self._folder / "update", old, new, base=base, target=f"1.{self.number}")
        body = {"attempt": 1, "version": self.number}
        self.server.post("/rose/weights/stage", body | {"path": str(path)}).raise_for_status()
        return body

    def commit(self, body: dict[str, int], kv: str, *, note: bool = True) -> None:
        answer = self.server.post("/rose/weights/commit", body | {"kv": kv})
        answer.raise_for_status()
        assert answer.json()["kv"] == kv
        if note:
            self.pauses[kv].append(answer.json()["pause_s"])


def running(server: EngineServer) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def prompts_of(rng: np.random.Generator) -> list[int]:
    """Two solved problems and a third: long enough to be cached."""
    (first, answer), (second, other), (third, _) = problem(rng), problem(rng), problem(rng)
    return [*first, *answer, *second, *other, *third]


def over_a_commit(pair: Pair, kv: str, jobs: Sequence[tuple[list[int], int, int]]) -> list[Turn]:
    """The turns of ``(prompt, tokens, seed)``, all under way when the pair's next checkpoint is committed."""
    body = pair.stage()
    turns: list[Turn] = []
    threads = [
        threading.Thread(
            target=lambda prompt=prompt, count=count, seed=seed: turns.append(
                sample(pair.server, prompt, count, seed)
            )
        )
        for prompt, count, seed in jobs
    ]
    for thread in threads:
        thread.start()
    while running(pair.server) < len(jobs) and any(thread.is_alive() for thread in threads):
        pass
    pair.commit(body, kv)
    for thread in threads:
        thread.join()
    return turns


def round_of(pair: Pair, kv: str, rng: np.random.Generator) -> dict[str, list[float] | int]:
    """One commit with turns in flight, and turns over a cached prompt after it."""
    server, prompts = pair.server, [prompts_of(rng) for _ in range(NUM_TURNS)]
    seeds = [int(seed) for seed in rng.integers(1 << 30, size=2 * NUM_TURNS)]
    for prompt in prompts:
        sample(server, prompt, 1, 0)
    turns = over_a_commit(
        pair,
        kv,
        [(prompt[-16:], TURN_TOKENS, seed) for seed, prompt in zip(seeds[:NUM_TURNS], prompts, strict=True)],
    )
    later = [
        sample(server, prompt, 12, seed) for prompt, seed in zip(prompts, seeds[NUM_TURNS:], strict=True)
    ]
    alone = [sample(server, prompt, 12, 1, salt=f"floor {pair.number}") for prompt in prompts[:2]]
    cut = [turn for turn in turns if len(turn["spans"]) == 2]
    return {
        "in_flight": [each for turn in cut for each in off(server, turn, turn["spans"][1]["start"])],
        "in_flight_turns": len(cut),
        "in_flight_marked": sum(turn["kv_mixed"] for turn in cut),
        "cached": [each for turn in later for each in off(server, turn, 0)],
        "cached_turns": len(later),
        "cached_marked": sum(turn["kv_mixed"] for turn in later),
        "floor": [each for turn in alone for each in off(server, turn, 0)],
    }


def measure(
    report: Report, base: Path, pair: tuple[Path, Path], rounds: int
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """(figures of each mode, median pause of each mode in seconds)."""
    rng = np.random.default_rng(1)
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="rose-weights-kv-") as name:
        folder = Path(name)
        shutil.copytree(base, folder / "model")
        write_tokenizer(folder / "model", int(MODEL["vocab_size"]))
        shapes = load_file(folder / "model" / "model.safetensors")
        first, second = (
            {n: bits.reshape(shapes[n].shape).view(torch.bfloat16) for n, bits in load_file(path).items()}
            for path in pair
        )
        write_weights(folder / "model", first)
        with dedicated(folder / "model", env={"ROSE_WEIGHTS_DIR": name}, args=ARGS) as server:
            both = Pair(server, folder, (first, second))
            for number in range(rounds):
                for mode in MODES:  # to and fro, so each mode sees both directions
                    found[mode].append(round_of(both, mode, rng))
                    # What `keep` left behind is gone before the next.
                    both.commit(both.stage(), "reset", note=False)
                report.progress("rounds", number + 1, rounds)
            pauses = {mode: statistics.median(both.pauses[mode]) for mode in MODES}
    table: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        table[mode] = {}
        for kind in ("cached", "in_flight", "floor"):
            values = [each for row in found[mode] for each in row[kind]]
            table[mode] |= {
                f"{kind}_mean": statistics.fmean(values) if values else None,
                f"{kind}_p99": percentile(values, 0.99) if values else None,
                f"{kind}_max": max(values, default=None),
                f"{kind}_tokens": len(values),
            }
        for kind in ("cached", "in_flight"):
            for what in ("turns", "marked"):
                table[mode][f"{kind}_{what}"] = sum(row[f"{kind}_{what}"] for row in found[mode])
    return table, pauses


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rl", type=Path, required=True, help="folder of rl_checkpoints.py")
    parser.add_argument("--lr", default="5e-06")
    parser.add_argument("--steps", type=int, nargs=2, default=(149, 150), help="checkpoints to go between")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("weights_kv")
    first, second = (args.rl / f"lr-{args.lr}" / f"step-{step:05d}.safetensors" for step in args.steps)
    table, pauses = measure(report, args.rl / "base", (first, second), args.rounds)
    kinds = ("cached", "in_flight", "floor")
    report.table(
        ("kv", *(f"{kind} {what}" for kind in kinds for what in ("mean", "max")), "marked mixed"),
        [
            (
                mode,
                *(table[mode][f"{kind}_{what}"] for kind in kinds for what in ("mean", "max")),
                f"{table[mode]['cached_marked']} of {table[mode]['cached_turns']}, "
                f"{table[mode]['in_flight_marked']} of {table[mode]['in_flight_turns']}",
            )
            for mode in MODES
        ],
        title=f"|log-prob - exact|, nats; lr {args.lr}, steps {args.steps[0]} and {args.steps[1]}",
    )
    summary = {"lr": float(args.lr), "steps_apart": args.steps[1] - args.steps[0]}
    summary |= {f"{mode}_{key}": value for mode in MODES for key, value in table[mode].items()}
    summary |= {f"{mode}_pause_ms": pauses[mode] * 1e3 for mode in MODES}
    report.finish(summary, {"steps": list(args.steps), "rounds": args.rounds}, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
