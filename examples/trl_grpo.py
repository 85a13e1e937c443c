"""Train with TRL on ROSE's engines: nothing of TRL is patched, and the trainer's own process generates nothing.

Two of TRL's extension points are all it takes.  ``GRPOTrainer(rollout_func=...)`` asks for completions: :class:`RoseRollout` plays
an episode per prompt through rose-scheduler and hands back the exact tokens, log-probs and mask that it recorded.  A
``TrainerCallback`` publishes after each optimiser step: :class:`PublishSteps` sends the weights as ROSE's own trainer does and
lets no engine below them take a turn, so the next rollout runs on them::

    pip install '.[trl]'                                                      # from a checkout
    rose-scheduler & rose relay --directory /dev/shm/weights & ...           # and at least one rollout engine
    python examples/trl_grpo.py --model PATH --store http://127.0.0.1:8470 --steps 100

The prompts are the first observations of a ROSE environment (``--env``, by default arithmetic with a calculator), and the rewards
are its own.  TRL normalises over the whole vocabulary, so the environment must take free text: one with a short list of allowed
answers is refused.  TRL uses the recorded log-probs in its loss only with ``use_vllm``; here the engines hold the trainer's own
weights at every step, so it recomputes them.  One process; under ``accelerate launch`` each rank plays its own prompts and the first
publishes, as long as every rank holds the whole model.
"""

# pyright: reportMissingImports=false
# TRL is an extra, and not where everything else is.

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # its warning that rollout_func may change

from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rose.auth import Tokens
from rose.errors import ConfigError, RoseError, TrainError
from rose.train.batch import samples_of
from rose.train.client import SchedulerClient
from rose.train.envs.base import Family, Message
from rose.train.envs.registry import make_family
from rose.train.rollout import EpisodeParams, EpisodeRunner
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.store import ObjectStore
from rose.weights.stores import trainer_store


async def first_prompts(family: Family, count: int) -> dict[str, Any]:
    """Tasks by the text of their first observation: TRL hands a rollout function prompts and nothing else."""
    found: dict[str, Any] = {}
    for task in family.tasks()[:count]:
        environment = family.make()
        try:
            observation = await environment.reset(task)
        finally:
            await environment.close()
        found[_key(observation.messages)] = (list(observation.messages), task)
    return found


def _key(messages: Sequence[Message]) -> str:
    return "\x00".join(f"{one['role']}\x00{one['content']}" for one in messages)


class RoseRollout:
    """TRL's ``rollout_func``: an episode per prompt, each as often as TRL repeats it.

    Args:
        url: Of rose-scheduler.
        job: Name there; :class:`PublishSteps` needs the same.
        known: Of :func:`first_prompts`.
    """

    def __init__(
        self, url: str, tokens: Tokens, family: Family, known: dict[str, Any], *, job: str, model: str
    ) -> None:
        if family.allowed_texts is not None:
            raise ConfigError("takes only certain answers, and TRL cannot normalise over those", field="env")
        self._url, self._tokens, self._family, self._known = url, tokens, family, known
        self._job, self._model = job, model

    def __call__(self, prompts: list[list[Message]], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        return asyncio.run(self._play(prompts, trainer))

    async def _play(self, prompts: list[list[Message]], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        params = EpisodeParams(
            job=self._job,
            model=self._model,
            temperature=trainer.args.temperature,
            max_tokens=trainer.args.max_completion_length,
            concurrency=1024,
            step_timeout_s=60.0,
            max_retries=3,
        )
        step = trainer.state.global_step
        async with SchedulerClient(self._url, environment_token=self._tokens.environment) as client:
            runner = EpisodeRunner(client, self._family, params, None)
            played = await asyncio.gather(
                *(
                    runner.play(
                        self._known[_key(prompt)][1],
                        job=self._job,
                        group_id=f"{step}-{sha256(_key(prompt).encode()).hexdigest()[:16]}",
                    )
                    for prompt in prompts
                )
            )
        found: dict[str, list[Any]] = {
            name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward")
        }
        limits = {"vocab_size": trainer.model.config.vocab_size, "max_tokens": 1 << 20}
        for final, _, trace in played:
            (sample,) = samples_of({**trace, "reward": final.reward}, **limits)  # history only grows here
            begin, length = sample.positions[0], len(sample.token_ids)
            sampled = dict(zip(sample.positions, sample.logprobs, strict=True))
            found["prompt_ids"].append(list(sample.token_ids[:begin]))
            found["completion_ids"].append(list(sample.token_ids[begin:]))
            # What the environment said in between is in the completion, and masked.
            found["logprobs"].append([sampled.get(place, 0.0) for place in range(begin, length)])
            found["env_mask"].append([int(place in sampled) for place in range(begin, length)])
            found["reward"].append(final.reward)
        return found


def prompts_of(known: dict[str, Any]) -> Dataset:
    """The prompts as TRL wants them.  A fingerprint of our own: `datasets` would pickle Arrow's classes to make one, which fails
    with some versions of Arrow, and nothing here is cached under it.
    """
    table = InMemoryTable.from_pylist([{"prompt": messages} for messages, _ in known.values()])
    return Dataset(table, fingerprint="rose-prompts")


def environment_reward(completions: list[Any], reward: list[float], **_: Any) -> list[float]:
    """What the environments paid; TRL passes on what the rollout function returned."""
    return reward


class PublishSteps(TrainerCallback):
    """Publishes version 0 when training begins and version ``global_step`` after each step, then requires it.

    Args:
        attempt: One more than any earlier start of this job has used.
    """

    def __init__(self, url: str, tokens: Tokens, store: ObjectStore, *, job: str, attempt: int) -> None:
        self._url, self._tokens, self._store = url, tokens, store
        self._job, self._attempt = job, attempt
        self._publisher: WeightPublisher | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            model: torch.nn.Module = kwargs["model"]
            if getattr(model, "peft_config", None):
                raise ConfigError(
                    "has adapters beside its weights (PEFT), and the engines have none",
                    field="model",
                    fix="leave peft_config out, or publish a function that merges them: docs/weights.md, LoRA",
                )
            self._publisher = WeightPublisher(
                model, self._store, self._job, self._attempt, WeightsParams(cast="BF16")
            )
            self._publish(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._publish(state.global_step)

    def _publish(self, version: int) -> None:
        if self._publisher is None:
            raise TrainError("a step ended before training began", field="callback")
        self._publisher.publish(version)
        asyncio.run(self._require(version))

    async def _require(self, version: int) -> None:
        async with SchedulerClient(self._url, trainer_token=self._tokens.trainer) as client:
            await client.set_version(job=self._job, attempt=self._attempt, version=version, run=self._job)


def next_attempt(store: ObjectStore, run_id: str) -> int:
    head = store.wait_head(run_id, None, 0.0)
    return 1 if head is None else head.attempt + 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8800", help="of rose-scheduler")
    parser.add_argument(
        "--store", default="http://127.0.0.1:8470", help="where versions go: a relay or any store"
    )
    parser.add_argument(
        "--model", required=True, type=Path, help="Hugging Face folder, as the engines serve it"
    )
    parser.add_argument("--served-name", default="policy", help="under which the engines serve it")
    parser.add_argument("--env", default="math_tools", help="a ROSE environment, or module:factory")
    parser.add_argument("--job", default="trl")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4, help="per step")
    parser.add_argument("--max-tokens", type=int, default=128, help="per turn")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--token-file", default=None, help="default: the file named by ROSE_TOKEN_FILE")
    parser.add_argument(
        "--unsigned",
        action="store_true",
        help="publish without tokens.key: nodes need weights.signed = false",
    )
    parser.add_argument("--output-dir", default="out/trl")
    args = parser.parse_args()
    needs = ["environment", "trainer"]
    needs += ["publish"] if args.store.startswith("http") else []
    needs += [] if args.unsigned else ["publish_key"]
    tokens = Tokens.load(args.token_file, needs)
    family = make_family(args.env, {})
    known = asyncio.run(first_prompts(family, 1024))
    store = trainer_store(args.store, tokens, signs=not args.unsigned)
    trainer = GRPOTrainer(
        model=str(args.model),
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        reward_funcs=environment_reward,
        train_dataset=prompts_of(known),
        rollout_func=RoseRollout(args.url, tokens, family, known, job=args.job, model=args.served_name),
        callbacks=[
            PublishSteps(args.url, tokens, store, job=args.job, attempt=next_attempt(store, args.job))
        ],
        args=GRPOConfig(
            output_dir=args.output_dir,
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            num_generations=args.group_size,
            per_device_train_batch_size=args.group_size * args.groups,
            max_completion_length=args.max_tokens,
            # The whole distribution: recorded log-probs are of this one, and TRL's loss computes it.
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=None,
        ),
    )
    trainer.train()
    for line in trainer.state.log_history:
        if "reward" in line:
            print(f"step {line['step']}: reward {line['reward']:.3f}, loss {line.get('loss', 0.0):.4f}")


if __name__ == "__main__":
    try:
        main()
    except RoseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
