"""``rose profile``: the fit, its error on held-out steps, and what a bad file is answered with."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rose.coserve.step_profile import EngineStep, fit, load_profile, read_steps
from rose.errors import ConfigError, EngineError

TRUE = (0.012, 0.0002, 0.0008, 1e-6)


def steps(num: int, noise: float, seed: int = 0) -> list[EngineStep]:
    rng = random.Random(seed)
    found: list[EngineStep] = []
    for _ in range(num):
        prefill, decodes = rng.choice([0, 0, rng.randint(1, 512)]), rng.randint(0, 32)
        context = decodes * rng.randint(1, 500)
        exact = TRUE[0] + TRUE[1] * prefill + TRUE[2] * decodes + TRUE[3] * context
        found.append(
            EngineStep(
                prefill_tokens=prefill,
                num_decodes=decodes,
                context_tokens=context,
                seconds=exact * rng.lognormvariate(0, noise),
            )
        )
    return found


def test_exact_steps_give_their_coefficients_back() -> None:
    profile = fit(steps(300, 0.0))
    assert profile.base_s == pytest.approx(TRUE[0], rel=1e-6)
    assert profile.prefill_token_s == pytest.approx(TRUE[1], rel=1e-6)
    assert profile.decode_s == pytest.approx(TRUE[2], rel=1e-6)
    assert profile.context_token_s == pytest.approx(TRUE[3], rel=1e-6)
    assert profile.mae_fraction < 1e-9
    assert (profile.num_steps, profile.num_held_out) == (300, 100)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_five_percent_is_predicted_within_ten(seed: int) -> None:
    assert 0.02 < fit(steps(600, 0.05, seed)).mae_fraction < 0.10


def test_the_error_is_of_steps_that_did_not_fit_it() -> None:
    """Pure noise cannot be predicted: an error measured on the fitted steps would look better than it is."""
    assert fit(steps(90, 0.8)).mae_fraction > 0.3


def test_a_coefficient_is_never_negative() -> None:
    rng = random.Random(1)
    falling = [
        EngineStep(
            prefill_tokens=n, num_decodes=1, context_tokens=0, seconds=0.1 - n * 1e-4 + rng.random() * 1e-4
        )
        for n in range(300)
    ]
    profile = fit(falling)
    assert min(profile.base_s, profile.prefill_token_s, profile.decode_s, profile.context_token_s) >= 0
    assert profile.step_model().predict(10) > 0


def test_too_few_steps_say_nothing() -> None:
    with pytest.raises(EngineError, match="60 are needed"):
        fit(steps(59, 0.0))


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile = fit(steps(100, 0.01), "policy")
    path.write_text(profile.to_json())
    assert load_profile(path) == profile


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "base_s": 1}', "null", '{"schema":1,"x":2}']
)
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"p\.json"):
        load_profile(path)


def test_impossible_coefficients_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    table = json.loads(fit(steps(100, 0.0)).to_json())
    path.write_text(json.dumps({**table, "base_s": -1.0}))
    with pytest.raises(ConfigError, match="base_s"):
        load_profile(path)


def test_the_log_of_a_killed_engine_is_read_up_to_its_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_text("10 2 30 0.5\n0 1 5 0.25\nnonsense\n3 1")
    assert read_steps(path) == [
        EngineStep(prefill_tokens=10, num_decodes=2, context_tokens=30, seconds=0.5),
        EngineStep(prefill_tokens=0, num_decodes=1, context_tokens=5, seconds=0.25),
    ]
    with pytest.raises(EngineError, match="no steps"):
        read_steps(tmp_path / "none")
