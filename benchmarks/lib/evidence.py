"""docs/evidence.md and the README's figures: what is claimed, from committed result files, by rules that the file states.   (`run.py --render`)

A claim names a benchmark and its figures, never a file: the newest run that has them is taken, or all runs, so that nobody can
pick the best.  A run is as old as the commit it names; where that is lost, as the commit that brought its figures in.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.claims import CLAIMS, Claim
from benchmarks.lib.engine_kinds import KINDS, PLAIN

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "evidence.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- generated from here -->\n", "<!-- to here -->\n"
RUNS = "commit_of_the_runs"
"""Names the code that was measured, where another summed up what it had left."""
SINCE_PARKED = "used_share"
"""Runs of co-serving have it since production parks beside rollouts (docs/evidence.md, "What breaks these rules")."""
LOST = {"68ea845", "f1892d8", "9673aeb", "99bbd4f", "3f19aa1", "9f750a9"}
"""Commits that committed result files name and the repository does not have.  No others may join them."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One benchmark's figures in one result file.

    Attributes:
        time: In seconds since the epoch, None without history.
        production: What its production engine had switched on (``benchmarks/lib/engine_kinds.py``).  Claims and headlines are of a plain one.
    """

    benchmark: str
    file: str
    commit: str
    time: int | None
    summary: dict[str, Any]
    production: str = PLAIN


def has_history() -> bool:
    """Whether git knows all commits: no for an unpacked archive and for a shallow clone."""
    return _git("rev-parse", "--is-shallow-repository") == "false"


def commit_exists(commit: str) -> bool:
    """Whether it is a part of this history: one that a rebase left behind is gone with the clone that made it."""
    found = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(found, cwd=ROOT, capture_output=True, check=False).returncode == 0


def commits_of(path: Path) -> set[str]:
    """Every commit that a result file names as the code it ran."""
    document = json.loads(path.read_text())
    where = document.get("machine") or document.get("details", {}).get("where", {})
    parts = document.get("benchmarks", {}).values()
    named = {str(one["commit"]) for one in (where, *parts) if one.get("commit")}
    measured = document.get("details", {}).get(RUNS)
    return named | {str(measured)} if measured else named


def all_runs(paths: list[Path]) -> list[Run]:
    """All runs of all files, the oldest first."""
    known = has_history()
    runs: list[Run] = []
    for path in paths:
        document = json.loads(path.read_text())
        where = document.get("machine") or document.get("details", {}).get("where", {})
        parts = document.get("benchmarks") or {document.get("benchmark", path.parent.name): document}
        for name, part in parts.items():
            details = part.get("details", {})
            commit = details.get(RUNS) or part.get("commit") or where["commit"]
            production = details.get("engine", PLAIN)
            runs.append(
                Run(
                    benchmark=name,
                    file=str(path.relative_to(RESULTS)),
                    commit=commit,
                    time=_time(commit, path) if known else None,
                    summary=part.get("summary", {}),
                    production=production if isinstance(production, str) and production in KINDS else PLAIN,
                )
            )
    return sorted(runs, key=lambda run: (run.time or 0, run.file))


def _time(commit: str, path: Path) -> int:
    own = _git("show", "-s", "--format=%ct", commit)
    return int(own or _git("log", "--follow", f"-S{commit}", "--format=%ct", "--", str(path)).split()[-1])


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def figures_of(claim: Claim, run: Run) -> dict[str, float] | None:
    """The claim's figures in a run, by key, or None where it does not have them all."""
    found: dict[str, float] = {}
    for key in claim.keys:
        pattern = re.compile(re.escape(key).replace(r"\*", r"[^.]+"))
        own = sorted(name for name in run.summary if pattern.fullmatch(name))
        values = {name: run.summary[name] for name in own}
        if not values or any(type(value) not in (int, float) for value in values.values()):
            return None
        found |= values
    return found


def lines_of(claim: Claim, runs: list[Run]) -> list[str]:
    """The claim's rows: of the newest run that has its figures, or of all, the newest last."""
    having = [
        (run, found)
        for run in runs
        if run.benchmark == claim.benchmark and run.production == PLAIN and (found := figures_of(claim, run))
    ]
    return [_line(claim, run, found, last=run is having[-1][0]) for run, found in (having if claim.every else having[-1:])]  # fmt: skip


def _line(claim: Claim, run: Run, found: dict[str, float], *, last: bool) -> str:
    values = list(found.values())
    measured = ", ".join(claim.form.format(value * (100.0 if "%" in claim.form else 1.0)) for value in values)
    sources = " ".join(f"`{run.file}:{run.benchmark}.{key}`" for key in found)
    bar = ""
    if claim.bar is not None:
        index, how, limit = claim.bar
        limit = values[limit[0]] + limit[1] if isinstance(limit, tuple) else limit
        judged = values if index is None else values[index : index + 1]
        met = all(value <= limit if how == "<=" else value >= limit for value in judged)
        bar = f"{how} {limit:.4g}: {'met' if met else '**missed**'}"
    text = f"{claim.text}, {'newest run' if last else 'earlier run'}" if claim.every else claim.text
    lost = " (commit lost)" if run.commit in LOST else ""
    return f"| {text} | {measured} | {sources}{lost} | {bar} |"


def coserving(runs: list[Run]) -> list[str]:
    """A row for every run of ``coserve`` that has our arm; one of other arms only has claims of its own."""
    return [
        _coserve_row(run) for run in runs if run.benchmark == "coserve" and "p99_ttft_ratio" in run.summary
    ]


def _coserve_row(run: Run) -> str:
    s = run.summary
    return (
        f"| `{run.file}` at `{run.commit}` | {run.production} | {s['num_pairs']} "
        f"| {_ratio(s, 'p99_ttft_ratio')} | {s['aa_ratio']:.2f}x "
        f"| {_ratio(s, 'p99_itl_ratio')} | {s['aa_itl_ratio']:.2f}x "
        f"| {s['extra_violations'] + 0.0:g} | {_share(s)} | {'met' if s['bar_met'] else '**not met**'} |"
    )


def overheads(runs: list[Run]) -> list[str]:
    """A row for every run of ``overhead``."""
    return [_overhead_row(run) for run in runs if run.benchmark == "overhead"]


def _overhead_row(run: Run) -> str:
    s = run.summary
    times = (
        f"{s[key]:.0f} us" if key in s else "not measured"
        for key in ("hook_p99_us", "beside_p99_us", "cold_p99_us")
    )
    ratios = (
        (_between(s, name), _between(s, noise))
        for name, noise in (("step_ratio", "aa_ratio"), ("end_ratio", "end_aa_ratio"))
    )
    verdicts = {True: "met", False: "**not met**", None: "says nothing"}
    bars = [verdicts[s.get("limit_met")], verdicts[s.get("end_limit_met")]]
    cells = [*times, *(cell for pair in ratios for cell in pair), ", ".join(bars)]
    return f"| `{run.file}` at `{run.commit}` | {run.production} | {' | '.join(cells)} |"


def _between(summary: dict[str, Any], key: str) -> str:
    if key not in summary:
        return "not measured"
    ends = [summary.get(f"{key}_{end}") for end in ("low", "high")]
    interval = "" if None in ends else f" ({ends[0]:.3f} to {ends[1]:.3f})"
    return f"{summary[key]:.3f}x{interval}"


def _ratio(summary: dict[str, Any], key: str) -> str:
    """A ratio and the upper end of its interval.  Where the two are one, the P99 is one request's: there is no interval."""
    value, high = summary[key], summary[f"{key}_high"]
    return f"{value:.2f}x (no interval)" if high <= value else f"{value:.2f}x (to {high:.2f}x)"


def _share(summary: dict[str, Any]) -> str:
    """The harvested share, where it says something.  It is a part of a whole: an interval above 1 measured something else."""
    value, low, high = (summary.get(f"harvested_share{end}") for end in ("", "_low", "_high"))
    assert value is not None, "every run of coserve has a harvested share"
    if (value if low is None else low) > 1.0:
        return "impossible: above 1"
    if low is None or high is None:
        return f"{value:.2f}, no interval"
    if low < 0.85 and high > 1.0:
        return "empty interval"
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def tables(runs: list[Run]) -> str:
    """The generated part of the document."""
    rows = [(claim, line) for claim in CLAIMS for line in lines_of(claim, runs)]
    head = "| claim | measured | source | bar |\n|---|---|---|---|"
    return "\n".join(
        [
            "## Co-serving: every run",
            "",
            "| file and commit, the newest last | production | pairs | P99 first token over alone | noise | P99 between tokens | noise "
            "| added misses | harvested share | its bar |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *coserving(runs),
            "",
            "## What the plugin costs: every run",
            "",
            "| file and commit, the newest last | production | hooks of a step, P99 | beside a rollout engine | with cold caches | a step, with over without | noise "
            "| a request through the whole server, with over without | noise | their bar |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *overheads(runs),
            "",
            "## Evidence: claims",
            "",
            head,
            *(line for claim, line in rows if not claim.undecided),
            "",
            "## Evidence: undecided, no claim is made",
            "",
            head,
            *(line for claim, line in rows if claim.undecided),
            "",
        ]
    )


def headlines(runs: list[Run]) -> str:
    """The README's figures, each of all runs that have it, with its noise."""

    def every(benchmark: str, key: str) -> list[float]:
        return sorted(
            run.summary[key]
            for run in runs
            if run.benchmark == benchmark
            and run.production == PLAIN
            and run.summary.get(key) is not None
            and (benchmark != "coserve" or SINCE_PARKED in run.summary)
        )

    def span(values: list[float], form: str) -> str:
        if not values:
            return "not measured"
        ends = [form.format(values[0]), form.format(values[-1])]
        return " to ".join(dict.fromkeys(ends))

    ratios, noise = every("coserve", "p99_ttft_ratio"), every("coserve", "aa_ratio")
    between, between_noise = every("coserve", "p99_itl_ratio"), every("coserve", "aa_itl_ratio")
    pooled = [run for run in runs if run.benchmark == "demo" and "pooled.steps_gain" in run.summary]
    steps = [run.summary["pooled.steps_gain"] for run in pooled]
    low, high = ([run.summary[f"pooled.steps_gain_{end}"] for run in pooled] for end in ("low", "high"))
    end, end_noise = every("overhead", "end_ratio"), every("overhead", "end_aa_ratio")
    judged = every("coserve", "judged_met")
    return "\n".join(
        [
            "| on two CPU cores | with ROSE over without | the same where nothing changed; of steps the 95 % interval |",
            "|---|---|---|",
            f"| latency of a request, with the plugin and nothing lent | {span(end, '{:.3f}x')} ({len(end)} runs) | {span(end_noise, '{:.3f}x')} |",
            f"| production's P99 first token, beside rollouts on its core ([bar](docs/evidence.md#what-co-serving-is-judged-by) met by {sum(judged):.0f} of {len(judged)} runs) "
            f"| {span(ratios, '{:.2f}x')} | {span(noise, '{:.2f}x')} |",
            f"| its P99 between tokens, same runs | {span(between, '{:.2f}x')} | {span(between_noise, '{:.2f}x')} |",
            "| RL training steps a minute in `make demo`, more is better, three seeds ([and of the demo's earlier forms](docs/evidence.md#what-breaks-these-rules)) "
            f"| {span(sorted(steps), '{:.2f}x')} | {min(low, default=0):.2f}x to {max(high, default=0):.2f}x |",
            "",
        ]
    )  # fmt: skip


def render(document: str, generated: str) -> str:
    """The document with its generated part made anew; what people wrote stays."""
    before, _, rest = document.partition(BEGIN)
    return f"{before}{BEGIN}\n{generated}\n{END}{rest.partition(END)[2]}"
