"""Production's traffic out of vLLM's own metrics: a file of scrapes, or a Prometheus server (:mod:`rose.sim.prometheus`).

Metrics know how many requests ended in each interval, and histograms of their lengths; they know no request by itself.  So a
stretch is drawn: as many requests as ended in each of its intervals, at random moments, with lengths from the histograms (evenly on
a logarithmic scale inside a bucket, then scaled to the mean that the histogram's sum gives).

A file of scrapes is pages as ``GET /metrics`` answers them, each behind a line that says when it was read, and whose it is where
there are several servers::

    # scraped 1764000000 http://host-a:8000
    ...the page...

All input is hostile: lengths of lines, pages, series and files are bounded, and what is not a number is refused with its line.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from rose.coserve.latency import p99_between
from rose.errors import ConfigError
from rose.evaluation.arrivals import MAX_TRACE_DAYS
from rose.sim.arrivals import Floats, Ints
from rose.sim.scenario import ServingSection
from rose.sim.traffic import Drawn, Traffic

MAX_FILE_BYTES = 4 << 30
MAX_LINE_BYTES = 1 << 16
MAX_PAGES = 1_000_000
MAX_SERIES = 1_000_000
MAX_ENGINES = 16_384
MAX_NAMES = 1000
MAX_COUNT = 1e18
"""Of tokens, over a fleet and a year, with room."""
GAP = 3
"""An interval this many times as long as the usual one is taken for time without data: nobody knows what came when in it."""
FEW_RESTARTS = (2, 0.05)
"""So many, or this share of the intervals: counters that go back more often are of several servers that take turns behind one address."""
LATEST_S = 4_102_444_800.0
"""2100: a time after that is milliseconds, or nonsense."""

REQUESTS = "vllm:request_success_total"
STARTED = "process_start_time_seconds"
"""Of the process that answers, where its page has it: not with several API servers."""
RUNNING = "vllm:num_requests_running"
KV_USE = "vllm:kv_cache_usage_perc"
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
HISTOGRAMS = {
    "prompt": "vllm:request_prompt_tokens",
    "output": "vllm:request_generation_tokens",
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
}
"""``tpot``: one value a request, the mean of its tokens, as the simulator has it; ``itl``: one between every two tokens."""
_COUNTERS = (REQUESTS, QUERIES, HITS, STARTED)
_WANTED = (
    *(f"{name}_{part}" for name in HISTOGRAMS.values() for part in ("bucket", "sum")),
    *_COUNTERS,
    RUNNING,
    KV_USE,
)

Bucket = tuple[float, float]
"""From (not included), to (included)."""


@dataclass(kw_only=True, slots=True)
class Histogram:
    """Counts by bucket, and the sum of the values; 0 where it is not known."""

    counts: dict[Bucket, float] = field(default_factory=lambda: dict[Bucket, float]())
    total: float = 0.0

    @property
    def num(self) -> float:
        return sum(self.counts.values())

    @property
    def p99(self) -> float | None:
        below, cumulative = 0.0, dict[float, float]()
        for (low, high), count in sorted(self.counts.items(), key=lambda item: item[0][1]):
            cumulative.setdefault(low, below)  # buckets between that are empty
            below += count
            cumulative[high] = below
        return p99_between({}, cumulative)

    def without_lowest(self, num: float) -> Histogram:
        """With so many fewer in the lowest bucket, as far as it has them."""
        counts = dict(self.counts)
        if counts:
            lowest = min(counts)
            counts[lowest] = max(0.0, counts[lowest] - num)
        return Histogram(counts=counts)

    def add(self, cumulative: Mapping[float, float]) -> None:
        """Of one server: how many more lie at or below each bound."""
        lower, below = 0.0, 0.0
        for bound in sorted(cumulative):
            more = max(0.0, cumulative[bound] - below)
            if more:
                self.counts[lower, bound] = self.counts.get((lower, bound), 0.0) + more
            lower, below = bound, max(below, cumulative[bound])

    def draw(self, num: int, rng: np.random.Generator) -> Ints:
        """So many whole lengths."""
        buckets = sorted(self.counts)
        weights = np.array([self.counts[bucket] for bucket in buckets])
        low = np.array([max(1.0, bucket[0]) for bucket in buckets])
        # Nothing is known of what lies beyond the last bound.
        high = np.array(
            [bucket[1] if math.isfinite(bucket[1]) else max(1.0, bucket[0]) for bucket in buckets]
        )
        high = np.maximum(low, high)
        factor = 1.0
        if self.total > 0:
            ratio = high / low
            means = np.where(ratio > 1, (high - low) / np.log(np.maximum(ratio, 1 + 1e-9)), low)
            factor = float(np.clip(self.total / self.num / (weights @ means / weights.sum()), 0.5, 2.0))
        chosen = rng.choice(len(buckets), size=num, p=weights / weights.sum())
        values = low[chosen] * (high[chosen] / low[chosen]) ** rng.random(num) * factor
        return np.maximum(1, np.rint(values)).astype(np.int64)


@dataclass(kw_only=True, slots=True)
class Metered:
    """What metrics tell of a stretch of time."""

    source: str
    intervals: list[tuple[float, float, float, float]] = field(
        default_factory=lambda: list[tuple[float, float, float, float]]()
    )
    """(from, to, requests that ended, engines that served them), of one server or of all; seconds of the clock."""
    knows_engines: bool = True
    """False: of some interval nothing says how many engines served it; 1 stands there."""
    asked_s: float = 0.0
    """How long a stretch was asked for; 0: from the first interval to the last."""
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram() for name in HISTOGRAMS}
    )
    kv_use: list[float] = field(default_factory=lambda: list[float]())
    queried: float = 0.0
    found: float = 0.0
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class MeteredTraffic(Traffic):
    """Time without data is cut out of it.

    ``edges``, ``ended``: requests up to each moment, as if ``num_engines`` had served at all times; ``engine_s``: seconds of engines up to
    each moment, over ``num_engines``; ``noise``: see :class:`ServingSection`.
    """

    edges: Floats
    ended: Floats
    engine_s: Floats
    prompts: Histogram
    outputs: Histogram
    noise: float

    @property
    def engines_unsaid(self) -> str:
        return f"nothing says how many engines served this traffic, as {RUNNING} is not in it"

    def counted(self, until_s: Floats) -> Floats:
        loops, inside = np.divmod(until_s, self.span_s)
        return loops * self.ended[-1] + np.interp(inside, self.edges, self.ended)

    def engine_share(self) -> Floats:
        edges = self._bins()
        return np.diff(np.interp(edges, self.edges, self.engine_s)) / np.diff(edges)

    def _draw(
        self, start_s: float, length_s: float, copies: float, num_engines: int, rng: np.random.Generator
    ) -> Drawn:
        num = math.ceil(length_s)
        rates = np.diff(self.counted(np.arange(start_s, start_s + num + 0.5, dtype=np.float64))) * copies
        if self.noise > 0:
            shape = 1.0 / self.noise**2
            rates *= rng.gamma(shape, 1.0 / shape, num)
        counts = rng.poisson(rates)
        at_s = np.sort(np.repeat(np.arange(num), counts) + rng.uniform(0.0, 1.0, int(counts.sum())))
        at_s = at_s[at_s < length_s]
        return at_s, self.prompts.draw(len(at_s), rng), self.outputs.draw(len(at_s), rng)


def traffic_of(metered: Metered, num_engines: int | None, config: ServingSection) -> MeteredTraffic:
    """
    Args:
        num_engines: That served it on average; None: as many as the metrics name, else as many as make ``config.requests_per_s``.

    Raises:
        ConfigError: Nothing can be made of them.
    """
    spans = [span for span in metered.intervals if span[1] > span[0]]
    if not spans:
        raise ConfigError(
            "holds no two scrapes of one server",
            field=metered.source,
            fix="scrape once a minute, for a day if you can",
        )
    begin_s, end_s = min(span[0] for span in spans), max(span[1] for span in spans)
    longest_s = GAP * float(np.median([high - low for low, high, _, _ in spans]))
    spans = [span for span in spans if span[1] - span[0] <= longest_s]
    prompts, outputs = metered.histograms["prompt"], metered.histograms["output"]
    ended = sum(span[2] for span in spans)
    for kind, histogram in (("prompt", prompts), ("output", outputs)):
        if ended >= 1 > histogram.num:
            raise ConfigError(
                f"{ended:.0f} requests ended, but no {HISTOGRAMS[kind]} was counted of them",
                field=metered.source,
                fix=f"keep the buckets of {HISTOGRAMS[kind]} in what is scraped, under vLLM's own name",
            )
    if ended < 1:
        raise ConfigError(
            "no request ended while it lasts",
            field=metered.source,
            fix=f"{REQUESTS} must rise: scrape servers that have traffic",
        )
    points = np.unique(np.array([moment for low, high, _, _ in spans for moment in (low, high)]))
    changes = np.zeros((2, len(points)))
    for low, high, num, engines in spans:
        change = (num / (high - low), engines)
        first, last = np.searchsorted(points, [low, high])
        changes[:, first] += change
        changes[:, last] -= change
    rates, engines = np.cumsum(changes, axis=1)[:, :-1]
    known = engines > 0.5
    rates, engines, seconds = np.maximum(0.0, rates[known]), engines[known], np.diff(points)[known]
    if engines.max() > MAX_ENGINES:
        raise ConfigError(
            f"names {engines.max():.0f} engines",
            field=metered.source,
            fix=f"at most {MAX_ENGINES}: narrow it, with --match or fewer files",
        )
    mean = float(np.average(engines, weights=seconds))
    is_known = metered.knows_engines or num_engines is not None
    num = num_engines or max(1, round(mean))
    if not is_known:
        num = float(np.average(rates, weights=seconds)) / config.requests_per_s
    scale = num if metered.knows_engines and num_engines is None else mean
    edges = _total(seconds)
    # vLLM counts a request of one token as 0 s per token; the simulator has no such time of it.
    ones = sum(count for (_, high), count in outputs.counts.items() if high <= 1)
    latencies = {**metered.histograms, "tpot": metered.histograms["tpot"].without_lowest(ones)}
    p99s = {f"{kind}_p99": latencies[kind].p99 for kind in ("ttft", "tpot", "itl")}
    use = metered.kv_use
    return MeteredTraffic(
        source=metered.source,
        num_engines=float(num),
        span_s=float(edges[-1]),
        begin_s=begin_s,
        covered=min(1.0, float(edges[-1]) / max(end_s - begin_s, metered.asked_s)),
        knows_engines=is_known,
        knows_bursts=False,
        kv_use=(float(np.mean(use)), max(use)) if use else None,
        restarts=metered.restarts,
        hit_share=metered.found / metered.queried if metered.queried > 0 else None,
        observed_ms={kind: value * 1e3 for kind, value in p99s.items() if value is not None},
        edges=edges,
        # Of a number that metrics do not name, all that came is theirs; else each engine has at any time what one of those there had.
        ended=_total(rates / engines * scale * seconds),
        engine_s=_total(engines / scale * seconds),
        prompts=prompts,
        outputs=outputs,
        noise=config.noise,
    )


def _total(parts: Floats) -> Floats:
    """Up to each edge, from 0."""
    return np.concatenate([[0.0], np.cumsum(parts)])


# --- scrapes ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Page:
    """One scrape of one server."""

    where: str
    server: str
    at_s: float
    counters: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    buckets: dict[str, dict[float, float]] = field(
        default_factory=lambda: {name: dict[float, float]() for name in HISTOGRAMS}
    )
    sums: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    engines: int = 0
    kv_use: list[float] = field(default_factory=lambda: list[float]())


Key = tuple[str, str, float]
"""What a series counts: metric, kind of histogram, upper bound."""


class _Reader:
    """Lines to pages; a series' name and labels are looked at once."""

    def __init__(self) -> None:
        self._known: dict[str, Key] = {}
        self._models: set[str] = set()
        self._by_metric = {f"{name}_bucket": ("bucket", kind) for kind, name in HISTOGRAMS.items()}
        self._by_metric |= {f"{name}_sum": ("sum", kind) for kind, name in HISTOGRAMS.items()}

    def take(self, page: _Page, line: str, where: str) -> None:
        head, _, text = line.rstrip().rpartition(" ")
        key = self._known.get(head)
        if key is None:
            if len(self._known) >= MAX_SERIES:
                raise ConfigError(
                    f"more than {MAX_SERIES} series", field=where, fix="use --prometheus for such a fleet"
                )
            key = self._known[head] = self._key(head, where)
        metric, kind, bound = key
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"{text[:40]!r} is not a number", field=where) from None
        most = 1.0 if metric == KV_USE else MAX_COUNT
        if not 0 <= value <= most:
            raise ConfigError(f"{metric} is {value:g}, outside 0 to {most:g}", field=where)
        if metric == "bucket":
            held = page.buckets[kind]
            held[bound] = held.get(bound, 0.0) + value
        elif metric == "sum":
            page.sums[kind] = page.sums.get(kind, 0.0) + value
        elif metric == RUNNING:
            page.engines += 1
        elif metric == KV_USE:
            page.kv_use.append(value)
        else:
            page.counters[metric] = page.counters.get(metric, 0.0) + value

    def _key(self, head: str, where: str) -> Key:
        try:
            (family,) = text_string_to_metric_families(f"{head} 0\n")
            (sample,) = family.samples
            metric, kind = self._by_metric.get(sample.name, (sample.name, ""))
            bound = float(sample.labels["le"]) if metric == "bucket" else 0.0
        except (ValueError, KeyError):
            raise ConfigError(f"{head[:60]!r} is no line of a metrics page", field=where) from None
        if sample.timestamp is not None:
            raise ConfigError(
                f"a time stands behind its value: {head[:60]!r}",
                field=where,
                fix="pages as vLLM's GET /metrics answers them, not as another server federates them",
            )
        if math.isnan(bound):
            raise ConfigError("le is not a number", field=where)
        model = sample.labels.get("model_name")
        if model is not None:
            self._models.add(model)
        check_models(self._models, where, "keep pages of one model, and plan for each by itself")
        return metric, kind, bound


def check_models(models: Collection[str], field: str, fix: str) -> None:
    """
    Raises:
        ConfigError: There are several: a sum over them is the traffic of no engine.
    """
    if len(models) > 1:
        names = ", ".join(f"{model[:40]!r}" for model in sorted(models)[:3])
        raise ConfigError(f"holds more than one model: {names}", field=field, fix=fix)


def read_scrapes(path: Path) -> Metered:
    """A file of scrapes, or a folder of them (read in the order of their names).

    Raises:
        ConfigError: ``field`` is ``path:line`` of what is wrong.
    """
    metered = Metered(source=str(path))
    last: dict[str, _Page] = {}
    seen: dict[str, tuple[int, int]] = {}
    first_s = math.inf
    names: set[str] = set()
    has_some = False
    for page in _pages(path, names):
        before = last.get(page.server)
        if before is not None and page.at_s < before.at_s:
            raise ConfigError(
                f"time goes back by {before.at_s - page.at_s:g} s",
                field=page.where,
                fix="sort pages by time; name the server behind it where there are several",
            )
        if before is not None and page.at_s == before.at_s:
            raise ConfigError(
                f"a second page of {page.server or 'a server without a name'} at the same second",
                field=page.where,
                fix="'# scraped SECONDS SERVER' where there are several servers; one page of each at a time",
            )
        first_s = min(first_s, page.at_s)
        if page.at_s - first_s > MAX_TRACE_DAYS * 86400.0:
            raise ConfigError(
                "lies too long after the first", field=page.where, fix=f"at most {MAX_TRACE_DAYS} days"
            )
        has_some = has_some or bool(page.counters or page.engines)
        if not _is_whole(page, before):
            continue
        if before is not None and page.at_s > before.at_s:
            is_restart = _between(metered, before, page)
            restarts, intervals = seen.get(page.server, (0, 0))
            seen[page.server] = (restarts + is_restart, intervals + 1)
        if page.kv_use:
            metered.kv_use.append(sum(page.kv_use) / len(page.kv_use))
        last[page.server] = page
    if not last:
        if names or has_some:
            near = difflib.get_close_matches(REQUESTS, sorted(names), 1)
            raise ConfigError(
                f"has no {REQUESTS}" + (f", but {near[0]!r}" if near else ""),
                field=str(path),
                fix="pages as vLLM's GET /metrics answers them, under vLLM's own names",
            )
        raise ConfigError(
            "holds no page of vLLM's metrics",
            field=str(path),
            fix="what GET /metrics answers, each behind a line '# scraped SECONDS [SERVER]'",
        )
    for server, (restarts, intervals) in seen.items():
        check_restarts(restarts, intervals, f"{path} {server[:200]!r}" if server else str(path))
        metered.restarts += restarts
    return metered


def check_restarts(restarts: int, intervals: int, field: str) -> None:
    """
    Raises:
        ConfigError: More than :data:`FEW_RESTARTS`.
    """
    few, share = FEW_RESTARTS
    if restarts > few and restarts > share * intervals:
        raise ConfigError(
            f"another process answered, or counters went back, {restarts} of {intervals} times: the address of a balancer, pages of several "
            "servers without their names, or servers that do not stay up",
            field=field,
            fix="scrape each server at its own address, its name behind the time",
        )


def _is_whole(page: _Page, before: _Page | None) -> bool:
    """False: the server did not answer, or not to the end; taken for a restart, the next page's counts of a lifetime would be those of one
    interval."""
    had = {} if before is None else before.buckets
    return REQUESTS in page.counters and all(page.buckets[kind] for kind, held in had.items() if held)


def _fell(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    return any(after.get(name, value) < value for name, value in before.items())


def _between(metered: Metered, before: _Page, page: _Page) -> bool:
    """What was counted between two scrapes of a server.  True, and nothing, where it was started again: nobody knows what it had served
    by then, nor whether all that the new one counts is of this interval."""
    was, now_at = before.counters.get(STARTED), page.counters.get(STARTED)
    is_other = was is not None and now_at is not None and was != now_at
    if is_other or _fell(before.counters, page.counters) or _fell(before.sums, page.sums):
        return True

    def more(now: Mapping[str, float], then: Mapping[str, float], name: str) -> float:
        if name not in now or name not in then:
            return 0.0  # what was counted before it was first seen is of another time
        return max(0.0, now[name] - then[name])

    num = more(page.counters, before.counters, REQUESTS)
    engines = page.engines or before.engines
    if not engines:
        metered.knows_engines = False
    metered.intervals.append((before.at_s, page.at_s, num, max(1, engines)))
    metered.queried += more(page.counters, before.counters, QUERIES)
    metered.found += more(page.counters, before.counters, HITS)
    for kind, histogram in metered.histograms.items():
        old = before.buckets[kind]
        if old:
            histogram.add({bound: count - old.get(bound, 0.0) for bound, count in page.buckets[kind].items()})
        histogram.total += more(page.sums, before.sums, kind)
    return False


def _pages(path: Path, names: set[str]) -> Iterator[_Page]:
    """Args:
    names: Gets names of vLLM's metrics, for the case that the one which is needed is not among them.
    """
    reader = _Reader()
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    num_bytes = num_pages = 0
    for file in files:
        page: _Page | None = None
        for where, line in _lines(file):
            num_bytes += len(line)
            if num_bytes > MAX_FILE_BYTES:
                raise ConfigError(
                    f"more than {MAX_FILE_BYTES} bytes",
                    field=str(path),
                    fix="use --prometheus, or scrape less often",
                )
            if line.startswith("# scraped"):
                if page is not None:
                    yield page
                num_pages += 1
                if num_pages > MAX_PAGES:
                    raise ConfigError(f"more than {MAX_PAGES} pages", field=where)
                page = _begin(line, where)
            elif line.startswith(_WANTED):
                if page is None:
                    raise ConfigError(
                        "no line before it says when it was scraped",
                        field=where,
                        fix="put '# scraped SECONDS' before each page: echo \"# scraped $(date +%s)\"",
                    )
                reader.take(page, line, where)
            elif line.startswith("vllm") and len(names) < MAX_NAMES:
                names.add(line.partition(" ")[0].partition("{")[0][:80])
        if page is not None:
            yield page


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    try:
        with file.open("rb") as stream:
            number = 0
            while data := stream.readline(MAX_LINE_BYTES):
                number += 1
                where = f"{file}:{number}"
                if len(data) == MAX_LINE_BYTES:
                    raise ConfigError(f"a line of more than {MAX_LINE_BYTES} bytes", field=where)
                # Editors of other systems begin a file with a byte order mark.
                yield where, data.decode("utf-8-sig" if number == 1 else "utf-8")
    except FileNotFoundError:
        raise ConfigError("does not exist", field=str(file)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read as text: {error}", field=str(file)) from error


def _begin(line: str, where: str) -> _Page:
    words = line.split()
    try:
        at_s = float(words[2])
    except (IndexError, ValueError):
        at_s = math.nan
    if not 0 <= at_s <= LATEST_S:
        raise ConfigError(
            f"{line.strip()[:60]!r} does not say when",
            field=where,
            fix="'# scraped SECONDS [SERVER]', seconds since 1970",
        )
    return _Page(where=where, server=words[3] if len(words) > 3 else "", at_s=at_s)
