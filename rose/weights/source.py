"""The trainer's tensors as the engines hold them: names, types, raw bits.

What a publisher is given is a torch module, or a function that returns a mapping of names to torch tensors,
numpy arrays or :class:`RawBits`.  Masters in fp32 are rounded to the type that the engine computes in, to nearest
even, exactly as torch's ``.to(torch.bfloat16)`` does; what the engine holds in another type is left alone.

Tied tensors travel once, under the name the checkpoint uses: of the names that share memory, the one that the
model does not declare as tied (``_tied_weights_keys``), else the first.

torch is never imported here: a tensor is recognised by what it can do, and its module is loaded already.  Nothing
is copied but what a cast or a device-to-host transfer must; :meth:`Tensor.bits` does that for a range at a time,
so memory beyond the trainer's own is bounded by the range.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import ConfigError, WeightsError
from rose.weights import kernels
from rose.weights.spec import TensorSpec
from rose.weights.statehash import Bits, readonly

CASTS = ("BF16", "F16", "F32")
_TORCH_NAMES = {
    "torch.bool": "BOOL", "torch.uint8": "U8", "torch.int8": "I8", "torch.int16": "I16", "torch.uint16": "U16",
    "torch.int32": "I32", "torch.uint32": "U32", "torch.int64": "I64", "torch.uint64": "U64",
    "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float32": "F32", "torch.float64": "F64",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_NUMPY_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32",
    "uint32": "U32", "int64": "I64", "uint64": "U64", "float16": "F16", "float32": "F32", "float64": "F64",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_WIDE_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_TORCH_OF = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class RawBits:
    """Bits that are final: ``bits`` (unsigned, in the tensor's shape) of safetensors type ``dtype``."""

    bits: NDArray[Any]
    dtype: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to publish: what it is on the wire, and how to get a range of its bits.

    Args:
        spec: Name, type and shape as the engine's checkpoint has them.
        read: ``read(start, stop)`` -> bits of that flat range, unsigned; fresh or a view, valid until the next
            call, and only as long as the trainer does not step.
    """

    spec: TensorSpec
    read: Callable[[int, int], NDArray[Any]]

    def bits(self, start: int, stop: int) -> Bits:
        found = self.read(start, stop)
        if found.dtype != self.spec.bits_dtype or found.size != stop - start:
            raise WeightsError("changed its type or size while it was read", field=self.spec.name)
        return found


def collect(source: Any, *, cast: str = "BF16", keep: tuple[str, ...] = ()) -> list[Tensor]:
    """List what ``source`` holds now, in its own order, tied tensors once.

    Args:
        source: A torch module, or a function returning a mapping of tensors.
        cast: Type that floats of 16 bits and more are rounded to: BF16, F16 or F32.
        keep: Name patterns (``*`` and ``?``) of tensors that keep their own type.

    Raises:
        ConfigError: Not such a thing, or a sharded tensor.
        WeightsError: A tensor of a type that cannot travel.
    """
    source = getattr(source, "_orig_mod", source)  # torch.compile's wrapper would prefix every name
    tied: frozenset[str] = frozenset()
    if callable(getattr(source, "state_dict", None)):
        table: Any = source.state_dict()
        tied = frozenset(getattr(source, "_tied_weights_keys", None) or ())  # a list, or a mapping by name
    elif callable(source):
        table = source()
    else:
        raise ConfigError("needs a torch module or a function that returns tensors by name", field="tensors")
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"gave {type(table).__name__}, needs a mapping of names to tensors", field="tensors"
        )
    chosen: dict[Any, str] = {}
    for name, value in table.items():
        identity = _memory_of(value) or name
        holder = chosen.get(identity)
        if holder is None or (holder in tied and name not in tied):
            chosen[identity] = name
    names = set(chosen.values())
    return [_tensor(name, value, cast, keep) for name, value in table.items() if name in names]


def _tensor(name: str, value: Any, cast: str, keep: tuple[str, ...]) -> Tensor:
    kept = any(fnmatchcase(name, pattern) for pattern in keep)
    if isinstance(value, RawBits):
        spec = TensorSpec(name, value.dtype, value.bits.shape)
        flat = np.ascontiguousarray(value.bits).reshape(-1)
        return Tensor(spec, lambda start, stop: flat[start:stop])
    if isinstance(value, np.ndarray):
        return _numpy_tensor(name, value, cast, kept)
    if hasattr(value, "detach") and str(getattr(value, "dtype", "")).startswith("torch."):
        return _torch_tensor(name, value, cast, kept)
    raise WeightsError(f"is a {type(value).__name__}, not a tensor", field=name)


def _numpy_tensor(name: str, array: NDArray[Any], cast: str, kept: bool) -> Tensor:
    own = _NUMPY_NAMES.get(array.dtype.name)
    if own is None:
        raise WeightsError(f"numpy type {array.dtype} cannot travel", field=name)
    target = cast if own in _WIDE_FLOATS and not kept else own
    spec = TensorSpec(name, target, array.shape)
    flat = np.ascontiguousarray(array).reshape(-1)

    def read(start: int, stop: int) -> NDArray[Any]:
        part = flat[start:stop]
        if own == target:
            return part.view(spec.bits_dtype)
        wide = np.ascontiguousarray(part, np.float64 if own == "F64" else np.float32)
        if target == "BF16":
            return round_to_bf16(wide.astype(np.float32, copy=False))
        return wide.astype(np.float16 if target == "F16" else np.float32).view(spec.bits_dtype)

    return Tensor(spec, read)


def _torch_tensor(name: str, value: Any, cast: str, kept: bool) -> Tensor:
    if hasattr(value, "to_local"):
        raise ConfigError(
            "is a sharded DTensor", field=f"tensors.{name}", fix="pass a function that returns full tensors"
        )
    own = _TORCH_NAMES.get(str(value.dtype))
    if own is None:
        raise WeightsError(f"type {value.dtype} cannot travel", field=name)
    target = cast if own in _WIDE_FLOATS and not kept else own
    spec = TensorSpec(name, target, tuple(int(n) for n in value.shape))
    torch = sys.modules["torch"]
    dtype = getattr(torch, _TORCH_OF[target]) if own != target else value.dtype
    unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[spec.width_bytes]
    flat = value.detach().reshape(-1)  # a view of a contiguous tensor, a copy of any other

    def read(start: int, stop: int) -> NDArray[Any]:
        part = flat[start:stop].to(dtype).cpu().contiguous()  # cast first: half the bytes leave the device
        return part.view(unsigned).numpy().view(spec.bits_dtype)

    return Tensor(spec, read)


def _memory_of(value: Any) -> Any:
    """A key that two names share exactly when they are one tensor in memory; None when that cannot be told."""
    if isinstance(value, RawBits):
        value = value.bits
    if isinstance(value, np.ndarray):
        if value.size == 0:
            return None
        return (value.__array_interface__["data"][0], value.dtype.str, value.shape, value.strides)
    if hasattr(value, "data_ptr") and hasattr(value, "stride"):
        if value.numel() == 0 or hasattr(value, "to_local"):
            return None
        return (str(value.device), value.data_ptr(), str(value.dtype), tuple(value.shape), value.stride())
    return None


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bits of fp32 values, to nearest, ties to even."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    out = np.empty(flat.size, np.uint16)
    kernels.round_bf16(readonly(flat.view(np.uint32)), out)
    return out
