"""The vocabulary of provisioning: what it is told (events) and what it answers (actions).  The policy is in
``rose.policy.provisioning``; every event carries ``at_s``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rose.policy.worker import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSeen:
    """A host reports.

    ``model``: the base model of its engine.  ``run``: whose weights it has; empty: nobody's.  ``speed``: of a dedicated host of
    the same kind.  ``serving_use``: recent share of KV memory that production uses, 0 where none runs.  ``left_s``: how much longer
    its owner leaves it.  ``copies``: runs whose policy lies on its host.  ``commit_s``: what its last change of run took, and
    ``pull_s``: what the last policy took to arrive of which there was no copy; None: not measured.  ``num_switches``: changes of
    run so far, so that a new figure that is equal to the old one is seen as new.
    """

    at_s: float
    host: str
    tier: Tier
    serving_use: float = 0.0
    reclaim_rate: float = 0.0
    pull_s: float | None = None
    commit_s: float | None = None
    num_switches: int = 0
    copies: tuple[str, ...] = ()
    model: str = ""
    run: str = ""
    speed: float = 1.0
    left_s: float = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGone:
    at_s: float
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSeen:
    """A new job, or new facts of a known one.  ``model``: empty where it is not known yet, and then no host is of it."""

    at_s: float
    job: str
    n_dedicated: int
    n_harvested: int
    weight: float = 1.0
    model: str = ""
    run: str = ""
    n_borrowed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobGone:
    """It is forgotten with all that was learned of it."""

    at_s: float
    job: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSeen:
    """``num_turns``: under way or waiting.  ``is_training``: its trainer has a batch.  ``token_s``, ``crowd_s``: of a dedicated engine, alone and per turn beside
    (``rose.policy.speed``); ``slots``: turns that one takes at once.  ``deadline_s``: until its work of now has to be done.
    ``num_open``, ``open_speed``: its part of the engines that are everybody's, and their speed together."""

    at_s: float
    job: str
    num_turns: int
    token_s: float = 0.02
    crowd_s: float = 0.0005
    slots: int = 64
    deadline_s: float = math.inf
    num_open: float = 0.0
    open_speed: float = 0.0
    is_training: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DecideNow:
    """Decide now."""

    at_s: float


Event = HostSeen | HostGone | JobSeen | JobGone | LoadSeen | DecideNow


@dataclass(frozen=True, kw_only=True, slots=True)
class Activate:
    host: str
    job: str
    gain_s: float
    """Expected, less what it costs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopt:
    """A host that is seen for the first time works for the job whose weights it has: nothing has to be switched."""

    host: str
    job: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """``reason``: idle, pressure, cap, job_gone, no_weights (they never came), returned (to its owner), turn (its partner's), value,
    fair_share; after the last three another job has it at once."""

    host: str
    job: str
    reason: str


Action = Activate | Release | Adopt
