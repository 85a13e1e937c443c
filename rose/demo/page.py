"""The report as one HTML page: inline SVG and CSS, no script, nothing from the network, light and dark.

Everything that came from outside (error texts, event texts, settings) passes through ``escape``.
What was not measured says so; nothing is drawn from a value that is None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from itertools import accumulate
from string import Template

from rose.demo.page_tables import (
    NOT_MEASURED,
    TIER_NAMES,
    facts,
    latency_table,
    reclaim_table,
    steps_table,
    table,
    tier_table,
)
from rose.demo.result import (
    ALONE_1,
    ALONE_2,
    ARMS,
    DEDICATED,
    HARVESTED,
    PHASE_NAMES,
    REST,
    SHARED,
    TIERS,
    DemoResult,
    StepRecord,
    TierCount,
    harvested_share,
    shared_tiers,
    steps_gain,
    summarize,
)
from rose.evaluation.arms import Ratio
from rose.evaluation.charts import (
    Axis,
    Band,
    Lane,
    LaneBar,
    Series,
    VerticalLine,
    bar_chart,
    bytes_axis,
    legend,
    line_chart,
    linear_axis,
    log_axis,
    nice_ticks,
    timeline,
)
from rose.evaluation.page import style
from rose.units import format_bytes, format_s

ARM_NAMES = {ALONE_1: "off, one half", ALONE_2: "off, other half", SHARED: "on"}
ARM_CSS = {ALONE_1: "alone", ALONE_2: "again", SHARED: "shared"}
MAX_DISTRIBUTION_POINTS = 400


def render_html(result: DemoResult) -> str:
    """The whole page."""
    template = files("rose.demo").joinpath("report.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        style=style(),
        verdict=_verdict(result),
        tiles=_tiles(result),
        timeline=_timeline(result),
        learning=_learning(result),
        turns=_turns(result),
        blocks=_blocks(result),
        resumed=_resumed(result),
        tier_table=tier_table(result),
        latency_table=latency_table(result),
        distributions=_distributions(result),
        weights=_weights(result),
        weights_note=_weights_note(result),
        reclaim=reclaim_table(result),
        steps_table=steps_table(result),
        settings=facts({**result.settings, "Traffic": result.traffic_source}),
        machine=facts(result.machine),
    )


# ---------------------------------------------------------------- top of the page


def _verdict(result: DemoResult) -> str:
    """One or two sentences; says first what went wrong, if anything did."""
    parts: list[str] = []
    if not result.complete:
        parts.append("<b>This run was cut short; the figures cover what was done.</b>")
    if result.steps:
        first, last = result.steps[0].success_rate, result.steps[-1].success_rate
        parts.append(
            f"The policy went from {first:.0%} to {last:.0%} success in {len(result.steps)} RL steps"
            + (
                f", {share:.0%} of its turns on the idle part of production's core."
                if (share := harvested_share(result.tiers)) is not None
                else "."
            )
        )
    failed = result.production_errors
    parts.append(
        f"Production answered {result.production_requests - failed:,} of "
        f"{result.production_requests:,} requests"
        + (f"; <b>{failed:,} failed.</b>" if failed else ", none failed.")
    )
    if gain := steps_gain(result.blocks):
        parts.append(
            f"With harvesting on the job made {gain.value:.2f}x the RL steps per minute that it made without "
            f"({gain.low:.2f} to {gain.high:.2f} with 95 % confidence, {gain.num_pairs} pairs of blocks)."
        )
    if pair := _ratio_pair(result, "ttft_p99"):
        parts.append(
            f"Production's P99 time to first token was {pair[0].value:.2f}x that of production alone; "
            f"two measurements of production alone differ by {pair[1].value:.2f}x."
        )
    return " ".join(parts)


def _ratio_pair(result: DemoResult, name: str) -> tuple[Ratio, Ratio] | None:
    ratio, noise = result.latency.ratios.get(name), result.latency.ratios.get(f"aa_{name}")
    return (ratio, noise) if ratio and noise else None


def _tiles(result: DemoResult) -> str:
    summary = summarize(result)

    def tile(label: str, value: str, note: str, state: str = "") -> str:
        return (
            f'<div class="tile {state}"><div class="label">{escape(label)}</div>'
            f'<div class="value">{value}</div><div class="note">{escape(note)}</div></div>'
        )

    def times(name: str) -> str:
        return NOT_MEASURED if summary[name] is None else f"{summary[name]:.2f}x"

    first, last = summary["success_rate_first"], summary["success_rate_last"]
    share = summary["harvested_turn_share"]
    shared_share = harvested_share(shared_tiers(result))
    gain = steps_gain(result.blocks)
    dense, sent = summary["weight_bytes_dense"], summary["weight_bytes_sent"]
    errors = result.production_errors
    return "".join(
        (
            tile(
                "Success rate",
                NOT_MEASURED if first is None or last is None else f"{first:.0%} → {last:.0%}",
                f"over {len(result.steps)} RL steps",
            ),
            tile(
                "Harvested turns",
                NOT_MEASURED if share is None else f"{share:.0%}",
                "of all turns"
                + (f"; {shared_share:.0%} while harvesting was on" if shared_share is not None else ""),
            ),
            tile(
                "RL steps per minute, on / off",
                NOT_MEASURED if gain is None else f"{gain.value:.2f}x",
                ""
                if gain is None
                else f"{gain.low:.2f}-{gain.high:.2f}; {summary['steps_per_minute_on']:.1f} and "
                f"{summary['steps_per_minute_off']:.1f}",
            ),
            tile(
                "Resumed turns",
                f"{result.reclaim.resumed_turns:,}",
                f"{summary['resumed_with_8_tokens_each_side']:,} of {len(result.resumed):,} looked at have 8 tokens "
                "or more on both sides",
            ),
            tile("P99 first token", times("p99_ttft_ratio"), f"A/A noise {times('aa_ttft_ratio')}"),
            tile("P99 between tokens", times("p99_itl_ratio"), f"A/A noise {times('aa_itl_ratio')}"),
            tile(
                "Failed production requests",
                f"{errors:,}",
                f"of {result.production_requests:,}",
                "bad" if errors else "good",
            ),
            tile(
                "Weights sent",
                NOT_MEASURED if sent is None else escape(format_bytes(sent)),
                "" if not dense or sent is None else f"{sent / dense:.0%} of dense ({format_bytes(dense)})",
            ),
        )
    )


# ---------------------------------------------------------------- charts


def _seconds_axis(result: DemoResult) -> Axis:
    end_s = max(
        [result.seconds_total, *(phase.end_s for phase in result.phases), *(s.end_s for s in result.steps)]
    )
    return Axis(
        low=0.0, high=end_s, ticks=nice_ticks(0.0, end_s, 10), format=lambda s: f"{s:.0f} s", label="time"
    )


def _timeline(result: DemoResult) -> str:
    def curve(name: str, css: str) -> Series | None:
        found = result.curves.get(name)
        return Series(name=found.name, css=css, points=found.points) if found and found.points else None

    def per_second(unit: str) -> Callable[[float], str]:
        return lambda value: f"{value:,.0f} {unit}/s"

    lanes = [
        Lane(
            name="Production",
            note="core 0, requests",
            curve=curve("production", "production"),
            format=per_second("req"),
        ),
        Lane(
            name="Harvested rollouts",
            note="core 0, idle class",
            curve=curve(HARVESTED, HARVESTED),
            format=per_second("tok"),
        ),
        Lane(
            name="Dedicated rollouts",
            note="core 1",
            curve=curve(DEDICATED, DEDICATED),
            format=per_second("tok"),
        ),
        Lane(name="RL steps", note="core 1", spans=_step_spans(result.steps)),
    ]
    if lent := curve("lent", "lent"):
        lanes.insert(
            2, Lane(name="Pages lent", note="2 MiB each", curve=lent, format=lambda v: f"{v:,.0f} pages")
        )
    bands = [
        Band(start=phase.start_s, end=phase.end_s, label=PHASE_NAMES.get(phase.name, phase.name))
        for phase in result.phases
    ]
    shown = {"pressure": "pressure", "cut": "pressure", "kill": "event", "restart": "event"}
    marks = [
        VerticalLine(at=event.at_s, css=shown[event.kind], title=f"{event.at_s:.1f} s: {event.text}")
        for event in result.events
        if event.kind in shown
    ]
    key = [("train", "training"), ("publish", "weights published")]
    if any(mark.css == "pressure" for mark in marks):
        key.append(("pressure", "production took memory back"))
    if any(mark.css == "event" for mark in marks):
        key.append(("event", "a process was killed or restarted"))
    return legend(key) + timeline(
        lanes, _seconds_axis(result), title="What ran where, over time", bands=bands, marks=marks
    )


def _step_spans(steps: Sequence[StepRecord]) -> list[LaneBar]:
    spans: list[LaneBar] = []
    for step in steps:
        tip = f"step {step.step}: success {step.success_rate:.0%}"
        if step.rollout_s is None or step.train_s is None:
            spans.append(
                LaneBar(start=step.start_s, end=step.end_s, css="rollout", label=str(step.step), title=tip)
            )
            continue
        rollout_end_s = min(step.end_s, step.start_s + step.rollout_s)
        train_end_s = min(step.end_s, rollout_end_s + step.train_s)
        parts = (
            (step.start_s, rollout_end_s, "rollout", "rollout"),
            (rollout_end_s, train_end_s, "train", "training"),
            (train_end_s, step.end_s, "publish", "publishing weights"),
        )
        for start_s, end_s, css, name in parts:
            label = str(step.step) if css == "rollout" else ""
            spans.append(
                LaneBar(
                    start=start_s,
                    end=end_s,
                    css=css,
                    label=label,
                    title=f"{tip}; {name} {format_s(end_s - start_s)}",
                )
            )
    return spans


def _steps_axis(steps: Sequence[StepRecord]) -> Axis:
    first, last = steps[0].step, steps[-1].step
    stride = max(1, math.ceil((last - first + 1) / 12))
    return Axis(
        low=first - 0.6,
        high=last + 0.6,
        ticks=[float(n) for n in range(first, last + 1, stride)],
        format=lambda n: f"{n:.0f}",
        label="RL step",
    )


def _on_bands(result: DemoResult) -> list[Band]:
    """Where harvesting was on, on the axis of steps."""
    return [
        Band(start=start, end=end, label="on" if end - start > 2 else "")
        for phase in result.phases
        if phase.name in (SHARED, REST)
        for start, end in [(_step_at(result.steps, phase.start_s), _step_at(result.steps, phase.end_s))]
        if end > start
    ]


def _step_at(steps: Sequence[StepRecord], at_s: float) -> float:
    """A time as a number of steps: halfway through step 3 is 3.0, whose bar stands there."""
    for step in steps:
        if at_s < step.end_s:
            return step.step - 0.5 + max(0.0, at_s - step.start_s) / (step.end_s - step.start_s)
    return steps[-1].step + 0.5 if steps else 0.0


def _blocks(result: DemoResult) -> str:
    if not result.blocks:
        return _absent("no block of traffic passed while the job ran")
    series = [
        Series(
            name=name,
            css=css,
            points=[
                (float(number), block.steps_per_minute if block.harvesting == on else 0.0)
                for number, block in enumerate(result.blocks, start=1)
            ],
        )
        for name, css, on in (("harvesting off", "dedicated", False), ("harvesting on", "harvested", True))
    ]
    numbers = [float(number) for number in range(1, len(result.blocks) + 1)]
    axis = Axis(low=0.4, high=numbers[-1] + 0.6, ticks=numbers, format=lambda n: f"{n:.0f}", label="block")
    top = max(block.steps_per_minute for block in result.blocks)
    chart = bar_chart(
        series,
        numbers,
        axis,
        linear_axis(top, lambda v: f"{v:.0f}"),
        title="RL steps per minute, by block",
        width=1080,
    )
    rows = [
        [
            str(number),
            "on" if block.harvesting else "off",
            f"{block.steps_per_minute:.1f}",
            *(f"{block.tiers.get(tier, TierCount()).num_turns:,}" for tier in TIERS),
        ]
        for number, block in enumerate(result.blocks, start=1)
    ]
    by_block = table(["Block", "Harvesting", "Steps per minute", "Dedicated turns", "Harvested turns"], rows)
    return legend([("dedicated", "harvesting off"), ("harvested", "harvesting on")]) + chart + by_block


def _resumed(result: DemoResult) -> str:
    """One turn that moved, token by token, each in the colour of the engine that sampled it."""
    turn = result.longest_resumed
    if turn is None:
        return _absent("no turn was seen that lost its engine with tokens")
    chips: list[str] = []
    ends = set(accumulate(turn.parts[:-1]))
    for number, token in enumerate(turn.tokens):
        if number in ends:
            before, after = turn.tokens[number - 1], token
            chips.append(
                f'<span class="moved">goes on elsewhere: from {escape(before.worker)} to {escape(after.worker)}</span>'
            )
        css = token.tier if token.tier in TIERS else "event"
        title = f"token {number + 1}, {token.worker}, log-prob {token.logprob:.3f}, weights {token.version}"
        chips.append(f'<span class="token s-{css}" title="{escape(title)}">{escape(token.text)}</span>')
    sides = " + ".join(str(part) for part in turn.parts)
    versions = sorted({token.version for token in turn.tokens})
    return (
        legend([(tier, TIER_NAMES[tier]) for tier in TIERS])
        + f'<div class="turn"><pre>{escape(readable(turn.prompt))}</pre><div class="tokens">{"".join(chips)}</div></div>'
        + f'<p class="hint">Trajectory {escape(turn.trajectory_id)}: {sides} tokens, weights '
        f"{escape(', '.join(versions))}. Each token was sampled once; none was sampled again after the move.</p>"
    )


def readable(prompt: str) -> str:
    """The board of a prompt, without the marks of the chat template."""
    return re.sub(r"<\|[a-z]+\|>", "", prompt)


def _learning(result: DemoResult) -> str:
    if not result.steps:
        return _absent("no RL step was finished")
    points = [(float(step.step), step.success_rate) for step in result.steps]
    percent = Axis(low=0.0, high=1.0, ticks=[0, 0.25, 0.5, 0.75, 1.0], format=lambda v: f"{v:.0%}")
    return line_chart(
        [Series(name="success rate", css="policy", points=points)],
        _steps_axis(result.steps),
        percent,
        title="Success rate per RL step",
        bands=_on_bands(result),
    )


def _turns(result: DemoResult) -> str:
    if not result.steps:
        return _absent("no RL step was finished")
    series = [
        Series(
            name=TIER_NAMES[tier],
            css=tier,
            points=[(float(s.step), float(s.tiers.get(tier, TierCount()).num_turns)) for s in result.steps],
        )
        for tier in TIERS
    ]
    top = max(sum(count.num_turns for count in step.tiers.values()) for step in result.steps)
    return legend([(tier, TIER_NAMES[tier]) for tier in TIERS]) + bar_chart(
        series,
        [float(step.step) for step in result.steps],
        _steps_axis(result.steps),
        linear_axis(float(top), lambda v: f"{v:,.0f}"),
        title="Turns per RL step and tier",
    )


def _distributions(result: DemoResult) -> str:
    found = {arm: result.latency.distributions[arm] for arm in ARMS if arm in result.latency.distributions}
    charts: list[str] = []
    objectives = (
        ("Time to first token", 0, result.latency.slo.ttft_s),
        ("Time between tokens", 1, result.latency.slo.tpot_s),
    )
    for title, which, slo_s in objectives:
        values = [value for pair in found.values() for value in pair[which] if value > 0]
        if not values:
            continue
        axis = log_axis(min(values), max(*values, slo_s), _short(format_s))
        series = [
            Series(name=ARM_NAMES[arm], css=ARM_CSS[arm], points=_staircase(pair[which]))
            for arm, pair in found.items()
        ]
        percent = Axis(low=0.0, high=1.0, ticks=[0, 0.25, 0.5, 0.75, 1.0], format=lambda v: f"{v:.0%}")
        slo_line = Series(name=f"SLO {format_s(slo_s)}", css="slo", points=[(slo_s, 0.0), (slo_s, 1.0)])
        charts.append(
            f"<figure><figcaption>{title}: share of all values at or below</figcaption>"
            + line_chart([slo_line, *series], axis, percent, title=title, dots=False, steps=True)
            + "</figure>"
        )
    if not charts:
        return _absent("no production request was measured")
    key = legend([*((ARM_CSS[arm], ARM_NAMES[arm]) for arm in found), ("slo", "SLO")])
    return key + f'<div class="pair">{"".join(charts)}</div>'


def _staircase(sorted_values: Sequence[float]) -> list[tuple[float, float]]:
    """An empirical distribution in at most ``MAX_DISTRIBUTION_POINTS`` steps; its two ends are exact."""
    num = len(sorted_values)
    if not num:
        return []
    stride = max(1, math.ceil(num / MAX_DISTRIBUTION_POINTS))
    kept = sorted({*range(0, num, stride), num - 1})
    return [(sorted_values[0], 0.0), *((sorted_values[i], (i + 1) / num) for i in kept)]


def _weights(result: DemoResult) -> str:
    steps = [step for step in result.steps if step.bytes_sent and step.bytes_dense]
    if not steps:
        return _absent("no weight update was published")
    sent = [(float(s.step), float(s.bytes_sent or 0)) for s in steps]
    dense = [(float(s.step), float(s.bytes_dense or 0)) for s in steps]
    values = [value for _, value in (*sent, *dense)]
    return legend([("sent", "sent"), ("dense", "dense, for comparison")]) + bar_chart(
        [Series(name="sent", css="sent", points=sent)],
        [float(step.step) for step in steps],
        _steps_axis(steps),
        bytes_axis(min(values) / 2, max(values), _short(format_bytes)),
        title="Bytes per weight update",
        outline=Series(name="dense", css="dense", points=dense),
    )


def _weights_note(result: DemoResult) -> str:
    def describe(steps: Sequence[StepRecord]) -> str:
        sent, dense = sum(s.bytes_sent or 0 for s in steps), sum(s.bytes_dense or 0 for s in steps)
        densities = [s.density for s in steps if s.density is not None]
        density = f"{sum(densities) / len(densities):.1%} of the weights changed, " if densities else ""
        return (
            f"{density}{format_bytes(sent / len(steps))} sent per update, "
            f"{dense / max(1, sent):.1f}x fewer than dense"
        )

    deltas = [s for s in result.steps if s.bytes_sent is not None and s.update_kind != "anchor"]
    return f"<p>{describe(deltas)}.</p>" if deltas else ""


def _short(format_value: Callable[[float], str]) -> Callable[[float], str]:
    """For axis ticks: ``10 ms`` instead of ``10.0 ms``."""
    return lambda value: format_value(value).replace(".0 ", " ")


def _absent(text: str) -> str:
    return f'<p class="absent">Not shown: {escape(text)}.</p>'
