"""The weight path of whole runs in tests: a version is a file.  Imported by every process of a run, so it imports no torch before it needs it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.auth import Tokens
from rose.train.train_config import TrainConfig

RUN = "loop"
"""The job of these tests, and the run that its engines follow."""


class FilePublisher:
    """A version is one file of bf16 tensors, written beside its place and renamed."""

    def __init__(self, module: Any, directory: Path, attempt: int) -> None:
        self._module, self._directory, self._attempt = module, directory, attempt

    def publish(self, version: int, *, step: int | None = None, lr: float | None = None) -> Any:
        import torch.distributed as dist
        from safetensors.torch import save_file

        from rose.train.model import whole_of

        # On several ranks the others have their part in putting each tensor together, and no more.
        tensors = {
            name: whole_of(tensor.detach()).bfloat16() for name, tensor in self._module.named_parameters()
        }
        if dist.is_initialized() and dist.get_rank():
            return None
        target = self._directory / f"{self._attempt}.{version}.safetensors"
        assert not target.exists(), "one version was published twice"
        save_file(tensors, f"{target}.part")
        os.rename(f"{target}.part", target)
        size = target.stat().st_size
        return Report(kind="anchor", bytes_dense=size, bytes_sent=size, density=1.0)


@dataclass(frozen=True)
class Report:
    kind: str
    bytes_dense: int
    bytes_sent: int
    density: float


def file_publisher(config: TrainConfig, tokens: Tokens, module: Any, attempt: int) -> FilePublisher:
    """For :class:`rose.train.workers.Parts`; importable in an actor."""
    assert config.weights.directory is not None
    return FilePublisher(module, config.weights.directory, attempt)
