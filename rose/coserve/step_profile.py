"""``rose profile``: measure how long an engine's steps take, fit the model that admission predicts with, say how wrong it is.

Starts the ``[engine]`` of a node's settings alone on its cores (no production, no scheduler, no relay), sends it prompts of
many lengths and batches of many sizes, and reads the steps that its plugin wrote down (``ROSE_STEP_LOG``).  Two thirds of the
steps fit the coefficients, the rest judges them.  The result is a small JSON file::

    rose profile --config node.toml --out policy-profile.json
    # node.toml:  [engine] profile = "policy-profile.json"      production:  ROSE_STEP_PROFILE=... vllm serve ...

The engine starts from these coefficients and goes on correcting them from its own steps.

Errors: a file that is not a profile is a ConfigError that names the field.  Callers: ``rose.cli``, the node agent's settings.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from rose.config import load_config
from rose.coserve.config import NodeConfig
from rose.errors import ConfigError, EngineError
from rose.policy.admission import StepModel

SCHEMA = 1
MAX_PROFILE_BYTES = 1 << 16
MAX_LOG_BYTES = 64 << 20
BAR_FRACTION = 0.10
MIN_STEPS = 60
COEFFICIENTS = ("base_s", "prefill_token_s", "decode_s", "context_token_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
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


def read_steps(path: Path) -> list[Step]:
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
    steps: list[Step] = []
    for line in lines:
        parts = line.split()
        try:
            prefill, decodes, context, seconds = int(parts[0]), int(parts[1]), int(parts[2]), float(parts[3])
        except (ValueError, IndexError):
            continue
        if seconds > 0:
            steps.append(
                Step(prefill_tokens=prefill, num_decodes=decodes, context_tokens=context, seconds=seconds)
            )
    return steps


def fit(steps: Sequence[Step], model: str = "", seed: int = 0) -> Profile:
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


def _rows(steps: Sequence[Step]) -> Any:
    """``[n, 4]``: each step's counts over its length, so that a prediction of 1 is a perfect one."""
    counts = [(1.0, s.prefill_tokens, s.num_decodes, s.context_tokens) for s in steps]
    return np.array(counts, dtype=np.float64) / np.array([[s.seconds] for s in steps])


def _residuals(steps: Sequence[Step], weights: Any) -> Any:
    return _rows(steps) @ weights - 1.0


def _solve(steps: Sequence[Step]) -> Any:
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


# --- measuring


def profile_main(
    config: Annotated[Path, typer.Option(help="A node's settings; its section engine is measured.")],
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("profile.json"),
    seconds: Annotated[float, typer.Option(min=5, help="How long to measure.")] = 60.0,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Change a setting: a.b=value.")] = None,
) -> None:
    """Measure an engine's step times, fit the latency model of admission, and print its error on held-out steps."""
    settings = load_config(NodeConfig, config, overrides or [])
    profile = asyncio.run(measure(settings, seconds, typer.echo))
    out.write_text(profile.to_json())
    for name in COEFFICIENTS:
        typer.echo(f"{name:18} {getattr(profile, name) * 1e6:10.2f} us")
    met = "within" if profile.mae_fraction <= BAR_FRACTION else "above"
    typer.echo(
        f"mean absolute error {profile.mae_fraction:.1%} (median {profile.median_error_fraction:.1%}) on "
        f"{profile.num_held_out} held-out of {profile.num_steps} steps: {met} the limit of {BAR_FRACTION:.0%}"
    )
    typer.echo(f"{out}")


async def measure(settings: NodeConfig, seconds: float, say: Any) -> Profile:
    """Run the engine alone and fit what it wrote."""
    from rose.auth import Tokens
    from rose.coserve.agent import NodeAgent

    with tempfile.TemporaryDirectory(prefix="rose-profile-") as folder:
        log = Path(folder) / "steps.log"
        engine = settings.engine.model_copy(
            update={"env": {**settings.engine.env, "ROSE_STEP_LOG": str(log)}, "profile": None}
        )
        alone = settings.model_copy(
            update={
                "dir": Path(folder) / "n",
                "mode": "on",
                "serving": None,
                "scheduler": None,
                "weights": None,
                "engine": engine,
            }
        )
        agent = NodeAgent(alone, Tokens.generate())
        running = asyncio.create_task(agent.run())
        try:
            say("starting the engine ...")
            await _ready(agent, running, settings.engine.start_timeout_s)
            say(f"measuring for {seconds:.0f} s ...")
            await _exercise(agent, seconds, settings.engine.max_model_len)
        finally:
            agent.stop()
            await asyncio.gather(running, return_exceptions=True)
        return fit(read_steps(log), settings.engine.model)


async def _ready(agent: Any, running: asyncio.Task[None], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while agent.engine.state != "ready" or not (
            agent.device.rollout and agent.device.rollout.reserved_pages
        ):
            if running.done():
                running.result()
                raise EngineError("ended before it was ready", field="rollout engine")
            await asyncio.sleep(0.1)


async def _exercise(agent: Any, seconds: float, max_model_len: int) -> None:
    """Waves of requests: batch sizes and prompt lengths drawn so that every coefficient is exercised."""
    rng = random.Random(0)
    number = 0
    until_s = asyncio.get_running_loop().time() + seconds
    longest = max(16, max_model_len // 2)
    while asyncio.get_running_loop().time() < until_s:
        batch = rng.choice([1, 1, 2, 4, 8, 16])
        length = min(longest, int(8 * 2 ** rng.uniform(0, 7)))
        bodies: list[dict[str, Any]] = []
        for _ in range(batch):
            number += 1
            tokens = [rng.randrange(100) for _ in range(max(1, int(length * rng.uniform(0.5, 1.0))))]
            sampling = {"max_tokens": rng.choice([4, 16, 32]), "temperature": 1.0, "ignore_eos": True}
            bodies.append(
                {"request_id": f"profile-{number}", "token_ids": tokens, "sampling_params": sampling}
            )
        calls = [
            agent.engine.call("POST", "/inference/v1/generate", body, timeout_s=120.0) for body in bodies
        ]
        await asyncio.gather(*calls)
