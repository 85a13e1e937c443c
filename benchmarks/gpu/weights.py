"""Stages of weight updates: a checkpoint that is loaded and brought up to date by the real codec path, and the codec's kernels alone.

``updates`` is all of it but the trainer: a publisher, a store, a node agent with its subscriber and its weight loop, and an engine that it has
started.  What the engine holds is proved by its own scan.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import figures, models
from benchmarks.gpu.common import GIB, Figures, keep, logs_folder, memory_folder, place, rehearsing
from rose.auth import Tokens
from rose.config import validate
from rose.coserve.agent import NodeAgent
from rose.coserve.node_config import NodeConfig
from rose.demo.programs import ENGINE_ENV
from rose.errors import EngineError, WeightsError
from rose.proc import free_port
from rose.signatures import SigningKey
from rose.weights import codec as reference
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.stores import open_store

RUN, ATTEMPT, NUM_DELTAS = "gpu-check", 1, 3
DENSITY = 0.01
"""Changed elements of a delta, each by one unit in the last place."""
START_S, UPDATE_S = 150.0, 60.0
SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")


# --- through the engine


def updates() -> tuple[Figures, dict[str, Any]]:
    """A small seeded checkpoint is loaded, replaced whole, then brought up to date by deltas: seconds of each phase, and the proof."""
    here = place()
    shape = models.TINY if rehearsing() else models.SMALL
    with tempfile.TemporaryDirectory(dir=memory_folder()) as name, tempfile.TemporaryDirectory() as copies:
        folder = Path(name)
        weights = models.write_checkpoint(shape, folder / "model", seed=1)
        return asyncio.run(_follow(here.device, folder, Path(copies), weights))


async def _follow(
    device: str, folder: Path, copies: Path, weights: dict[str, Any]
) -> tuple[Figures, dict[str, Any]]:
    tokens = Tokens.generate()
    store = open_store(f"file://{folder / 'store'}", key=SigningKey.parse(tokens.publish_key))
    publisher = WeightPublisher(lambda: weights, store, RUN, ATTEMPT, WeightsParams())
    agent = NodeAgent(validate(NodeConfig, node_settings(device, folder, copies)), tokens)
    running = asyncio.create_task(agent.run())
    found: Figures = {}
    rows: list[dict[str, Any]] = []
    begun = time.monotonic()
    try:
        await _until(agent, running, lambda: agent.engine.version is not None, START_S)
        found["start_s"] = time.monotonic() - begun
        keep(found)
        for number in range(1 + NUM_DELTAS):
            _change(weights, seed=10 + number, density=1.0 if number == 0 else DENSITY)
            begun = time.monotonic()
            report = await asyncio.to_thread(publisher.publish, number + 1)
            published_s = time.monotonic() - begun
            await _until(agent, running, lambda v=str(report.version): agent.engine.version == v, UPDATE_S)
            row = {
                "kind": report.kind,
                "bytes_sent": report.bytes_sent,
                "bytes_dense": report.bytes_dense,
                "density": report.density,
                "publish_s": published_s,
                "acknowledged_s": time.monotonic() - begun,
                **{key: value for key, value in (agent.weights.last if agent.weights else {}).items() if key.endswith("_s")},
                "proved": await _holds(agent, report.state),
            }  # fmt: skip
            rows.append(row)
            found |= figures.updates(rows)
            keep(found)
        if not all(row["proved"] for row in rows):
            raise WeightsError("the engine does not hold what was published")
        return found, {"versions": rows}
    finally:
        agent.stop()
        await asyncio.gather(running, return_exceptions=True)
        publisher.close()


async def _until(
    agent: NodeAgent, running: asyncio.Task[None], what: Callable[[], bool], timeout_s: float
) -> None:
    until_s = time.monotonic() + timeout_s
    while not what():
        if running.done():
            running.result()
        if time.monotonic() > until_s:
            told = agent.weights.error if agent.weights is not None else ""
            raise EngineError(
                f"not within {timeout_s:.0f} s: {told or agent.engine.error or agent.engine.state}"
            )
        await asyncio.sleep(0.005)


async def _holds(agent: NodeAgent, state: Any) -> bool:
    """Does a scan of the engine's memory give the hash of every tensor that was published?"""
    (rank,) = (await agent.engine.call("GET", "/rose/weights/hash", timeout_s=120.0))["ranks"]
    return rank["hashes"] == dict(state)


def _change(weights: dict[str, Any], *, seed: int, density: float) -> None:
    """Move a share of the elements of every tensor by one unit in the last place."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        bits = tensor.view(torch.int16)
        if density >= 1.0:
            bits ^= 1
        else:
            bits ^= (torch.rand(bits.shape, generator=generator) < density).to(torch.int16)


def node_settings(device: str, folder: Path, copies: Path) -> dict[str, Any]:
    """Settings of a node without production: everything is the engine's.  ``copies``, on a disk, is this run's alone: the same run's
    copies of an earlier one are of other versions."""
    kind = "host"
    if device == "cuda":
        kind = "gpu" if importlib.util.find_spec("pynvml") is not None else "host"
        env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        args = ["--enforce-eager", "--gpu-memory-utilization=0.4", f"--kv-cache-memory-bytes={4 * GIB}"]
    else:
        env = dict(ENGINE_ENV)
        args = [
            "--enforce-eager",
            f"--kv-cache-memory-bytes={32 << 20}",
            "--max-num-seqs=8",
            "--dtype=bfloat16",
        ]
    return {
        "node_id": "gpu-check",
        "dir": str(folder / "node"),
        "device": {"kind": kind},
        "engine": {
            "model": str(folder / "model"),
            "command": list(SERVE),
            "args": args,
            "env": env,
            "port": free_port(),
            "max_model_len": 512,
            "allow_unmeasured": True,
            "log_path": str(logs_folder() / "engine.log"),
        },
        "weights": {
            "relay_url": f"file://{folder / 'store'}",
            "run_id": RUN,
            "poll_s": 0.1,
            "directory": str(copies),
        },
    }


# --- the kernels alone


def kernels() -> Figures:
    """The codec's Triton kernels against the CPU codec: the same bytes, GB/s by size and density, one payload over 2^31 bits."""
    if rehearsing():
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    here = place()
    from rose.weights import device as ours
    from vllm_plugin.weight_bits import scatter

    found: Figures = {}
    reference.encode(*_bits(2**17, 0.01))  # compiles
    for name, size, density in _cases():
        old, new = _bits(size, density)
        begun = time.perf_counter()
        expected = reference.encode(old, new)
        cpu_s = time.perf_counter() - begun
        assert expected is not None
        put = _putter(here)
        before, after = put(old), put(new)
        encode_s, encoded = _median(here, lambda b=before, a=after: ours.encode(b, a))
        if encoded != expected:
            raise WeightsError(f"{name}: the device's payload is not the CPU codec's")
        delta = reference.decode(expected.data, size, old.dtype)
        at = here.torch.from_numpy(delta.idx.astype(np.int64))
        values = here.torch.from_numpy(new[delta.idx].view(np.int16))
        apply_s, differs = _median(here, lambda b=before, i=at, v=values: scatter(b, i, v))
        if bool(differs) or not here.torch.equal(before, after):
            raise WeightsError(f"{name}: the device's new weights are not the CPU codec's")
        found |= figures.codec(name, size, len(expected.data), expected.num_changed, encode_s, apply_s, cpu_s)
        keep(found)
        del before, after, at, values
    return found


def _cases() -> list[tuple[str, int, float]]:
    """Name, elements, density.  A real embedding, and steps so dense and large that the payload passes 2^31 bits."""
    if rehearsing():
        return [("tensor", 70_000, 0.01), ("dense", 4_097, 1.0)]
    shape = models.POLICY
    return [("tensor", shape.vocab_size * shape.hidden_size, 0.01), ("dense", 100_000_000, 1.0)]


def _bits(size: int, density: float) -> tuple[Any, Any]:
    """Old and new bits: small steps, or at density 1 any."""
    rng = np.random.default_rng(5)
    old = rng.integers(0, 2**16, size, dtype=np.uint16)
    if density >= 1.0:
        return old, rng.integers(0, 2**16, size, dtype=np.uint16)
    new = old.copy()
    index = np.flatnonzero(rng.random(size, dtype=np.float32) < density)
    new[index] += rng.integers(1, 4, index.size, dtype=np.uint16)
    return old, new


def _putter(here: Any) -> Callable[..., Any]:
    def put(bits: Any, kind: Any = np.int16) -> Any:
        return here.torch.from_numpy(bits.view(kind)).clone().to(here.device)

    return put


def _median(here: Any, call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the middle one of three calls, behind one that compiles; and what the last one gave."""
    rounds = 1 if rehearsing() else 3
    found = call()
    seconds: list[float] = []
    for _ in range(rounds):
        here.settle()
        begun = time.perf_counter()
        found = call()
        here.settle()
        seconds.append(time.perf_counter() - begun)
    return sorted(seconds)[rounds // 2], found
