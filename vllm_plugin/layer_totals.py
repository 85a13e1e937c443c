"""What a rollout engine's steps that may stop between two layers have come to, by the word of its first worker."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rose.coserve.ledger import RecordReader
from rose.coserve.records import LayerState
from rose.errors import LedgerError


class LayerTotals:
    """See the module.  Engine thread."""

    def __init__(self, reader: RecordReader[LayerState]) -> None:
        self._reader = reader
        self._stopped_ns: int | None = 0
        """Of all steps so far, between two layers; None: could not be read."""

    def stood_ns(self) -> int | None:
        """How long the step that ends stood between two layers: time in which it did nothing, and a cut ends it at once.

        None: not known.  Asked at every step, whether steps may stop now or not: what was not taken off the step that stood would be
        taken off a later one.
        """
        try:
            said = self._reader.read()
        except LedgerError:
            self._stopped_ns = None
            return None
        before, self._stopped_ns = self._stopped_ns, said.waited_ns if said is not None else 0
        return None if before is None else max(0, self._stopped_ns - before)

    def status(self, may_stop: bool) -> dict[str, Any] | None:
        """None where steps cannot stop: not eager, or of several pipeline stages."""
        try:
            said = self._reader.read() if self._reader.alive() else None
        except LedgerError as error:  # mended by its writer at the next step; all else is as true as it was
            return {"error": str(error)}
        return None if said is None else {"on": may_stop, **asdict(said)}
