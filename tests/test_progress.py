"""Progress of a command: bars on a terminal, lines in a log."""

from __future__ import annotations

import io

from rich.console import Console

from rose.progress import Bars


def told(*, terminal: bool) -> str:
    out = io.StringIO()
    with Bars(10, Console(file=out, force_terminal=terminal, width=60)) as bars:
        task = bars.add_task("reading", total=1.0)
        for hundredth in range(101):
            bars.update(task, completed=hundredth / 100)
        bars.update(task, completed=1.0, description="judging")
    return out.getvalue()


def test_a_log_has_a_line_for_each_quarter_and_each_thing_that_begins() -> None:
    assert told(terminal=False).split("\n")[:6] == [
        "reading: 0 %", "reading: 25 %", "reading: 50 %", "reading: 75 %", "reading: 100 %", "judging: 100 %",
    ]  # fmt: skip


def test_a_terminal_has_the_bar_alone() -> None:
    assert "reading: 25 %" not in told(terminal=True)
