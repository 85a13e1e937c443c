"""A model of text and images (Idefics 3's shape, as SmolVLM) on a real production engine: its answers are stock vLLM's whatever is lent, memory moves and
comes back, and the board counts what an image takes."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.records import Mode, Phase
from rose.policy.compat import Support
from tests.engine_launcher import EngineServer
from tests.plugin.ask_doctor import ask_about
from tests.plugin.stand_in import eventually
from tests.plugin.test_serving_engine import Agent
from tests.tiny_shapes import image_url, write_shape, write_weights

pytestmark = [pytest.mark.engine, pytest.mark.conformance, pytest.mark.timeout(240)]

SEATS = 16
ARGS = (f"--max-num-seqs={SEATS}",)
ENV = {"VLLM_SERVER_DEV_MODE": "1"}
FIRST_WORD = 20
Answer = tuple[list[str], list[float]]


class Production:
    def __init__(self, server: EngineServer) -> None:
        self.server = server

    def ask(self, images: list[int], words: int = 100, max_tokens: int = 16) -> Answer:
        """Seeded images, and so many words behind them."""
        content: list[Any] = [{"type": "image_url", "image_url": {"url": image_url(one)}} for one in images]
        text = " ".join(f"w{FIRST_WORD + index % 100}" for index in range(words))
        body = {
            "model": str(self.server.model_dir),
            "messages": [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": True,
        }
        answer = self.server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        said = choice["logprobs"]["content"]
        return [one["token"] for one in said], [one["logprob"] for one in said]

    def answers(self) -> list[Answer]:
        """The same words behind no image, one and two, each computed anew and then out of the prefix cache."""
        assert self.server.post("/reset_prefix_cache").status_code == 200
        return [self.ask(images) for images in ([], [0], [0], [1], [1, 0], [1, 0])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_shape(tmp_path_factory.mktemp("model") / "idefics3", "idefics3")
    write_weights(folder)
    return folder


@pytest.fixture(scope="module")
def production(model: Path) -> Iterator[Production]:
    with EngineServer(model, role="serving", env=ENV | {"ROSE_GUARD": "1"}, args=ARGS) as server:
        yield Production(server)


@pytest.fixture
def agent(production: Production) -> Iterator[Agent]:
    agent = Agent(production.server.rose_dir)
    eventually(lambda: agent.lease().phase == Phase.READY, "serving is ready")
    yield agent
    agent.write(mode=int(Mode.OFF), lend_pages=0, held=0)
    agent.until_lent(0)
    lease = agent.lease()
    agent.close()
    assert (lease.phase, lease.errors) == (Phase.READY, 0)
    assert "Traceback" not in production.server.log_path.read_text(errors="replace")


def test_answers_are_the_same_whatever_is_lent(production: Production, agent: Agent) -> None:
    assert agent.lease().support == Support.ELASTIC
    alone = production.answers()
    assert len({tuple(numbers) for _, numbers in alone}) >= 4  # each image is seen
    for pages in (agent.total - 1, 0):
        agent.write(lend_pages=pages)
        agent.until_lent(pages)
        assert production.answers() == alone
    agent.write(lend_pages=agent.total - 1)
    agent.until_lent(agent.total - 1)
    agent.write(mode=int(Mode.OFF), lend_pages=agent.total - 1)
    agent.until_lent(0)
    assert production.answers() == alone


def test_answers_while_memory_is_lent_are_those_of_vllm_without_the_plugin(
    production: Production, agent: Agent
) -> None:
    env = ENV | {"VLLM_PLUGINS": ""}
    with EngineServer(production.server.model_dir, env=env, args=ARGS) as stock:
        expected = Production(stock).answers()
    assert expected[1] != expected[3]  # the image reaches the last token
    agent.write(lend_pages=agent.total - 1)
    agent.until_lent(agent.total - 1)
    assert production.answers() == expected


def test_a_burst_of_images_takes_lent_memory_back_and_its_steps_are_learned(
    production: Production, agent: Agent
) -> None:
    agent.write(lend_pages=agent.total - 1, slo_ttft_ns=60 * 10**9, slo_tpot_ns=60 * 10**9)
    agent.until_lent(agent.total - 1)
    board, stop, seen = agent.dir.serving_board(), threading.Event(), []
    before = board.read()
    assert before is not None

    def watch() -> None:
        while not stop.wait(0.001):
            seen.append(board.read())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with concurrent.futures.ThreadPoolExecutor(SEATS) as pool:
        for done in [
            pool.submit(production.ask, [10 + 2 * one, 11 + 2 * one], 200, 60) for one in range(2 * SEATS)
        ]:
            done.result(timeout=120)
    stop.set()
    watcher.join()

    after = board.read()
    assert after is not None
    assert after.pressure_seq > before.pressure_seq
    assert after.breaches == before.breaches
    assert any(one.owes_first and one.ttft_deadline_ns for one in seen)


def test_the_doctor_had_said_so(production: Production, agent: Agent) -> None:
    answer = ask_about(production.server)
    lease = agent.lease()
    assert (answer["support"], answer["problem"]) == (Support(lease.support).label, "")
    assert answer["total_pages"] == lease.total_pages
    assert [one["row"] for one in answer["rows"]] == ["multimodal"]
