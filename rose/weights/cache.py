"""What a relay keeps of another's objects: the most recently used, as many bytes as it may.

Decides only; :mod:`rose.weights.pull_through` moves the bytes.  Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict

from rose.errors import CapacityError

_RETRY_S = 1.0


class CacheBook:
    """Args:
    limit_bytes: Of all objects together, those on their way included.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._whole: OrderedDict[str, int] = OrderedDict()
        """Bytes by key, least recently used first."""
        self._arriving: dict[str, int] = {}
        self.num_bytes = 0

    def admit(self, key: str, nbytes: int) -> list[str]:
        """Room for an object that begins to arrive; returns the keys to delete for it, oldest first.

        Raises:
            CapacityError: 507, it is larger than all there may be; 503, others on their way leave no room.
        """
        if nbytes > self.limit_bytes:
            raise CapacityError(
                f"{nbytes} bytes, and the cache holds {self.limit_bytes}", status=507, field=key
            )
        if nbytes + sum(self._arriving.values()) > self.limit_bytes:
            raise CapacityError("the cache is full of what is arriving", retry_after_s=_RETRY_S, field=key)
        gone = self.shrink(self.limit_bytes - nbytes)
        self._arriving[key] = nbytes
        self.num_bytes += nbytes
        return gone

    def landed(self, key: str) -> None:
        """It is whole."""
        self._whole[key] = self._arriving.pop(key)

    def used(self, key: str) -> None:
        if key in self._whole:
            self._whole.move_to_end(key)

    def drop(self, key: str) -> None:
        """It is gone, or will not arrive."""
        self.num_bytes -= self._whole.pop(key, 0) + self._arriving.pop(key, 0)

    def shrink(self, limit_bytes: int) -> list[str]:
        """Keys to delete, oldest first, until no more than ``limit_bytes`` are held; what is arriving stays."""
        gone: list[str] = []
        while self._whole and self.num_bytes > limit_bytes:
            key, nbytes = self._whole.popitem(last=False)
            self.num_bytes -= nbytes
            gone.append(key)
        return gone

    def found(self, key: str, nbytes: int) -> None:
        """It lies there from an earlier process; to be told in the order of use."""
        self._whole[key] = nbytes
        self.num_bytes += nbytes
