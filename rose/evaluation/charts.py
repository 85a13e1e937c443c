"""Small SVG charts for the report: a line per series, stacked bars, step curves, a timeline of lanes.

Pure functions from numbers to SVG text.  Colours come from CSS classes (``s-NAME`` for a series), so that one
drawing serves light and dark; every mark carries a ``<title>``, which is the tooltip.  All text is escaped
here: callers pass plain text, labels from other processes included.  Why no library draws them: decision 0011.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
Format = Callable[[float], str]

LEFT, RIGHT, TOP, BOTTOM = 62, 14, 18, 34
"""Margins of a plot, in the SVG's own units (one unit is one CSS pixel at full width)."""
BAR_GAP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """``name`` is shown; ``css`` is the class that colours it (see the template)."""

    name: str
    css: str
    points: Sequence[Point]


CAPTION_PX = 6
"""Of a letter of a caption, about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A shaded stretch of the x axis with a caption."""

    start: float
    end: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    low: float
    high: float
    ticks: Sequence[float]
    format: Format
    label: str = ""
    log: bool = False

    def fraction(self, value: float) -> float:
        """Where ``value`` lies between ``low`` (0) and ``high`` (1); outside is pulled to the edge."""
        if self.log:
            value, low, high = (math.log10(max(v, 1e-12)) for v in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneBar:
    """A stretch of time in a lane of the timeline."""

    start: float
    end: float
    css: str
    label: str
    """Written into the span where it fits, and the tooltip."""
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One row of the timeline: spans, or a curve filled from its base line."""

    name: str
    note: str = ""
    spans: Sequence[LaneBar] = ()
    curve: Series | None = None
    format: Format = str


@dataclass(frozen=True, kw_only=True, slots=True)
class VerticalLine:
    """A moment, drawn through all lanes."""

    at: float
    css: str
    title: str


def nice_ticks(low: float, high: float, num: int = 5) -> list[float]:
    """Round numbers that cover ``low..high``."""
    if not high > low:
        return [low]
    raw = (high - low) / num
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    ticks: list[float] = []
    while (value := first * step) <= high * (1 + 1e-9) + 1e-12:
        ticks.append(round(value, 12))
        first += 1
    return ticks


def linear_axis(high: float, format_value: Format, label: str = "", low: float = 0.0) -> Axis:
    """From ``low`` to the first round number at or above ``high``."""
    high = high if high > low else low + 1.0
    ticks = nice_ticks(low, high)
    if ticks[-1] < high * (1 - 1e-9):
        ticks.append(round(2 * ticks[-1] - ticks[-2], 12))
    top = ticks[-1]
    return Axis(low=low, high=top, ticks=ticks, format=format_value, label=label)


def bytes_axis(low: float, high: float, format_value: Format) -> Axis:
    """Logarithmic, with ticks that read well in binary units: 1, 10, 100 KiB, 1 MiB, ..."""
    candidates = [m * 1024.0**power for power in range(5) for m in (1, 10, 100)]
    bottom = max((t for t in candidates if t <= low), default=candidates[0])
    top = min((t for t in candidates if t >= high), default=candidates[-1])
    top = top if top > bottom else bottom * 10
    ticks = [t for t in candidates if bottom <= t <= top]
    return Axis(low=bottom, high=top, ticks=ticks, format=format_value, log=True)


def log_axis(low: float, high: float, format_value: Format, label: str = "") -> Axis:
    """Whole decades, or 1-2-5 steps where the values span about two of them or less."""
    low = max(low, 1e-9)
    high = max(high, low * 1.0001)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if high / low < 200 else (1,)
    ticks = [m * 10.0**power for power in range(first, last + 1) for m in steps]
    bottom = max((t for t in ticks if t <= low * 1.001), default=ticks[0])
    top = min((t for t in ticks if t >= high * 0.999), default=ticks[-1])
    return Axis(
        low=bottom,
        high=top,
        ticks=[t for t in ticks if bottom <= t <= top],
        format=format_value,
        label=label,
        log=True,
    )


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    title: str,
    bands: Sequence[Band] = (),
    dots: bool = True,
    steps: bool = False,
    width: int = 520,
    height: int = 260,
) -> str:
    """One line per series; ``steps`` draws a distribution's staircase."""
    plot = _Plot(x, y, width, height)
    body = [plot.bands(bands), plot.axes()]
    for one in series:
        if not one.points:
            continue
        at = [(plot.x(px), plot.y(py)) for px, py in one.points]
        if steps:
            path = f"M{at[0][0]:.1f} {at[0][1]:.1f}" + "".join(f"H{px:.1f}V{py:.1f}" for px, py in at[1:])
        else:
            path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in at)
        body.append(f'<path class="line s-{one.css}" d="{path}"><title>{escape(one.name)}</title></path>')
        if dots:
            for (px, py), (vx, vy) in zip(at, one.points, strict=True):
                tip = f"{one.name}: {y.format(vy)} at {x.format(vx)}"
                body.append(
                    f'<circle class="dot s-{one.css}" cx="{px:.1f}" cy="{py:.1f}" r="4">'
                    f"<title>{escape(tip)}</title></circle>"
                )
    return _svg(width, height, title, body)


def bar_chart(
    stacks: Sequence[Series],
    x_values: Sequence[float],
    x: Axis,
    y: Axis,
    *,
    title: str,
    bands: Sequence[Band] = (),
    outline: Series | None = None,
    width: int = 520,
    height: int = 260,
) -> str:
    """Bars at ``x_values``, one layer per series, the first at the bottom; ``outline`` is a level above.

    A log axis takes one series only: stacked logarithms mean nothing.
    """
    plot = _Plot(x, y, width, height)
    body = [plot.bands(bands), plot.axes()]
    spacing = (plot.x(x_values[1]) - plot.x(x_values[0])) if len(x_values) > 1 else 60.0
    bar = max(2.0, min(36.0, spacing * 0.68))
    by_series = [dict(one.points) for one in stacks]
    for value in x_values:
        base = 0.0
        for one, points in zip(stacks, by_series, strict=True):
            amount = points.get(value, 0.0)
            if amount <= 0:
                continue
            bottom = plot.y(base) if not y.log else plot.bottom
            top = plot.y(base + amount)
            gap = BAR_GAP if base > 0 and bottom - top > 2 * BAR_GAP else 0
            tip = f"{one.name}: {y.format(amount)} at {x.format(value)}"
            body.append(
                f'<rect class="bar s-{one.css}" x="{plot.x(value) - bar / 2:.1f}" y="{top:.1f}" rx="1.5" '
                f'width="{bar:.1f}" height="{max(0.6, bottom - top - gap):.1f}">'
                f"<title>{escape(tip)}</title></rect>"
            )
            base += amount
    if outline is not None:
        for vx, vy in outline.points:
            px, py = plot.x(vx), plot.y(vy)
            body.append(
                f'<path class="level s-{outline.css}" '
                f'd="M{px - bar / 2 - 2:.1f} {py:.1f}H{px + bar / 2 + 2:.1f}">'
                f"<title>{escape(f'{outline.name}: {y.format(vy)} at {x.format(vx)}')}</title></path>"
            )
    return _svg(width, height, title, body)


def timeline(
    lanes: Sequence[Lane],
    x: Axis,
    *,
    title: str,
    bands: Sequence[Band] = (),
    marks: Sequence[VerticalLine] = (),
    width: int = 1080,
    lane_height: int = 46,
) -> str:
    """Lanes over one time axis, phases as bands behind them, moments as thin lines through them."""
    left, top, gap = 240, 30, 12
    bottom = top + len(lanes) * (lane_height + gap)
    height = bottom + 26
    right = width - RIGHT

    def at(value: float) -> float:
        return left + x.fraction(value) * (right - left)

    body: list[str] = []
    for number, band in enumerate(bands):
        start, end = at(band.start), at(band.end)
        body.append(
            f'<rect class="band{" alt" if number % 2 else ""}" x="{start:.1f}" y="18" '
            f'width="{max(0.0, end - start):.1f}" height="{bottom - 18}">'
            f"<title>{escape(band.label)}</title></rect>"
        )
        if end - start > CAPTION_PX * len(band.label):
            body.append(f'<text class="cap" x="{start + 5:.1f}" y="12">{escape(band.label)}</text>')
    for number, lane in enumerate(lanes):
        y0 = top + number * (lane_height + gap)
        base = y0 + lane_height
        body.append(f'<text class="lane" x="0" y="{y0 + 18}">{escape(lane.name)}</text>')
        if lane.note:
            body.append(f'<text class="tick" x="0" y="{y0 + 34}">{escape(lane.note)}</text>')
        body.append(f'<path class="base" d="M{left} {base}H{right}"/>')
        if lane.curve is not None and lane.curve.points:
            peak = max(value for _, value in lane.curve.points) or 1.0
            path = f"M{at(lane.curve.points[0][0]):.1f} {base}"
            path += "".join(
                f"L{at(px):.1f} {base - lane_height * py / peak:.1f}" for px, py in lane.curve.points
            )
            path += f"L{at(lane.curve.points[-1][0]):.1f} {base}Z"
            tip = f"{lane.curve.name}, at most {lane.format(peak)}"
            body.append(
                f'<path class="area s-{lane.curve.css}" d="{path}"><title>{escape(tip)}</title></path>'
            )
            body.append(
                f'<text class="tick" x="{left - 6}" y="{y0 + 9}" text-anchor="end">'
                f"{escape(lane.format(peak))}</text>"
            )
        for span in lane.spans:
            start, end = at(span.start), at(span.end)
            size = max(1.0, end - start - 1)
            body.append(
                f'<rect class="span s-{span.css}" x="{start:.1f}" y="{y0 + 8}" rx="2" width="{size:.1f}" '
                f'height="{lane_height - 12}"><title>{escape(span.title or span.label)}</title></rect>'
            )
            room = size - 7 * len(span.label)
            if room > 2:
                body.append(
                    f'<text class="in" x="{start + min(5.0, room / 2):.1f}" '
                    f'y="{y0 + lane_height / 2 + 6:.1f}">{escape(span.label)}</text>'
                )
    for mark in marks:
        px = at(mark.at)
        body.append(
            f'<path class="mark s-{mark.css}" d="M{px:.1f} 18V{bottom}">'
            f"<title>{escape(mark.title)}</title></path>"
        )
    body.extend(
        f'<text class="tick" x="{at(tick):.1f}" y="{bottom + 16}" text-anchor="middle">'
        f"{escape(x.format(tick))}</text>"
        for tick in x.ticks
    )
    return _svg(width, height, title, body)


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """One bar of a tornado: what a result becomes at the low and the high end of one assumption; None = nothing can be said."""

    label: str
    low_label: str
    high_label: str
    low: float | None
    high: float | None


def tornado(
    rows: Sequence[Range], base: float, x: Axis, *, title: str, width: int = 1080, row_height: int = 38
) -> str:
    """Bars from ``base`` to each end, one row per assumption, in the order given; the ends carry what they stand for."""
    left, right, top = 400, width - 120, 8
    bottom = top + len(rows) * row_height

    def at(value: float) -> float:
        return left + 90 + x.fraction(value) * (right - left - 90)

    body: list[str] = []
    for tick in x.ticks:
        body.append(f'<path class="grid" d="M{at(tick):.1f} {top}V{bottom}"/>')
        body.append(
            f'<text class="tick" x="{at(tick):.1f}" y="{bottom + 16}" text-anchor="middle">'
            f"{escape(x.format(tick))}</text>"
        )
    for number, row in enumerate(rows):
        middle = top + (number + 0.5) * row_height
        body.append(f'<text x="0" y="{middle + 4:.1f}">{escape(row.label)}</text>')
        ends = [(row.low, row.low_label, "dedicated"), (row.high, row.high_label, "harvested")]
        known = sorted(
            ((value, label, css) for value, label, css in ends if value is not None), key=lambda e: e[0]
        )
        # The nearer over the farther: both may lie on one side.
        for value, label, css in sorted(known, key=lambda end: -abs(end[0] - base)):
            begin, end = sorted((at(base), at(value)))
            tip = f"{row.label}, {label}: {x.format(value)}"
            body.append(
                f'<rect class="bar s-{css}" x="{begin:.1f}" y="{middle - 8:.1f}" width="{max(1.0, end - begin):.1f}" '
                f'height="16" rx="2"><title>{escape(tip)}</title></rect>'
            )
        for index, (value, label, _) in enumerate(known):
            outer = index == len(known) - 1 and (len(known) > 1 or value >= base)
            px = max(at(value), at(base)) + 6 if outer else min(at(value), at(base)) - 6
            body.append(
                f'<text class="tick" x="{px:.1f}" y="{middle + 4:.1f}" text-anchor="{"start" if outer else "end"}">'
                f"{escape(label)}</text>"
            )
        if len(known) < 2:
            lost = ", ".join(label for value, label, _ in ends if value is None)
            body.append(
                f'<text class="tick" x="{width}" y="{middle + 4:.1f}" text-anchor="end">nothing known at {escape(lost)}</text>'
            )
    body.append(f'<path class="mark s-event" d="M{at(base):.1f} {top}V{bottom}"/>')
    return _svg(width, bottom + 24, title, body)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """HTML legend of ``(css, name)``."""
    items = "".join(f'<span><i class="key s-{css}"></i>{escape(name)}</span>' for css, name in entries)
    return f'<div class="legend">{items}</div>'


class _Plot:
    """Places values of two axes inside the margins."""

    def __init__(self, x: Axis, y: Axis, width: int, height: int) -> None:
        self._x, self._y = x, y
        self.left, self.right, self.top, self.bottom = LEFT, width - RIGHT, TOP, height - BOTTOM

    def x(self, value: float) -> float:
        return self.left + self._x.fraction(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - self._y.fraction(value) * (self.bottom - self.top)

    def axes(self) -> str:
        parts: list[str] = []
        for tick in self._y.ticks:
            py = self.y(tick)
            parts.append(f'<path class="grid" d="M{self.left} {py:.1f}H{self.right}"/>')
            parts.append(
                f'<text class="tick" x="{self.left - 6}" y="{py + 4:.1f}" text-anchor="end">'
                f"{escape(self._y.format(tick))}</text>"
            )
        parts.extend(
            f'<text class="tick" x="{self.x(tick):.1f}" y="{self.bottom + 16}" '
            f'text-anchor="{"end" if self.x(tick) > self.right - 12 else "middle"}">'
            f"{escape(self._x.format(tick))}</text>"
            for tick in self._x.ticks
        )
        parts.append(f'<path class="base" d="M{self.left} {self.bottom}H{self.right}"/>')
        if self._x.label:
            parts.append(
                f'<text class="tick" x="{self.right}" y="{self.bottom + 30}" text-anchor="end">'
                f"{escape(self._x.label)}</text>"
            )
        return "".join(parts)

    def bands(self, bands: Sequence[Band]) -> str:
        shades: list[str] = []
        captions: list[str] = []
        written_to = 0.0
        for band in sorted(bands, key=lambda band: band.end):
            start, end = self.x(band.start), self.x(band.end)
            meets = end - CAPTION_PX * len(band.label) < written_to  # then it is written below that one
            written_to = written_to if meets else end
            shades.append(
                f'<rect class="band" x="{start:.1f}" y="{self.top}" width="{max(0.0, end - start):.1f}" '
                f'height="{self.bottom - self.top}"/>'
            )
            captions.append(
                f'<text class="cap" x="{end:.1f}" y="{self.top + (10 if meets else -4)}" text-anchor="end">'
                f"{escape(band.label)}</text>"
            )
        return "".join(shades + captions)


def _svg(width: int, height: int, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'style="min-width:{min(width, 760) * 0.72:.0f}px">{"".join(body)}</svg>'
    )
