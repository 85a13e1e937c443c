"""A model of real size takes real steps with our trainer: seconds and memory of each rank.

    python benchmarks/training/real_size.py --json FILE                               # Qwen3-0.6B's shape, random weights: 16 GB, many minutes
    python benchmarks/training/real_size.py --shape tiny --steps 1 --arms 1,2,lora,trl    # to see that it runs
    python benchmarks/training/real_size.py --shape 256x4 --steps 7 --arms packing --spread 10 --json FILE    # packed or padded?

Arms: ``1`` and ``2`` ranks that train the whole model; ``lora``: one rank that trains adapters of rank 16; ``trl``: TRL's ``GRPOTrainer`` as one process, which is
handed the same sequences by its ``rollout_func`` and told to take the same parts, minibatches and precision, with its own measure of entropy and its own loss.  Each is a program of its own (one process a rank, gloo, one thread
each unless told otherwise), one after the other, on the same folder and the same batch: GRPO groups of sampled tokens with made-up log-probs and rewards, of which half are 1.  What is
timed is ``TorchTrainer.step``: proximal log-probs, then forward and backward of every minibatch, AdamW, the step guard's measure; of TRL as many of its updates, the log-probs before them included.
``packing`` is one process with three trainers that take each step in turn, the order changed every time: one that pads, one that does the same (A/A), one that packs.  All sequences
of a batch are one minibatch, in parts of the default size; ``--spread 10`` makes their lengths differ tenfold.  Its seconds are of the processor, not of the clock.

An arm that is in FILE already is not taken again.

Bar: every arm ends with finite losses and weights that moved, within the memory of the machine.  Nothing is claimed of speed.

Keys of ``packing``: ``padded_s`` (a step; median), and the median over steps of ``again_over_padded`` and ``packed_over_padded``.
Keys of the other arms: ``seconds`` (a step; median), ``tokens_per_s`` (all tokens of the batch), ``peak_bytes`` (the largest resident size of a rank, model loading included), and
``state_bytes``: what masters, moments and gradients of the largest rank come to.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from benchmarks.gpu.made_up import Sizes, made_up, timed_step, write_model
from benchmarks.gpu.models import SMALL, TINY, Shape
from benchmarks.lib.report import Report, write
from rose.proc import free_port
from rose.train.adapter import LoraParams
from rose.train.batch import MAX_PART_TOKENS
from rose.train.guard import GuardParams
from rose.train.trainer import TorchTrainer, TrainerParams

TOY = Shape(
    name="256x4", family="qwen3", hidden_size=256, intermediate_size=768, num_layers=4,
    num_heads=4, num_kv_heads=2, head_size=64, vocab_size=2048,
)  # fmt: skip
"""Small enough for many steps on a CPU."""
SHAPES: dict[str, Shape] = {shape.name: shape for shape in (SMALL, TOY, TINY)}
ARMS = {"1": 1, "2": 2, "lora": 1, "trl": 1, "packing": 1}
LORA_RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where results go")
    parser.add_argument("--shape", choices=sorted(SHAPES), default=SMALL.name)
    parser.add_argument("--arms", default="1,2,lora,trl", help="comma-separated")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--sampled", type=int, default=128, help="tokens")
    parser.add_argument("--spread", type=float, default=1.0, help="longest sequence over shortest")
    parser.add_argument("--compute", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--folder", type=Path, help="where the model is, or is made; else a temporary one")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of is not None:
        one_rank(args, args.rank_of)
        return
    arms = args.arms.split(",")
    for arm in arms:
        if arm not in ARMS:
            parser.error(f"--arms: '{arm}' is not one of {', '.join(ARMS)}")
    report, summary = Report("real_size"), dict[str, float]()
    named = {
        key: value for key, value in vars(args).items() if key not in ("json", "folder", "rank_of", "arms")
    }
    if args.json is not None and args.json.exists():
        known = json.loads(args.json.read_text())
        if known["details"]["arguments"] != named:
            parser.error(f"--json: {args.json} has results of other arguments: take another file")
        summary |= known["summary"]
    with tempfile.TemporaryDirectory(prefix="rose-real-size-") as temporary:
        args.folder = args.folder or Path(temporary) / "model"
        if not (args.folder / "model.safetensors").is_file():
            write_model(SHAPES[args.shape], args.folder)
        for arm in arms:
            if f"{arm}_seconds" not in summary and f"{arm}_padded_s" not in summary:
                summary |= {f"{arm}_{key}": value for key, value in one_arm(arm, args, report).items()}
                if args.json is not None:
                    write(args.json, "real_size", summary, {"arguments": named})
    report.finish(summary, {"arguments": named}, args.json)


def sizes_of(args: argparse.Namespace) -> Sizes:
    names = ("groups", "group_size", "prompt", "sampled", "spread")
    return Sizes(**{name: getattr(args, name) for name in names})


def one_arm(arm: str, args: argparse.Namespace, report: Report) -> dict[str, float]:
    """Run its ranks to their end; what the slowest and the largest of them told."""
    port, started_s = str(free_port()), time.monotonic()
    own = ["--folder", str(args.folder), "--rank-of", arm]
    for name in (
        "shape",
        "steps",
        "groups",
        "group_size",
        "prompt",
        "sampled",
        "spread",
        "compute",
        "threads",
    ):
        own += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    ranks = []
    for rank in range(ARMS[arm]):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ARMS[arm]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": str(args.threads),
        }
        ranks.append(
            subprocess.Popen([sys.executable, __file__, *own], env=env, stdout=subprocess.PIPE, text=True)
        )
    told: list[dict[str, Any]] = []
    try:
        for rank in ranks:
            assert rank.stdout is not None
            for line in rank.stdout:
                told.append(json.loads(line))
                print(f"{arm}: {time.monotonic() - started_s:.0f} s, {line.strip()}", flush=True)
            if rank.wait() != 0:
                raise SystemExit(f"{arm}: a rank ended with {rank.returncode}")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if arm == "packing":
        return told[-1]
    seconds = statistics.median(one["seconds"] for one in told if "seconds" in one)
    ends = [one for one in told if "peak_bytes" in one]
    num_tokens = args.groups * args.group_size * (args.prompt + args.sampled)
    return {
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "peak_bytes": max(one["peak_bytes"] for one in ends),
        "state_bytes": max(one["state_bytes"] for one in ends),
    }


def one_rank(args: argparse.Namespace, arm: str) -> None:
    torch.set_num_threads(args.threads)
    if ARMS[arm] > 1:
        dist.init_process_group("gloo")
    params = TrainerParams(
        learning_rate=1e-6,
        num_epochs=1,
        minibatch_sequences=args.group_size,
        max_part_tokens=2 * (args.prompt + args.sampled),
        compute_dtype=args.compute,
        activation_checkpointing=True,
        guard=GuardParams(kl_target=0.05),
    )
    if arm == "packing":
        compare_packing(args, params)
        return
    if arm == "trl":
        steps_of_trl(args, params)
        return
    if arm == "lora":
        params = replace(params, learning_rate=1e-4, lora=LoraParams(rank=LORA_RANK, alpha=2.0 * LORA_RANK))
    trainer = TorchTrainer(args.folder, params)
    masters = list(trainer.masters)
    before = [_local(tensor).clone() for tensor in masters[:1]]
    for step in range(args.steps):
        seconds = timed_step(trainer, made_up(sizes_of(args), trainer.vocab_size, seed=step))
        print(json.dumps({"step": step, "seconds": round(seconds, 2)}), flush=True)
    if all(torch.equal(old, _local(new)) for old, new in zip(before, masters, strict=False)):
        raise SystemExit("the weights have not moved")
    tell_memory(masters)
    os._exit(0)  # gloo's threads may abort an interpreter that ends


def tell_memory(masters: Iterable[torch.Tensor]) -> None:
    told = {
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "state_bytes": 4 * 4 * sum(_local(tensor).numel() for tensor in masters),
    }
    print(json.dumps(told), flush=True)


def steps_of_trl(args: argparse.Namespace, params: TrainerParams) -> None:
    """TRL's own trainer on the batches of :func:`made_up`: two sequences at once, a group an update, all groups a step."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # its warning that rollout_func may change
    import transformers
    import trl
    from datasets import Dataset
    from datasets.table import InMemoryTable

    trl_module: Any = trl  # its names are loaded lazily, which types do not say
    transformers.utils.logging.disable_progress_bar()
    batches = [
        made_up(sizes_of(args), SHAPES[args.shape].vocab_size, seed=step) for step in range(args.steps)
    ]
    clock: dict[str, Any] = {"step": 0, "began_s": 0.0}
    told = sys.stdout  # TRL writes there too

    def play(prompts: Sequence[Any], _: Any) -> dict[str, list[Any]]:
        clock["began_s"] = time.monotonic()
        batch = batches[clock["step"]]
        if len(prompts) != len(batch):
            raise SystemExit(f"TRL asks for {len(prompts)} completions where a step has {len(batch)}")
        return {
            "prompt_ids": [list(one.token_ids[: one.positions[0]]) for one in batch],
            "completion_ids": [list(one.token_ids[one.positions[0] :]) for one in batch],
            "logprobs": [list(one.logprobs) for one in batch],
            "paid": [one.reward for one in batch],
        }

    def pay(completions: Sequence[Any], paid: Sequence[float], **_: Any) -> Sequence[float]:
        return paid

    class Timed(transformers.TrainerCallback):
        def on_step_end(
            self, args_: transformers.TrainingArguments, state: Any, control: Any, **_: Any
        ) -> None:
            if state.global_step % args.groups == 0:
                seconds = round(time.monotonic() - clock["began_s"], 2)
                print(json.dumps({"step": clock["step"], "seconds": seconds}), file=told, flush=True)
                clock["step"] += 1

    table = InMemoryTable.from_pylist([{"prompt": f"group {one}"} for one in range(args.groups)])
    with (
        tempfile.TemporaryDirectory(prefix="rose-real-size-") as folder,
        contextlib.redirect_stdout(sys.stderr),
    ):
        trainer: Any = trl_module.GRPOTrainer(
            model=str(args.folder),
            processing_class=transformers.AutoTokenizer.from_pretrained(args.folder, padding_side="left"),
            reward_funcs=pay,
            train_dataset=Dataset(table, fingerprint="rose-made-up"),
            rollout_func=play,
            callbacks=[Timed()],
            args=trl_module.GRPOConfig(
                output_dir=folder,
                max_steps=args.steps * args.groups,
                learning_rate=params.learning_rate,
                lr_scheduler_type="constant",
                num_generations=args.group_size,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=args.group_size // 2,
                steps_per_generation=args.groups * args.group_size // 2,
                max_completion_length=args.sampled,
                beta=0.0,
                gradient_checkpointing=params.activation_checkpointing,
                model_init_kwargs={"dtype": "float32"},
                bf16=args.compute == "bfloat16",
                use_cpu=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        before = next(trainer.model.parameters()).detach().clone()
        trainer.train()
    if torch.equal(before, next(trainer.model.parameters()).detach()):
        raise SystemExit("the weights have not moved")
    tell_memory(trainer.model.parameters())


def compare_packing(args: argparse.Namespace, params: TrainerParams) -> None:
    padded = replace(
        params,
        minibatch_sequences=args.groups * args.group_size,
        max_part_tokens=MAX_PART_TOKENS,
        activation_checkpointing=False,
    )
    trainers = {
        name: TorchTrainer(args.folder, replace(padded, packing=name == "packed"))
        for name in ("padded", "again", "packed")
    }
    order, seconds = [*trainers], {name: list[float]() for name in trainers}
    for step in range(args.steps + 1):
        order.append(order.pop(0))
        batch = made_up(sizes_of(args), trainers["padded"].vocab_size, seed=step)
        for name in order:
            started_s = time.process_time()
            trainers[name].step(batch)
            if step:  # the first is for warming up
                seconds[name].append(time.process_time() - started_s)
    found = {"padded_s": round(statistics.median(seconds["padded"]), 3)}
    for name in ("again", "packed"):
        ratios = [one / base for one, base in zip(seconds[name], seconds["padded"], strict=True)]
        found[f"{name}_over_padded"] = round(statistics.median(ratios), 3)
    print(json.dumps(found), flush=True)


def _local(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


if __name__ == "__main__":
    main()
