"""What a plan says, in words and as JSON: the recommendation first, then what it rests on and what to measure next."""

from __future__ import annotations

import math
from typing import Any

from rose.sim.plan import ENOUGH, SAFE_EXTRA, CapacityPlan, PlanCell, RiskVerdict, Swing, kept_alone
from rose.sim.scenario import MAX_CELL_S
from rose.sim.summary import SETTLE_S
from rose.sim.traffic import LEAST_READ, LEAST_SPAN_S, Traffic
from rose.sim.worth import LOADED

NAMES = {"quiet": "quietest", "mean": "average", "busy": "busiest"}
COVERED = 0.98
"""Data of less of the time than this is said."""
NONE_JUDGED = "no request judged"
KV_FAR = 0.1
"""KV memory in use, as read and as simulated, further apart than this is said to be."""
FAR = 0.25
"""A simulated P99 further than this from the fleet's own is said to be."""
COMPARED = (("ttft", "time to the first token"), ("tpot", "mean per output token"))
"""Of a request, both as vLLM's metrics have it and as it is simulated."""
ALONE_MISSED = 0.01
"""Where production by itself misses more of its limits than this, they may not be the fleet's own."""


def answer(plan: CapacityPlan) -> tuple[str, str]:
    """The recommendation, and why; a worth is stated with the first one alone."""
    if plan.lends:
        assert plan.mean_gpus is not None
        return (
            f"rollouts worth {plan.mean_gpus:.1f} dedicated GPUs on average ({how_sure(plan)})",
            f"at most {plan.most_gpus:.1f} at the traffic as read: the rest of the engines' time goes into production's own steps",
        )
    misses = plan.misses
    if misses.share is None:
        return (
            "not known whether lending is safe, so no worth is stated",
            "no request was judged, so nothing is known of the risk; give traffic that has requests, or longer cells.seconds",
        )
    if plan.verdict is RiskVerdict.UNSAFE:
        worst = max(plan.judged, key=lambda cell: cell.misses.share or 0.0)
        return (
            "do not lend as assumed, and no worth is stated",
            f"rollouts make {worst.misses.share or 0.0:.2%} more of the requests of the {NAMES[worst.window]} stretch miss a limit, at the "
            f"headroom that looked best; {SAFE_EXTRA:.1%} is allowed (production alone misses {worst.alone_missed:.1%} there)",
        )
    if plan.verdict is RiskVerdict.UNCLEAR:
        if plan.traffic.is_too_little:
            return (
                "not known whether lending is safe, so no worth is stated",
                f"{plan.traffic.num_read:,.0f} requests of {span(plan.traffic.span_s)} were read, and all that is simulated is drawn from these: "
                f"{LEAST_READ:,} of {span(LEAST_SPAN_S)} are the least, and a day is what shows a fleet",
            )
        if is_late_alone(plan):
            return (
                "not known whether lending is safe, so no worth is stated",
                f"by itself production answers {kept_alone(plan.judged):,.0f} of {misses.num:,} requests within its limits: too few to show "
                f"that at most {SAFE_EXTRA:.1%} more are late beside rollouts",
            )
        return (
            "not known whether lending is safe, so no worth is stated",
            f"of {misses.num:,} requests judged {misses.added} are late only with rollouts and {misses.mended} only without: too few to show "
            f"that at most {SAFE_EXTRA:.1%} are added",
        )
    if plan.mean_gpus is None:
        return (
            "lending is safe as simulated, but its worth is not told",
            f"the job's {in_flight(plan):,} trajectories do not load the engines of a cell: the last engines of a dedicated fleet add "
            f"{max(0.0, plan.yardstick.gain):.0%} of what they would in proportion (told from {LOADED:.0%}), so any number of engines looks equal",
        )
    return "nothing to gain as assumed", "the job samples no more with production's engines than without them"


def how_sure(plan: CapacityPlan) -> str:
    if plan.range_gpus is None:
        return "how much hangs on the assumptions cannot be told"
    low, high = plan.range_gpus
    return f"{low:.1f} to {high:.1f} as the assumptions go"


def is_late_alone(plan: CapacityPlan) -> bool:
    """Whether requests enough were judged, but too few that are within their limits without rollouts: more of such say no more."""
    return kept_alone(plan.judged) * SAFE_EXTRA < 1 <= plan.misses.num * SAFE_EXTRA


def text(plan: CapacityPlan) -> str:
    """The answer in a few lines, for the terminal."""
    fleet, misses = plan.scenario.fleet, plan.misses
    what, why = answer(plan)
    lines = [
        f"{fleet.serving} serving engine{'s' if fleet.serving != 1 else ''} on {fleet.device}: {what}",
        why,
    ]
    if plan.lends:
        lines.append(
            f"a month, made of {span(plan.traffic.span_s)}: {plan.gpu_hours_a_month or 0.0:,.0f} GPU hours, "
            f"{money(plan.money_a_month or 0.0)} at ${plan.price:g} a GPU hour; {tokens(plan.tokens_a_day)} sampled tokens a day"
        )
    lines += [
        f"production: {_added(plan)}; first-token P99 at the busiest {p99(plan.judged[-1], 'ttft')}, per-token P99 "
        f"{p99(plan.judged[-1], 'tpot')} (alone -> with rollouts)",
        f"with min_headroom_fraction = {plan.headroom:g}; {misses.num:,} requests simulated, each beside itself without rollouts",
    ]
    most = matters_most(plan)
    if most:
        lines.append(f"rests most on {most}")
    lines += [f"warning: {line}" for line in warnings(plan)]
    lines.append(f"measure next: {measure_next(plan)[0]}")
    lines.append("simulated, not measured: run a node in mode `observe` before you switch it on")
    return "\n".join(lines)


def warnings(plan: CapacityPlan) -> list[str]:
    """What makes the data less than it seems."""
    traffic, found = plan.traffic, list[str]()
    if traffic.is_measured and not traffic.knows_engines:
        rate = plan.scenario.serving.requests_per_s
        found.append(
            f"{traffic.engines_unsaid}: the {plan.scenario.fleet.serving} of [fleet] serving are planned for, with {rate:g} requests a second each; "
            f"all that was read are {traffic.total:.3g} a second (--engines N, if you know)"
        )
    if traffic.covered < COVERED:
        found.append(_covered(traffic))
    if traffic.silence_s is not None:
        begin_s, length_s = traffic.silence_s
        found.append(
            f"no request came for {span(length_s)}, {span(begin_s)} after the first; this is counted as quiet: if the log has a hole there, "
            "plan for each side of it by itself"
        )
    if traffic.restarts:
        found.append(
            f"servers were started again, {traffic.restarts} time{'s' if traffic.restarts > 1 else ''} while this was counted; if they were not, the "
            "address is a balancer's, and the traffic is not what is stated here"
        )
    if traffic.kv_use is not None and traffic.kv_use[0] - alone_kv(plan) > KV_FAR:
        found.append(
            f"production has more of its KV memory in use than is simulated ({traffic.kv_use[0]:.0%} as read, {alone_kv(plan):.0%}), so less can be "
            "lent than is simulated"
        )
    return found


def alone_kv(plan: CapacityPlan, window: str = "mean") -> float:
    """Share of its KV memory that simulated production holds without rollouts."""
    return next(cell.alone_kv for cell in plan.judged if cell.window == window)


def matters_most(plan: CapacityPlan) -> str:
    """The assumption that moves the answer most: its worth, or the risk where no worth is stated.  Empty where none does."""
    if plan.lends and plan.swings:
        one = plan.swings[0]

        def gpus(value: float | None) -> str:
            return "nothing can be told" if value is None else f"they are worth {value:.1f} GPUs"

        return (
            f"{one.assumption.name}: at {one.assumption.low} {gpus(one.low_gpus)}, at {one.assumption.high} "
            f"{gpus(one.high_gpus)}"
        )
    if plan.verdict is RiskVerdict.SAFE:
        return f"trajectories under way per engine: {plan.scenario.cells.in_flight_per_engine} are assumed"
    felt = [one for one in plan.swings if one.low_added is not None and one.high_added is not None]
    one = max(felt, key=_added_width, default=None)
    if one is None or _added_width(one) <= SAFE_EXTRA:
        return ""
    return (
        f"{one.assumption.name}: at {one.assumption.low} {one.low_added:.2%} more requests of the busiest stretch miss a limit, at "
        f"{one.assumption.high} {one.high_added:.2%}"
    )


def _added_width(swing: Swing) -> float:
    return abs((swing.high_added or 0.0) - (swing.low_added or 0.0))


def in_flight(plan: CapacityPlan) -> int:
    """Trajectories of the job in one cell."""
    cells = plan.scenario.cells
    return cells.in_flight_per_engine * (cells.serving + cells.dedicated)


def document(plan: CapacityPlan) -> dict[str, Any]:
    """``{"schema", "summary", "details"}``; sizes in the names.  What a harvest is worth is null unless lending is recommended."""
    misses, busy = plan.misses, plan.judged[-1]
    low, high = plan.range_gpus or (None, None)
    what, why = answer(plan)
    worth = {
        "gpus_mean": plan.mean_gpus,
        "gpus_low": low,
        "gpus_high": high,
        "gpu_hours_per_month": plan.gpu_hours_a_month,
        "money_per_month": plan.money_a_month,
        "sampled_tokens_per_day": plan.tokens_a_day,
    }
    summary = {
        "is_recommended": plan.lends,
        "verdict": str(plan.verdict),
        "answer": what,
        "why": why,
        **(worth if plan.lends else dict.fromkeys(worth)),
        "gpus_most": plan.most_gpus,
        "gpu_hour_price": plan.price,
        "chance_of_assumptions": plan.chance,
        "added_misses": misses.share,
        "added_misses_upper_95": misses.high,
        "requests_simulated": misses.num,
        "busiest_missed_alone": busy.alone_missed,
        "busiest_ttft_p99_ms": busy.ttft_p99_ms,
        "busiest_ttft_p99_alone_ms": busy.alone_ttft_p99_ms,
        "busiest_tpot_p99_ms": busy.tpot_p99_ms,
        "busiest_tpot_p99_alone_ms": busy.alone_tpot_p99_ms,
        "min_headroom_fraction": plan.headroom,
    }
    traffic = plan.traffic
    details = {
        "traffic": {
            "source": traffic.source,
            "span_s": traffic.span_s,
            "covered": traffic.covered,
            "silence_s": traffic.silence_s,
            "num_engines": traffic.num_engines,
            "knows_engines": traffic.knows_engines,
            "restarts": traffic.restarts,
            "kv_use": traffic.kv_use,
            "hit_share": traffic.hit_share,
            "observed_ms": dict(traffic.observed_ms),
        },
        "over_time": {
            "at_s": plan.at_s.tolist(),
            "requests_per_s_and_engine": plan.load.tolist(),
            "gpus_if_lent": None if plan.gpus is None else plan.gpus.tolist(),
        },
        "yardstick": {
            "trajectories": in_flight(plan),
            "dedicated_engines": list(plan.yardstick.engines),
            "tokens_per_s": list(plan.yardstick.tokens_s),
            "gain_of_the_last": plan.yardstick.gain,
        },
        "judged": [_cell(cell) for cell in plan.judged],
        "sweep": [_cell(cell) for cell in plan.sweep],
        "assumptions": [
            {
                "name": swing.assumption.name,
                "low": swing.assumption.low,
                "high": swing.assumption.high,
                "gpus_low_if_lent": swing.low_gpus,
                "gpus_high_if_lent": swing.high_gpus,
                "added_misses_low": swing.low_added,
                "added_misses_high": swing.high_added,
            }
            for swing in plan.swings
        ],
        "measure_next": measure_next(plan),
        "scenario": plan.scenario.model_dump(mode="json"),
    }
    return {"schema": 3, "summary": summary, "details": details}


def measure_next(plan: CapacityPlan) -> list[str]:
    """What would narrow the answer most, the most first."""
    traffic, found = plan.traffic, list[str]()
    if not traffic.is_measured:
        found.append(
            "your own traffic: --prometheus URL, --scrapes FILE or --trace CSV; all of this rests on a generator's"
        )
    elif not traffic.knows_engines:
        found.append("how many engines served this traffic: --engines N")
    misses, cells = plan.misses, plan.scenario.cells
    if traffic.is_too_little:
        found.append(
            f"a longer stretch: {traffic.num_read:,.0f} requests of {span(traffic.span_s)} are too little to plan by"
        )
    elif plan.verdict is RiskVerdict.UNCLEAR and misses.num and not is_late_alone(plan):
        times = max(2.0, ENOUGH / SAFE_EXTRA / misses.num)
        longer_s = SETTLE_S + (cells.seconds - SETTLE_S) * times  # the last minute of each is not judged
        how = f"--set cells.seconds={longer_s:.0f}, or more" if longer_s <= MAX_CELL_S else "More"
        found.append(f"more requests: only {misses.num:,} were judged. {how} traffic per engine")
    missed = plan.judged[-1].alone_missed
    if missed > ALONE_MISSED:
        serving = plan.scenario.serving
        found.append(
            f"your limits: by itself production misses {missed:.1%} of {serving.slo_ttft_ms:g} ms to the first and {serving.slo_tpot_ms:g} ms per "
            "token at the busiest, as simulated; state yours: serving.slo_ttft_ms, serving.slo_tpot_ms"
        )
    if plan.gpus is None:
        found.append(
            "your job's concurrent trajectories (batch x group size), over all engines, serving and dedicated: cells.in_flight_per_engine"
        )
    if traffic.is_measured and traffic.span_s < 20 * 3600:
        found.append(
            f"a whole day of traffic: this is {span(traffic.span_s)} of one, and a month is made of it"
        )
    found += [line for line in far_off(plan) if line not in found]
    if plan.lends:
        for swing in plan.swings[:4]:
            if math.isinf(swing.width):
                found.append(f"{swing.assumption.name}: {swing.assumption.measure}")
            elif swing.width > max(0.02, plan.chance) * (plan.mean_gpus or 0.0):
                found.append(
                    f"{swing.assumption.name} ({swing.width:.1f} GPUs between its ends): {swing.assumption.measure}"
                )
    else:
        for swing in sorted(plan.swings, key=lambda swing: -_added_width(swing))[:3]:
            if _added_width(swing) > SAFE_EXTRA:
                found.append(
                    f"{swing.assumption.name} ({_added_width(swing):.2%} of requests late between its ends): {swing.assumption.measure}"
                )
    found.append(
        "then one node in mode `observe` for a day: `rose node status` says what it could lend, and nothing runs yet"
    )
    return list(dict.fromkeys(found))


def far_off(plan: CapacityPlan) -> list[str]:
    """Where the simulated fleet, without rollouts, is not the fleet that was read."""
    lines: list[str] = []
    for kind, name in COMPARED:
        seen = plan.traffic.observed_ms.get(f"{kind}_p99")
        made = max(getattr(cell, f"alone_{kind}_p99_ms") for cell in plan.judged)
        if seen and made and abs(made / seen - 1) > FAR:
            lines.append(
                f"step times: your P99 of the {name} is {seen:.0f} ms, the simulated one {made:.0f} ms at the busiest; "
                "`rose profile` gives serving.profile"
            )
    use = plan.traffic.kv_use
    if use is not None and abs(use[0] - alone_kv(plan)) > KV_FAR:
        lines.append(
            f"production's memory: on average it has {use[0]:.0%} of its KV memory in use as read, {alone_kv(plan):.0%} as simulated; state its model, "
            "device, GPUs per engine and fleet.reserve_gb (what --gpu-memory-utilization leaves out is no KV memory)"
        )
    return lines


def traffic_line(traffic: Traffic) -> str:
    gaps = f"; {_covered(traffic)}" if traffic.covered < COVERED else ""
    return f"{traffic.source}, {span(traffic.span_s)}{gaps}"


def _covered(traffic: Traffic) -> str:
    whole_s = traffic.span_s / traffic.covered
    return (
        f"there is data of {traffic.covered:.0%} of the {span(whole_s)} that were read; the rest is cut out, "
        "and a month is made of what is left"
    )


def _cell(cell: PlanCell) -> dict[str, Any]:
    row = {name: getattr(cell, name) for name in PlanCell.__dataclass_fields__ if name != "misses"}
    misses = cell.misses
    return {**row, "requests": misses.num, "late_only_with": misses.added, "late_only_without": misses.mended}


def _added(plan: CapacityPlan) -> str:
    misses = plan.misses
    if misses.share is None or misses.high is None:
        return NONE_JUDGED
    return f"{misses.share:.3%} of requests more over their limits (at most {misses.high:.2%}, 95 %)"


def sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."


def p99(cell: PlanCell, kind: str) -> str:
    alone, with_rollouts = getattr(cell, f"alone_{kind}_p99_ms"), getattr(cell, f"{kind}_p99_ms")
    return f"{alone:.0f} -> {with_rollouts:.0f} ms"


def money(amount: float) -> str:
    return f"${amount / 1e6:,.2f} M" if amount >= 1e6 else f"${amount:,.0f}"


def tokens(count: float) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.1f} {word}"
    return f"{count:,.0f}"


def span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 3600:.1f} hours" if seconds >= 7200 else f"{seconds / 60:.0f} minutes"
