"""Checkpoints of the trainer: complete or absent, and no pickle.

A checkpoint is a folder ``step-000012.2`` (step, attempt) with two files: ``state.safetensors`` (fp32 masters as
``weights/NAME``, AdamW moments as ``optimizer/NAME/KEY``, random states as ``rng/NAME``) and ``state.json`` (everything else, and the hash of the
first and of itself).  It is written beside its place, synced, and renamed, so a reader sees all of it or nothing;
:func:`load_latest` takes the newest that verifies and says which it had to pass over.

``consumed`` is why a killed trainer neither loses nor repeats a trajectory: the ids that the last steps
were trained on live in the same atom as the weights that they changed.  On restart the scheduler is told
these ids; whatever it had leased out and they do not name becomes leasable again.

Newest means: highest attempt first, then highest step, as weight versions are ordered.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rose.errors import TrainError

SCHEMA = 1
CONSUMED_STEPS = 64
"""Steps whose ids a checkpoint keeps.  One would do while every step is acknowledged before the next begins; the
rest lets a run that had to pass over damaged checkpoints still name what it used."""

_STAGING = ".writing-"
_NAME = re.compile(r"step-(\d{6,})\.(\d+)")
_MAX_JSON_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The trainer's state after ``step`` steps.  Tensors are owned by the trainer until saved."""

    step: int
    attempt: int
    version: int
    consumed: Mapping[int, tuple[str, ...]]
    """Trajectory ids by the step that was trained on them; the last :data:`CONSUMED_STEPS` steps."""
    shuffle_state: tuple[Any, ...]
    rng: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """States of random generators that the shuffle's is not, by name; uint8."""
    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    grad_norms: tuple[float, ...] = ()
    """Of the last updates: what the step guard holds for usual."""

    @property
    def consumed_ids(self) -> list[str]:
        return [trajectory_id for step in sorted(self.consumed) for trajectory_id in self.consumed[step]]


def save(checkpoint: Checkpoint, directory: Path, *, keep: int = 3) -> Path:
    """Write ``checkpoint`` below ``directory`` and drop all but the ``keep`` newest and the best.

    Raises:
        TrainError: The disk refused; older checkpoints are untouched.
    """
    target = directory / name_of(checkpoint.step, checkpoint.attempt)
    staging: Path | None = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for torn in directory.glob(f"{_STAGING}*"):  # of a writer that was killed: one model in size each
            shutil.rmtree(torn, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=directory))
        tensors = {f"weights/{name}": tensor.contiguous() for name, tensor in checkpoint.weights.items()}
        tensors |= {f"optimizer/{name}": tensor.contiguous() for name, tensor in checkpoint.optimizer.items()}
        tensors |= {f"rng/{name}": tensor for name, tensor in checkpoint.rng.items()}
        save_file(tensors, staging / "state.safetensors")
        oldest = checkpoint.step - CONSUMED_STEPS
        described = {
            "schema": SCHEMA,
            "step": checkpoint.step,
            "attempt": checkpoint.attempt,
            "version": checkpoint.version,
            "consumed": {str(step): list(ids) for step, ids in checkpoint.consumed.items() if step >= oldest},
            "shuffle_state": checkpoint.shuffle_state,
            "grad_norms": checkpoint.grad_norms,
            "tensors_xxh3": _digest(staging / "state.safetensors"),
        }
        described["xxh3"] = _digest_of_description(described)
        (staging / "state.json").write_text(json.dumps(described))
        for path in (staging / "state.safetensors", staging / "state.json", staging):
            _sync(path)
        if target.exists():  # the same step of the same attempt: only a retry after a failed answer writes it
            shutil.rmtree(target)
        staging.rename(target)
        _sync(directory)
    except OSError as error:
        raise TrainError(f"{target} cannot be written: {error}", field="checkpoint") from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    best = best_of(directory)
    for path in _newest_first(directory)[max(1, keep) :]:
        if best is None or path.name != best[0]:
            shutil.rmtree(path, ignore_errors=True)
    return target


def name_of(step: int, attempt: int) -> str:
    """Of the folder of a checkpoint."""
    return f"step-{step:06d}.{attempt}"


def note_best(directory: Path, name: str, success: float) -> None:
    """Keep the checkpoint ``name`` if no other was as good; the one before goes as it becomes old.

    Raises:
        TrainError: The disk refused.
    """
    best = best_of(directory)
    if (best is not None and best[1] >= success) or not (directory / name).is_dir():
        return
    staging = directory / f"{_STAGING}best.json"
    try:
        staging.write_text(json.dumps({"checkpoint": name, "success": success}))
        _sync(staging)
        staging.rename(directory / "best.json")
    except OSError as error:
        raise TrainError(f"{directory} cannot be written: {error}", field="checkpoint") from error


def best_of(directory: Path) -> tuple[str, float] | None:
    """Name and success of the best checkpoint; None where none was noted, or it is not there."""
    try:
        told = json.loads((directory / "best.json").read_text())
        name, success = str(told["checkpoint"]), float(told["success"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    known = _NAME.fullmatch(name) is not None and math.isfinite(success)
    return (name, success) if known and (directory / name).is_dir() else None


def load(path: Path) -> Checkpoint:
    """Read one checkpoint and verify it.

    Raises:
        TrainError: Missing, damaged, or of another schema.
    """
    try:
        if (path / "state.json").stat().st_size > _MAX_JSON_BYTES:
            raise TrainError("state.json is too large", field=str(path))
        described = json.loads((path / "state.json").read_text())
        if described.get("schema") != SCHEMA:
            raise TrainError(f"schema {described.get('schema')!r} is not {SCHEMA}", field=str(path))
        # The first versions of this schema wrote none.
        if described.get("xxh3") not in (None, _digest_of_description(described)):
            raise TrainError("state.json does not match its hash", field=str(path))
        if _digest(path / "state.safetensors") != described["tensors_xxh3"]:
            raise TrainError("state.safetensors does not match its hash", field=str(path))
        tensors = load_file(path / "state.safetensors")
        version, internal, gauss = described["shuffle_state"]
        return Checkpoint(
            step=int(described["step"]),
            attempt=int(described["attempt"]),
            version=int(described["version"]),
            consumed={int(step): tuple(ids) for step, ids in described["consumed"].items()},
            shuffle_state=(version, tuple(internal), gauss),
            grad_norms=_finite(described.get("grad_norms", ())),
            rng={
                name.removeprefix("rng/"): tensor
                for name, tensor in tensors.items()
                if name.startswith("rng/")
            },
            weights=_under("weights/", tensors),
            optimizer=_under("optimizer/", tensors),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise TrainError(f"is damaged: {error}", field=str(path)) from error


def load_latest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies (None where none does), and why newer ones were passed over."""
    passed_over: list[str] = []
    for path in _newest_first(directory):
        try:
            return load(path), passed_over
        except TrainError as error:
            passed_over.append(str(error))
    return None, passed_over


def latest_attempt(directory: Path) -> int:
    """The highest attempt that any checkpoint, readable or not, names; 0 if there is none."""
    return max((_order(path)[0] for path in _newest_first(directory)), default=0)


def _newest_first(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(
        (path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=_order, reverse=True
    )


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    return (int(match[2]), int(match[1])) if match else (-1, -1)


def _finite(values: Any) -> tuple[float, ...]:
    found = tuple(float(value) for value in values)
    if not all(map(math.isfinite, found)):
        raise ValueError("a gradient norm is not finite")
    return found


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    for name, tensor in found.items():
        if not math.isfinite(float(tensor.float().abs().sum())):
            raise TrainError(f"tensor {name} is not finite", field="checkpoint")
    return found


def _digest_of_description(described: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in described.items() if name != "xxh3"}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
