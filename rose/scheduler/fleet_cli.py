"""``rose fleet``: harvesting of all nodes that a rose-scheduler knows, off and on, with one page of status.

``off`` is the fleet's kill switch: every node (or every one of a group) gives production all its memory back with its next heartbeat, half
a second.  ``on`` lets them lend again, a canary group first.  Orders stay in force over restarts of the scheduler; what waits here is
only the page: Ctrl-C ends that, not the order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rose.scheduler.cli_client import DEFAULT_URL, CliClient, Url

app = typer.Typer(
    name="rose fleet",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Harvesting of all nodes that a running rose-scheduler knows: status, off, on.",
    epilog='A node names its group in node.toml: \\[scheduler] group = "canary". One that names none is of group `default`. '
    "Nodes are known from their engine's first start on; one that restarts while it is held may lend until its first heartbeat.",
)
TokenFile = Annotated[Path | None, typer.Option(help="With the admin token; else ROSE_TOKEN_FILE.")]
Groups = Annotated[
    list[str] | None, typer.Argument(help="Groups of nodes; all nodes if none is named.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="The whole answer as JSON, without waiting.")]
LOOK_EVERY_S = 0.5
_SILENT_S = 5.0
_WAITS = "waits until production's P99 is measured on one of its nodes (serving.metrics_url, and traffic)"


@app.command()
def status(url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: Json = False) -> None:
    """One page: every node, what was ordered, what it holds, and production's latency beside its promise.

    Exit code 1 while a node that is ordered off still holds memory, or production is late on one that lends.
    """
    told = CliClient(url, token_file, "admin").ask("GET", "/fleet")
    _print(told, as_json)
    if any(holds(node) or (node["ordered"] == "on" and node["late"]) for node in told["nodes"]):
        raise typer.Exit(1)


@app.command()
def off(
    groups: Groups = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait until all memory is back.", min=0.0)] = 30.0,
    as_json: Json = False,
) -> None:
    """Nothing is lent any more, on all nodes or on those of GROUPS. Production is not restarted, and no node's own mode changes.

    rose fleet off                 # everywhere
    rose fleet off eu-west canary  # two groups

    Exit code 1 if a node still holds memory (or is silent) at the end of --wait.
    """
    client = CliClient(url, token_file, "admin")
    told = client.ask("POST", "/fleet/off", {"groups": groups or []})
    if as_json:
        _print(told, as_json)
        return
    told = _follow(client, told, wait, lambda told: not any(map(holds, told["nodes"])))
    left = [_name(node) for node in told["nodes"] if holds(node)]
    typer.echo(f"NOT all memory is back: {', '.join(left)}" if left else "all memory is back")
    if left:
        raise typer.Exit(1)


@app.command()
def on(
    groups: Groups = None,
    canary: Annotated[
        list[str] | None, typer.Option(help="A group that goes first, and is watched alone; repeatable.")
    ] = None,
    watch: Annotated[float, typer.Option(help="Seconds that each stage is watched.", min=0.0)] = 60.0,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Nodes may lend again: each does as its own operator has set it.

    rose fleet on --canary canary --watch 300   # one group for five minutes, then the rest

    A stage is taken back by itself when production's P99 on one of its nodes is over its promise for ten seconds on end; the next stage
    does not begin then.  Exit code 1 if that happened.  A node that was silent before its stage began is not waited for, and named; it does
    as was ordered when it comes back.
    """
    client = CliClient(url, token_file, "admin")
    body = {"groups": groups or [], "canary": canary or [], "watch_s": watch}
    told = client.ask("POST", "/fleet/on", body)
    if as_json:
        _print(told, as_json)
        return
    told = _follow(client, told, None, lambda told: told["release"] is None)
    for node in told["nodes"]:
        if node.get("skipped"):  # an older scheduler does not say
            typer.echo(f"not waited for: {node['node']}, {_silence(node)}")
    if told["taken_back"]:
        typer.echo(f"off again: {told['taken_back']}")
        raise typer.Exit(1)
    typer.echo("on")


def _follow(
    client: CliClient, told: dict[str, Any], wait_s: float | None, done: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Show the page until it is done, at most ``wait_s``; the last answer."""
    until_s = None if wait_s is None else time.monotonic() + wait_s
    console = Console()
    with Live(_page(told), console=console, transient=not console.is_terminal) as live:
        said = ""
        while not done(told) and (until_s is None or time.monotonic() < until_s):
            if not console.is_terminal and (now := _stands(told)) != said:
                said = now
                typer.echo(said)
            time.sleep(LOOK_EVERY_S)
            told = client.ask("GET", "/fleet")
            live.update(_page(told))
    return told


def _stands(told: dict[str, Any]) -> str:
    """What is waited for, in a line."""
    release = told["release"]
    if release is None:
        return (
            f"holding memory: {', '.join(_name(node) for node in told['nodes'] if holds(node)) or 'nobody'}"
        )
    names = ", ".join(release["stages"][release["stage"]]) or "all the rest"
    waits = _WAITS if release["left_s"] <= 0 else "is watched"
    return f"stage {release['stage'] + 1} of {len(release['stages'])} ({names}): {waits}"


def _name(node: dict[str, Any]) -> str:
    """With the place, of one that has not the name for itself."""
    return f"{node['node']} at {node['at']}" if node.get("at") else node["node"]


def holds(node: dict[str, Any]) -> bool:
    """Is it ordered off, and has not said that it holds nothing?"""
    return node["ordered"] == "off" and (
        node["held_pages"] != 0 or node["held"] is not True or node["silent_s"] > _SILENT_S
    )


def _print(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(told, indent=2))
    else:
        Console(soft_wrap=True).print(_page(told))


def _page(told: dict[str, Any]) -> Group:
    nodes = told["nodes"]
    lends = sum(node["ordered"] == "on" and node["mode"] == "on" for node in nodes)
    head = Text(f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}, {lends} may lend", "bold")
    if (release := told["release"]) is not None:
        names = ", ".join(release["stages"][release["stage"]]) or "all the rest"
        waits = _WAITS if release["left_s"] <= 0 else f"{release['left_s']:.0f} s to watch"
        head.append(f"; stage {release['stage'] + 1} of {len(release['stages'])} ({names}), {waits}")
    if told["taken_back"]:
        head.append(f"; off again: {told['taken_back']}", "bold red")
    table = Table(box=None, pad_edge=False)
    for heading in (
        "node",
        "group",
        "ordered",
        "own mode",
        "holds",
        "P99 first token",
        "P99 between tokens",
        "",
    ):
        table.add_column(heading, overflow="fold")
    for node in nodes:
        says = []
        if node.get("unregistered"):  # an older scheduler does not say
            says.append("NOT REGISTERED")
        if node["held"] is None:
            says.append("knows no fleet orders: update it")
        if node["silent_s"] > _SILENT_S:
            says.append(_silence(node))
        if node["late"]:
            says.append("LATE")
        table.add_row(
            Text(node["node"]),
            Text(node["group"]),
            Text(node["ordered"], "yellow" if node["ordered"] == "off" else ""),
            Text(node["mode"] or "?"),
            Text(_memory(node)),
            Text(_latency(node["ttft_p99_s"], node["slo_ttft_s"])),
            Text(_latency(node["tpot_p99_s"], node["slo_tpot_s"])),
            Text(", ".join(says), "bold red" if says else ""),
        )
    twins = [
        Text(f"{node['node']} is the node_id of {node['at']} as well, which is not registered", "bold red")
        for node in nodes
        if node.get("at")
    ]
    return Group(head, table, *twins)


def _silence(node: dict[str, Any]) -> str:
    return f"silent for {node['silent_s']:.0f} s"


def _memory(node: dict[str, Any]) -> str:
    """What its rollout engine holds: of a node that is silent, held, as far as anybody knows."""
    if node["held_pages"] is None:
        return "?"
    size = f"{2 * node['held_pages']} MiB"
    return f"held {size} when last heard" if node["silent_s"] > _SILENT_S else size


def _latency(p99_s: float | None, slo_s: float | None) -> str:
    if p99_s is None or slo_s is None:
        return "not measured"
    return f"{p99_s * 1e3:.0f} of {slo_s * 1e3:.0f} ms"
