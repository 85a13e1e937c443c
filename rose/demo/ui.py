"""What the demo says while it runs: named stages with elapsed time, and the table at the end.

On a terminal a stage is one live line; elsewhere (a pipe, a CI log) it is one line when it begins and
one when it ends, so that a log reads the same way as the screen did.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.table import Table

from rose.demo.result import DemoResult, harvested_share, shared_tiers, steps_gain, summarize
from rose.units import format_bytes


class Stages:
    """Shows one stage at a time; ``elapsed`` counts from the start of the run."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started_s = time.monotonic()
        self._name = ""
        self._live: Status | None = None

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Everything done inside belongs to ``name``."""
        began_s, self._name = time.monotonic(), name
        if self.console.is_terminal:
            self._live = self.console.status(self._line())
            self._live.start()
        else:
            self._say(f"{name} ...")
        finished = False
        try:
            yield
            finished = True
        finally:
            if self._live is not None:
                self._live.stop()
                self._live = None
            sign = "[green]done[/green]" if finished else "[red]stopped[/red]"
            self._say(f"{name}: {sign} in {time.monotonic() - began_s:.0f} s")

    def update(self, detail: str) -> None:
        """More about the running stage; terminals only."""
        if self._live is not None:
            self._live.update(self._line(detail))

    def note(self, text: str) -> None:
        """A line that stays."""
        self._say(text)

    def _line(self, detail: str = "") -> str:
        minutes, seconds = divmod(int(self.elapsed_s()), 60)
        return f"[dim]{minutes}:{seconds:02d}[/dim]  {self._name}" + (
            f"  [dim]{detail}[/dim]" if detail else ""
        )

    def _say(self, text: str) -> None:
        minutes, seconds = divmod(int(self.elapsed_s()), 60)
        self.console.print(f"[dim]{minutes:2d}:{seconds:02d}[/dim]  {text}", highlight=False)


def summary_table(result: DemoResult) -> Table:
    """The figures of ``report.json``'s summary, each ratio beside its noise."""
    summary = summarize(result)

    def times(name: str) -> str:
        value = summary[name]
        return "-" if value is None else f"{value:.2f}x"

    def percent(value: float | int | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    table = Table(title="ROSE demo", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row(
        "success rate",
        f"{percent(summary['success_rate_first'])} -> {percent(summary['success_rate_last'])} "
        f"in {len(result.steps)} RL steps",
    )
    table.add_row(
        "harvested turns",
        f"{percent(summary['harvested_turn_share'])} of all, "
        f"{percent(harvested_share(shared_tiers(result)))} in blocks with harvesting on",
    )
    failed = result.production_errors
    table.add_row(
        "production",
        f"{result.production_requests:,} requests, "
        + (f"[red]{failed:,} failed[/red]" if failed else "0 failed"),
    )
    if (gain := steps_gain(result.blocks)) is not None:
        table.add_row(
            "RL steps per minute",
            f"{summary['steps_per_minute_on']:.1f} on, {summary['steps_per_minute_off']:.1f} off: {gain.value:.2f}x "
            f"({gain.low:.2f}-{gain.high:.2f}, {gain.num_pairs} pairs of blocks)",
        )
    table.add_row("P99 first token", f"{times('p99_ttft_ratio')} on / off  (A/A {times('aa_ttft_ratio')})")
    table.add_row("P99 between tokens", f"{times('p99_itl_ratio')} on / off  (A/A {times('aa_itl_ratio')})")
    sent, dense = summary["weight_bytes_sent"], summary["weight_bytes_dense"]
    if sent is not None and dense is not None:
        table.add_row(
            "weights", f"{format_bytes(sent)} sent, {format_bytes(dense)} dense ({sent / max(1, dense):.0%})"
        )
    table.add_row(
        "memory taken back",
        f"{result.reclaim.cuts} times, {result.reclaim.cut_requests} turns stopped for it",
    )
    table.add_row(
        "turns that moved",
        f"{result.reclaim.resumed_turns}, {result.reclaim.continued_turns} of them with tokens already; "
        f"{summary['resumed_with_8_tokens_each_side']} of {len(result.resumed)} looked at have 8 tokens or more on both sides",
    )
    return table
