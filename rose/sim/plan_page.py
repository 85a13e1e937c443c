"""What people and programs read of a plan: the sentence, one HTML page and one JSON document."""

from __future__ import annotations

import json
import math
import os
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rose.evaluation.charts import Band, Range, Series, legend, line_chart, linear_axis, tornado
from rose.sim.plan import FRESH, HEADROOMS, HOURS_A_MONTH, SAFE_EXTRA, WINDOWS, Cell, Plan
from rose.sim.traffic import Traffic

CSS = dict(zip(WINDOWS, ("dedicated", "production", "harvested"), strict=True))
NAMES = {"quiet": "quietest", "mean": "average", "busy": "busiest"}
COVERED = 0.98
"""Data of less of the time than this is said."""
NONE_JUDGED = "no request judged"
FAR = 0.25
"""A simulated P99 further than this from the fleet's own is said to be."""


def text(plan: Plan) -> str:
    """The answer in a few lines, for the terminal and the top of the page."""
    fleet, misses = plan.scenario.fleet, plan.misses
    low, high = plan.range_gpus
    engines = f"{fleet.serving} serving engines on {fleet.device}"
    lines = [
        f"{engines}: rollouts worth {plan.mean_gpus:.1f} dedicated GPUs on average ({low:.1f} to {high:.1f} as the assumptions go)",
        f"a month: {plan.gpu_hours_a_month:,.0f} GPU hours, {_money(plan.money_a_month)} at {plan.price:g} a GPU hour; "
        f"{_tokens(plan.tokens_a_day)} sampled tokens a day",
        f"production: {_added(plan)}; first-token P99 at the busiest {_p99(plan.judged[-1], 'ttft')}, per-token P99 "
        f"{_p99(plan.judged[-1], 'tpot')}",
        f"with min_headroom_fraction = {plan.headroom:g}; {misses.num:,} requests simulated, each beside itself without rollouts",
    ]
    if plan.traffic.covered < COVERED:
        lines.append(f"warning: {_covered(plan.traffic)}")
    if not plan.safe:
        lines.append(f"warning: {_unsafe(plan)[0]}; {_unsafe(plan)[1]}")
    lines.append("simulated, not measured: run a node in mode `observe` before you switch it on")
    return "\n".join(lines)


def document(plan: Plan) -> dict[str, Any]:
    """``{"schema", "summary", "details"}``; sizes in the names."""
    misses, busy = plan.misses, plan.judged[-1]
    low, high = plan.range_gpus
    summary = {
        "gpus_mean": plan.mean_gpus,
        "gpus_low": low,
        "gpus_high": high,
        "gpu_hours_per_month": plan.gpu_hours_a_month,
        "money_per_month": plan.money_a_month,
        "gpu_hour_price": plan.price,
        "sampled_tokens_per_day": plan.tokens_a_day,
        "added_misses": misses.share,
        "added_misses_upper_95": misses.high,
        "requests_simulated": misses.num,
        "busiest_ttft_p99_ms": busy.ttft_p99_ms,
        "busiest_ttft_p99_alone_ms": busy.alone_ttft_p99_ms,
        "busiest_tpot_p99_ms": busy.tpot_p99_ms,
        "busiest_tpot_p99_alone_ms": busy.alone_tpot_p99_ms,
        "min_headroom_fraction": plan.headroom,
        "is_safe": plan.safe,
    }
    traffic = plan.traffic
    details = {
        "traffic": {
            "source": traffic.source,
            "span_s": traffic.span_s,
            "covered": traffic.covered,
            "num_engines": traffic.num_engines,
            "knows_engines": traffic.knows_engines,
            "kv_use": traffic.kv_use,
            "hit_share": traffic.hit_share,
            "observed_ms": dict(traffic.observed_ms),
        },
        "over_time": {
            "at_s": plan.at_s.tolist(),
            "requests_per_s_and_engine": plan.load.tolist(),
            "gpus": plan.gpus.tolist(),
        },
        "judged": [_cell(cell) for cell in plan.judged],
        "sweep": [_cell(cell) for cell in plan.sweep],
        "assumptions": [
            {
                "name": swing.assumption.name,
                "low": swing.assumption.low,
                "high": swing.assumption.high,
                "gpus_low": swing.low_gpus,
                "gpus_high": swing.high_gpus,
                "added_misses_low": swing.low_added,
                "added_misses_high": swing.high_added,
            }
            for swing in plan.swings
        ],
        "measure_next": measure_next(plan),
        "scenario": plan.scenario.model_dump(mode="json"),
    }
    return {"schema": 2, "summary": summary, "details": details}


def measure_next(plan: Plan) -> list[str]:
    """What would narrow the answer most, the most first."""
    traffic, found = plan.traffic, list[str]()
    if not traffic.is_measured:
        found.append(
            "your own traffic: --prometheus URL, --scrapes FILE or --trace CSV; all of this rests on a generator's"
        )
    elif traffic.span_s < 20 * 3600:
        found.append(
            f"a whole day of traffic: this is {_span(traffic.span_s)} of one, and a month is made of it"
        )
    found += [line for line in far_off(plan) if line not in found]
    for swing in plan.swings[:4]:
        if math.isinf(swing.width):
            found.append(f"{swing.assumption.name}: {swing.assumption.measure}")
        elif swing.width > 0.02 * max(plan.mean_gpus, 1e-9):
            found.append(
                f"{swing.assumption.name} ({swing.width:.1f} GPUs between its ends): {swing.assumption.measure}"
            )
    found.append(
        "then one node in mode `observe` for a day: `rose node status` says what it could lend, and nothing runs yet"
    )
    return list(dict.fromkeys(found))


def far_off(plan: Plan) -> list[str]:
    """Where the simulated fleet, without rollouts, is not the fleet that was read."""
    lines: list[str] = []
    for kind, name in (("ttft", "first token"), ("tpot", "between tokens")):
        seen = plan.traffic.observed_ms.get(f"{kind}_p99")
        made = max(getattr(cell, f"alone_{kind}_p99_ms") for cell in plan.judged)
        if seen and made and abs(made / seen - 1) > FAR:
            lines.append(
                f"step times: your P99 {name} is {seen:.0f} ms, the simulated one {made:.0f} ms at the busiest; "
                "`rose profile` gives serving.profile"
            )
    return lines


def write_plan(plan: Plan, directory: Path) -> list[Path]:
    """``plan.html`` and ``plan.json``, each replaced as a whole."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / "plan.html", directory / "plan.json"]
    for path, content in zip(paths, (render(plan), json.dumps(document(plan), indent=1) + "\n"), strict=True):
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    return paths


def render(plan: Plan) -> str:
    """The page; nothing in it is fetched from elsewhere."""
    fleet, serving = plan.scenario.fleet, plan.scenario.serving
    style = files("rose.demo").joinpath("report.html").read_text(encoding="utf-8")
    style = style[style.index("<style>") : style.index("</style>") + len("</style>")]
    measure = "".join(f"<li>{_code(line)}</li>" for line in measure_next(plan))
    warning = (
        ""
        if plan.safe
        else (f'<p class="lead"><b>{_sentence(_unsafe(plan)[0])}</b> {_sentence(_unsafe(plan)[1])}</p>')
    )
    parts = [
        f"<h1>What {escape(plan.scenario.name)} can lend to rollouts</h1>",
        f'<p class="lead">{fleet.serving} engines of {escape(serving.model)} on {escape(fleet.device)}, beside them '
        f"{escape(plan.scenario.job.model)}. Traffic: {escape(traffic_line(plan.traffic))}. "
        "<b>Simulated with ROSE's own policies, not measured.</b></p>",
        warning,
        _tiles(plan),
        '<div class="grid2">',
        _section(
            "Production over time", "Requests per second of one engine, as read.", _over_time(plan, load=True)
        ),
        _section(
            "What can be harvested then", "In dedicated GPUs, the whole fleet.", _over_time(plan, load=False)
        ),
        "</div>",
        _section(
            "What production feels",
            f"At the recommended headroom of {plan.headroom:.0%}: the same requests without rollouts and with them, "
            f"{FRESH} draws of each stretch that the choice of the headroom has not seen.",
            _table(plan),
        ),
        _section(
            "Which assumptions matter",
            f"Each by itself at a low and a high value, everything else as assumed; {plan.mean_gpus:.1f} GPUs is the line.",
            _tornado(plan),
        ),
        '<div class="grid2">',
        _section("What to measure next", "The first line narrows the answer most.", f"<ol>{measure}</ol>"),
        _section(
            "Memory that production keeps free",
            f"Worth by lending.min_headroom_fraction; recommended {plan.headroom:g}: the most that is harvested with at most "
            f"{SAFE_EXTRA:.1%} of requests more over their limits.",
            _headrooms(plan),
        ),
        "</div>",
        _section("What this rests on", "", _basis(plan)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(plan.scenario.name)}: plan</title>{style}</head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def traffic_line(traffic: Traffic) -> str:
    gaps = f"; {_covered(traffic)}" if traffic.covered < COVERED else ""
    return f"{traffic.source}, {_span(traffic.span_s)}{gaps}"


def _covered(traffic: Traffic) -> str:
    whole_s = traffic.span_s / traffic.covered
    return (
        f"there is data of {traffic.covered:.0%} of the {_span(whole_s)} that were read; the rest is cut out, "
        "and a month is made of what is left"
    )


def _tiles(plan: Plan) -> str:
    low, high = plan.range_gpus
    misses, busy = plan.misses, plan.judged[-1]
    tiles = [
        (
            "",
            "worth, on average",
            f"{plan.mean_gpus:.1f} GPUs",
            f"{low:.1f} to {high:.1f} as the assumptions go",
        ),
        (
            "",
            "a month",
            f"{plan.gpu_hours_a_month:,.0f} GPU h",
            f"{_tokens(plan.tokens_a_day)} sampled tokens a day",
        ),
        (
            "",
            "worth, a month",
            _money(plan.money_a_month),
            f"at {plan.price:g} a GPU hour (--gpu-hour-price)",
        ),
        (
            "good" if misses.share is not None and misses.share <= SAFE_EXTRA else "bad",
            "limits missed that rollouts add",
            NONE_JUDGED if misses.share is None else f"{misses.share:.3%}",
            "" if misses.high is None else f"of {misses.num:,} requests; at most {misses.high:.2%} (95 %)",
        ),
        (
            "",
            "first token, P99, busiest",
            _p99(busy, "ttft"),
            f"alone, with rollouts; limit {plan.scenario.serving.slo_ttft_ms:g} ms",
        ),
        (
            "",
            "per token, P99, busiest",
            _p99(busy, "tpot"),
            f"alone, with rollouts; limit {plan.scenario.serving.slo_tpot_ms:g} ms",
        ),
    ]
    return (
        '<div class="tiles" style="grid-template-columns: repeat(auto-fit, minmax(300px, 1fr))">'
        + "".join(
            f'<div class="tile {css}"><div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>'
            f'<div class="note">{escape(note)}</div></div>'
            for css, label, value, note in tiles
        )
        + "</div>"
    )


def _over_time(plan: Plan, *, load: bool) -> str:
    in_hours = plan.traffic.span_s > 2 * 3600
    unit_s, unit = (3600.0, "hours") if in_hours else (60.0, "minutes")
    values = plan.load if load else plan.gpus
    css, name = ("production", "requests per second") if load else ("harvested", "GPUs")
    points = [(float(at) / unit_s, float(value)) for at, value in zip(plan.at_s, values, strict=True)]
    span = plan.traffic.span_s / unit_s
    x = linear_axis(span, lambda value: f"{value:g}", unit)
    x = type(x)(
        low=0.0, high=span, ticks=[tick for tick in x.ticks if tick <= span], format=x.format, label=unit
    )
    most = max(value for _, value in points)
    digits = 0 if most > 20 else 1 if most > 2 else 2
    y = linear_axis(most or 1.0, lambda value: f"{value:.{digits}f}")
    cells = plan.scenario.cells
    length_s = min(plan.traffic.span_s, cells.warm_s + cells.seconds)
    bands = [
        Band(start=start_s / unit_s, end=(start_s + length_s) / unit_s, label=NAMES[window])
        for window, start_s in plan.traffic.windows(length_s).items()
        if load
    ]
    return line_chart(
        [Series(name=name, css=css, points=points)], x, y, title=name, dots=len(points) < 2, bands=bands
    )


def _table(plan: Plan) -> str:
    rows = "".join(
        f"<tr><td>{NAMES[cell.window]}</td><td>{cell.load:.2f}</td><td>{cell.busy:.0%}</td><td>{cell.misses.num:,}</td>"
        f"<td>{cell.misses.added} / {cell.misses.mended}</td>"
        f"<td>{cell.alone_ttft_p99_ms:.0f} / {cell.ttft_p99_ms:.0f}</td>"
        f"<td>{cell.alone_tpot_p99_ms:.1f} / {cell.tpot_p99_ms:.1f}</td>"
        f"<td>{cell.cuts_per_min:.2f}</td><td>{cell.worth:.2f}</td></tr>"
        for cell in plan.judged
    )
    return (
        '<div class="scroll"><style>.feels th { white-space: normal; vertical-align: bottom; }</style><table class="feels">'
        "<tr><th>stretch</th><th>requests a second, engine</th><th>production busy</th><th>requests</th>"
        "<th>late only with / without</th><th>first token P99, ms, alone / with</th><th>per token P99, ms, alone / with</th>"
        f"<th>cuts, engine and minute</th><th>worth of an engine</th></tr>{rows}</table></div>"
        '<p class="hint">Busy: a step is under way. Late: over one of the two limits. Late only without rollouts happens too: a request shares its steps with others.'
        " Worth: dedicated engines that the job would need more, to sample as much.</p>"
    )


def _tornado(plan: Plan) -> str:
    rows = [
        Range(
            label=swing.assumption.name,
            low_label=swing.assumption.low,
            high_label=swing.assumption.high,
            low=swing.low_gpus,
            high=swing.high_gpus,
        )
        for swing in plan.swings
    ]
    _, high = plan.range_gpus
    x = linear_axis(high * 1.02 or 1.0, lambda value: f"{value:g} GPUs" if value else "0")
    risky = [
        f"{swing.assumption.name} at {label} ({added:.2%})"
        for swing in plan.swings
        for label, added in (
            (swing.assumption.low, swing.low_added),
            (swing.assumption.high, swing.high_added),
        )
        if added is not None and added > SAFE_EXTRA
    ]
    note = (
        f"More than {SAFE_EXTRA:.1%} of requests would miss a limit in the busiest stretch with: {'; '.join(risky)}."
        if risky
        else f"None of them adds misses of more than {SAFE_EXTRA:.1%} in the busiest stretch."
        if any(swing.low_added is not None or swing.high_added is not None for swing in plan.swings)
        else f"Busiest stretch: {NONE_JUDGED}."
    )
    drawn = tornado(rows, plan.mean_gpus, x, title="Worth in GPUs by assumption")
    return (
        f'<div class="scroll">{drawn}</div>{legend([("dedicated", "low value"), ("harvested", "high value")])}'
        f'<p class="hint">{escape(note)}</p>'
    )


def _headrooms(plan: Plan) -> str:
    engines = plan.scenario.fleet.serving * plan.scenario.fleet.rollout_gpus
    series = [
        Series(
            name=f"{NAMES[window]}: GPUs",
            css=CSS[window],
            points=[
                (cell.headroom * 100, cell.worth * engines) for cell in plan.sweep if cell.window == window
            ],
        )
        for window in WINDOWS
    ]
    most = max(value for one in series for _, value in one.points)
    chart = line_chart(
        series,
        linear_axis(max(HEADROOMS) * 100, lambda value: f"{value:.0f} %", "headroom"),
        linear_axis(most or 1.0, lambda value: f"{value:g}"),
        title="Worth in GPUs by headroom",
    )
    return chart + legend([(CSS[window], NAMES[window]) for window in WINDOWS])


def _basis(plan: Plan) -> str:
    scenario, traffic = plan.scenario, plan.traffic
    fleet, job = scenario.fleet, scenario.job
    engines = f"{traffic.num_engines:.4g}" + (
        ""
        if traffic.knows_engines
        else f": not in the data; so many make serving.requests_per_s = {scenario.serving.requests_per_s:g}"
    )
    entries = [
        ("traffic", traffic_line(traffic)),
        ("engines that served it", engines),
        ("GPUs per engine", f"{fleet.serving_gpus} serving, {fleet.rollout_gpus} rollout"),
        (
            "rollouts",
            f"{job.model}, {job.turns_median:g} turns, {job.output_median:g} tokens sampled and {job.observation_median:g} observed in each "
            f"(medians), {scenario.cells.in_flight_per_engine} trajectories under way per engine: a job that keeps all engines busy",
        ),
        (
            "step times",
            "measured"
            if scenario.serving.profile and job.profile
            else "datasheet and efficiency, see docs/simulator.md",
        ),
        (
            "simulated",
            f"{scenario.cells.serving} serving engines for {scenario.cells.seconds:g} s at a time, stand for all",
        ),
        (
            "price",
            f"{plan.price:g} a GPU hour, {HOURS_A_MONTH:g} hours a month; network, CPUs and people not counted",
        ),
        ("a month", f"is made of {_span(traffic.span_s)}"),
    ]
    if traffic.kv_use is not None:
        entries.append(
            (
                "production's KV memory, as read",
                f"{traffic.kv_use[0]:.0%} on average, at most {traffic.kv_use[1]:.0%}",
            )
        )
    if traffic.hit_share is not None:
        entries.append(
            (
                "prefix cache, as read",
                f"{traffic.hit_share:.0%} of prompt tokens found; not simulated, so production's load is overstated by it",
            )
        )
    for kind, name in (("ttft", "first token"), ("tpot", "between tokens")):
        seen = traffic.observed_ms.get(f"{kind}_p99")
        if seen is not None:
            made = max(getattr(cell, f"alone_{kind}_p99_ms") for cell in plan.judged)
            entries.append(
                (
                    f"P99 {name}",
                    f"{seen:.0f} ms as read, {made:.0f} ms simulated without rollouts at the busiest",
                )
            )
    return (
        "<dl>"
        + "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in entries)
        + "</dl>"
    )


def _section(title: str, hint: str, content: str) -> str:
    hint = f'<p class="hint">{escape(hint)}</p>' if hint else ""
    return f"<section><h2>{escape(title)}</h2>{hint}<figure>{content}</figure></section>"


def _cell(cell: Cell) -> dict[str, Any]:
    row = {name: getattr(cell, name) for name in Cell.__dataclass_fields__ if name != "misses"}
    misses = cell.misses
    return {**row, "requests": misses.num, "late_only_with": misses.added, "late_only_without": misses.mended}


def _added(plan: Plan) -> str:
    misses = plan.misses
    if misses.share is None or misses.high is None:
        return NONE_JUDGED
    return f"{misses.share:.3%} of requests more over their limits (at most {misses.high:.2%}, 95 %)"


def _unsafe(plan: Plan) -> tuple[str, str]:
    """Why no headroom is safe, and which one is shown."""
    if plan.misses.share is None:
        return (
            "no request was judged, so nothing is known of the risk",
            "give traffic that has requests, or longer cells.seconds",
        )
    return f"no headroom that was tried keeps the added misses under {SAFE_EXTRA:.1%}", "the safest is shown"


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."


def _p99(cell: Cell, kind: str) -> str:
    alone, with_rollouts = getattr(cell, f"alone_{kind}_p99_ms"), getattr(cell, f"{kind}_p99_ms")
    return f"{alone:.0f} -> {with_rollouts:.0f} ms"


def _money(amount: float) -> str:
    return f"${amount / 1e6:,.2f} M" if amount >= 1e6 else f"${amount:,.0f}"


def _tokens(count: float) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.1f} {word}"
    return f"{count:,.0f}"


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 7200 else f"{seconds / 60:.0f} minutes"


def _code(line: str) -> str:
    """Escaped, with what stands in backquotes as code."""
    pieces = escape(line).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
