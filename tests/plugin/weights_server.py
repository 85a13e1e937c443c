"""A real rollout engine with a device of its own, and what its weights should be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from rose.weights import statehash
from tests.engine_launcher import EngineServer
from tests.plugin.stand_in import Host, eventually
from tests.plugin.weights_kit import RUN, Tensors, make_update, state_hash
from tests.tiny_model import write_tiny_model

PROMPT = [7, 30, 99, 181, 12, 240, 5, 66]
FAULTS = "--worker-extension-cls=tests.plugin.weights_faults.FaultyWorker"


@contextlib.contextmanager
def dedicated(
    model: Path, *, env: Mapping[str, str], args: Sequence[str] = (), start_timeout_s: float = 120.0
) -> Iterator[EngineServer]:
    """A rollout engine on a device of its own, with all of its memory."""
    server = EngineServer(
        model,
        role="rollout",
        env=env,
        args=["--logprobs-mode=processed_logprobs", *args],
        start_timeout_s=start_timeout_s,
    )
    with server:
        host = Host(server.rose_dir, has_serving=False)
        try:
            host.lend(host.lease.total_pages)
            eventually(lambda: scheduler_of(server)["budget_tokens"] > 1000, "memory for the engine")
            yield server
        finally:
            host.close()


def scheduler_of(server: EngineServer) -> dict[str, Any]:
    return server.get("/rose/status").json()["scheduler"]


class Policy:
    """A server and what its weights should be."""

    def __init__(self, folder: Path, tied: bool) -> None:
        self.folder = folder
        self.tied = tied
        self.weights = write_tiny_model(folder / "model", seed=3, tied=tied)
        self.number = 0
        self.server: EngineServer

    @property
    def version(self) -> str:
        return "0.0" if self.number == 0 else f"1.{self.number}"

    @property
    def label(self) -> str:
        """What the engine stamps on its tokens."""
        return f"{RUN}@{self.version}"

    def update(self, new: Tensors, **kwargs: Any) -> dict[str, Any]:
        """Write the update to ``new``; the body that stages it."""
        number = self.number + 1
        kwargs = {"base": self.version, "target": f"1.{number}"} | kwargs
        path = make_update(self.folder / f"update-{number}.safetensors", self.weights, new, **kwargs)
        return {"path": str(path), "attempt": 1, "version": number}

    def stage(self, body: dict[str, Any]) -> httpx.Response:
        return self.server.post("/rose/weights/stage", body)

    def commit(self, body: dict[str, Any], **kwargs: Any) -> httpx.Response:
        return self.server.post(
            "/rose/weights/commit", {"attempt": body["attempt"], "version": body["version"]} | kwargs
        )

    def became(self, new: Tensors) -> None:
        self.weights = new
        self.number += 1

    def hashes(self) -> dict[str, str]:
        (rank,) = self.server.get("/rose/weights/hash").json()["ranks"]
        return rank["hashes"]

    def holds(self, weights: Tensors) -> bool:
        expected = {name: statehash.to_hex(state_hash(tensor)) for name, tensor in weights.items()}
        return self.hashes() == expected

    def rpc(self, method: str, *args: Any) -> Any:
        answer = self.server.post("/collective_rpc", {"method": method, "args": list(args)})
        answer.raise_for_status()
        return answer.json()["results"]


def turn(server: EngineServer) -> tuple[list[int], list[float]]:
    choice = server.generate(PROMPT, max_tokens=24, logprobs=1)["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
