"""``rose plan``: the command line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rose.errors import ConfigError
from rose.evaluation.page import make_folder
from rose.progress import Bars
from rose.sim.metrics_source import MAX_ENGINES, read_scrapes, traffic_of
from rose.sim.plan import GPU_HOUR_PRICE, make_plan
from rose.sim.plan_page import write_plan
from rose.sim.plan_words import document, text
from rose.sim.prometheus import PrometheusQuery, read_prometheus
from rose.sim.scenario import Scenario
from rose.sim.scenario_file import load_scenario
from rose.sim.traffic import Traffic, from_trace, generated

DEFAULTS = ("fleet.serving=64", "cells.warm_s=30", "cells.seconds=330", "cells.in_flight_per_engine=32")
"""Without a scenario: as examples/scenarios/plan.toml."""
MAX_TOKEN_BYTES = 16_384
MAX_PRICE = 1e6


def plan(
    prometheus: Annotated[
        str | None, typer.Option(help="URL of the Prometheus server that scrapes your vLLM servers.")
    ] = None,
    scrapes: Annotated[
        Path | None, typer.Option(help="Pages of vLLM's /metrics, as above: a file, or a folder of files.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="One row per request: CSV with TIMESTAMP,ContextTokens,GeneratedTokens (Azure's format)."
        ),
    ] = None,
    scenario: Annotated[
        Path | None,
        typer.Option(help="Device, models, limits, your job, as TOML; see examples/scenarios/plan.toml."),
    ] = None,
    engines: Annotated[
        int | None,
        typer.Option(
            help="How many engines served this traffic. Default: what the metrics name; a trace names none."
        ),
    ] = None,
    gpu_hour_price: Annotated[float, typer.Option(help="Of one GPU hour, in dollars.")] = GPU_HOUR_PRICE,
    match: Annotated[
        str, typer.Option(help="""Labels of the fleet in Prometheus: 'job="vllm",cluster="eu"'.""")
    ] = "",
    hours: Annotated[float, typer.Option(help="How much of Prometheus' past to read.")] = 24.0,
    end: Annotated[
        str,
        typer.Option(
            help="Its end: 'now', or a moment like 2026-11-20T00:00+00:00; without a zone it is UTC."
        ),
    ] = "now",
    step: Annotated[
        int, typer.Option(help="Seconds between two points; at least four times your scrape interval.")
    ] = 300,
    prometheus_token_file: Annotated[
        Path | None, typer.Option(help="A file with a bearer token for Prometheus.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where plan.html and plan.json go.")] = Path("out/plan"),
    as_json: Annotated[bool, typer.Option("--json", help="Print plan.json instead of the summary.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting: a.b=value; repeatable.")
    ] = None,
) -> None:
    """What rollouts a serving fleet can lend, at what risk to production, worth how many GPUs and how much money a month.

    Give it your traffic in one of three ways (without any, a generator's stands in):

    [bold]rose plan --prometheus http://prometheus:9090 --match 'job="vllm"'[/bold]

    [bold]rose plan --scrapes day.prom[/bold], a file that this makes, a page a minute:
    while sleep 60; do echo "# scraped $(date +%s)"; curl -s http://HOST:8000/metrics; done > day.prom
    (several servers: their name behind the time, one file each in a folder, or all in one)

    [bold]rose plan --trace requests.csv --engines 64[/bold]

    Then say what runs there: --set fleet.device=h200 --set serving.model=qwen2.5-32b --set serving.slo_ttft_ms=1000, or a
    --scenario with your own device, models and job. Writes [bold]plan.html[/bold], one page to show, and plan.json.

    Everything is simulated with the policies that the daemons run; nothing is started, and nothing is sent but the queries.
    Takes some minutes on two cores. Exit 0 with a plan, whether or not it recommends to lend, 2 with a message that names what to mend.
    """
    given = [
        name
        for name, value in (("--prometheus", prometheus), ("--scrapes", scrapes), ("--trace", trace))
        if value
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other", field=given[1], fix="give one of them")
    if engines is not None and not 1 <= engines <= MAX_ENGINES:
        raise ConfigError(f"must be 1 to {MAX_ENGINES}, got {engines}", field="--engines")
    if not (math.isfinite(gpu_hour_price) and 0 <= gpu_hour_price <= MAX_PRICE):
        raise ConfigError(f"must be 0 to {MAX_PRICE:g}, got {gpu_hour_price:g}", field="--gpu-hour-price")
    if match and prometheus is None:
        raise ConfigError("is for --prometheus", field="--match")
    config, is_named = load(scenario, overrides or [])
    make_folder(out)
    with Bars(24) as progress:
        bar = progress.add_task("reading", total=1.0)

        def show(share: float, what: str) -> None:
            progress.update(bar, completed=share, description=what)

        asked = None
        if prometheus is not None:
            token = "" if prometheus_token_file is None else read_token(prometheus_token_file)
            asked = PrometheusQuery(
                url=prometheus, end_s=moment(end), hours=hours, step_s=step, match=match, token=token
            )
        traffic = read_traffic(
            config,
            engines,
            asked=asked,
            scrapes=scrapes,
            trace=trace,
            progress=lambda share: show(share, "reading" if asked is None else f"asking {asked.url}"),
        )
        config = of_fleet(config, traffic, engines, is_named=is_named)
        result = make_plan(config, traffic, price=gpu_hour_price, progress=show)
    paths = write_plan(result, out)
    if as_json:
        typer.echo(json.dumps(document(result), indent=1))
        return
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(text(result))
    console.print("wrote " + ", ".join(str(path) for path in paths))


def read_traffic(
    config: Scenario,
    engines: int | None,
    *,
    asked: PrometheusQuery | None = None,
    scrapes: Path | None = None,
    trace: Path | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Traffic:
    """From the one source that is given; else the scenario's trace or generator."""
    serving = config.serving
    if asked is not None:
        return traffic_of(read_prometheus(asked, progress), engines, serving)
    if scrapes is not None:
        return traffic_of(read_scrapes(scrapes), engines, serving)
    path = trace or serving.trace
    if path is not None:
        return from_trace(path, engines, serving)
    return generated(engines or config.fleet.serving, serving)


def load(path: Path | None, overrides: list[str]) -> tuple[Scenario, bool]:
    """The scenario, and whether somebody named the size of the fleet.

    Raises:
        ConfigError: As :func:`load_scenario`.
    """
    if any(text.partition("=")[0].strip() == "fleet.dedicated" for text in overrides):
        raise ConfigError(
            "has no effect on a plan",
            field="--set: fleet.dedicated",
            fix="cells.dedicated: the job's own engines beside cells.serving, in what is simulated",
        )
    config = load_scenario(path, [*(DEFAULTS if path is None else ()), *overrides])
    if path is None:
        return config, any(text.partition("=")[0].strip() == "fleet.serving" for text in overrides)
    return config, "serving" in config.fleet.model_fields_set


def of_fleet(config: Scenario, traffic: Traffic, engines: int | None, *, is_named: bool) -> Scenario:
    """The scenario with as many serving engines as the traffic was served by, where that is known.

    Raises:
        ConfigError: Neither the traffic nor anybody (``is_named``) says how many there are.
    """
    is_blind = traffic.is_measured and not traffic.knows_engines
    if is_blind and not (engines or is_named):
        raise ConfigError(
            f"{traffic.engines_unsaid}; it has {traffic.total:.3g} requests a second",
            field=traffic.source,
            fix="--engines N; or the size of your fleet, --set fleet.serving=N, each engine then with serving.requests_per_s",
        )
    num = engines or (
        max(1, round(traffic.num_engines)) if traffic.is_measured and not is_blind else config.fleet.serving
    )
    if num < 1:
        raise ConfigError(
            "must be 1 or more: it is these that lend", field="fleet.serving", fix="--engines N"
        )
    return config.model_copy(update={"fleet": config.fleet.model_copy(update={"serving": num})})


def moment(word: str) -> float:
    """Seconds since 1970.

    Raises:
        ConfigError: It is no moment.
    """
    if word == "now":
        return time.time()
    try:
        at = datetime.fromisoformat(word)
    except ValueError:
        raise ConfigError(
            f"'{word[:40]}' is no moment", field="--end", fix="'now', or like 2026-11-20T00:00+00:00"
        ) from None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def read_token(path: Path) -> str:
    """
    Raises:
        ConfigError: It cannot be read, or is no token.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field="--prometheus-token-file") from error
    token = data.decode("ascii", errors="replace").strip()
    if (
        not token
        or len(data) > MAX_TOKEN_BYTES
        or not token.isascii()
        or not token.isprintable()
        or " " in token
    ):
        raise ConfigError(
            f"{path} holds no token", field="--prometheus-token-file", fix="one line, nothing else"
        )
    return token
