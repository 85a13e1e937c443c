"""The trainer's tensors as the engines hold them: names, types, raw bits.

What a publisher is given is a torch module, or a function that returns a mapping of names to torch tensors,
numpy arrays or :class:`RawBits`.  In a trainer of several ranks each rank gives what it holds: DTensors (FSDP2,
tensor parallelism) say themselves which slice that is, :class:`Shard` says it for everybody else (Megatron).  Masters in fp32 are rounded to the type that the engine computes in, to nearest
even, exactly as torch's ``.to(torch.bfloat16)`` does; what the engine holds in another type is left alone.

Tied tensors travel once, under the name the checkpoint uses: of the names that share memory, the one that the
module does not declare as tied (``_tied_weights_keys``), else the first that it registered.  A function declares
nothing and its order means nothing: it returns such a tensor once.  ``torch.compile``, of the whole or of any layer,
changes no name.

torch is never imported here: a tensor is recognised by what it can do, and its module is loaded already.  Nothing
is copied but what a cast or a device-to-host transfer must; :meth:`TensorBox.bits` does that for a range at a time,
so memory beyond the trainer's own is bounded by the range.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from rose.errors import ConfigError, WeightsError
from rose.weights import boxes
from rose.weights.boxes import Box
from rose.weights.jit import compiled
from rose.weights.spec import DTYPE_BYTES, TensorSpec
from rose.weights.statehash import Bits, readonly

_TORCH_NAMES = {
    "torch.bool": "BOOL", "torch.uint8": "U8", "torch.int8": "I8", "torch.int16": "I16", "torch.uint16": "U16",
    "torch.int32": "I32", "torch.uint32": "U32", "torch.int64": "I64", "torch.uint64": "U64",
    "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float32": "F32", "torch.float64": "F64",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.float8_e4m3fnuz": "F8_E4M3FNUZ", "torch.float8_e5m2fnuz": "F8_E5M2FNUZ", "torch.complex64": "C64",
}  # fmt: skip
_NUMPY_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32",
    "uint32": "U32", "int64": "I64", "uint64": "U64", "float16": "F16", "float32": "F32", "float64": "F64",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
_WIDE_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_COMPILED = "_orig_mod"
"""What torch.compile's wrapper calls the module inside it."""
Read = Callable[[int, int], NDArray[Any]]
_TORCH_OF = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class RawBits:
    """Bits that are final: ``bits`` (unsigned, in the tensor's shape) of safetensors type ``dtype``."""

    bits: NDArray[Any]
    dtype: str


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a checkpoint tensor that this rank holds, for trainers whose tensors do not say it themselves.

    ``tensor`` is ``whole[offset : offset + tensor.shape]`` in every dimension.  A rank that holds several parts of
    one tensor (attention heads interleaved by group, gate and up in one matrix) gives a list of them.

    Args:
        tensor: A torch tensor, numpy array or :class:`RawBits`; views are fine.
        shape: Of the whole tensor in the checkpoint.
        offset: Where the part begins, one number per dimension.
    """

    tensor: Any
    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorBox:
    """One box of one tensor, to publish: what it is on the wire, and how to get a range of its bits.

    Args:
        spec: Name, type and shape of the whole tensor, as the engine's checkpoint has them.
        box: Which of its elements these are.
        read: ``read(start, stop)`` -> bits of that range of the box, unsigned; fresh or a view, valid until the
            next call, and only as long as the trainer does not step.
        read_there: The same range where the tensor is, as torch's ``uint8`` or ``int16``; None: it is on the host, or its elements
            are wider.
        own: The type that the trainer holds it in; empty: it is not told.
    """

    spec: TensorSpec
    box: Box
    read: Callable[[int, int], NDArray[Any]]
    read_there: Callable[[int, int], Any] | None = None
    own: str = ""

    def bits(self, start: int, stop: int) -> Bits:
        """Elements ``start`` .. ``stop`` of the box as they are now, as unsigned integers ``[stop - start]``.

        Raises:
            WeightsError: The tensor changed its type or size meanwhile.
        """
        found = self.read(start, stop)
        if found.dtype != self.spec.bits_dtype or found.size != stop - start:
            raise WeightsError("changed its type or size while it was read", field=self.spec.name)
        return found

    def copied(self) -> TensorBox:
        """The same piece with its bits as they are now."""
        bits = np.array(self.bits(0, self.box.num_elements), copy=True)
        return TensorBox(self.spec, self.box, lambda start, stop: bits[start:stop])


def collect(source: Any, *, cast: str = "BF16", keep: tuple[str, ...] = ()) -> list[TensorBox]:
    """List what this rank holds now, in the source's own order, tied tensors once.

    Args:
        source: A torch module (one of transformers by the names of its checkpoint), or a function returning a mapping by checkpoint name of tensors, DTensors,
            :class:`Shard` or lists of :class:`Shard`.  A plain tensor is a whole one; where several ranks hold
            it, one of them publishes it.
        cast: Type that floats of 16 bits and more are rounded to: BF16, F16 or F32.
        keep: Name patterns (``*`` and ``?``) of tensors that keep their own type.

    Raises:
        ConfigError: Not such a thing, a DTensor that is no box, or a function that returns one tensor under two names.
        WeightsError: A tensor of a type that cannot travel.
    """
    source = getattr(source, _COMPILED, source)
    if type(source).__name__ in (
        "DataParallel",
        "DistributedDataParallel",
    ):  # whose names all begin with "module."
        source = source.module
        source = getattr(source, _COMPILED, source)
    is_module = callable(getattr(source, "state_dict", None))
    if not is_module and not callable(source):
        raise ConfigError("needs a torch module or a function that returns tensors by name", field="tensors")
    table = _plain_names(source.state_dict() if is_module else source())
    # A module ties its own names, so one of each is chosen before they become the checkpoint's.
    names = _chosen(table, _tied_names(source) if is_module else None)
    table = {name: value for name, value in table.items() if name in names}
    if is_module:
        table = _checkpoint_names(source, table)
    made = next((name for name in table if ".parametrizations." in f".{name}"), None)
    if made is not None:
        raise ConfigError(
            "is what a parametrization computes a weight from, which an engine does not have",
            field=f"tensors.{made}",
            fix="torch.nn.utils.parametrize.remove_parametrizations, or a function that returns the weights",
        )
    adapter = next((name for name in table if ".lora_A." in f".{name}" or ".base_layer." in f".{name}"), None)
    if adapter is not None:
        raise ConfigError(
            "is of an adapter beside the model, which an engine of its checkpoint does not have",
            field=f"tensors.{adapter}",
            fix="pass a function that returns merged weights by the checkpoint's names",
        )
    found: list[TensorBox] = []
    for name, value in table.items():
        kept = any(fnmatchcase(name, pattern) for pattern in keep)
        for shard in _shards(name, value):
            found += _pieces(name, shard, cast, kept)
    return found


def _tied_names(module: Any) -> frozenset[str]:
    """The names that a module declares as second ones: transformers 5 lists those of its parts too, others have a list or a mapping."""
    declared = getattr(module, "_tied_weights_keys", None) or ()
    everywhere = getattr(module, "all_tied_weights_keys", None) or ()
    return frozenset(declared) | frozenset(everywhere)


_CONVERTED: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()
"""Of modules of transformers, the names that they or their checkpoint have and the other has not."""


def _checkpoint_names(module: Any, table: dict[str, Any]) -> dict[str, Any]:
    """What ``save_pretrained`` would write: transformers keeps the experts of a mixture in one tensor each layer, the checkpoint one by one.

    Raises:
        ConfigError: The names differ, and a tensor is divided over ranks: transformers' conversion takes whole ones.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    if revert is None or not callable(getattr(module, "save_pretrained", None)):
        return table
    if module not in _CONVERTED:
        empty = sys.modules["torch"].empty
        shapes = {name: empty(tuple(value.shape), device="meta") for name, value in table.items()}
        _CONVERTED[module] = frozenset(set(table) ^ set(revert(module, shapes)))
    unlike = _CONVERTED[module]
    if not unlike:
        return table
    if any(hasattr(value, "to_local") and hasattr(value, "device_mesh") for value in table.values()):
        raise ConfigError(
            "is several tensors in the checkpoint, or has another name there, and the model is divided over ranks",
            field=f"tensors.{min(unlike & set(table) or unlike)}",
            fix="pass a function that returns Shards by the checkpoint's names",
        )
    return dict(revert(module, table))


def _plain_names(table: Any) -> dict[str, Any]:
    """The table by checkpoint name: without the level that torch.compile puts between a module and its own."""
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"gave {type(table).__name__}, needs a mapping of names to tensors", field="tensors"
        )
    found: dict[str, Any] = {}
    for name, value in table.items():
        plain = ".".join(part for part in str(name).split(".") if part != _COMPILED)
        if plain in found:
            raise ConfigError("is there twice, compiled and not", field=f"tensors.{plain}")
        found[plain] = value
    return found


def _chosen(table: Mapping[str, Any], tied: frozenset[str] | None) -> set[str]:
    """Of every tensor one name; ``tied``: the names that a module declares as second ones, None of a function."""
    chosen: dict[Any, str] = {}
    for name, value in table.items():
        identity = _memory_of(value) or name
        holder = chosen.get(identity)
        if holder is not None and tied is None:
            first, second = sorted((holder, name))
            raise ConfigError(
                f"is {first} too: one tensor in memory",
                field=f"tensors.{second}",
                fix="return it once, under the name that the engine's checkpoint has",
            )
        if holder is None or (tied is not None and holder in tied and name not in tied):
            chosen[identity] = name
    return set(chosen.values())


def _shards(name: str, value: Any) -> list[Shard]:
    if isinstance(value, Shard):
        return [value]
    if isinstance(value, list):
        if not value or not all(isinstance(part, Shard) for part in value):
            raise ConfigError("needs a list of one or more Shard", field=f"tensors.{name}")
        return value
    if hasattr(value, "to_local") and hasattr(value, "device_mesh"):
        return _shards_of_dtensor(name, value)
    shape = _shape_of(name, value)
    return [Shard(value, shape, (0,) * len(shape))]


def _shards_of_dtensor(name: str, value: Any) -> list[Shard]:
    """The rows or columns that FSDP2 or tensor parallelism left to this rank.  Nothing is gathered."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in value.placements):
        raise ConfigError("is a partial sum", field=f"tensors.{name}", fix="redistribute it first")
    local = value.detach().to_local()
    extent, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    shape = tuple(int(n) for n in value.shape)
    if local.numel() == 0 and math.prod(shape):
        return []  # fewer rows than ranks
    if tuple(local.shape) != tuple(extent) or len(offset) != len(shape):
        raise ConfigError(
            f"its local shape {tuple(local.shape)} is no slice of {shape}",
            field=f"tensors.{name}",
            fix="pass a function that returns Shards",
        )
    return [Shard(local, shape, tuple(int(n) for n in offset))]


def _pieces(name: str, shard: Shard, cast: str, kept: bool) -> Iterator[TensorBox]:
    extent = _shape_of(name, shard.tensor)
    dtype, read, there = _reader(name, shard.tensor, cast, kept)
    own = _TORCH_NAMES.get(str(getattr(shard.tensor, "dtype", "")), "")
    spec = TensorSpec(name, dtype, tuple(int(n) for n in shard.shape))
    try:
        found = boxes.of_slice(spec.shape, shard.offset, extent)
    except WeightsError as error:
        raise ConfigError(error.message, field=f"tensors.{name}") from None
    if not spec.num_elements:
        yield TensorBox(spec, Box.flat(0, 0), read)
    begin = 0
    for box in found:
        later = None if there is None else _later(there, begin)
        yield TensorBox(spec, box, _later(read, begin), later, own)
        begin += box.num_elements


def _later(read: Callable[[int, int], Any], begin: int) -> Callable[[int, int], Any]:
    return read if not begin else lambda start, stop: read(begin + start, begin + stop)


def _shape_of(name: str, value: Any) -> tuple[int, ...]:
    shape = value.bits.shape if isinstance(value, RawBits) else getattr(value, "shape", None)
    if shape is None or not hasattr(shape, "__len__"):
        raise WeightsError(f"is a {type(value).__name__}, not a tensor", field=name)
    return tuple(int(n) for n in shape)


def _reader(
    name: str, value: Any, cast: str, kept: bool
) -> tuple[str, Read, Callable[[int, int], Any] | None]:
    """The type on the wire, and how to read flat ranges of the bits: here, and where the tensor is."""
    if isinstance(value, RawBits):
        flat = np.ascontiguousarray(value.bits).reshape(-1)
        return value.dtype, lambda start, stop: flat[start:stop], None
    if isinstance(value, np.ndarray):
        return (*_numpy_reader(name, value, cast, kept), None)
    if hasattr(value, "detach") and str(getattr(value, "dtype", "")).startswith("torch."):
        return _torch_reader(name, value, cast, kept)
    raise WeightsError(f"is a {type(value).__name__}, not a tensor", field=name)


def _numpy_reader(name: str, array: NDArray[Any], cast: str, kept: bool) -> tuple[str, Read]:
    own = _NUMPY_NAMES.get(array.dtype.name)
    if own is None:
        raise WeightsError(f"numpy type {array.dtype} cannot travel", field=name)
    target = cast if own in _WIDE_FLOATS and not kept else own
    bits_dtype = np.dtype(f"<u{DTYPE_BYTES[target]}")
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)

    def read(start: int, stop: int) -> NDArray[Any]:
        part = flat[start:stop]
        if own == target:
            return part.view(bits_dtype)
        wide = np.ascontiguousarray(part, np.float64 if own == "F64" else np.float32)
        if target == "BF16":
            return round_to_bf16(wide.astype(np.float32, copy=False))
        return wide.astype(np.float16 if target == "F16" else np.float32).view(bits_dtype)

    return target, read


def _torch_reader(
    name: str, value: Any, cast: str, kept: bool
) -> tuple[str, Read, Callable[[int, int], Any] | None]:
    own = _TORCH_NAMES.get(str(value.dtype))
    if own is None:
        raise WeightsError(f"type {value.dtype} cannot travel", field=name)
    if str(value.layout) != "torch.strided":
        raise WeightsError(f"is {value.layout}, and only dense tensors travel", field=name)
    if value.device.type == "meta":
        raise WeightsError("is on the meta device, where nothing is kept: load the model first", field=name)
    target = cast if own in _WIDE_FLOATS and not kept else own
    width_bytes = DTYPE_BYTES[target]
    torch = sys.modules["torch"]
    dtype = getattr(torch, _TORCH_OF[target]) if own != target else value.dtype
    unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width_bytes]
    # A view of a contiguous tensor, a copy of any other; a conjugate that torch has only noted is made first.
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1)

    def read(start: int, stop: int) -> NDArray[Any]:
        part = flat[start:stop].to(dtype).cpu().contiguous()  # cast first: half the bytes leave the device
        return part.view(unsigned).numpy().view(f"<u{width_bytes}")

    def read_there(start: int, stop: int) -> Any:
        return flat[start:stop].to(dtype).contiguous().view(unsigned)

    return target, read, read_there if width_bytes <= 2 and on_gpu(flat) else None


def on_gpu(tensor: Any) -> bool:
    """Is a torch tensor where :mod:`rose.weights.device` runs?"""
    return tensor.device.type == "cuda"


def _memory_of(value: Any) -> Any:
    """A key that two names share exactly when they are one tensor in memory; None when that cannot be told."""
    if isinstance(value, RawBits):
        value = value.bits
    if isinstance(value, np.ndarray):
        if value.size == 0:
            return None
        return (value.__array_interface__["data"][0], value.dtype.str, value.shape, value.strides)
    if hasattr(value, "to_local") and hasattr(value, "device_mesh"):
        value = value.detach().to_local()
    if hasattr(value, "data_ptr") and hasattr(value, "stride"):
        if value.numel() == 0 or str(getattr(value, "layout", "torch.strided")) != "torch.strided":
            return None
        return (str(value.device), value.data_ptr(), str(value.dtype), tuple(value.shape), value.stride())
    return None


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bits of fp32 values, to nearest, ties to even."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    out = np.empty(flat.size, np.uint16)
    _round_bf16(readonly(flat.view(np.uint32)), out)
    return out


@compiled
def _round_bf16(wide: Any, out: Any) -> None:
    """fp32 bits to bf16 bits, to nearest, ties to even."""
    for i in range(wide.size):
        u = wide[i]
        if (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            out[i] = np.uint16(0x7FC0)  # as torch: rounding a NaN's payload could make it an infinity
        else:
            out[i] = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
