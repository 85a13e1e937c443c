"""Production's traffic from a Prometheus server that scrapes vLLM: few queries, each summed over the fleet by the server itself.

Of `the HTTP API <https://prometheus.io/docs/prometheus/latest/querying/api/>`_ two routes are used: ``query_range`` for what changes over
the stretch, ``query`` at its end for the histograms of the whole of it.  Answers are bounded in time and size; a token goes to the given
server and nowhere else, and no redirect is followed.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

from rose.errors import ConfigError
from rose.sim.metrics_source import (
    HISTOGRAMS,
    HITS,
    KV_USE,
    LATEST_S,
    MAX_COUNT,
    QUERIES,
    REQUESTS,
    RUNNING,
    Metered,
    check_models,
    check_restarts,
)
from rose.wire.http_client import ask, open_client

FIELD = "--prometheus"
ONE_AN_ENGINE = f"{HISTOGRAMS['prompt']}_sum"
"""A counter of which each engine has one series."""
NEAR = 'count by (__name__) ({__name__=~"vllm.request_success.*"})'
MAX_POINTS = 11_000
"""Prometheus answers no more for one series."""
MAX_ANSWER_BYTES = 32 << 20
MAX_SERIES = 10_000
MAX_MATCH = 1000
TIMEOUT_S = 120.0
MIN_STEP_S = 15
MIN_HELD = 4
"""Scrapes in a step: of one nothing can have risen, and one or two may fail or lie just outside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrometheusQuery:
    """What to ask for.

    Raises:
        ConfigError: Names the option.
    """

    url: str
    end_s: float
    hours: float
    step_s: int
    match: str = ""
    """Labels that the series must have, as in PromQL: ``job="vllm",cluster=~"eu.*"``."""
    token: str = ""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("is no http or https URL", field=FIELD, fix="http://HOST:9090")
        if parts.username or parts.query or parts.fragment:
            raise ConfigError(
                "holds more than host and path", field=FIELD, fix="a token goes into --prometheus-token-file"
            )
        if not (math.isfinite(self.hours) and 0 < self.hours <= 24 * 366):
            raise ConfigError(f"must be above 0 and at most a year, got {self.hours:g}", field="--hours")
        if self.step_s < MIN_STEP_S or self.hours * 3600 < 2 * self.step_s:
            raise ConfigError(
                f"must be {MIN_STEP_S} or more, and twice within --hours, got {self.step_s}", field="--step"
            )
        if self.hours * 3600 / self.step_s > MAX_POINTS:
            raise ConfigError(
                f"{self.step_s} s make more than {MAX_POINTS} points of {self.hours:g} hours",
                field="--step",
                fix=f"at least {math.ceil(self.hours * 3600 / MAX_POINTS)}",
            )
        if not 0 < self.end_s <= LATEST_S:
            raise ConfigError(f"{self.end_s:g} is no moment in seconds since 1970", field="--end")
        if len(self.match) > MAX_MATCH or "{" in self.match or "}" in self.match:
            raise ConfigError(
                "is no list of labels", field="--match", fix="""without braces: job="vllm",cluster=~"eu.*\""""
            )


def read_prometheus(
    asked: PrometheusQuery, progress: Callable[[float], None] = lambda share: None
) -> Metered:
    """
    Args:
        progress: Told before each query what share of them is answered: the first may take long.

    Raises:
        ConfigError: The server refuses, or has no such series.
        EngineError: It does not answer.
    """
    return asyncio.run(_read(asked, progress))


async def _read(asked: PrometheusQuery, progress: Callable[[float], None]) -> Metered:
    step, where = f"{asked.step_s}s", f"{{{asked.match}}}"
    whole = f"{int(asked.hours * 3600)}s"
    over_time = {
        "requests": f"sum(increase({REQUESTS}{where}[{step}]))",
        "engines": f"count({RUNNING}{where})",
        "kv_use": f"avg({KV_USE}{where})",
        "held": f"max(count_over_time({ONE_AN_ENGINE}{where}[{step}]))",
    }
    at_end = {
        "queried": f"sum(increase({QUERIES}{where}[{whole}]))",
        "found": f"sum(increase({HITS}{where}[{whole}]))",
        "restarts": f"sum(resets({ONE_AN_ENGINE}{where}[{whole}]))",
        "scrapes": f"sum(count_over_time({ONE_AN_ENGINE}{where}[{whole}]))",
    }
    at_end["models"] = f"sum by (model_name) (increase({REQUESTS}{where}[{whole}]))"
    for kind, name in HISTOGRAMS.items():
        at_end[kind] = f"sum by (le) (increase({name}_bucket{where}[{whole}]))"
        at_end[f"{kind}_sum"] = f"sum(increase({name}_sum{where}[{whole}]))"
    headers = {"Authorization": f"Bearer {asked.token}"} if asked.token else {}
    answers: dict[str, list[Any]] = {}
    async with open_client(headers) as client:
        for number, (name, query) in enumerate([*over_time.items(), *at_end.items()]):
            progress(number / (len(over_time) + len(at_end)))
            if name in over_time:
                route, when = (
                    "query_range",
                    {
                        "start": f"{asked.end_s - asked.hours * 3600 + asked.step_s:.0f}",
                        "end": f"{asked.end_s:.0f}",
                        "step": str(asked.step_s),
                    },
                )
            else:
                route, when = "query", {"time": f"{asked.end_s:.0f}"}
            answers[name] = await _ask(client, asked, route, {"query": query, **when})
        _check_step(asked, answers["held"])
        if not _points(answers["requests"]):
            near = await _ask(client, asked, "query", {"query": NEAR, "time": f"{asked.end_s:.0f}"})
            raise _missing(asked, [str(_in(_in(each, "metric"), "__name__")) for each in near])
    return _metered(asked, answers)


def _check_step(asked: PrometheusQuery, answer: list[Any]) -> None:
    held = max((value for _, value in _points(answer)), default=0.0)
    if 0 < held < MIN_HELD:
        raise ConfigError(
            f"{asked.step_s} s hold {held:.0f} scrape{'s' if held > 1 else ''}, too few to tell what rose in each",
            field="--step",
            fix=f"at least {math.ceil(MIN_HELD * asked.step_s / held)}: {MIN_HELD} times your scrape interval",
        )


def _missing(asked: PrometheusQuery, near: list[str]) -> ConfigError:
    """Args:
    near: Names of what may be the counter of requests, whatever its labels.
    """
    found = ""
    if REQUESTS in near:
        found = "; there is one without --match, --hours and --end"
    elif near:
        found = f"; there is {near[0][:80]!r}: its name was changed on the way"
    return ConfigError(
        f"has no {REQUESTS}{{{asked.match}}} in these {asked.hours:g} hours{found}",
        field=FIELD,
        fix="check --match, --end and --hours; the server must scrape vLLM's /metrics and keep vLLM's names",
    )


async def _ask(
    client: httpx.AsyncClient, asked: PrometheusQuery, route: str, parameters: dict[str, str]
) -> list[Any]:
    full = f"{asked.url.rstrip('/')}/api/v1/{route}?{urlencode(parameters)}"
    what = f"{parameters['query'][:80]}: "
    answer = await ask(
        client, "GET", full, timeout_s=TIMEOUT_S, max_bytes=MAX_ANSWER_BYTES, field=FIELD, what=what
    )
    if answer.status in (401, 403):
        raise ConfigError(
            f"answered {answer.status}",
            field=FIELD,
            fix="a file with its bearer token: --prometheus-token-file",
        )
    document = None
    try:
        document = json.loads(answer.body)
        result = document["data"]["result"] if answer.status == 200 else None
    except (ValueError, KeyError, TypeError, RecursionError):
        result = None
    if answer.status == 400 and isinstance(document, dict) and document.get("errorType") == "bad_data":
        raise ConfigError(
            f"is refused: {str(document.get('error'))[:300]!r}",
            field="--match" if asked.match else FIELD,
            fix="""labels as in PromQL: job="vllm",cluster=~"eu.*\"""",
        )
    if not isinstance(result, list) or len(result) > MAX_SERIES:
        text = answer.body[:120].decode(errors="replace")
        raise ConfigError(
            f"{what}answered {answer.status}: {text!r}",
            field=FIELD,
            fix="the URL of a Prometheus server, its /api/v1 left out",
        )
    return result


def _metered(asked: PrometheusQuery, answers: dict[str, list[Any]]) -> Metered:
    source = (
        f"{asked.url}, {asked.hours:g} h to {datetime.fromtimestamp(asked.end_s, UTC):%Y-%m-%d %H:%M} UTC"
    )
    metered = Metered(source=source, asked_s=int(asked.hours * 3600 / asked.step_s) * asked.step_s)
    requests = _points(answers["requests"])
    models = {str(_in(_in(each, "metric"), "model_name")): [each] for each in answers["models"]}
    check_models(
        [model for model, each in models.items() if _number(each) >= 1],
        FIELD,
        """plan for one by itself: --match 'model_name="NAME"'""",
    )
    # What rose in the step that ends at the point; who served it may be gone at its end.
    engines = dict(_points(answers["engines"]))
    metered.knows_engines = bool(engines)
    for at_s, num in requests:
        count = engines.get(at_s) or engines.get(at_s - asked.step_s) or (0.0 if engines else 1.0)
        if count:
            metered.intervals.append((at_s - asked.step_s, at_s, num, count))
    metered.kv_use = [value for _, value in _points(answers["kv_use"]) if value <= 1.0]
    metered.queried, metered.found = _number(answers["queried"]), _number(answers["found"])
    metered.restarts = round(_number(answers["restarts"]))
    check_restarts(metered.restarts, round(_number(answers["scrapes"])), source)
    for kind, histogram in metered.histograms.items():
        cumulative: dict[float, float] = {}
        for series in answers[kind]:
            bound = _float(_in(_in(series, "metric"), "le"))
            if bound is not None:
                # One bound may be written in two ways: 1000 and 1000.0.
                cumulative[bound] = cumulative.get(bound, 0.0) + _number([series])
        histogram.add(cumulative)
        histogram.total = _number(answers[f"{kind}_sum"])
    return metered


def _points(result: list[Any]) -> list[tuple[float, float]]:
    """The one series of a range; points that are no numbers are left out, as Prometheus' NaN is."""
    values = _in(result[0], "values") if result else None
    found: list[tuple[float, float]] = []
    for point in values if isinstance(values, list) else []:
        pair = point if isinstance(point, list) and len(point) == 2 else (None, None)
        at_s, value = _float(pair[0]), _float(pair[1])
        if at_s is not None and value is not None and 0 <= at_s <= LATEST_S and 0 <= value <= MAX_COUNT:
            found.append((at_s, value))
    return sorted(found)


def _number(result: list[Any]) -> float:
    """Of the one value of an instant; 0 where there is none."""
    pair = _in(result[0], "value") if result else None
    value = _float(pair[1]) if isinstance(pair, list) and len(pair) == 2 else None
    return value if value is not None and 0 <= value <= MAX_COUNT else 0.0


def _in(tree: Any, name: str) -> Any:
    return tree.get(name) if isinstance(tree, dict) else None


def _float(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number
