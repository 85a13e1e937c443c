"""What a fleet's own data say of its traffic: traces, scrapes of vLLM, Prometheus; and what of it is refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from rose.errors import ConfigError, EngineError
from rose.sim import metrics_source
from rose.sim.metrics_source import HISTOGRAMS, Histogram, Metered, read_scrapes, traffic_of
from rose.sim.prometheus import PrometheusQuery, read_prometheus
from rose.sim.scenario import ServingSection
from rose.sim.traffic import Traffic, from_trace, generated
from tests.sim.prometheus_server import BEGIN_S, PROGRAM, SPAN_S, answering, real, scrape, stand_in

SERVING = ServingSection()
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ASKED = PrometheusQuery(url="http://x", end_s=BEGIN_S + SPAN_S, hours=1.0, step_s=60, match='job="vllm"')


def hour(path: Path) -> Path:
    """An hour of scrapes, a page a minute."""
    pages = [f"# scraped {at_s}\n{scrape(at_s)}" for at_s in range(BEGIN_S, BEGIN_S + SPAN_S + 1, 60)]
    path.write_text("".join(pages))
    return path


def check_the_fleet(traffic: Traffic) -> None:
    """What :mod:`tests.sim.prometheus_server` says it is."""
    assert traffic.num_engines == 2
    at_s, rate = traffic.profile()
    assert rate[(at_s > 60) & (at_s < SPAN_S * 0.45)] == pytest.approx(0.2, rel=0.1)
    assert rate[(at_s > SPAN_S * 0.55) & (at_s < SPAN_S - 60)] == pytest.approx(0.6, rel=0.1)
    starts = traffic.windows(600.0)
    assert traffic.rate(starts["quiet"], 600.0) == pytest.approx(0.2, rel=0.1)
    assert traffic.rate(starts["busy"], 600.0) == pytest.approx(0.6, rel=0.1)
    made = traffic.arrivals(SERVING, starts["busy"], 600.0, 8, seed=1)
    assert len(made.at_s) == pytest.approx(0.6 * 8 * 600, rel=0.2)
    assert np.all(np.diff(made.at_s) >= 0)
    assert np.mean(made.prompt < 200) == pytest.approx(0.5, abs=0.05)
    assert made.prompt.mean() == pytest.approx(400, rel=0.1)
    assert made.output.mean() == pytest.approx(32, rel=0.1)
    assert traffic.kv_use == pytest.approx((0.25, 0.25))
    assert traffic.hit_share == pytest.approx(0.25)
    assert traffic.observed_ms["ttft_p99"] == pytest.approx(235, rel=0.05)
    assert traffic.observed_ms["tpot_p99"] == pytest.approx(23.5, rel=0.05)
    assert traffic.observed_ms["itl_p99"] == pytest.approx(92.5, rel=0.05)
    assert not traffic.knows_bursts


def test_scrapes_give_rates_lengths_engines_and_latencies(tmp_path: Path) -> None:
    check_the_fleet(traffic_of(read_scrapes(hour(tmp_path / "day.prom")), None, SERVING))


def test_scrapes_of_several_servers_add_up_in_one_file_or_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    mixed: list[str] = []
    for at_s in range(BEGIN_S, BEGIN_S + SPAN_S + 1, 60):
        for host in ("a", "b"):
            text = f"# scraped {at_s + (7 if host == 'b' else 0)} http://{host}:8000\n{scrape(at_s, ('0',))}"
            mixed.append(text)
            with (folder / f"{host}.prom").open("a") as file:
                file.write(text)
    (tmp_path / "mixed.prom").write_text("".join(mixed))

    check_the_fleet(traffic_of(read_scrapes(tmp_path / "mixed.prom"), None, SERVING))
    check_the_fleet(traffic_of(read_scrapes(folder), None, SERVING))


@pytest.mark.parametrize(
    "how", ["counters fell", "its tokens fell", "another process, busier than the one before"]
)
def test_the_time_of_a_restart_is_left_out_and_restarts_are_counted(tmp_path: Path, how: str) -> None:
    """What a page counts since another process began is no traffic of one interval."""
    path = tmp_path / "day.prom"
    value = " 15.0" if how == "counters fell" else " 9e9"

    def page(at_s: int) -> str:
        after = at_s > 600
        text = scrape(BEGIN_S + at_s)
        if after and how == "its tokens fell":
            text = re.sub(r"(?m)(prompt_tokens_sum.*) [0-9.]+$", r"\1 5.0", text)
        elif after:
            text = re.sub(r"(?m)(success_total.*) [0-9.]+$", rf"\1{value}", text)
        started = BEGIN_S + 601 if after and how.startswith("another") else 5
        return f"# scraped {BEGIN_S + at_s}\n{text}process_start_time_seconds {started}\n"

    path.write_text("".join(page(at_s) for at_s in (0, 600, 660)))

    metered = read_scrapes(path)

    assert [num for _, _, num, _ in metered.intervals] == pytest.approx([240.0])
    assert metered.histograms["prompt"].num == pytest.approx(240.0)
    assert metered.restarts == 1
    assert traffic_of(metered, None, SERVING).restarts == 1


def test_an_address_behind_which_servers_take_turns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "day.prom"
    pages = [
        f"# scraped {BEGIN_S + 60 * n} http://balancer:8000\n{scrape(BEGIN_S + 60 * n + 600 * (n % 2))}"
        for n in range(20)
    ]
    path.write_text("".join(pages))

    with pytest.raises(ConfigError, match=r"9 of 19 times.*balancer.*each server at its own address"):
        traffic_of(read_scrapes(path), None, SERVING)


def test_prometheus_behind_a_balancer_is_refused_and_few_restarts_are_counted() -> None:
    assert ask(stand_in(restarts=2), ASKED).restarts == 2
    with pytest.raises(ConfigError, match=r"40 of 480 times.*balancer"):
        ask(stand_in(restarts=40), ASKED)


@pytest.mark.parametrize("failed", ["", scrape(BEGIN_S + 120).split("vllm:request_success")[0]])
def test_a_scrape_that_failed_is_no_restart(tmp_path: Path, failed: str) -> None:
    """The loop of ``--help`` writes when it asked, whether or not the server answered."""
    whole, some = tmp_path / "whole.prom", tmp_path / "some.prom"
    for path, missed in ((whole, ()), (some, (120, 240))):
        pages = [
            (at_s, failed if at_s in missed else scrape(BEGIN_S + at_s)) for at_s in (0, 60, 120, 180, 240)
        ]
        path.write_text("".join(f"# scraped {BEGIN_S + at_s}\n{page}" for at_s, page in pages))

    expected, metered = read_scrapes(whole), read_scrapes(some)

    assert sum(num for _, _, num, _ in metered.intervals) == pytest.approx(0.2 * 2 * 180)
    assert metered.histograms["prompt"].num == pytest.approx(expected.histograms["prompt"].num * 3 / 4)
    assert metered.queried == pytest.approx(expected.queried * 3 / 4)
    assert traffic_of(metered, None, SERVING).num_engines == 2


def test_a_page_that_breaks_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "day.prom"
    text = scrape(BEGIN_S + 60)
    pages = [
        scrape(BEGIN_S),
        text[: text.index("vllm:request_generation_tokens")],
        scrape(BEGIN_S + 120),
    ]
    path.write_text("".join(f"# scraped {BEGIN_S + 60 * n}\n{page}" for n, page in enumerate(pages)))

    metered = read_scrapes(path)

    assert metered.histograms["output"].num == pytest.approx(0.2 * 2 * 120)


def test_pages_that_name_no_engine_are_not_of_one(tmp_path: Path) -> None:
    """Two engines behind one address, their gauge dropped on the way: all of the traffic was taken for that of one."""
    path = hour(tmp_path / "day.prom")
    path.write_text(re.sub(r"(?m)^vllm:num_requests_running.*\n", "", path.read_text()))

    unsaid = traffic_of(read_scrapes(path), None, ServingSection(requests_per_s=0.1))

    assert not unsaid.knows_engines
    assert "vllm:num_requests_running" in unsaid.engines_unsaid
    assert unsaid.rate(0.0, SPAN_S) == pytest.approx(0.1)
    assert unsaid.num_engines == pytest.approx(8, rel=0.01)
    check_the_fleet(traffic_of(read_scrapes(path), 2, SERVING))


def test_prometheus_without_the_gauge_names_no_engine() -> None:
    unsaid = ask(stand_in(engines=lambda since_s: 0), ASKED)

    assert not unsaid.knows_engines
    assert unsaid.rate(0.0, SPAN_S) == pytest.approx(SERVING.requests_per_s)


@pytest.mark.parametrize("named", ["--match", ""])
def test_several_models_are_refused(tmp_path: Path, named: str) -> None:
    path = tmp_path / "day.prom"
    other = scrape(BEGIN_S).replace('model_name="m"', 'model_name="other"')
    path.write_text(f"# scraped 10 a\n{scrape(BEGIN_S)}# scraped 10 b\n{other}")

    def read() -> None:
        if named:
            ask(stand_in(models=("m", "other")), ASKED)
        else:
            read_scrapes(path)

    with pytest.raises(ConfigError, match=r"more than one model: 'm', 'other'") as caught:
        read()
    assert named in str(caught.value)


# Of a day, six hours of traffic; then nothing answers.
SHORT = [(float(at_s), at_s + 60.0, 60 * 2.5 * 2, 2.0) for at_s in range(0, 6 * 3600, 60)]


def metered(intervals: Sequence[tuple[float, float, float, float]], asked_s: float = 0.0) -> Metered:
    lengths = {name: Histogram(counts={(10.0, 100.0): 1e5}, total=5e6) for name in HISTOGRAMS}
    return Metered(source="x", intervals=list(intervals), histograms=lengths, asked_s=asked_s)


def test_requests_of_one_token_have_no_time_per_token() -> None:
    """vLLM counts 0 for each of them, the simulator nothing: of many the P99 read would be that of no other request."""
    read = metered(SHORT)
    read.histograms["output"] = Histogram(counts={(0.0, 1.0): 990.0, (1.0, 50.0): 10.0})
    read.histograms["tpot"] = Histogram(counts={(0.0, 0.01): 990.0, (0.03, 0.04): 10.0})

    assert traffic_of(read, None, SERVING).observed_ms["tpot_p99"] == pytest.approx(39.9)


def test_time_without_data_is_cut_out_and_not_taken_for_quiet() -> None:
    gap = [(low + 20 * 3600, high + 20 * 3600, num, engines) for low, high, num, engines in SHORT[:60]]
    for intervals, asked_s, share in (
        (SHORT, 24 * 3600.0, 6 / 24),
        (SHORT + gap, 0.0, 7 / 21),
        (SHORT, 0.0, 1.0),
    ):
        traffic = traffic_of(metered(intervals, asked_s), None, SERVING)

        _, rate = traffic.profile()
        assert rate == pytest.approx(2.5)
        assert traffic.rate(traffic.windows(600.0)["quiet"], 600.0) == pytest.approx(2.5)
        assert traffic.covered == pytest.approx(share)


def test_a_long_time_between_two_pages_is_without_data() -> None:
    """Nobody knows what came when, nor what a server that was started again had counted."""
    long = (6 * 3600.0, 20 * 3600.0, 30.0, 2.0)

    traffic = traffic_of(metered([*SHORT, long]), None, SERVING)

    assert traffic.span_s == 6 * 3600
    assert traffic.covered == pytest.approx(6 / 20)


def test_engines_are_counted_at_each_moment() -> None:
    """Pods that were replaced at noon are not twice as many; half as many at night lend half as much."""
    pods = [(at, at + 60.0, 60.0, 1.0) for at in range(0, 43200, 60) for _ in range(8)]
    pods += [(at, at + 60.0, 60.0, 1.0) for at in range(43200, 86400, 60) for _ in range(8)]
    night = [(low, high, num, 8.0 if low < 43200 else 16.0) for low, high, num, _ in pods[::8]]

    replaced = traffic_of(metered(pods), None, SERVING)
    assert replaced.num_engines == 8
    assert replaced.profile()[1] == pytest.approx(1.0)
    assert replaced.engine_share() == pytest.approx(1.0)

    scaled = traffic_of(metered(night), None, SERVING)
    at_s, rate = scaled.profile()
    assert scaled.num_engines == 12
    assert rate[at_s < 43000] == pytest.approx(1 / 8)
    assert rate[at_s > 43400] == pytest.approx(1 / 16)
    assert scaled.engine_share()[[0, -1]] == pytest.approx([8 / 12, 16 / 12])
    assert traffic_of(metered(night), 24, SERVING).engine_share()[[0, -1]] == pytest.approx([8 / 12, 16 / 12])


def test_what_metrics_counted_is_shared_by_as_many_engines_as_are_named() -> None:
    """Named engines had become more traffic: four times as many, four times as much."""
    counted = metered([(at, at + 60.0, 60.0, 1.0) for at in range(0, 7200, 60)])

    one, four = traffic_of(counted, None, SERVING), traffic_of(counted, 4, SERVING)

    assert (one.num_engines, four.num_engines) == (1, 4)
    assert one.rate(0.0, 7200.0) == pytest.approx(1.0)
    assert four.rate(0.0, 7200.0) == pytest.approx(0.25)


def test_prometheus_gaps_are_cut_out_and_its_engines_change() -> None:
    traffic = ask(stand_in(silent_s=(600, 1200), engines=lambda since_s: 2 if since_s < 1800 else 4), ASKED)

    assert traffic.span_s == pytest.approx(3000, abs=60)
    assert traffic.covered == pytest.approx(3000 / 3600, abs=0.02)
    at_s, rate = traffic.profile()
    assert rate[at_s < 1100] == pytest.approx(0.2, rel=0.1)
    assert rate[at_s > 1300] == pytest.approx(0.3, rel=0.1)
    assert traffic.num_engines == 3


@pytest.mark.parametrize(
    ("text", "line", "match"),
    [
        (scrape(BEGIN_S), 3, "says when it was scraped"),
        ("# scraped yesterday\n", 1, "does not say when"),
        ("# scraped 1e99\n", 1, "does not say when"),
        ("# scraped 10\nvllm:request_success_total 5\n# scraped 9\n", 3, "time goes back by 1"),
        ("# scraped 10\nvllm:request_success_total nan\n", 2, "outside 0"),
        ("# scraped 10\nvllm:request_success_total -1\n", 2, "outside 0"),
        ("# scraped 10\nvllm:kv_cache_usage_perc 85.0\n", 2, "is 85, outside 0 to 1"),
        ("# scraped 10\nvllm:request_success_total many\n", 2, "not a number"),
        ("# scraped 10\nvllm:request_success_total 5 1700000000\n", 2, "a time stands behind its value"),
        ('# scraped 10\nvllm:request_success_total{a="b c"} 5 1700000000000\n', 2, "a time stands behind"),
        ("# scraped 10\nvllm:request_success_total \x1b[31m\n", 2, r"'\\x1b\[31m' is not a number"),
        ("# scraped \x1b[31m\n", 1, r"\\x1b\[31m' does not say when"),
        ("# scraped 10\nvllm:request_success_total{a=\n", 2, "no line of a metrics page"),
        ('# scraped 10\nvllm:request_prompt_tokens_bucket{le="x"} 1\n', 2, "no line of a metrics page"),
        ("# scraped 10\n# scraped 99999999\n", 2, "too long after"),
        ("# scraped 10\n" + "v" * (1 << 16) + "\n", 2, "a line of more than"),
    ],
)
def test_a_wrong_line_of_a_scrape_is_named(tmp_path: Path, text: str, line: int, match: str) -> None:
    path = tmp_path / "day.prom"
    path.write_text(text)

    with pytest.raises(ConfigError, match=match) as caught:
        read_scrapes(path)
    assert f"{path}:{line}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no page of vLLM"),
        ("# scraped 10\n# scraped 70\n", "no page of vLLM"),
        ("# scraped 10\nvllm:num_requests_running 5\n", "no vllm:request_success_total"),
        ("# scraped 10\nvllm:request_success_total 5\n", "no two scrapes"),
        (f"# scraped 10\n{scrape(BEGIN_S)}# scraped 70\n{scrape(BEGIN_S)}", "no request ended"),
    ],
)
def test_scrapes_that_say_nothing_are_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "day.prom"
    path.write_text(text)

    with pytest.raises(ConfigError, match=match) as caught:
        traffic_of(read_scrapes(path), None, SERVING)
    assert str(path) in str(caught.value)


def test_metrics_of_other_names_are_named(tmp_path: Path) -> None:
    """As a relabelling proxy or another version has them: the message was that nothing rose, or no page was there."""
    path = tmp_path / "day.prom"
    whole = hour(path).read_text()
    for old, new, match in (
        ("vllm:", "vllm_", r"no vllm:request_success_total.*'vllm_request_success_total'"),
        ("request_success_total", "finished_total", r"no vllm:request_success_total.*under vLLM's own names"),
        ("vllm:request_prompt_tokens", "x", r"requests ended.*no vllm:request_prompt_tokens"),
        ("vllm:request_generation_tokens", "x", "requests ended.*no vllm:request_generation_tokens"),
    ):
        path.write_text(whole.replace(old, new))
        with pytest.raises(ConfigError, match=match):
            traffic_of(read_scrapes(path), 2, SERVING)


def test_series_pages_and_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hour(tmp_path / "day.prom")
    for name, value, match in (
        ("MAX_SERIES", 10, "more than 10 series"),
        ("MAX_PAGES", 5, "more than 5 pages"),
        ("MAX_FILE_BYTES", 5000, "more than 5000 bytes"),
        ("MAX_ENGINES", 1, "names 2 engines"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(metrics_source, name, value)
            with pytest.raises(ConfigError, match=match):
                traffic_of(read_scrapes(path), None, SERVING)
    with pytest.raises(ConfigError, match="does not exist"):
        read_scrapes(tmp_path / "none")


def test_a_histogram_s_lengths_lie_in_its_buckets_and_have_its_mean() -> None:
    histogram = Histogram()
    histogram.add({10.0: 0.0, 100.0: 300.0, 1000.0: 400.0, float("inf"): 410.0})
    histogram.total = 410 * 120.0

    drawn = histogram.draw(20_000, np.random.default_rng(0))

    assert drawn.mean() == pytest.approx(120, rel=0.02)
    assert np.mean(drawn > 500) > 0.02
    assert drawn.min() >= 1


# --- Prometheus ----------------------------------------------------------------------------------------


def ask(server: AbstractAsyncContextManager[str], asked: PrometheusQuery) -> Traffic:
    async def main() -> Traffic:
        async with server as url:
            metered = await asyncio.to_thread(read_prometheus, replace(asked, url=url))
            return traffic_of(metered, None, SERVING)

    return asyncio.run(main())


def test_prometheus_gives_the_same_as_the_scrapes_that_it_has_made() -> None:
    check_the_fleet(ask(stand_in(), ASKED))


@pytest.mark.skipif(PROGRAM is None, reason="prometheus is not installed (apt-get install prometheus)")
def test_and_so_does_the_real_one(tmp_path: Path) -> None:
    with real(tmp_path) as url:
        traffic = traffic_of(read_prometheus(replace(ASKED, url=url)), None, SERVING)
        with pytest.raises(ConfigError, match="there is one without --match"):
            read_prometheus(replace(ASKED, url=url, match='job="other"'))
    check_the_fleet(traffic)
    assert traffic.restarts == 0
    assert traffic.source == f"{url}, 1 h to 2023-11-14 23:13 UTC"


@pytest.mark.parametrize(
    ("has", "match"),
    [
        ("vllm_request_success_total", "there is 'vllm_request_success_total': its name was changed"),
        ("vllm:request_success_total", "there is one without --match"),
    ],
)
def test_what_prometheus_has_instead_is_named(has: str, match: str) -> None:
    with pytest.raises(ConfigError, match=rf"has no vllm:request_success_total.*{match}"):
        ask(stand_in(has=has), replace(ASKED, match='job="other"'))


def test_bounds_written_in_two_ways_and_the_tokens_of_a_large_fleet_are_counted() -> None:
    """Servers of two versions: 100 and 100.0 are one bound, and the one had hidden the other."""
    lengths = {"100": 30.0, "100.0": 50.0, "1000": 60.0, "1000.0": 100.0, "+Inf": 160.0}
    buckets = [{"metric": {"le": bound}, "value": [0, str(value * 1e11)]} for bound, value in lengths.items()]
    points = [{"values": [[BEGIN_S + 60 * n, "5"] for n in range(1, 60)]}]

    async def main() -> Metered:
        async def answer(request: web.Request) -> web.Response:
            query = request.query["query"]
            by_le = query.startswith("sum by (le)")
            one = [{"metric": {}, "value": [0, "3e14"]}]
            result = points if request.path.endswith("range") else buckets if by_le else one
            if "resets" in query:
                result = []
            return web.json_response({"data": {"result": result}})

        async with answering(answer) as url:
            return await asyncio.to_thread(read_prometheus, replace(ASKED, url=url))

    read = asyncio.run(main())

    assert read.histograms["prompt"].counts == {(0.0, 100.0): 8e12, (100.0, 1000.0): 8e12}
    assert read.queried == 3e14


def test_a_step_that_holds_too_few_scrapes_is_refused_with_one_that_holds_enough() -> None:
    """Of a step with one scrape nothing can have risen: it was called a fleet without such metrics."""
    with pytest.raises(ConfigError, match=r"--step: 45 s hold 3 scrapes.*at least 60"):
        ask(stand_in(), replace(ASKED, step_s=45))


def test_labels_that_prometheus_cannot_read_are_named_in_its_words() -> None:
    """It was told that the URL is no Prometheus server's."""

    async def main() -> None:
        async def answer(request: web.Request) -> web.Response:
            told = {"status": "error", "errorType": "bad_data", "error": "parse error: unexpected identifier"}
            return web.json_response(told, status=400)

        async with answering(answer) as url:
            await asyncio.to_thread(read_prometheus, replace(ASKED, url=url, match="job=vllm"))

    with pytest.raises(ConfigError, match="--match: is refused: 'parse error: unexpected identifier'"):
        asyncio.run(main())


def test_it_is_said_that_prometheus_is_asked_before_it_answers() -> None:
    """One that hung was silence for two minutes."""
    said: list[float] = []

    async def main() -> None:
        async def answer(request: web.Request) -> web.Response:
            assert said == [0.0]
            return web.Response(status=503)

        async with answering(answer) as url:
            await asyncio.to_thread(read_prometheus, replace(ASKED, url=url), said.append)

    with pytest.raises((ConfigError, EngineError), match="503"):
        asyncio.run(main())


def test_a_token_is_sent_and_its_lack_is_named() -> None:
    check_the_fleet(ask(stand_in(token="secret"), replace(ASKED, token="secret")))
    with pytest.raises(ConfigError, match=r"answered 401.*--prometheus-token-file"):
        ask(stand_in(token="secret"), ASKED)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"<html>", "answered 200"),
        (b'{"data": {"result": 5}}', "answered 200"),
        (b'{"data": {"result": [' + b"{}," * 20_000 + b"{}]}}", "answered 200"),
        (b'{"data": {"result": []}}', "has no vllm:request_success_total"),
        (
            b'{"data": {"result": [{"values": [[1, "NaN"], ["x", 2], 3, [1e400, "1"]]}]}}',
            "has no vllm:request",
        ),
        (b"[" * 200_000, "answered 200"),
        (b" " * (33 << 20), "longer than"),
    ],
    ids=["no-json", "no-list", "too-many-series", "nothing", "no-numbers", "deep", "long"],
)
def test_nonsense_from_a_server_is_refused(body: bytes, match: str) -> None:
    async def main() -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(body=body, content_type="application/json")

        async with answering(answer) as url:
            await asyncio.to_thread(read_prometheus, replace(ASKED, url=url))

    with pytest.raises((ConfigError, EngineError), match=match):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"url": "prometheus:9090"}, "--prometheus"),
        ({"url": "file:///etc/passwd"}, "--prometheus"),
        ({"url": "http://me:secret@host"}, "--prometheus"),
        ({"hours": 0.0}, "--hours"),
        ({"hours": float("nan")}, "--hours"),
        ({"step_s": 1}, "--step"),
        ({"hours": 8000.0, "step_s": 60}, "--step"),
        ({"match": '{job="x"}'}, "--match"),
        ({"end_s": float("inf")}, "--end"),
    ],
)
def test_what_cannot_be_asked_names_its_option(change: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(ASKED, **change)
    assert caught.value.field == field
    assert "secret" not in str(caught.value)


# --- traces and the generator ----------------------------------------------------------------------------


def burst(path: Path) -> Path:
    """Ten minutes with a row every 20 s, and 40 rows in one second."""
    rows = [f"2023-11-16 18:{second // 60:02d}:{second % 60:02d},100,10" for second in range(0, 600, 20)]
    rows[20:20] = ["2023-11-16 18:06:25,100,10"] * 40
    path.write_text(HEADER + "\n".join(rows) + "\n")
    return path


def test_a_trace_s_stretches_are_found_and_keep_their_bursts(tmp_path: Path) -> None:
    traffic = from_trace(burst(tmp_path / "trace.csv"), 2, SERVING)

    starts = traffic.windows(60.0)
    assert starts["busy"] <= 385 <= starts["busy"] + 60
    made = {name: traffic.arrivals(SERVING, at_s, 60.0, 20, 1) for name, at_s in starts.items()}
    assert len(made["busy"].at_s) > 3 * len(made["mean"].at_s)
    # Ten times as many engines have ten times as many requests, still within half a second.
    counts = np.bincount(made["busy"].at_s.astype(int), minlength=60)
    assert counts.max() == pytest.approx(400, rel=0.25)
    assert traffic.knows_engines


def test_a_hole_in_a_trace_is_found_and_its_bursts_are_none(tmp_path: Path) -> None:
    """Six hours that were not logged made six hours in which nearly every GPU could be lent."""
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 {minute // 60:02d}:{minute % 60:02d}:00,100,10" for minute in range(1440)]
    path.write_text(HEADER + "\n".join(rows[:120] + rows[480:]) + "\n")

    assert from_trace(path, 2, SERVING).silence_s == (119 * 60.0, 361 * 60.0)
    assert from_trace(burst(path), 2, SERVING).silence_s is None


def test_requests_that_somebody_had_are_as_long_as_they_were(tmp_path: Path) -> None:
    """The scenario's longest request is the generator's: of a fleet with longer ones it made a quieter one."""
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "2023-01-01 00:00:00,20000,4000\n2023-01-01 00:10:00,5,5\n")

    made = from_trace(path, 1, SERVING).arrivals(SERVING, 0.0, 600.0, 4, 1)

    assert (made.prompt.max(), made.output.max()) == (20_000, 4_000)
    longest = generated(4, SERVING).longest(SERVING)
    assert longest == (SERVING.prompt_max, SERVING.output_max)


def test_a_trace_without_engines_gets_as_many_as_make_the_scenario_s_rate(tmp_path: Path) -> None:
    traffic = from_trace(burst(tmp_path / "trace.csv"), None, ServingSection(requests_per_s=0.05))

    assert traffic.rate(0.0, traffic.span_s) == pytest.approx(0.05)
    assert not traffic.knows_engines


def test_more_than_an_engine_could_have_served_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "2023-01-01 00:00:00,5,5\n" * 3000 + "2023-01-01 00:00:01,5,5\n")
    traffic = from_trace(path, 1, SERVING)

    with pytest.raises(ConfigError, match=r"more than an engine can serve.*--engines"):
        traffic.arrivals(SERVING, 0.0, 60.0, 8, 0)


def test_without_data_the_generator_s_day_stands_in() -> None:
    traffic = generated(10, ServingSection(requests_per_s=0.5, daily_swing=0.5))

    starts = traffic.windows(600.0)
    assert traffic.rate(starts["quiet"], 600.0) == pytest.approx(0.25, rel=0.01)
    assert traffic.rate(starts["busy"], 600.0) == pytest.approx(0.75, rel=0.01)
    made = traffic.arrivals(SERVING, starts["busy"], 600.0, 10, 3)
    assert len(made.at_s) == pytest.approx(0.75 * 10 * 600, rel=0.15)
    assert not traffic.is_measured


def test_two_pages_of_one_second_without_a_name_are_of_two_servers(tmp_path: Path) -> None:
    """A loop over several hosts that names none writes them; they were one engine with a third of the traffic."""
    path = tmp_path / "day.prom"
    pages = [f"# scraped {at_s}\n{scrape(at_s)}" * 2 for at_s in range(BEGIN_S, BEGIN_S + 600, 60)]
    path.write_text("".join(pages))

    with pytest.raises(ConfigError, match="a second page of a server without a name at the same second"):
        read_scrapes(path)


def test_scrapes_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    plain, marked = hour(tmp_path / "a.prom"), tmp_path / "b.prom"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())

    assert read_scrapes(marked).intervals == read_scrapes(plain).intervals


@pytest.mark.parametrize(
    ("num", "gap_s", "too_little"), [(2, 1.5, True), (400, 1.0, True), (200, 10.0, True), (400, 3.0, False)]
)
def test_what_is_too_little_to_tell_of_a_fleet(
    tmp_path: Path, num: int, gap_s: float, too_little: bool
) -> None:
    begin = datetime(2026, 11, 20)
    rows = [f"{begin + timedelta(seconds=gap_s * n)},100,20" for n in range(num)]
    (tmp_path / "t.csv").write_text(HEADER + "\n".join(rows) + "\n")
    traffic = from_trace(tmp_path / "t.csv", 4, SERVING)

    assert traffic.num_read == pytest.approx(num, rel=0.01)
    assert traffic.is_too_little is too_little
    assert not generated(4, SERVING).is_too_little
