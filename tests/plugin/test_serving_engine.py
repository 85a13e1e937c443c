"""A real production engine with the plugin on, against stand-ins for the node agent and the rollout engine."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.auth import Tokens
from rose.config import validate
from rose.coserve.agent import NodeAgent
from rose.coserve.latency import p99_between, read_page
from rose.coserve.node_config import NodeConfig
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState, Phase, RolloutLease, ServingLease
from rose.coserve.state_file import StateFile
from rose.sim.metrics_source import read_scrapes, traffic_of
from rose.sim.plan import make_plan
from rose.sim.plan_words import text as plan_text
from rose.sim.scenario import Scenario
from tests.engine_launcher import EngineServer
from tests.plugin.stand_in import eventually
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

PROMPT = list(range(5, 105))


@pytest.fixture(scope="module")
def node_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, node_dir: Path) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    env = {"ROSE_DIR": str(node_dir), "ROSE_GUARD": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "rose"}
    with EngineServer(folder, role="serving", env=env, args=["--max-num-seqs=64"]) as server:
        yield server


class Agent:
    """Node agent and rollout engine at the shared files."""

    def __init__(self, path: Path) -> None:
        self.dir = NodeDir(path)
        self._writer = self.dir.node_writer()
        self._peer_writer = self.dir.rollout_lease_writer()
        self._lease = self.dir.serving_lease()
        self._state = NodeState(mode=Mode.ON, has_serving=1)
        self._peer = RolloutLease(phase=Phase.READY)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.beating = True
        self.write()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def write(self, *, held: int | None = None, **fields: int) -> None:
        with self._lock:
            self._state = dataclasses.replace(self._state, **fields)
            if held is not None:
                self._peer = dataclasses.replace(self._peer, reserved_pages=held)
            if not self.beating:
                return
            now_ns = time.monotonic_ns()
            self._writer.write(dataclasses.replace(self._state, heartbeat_ns=now_ns))
            self._peer_writer.write(dataclasses.replace(self._peer, heartbeat_ns=now_ns))
        self._writer.wake()
        self._peer_writer.wake()

    def _beat(self) -> None:
        while not self._stop.wait(0.2):
            self.write()

    def lease(self) -> ServingLease:
        lease = self._lease.read()
        assert lease is not None
        return lease

    def resident_pages(self) -> int:
        record = self.dir.rank("serving", 0).read()
        assert record is not None
        return record.resident_pages

    def until_lent(self, pages: int) -> None:
        eventually(
            lambda: self.lease().lent_pages == pages and self.resident_pages() == self.total - pages,
            f"{pages} pages lent, last {self.lease()} with {self.resident_pages()} resident",
        )

    @property
    def total(self) -> int:
        return self.lease().total_pages

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._writer.close()
        self._peer_writer.close()


@pytest.fixture
def agent(server: EngineServer, node_dir: Path) -> Iterator[Agent]:
    agent = Agent(node_dir)
    eventually(lambda: agent.lease().phase == Phase.READY, "serving is ready")
    yield agent
    agent.beating = True
    agent.write(mode=int(Mode.OFF), held=0)
    agent.until_lent(0)
    agent.close()


def complete(server: EngineServer, prompt: list[int], max_tokens: int = 8) -> list[str]:
    answer = server.post(
        "/v1/completions",
        {
            "model": str(server.model_dir),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        },
    )
    answer.raise_for_status()
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    return answer.json()["choices"][0]["text"]


def test_an_idle_engine_lends_what_is_asked_and_its_memory_really_goes(
    server: EngineServer, agent: Agent
) -> None:
    agent.write(lend_pages=10)

    agent.until_lent(10)


def test_off_brings_everything_back(server: EngineServer, agent: Agent) -> None:
    agent.write(lend_pages=10)
    agent.until_lent(10)

    agent.write(mode=int(Mode.OFF))

    agent.until_lent(0)


def test_observe_lends_nothing(server: EngineServer, agent: Agent) -> None:
    agent.write(mode=int(Mode.OBSERVE), lend_pages=10)
    complete(server, PROMPT)

    agent.until_lent(0)


def test_the_floor_is_never_lent(server: EngineServer, agent: Agent) -> None:
    agent.write(lend_pages=10_000, floor_pages=6)

    agent.until_lent(agent.total - 6)
    agent.write(floor_pages=0)


def test_tokens_and_log_probs_do_not_change_with_what_is_lent_and_given_back(
    server: EngineServer, agent: Agent
) -> None:
    def answer() -> tuple[list[str], list[float]]:
        body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
        found = server.post("/v1/completions", {"model": str(server.model_dir), **body})
        found.raise_for_status()
        logprobs = found.json()["choices"][0]["logprobs"]
        return logprobs["tokens"], logprobs["token_logprobs"]

    before = answer()
    assert len(before[1]) == 40
    for pages in (12, 0, 15):
        agent.write(lend_pages=pages)
        agent.until_lent(pages)
        assert answer() == before


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_is_told_to_sleep_takes_back_and_lends_and_answers_when_it_wakes(
    server: EngineServer, agent: Agent, level: int
) -> None:
    """Without sleep mode, which vLLM's CPU build has not: it pauses and empties its caches, and no memory goes."""
    agent.write(lend_pages=10)
    agent.until_lent(10)
    before = complete(server, PROMPT)

    assert server.post(f"/sleep?level={level}").status_code == 200
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        meanwhile = pool.submit(complete, server, PROMPT)
        agent.write(lend_pages=4)
        agent.until_lent(4)
        assert not meanwhile.done()
        assert server.post("/wake_up").status_code == 200  # 0.31 answers with an empty body
        assert meanwhile.result(timeout=60) == before
    agent.write(lend_pages=10)
    agent.until_lent(10)
    assert complete(server, PROMPT) == before


def test_memory_the_peer_still_holds_is_waited_for_as_a_number(server: EngineServer, agent: Agent) -> None:
    agent.write(lend_pages=10)
    agent.until_lent(10)
    agent.write(held=10)

    agent.write(lend_pages=0)
    eventually(lambda: agent.lease().reserved_pages == agent.total, "serving has reserved it all")
    complete(server, PROMPT)  # serving goes on meanwhile
    assert agent.resident_pages() == agent.total - 10

    agent.write(held=4)
    eventually(lambda: agent.resident_pages() == agent.total - 4, "what was released is back")
    agent.write(held=0)
    agent.until_lent(0)


def test_a_burst_takes_lent_memory_back_without_the_agent(server: EngineServer, agent: Agent) -> None:
    agent.write(lend_pages=agent.total - 1)
    agent.until_lent(agent.total - 1)

    # 48 requests of 500 tokens are 192 blocks of 128; one chunk of 32 is not lent.
    with concurrent.futures.ThreadPoolExecutor(48) as pool:
        for future in [pool.submit(complete, server, [7 + i] * 440, 60) for i in range(48)]:
            future.result(timeout=120)

    board = agent.dir.serving_board().read()
    assert board is not None
    assert board.pressure_seq > 0


def test_a_silent_agent_means_nothing_is_lent(server: EngineServer, agent: Agent) -> None:
    agent.write(lend_pages=10)
    agent.until_lent(10)

    agent.beating = False

    agent.until_lent(0)


def test_stock_metrics_read_as_without_the_plugin(server: EngineServer, agent: Agent) -> None:
    agent.write(lend_pages=10)
    agent.until_lent(10)
    complete(server, PROMPT)

    def usage() -> float:
        lines = server.get("/metrics").text.splitlines()
        return float(next(x for x in lines if x.startswith("vllm:kv_cache_usage_perc")).rsplit(" ", 1)[1])

    eventually(lambda: usage() == 0.0, "an idle engine reports no KV use")


def test_its_p99_is_read_from_its_metrics_page(server: EngineServer, agent: Agent) -> None:
    before = read_page(server.get("/metrics").text)
    complete(server, PROMPT, max_tokens=20)
    after = read_page(server.get("/metrics").text)

    for kind in ("ttft", "tpot"):
        p99_s = p99_between(before[kind], after[kind])
        assert p99_s is not None
        assert 0 < p99_s < 60


def test_the_prefix_cache_can_be_reset_while_memory_is_lent(server: EngineServer, agent: Agent) -> None:
    agent.write(lend_pages=10)
    agent.until_lent(10)
    before = complete(server, PROMPT, 20)

    assert server.post("/reset_prefix_cache").status_code == 200

    assert complete(server, PROMPT, 20) == before
    agent.until_lent(10)


def test_a_loan_of_all_cached_pages_costs_prompts_that_come_again_a_point_at_most(
    server: EngineServer, agent: Agent
) -> None:
    """Taken all at once, as they were, the next prompts would find nothing of theirs."""
    rng = random.Random(3)
    prompts = [[rng.randrange(5, 200) for _ in range(400)] for _ in range(60)]  # three whole blocks each
    assert server.post("/reset_prefix_cache").status_code == 200
    agent.write(max_loss_ppm=10_000)

    def ask() -> None:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(complete, server, prompt, 2) for prompt in prompts]:
                future.result(timeout=120)

    ask()
    eventually(lambda: agent.lease().queried_tokens >= 60 * 400, "all prompts are counted")
    before = agent.lease()
    agent.write(lend_pages=agent.total - 1)
    eventually(lambda: agent.lease().lent_pages > 3, "what holds no prefix is lent")
    eventually(lambda: agent.lease().kept_pages > 0, "what holds some is kept, and it says so")
    ask()
    eventually(
        lambda: agent.lease().queried_tokens >= before.queried_tokens + 60 * 400, "all prompts are counted"
    )

    after = agent.lease()
    lost, asked = (getattr(after, name) - getattr(before, name) for name in ("lost_tokens", "queried_tokens"))
    assert 0.01 * asked >= lost


class RealAgent:
    """The node agent's own rounds on production's real files; the rollout engine obeys at once."""

    def __init__(self, path: Path) -> None:
        lending = {"grow_period_s": 0.02, "use_window_s": 0.05, "cool_down_s": 0.05, "growth_window_s": 1.0}
        table = {
            "node_id": "n0",
            "dir": str(path),
            "serving": {"slo_ttft_ms": 5000, "slo_tpot_ms": 5000},
            "mode": "on",
            "engine": {"model": "policy", "max_model_len": 64},
            "lending": lending,
        }
        self.agent = NodeAgent(validate(NodeConfig, table), Tokens.generate())
        self.agent._state = StateFile(self.agent)
        self._peer = self.agent.dir.rollout_lease_writer()
        self._stop = threading.Event()
        self.off = threading.Event()
        """Said to the agent in its own thread: it is no other's."""
        self.agent._set_mode()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            now_ns = time.monotonic_ns()
            held = min(self.agent.policy.lend_pages, max(0, self.lent_pages))
            self._peer.write(RolloutLease(phase=Phase.READY, reserved_pages=held, heartbeat_ns=now_ns))
            if self.off.is_set() and self.agent.mode != Mode.OFF:
                self.agent.mode = Mode.OFF
                self.agent._set_mode()
            self.agent._round()

    @property
    def lent_pages(self) -> int:
        lease = self.agent.device.lease
        return lease.lent_pages if lease is not None else -1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for writer in (self.agent._state, self._peer):
            writer.close()


def test_a_loan_goes_on_while_no_hit_is_lost_and_shrinks_when_hits_are(
    server: EngineServer, node_dir: Path
) -> None:
    def ask(prompts: list[list[int]]) -> None:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(complete, server, prompt, 2) for prompt in prompts]:
                future.result(timeout=120)

    def fresh(count: int) -> list[list[int]]:
        return [[rng.randrange(5, 200) for _ in range(400)] for _ in range(count)]  # three whole blocks each

    rng = random.Random(0)
    # What earlier prompts left would be kept: too few of them have come to say that nobody wants it.
    assert server.post("/reset_prefix_cache").status_code == 200
    real = RealAgent(node_dir)
    try:
        talks = fresh(80)  # 240 of 512 blocks
        eventually(lambda: real.lent_pages > 12, "most of the device is lent")
        ask(talks)
        eventually(lambda: real.agent.device.lease.queried_tokens >= 80 * 400, "all prompts are counted")  # type: ignore[union-attr]
        lease = real.agent.device.lease
        assert lease is not None
        assert lease.lost_tokens == 0
        assert real.lent_pages > 12

        # The second turns: a whole device would have all first turns, the part that is not lent has the latest.
        ask([talk[:400] + [7] * 20 for talk in talks])

        eventually(lambda: real.lent_pages < 10, "the loan shrinks")
        status = real.agent.status()
        assert status["serving"]["lost_tokens"] >= 0.01 * status["serving"]["queried_tokens"]
        assert status["lending"]["hit_rate_loss"] > 0.01
        assert status["lending"]["cache_limit_pages"] < 10
        assert status["lending"]["reason"] == "serving's prompts miss prefixes"
    finally:
        real.off.set()
        eventually(lambda: real.lent_pages == 0, "everything is back")
        real.close()


def test_serving_adds_no_routes(server: EngineServer) -> None:
    assert server.get("/rose/status").status_code == 404


def test_two_scrapes_of_a_real_engine_are_enough_for_a_plan(server: EngineServer, tmp_path: Path) -> None:
    """``rose plan --scrapes``: how many requests, how long they were, how fast it was, in vLLM's own words."""
    path = tmp_path / "day.prom"

    def scrape(at_s: float) -> None:
        with path.open("a") as file:
            file.write(f"# scraped {at_s}\n{server.get('/metrics').text}")

    scrape(0.0)
    for number in range(6):
        complete(server, PROMPT[: 50 if number % 2 else 100], max_tokens=8)
    eventually(lambda: "vllm:request_success_total{" in server.get("/metrics").text, "requests are counted")
    scrape(60.0)

    scenario = Scenario.model_validate(
        {
            "name": "cpu",
            "devices": {"cpu": {"memory_gb": 8, "bandwidth_tb_s": 0.02, "tflops": 0.2}},
            "models": {  # larger than the one that was scraped: a second of few steps is simulated quickly
                "small": {"params_billion": 1.0, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}
            },
            "fleet": {"device": "cpu", "dedicated": 1, "serving": 1, "reserve_gb": 1.0},
            "serving": {"model": "small"},
            "job": {
                "model": "small",
                "group_size": 4,
                "max_model_len": 512,
                "prompt_tokens": 50,
                "output_max": 64,
            },
            "cells": {"serving": 1, "dedicated": 1, "warm_s": 5, "seconds": 75, "in_flight_per_engine": 4},
        }
    )
    traffic = traffic_of(read_scrapes(path), None, scenario.serving)
    assert traffic.num_engines == 1
    assert traffic.rate(0.0, 60.0) == pytest.approx(6 / 60.0)
    drawn = traffic.arrivals(scenario.serving, 0.0, 60.0, 100, seed=0)
    assert drawn.output.mean() == pytest.approx(8, abs=1)
    assert drawn.prompt.mean() == pytest.approx(75, rel=0.1)
    assert 0 < traffic.observed_ms["ttft_p99"] < 60_000

    plan = make_plan(scenario, traffic, workers=1)
    assert plan.tokens_a_day > 0
    assert "requests simulated" in plan_text(plan)
