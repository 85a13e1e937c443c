"""``rose traj`` and ``rose top``: look at a running rose-scheduler from a terminal.

``rose traj show ID`` prints a trajectory's text with every sampled token shaded by how unlikely it was, and says which
engine, tier and weight version it came from; ``ls`` lists, ``export`` writes one JSON object per line.
``rose top`` shows workers and turns, live.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text

from rose.errors import ConfigError, NotFound
from rose.scheduler.cli_client import DEFAULT_URL, CliClient, Url
from rose.wire import samples

app = typer.Typer(
    name="rose traj", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)
TokenFile = Annotated[Path | None, typer.Option(help="Tokens by role; else ROSE_TOKEN_FILE.")]
_TIER_COLOURS = {"dedicated": "blue", "harvested": "dark_orange", "borrowed": "magenta"}


@app.command()
def show(
    trajectory: Annotated[str, typer.Argument(help="Its id, as `ls` has it.")],
    turn: Annotated[int | None, typer.Option(help="Show the branch that ends with this turn.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Text with mask, log-prob, version and tier of every sampled token."""
    client = CliClient(url, token_file, "environment")
    shown = client.get(f"/rose/v1/trajectories/{trajectory}/tokens", turn=turn)
    console = Console()
    text = Text()
    runs: list[list[Any]] = []
    for row in shown["tokens"]:
        word = _plain(row["text"]) if row["text"] is not None else f"<{row['id']}>"
        if not row["sampled"]:
            text.append(word, Style(dim=True))
            continue
        unlikely = min(1.0, -row["logprob"] / 6)
        colour = f"rgb({int(60 + 195 * unlikely)},{int(200 - 120 * unlikely)},90)"
        text.append(word, Style(color=colour, underline=row["tier"] != "dedicated"))
        where = [row["turn"], row.get("version"), row["tier"], row["worker"], row["attempt"]]
        if runs and runs[-1][0] == where:
            runs[-1][1].append(row["logprob"])
        else:
            runs.append([where, [row["logprob"]]])
    console.print(text)
    table = Table("turn", "version", "tier", "worker", "attempt", "tokens", "mean log-prob")
    for (number, version, tier, worker, attempt), logprobs in runs:
        mean = f"{sum(logprobs) / len(logprobs):.3f}"
        named = Text(tier, style=_TIER_COLOURS[tier])
        cells = [_cell(each) for each in (number, version, worker, attempt, len(logprobs), mean)]
        table.add_row(*cells[:2], named, *cells[2:])
    console.print(table)
    console.print(
        "dim: prompt, mask 0; green to red: likely to unlikely; underlined: not dedicated", style="dim"
    )
    if len(shown.get("branches", [])) > 1:
        console.print(f"other branches end with turns {shown['branches']}; see --turn", style="dim")


@app.command("ls")
def list_(
    job: Annotated[str | None, typer.Option(help="Of this job only.")] = None,
    state: Annotated[str | None, typer.Option(help="In this state only.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Trajectories that the scheduler remembers."""
    table = Table("id", "job", "group", "state", "reason", "turns", "reward")
    table.columns[0].no_wrap = True  # whole: it is what other commands take
    table.columns[0].overflow = "ignore"
    client = CliClient(url, token_file, "environment")
    for each in _listed(client, job, state):
        reward = "" if each["reward"] is None else f"{each['reward']:g}"
        names = ("id", "job", "group_id", "state", "reason", "num_turns")
        table.add_row(*(_cell(each[name]) for name in names), reward)
    Console().print(table)


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="File to write: JSON, one trajectory per line.")],
    job: Annotated[str | None, typer.Option(help="Of this job only.")] = None,
    state: Annotated[str | None, typer.Option(help="In this state only.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Full token traces, for a look offline."""
    client = CliClient(url, token_file, "environment")
    names = [each["id"] for each in _listed(client, job, state)]
    console = Console(stderr=True)
    num_gone = 0
    try:
        with out.open("wb") as file, console.status("exporting") as status:
            for count, name in enumerate(names, 1):
                status.update(f"{count} of {len(names)}")
                try:
                    found = client.get(f"/rose/v1/trajectories/{name}")
                except NotFound:  # since the listing: trained on, or too old
                    num_gone += 1
                    continue
                file.write(msgspec.json.encode(found) + b"\n")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", field="--out") from error
    gone = f"; {num_gone} were gone before they were read" if num_gone else ""
    console.print(f"wrote {len(names) - num_gone} trajectories to {out}{gone}")


def _listed(client: CliClient, job: str | None, state: str | None) -> list[dict[str, Any]]:
    found = client.get("/rose/v1/trajectories", job=job, state=state)["trajectories"]
    if len(found) >= samples.USUAL_FOUND:
        # Only now: a scheduler of before refuses it.
        found = client.get("/rose/v1/trajectories", job=job, state=state, limit=samples.MOST_FOUND)[
            "trajectories"
        ]
    return found


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    period_s: Annotated[float, typer.Option(help="Between two looks.")] = 1.0,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Workers and turns, live.  Ctrl-C ends it."""
    client = CliClient(url, token_file, "environment")
    if once:
        Console().print(_screen(client.get("/status")))
        return
    try:
        with Live(_screen(client.get("/status")), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(period_s)
                live.update(_screen(client.get("/status")), refresh=True)
    except KeyboardInterrupt:
        pass


def _screen(status: dict[str, Any]) -> Group:
    turns, queue = status["turns"], status["queue"]
    versions = ", ".join(f"{job} {version}" for job, version in status["versions"].items()) or "none"
    head = Text.assemble(
        (f"up {status['uptime_s']:.0f} s", "bold"),
        f"   turns: {turns['running']} running, {queue['depth']} waiting (oldest {queue['oldest_s']:.1f} s), "
        f"{turns['done']} done ({turns['by_tier']['harvested']} harvested), {turns['failed']} failed\n"
        f"weights: {versions}   continued elsewhere: {status['resumed_turns']}   "
        f"reroutes: {_counts(status['reroutes'])}   forks: {_counts(status['forks'])}"
        f"{_promises(status['serving_p99'])}",
    )
    workers = Table(
        "worker",
        "tier",
        "health",
        "lending",
        "duty",
        "version",
        "in flight",
        "waits there",
        "KV used / budget",
        "silent",
    )
    for each in status["workers"]:
        workers.add_row(
            _cell(each["worker_id"]),
            Text(each["tier"], style=_TIER_COLOURS[each["tier"]]),
            Text(each["health"], style="" if each["health"] == "ready" else "red"),
            Text(each["lending"], style="red" if each["lending"] == "pressure" else ""),
            each["duty"],
            each["version"] or "",
            f"{each['inflight']} / {each['cap']}",
            str(each["waiting"] or ""),
            f"{_or_dash(each['kv_used_tokens'])} / {_or_dash(each['kv_budget_tokens'])}",
            f"{each['silent_s']:.1f} s",
        )
    stuck = Table("oldest turns", "state", "worker", "age", "tokens")
    for each in status["stuck"][:8]:
        state = each["state"] + (f" ({each['hold']})" if each["hold"] else "")
        cells = (
            each["trajectory"],
            state,
            each["worker"] or "",
            f"{each['age_s']:.1f} s",
            each["num_tokens"],
        )
        stuck.add_row(*map(_cell, cells))
    return Group(head, workers, stuck)


def _plain(text: str) -> str:
    """What models and agents say must not move the cursor or change the title of somebody's terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _cell(value: Any) -> Text:
    """As it is: names may hold what rich takes for markup."""
    return Text(_plain(str(value)).replace("\n", " "))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _promises(p99: dict[str, dict[str, float]]) -> str:
    """Production's P99 on the engine that is nearest to its promise; nothing where no node reads it."""
    told = [
        f"{name} {p99[kind]['p99_s'] * 1e3:.0f} of {p99[kind]['slo_s'] * 1e3:.0f} ms"
        for kind, name in (("ttft", "first token"), ("tpot", "between two"))
        if kind in p99
    ]
    return f"\nproduction's P99: {', '.join(told)}" if told else ""


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
