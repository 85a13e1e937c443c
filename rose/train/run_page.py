"""``output_dir/run.html``: what a run has come to so far, for people, in one file that fetches nothing.

A sink of :mod:`rose.train.logs`: it keeps the numbers that it draws, those of earlier drivers read from ``metrics.jsonl``, and writes the page anew
at most every few seconds.  Steps that a death has undone are taken out when they are taken again.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from rose.evaluation.charts import Axis, Series, legend, line_chart, linear_axis, nice_ticks
from rose.evaluation.page import whole_page, write_whole

EVERY_S = 5.0
MAX_POINTS = 200
"""Of a line; of more steps, the means of neighbours are drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCurve:
    """One line: the name under which boards have it, what it is called, and its colour."""

    name: str
    label: str
    css: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunChart:
    title: str
    hint: str
    curves: tuple[RunCurve, ...]
    top: float | None = None
    """Of the axis; None = as the values are."""


def _curves(*rows: tuple[str, str, str]) -> tuple[RunCurve, ...]:
    return tuple(RunCurve(name=name, label=label, css=css) for name, label, css in rows)


CHARTS = (
    RunChart(
        title="Success",
        hint="Batches were sampled by earlier versions. Evaluations are of one version, greedy, and their mean is over the last ones.",
        curves=_curves(
            ("reward/sampled_success_rate", "batches", "rollout"),
            ("eval/success_rate", "held out", "again"),
            ("eval_recent/success_rate", "held out, mean", "alone"),
            ("eval_training/success_rate", "training tasks", "dense"),
            ("eval_recent/training_success_rate", "training tasks, mean", "policy"),
        ),
        top=1.0,
    ),
    RunChart(
        title="Gap",
        hint="Success on training tasks less that on held-out tasks, on the same weights.",
        curves=_curves(
            ("eval/gap", "greedy", "dense"),
            ("eval_recent/gap", "greedy, mean", "policy"),
            ("eval_recent/sampled_gap", "sampled, mean", "shared"),
        ),
    ),
    RunChart(
        title="Sampled as in training",
        hint="The same tasks at the temperature of training.",
        curves=_curves(
            ("eval_sampled/success_rate", "held out", "alone"),
            ("eval_sampled_training/success_rate", "training tasks", "policy"),
        ),
        top=1.0,
    ),
    RunChart(
        title="Reward",
        hint="Mean of the batch.",
        curves=_curves(("reward/reward_mean", "reward", "dedicated")),
    ),
    RunChart(
        title="Age of what is trained on",
        hint="Versions behind.",
        curves=_curves(
            ("batch/lag_mean", "mean", "dedicated"),
            ("batch/lag_max", "largest", "rollout"),
            ("batch/alpha", "bound of what is begun", "slo"),
        ),
    ),
    RunChart(
        title="Engine and trainer apart",
        hint="Mismatch KL, nats per token: of engine and trainer, and of versions where samples are older.",
        curves=_curves(("policy/mismatch_kl", "mismatch KL", "shared")),
    ),
    RunChart(
        title="Entropy",
        hint="Of the policy, nats per token, before the step.",
        curves=_curves(("policy/entropy", "entropy", "policy")),
    ),
    RunChart(
        title="Lengths in short and long rounds",
        hint="Sampled tokens of a batch over those of the batches of a whole cycle of rounds: an update of a short round sees short groups, one of a long round long ones.",
        curves=_curves(
            ("tail/length_ratio", "length, over the usual", "dense"), ("tail/is_long", "long round", "event")
        ),
    ),
    RunChart(
        title="Time of a step",
        hint="Seconds. Asynchronous: rollouts are what the trainer waited.",
        curves=_curves(
            ("time/step_s", "whole", "event"),
            ("time/rollout_s", "rollouts", "rollout"),
            ("time/train_s", "training", "train"),
            ("time/publish_s", "publishing", "publish"),
            ("time/eval_s", "waiting for an evaluation", "alone"),
        ),
    ),
)
_NAMES = (
    "run/attempt",
    "eval_recent/num_versions",
    *(curve.name for chart in CHARTS for curve in chart.curves),
)


class RunPage:
    """See the module's docstring.

    Args:
        job: Its name; plain text, as are the ``facts`` about it.
        clock: Seconds.
    """

    def __init__(
        self,
        path: Path,
        job: str,
        num_steps: int,
        facts: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._job, self._num_steps, self._facts = path, job, num_steps, facts
        self._clock = clock
        self._written_s = -math.inf
        self._rows: dict[int, array[float]] = {}
        """Steps rise."""

    def remember(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take a step in, and this and all later ones of before out."""
        while self._rows and (last := next(reversed(self._rows))) >= step:
            del self._rows[last]
        self._rows[step] = array("d", (scalars.get(name, math.nan) for name in _NAMES))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.remember(step, scalars)
        if self._clock() - self._written_s >= EVERY_S:
            self._save(refresh_s=30)

    def close(self, *, failed: bool) -> None:
        if self._rows:
            self._save(refresh_s=None)

    def _save(self, refresh_s: int | None) -> None:
        write_whole(self._path, self.render(refresh_s))
        self._written_s = self._clock()

    def render(self, refresh_s: int | None = None) -> str:
        """The page.

        Args:
            refresh_s: A browser looks for a newer one this often.
        """
        done = next(reversed(self._rows)) + 1 if self._rows else 0
        attempt = self._last("run/attempt")
        lead = f"{done} of {self._num_steps} steps" + (f", attempt {attempt[1]:.0f}" if attempt else "")
        facts = "".join(
            f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in self._facts.items()
        )
        charts = "".join(map(self._chart, CHARTS))
        body = (
            f'<h1>{escape(self._job)}</h1><p class="lead">{lead}</p>{self._tiles()}<div class="grid2">{charts}</div>'
            f"<section><h2>Settings</h2><dl>{facts}</dl></section>"
        )
        return whole_page(f"{self._job}: run", body, refresh_s=refresh_s)

    def _last(self, name: str) -> tuple[int, float] | None:
        """The newest step that has it, and its value."""
        at = _NAMES.index(name)
        return next(
            ((s, row[at]) for s in reversed(self._rows) if not math.isnan((row := self._rows[s])[at])), None
        )

    def _tiles(self) -> str:
        count = self._last("eval_recent/num_versions")
        over = f"mean of the last {count[1]:.0f} evaluated versions" if count else ""
        rows = [
            (
                "Batches",
                "reward/sampled_success_rate",
                "success of the last step's, sampled by earlier versions",
                "{:.2f}",
            ),
            ("Held out", "eval_recent/success_rate", over, "{:.2f}"),
            ("Training tasks", "eval_recent/training_success_rate", over, "{:.2f}"),
            ("Gap", "eval_recent/gap", over, "{:+.2f}"),
        ]
        tiles = [
            f'<div class="tile"><div class="label">{label}</div><div class="value">{form.format(found[1])}</div>'
            f'<div class="note">{note}</div></div>'
            for label, name, note, form in rows
            if (found := self._last(name)) is not None
        ]
        return f'<div class="tiles">{"".join(tiles)}</div>'

    def _chart(self, chart: RunChart) -> str:
        lines = [(curve, self._points(curve.name)) for curve in chart.curves]
        drawn = [Series(name=one.label, css=one.css, points=points) for one, points in lines if points]
        if not drawn:
            return ""
        values = [value for one in drawn for _, value in one.points]
        low, high = min(0.0, *values), max(values) if chart.top is None else chart.top
        y = _axis(low, high if high > low else low + 1.0, lambda value: f"{value:.3g}")
        x = linear_axis(float(next(reversed(self._rows)) + 1), lambda value: f"{value:g}", "steps")
        picture = line_chart(drawn, x, y, title=chart.title, dots=all(len(one.points) <= 40 for one in drawn))
        keys = legend([(one.css, one.name) for one in drawn])
        return f'<section><h2>{chart.title}</h2><p class="hint">{chart.hint}</p><figure>{picture}</figure>{keys}</section>'

    def _points(self, name: str) -> list[tuple[float, float]]:
        at = _NAMES.index(name)
        found = [(float(step + 1), row[at]) for step, row in self._rows.items() if math.isfinite(row[at])]
        if len(found) <= MAX_POINTS:
            return found
        cuts = [index * len(found) // MAX_POINTS for index in range(MAX_POINTS + 1)]
        return [_middle(found[a:b]) for a, b in pairwise(cuts)]


def _middle(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _axis(low: float, high: float, form: Callable[[float], str]) -> Axis:
    ticks = nice_ticks(low, high)
    return Axis(low=min(low, ticks[0]), high=max(high, ticks[-1]), ticks=ticks, format=form)
