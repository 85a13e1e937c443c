"""Objects of versions on their way to a reader's host copy, and those of its last few deltas, as files.

What was pulled of an object stays when the transfer breaks, or the process dies: the next try appends.  A file has its object's name only when
it is complete, and is checked each time that it is pulled.  Objects may be pulled at once, by several threads; each by one of them.
Versions that are expected may be pulled before their manifest says what they are.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rose.errors import CapacityError, NotAuthentic, RequestError, SectionCorrupt
from rose.lineage import WeightVersion
from rose.weights import sealed
from rose.weights.manifest import Manifest, ObjectRef
from rose.weights.store import ObjectStore

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

    def __init__(self, folder: Path, store: ObjectStore, keep_leased: Callable[[], None]) -> None:
        self.folder, self._store, self._keep_leased = folder, store, keep_leased
        folder.mkdir(exist_ok=True)
        self._changed = threading.Condition()
        self._busy: set[Path] = set()
        self._expected: list[frozenset[WeightVersion]] = [frozenset(), frozenset()]

    def pull(self, step: Manifest, reference: ObjectRef) -> mmap.mmap | bytes:
        """An object, whole and checked.

        Raises:
            SectionCorrupt: It is damaged at the store.  NotAuthentic: or somebody replaced it.
            NotFound: It is not there.
            CapacityError: The store cannot be reached, or the disk is full.
        """
        path = self._path(step.identity, reference.key)
        sealed.require_bound(self._store, reference)
        for attempt in range(_TRIES):
            with self._alone(path):
                if not path.exists():
                    self._download(reference.key, reference.nbytes, path)
            content = _mapped(path)
            if sealed.check_content(reference, memoryview(content)):
                return content
            _log.warning("object %s arrived damaged (try %d)", reference.key, attempt + 1)
            self._store.distrust(reference.key)
            path.unlink()
        if reference.blake3:
            raise NotAuthentic("is not what was signed: damaged at rest, or replaced", field=reference.key)
        raise SectionCorrupt("checksum is wrong", field=reference.key)

    def expect(self, versions: set[WeightVersion]) -> None:
        """These may be pulled ahead.  Those expected before count once more: a version's head may be on its way."""
        self._expected = [self._expected[1], frozenset(versions)]

    def pull_ahead(
        self, version: WeightVersion, key: str, nbytes: int, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Bring an object that no manifest names yet.

        Raises:
            RoseError: It did not come; what came of it stays.
        """
        path = self._path(version, key)
        with self._alone(path):
            if not path.exists():
                self._download(key, nbytes, path, is_over)

    def read(self, step: Manifest, reference: ObjectRef) -> mmap.mmap | bytes:
        """One that was pulled before."""
        return _mapped(self._path(step.identity, reference.key))

    def missing_bytes(self, steps: Sequence[Manifest]) -> int:
        """What is yet to be pulled of ``steps``."""
        held = {path.name: path.stat().st_size for path in self.folder.glob("*/*")}
        names = [(Path(reference.key).name, reference.nbytes) for step in steps for reference in step.objects]
        return sum(max(0, nbytes - held.get(name, held.get(f"{name}.part", 0))) for name, nbytes in names)

    def clear(self, steps: Sequence[Manifest]) -> None:
        """Drop all but the objects of ``steps``, and what is expected beyond them."""
        kept = {str(step.identity) for step in steps}
        newest = steps[-1].identity if steps else None
        kept |= {str(each) for told in self._expected for each in told if newest is None or each > newest}
        for folder in self.folder.iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _path(self, version: WeightVersion, key: str) -> Path:
        return self.folder / str(version) / Path(key).name

    @contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        """One thread at a time for each object."""
        with self._changed:
            while path in self._busy:
                self._changed.wait()
            self._busy.add(path)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(path)
                self._changed.notify_all()

    def _download(
        self, key: str, nbytes: int, path: Path, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        part = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(exist_ok=True)
            with part.open("ab") as file:
                done = file.tell()
                while done < nbytes:
                    if is_over():
                        return
                    count = min(PULL_BYTES, nbytes - done)
                    self._keep_leased()
                    try:
                        file.write(self._store.get_range(key, done, count))
                    except RequestError as error:
                        if error.status == 416:
                            raise SectionCorrupt("is shorter than its manifest says", field=key) from error
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
