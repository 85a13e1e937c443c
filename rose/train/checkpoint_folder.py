"""What can be told of a run's checkpoints without their tensors: names, their order, and whether one is of the model that a job trains.

Decides nothing of what is read from them (``rose.train.checkpoint``).  Loads no torch: ``rose train --check`` looks too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rose.errors import TrainError

MAX_JSON_BYTES = 64 * 1024 * 1024
"""Of a state.json that is read.  What would be larger is not written."""
_NAME = re.compile(r"step-(\d{6,})\.(\d+)")
_ANEW = "another output_dir to begin anew"

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a job trains, as far as it is known."""

    folder: Path
    """Of the model."""
    base: str
    """:func:`rose.train.model_folder.identity_of` it.  Empty: not known."""
    rank: int
    """Of its adapters; 0: the whole model."""
    targets: tuple[str, ...] = ()
    """Layers of its adapters, by the last parts of their names; empty: not known."""
    shapes: Shapes | None = None
    """Of all trained tensors; None: not known."""


def check_fits(shapes: Shapes, base: str, path: Path, trained: Trained) -> None:
    """Whether a job can go on from a checkpoint.

    Args:
        shapes: Of the checkpoint's weights.
        base: What it says of the model that it was trained on; empty: nothing.
        path: Where it is, for the message.

    Raises:
        TrainError: It cannot; names the setting that differs.
    """
    held = rank_of(shapes)
    if trained.rank and not held:
        raise TrainError(
            f"is {trained.rank}, and {path} holds the whole model",
            field="trainer.lora.rank",
            fix=f"set it to 0 to go on, or give {_ANEW}",
        )
    if held != trained.rank:
        raise TrainError(
            f"is {trained.rank}, and {path} holds adapters of rank {held}",
            field="trainer.lora.rank",
            fix=f"set it to {held} to go on, or give {_ANEW}",
        )
    another = f"{path} is of another model than {trained.folder}"
    fix = f"give the folder that the run began with, or {_ANEW}"
    if base and trained.base and base != trained.base:
        what = "holds adapters of another base model than" if held else "is of another model than"
        raise TrainError(f"{path} {what} {trained.folder}, whose weights are others", field="model", fix=fix)
    if held and not _have_layers(shapes, trained):
        ends = sorted({layer.rpartition(".")[2] for layer in _layers_of(shapes)})
        raise TrainError(
            f"are not those of {path}, whose adapters are in {', '.join(ends)}",
            field="trainer.lora.targets",
            fix=f"name those to go on, or give {_ANEW}",
        )
    wanted = trained.shapes
    if wanted is None or wanted == shapes:
        return
    name = min(one for one in {*wanted, *shapes} if wanted.get(one) != shapes.get(one))
    there, here = (list(one[name]) if name in one else "not there" for one in (shapes, wanted))
    raise TrainError(f"{another}: tensor {name} is {there}, and {here} in the folder", field="model", fix=fix)


def rank_of(shapes: Shapes) -> int:
    """Of the adapters of which these are the weights; 0 of a whole model's."""
    return next((shape[0] for name, shape in shapes.items() if ".lora_A." in name), 0)


def _layers_of(shapes: Shapes) -> set[str]:
    return {name.partition(".lora_")[0] for name in shapes}


def _have_layers(shapes: Shapes, trained: Trained) -> bool:
    """Whether the adapters of a checkpoint are in the job's layers."""
    layers = _layers_of(shapes)
    if trained.shapes is not None:
        return layers == _layers_of(trained.shapes)
    targets = trained.targets
    found = {target: {one for one in layers if f".{one}".endswith(f".{target}")} for target in targets}
    return not targets or (all(found.values()) and set().union(*found.values()) == layers)


def name_of(step: int, attempt: int) -> str:
    """Of the folder of a checkpoint."""
    return f"step-{step:06d}.{attempt}"


def is_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint."""
    return _NAME.fullmatch(name) is not None


def newest_first(directory: Path) -> list[Path]:
    """All checkpoints, readable or not."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if is_name(path.name)), key=order_of, reverse=True)


def order_of(path: Path) -> tuple[int, int]:
    """Attempt and step of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return (int(match[2]), int(match[1])) if match else (-1, -1)


def told_shapes(path: Path) -> tuple[Shapes, str] | None:
    """Shapes and base that a checkpoint names; None where it cannot be read.  Its files and hashes are not looked at."""
    try:
        file = path / "state.json"
        if file.stat().st_size > MAX_JSON_BYTES:
            return None
        told = json.loads(file.read_text())
        shapes = {str(name): tuple(map(int, shape)) for name, shape in told["shapes"].items()}
        return shapes, str(told.get("base", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
