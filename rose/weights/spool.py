"""Objects of versions on their way to a reader's host copy, and those of its last few deltas, as files.

What was pulled of an object stays when the transfer breaks, or the process dies: the next try appends.  A file has its object's name only when
it is complete, and is checked each time that it is pulled.  Different objects may be pulled at once, by several threads.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rose.errors import CapacityError, NotAuthentic, RequestError, SectionCorrupt
from rose.weights import sealed
from rose.weights.manifest import Manifest, ObjectRef
from rose.weights.store import Store

_log = logging.getLogger(__name__)

PULL_BYTES = 32 << 20
"""Per request: small ranges halve a relay's throughput (4 MB: .6 of 1.2 GB/s), large ones lose more when broken."""

_TRIES = 3  # fetches of an object whose checksum is wrong, before it is called corrupt at rest


class Spool:
    """See the module's docstring.

    Args:
        folder: Made if it is not there.
        keep_leased: Called before each request; a transfer may take longer than a lease.
    """

    def __init__(self, folder: Path, store: Store, keep_leased: Callable[[], None]) -> None:
        self.folder, self._store, self._keep_leased = folder, store, keep_leased
        folder.mkdir(exist_ok=True)

    def pull(self, step: Manifest, reference: ObjectRef) -> mmap.mmap | bytes:
        """An object, whole and checked.

        Raises:
            SectionCorrupt: It is damaged at the store.  NotAuthentic: or somebody replaced it.
            NotFound: It is not there.
            CapacityError: The store cannot be reached, or the disk is full.
        """
        path = self._path(step, reference)
        path.parent.mkdir(exist_ok=True)
        sealed.require_bound(self._store, reference)
        for attempt in range(_TRIES):
            if not path.exists():
                self._download(reference, path)
            content = _mapped(path)
            if sealed.check_content(reference, memoryview(content)):
                return content
            _log.warning("object %s arrived damaged (try %d)", reference.key, attempt + 1)
            self._store.distrust(reference.key)
            path.unlink()
        if reference.blake3:
            raise NotAuthentic("is not what was signed: damaged at rest, or replaced", field=reference.key)
        raise SectionCorrupt("checksum is wrong", field=reference.key)

    def read(self, step: Manifest, reference: ObjectRef) -> mmap.mmap | bytes:
        """One that was pulled before."""
        return _mapped(self._path(step, reference))

    def missing_bytes(self, steps: Sequence[Manifest]) -> int:
        """What is yet to be pulled of ``steps``."""
        held = {path.name: path.stat().st_size for path in self.folder.glob("*/*")}
        names = [(Path(reference.key).name, reference.nbytes) for step in steps for reference in step.objects]
        return sum(max(0, nbytes - held.get(name, held.get(f"{name}.part", 0))) for name, nbytes in names)

    def clear(self, steps: Sequence[Manifest]) -> None:
        """Drop all but the objects of ``steps``."""
        kept = {str(step.identity) for step in steps}
        for folder in self.folder.iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _path(self, step: Manifest, reference: ObjectRef) -> Path:
        return self.folder / str(step.identity) / Path(reference.key).name

    def _download(self, reference: ObjectRef, path: Path) -> None:
        part = path.with_name(f"{path.name}.part")
        try:
            with part.open("ab") as file:
                done = file.tell()
                while done < reference.nbytes:
                    count = min(PULL_BYTES, reference.nbytes - done)
                    self._keep_leased()
                    try:
                        file.write(self._store.get_range(reference.key, done, count))
                    except RequestError as error:
                        if error.status == 416:
                            raise SectionCorrupt(
                                "is shorter than its manifest says", field=reference.key
                            ) from error
                        raise
                    done += count
            os.replace(part, path)
        except OSError as error:
            raise CapacityError(
                f"cannot be written: {error.strerror}", status=507, field=path.name
            ) from error


def _mapped(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:  # mmap refuses an empty file
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
