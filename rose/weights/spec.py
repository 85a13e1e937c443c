"""What a policy model consists of: tensor names, element types and shapes, and the digest over them.

Everything on the wire speaks *checkpoint coordinates*: a tensor's name in the Hugging Face checkpoint and
a flat row-major index into it.  Element types carry safetensors' names.  Two models with the same digest
have the same coordinates; a delta for one is refused by the other.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rose.errors import WeightsError

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F32": 4, "I32": 4, "U32": 4,
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element, by safetensors' name of the type.  Types of less than a byte (F4, F6) are refused: checkpoints hold
such codes packed in U8, and so they travel."""

MAX_TENSORS = 1_000_000
MAX_NAME_CHARS = 512
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 44  # 16-bit elements of 32 TiB; keeps (index << 16) and every byte offset inside 64 bits


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the checkpoint.  Constructing one checks it; hostile input never gets further."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > MAX_NAME_CHARS or not self.name.isprintable():
            raise WeightsError(f"needs 1..{MAX_NAME_CHARS} printable characters", field="tensor.name")
        if self.dtype not in DTYPE_BYTES:
            raise WeightsError(f"unknown element type {self.dtype[:20]!r}", field=f"{self.name}.dtype")
        if len(self.shape) > MAX_DIMENSIONS or any(
            type(n) is not int or not 0 <= n <= MAX_ELEMENTS for n in self.shape
        ):
            raise WeightsError(f"bad shape {str(self.shape)[:80]}", field=f"{self.name}.shape")
        if self.num_elements > MAX_ELEMENTS:
            raise WeightsError(f"more than 2**44 elements: {self.shape}", field=f"{self.name}.shape")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def width_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.width_bytes

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        """numpy type of one raw element: u1, u2, u4 or u8."""
        return np.dtype(f"<u{self.width_bytes}")

    @property
    def sparse_codec(self) -> bool:
        """Whether the ``planes`` codec understands it; everything else travels raw."""
        return self.width_bytes <= 4


def model_digest(specs: Iterable[TensorSpec]) -> str:
    """sha256 over names, types and shapes, in hex; the order of ``specs`` does not matter.

    Raises:
        WeightsError: A name twice, or more than a million tensors.
    """
    rows = sorted([spec.name, spec.dtype, list(spec.shape)] for spec in specs)
    if len(rows) > MAX_TENSORS:
        raise WeightsError(f"{len(rows)} tensors, at most {MAX_TENSORS}", field="model")
    for before, after in pairwise(rows):
        if before[0] == after[0]:
            raise WeightsError("named twice", field=str(after[0]))
    text = json.dumps(rows, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def differences(here: Mapping[str, TensorSpec], there: Mapping[str, TensorSpec]) -> str:
    """In which tensors two models differ, for people: what ``there`` lacks, has besides, or has otherwise; a few of each by name."""
    other = [
        f"{name} ({_words(there[name])}, here {_words(spec)})"
        for name, spec in here.items()
        if name in there and there[name] != spec
    ]
    parts = [
        _named("it lacks", [name for name in here if name not in there]),
        _named("it has besides", [name for name in there if name not in here]),
        _named("it has otherwise", other),
    ]
    return "; ".join(part for part in parts if part)


def _words(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _named(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(names[:3])}{rest}"
