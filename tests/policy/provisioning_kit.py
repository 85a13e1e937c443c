"""Jobs and hosts for tests of provisioning."""

from __future__ import annotations

from rose.policy import provisioning as pv
from rose.policy.worker import Tier

MANY = 1000
"""Turns: more than all devices take."""


def job(
    book: pv.Provisioning, name: str, own: int, shared: int, at_s: float = 0.0, **fields: object
) -> list[pv.Action]:
    return book.handle(
        pv.JobSeen(at_s=at_s, job=name, n_dedicated=own, n_harvested=shared, **fields)  # type: ignore[arg-type]
    )


def seen(
    book: pv.Provisioning, name: str, tier: Tier = Tier.HARVESTED, at_s: float = 0.0, **fields: object
) -> None:
    book.handle(pv.HostSeen(at_s=at_s, host=name, tier=tier, **fields))  # type: ignore[arg-type]
