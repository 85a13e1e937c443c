"""What a chart would write over itself."""

from __future__ import annotations

import re

from rose.evaluation.charts import Band, Series, line_chart, linear_axis


def captions(bands: list[Band]) -> list[tuple[str, float]]:
    axis = linear_axis(18.0, str)
    chart = line_chart([Series(name="a", css="a", points=[(0.0, 1.0)])], axis, axis, title="t", bands=bands)
    return [
        (name, float(y)) for y, name in re.findall(r'class="cap" x="[\d.]+" y="([-\d.]+)"[^>]*>(\w+)<', chart)
    ]


def test_captions_that_would_meet_are_in_two_rows() -> None:
    apart = captions([Band(start=0, end=8, label="quietest"), Band(start=9, end=16, label="average")])
    assert [name for name, _ in apart] == ["quietest", "average"]
    assert apart[0][1] == apart[1][1]
    close = captions([Band(start=5, end=16.3, label="average"), Band(start=16.5, end=18, label="busiest")])
    assert close[0][1] != close[1][1]
