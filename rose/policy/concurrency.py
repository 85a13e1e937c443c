"""How many turns one worker may run at once: additive or multiplicative growth, multiplicative cuts.

=============================================  ==========================  ==================================
signal, in a heartbeat                         harvested                   dedicated
=============================================  ==========================  ==================================
use below 0.6 of the KV budget, limit reached  one turn or 10 % per 5 s    x 1.25 once as many turns ended as the
                                                                           limit, else 10 % per 5 s
use over 0.8                                   no growth                   no growth
use over 0.9                                   down to what fills 0.7, at turn boundaries (nothing is cut)
waiting over half of running, 6 times          x 0.9                       x 0.9
preemptions in the engine                      x 0.8, again at once: down to x 0.5
reclaim                                        x 0.5                       -
=============================================  ==========================  ==================================

It grows only when a heartbeat says that there is room, so stale numbers never grow it.  The limit stays between
1 and the worker's cap, and starts at the cap: without a signal nothing changes.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

GROW_EVERY_S = 5.0
_LOW_USE, _HIGH_USE, _FULL_USE, _TRIM_TO = 0.6, 0.8, 0.9, 0.7
_WAITING_POLLS = 6


@dataclass(kw_only=True, slots=True)
class Concurrency:
    """The limit of one worker; ``cap`` is the configured bound."""

    cap: int
    limit: float
    num_ended: int = 0
    """Turns ended since the limit last grew."""
    grown_at_s: float = 0.0
    num_waiting_polls: int = 0
    num_preemptions: int = 0
    """As last reported; the engine counts since its start."""
    preempted_in_a_row: int = 0

    @classmethod
    def at_cap(cls, cap: int) -> Concurrency:
        return cls(cap=cap, limit=float(cap))

    @property
    def slots(self) -> int:
        return max(1, int(self.limit))

    def heard(
        self,
        *,
        at_s: float,
        harvested: bool,
        kv_use: float | None,
        inflight: int,
        running: int,
        waiting: int,
        num_preemptions: int,
    ) -> None:
        """A heartbeat.  ``kv_use`` is a share of the advertised budget, None where the worker tells none."""
        preempted = num_preemptions > self.num_preemptions
        self.num_preemptions = num_preemptions
        self.preempted_in_a_row = self.preempted_in_a_row + 1 if preempted else 0
        self.num_waiting_polls = self.num_waiting_polls + 1 if waiting > 0.5 * running else 0
        if preempted:
            self._shrink(max(0.8**self.preempted_in_a_row, 0.5))
        elif self.num_waiting_polls >= _WAITING_POLLS:
            self.num_waiting_polls = 0
            self._shrink(0.9)
        elif kv_use is not None and kv_use > _FULL_USE:
            self.limit = max(1.0, min(self.limit, inflight * _TRIM_TO / kv_use))
        elif kv_use is None or kv_use < _LOW_USE:
            self._grow(at_s, harvested, inflight)

    def ended(self) -> None:
        self.num_ended += 1

    def reclaimed(self) -> None:
        self._shrink(0.5)

    def _shrink(self, factor: float) -> None:
        self.limit = max(1.0, self.limit * factor)
        self.num_ended = 0

    def _grow(self, at_s: float, harvested: bool, inflight: int) -> None:
        if inflight < self.slots or self.limit >= self.cap:
            return  # a limit that does not bind says nothing about what the worker could carry
        if not harvested and self.num_ended >= self.limit:
            self.limit = min(float(self.cap), self.limit * 1.25)
        elif at_s - self.grown_at_s >= GROW_EVERY_S:
            self.limit = min(float(self.cap), self.limit + max(1.0, 0.1 * self.limit))
        else:
            return
        self.grown_at_s, self.num_ended = at_s, 0
