"""How far engine and trainer are apart on the tokens that are trained on: real vLLM engines, the real trainer, equal weights.

    python benchmarks/training/logprobs.py --json FILE                     # about five minutes on one core
    python benchmarks/training/logprobs.py --part kept --cache CACHE       # one part now: float32, bfloat16 or kept; go on from CACHE later

``float32``, ``bfloat16``: two engines of that dtype behind the scheduler.

- ``fresh``: tokens sampled on keys and values of the same weights and the same engine.  Conversations of several turns, free text
  and answers restricted to four tokens.
- ``moved``: tokens sampled after their turn was taken from its engine in the middle and went on at the other one, which computed
  the context anew.  Every turn is moved several times.

``kept``: one bf16 engine that takes a real optimiser step of the trainer as an update, with each setting of the KV cache at the
commit and two learning rates.  The trainer computes with the new weights.

- ``cached``: turns that begin after the commit, on a prompt that the engine has cached before it.
- ``in_flight``: turns that sample while the commit happens, their tokens after it.
- ``fresh``: turns after the commit on a prompt that nobody has cached: what bf16 alone does.

Of each: the largest difference of a token's log-prob, the k3 estimate of KL(engine || trainer), and the 99th percentile of the
ratio of their probabilities, as a run shows them (``rose.train.loss.mismatch``).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.report import Report
from benchmarks.weight_transfer.weights_kv import MODES, Pair, over_a_commit, sample
from rose.auth import Tokens, bearer
from rose.demo.models import POLICY, ensure_model
from rose.policy.worker import Duty
from rose.scheduler.app import Scheduler
from rose.scheduler.scheduler_config import SchedulerConfig, StaticWorker
from rose.train.batch import TrainingSequence, samples_of
from rose.train.client import SchedulerClient
from rose.train.envs.frozenlake import FrozenLakeFamily, FrozenLakeParams
from rose.train.loss import mismatch
from rose.train.plan import GroupPlan
from rose.train.rollout import EpisodeParams, EpisodeRunner, single_token_ids
from rose.train.trainer import TorchTrainer, TrainerParams
from tests.engine_launcher import EngineServer
from tests.plugin.weights_server import dedicated

PARTS = ("float32", "bfloat16", "kept")
BAR = 1e-3
"""Of a token's log-prob, in float32 with fresh keys and values."""
MAX_MODEL_LEN = 512
ARGS = (
    "--max-num-seqs=16",
    f"--max-model-len={MAX_MODEL_LEN}",
    f"--kv-cache-memory-bytes={128 << 20}",
    "--block-size=32",
)
PLAIN = (*ARGS, "--enable-scale-out", "--logprobs-mode=processed_logprobs", "--served-model-name=policy")
GROUPS, GROUP_SIZE = 4, 8
NUM_LONG, LONG_TOKENS = 16, 240
MOVE_EVERY = 40
"""Tokens that each turn of an engine samples before they are all moved."""
RATES = (5e-6, 1e-3)
NUM_TURNS, PROMPT_TOKENS, SHORT_TOKENS, FLIGHT_TOKENS = 8, 72, 12, 120


class Tally:
    """Log-probs of both sides, by kind."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self.trainer = trainer
        self._pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, samples: Sequence[TrainingSequence], kinds: Sequence[Sequence[str]]) -> None:
        """``kinds``: of each sampled token of each sample; the empty name is left out."""
        for one, mine_N, names in zip(samples, self.trainer.log_probs(samples), kinds, strict=True):
            theirs_N = torch.tensor(one.logprobs)
            for kind in sorted(set(names) - {""}):
                chosen_N = torch.tensor([name == kind for name in names])
                self._pairs.setdefault(kind, []).append((theirs_N[chosen_N], mine_N[chosen_N]))

    def found(self) -> dict[str, dict[str, float]]:
        table: dict[str, dict[str, float]] = {}
        for kind, pairs in self._pairs.items():
            theirs_N, mine_N = (torch.cat(part) for part in zip(*pairs, strict=True))
            table[kind] = {"num_tokens": theirs_N.numel(), **mismatch(theirs_N, mine_N)}
        return table


# --- two engines behind the scheduler --------------------------------------------------------------------


async def episodes(scheduler: Scheduler, client: SchedulerClient, model: Path) -> list[dict[str, Any]]:
    """Traces of whole groups: restricted answers in one job, free text in the other."""
    family = FrozenLakeFamily(FrozenLakeParams(num_maps=GROUPS, seed=3, max_turns=6))
    traces: list[dict[str, Any]] = []
    for job, allowed, max_tokens in (
        ("restricted", single_token_ids(model, family.allowed_texts), 1),
        ("free", None, 12),
    ):
        params = EpisodeParams(
            job=job,
            model="policy",
            temperature=0.8,
            max_tokens=max_tokens,
            concurrency=64,
            step_timeout_s=60,
            max_retries=0,
        )
        plans = [
            GroupPlan(group_id=f"{job}{index}", group_size=GROUP_SIZE, task=task, num_missing=GROUP_SIZE)
            for index, task in enumerate(family.tasks())
        ]
        await EpisodeRunner(client, family, params, allowed).run(plans)
        leased = await client.lease(job=job, num_groups=GROUPS, attempt=0, version=0, ttl_s=60, wait_s=5)
        assert leased is not None
        traces += leased[1]
    return traces


async def moved(scheduler: Scheduler, client: SchedulerClient) -> list[dict[str, Any]]:
    """Traces of long turns that were moved to and fro."""
    rng = np.random.default_rng(2)
    sampling = {"temperature": 1.0, "max_tokens": LONG_TOKENS, "ignore_eos": True}

    async def long_turn(session: aiohttp.ClientSession, index: int) -> str:
        begun = await client.create_trajectory(
            job="moved", group_id=f"m{index}", group_size=1, task={"n": index}
        )
        body = {"token_ids": prompt_of(rng), "sampling_params": sampling}
        url = f"{scheduler.url}/rose/v1/generate"
        async with session.post(url, json=body, headers=bearer(begun.key)) as response:
            response.raise_for_status()
            await response.read()
        return begun.id

    def live() -> dict[str, list[int]]:
        """Tokens that the live attempts of each engine have given."""
        found: dict[str, list[int]] = {"a": [], "b": []}
        for turn in scheduler.book.turns.values():
            if turn.worker is not None:
                found[turn.worker.worker_id].append(len(turn.token_ids) - turn.attempt_start)
        return found

    def ripe() -> list[str]:
        return [name for name, counts in live().items() if min(counts, default=0) >= MOVE_EVERY]

    async def move() -> None:
        while True:
            await until(lambda: bool(ripe()))  # either: the first turns may all be at one engine
            name = ripe()[0]
            scheduler.dispatcher.set_duty(name, Duty.DRAINING)
            await until(lambda name=name: not live()[name])
            scheduler.dispatcher.set_duty(name, Duty.ACTIVE)

    async with aiohttp.ClientSession() as session:
        mover = asyncio.create_task(move())
        try:
            names = await asyncio.gather(*(long_turn(session, index) for index in range(NUM_LONG)))
        finally:
            if not mover.cancel():
                mover.result()  # it ends by itself only by an error
    return [{**(await client.get_trajectory(name)), "reward": 0.0} for name in names]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a look at the scheduler's book
        await asyncio.sleep(0.01)


def kinds_of(trace: Mapping[str, Any]) -> list[str]:
    """Of each sampled token of a trajectory: whether its turn had been moved before."""
    return [
        "fresh" if index == 0 else "moved"
        for turn in trace["turns"]
        for index, segment in enumerate(turn["segments"])
        for _ in range(segment["n"])
    ]


async def two_engines(urls: Sequence[str], model: Path, folder: Path) -> list[dict[str, Any]]:
    tokens = Tokens.generate()
    workers = tuple(
        StaticWorker(worker_id=name, url=url, model="policy", max_model_len=MAX_MODEL_LEN)
        for name, url in zip("ab", urls, strict=True)
    )
    # Streamed, so that a turn has its tokens with it when it leaves.
    config = SchedulerConfig(port=0, workers=workers, stream_upstream=True)
    scheduler = Scheduler(config, tokens, folder)
    await scheduler.start()
    try:
        async with SchedulerClient(
            scheduler.url, environment_token=tokens.environment, trainer_token=tokens.trainer
        ) as client:
            return await episodes(scheduler, client, model) + await moved(scheduler, client)
    finally:
        await scheduler.stop()


def of_dtype(dtype: str, model: Path, report: Report) -> dict[str, Any]:
    args = (*PLAIN, f"--dtype={dtype}")
    with (
        tempfile.TemporaryDirectory(prefix="rose-logprobs-") as folder,
        EngineServer(model, args=args) as first,
        EngineServer(model, args=args) as second,
    ):
        traces = asyncio.run(two_engines((first.url, second.url), model, Path(folder)))
    report.progress(dtype, 1, 1)
    tally = Tally(TorchTrainer(model, TrainerParams(learning_rate=1e-3)))
    num_moves = 0
    for trace in traces:
        samples = samples_of(trace, vocab_size=tally.trainer.vocab_size, max_tokens=MAX_MODEL_LEN)
        if not samples:
            continue
        (one,) = samples  # nobody rewrote a history
        tally.add([one], [kinds_of(trace)])
        num_moves += sum(len(turn["segments"]) - 1 for turn in trace["turns"])
    return {**tally.found(), "num_moves": num_moves}


# --- an update on keys and values of before --------------------------------------------------------------


def sample_from(turn: Mapping[str, Any], begin: int = 0) -> TrainingSequence:
    """The tokens of a turn from ``begin`` on, to be computed by the trainer."""
    start, count = len(turn["prompt"]) + begin, len(turn["tokens"]) - begin
    return TrainingSequence(
        trajectory_id="t",
        group_id="g",
        reward=0.0,
        token_ids=(*turn["prompt"], *turn["tokens"]),
        positions=tuple(range(start, start + count)),
        logprobs=tuple(turn["logprobs"][begin:]),
        temperatures=(1.0,) * count,
        allowed=(None,) * count,
    )


def stepped(model: Path, rate: float, rng: np.random.Generator) -> TorchTrainer:
    """A trainer one RL step behind the model's weights, on made-up conversations of its own."""
    trainer = TorchTrainer(model, TrainerParams(learning_rate=rate))
    blank = [
        sample_from({"prompt": prompt_of(rng), "tokens": prompt_of(rng), "logprobs": [0.0] * PROMPT_TOKENS})
        for _ in range(GROUPS * GROUP_SIZE)
    ]
    own = [
        dataclasses.replace(
            one,
            trajectory_id=f"t{index:03d}",
            group_id=f"g{index // GROUP_SIZE}",
            reward=float(rng.random()),
            logprobs=tuple(values_N.tolist()),
        )
        for index, (one, values_N) in enumerate(zip(blank, trainer.log_probs(blank), strict=True))
    ]
    trainer.step(own)
    return trainer


def prompt_of(rng: np.random.Generator) -> list[int]:
    return [int(token) for token in rng.integers(10, 250, size=PROMPT_TOKENS)]


def weights_of(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    """As they are published."""
    return {
        name: tensor.detach().bfloat16().contiguous() for name, tensor in trainer.module.named_parameters()
    }


def around_a_commit(pair: Pair, kv: str, rng: np.random.Generator) -> list[tuple[str, TrainingSequence]]:
    """One commit with turns in flight, and turns on cached and on new prompts after it."""
    server, prompts = pair.server, [prompt_of(rng) for _ in range(NUM_TURNS)]
    for prompt in prompts:
        sample(server, prompt, 1, 0)
    turns = over_a_commit(
        pair, kv, [(prompt[:16], FLIGHT_TOKENS, seed) for seed, prompt in enumerate(prompts)]
    )
    in_flight = [
        ("in_flight", sample_from(turn, turn["spans"][1]["start"]))
        for turn in turns
        if len(turn["spans"]) == 2
    ]
    later = [("cached", sample_from(sample(server, prompt, SHORT_TOKENS, 1))) for prompt in prompts]
    alone = [
        ("fresh", sample_from(sample(server, prompt_of(rng), SHORT_TOKENS, 1))) for _ in range(NUM_TURNS)
    ]
    return in_flight + later + alone


def kept(model: Path, rounds: int, report: Report) -> dict[str, Any]:
    """``{rate: {mode: {kind: figures}}}``"""
    rng = np.random.default_rng(1)
    found: dict[str, Any] = {}
    old = weights_of(TorchTrainer(model, TrainerParams(learning_rate=1e-3)))
    for rate in RATES:
        trainer = stepped(model, rate, rng)
        new = weights_of(trainer)
        tallies = {mode: Tally(trainer) for mode in MODES}
        with (
            tempfile.TemporaryDirectory(prefix="rose-logprobs-") as name,
            dedicated(model, env={"ROSE_WEIGHTS_DIR": name}, args=ARGS) as server,
        ):
            pair = Pair(server, Path(name), (old, new))
            for number in range(rounds):
                for mode in MODES:
                    for kind, one in around_a_commit(pair, mode, rng):
                        tallies[mode].add([one], [[kind] * len(one.positions)])
                    pair.commit(pair.stage(), "reset", note=False)  # and back
                report.progress(f"kept, learning rate {rate:g}", number + 1, rounds)
        changed = sum(int((new[name] != old[name]).sum()) for name in new)
        found[f"{rate:g}"] = {
            "density": changed / sum(tensor.numel() for tensor in new.values()),
            **{mode: tallies[mode].found() for mode in MODES},
        }
    return found


# --- all of it -------------------------------------------------------------------------------------------


def rows_of(found: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float]]]:
    """``(name, figures)``"""
    rows = [
        (f"{dtype}.{kind}", found[dtype][kind])
        for dtype in ("float32", "bfloat16")
        if dtype in found
        for kind in ("fresh", "moved")
        if kind in found[dtype]  # no turn lasted long enough to be moved
    ]
    for rate, modes in found.get("kept", {}).items():
        rows += [
            (f"{mode}.{kind}.lr{rate}", modes[mode][kind])
            for mode in MODES
            for kind in ("fresh", "cached", "in_flight")
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--part", choices=["all", *PARTS], default="all")
    parser.add_argument("--cache", type=Path, help="keep finished parts here, and take them from here")
    parser.add_argument("--rounds", type=int, default=3, help="commits with each setting")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = Report("logprobs")
    model = ensure_model(POLICY, seed=0)
    found: dict[str, Any] = {}
    if args.cache is not None and args.cache.exists():
        found = json.loads(args.cache.read_text())
    for part in PARTS if args.part == "all" else (args.part,):
        if part not in found:
            found[part] = (
                kept(model, args.rounds, report) if part == "kept" else of_dtype(part, model, report)
            )
            if args.cache is not None:
                args.cache.write_text(json.dumps(found))
    rows = rows_of(found)
    names = ("num_tokens", "logprob_diff_max", "mismatch_kl", "ratio_p99")
    report.table(
        ("tokens", *names),
        [(name, *(figures[key] for key in names)) for name, figures in rows],
        title="engine against trainer, equal weights",
    )
    summary = {f"{name}.{key}": value for name, figures in rows for key, value in figures.items()}
    if "float32" in found:
        summary["float32.bar"] = BAR
        worst = found["float32"]["fresh"]["logprob_diff_max"]
        print(f"float32, fresh: {worst:.1e} at most; {'meets' if worst <= BAR else 'MISSES'} {BAR:g}")
    for dtype in ("float32", "bfloat16"):
        if dtype in found:
            summary[f"{dtype}.num_moves"] = found[dtype]["num_moves"]
    report.finish(summary, found, args.json)


if __name__ == "__main__":
    main()
