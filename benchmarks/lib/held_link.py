"""A link of a given rate, as a TCP proxy in a process of its own: what comes from the far end is held to so many bits a second, all connections together.

A token bucket of 5 ms.  What this machine's loopback and cores do not carry it cannot either: measure the link alone first.
"""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_PIECE_BYTES = 256 << 10
_BURST_S = 0.005


class HeldLink:
    """A context manager; ``url`` is the near end.

    Args:
        far: ``http://host:port`` of what lies behind the link.
        gbps: Of answers; requests pass as they are.
    """

    def __init__(self, far: str, gbps: float) -> None:
        near, theirs = multiprocessing.Pipe()
        parts = urlsplit(far)
        assert parts.hostname
        self._process = multiprocessing.get_context("spawn").Process(
            target=_carry, args=(theirs, parts.hostname, parts.port, gbps), daemon=True
        )
        self._near = near

    def __enter__(self) -> Self:
        self._process.start()
        self.url = f"http://127.0.0.1:{self._near.recv()}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()


class _Bucket:
    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def take(self, num_bytes: int) -> None:
        """Returns when they may pass."""
        with self._lock:
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s - _BURST_S) + num_bytes / self._rate
            wait_s = self._free_at_s - now_s
        if wait_s > 0:
            time.sleep(wait_s)


def _carry(parent: Connection, host: str, port: int, gbps: float) -> None:
    bucket = _Bucket(gbps * 1e9 / 8)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    parent.send(listener.getsockname()[1])
    while True:
        client, _ = listener.accept()
        try:
            server = socket.create_connection((host, port), timeout=5.0)
        except OSError:
            client.close()
            continue
        server.settimeout(None)
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_pass, args=(client, server, None), daemon=True).start()
        threading.Thread(target=_pass, args=(server, client, bucket), daemon=True).start()


def _pass(source: socket.socket, sink: socket.socket, bucket: _Bucket | None) -> None:
    piece = memoryview(bytearray(_PIECE_BYTES))
    try:
        while count := source.recv_into(piece):
            if bucket is not None:
                bucket.take(count)
            sink.sendall(piece[:count])
    except OSError:
        pass
    for each in (source, sink):
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
