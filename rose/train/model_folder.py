"""What a job's model folder says in the headers of its safetensors files: whether engines that hold it can take what is trained, and, by some of its
bytes, which model it is (:func:`identity_of`)."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import xxhash

from rose.errors import ConfigError, WeightsError
from rose.weights.folder import checkpoint_files, checkpoint_tensors
from rose.weights.spec import TensorSpec

WIRE_TYPE = {"bfloat16": "BF16", "float32": "F32"}
"""Safetensors' name of each ``policy_dtype``."""
SAMPLE_BYTES = 4096
"""Of a tensor, read from its middle."""
MAX_SAMPLES = 2048
"""Tensors of a folder of which bytes are read; of one with more, as many are chosen evenly."""
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


def check_chat_template(folder: Path) -> None:
    """Engines render what an environment says with the folder's chat template; base models have none.

    Raises:
        ConfigError: It has none, or a file that should hold one cannot be read.
    """
    # vLLM renders for these with Mistral's own library.
    if any(folder.glob("tekken.json")) or any(folder.glob("tokenizer.model.v*")):
        return
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return
    settings = folder / "tokenizer_config.json"
    try:
        told = json.loads(settings.read_text()) if settings.is_file() else {}
        found = told.get("chat_template")
        if isinstance(found, list):
            found = {one["name"]: one["template"] for one in found}.get("default")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{settings} cannot be read: {error}", field="model") from error
    if not found:
        raise ConfigError(
            f"{folder} has no chat template, with which engines render what the environment says",
            field="model",
            fix="put chat_template.jinja into it, also where engines are started with one of their own; instruction-tuned models have one",
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


def layers_named(folder: Path) -> set[str]:
    """Names of what has a matrix ``weight`` in the folder; none where it has no safetensors files, or tensors of single experts, which a model holds together.

    Raises:
        WeightsError: A header cannot be read.
    """
    headers = _headers(folder)
    if any(_EXPERT.search(tensor.name) for tensor in headers):
        return set()
    matrices = (tensor.name for tensor in headers if len(tensor.shape) == 2)
    return {name.removesuffix(".weight") for name in matrices if name.endswith(".weight")}


def identity_of(folder: Path) -> str:
    """Tells a folder's weights from others of the same shapes: a digest of all tensors' names, types and shapes, and of bytes from the middle of each.

    It is the same wherever the folder lies, and however its tensors are dealt to files.  Another model, or one that was trained further, has other values
    everywhere.  Not seen are values that were changed one by one elsewhere, and what else is in the folder (``config.json``, tokenizer).

    Returns:
        Hexadecimal digits; of a folder without safetensors files, none.

    Raises:
        WeightsError: A file cannot be read.
    """
    headers = sorted(_headers(folder), key=lambda tensor: tensor.name)
    if not headers:
        return ""
    digest = xxhash.xxh3_128(json.dumps([[one.name, one.dtype, one.shape] for one in headers]).encode())
    sampled = {one.name for one in headers[:: -(-len(headers) // MAX_SAMPLES)]}
    samples: dict[str, bytes] = {}
    for path in checkpoint_files(folder):
        try:
            with path.open("rb") as file:
                # The library, which has read them by now, vouches for their size and sense.
                num_bytes = int.from_bytes(file.read(8), "little")
                places = json.loads(file.read(num_bytes))
                for name in sampled & places.keys():
                    begin, end = places[name]["data_offsets"]
                    file.seek(8 + num_bytes + max(begin, (begin + end - SAMPLE_BYTES) // 2))
                    samples[name] = file.read(min(SAMPLE_BYTES, end - begin))
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error}", field="model") from error
    for name in sorted(samples):
        digest.update(samples[name])
    return digest.hexdigest()


def _main_type(headers: list[TensorSpec]) -> str | None:
    """What most elements are of; None: there are none."""
    elements: Counter[str] = Counter()
    for tensor in headers:
        elements[tensor.dtype] += tensor.num_elements
    return elements.most_common(1)[0][0] if elements else None


def _headers(folder: Path) -> list[TensorSpec]:
    """Of the folder's safetensors files; of a folder without any, none."""
    return checkpoint_tensors(folder) if checkpoint_files(folder) else []
