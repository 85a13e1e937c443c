"""A device for as long as one asks: two books behind their doors, pagers that are late, and a log of all that was said.

What :mod:`tests.policy.coserving.explorer` does with every order of a small device, this does with one random order of a large one,
through :meth:`handle`, as the plugin's shells do.
"""

from __future__ import annotations

import random
from typing import Any

from rose.policy.coserving.chunks import MAPPED, MOVING, UNMAPPED
from rose.policy.coserving.events import (
    AllowedAgain,
    Mark,
    MarksWritten,
    PeerCounted,
    Report,
    Reserve,
    RolloutLooked,
    ServingLooked,
    Stranded,
    Use,
)
from rose.policy.coserving.rollout import RolloutBook
from rose.policy.coserving.serving import ServingBook


class Pager:
    """Maps and unmaps a few chunks at a time; announces before it maps."""

    def __init__(self, num_chunks: int, mapped: bool) -> None:
        self.mapped = bytearray([mapped]) * num_chunks
        self.wanted = bytes(self.mapped)
        self.generation = 0
        self.report = Report(0, bytes(self.mapped))
        self._announced: list[int] = []

    def look(self, mark: Mark | None, rng: random.Random) -> None:
        if mark is not None and mark.generation != self.generation:
            self.generation, self.wanted = mark.generation, mark.marks
        for chunk in self._announced:
            if self.wanted[chunk]:
                self.mapped[chunk] = 1
        self._announced = []
        for chunk, there in enumerate(self.mapped):
            if there and not self.wanted[chunk] and rng.random() < 0.5:
                self.mapped[chunk] = 0
            elif not there and self.wanted[chunk] and rng.random() < 0.5:
                self._announced.append(chunk)
        states = bytearray()
        for chunk, there in enumerate(self.mapped):
            state = (MAPPED if self.wanted[chunk] else MOVING) if there else UNMAPPED
            states.append(MOVING if chunk in self._announced else state)
        self.report = Report(self.generation, bytes(states))


class Side:
    """One engine: its book, its pager, and what its files say."""

    def __init__(self, book: Any, num_chunks: int, *, serving: bool) -> None:
        self.book = self.door = book
        self.pool = set(range(num_chunks)) if serving else set[int]()
        self.lease_pages = num_chunks if serving else 0
        self.mark: Mark | None = None
        self.pager = Pager(num_chunks, serving)
        self.released: list[tuple[int, int]] = []
        self.stranded_pages = 0
        self.said: list[tuple[Any, list[Any]]] = []
        """Every event and what was answered."""

    def tell(self, event: Any) -> bool:
        """Do what the book says; whether it announces a growth."""
        actions = self.door.handle(event)
        self.said.append((event, actions))
        growing = False
        for action in actions:
            match action:
                case Use():
                    self.pool.update(action.chunks)
                case Reserve():
                    self.lease_pages, growing = action.pages, action.growing
                case Mark():
                    self.mark = action
                    self.tell(MarksWritten())
                case Stranded():
                    self.stranded_pages = action.pages
        return growing

    def take_released(self) -> tuple[tuple[int, int], ...]:
        released, self.released = tuple(self.released), []
        return released


class Device:
    """See the module."""

    def __init__(self, num_chunks: int, seed: int) -> None:
        self.num_chunks = num_chunks
        self.rng = random.Random(seed)
        self.serving = Side(ServingBook(num_chunks, 1), num_chunks, serving=True)
        self.rollout = Side(RolloutBook(num_chunks, 1), num_chunks, serving=False)
        self.lend = self.claim = self.allowed = 0
        self.at_s = 100.0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.rng.choice((self._serve, self._roll, self._page, self._change))()
            self.at_s += self.rng.random()
            self.check()

    def check(self) -> None:
        held = sum(self.serving.pager.mapped) + sum(self.rollout.pager.mapped)
        assert held <= self.num_chunks
        for side in (self.serving, self.rollout):
            side.book.check()
            assert all(side.pager.mapped[chunk] for chunk in side.pool)

    def _change(self) -> None:
        self.lend = self.rng.choice((0, 0, self.num_chunks // 2, self.num_chunks - 1))
        self.claim = self.rng.choice((0, 0, 0, 3))

    def _page(self) -> None:
        side = self.rng.choice((self.serving, self.rollout))
        side.pager.look(side.mark, self.rng)

    def _serve(self) -> None:
        side, rng = self.serving, self.rng
        for chunk in sorted(side.pool - {0}):
            if len(side.pool) > self.num_chunks - self.lend and not self.claim and rng.random() < 0.3:
                side.pool.discard(chunk)
                side.released.append((chunk, 7))
        side.tell(
            ServingLooked(
                at_s=self.at_s,
                released=side.take_released(),
                reports=(side.pager.report,),
                target_chunks=self.lend,
                claim_chunks=self.claim,
            )
        )
        if rng.random() < 0.3:
            self._page()
        side.tell(PeerCounted(at_s=self.at_s, pages=self.rollout.lease_pages))

    def _may_hold(self) -> int:
        return max(0, min(self.lend, self.num_chunks - self.serving.lease_pages - self.claim))

    def _roll(self) -> None:
        side, allowed = self.rollout, self._may_hold()
        for chunk in sorted(side.pool, reverse=True)[: max(0, len(side.pool) - allowed)]:
            side.pool.discard(chunk)
            side.released.append((chunk, 3))
        growing = side.tell(
            RolloutLooked(
                at_s=self.at_s,
                released=side.take_released(),
                reports=(side.pager.report,),
                allowed_chunks=allowed,
            )
        )
        if growing:
            if self.rng.random() < 0.5:
                self._serve()
            side.tell(AllowedAgain(at_s=self.at_s, allowed_chunks=self._may_hold()))
