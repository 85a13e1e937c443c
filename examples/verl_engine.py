"""verl's weights over ROSE: a ``CheckpointEngine`` that publishes from the actor and follows on verl's own rollout replicas.

    rose tokens tokens.toml --split parts
    rose relay --directory /dev/shm/weights --token-file tokens.toml --no-fsync &

With this file on PYTHONPATH of every worker, in verl's configuration::

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: rose
      custom_backend_module: verl_engine
      engine_kwargs:
        rose: {store: "http://relay:8470", run_id: my-run, attempt: 1,    # attempt: one more at every restart
               token_file: tokens.toml, directory: /var/cache/rose-copy}  # tokens.key lies beside the actor's

Version ``global_steps`` travels as what changed; each machine with replicas keeps one copy, which its workers share, and engines of
ROSE follow the same run.  verl's interface as of its 0.10 (2026); ``tests/weights/test_verl.py`` has that contract.
"""

# pyright: reportMissingImports=false
# verl is not where everything else is.

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from rose.auth import Tokens
from rose.errors import ConfigError, WeightsError
from rose.lineage import WeightVersion
from rose.signatures import PublicKeys
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.shared_copy import SharedCopy, make_own, open_shared
from rose.weights.stores import trainer_store
from rose.weights.update import UpdateFile

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@CheckpointEngineRegistry.register("rose")
class RoseCheckpointEngine(CheckpointEngine):
    """On every actor rank and every worker of verl's replicas; which of the two is known by what is called first.

    Args:
        bucket_size, is_master: verl's own.  The master alone keeps a copy in host memory, and publishes.
        attempt: One more at every restart of the trainer.
        token_file: Of role publish, with its key beside it, where the actor is; of role relay where replicas are.  Empty: none, and
            nothing is signed, for a store that nobody else can write to.
        directory: Where replicas are: a host copy and update files, 2.2 times the model.
        cast: What the engines compute in.
        leave_out: Names that the engines' checkpoint does not have, as ``lm_head.weight`` where embeddings are tied.
        timeout_s: How long replicas wait for a version.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        store: str,
        run_id: str,
        attempt: int,
        token_file: str = "",
        directory: str = "",
        cast: str = "BF16",
        leave_out: tuple[str, ...] = (),
        timeout_s: float = 600.0,
    ) -> None:
        self._is_master = is_master
        self._store, self._run_id, self._attempt = store, run_id, attempt
        self._token_file, self._directory = token_file, directory
        self._cast, self._leave_out, self._timeout_s = cast, frozenset(leave_out), timeout_s
        self._sent: dict[str, torch.Tensor] = {}
        self._publisher: WeightPublisher | None = None
        self._copy: SharedCopy | None = None
        self._at: WeightVersion | None = None

    # No rank needs to know of another: all of them know the store.

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        pass

    def finalize(self) -> None:
        pass

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish; returns metrics for verl to log.  To make a tensor is a collective call, so every rank runs through all of them."""
        version = self._version(global_steps)
        for name, tensor in weights:
            if self._is_master and name not in self._leave_out:
                self._keep(name, tensor.detach())
        if not self._is_master:
            return {}
        report = await asyncio.to_thread(self._publish, version.version)
        return {"rose/bytes_sent": float(report.bytes_sent), "rose/density": report.density}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Every tensor of the version, out of the machine's copy; what came over the network is what changed."""
        path = await asyncio.to_thread(self._await, self._version(global_steps))
        with UpdateFile(path) as file:
            for name in file:
                tensor = file.read(name)
                assert tensor.dense is not None  # it has no base
                bits = torch.from_numpy(tensor.dense).view(DTYPES[tensor.spec.dtype])
                yield name, bits.reshape(tensor.spec.shape)

    def close(self) -> None:
        """For who takes it alone; verl's workers just end."""
        for each in (self._publisher, self._copy):
            if each is not None:
                each.close()

    def _version(self, global_steps: int | None) -> WeightVersion:
        if global_steps is None:
            raise ConfigError("is needed: it is the version's number", field="global_steps")
        return WeightVersion(self._attempt, global_steps)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """verl's tensor lives until the next is made."""
        held = self._sent.get(name)
        if held is None:
            self._sent[name] = tensor.to("cpu", copy=True)
        else:
            held.copy_(tensor)

    def _publish(self, version: int) -> Any:
        if self._publisher is None:
            tokens = Tokens.load(self._token_file, ["publish", "publish_key"]) if self._token_file else None
            store = trainer_store(self._store, tokens)
            params = WeightsParams(cast=self._cast)
            self._publisher = WeightPublisher(lambda: self._sent, store, self._run_id, self._attempt, params)
        return self._publisher.publish(version)

    def _await(self, version: WeightVersion) -> Path:
        """The file of a version that may not be published yet."""
        if self._copy is None:
            if not self._directory:
                raise ConfigError("is needed where replicas are", field="engine_kwargs.rose.directory")
            tokens = Tokens.load(self._token_file, ["relay", "public_key"]) if self._token_file else None
            trusted = None if tokens is None else PublicKeys.parse(tokens.public_key)
            directory = Path(self._directory)
            make_own(directory)
            token = "" if tokens is None else tokens.relay
            self._copy = open_shared(self._store, self._run_id, directory, token=token, trusted=trusted)
        until_s = time.monotonic() + self._timeout_s
        while self._at != version:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise WeightsError(
                    f"did not come within {self._timeout_s:g} s: the copy is at {self._at}",
                    field=str(version),
                )
            self._at = self._copy.poll(left_s) or self._at
        return self._copy.fetch(version, None)
