"""Decide how many KV pages the serving engine of one device lends to rollouts.

Serving owns the device.  It lends the pages its own traffic does not need and takes them back the moment
that traffic needs them.  This module decides *how many* are on loan, until when a cut must be obeyed, and
when an engine that does not obey must die; it never moves a page.

Main path: :meth:`Lending.handle` takes one event, updates the books, and returns the actions that make the
world agree with them.  The node agent, the simulator and the tests call that one method.  The rollout
engine itself calls :func:`rose.policy.coserving.rollout.allowed_pages`, so that it gives memory back even when the agent is dead.

Words.  *Headroom*: pages kept free above serving's use.  *Need*: the most that use has lately grown within
one reclaim (notice, cut, kill included).  *Watermark*: the part of the headroom that must still be there
when a cut starts; at least the need.  A *cut* is a smaller loan than the rollout engine holds.  It is *due* from the moment that
serving could come to wait for it: its deadline runs, and after half of it the engine is lifted to a normal share.  A cut ahead of need is obeyed
in time that nobody else wants: lifted, the engine would take the processor from the very burst that the cut is for (13 prompts
0.1 to 0.2 s late on one core, while 28 of 96 pages were free).

Invariants, after every event, asserted by :meth:`Lending.check`:

1. ``0 <= lend <= max(0, total - floor - headroom)``, and at most what the operator allows.
2. Nothing is lent unless the mode is on, serving is ready and not silent, and the rollout engine is ready.  Where the device is
   asked how much memory it has free, nothing is lent unless it answers.  (On a device without serving only the rollout engine
   has to be ready, and everything is lent.)
3. (:class:`LendingPolicy`) a loan leaves serving its watermark: ``lend == 0`` or
   ``total - used - lend >= watermark``; and it is at most what serving's prefix cache can do without
   (``rose.policy.cold_cache``).
4. When the device has less memory free than its reserve, the loan becomes at most what was held minus what is missing.  It stays
   so limited until the device has its reserve and a margin free.

Pace: a loan shrinks at once.  It grows at most one step per period, not while a cut is unanswered, not
within the cool-down after a cut, and, when the last minute already had its share of cuts, not beyond what the
latest of them left.

Pure: no I/O, no clock, no randomness, no logging.  Time arrives as ``at_s``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace
from operator import attrgetter

from rose.errors import ConfigError, PolicyError
from rose.policy import deadlines
from rose.policy.growth import PeakGrowth, WindowMax
from rose.policy.lending_events import (
    ALL_PAGES,
    Action,
    Event,
    KillRollout,
    Mode,
    ModeSet,
    Phase,
    RlStepStarted,
    RolloutReported,
    ServingReported,
    SetLend,
    Tick,
)
from rose.units import NS_PER_S, PAGE_BYTES, format_bytes

DEAD_AFTER_S = 2.0
"""Silence after which a peer counts as gone; four heartbeats."""
_MAX_RECLAIM_SAMPLES = 128
_FEW_RECLAIM_SAMPLES = 20
"""From this many observed reclaims on the p99 is theirs."""
_SOME_RECLAIM_SAMPLES = 5
"""From so many on it is twice the longest; before, the worst case."""
_MAX_PROMISES = 64
_RESERVE_MARGIN = 0.25
"""Of the reserve, above it, before a loan that was cut for its sake may grow again."""


_COUNTS: dict[type, tuple[str, ...]] = {
    ModeSet: ("floor_pages", "max_lend_pages"),
    ServingReported: (
        "total_pages",
        "reserved_pages",
        "used_pages",
        "needed_pages",
        "queried_tokens",
        "lost_tokens",
        "cold_pages",
    ),
    RolloutReported: ("reserved_pages", "wanted_pages"),
}
_COUNTS_OF = {cls: attrgetter(*names) for cls, names in _COUNTS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class LendingParams:
    """Fractions are of the device's pages.

    Raises:
        ConfigError: A value out of range; nothing is corrected silently.
    """

    min_headroom_fraction: float = 0.1
    growth_window_s: float = 3600.0
    """How long a burst is remembered: one that comes back after it was forgotten costs production a reclaim."""
    use_window_s: float = 30.0
    """A page that serving used within it is not lent: requests come and go, and each dip would end in a cut."""
    reclaim_deadline_s: float | None = 0.1
    """None: by what was measured (:mod:`rose.policy.deadlines`); as is the next."""
    backstop_s: float | None = 0.5
    """From the kill to usable memory."""
    period_s: float = 0.05
    """How late the caller may notice; part of every reclaim."""
    grow_period_s: float = 0.5
    grow_step_fraction: float = 0.2
    hysteresis_fraction: float = 0.02
    """A loan does not grow for less."""
    cool_down_s: float = 2.0
    max_cuts: int = 4
    cut_window_s: float = 60.0
    """After ``max_cuts`` cuts within it a loan grows no further than the latest of them left it."""
    dead_after_s: float = DEAD_AFTER_S
    max_hit_rate_loss: float = 0.01
    """Of the tokens that serving's prompts query in its prefix cache; see :mod:`rose.policy.cold_cache`."""

    def __post_init__(self) -> None:
        for name in (
            "min_headroom_fraction",
            "grow_step_fraction",
            "hysteresis_fraction",
            "max_hit_rate_loss",
        ):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0:
                raise ConfigError(f"{value} is not in (0, 1]", field=name)
        for name in (
            "growth_window_s",
            "use_window_s",
            "reclaim_deadline_s",
            "backstop_s",
            "period_s",
            "grow_period_s",
            "cool_down_s",
            "cut_window_s",
            "dead_after_s",
        ):
            value = getattr(self, name)
            if value is None and name in ("reclaim_deadline_s", "backstop_s"):
                continue  # by what is measured
            if value is None or not (0.0 < value < math.inf):
                raise ConfigError(f"{value} is not a positive number", field=name)
        if self.max_cuts < 1:
            raise ConfigError(f"{self.max_cuts} is not positive", field="max_cuts")


@dataclass(slots=True)
class _Promise:
    """The rollout engine was told to hold at most ``pages``, until ``deadline_s`` once that is due."""

    pages: int
    due_s: float | None
    """Since when serving may come to wait for it; None: not yet."""
    deadline_s: float = math.inf
    killed_s: float | None = None


class Lending(ABC):
    """The books of one device, and what every policy shares: liveness, deadlines, kills.

    Subclasses decide the size of the loan in :meth:`_decide`.
    """

    # Here, so that the books of a decision log from before they existed have them.
    _device: Tick | None = None
    _device_silent: bool = False
    _device_limit: int | None = None
    num_reserve_breaches: int = 0
    _told: bool = False
    """The latest event is the operator's word."""
    _steps_ns: WindowMax | None = None
    _exit_s: float = 0.0
    _p99_s: float | None = None
    """Answer of :attr:`reclaim_p99_s`; None: ask the samples."""

    def __init__(self, params: LendingParams | None = None) -> None:
        self.params = params or LendingParams()
        self.lend_pages: int = 0
        self.reason = "mode is off"
        self.num_cuts = 0
        self._now_s = -math.inf
        self._mode = ModeSet(at_s=0.0, mode=Mode.OFF)
        self._serving: ServingReported | None = None
        self._rollout: RolloutReported | None = None
        self._promises: list[_Promise] = []
        self._reclaims_s: deque[float] = deque(maxlen=_MAX_RECLAIM_SAMPLES)
        self._growth = PeakGrowth(self.params.growth_window_s)
        self._used = WindowMax(self.params.use_window_s)
        self._steps_ns = WindowMax(deadlines.STEP_WINDOW_S)

    def handle(self, event: Event) -> list[Action]:
        """Take one event; the actions it calls for, in order.

        Raises:
            PolicyError: Time went backwards, or a count is negative.  The books are unchanged.
        """
        self._refuse_nonsense(event)
        self._now_s = event.at_s
        match event:
            case ModeSet():
                self._mode = event
            case ServingReported():
                served, self._serving = self._serving, event
                self._note_growth(event)
                self._on_serving(event, served)
            case RolloutReported():
                rolled, self._rollout = self._rollout, event
                self._note_times(event)
                self._on_rollout(event, rolled)
            case RlStepStarted():
                self._on_rl_step()
            case Tick():
                self._see_device(event)
        self._told = isinstance(event, ModeSet)
        return [*self._settle(), *self._resize(), *self._hasten()]

    def take_over(self, other: Lending) -> None:
        """Go on from the books of the policy that ruled before; its loan stands where this one's limits allow.

        What is beyond them is a cut like any other: the next event asks for it, with a deadline.
        """
        self._now_s, self._mode = other._now_s, other._mode
        self._serving, self._rollout = other._serving, other._rollout
        self._promises, self._reclaims_s = other._promises, other._reclaims_s
        self._growth, self._used = other._growth, other._used
        self._steps_ns, self._exit_s = other._steps_ns, other._exit_s
        self._p99_s = None
        self.num_cuts, self.reason = other.num_cuts, other.reason
        self._device, self._device_silent = other._device, other._device_silent
        self._device_limit = other._device_limit
        self.num_reserve_breaches = other.num_reserve_breaches
        self.lend_pages = other.lend_pages

    @property
    def reclaim_deadline_s(self) -> float:
        """What the rollout engine has to obey a cut that is asked for now."""
        step_ns = self._steps_ns.at(self._now_s) if self._steps_ns is not None else 0
        return deadlines.reclaim_s(step_ns / NS_PER_S, self.params.reclaim_deadline_s)

    @property
    def backstop_s(self) -> float:
        """From its kill to usable memory."""
        return deadlines.backstop_s(self._exit_s, self.params.backstop_s)

    @property
    def worst_reclaim_s(self) -> float:
        """A cut that is not obeyed, and the kill."""
        return self.reclaim_deadline_s + self.backstop_s

    @property
    def held_pages(self) -> int:
        """What the rollout engine holds, as far as we know."""
        return self._rollout.reserved_pages if self._rollout is not None else 0

    @property
    def total_pages(self) -> int:
        return self._serving.total_pages if self._serving is not None else 0

    @property
    def reclaim_p99_s(self) -> float:
        """From the moment that a cut is due to usable pages, notice included; the worst case until enough was observed."""
        if self._p99_s is None:
            samples = sorted(self._reclaims_s)
            if len(samples) < _SOME_RECLAIM_SAMPLES:
                observed = max([self.worst_reclaim_s, *samples])
            elif len(samples) < _FEW_RECLAIM_SAMPLES:
                observed = min(max(self.worst_reclaim_s, samples[-1]), deadlines.MARGIN * samples[-1])
            else:
                observed = samples[math.ceil(0.99 * len(samples)) - 1]
            self._p99_s = observed + self.params.period_s
        return self._p99_s

    @property
    def is_urgent(self) -> bool:
        """Does production wait for what the rollout engine still holds, or may it soon?

        A cut that is due and that nobody waits for yet gets half of its time in the idle class: mostly there is a gap long enough.
        """
        held = self.held_pages
        if not held:
            return False
        if self.blocked is not None or self._claims_held:
            return True
        return any(
            promise.due_s is not None
            and held > promise.pages
            and 2 * self._now_s >= promise.due_s + promise.deadline_s
            for promise in self._promises
        )

    @property
    def _claims_held(self) -> bool:
        """Does serving claim pages that the rollout engine holds?"""
        serving = self._serving
        if serving is None or serving.compute_only or not serving.needed_pages:
            return False
        return self.held_pages > serving.total_pages - serving.needed_pages

    @property
    def _rush_s(self) -> float:
        """What a cut takes that is due, as far as is known."""
        longest_s = max(self._reclaims_s, default=0.0)
        guess_s = deadlines.MARGIN * longest_s if longest_s else deadlines.UNMEASURED_RECLAIM_S
        return min(self.reclaim_p99_s, guess_s + self.params.period_s)

    @property
    def _is_due(self) -> bool:
        """Must what is held beyond the loan come back now?  Not while what is free lasts for as long as that would take."""
        serving = self._serving
        if self._told or self._device_limit is not None or self.blocked is not None or self._claims_held:
            return True
        if serving is None or serving.compute_only or not self._mode.has_serving:
            return True
        free = serving.total_pages - serving.used_pages - self.held_pages
        return free < max(1, self._growth.peak_pages(self._now_s, self._rush_s))

    @property
    @abstractmethod
    def headroom_pages(self) -> int: ...

    @property
    def short_of_reserve(self) -> bool:
        """Has the device, or had it a moment ago, less free than its reserve?"""
        return self._device_limit is not None

    @property
    def cap_pages(self) -> int:
        """What could be lent at most, to an idle serving engine's peer."""
        limit = self._device_limit
        return self._memory_pages if limit is None else min(limit, self._memory_pages)

    @property
    def _memory_pages(self) -> int:
        """What the sizes of the device leave."""
        if not self._mode.has_serving:
            return self._mode.max_lend_pages
        if self._serving is not None and self._serving.compute_only:
            # Without a number from the operator nobody knows what the device has left.
            return self._mode.max_lend_pages if self._mode.max_lend_pages < ALL_PAGES else 0
        cap = self.total_pages - self._mode.floor_pages - self.headroom_pages
        return max(0, min(cap, self._mode.max_lend_pages))

    @property
    def blocked(self) -> str | None:
        """Why nothing may be lent now; None when something may."""
        serving, rollout, now_s = self._serving, self._rollout, self._now_s
        if self._mode.mode != Mode.ON:
            return "mode is observe" if self._mode.mode == Mode.OBSERVE else "mode is off"
        if self._mode.has_serving:
            if serving is None or not serving.alive:
                return "serving is not there"
            if now_s - serving.at_s > self.params.dead_after_s:
                return "serving is silent"
            if serving.phase != Phase.READY:
                return "serving is starting" if serving.phase == Phase.STARTING else "serving does not share"
        if rollout is None or not rollout.alive or rollout.phase != Phase.READY:
            return "rollout engine is not ready"
        if self._device_silent:
            return "the device does not say what it has free"
        return None

    @property
    def _short_because(self) -> str:
        reserve = self._device.device_reserve_bytes if self._device is not None else 0
        return f"less than the reserve of {format_bytes(reserve)} is free"

    @property
    def stands_because(self) -> str:
        """Why the loan is what it is, by what holds now; :attr:`reason` is what changed it last."""
        return self.blocked or self.reason

    def check(self) -> None:
        """Assert the invariants of the module."""
        assert 0 <= self.lend_pages <= self.cap_pages
        assert self.lend_pages == 0 or self.blocked is None
        # Promises get stricter one after the other, and none asks for more than the loan allows.
        pages = [promise.pages for promise in self._promises]
        assert pages == sorted(pages, reverse=True)
        assert all(page >= self.lend_pages for page in pages)
        assert len(pages) <= _MAX_PROMISES
        device = self._device
        if device is not None and device.device_free_bytes is not None:
            short = device.device_free_bytes < device.device_reserve_bytes
            assert not short or self._device_limit is not None

    @abstractmethod
    def _decide(self) -> tuple[int, str]:
        """The loan that should be, and why; called only when nothing blocks it."""

    def _note_growth(self, event: ServingReported) -> None:
        # In every mode and under every policy: who learns only while lending learns from the first burst's victims.
        if not event.alive or event.phase != Phase.READY:
            self._growth.forget_recent()
            return
        demand = max(event.used_pages, event.needed_pages)
        # Also what rose within longer than a reclaim takes now: the next may be slower.
        self._growth.add(event.at_s, demand, max(self.reclaim_p99_s, self.worst_reclaim_s))
        self._used.add(event.at_s, event.used_pages)

    def _on_serving(self, event: ServingReported, before: ServingReported | None) -> None:
        """Look at a report that is already in the books."""
        return

    def _on_rl_step(self) -> None:
        """Look at the start of an RL step."""
        return

    def _see_device(self, event: Tick) -> None:
        """Hold the device's own figure against its reserve.

        The limit is on what is *held*: memory that was lent and not yet taken does not count as used, here as there.  It
        only falls while the device is short, so what is on its way back is not asked for twice.
        """
        free, reserve = event.device_free_bytes, event.device_reserve_bytes
        if free is None:
            last = self._device
            if reserve:  # it was asked; that a while has passed without asking says nothing
                self._device_silent = last is None or event.at_s - last.at_s > self.params.dead_after_s
            return
        self._device, self._device_silent = event, False
        if free < reserve:
            if self._device_limit is None:
                self.num_reserve_breaches += 1
            left = max(0, self.held_pages - math.ceil((reserve - free) / PAGE_BYTES))
            self._device_limit = left if self._device_limit is None else min(left, self._device_limit)
        elif free >= reserve * (1.0 + _RESERVE_MARGIN):
            self._device_limit = None

    def _note_times(self, event: RolloutReported) -> None:
        if event.step_s > 0 and self._steps_ns is not None:
            self._steps_ns.add(event.at_s, round(event.step_s * NS_PER_S))
        longer = event.exit_s > self._exit_s
        self._exit_s = max(self._exit_s, event.exit_s)
        if self.params.reclaim_deadline_s is None or (longer and self.params.backstop_s is None):
            self._p99_s = None

    def _on_cut(self) -> None:
        """A cut is being asked for."""
        return

    def _on_rollout(self, event: RolloutReported, before: RolloutReported | None) -> None:
        kept: list[_Promise] = []
        for promise in self._promises:
            if event.reserved_pages > promise.pages:
                kept.append(promise)
            elif promise.due_s is not None:
                took_s = event.at_s - promise.due_s
                # A kill is counted in full: that it went fast this time is no promise for the next.
                least_s = 0.0 if promise.killed_s is None else self.worst_reclaim_s
                self._reclaims_s.append(max(took_s, least_s))
                self._p99_s = None
        if not kept and event.reserved_pages > self.lend_pages:
            # It holds more than it was ever allowed (we restarted, or it misbehaves): it gets one deadline.
            kept.append(self._promise(self.lend_pages))
        self._promises = kept

    def _promise(self, pages: int) -> _Promise:
        promise = _Promise(pages=pages, due_s=None)
        if self._is_due:
            self._fall_due(promise)
        return promise

    def _fall_due(self, promise: _Promise) -> None:
        promise.due_s = self._now_s
        promise.deadline_s = self._now_s + self.reclaim_deadline_s

    def _hasten(self) -> list[Action]:
        """Cuts ahead of need that have become needed."""
        waiting = [promise for promise in self._promises if promise.due_s is None]
        if not waiting or not self._is_due:
            return []
        for promise in waiting:
            self._fall_due(promise)
        return [SetLend(pages=self.lend_pages, deadline_s=waiting[-1].deadline_s, reason=self.reason)]

    def _settle(self) -> list[Action]:
        """Kill for the first promise that is past its deadline, and again if that brought nothing."""
        for promise in self._promises:
            if self._now_s <= promise.deadline_s:
                continue
            if promise.killed_s is not None and self._now_s - promise.killed_s < self.backstop_s:
                return []
            promise.killed_s = self._now_s
            late_s = self._now_s - promise.deadline_s
            reason = (
                f"{self.held_pages} pages held, {promise.pages} allowed, {late_s:.3f} s past the deadline"
            )
            return [KillRollout(reason=reason)]
        return []

    def _resize(self) -> list[Action]:
        blocked = self.blocked
        if blocked is not None:
            pages, reason = 0, blocked
        elif not self._mode.has_serving:
            pages, reason = self.cap_pages, "no serving on this device"
        elif self._serving is not None and self._serving.compute_only:
            pages, reason = self.cap_pages, "compute only: a fixed budget"
        else:
            pages, reason = self._decide()
        pages = max(0, min(pages, self.cap_pages))
        if pages == self.lend_pages:
            return []
        if blocked is None and pages == self._device_limit:
            reason = self._short_because
        shrinks = pages < self.lend_pages
        self.lend_pages, self.reason = pages, reason
        deadline_s = None
        if shrinks and self.held_pages > pages:
            promise = self._promise(pages)
            deadline_s = promise.deadline_s if promise.due_s is not None else None
            if len(self._promises) == _MAX_PROMISES:
                # The older deadline for the stricter number: the list stays short and errs to serving's side.
                promise = replace(self._promises.pop(), pages=pages)
            self._promises.append(promise)
            self.num_cuts += 1
            self._on_cut()
        return [SetLend(pages=pages, deadline_s=deadline_s, reason=reason)]

    def _refuse_nonsense(self, event: Event) -> None:
        if not math.isfinite(event.at_s) or event.at_s < self._now_s:
            raise PolicyError(f"{event.at_s} s after {self._now_s} s", field="at_s")
        counts_of = _COUNTS_OF.get(type(event))
        if counts_of is not None and min(counts_of(event)) < 0:
            for name, value in zip(_COUNTS[type(event)], counts_of(event), strict=True):
                if value < 0:
                    raise PolicyError(f"{value} is negative", field=name)
        if isinstance(event, RolloutReported):
            for name in ("step_s", "exit_s"):
                if not 0.0 <= getattr(event, name) < math.inf:
                    raise PolicyError(f"{getattr(event, name)} is not a duration", field=name)
        if isinstance(event, Tick):  # one of its counts may be missing
            for name in ("device_free_bytes", "device_reserve_bytes"):
                value = getattr(event, name)
                if value is not None and value < 0:
                    raise PolicyError(f"{value} is negative", field=name)
