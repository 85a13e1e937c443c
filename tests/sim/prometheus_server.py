"""One hour of a fleet's metrics, and a Prometheus server that has them: the stand-in, and the real program where it is installed.

The fleet: two engines, each 0.2 requests a second in the first half hour and 0.6 in the second; half of the prompts have 50 to 100 tokens
and half 500 to 1,000, all outputs 20 to 50.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
from aiohttp import web

from rose.proc import free_port

BEGIN_S = 1_700_000_000
SPAN_S = 3600
SCRAPED_S = 15
ENGINES = ("0", "1")
PROGRAM = shutil.which("prometheus")
LABELS = {"job": "vllm", "model_name": "m"}


def ended(at_s: float) -> float:
    """Requests of one engine so far."""
    since_s = min(SPAN_S, max(0.0, at_s - BEGIN_S))
    return 1000.0 + 0.2 * min(since_s, SPAN_S / 2) + 0.6 * max(0.0, since_s - SPAN_S / 2)


def series(at_s: float) -> dict[tuple[str, str], float]:
    """(metric, le or nothing) -> value of one engine."""
    num = ended(at_s)
    found = {
        ("vllm:request_success_total", ""): num,
        ("vllm:num_requests_running", ""): 3.0,
        ("vllm:kv_cache_usage_perc", ""): 0.25,
        ("vllm:prefix_cache_queries_total", ""): 400 * num,
        ("vllm:prefix_cache_hits_total", ""): 100 * num,
    }
    histograms = {
        "vllm:request_prompt_tokens": ({50: 0.0, 100: 0.5, 500: 0.5, 1000: 1.0}, 400.0),
        "vllm:request_generation_tokens": ({20: 0.0, 50: 1.0}, 32.0),
        "vllm:time_to_first_token_seconds": ({0.1: 0.9, 0.25: 1.0}, 0.1),
        "vllm:request_time_per_output_token_seconds": ({0.005: 0.2, 0.01: 0.9, 0.025: 1.0}, 0.008),
        "vllm:inter_token_latency_seconds": ({0.01: 0.8, 0.025: 0.9, 0.1: 1.0}, 0.008),
    }
    for name, (buckets, mean) in histograms.items():
        found |= {(f"{name}_bucket", f"{bound}"): share * num for bound, share in buckets.items()}
        found[f"{name}_bucket", "+Inf"] = num
        found[f"{name}_sum", ""] = mean * num
    return found


def scrape(at_s: float, engines: tuple[str, ...] = ENGINES) -> str:
    """As vLLM's own page has it."""
    lines = ["# HELP vllm:num_requests_running Number of requests", "python_gc_objects_collected_total 3.0"]
    for engine in engines:
        for (metric, bound), value in series(at_s).items():
            le = f'le="{bound}",' if bound else ""
            lines.append(f'{metric}{{engine="{engine}",{le}model_name="m"}} {value}')
    return "\n".join(lines) + "\n"


def _answer(
    query: str, at_s: float, models: tuple[str, ...] = ("m",), engines: int = 2, restarts: int = 0
) -> list[dict[str, object]]:
    """What Prometheus says to the forms of query that ROSE sends."""
    found = re.fullmatch(
        r'(sum|count|avg|max)(?: by \((le|model_name)\))? ?\((?:(increase|resets|count_over_time)\()?([a-z0-9:_]+)\{job="vllm"\}(?:\[(\d+)s\]\))?\)',
        query,
    )
    assert found is not None, query
    _, by, over, metric, window = found.groups()
    if by == "model_name":
        return [{"metric": {by: model}, "value": [at_s, "2"]} for model in models]
    answers: list[dict[str, object]] = []
    for (name, bound), value in series(at_s).items():
        if name != metric:
            continue
        if over == "increase":
            value = 2 * (value - series(at_s - float(window))[name, bound])
        elif over == "resets":
            value = restarts
        elif over == "count_over_time":
            value = (1 if query.startswith("max") else 2) * int(window) // SCRAPED_S
        elif query.startswith("count"):
            value = engines
        answers.append({"metric": {"le": bound} if by else {}, "value": [at_s, str(value)]})
    return answers


@asynccontextmanager
async def stand_in(
    token: str = "",
    models: tuple[str, ...] = ("m",),
    engines: Callable[[float], int] = lambda since_s: 2,
    silent_s: tuple[float, float] = (0.0, 0.0),
    restarts: int = 0,
    has: str = "",
) -> AsyncIterator[str]:
    """The two routes that ROSE uses; the contract tests hold it to the real program.

    Args:
        engines: Of the seconds since the beginning; the requests of all stay as many.  0: none has that metric.
        has: The name under which the requests are found, where those asked for are not.
        silent_s: From and to: no points are known, but for the end (as where nothing was scraped).
    """

    async def query(request: web.Request) -> web.Response:
        if token and request.headers.get("Authorization") != f"Bearer {token}":
            return web.Response(status=401)
        asked = request.query
        if has:
            is_asked = asked["query"] == 'count by (__name__) ({__name__=~"vllm.request_success.*"})'
            result = [{"metric": {"__name__": has}, "value": [0, "2"]}] if is_asked else []
            return web.json_response({"status": "success", "data": {"result": result}})
        if request.path.endswith("query"):
            result = _answer(asked["query"], float(asked["time"]), models, restarts=restarts)
        else:
            at_s, end_s, step_s = (float(asked[name]) for name in ("start", "end", "step"))
            values: list[object] = []
            while at_s <= end_s:
                since_s = at_s - BEGIN_S
                if not silent_s[0] < since_s <= silent_s[1]:
                    answers = _answer(asked["query"], at_s, models, engines(since_s))
                    answers = [each for each in answers if each["value"] != [at_s, "0"]]
                    values += [answer["value"] for answer in answers]
                at_s += step_s
            result = [{"metric": {}, "values": values}]
        return web.json_response({"status": "success", "data": {"result": result}})

    async with answering(query) as url:
        yield url


@asynccontextmanager
async def answering(handler: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """A server that answers everything by it; its address."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def real(folder: Path) -> Iterator[str]:
    """Prometheus itself, over the same hour."""
    assert PROGRAM is not None
    lines: list[str] = []
    for metric, bound in series(BEGIN_S):
        for engine in ENGINES:
            labels = ",".join(
                f'{key}="{value}"'
                for key, value in {**LABELS, "engine": engine, **({"le": bound} if bound else {})}.items()
            )
            lines += [
                f"{metric}{{{labels}}} {series(at_s)[metric, bound]} {at_s}"
                for at_s in range(BEGIN_S - SCRAPED_S, BEGIN_S + SPAN_S + 1, SCRAPED_S)
            ]
    (folder / "hour.om").write_text("\n".join(lines) + "\n# EOF\n")
    (folder / "none.yml").write_text("")
    subprocess.run(
        [
            "promtool",
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            str(folder / "hour.om"),
            str(folder / "data"),
        ],
        check=True,
        capture_output=True,
    )
    port = free_port()
    process = subprocess.Popen(
        [
            PROGRAM,
            f"--config.file={folder / 'none.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--storage.tsdb.retention.time=100y",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s:
            try:
                if httpx.get(f"{url}/-/ready").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
        yield url
    finally:
        process.terminate()
        process.wait(20)
