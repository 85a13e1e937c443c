"""How a trainer makes its weights a version that engines can take: what it needs from a publisher, and how long it goes on trying.

Decides nothing of what a version holds, or who has to have it: :mod:`rose.weights.publisher` and the scheduler do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from rose.auth import Tokens
from rose.errors import CapacityError
from rose.lineage import WeightVersion
from rose.train.build import make_publisher, weight_store
from rose.train.train_config import TrainConfig

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Before a publish that failed is tried again."""


class Publisher(Protocol):
    """What the trainer needs from ``rose.weights.publisher.WeightPublisher``."""

    def publish(self, version: int, *, step: int | None = None, lr: float | None = None) -> Any:
        """Make ``version`` durable and current; the report has ``kind``, ``bytes_dense``, ``bytes_sent``, ``density``."""
        ...


MakePublisher = Callable[[TrainConfig, Tokens, Any, int], Publisher]
"""Builds a publisher of ``module`` for ``attempt``: ``(config, tokens, module, attempt)``; on several ranks one on each, which publish together."""


async def publish_patiently(
    publisher: Publisher, version: WeightVersion, *, learning_rate: float | None, patience_s: float
) -> dict[str, Any]:
    """Publish the weights as they are; what was sent is told.

    Raises:
        CapacityError: The store cannot be reached for ``patience_s``.
    """
    number = version.version
    step = number - 1 if number else None
    started_s = time.monotonic()
    while True:
        try:
            report = await asyncio.to_thread(publisher.publish, number, step=step, lr=learning_rate)
        except CapacityError as error:
            # What was sent so far is no version yet; publishing again is right.
            if time.monotonic() - started_s >= patience_s:
                raise
            logger.warning("version %s is not published yet: %s", version, error)
            await asyncio.sleep(PAUSE_S)
            continue
        return {
            "kind": str(report.kind),
            "bytes_dense": int(report.bytes_dense),
            "bytes_sent": int(report.bytes_sent),
            "density": float(report.density),
        }


def published_attempt(config: TrainConfig, tokens: Tokens, make: MakePublisher) -> int:
    """The highest attempt that published weights of the job's run; 0 for none, or where the transport is not ours."""
    if make is not make_publisher:
        return 0
    store = weight_store(config, tokens)
    try:
        head = store.wait_head(config.run_id, None, 0.0)
    finally:
        store.close()
    return 0 if head is None else head.attempt
