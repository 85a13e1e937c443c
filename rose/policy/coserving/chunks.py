"""The chunks of one engine: where each is, what the pagers are told, and what they have acknowledged.

States and transitions: table in :mod:`rose.policy.coserving`.  One owner, one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rose.errors import PolicyError
from rose.policy.coserving.events import Mark, Report

UNMAPPED, MAPPED, MOVING = 0, 1, 2
"""What a report says of a chunk.  ``MOVING``: memory is, or may be, still there, and it is nobody's to use."""

_USED, _LEAVING, _GONE, _COMING = range(4)
_NAMES = ("used", "leaving", "gone", "coming")


class ChunkBook:
    """See the module.

    Args:
        num_chunks: Chunks 0 .. num_chunks - 1.
        used: All are in use at first (production), or all are gone (rollouts).
        away: Of those in use, the ones that are gone all the same.

    Attributes:
        marks: One byte per chunk, 1 = wanted: what the pagers are to be told.
        generation: Of the marks that were published last; 0 = none yet.
        after_step: No step above it may touch a chunk that is LEAVING.
        changed: The marks differ from what was published.
    """

    def __init__(self, num_chunks: int, *, used: bool, away: Iterable[int] = ()) -> None:
        self._state = bytearray([_USED if used else _GONE]) * num_chunks
        for chunk in away:
            self._state[chunk] = _GONE
        self._num = [self._state.count(state) for state in range(len(_NAMES))]
        self._by: dict[int, int] = {}
        """Of each chunk that is LEAVING or COMING the generation that says so; empty most of the time."""
        self.marks = bytearray(state == _USED for state in self._state)
        self.generation = 0
        self.after_step = 0
        self.changed = False

    @property
    def num_chunks(self) -> int:
        return len(self._state)

    @property
    def num_used(self) -> int:
        return self._num[_USED]

    @property
    def num_leaving(self) -> int:
        return self._num[_LEAVING]

    @property
    def num_gone(self) -> int:
        return self._num[_GONE]

    @property
    def num_coming(self) -> int:
        return self._num[_COMING]

    @property
    def num_held(self) -> int:
        """All whose memory may be there: what the lease has to say at least."""
        return len(self._state) - self._num[_GONE]

    def leaving(self) -> list[int]:
        return self._all(_LEAVING)

    def coming(self) -> list[int]:
        return self._all(_COMING)

    def gone(self) -> list[int]:
        return self._all(_GONE)

    def release(self, chunk: int, step: int) -> None:
        """The engine thread took a USED chunk out of the pool; steps up to ``step`` may still touch it.

        Raises:
            PolicyError: It was not in use.  Nothing is changed.
        """
        self._move(chunk, _USED, _LEAVING)
        self.after_step = max(self.after_step, step)

    def take(self, chunks: Iterable[int]) -> None:
        """Want chunks that are LEAVING (still held) or GONE (the caller has asked the peer's number)."""
        for chunk in chunks:
            self._move(chunk, self._state[chunk] if self._state[chunk] != _USED else _GONE, _COMING)

    def give_up(self, chunks: Iterable[int]) -> None:
        """Want chunks no longer that are COMING."""
        for chunk in chunks:
            self._move(chunk, _COMING, _LEAVING)

    def settle(self, reports: Sequence[Report]) -> list[int]:
        """Believe what every rank has acknowledged; the chunks that may be used from now on.

        Raises:
            PolicyError: A report is of another number of chunks.  Nothing is changed.
        """
        if any(len(report.states) != len(self._state) for report in reports):
            raise PolicyError(f"a report is not of {len(self._state)} chunks")
        usable: list[int] = []
        if not self._by or not reports:
            return usable
        oldest = min(report.generation for report in reports)
        for chunk, by in list(self._by.items()):
            if by > self.generation or by > oldest:
                continue
            state = self._state[chunk]
            if state == _LEAVING and not any(report.states[chunk] for report in reports):
                self._set(chunk, _GONE)
            elif state == _COMING and all(report.states[chunk] == MAPPED for report in reports):
                self._set(chunk, _USED)
                usable.append(chunk)
        return usable

    def mark(self) -> list[Mark]:
        """What the pagers have to be told, if anything."""
        if not self.changed:
            return []
        return [Mark(generation=self.generation + 1, after_step=self.after_step, marks=bytes(self.marks))]

    def published(self) -> None:
        """The marks have been written under ``generation + 1``."""
        self.generation += 1
        self.changed = False

    def check(self) -> None:
        """Assert what always holds; for tests and the explorer."""
        for state, name in enumerate(_NAMES):
            assert self._num[state] == self._state.count(state), f"number of chunks that are {name}"
        for chunk, state in enumerate(self._state):
            assert self.marks[chunk] == (state in (_USED, _COMING)), f"chunk {chunk} is {_NAMES[state]}"
            assert (chunk in self._by) == (state in (_LEAVING, _COMING)), f"chunk {chunk} is {_NAMES[state]}"
        assert self.changed or all(by <= self.generation for by in self._by.values())

    def snapshot(self) -> tuple[object, ...]:
        """All of the book as a value; equal books have equal ones."""
        return (bytes(self._state), self.generation, self.after_step, self.changed, tuple(self._by.items()))

    def _all(self, state: int) -> list[int]:
        return (
            [chunk for chunk, there in enumerate(self._state) if there == state] if self._num[state] else []
        )

    def _move(self, chunk: int, from_: int, to: int) -> None:
        if self._state[chunk] != from_:
            raise PolicyError(f"chunk {chunk} is {_NAMES[self._state[chunk]]}, not {_NAMES[from_]}")
        self._set(chunk, to)

    def _set(self, chunk: int, to: int) -> None:
        self._num[self._state[chunk]] -= 1
        self._num[to] += 1
        self._state[chunk] = to
        if to in (_LEAVING, _COMING):
            self._by[chunk] = self.generation + 1
            self.marks[chunk] = to == _COMING
            self.changed = True
        else:
            self._by.pop(chunk, None)
