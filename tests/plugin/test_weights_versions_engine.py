"""Two hundred random versions of a sharded trainer, every fiftieth (more often with ``ROSE_TEST_VERSIONS``) on a real server: dense on one and two ranks, MoE.

At the end the server's memory, tokens and log-probs are those of a server started with the full checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from rose.lineage import WeightVersion
from rose.testing.memory_store import MemoryStore
from rose.weights import statehash
from rose.weights.params import WeightsParams
from rose.weights.subscriber import WeightSubscriber
from tests.engine_launcher import EngineServer
from tests.plugin.test_weights_layouts import served, train
from tests.plugin.weights_kit import VERSIONS, Tensors, change, make_update, state_hash
from tests.plugin.weights_server import FAULTS, dedicated, turn
from tests.tiny_model import write_tiny_model, write_weights
from tests.weights.shards_kit import Trainer, fsdp

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400 + VERSIONS // 10)]
PUBLISHED = 200
EVERY = PUBLISHED // max(4, min(VERSIONS // 100, PUBLISHED))
"""Of these versions one goes to the server."""


def holds(server: EngineServer, weights: Tensors) -> bool:
    """By a full scan of every rank: a tensor is whole on each, or its parts add up."""
    ranks = [each["hashes"] for each in server.get("/rose/weights/hash").json()["ranks"]]
    for name, tensor in weights.items():
        parts = [statehash.from_hex(hashes[name]) for hashes in ranks]
        whole = state_hash(tensor)
        if parts != [whole] * len(parts) and sum(parts) & statehash.MASK != whole:
            return False
    return True


@pytest.mark.parametrize(
    ("world", "experts"),
    [
        pytest.param(1, 0, marks=pytest.mark.conformance, id="dense-tp-1"),
        pytest.param(2, 0, id="dense-tp-2"),
        pytest.param(1, 4, marks=pytest.mark.conformance, id="moe-tp-1"),
    ],
)
def test_versions_of_200_run_on_a_real_server(world: int, experts: int, tmp_path: Path) -> None:
    args = [f"--tensor-parallel-size={world}"] if world > 1 else []
    kind: dict[str, Any] = {"tied": False, "num_experts": experts}
    initial = write_tiny_model(tmp_path / "model", seed=5, **kind)
    masters = {name: tensor.float() for name, tensor in initial.items()}
    store = MemoryStore()
    trainer = Trainer(fsdp(2), store, 1, WeightsParams(anchor_every=20, bucket_bytes=1 << 16))
    subscriber = WeightSubscriber(store, "run", tmp_path / "copy")
    rng = np.random.default_rng(world + experts)
    try:
        with dedicated(tmp_path / "model", env={"ROSE_WEIGHTS_DIR": str(tmp_path)}, args=args) as server:
            (rank, *_) = server.get("/rose/status").json()["ranks"]
            assert rank["fallback"] == {}
            running = WeightVersion(0, 0)
            for number in range(PUBLISHED):
                trainer.publish(masters, number)
                newest = WeightVersion(1, number)
                assert subscriber.poll(0) == newest
                if number % EVERY == EVERY - 1:
                    path = subscriber.fetch(newest, running)
                    body = {"attempt": 1, "version": number}
                    staged = server.post("/rose/weights/stage", body | {"path": str(path)})
                    assert staged.status_code == 200, staged.text
                    assert server.post("/rose/weights/commit", body).status_code == 200
                    running = newest
                    assert holds(server, served(masters))
                last, masters = served(masters), train(masters, rng)
            found = turn(server)
        assert running == WeightVersion(1, PUBLISHED - 1)
        write_tiny_model(tmp_path / "fresh", **kind)
        write_weights(tmp_path / "fresh", {name: tensor.contiguous() for name, tensor in last.items()})
        with dedicated(tmp_path / "fresh", env={"ROSE_WEIGHT_VERSION": str(running)}, args=args) as fresh:
            assert holds(fresh, last)
            assert turn(fresh) == found
        assert not all(torch.equal(last[name], initial[name]) for name in last)
    finally:
        subscriber.close()


@pytest.mark.parametrize("moment", [pytest.param("stage", marks=pytest.mark.conformance), "commit"])
def test_an_engine_killed_in_an_update_comes_back_with_the_whole_version(moment: str, tmp_path: Path) -> None:
    """SIGKILL, with the update half way; the process that takes its place loads the base model again."""
    initial = write_tiny_model(tmp_path / "model", seed=5, tied=False)
    new = change(initial, seed=7)
    env = {"ROSE_WEIGHTS_DIR": str(tmp_path), "VLLM_SERVER_DEV_MODE": "1"}
    delta = make_update(tmp_path / "delta", initial, new, base="0.0", target="1.1")
    body = {"attempt": 1, "version": 1}
    with dedicated(tmp_path / "model", env=env, args=[FAULTS]) as server:
        if moment == "commit":
            assert server.post("/rose/weights/stage", body | {"path": str(delta)}).status_code == 200
        server.post("/collective_rpc", {"method": f"die_at_{moment}", "args": [0]}).raise_for_status()
        try:
            answer = server.post(
                f"/rose/weights/{moment}", body | ({"path": str(delta)} if moment == "stage" else {})
            )
            assert answer.status_code >= 500
        except httpx.TransportError:
            pass  # the whole server is gone already
        with pytest.raises((httpx.TransportError, httpx.HTTPStatusError)):
            server.generate([7, 30, 99], max_tokens=2)
    with dedicated(tmp_path / "model", env=env) as server:
        assert holds(server, initial)
        whole = make_update(tmp_path / "whole", initial, new, base=None, target="1.1")
        assert server.post("/rose/weights/stage", body | {"path": str(whole)}).status_code == 200
        assert server.post("/rose/weights/commit", body).status_code == 200
        assert holds(server, new)
