"""A store at any URL that fsspec opens: ``s3://bucket/path``, ``gs://``, ``abfs://``, ``file://``, ``memory://``.

Credentials and endpoints are fsspec's own (environment, configuration files).  What the file system must give is
"create only if absent"; object stores do (S3's If-None-Match, Google's generation match, Azure's overwrite=false),
a local file system does by a link.  On a file system without it two trainers with one run id may both believe that
they moved the head; the store warns once and goes on.

An embedded relay is faster on one network (readers are woken, bytes go by sendfile); this one is for what is already
there, across sites, and as an archive.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from rose.errors import CapacityError, ConfigError
from rose.weights.flat_store import FlatStore
from rose.weights.manifest import MAX_OBJECT_BYTES
from rose.weights.store import Buffer

_log = logging.getLogger(__name__)
T = TypeVar("T")

_CREATES_ONCE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"})
"""Protocols whose ``pipe_file(mode="create")`` is one conditional request."""
_LOCAL = frozenset({"file", "local"})
_in_memory = threading.Lock()  # fsspec's memory file system looks first and writes then


class FsspecStore(FlatStore):
    """See the module.

    Args:
        url: Folder or prefix; made when first written to.
        options: For the file system, as fsspec takes them.

    Raises:
        ConfigError: fsspec cannot open it.
    """

    def __init__(
        self,
        url: str,
        *,
        options: dict[str, Any] | None = None,
        max_object_bytes: int = MAX_OBJECT_BYTES,
        poll_s: float | None = None,
    ) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ConfigError("fsspec is not installed", field="store", fix="pip install fsspec") from error
        try:
            self._fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **(options or {}))
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"cannot be opened: {error}", field=_without_secrets(url)) from error
        protocol = self._fs.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._root = path.rstrip("/")
        near = bool(self._protocols & (_LOCAL | {"memory"}))
        super().__init__(max_object_bytes=max_object_bytes, poll_s=poll_s or (0.05 if near else 0.5))
        self.url = _without_secrets(url)
        if not near and not self._protocols & _CREATES_ONCE:
            _log.warning("%s cannot create a file only if it is absent: use one trainer per run id", self.url)

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    def _create(self, name: str, data: Buffer) -> bool:
        path = self._path(name)
        return self._guard(name, lambda: self._create_at(path, bytes(data)))

    def _create_at(self, path: str, data: bytes) -> bool:
        try:
            if self._protocols & _LOCAL:
                self._link(path, data)
            elif "memory" in self._protocols:
                with _in_memory:
                    self._fs.pipe_file(path, data, mode="create")
            else:
                self._fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        return True

    def _link(self, path: str, data: bytes) -> None:
        """A file that appears whole, and only where there is none."""
        temporary = f"{self._root}/tmp/{secrets.token_hex(12)}"
        for folder in (path, temporary):
            self._fs.makedirs(folder.rpartition("/")[0], exist_ok=True)
        try:
            self._fs.pipe_file(temporary, data)
            self._fs.link(temporary, path)
        finally:
            self._fs.rm_file(temporary)

    def _overwrite(self, name: str, data: bytes) -> None:
        path = self._path(name)

        def write() -> None:
            if self._protocols & _LOCAL:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, data)

        self._guard(name, write)

    def _read(self, name: str, offset: int, nbytes: int | None) -> bytes:
        end = None if nbytes is None else offset + nbytes
        return self._guard(name, lambda: self._fs.cat_file(self._path(name), start=offset, end=end))

    def _size(self, name: str) -> int:
        info = self._guard(name, lambda: self._fs.info(self._path(name)))
        if info["type"] != "file":
            raise FileNotFoundError(name)
        return int(info["size"])

    def _find(self, prefix: str) -> list[str]:
        path = self._path(prefix.rstrip("/"))

        def find() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return list(self._fs.find(path))
            except FileNotFoundError:
                return []

        found = self._guard(prefix, find)
        return [name.removeprefix(f"{self._root}/") for name in found if name.startswith(f"{path}/")]

    def _remove(self, name: str) -> bool:
        def remove() -> bool:
            if not self._fs.isfile(self._path(name)):
                return False
            self._fs.rm_file(self._path(name))
            return True

        try:
            return self._guard(name, remove)
        except FileNotFoundError:  # somebody else was faster
            return False

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _guard(self, name: str, call: Callable[[], T]) -> T:
        """Run ``call``; a fault of the file system becomes ours.  Backends raise what their libraries raise."""
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception as error:
            text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise CapacityError(f"{self.url}: {text}", field=name) from error


def _without_secrets(url: str) -> str:
    """A URL that may be shown: without user, password and query."""
    scheme, separator, rest = url.partition("://")
    place = (rest if separator else scheme).partition("?")[0].rpartition("@")[2]
    return f"{scheme}{separator}{place}" if separator else place
