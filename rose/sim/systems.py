"""The systems under test: which parts each of them has.

A rival is modelled by its published mechanism, on our engines, our workload and our seeds; it is not that project's code.
``rose`` is this repository's own policy code, configured as the daemons are (:mod:`rose.sim.live`).  ``rose-X`` is ``rose`` without X.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rose.wire.samples import RoutingName

Extra = Literal["none", "harvest", "spot", "serverless", "trainers"]
LendingName = Literal["rose", "paper", "static"]
Rule = Literal["slack", "paper", "free"]
Format = Literal["full", "coo", "rose"]

BYTES_PER_CHANGE = {"coo": 6.0, "rose": 1.25}
"""COO: a 4-byte index and a bf16 value.  rose: middle of 1.1 to 1.4, this repository's codec."""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    name: str
    label: str
    training: Literal["sync", "async"] = "sync"
    extra: Extra = "none"
    """Where rollouts run besides the dedicated engines."""
    lending: LendingName | None = None
    """These three: None = what the daemons' configuration says."""
    rule: Rule | None = None
    routing: RoutingName | None = "sticky_least_loaded"
    plain_queue: bool = True
    """Turns are placed in the order in which they came; else as ``rose-scheduler`` is configured to."""
    slots: Literal["turn", "trajectory"] = "turn"
    """What holds a slot of an engine: a turn while it runs, or a trajectory from its first turn to its last, observations
    included (ROLL's and AReaL's limit on concurrent rollouts).  Per turn, more trajectories than slots take turns in them."""
    resumable: bool = True
    """A turn that is cut goes on with its tokens."""
    format: Format = "rose"
    """Of a weight update on its way to extra engines."""
    prefetch: bool = True
    """Extra engines pull while the trainer pushes, each only its part."""


_ROSE = System(name="rose", label="ROSE, as here", extra="harvest", routing=None, plain_queue=False)

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(name="fixed_sync", label="fixed, synchronous (after ROLL)", slots="trajectory"),
        System(
            name="fixed_async",
            label="fixed, asynchronous (after AReaL)",
            training="async",
            slots="trajectory",
        ),
        System(name="fixed_ours", label="fixed, ROSE's scheduler", routing=None, plain_queue=False),
        System(
            name="spot",
            label="spot-elastic (after RLBoost)",
            extra="spot",
            routing="round_robin",
            format="full",
        ),
        System(
            name="serverless",
            label="serverless",
            extra="serverless",
            routing="round_robin",
            resumable=False,
            format="full",
            prefetch=False,
        ),
        System(
            name="static",
            label="static co-location",
            extra="harvest",
            lending="static",
            rule="free",
            format="full",
        ),
        System(name="trainers", label="borrowing training GPUs (after PEARL)", extra="trainers"),
        System(
            name="paper",
            label="ROSE, as in the paper",
            extra="harvest",
            lending="paper",
            rule="paper",
            routing="paper",
            resumable=False,
            format="coo",
        ),
        _ROSE,
        replace(_ROSE, name="rose_async", label="ROSE, asynchronous", training="async"),
        replace(_ROSE, name="rose-admission", label="ROSE without admission by slack", rule="free"),
        replace(_ROSE, name="rose-lending", label="ROSE with the paper's lending", lending="paper"),
        replace(_ROSE, name="rose-continuation", label="ROSE that restarts cut turns", resumable=False),
        replace(
            _ROSE, name="rose-affinity", label="ROSE without affinity (round robin)", routing="round_robin"
        ),
        replace(_ROSE, name="rose-delta", label="ROSE with full weights", format="full"),
        replace(
            _ROSE, name="rose-cost", label="ROSE that balances by load alone", routing="sticky_least_loaded"
        ),
    )
}
