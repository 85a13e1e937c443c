"""A model whose KV cache has several groups, on a real production engine: it computes beside rollouts and lends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Phase
from rose.policy.compat import Support, row, row_of_number
from tests.engine_launcher import EngineServer
from tests.plugin.ask_doctor import ask_about
from tests.plugin.stand_in import eventually
from tests.plugin.test_serving_engine import Agent
from tests.tiny_shapes import write_shape

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

KV_BYTES = 48 << 20
LONG = [5 + i % 200 for i in range(3900)]


@pytest.fixture(scope="module")
def node_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, node_dir: Path) -> Iterator[EngineServer]:
    model = write_shape(tmp_path_factory.mktemp("model") / "gemma3", "gemma3")
    args = ["--load-format=dummy", "--max-model-len=4096", f"--kv-cache-memory-bytes={KV_BYTES}"]
    with EngineServer(model, role="serving", env={"ROSE_DIR": str(node_dir)}, args=args) as server:
        yield server


@pytest.fixture
def agent(server: EngineServer, node_dir: Path) -> Iterator[Agent]:
    agent = Agent(node_dir)
    eventually(lambda: agent.lease().phase == Phase.READY, "serving is ready")
    yield agent
    agent.close()


def complete(server: EngineServer, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 1} | more
    answer = server.post("/v1/completions", {"model": str(server.model_dir)} | body, timeout=30.0)
    answer.raise_for_status()
    return answer.json()["choices"][0]


def test_several_groups_share_compute_only_and_their_memory_is_counted_once(agent: Agent) -> None:
    lease = agent.lease()
    assert (Support(lease.support), row_of_number(lease.row)) == (Support.COMPUTE_ONLY, row("kv_groups"))
    assert (lease.total_pages, lease.reserved_pages) == (KV_BYTES >> 21, KV_BYTES >> 21)


@pytest.mark.conformance
def test_the_doctor_had_said_so(server: EngineServer, agent: Agent) -> None:
    answer = ask_about(server)

    lease = agent.lease()
    assert (answer["support"], answer["problem"]) == (Support(lease.support).label, "")
    assert answer["rows"][0]["row"] == row_of_number(lease.row).name
    assert answer["rows"][0]["found"] in server.log_path.read_text(errors="replace")
    assert (answer["total_pages"], answer["lendable_pages"]) == (lease.total_pages, 0)


def test_its_workers_have_vllms_own_memory(server: EngineServer, agent: Agent, node_dir: Path) -> None:
    del server, agent
    assert NodeDir(node_dir).ranks("serving") == []


def test_a_long_request_runs_beside_a_loan_of_a_fixed_budget(server: EngineServer, agent: Agent) -> None:
    """24 pages are all there are: counted in every group, 129 were lent of them, and such a request never ran."""
    alone = complete(server, LONG)
    agent.write(lend_pages=129, held=16)

    beside = complete(server, [*LONG[:-1], 9])

    assert beside["finish_reason"] == "length"
    assert complete(server, LONG)["logprobs"] == alone["logprobs"]
    assert (agent.lease().lent_pages, agent.lease().total_pages) == (0, KV_BYTES >> 21)
    assert agent.lease().phase == Phase.READY
