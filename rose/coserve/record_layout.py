"""How a record lies in a shared file, and what a file must be to be believed.

Layout of a file, little-endian, in this order::

    header, 64 bytes, never changes   magic, version, schema, record size, extra bytes, incarnation, checksum
    slot 0, slot 1, up to byte 1024   u32 checksum over number and body, u32 number, body of 64-bit ints
    sequence word, 64 bytes           u32 = number of the newest record (0: none yet); also the futex
    extra                             bytes of the owner's, each valid by itself (chunk maps)

Standard library and ``rose.policy`` only.
"""

from __future__ import annotations

import stat
import struct
import zlib
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from rose.coserve.records import (
    ChunkState,
    LayerState,
    NodeState,
    RankState,
    RolloutLease,
    ServingBoard,
    ServingLease,
)
from rose.errors import LedgerError

R = TypeVar("R")

VERSION = 3
MAX_EXTRA_BYTES = 1 << 24
"""One byte per chunk: 16 M chunks are 32 TiB.  More is a corrupt header, not a device."""
FOUND_BYTES = 256
"""Behind ``serving.lease``, UTF-8, the rest zero: what of production's configuration its row of the compatibility table was found by."""

MAGIC = b"ROSELGR\n"
HEADER = struct.Struct("<8sIIIIQ")  # magic, version, schema, record bytes, extra bytes, incarnation
HEADER_BYTES = 64
WORD_AT = 1024
"""Everything but the extra bytes lies in one page: one pwrite publishes a record, one mapped page holds the futex."""
EXTRA_AT = 1088
MODE = stat.S_IFREG | 0o600
U32 = struct.Struct("<I")
CRC_BYTES = 4


def _described(record_type: type[Any]) -> bytes:
    return f"{record_type.__name__}:{','.join(field.name for field in fields(record_type))};".encode()


_PROTOCOL = 0
"""Of all records of a device together, into each file's schema: who differs in one of them is understood in none.  Else production could
read a lease and not the report that counts when its writer is dead."""
for _one in (NodeState, ServingLease, ServingBoard, ChunkState, RankState, RolloutLease, LayerState):
    _PROTOCOL = zlib.crc32(_described(_one), _PROTOCOL)


def pack_found(text: str) -> bytes:
    """For the extra bytes of ``serving.lease``; cut off where it is too long."""
    return text.encode(errors="replace")[:FOUND_BYTES].ljust(FOUND_BYTES, b"\0")


def unpack_found(data: bytes) -> str:
    """Whatever stands there as one printable line."""
    text = data.rstrip(b"\0").decode(errors="replace")
    return "".join(one if one.isprintable() else "?" for one in text)


class RecordLayout(Generic[R]):
    """How records of one type lie in a file.  Built once per type and size."""

    def __init__(self, record_type: type[R]) -> None:
        self.names = tuple(field.name for field in fields(cast(Any, record_type)))
        self.values_of = attrgetter(*self.names)
        self.body = struct.Struct(f"<{len(self.names)}q")
        self.numbered = struct.Struct(f"<I{len(self.names)}q")
        self.slot_size = CRC_BYTES + self.numbered.size
        self.slot_bytes = (self.slot_size + 63) & ~63
        self.slots_at = WORD_AT - 2 * self.slot_bytes
        if self.slots_at < HEADER_BYTES:
            raise LedgerError(
                f"a record of {len(self.names)} fields is too large", field=record_type.__name__
            )
        self.schema = zlib.crc32(_described(record_type), _PROTOCOL)

    def header(self, extra_bytes: int, incarnation: int) -> bytes:
        head = HEADER.pack(MAGIC, VERSION, self.schema, self.body.size, extra_bytes, incarnation)
        return (head + U32.pack(zlib.crc32(head))).ljust(HEADER_BYTES, b"\0")

    def check_header(self, data: bytes, size: int, path: Path, extra_bytes: int | None) -> tuple[int, int]:
        """``(extra_bytes, incarnation)`` of a file of ``size`` bytes that starts with ``data``.

        Raises:
            LedgerError: Not a ledger file, damaged, truncated, or of another version, record or size.
        """
        if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
            raise LedgerError("not a ledger file, or truncated", field=str(path), fix="remove it")
        head = data[: HEADER.size]
        if U32.unpack_from(data, HEADER.size)[0] != zlib.crc32(head):
            raise LedgerError("header checksum is wrong", field=str(path), fix="remove it")
        _, version, schema, record_bytes, extra, incarnation = HEADER.unpack(head)
        if version != VERSION:
            raise LedgerError(
                f"ledger version {version}, this program speaks {VERSION}",
                field=str(path),
                fix="run the same ROSE version in every process of the device",
            )
        if schema != self.schema or record_bytes != self.body.size:
            raise LedgerError(
                "was written by another ROSE version, or holds another kind of record",
                field=str(path),
                fix="run the same ROSE version in every process of the device",
            )
        if extra > MAX_EXTRA_BYTES or (extra_bytes is not None and extra != extra_bytes):
            raise LedgerError(f"has {extra} extra bytes, expected {extra_bytes}", field=str(path))
        if size != EXTRA_AT + extra:
            raise LedgerError(f"is {size} bytes, its header says {EXTRA_AT + extra}", field=str(path))
        return extra, incarnation


_layouts: dict[type[Any], RecordLayout[Any]] = {}


def layout_of(record_type: type[R]) -> RecordLayout[R]:
    layout = _layouts.get(record_type)
    if layout is None:
        layout = _layouts[record_type] = RecordLayout(record_type)
    return cast(RecordLayout[R], layout)
