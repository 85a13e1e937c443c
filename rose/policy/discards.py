"""What was thrown away, by cause and by length.

Cancelling stale and redundant work removes the longest trajectories first, and a policy trained on what is left
learns to be short.  So discards are reported against the lengths of *all* trajectories that ended: of a cause
that is blind to length, a quarter falls into each quartile.

Lengths are sampled tokens, in bins a quarter of an octave wide; memory does not grow with the run.

Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

_BINS_PER_OCTAVE = 4
MAX_CAUSES = 64
"""Causes are ours, but for the words that an agent may give; jobs come from clients.  Beyond this, "other"."""
QUANTILES = 4


def _bin(num_tokens: int) -> int:
    return 0 if num_tokens < 1 else 1 + int(_BINS_PER_OCTAVE * math.log2(num_tokens))


@dataclass(kw_only=True, slots=True)
class Discards:
    """Counts of ended and of discarded trajectories, by job and length."""

    _ended: dict[str, Counter[int]] = field(default_factory=lambda: dict[str, Counter[int]]())
    _discarded: dict[tuple[str, str], Counter[int]] = field(
        default_factory=lambda: dict[tuple[str, str], Counter[int]]()
    )

    def ended(self, job: str, num_tokens: int) -> None:
        """A trajectory ended, whatever becomes of it."""
        if job not in self._ended and len(self._ended) >= MAX_CAUSES:
            job = "other"
        self._ended.setdefault(job, Counter())[_bin(num_tokens)] += 1

    def discarded(self, job: str, cause: str, num_tokens: int) -> None:
        key = (job, cause)
        if key not in self._discarded and len(self._discarded) >= MAX_CAUSES:
            key = ("other", "other")
        self._discarded.setdefault(key, Counter())[_bin(num_tokens)] += 1

    def report(self, job: str) -> dict[str, list[int]]:
        """``{cause: [shortest quarter, second, third, longest quarter]}`` of what was discarded.

        A bin that spans two quarters counts where its middle lies.
        """
        ended = self._ended.get(job, Counter())
        total = ended.total()
        quarter: dict[int, int] = {}
        below = 0
        for number in sorted(ended):
            middle = (below + ended[number] / 2) / total
            quarter[number] = min(int(middle * QUANTILES), QUANTILES - 1)
            below += ended[number]
        found: dict[str, list[int]] = {}
        for (name, cause), counts in sorted(self._discarded.items()):
            if name == job:
                row = found[cause] = [0] * QUANTILES
                for number, count in counts.items():
                    row[quarter.get(number, QUANTILES - 1)] += count
        return found

    def jobs(self) -> list[str]:
        return sorted({job for job, _ in self._discarded})
