"""What production's users felt: percentiles per arm, and ratios of two arms with intervals.

Pure arithmetic on the sender's records (:class:`rose.demo.traffic.RequestRecord` as JSON lines).

* Percentiles are those of :mod:`rose.evaluation.statistics`; P99 of few values says so by its interval.
* Failed requests have no latency.  They are counted, and count as violations.
* A ratio is percentile(A) / percentile(B).  Its 95 % interval is a bootstrap over *request indices*, the
  same draw for both arms: the arms replay one schedule, so index ``i`` is one request seen in both, and
  its gaps between tokens depend on each other.  An index that failed in either arm is left out of ratios.
  Every index weighs the same, however often an arm sent it: its last cycle may have been cut short.
* The A/A ratio is the same figure for two arms that differ in nothing: the noise any other ratio has to beat.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rose.errors import ConfigError
from rose.evaluation.statistics import Floats, percentile, weighted_percentile
from rose.policy.coserving.timing import is_late

Metric = Literal["ttft", "itl", "stall"]
MAX_RECORDS_BYTES = 512 * 2**20
NUM_RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Production's objectives: first token, and tokens after it (as a mean per request)."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLatency:
    """One finished request.  ``error`` is None or the latencies are meaningless."""

    index: int
    phase: str
    at_s: float
    ttft_s: float
    end_s: float
    itl_s: tuple[float, ...]
    num_tokens: int
    late_s: float
    error: str | None

    @property
    def stall_s(self) -> float:
        """The longest wait between two tokens; 0 for a single token."""
        return max(self.itl_s, default=0.0)

    @property
    def tpot_s(self) -> float:
        return (self.end_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    def violates(self, slo: Slo) -> bool:
        late = is_late(self.ttft_s, slo.ttft_s) or is_late(self.tpot_s, slo.tpot_s)
        return self.error is not None or late


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmStats:
    """One arm.  Latencies are None when no request finished."""

    num_requests: int
    num_errors: int
    num_violations: int
    num_tokens: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    stall_p50_s: float | None
    stall_p99_s: float | None
    stall_max_s: float | None
    late_p99_s: float | None
    """Of the sender itself: a figure near the latencies makes them worthless."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """``value`` with its 95 % interval; ``num_pairs`` request indices stood behind it."""

    value: float
    low: float
    high: float
    num_pairs: int


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a records file; a torn last line (the sender was killed) is dropped.

    Raises:
        ConfigError: Not readable, too large, or a line in the middle is no JSON object.
    """
    try:
        if path.stat().st_size > MAX_RECORDS_BYTES:
            raise ConfigError(f"larger than {MAX_RECORDS_BYTES} bytes", field=str(path))
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=str(path)) from error
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines):
                break
            raise ConfigError(f"is not a record: {error}", field=f"{path}:{number}") from error
        records.append(record)
    return records


def to_samples(records: Iterable[Mapping[str, Any]]) -> list[RequestLatency]:
    """The request records, as samples, in their order."""
    return [
        RequestLatency(
            index=int(record["index"]),
            phase=str(record["phase"]),
            at_s=float(record["at_s"]),
            ttft_s=float(record["ttft_s"] or 0.0),
            end_s=float(record["end_s"] or 0.0),
            itl_s=tuple(record["itl_s"]),
            num_tokens=int(record["num_tokens"]),
            late_s=float(record["late_s"]),
            error=record["error"],
        )
        for record in records
        if record.get("type") == "request"
    ]


def arm_stats(samples: Sequence[RequestLatency], slo: Slo) -> ArmStats:
    ok = [sample for sample in samples if sample.error is None]
    return ArmStats(
        num_requests=len(samples),
        num_errors=len(samples) - len(ok),
        num_violations=sum(sample.violates(slo) for sample in samples),
        num_tokens=sum(sample.num_tokens for sample in ok),
        ttft_p50_s=_of(_values(ok, "ttft")[0], 0.50),
        ttft_p99_s=_of(_values(ok, "ttft")[0], 0.99),
        itl_p50_s=_of(_values(ok, "itl")[0], 0.50),
        itl_p99_s=_of(_values(ok, "itl")[0], 0.99),
        stall_p50_s=_of(_values(ok, "stall")[0], 0.50),
        stall_p99_s=_of(_values(ok, "stall")[0], 0.99),
        stall_max_s=_of(_values(ok, "stall")[0], 1.0),
        late_p99_s=_of(np.array([sample.late_s for sample in samples], dtype=np.float64), 0.99),
    )


def _of(values: Floats, fraction: float) -> float | None:
    return percentile(values, fraction) if len(values) else None


def ratio(
    above: Sequence[RequestLatency],
    below: Sequence[RequestLatency],
    metric: Metric,
    fraction: float,
    *,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> Ratio | None:
    """``percentile(above) / percentile(below)``; None when no request index finished in both."""
    failed = {s.index for s in (*above, *below) if s.error is not None}
    paired = sorted(({s.index for s in above} & {s.index for s in below}) - failed)
    sides: list[tuple[Floats, npt.NDArray[np.int64], Floats]] = []
    for arm in (above, below):
        values, owner = _values([s for s in arm if s.index in set(paired)], metric)
        if len(values) == 0:
            return None
        order = np.argsort(values, kind="stable")
        times = Counter(s.index for s in arm)
        share = np.array([1.0 / times[index] for index in owner[order].tolist()])
        sides.append((values[order], np.searchsorted(paired, owner[order]), share))

    def estimate(weight_of_pair: Floats) -> float:
        top, bottom = (
            weighted_percentile(values, weight_of_pair[pair] * share, fraction)
            for values, pair, share in sides
        )
        return top / bottom if bottom > 0 else float("nan")

    rng = np.random.default_rng(seed)
    even = np.full(len(paired), 1.0 / len(paired))
    draws = [estimate(rng.multinomial(len(paired), even).astype(np.float64)) for _ in range(num_resamples)]
    finite = np.array([draw for draw in draws if np.isfinite(draw)])
    value = estimate(np.ones(len(paired)))
    if not np.isfinite(value) or len(finite) == 0:
        return None
    return Ratio(
        value=value,
        low=float(np.quantile(finite, 0.025)),
        high=float(np.quantile(finite, 0.975)),
        num_pairs=len(paired),
    )


def _values(samples: Sequence[RequestLatency], metric: Metric) -> tuple[Floats, npt.NDArray[np.int64]]:
    """All values of a metric, and the request index that each belongs to."""
    if metric == "itl":
        values = [gap for sample in samples for gap in sample.itl_s]
        owners = [sample.index for sample in samples for _ in sample.itl_s]
    else:
        # A request of one token has no stall to speak of: it would pull the percentile to zero.
        kept = samples if metric == "ttft" else [sample for sample in samples if sample.itl_s]
        values = [sample.ttft_s if metric == "ttft" else sample.stall_s for sample in kept]
        owners = [sample.index for sample in kept]
    return np.array(values, dtype=np.float64), np.array(owners, dtype=np.int64)
