"""Objects that a trainer has begun to send and that no head names yet: a relay tells them, so that readers pull meanwhile.

It is a hint and no more.  Who pulls early has bytes of a name; what counts is said by the manifest, signed, when the head
moves, and compared then as if the bytes had just been pulled.
"""

from __future__ import annotations

import secrets

import msgspec

from rose.errors import RequestError, SectionCorrupt
from rose.lineage import WeightVersion
from rose.weights import manifest

LEAST_BYTES = 1 << 20
"""Of an object that is told: a smaller one is pulled in the time that it takes to hear of it."""
MOST_OBJECTS = 4096
"""Of one run; those beyond are pulled when the head names them."""
MOST_RUNS = 1024
MAX_BYTES = 1 << 20
"""Of an answer."""


class Upcoming(msgspec.Struct, frozen=True):
    """What is told of a run at one moment.

    Args:
        mark: Of this moment, for who asks what came since; never empty.
        objects: Key and bytes of each, in the order in which they were begun.
    """

    mark: str
    objects: tuple[tuple[str, int], ...]


def decode(data: bytes, run_id: str) -> Upcoming:
    """Read and check an answer about ``run_id``.

    Raises:
        SectionCorrupt: It is malformed, or tells of what is none of this run's objects.
    """
    try:
        found = msgspec.json.decode(data, type=Upcoming)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SectionCorrupt(f"is malformed: {error}", field="upcoming") from None
    for key, nbytes in found.objects:
        owner = version_of(key)
        if owner is None or owner[0] != run_id or not 0 < nbytes <= manifest.MAX_OBJECT_BYTES:
            raise SectionCorrupt(f"{key[:80]!r} is no object of {run_id}", field="upcoming")
    if not found.mark:
        raise SectionCorrupt("has no mark", field="upcoming")
    return found


def version_of(key: str) -> tuple[str, WeightVersion] | None:
    """Run and version that an object belongs to; None for manifests, and for keys of another form."""
    parts = key.split("/")
    if len(parts) != 3 or manifest.is_manifest(key):
        return None
    try:
        manifest.check_key(key)
        return manifest.check_run_id(parts[0]), WeightVersion.parse(parts[1])
    except RequestError:
        return None


class UpcomingBook:
    """What one relay has to tell.  In its event loop only."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[str, tuple[WeightVersion, int]]] = {}
        self._life = secrets.token_hex(4)  # marks of a relay that was restarted mean nothing
        self._count = 0
        self._counts: dict[str, int] = {}

    def begun(self, key: str, nbytes: int, head: WeightVersion | None) -> bool:
        """An upload has begun; True where this is news.

        Args:
            head: Where its run is: what is not beyond it is no news to anybody.
        """
        owner = version_of(key)
        if owner is None or nbytes < LEAST_BYTES or (head is not None and owner[1] <= head):
            return False
        run_id, version = owner
        objects = self._runs.setdefault(run_id, {})
        if len(objects) >= MOST_OBJECTS:
            return False
        objects[key] = version, nbytes
        while len(self._runs) > MOST_RUNS:
            oldest = next(iter(self._runs))
            del self._runs[oldest]
            self._counts.pop(oldest, None)
        self._stir(run_id)
        return True

    def gone(self, key: str) -> bool:
        """It was not sent to its end, or is deleted; True where it had been told."""
        owner = version_of(key)
        if owner is None or self._runs.get(owner[0], {}).pop(key, None) is None:
            return False
        self._stir(owner[0])
        return True

    def moved(self, run_id: str, head: WeightVersion) -> bool:
        """The head names what it names, and an older version can no longer become one; True where something had been told of them."""
        objects = self._runs.pop(run_id, {})
        left = {key: each for key, each in objects.items() if each[0] > head}
        if left:
            self._runs[run_id] = left
        if len(left) == len(objects):
            return False
        self._stir(run_id)
        return True

    def of(self, run_id: str) -> Upcoming:
        """What is told now."""
        objects = tuple((key, nbytes) for key, (_, nbytes) in self._runs.get(run_id, {}).items())
        return Upcoming(mark=f"{self._life}.{self._counts.get(run_id, 0)}", objects=objects)

    def _stir(self, run_id: str) -> None:
        self._count += 1
        self._counts[run_id] = self._count
        while len(self._counts) > 2 * MOST_RUNS:
            del self._counts[next(iter(self._counts))]
