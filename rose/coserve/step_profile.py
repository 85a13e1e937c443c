"""Step times of an engine, and the model that admission predicts with, fitted to them.

``rose profile`` (:mod:`rose.coserve.profile_engine`) measures them; the plugin writes them down (``ROSE_STEP_LOG``).  Two thirds of
the steps fit the coefficients, the rest judges them.  The result is a small JSON file.  The engine starts from these coefficients
and goes on correcting them from its own steps.

Errors: a file that is not a profile is a ConfigError that names the field.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rose.errors import ConfigError, EngineError
from rose.policy.admission import StepModel

SCHEMA = 1
MAX_PROFILE_BYTES = 1 << 16
MAX_LOG_BYTES = 64 << 20
BAR_FRACTION = 0.10
MIN_STEPS = 60
COEFFICIENTS = ("base_s", "prefill_token_s", "decode_s", "context_token_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStep:
    """One engine step as the plugin measured it."""

    prefill_tokens: int
    num_decodes: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Coefficients, and the mean of ``|predicted - measured| / measured`` over steps that did not fit them."""

    model: str
    base_s: float
    prefill_token_s: float
    decode_s: float
    context_token_s: float
    mae_fraction: float
    median_error_fraction: float
    num_steps: int
    num_held_out: int

    def step_model(self) -> StepModel:
        return StepModel(**{name: getattr(self, name) for name in COEFFICIENTS})

    def to_json(self) -> str:
        table = {"schema": SCHEMA, **{name: getattr(self, name) for name in self.__slots__}}
        return json.dumps(table, indent=1) + "\n"


def read_steps(path: Path) -> list[EngineStep]:
    """Steps of a log; a torn last line is dropped.

    Raises:
        EngineError: No log, or one of nonsense: the engine did not run with our plugin.
    """
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise EngineError(f"is larger than {MAX_LOG_BYTES} bytes", field=str(path))
        lines = path.read_text().splitlines()
    except OSError as error:
        raise EngineError(f"no steps were written: {error.strerror}", field=str(path)) from error
    steps: list[EngineStep] = []
    for line in lines:
        parts = line.split()
        try:
            prefill, decodes, context, seconds = int(parts[0]), int(parts[1]), int(parts[2]), float(parts[3])
        except (ValueError, IndexError):
            continue
        if seconds > 0:
            steps.append(
                EngineStep(
                    prefill_tokens=prefill, num_decodes=decodes, context_tokens=context, seconds=seconds
                )
            )
    return steps


def fit(steps: Sequence[EngineStep], model: str = "", seed: int = 0) -> Profile:
    """Least squares on the *relative* error with coefficients that are not negative; every third step is held out.

    The slowest hundredth of the fitted steps is left out (a host that was elsewhere); of the held-out ones none is.

    Raises:
        EngineError: Too few steps to say anything.
    """
    if len(steps) < MIN_STEPS:
        raise EngineError(f"only {len(steps)} steps were measured, {MIN_STEPS} are needed", field="profile")
    order = random.Random(seed).sample(range(len(steps)), len(steps))
    held, fitted = [steps[i] for i in order[::3]], [steps[i] for n, i in enumerate(order) if n % 3]
    first = _solve(fitted)
    errors = np.abs(_residuals(fitted, first))
    kept = [step for step, error in zip(fitted, errors, strict=True) if error <= np.quantile(errors, 0.99)]
    weights = _solve(kept)
    wrong = np.abs(_residuals(held, weights))
    return Profile(
        model=model,
        **dict(zip(COEFFICIENTS, (float(w) for w in weights), strict=True)),
        mae_fraction=float(np.mean(wrong)),
        median_error_fraction=float(np.median(wrong)),
        num_steps=len(steps),
        num_held_out=len(held),
    )


def _rows(steps: Sequence[EngineStep]) -> Any:
    """``[n, 4]``: each step's counts over its length, so that a prediction of 1 is a perfect one."""
    counts = [(1.0, s.prefill_tokens, s.num_decodes, s.context_tokens) for s in steps]
    return np.array(counts, dtype=np.float64) / np.array([[s.seconds] for s in steps])


def _residuals(steps: Sequence[EngineStep], weights: Any) -> Any:
    return _rows(steps) @ weights - 1.0


def _solve(steps: Sequence[EngineStep]) -> Any:
    """Non-negative least squares by dropping the most negative column; four columns make that cheap and exact enough."""
    rows = _rows(steps)
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    columns = list(range(4))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, columns] / scale[columns], np.ones(len(rows)), rcond=None)
        worst = int(np.argmin(found))
        if found[worst] >= 0 or len(columns) == 1:
            weights = np.zeros(4)
            weights[columns] = np.maximum(found, 0.0) / scale[columns]
            return weights
        columns.pop(worst)


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: It is none; the message names the file and what is wrong.
    """
    try:
        if path.stat().st_size > MAX_PROFILE_BYTES:
            raise ConfigError(f"is larger than {MAX_PROFILE_BYTES} bytes", field=str(path))
        table = json.loads(path.read_bytes())
        if not isinstance(table, dict) or table.pop("schema", None) != SCHEMA:
            raise ConfigError("is no step profile of this version", field=str(path), fix="rose profile")
        profile = Profile(**table)
        profile.step_model()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=str(path)) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"is no step profile: {error}", field=str(path), fix="rose profile") from error
    return profile
