"""Every order of events in a small device, one by one: two books, their pagers, and processes that stop and die anywhere.

The books are the product's own.  Around them is the smallest world that can go wrong: files are atomic registers (the kernel's page
cache), a process is a list of atomic steps between which it may stand still for any time, so a stop needs no event of its own.
What the live shells do between two steps, and in which order they read and write, is written down here once more; whether real engines
keep to it is looked for in their protocol logs (:mod:`tests.policy.coserving.live_logs`).

Safety, in every state: memory that is really mapped, of both engines, is at most what the device has; no step meets memory that is not
there.  Liveness: from every state in which nothing is lent any more, without any further fault, production gets all of it back on
some path (``home``), that is, nothing is stranded for good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rose.policy.coserving.chunks import MAPPED, MOVING, UNMAPPED, ChunkBook
from rose.policy.coserving.events import Report
from rose.policy.coserving.rollout import RolloutBook
from rose.policy.coserving.serving import STRANDED_AFTER_S, ServingBook


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How large the world is, and what may happen in it."""

    chunks: int = 2
    """Of each engine, a page each; the device has as many pages."""
    ranks: int = 1
    """Of the rollout engine; production has one."""
    kills: int = 1
    """Of the rollout engine's core and workers, with a restart each."""
    unlinks: int = 0
    """Of the file in which production's worker reports."""
    lost_wakes: int = 0
    waits: int = 0
    """How often production waits for as long as it does before it calls pages stranded."""
    delayed: bool = False
    """Reports reach their engine core late; of several only the last may."""
    max_states: int = 400_000


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """What is broken on purpose; the defaults are the product."""

    believes_old_reports: bool = False
    """A report counts whatever the generation it was made by."""
    maps_unannounced: bool = False
    """A pager maps first and reports then."""
    takes_what_is_held: bool = False
    """Production maps what it wants back though the peer still holds it."""
    reads_first: bool = False
    """Production reads the peer's number before it says what it reserves."""
    follows_the_name: bool = False
    """A reader lets go of a file whose name is gone, though its writer lives, and the writer never makes it anew."""
    keeps_a_dead_file: bool = False
    """A reader never lets go of the file that it has, though its writer is dead and another has come."""
    takes_what_is_stranded: bool = False
    """Production maps what has been stranded for long, as if its holder were dead."""
    waits_in_silence: bool = False
    """It never says that pages are stranded."""
    stays_stranded: bool = False
    """It never takes that back."""
    no_heartbeat: bool = False
    """Who was not woken does not look."""


class Broken(AssertionError):
    """An invariant does not hold; the message has the steps that lead there."""


class _Pager:
    """A worker's pager: the generation and marks it acts by, what is really mapped, and what it has said."""

    __slots__ = ("alive", "announced", "generation", "mapped", "report", "wanted")

    def __init__(self, num_chunks: int, mapped: bool) -> None:
        self.alive = True
        self.generation = 0
        self.wanted = bytes([mapped]) * num_chunks
        self.mapped = bytearray([mapped]) * num_chunks
        self.announced = -1
        """Chunk that is reported as on its way in, and not mapped yet."""
        self.report = Report(0, bytes(self.mapped))

    def say(self, moving: int = -1) -> None:
        states = bytearray()
        for chunk, there in enumerate(self.mapped):
            state = (MAPPED if self.wanted[chunk] else MOVING) if there else UNMAPPED
            states.append(MOVING if chunk == moving else state)
        self.report = Report(self.generation, bytes(states))


class World:
    """One state.  ``steps()`` are the names of what may happen next; ``after(name)`` is a new world."""

    def __init__(self, bounds: Bounds, mutant: Mutant) -> None:
        n = bounds.chunks
        self.bounds, self.mutant = bounds, mutant
        self.lend = 0
        self.claim = 0
        self.kills, self.unlinks, self.lost = bounds.kills, bounds.unlinks, bounds.lost_wakes
        self.waits, self.now_s = bounds.waits, 0.0
        self.missing, self.missing_since_s = 0, 0.0
        """What production wants back and its peer still has, and since when it has not become less: our own note of it."""
        self.serving, self.rollout = ServingBook(n, 1), RolloutBook(n, 1)
        self.pool = set(range(n))
        """Chunks that production's steps may use; chunk 0 is never lent."""
        self.turns: set[int] = set()
        """Chunks that rollout steps may use."""
        self.s_lease, self.r_lease = n, 0
        self.s_marks: tuple[int, bytes] = (0, bytes(self.serving.chunks.marks))
        self.r_marks: tuple[int, bytes] = (0, bytes(self.rollout.chunks.marks))
        self.s_pager = _Pager(n, True)
        self.r_pagers = [_Pager(n, False) for _ in range(bounds.ranks)]
        self.s_at = self.r_at = ""
        """Where each core is in its round."""
        self.s_peer = 0
        self.growth = 0
        self.r_alive = True
        self.report_lost = False
        self.first_life = True
        """No other rollout engine has come after the one that production met first."""
        self.r_lease_of_first = 0
        self.woken = True
        self.s_seen = self.s_pager.report
        self.r_seen = [pager.report for pager in self.r_pagers]

    # --- what may happen

    def steps(self) -> Iterator[str]:
        n, s = self.bounds.chunks, self.serving
        yield "agent: lend 0" if self.lend else f"agent: lend {n - 1}"
        if self.lend or s.num_lent:
            yield "traffic: claim" if not self.claim else "traffic: no claim"
        if self.s_at:
            yield f"serving: {self.s_at}"
        elif self.mutant.reads_first:
            yield "serving: read"
        elif not self.mutant.no_heartbeat or self.woken:
            yield "serving: round"
        if self.waits and self.missing:
            yield "clock: a wait is over"
        if len(self.pool) > n - min(0 if s.stranded else self.lend, n - 1) and not self.s_at:
            for chunk in sorted(self.pool - {0}):
                yield f"serving: release {chunk}"
        yield from self._pager_steps("serving pager", self.s_pager, self.s_marks, True)
        if self.r_alive:
            yield "rollout: grow" if self.r_at else "rollout: round"
            if not self.r_at:
                for chunk in sorted(self.turns) if len(self.turns) > self._allowed() else ():
                    yield f"rollout: cut {chunk}"
            if self.kills:
                yield "kill: rollout core"
        elif not any(pager.alive for pager in self.r_pagers):
            yield "start: rollout"
        for rank, pager in enumerate(self.r_pagers):
            if pager.alive:
                yield from self._pager_steps(f"rollout pager {rank}", pager, self.r_marks, self.r_alive)
                if not self.r_alive:
                    yield f"kill: rollout pager {rank}"
        if self.unlinks and not self.report_lost:
            yield "unlink: serving report"
        if self.lost and self.woken:
            yield "lose: a wake"
        if self.bounds.delayed:
            if self.s_seen != self.s_pager.report:
                yield "report: serving"
            for rank, pager in enumerate(self.r_pagers) if self.r_alive else ():
                if self.r_seen[rank] != pager.report:
                    yield f"report: rollout {rank}"

    def _pager_steps(
        self, name: str, pager: _Pager, marks: tuple[int, bytes], core_alive: bool
    ) -> Iterator[str]:
        generation, wanted = marks if core_alive else (pager.generation, bytes(len(pager.mapped)))
        if pager.announced >= 0:
            yield f"{name}: map"
            return
        if (generation, wanted) != (pager.generation, pager.wanted):
            yield f"{name}: adopt"
        for chunk, there in enumerate(pager.mapped):
            if there and not pager.wanted[chunk]:
                yield f"{name}: unmap {chunk}"
            elif not there and pager.wanted[chunk]:
                yield f"{name}: announce {chunk}"
        before = pager.report
        pager.say()
        changed, pager.report = pager.report != before, before
        if changed:
            yield f"{name}: say"

    # --- what it does

    def do(self, name: str) -> None:
        who, _, what = name.partition(": ")
        verb, _, argument = what.partition(" ")
        if who == "agent":
            self.lend = int(argument)
            self._wake()
        elif who == "traffic":
            self.claim = int(what == "claim")
            self._wake()
        elif who == "serving":
            self._serving(verb, argument)
        elif who == "rollout":
            self._rollout(verb, argument)
        elif who == "serving pager":
            self._pager(self.s_pager, self.s_marks, True, verb, argument)
            self._wake()
        elif who.startswith("rollout pager"):
            self._pager(self.r_pagers[int(who[-1])], self.r_marks, self.r_alive, verb, argument)
            self._wake()
        elif who == "report":
            if verb == "serving":
                self.s_seen = self.s_pager.report
            else:
                self.r_seen[int(argument)] = self.r_pagers[int(argument)].report
            self._wake()
        elif who == "kill":
            self._kill(what)
        elif who == "start":
            self._start()
        elif who == "unlink":
            self.unlinks -= 1
            self.report_lost = self.mutant.follows_the_name
        elif who == "lose":
            self.lost -= 1
            self.woken = False
        elif who == "clock":
            self.waits -= 1
            self.now_s += STRANDED_AFTER_S
        if not self.bounds.delayed:
            self.s_seen = self.s_pager.report
            self.r_seen = [pager.report for pager in self.r_pagers]
        self._check()

    def _wake(self) -> None:
        self.woken = True

    def _serving(self, verb: str, argument: str) -> None:
        book = self.serving
        if verb == "release":
            chunk = int(argument)
            self.pool.discard(chunk)
            book.released([(chunk, 0)])
            return
        if verb == "read":
            self.s_peer, self.s_at = self._peer_pages(), "round"
            return
        if verb == "round":
            self.woken = False
            if self.report_lost:
                return  # it raises, and serving is off: nothing comes back
            self.pool.update(book.settle([self._believed(book.chunks, self.s_seen)]))
            self.s_lease = book.resize(target_chunks=self.lend, claim_chunks=self.claim)
            self.s_at = "take"
            return
        peer = self.s_peer if self.mutant.reads_first else self._peer_pages()
        was_stranded = book.stranded
        if self.mutant.takes_what_is_held or (self.mutant.takes_what_is_stranded and was_stranded):
            peer = 0
        book.take(self.now_s, peer)
        if self.mutant.waits_in_silence or self.mutant.stays_stranded:
            book.stranded = was_stranded or (book.stranded and not self.mutant.waits_in_silence)
        self._note_missing()
        self.s_marks = self._publish(book.chunks, self.s_marks)
        self.s_at = ""
        self.s_peer = 0

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
            chunk = int(argument)
            self.turns.discard(chunk)
            book.released([(chunk, 0)])
            return
        allowed = self._allowed()
        if verb == "round":
            before = self.r_lease
            reports = [self._believed(book.chunks, report) for report in self.r_seen]
            self.turns.update(book.settle(reports))
            book.shrink(allowed)
            self.growth = book.growth(allowed)
            self.r_lease = book.lease_pages(self.growth)
            if self.r_lease != before:
                self._wake()
            if self.growth:
                self.r_at = "grow"
                return  # whatever may happen before the numbers are read again
        if self.growth:
            book.grow(self.growth, allowed)
            self._wake()
        self.r_lease = book.lease_pages()
        self.r_marks = self._publish(book.chunks, self.r_marks)
        self.r_at, self.growth = "", 0

    def _publish(self, chunks: ChunkBook, marks: tuple[int, bytes]) -> tuple[int, bytes]:
        if not chunks.changed:
            return marks
        chunks.published()
        return chunks.generation, bytes(chunks.marks)

    def _believed(self, chunks: ChunkBook, report: Report) -> Report:
        return Report(chunks.generation, report.states) if self.mutant.believes_old_reports else report

    def _allowed(self) -> int:
        """``allowed_pages`` for a device whose agent and production live."""
        return max(0, min(self.lend, self.bounds.chunks - self.s_lease - self.claim))

    def _peer_pages(self) -> int:
        if self.mutant.keeps_a_dead_file and not self.first_life:
            return self.r_lease_of_first
        if self.r_alive:
            return self.r_lease
        return max(
            (sum(map(bool, p.report.states)) for p in self.r_pagers if p.alive),
            default=0,
        )

    def _pager(
        self, pager: _Pager, marks: tuple[int, bytes], core_alive: bool, verb: str, argument: str
    ) -> None:
        wish = marks if core_alive else (pager.generation, bytes(len(pager.mapped)))
        if verb == "adopt":
            pager.generation, pager.wanted = wish
            pager.say()
        elif verb == "unmap":
            pager.mapped[int(argument)] = 0
        elif verb == "announce":
            if self.mutant.maps_unannounced:
                pager.mapped[int(argument)] = 1
                return
            pager.announced = int(argument)
            pager.say(moving=pager.announced)
        elif verb == "map":
            chunk, pager.announced = pager.announced, -1
            if wish[1][chunk]:  # read once more
                pager.mapped[chunk] = 1
            else:
                pager.say()
        else:
            pager.say()

    def _kill(self, what: str) -> None:
        if what == "rollout core":
            self.kills -= 1
            self.r_alive, self.r_at, self.growth = False, "", 0
            self.turns.clear()
            if self.first_life:
                self.r_lease_of_first = self.r_lease
        else:
            pager = self.r_pagers[int(what[-1])]
            pager.alive = False
            pager.mapped[:] = bytes(len(pager.mapped))
            pager.announced = -1
        self._wake()

    def _start(self) -> None:
        n = self.bounds.chunks
        self.rollout, self.r_lease = RolloutBook(n, 1), 0
        self.r_marks = (0, bytes(self.rollout.chunks.marks))
        self.r_pagers = [_Pager(n, False) for _ in range(self.bounds.ranks)]
        self.r_seen = [pager.report for pager in self.r_pagers]
        self.r_alive, self.first_life = True, False
        self._wake()

    # --- what has to hold

    def _check(self) -> None:
        self.serving.chunks.check()
        self.rollout.chunks.check()
        for rank, pager in enumerate(self.r_pagers):
            total = sum(self.s_pager.mapped) + sum(pager.mapped)
            if total > self.bounds.chunks:
                raise Broken(f"{total} of {self.bounds.chunks} pages are mapped on the device of rank {rank}")
            if any(not pager.mapped[chunk] for chunk in self.turns):
                raise Broken(f"a rollout step uses a chunk that rank {rank} has not mapped")
        if any(not self.s_pager.mapped[chunk] for chunk in self.pool):
            raise Broken("a serving step uses a chunk that is not mapped")

    def is_home(self) -> bool:
        return len(self.pool) == self.bounds.chunks and not self.serving.stranded

    # --- identity

    def key(self) -> tuple[object, ...]:
        """Equal for worlds that behave alike: generations count by their order only."""
        s_order = self._order(self.serving.chunks, self.s_marks, [self.s_pager], [self.s_seen])
        r_order = self._order(self.rollout.chunks, self.r_marks, self.r_pagers, self.r_seen)
        return (
            self.lend,
            self.claim,
            self.kills,
            self.unlinks,
            self.lost,
            self.woken if self.mutant.no_heartbeat else True,
            frozenset(self.pool),
            frozenset(self.turns),
            self.s_lease,
            self.r_lease,
            self.s_at,
            self.r_at,
            self.s_peer,
            self.growth,
            self.r_alive,
            self.report_lost,
            (self.first_life, self.r_lease_of_first) if self.mutant.keeps_a_dead_file else True,
            self.serving._back if self.s_at else 0,
            self._waited() if self.bounds.waits else True,
            s_order,
            r_order,
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
        self, book: ChunkBook, marks: tuple[int, bytes], pagers: list[_Pager], seen: list[Report]
    ) -> tuple[object, ...]:
        by = book._by
        numbers = {book.generation, marks[0], *by.values()}
        for pager in pagers:
            numbers |= {pager.generation, pager.report.generation}
        numbers |= {report.generation for report in seen}
        rank = {number: place for place, number in enumerate(sorted(numbers))}
        return (
            bytes(book._state),
            tuple(sorted((chunk, rank[number]) for chunk, number in by.items())),
            book.changed,
            rank[book.generation],
            rank[marks[0]],
            marks[1],
            tuple(
                (
                    pager.alive,
                    rank[pager.generation],
                    pager.wanted,
                    bytes(pager.mapped),
                    pager.announced,
                    rank[pager.report.generation],
                    pager.report.states,
                )
                for pager in pagers
            ),
            tuple((rank[report.generation], report.states) for report in seen),
        )

    def clone(self) -> World:
        other = object.__new__(World)
        other.__dict__.update(self.__dict__)
        other.pool, other.turns = set(self.pool), set(self.turns)
        other.serving = _copy_serving(self.serving)
        other.rollout = RolloutBook.__new__(RolloutBook)
        other.rollout.chunk_pages = 1
        other.rollout.chunks = _copy_chunks(self.rollout.chunks)
        other.s_pager = _copy_pager(self.s_pager)
        other.r_pagers = [_copy_pager(pager) for pager in self.r_pagers]
        other.r_seen = list(self.r_seen)
        return other


def _copy_chunks(book: ChunkBook) -> ChunkBook:
    other = ChunkBook.__new__(ChunkBook)
    other._state, other._num, other._by = bytearray(book._state), list(book._num), dict(book._by)
    other.marks, other.generation = bytearray(book.marks), book.generation
    other.after_step, other.changed = book.after_step, book.changed
    return other


def _copy_serving(book: ServingBook) -> ServingBook:
    other = ServingBook.__new__(ServingBook)
    other.__dict__.update(book.__dict__)
    other.chunks = _copy_chunks(book.chunks)
    return other


def _copy_pager(pager: _Pager) -> _Pager:
    other = _Pager.__new__(_Pager)
    for name in ("alive", "announced", "generation", "report", "wanted"):
        setattr(other, name, getattr(pager, name))
    other.mapped = bytearray(pager.mapped)
    return other


@dataclass(frozen=True, kw_only=True)
class Explored:
    """What an exploration saw."""

    num_states: int
    num_steps: int


FAULTS = (
    "clock: ",
    "agent: lend ",
    "traffic: ",
    "kill: rollout core",
    "unlink: ",
    "lose: ",
    "serving: release",
)
"""What need not happen: production must come home without any of it (a rollout engine that is dead is reaped, though)."""


def explore(bounds: Bounds, mutant: Mutant | None = None) -> Explored:
    """Look at every state that can be reached.

    Raises:
        Broken: An invariant does not hold; the steps that lead there are in the message.
        AssertionError: There are more than ``bounds.max_states``.
    """
    first = World(bounds, mutant or Mutant())
    number = {first.key(): 0}
    worlds: list[World | None] = [first]
    came: list[tuple[int, str]] = [(-1, "")]
    back: list[list[int]] = [[]]
    """Of each state those from which a step that is no fault leads there."""
    must_come_home, home = [], []
    queue, num_steps = deque([0]), 0
    while queue:
        index = queue.popleft()
        world = worlds[index]
        assert world is not None
        worlds[index] = None
        if not world.lend:
            must_come_home.append(index)
            if world.is_home():
                home.append(index)
        for step in list(world.steps()):
            num_steps += 1
            then = world.clone()
            try:
                then.do(step)
            except (AssertionError, ValueError) as error:
                raise Broken(f"{error}\n  " + "\n  ".join([*_story(came, index), step])) from error
            key = then.key()
            found = number.get(key)
            if found is None:
                found = number[key] = len(worlds)
                assert found < bounds.max_states, f"more than {bounds.max_states} states"
                worlds.append(then)
                came.append((index, step))
                back.append([])
                queue.append(found)
            if not step.startswith(FAULTS):
                back[found].append(index)
    comes_home, look = set(home), list(home)
    while look:
        for before in back[look.pop()]:
            if before not in comes_home:
                comes_home.add(before)
                look.append(before)
    for index in must_come_home:
        if index not in comes_home:
            raise Broken("production's memory never comes home\n  " + "\n  ".join(_story(came, index)))
    return Explored(num_states=len(worlds), num_steps=num_steps)


def _story(came: list[tuple[int, str]], index: int) -> list[str]:
    steps: list[str] = []
    while index > 0:
        index, step = came[index]
        steps.append(step)
    return steps[::-1]


LARGER = (
    Bounds(chunks=3, ranks=1, kills=0),
    Bounds(chunks=2, ranks=2, kills=1),
    Bounds(chunks=2, ranks=1, kills=2, unlinks=1, lost_wakes=1, delayed=True),
    Bounds(chunks=3, ranks=1, kills=1, max_states=4_000_000),
)
"""Minutes: ``python -m tests.policy.coserving.explorer``."""

if __name__ == "__main__":
    for each in LARGER:
        print(each, explore(each), flush=True)
