"""The update file: one step from what an engine holds to another version, handed over as a file.

The node agent writes it, the rollout engine stages it.  It is a safetensors file; tensors inside it are named

* ``dense/NAME``: all bits of tensor NAME, as an unsigned integer array of the checkpoint's shape, or
* ``idx/NAME`` and ``val/NAME``: flat row-major indices (uint32 or int64, strictly increasing) and the new
  bits there,

and its metadata holds one JSON text under ``rose`` (:class:`Header`).  The header lists *every* tensor of the
model with its state hash before and after; a tensor without data is unchanged.  Values are absolute, so
applying a file twice is the same as once.

:func:`read_update` proves the file is well formed: types, shapes, sizes, order and range of indices, and that
header and data agree.  It does not prove the contents: the engine does, by comparing state hashes
(``h_before`` against what it holds, ``h_after`` against what it staged) before it changes anything.

Invariants: without a ``base`` every tensor is dense (an engine in any state may take it), and ``h_before``
is None exactly then.  A 64-bit tensor travels dense only.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from rose.errors import RoseError, SectionCorrupt, WeightsError
from rose.lineage import WeightVersion
from rose.weights import indexed, statehash
from rose.weights.spec import MAX_TENSORS, TensorSpec, model_digest

SCHEMA = 1
MAX_UPDATE_BYTES = 1 << 40
"""1 TiB: a sanity bound on a file we are asked to read, not a memory limit (tensors are read one by one)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorUpdate:
    """One tensor of the model in an update: unchanged, sparse, or dense.

    Args:
        h_before: State hash that the engine must hold; None when the update has no base.
        h_after: State hash once applied.
        dense: All new bits, in the checkpoint's shape, as an unsigned integer array; or None.
        idx: Sorted unique flat indices, uint32 or int64, ``[K]``; or None.
        val: New bits at ``idx``, ``[K]``; or None.
    """

    spec: TensorSpec
    h_before: int | None
    h_after: int
    dense: NDArray[Any] | None = field(default=None, repr=False)
    idx: NDArray[Any] | None = field(default=None, repr=False)
    val: NDArray[Any] | None = field(default=None, repr=False)

    @property
    def num_changed(self) -> int:
        """Elements that the update writes (for a dense tensor: all of them)."""
        if self.dense is not None:
            return self.spec.num_elements
        return 0 if self.idx is None else int(self.idx.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """A whole update file in memory.  ``tensors`` names every tensor of the model, in file order."""

    run_id: str
    target: WeightVersion
    base: WeightVersion | None
    model: str
    tensors: Mapping[str, TensorUpdate]

    @property
    def num_changed(self) -> int:
        return sum(tensor.num_changed for tensor in self.tensors.values())


class TensorHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    h_before: str | None
    h_after: str
    num_changed: int


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON text under ``rose`` in the file's metadata."""

    schema: int
    run_id: str
    attempt: int
    version: int
    base: tuple[int, int] | None
    model: str
    tensors: dict[str, TensorHeader]


class _Place(msgspec.Struct, frozen=True):
    """An array in the table of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def write_update(path: Path | str, update: Update) -> int:
    """Write ``update`` at once or not at all (temporary file, rename); returns the size in bytes.

    Nothing waits for a disk: the file is read while the machine is up, and is written again after that.

    Raises:
        WeightsError: ``update`` breaks a rule of the format.
        OSError: The disk did.
    """
    path = Path(path)
    arrays: dict[str, NDArray[Any]] = {}
    rows: dict[str, TensorHeader] = {}
    for name, tensor in update.tensors.items():
        if name != tensor.spec.name:
            raise WeightsError(f"is filed under '{name}'", field=tensor.spec.name)
        _check(tensor, update.base)
        if tensor.dense is not None:
            # Not ascontiguousarray, which makes one axis of none: a scale of shape () would become another tensor.
            arrays[f"dense/{name}"] = np.asarray(tensor.dense, order="C")
        elif tensor.idx is not None and tensor.val is not None:
            arrays[f"idx/{name}"] = np.ascontiguousarray(tensor.idx)
            arrays[f"val/{name}"] = np.ascontiguousarray(tensor.val)
        rows[name] = TensorHeader(
            dtype=tensor.spec.dtype,
            shape=list(tensor.spec.shape),
            h_before=None if tensor.h_before is None else statehash.to_hex(tensor.h_before),
            h_after=statehash.to_hex(tensor.h_after),
            num_changed=tensor.num_changed,
        )
    if update.model != model_digest(tensor.spec for tensor in update.tensors.values()):
        raise WeightsError("is not the digest of these tensors", field="model")
    header = Header(
        schema=SCHEMA,
        run_id=update.run_id,
        attempt=update.target.attempt,
        version=update.target.version,
        base=None if update.base is None else (update.base.attempt, update.base.version),
        model=update.model,
        tensors=rows,
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            _save(file, arrays, {"rose": msgspec.json.encode(header).decode()})
            size_bytes = file.tell()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return size_bytes


def _save(file: BinaryIO, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """As ``safetensors.numpy.save_file``, which copies each array first: of a large model that takes as long as writing it.

    Format: https://huggingface.co/docs/safetensors (8 bytes of length, JSON, data without holes).
    """
    table: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    # The widest first: then each lies where a processor reads it in place (:meth:`UpdateFile.view`).
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
    for name, array in arrays.items():
        kind = f"{'I' if array.dtype.kind == 'i' else 'U'}{8 * array.itemsize}"
        table[name] = {"dtype": kind, "shape": array.shape, "data_offsets": (end, end + array.nbytes)}
        end += array.nbytes
    head = msgspec.json.encode(table)
    head += b" " * (-len(head) % 8)
    file.write(len(head).to_bytes(8, "little") + head)
    for array in arrays.values():
        file.write(array.reshape(-1).view(np.uint8).data)


class UpdateFile:
    """An update file open for reading, one tensor at a time; a context manager.

    The constructor checks the header and that header and stored arrays agree in name, type and shape;
    :meth:`read` copies a tensor and checks its values, :meth:`view` does neither.  Memory: one tensor, and the header.  What is open reads on when its name is gone or another
    file's: whoever wrote it may delete it at any time.

    Raises:
        SectionCorrupt: The file is not a well-formed update; nothing of it may be used.
    """

    def __init__(self, path: Path | str, *, max_bytes: int = MAX_UPDATE_BYTES) -> None:
        self.path = Path(path)
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SectionCorrupt(f"cannot be read: {error.strerror}", field=self.path.name) from error
        self._file: Any = None
        self._map: mmap.mmap | None = None
        try:
            self._as_opened = self._identity()
            size_bytes = self._as_opened[0]
            if size_bytes > max_bytes:
                raise SectionCorrupt(f"{size_bytes} bytes, at most {max_bytes}", field=self.path.name)
            # By the descriptor: the name may be another file's by now.
            self._file = self._guard(
                lambda: safe_open(f"/proc/self/fd/{self._descriptor}", framework="numpy")
            )
            self._load_header()
            self._load_places(size_bytes)
        except BaseException:
            self.close()
            raise

    def _identity(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def was_written_to(self) -> bool:
        """Since it was opened.  Nobody writes to an update file: it is replaced."""
        return self._identity() != self._as_opened

    def _load_header(self) -> None:
        text = (self._guard(self._file.metadata) or {}).get("rose", "")
        try:
            self.header = msgspec.json.decode(text, type=Header)
        except msgspec.DecodeError as error:  # ValidationError is one
            raise self._corrupt(f"metadata 'rose' is malformed: {error}") from None
        header = self.header
        if header.schema != SCHEMA:
            raise self._corrupt(f"schema {header.schema}, this reader knows {SCHEMA}")
        if len(header.tensors) > MAX_TENSORS:
            raise self._corrupt(f"{len(header.tensors)} tensors, at most {MAX_TENSORS}")
        self.target = self._version((header.attempt, header.version))
        self.base = None if header.base is None else self._version(header.base)
        self.specs = {
            name: self._guard(lambda n=name, r=row: TensorSpec(n, r.dtype, tuple(r.shape)))
            for name, row in header.tensors.items()
        }
        if header.model != self._guard(lambda: model_digest(self.specs.values())):
            raise self._corrupt("'model' is not the digest of the tensors listed")
        self._stored: set[str] = set(self._file.keys())
        for key in self._stored:
            kind, _, name = key.partition("/")
            if name not in self.specs or kind not in ("dense", "idx", "val"):
                raise self._corrupt(f"unknown array '{key[:80]}'")

    def _load_places(self, size_bytes: int) -> None:
        """Where each array lies; the library, which has checked the file's table, does not tell."""
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        self._data_at = 8 + length
        text = os.pread(self._descriptor, length, 8)
        self._places = self._guard(lambda: msgspec.json.decode(text, type=dict[str, msgspec.Raw]))
        self._map = mmap.mmap(self._descriptor, size_bytes, access=mmap.ACCESS_COPY)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def read(self, name: str) -> TensorUpdate:
        """One tensor, copied and checked."""
        return self._tensor(name, lambda key: self._file.get_tensor(key), indices=True)

    def view(self, name: str) -> TensorUpdate:
        """One tensor as it lies in the file: only what is looked at is read.

        That indices increase within the tensor is not checked, and whoever can write to the file may change the arrays: what is acted on
        is to be copied first, and checked then.
        """
        return self._tensor(name, self._mapped, indices=False)

    def _mapped(self, key: str) -> NDArray[Any]:
        assert self._map is not None
        place = msgspec.json.decode(self._places[key], type=_Place)
        begin, end = place.data_offsets
        found = np.frombuffer(
            self._map, np.dtype(f"<{place.dtype[0].lower()}{int(place.dtype[1:]) // 8}"),
            count=math.prod(place.shape), offset=self._data_at + begin,
        )  # fmt: skip
        if found.nbytes != end - begin:
            raise ValueError(f"'{key}' is of another size")
        return (found if found.flags.aligned else found.copy()).reshape(place.shape)

    def _tensor(self, name: str, get: Callable[[str], NDArray[Any]], *, indices: bool) -> TensorUpdate:
        row = self.header.tensors[name]
        arrays = {
            kind: self._guard(lambda k=kind: get(f"{k}/{name}"))
            for kind in ("dense", "idx", "val")
            if f"{kind}/{name}" in self._stored
        }
        tensor = self._guard(
            lambda: TensorUpdate(
                spec=self.specs[name],
                h_before=None if row.h_before is None else statehash.from_hex(row.h_before),
                h_after=statehash.from_hex(row.h_after),
                **arrays,
            )
        )
        self._guard(lambda: _check(tensor, self.base, indices=indices))
        if tensor.num_changed != row.num_changed:
            raise self._corrupt(
                f"'{name}' has {tensor.num_changed} changes, its header says {row.num_changed}"
            )
        return tensor

    def close(self) -> None:
        """Safe to call twice.  Views stay good."""
        file, self._file = self._file, None
        self._map = None  # not closed: views may be in use, and the last of them takes it with it
        if file is not None:
            file.__exit__(None, None, None)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _corrupt(self, message: str) -> SectionCorrupt:
        return SectionCorrupt(message, field=self.path.name)

    def _version(self, pair: tuple[int, int]) -> WeightVersion:
        return self._guard(lambda: WeightVersion(*pair))

    def _guard(self, call: Callable[[], Any]) -> Any:
        """Run ``call``; whatever it says is wrong becomes SectionCorrupt naming this file."""
        try:
            return call()
        except (RoseError, SafetensorError, OSError, ValueError, TypeError) as error:
            raise self._corrupt(str(error)) from error


def read_update(path: Path | str, *, max_bytes: int = MAX_UPDATE_BYTES) -> Update:
    """Read and check a whole update file into memory.

    Raises:
        SectionCorrupt: See :class:`UpdateFile`.
    """
    with UpdateFile(path, max_bytes=max_bytes) as file:
        return Update(
            run_id=file.header.run_id,
            target=file.target,
            base=file.base,
            model=file.header.model,
            tensors={name: file.read(name) for name in file},
        )


def _check(tensor: TensorUpdate, base: WeightVersion | None, *, indices: bool = True) -> None:
    """The rules of one tensor, for writer and reader alike; ``indices`` False: all but their order and range."""
    spec = tensor.spec

    def refuse(message: str) -> WeightsError:
        return WeightsError(message, field=spec.name)

    if (tensor.idx is None) != (tensor.val is None):
        raise refuse("idx and val belong together")
    if tensor.dense is not None and tensor.idx is not None:
        raise refuse("is both dense and sparse")
    if (base is None) != (tensor.h_before is None):
        raise refuse("h_before is needed exactly when the update has a base")
    if tensor.dense is not None:
        if tensor.dense.dtype != spec.bits_dtype:
            raise refuse(f"dense bits are {tensor.dense.dtype}, {spec.dtype} needs {spec.bits_dtype}")
        if tensor.dense.shape != spec.shape:
            raise refuse(f"dense bits have shape {tensor.dense.shape}, the tensor {spec.shape}")
        return
    if base is None:
        raise refuse("an update without a base needs every tensor dense")
    if tensor.idx is None or tensor.val is None:
        if tensor.h_before != tensor.h_after:
            raise refuse("state hash changes but no data does")
        return
    idx, val = tensor.idx, tensor.val
    if spec.width_bytes > 4:
        raise refuse(f"{spec.dtype} travels dense only")
    if idx.ndim != 1 or idx.dtype not in (np.dtype(np.uint32), np.dtype(np.int64)):
        raise refuse(f"indices are {idx.dtype}, need 1-D uint32 or int64")
    if val.shape != idx.shape or val.dtype != spec.bits_dtype:
        raise refuse(f"values are {val.dtype}{val.shape}, need {spec.bits_dtype}{idx.shape}")
    if idx.size == 0:
        raise refuse("a sparse change of nothing; leave the tensor out")
    if indices and (int(idx[0]) < 0 or int(idx[-1]) >= spec.num_elements or not indexed.increases(idx)):
        raise refuse(f"indices must increase strictly within 0..{spec.num_elements - 1}")
