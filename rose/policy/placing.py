"""The queue of turns that wait, and which of them goes where.

A turn that found no worker is looked at again only when something got better for it: a worker *gained* (a
slot, KV room, weights, health, slack; ``WorkerTable.gained``), or the turn itself did (its back-off ran out).
So an event costs what it changed, not turns times workers, and the outcome is the same as if every waiting
turn had been tried against every worker.

Order: resumed turns first, then by age, where the age of their group (``TurnParams.oldest_first_s``) and the longest
predicted rest (``TurnParams.longest_first_s``) may count.  In a full fleet a turn may wait a moment for a slot where its prefix
is (``TurnParams.affine_wait_s``); others take the slots that open elsewhere.  The queue is never searched for a turn that fits "better": a later
turn overtakes only where an earlier one cannot run.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rose.errors import PolicyError
from rose.lineage import Version
from rose.policy.affinity import Affinity
from rose.policy.draining import Draining
from rose.policy.fleet import Fleet
from rose.policy.packed import Eligible, Mask, Rows
from rose.policy.remaining import Remaining
from rose.policy.routing import Candidate, RoutingPolicy
from rose.policy.turn import Turn
from rose.policy.turn_events import TurnParams
from rose.policy.worker import Health, Tier, Worker

Entry = tuple[tuple[int, float, int], str, int]
"""Order, turn, and the KV room that it needs: whoever fits nowhere is passed over by that alone."""
_MAX_CLASSES = 256
_Class = tuple[str, str, bool, Version | None, str | None]
"""What eligibility depends on besides size and back-off: model, job, dedicated only, lowest version, run."""


@dataclass(kw_only=True, slots=True)
class Placer:
    """Args:
    turns: All turns that have not ended; owned by the turn book.
    required: Lowest weight version per job; owned by the turn book.
    runs: The run of each job whose trainer named one; owned by the turn book.
    draining: Which jobs drain; owned by the turn book.
    """

    policy: RoutingPolicy
    params: TurnParams
    fleet: Fleet
    affinity: Affinity
    remaining: Remaining
    turns: dict[str, Turn]
    required: dict[str, Version]
    runs: dict[str, str]
    draining: Draining
    queue: list[Entry] = field(default_factory=lambda: list[Entry]())
    _fresh: set[str] = field(default_factory=lambda: set[str]())
    """Queued turns that have not been tried against the workers as they were when these last gained."""
    _backoffs: list[tuple[float, str]] = field(default_factory=lambda: list[tuple[float, str]]())
    _suits: dict[_Class, Mask] = field(default_factory=lambda: dict[_Class, Mask]())
    """``WorkerTable.suits`` by class, as of ``_suits_epoch``."""
    _suits_epoch: int = -1

    # --- the queue -------------------------------------------------------------------------------------

    def put(self, turn: Turn) -> None:
        spec, turn_id = turn.spec, turn.spec.turn_id
        left = spec.max_tokens - len(turn.token_ids)
        expected = self.affinity.expected_tokens(spec)
        turn.expected_tokens = min(left, max(1, expected - spec.num_copied) if spec.num_copied else expected)
        bisect.insort(self.queue, (turn.order, turn_id, turn.need_tokens))
        self._fresh.add(turn_id)
        for until_s in turn.backoff_until_s.values():
            heapq.heappush(self._backoffs, (until_s, turn_id))

    def remove(self, turn: Turn) -> None:
        index = bisect.bisect_left(self.queue, (turn.order, turn.spec.turn_id, 0))
        del self.queue[index]
        self._fresh.discard(turn.spec.turn_id)

    def _entry(self, turn_id: str) -> Entry:
        turn = self.turns[turn_id]
        return turn.order, turn_id, turn.need_tokens

    def try_again(self, turn_ids: Iterable[str]) -> None:
        """These turns may run where they could not before, for a reason no worker shows."""
        self._fresh.update(turn_ids)

    # --- placing ---------------------------------------------------------------------------------------

    def place(self, at_s: float) -> Iterator[tuple[Turn, Worker, Candidate]]:
        """Each placement in turn; the caller carries it out before it asks for the next.

        Raises:
            PolicyError: The policy chose a worker that is not eligible.
        """
        while self._backoffs and self._backoffs[0][0] <= at_s:
            turn = self.turns.get(heapq.heappop(self._backoffs)[1])
            if turn is not None and turn.worker is None:
                self._fresh.add(turn.spec.turn_id)
        table = self.fleet.table
        if not self.queue:
            table.gained.clear()  # nobody waits for what got better
            return
        if not table.gained and not self._fresh:
            return
        gained = table.take_gained()
        rooms: dict[_Class, int] = {}
        count = len(table)
        num_open = table.num_open
        entries = list(self.queue) if len(gained) else sorted(self._entry(turn_id) for turn_id in self._fresh)
        most_room: int | None = None
        for _, turn_id, need_tokens in entries:
            if num_open == 0 or not (self._fresh or len(gained)):
                break
            fresh = turn_id in self._fresh
            if not fresh:
                if most_room is None:
                    mine = gained[table.open[gained]]
                    most_room = int(table.room[mine].max()) if len(mine) else -1
                if need_tokens > most_room:
                    continue
            turn = self.turns[turn_id]
            kind = self._class_of(turn)
            mask = self._suiting(kind) & table.open[:count]
            if not fresh:
                room = rooms.get(kind)
                if room is None:
                    mine = gained[mask[gained]]
                    room = rooms[kind] = int(table.room[mine].max()) if len(mine) else -1
                if need_tokens > room:
                    continue
            mask = self._narrow(turn, mask, at_s)
            if self.params.affine_wait_s > 0 and len(self.queue) > num_open:
                mask = self._wait_for_prefix(turn, mask, at_s)
            rows: Rows = mask.nonzero()[0]
            if not (len(rows) if fresh else mask[gained].any()):
                self._fresh.discard(turn_id)
                turn.hold = self.why(turn, at_s)
                continue
            if turn.is_tail:
                mask = self._for_tail(mask)
                rows = mask.nonzero()[0]
            candidate = self._candidate(turn, at_s)
            eligible = Eligible(table, mask, rows)
            worker = self.policy.choose(candidate, eligible)
            if worker is None:
                self._fresh.discard(turn_id)
                turn.hold = "policy"
                continue
            if worker not in eligible:
                raise PolicyError(
                    f"the policy chose {worker.worker_id}, which is not eligible", field="policy"
                )
            self.remove(turn)
            yield turn, worker, candidate
            rooms.clear()
            most_room = None
            if worker.inflight >= worker.slots:
                num_open -= 1
        if num_open == 0:
            self._fresh.clear()  # whoever opens has gained, and is tried then

    @property
    def has_home(self) -> bool:
        """Is there a dedicated worker with room for one more turn?"""
        table = self.fleet.table
        count = len(table)
        return bool((table.open[:count] & table.dedicated[:count]).any())

    def homes(self, turn: Turn, at_s: float) -> list[Worker]:
        """Dedicated workers that could run this turn, which runs elsewhere, from where it is."""
        return self._rooms(turn, self.fleet.table.dedicated, at_s)

    def places(self, turn: Turn, at_s: float) -> list[Worker]:
        """The same of all workers, its own too."""
        return self._rooms(turn, self.fleet.table.everyone, at_s)

    def _rooms(self, turn: Turn, among: Mask, at_s: float) -> list[Worker]:
        table = self.fleet.table
        count = len(table)
        mask = self._suiting(self._class_of(turn)) & table.open[:count] & among[:count]
        if not mask.any():
            return []
        mask = self._narrow(turn, mask, at_s)
        return [worker for worker in self.fleet if mask[table.rows[worker.worker_id]]]

    def _for_tail(self, mask: Mask) -> Mask:
        """Those of ``mask`` that a turn of the tail goes to: the first choice for it, else dedicated ones, else any."""
        table = self.fleet.table
        for better in (table.for_tail, table.dedicated):
            if (own := mask & better[: len(mask)]).any():
                return own
        return mask

    def _wait_for_prefix(self, turn: Turn, mask: Mask, at_s: float) -> Mask:
        """``mask`` without workers that would read the prompt again, while the turn may wait for the one that need not.

        In a full fleet a slot that opens is the only one there is, and the right one for one turn in as many as there are
        workers: whoever waits longest takes it, and reads everything again.  A slot where the prefix is opens soon (delay
        scheduling, Zaharia et al. 2010).
        """
        worker, resident = self.affinity.where(turn.spec.trajectory_id)
        if worker is None or resident == 0:
            return mask
        # To wait longer than the prompt takes to read would lose more than it saves.
        wait_s = min(self.params.affine_wait_s, resident * worker.speed.prefill_s)
        until_s = turn.queued_at_s + wait_s
        if at_s >= until_s:
            return mask
        row = self.fleet.table.rows[worker.worker_id]
        if not mask[row]:
            heapq.heappush(self._backoffs, (until_s, turn.spec.turn_id))
        own = mask & False
        own[row] = mask[row]
        return own

    def _class_of(self, turn: Turn) -> _Class:
        spec = turn.spec
        floor = self.required.get(spec.job)
        if spec.min_version is not None and (floor is None or spec.min_version > floor):
            floor = spec.min_version
        if turn.spans:  # versions never decrease within a turn
            own = turn.spans[-1].version
            floor = own if floor is None else max(floor, own)
        dedicated_only = spec.dedicated_only or self._is_pinned(turn)
        run = self.runs.get(spec.job)
        if not run:  # one turn, one trajectory, one policy, also where nobody asked for one by name
            run = turn.segments[-1].run if turn.segments else spec.run or None
        return spec.model, spec.job, dedicated_only, floor, run

    def _suiting(self, kind: _Class) -> Mask:
        table = self.fleet.table
        if self._suits_epoch != table.epoch:
            self._suits.clear()
            self._suits_epoch = table.epoch
        mask = self._suits.get(kind)
        if mask is None:
            if len(self._suits) >= _MAX_CLASSES:
                self._suits.clear()
            model, job, dedicated_only, floor, run = kind
            mask = table.suits(model=model, job=job, dedicated_only=dedicated_only, floor=floor, run=run)
            self._suits[kind] = mask
        return mask

    def _is_pinned(self, turn: Turn) -> bool:
        """Cut too often: it waits for a dedicated worker, if there is one."""
        return turn.num_reclaims >= self.params.pin_after_reclaims and any(
            worker.tier is Tier.DEDICATED and worker.health is not Health.DEAD for worker in self.fleet
        )

    def _narrow(self, turn: Turn, mask: Mask, at_s: float) -> Mask:
        """``mask`` without workers that cannot hold the turn, or that it backs off from."""
        table = self.fleet.table
        mask = table.fits(mask, num_tokens=turn.num_tokens, need_tokens=turn.need_tokens)
        if turn.spec.only_at:
            row = table.rows.get(turn.spec.only_at)
            mask = mask & False if row is None else mask & (table.numbers[: len(mask)] == row)
        for worker_id, until_s in turn.backoff_until_s.items():
            if until_s > at_s and worker_id in table.rows:
                mask[table.rows[worker_id]] = False
        return self._in_time(turn, mask, at_s) if table.any_ends else mask

    def _in_time(self, turn: Turn, mask: Mask, at_s: float) -> Mask:
        """``mask`` without workers that go back before the turn is expected to have ended."""
        table = self.fleet.table
        worker, resident = self.affinity.where(turn.spec.trajectory_id)
        return table.ends_in_time(
            mask,
            at_s=at_s + self.fleet.params.drain_s,
            num_prompt=turn.num_tokens,
            num_new=turn.expected_tokens,
            resident=(None, 0) if worker is None else (worker.worker_id, min(resident, turn.num_tokens)),
        )

    def _candidate(self, turn: Turn, at_s: float) -> Candidate:
        spec = turn.spec
        affine, resident = self.affinity.where(spec.trajectory_id)
        group_worker, group_tokens = self.affinity.group_worker(spec.group_id)
        return Candidate(
            at_s=at_s,
            num_prompt_tokens=turn.num_tokens,
            expected_tokens=turn.expected_tokens,
            remaining_tokens=self.remaining.tokens(spec.trajectory_id, spec.history),
            drains=self.draining.drains(spec.job),
            affine=affine,
            resident_tokens=min(resident, turn.num_tokens),
            group_worker=group_worker if affine is None else None,
            group_tokens=min(group_tokens, turn.num_tokens),
        )

    def why(self, turn: Turn, at_s: float) -> str:
        """The first thing that keeps the turn from every worker."""
        table = self.fleet.table
        count = len(table)
        model, job, dedicated_only, floor, run = self._class_of(turn)
        mask = table.serves(model, job)
        if not mask.any() and any(worker.model == model for worker in self.fleet):
            return "job"
        mask &= table.max_len[:count] > turn.num_tokens
        if not mask.any():
            return "model"
        if dedicated_only and not (mask & table.dedicated[:count]).any():
            return "pinned" if not turn.spec.dedicated_only else "tier"
        if dedicated_only:
            mask &= table.dedicated[:count]
        if run is not None:
            mask &= table.of_run(run)
            if not mask.any():
                return "run"
        if floor is not None and not (mask & table.at_least(floor)).any():
            return "weights"
        open_ = table.may_run(model=model, job=job, dedicated_only=dedicated_only, floor=floor, run=run)
        open_ = table.fits(open_, num_tokens=turn.num_tokens, need_tokens=turn.need_tokens)
        if open_.any():
            return "backoff" if not table.any_ends or self._in_time(turn, open_, at_s).any() else "ends"
        if dedicated_only and not turn.spec.dedicated_only:
            return "pinned"
        suits = self._suiting((model, job, dedicated_only, floor, run)) & (
            table.max_len[:count] > turn.num_tokens
        )
        if (suits & table.open[:count]).any():
            return "memory"
        return "capacity" if (table.free[:count][suits] <= 0).any() else "closed"

    def upgrade(self) -> None:
        """Complete the state of a decision log from before the queue said what room a turn needs."""
        # Not from its entries, which a compiled build could not even read.
        self.queue[:] = sorted(self._entry(name) for name, turn in self.turns.items() if turn.worker is None)

    def check(self) -> None:
        """The queue is sorted and holds exactly the turns without a worker."""
        assert self.queue == sorted(self._entry(turn_id) for _, turn_id, _ in self.queue)
        waiting = sorted(name for name, turn in self.turns.items() if turn.worker is None)
        assert waiting == sorted(turn_id for _, turn_id, _ in self.queue)
        assert self._fresh <= set(waiting)
