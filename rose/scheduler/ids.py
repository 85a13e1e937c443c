"""Token ids and log-probs as packed bytes: 4 and 8 bytes each, where Python lists take 30 to 60."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

if array("I").itemsize != 4:  # pragma: no cover
    raise ImportError("this platform's unsigned int is not 4 bytes")

MAX_TOKEN_ID = 2**32 - 1


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Little-endian u32."""
    return _bytes(array("I", token_ids))


def unpack_ids(data: bytes) -> list[int]:
    return _array("I", data).tolist()


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Little-endian f64: what the engine sent, bit for bit."""
    return _bytes(array("d", logprobs))


def unpack_logprobs(data: bytes) -> list[float]:
    return _array("d", data).tolist()


def split(data: bytes, size: int) -> list[bytes]:
    """Packed values of ``size`` bytes each."""
    return [data[at : at + size] for at in range(0, len(data), size)]


def _bytes(values: array) -> bytes:
    if sys.byteorder == "big":  # pragma: no cover
        values.byteswap()
    return values.tobytes()


def _array(code: str, data: bytes) -> array:
    values = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":  # pragma: no cover
        values.byteswap()
    return values
