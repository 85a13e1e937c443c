"""A small device with two engines, its agent and its files, for whom every order of events is tried (:mod:`tests.policy.coserving.explorer`).

The books are the product's own, and are told everything through the door that the plugin uses (``handle``); what a rollout engine may hold
is the product's ``allowed_pages``.  Around them is the smallest world that can go wrong: files are atomic registers (the kernel's page
cache), a process is a list of atomic steps between which it may stand still for any time, so a stop needs no event of its own.
What the live shells do between two steps, and in which order they read and write, is written down here once more; whether real engines
keep to it is looked for in their protocol logs (:mod:`tests.policy.coserving.live_logs`).

Files: a reader keeps what it has met for as long as its writer lives; a writer makes anew what was deleted when it next looks; who is new
finds only what has a name.  Two things are taken for granted, because an engine takes seconds to start and those that live look several
times a second: they have met the files of one that starts before it does anything, and one that starts finds the files that they write,
when production asks who holds memory.  Production is started again when all of its processes are gone; it counts at any moment what its
peer holds, and at a later one maps the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TypeVar

from rose.policy.coserving.chunks import ChunkBook
from rose.policy.coserving.events import (
    AllowedAgain,
    Mark,
    MarksWritten,
    PeerCounted,
    Report,
    Reserve,
    RolloutAction,
    RolloutLooked,
    ServingAction,
    ServingLooked,
    Use,
)
from rose.policy.coserving.rollout import RolloutBook, allowed_pages
from rose.policy.coserving.serving import STRANDED_AFTER_S, ServingBook, chunks_at_start
from rose.policy.lending_events import Mode, Phase
from tests.policy.coserving.bounds import ROLLOUTS, SERVINGS, Bounds, Broken, Mutant
from tests.policy.coserving.world_pager import Pager, Wish

Book = TypeVar("Book", ServingBook, RolloutBook)


class World:
    """One state.  ``steps()`` are the names of what may happen next; ``do(name)`` is what it does."""

    def __init__(self, bounds: Bounds, mutant: Mutant) -> None:
        n = bounds.chunks
        self.bounds, self.mutant = bounds, mutant
        self.lend = 0
        self.claim = 0
        self.kills, self.unlinks, self.lost = bounds.kills, bounds.unlinks, bounds.lost_wakes
        self.s_kills, self.silences = bounds.production_kills, bounds.silences
        self.waits, self.now_s = bounds.waits, 0.0
        self.missing, self.missing_since_s = 0, 0.0
        """What production wants back and its peer still has, and since when it has not become less: our own note of it."""
        self.serving, self.rollout = ServingBook(n, 1), RolloutBook(n, 1)
        self.pool = frozenset(range(n))
        """Chunks that production's steps may use; chunk 0 is never lent."""
        self.turns: frozenset[int] = frozenset()
        """Chunks that rollout steps may use."""
        self.s_released: frozenset[int] = frozenset()
        self.r_released: frozenset[int] = frozenset()
        """Taken out of the pool by the engine thread, and not told to the book yet."""
        self.s_lease, self.r_lease = n, 0
        self.s_marks: tuple[int, bytes] = (0, bytes(self.serving.chunks.marks))
        self.r_marks: tuple[int, bytes] = (0, bytes(self.rollout.chunks.marks))
        self.s_pager = Pager(n, True)
        self.r_pagers = [Pager(n, False) for _ in range(bounds.ranks)]
        self.s_at = self.r_at = ""
        """Where each core is in its round."""
        self.s_peer = self.r_allowed = 0
        """What they have read in it."""
        self.r_alive = self.s_alive = True
        self.starting = False
        """Production says so, and has no memory yet."""
        self.silent = self.s_deaf = self.r_deaf = False
        """The agent is; each side has noticed."""
        self.gone: frozenset[str] = frozenset()
        """Files that have lost their names."""
        self.r_met: frozenset[str] = frozenset()
        self.s_met: frozenset[str] = frozenset()
        """Of others' files those that each core has open."""
        self.first_life = True
        """No other rollout engine has come after the one that production met first."""
        self.r_lease_of_first = 0
        self.woken = True
        self.s_seen = self.s_pager.report
        self.r_seen = [pager.report for pager in self.r_pagers]
        self._s_key: tuple[object, ...] = ()
        self._r_key: tuple[object, ...] = ()

    # --- what may happen

    def steps(self) -> Iterator[str]:
        yield from self._agents_steps()
        yield from self._serving_steps()
        yield from self._pager_steps("serving pager", self.s_pager, self._wish(True))
        yield from self._rollout_steps()
        for rank, pager in enumerate(self.r_pagers):
            if pager.alive:
                yield from self._pager_steps(f"rollout pager {rank}", pager, self._wish(False))
                if not self.r_alive:
                    yield f"kill: rollout pager {rank}"
        for file in self.bounds.files if self.unlinks else ():
            if file not in self.gone:
                yield f"unlink: {file}"
        if self.lost and self.woken:
            yield "lose: a wake"
        if self.bounds.delayed:
            if self.s_seen != self.s_pager.report:
                yield "report: serving"
            for rank, pager in enumerate(self.r_pagers) if self.r_alive else ():
                if self.r_seen[rank] != pager.report:
                    yield f"report: rollout {rank}"

    def _agents_steps(self) -> Iterator[str]:
        if self.silent:
            yield "agent: speaks"
            if not self.s_deaf and self.s_alive:
                yield "serving: misses the agent"
            if not self.r_deaf and self.r_alive:
                yield "rollout: misses the agent"
            return
        yield "agent: lend 0" if self.lend else f"agent: lend {self.bounds.chunks - 1}"
        if self.silences:
            yield "agent: falls silent"
        if "node.state" in self.gone and not self.mutant.follows_the_name:
            yield "agent: mends"

    def _serving_steps(self) -> Iterator[str]:
        if not self.s_alive:
            yield "kill: serving pager" if self.s_pager.alive else "start: production"
            return
        if self.starting:
            if self.s_at:
                yield "serving: takes the rest"
            elif not self.gone & {*ROLLOUTS, "rollout.rank0"}:
                yield "serving: asks"
            return
        if self.s_kills:
            yield "kill: serving core"
        if self.lend or self.serving.num_lent:
            yield "traffic: claim" if not self.claim else "traffic: no claim"
        if self.waits and self.missing:
            yield "clock: a wait is over"
        if self.s_at:
            yield f"serving: {self.s_at}"
            return
        if not self.mutant.no_heartbeat or self.woken:
            yield "serving: count" if self.mutant.reads_first else "serving: look"
        # Also in the middle of a round, live: the book hears of it at the next.
        if len(self.pool) > self.bounds.chunks - self._target(self.serving.stranded):
            for chunk in sorted(self.pool - {0}):
                yield f"serving: release {chunk}"

    def _rollout_steps(self) -> Iterator[str]:
        if not self.r_alive:
            if not any(pager.alive for pager in self.r_pagers):
                yield "start: rollout"
            return
        yield f"rollout: {self.r_at or 'look'}"
        if not self.r_at and len(self.turns) > self._allowed():
            for chunk in sorted(self.turns):
                yield f"rollout: cut {chunk}"
        if self.kills:
            yield "kill: rollout core"

    def _wish(self, serving: bool) -> Wish:
        """The marks as a pager reads them; None: there are none, everything stays as it is."""
        alive, marks, pager = (
            (self.s_alive, self.s_marks, self.s_pager)
            if serving
            else (self.r_alive, self.r_marks, self.r_pagers[0])
        )
        lost = self.mutant.follows_the_name and f"{'serving' if serving else 'rollout'}.chunks" in self.gone
        if alive and not lost:
            return marks
        return None if serving else (pager.generation, bytes(len(pager.mapped)))

    def _pager_steps(self, name: str, pager: Pager, wish: Wish) -> Iterator[str]:
        lost_name = f"{name[:7]}.rank0" in self.gone and not self.mutant.follows_the_name
        for step in pager.steps(wish, lost_name):
            yield f"{name}: {step}"

    # --- what it does

    def do(self, name: str) -> None:
        who, _, what = name.partition(": ")
        if who.startswith(("serving", "report", "kill", "start")):
            self._s_key = ()
        if who.startswith(("rollout", "report", "kill", "start")):
            self._r_key = ()
        verb, _, argument = what.partition(" ")
        if who == "agent":
            self._agent(verb, argument)
        elif who == "traffic":
            self.claim = int(what == "claim")
            self.woken = True
        elif verb == "misses":
            self.s_deaf, self.r_deaf = self.s_deaf or who == "serving", self.r_deaf or who == "rollout"
        elif who == "serving":
            self._serving(verb, argument)
        elif who == "rollout":
            self._rollout(verb, argument)
        elif who.endswith("pager") or who[:-1].endswith("pager "):
            serving = who == "serving pager"
            self._copied_pager(who).do(self._wish(serving), verb, argument, self.mutant)
            if verb == "say":
                self._mend(f"{who[:7]}.rank0")
            self.woken = True
        elif who == "report":
            if verb == "serving":
                self.s_seen = self.s_pager.report
            else:
                self.r_seen = list(self.r_seen)
                self.r_seen[int(argument)] = self.r_pagers[int(argument)].report
            self.woken = True
        elif who == "kill":
            self._kill(what)
        elif who == "start":
            self._start(what)
        elif who == "unlink":
            self.unlinks -= 1
            self.gone |= {what}
        elif who == "lose":
            self.lost -= 1
            self.woken = False
        elif who == "clock":
            self.waits -= 1
            self.now_s += STRANDED_AFTER_S
        if not self.bounds.delayed:
            self.s_seen = self.s_pager.report
            self.r_seen = [pager.report for pager in self.r_pagers]
        if who not in ("agent", "traffic", "clock", "lose", "unlink"):
            self._check(told_a_book=who in ("serving", "rollout", "start"))

    def _agent(self, verb: str, argument: str) -> None:
        if verb == "lend":
            self.lend = int(argument)
        elif verb == "mends":
            self._mend("node.state")
        else:
            self.silent = verb == "falls"
            self.silences -= self.silent
            self.s_deaf = self.r_deaf = False
        self.woken = True

    def _serving(self, verb: str, argument: str) -> None:
        book, mutant = self.serving, self.mutant
        if verb == "release":
            self.pool -= {int(argument)}
            self.s_released |= {int(argument)}
        elif verb == "asks":
            self.s_peer, self.s_at = self._peer_pages_at_start(), "takes"
        elif verb == "takes":
            self._take_the_rest()
        elif verb == "look":
            self.woken = False
            if mutant.follows_the_name and "serving.rank0" in self.gone:
                return  # it raises, and serving is off: nothing comes back
            self._mend(*SERVINGS)
            if "node.state" not in self.gone:
                self.s_met |= {"node.state"}
            event = ServingLooked(
                at_s=self.now_s,
                released=tuple((chunk, 0) for chunk in sorted(self.s_released)),
                reports=(self._believed(book.chunks, self.s_seen),),
                target_chunks=self._target(),
                claim_chunks=self.claim,
            )
            self.s_released = frozenset()
            self.serving = book = _copy_book(book)
            self._obey_serving(book.handle(event))
            self.s_at = "mark" if mutant.reads_first else "count"
        elif verb == "count":
            self.s_peer, self.s_at = self._peer_pages(), "look" if mutant.reads_first else "mark"
        else:
            self.serving = book = _copy_book(book)
            peer, was_stranded = self.s_peer, book.stranded
            if mutant.takes_what_is_held or (mutant.takes_what_is_stranded and was_stranded):
                peer = 0
            self._obey_serving(book.handle(PeerCounted(at_s=self.now_s, pages=peer)))
            if mutant.waits_in_silence or mutant.stays_stranded:
                book.stranded = was_stranded or (book.stranded and not mutant.waits_in_silence)
            self._note_missing()
            self.s_at, self.s_peer = "", 0

    def _obey_serving(self, actions: list[ServingAction]) -> None:
        for action in actions:
            match action:
                case Use():
                    self.pool |= set(action.chunks)
                case Reserve():
                    self.s_lease = action.pages
                case Mark():
                    self.s_marks = (action.generation, action.marks)
                    self.serving.handle(MarksWritten())
                case _:
                    pass

    def _target(self, stranded: bool = False) -> int:
        """What production may lend by what the agent says."""
        unread = "node.state" in self.gone and (
            self.mutant.follows_the_name or (self.bounds.production_kills and "node.state" not in self.s_met)
        )
        deaf = (self.s_deaf and not self.mutant.trusts_the_silent) or unread
        return 0 if stranded or deaf else min(self.lend, self.bounds.chunks - 1)

    def _note_missing(self) -> None:
        missing = self.serving.missing_pages
        if not self.missing or missing < self.missing:
            self.missing_since_s = self.now_s
        self.missing = missing
        waited = missing > 0 and self.now_s - self.missing_since_s >= STRANDED_AFTER_S
        if waited and not self.serving.stranded:
            raise Broken(f"{missing} pages that nobody gives back are not said to be stranded")

    def _rollout(self, verb: str, argument: str) -> None:
        book = self.rollout
        if verb == "cut":
            self.turns -= {int(argument)}
            self.r_released |= {int(argument)}
            return
        if self.mutant.follows_the_name and "rollout.rank0" in self.gone:
            return  # it raises: nothing may be held, and no book hears of what was given up
        if verb in ("look", "again"):
            self._mend(*ROLLOUTS)
            self.r_met |= {file for file in ("node.state", *SERVINGS[:2]) if file not in self.gone}
            if verb == "look" or not self.mutant.grows_unasked:
                self.r_allowed = self._allowed()
            verb = "tell" if verb == "look" else "grow"
            if self.bounds.slow_reads:
                self.r_at = verb
                return
        self.rollout = book = _copy_book(book)
        before = self.r_lease
        if verb == "tell":
            event: RolloutLooked | AllowedAgain = RolloutLooked(
                at_s=self.now_s,
                released=tuple((chunk, 0) for chunk in sorted(self.r_released)),
                reports=tuple(self._believed(book.chunks, report) for report in self.r_seen),
                allowed_chunks=self.r_allowed,
            )
            self.r_released = frozenset()
        else:
            event = AllowedAgain(at_s=self.now_s, allowed_chunks=self.r_allowed)
        self._obey_rollout(book.handle(event))
        self.woken = self.woken or self.r_lease != before
        if not self.r_at:
            self.r_allowed = 0

    def _obey_rollout(self, actions: list[RolloutAction]) -> None:
        for action in actions:
            match action:
                case Use():
                    self.turns |= set(action.chunks)
                case Reserve():
                    self.r_lease, self.r_at = action.pages, "again" if action.growing else ""
                case Mark():
                    self.r_marks = (action.generation, action.marks)
                    self.rollout.handle(MarksWritten())

    def _believed(self, chunks: ChunkBook, report: Report) -> Report:
        return Report(chunks.generation, report.states) if self.mutant.believes_old_reports else report

    def _allowed(self) -> int:
        """By what the rollout engine can read."""

        def reads(file: str) -> bool:
            return file not in self.gone or (file in self.r_met and not self.mutant.follows_the_name)

        n = self.bounds.chunks
        claim = min(self.claim, n - len(self.pool)) if reads("serving.board") else 0
        deaf = self.r_deaf and not self.mutant.trusts_the_silent
        pages, _ = allowed_pages(
            mode=Mode.ON,
            lend_pages=self.lend,
            has_serving=True,
            serving_phase=Phase.STARTING if self.starting else Phase.READY,
            serving_alive=self.s_alive and reads("serving.lease"),
            serving_total=0 if self.starting else n,
            serving_reserved=self.s_lease,
            serving_needed=len(self.pool) + claim if claim else 0,
            node_age_s=inf if deaf or not reads("node.state") else 0.0,
            serving_age_s=0.0,
        )
        return min(pages, n)

    def _peer_pages(self) -> int:
        if self.mutant.keeps_a_dead_file and not self.first_life:
            return self.r_lease_of_first
        lost = self.mutant.follows_the_name and "rollout.lease" in self.gone
        if self.r_alive and not lost:
            return self.r_lease
        if self.mutant.follows_the_name and "rollout.rank0" in self.gone:
            return 0
        return max((sum(map(bool, p.report.states)) for p in self.r_pagers if p.alive), default=0)

    def _copied_pager(self, name: str) -> Pager:
        """Worlds share what they have not changed."""
        if name == "serving pager":
            self.s_pager = pager = self.s_pager.copy()
            return pager
        rank, others = int(name[-1]), list(self.r_pagers)
        others[rank] = pager = others[rank].copy()
        self.r_pagers = others
        return pager

    def _mend(self, *files: str) -> None:
        if self.gone and not self.mutant.follows_the_name:
            self.gone -= set(files)

    def _kill(self, what: str) -> None:
        if what == "rollout core":
            self.kills -= 1
            self.r_alive, self.r_at, self.r_allowed = False, "", 0
            self.turns = self.r_released = frozenset()
            if self.first_life:
                self.r_lease_of_first = self.r_lease
        elif what == "serving core":
            self.s_kills -= 1
            self.s_alive, self.s_at, self.s_peer, self.claim, self.missing = False, "", 0, 0, 0
            self.pool = self.s_released = frozenset()
            self.r_met -= set(SERVINGS)
        else:
            self._copied_pager(what).die()
        self.woken = True

    def _start(self, what: str) -> None:
        n = self.bounds.chunks
        if what == "production":
            self.s_alive = self.starting = True
            self.s_lease, self.s_deaf, self.s_met = 0, self.silent, frozenset()
            self.gone -= {*SERVINGS, "serving.rank0"}
        else:
            self.rollout, self.r_lease, self.r_met = RolloutBook(n, 1), 0, frozenset()
            self.r_marks = (0, bytes(self.rollout.chunks.marks))
            self.r_pagers = [Pager(n, False) for _ in range(self.bounds.ranks)]
            self.r_seen = [pager.report for pager in self.r_pagers]
            self.r_alive, self.first_life, self.r_deaf = True, False, self.silent
            self.gone -= {*ROLLOUTS, "rollout.rank0"}
        self.woken = True

    def _peer_pages_at_start(self) -> int:
        if self.mutant.starts_with_all or (self.mutant.forgets_workers and not self.r_alive):
            return 0
        return self._peer_pages()

    def _take_the_rest(self) -> None:
        n = self.bounds.chunks
        first = chunks_at_start(n, 1, self.s_peer)
        self.starting, self.s_at, self.s_peer = False, "", 0
        self.serving = book = ServingBook(n, 1, range(first, n))
        self.s_lease, self.s_marks = book.lease_pages, (0, bytes(book.chunks.marks))
        self.s_pager = Pager(n, True, first)
        self.s_seen = self.s_pager.report
        self.pool = frozenset(range(first))

    # --- what has to hold

    def _check(self, told_a_book: bool) -> None:
        if told_a_book:
            self.serving.check(self.s_lease if self.s_alive and not self.starting else None)
            self.rollout.check(self.r_lease)
        ours, n = self.s_pager.mapped, self.bounds.chunks
        for rank, pager in enumerate(self.r_pagers):
            total = ours.count(1) + pager.mapped.count(1)
            if total > n:
                raise Broken(f"{total} of {n} pages are mapped on the device of rank {rank}")
            if self.turns and not all(pager.mapped[chunk] for chunk in self.turns):
                raise Broken(f"a rollout step uses a chunk that rank {rank} has not mapped")
        if not all(ours[chunk] for chunk in self.pool):
            raise Broken("a serving step uses a chunk that is not mapped")

    def must_come_home(self) -> bool:
        """Does nobody lend any more?"""
        return not self.lend or self.silent

    def is_home(self) -> bool:
        return self.s_alive and len(self.pool) == self.bounds.chunks and not self.serving.stranded

    # --- identity

    def key(self) -> tuple[object, ...]:
        """Equal for worlds that behave alike: generations count by their order only."""
        bounds, mutant = self.bounds, self.mutant
        if not self._s_key:
            self._s_key = self._order(self.serving.chunks, self.s_marks, [self.s_pager], [self.s_seen])
        if not self._r_key:
            self._r_key = self._order(self.rollout.chunks, self.r_marks, self.r_pagers, self.r_seen)
        # What is open matters while a name is gone, or may go.
        may_go = frozenset(bounds.files) if self.unlinks else self.gone
        return (
            (self.lend, self.claim, self.kills),
            (self.woken, self.lost) if mutant.no_heartbeat else True,
            (self.pool, self.turns, self.s_released, self.r_released),
            (self.s_lease, self.r_lease, self.s_at, self.r_at),
            (self.s_peer, self.r_allowed, self.r_alive),
            (self.unlinks, self.gone, self.r_met & may_go, self.s_met & may_go) if bounds.unlinks else True,
            (self.silences, self.silent, self.s_deaf, self.r_deaf) if bounds.silences else True,
            (self.s_kills, self.s_alive, self.starting) if bounds.production_kills else True,
            (self.first_life, self.r_lease_of_first) if mutant.keeps_a_dead_file else True,
            self.serving._back if self.s_at else 0,
            self.rollout._growth if self.r_at else 0,
            self._waited() if bounds.waits else True,
            self._s_key,
            self._r_key,
        )

    def _waited(self) -> tuple[object, ...]:
        book = self.serving
        return (
            self.waits,
            self.missing,
            self.now_s - self.missing_since_s if self.missing else 0.0,
            book.stranded,
            book._missing,
            self.now_s - book._missing_since_s if book._missing else 0.0,
        )

    def _order(
        self, book: ChunkBook, marks: tuple[int, bytes], pagers: list[Pager], seen: list[Report]
    ) -> tuple[object, ...]:
        by = book._by
        numbers = {book.generation, marks[0], *by.values(), *(report.generation for report in seen)}
        for pager in pagers:
            numbers.update((pager.generation, pager.report.generation))
        rank = {number: place for place, number in enumerate(sorted(numbers))}
        return (
            bytes(book._state),
            tuple(sorted((chunk, rank[number]) for chunk, number in by.items())),
            book.changed,
            rank[book.generation],
            rank[marks[0]],
            marks[1],
            tuple(pager.key(rank) for pager in pagers),
            tuple((rank[report.generation], report.states) for report in seen),
        )

    def clone(self) -> World:
        other = object.__new__(World)
        other.__dict__.update(self.__dict__)
        return other


def _copy_chunks(book: ChunkBook) -> ChunkBook:
    other = ChunkBook.__new__(ChunkBook)
    other._state, other._num, other._by = bytearray(book._state), list(book._num), dict(book._by)
    other.marks, other.generation = bytearray(book.marks), book.generation
    other.after_step, other.changed = book.after_step, book.changed
    return other


def _copy_book(book: Book) -> Book:
    other = object.__new__(type(book))
    other.__dict__.update(book.__dict__)
    other.chunks = _copy_chunks(book.chunks)
    return other
