"""The frame of our append-only files: ``length (u32) | crc32 (u32) | payload``, little-endian."""

from __future__ import annotations

import struct
import zlib

FRAME = struct.Struct("<II")
MAX_RECORD_BYTES = 256 * 2**20


def frame(payload: bytes) -> bytes:
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload
