"""Lending policies to compare ours with: the published one, and a fixed split.

Same events, same actions, same books (:class:`rose.policy.lending.Lending`); only the size of the loan is decided
differently.  ``rose node set --policy paper`` puts one in force on a live device.

Pure, as everything in this package.
"""

from __future__ import annotations

import math

from rose.errors import ConfigError
from rose.policy.lending import Lending, LendingParams
from rose.policy.lending_policy import LendingPolicy

POLICIES = ("rose", "paper", "static")


def make_lending(name: str, params: LendingParams | None = None) -> Lending:
    """The policy of that name.

    Raises:
        ConfigError: There is none.
    """
    match name:
        case "rose":
            return LendingPolicy(params)
        case "paper":
            return PaperLending(params)
        case "static":
            return StaticLending(params)
        case _:
            raise ConfigError(f"'{name}' is not one of {', '.join(POLICIES)}", field="lending.policy")


class PaperLending(Lending):
    """The published policy, for comparison: a fixed headroom, cut by half, frozen until the next RL step.

    When serving's free pages fall below half the headroom, the loan is halved, once per crossing; it grows
    again only when an RL step starts, and then at once to all that the headroom leaves.
    """

    def __init__(self, params: LendingParams | None = None, headroom_fraction: float = 0.2) -> None:
        super().__init__(params)
        if not 0.0 < headroom_fraction < 1.0:
            raise ConfigError(f"{headroom_fraction} is not in (0, 1)", field="headroom_fraction")
        self._headroom_fraction = headroom_fraction
        self._frozen = False
        self._crossed = False

    @property
    def headroom_pages(self) -> int:
        return math.ceil(self._headroom_fraction * self.total_pages)

    def _on_rl_step(self) -> None:
        self._frozen = False

    def _decide(self) -> tuple[int, str]:
        serving = self._serving
        assert serving is not None
        free = serving.total_pages - serving.used_pages - self.lend_pages
        below = free < self.headroom_pages // 2
        if below and not self._crossed and self.lend_pages:
            self._crossed = self._frozen = True
            return self.lend_pages // 2, "serving's use crossed the watermark"
        self._crossed = below
        target = max(0, min(self.cap_pages, serving.total_pages - serving.used_pages - self.headroom_pages))
        if self.lend_pages > self.cap_pages:
            limited = self.cap_pages == self._mode.max_lend_pages
            return self.cap_pages, "the operator's limit" if limited else "headroom and floor leave no more"
        if self._frozen or self._promises or target <= self.lend_pages:
            return self.lend_pages, self.reason
        return target, "serving left room"


class StaticLending(Lending):
    """A fixed split: what the operator allows is lent for good, whatever serving does with the rest.

    It is what two engines get that divide a device at start, and the only choice where KV memory must never
    be unmapped (``compute-only`` in the compatibility table).  Serving's claims are not heard:
    ``NodeState.fixed`` tells both engines.
    """

    @property
    def headroom_pages(self) -> int:
        return 0

    def _decide(self) -> tuple[int, str]:
        if self._promises and self.cap_pages > self.lend_pages:
            return self.lend_pages, self.reason  # it still owes pages of the last cut
        return self.cap_pages, "a fixed split"
