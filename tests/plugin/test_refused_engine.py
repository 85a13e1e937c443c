"""What the table refuses, on a real production engine: it runs as stock vLLM, says why, and lends nothing to who asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.records import Phase
from rose.policy.compat import Support, judge, row, row_of_number
from tests.engine_launcher import EngineServer
from tests.plugin.test_serving_engine import Agent
from tests.tiny_model import write_tiny_model
from tests.tiny_shapes import write_shape

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

LENDERS = ("serving.board", "serving.chunks", "serving.rank0")
"""Files of a production that takes part."""
PROMPTS = [[5 + (13 * number + 7 * i) % 200 for i in range(100)] for number in range(3)]


@dataclass
class Production:
    """An engine, and the row of the table that refuses it."""

    row: str
    server: EngineServer
    args: list[str]

    def answers(self) -> list[Any]:
        """Greedy tokens and their log-probs; of a pooling model vectors."""
        model, found = {"model": str(self.server.model_dir)}, []
        for prompt in PROMPTS:
            if self.row == "pooling":
                answer = self.server.post("/v1/embeddings", model | {"input": prompt})
            else:
                body = {"prompt": prompt, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
                answer = self.server.post("/v1/completions", model | body | {"logprobs": 1})
            assert answer.status_code == 200, answer.text
            body = answer.json()
            found.append(body["data"][0]["embedding"] if "data" in body else body["choices"][0]["logprobs"])
        return found


@pytest.fixture(scope="module", params=["pooling", pytest.param("priority", marks=pytest.mark.conformance)])
def production(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Production]:
    folder, refused_by = tmp_path_factory.mktemp("engine"), request.param
    (folder / "node").mkdir(mode=0o700)
    args = ["--scheduling-policy=priority"]
    if refused_by == "pooling":
        write_shape(folder / "model", "pooling")
        args = ["--load-format=dummy"]
    else:
        write_tiny_model(folder / "model")
    env = {"ROSE_DIR": str(folder / "node")}
    with EngineServer(folder / "model", role="serving", env=env, args=args) as server:
        yield Production(refused_by, server, args)


@pytest.fixture
def agent(production: Production) -> Iterator[Agent]:
    agent = Agent(production.server.rose_dir)
    yield agent
    agent.close()


def is_off(production: Production, agent: Agent) -> bool:
    lease = agent.lease()
    said = (lease.phase, row_of_number(lease.row).name, lease.total_pages, lease.reserved_pages)
    return said == (Phase.OFF, production.row, 0, 0)


def test_it_says_by_what_and_has_nothing_to_lend_with(production: Production, agent: Agent) -> None:
    assert judge("serving", [production.row])[0] is Support.REFUSED
    assert is_off(production, agent)
    assert agent.dir.serving_lease().alive()
    said = production.server.log_path.read_text(errors="replace")
    assert f"ROSE is off, serving goes on as without it: {row(production.row).feature}" in said
    assert "Traceback" not in said
    written = {path.name for path in Path(agent.dir.path).iterdir()}
    assert not written & set(LENDERS)


def test_its_answers_are_stock_vllms_while_an_agent_asks_for_its_memory(
    production: Production, agent: Agent
) -> None:
    with EngineServer(production.server.model_dir, env={"VLLM_PLUGINS": ""}, args=production.args) as stock:
        expected = Production(production.row, stock, production.args).answers()
    agent.write(lend_pages=8)

    assert production.answers() == expected
    assert is_off(production, agent)
    assert not any((Path(agent.dir.path) / name).exists() for name in LENDERS)
