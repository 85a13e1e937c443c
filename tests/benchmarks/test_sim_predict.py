"""The live side of the prediction: requests made again from a committed run, and what the calibration makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.sim.sim_predict import (
    BLOCK_TOKENS,
    Live,
    arrivals_of,
    at_speed,
    calibrate,
    measured,
    read_live,
)
from rose.errors import ConfigError
from rose.policy.admission import StepModel
from rose.sim.engine import Request, SimEngine

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def live() -> Live:
    return read_live(RESULTS / "coserving/coserve-live-A/2026-11-21.json")


def test_a_committed_run_s_requests_are_made_again_with_the_lengths_it_measured(live: Live) -> None:
    assert len(live.samples) > 100
    for _, segment, index, ttft_s, end_s, tokens, gaps in live.samples:
        assert live.segments[segment][index].output_tokens == tokens
        assert 0 < ttft_s <= end_s
        assert len(gaps) == tokens - 1


def test_calibration_says_what_production_alone_showed(live: Live) -> None:
    found = calibrate(live, None)
    alone = measured(live)["alone"]

    # A request that nobody disturbs: its prompt's step, then one step per token.
    assert found.serving.step_model().predict(0, 1) * 1e3 == pytest.approx(alone["tpot_p50_ms"], rel=0.1)


def test_pooled_results_and_missing_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not one run of coserve"):
        read_live(RESULTS / "coserving/coserve/2026-11-21.json")
    with pytest.raises(ConfigError, match=r"azure_llm_2023_conv\.csv"):
        read_live(RESULTS / "coserving/coserve-live-C1/2026-11-21.json")
    other = json.loads((RESULTS / "coserving/coserve-live-A/2026-11-21.json").read_text())
    other["details"]["settings"]["seed"] = 7
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="cannot be made again"):
        read_live(path)


def test_a_slower_machine_takes_longer_for_everything(live: Live) -> None:
    found = calibrate(live, None)
    slow = at_speed(found, 2.0)

    assert slow.rollout.step_model().predict(100, 16) == pytest.approx(
        2 * found.rollout.step_model().predict(100, 16)
    )
    assert slow.frontend_s == pytest.approx(2 * found.frontend_s)


def test_the_model_of_the_prefix_cache_finds_what_production_s_cache_found_live() -> None:
    """Nothing of it was fitted: blocks are vLLM's, prompts are the sender's."""
    live = read_live(RESULTS / "coserving/coserve-multiturn/2026-11-21.json")
    arrivals, _ = arrivals_of(live)
    assert arrivals.prefixes is not None
    engine = SimEngine(StepModel(), 4096, 12_288, BLOCK_TOKENS)
    asked = found = 0
    for index in range(sum(map(len, live.segments))):
        request = Request(f"p{index}", int(arrivals.prompt[index]), int(arrivals.output[index]), 0.0)
        arrivals.prefixes.mark(request, index)
        engine.add(request)
        engine.admit(12_288)
        engine.advance(1, engine.pending_tokens, 1.0)
        engine.advance(1000, 0.0, 1.0)
        assert request.repeated is not None
        engine.keep(request, request.repeated)
        asked += request.prompt
        found += request.cached

    assert asked == live.total(["alone_1"], "prefix_queries")
    assert found == pytest.approx(live.total(["alone_1"], "prefix_hits"), rel=0.02)
