"""What a chart would write over itself."""

from __future__ import annotations

import re

from rose.evaluation.charts import Band, Range, Series, line_chart, linear_axis, tornado


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


def test_of_two_ends_on_one_side_the_nearer_is_drawn_over_the_farther() -> None:
    """The longer bar hid the shorter one."""
    for low, high in ((12.0, 15.0), (15.0, 12.0), (2.0, 5.0), (5.0, 2.0)):
        row = Range(label="a", low_label="low", high_label="high", low=low, high=high)
        drawn = tornado([row], 8.0, linear_axis(20.0, "{:g}".format), title="t")
        widths = [float(width) for width in re.findall(r'<rect class="bar[^>]* width="([\d.]+)"', drawn)]
        assert widths == sorted(widths, reverse=True), (low, high)


def test_captions_of_stretches_far_apart_are_in_one_row_in_whatever_order_they_come() -> None:
    """All that stood left of the first one were taken to meet it, and lay under the curve."""
    found = captions(
        [
            Band(start=15, end=18, label="quietest"),
            Band(start=8, end=11, label="average"),
            Band(start=1, end=5, label="busiest"),
        ]
    )

    assert [name for name, _ in found] == ["busiest", "average", "quietest"]
    assert len({row for _, row in found}) == 1


def test_no_stretch_covers_the_caption_of_another() -> None:
    axis = linear_axis(18.0, str)
    bands = [Band(start=1, end=9, label="average"), Band(start=3, end=12, label="busiest")]

    chart = line_chart([], axis, axis, title="t", bands=bands)

    assert chart.rindex('<rect class="band"') < chart.index('class="cap"')
