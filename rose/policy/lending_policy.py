"""Our policy of lending: headroom by what traffic was measured to need, and growth at a bounded pace.

The books that it keeps with every other policy, and the words, are in :mod:`rose.policy.lending`.

Pure: no I/O, no clock, no randomness, no logging.
"""

from __future__ import annotations

import math
from collections import deque

from rose.policy.cold_cache import ColdCache, ColdCacheParams
from rose.policy.lending import Lending, LendingParams
from rose.policy.lending_events import ALL_PAGES, Action, Event, Phase, RolloutReported, ServingReported


class LendingPolicy(Lending):
    """Ours: by time and by what was measured, not by RL steps.

    - Headroom follows traffic: the larger of a minimum and what demand grew lately within one reclaim.
    - A cut restores the full headroom: the next one is at least ``headroom - watermark`` of growth away.
    - Growth is paced and pauses after cuts, which bounds how often rollouts are preempted.
    - Serving's cold prefixes are lent only while that costs it less than ``max_hit_rate_loss``.

    Why a loan stands where it stands (:attr:`stands_because`, in ``rose node status`` and at the end of a replayed decision log): the
    first of these that holds.  An action's ``reason`` is what changed the loan at that moment.

    ====================================================================================  ==========================================================
    what :attr:`blocked` says                                                             nothing may be lent at all
    serving's use crossed the watermark                                                   or another cut's reason: what it asked for is not back yet
    rollouts want less                                                                    it is all that they have use for
    serving claims pages                                                                  what it waits for is not lent
    less than the reserve of N is free                                                    by the device's own figure
    serving's prompts miss prefixes                                                       :mod:`rose.policy.cold_cache`
    the operator's limit                                                                  ``max_lend_pages``
    serving's demand grew by N pages within one reclaim: so much is kept free for T more  T: ``growth_window_s`` after the burst
    headroom and floor leave no more                                                      no burst is remembered
    serving used N pages within the last T                                                and may again: ``use_window_s``
    serving uses N pages                                                                  and has its headroom beside them
    no growth for T more, after a cut                                                     ``cool_down_s``
    no more than the latest of many cuts left, for T more                                 ``max_cuts`` in ``cut_window_s``
    serving left room                                                                     the loan grows
    ====================================================================================  ==========================================================
    """

    _cache: ColdCache | None = None  # also in the books of a decision log from before there was one
    _headroom: int | None = None
    _cap: int | None = None
    """Answers since the latest event: one decision asks several times."""

    def __init__(self, params: LendingParams | None = None) -> None:
        super().__init__(params)
        self._grown_s = -math.inf
        self._cuts_s: deque[float] = deque(maxlen=self.params.max_cuts)
        self._rest_pages = 0
        """The loan that the latest cut for traffic's sake left: as much as that may be held again at any time."""

    @property
    def need_pages(self) -> int:
        """The most that serving's demand grew within one reclaim, lately."""
        return self._growth.peak_pages(self._now_s, self.reclaim_p99_s)

    @property
    def hysteresis_pages(self) -> int:
        return max(1, math.ceil(self.params.hysteresis_fraction * self.total_pages))

    @property
    def headroom_pages(self) -> int:
        if self._headroom is None:
            minimum = math.ceil(self.params.min_headroom_fraction * self.total_pages)
            self._headroom = max(minimum, self.need_pages + self.hysteresis_pages)
        return self._headroom

    @property
    def cache(self) -> ColdCache | None:
        """What loans cost serving's prefix cache; None while it does not say."""
        return self._cache

    @property
    def cap_pages(self) -> int:
        if self._cap is None:
            cap = super().cap_pages
            self._cap = cap if self._cache is None else min(cap, self._cache.limit_pages)
        return self._cap

    def handle(self, event: Event) -> list[Action]:
        self._headroom = self._cap = None
        return super().handle(event)

    @property
    def watermark_pages(self) -> int:
        return max(self.need_pages, self.headroom_pages // 2)

    @property
    def target_pages(self) -> int:
        """What could be lent now if growth were free; also what mode observe reports as harvestable."""
        serving = self._serving
        if serving is None:
            return 0
        used = max(serving.used_pages, self._used.at(self._now_s))
        target = serving.total_pages - used - self.headroom_pages
        if serving.needed_pages:
            target = min(target, self._unclaimed_pages)
        return max(0, min(target, self.cap_pages))

    @property
    def cool_until_s(self) -> float:
        """No growth before; ``-inf`` when free to grow."""
        return self._cuts_s[-1] + self.params.cool_down_s if self._cuts_s else -math.inf

    @property
    def frozen_until_s(self) -> float:
        """No growth beyond what the latest cut left before; ``-inf`` when free to grow."""
        until_s = self.cool_until_s
        if len(self._cuts_s) == self.params.max_cuts:
            until_s = max(until_s, self._cuts_s[0] + self.params.cut_window_s)
        return until_s

    @property
    def stands_because(self) -> str:
        serving, rollout = self._serving, self._rollout
        if self.blocked is not None or self._promises or serving is None or rollout is None:
            return super().stands_because
        if serving.compute_only or not self._mode.has_serving:
            return super().stands_because
        now_s, lend, target = self._now_s, self.lend_pages, self.target_pages
        if rollout.wanted_pages and self._wanted_pages(serving, rollout) <= lend:
            return "rollouts want less"
        if target < lend + self.hysteresis_pages:
            return self._limited_because(serving)
        if now_s < self.cool_until_s:
            return f"no growth for {_left(self.cool_until_s - now_s)} more, after a cut"
        if now_s < self.frozen_until_s and self._rest_pages <= lend:
            left = _left(self.frozen_until_s - now_s)
            return f"no more than the latest of many cuts left, for {left} more"
        return "serving left room"

    def _limited_because(self, serving: ServingReported) -> str:
        """What keeps the loan from being larger, where nothing could be added."""
        now_s, cap, used = self._now_s, self.cap_pages, serving.used_pages
        if serving.needed_pages and self._unclaimed_pages <= min(cap, self.total_pages - used):
            return "serving claims pages"
        lately = max(used, self._used.at(now_s))
        room = self.total_pages - lately - self.headroom_pages
        if room >= cap:
            if cap == self._device_limit:
                return self._short_because
            if self._cache is not None and cap == self._cache.limit_pages < self._memory_pages:
                return "serving's prompts miss prefixes"
            if cap == self._mode.max_lend_pages:
                return "the operator's limit"
        kept = self.headroom_pages - math.ceil(self.params.min_headroom_fraction * self.total_pages)
        if self.need_pages and kept > 0 and kept >= lately:
            left = _left(self._growth.forgotten_s(now_s, self.reclaim_p99_s) - now_s)
            return f"serving's demand grew by {self.need_pages} pages within one reclaim: so much is kept free for {left} more"
        if room >= cap:
            return "headroom and floor leave no more"
        if lately > used:
            return f"serving used {lately} pages within the last {_left(self.params.use_window_s)}"
        return f"serving uses {used} pages"

    def check(self) -> None:
        super().check()
        if self._cache is not None:
            self._cache.check()
        serving = self._serving
        if serving is not None and self.lend_pages and not serving.compute_only:
            assert serving.total_pages - serving.used_pages - self.lend_pages >= self.watermark_pages
            assert not serving.needed_pages or self.lend_pages <= self._unclaimed_pages
        assert self.watermark_pages < self.headroom_pages or self.total_pages == 0

    @property
    def _unclaimed_pages(self) -> int:
        """What serving leaves while it claims memory."""
        serving = self._serving
        if serving is None:
            return 0
        return max(0, serving.total_pages - serving.needed_pages)

    def _wanted_pages(self, serving: ServingReported, rollout: RolloutReported) -> int:
        """What the rollout engine has use for, of one that says it."""
        # Never below what is held: a smaller wish is no cut.  In whole chunks: of a loan of less serving lends nothing, and takes back what is held.
        wanted = max(rollout.wanted_pages, rollout.reserved_pages)
        return -(-wanted // serving.chunk_pages) * serving.chunk_pages

    def _decide(self) -> tuple[int, str]:
        serving, rollout = self._serving, self._rollout
        assert serving is not None
        assert rollout is not None
        now_s, lend, target = self._now_s, self.lend_pages, self.target_pages
        if serving.needed_pages and lend > self._unclaimed_pages:
            return target, "serving claims pages"
        if lend > self.cap_pages:
            if self._cache is not None and lend > self._cache.limit_pages:
                return target, "serving's prompts miss prefixes"
            if self.cap_pages == self._mode.max_lend_pages:
                return target, "the operator's limit"
            return target, "headroom and floor leave no more"
        if lend and serving.total_pages - serving.used_pages - lend < self.watermark_pages:
            return target, "serving's use crossed the watermark"
        wanted = ALL_PAGES
        if rollout.wanted_pages:
            # Lending what nobody uses would cost serving its prefix cache.
            wanted = self._wanted_pages(serving, rollout)
            target = min(target, wanted)
            if wanted + self.hysteresis_pages <= lend:
                return wanted, "rollouts want less"
        if target < lend + self.hysteresis_pages and target < min(self.cap_pages, wanted):
            return lend, self.reason
        if now_s < self.frozen_until_s:
            target = min(target, self._rest_pages)
        if (
            target <= lend
            or self._promises
            or now_s < self.cool_until_s
            or now_s < self._grown_s + self.params.grow_period_s
        ):
            return lend, self.reason
        self._grown_s = now_s
        step = max(1, math.ceil(self.params.grow_step_fraction * serving.total_pages))
        return min(target, lend + step), "serving left room"

    def take_over(self, other: Lending) -> None:
        super().take_over(other)
        self._headroom = self._cap = None
        if isinstance(other, LendingPolicy):
            self._cache = other._cache

    def _on_serving(self, event: ServingReported, before: ServingReported | None) -> None:
        if not event.alive or event.phase != Phase.READY:
            return
        self._see_cache(event)
        if before is not None and event.pressure_seq != before.pressure_seq and self.held_pages:
            self._count_cut()  # serving took pages back by itself, without waiting for us

    def _see_cache(self, event: ServingReported) -> None:
        if not event.queried_tokens or event.compute_only:
            self._cache = None
            return
        cache, total = self._cache, event.total_pages
        queried, lost = event.queried_tokens, event.lost_tokens
        if cache is None or not cache.continues(num_pages=total, queried_tokens=queried, lost_tokens=lost):
            params = ColdCacheParams(max_loss_fraction=self.params.max_hit_rate_loss)
            cache = self._cache = ColdCache(total, params)
        lent = max(0, total - event.reserved_pages)
        cache.see(
            event.at_s,
            queried_tokens=queried,
            lost_tokens=lost,
            lent_pages=lent,
            cold_pages=min(event.cold_pages, lent),
        )

    def _on_cut(self) -> None:
        if self.blocked is None:  # what an operator or a restart takes back says nothing about traffic
            self._rest_pages = self.lend_pages
            self._count_cut()

    def _count_cut(self) -> None:
        """Note one; what serving reports and what we ask for within one deadline are the same cut."""
        if self._cuts_s and self._now_s - self._cuts_s[-1] < self.reclaim_deadline_s:
            return
        self._cuts_s.append(self._now_s)


def _left(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{math.ceil(seconds)} s"
