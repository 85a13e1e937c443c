"""Production's P99, from its own metrics page: what its users see, beside what it promises them.

vLLM counts the time to every first token and between every two tokens in histograms, front end included.  The P99 of the
last :data:`WINDOW_S` is that of the difference of two pages, read as Prometheus' ``histogram_quantile`` does: linear inside a
bucket.  It is for people; nothing is decided by it (slack and broken promises come from the board, at every step).

A page costs production's front end some milliseconds, as any Prometheus does, so it is read once in :data:`PERIOD_S`.
When it cannot be read there is no P99, and nothing else happens.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rose.errors import EngineError
from rose.wire.http_client import ask, open_client

logger = logging.getLogger("rose.node")

PERIOD_S = 10.0
WINDOW_S = 60.0
_TIMEOUT_S = 5.0
_MAX_PAGE_BYTES = 8 << 20
_NAMES = {"ttft": "vllm:time_to_first_token_seconds", "tpot": "vllm:inter_token_latency_seconds"}

Buckets = Mapping[float, float]
"""Upper bound, inclusive -> how many so far."""


def read_page(text: str) -> dict[str, Buckets]:
    """``ttft`` and ``tpot``, summed over engines and models.

    Raises:
        ValueError: The page is no metrics page.
    """
    found: dict[str, dict[float, float]] = {kind: {} for kind in _NAMES}
    for kind, name in _NAMES.items():
        lines = [line for line in text.splitlines() if line.startswith(f"{name}_bucket")]
        for family in text_string_to_metric_families("\n".join([f"# TYPE {name} histogram", *lines, ""])):
            for sample in family.samples:
                bound = float(sample.labels["le"])
                found[kind][bound] = found[kind].get(bound, 0.0) + sample.value
    return dict(found)


def p99_between(before: Buckets, after: Buckets) -> float | None:
    """Of what was counted between two pages; None when that is nothing."""
    bounds = sorted(after)
    counts = [after[bound] - before.get(bound, 0.0) for bound in bounds]
    if not counts or counts[-1] <= 0:
        return None
    rank = 0.99 * counts[-1]
    below, lower = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank:
            if math.isinf(bound):
                return lower  # beyond the last bound: at least that
            return lower + (bound - lower) * (rank - below) / (count - below)
        below, lower = count, bound
    return None


class ServingLatency:
    """Args:
    url: Of production's metrics page.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._pages: deque[tuple[float, dict[str, Buckets]]] = deque()
        self._p99_s: dict[str, float] = {}
        self.error = "not read yet"

    @property
    def p99_s(self) -> Mapping[str, float]:
        """``ttft`` and ``tpot``, those that are known."""
        return self._p99_s

    async def run(self) -> None:
        """Until cancelled."""
        async with open_client() as client:
            while True:
                await self.look(client)
                await asyncio.sleep(PERIOD_S)

    async def look(self, client: httpx.AsyncClient) -> None:
        """Read the page once."""
        try:
            page = await ask(
                client,
                "GET",
                self._url,
                timeout_s=_TIMEOUT_S,
                max_bytes=_MAX_PAGE_BYTES,
                field="serving.metrics_url",
            )
            if page.status != 200:
                raise EngineError(f"answered {page.status}", field="serving.metrics_url")
            found = read_page(page.body.decode())
            error = ""
            if not any(found.values()):
                error = f"the page has no {' and no '.join(_NAMES.values())}: was production started with --disable-log-stats?"
            self.took(time.monotonic(), found)
        except (EngineError, ValueError, KeyError) as failure:
            self._pages.clear()
            self._p99_s = {}
            error = f"{type(failure).__name__}: {failure}"
        if error != self.error:
            (logger.warning if error else logger.info)("production's metrics: %s", error or "read")
        self.error = error

    def took(self, at_s: float, page: dict[str, Buckets]) -> None:
        """A page was read at ``at_s``."""
        pages = self._pages
        if pages and any(_total(page[kind]) < _total(pages[-1][1][kind]) for kind in page):
            pages.clear()  # production was restarted
        while len(pages) > 1 and pages[1][0] <= at_s - WINDOW_S:
            pages.popleft()
        known = {kind: p99_between(pages[0][1][kind], page[kind]) for kind in page} if pages else {}
        self._p99_s = {kind: value for kind, value in known.items() if value is not None}
        pages.append((at_s, page))


def _total(buckets: Buckets) -> float:
    return buckets.get(math.inf, 0.0)
