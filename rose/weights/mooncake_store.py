"""A store in Mooncake's distributed memory (optional extra ``relay-mooncake``): RDMA inside one data centre.

What Mooncake does not promise, and what is done about it:

* ``put`` on an existing key succeeds and keeps the old bytes.  Every value begins with 16 random bytes, and what was
  written is read back: whoever finds its own bytes there has created the key.
* An object may be evicted without a word when memory is short, and reads as empty.  Sizes are compared, and a reader
  proves every byte by the manifest anyway.  Give the cluster more memory than the kept versions need.
* There is no listing in the client; the master's HTTP port (``metrics_port``) has one.  It asks for no token: keep
  master and clients on a network of their own.

A range costs the whole object here: publish with ``bucket_bytes`` of at most 32 MiB.
"""

from __future__ import annotations

import importlib
import secrets
import socket
from typing import Any
from urllib.parse import parse_qs

import httpx

from rose.errors import CapacityError, ConfigError
from rose.weights.flat_store import FlatStore
from rose.weights.manifest import MAX_OBJECT_BYTES
from rose.weights.store import Buffer

_MARK_BYTES = 16
_MAX_LIST_BYTES = 256 << 20
_TRIES = 3


class MooncakeStore(FlatStore):
    """See the module.

    Args:
        address: ``HOST:PORT`` of the master, then optionally ``?metrics_port=9003&protocol=tcp&segment_mib=512``
            ``&host=ADDRESS`` (``host``: where other clients reach this one).
        namespace: Put before every key.

    Raises:
        ConfigError: Mooncake is not installed, or the master cannot be reached.
    """

    def __init__(
        self,
        address: str,
        *,
        namespace: str = "rose",
        max_object_bytes: int = MAX_OBJECT_BYTES,
        poll_s: float = 0.2,
    ) -> None:
        super().__init__(max_object_bytes=max_object_bytes, poll_s=poll_s)
        try:
            mooncake = importlib.import_module("mooncake.store")
        except ImportError as error:  # also: installed, and a library of it missing
            raise ConfigError(
                f"Mooncake cannot be loaded: {error}",
                field="store",
                fix="pip install '.[relay-mooncake]' from a checkout of ROSE, and the system's libibverbs1",
            ) from error
        master, _, query = address.partition("?")
        options = {name: values[-1] for name, values in parse_qs(query).items()}
        unknown = options.keys() - {"metrics_port", "protocol", "segment_mib", "host"}
        host, _, port = master.rpartition(":")
        numbers = (port, options.get("metrics_port", "9003"), options.get("segment_mib", "512"))
        if unknown or not host or not all(number.isdigit() for number in numbers):
            raise ConfigError(f"'{address}' is not HOST:PORT[?metrics_port=..&..]", field="store")
        self._list_url = f"http://{host}:{numbers[1]}/get_all_keys"
        self._namespace = namespace
        self._client: Any = mooncake.MooncakeDistributedStore()
        here = options.get("host", "127.0.0.1")
        code = self._client.setup(
            f"{here}:{_free_port(here)}",
            "P2PHANDSHAKE",
            int(numbers[2]) << 20,
            max(2 * max_object_bytes, 64 << 20) if max_object_bytes < MAX_OBJECT_BYTES else 512 << 20,
            options.get("protocol", "tcp"),
            "",
            master,
        )
        if code != 0:
            raise ConfigError(f"master {master} cannot be reached (code {code})", field="store")
        self.url = f"mooncake://{master}"

    def __repr__(self) -> str:
        return f"MooncakeStore({self.url!r})"

    def _create(self, name: str, data: Buffer) -> bool:
        key = self._key(name)
        if self._client.is_exist(key) == 1:
            return False
        mark = secrets.token_bytes(_MARK_BYTES)
        code = self._client.put(key, mark + bytes(data))
        if code != 0:
            raise CapacityError(f"{self.url}: put failed with {code}", status=507, field=name)
        try:
            found = self._value(name)
        except FileNotFoundError:
            raise CapacityError(f"{self.url}: evicted as soon as written", status=507, field=name) from None
        return len(found) == _MARK_BYTES + len(data) and found[:_MARK_BYTES] == mark

    def _overwrite(self, name: str, data: bytes) -> None:
        code = self._client.upsert(self._key(name), secrets.token_bytes(_MARK_BYTES) + data)
        if code != 0:
            raise CapacityError(f"{self.url}: upsert failed with {code}", status=507, field=name)

    def _read(self, name: str, offset: int, nbytes: int | None) -> bytes:
        begin = _MARK_BYTES + offset
        return self._value(name)[begin : None if nbytes is None else begin + nbytes]

    def _value(self, name: str) -> bytes:
        key = self._key(name)
        for _ in range(_TRIES):
            data = self._client.get(key)
            if data:  # b"" means missing, evicted, or a transfer that failed
                return data
            if self._client.is_exist(key) != 1:
                raise FileNotFoundError(name)
        raise CapacityError(f"{self.url}: exists and cannot be read", field=name)

    def _size(self, name: str) -> int:
        nbytes = self._client.get_size(self._key(name))
        if nbytes < _MARK_BYTES:
            raise FileNotFoundError(name)
        return nbytes - _MARK_BYTES

    def _find(self, prefix: str) -> list[str]:
        try:
            with httpx.stream(
                "GET", self._list_url, headers={"Accept-Encoding": "identity"}, timeout=10, trust_env=False
            ) as answer:
                answer.raise_for_status()
                text = bytearray()
                for piece in answer.iter_raw():
                    text += piece
                    if len(text) > _MAX_LIST_BYTES:
                        break
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise CapacityError(f"{self.url}: keys cannot be listed: {error}", field=prefix) from error
        if len(text) > _MAX_LIST_BYTES:
            raise CapacityError(f"{self.url}: more than {_MAX_LIST_BYTES} bytes of keys", field=prefix)
        start = self._key(prefix)
        keys = text.decode(errors="replace").splitlines()
        return [key.removeprefix(f"{self._namespace}/") for key in keys if key.startswith(start)]

    def _remove(self, name: str) -> bool:
        return self._client.remove(self._key(name), True) == 0

    def _key(self, name: str) -> str:
        return f"{self._namespace}/{name}"

    def close(self) -> None:
        super().close()
        self._client.close()


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
