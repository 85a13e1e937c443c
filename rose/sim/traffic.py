"""What a fleet's users asked of it over one stretch of time, from whatever the fleet's owner has; and samples of it.

A trace has every request; metrics have counts per interval and histograms of lengths (:mod:`rose.sim.metrics_source`); where there is
neither, the generator of :mod:`rose.sim.arrivals` stands in.  ``rose plan`` asks all three the same: the rate over time, where the
quietest, an average and the busiest stretch are, and the requests of such a stretch for a few engines.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rose.errors import ConfigError
from rose.evaluation.arrivals import load_trace
from rose.sim.arrivals import (
    Arrivals,
    Floats,
    Ints,
    daily,
    make_arrivals,
    num_copies,
    spread_copies,
    trace_span_s,
)
from rose.sim.scenario import ServingSection

MAX_WINDOW_REQUESTS = 200_000
"""Of the few engines that are simulated for some minutes: more is no traffic that such engines could have served."""
MEASURED_MAX = (131_072, 32_768)
"""Prompt and output tokens of a request that somebody has really had; more is taken for this."""
MAX_STARTS = 100_000
PROFILE_BINS = 288
"""Points of the rate over time, at most: 5 minutes of a day."""
LEAST_READ, LEAST_SPAN_S = 300, 600.0
"""Requests and seconds that have to be read before anything is said of a fleet; ours."""
MIN_BIN_S = 30.0

SILENCE = (300.0, 30)
"""A time without a request of so many seconds and so many mean times between two is no chance: the log has a hole, or users are away."""

Drawn = tuple[Floats, Ints, Ints]
"""Seconds from the beginning of the stretch, prompt and output tokens; sorted by time."""


@dataclass(frozen=True, kw_only=True)
class Traffic(ABC):
    """``num_engines``: that served it; ``span_s``: how long it lasted, then it begins again."""

    source: str
    """What was read, for people."""
    num_engines: float
    span_s: float
    begin_s: float | None = None
    """When it began, in seconds since 1970; None where that is not known."""
    covered: float = 1.0
    """Share of the time that was read of which there is data; the rest is cut out, and not in ``span_s``."""
    is_measured: bool = True
    knows_engines: bool = True
    """False: nothing says how many engines served it; ``num_engines`` follows from the scenario's rate."""
    knows_bursts: bool = True
    """False: how requests lie between two scrapes is a guess."""
    kv_use: tuple[float, float] | None = None
    """Of production's KV memory: mean, and the highest of a scrape (mean over engines)."""
    restarts: int = 0
    """Times that a server's counters went back, or another process answered."""
    silence_s: tuple[float, float] | None = None
    """The longest time without a request: its begin, and how long; None where it may be chance, or a gap is known to be none."""
    hit_share: float | None = None
    """Of prompt tokens, found in production's prefix cache."""
    observed_ms: Mapping[str, float] = field(default_factory=lambda: dict[str, float]())
    """``ttft_p99``, ``tpot_p99`` (of each request's mean per token) and ``itl_p99`` (between any two tokens) that the fleet's own metrics say,
    where they do."""

    @abstractmethod
    def counted(self, until_s: Floats) -> Floats:
        """Requests of all engines before each moment, at most twice the span: after it, all begins again."""

    @abstractmethod
    def _draw(
        self, start_s: float, length_s: float, copies: float, num_engines: int, rng: np.random.Generator
    ) -> Drawn:
        """The requests of a stretch, each ``copies`` times on average."""

    @property
    def engines_unsaid(self) -> str:
        """For people, where :attr:`knows_engines` is false."""
        return "nothing says how many engines served this traffic"

    @property
    def total(self) -> float:
        """Requests per second of all engines, on average."""
        return self.rate(0.0, self.span_s) * self.num_engines

    @property
    def num_read(self) -> float:
        """Requests in it, whoever served them."""
        return float(self.counted(np.array([self.span_s]))[0])

    @property
    def is_too_little(self) -> bool:
        """So little was measured that nothing drawn from it tells of a fleet."""
        return self.is_measured and (self.num_read < LEAST_READ or self.span_s < LEAST_SPAN_S)

    def profile(self) -> tuple[Floats, Floats]:
        """Middle of each bin in seconds, and requests per second of one engine in it."""
        edges = self._bins()
        rates = np.diff(self.counted(edges)) / np.diff(edges) / self.num_engines
        return (edges[:-1] + edges[1:]) / 2, rates

    def engine_share(self) -> Floats:
        """Engines in each bin of :meth:`profile`, over ``num_engines``."""
        return np.ones(len(self._bins()) - 1)

    def _bins(self) -> Floats:
        num = max(1, min(PROFILE_BINS, int(self.span_s / MIN_BIN_S)))
        return np.linspace(0.0, self.span_s, num + 1)

    def windows(self, length_s: float) -> dict[str, float]:
        """Where the quietest, an average and the busiest stretch of ``length_s`` begin, in seconds."""
        length_s = min(length_s, self.span_s)
        starts = np.arange(0.0, self.span_s, max(1.0, self.span_s / MAX_STARTS), dtype=np.float64)
        counts = self.counted(np.add(starts, length_s, dtype=np.float64)) - self.counted(starts)
        return {
            "quiet": float(starts[np.argmin(counts)]),
            "mean": float(starts[np.argmin(np.abs(counts - counts.mean()))]),
            "busy": float(starts[np.argmax(counts)]),
        }

    def rate(self, start_s: float, length_s: float) -> float:
        """Requests per second of one engine in a stretch."""
        length_s = min(length_s, self.span_s)
        low, high = self.counted(np.array([start_s, start_s + length_s]))
        return float(high - low) / length_s / self.num_engines

    def arrivals(
        self,
        config: ServingSection,
        start_s: float,
        length_s: float,
        num_engines: int,
        seed: int,
        scale: float = 1.0,
    ) -> Arrivals:
        """The requests of a stretch for ``num_engines`` engines, ``scale`` times as many as there were; a seed fixes them.

        Raises:
            ConfigError: More than such engines could have served.
        """
        rng = np.random.default_rng([seed, 0x71AF])
        expected = self.rate(start_s, length_s) * num_engines * length_s * scale
        if expected > MAX_WINDOW_REQUESTS:
            raise ConfigError(
                f"{expected / num_engines / length_s:.3g} requests per second and engine in its busiest "
                f"{length_s:.0f} s are more than an engine can serve",
                field=self.source,
                fix="say how many engines served it with --engines",
            )
        copies = scale * num_engines / self.num_engines
        at_s, prompt, output = self._draw(start_s, length_s, copies, num_engines, rng)
        prompt_max, output_max = self.longest(config)
        return Arrivals(
            at_s=at_s,
            engine=rng.integers(0, max(1, num_engines), len(at_s)),
            prompt=np.clip(prompt, 1, prompt_max).astype(np.int64),
            output=np.clip(output, 1, output_max).astype(np.int64),
        )

    def longest(self, config: ServingSection) -> tuple[int, int]:
        """Prompt and output tokens of a request, at most.  The scenario's are the generator's: a fleet's own requests are as long as they are."""
        if not self.is_measured:
            return config.prompt_max, config.output_max
        return max(MEASURED_MAX[0], config.prompt_max), max(MEASURED_MAX[1], config.output_max)


@dataclass(frozen=True, kw_only=True)
class TraceTraffic(Traffic):
    """``at_s``, ``prompt``, ``output``: columns of one row per request."""

    at_s: Floats
    prompt: Ints
    output: Ints

    def counted(self, until_s: Floats) -> Floats:
        twice = np.concatenate([self.at_s, self.at_s + self.span_s])
        return np.searchsorted(twice, until_s).astype(float)

    def _draw(
        self, start_s: float, length_s: float, copies: float, num_engines: int, rng: np.random.Generator
    ) -> Drawn:
        loops = math.ceil(length_s / self.span_s)
        times = (self.at_s - start_s) % self.span_s
        order = np.argsort(times, kind="stable")
        rows = np.tile(order, loops)
        times = np.concatenate([times[order] + loop * self.span_s for loop in range(loops)])
        rows, times = rows[times < length_s], times[times < length_s]
        index, jitter = spread_copies(rng, num_copies(rng, copies, len(rows)))
        at_s = times[index] + jitter
        order = np.argsort(at_s, kind="stable")
        order = order[at_s[order] < length_s]
        chosen = rows[index[order]]
        return at_s[order], self.prompt[chosen], self.output[chosen]


@dataclass(frozen=True, kw_only=True)
class GeneratedTraffic(Traffic):
    """No data: a day of the scenario's generator."""

    config: ServingSection

    def counted(self, until_s: Floats) -> Floats:
        minutes = np.arange(0.0, 2 * self.span_s + 60.0, 60.0)
        rates = self.config.requests_per_s * self.num_engines * daily(self.config, minutes)
        total = np.concatenate([[0.0], np.cumsum((rates[:-1] + rates[1:]) * 30.0)])
        return np.interp(until_s, minutes, total)

    def _draw(
        self, start_s: float, length_s: float, copies: float, num_engines: int, rng: np.random.Generator
    ) -> Drawn:
        rate = self.rate(start_s, length_s) * copies * self.num_engines / num_engines
        update = {"requests_per_s": max(rate, 1e-3), "daily_swing": 0.0, "trace": None}
        made = make_arrivals(
            self.config.model_copy(update=update), num_engines, length_s, int(rng.integers(2**31))
        )
        return made.at_s, made.prompt, made.output


def from_trace(path: Path, num_engines: int | None, config: ServingSection) -> TraceTraffic:
    """An Azure-format CSV.

    Args:
        num_engines: That served it; None: as many as make ``config.requests_per_s`` of its rate.

    Raises:
        ConfigError: It is wrong (with its line).
    """
    rows = load_trace(path)
    at_s = np.array([row.at_s for row in rows])
    span_s = trace_span_s(at_s)
    return TraceTraffic(
        source=str(path),
        num_engines=num_engines or len(rows) / span_s / config.requests_per_s,
        span_s=span_s,
        knows_engines=num_engines is not None,
        silence_s=_silence(at_s),
        at_s=at_s,
        prompt=np.array([row.context_tokens for row in rows], dtype=np.int64),
        output=np.array([row.generated_tokens for row in rows], dtype=np.int64),
    )


def _silence(at_s: Floats) -> tuple[float, float] | None:
    gaps_s = np.diff(at_s)
    longest = int(np.argmax(gaps_s))
    least_s, means = SILENCE
    if gaps_s[longest] < max(least_s, means * float(gaps_s.mean())):
        return None
    return float(at_s[longest]), float(gaps_s[longest])


def generated(num_engines: int, config: ServingSection) -> GeneratedTraffic:
    """A day of the generator."""
    return GeneratedTraffic(
        source="the scenario's generator",
        num_engines=float(num_engines),
        span_s=86400.0,
        is_measured=False,
        config=config,
    )
