"""The production schedule: its shape, its bounds, and what a trace file may not be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rose.errors import ConfigError
from rose.evaluation.arrivals import (
    Arrival,
    TraceRow,
    TrafficShape,
    busiest_second_ratio,
    fit_trace,
    generate_arrivals,
    load_trace,
    thin_burst,
)

SHAPE = TrafficShape(
    period_s=60.0,
    mean_rate_hz=2.0,
    prompt_median_tokens=64,
    prompt_max_tokens=400,
    output_median_tokens=20,
    output_max_tokens=80,
)
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def check(arrivals: list[Arrival], shape: TrafficShape) -> None:
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < shape.period_s
    assert all(1 <= arrival.prompt_tokens <= shape.prompt_max_tokens for arrival in arrivals)
    assert all(1 <= arrival.output_tokens <= shape.output_max_tokens for arrival in arrivals)


def test_busiest_second_is_five_to_ten_times_the_mean() -> None:
    ratios = [busiest_second_ratio(generate_arrivals(SHAPE, seed), 60.0) for seed in range(50)]

    assert 5 <= float(np.median(ratios)) <= 10
    assert min(ratios) >= 3.5  # never an even schedule, whatever the seed


def test_mean_rate_is_the_one_asked_for() -> None:
    assert len(generate_arrivals(SHAPE, 3)) == 120


@pytest.mark.parametrize("seed", range(20))
def test_schedule_keeps_its_bounds(seed: int) -> None:
    check(generate_arrivals(SHAPE, seed), SHAPE)


def test_lengths_are_log_normal_around_the_median() -> None:
    long = TrafficShape(
        period_s=2000.0,
        mean_rate_hz=5.0,
        prompt_median_tokens=64,
        prompt_max_tokens=100_000,
        output_median_tokens=20,
        output_max_tokens=100_000,
    )
    prompts = [arrival.prompt_tokens for arrival in generate_arrivals(long, 1)]

    assert np.median(prompts) == pytest.approx(64, rel=0.05)
    assert np.std(np.log(prompts)) == pytest.approx(0.99, rel=0.05)


def test_same_seed_same_schedule_other_seed_other() -> None:
    assert generate_arrivals(SHAPE, 7) == generate_arrivals(SHAPE, 7)
    assert generate_arrivals(SHAPE, 7) != generate_arrivals(SHAPE, 8)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mean_rate_hz": 0.0}, "traffic.mean_rate_hz"),
        ({"mean_rate_hz": float("nan")}, "traffic.mean_rate_hz"),
        ({"mean_rate_hz": 1e9}, "traffic.mean_rate_hz"),
        ({"period_s": 1.0}, "traffic.period_s"),
        ({"prompt_median_tokens": 401}, "traffic.prompt_median_tokens"),
        ({"output_median_tokens": 0}, "traffic.output_median_tokens"),
    ],
)
def test_impossible_shape_names_the_field(changes: dict[str, float], field: str) -> None:
    values = {name: getattr(SHAPE, name) for name in SHAPE.__slots__}
    with pytest.raises(ConfigError) as caught:
        TrafficShape(**{**values, **changes})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.9799600"),
        ("2023-11-16 18:17:03.979960+00:00", "2023-11-16 18:17:04.97996Z"),
        ("2023-11-16 18:17:03.9799600Z", "2023-11-16 13:17:04.9799600-05:00"),
        ("2023-11-16T18:17:03", "2023-11-16 18:17:04"),
    ],
)
def test_trace_times_are_read_with_seven_decimals_and_with_an_offset(
    tmp_path: Path, first: str, second: str
) -> None:
    rows = load_trace(
        write(
            tmp_path,
            HEADER + first + ",4808,10\n" + second + ",3180,8\n\n",
        )
    )

    assert rows == [
        TraceRow(at_s=0.0, context_tokens=4808, generated_tokens=10),
        TraceRow(at_s=1.0, context_tokens=3180, generated_tokens=8),
    ]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a,b,c\n1,2,3\n", 1, "header"),
        ("", 1, "header"),
        (HEADER + "2023-11-16 18:17:03,1\n", 2, "2 columns"),
        (HEADER + "yesterday,1,1\n", 2, "not a time"),
        (HEADER + "2023-11-16 18:61:03,1,1\n", 2, "not a time"),
        (HEADER + "2023-11-16 18:17:03.5 and more,1,1\n", 2, "not a time"),
        (HEADER + "-5,1,1\n", 2, "not a time"),
        (HEADER + "2023-11-16 18:17:03,1,1\n2023-11-16 18:17:04.5Z,1,1\n", 3, "time zone are mixed"),
        (HEADER + "2023-11-16 18:17:03+00:00,1,1\n2023-11-16 18:17:04.5,1,1\n", 3, "time zone are mixed"),
        (HEADER + "2023-11-16 18:17:03,1,1\n2023-11-16 18:17:04,x,1\n", 3, "ContextTokens 'x'"),
        (HEADER + "2023-11-16 18:17:03,1,-4\n", 2, "GeneratedTokens is -4"),
        (HEADER + "2023-11-16 18:17:03,1,1\n2023-11-16 18:17:01,1,1\n", 3, "goes back by 2 s"),
        (HEADER + "2023-11-16 18:17:03,99999999999999,1\n", 2, "outside 0"),
    ],
)
def test_wrong_trace_names_file_and_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_trace(path)
    assert caught.value.field == f"{path}:{line}"


def test_missing_empty_and_binary_traces_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_trace(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="two rows"):
        load_trace(write(tmp_path, HEADER + "2023-11-16 18:17:03,1,1\n"))
    binary = tmp_path / "trace.csv"
    binary.write_bytes(HEADER.encode() + b"\xff\xfe\x00\x01\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(binary)


def test_a_trace_that_a_spreadsheet_wrote_is_read(tmp_path: Path) -> None:
    """With a mark before the first letter: the header was refused, and a line to the eye like it asked for."""
    path = tmp_path / "trace.csv"
    path.write_bytes(
        b"\xef\xbb\xbf" + HEADER.encode() + b"2023-11-16 18:17:03,5,6\r\n2023-11-16 18:17:04,7,8\r\n"
    )

    assert [row.context_tokens for row in load_trace(path)] == [5, 7]


@pytest.mark.parametrize(("row", "name"), [("0,5", "ContextTokens"), ("5,0", "GeneratedTokens")])
def test_a_trace_without_lengths_is_refused(tmp_path: Path, row: str, name: str) -> None:
    """Each request was taken for one of one token."""
    path = write(tmp_path, HEADER + f"2023-11-16 18:17:03,{row}\n2023-11-16 18:17:04,{row}\n")

    with pytest.raises(ConfigError, match=f"{name} is 0 in every row"):
        load_trace(path)
    path.write_text(path.read_text() + "2023-11-16 18:17:05,5,5\n")
    assert len(load_trace(path)) == 3


def test_a_trace_of_too_many_rows_is_told_how_to_give_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.evaluation.arrivals.MAX_TRACE_ROWS", 2)
    path = write(tmp_path, HEADER + "2023-11-16 18:17:03,1,1\n" * 3)

    with pytest.raises(ConfigError, match=r"trace.csv:4: more than 2 rows.*every n-th row") as caught:
        load_trace(path)
    assert "--engines" in str(caught.value)


def even_trace(num: int, every_s: float, burst_at: int | None = None) -> list[TraceRow]:
    times = [index * every_s for index in range(num)]
    if burst_at is not None:
        times = sorted(times + [burst_at + 0.01 * index for index in range(20)])
    return [TraceRow(at_s=at, context_tokens=1000, generated_tokens=100) for at in times]


def test_trace_is_scaled_to_rate_and_lengths() -> None:
    arrivals = fit_trace(even_trace(4000, 0.25), SHAPE)  # 4 a second -> 2 a second

    check(arrivals, SHAPE)
    assert len(arrivals) == pytest.approx(120, abs=2)
    assert {(arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals} == {(64, 20)}


def test_a_thinned_burst_keeps_the_seconds_of_the_trace() -> None:
    rows = even_trace(1000, 0.5, burst_at=400)  # 2 a second, once 22: 11 times the mean
    shape = replace(SHAPE, mean_rate_hz=0.5)

    found = [thin_burst(rows, shape, seed) for seed in range(8)]

    counts = np.array([np.bincount([int(one.at_s) for one in burst], minlength=61) for burst in found])
    assert set(counts.argmax(axis=1)) <= {23, 24}  # where 40 % of the window is over
    assert counts.max(axis=1) / 0.5 == pytest.approx(11.0, abs=2.0)  # to within one request of 5.4
    assert len({tuple(one.at_s for one in burst) for burst in found}) > 1  # other requests each time


def test_a_trace_cannot_be_thinned_to_more_than_it_has() -> None:
    with pytest.raises(ConfigError, match="--rate"):
        thin_burst(even_trace(1000, 0.5), replace(SHAPE, mean_rate_hz=2.5), 0)


def test_trace_window_contains_the_busiest_second() -> None:
    arrivals = fit_trace(even_trace(1000, 0.5, burst_at=400), SHAPE)

    check(arrivals, SHAPE)
    counts = np.bincount([int(arrival.at_s) for arrival in arrivals], minlength=60)
    assert counts.argmax() in range(22, 27)  # 40 % of the window
    assert counts.max() >= 18


def test_another_stretch_of_a_trace_has_none_of_the_busiest_ones_requests() -> None:
    rows = [replace(row, context_tokens=1 + i) for i, row in enumerate(even_trace(4000, 0.25, burst_at=400))]
    shape = replace(SHAPE, prompt_median_tokens=100_000, prompt_max_tokens=10**9)  # no two are rounded alike

    stretches = [{a.prompt_tokens for a in fit_trace(rows, shape, number)} for number in range(4)]

    assert all(not one & other for i, one in enumerate(stretches) for other in stretches[:i])


def test_a_stretch_that_a_trace_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="windows"):
        fit_trace(even_trace(4000, 0.25), SHAPE, 1000)
