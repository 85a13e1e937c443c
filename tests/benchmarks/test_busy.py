"""The search for a rate at which production alone is as busy as is wanted."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import coserve
from benchmarks.coserving import busy
from benchmarks.coserving.plan import Prefix, Segment, Timing, make_segments
from rose.demo.ui import Stages
from rose.errors import ConfigError
from rose.evaluation.arrivals import Arrival, TrafficShape

TIMING = Timing(lead_s=0.005, traffic_s=0.02, tail_s=0.005)


def segment(count: int) -> Segment:
    at_s = [TIMING.traffic_s * (number + 0.5) / count for number in range(count)]
    return [(Arrival(at_s=at, prompt_tokens=4, output_tokens=2), Prefix()) for at in at_s]


def traffic(rate: float) -> Sequence[Segment]:
    """Every fourth stretch has a burst."""
    return [
        segment(max(1, round(rate * TIMING.traffic_s * (4 if number % 4 == 0 else 1)))) for number in range(8)
    ]


def test_the_share_of_a_burst_counts_for_what_production_can_be_busy() -> None:
    calm, burst = [segment(2)] * 2, [segment(1), segment(3)]
    assert busy.share(burst, TIMING, 0.01) < busy.share(calm, TIMING, 0.01)
    assert busy.share([segment(2000)], TIMING, 0.01) == pytest.approx(1.0)


@pytest.mark.parametrize("found", [0.05, 0.4, 0.9])
def test_what_was_measured_is_what_the_model_says_of_the_same_traffic(found: float) -> None:
    tried = traffic(500.0)
    assert busy.share(tried, TIMING, busy.fit(tried, TIMING, found)) == pytest.approx(found, abs=1e-3)


def test_a_saturated_probe_leads_to_less_traffic() -> None:
    k = busy.fit(traffic(5000.0), TIMING, 1.0)
    assert busy.next_rate(traffic, TIMING, 5000.0, k, 0.4) < 2500.0


def test_one_probe_does_not_lead_further_than_it_can_tell() -> None:
    k = busy.fit(traffic(500.0), TIMING, 0.01)
    assert busy.next_rate(traffic, TIMING, 500.0, k, 0.9) == pytest.approx(500.0 * busy.MOST_FACTOR, rel=1e-3)


def test_production_that_was_never_busy_tells_nothing() -> None:
    with pytest.raises(ConfigError, match=r"--rate: production was never busy"):
        busy.fit(traffic(500.0), TIMING, 0.0)


def test_as_many_segments_as_have_the_pairs() -> None:
    shape = TrafficShape(
        period_s=40.0, mean_rate_hz=2.0, prompt_median_tokens=64, prompt_max_tokens=400,
        output_median_tokens=12, output_max_tokens=48,
    )  # fmt: skip

    def made(count: int) -> Sequence[Segment]:
        return make_segments("generated", shape, Timing(), count, 3, None)

    found = busy.enough(made, 100)
    assert sum(map(len, found)) >= 100 > sum(map(len, made(len(found) - 1)))
    assert len(busy.enough(made, 10**6)) == busy.MOST_SEGMENTS


def test_a_probe_takes_segments_from_everywhere() -> None:
    segments = [segment(number + 1) for number in range(20)]
    sizes = [len(one) for one in busy.spread(segments, 5)]
    assert sizes == [1, 5, 9, 13, 17]
    assert busy.spread(segments[:3], 5) == segments[:3]


class Host:
    """Stands in for sender and engines: production is busy for ``per_request_s`` with each request of a block."""

    def __init__(self, records: Path, per_request_s: float) -> None:
        self.per_request_s = per_request_s
        self.plan = argparse.Namespace(records_path=records, traffic=lambda: None, write_traffic=self.write)
        self.rates: list[float] = []
        self._counts: list[int] = []
        self._reads = 0

    def write(self, schedule: Any, probe: int) -> None:
        assert probe == len(self.rates) + 1  # prompts that no other probe has sent
        assert {block.arm for block in schedule.blocks} == {"alone_1"}
        self.rates.append(len(schedule.arrivals) / (len(schedule.blocks) * TIMING.traffic_s))
        self._counts, self._reads = [block.count for block in schedule.blocks], 0

    async def start(self, _: Any) -> None:
        with self.plan.records_path.open("x") as out:  # the requests of another rate are gone
            out.write(json.dumps({"type": "cycle", "at_s": time.monotonic()}) + "\n")
            for number in range(sum(self._counts)):
                out.write(json.dumps({"type": "request", "index": number}) + "\n")

    async def stop(self, _: str) -> None:
        await asyncio.sleep(0)

    async def enter(self, _: Any) -> None:
        await asyncio.sleep(0)

    async def read(self) -> int:
        self._reads += 1
        return self._reads

    def block(self, before: int, _: int) -> dict[str, float]:
        rate = self._counts[before // 2] / TIMING.traffic_s
        return {"seconds": 1.0, "serving_busy_s": 1.0 - math.exp(-self.per_request_s * rate)}


async def search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Host, rate: float, wanted: float
) -> tuple[float, list[dict[str, float]]]:
    monkeypatch.setattr(coserve, "delta", host.block)
    monkeypatch.setattr(coserve, "MAX_LATE_S", 60.0)
    probes: list[dict[str, float]] = []
    args = argparse.Namespace(rate=rate, busy=wanted, run=2)
    stages = Stages(Console(quiet=True))
    found = await coserve._rate(args, host, host, traffic, TIMING, stages, probes)  # type: ignore[arg-type]
    return found, probes


async def test_the_rate_follows_from_what_this_host_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []
    for per_request_s in (0.001, 0.002):
        folder = tmp_path / str(per_request_s)
        folder.mkdir()
        host = Host(folder / "records.jsonl", per_request_s)
        rate, probes = await search(folder, monkeypatch, host, 400.0, 0.65)
        assert busy.share(traffic(rate), TIMING, per_request_s) == pytest.approx(0.65, abs=0.05)
        assert probes[0]["rate"] == 400.0
        assert not host.plan.records_path.exists()
        rates.append(rate)
    assert rates[0] > 1.7 * rates[1]


async def test_a_rate_that_is_right_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = busy.share(traffic(500.0), TIMING, 0.002)
    rate, probes = await search(tmp_path, monkeypatch, Host(tmp_path / "r.jsonl", 0.002), 500.0, wanted)
    assert (rate, len(probes)) == (500.0, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--busy", "1.5"], "--busy must be between"),
        (["--busy", "0.5", "--engine", "dp2"], "look busy: leave it out"),
        (["--pairs", "0"], "--pairs must be 1 or more"),
    ],
)
def test_what_cannot_be_looked_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    monkeypatch.setattr("sys.argv", ["coserve.py", *given])
    with pytest.raises(SystemExit):
        coserve._arguments()
    assert said in capsys.readouterr().err
