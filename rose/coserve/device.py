"""What the engines of one device say in their shared files, as the node agent sees it.

Reads; writes nothing, decides nothing, and takes no lock.  :meth:`DeviceView.look` is one look at all three records;
what a policy is told of it are :meth:`~DeviceView.serving_event` and :meth:`~DeviceView.rollout_event`.
:class:`FreeFigure` is the third witness: the device itself.  A damaged file
counts as a dead writer's, and is recorded once.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any, TypeVar

from rose.coserve.free_memory import FreeMemory, HostMemory
from rose.coserve.ledger import RecordReader
from rose.coserve.node_dir import NodeDir, RankReaders
from rose.coserve.record_layout import unpack_found
from rose.coserve.records import Phase, RolloutLease, ServingBoard, ServingLease
from rose.errors import LedgerError
from rose.policy.admission import BoardView, slack
from rose.policy.compat import Support
from rose.policy.coserving import timing
from rose.policy.lending_events import RolloutReported, ServingReported, Tick
from rose.units import NS_PER_S

logger = logging.getLogger("rose.node")

R = TypeVar("R")
_FREE_EVERY_S = 0.04
"""How often, at most, the device is asked what it has free: reading it costs about 0.1 ms."""


class DeviceView:
    """One look after the other.

    Args:
        errors: Where a file that cannot be read is named; the agent's own.

    Attributes:
        lease, board, rollout: As last read; None before there was one.
        serving_seen, rollout_seen: Did the writers live at the last :meth:`look`?
    """

    def __init__(self, directory: NodeDir, errors: dict[str, str]) -> None:
        self._errors = errors
        self._workers = RankReaders(directory, "rollout")
        self.lease: ServingLease | None = None
        self.board: ServingBoard | None = None
        self.rollout: RolloutLease | None = None
        self.serving_seen = self.rollout_seen = False
        self._lease_file = directory.serving_lease()
        self._board_file = directory.serving_board()
        self._rollout_file = directory.rollout_lease()
        self._chunks_file = directory.chunks("serving")

    def look(self) -> None:
        """Read the three records anew."""
        self.lease, lease_alive = self._read(self._lease_file, self.lease)
        self.board, board_alive = self._read(self._board_file, self.board)
        self.rollout, self.rollout_seen = self._read(self._rollout_file, self.rollout)
        self._workers.met()
        self.serving_seen = lease_alive and board_alive

    def serving_alive(self) -> bool:
        """Does production live, now?"""
        return _alive(self._lease_file)

    def serving_is_there(self) -> bool:
        """:meth:`serving_alive`, of a lease that cannot be read, too."""
        return self._lease_file.may_live()

    def rollout_alive(self) -> bool:
        return _alive(self._rollout_file)

    def found(self) -> str:
        """What of production's configuration its row of the compatibility table was found by; empty where it did not say."""
        try:
            return unpack_found(self._lease_file.extra)
        except LedgerError:
            return ""

    def serving_event(self, dead_after_s: float) -> ServingReported | None:
        """The last look as the lending policy wants it; None where there is no lease."""
        lease, board = self.lease, self.board or ServingBoard()
        if lease is None:
            return None
        return ServingReported(
            at_s=time.monotonic(),
            alive=self.serving_seen and age_s(lease.heartbeat_ns) <= dead_after_s,
            phase=lease.phase,
            total_pages=max(0, lease.total_pages),
            reserved_pages=max(0, lease.reserved_pages),
            used_pages=max(0, board.used_pages),
            needed_pages=max(0, board.needed_pages),
            pressure_seq=board.pressure_seq,
            compute_only=lease.support == Support.COMPUTE_ONLY,
            queried_tokens=max(0, lease.queried_tokens),
            lost_tokens=max(0, lease.lost_tokens),
            cold_pages=max(0, lease.cold_pages),
            chunk_pages=self._chunk_pages(max(0, lease.total_pages)),
        )

    def rollout_event(self, exit_s: float = 0.0) -> RolloutReported:
        """What the engine holds.  Of one whose core is gone: what its workers have, until they are gone too.

        Args:
            exit_s: See :class:`RolloutReported`.
        """
        if not self.rollout_seen or self.rollout is None:
            left = max(self.resident_pages().values(), default=0)
            now_s = time.monotonic()
            return RolloutReported(
                at_s=now_s, alive=False, phase=Phase.ABSENT, reserved_pages=left, exit_s=exit_s
            )
        lease = self.rollout
        return RolloutReported(
            at_s=time.monotonic(),
            alive=True,
            phase=lease.phase,
            reserved_pages=max(0, lease.reserved_pages),
            wanted_pages=max(0, lease.wanted_pages),
            reclaim_seq=lease.reclaim_seq,
            step_s=max(0, lease.step_ns) / NS_PER_S,
            exit_s=exit_s,
        )

    def _chunk_pages(self, total_pages: int) -> int:
        """Of which production lends whole ones; 1 where it does not say.  It has a mark for each."""
        try:
            num_chunks = self._chunks_file.extra_bytes if self._chunks_file.alive() else 0
        except LedgerError:
            num_chunks = 0
        return max(1, total_pages // num_chunks) if num_chunks else 1

    def held_pages(self) -> int:
        """Pages of the rollout engine: reserved, or still resident in one of its workers."""
        reserved = self.rollout.reserved_pages if self.rollout is not None and self.rollout_alive() else 0
        # Asked also where the engine core is dead or its file damaged: workers hold memory by themselves.
        return max(reserved, sum(self.resident_pages().values()))

    def resident_pages(self) -> dict[int, int]:
        """What each live worker of the rollout engine holds, by its file (``rose.coserve.audit`` asks the kernel, too)."""
        records = self._workers.records()
        return {rank: max(0, record.resident_pages) for rank, record in records.items()}

    def slack_s(self) -> float | None:
        """Until production's next deadline; None where it has none."""
        board = self.board
        if board is None or not _alive(self._board_file):
            return None
        view = BoardView(
            busy=bool(board.busy),
            running=board.running,
            waiting=board.waiting,
            ttft_deadline_s=board.ttft_deadline_ns / NS_PER_S if board.ttft_deadline_ns else None,
            tpot_deadline_s=board.tpot_deadline_ns / NS_PER_S if board.tpot_deadline_ns else None,
            step_started_s=board.step_started_ns / NS_PER_S,
            step_s=board.step_ns / NS_PER_S,
        )
        if view.idle:
            return None
        value, _ = slack(time.monotonic(), view, 0.0)
        return value if math.isfinite(value) else None

    def _read(self, file: RecordReader[R], last: R | None) -> tuple[R | None, bool]:
        """The record and whether its writer lives."""
        name = file.path.name
        try:
            record = file.read()
            alive = record is not None and file.alive()
        except LedgerError as error:
            if self._errors.get(name) != str(error):
                logger.error("%s", error)
            self._errors[name] = str(error)
            return last, False
        self._errors.pop(name, None)
        return record, alive


class FreeFigure:
    """What the device itself says it has free, beside the reserve that the lending policy holds it against.

    Args:
        errors: Where a device that does not say is named.

    Attributes:
        memory: Who is asked; main memory unless the agent says otherwise.
        num_bytes: The last answer; None before there was one.
    """

    def __init__(self, reserve_bytes: int, errors: dict[str, str]) -> None:
        self.reserve_bytes, self._errors = reserve_bytes, errors
        self.memory: FreeMemory = HostMemory()
        self.num_bytes: int | None = None
        self._asked_s = -math.inf

    def tick(self, now_s: float) -> Tick:
        """Time has passed; with what is free now, unless that was asked a moment ago or nobody answers."""
        if now_s - self._asked_s < _FREE_EVERY_S:
            return Tick(at_s=now_s)
        try:
            self.num_bytes = self.memory.free_bytes()
        except LedgerError as error:  # the policy ends the lending when this goes on
            if self._errors.get("device") != str(error):
                logger.error("%s", error)
            self._errors["device"] = str(error)
            return Tick(at_s=now_s, device_reserve_bytes=self.reserve_bytes)
        self._asked_s = now_s
        self._errors.pop("device", None)
        return Tick(at_s=now_s, device_free_bytes=self.num_bytes, device_reserve_bytes=self.reserve_bytes)


def age_s(at_ns: int) -> float:
    """Seconds since a CLOCK_MONOTONIC stamp; a stamp from the future is as wrong as one from long ago."""
    return timing.age_s(at_ns / NS_PER_S, time.monotonic_ns() / NS_PER_S)


def _alive(file: RecordReader[Any]) -> bool:
    try:
        return file.alive()
    except LedgerError:
        return False
