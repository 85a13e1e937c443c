"""The one update that a worker rank has at hand: how far it is, and what was staged of it (:mod:`vllm_plugin.rank_weights`)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rose.errors import RoseError
from rose.lineage import WeightVersion
from rose.weights.update import UpdateFile
from vllm_plugin.weight_bits import BoxUpdate


class UpdatePhase(StrEnum):
    """How far a rank is with the update at hand."""

    IDLE = "idle"
    """No update is at hand."""
    STAGING = "staging"
    STAGED = "staged"
    FAILED = "failed"
    """The update was refused; ``error`` says why.  The weights are unchanged."""
    STREAMING = "streaming"
    """A part of a whole version is in place; ``commit`` goes on with it, and nothing leads back."""
    COMMITTED = "committed"
    """New bits are in place and proved; ``finish`` or ``undo`` comes next."""
    BROKEN = "broken"
    """An undo could not be proved, or there was none: this rank's weights are of no version.  Only a restart helps."""


@dataclass(kw_only=True, slots=True)
class StagedUpdate:
    """An update that is read, checked and ready to be written."""

    target: WeightVersion
    run: str
    pieces: list[BoxUpdate]
    hashes: dict[str, int]
    """This rank's hash of each changed tensor, once committed."""
    partial: dict[str, dict[str, Any]]
    header: str
    """Digest of the file's header: all ranks must have staged the same update."""
    num_changed: int
    stage_s: float
    left: list[str] | None
    """Of a version that streams, tensors that are still to come; None: it does not."""
    file: UpdateFile | None
    """Of a version that streams, open until all is written."""

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


@dataclass(kw_only=True, slots=True)
class StagedTensor:
    """What becomes of one tensor of it on this rank."""

    pieces: list[BoxUpdate] = field(default_factory=list)
    num_changed: int = 0
    hash: int | None = None
    """This rank's, once committed; None: unchanged."""
    partial: dict[str, Any] | None = None
    """For :func:`~vllm_plugin.weight_vote.judge`, of a tensor that this rank does not hold whole."""
    streams: bool = False


@dataclass(kw_only=True)
class UpdateSlot:
    """The one update at hand.  Guarded by the rank's lock."""

    phase: UpdatePhase = UpdatePhase.IDLE
    target: WeightVersion | None = None
    path: str = ""
    source: tuple[int, ...] | None = None
    error: RoseError | None = None
    staged: StagedUpdate | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def drop(self) -> None:
        """What was staged is of no use any more."""
        staged, self.staged = self.staged, None
        if staged is not None:
            staged.close()
