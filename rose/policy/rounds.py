"""How many rollout steps follow one step of production, where their steps take turns.

With one of each in turn, a rollout engine beside decoding production has half of the device at best, however much of its limit between two tokens
production has left.  Several steps in a row take more of it: as many as the slack holds (:mod:`rose.policy.admission` says how much that is), and as
production's own latency allows.  That is fed back: each request that ends tells how long it took between its tokens, and one that took more than a
share of the limit halves the number at once; a row of others raises it by one.  The slack is a prediction; this is what came of it, with
everything that the prediction leaves out.

First tokens are not part of it: while one is owed, there is one rollout step in turn, as without this.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.errors import ConfigError

CALM = 8
"""So many requests in a row have to be quick before another step is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundParams:
    """Raises:
    ConfigError: A value out of range.
    """

    most: int = 1
    """Rollout steps for each of production's; 1 is a step of each in turn."""
    tpot_share: float = 0.5
    """Of production's limit between two tokens, that one of its requests may take on average."""

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ConfigError(f"{self.most} is below 1", field="most")
        if not 0.0 < self.tpot_share <= 1.0:
            raise ConfigError(f"{self.tpot_share} is not above 0 and at most 1", field="tpot_share")


class Rounds:
    """Of one device.

    Args:
        slo_tpot_s: Production's limit between two tokens, in seconds; 0: it has none.
    """

    def __init__(self, *, params: RoundParams, slo_tpot_s: float) -> None:
        self.params, self.slo_tpot_s = params, slo_tpot_s
        self.steps = params.most
        """Rollout steps in turn that production's latency allows now."""
        self._calm = 0

    def served(self, tpot_s: float) -> None:
        """A request of production ended; ``tpot_s``: seconds between its tokens, on average."""
        if 0 < self.slo_tpot_s * self.params.tpot_share < tpot_s:
            self.steps, self._calm = max(1, self.steps // 2), 0
            return
        self._calm += 1
        if self._calm >= CALM:
            self.steps, self._calm = min(self.params.most, self.steps + 1), 0

    def fit(self, *, slack_s: float, step_s: float) -> int:
        """Rollout steps of ``step_s`` seconds that may follow production's next one, 1 or more.

        Args:
            slack_s: Production's, as admission found it for the first of them; infinite where nothing is promised.
        """
        if self.steps <= 1 or slack_s >= step_s * self.steps:
            return self.steps
        return max(1, int(slack_s / step_s))
