"""A device of 100 pages whose two engines report to a lending policy."""

from __future__ import annotations

import dataclasses

from rose.policy.lending import Lending, LendingParams
from rose.policy.lending_events import (
    Action,
    Mode,
    Phase,
    RolloutReported,
    ServingReported,
)

TOTAL = 100
PARAMS = LendingParams(
    min_headroom_fraction=0.2,
    growth_window_s=64.0,
    use_window_s=1e-6,
    reclaim_deadline_s=0.1,
    backstop_s=0.5,
    period_s=0.05,
    grow_period_s=1.0,
    grow_step_fraction=0.3,
    hysteresis_fraction=0.02,
    cool_down_s=5.0,
    max_cuts=3,
    cut_window_s=60.0,
    dead_after_s=2.0,
)
"""100 pages: headroom 20, watermark 10, steps of 30."""


class World:
    """A policy with both engines reporting; the rollout engine obeys at once unless told otherwise."""

    def __init__(self, policy: Lending) -> None:
        self.policy = policy
        self.at_s = 0.0
        self.used = 0
        self.held = 0
        self.obeys = True
        self.actions: list[Action] = []

    def step(self, at_s: float, **serving: object) -> list[Action]:
        """Both report at ``at_s``; what the policy did."""
        self.at_s = at_s
        report = ServingReported(
            at_s=at_s,
            alive=True,
            phase=Phase.READY,
            total_pages=TOTAL,
            reserved_pages=max(0, TOTAL - self.policy.lend_pages),
            used_pages=self.used,
        )
        actions = self.policy.handle(dataclasses.replace(report, **serving))  # type: ignore[arg-type]
        self.policy.check()
        if self.obeys:
            self.held = self.policy.lend_pages
        actions += self.policy.handle(
            RolloutReported(at_s=at_s, alive=True, phase=Phase.READY, reserved_pages=self.held)
        )
        self.policy.check()
        if self.obeys:
            self.held = self.policy.lend_pages
        self.actions += actions
        return actions

    def run(self, until_s: float, period_s: float = 0.5) -> None:
        while self.at_s + period_s <= until_s:
            self.step(self.at_s + period_s)


CALM: dict[str, object] = {
    "mode": Mode.ON,
    "lend_pages": 30,
    "has_serving": True,
    "serving_phase": Phase.READY,
    "serving_alive": True,
    "serving_total": 100,
    "serving_reserved": 60,
    "serving_needed": 0,
    "node_age_s": 0.1,
    "serving_age_s": 0.1,
    "dead_after_s": 2.0,
}
