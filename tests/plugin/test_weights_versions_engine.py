"""Two hundred random versions of a sharded trainer, every fiftieth on a real server: dense on one and two ranks, MoE.

At the end the server's memory, tokens and log-probs are those of a server started with the full checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rose.weights import statehash
from rose.weights.params import WeightsParams
from rose.weights.store import MemoryStore
from rose.weights.subscriber import WeightSubscriber
from rose.weights.version import WeightVersion
from tests.engine_launcher import EngineServer
from tests.plugin.test_weights_layouts import served, train
from tests.plugin.weights_kit import Tensors, make_update, state_hash
from tests.plugin.weights_server import dedicated, turn
from tests.tiny_model import write_tiny_model, write_weights
from tests.weights.shards_kit import Trainer, fsdp

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]
VERSIONS, EVERY = 200, 50


def holds(server: EngineServer, weights: Tensors) -> bool:
    """By a full scan of every rank: a tensor is whole on each, or its parts add up."""
    ranks = [each["hashes"] for each in server.get("/rose/weights/hash").json()["ranks"]]
    for name, tensor in weights.items():
        parts = [statehash.from_hex(hashes[name]) for hashes in ranks]
        whole = state_hash(tensor)
        if parts != [whole] * len(parts) and sum(parts) & statehash.MASK != whole:
            return False
    return True


@pytest.mark.parametrize("world", [1, 2], ids=["dense-tp-1", "dense-tp-2"])
def test_every_fiftieth_of_200_versions_runs_on_a_real_server(world: int, tmp_path: Path) -> None:
    args = [f"--tensor-parallel-size={world}"] if world > 1 else []
    initial = write_tiny_model(tmp_path / "model", seed=5, tied=False)
    masters = {name: tensor.float() for name, tensor in initial.items()}
    store = MemoryStore()
    trainer = Trainer(fsdp(2), store, 1, WeightsParams(anchor_every=20, bucket_bytes=1 << 16))
    subscriber = WeightSubscriber(store, "run", tmp_path / "copy")
    rng = np.random.default_rng(world)
    try:
        with dedicated(tmp_path / "model", env={"ROSE_WEIGHTS_DIR": str(tmp_path)}, args=args) as server:
            (rank, *_) = server.get("/rose/status").json()["ranks"]
            assert rank["fallback"] == {}
            running = WeightVersion(0, 0)
            for number in range(VERSIONS):
                trainer.publish(masters, number)
                newest = subscriber.poll(0)
                assert newest == WeightVersion(1, number)
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
        assert running == WeightVersion(1, VERSIONS - 1)
        write_tiny_model(tmp_path / "fresh", tied=False)
        write_weights(tmp_path / "fresh", {name: tensor.contiguous() for name, tensor in last.items()})
        with dedicated(tmp_path / "fresh", env={"ROSE_WEIGHT_VERSION": str(running)}, args=args) as fresh:
            assert holds(fresh, last)
            assert turn(fresh) == found
        assert not all(torch.equal(last[name], initial[name]) for name in last)
    finally:
        subscriber.close()


def test_experts_that_the_engine_repacked_are_refused_by_name_and_the_rest_is_taken(tmp_path: Path) -> None:
    """vLLM's CPU build packs experts for its grouped kernel after loading, so their memory is not the checkpoint's."""
    initial = write_tiny_model(tmp_path / "model", seed=5, tied=False, num_experts=4)
    packed = "model.layers.0.mlp.experts.1.up_proj.weight"
    plain = "model.layers.0.self_attn.q_proj.weight"
    with dedicated(tmp_path / "model", env={"ROSE_WEIGHTS_DIR": str(tmp_path)}) as server:
        (rank,) = server.get("/rose/status").json()["ranks"]
        assert set(rank["fallback"]) == {name for name in initial if ".experts." in name}
        for number, name in enumerate((packed, plain), 1):
            new = initial | {name: initial[name] + 1}
            path = make_update(
                tmp_path / f"{number}.safetensors", initial, new, base="0.0", target=f"1.{number}"
            )
            body = {"attempt": 1, "version": number}
            staged = server.post("/rose/weights/stage", body | {"path": str(path)})
            assert (staged.status_code == 200) == (name == plain), staged.text
            assert (packed in staged.text) == (name == packed)
        assert server.post("/rose/weights/commit", body).status_code == 200
        assert server.get("/rose/weights/hash").json()["ranks"][0]["hashes"][plain] == statehash.to_hex(
            state_hash(new[plain])
        )
