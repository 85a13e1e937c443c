"""``rose profile``: measure how long an engine's steps take, and say how wrong the fitted model is.

Starts the ``[engine]`` of a node's settings alone on its cores (no production, no scheduler, no relay), sends it prompts of
many lengths and batches of many sizes, and fits the steps that its plugin wrote down (:mod:`rose.coserve.step_profile`)::

    rose profile --config node.toml --out policy-profile.json
    # node.toml:  [engine] profile = "policy-profile.json"      production:  ROSE_STEP_PROFILE=... vllm serve ...
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from rose.auth import Tokens
from rose.config import load_config
from rose.coserve.agent import NodeAgent
from rose.coserve.node_config import NodeConfig
from rose.coserve.step_profile import BAR_FRACTION, COEFFICIENTS, Profile, fit, read_steps
from rose.errors import ConfigError, EngineError


def profile_main(
    config: Annotated[Path, typer.Option(help="A node's settings; its section engine is measured.")],
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("profile.json"),
    seconds: Annotated[float, typer.Option(min=5, help="How long to measure.")] = 60.0,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Change a setting: a.b=value.")] = None,
) -> None:
    """Measure an engine's step times, fit the latency model of admission, and print its error on held-out steps."""
    settings = load_config(NodeConfig, config, overrides or [])
    _require_place(out)
    profile = asyncio.run(measure(settings, seconds, typer.echo))
    try:
        out.write_text(profile.to_json())
    except OSError as error:
        typer.echo(profile.to_json())  # a minute's work
        raise ConfigError(f"{out} cannot be written: {error.strerror}", field="--out") from error
    for name in COEFFICIENTS:
        typer.echo(f"{name:18} {getattr(profile, name) * 1e6:10.2f} us")
    met = "within" if profile.mae_fraction <= BAR_FRACTION else "above"
    typer.echo(
        f"mean absolute error {profile.mae_fraction:.1%} (median {profile.median_error_fraction:.1%}) on "
        f"{profile.num_held_out} held-out of {profile.num_steps} steps: {met} the limit of {BAR_FRACTION:.0%}"
    )
    typer.echo(f"{out}")


def _require_place(out: Path) -> None:
    """Raises ConfigError: What is measured could not be written there."""
    folder = out.absolute().parent
    if out.is_dir():
        raise ConfigError(f"{out} is a directory", field="--out", fix="name a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        wrong = "cannot be written" if folder.is_dir() else "is no directory"
        raise ConfigError(f"{folder} {wrong}", field="--out", fix=f"mkdir -p {folder}, or name another")


async def measure(settings: NodeConfig, seconds: float, say: Any) -> Profile:
    """Run the engine alone and fit what it wrote.

    Raises:
        EngineError: It cannot be started, died, was not ready in time, or ran too few steps.
    """
    with tempfile.TemporaryDirectory(prefix="rose-profile-") as folder:
        log = Path(folder) / "steps.log"
        engine = settings.engine.model_copy(
            update={
                "env": {**settings.engine.env, "ROSE_STEP_LOG": str(log)},
                "profile": None,
                "max_restarts": 0,  # somebody waits: what it dies of is said at once
            }
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
        if refused := agent.engine.look():
            raise EngineError(refused, field="rollout engine")
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
    """Raises EngineError: It died, or was not ready in time."""
    engine = agent.engine

    def ended(why: str) -> EngineError:
        said = f": {engine.error}" if engine.error else ""
        return EngineError(f"{why}{said}", field="rollout engine", fix=f"its output is in {engine.log.path}")

    try:
        async with asyncio.timeout(timeout_s):
            while engine.state != "ready" or not (
                agent.device.rollout and agent.device.rollout.reserved_pages
            ):
                if running.done():
                    running.result()
                    raise ended("ended before it was ready")
                if engine.state == "failed":
                    raise ended("did not start")
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise ended(f"was not ready within {timeout_s:g} s") from None


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
