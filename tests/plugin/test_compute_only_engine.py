"""What the table calls compute-only because of the model, on a real production engine: its memory stays its own, its answers are stock
vLLM's, no request fails, and the board says what a rollout engine beside it has to know."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rose.coserve.record_layout import unpack_found
from rose.coserve.records import Mode, Phase
from rose.policy.compat import Support, row, row_of_number
from tests.engine_launcher import EngineServer
from tests.plugin.ask_doctor import ask_about
from tests.plugin.conftest import ON_NEWEST
from tests.plugin.stand_in import eventually
from tests.plugin.test_serving_engine import Agent
from tests.tiny_shapes import SHAPE_ARGS, write_shape, write_weights

pytestmark = [pytest.mark.engine, pytest.mark.conformance, pytest.mark.timeout(240)]

STATES = {"qwen3_next": "GDN_ATTN", "granite": "MAMBA2", "mamba2": "MAMBA2", "lfm2": "SHORT_CONV"}
"""Shape -> kind of its states."""
REFUSED_BY_VLLM = {
    "lfm2": pytest.mark.skipif(
        not ON_NEWEST, reason="vLLM 0.31 has no short convolution of three tokens on CPUs"
    )
}
SEATS = 16
BUDGET_PAGES = 8
ENV = {"VLLM_SERVER_DEV_MODE": "1"}
Answer = tuple[list[str], list[float]]


class Production:
    def __init__(self, shape: str, server: EngineServer, args: list[str]) -> None:
        self.shape, self.server, self.args = shape, server, args

    def ask(self, prompt: list[int], max_tokens: int = 16) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 1,
        }
        answer = self.server.post("/v1/completions", {"model": str(self.server.model_dir)} | body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        return choice["logprobs"]

    def answers(self) -> list[Answer]:
        """Prompts that end alike, each twice: computed anew, then out of the prefix cache where there is one."""
        assert self.server.post("/reset_prefix_cache").status_code == 200
        asked = [self.ask(tokens(first)) for first in (0, 0, 4, 4)]
        return [(one["tokens"], one["token_logprobs"]) for one in asked]


def tokens(first: int, count: int = 400) -> list[int]:
    """A prompt of its own, but for its last 16 tokens."""
    return [5 + (first + 7 * i) % 200 for i in range(count - 16)] + list(range(20, 36))


@pytest.fixture(
    scope="module", params=[pytest.param(one, marks=REFUSED_BY_VLLM.get(one, ())) for one in STATES]
)
def production(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Production]:
    shape: str = request.param
    folder = tmp_path_factory.mktemp("engine")
    (folder / "node").mkdir(mode=0o700)
    args = [f"--max-num-seqs={SEATS}", *SHAPE_ARGS.get(shape, ())]
    model = write_shape(folder / "model", shape)
    write_weights(model)
    env = ENV | {"ROSE_DIR": str(folder / "node")}
    with EngineServer(model, role="serving", env=env, args=args) as server:
        yield Production(shape, server, args)


@pytest.fixture
def agent(production: Production) -> Iterator[Agent]:
    agent = Agent(production.server.rose_dir)
    eventually(lambda: agent.lease().phase == Phase.READY, "serving is ready")
    agent.write(slo_ttft_ns=60 * 10**9, slo_tpot_ns=60 * 10**9)
    yield agent
    agent.write(mode=int(Mode.OFF), lend_pages=0, held=0)
    lease = agent.lease()
    agent.close()
    assert (lease.phase, lease.errors) == (Phase.READY, 0)
    assert (lease.reserved_pages, lease.lent_pages) == (lease.total_pages, 0)
    assert "Traceback" not in production.server.log_path.read_text(errors="replace")


def test_it_shares_compute_only_and_says_by_what(production: Production, agent: Agent) -> None:
    lease = agent.lease()
    assert (Support(lease.support), row_of_number(lease.row)) == (Support.COMPUTE_ONLY, row("hybrid"))
    assert lease.total_pages > 0
    found = unpack_found(agent.dir.serving_lease().extra)
    assert found == f"a group of MambaSpec of {STATES[production.shape]}"
    assert agent.dir.rank("serving", 0).read() is None  # the worker is vLLM's own


def test_answers_beside_a_budget_and_switched_off_are_those_of_vllm_without_the_plugin(
    production: Production, agent: Agent
) -> None:
    env = ENV | {"VLLM_PLUGINS": ""}
    with EngineServer(production.server.model_dir, env=env, args=production.args) as stock:
        expected = Production(production.shape, stock, production.args).answers()
    assert expected[0] != expected[2]  # what comes first reaches the last token
    agent.write(lend_pages=BUDGET_PAGES, held=BUDGET_PAGES)
    assert production.answers() == expected
    agent.write(mode=int(Mode.OFF), lend_pages=0, held=0)
    assert production.answers() == expected
    agent.write(mode=int(Mode.ON), lend_pages=BUDGET_PAGES, held=BUDGET_PAGES)
    assert production.answers() == expected


def test_a_burst_runs_and_the_board_says_so(production: Production, agent: Agent) -> None:
    agent.write(lend_pages=BUDGET_PAGES, held=BUDGET_PAGES)
    board, stop, seen = agent.dir.serving_board(), threading.Event(), []

    def watch() -> None:
        while not stop.wait(0.001):
            seen.append(board.read())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with concurrent.futures.ThreadPoolExecutor(2 * SEATS) as pool:
        for done in [pool.submit(production.ask, tokens(20 + i), 60) for i in range(2 * SEATS)]:
            done.result(timeout=120)
    stop.set()
    watcher.join()

    assert max(one.running for one in seen) > 1
    assert any(one.owes_first and one.ttft_deadline_ns for one in seen)
    assert any(one.busy and one.tpot_deadline_ns for one in seen)
    assert 0 < max(one.used_pages for one in seen) <= agent.lease().total_pages
    assert all(not one.needed_pages for one in seen)
    after = board.read()
    assert after is not None
    assert after.step > 60
    eventually(lambda: not board.read().busy, "it is idle")  # type: ignore[union-attr]
    assert (after.running, after.waiting, after.breaches) == (0, 0, 0)


def test_the_doctor_had_said_so(production: Production, agent: Agent) -> None:
    answer = ask_about(production.server)
    assert (answer["support"], answer["problem"]) == (Support.COMPUTE_ONLY.label, "")
    assert answer["rows"][0]["row"] == "hybrid"
