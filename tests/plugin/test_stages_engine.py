"""A pipeline of two stages on a real production engine: it shares compute, and its answers are stock vLLM's."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.coserve.record_layout import unpack_found
from rose.coserve.records import Mode, Phase
from rose.policy.compat import Support, row, row_of_number
from tests.engine_launcher import EngineServer
from tests.plugin.ask_doctor import ask_about
from tests.plugin.stand_in import eventually
from tests.plugin.test_compute_only_engine import BUDGET_PAGES, ENV, SEATS, Production, tokens
from tests.plugin.test_serving_engine import Agent
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.conformance, pytest.mark.timeout(300)]

ARGS = [
    "--pipeline-parallel-size=2",
    f"--max-num-seqs={SEATS}",
    # vLLM's CPU build makes a later stage's buffers in its warm-up, which it leaves out where it runs eagerly with a given cache.
    "--no-enforce-eager",
    '--compilation-config={"mode":1,"backend":"eager"}',
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def production(model: Path) -> Iterator[Production]:
    with EngineServer(model, role="serving", env=ENV, args=ARGS) as server:
        yield Production("stages", server, ARGS)


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
    assert (Support(lease.support), row_of_number(lease.row)) == (
        Support.COMPUTE_ONLY,
        row("pipeline_parallel"),
    )
    assert lease.total_pages > 0
    assert unpack_found(agent.dir.serving_lease().extra) == "parallel_config.pipeline_parallel_size = 2"
    answer = ask_about(production.server)
    assert (answer["support"], answer["problem"]) == (Support.COMPUTE_ONLY.label, "")
    assert [one["row"] for one in answer["rows"]] == ["pipeline_parallel"]


def test_answers_beside_a_budget_and_switched_off_are_those_of_vllm_without_the_plugin(
    production: Production, agent: Agent
) -> None:
    with EngineServer(production.server.model_dir, env=ENV | {"VLLM_PLUGINS": ""}, args=ARGS) as stock:
        expected = Production("stages", stock, ARGS).answers()
    assert expected[0] != expected[2]
    agent.write(lend_pages=BUDGET_PAGES, held=BUDGET_PAGES)
    assert production.answers() == expected
    agent.write(mode=int(Mode.OFF), lend_pages=0, held=0)
    assert production.answers() == expected


def test_the_board_times_a_token_and_not_the_gap_between_two_batches(
    production: Production, agent: Agent
) -> None:
    """A stand-in of a rollout engine has every step told: while both stages have work, one step ends in the time of another."""
    agent.write(lend_pages=BUDGET_PAGES, held=BUDGET_PAGES)
    board, stop, seen = agent.dir.serving_board(), threading.Event(), []

    def watch() -> None:
        while not stop.wait(0.0005):
            seen.append(board.read())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with concurrent.futures.ThreadPoolExecutor(2 * SEATS) as pool:
        for done in [pool.submit(production.ask, tokens(20 + i), 60) for i in range(2 * SEATS)]:
            done.result(timeout=120)
    stop.set()
    watcher.join()

    ends = {one.step: one for one in seen}
    assert max(one.running for one in seen) > 1
    assert any(one.owes_first and one.ttft_deadline_ns for one in seen)
    assert any(one.busy and one.tpot_deadline_ns for one in seen)
    first, last = ends[min(ends)], ends[max(ends)]
    # Each step's own time, together, is more than what passed: they overlap.  What passed is counted once.
    assert last.busy_ns - first.busy_ns <= last.written_ns - first.written_ns
    assert all(not one.needed_pages for one in seen)
    eventually(lambda: not board.read().busy, "it is idle")  # type: ignore[union-attr]
    after = board.read()
    assert after is not None
    assert (after.running, after.waiting, after.breaches) == (0, 0, 0)
