"""When production requests arrive and how long they are: one period, from a seed or from a trace file.

Decides the schedule only; :mod:`rose.demo.traffic` sends it.  The same period is replayed in every
arm of the demo, so that request ``i`` of one arm has a partner of equal size, at the same
moment of the period, in every other.

Invariants of what both makers return: sorted by ``at_s``; ``0 <= at_s < period_s``; every length between
1 and its maximum; no more than ``MAX_ARRIVALS``.  No I/O but reading the trace; no clock; a seed fixes it.

The generator's shape is fitted to the Azure LLM inference traces of 2023 (`AzurePublicDataset
<https://github.com/Azure/AzurePublicDataset>`_, CC-BY 4.0).  Bursts follow the code trace: 58 % of its
requests lie in the 8 % of seconds above four times the mean, bursts last a few seconds (lag-1
autocorrelation 0.76), the median minute peaks at 6.2x the mean.  Lengths follow the conversation
trace: log-normal, standard deviation of the logarithm 0.99 (context) and 0.86 (generated).
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from rose.errors import ConfigError

MAX_ARRIVALS = 100_000
MAX_TRACE_ROWS = 2_000_000
"""A day of 46 engines with a request every two seconds; more must not eat the machine."""
MAX_TRACE_TOKENS = 10_000_000
MAX_TRACE_DAYS = 366
"""What reads a trace counts its seconds: two rows that lie a thousand years apart must not eat the machine either."""

PROMPT_LOG_STD = 0.99
OUTPUT_LOG_STD = 0.86
BURST_LENGTH_S = (1.0, 1.5)
BURST_FACTOR = (5.5, 8.0)
"""Rate in a burst over the mean rate: with the noise of counts, the busiest second is 5-10x the mean."""
MIN_CALM_FRACTION = 0.25
"""Calm traffic keeps at least this share of the mean rate, however short the period is."""
QUIET_TAIL_S = 2.0
"""No burst in the last seconds of a period, so that one period's backlog does not run into the next arm."""

TRACE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
"""Azure writes seven decimals, Python reads six; a later trace adds an offset ("+00:00")."""
PEAK_POSITION = 0.4
"""Where in the replayed window of a trace its busiest second lies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One production request: seconds from the start of the period, and its lengths."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficShape:
    """How much traffic, scaled to the production model at hand."""

    period_s: float
    mean_rate_hz: float
    prompt_median_tokens: int
    prompt_max_tokens: int
    output_median_tokens: int
    output_max_tokens: int
    burst_every_s: float = 20.0

    def __post_init__(self) -> None:
        for name in ("period_s", "mean_rate_hz", "burst_every_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"must be above 0, got {value}", field=f"traffic.{name}")
        if self.period_s < 4 * QUIET_TAIL_S:
            raise ConfigError(f"must be at least {4 * QUIET_TAIL_S:g}", field="traffic.period_s")
        if self.period_s * self.mean_rate_hz > MAX_ARRIVALS / 2:
            raise ConfigError(
                f"{self.period_s:g} s of it is more than {MAX_ARRIVALS // 2} requests",
                field="traffic.mean_rate_hz",
            )
        for kind in ("prompt", "output"):
            median, most = getattr(self, f"{kind}_median_tokens"), getattr(self, f"{kind}_max_tokens")
            if not 1 <= median <= most:
                raise ConfigError(
                    f"must lie between 1 and {kind}_max_tokens ({most}), got {median}",
                    field=f"traffic.{kind}_median_tokens",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    at_s: float
    context_tokens: int
    generated_tokens: int


def generate_arrivals(shape: TrafficShape, seed: int) -> list[Arrival]:
    """One period of bursty traffic.

    One burst falls at a random place in each stretch of ``shape.burst_every_s``: unlike a free Markov chain,
    a period of half a minute then never comes without a burst, whatever the seed.
    """
    rng = np.random.default_rng([seed, 0x7_4AFF1C])
    last_s = shape.period_s - QUIET_TAIL_S
    num_bursts = max(1, round(last_s / shape.burst_every_s))
    stretch_s = last_s / num_bursts
    length_s = np.minimum(rng.uniform(*BURST_LENGTH_S, num_bursts), stretch_s)
    start_s = stretch_s * np.arange(num_bursts) + rng.uniform(0, 1, num_bursts) * (stretch_s - length_s)
    extra = rng.uniform(*BURST_FACTOR, num_bursts) * length_s  # in units of mean rate x seconds
    budget = (1.0 - MIN_CALM_FRACTION) * shape.period_s
    extra *= min(1.0, budget / float(extra.sum()))

    num_requests = max(2, round(shape.mean_rate_hz * shape.period_s))
    num_burst_requests = rng.multinomial(
        num_requests, [*(extra / shape.period_s), 1.0 - float(extra.sum()) / shape.period_s]
    )
    at_s: list[float] = []
    for start, length, num in zip(start_s, length_s, num_burst_requests, strict=False):
        at_s.extend(rng.uniform(start, start + length, num))
    # Between bursts the rate itself wanders (Gamma by second), as the traces' does.
    weight = rng.gamma(2.0, 1.0, math.ceil(shape.period_s))
    second = rng.choice(len(weight), size=int(num_burst_requests[-1]), p=weight / weight.sum())
    at_s.extend(np.minimum(second + rng.uniform(0, 1, len(second)), np.nextafter(shape.period_s, 0)))
    at_s.sort()

    prompts = _log_normal(
        rng, shape.prompt_median_tokens, PROMPT_LOG_STD, shape.prompt_max_tokens, num_requests
    )
    outputs = _log_normal(
        rng, shape.output_median_tokens, OUTPUT_LOG_STD, shape.output_max_tokens, num_requests
    )
    return [
        Arrival(at_s=float(at), prompt_tokens=int(prompt), output_tokens=int(output))
        for at, prompt, output in zip(at_s, prompts, outputs, strict=True)
    ]


def load_trace(path: Path | str) -> list[TraceRow]:
    """Read an Azure-format CSV; times become seconds from its first row.

    Raises:
        ConfigError: ``field`` is ``path`` or ``path:line`` of the first row that is wrong.
    """
    path = Path(path)
    rows: list[TraceRow] = []
    first: datetime | None = None
    try:
        # A spreadsheet begins a file with a byte order mark.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, None)
            if header is None or tuple(name.strip() for name in header) != TRACE_COLUMNS:
                raise ConfigError(
                    "the header is not the one of an Azure LLM inference trace",
                    field=f"{path}:1",
                    fix=f"first line: {','.join(TRACE_COLUMNS)}",
                )
            for cells in reader:
                where = f"{path}:{reader.line_num}"
                if not cells:
                    continue  # a blank line, often the last
                if len(rows) >= MAX_TRACE_ROWS:
                    raise ConfigError(
                        f"more than {MAX_TRACE_ROWS} rows",
                        field=where,
                        fix="a shorter stretch, or every n-th row: that is the traffic of so many times fewer engines (rose plan: --engines)",
                    )
                moment, context, generated = _parse_row(cells, where)
                first = first or moment
                if (moment.tzinfo is None) != (first.tzinfo is None):
                    raise ConfigError(
                        "times with and without a time zone are mixed",
                        field=where,
                        fix="give every TIMESTAMP an offset, or none",
                    )
                at_s = (moment - first).total_seconds()
                if rows and at_s < rows[-1].at_s:
                    raise ConfigError(
                        f"time goes back by {rows[-1].at_s - at_s:g} s", field=where, fix="sort by TIMESTAMP"
                    )
                if at_s > MAX_TRACE_DAYS * 86400.0:
                    raise ConfigError(
                        f"is {at_s / 86400:.0f} days after the first row",
                        field=where,
                        fix=f"at most {MAX_TRACE_DAYS} days",
                    )
                rows.append(TraceRow(at_s=at_s, context_tokens=context, generated_tokens=generated))
    except FileNotFoundError:
        raise ConfigError("does not exist", field=str(path)) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot be read as CSV: {error}", field=str(path)) from error
    if len(rows) < 2 or rows[-1].at_s <= 0:
        raise ConfigError("needs two rows or more, at different times", field=str(path))
    for name, is_said in (
        ("ContextTokens", any(row.context_tokens for row in rows)),
        ("GeneratedTokens", any(row.generated_tokens for row in rows)),
    ):
        if not is_said:
            raise ConfigError(f"{name} is 0 in every row", field=str(path), fix="the tokens of each request")
    return rows


def fit_trace(rows: list[TraceRow], shape: TrafficShape, stretch: int = 0) -> list[Arrival]:
    """A window of the trace, scaled to ``shape``: that around its busiest second, or another.

    Args:
        stretch: 0 for the window around the busiest second; ``k`` for the ``k``-th busiest of those that lie end to end before and after it,
            so that no two share a request.

    Time is scaled by the *whole* trace's mean rate, so the window keeps its burstiness: a busy window
    has more than ``mean_rate_hz``.  Lengths are scaled median to median and cut at the maximum.
    """
    scale = shape.mean_rate_hz * rows[-1].at_s / len(rows)  # demo seconds are trace seconds / scale
    at_s = np.array([row.at_s for row in rows])
    window_s = shape.period_s * scale
    second = np.bincount(at_s.astype(np.int64)).argmax()
    start_s = float(np.clip(second + 0.5 - PEAK_POSITION * window_s, 0, max(0.0, at_s[-1] - window_s)))
    if stretch:
        start_s = _other_window(at_s, start_s, window_s, stretch)
    low, high = np.searchsorted(at_s, [start_s, start_s + window_s])
    if not 2 <= high - low <= MAX_ARRIVALS:
        raise ConfigError(
            f"its busiest {window_s:.0f} s hold {high - low} requests", field="--trace", fix="change --rate"
        )
    prompt_scale, output_scale = _length_scales(rows, shape)
    before_end = float(np.nextafter(shape.period_s, 0))
    return [
        Arrival(
            at_s=min((row.at_s - start_s) / scale, before_end),
            prompt_tokens=_clip(row.context_tokens * prompt_scale, shape.prompt_max_tokens),
            output_tokens=_clip(row.generated_tokens * output_scale, shape.output_max_tokens),
        )
        for row in rows[low:high]
    ]


def _other_window(at_s: np.ndarray, first_s: float, window_s: float, number: int) -> float:
    """Where the ``number``-th busiest window begins (seconds of the trace), of those beside the one at ``first_s``."""
    before = np.arange(first_s - window_s, 0.0, -window_s)
    after = np.arange(first_s + window_s, at_s[-1] - window_s, window_s)
    starts = np.concatenate([before, after])
    if number > len(starts):
        raise ConfigError(
            f"the trace has {len(starts)} windows of {window_s:.0f} s beside the busiest",
            field="--run",
            fix="a lower number, or fewer segments",
        )
    counts = np.searchsorted(at_s, starts + window_s) - np.searchsorted(at_s, starts)
    return float(starts[np.argsort(-counts, kind="stable")[number - 1]])


def thin_burst(rows: list[TraceRow], shape: TrafficShape, seed: int) -> list[Arrival]:
    """The trace's busiest second and what is around it, in the trace's own time: every n-th request, scaled to ``shape``.

    Where :func:`fit_trace` stretches time, and with it bursts, this keeps the second as it is and takes fewer of its requests: the
    whole trace would have ``mean_rate_hz``, the window many times that.  A seed chooses which of n to begin with (n need not be
    whole), so each second keeps its share to within one request.
    """
    at_s = np.array([row.at_s for row in rows])
    second = int(np.bincount(at_s.astype(np.int64)).argmax())
    start_s = max(0.0, second + 0.5 - PEAK_POSITION * shape.period_s)
    low, high = (int(at) for at in np.searchsorted(at_s, [start_s, start_s + shape.period_s]))
    share = shape.mean_rate_hz * rows[-1].at_s / len(rows)
    if share > 1.0:
        raise ConfigError(
            f"{shape.mean_rate_hz:g} requests/s are more than the trace has", field="--rate", fix="lower it"
        )
    offset = float(np.random.default_rng([seed, 0x7_1111]).uniform())
    kept = np.floor(share * np.arange(1, high - low + 1) + offset) > np.floor(
        share * np.arange(high - low) + offset
    )
    prompt_scale, output_scale = _length_scales(rows, shape)
    return [
        Arrival(
            at_s=row.at_s - start_s,
            prompt_tokens=_clip(row.context_tokens * prompt_scale, shape.prompt_max_tokens),
            output_tokens=_clip(row.generated_tokens * output_scale, shape.output_max_tokens),
        )
        for row, keep in zip(rows[low:high], kept, strict=True)
        if keep
    ]


def _length_scales(rows: list[TraceRow], shape: TrafficShape) -> tuple[float, float]:
    """Factors on context and generated tokens: median to median."""
    context_median = float(np.median([row.context_tokens for row in rows]))
    generated_median = float(np.median([row.generated_tokens for row in rows]))
    return (
        shape.prompt_median_tokens / max(1.0, context_median),
        shape.output_median_tokens / max(1.0, generated_median),
    )


def busiest_second_ratio(arrivals: list[Arrival], period_s: float) -> float:
    """Requests in the busiest second over the mean per second; 1.0 is perfectly even."""
    counts = np.bincount([int(arrival.at_s) for arrival in arrivals])
    return float(counts.max() * period_s / len(arrivals))


def _parse_row(cells: list[str], where: str) -> tuple[datetime, int, int]:
    if len(cells) != len(TRACE_COLUMNS):
        raise ConfigError(f"{len(cells)} columns, expected {len(TRACE_COLUMNS)}", field=where)
    text = cells[0].strip()
    found = _TIMESTAMP.fullmatch(text)
    second, decimals, offset = found.groups("") if found else ("", "", "")
    try:
        moment = datetime.fromisoformat(second + offset)
    except ValueError:
        raise ConfigError(
            f"TIMESTAMP '{text[:40]}' is not a time", field=where, fix="like 2023-11-16 18:17:03.979"
        ) from None
    moment = moment.replace(microsecond=int(decimals[:6].ljust(6, "0")))
    counts: list[int] = []
    for name, cell in zip(TRACE_COLUMNS[1:], cells[1:], strict=True):
        try:
            count = int(cell)
        except ValueError:
            raise ConfigError(f"{name} '{cell[:40]}' is not a whole number", field=where) from None
        if not 0 <= count <= MAX_TRACE_TOKENS:
            raise ConfigError(f"{name} is {count}, outside 0 to {MAX_TRACE_TOKENS}", field=where)
        counts.append(count)
    return moment, counts[0], counts[1]


def _log_normal(
    rng: np.random.Generator, median: int, log_std: float, most: int, num: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.clip(np.rint(median * rng.lognormal(0.0, log_std, num)), 1, most).astype(np.int64)


def _clip(value: float, most: int) -> int:
    return int(min(max(round(value), 1), most))
