"""One device with its agent's books, and what is counted of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rose.coserve.node_config import NodeConfig
from rose.lineage import Version
from rose.policy.lending import Lending
from rose.policy.worker import Tier
from rose.sim.device import SimDevice


@dataclass(slots=True)
class SimNode:
    """One device with its agent's books."""

    device: SimDevice
    tier: Tier
    config: NodeConfig
    cap: int | None = None
    """None: the scheduler's own for its tier."""
    for_tail: bool = False
    """The first choice for the longest trajectories."""
    lent_until_s: float = -math.inf
    """Of a borrowed one."""
    lending: Lending | None = None
    version: Version | None = None
    run: str = ""
    """Whose weights these are; empty where there is one job."""
    is_switching: bool = False
    """Its requests end for another run's weights."""
    incarnation: int = 0
    seq: int = 0
    registered: bool = False
    reported_s: float = -math.inf
    reclaim_seen: int = 0
    cut_due: bool = False


@dataclass(slots=True)
class Counters:
    """Of one run; tokens are rollout tokens unless said otherwise."""

    sampled: dict[str, int] = field(default_factory=lambda: dict.fromkeys((tier.value for tier in Tier), 0))
    asked: int = 0
    """Prompt tokens of production, and how many of them its prefix cache had."""
    found: int = 0
    prefilled: int = 0
    cached: int = 0
    lost: int = 0
    """Sampled, then thrown away."""
    recomputed: int = 0
    turns: int = 0
    requeued: int = 0
    failed: int = 0
    cuts: int = 0
    kills: int = 0
    delivered: int = 0
    """In turns that ended, however they ended."""
    dropped: int = 0
    """Of turns that had to start again."""
    fenced: int = 0
    """Of attempts that were no longer live."""
    copies: int = 0
    """Second copies of turns, and below how many of them ended first, and what was sampled twice."""
    copies_won: int = 0
    copied: int = 0
