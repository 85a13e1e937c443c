"""Make the consecutive checkpoints of a small real RL run: what the weight benchmark measures sizes on.

An 8.7 M Qwen3 model learns to sort: the prompt is 15 letters of one of eight alphabets, the answer the letters in
ascending, then in descending order; the reward is the share of right positions.  First a *base* is made by a few
supervised steps from random weights and rounded to bf16, as published base models are.  Then each run starts from
those files and takes RL steps with :class:`rose.train.trainer.TorchTrainer` (fp32 masters, GRPO advantages, AdamW,
one update per step): ``--groups`` groups of 8 answers, 32 tokens each, sampled by the very weights that the step
changes.  16 groups, the default, are 4,096 loss tokens a step.

Written to ``--out``: ``base/`` (a Hugging Face folder), and per learning rate a folder with ``step-NNNNN.safetensors``
(bf16, the checkpoints before and after each step of ``--pairs``) and ``log.jsonl`` (per step: reward, entropy,
gradient norm, and how many bits of each tensor changed).  A run that is interrupted is made again from its start.

One core takes about 6 s per step: 300 steps at two rates take an hour.  The same seed gives the same run on one
machine with one thread.

    python benchmarks/weight_transfer/rl_checkpoints.py --out out/rl --lr 1e-6 5e-6 --steps 300
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from rose.train.batch import TrainingSequence
from rose.train.trainer import TorchTrainer, TrainerParams
from rose.weights.source import collect

NUM_ALPHABETS, NUM_LETTERS = 8, 64
SEPARATOR, END, FIRST_LETTER = 1, 2, 16
LETTERS_PER_PROMPT = 15
ANSWER_TOKENS = 2 * LETTERS_PER_PROMPT + 2
GROUP_SIZE = 8
MODEL = {
    "vocab_size": 2048,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
MOE_MODEL = {
    **{key: value for key, value in MODEL.items() if key != "intermediate_size"},
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
"""A mixture of experts, 8.0 M parameters: an expert sees a quarter of the tokens."""
KINDS = ("dense", "moe")
PAIRS = (1, 10, 25, 50, 100, 110, 120, 130, 140, 150, 175, 200, 225, 250, 275, 299, 300)


def problem(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """A prompt and its right answer, as token ids."""
    base = FIRST_LETTER + NUM_LETTERS * int(rng.integers(NUM_ALPHABETS))
    letters = [base + int(letter) for letter in rng.integers(0, NUM_LETTERS, LETTERS_PER_PROMPT)]
    ascending = sorted(letters)
    return [*letters, SEPARATOR], [*ascending, SEPARATOR, *ascending[::-1], END]


def make_base(folder: Path, *, steps: int, seed: int, kind: str = "dense") -> None:
    """Supervised steps from random weights; the result is saved in bf16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model: torch.nn.Module
    if kind == "moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE_MODEL))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / steps)
        problems = [problem(rng) for _ in range(96)]
        ids = torch.tensor([prompt + answer for prompt, answer in problems])
        labels = ids.clone()
        labels[:, : LETTERS_PER_PROMPT + 1] = -100
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        show(f"base {step + 1}/{steps}: loss {float(loss.detach()):.3f}")
    temporary = folder.with_name(".base.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(temporary)  # type: ignore[operator]
    temporary.rename(folder)


@torch.no_grad()
def roll_out(
    model: torch.nn.Module, num_groups: int, rng: np.random.Generator, generator: torch.Generator
) -> list[TrainingSequence]:
    """Sample ``num_groups * GROUP_SIZE`` answers at temperature 1, with the log-probs of what was sampled."""
    problems = [problem(rng) for _ in range(num_groups)]
    ids = torch.tensor([prompt for prompt, _ in problems for _ in range(GROUP_SIZE)])
    cache, tokens, log_probs = None, [], []
    for _ in range(ANSWER_TOKENS):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        distribution = torch.log_softmax(out.logits[:, -1].float(), -1)
        ids = torch.multinomial(distribution.exp(), 1, generator=generator)
        tokens.append(ids)
        log_probs.append(distribution.gather(1, ids))
    answers, chosen = torch.cat(tokens, 1).tolist(), torch.cat(log_probs, 1).tolist()
    samples = []
    for row, answer in enumerate(answers):
        prompt, right = problems[row // GROUP_SIZE]
        samples.append(
            TrainingSequence(
                trajectory_id=f"t{row:04d}",
                group_id=f"g{row // GROUP_SIZE:03d}",
                reward=sum(a == b for a, b in zip(answer, right, strict=True)) / ANSWER_TOKENS,
                token_ids=(*prompt, *answer),
                positions=tuple(range(len(prompt), len(prompt) + ANSWER_TOKENS)),
                logprobs=tuple(min(value, 0.0) for value in chosen[row]),
                temperatures=(1.0,) * ANSWER_TOKENS,
                allowed=(None,) * ANSWER_TOKENS,
            )
        )
    return samples


def published(trainer: TorchTrainer) -> dict[str, np.ndarray]:
    """The bits that a publisher would send, flat, by checkpoint name."""
    return {
        tensor.spec.name: tensor.bits(0, tensor.spec.num_elements).copy()
        for tensor in collect(trainer.module)
    }


def run(out: Path, *, lr: float, steps: int, num_groups: int, pairs: frozenset[int], seed: int) -> None:
    """One RL run; see the module."""
    folder = out / f"lr-{lr:g}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    params = TrainerParams(learning_rate=lr, max_grad_norm=1.0, seed=seed)
    trainer = TorchTrainer(out / "base", params)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    shapes = {name: tuple(tensor.shape) for name, tensor in trainer.module.named_parameters()}

    def save(step: int, bits: dict[str, np.ndarray]) -> None:
        path = folder / f"step-{step:05d}.safetensors"
        if not path.exists():
            save_file(
                {
                    n: torch.from_numpy(b.view(np.int16)).view(torch.bfloat16).reshape(shapes[n])
                    for n, b in bits.items()
                },
                path,
                metadata={"format": "pt"},
            )

    held = published(trainer)
    with (folder / "log.jsonl").open("w") as log:
        for step in range(1, steps + 1):
            began_s = time.monotonic()
            samples = roll_out(trainer.rounded_model, num_groups, rng, generator)
            report = trainer.step(samples, single_update=True)
            now = published(trainer)
            changed = {name: int(np.count_nonzero(bits != held[name])) for name, bits in now.items()}
            total = sum(bits.size for bits in now.values())
            row = {
                "step": step,
                "reward": sum(sample.reward for sample in samples) / len(samples),
                "num_tokens": report.num_tokens,
                "num_trained_sequences": report.num_trained_sequences,
                "entropy": report.entropy,
                "grad_norm": report.grad_norm,
                "mismatch_kl": report.mismatch_kl,
                "density": sum(changed.values()) / total,
                "seconds": time.monotonic() - began_s,
                "changed": changed,
            }
            log.write(json.dumps(row) + "\n")
            log.flush()
            if step in pairs:
                save(step - 1, held)
                save(step, now)
            held = now
            show(
                f"lr {lr:g}, {step}/{steps}: reward {row['reward']:.3f}, "
                f"{100 * row['density']:.3f} % changed, {row['seconds']:.1f} s"
            )


def checkpoint_pairs(folder: Path) -> Iterator[tuple[int, Path, Path]]:
    """``(step, before, after)`` of every consecutive pair in the folder of one run, in order."""
    for after in sorted(folder.glob("step-*.safetensors")):
        step = int(after.stem.removeprefix("step-"))
        before = folder / f"step-{step - 1:05d}.safetensors"
        if before.exists():
            yield step, before, after


def show(text: str) -> None:
    print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, end="" if sys.stderr.isatty() else "\n",
          file=sys.stderr, flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/rl"), help="folder to write (default out/rl)")
    parser.add_argument(
        "--model", choices=KINDS, default="dense", help="a base that is there already is taken as it is"
    )
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 5e-6], help="one run per learning rate")
    parser.add_argument("--steps", type=int, default=300, help="RL steps per run (default 300)")
    parser.add_argument("--groups", type=int, default=16, help="groups of 8 answers a step (default 16)")
    parser.add_argument("--base-steps", type=int, default=150, help="supervised steps of the base")
    parser.add_argument(
        "--pairs", type=int, nargs="*", default=PAIRS, help="steps to keep checkpoints around"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "base").exists():
        make_base(args.out / "base", steps=args.base_steps, seed=args.seed, kind=args.model)
    for lr in args.lr:
        run(
            args.out,
            lr=lr,
            steps=args.steps,
            num_groups=args.groups,
            pairs=frozenset(args.pairs),
            seed=args.seed,
        )


if __name__ == "__main__":
    main()
