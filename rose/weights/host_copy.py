"""A copy of the policy on the engine's host: one safetensors file, mapped, and the state it proves to hold.

``weights.safetensors`` has the layout of a Hugging Face checkpoint.  ``state.json`` says which version it is and the state hash of each
tensor.  The state file exists only while the copy is whole: it is taken away before the first byte changes and written back
after the last, and opening a copy scans every byte against it.  So a crash at any moment leaves either a proven copy
or none.

It decides nothing; the subscriber does.  One process owns a directory (``flock``).  Not thread-safe.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rose.errors import CapacityError, ConfigError, RequestError, WeightsError
from rose.lineage import WeightVersion
from rose.units import format_bytes
from rose.weights import statehash
from rose.weights.spec import TensorSpec, model_digest
from rose.weights.statehash import Bits

_log = logging.getLogger(__name__)
SCHEMA = 1


class InUse(ConfigError):
    """Another process has the directory."""


class _TensorRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    h: str


class _State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    run_id: str
    version: str
    tensors: tuple[_TensorRow, ...]


class HostCopy:
    """See the module's docstring.

    Args:
        directory: Created if missing; ``/dev/shm`` for speed, a disk to survive a restart of the machine.

    Raises:
        InUse: Another process uses the directory.
        ConfigError: It cannot be written.
    """

    def __init__(self, directory: Path | str, run_id: str) -> None:
        self.directory = Path(directory).resolve()
        self.run_id = run_id
        self.version: WeightVersion | None = None
        self.h: dict[str, int] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.model = ""
        self._bits: dict[str, Bits] = {}
        self._map: mmap.mmap | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = (self.directory / "lock").open("ab")
        except OSError as error:
            raise ConfigError(f"{directory}: {error.strerror}", field="directory") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise InUse(f"{directory} is in use by another process", field="directory") from None
        self._load()

    @property
    def path(self) -> Path:
        return self.directory / "weights.safetensors"

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def require_there(self) -> None:
        """Raises WeightsError where the directory was deleted under us: another process may have its name by now, and its lock."""
        try:
            same = os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.directory / "lock"))
        except FileNotFoundError:
            same = False
        if not same:
            raise WeightsError(
                "was deleted while this process kept the copy in it",
                field=str(self.directory),
                fix="open the copy anew: start the process again, or POST /init_weight_transfer_engine to a stock server",
            )

    def require_room(self, num_bytes: int) -> None:
        """Before the first byte is written: a full disk is also other programs' trouble, a full tmpfs is the machine's memory."""
        free_bytes = shutil.disk_usage(self.directory).free
        if num_bytes > free_bytes:
            raise CapacityError(
                f"{self.directory} has {format_bytes(free_bytes)} left, the next version needs {format_bytes(num_bytes)}; "
                "name a directory on a larger disk: 2.2 times the model, and once more for each update that takes it whole",
                status=507,
                field="weights.directory",
            )

    def bits(self, name: str) -> Bits:
        """All bits of a tensor, flat; writes go to the copy and are allowed between begin and finish only."""
        return self._bits[name]

    def reshape(self, specs: Iterable[TensorSpec]) -> None:
        """Make room for another model; the present content is dropped unless the model is the same.

        Raises:
            CapacityError: The disk is full.
        """
        ordered = list(specs)
        model = model_digest(ordered)
        if self._map is not None and model == self.model:
            return
        header = _header(ordered)
        total = len(header) + sum(spec.nbytes for spec in ordered)
        temporary = self.directory / ".weights.tmp"
        try:
            # First: of no use any more, and the directory need not hold three models.
            self.begin()
            self._unmap()
            self.path.unlink(missing_ok=True)
            with temporary.open("wb") as file:
                # Reserved, not sparse: a full disk must fail here, not as SIGBUS in a later write to the mapping.
                os.posix_fallocate(file.fileno(), 0, total)
                file.write(header)
            os.replace(temporary, self.path)
        except OSError as error:
            raise CapacityError(
                f"no room for {total} bytes: {error.strerror}", status=507, field=str(self.path)
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        self._open_map(ordered, len(header))

    def begin(self) -> None:
        """From now on the copy is nothing, until :meth:`finish`."""
        self._state_path.unlink(missing_ok=True)
        self.version = None

    def finish(self, version: WeightVersion, h: Mapping[str, int]) -> None:
        """The copy is ``version``, whole."""
        rows = tuple(
            _TensorRow(spec.name, spec.dtype, spec.shape, statehash.to_hex(h[spec.name]))
            for spec in self.specs.values()
        )
        state = _State(schema=SCHEMA, run_id=self.run_id, version=str(version), tensors=rows)
        temporary = self.directory / ".state.tmp"
        try:
            temporary.write_bytes(msgspec.json.encode(state))
            os.replace(temporary, self._state_path)
        except OSError as error:  # the copy is whole all the same; only a restart will have to fetch it again
            _log.warning("state of the host copy cannot be written: %s", error.strerror)
        self.version, self.h = version, dict(h)

    def scan(self) -> dict[str, int]:
        """State hash of every tensor, from memory: what proves the copy."""
        return {name: statehash.hash_bits(bits) for name, bits in self._bits.items()}

    def close(self) -> None:
        self._unmap()
        self._lock.close()

    # -- files

    @property
    def _state_path(self) -> Path:
        return self.directory / "state.json"

    def _load(self) -> None:
        """Take over what an earlier process left, if it proves to be what it says."""
        try:
            state = msgspec.json.decode(self._state_path.read_bytes(), type=_State)
            specs = [TensorSpec(row.name, row.dtype, row.shape) for row in state.tensors]
            claimed = {row.name: statehash.from_hex(row.h) for row in state.tensors}
            version = WeightVersion.parse(state.version)
            header = _header(specs)
            with self.path.open("rb") as file:
                same = file.read(len(header)) == header
            whole = self.path.stat().st_size == len(header) + sum(spec.nbytes for spec in specs)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError, WeightsError, RequestError) as error:
            _log.warning("host copy in %s is unusable and will be fetched again: %s", self.directory, error)
            return
        if state.schema != SCHEMA or state.run_id != self.run_id or not same or not whole:
            return
        self._open_map(specs, len(header))
        if self.scan() == claimed:
            self.version, self.h = version, claimed
        else:
            _log.warning("host copy %s in %s is damaged and will be fetched again", version, self.directory)
            self.begin()

    def _open_map(self, specs: list[TensorSpec], header_bytes: int) -> None:
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.specs = {spec.name: spec for spec in specs}
        self.model = model_digest(specs)
        offsets = _offsets(specs)
        self._bits = {
            spec.name: np.frombuffer(
                self._map, spec.bits_dtype, spec.num_elements, header_bytes + offsets[spec.name]
            )
            for spec in specs
        }

    def _unmap(self) -> None:
        self._bits.clear()
        self.specs, self.h, self.model = {}, {}, ""
        mapping, self._map = self._map, None
        if mapping is not None:
            try:
                mapping.close()
            except BufferError:
                pass  # a caller still looks at it; it goes with the last view


def in_use(directory: Path) -> bool:
    """Whether some process has the copy open."""
    try:
        with (directory / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def remove(directory: Path) -> bool:
    """Remove a copy that no process has open, with all that lies there; False where one has, or it cannot be removed."""
    if directory.is_symlink():
        return False
    try:
        with (directory / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return not os.path.lexists(directory)


def _offsets(specs: list[TensorSpec]) -> dict[str, int]:
    """Where each tensor starts after the header: wide elements first, so that every tensor is aligned."""
    offsets: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: (-spec.width_bytes, spec.name)):
        offsets[spec.name] = end
        end += spec.nbytes
    return offsets


def _header(specs: list[TensorSpec]) -> bytes:
    """The safetensors header: length, JSON, padded to 8 bytes.  (The library writes only from memory it is given;
    here the file is the memory.)"""
    offsets = _offsets(specs)
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for spec in sorted(specs, key=lambda spec: offsets[spec.name]):
        start = offsets[spec.name]
        table[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.nbytes],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
