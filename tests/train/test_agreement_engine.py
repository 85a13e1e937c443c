"""Engine and trainer compute one policy: log-probs of a real ``vllm serve`` against the trainer's, on real episodes.

``python -m tests.train.test_agreement_engine FILE`` records the trajectories that ``test_reference.py`` reads.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.auth import Tokens
from rose.demo.models import POLICY, ensure_model
from rose.scheduler.app import Scheduler
from rose.scheduler.scheduler_config import SchedulerConfig, StaticWorker
from rose.train.adapter import LoraParams
from rose.train.batch import samples_of
from rose.train.client import SchedulerClient
from rose.train.envs.frozenlake import FrozenLakeFamily, FrozenLakeParams
from rose.train.plan import GroupPlan
from rose.train.rollout import EpisodeParams, EpisodeRunner, single_token_ids
from rose.train.trainer import TorchTrainer, TrainerParams
from tests.train.traces import random_batch

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(240)]

GROUPS, GROUP_SIZE = 2, 4


async def record(
    engine_url: str, model_path: Path, journal: Path, *, free_text: bool
) -> list[dict[str, Any]]:
    """Groups of episodes played by the engine, as a trainer leases them from a real scheduler.

    ``free_text`` samples several tokens of the whole vocabulary per turn; else one of the four actions.
    """
    tokens = Tokens.generate()
    config = SchedulerConfig(
        port=0,
        workers=(StaticWorker(worker_id="real", url=engine_url, model="policy", max_model_len=512),),
    )
    scheduler = Scheduler(config, tokens, journal)
    await scheduler.start()
    try:
        family = FrozenLakeFamily(FrozenLakeParams(num_maps=GROUPS, seed=3, max_turns=6))
        async with SchedulerClient(
            scheduler.url, environment_token=tokens.environment, trainer_token=tokens.trainer
        ) as client:
            params = EpisodeParams(
                job="j",
                model="policy",
                temperature=0.8,
                max_tokens=5 if free_text else 1,
                concurrency=64,
                step_timeout_s=60,
                max_retries=0,
            )
            allowed = None if free_text else single_token_ids(model_path, family.allowed_texts)
            plans = [
                GroupPlan(group_id=f"g{index}", group_size=GROUP_SIZE, task=task, num_missing=GROUP_SIZE)
                for index, task in enumerate(family.tasks())
            ]
            await EpisodeRunner(client, family, params, allowed).run(plans)
            leased = await client.lease(job="j", num_groups=GROUPS, attempt=1, version=0, ttl_s=60, wait_s=5)
            assert leased is not None
            return [await client.get_trajectory(one["id"]) for one in leased[1]]
    finally:
        await scheduler.stop()


def engine(model_path: Path, dtype: str) -> Any:
    from tests.engine_launcher import EngineServer

    args = ("--enable-scale-out", "--logprobs-mode=processed_logprobs", "--served-model-name=policy")
    # As a model's folder may have it: nothing of it is to bear on episodes.
    defaults = '--override-generation-config={"top_k": 3, "top_p": 0.5, "presence_penalty": 1.0}'
    return EngineServer(model_path, args=(*args, f"--dtype={dtype}", defaults))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def recorded(
    request: pytest.FixtureRequest, policy_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    pytest.importorskip("vllm")
    journal = tmp_path_factory.mktemp("journal")
    with engine(policy_model, request.param) as server:
        yield (
            request.param,
            asyncio.run(record(server.url, policy_model, journal / "a", free_text=False))
            + asyncio.run(record(server.url, policy_model, journal / "b", free_text=True)),
        )


def test_log_probs_of_engine_and_trainer_agree(recorded: Any, policy_model: Path) -> None:
    """Fresh KV and equal weights.  In fp32 the largest difference of a token is bounded; bf16 is another computation,
    whose distance is reported by the metrics that a run shows, and is small."""
    dtype, trajectories = recorded
    trainer = TorchTrainer(policy_model, TrainerParams(learning_rate=1e-3))
    samples = [one for trace in trajectories for one in samples_of(trace, vocab_size=320, max_tokens=1024)]
    assert any(sample.allowed[0] is None for sample in samples)
    assert any(sample.allowed[0] is not None for sample in samples)

    report = trainer.step(samples)

    print(
        f"{dtype}: {report.num_tokens} tokens, max |difference| {report.logprob_diff_max:.1e}, "
        f"mismatch KL {report.mismatch_kl:.1e}, ratio p99 {report.ratio_p99:.4f}"
    )
    if dtype == "float32":
        assert report.logprob_diff_max <= 1e-3
    else:
        assert report.logprob_diff_max > 1e-6  # it is another computation, or the engine was not in bf16
        assert report.mismatch_kl < 5e-3
        assert 0.9 < report.ratio_p99 < 1.2


def test_an_engine_serves_what_adapters_were_merged_to(policy_model: Path, tmp_path: Path) -> None:
    """A trainer with adapters that have moved, against an engine that has its export: one policy, in fp32 to a rounding."""
    pytest.importorskip("vllm")
    pytest.importorskip("peft")
    lora = LoraParams(rank=4, alpha=8.0)
    trainer = TorchTrainer(policy_model, TrainerParams(learning_rate=1e-2, policy_dtype="float32", lora=lora))
    batch = [one for trace in random_batch(1) for one in samples_of(trace, vocab_size=320, max_tokens=1024)]
    before = torch.cat(trainer.log_probs(batch))
    trainer.step(batch)
    moved = torch.cat(trainer.log_probs(batch)) - before
    assert float(moved.abs().max()) > 0.05  # it is another policy now
    trainer.export(tmp_path / "model")

    with engine(tmp_path / "model", "float32") as server:
        traces = asyncio.run(record(server.url, tmp_path / "model", tmp_path / "journal", free_text=True))

    samples = [one for trace in traces for one in samples_of(trace, vocab_size=320, max_tokens=1024)]
    assert trainer.step(samples).logprob_diff_max <= 1e-3


def _write_recording(target: Path) -> None:
    recipe = replace(POLICY, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=2, num_kv_heads=1)
    with tempfile.TemporaryDirectory() as folder:
        model_path = ensure_model(recipe, Path(folder), seed=0)
        with engine(model_path, "bfloat16") as server:
            found = []
            for index, free_text in enumerate((False, True)):
                journal = Path(folder) / f"journal{index}"
                for one in asyncio.run(record(server.url, model_path, journal, free_text=free_text)):
                    # The untrained policy seldom reaches a goal; a reward of each kind in each group is what is needed.
                    reward = one["reward"] + 0.25 * (len(found) % 3)
                    kept = ("prompt_token_ids", "token_ids", "logprobs", "sampling", "finish_reason")
                    turns = [{name: turn[name] for name in kept} for turn in one["turns"]]
                    found.append(
                        {
                            "id": f"t{len(found):02d}",
                            "group_id": f"{index}-{one['group_id']}",
                            "reward": reward,
                            "turns": turns,
                        }
                    )
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in found)
    target.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    _write_recording(Path(sys.argv[1]))
