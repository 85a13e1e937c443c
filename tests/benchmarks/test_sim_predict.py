"""The live side of the prediction: requests made again from a committed run, and what the calibration makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.sim_predict import Live, at_speed, calibrate, measured, read_live
from rose.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def live() -> Live:
    return read_live(RESULTS / "2026-11-21-coserve-live-A.json")


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
        read_live(RESULTS / "coserve-2026-11-21-2core.json")
    with pytest.raises(ConfigError, match=r"azure_llm_2023_conv\.csv"):
        read_live(RESULTS / "2026-11-21-coserve-live-C1.json")
    other = json.loads((RESULTS / "2026-11-21-coserve-live-A.json").read_text())
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
