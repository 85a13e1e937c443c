"""What a job's model folder says in the headers of its safetensors files: whether engines that hold it can take what is trained.  No weight is read."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from rose.errors import ConfigError
from rose.weights.folder import checkpoint_files, checkpoint_tensors
from rose.weights.spec import TensorSpec

WIRE_TYPE = {"bfloat16": "BF16", "float32": "F32"}
"""Safetensors' name of each ``policy_dtype``."""
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


def check_type(folder: Path, policy_dtype: str) -> None:
    """An engine takes versions in the types of its own checkpoint alone, and versions are in ``policy_dtype``.

    Raises:
        ConfigError: Most elements in the folder are of another type.
        WeightsError: A header cannot be read.
    """
    held, wanted = _main_type(_headers(folder)), WIRE_TYPE[policy_dtype]
    if held is None:
        return
    if held != wanted:
        other = next((name for name, wire in WIRE_TYPE.items() if wire == held), None)
        way = f", or trainer.policy_dtype = {other} and engines with --dtype {other}" if other else ""
        raise ConfigError(
            f"{folder} is in {held}, and is published in {wanted} (trainer.policy_dtype): its engines would refuse every version",
            field="model",
            fix=f"save it in {policy_dtype} first{way}",
        )


def check_ranks(folder: Path) -> None:
    """Several ranks read and publish tensors under the folder's names; transformers holds all experts of a layer in one.

    Raises:
        ConfigError: The folder has a tensor for each expert of a mixture.
        WeightsError: A header cannot be read.
    """
    expert = next((tensor.name for tensor in _headers(folder) if _EXPERT.search(tensor.name)), None)
    if expert is not None:
        raise ConfigError(
            f"{folder} is a mixture of experts ({expert}), which several ranks cannot train",
            field="model",
            fix="trainer.num_ranks = 1, or bring your own trainer (rose.train.workers.Parts)",
        )


def kept_names(folder: Path, policy_dtype: str) -> tuple[str, ...]:
    """Tensors that a folder in bfloat16 holds in fp32 (corrections of routers), and its engines too; none of a folder in fp32.

    Raises:
        WeightsError: A header cannot be read.
    """
    headers = _headers(folder)
    if WIRE_TYPE[policy_dtype] != "BF16" or _main_type(headers) != "BF16":
        return ()
    return tuple(tensor.name for tensor in headers if tensor.dtype == "F32")


def _main_type(headers: list[TensorSpec]) -> str | None:
    """What most elements are of; None: there are none."""
    elements: Counter[str] = Counter()
    for tensor in headers:
        elements[tensor.dtype] += tensor.num_elements
    return elements.most_common(1)[0][0] if elements else None


def _headers(folder: Path) -> list[TensorSpec]:
    """Of the folder's safetensors files; of a folder without any, none."""
    return checkpoint_tensors(folder) if checkpoint_files(folder) else []
