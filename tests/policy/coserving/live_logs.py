"""Checks the protocol logs of a real device against the model that the explorer explores.

Each log replays through the product's book, event for event.  What the books cannot know is how the files between them behave; the
explorer takes them for atomic registers, and its pagers for ones that map only what marks want.  Here both are looked for in what really
was read:

- what production counted of its peer is a number that the peer's lease said at some moment of that read; what the rollout engine held itself
  to left production what its lease said at some moment of that read;
- generations of reports never fall, never exceed what was marked, and no chunk is reported as mapped that no marks since have wanted.

A killed engine loses the last second of its log, so between its last event and the first of the next its number is not known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rose.decisions.log import logs, replay
from rose.policy.coserving.chunks import MAPPED
from rose.policy.coserving.events import (
    AllowedAgain,
    Mark,
    PeerCounted,
    Reserve,
    RolloutLooked,
    ServingLooked,
)


class Wrong(AssertionError):
    """The log of a real device says what the model excludes."""


@dataclass
class Life:
    """One engine from its start to its end."""

    path: Path
    events: list[tuple[Any, list[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        found = replay(self.path, watch=lambda event, actions: self.events.append((event, list(actions))))
        if found.difference is not None:
            raise Wrong(f"{self.path.name}: {found.difference}")
        self.times = [event.at_s for event, _ in self.events if hasattr(event, "at_s")]
        self.said: list[tuple[float, int]] = []
        """When it began a look, and the number that its lease had behind it."""
        at_s = 0.0
        for event, actions in self.events:
            at_s = getattr(event, "at_s", at_s)
            self.said += [(at_s, action.pages) for action in actions if isinstance(action, Reserve)]

    def may_have_said(self, from_s: float, to_s: float) -> set[int] | None:
        """Numbers that its lease may have had between two moments; None: it was not there, or its log does not reach so far."""
        if not self.said or from_s < self.said[0][0] or to_s > self.times[-1]:
            return None
        found: set[int] = set()
        for number, (at_s, pages) in enumerate(self.said):
            # It is written after `at_s`, and written over before the look after the next.
            gone_s = self.said[number + 2][0] if number + 2 < len(self.said) else float("inf")
            if at_s <= to_s and from_s <= gone_s:
                found.add(pages)
        return found


def lives(folder: Path, role: str) -> list[Life]:
    return [Life(path) for path in logs(folder) if path.stem.startswith(f"{role}-")]


def check(folder: Path, *, total_pages: int, chunk_pages: int) -> dict[str, int]:
    """What was looked at, by kind.

    Raises:
        Wrong: It names the event.
    """
    looked = {"events": 0, "peers": 0, "allowed": 0, "reports": 0}
    serving, rollout = lives(folder, "serving"), lives(folder, "rollout")
    for life in (*serving, *rollout):
        looked["events"] += len(life.events)
        looked["reports"] += _check_reports(life)
    for life in serving:
        for began_s, event in _reads(life, PeerCounted):
            known = [found for peer in rollout if (found := peer.may_have_said(began_s, event.at_s))]
            if len(known) == 1 and event.pages:
                looked["peers"] += 1
                if event.pages not in known[0]:
                    raise Wrong(f"{life.path.name}: {event}: the peer said one of {sorted(known[0])}")
    for life in rollout:
        for began_s, event in _reads(life, AllowedAgain):
            known = [found for peer in serving if (found := peer.may_have_said(began_s, event.at_s))]
            if len(known) == 1 and event.allowed_chunks:
                looked["allowed"] += 1
                if event.allowed_chunks * chunk_pages > total_pages - min(known[0]):
                    raise Wrong(f"{life.path.name}: {event}: production said one of {sorted(known[0])}")
    return looked


def _reads(life: Life, cls: type) -> list[tuple[float, Any]]:
    """Each event of a kind, and when the look that it ends began."""
    found, began_s = [], 0.0
    for event, _ in life.events:
        if isinstance(event, ServingLooked | RolloutLooked):
            began_s = event.at_s
        elif isinstance(event, cls):
            found.append((began_s, event))
    return found


def _check_reports(life: Life) -> int:
    """The pagers of one engine: what they may have mapped by the marks that they had."""
    marks: list[bytes] = []
    """Of each generation, the first behind the state that the log begins with."""
    first = 0
    generations: dict[int, int] = {}
    looked = 0
    for event, actions in life.events:
        if isinstance(event, ServingLooked | RolloutLooked):
            for rank, report in enumerate(event.reports):
                if report.generation < generations.get(rank, 0):
                    raise Wrong(f"{life.path.name}: a report of rank {rank} fell to {report.generation}")
                generations[rank] = report.generation
                if not marks or report.generation < first:
                    continue
                if report.generation >= first + len(marks):
                    raise Wrong(f"{life.path.name}: generation {report.generation} was never marked")
                since = marks[report.generation - first :]
                for chunk, state in enumerate(report.states):
                    if state == MAPPED and not any(mark[chunk] for mark in since):
                        raise Wrong(f"{life.path.name}: chunk {chunk} is mapped, and nobody wants it")
                looked += 1
        for action in actions:
            if isinstance(action, Mark):
                first = first or action.generation
                marks.append(action.marks)
    return looked
