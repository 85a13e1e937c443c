"""The tables of the report: what the charts of :mod:`rose.demo.page` are drawn from, in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from rose.demo.result import (
    ARMS,
    DEDICATED,
    HARVESTED,
    MIN_SIDE_TOKENS,
    TIERS,
    DemoResult,
    TierCount,
    harvested_share,
    shared_tiers,
    shorter_side,
)
from rose.evaluation.arms import ArmStats
from rose.units import format_bytes, format_s

TIER_NAMES = {DEDICATED: "dedicated (core 1)", HARVESTED: "harvested (core 0)"}
LATENCY_ROWS = (
    ("First token, P50", "ttft_p50_s", "ttft_p50", None),
    ("First token, P99", "ttft_p99_s", "ttft_p99", "ttft"),
    ("Between tokens, P50", "itl_p50_s", "itl_p50", None),
    ("Between tokens, P99", "itl_p99_s", "itl_p99", "tpot"),
    ("Longest stall, P99", "stall_p99_s", "stall_p99", None),
    ("Longest stall, max", "stall_max_s", None, None),
)
NOT_MEASURED = "-"


def tier_table(result: DemoResult) -> str:
    """Where turns ran."""
    rows: list[list[str]] = []
    for name, tiers in (
        ("from the first block to the end", result.tiers),
        ("in blocks with harvesting on", shared_tiers(result)),
    ):
        share = harvested_share(tiers)
        for tier in TIERS:
            count = tiers.get(tier, TierCount())
            rows.append(
                [
                    f"{escape(TIER_NAMES[tier])}, {name}",
                    f"{count.num_turns:,}",
                    f"{count.num_tokens:,}",
                    NOT_MEASURED if share is None else f"{share if tier == HARVESTED else 1 - share:.0%}",
                ]
            )
    return table(["Tier", "Turns", "Tokens generated", "Share of turns"], rows)


def latency_table(result: DemoResult) -> str:
    """Production with harvesting off, twice, and on."""
    latency = result.latency
    arms = [latency.arms.get(arm) for arm in ARMS]
    slo = {"ttft": latency.slo.ttft_s, "tpot": latency.slo.tpot_s}

    def seconds(stats: ArmStats | None, name: str) -> str:
        value = getattr(stats, name) if stats else None
        return NOT_MEASURED if value is None else format_s(value)

    def ratio(name: str | None) -> str:
        found = latency.ratios.get(name) if name else None
        if found is None:
            return NOT_MEASURED
        return f'<b>{found.value:.2f}</b> <span class="ci">{found.low:.2f}-{found.high:.2f}</span>'

    rows = [
        [
            label,
            format_s(slo[objective]) if objective else "",
            *(seconds(stats, name) for stats in arms),
            ratio(key),
            ratio(f"aa_{key}" if key else None),
        ]
        for label, name, key, objective in LATENCY_ROWS
    ]
    for label, name in (
        ("Requests", "num_requests"),
        ("Failed", "num_errors"),
        ("SLO violations", "num_violations"),
    ):
        rows.append(
            [label, "", *(f"{getattr(stats, name):,}" if stats else NOT_MEASURED for stats in arms), "", ""]
        )
    rows.append(["Sender late by, P99", "", *(seconds(stats, "late_p99_s") for stats in arms), "", ""])
    heads = ["", "SLO", "Off, one half", "Off, other half", "On", "On / off", "A/A"]
    errors = "".join(f"<li>{escape(text)}</li>" for text in result.error_examples)
    return table(heads, rows) + (f"<p>Failures:</p><ul>{errors}</ul>" if errors else "")


def reclaim_table(result: DemoResult) -> str:
    """What was given back to production, and every event."""
    found = result.reclaim
    rows = [
        [
            "Times production ran out of memory that was free, and asked for more at once",
            f"{found.pressure_events:,}",
        ],
        ["Times the rollout engine gave memory back", f"{found.cuts:,}"],
        ["Turns stopped for that, with the tokens they had", f"{found.cut_requests:,}"],
        [
            "Turns that left their engine and were finished by another: it was switched off, was cut, or another had room sooner",
            f"{found.resumed_turns:,}",
        ],
        ["  of these, continued from tokens that they had", f"{found.continued_turns:,}"],
        [
            f"  of {len(result.resumed):,} that were looked at, with {MIN_SIDE_TOKENS} tokens or more on both sides of the cut",
            f"{sum(shorter_side(parts) >= MIN_SIDE_TOKENS for parts in result.resumed):,}",
        ],
        ["Rollout engines that the node agent killed", f"{found.engine_kills:,}"],
        ["Processes of the demo that were killed", f"{found.kills:,}"],
    ]
    events = [event for event in result.events if event.kind != "version"]
    listed = "".join(
        f"<tr><td>{event.at_s:.1f} s</td><td>{escape(event.kind)}</td><td>{escape(event.text)}</td></tr>"
        for event in events[:200]
    )
    more = f"<p>{len(events) - 200:,} more are in report.json.</p>" if len(events) > 200 else ""
    log = (
        f"<details><summary>All {len(events):,} events</summary><div class='scroll'><table class='left'>"
        f"{listed}</table></div>{more}</details>"
        if events
        else ""
    )
    return table(["What", "How often"], rows) + log


def steps_table(result: DemoResult) -> str:
    """Every RL step."""

    def number(value: float | None, form: str) -> str:
        return NOT_MEASURED if value is None else format(value, form)

    rows = [
        [
            str(s.step),
            f"{s.success_rate:.1%}",
            f"{s.lr:g}",
            *(f"{s.tiers.get(tier, TierCount()).num_turns:,}" for tier in TIERS),
            *(NOT_MEASURED if v is None else format_s(v) for v in (s.rollout_s, s.train_s, s.publish_s)),
            number(s.entropy, ".3f"),
            number(s.mismatch_kl, ".1e"),
            s.update_kind or NOT_MEASURED,
            NOT_MEASURED if s.bytes_dense is None else format_bytes(s.bytes_dense),
            NOT_MEASURED if s.bytes_sent is None else format_bytes(s.bytes_sent),
            number(s.density, ".1%"),
        ]
        for s in result.steps
    ]
    heads = ["Step", "Success", "lr", "Dedicated turns", "Harvested turns", "Rollout", "Train", "Publish"]
    return table([*heads, "Entropy", "Mismatch KL", "Update", "Dense", "Sent", "Changed"], rows)


def facts(known: Mapping[str, str]) -> str:
    """Names and values of a description list; both are escaped."""
    return "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in known.items())


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML: callers escape what is not theirs."""
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
