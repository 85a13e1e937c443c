"""Production's P99 out of its metrics page."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from rose.coserve import latency
from rose.coserve.latency import ServingLatency, p99_between, read_page
from rose.wire.http_client import open_client

INF = math.inf


def page(ttft: dict[str, int], tpot: dict[str, int] | None = None, engine: str = "0") -> str:
    """As vLLM writes it: cumulative counts."""
    lines = ["# HELP vllm:num_requests_running Number of requests", "vllm:num_requests_running 3.0"]
    names = {"vllm:time_to_first_token_seconds": ttft, "vllm:inter_token_latency_seconds": tpot or {}}
    for name, buckets in names.items():
        lines += [f"# HELP {name} Histogram", f"# TYPE {name} histogram"]
        lines += [
            f'{name}_bucket{{engine="{engine}",le="{bound}",model_name="m"}} {count}.0'
            for bound, count in buckets.items()
        ]
        lines += [f'{name}_sum{{engine="{engine}",model_name="m"}} 1.5']
    return "\n".join(lines) + "\n"


def test_a_page_is_summed_over_engines() -> None:
    both = page({"0.1": 4, "+Inf": 5}) + page({"0.1": 1, "+Inf": 2}, engine="1")
    assert read_page(both) == {"ttft": {0.1: 5.0, INF: 7.0}, "tpot": {}}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # 100 more, all in 0.1..0.2 but one beyond: the 99th is the end of that bucket.
        ({0.1: 5, 0.2: 5, 0.4: 5, INF: 5}, {0.1: 5, 0.2: 104, 0.4: 105, INF: 105}, 0.2),
        # 90 below 0.1, 10 in 0.1..0.2: nine tenths into it.
        ({}, {0.1: 90, 0.2: 100, INF: 100}, 0.19),
        ({}, {0.1: 0, INF: 10}, 0.1),
        ({0.1: 3, INF: 3}, {0.1: 3, INF: 3}, None),
        ({}, {}, None),
    ],
    ids=["difference", "inside", "beyond-the-last-bound", "nothing-new", "no-histogram"],
)
def test_the_p99_is_prometheus_own(before: Any, after: Any, expected: float | None) -> None:
    found = p99_between(before, after)
    assert found == (None if expected is None else pytest.approx(expected))


def test_it_is_of_the_last_minute_and_begins_anew_after_a_restart() -> None:
    watch = ServingLatency("http://production/metrics")

    def took(at_s: float, fast: int, slow: int) -> dict[str, float]:
        watch.took(at_s, read_page(page({"0.1": fast, "1.0": fast + slow, "+Inf": fast + slow})))
        return dict(watch.p99_s)

    assert took(0.0, 0, 100) == {}  # what came before us is not recent
    assert took(50.0, 0, 200)["ttft"] > 0.9
    assert took(100.0, 100, 200)["ttft"] > 0.9  # the slow ones came within the last 100 s, in reach of 60
    assert took(160.0, 200, 200)["ttft"] < 0.1
    assert took(161.0, 0, 1) == {}
    assert took(162.0, 100, 1)["ttft"] < 0.1


@pytest.fixture
async def production() -> AsyncIterator[tuple[str, list[web.Response]]]:
    """A metrics page that answers what the test puts in."""
    answers: list[web.Response] = []

    async def metrics(request: web.Request) -> web.Response:
        return answers.pop(0)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/metrics", answers
    await runner.cleanup()


async def test_a_page_without_latencies_is_told_from_one_that_was_read(
    production: tuple[str, list[web.Response]],
) -> None:
    """``--disable-log-stats``: the agent said that it reads production's metrics."""
    url, answers = production
    watch = ServingLatency(url)
    async with open_client() as client:
        answers.append(web.Response(text="vllm:num_requests_running 0.0\n"))
        await watch.look(client)
        assert "no vllm:time_to_first_token_seconds and no vllm:inter_token_latency_seconds" in watch.error
        assert "--disable-log-stats" in watch.error
        answers.append(web.Response(text=page({"0.1": 1, "+Inf": 1})))
        await watch.look(client)
        assert watch.error == ""


async def test_a_page_that_cannot_be_read_leaves_no_p99(
    production: tuple[str, list[web.Response]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answers = production
    monkeypatch.setattr(latency, "_MAX_PAGE_BYTES", 10_000)
    good = [page({"0.1": n, "+Inf": n}) for n in (1, 101, 201, 301)]
    bad = [
        web.Response(status=404),
        web.Response(text='vllm:time_to_first_token_seconds_bucket{le="x"} y\n'),
        web.Response(text="x" * 20_000),
        web.Response(body=b"\xff\xfe"),
    ]
    watch = ServingLatency(url)
    async with open_client() as client:
        for failure in bad:
            for text in good[:2]:
                answers.append(web.Response(text=text))
                await watch.look(client)
            assert watch.p99_s["ttft"] <= 0.1
            assert watch.error == ""
            answers.append(failure)
            await watch.look(client)
            assert watch.p99_s == {}
            assert watch.error
