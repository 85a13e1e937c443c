"""Open a store by its URL: one spelling for publishers, node agents and the command line.

======================  ===========================================================================================
``http(s)://HOST:PORT``  an embedded relay (``rose relay``), the default
``/path``, ``file://``   a folder on this machine or a shared file system
``mooncake://HOST:PORT`` Mooncake Store (optional extra ``relay-mooncake``); the master's address
anything else            fsspec: ``s3://``, ``gs://``, ``abfs://``, ``memory://``, ...
======================  ===========================================================================================
"""

from __future__ import annotations

from pathlib import Path

from rose.errors import ConfigError
from rose.weights.store import FileStore, Store


def open_store(url: str, token: str = "") -> Store:
    """The store at ``url``.

    Args:
        token: For a relay: bearer token of role relay.

    Raises:
        ConfigError: No such kind of store, or it cannot be opened.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "file", url
    if not rest:
        raise ConfigError(f"{url!r} names no place", field="store")
    match scheme:
        case "http" | "https":
            from rose.weights.http_store import HttpStore

            return HttpStore(url, token)
        case "file":
            return FileStore(Path(rest))
        case "mooncake":
            from rose.weights.mooncake_store import MooncakeStore

            return MooncakeStore(rest)
        case _:
            from rose.weights.fsspec_store import FsspecStore

            return FsspecStore(url)
