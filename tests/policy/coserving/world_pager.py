"""A worker's pager as the explorer's world has it: one atomic step after the other (``vllm_plugin/memory.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rose.policy.coserving.chunks import MAPPED, MOVING, UNMAPPED
from rose.policy.coserving.events import Report
from tests.policy.coserving.bounds import Mutant

Wish = tuple[int, bytes] | None
"""The marks and their generation, as a pager reads them; None: there are none, everything stays as it is."""


class Pager:
    """A worker's pager: the generation and marks it acts by, what is really mapped, and what it has said."""

    __slots__ = ("alive", "announced", "generation", "mapped", "report", "wanted")

    def __init__(self, num_chunks: int, mapped: bool, first: int | None = None) -> None:
        """``first``: of those that are mapped only so many, from the lowest; None: all."""
        self.alive = True
        self.generation = 0
        num_mapped = (num_chunks if first is None else first) if mapped else 0
        self.wanted = bytes(chunk < num_mapped for chunk in range(num_chunks))
        self.mapped = bytearray(self.wanted)
        self.announced = -1
        """Chunk that is reported as on its way in, and not mapped yet."""
        self.report = Report(0, bytes(self.mapped))

    def word(self, moving: int = -1) -> Report:
        states = bytearray()
        for chunk, there in enumerate(self.mapped):
            state = (MAPPED if self.wanted[chunk] else MOVING) if there else UNMAPPED
            states.append(MOVING if chunk == moving else state)
        return Report(self.generation, bytes(states))

    def say(self, moving: int = -1) -> None:
        self.report = self.word(moving)

    def die(self) -> None:
        self.alive, self.announced = False, -1
        self.mapped[:] = bytes(len(self.mapped))

    def steps(self, wish: Wish, lost_name: bool) -> Iterator[str]:
        """``lost_name``: its report is to be made anew."""
        if not self.alive:
            return
        if self.announced >= 0:
            yield "map"
            return
        if wish is not None and wish != (self.generation, self.wanted):
            yield "adopt"
        for chunk, there in enumerate(self.mapped) if wish is not None else ():
            if there and not self.wanted[chunk]:
                yield f"unmap {chunk}"
            elif not there and self.wanted[chunk]:
                yield f"announce {chunk}"
        if lost_name or self.report != self.word():
            yield "say"

    def do(self, wish: Wish, verb: str, argument: str, mutant: Mutant) -> None:
        if verb == "adopt":
            assert wish is not None
            self.generation, self.wanted = wish
            self.say()
        elif verb == "unmap":
            self.mapped[int(argument)] = 0
        elif verb == "announce":
            if mutant.maps_unannounced:
                self.mapped[int(argument)] = 1
                return
            self.announced = int(argument)
            self.say(moving=self.announced)
        elif verb == "map":
            chunk, self.announced = self.announced, -1
            if wish is not None and wish[1][chunk]:  # read once more
                self.mapped[chunk] = 1
            else:
                self.say()
        else:
            self.say()

    def key(self, rank: Mapping[int, int]) -> tuple[object, ...]:
        """``rank``: of each generation its place among all."""
        report = self.report
        return (
            (self.alive, rank[self.generation], self.wanted, bytes(self.mapped), self.announced),
            (rank[report.generation], report.states),
        )

    def copy(self) -> Pager:
        other = Pager.__new__(Pager)
        for name in ("alive", "announced", "generation", "report", "wanted"):
            setattr(other, name, getattr(self, name))
        other.mapped = bytearray(self.mapped)
        return other
