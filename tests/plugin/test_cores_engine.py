"""The engine cores of one real production server (``--data-parallel-size 2``), each with a node directory of its own: what one lends is none of
the other's business."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest

from rose.coserve.node_dir import core_dir
from rose.coserve.records import Mode, Phase
from rose.policy.compat import Support
from tests.engine_launcher import EngineServer
from tests.plugin.ask_doctor import ask_about
from tests.plugin.stand_in import eventually
from tests.plugin.test_serving_engine import Agent
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.conformance, pytest.mark.timeout(300)]

ENV = {"ROSE_GUARD": "1", "VLLM_SERVER_DEV_MODE": "1"}
PROMPTS = [list(range(first, first + 100)) for first in (5, 50, 90)]


class Cores:
    """Two engine cores, and how one of them is asked."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.directories = [core_dir(server.rose_dir, core) for core in range(2)]

    def ask(self, core: int, prompt: list[int], max_tokens: int = 8) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 1,
        }
        answer = self.server.post(
            "/v1/completions",
            {"model": str(self.server.model_dir)} | body,
            headers={"X-data-parallel-rank": str(core)},
            timeout=60.0,
        )
        answer.raise_for_status()
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        return answer.json()["choices"][0]["logprobs"]


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cores]:
    model, node = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("node")
    node.chmod(0o700)
    write_tiny_model(model)
    args = ["--data-parallel-size=2", "--max-num-seqs=64"]
    with EngineServer(model, role="serving", env={**ENV, "ROSE_DIR": str(node)}, args=args) as server:
        yield Cores(server)


@pytest.fixture
def agents(cores: Cores) -> Iterator[list[Agent]]:
    agents = [Agent(directory) for directory in cores.directories]
    for agent in agents:
        eventually(lambda agent=agent: agent.lease().phase == Phase.READY, "serving is ready")
    yield agents
    for agent in agents:
        agent.write(mode=int(Mode.OFF), held=0)
        agent.until_lent(0)
        assert (agent.lease().phase, agent.lease().errors) == (Phase.READY, 0)
        agent.close()
    assert "Traceback" not in cores.server.log_path.read_text(errors="replace")


def test_each_core_is_elastic_in_a_directory_of_its_own(agents: list[Agent]) -> None:
    assert [Support(agent.lease().support) for agent in agents] == [Support.ELASTIC] * 2
    assert [agent.total for agent in agents] == [16, 16]


def test_one_lends_and_the_other_keeps_all_its_memory(cores: Cores, agents: list[Agent]) -> None:
    alone = [[cores.ask(core, prompt) for prompt in PROMPTS] for core in range(2)]
    agents[0].write(lend_pages=15)
    agents[0].until_lent(15)

    assert agents[1].lease().lent_pages == 0
    assert [[cores.ask(core, prompt) for prompt in PROMPTS] for core in range(2)] == alone

    agents[1].write(lend_pages=9)
    agents[1].until_lent(9)
    agents[0].write(mode=int(Mode.OFF))
    agents[0].until_lent(0)
    assert agents[1].lease().lent_pages == 9
    assert [[cores.ask(core, prompt) for prompt in PROMPTS] for core in range(2)] == alone
    agents[0].write(mode=int(Mode.ON), lend_pages=0)


def test_a_burst_takes_back_what_its_own_core_has_lent(cores: Cores, agents: list[Agent]) -> None:
    for agent in agents:
        agent.write(mode=int(Mode.ON), lend_pages=15)
        agent.until_lent(15)

    # 48 requests of 500 tokens are 192 blocks of 128; one chunk of 32 is not lent.
    with concurrent.futures.ThreadPoolExecutor(48) as pool:
        for future in [pool.submit(cores.ask, 1, [7 + i] * 440, 60) for i in range(48)]:
            future.result(timeout=120)

    seen = [agent.dir.serving_board().read() for agent in agents]
    assert [one is not None and one.pressure_seq > 0 for one in seen] == [False, True]


def test_the_doctor_had_said_so(cores: Cores, agents: list[Agent]) -> None:
    answer = ask_about(cores.server)

    assert (answer["support"], answer["problem"]) == ("elastic", "")
    assert answer["rows"][0]["row"] == "data_parallel"
    assert answer["total_pages"] == agents[0].total
