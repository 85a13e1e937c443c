"""Production requests of a fleet: when, at which engine, how long.

The generator follows what is published about production fleets: a daily swing, bursts of seconds that all engines see
together, and noise between seconds.  Its lengths are those of the Azure conversation trace of 2023 (see
:mod:`rose.evaluation.arrivals`, which also reads trace files).  A front end spreads requests at random over engines.

Invariants: sorted by ``at_s``; ``0 <= at_s < duration_s``; lengths between 1 and their maximum.  A seed fixes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rose.errors import ConfigError
from rose.evaluation.arrivals import load_trace
from rose.sim.engine import Request
from rose.sim.scenario import ServingSection

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MAX_REQUESTS = 20_000_000
PEAK_HOUR = 14.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefixes:
    """What prompts have in common: columns of length N, as :class:`Arrivals`.

    ``conversation``: the next prompt of the same number begins with the first ``repeated`` tokens of this one.  ``group``:
    all prompts of the same number begin with the same ``shared`` tokens.  A number of -1: nothing in common.
    """

    conversation: Ints
    repeated: Ints
    group: Ints
    shared: Ints

    def mark(self, request: Request, index: int) -> None:
        """Tell ``request``, the one of row ``index``."""
        if self.conversation[index] >= 0:
            request.trajectory = f"c{self.conversation[index]}"
            request.repeated = int(self.repeated[index])
        if self.group[index] >= 0:
            request.group = f"g{self.group[index]}"
            request.shared = int(self.shared[index])


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """Columns of equal length N: seconds, engine index, prompt and output tokens."""

    at_s: Floats
    engine: Ints
    prompt: Ints
    output: Ints
    prefixes: Prefixes | None = None
    """None: no two prompts begin alike, as far as anybody knows; traces of production do not tell."""


def daily(config: ServingSection, at_s: npt.ArrayLike) -> Floats:
    """Rate over its daily mean at ``at_s`` seconds after ``start_hour``."""
    hour = config.start_hour + np.asarray(at_s, dtype=np.float64) / 3600.0
    return 1.0 + config.daily_swing * np.cos((hour - PEAK_HOUR) / 24.0 * 2.0 * math.pi)


def rates(config: ServingSection, num_engines: int, duration_s: float, rng: np.random.Generator) -> Floats:
    """Requests in each second of the fleet, expected, ``[ceil(duration_s)]``."""
    num = math.ceil(duration_s)
    rate = config.requests_per_s * num_engines * daily(config, np.arange(num) + 0.5)
    num_bursts = rng.poisson(duration_s / config.burst_every_s)
    starts = np.sort(rng.uniform(0.0, duration_s, num_bursts))
    lengths = rng.exponential(config.burst_length_s, num_bursts)
    factor = np.ones(num)
    for start, length in zip(starts, lengths, strict=True):
        first, last = int(start), min(num, math.ceil(start + max(length, 1.0)))
        factor[first:last] = config.burst_factor
    factor /= max(1e-9, factor.mean())  # bursts move traffic, they add none
    if config.noise > 0:
        shape = 1.0 / config.noise**2
        factor *= rng.gamma(shape, 1.0 / shape, num)
    return rate * factor


def make_arrivals(config: ServingSection, num_engines: int, duration_s: float, seed: int) -> Arrivals:
    """All requests of a run.

    Raises:
        ConfigError: A trace file is wrong (with its line), or there would be too many requests.
    """
    rng = np.random.default_rng([seed, 0x5E12])
    expected = config.requests_per_s * num_engines * duration_s
    if expected > MAX_REQUESTS:
        raise ConfigError(
            f"{expected:.3g} requests are more than {MAX_REQUESTS}",
            field="serving.requests_per_s",
            fix="mode = 'fleet', a shorter run or a smaller fleet",
        )
    if config.trace is not None:
        at_s, prompt, output = _from_trace(config, num_engines, duration_s, rng)
    else:
        counts = rng.poisson(rates(config, num_engines, duration_s, rng))
        second = np.repeat(np.arange(len(counts)), counts)
        at_s = np.sort(second + rng.uniform(0.0, 1.0, len(second)))
        at_s = at_s[at_s < duration_s]
        prompt = _log_normal(rng, config.prompt_median, config.prompt_log_std, config.prompt_max, len(at_s))
        output = _log_normal(rng, config.output_median, config.output_log_std, config.output_max, len(at_s))
    engine = rng.integers(0, max(1, num_engines), len(at_s))
    return Arrivals(at_s=at_s, engine=engine, prompt=prompt, output=output)


def _from_trace(
    config: ServingSection, num_engines: int, duration_s: float, rng: np.random.Generator
) -> tuple[Floats, Ints, Ints]:
    """The trace on its own clock, repeated over the run, thinned or multiplied to the wanted mean rate."""
    assert config.trace is not None
    rows = load_trace(config.trace)
    times = np.array([row.at_s for row in rows])
    span_s = trace_span_s(times)
    if config.trace_start_s:
        times = (times - config.trace_start_s) % span_s
        order = np.argsort(times, kind="stable")
        times, rows = times[order], [rows[index] for index in order]
    copies = config.requests_per_s * num_engines * span_s / len(rows)
    chosen: list[Ints] = []
    at: list[Floats] = []
    total = 0
    for loop in range(math.ceil(duration_s / span_s)):
        # Rows after the run's end are left out first (jitter only delays): they may be many.
        within = times + loop * span_s < duration_s
        count = num_copies(rng, copies, len(rows)) * within
        total += int(count.sum())
        if total > MAX_REQUESTS:
            raise ConfigError(
                f"its {len(rows)} rows in {span_s:.3g} s would become more than {MAX_REQUESTS} requests",
                field=str(config.trace),
                fix="a trace with more rows, a lower serving.requests_per_s, a shorter run or a smaller fleet",
            )
        index, jitter = spread_copies(rng, count)
        chosen.append(index)
        at.append(times[index] + loop * span_s + jitter)
    at_s, index = np.concatenate(at), np.concatenate(chosen)
    order = np.argsort(at_s, kind="stable")
    order = order[at_s[order] < duration_s]
    context = np.array([row.context_tokens for row in rows])
    generated = np.array([row.generated_tokens for row in rows])
    prompt = np.clip(context[index[order]], 1, config.prompt_max)
    output = np.clip(generated[index[order]], 1, config.output_max)
    return at_s[order], prompt.astype(np.int64), output.astype(np.int64)


def num_copies(rng: np.random.Generator, copies: float, num_rows: int) -> Ints:
    """How often each row of a trace comes: 0, 1 or more times at random, ``copies`` on average."""
    return math.floor(copies) + (rng.random(num_rows) < copies % 1.0).astype(np.int64)


def spread_copies(rng: np.random.Generator, count: Ints) -> tuple[Ints, Floats]:
    """Row of each request, and how many seconds after its row it comes: a row's further copies fall within half a
    second, so bursts stay bursts."""
    index = np.repeat(np.arange(len(count)), count)
    first = np.concatenate([[True], index[1:] != index[:-1]]) if len(index) else np.zeros(0, dtype=bool)
    return index, np.where(first, 0.0, rng.uniform(0.0, 0.5, len(index)))


def trace_span_s(times: Floats) -> float:
    """Of a whole trace, the gap to its repetition included."""
    return float(times[-1]) * (1.0 + 1.0 / len(times))


def _log_normal(rng: np.random.Generator, median: float, log_std: float, most: int, num: int) -> Ints:
    return np.clip(np.rint(median * rng.lognormal(0.0, log_std, num)), 1, most).astype(np.int64)
