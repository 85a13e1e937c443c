"""Open a store by its URL: one spelling for publishers, node agents and the command line.

======================  ===========================================================================================
``http(s)://HOST:PORT``  an embedded relay (``rose relay``), the default; several with commas between them: the nearest first, then
                         its parent, for when it does not answer
``/path``, ``file://``   a folder on this machine or a shared file system; a bare word only where it is one already
``mooncake://HOST:PORT`` Mooncake Store (optional extra ``relay-mooncake``); the master's address
anything else            fsspec: ``s3://``, ``gs://``, ``abfs://``, ``memory://``, ...
======================  ===========================================================================================
"""

from __future__ import annotations

import re
from pathlib import Path

from rose.auth import Tokens
from rose.errors import ConfigError
from rose.signatures import PublicKeys, SigningKey
from rose.weights.file_store import FileStore
from rose.weights.sealed import SealedStore
from rose.weights.store import ObjectStore

PATIENCE_S = 20.0
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+-]*:")
_WORD = re.compile(r"[A-Za-z0-9._-]*[A-Za-z0-9][A-Za-z0-9._-]*")
_HOST_AND_PORT = re.compile(r"[A-Za-z0-9._-]+:[0-9]+(/|$)")


def open_store(
    url: str,
    token: str = "",
    *,
    trusted: PublicKeys | None = None,
    key: SigningKey | None = None,
    timeout_s: float = 30.0,
    patience_s: float = PATIENCE_S,
) -> ObjectStore:
    """The store at ``url``.

    Args:
        token: For a relay: bearer token of role relay to read, of role publish to publish.
        trusted: Believe only what one of these keys signed.
        key: Sign what is published; believe only what this key signed, where ``trusted`` names no others.  With neither nothing
            is signed and nothing checked: for a store that nobody else can write to.
        timeout_s, patience_s: For a relay: see :class:`rose.weights.http_store.HttpStore`.

    Raises:
        ConfigError: No such kind of store, or it cannot be opened, or ``key`` is not among ``trusted``.
    """
    store = _open(url, token, timeout_s, patience_s)
    return store if trusted is None and key is None else SealedStore(store, trusted=trusted, key=key)


def trainer_store(url: str, tokens: Tokens | None, *, signs: bool = True) -> ObjectStore:
    """The store at ``url`` as a trainer opens it.

    Args:
        tokens: ``publish`` for a relay.  With ``publish_key`` versions are signed, and what a key of ``public_key`` signed is believed:
            several while a new key takes over, so that the trainer finds the head that the old one signed.  None: neither.
        signs: False: of a rank that signs nothing, or where nobody else can write to the store.

    Raises:
        ConfigError: As of :func:`open_store`.
    """
    if tokens is None:
        return open_store(url)
    key = SigningKey.parse(tokens.publish_key) if signs and tokens.publish_key else None
    trusted = PublicKeys.parse(tokens.public_key) if key is not None and tokens.public_key else None
    return open_store(url, tokens.publish, trusted=trusted, key=key)


def _open(url: str, token: str, timeout_s: float, patience_s: float) -> ObjectStore:
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator:
        if _HOST_AND_PORT.match(url):
            raise ConfigError(
                f"{url!r} is a host and a port",
                field="store",
                fix=f"write http://{url}, or ./{url} for a folder",
            )
        if _SCHEME.match(url):
            raise ConfigError(
                f"{url!r} lacks the // behind its scheme", field="store", fix=f"or write ./{url} for a folder"
            )
        if _WORD.fullmatch(url) and not Path(url).is_dir():
            raise ConfigError(
                f"{url!r} is no folder here",
                field="store",
                fix=f"write ./{url} for a new folder, or http://{url}:8470 for a relay there",
            )
        try:
            scheme, rest = "file", str(Path(url).expanduser()) if url else ""
        except RuntimeError as error:
            raise ConfigError(f"{url!r} is in nobody's home: {error}", field="store") from error
    if not rest:
        raise ConfigError(f"{url!r} names no place", field="store")
    match scheme:
        case "http" | "https":
            from rose.weights.http_store import HttpStore

            return HttpStore(f"{scheme}://{rest}", token, timeout_s=timeout_s, patience_s=patience_s)
        case "file":
            return FileStore(Path(rest))
        case "mooncake":
            from rose.weights.mooncake_store import MooncakeStore

            return MooncakeStore(rest)
        case _:
            from rose.weights.fsspec_store import FsspecStore

            return FsspecStore(f"{scheme}://{rest}")
