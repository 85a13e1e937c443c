"""Do the books of the page pools agree with the kernel?  Read from what every rank reports of itself.

Now and then, while it is moving nothing, a rank's pager compares its own book with what the kernel says (``vllm_plugin.memory``).  It
reports three numbers: how much it has booked, how much of that is in memory, and how much of the rest was touched (the canary of
``rose.coserve.pages``).  This module reads the reports of both engines and says what is wrong:

- *Used after release*, any byte: the engine reads or writes memory that it gave back.  What it reads there are zeros.
- *Booked, but not there*, more than :data:`TOLERANCE_BYTES`: the machine swaps, or a book is wrong.

Neither goes away by itself: memory that one engine counts as its own cannot be given to the other.  The page cache plays no part: KV
memory is anonymous, or the driver's.

Decides by :func:`disagreement`, which is pure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rose.coserve.node_dir import ROLES, NodeDir, RankReaders
from rose.units import format_bytes

AUDIT_EVERY_S = 5.0
"""How often a rank looks, and the agent reads."""
TOLERANCE_BYTES = 16 << 20
"""Missing: a few pages that the kernel swapped out of an idle engine are no reason to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One rank's books against the kernel, at one instant."""

    rank: str
    booked_bytes: int
    missing_bytes: int
    touched_bytes: int


def disagreement(found: Finding, tolerance_bytes: int = TOLERANCE_BYTES) -> str | None:
    """What is wrong; None when nothing is."""
    if found.touched_bytes > 0:
        return f"{found.rank}: {format_bytes(found.touched_bytes)} that it gave back were used"
    if found.missing_bytes > tolerance_bytes:
        return (
            f"{found.rank}: {format_bytes(found.missing_bytes)} of the {format_bytes(found.booked_bytes)} that it "
            "booked are not in memory"
        )
    return None


class ResidentAudit:
    """Reads the reports of a device's ranks; each of them counts once.

    Attributes:
        num_looks: Reports compared.
        num_disagreements: Of these, how many disagreed.
    """

    def __init__(self, node_dir: NodeDir) -> None:
        self._ranks = {role: RankReaders(node_dir, role) for role in ROLES}
        self._seen: dict[str, int] = {}
        self._last: dict[str, Finding] = {}
        self.num_looks = 0
        self.num_disagreements = 0
        self.newest_ns = 0

    def look(self) -> list[str]:
        """What the reports that came in since the last call find wrong."""
        wrong: list[str] = []
        before, self._last = self._last, {}
        for role, ranks in self._ranks.items():
            for number, record in ranks.records().items():
                name = f"{role}.rank{number}"
                if not record.audited_ns:
                    continue
                if record.audited_ns == self._seen.get(name) and name in before:
                    self._last[name] = before[name]
                    continue
                self._seen[name] = record.audited_ns
                self.newest_ns = max(self.newest_ns, record.audited_ns)
                found = self._last[name] = Finding(
                    rank=name,
                    booked_bytes=record.booked_bytes,
                    missing_bytes=record.missing_bytes,
                    touched_bytes=record.touched_bytes,
                )
                self.num_looks += 1
                problem = disagreement(found)
                if problem is not None:
                    self.num_disagreements += 1
                    wrong.append(problem)
        return wrong

    def report(self) -> dict[str, Any]:
        """For ``rose node status``."""
        return {
            "looks": self.num_looks,
            "disagreements": self.num_disagreements,
            "newest_ns": self.newest_ns,
            "ranks": [asdict(found) for found in self._last.values()],
        }
