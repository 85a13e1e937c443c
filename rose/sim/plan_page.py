"""A plan as one HTML page; without a worth where lending is not recommended."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from rose.evaluation.charts import Band, Range, Series, legend, line_chart, linear_axis, tornado
from rose.evaluation.page import whole_page, write_whole
from rose.sim.plan import HEADROOMS, HOURS_A_MONTH, SAFE_EXTRA, WINDOWS, CapacityPlan, RiskVerdict
from rose.sim.plan_words import (
    COMPARED,
    NAMES,
    NONE_JUDGED,
    alone_kv,
    answer,
    document,
    how_sure,
    in_flight,
    matters_most,
    measure_next,
    money,
    p99,
    sentence,
    span,
    tokens,
    traffic_line,
    warnings,
)
from rose.sim.worth import LOADED

CSS = dict(zip(WINDOWS, ("dedicated", "production", "harvested"), strict=True))


def write_plan(plan: CapacityPlan, directory: Path) -> list[Path]:
    """``plan.html`` and ``plan.json``, each replaced as a whole."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / "plan.html", directory / "plan.json"]
    for path, content in zip(paths, (render(plan), json.dumps(document(plan), indent=1) + "\n"), strict=True):
        write_whole(path, content)
    return paths


def render(plan: CapacityPlan) -> str:
    """The page; nothing in it is fetched from elsewhere."""
    fleet, serving = plan.scenario.fleet, plan.scenario.serving
    measure = "".join(f"<li>{_code(line)}</li>" for line in measure_next(plan))
    what, why = answer(plan)
    most = matters_most(plan)
    hint = "Requests per second of one engine, as read."
    if plan.traffic.begin_s is not None:
        hint += f" Begins {datetime.fromtimestamp(plan.traffic.begin_s, UTC):%Y-%m-%d %H:%M} UTC."
    load = _section("Production over time", hint, _over_time(plan, load=True))
    next_steps = _section(
        "What to measure next", "The first line narrows the answer most.", f"<ol>{measure}</ol>"
    )
    feels = _section(
        "What production feels",
        f"At {'the recommended headroom' if plan.lends else 'the headroom that looked best,'} of {plan.headroom:.0%}: the same requests "
        f"without rollouts and with them, {plan.fresh} draws of each stretch that the choice of the headroom has not seen.",
        _table(plan),
    )
    parts = [
        f"<h1>What {_name(plan)} can lend to rollouts</h1>",
        f'<p class="lead">{fleet.serving} engine{"s" if fleet.serving != 1 else ""} of {escape(serving.model)} on {escape(fleet.device)}, beside them '
        f"{escape(plan.scenario.job.model)}. Traffic: {escape(plan.traffic.source)}, {span(plan.traffic.span_s)}. "
        "<b>Simulated with ROSE's own policies, not measured.</b></p>",
        f'<p class="lead"><b>{escape(sentence(what))}</b> {escape(sentence(why))}</p>',
        f'<p class="lead">The assumption that matters most: {escape(sentence(most))}</p>' if most else "",
        *(f'<p class="lead">{escape(sentence(line))}</p>' for line in warnings(plan)),
        _tiles(plan),
    ]
    if plan.lends:
        parts += [
            '<div class="grid2">',
            load,
            _section(
                "What can be harvested then",
                "In dedicated GPUs, the whole fleet.",
                _over_time(plan, load=False),
            ),
            "</div>",
            feels,
            _section(
                "Which assumptions matter",
                f"Each by itself at a low and a high value, everything else as assumed; {plan.mean_gpus:.1f} GPUs is the line. "
                f"On one draw of half a cell, which with nothing changed is {plan.chance:.0%} off the whole one: less than that is chance.",
                _tornado(plan),
            ),
            '<div class="grid2">',
            next_steps,
            _section(
                "Memory that production keeps free",
                f"Worth in GPUs by lending.min_headroom_fraction, the share of its KV memory; recommended {plan.headroom:g}: the most that is "
                f"harvested with at most {SAFE_EXTRA:.1%} of requests more over their limits.",
                _headrooms(plan),
            ),
            "</div>",
        ]
    else:
        parts += [
            feels,
            '<div class="grid2">',
            load,
            next_steps,
            "</div>",
            _section(
                "What each assumption does to production",
                "Requests of the busiest stretch that miss a limit with rollouts and not without, less the other way round.",
                _risks(plan),
            ),
            _section(
                "Memory that production keeps free",
                "The same by lending.min_headroom_fraction, the share of its KV memory, on the draw that the headroom was chosen by.",
                _headroom_risks(plan),
            ),
        ]
    parts += [
        _section("How worth is computed", "", _worth_explained(plan)),
        _section("What this rests on", "", _basis(plan)),
    ]
    return whole_page(f"{plan.scenario.name}: plan", "".join(parts))


def _tiles(plan: CapacityPlan) -> str:
    misses, busy = plan.misses, plan.judged[-1]
    fleet = plan.scenario.fleet
    tiles: list[tuple[str, str, str, str]] = []
    if plan.lends:
        assert plan.mean_gpus is not None
        tiles += [
            (
                "",
                "worth, on average",
                f"{plan.mean_gpus:.1f} GPUs",
                f"dedicated; {how_sure(plan)}",
            ),
            (
                "",
                f"a month, made of {span(plan.traffic.span_s)}",
                f"{plan.gpu_hours_a_month or 0.0:,.0f} GPU h",
                f"{tokens(plan.tokens_a_day)} sampled tokens a day",
            ),
            (
                "",
                "worth, a month",
                money(plan.money_a_month or 0.0),
                f"at ${plan.price:g} a GPU hour (--gpu-hour-price)",
            ),
        ]
    elif plan.verdict is RiskVerdict.SAFE:
        tiles.append(("", "worth", "not told", "see below how it is computed"))
    else:
        word = "do not lend" if plan.verdict is RiskVerdict.UNSAFE else "not known"
        tiles.append(("bad", "is it safe to lend?", word, "no worth is stated"))
    tiles += [
        (
            "",
            "engine time that production leaves",
            f"{plan.most_gpus:.1f} GPUs",
            f"of {fleet.serving * fleet.serving_gpus}, on average; worth is never more",
        ),
        (
            "bad"
            if misses.share is None or misses.share > SAFE_EXTRA
            else "good"
            if plan.verdict is RiskVerdict.SAFE
            else "",
            "limits missed that rollouts add",
            NONE_JUDGED if misses.share is None else f"{misses.share:.3%}",
            "" if misses.high is None else f"of {misses.num:,} requests; at most {misses.high:.2%} (95 %)",
        ),
        (
            "",
            "first token, P99, busiest",
            p99(busy, "ttft"),
            f"alone, with rollouts; limit {plan.scenario.serving.slo_ttft_ms:g} ms",
        ),
        (
            "",
            "per token, P99, busiest",
            p99(busy, "tpot"),
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


def _over_time(plan: CapacityPlan, *, load: bool) -> str:
    in_hours = plan.traffic.span_s > 2 * 3600
    unit_s, unit = (3600.0, "hours") if in_hours else (60.0, "minutes")
    values = plan.load if load or plan.gpus is None else plan.gpus
    css, name = ("production", "requests per second") if load else ("harvested", "GPUs")
    points = [(float(at) / unit_s, float(value)) for at, value in zip(plan.at_s, values, strict=True)]
    span = plan.traffic.span_s / unit_s
    x = linear_axis(span, lambda value: f"{value:g}", unit)
    x = type(x)(
        low=0.0, high=span, ticks=[tick for tick in x.ticks if tick <= span], format=x.format, label=unit
    )
    y = linear_axis(max(value for _, value in points) or 1.0, lambda value: f"{value:g}")
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


def _name(plan: CapacityPlan) -> str:
    """Of the fleet: what its file calls it; that of the built-in scenario says nothing."""
    name = plan.scenario.name
    return "this fleet" if name == "fleet" else escape(name)


def _table(plan: CapacityPlan) -> str:
    def worth(value: float | None) -> str:
        return f"<td>{value:.2f}</td>" if plan.lends and value is not None else ""

    rows = "".join(
        f"<tr><td>{NAMES[cell.window]}</td>{worth(cell.worth)}<td>{cell.load:.3g}</td><td>{cell.busy:.0%}</td><td>{cell.own:.0%}</td><td>{cell.most:.2f}</td>"
        f"<td>{cell.misses.num:,}</td><td>{cell.alone_missed:.2%}</td><td>{cell.misses.added} / {cell.misses.mended}</td>"
        f"<td>{cell.alone_ttft_p99_ms:.0f} / {cell.ttft_p99_ms:.0f}</td>"
        f"<td>{cell.alone_tpot_p99_ms:.1f} / {cell.tpot_p99_ms:.1f}</td>"
        f"<td>{cell.cuts_per_min:.2f}</td></tr>"
        for cell in plan.judged
    )
    head = "<th>worth, dedicated engines per engine</th>" if plan.lends else ""
    return (
        '<div class="scroll"><style>.feels th { white-space: normal; vertical-align: bottom; } .feels th, .feels td { padding-left: 3px; padding-right: 3px; }</style><table class="feels">'
        f"<tr><th>stretch</th>{head}<th>requests a second, engine</th><th>production busy, alone</th><th>its own steps, with rollouts</th><th>leaves, dedicated engines per engine</th>"
        "<th>requests judged</th><th>late alone</th>"
        "<th>late only with / without</th><th>first token P99, ms, alone / with</th><th>per token P99, ms, alone / with</th>"
        f"<th>cuts, engine and minute</th></tr>{rows}</table></div>"
        '<p class="hint">Busy: a step is under way. Own steps: what they need for themselves; beside rollouts requests take longer and share '
        "more of them. Leaves: the rest of the time, and the part that two engines overlap. "
        "Late: over one of the two limits. Late only without rollouts happens too: a request shares its steps with others. "
        "Cuts: memory taken back from rollouts in use.</p>"
    )


def _risks(plan: CapacityPlan) -> str:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.2%}"

    rows = "".join(
        f"<tr><td>{escape(one.assumption.name)}</td><td>{escape(one.assumption.low)}</td><td>{share(one.low_added)}</td>"
        f"<td>{escape(one.assumption.high)}</td><td>{share(one.high_added)}</td></tr>"
        for one in plan.swings
        if one.assumption.is_risky
    )
    return (
        '<div class="scroll"><table><tr><th>assumption</th><th>low</th><th>requests late by it</th><th>high</th>'
        f"<th>requests late by it</th></tr>{rows}</table></div>"
    )


def _headroom_risks(plan: CapacityPlan) -> str:
    def share(headroom: float, window: str) -> str:
        found = [cell for cell in plan.sweep if (cell.headroom, cell.window) == (headroom, window)]
        late = found[0].misses.share
        return NONE_JUDGED if late is None else f"{late:.2%} of {found[0].misses.num:,}"

    rows = "".join(
        f"<tr><td>{headroom:.0%}</td>"
        + "".join(f"<td>{share(headroom, window)}</td>" for window in WINDOWS)
        + "</tr>"
        for headroom in HEADROOMS
    )
    head = "".join(f"<th>{NAMES[window]}</th>" for window in WINDOWS)
    return f'<div class="scroll"><table><tr><th>headroom</th>{head}</tr>{rows}</table></div>'


def _worth_explained(plan: CapacityPlan) -> str:
    cells, job, curve = plan.scenario.cells, plan.scenario.job, plan.yardstick
    curve_points = ", ".join(
        f"{tokens_s:,.0f} tokens/s on {engines}"
        for engines, tokens_s in zip(curve.engines, curve.tokens_s, strict=True)
    )
    lines = [
        f"A cell stands for the fleet: {cells.serving} serving and {cells.dedicated} dedicated engines, and a job with {in_flight(plan):,} "
        f"trajectories of {job.model} under way ({cells.in_flight_per_engine} per engine), always.",
        f"The same job on dedicated engines only samples {curve_points}. Worth is the number at which it samples what it samples beside "
        "production, less the dedicated engines that it has, for each serving engine.",
        f"Bound: what production leaves of its engines' time, {plan.most_gpus:.1f} GPUs on average; worth is cut off there, and at the engines "
        "of the largest of those fleets that would sample what is harvested.",
        *(
            [
                f"On {curve.crowded} engine{'s' if curve.crowded > 1 else ''} not all trajectories find room in memory: they take turns and read their "
                "prompts again, so the next engines add more than their part; worth is read in proportion to the largest fleet there. Set cells.in_flight_per_engine to what yours has."
            ]
            if curve.crowded
            else []
        ),
        f"The last dedicated engines add {max(0.0, curve.gain):.0%} of what they would in proportion. Below {LOADED:.0%} the job does not load "
        "the fleet, any number of engines looks equal, and worth is not told. Few trajectories also make worth smaller: such a job gains less "
        "from any engine.",
    ]
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _tornado(plan: CapacityPlan) -> str:
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
    assert plan.mean_gpus is not None
    _, high = plan.range_gpus or (0.0, plan.mean_gpus)
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


def _headrooms(plan: CapacityPlan) -> str:
    engines = plan.scenario.fleet.serving * plan.scenario.fleet.rollout_gpus
    series = [
        Series(
            name=f"{NAMES[window]}: GPUs",
            css=CSS[window],
            points=[
                (cell.headroom * 100, (cell.worth or 0.0) * engines)
                for cell in plan.sweep
                if cell.window == window
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


def _basis(plan: CapacityPlan) -> str:
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
            f"(medians), {scenario.cells.in_flight_per_engine} trajectories under way per engine, dedicated and serving",
        ),
        (
            "step times",
            "measured"
            if scenario.serving.profile and job.profile
            else "datasheet and efficiency, see docs/simulator.md",
        ),
        (
            "simulated",
            f"{scenario.cells.serving} serving engines and {scenario.cells.dedicated} dedicated ones of the job (cells.dedicated; fleet.dedicated "
            f"has no effect) for {scenario.cells.seconds:g} s at a time, stand for all",
        ),
        (
            "price",
            f"${plan.price:g} a GPU hour, {HOURS_A_MONTH:g} hours a month; network, CPUs and people not counted",
        ),
        ("a month", f"is made of {span(traffic.span_s)}"),
    ]
    if traffic.kv_use is not None:
        entries.append(
            (
                "production's KV memory in use",
                f"as read {traffic.kv_use[0]:.0%} on average, at most {traffic.kv_use[1]:.0%}; {alone_kv(plan):.0%} simulated without rollouts at the "
                f"average stretch, {alone_kv(plan, 'busy'):.0%} at the busiest",
            )
        )
    if traffic.hit_share is not None:
        entries.append(
            (
                "prefix cache, as read",
                f"{traffic.hit_share:.0%} of prompt tokens found; not simulated, so production's load is overstated by it",
            )
        )
    for kind, name in COMPARED:
        seen = traffic.observed_ms.get(f"{kind}_p99")
        if seen is not None:
            made = max(getattr(cell, f"alone_{kind}_p99_ms") for cell in plan.judged)
            entries.append(
                (
                    f"P99 of the {name}",
                    f"{seen:.0f} ms as read, {made:.0f} ms simulated without rollouts at the busiest",
                )
            )
    between_ms = traffic.observed_ms.get("itl_p99")
    if between_ms is not None:
        entries.append(
            (
                "P99 between two tokens",
                f"{between_ms:.0f} ms as read; steps are simulated, but only a request's mean per token is kept: not compared",
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


def _code(line: str) -> str:
    """Escaped, with what stands in backquotes as code."""
    pieces = escape(line).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
