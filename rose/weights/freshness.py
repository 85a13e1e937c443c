"""How new a run's head has to be: the highest version that was seen here, kept over restarts, and what the trainer says.

A signature says who made a version, not that it is the newest: a store that goes back to an older head shows only to who
remembers.  What is seen is written down before it is acted on; what the scheduler passes on from the trainer is not, for it is
said again.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from rose.errors import CapacityError, RequestError, RolledBack
from rose.lineage import WeightVersion

_log = logging.getLogger(__name__)
_MAX_CHARS = 512


class Freshness:
    """Of one run in one directory.  One thread uses it, beside any that call :meth:`require`.

    Args:
        path: A file, made when the first version is seen.
        counts: False: nothing is kept or refused, for who cannot tell a lie from a head would keep the lie.
    """

    def __init__(self, path: Path, run_id: str, *, counts: bool) -> None:
        self._path, self._run_id, self._counts = path, run_id, counts
        self.seen = self._load() if counts else None
        self._stated: WeightVersion | None = None

    def require(self, version: WeightVersion) -> None:
        """The trainer has published this."""
        if self._counts:
            self._stated = version if self._stated is None else max(version, self._stated)

    def check(self, version: WeightVersion | None) -> None:
        """Raises RolledBack where a head (None: none) is older than what is known to be published."""
        at = "names no head" if version is None else f"is at {version}"
        if self._stated is not None and (version is None or version < self._stated):
            raise RolledBack(
                f"store {at}, and the trainer has published {self._stated}", field=f"head of {self._run_id}"
            )
        if self.seen is not None and (version is None or version < self.seen):
            raise RolledBack(
                f"store {at}, and {self.seen} was there before",
                field=f"head of {self._run_id}",
                fix=f"take a new name for a run that begins anew, or remove {self._path}",
            )

    def see(self, version: WeightVersion) -> None:
        """A head that is authentic.

        Raises:
            RolledBack: As :meth:`check`.
            CapacityError: It cannot be written down.
        """
        self.check(version)
        if not self._counts or (self.seen is not None and version <= self.seen):
            return
        temporary = self._path.with_name(f"{self._path.name}.new")
        try:
            with temporary.open("w") as file:
                file.write(f"{self._run_id} {version}\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError as error:
            raise CapacityError(
                f"cannot be written: {error.strerror}", status=507, field=self._path.name
            ) from error
        self.seen = version

    def _load(self) -> WeightVersion | None:
        try:
            with self._path.open() as file:
                run_id, _, version = file.read(_MAX_CHARS).strip().partition(" ")
            return WeightVersion.parse(version) if run_id == self._run_id else None
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, RequestError) as error:
            _log.warning("%s says nothing: %s", self._path, error)
            return None
