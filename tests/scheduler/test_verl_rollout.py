"""verl's own agent loops, tools and batches over the endpoint, by the example's entries in its configuration; no Ray and no trainer."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose.errors import ConfigError
from rose.testing.fake_engine import FakeEngine
from rose.testing.toy_tokenizer import HFTokenizer
from tests.scheduler.chat_templates import HERMES
from tests.scheduler.conftest import World
from tests.scheduler.script_model import write_script_model

REASON = "verl is not installed: `make others` has it, in an environment of its own"
agent_loop = pytest.importorskip("verl.experimental.agent_loop", reason=REASON)
import verl  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from verl.protocol import DataProto  # noqa: E402
from verl.workers.rollout.llm_server import LLMServerClient  # noqa: E402

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
ANSWER = "It will be sunny."


class Forecaster(FakeEngine):
    """Calls the tool, and answers once it has its result."""

    def _sample(self, prompt: Sequence[int], params: Mapping[str, Any]) -> Any:
        knows = "sunny in Rome" in self.tokenizer.decode(prompt)
        for at, token in enumerate(
            [*self.tokenizer.encode(ANSWER if knows else CALL), self.tokenizer.eos_id]
        ):
            yield token, -0.25 - at / 64


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import verl_rollout

    yield verl_rollout
    del sys.modules["verl_rollout"]


@pytest.fixture
async def worker(world: World, example: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """verl's own, as its Ray actors hold it, with its default configuration but for what the example says."""
    write_script_model(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    tokenizer.chat_template = (
        HERMES  # verl renders an empty thought that Qwen3's takes back when the tool has answered
    )
    tokenizer.save_pretrained(tmp_path / "policy")
    await world.start()
    await world.add("a", kind=Forecaster, tokenizer=HFTokenizer(tokenizer), version="1.7")
    token_file = str(tmp_path / "tokens.toml")
    world.tokens.save(Path(token_file))
    entry = {"url": world.url, "job": "verl", "token_file": token_file}
    entries = [
        {"name": "rose_single_turn", "_target_": "verl_rollout.RoseSingleTurn", **entry},
        {"name": "rose_tools", "_target_": "verl_rollout.RoseToolAgent", **entry},
    ]
    OmegaConf.save(OmegaConf.create(entries), tmp_path / "rose_agents.yaml")
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml")
    config.actor_rollout_ref.model.path = str(tmp_path / "policy")
    config.data.max_prompt_length, config.data.max_response_length = 1024, 512
    rollout = config.actor_rollout_ref.rollout
    rollout.name, rollout.calculate_log_probs = "vllm", True
    rollout.multi_turn.function_tool_path = str(HERE / "verl_tools.py")
    rollout.agent.agent_loop_config_path = str(tmp_path / "rose_agents.yaml")
    yield agent_loop.AgentLoopWorker(config, llm_client=None)
    await example.connected(world.url, token_file, asyncio.get_running_loop()).close()
    example.connected.cache_clear()


def batch_of(agent_name: str, size: int) -> Any:
    prompts = np.empty(size, dtype=object)
    prompts[:] = [[{"role": "user", "content": f"The weather, {at}?"}] for at in range(size)]
    names = np.array([agent_name] * size, dtype=object)
    return DataProto(
        non_tensor_batch={"raw_prompt": prompts, "agent_name": names, "priority": np.arange(size)},
        meta_info={"global_steps": 7},
    )


@pytest.mark.parametrize(("agent_name", "num_turns"), [("rose_single_turn", 1), ("rose_tools", 2)])
async def test_verls_batch_is_made_of_what_the_scheduler_recorded(
    world: World, worker: Any, agent_name: str, num_turns: int
) -> None:
    output = await worker.generate_sequences(batch_of(agent_name, 3))
    extra = output.non_tensor_batch
    assert list(extra["min_global_steps"]) == list(extra["max_global_steps"]) == [7] * 3
    for row, name in enumerate(extra["rose_trajectory"]):
        trace = await world.ok("GET", f"/rose/v1/trajectories/{name}")
        assert [(turn["parent"], turn["fork"]) for turn in trace["turns"]] == [(None, None), (0, None)][
            :num_turns
        ]
        mask = output.batch["response_mask"][row].bool()
        assert output.batch["responses"][row][mask].tolist() == [
            token for turn in trace["turns"] for token in turn["token_ids"]
        ]
        assert output.batch["rollout_log_probs"][row][mask].tolist() == [
            one for turn in trace["turns"] for one in turn["logprobs"]
        ]
        prompt = output.batch["prompts"][row][output.batch["attention_mask"][row][:1024].bool()]
        assert prompt.tolist() == trace["turns"][0]["prompt_token_ids"]
        # verl has what it trains on: nothing is left for a trainer of ROSE's, nor held for one.
        assert world.scheduler.store.state(name)[0] == "cancelled"
    assert world.scheduler.store.held_bytes("verl") == 0


async def test_a_turn_is_as_long_as_verl_says_in_either_name(
    world: World, worker: Any, example: Any, tmp_path: Path
) -> None:
    client = example.connected(world.url, str(tmp_path / "tokens.toml"), asyncio.get_running_loop())
    server = example.RoseServer(worker.config, client, job="verl")
    for name in ("max_tokens", "max_new_tokens"):
        output = await server.generate("r", prompt_ids=np.arange(3), sampling_params={name: 2})
        assert (len(output.token_ids), output.log_probs, output.stop_reason) == (2, None, "completed")
    await server.end()


async def test_images_are_refused_by_name(world: World, worker: Any, example: Any) -> None:
    server = example.RoseServer(worker.config, client=None, job="verl")
    with pytest.raises(ConfigError, match="only tokens"):
        await server.generate("r", prompt_ids=[1], sampling_params={}, image_data=["picture"])


def test_a_turn_is_asked_for_as_verls_agent_loops_ask(example: Any) -> None:
    theirs = list(inspect.signature(inspect.unwrap(LLMServerClient.generate)).parameters)
    assert list(inspect.signature(example.RoseServer.generate).parameters) == theirs
