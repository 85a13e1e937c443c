"""``rose node``: run the agent of a device, and steer it.

``run`` stays in the foreground; the others talk to a running agent through the socket in its directory.
Errors are :class:`~rose.errors.RoseError`; ``rose.cli`` prints them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rose.auth import Tokens
from rose.config import load_config
from rose.coserve.node_config import NodeConfig
from rose.coserve.node_dir import NodeDir
from rose.coserve.standing import standing
from rose.coserve.state_file import keep_off
from rose.errors import AgentHangs, ConfigError, EngineError, RoseError
from rose.node_client import ControlClient
from rose.open_files import raise_limit
from rose.units import PAGE_BYTES, format_bytes, format_s

ENV_DIR = "ROSE_DIR"
_LOOK_S = 0.2
_SLOW_START_S = 60.0
EXIT_AGAIN = 75
"""``EX_TEMPFAIL`` of sysexits.h, of an agent that had begun: what ended it may pass, and a supervisor may start it again.  2: its settings."""
OPEN_FILES = 16_384
"""A version of a large model is thousands of objects, all of them mapped while it is staged."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Co-serving on this host: lend what production does not use to a rollout engine.",
)

Dir = Annotated[Path | None, typer.Option("--dir", help="Node directory; default: ROSE_DIR.")]
TokenFile = Annotated[Path | None, typer.Option(help="Default: ROSE_TOKEN_FILE.")]
Json = Annotated[bool, typer.Option("--json", help="The whole answer as JSON.")]


@app.command()
def run(
    config: Annotated[
        Path, typer.Option(help="Settings as TOML; every key is in rose/coserve/node_config.py.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting: a.b=value; repeatable.")
    ] = None,
) -> None:
    """Run the node agent: it starts the rollout engine, and ends it when it ends.

    Exit code 2: its settings or tokens are wrong; 75: it had begun, and what ended it may pass.
    """
    from rose.coserve.agent import NodeAgent

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    settings = load_config(NodeConfig, config, overrides or [])
    settings.require_reachable()
    raise_limit(OPEN_FILES)
    asyncio.run(_run(NodeAgent, settings, config.stat().st_mtime))


async def _run(agent_type: Any, settings: NodeConfig, changed_at_s: float) -> None:
    asks_relay = settings.weights is not None and settings.weights.relay_url.startswith(
        ("http://", "https://")
    )
    needs = ["node", *(["relay"] if asks_relay else [])]
    if settings.weights is not None and settings.weights.signed and settings.weights.public_key is None:
        needs.append("public_key")
    agent = agent_type(settings, Tokens.load(settings.token_file, needs), changed_at_s=changed_at_s)
    try:
        await agent.run()
    except RoseError as error:
        error.exit_code = EXIT_AGAIN
        raise


@app.command()
def on(
    directory: Dir = None,
    token_file: TokenFile = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for the rollout engine; says meanwhile how it stands.")
    ] = 0.0,
) -> None:
    """Lend; the first one starts the rollout engine (half a minute or more, see engine.warm).

    With --wait: exit code 1 if the engine is not ready in time.
    """
    client = _client(directory, token_file)
    status = client.set(mode="on", engine=True)
    if wait > 0:
        status = _awaited(client, wait)
    _show(status, False)
    if because := status["assignment"]["because"]:
        typer.echo(f"nothing is lent yet: {because}", err=True)
    if wait > 0 and status["engine"]["state"] != "ready":
        raise typer.Exit(1)


def _awaited(client: ControlClient, seconds: float) -> dict[str, Any]:
    """The status once the rollout engine is ready and the scheduler, if there is one, has answered; or it has been given up, or the time is
    over."""
    begun_s, told = time.monotonic(), ""
    while True:
        status = client.status()
        engine, passed_s = status["engine"], time.monotonic() - begun_s
        is_ready, is_told = engine["state"] == "ready", status["assignment"].get("told", True)
        if engine["state"] == "failed" or (is_ready and is_told) or passed_s >= seconds:
            return status
        now = f"engine {engine['state']}{_waits(engine)}{'; ' + engine['error'] if engine['error'] else ''}"
        if is_ready:
            now += f"; {status['assignment']['because']}: {status['scheduler']['error']}"
        if engine["state"] == "starting" and engine["sched"] == "idle" and passed_s >= _SLOW_START_S:
            now += "; in the idle class a start beside busy cores takes minutes: `rose node set --sched normal` shares them until it is up, `--sched idle` after"
        if now != told:
            typer.echo(f"{passed_s:5.0f} s  {now}", err=True)
            told = now
        time.sleep(_LOOK_S)


def _because(error: str) -> str:
    """Without the end of its log, where its first error is there."""
    first, ends, _ = error.partition("; the end of ")
    return f"; {first if ends and 'its first error' in first else error}" if error else ""


def _waits(engine: dict[str, Any]) -> str:
    return f", waits: {engine['waits_for']}" if engine["waits_for"] and engine["state"] != "ready" else ""


@app.command()
def off(
    directory: Dir = None,
    token_file: TokenFile = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the memory.")] = 30.0,
    stop_engine: Annotated[bool, typer.Option(help="End the engine's process too.")] = False,
    as_json: Json = False,
) -> None:
    """Take everything back, and prove it.  Production is not restarted.

    Exit code 1 if the rollout engine still holds something, 3 if no agent answers: then with what the shared files say of who holds what,
    and the order is kept for an agent that goes on, or that is started next.
    """
    where = _directory(directory)
    try:
        answer = _client(where, token_file).off(wait, engine=not stop_engine, told=_told_of_off)
    except EngineError as error:
        hangs = isinstance(error, AgentHangs)
        lines = standing(where, ordered=hangs)
        if not hangs:
            lines.append(keep_off(NodeDir(where)))
            error.exit_code = AgentHangs.exit_code
        for line in lines:
            typer.echo(line, err=True)
        raise
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        for name in ("before", "after"):
            proof = answer[name]
            kv = proof["engine_kv_resident_bytes"]
            typer.echo(
                f"{name:6}  reserved {proof['reserved_pages']} pages, "
                f"resident {proof['resident_pages']} pages ({format_bytes(proof['resident_pages'] * PAGE_BYTES)}) "
                f"by the workers, KV {'unknown' if kv is None else format_bytes(kv)} by the kernel, "
                f"process {format_bytes(proof['engine_rss_bytes'])}, steps {proof['steps']}"
            )
        keeps = answer["after"]["engine_rss_bytes"]
        still = (
            f"; the engine's process keeps {format_bytes(keeps)} of main memory (--stop-engine ends it)"
            if keeps
            else ""
        )
        typer.echo(f"all memory is back{still}" if answer["given_back"] else "NOT all memory is back")
    if not answer["given_back"]:
        raise typer.Exit(1)


def _told_of_off(seconds: float, pages: int | None) -> None:
    said = "the agent does not answer yet" if pages is None else f"the rollout engine has {pages} pages"
    typer.echo(f"{seconds:5.0f} s  {said}", err=True)


@app.command()
def lend(
    seconds: Annotated[float, typer.Argument(min=0.0, help="From now; renew it in time. 0 takes it back.")],
    directory: Dir = None,
    token_file: TokenFile = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for the memory, where it is taken back.")
    ] = 10.0,
    as_json: Json = False,
) -> None:
    """Leave a training GPU to its rollout engine for a time (node.toml: borrowed = true).

    Turns leave it before the time is over.  Exit code 1 if the device was taken back and the engine still holds something.
    """
    answer = _client(directory, token_file).lend(seconds, wait)
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    elif seconds:
        typer.echo(f"lent for {format_s(seconds)}")
    else:
        typer.echo("all memory is back" if answer["given_back"] else "NOT all memory is back")
    if not seconds and not answer["given_back"]:
        raise typer.Exit(1)


@app.command(name="set")
def set_(
    directory: Dir = None,
    token_file: TokenFile = None,
    mode: Annotated[
        str | None,
        typer.Option(help="off (an engine that runs stays, holding nothing), observe (no engine) or on."),
    ] = None,
    floor_pages: Annotated[int | None, typer.Option(help="Pages of 2 MiB that are never lent.")] = None,
    max_lend_pages: Annotated[int | None, typer.Option(help="Never lend more.")] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Production's time to first token.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Production's time between tokens.")] = None,
    policy: Annotated[str | None, typer.Option(help="Lending policy: rose, paper or static.")] = None,
    rule: Annotated[str | None, typer.Option(help="Gate of rollout steps: slack, paper or free.")] = None,
    serialise: Annotated[
        bool | None, typer.Option("--serialise/--overlap", help="No rollout step beside a serving step.")
    ] = None,
    stop_at_layers: Annotated[
        bool | None,
        typer.Option(
            "--stop-at-layers/--whole-steps",
            help="Where steps take turns: a rollout step waits between two layers for a prompt of production.",
        ),
    ] = None,
    first_token_reserve: Annotated[
        float | None,
        typer.Option(help="Share of production's limit for a first token that rollout steps leave unspent."),
    ] = None,
    sched: Annotated[str | None, typer.Option(help="The engine's class: normal or idle.")] = None,
    as_json: Json = False,
) -> None:
    """Change what is in force, now and until the agent ends."""
    given = {
        "mode": mode,
        "floor_pages": floor_pages,
        "max_lend_pages": max_lend_pages,
        "slo_ttft_ms": slo_ttft_ms,
        "slo_tpot_ms": slo_tpot_ms,
        "policy": policy,
        "rule": rule,
        "serialise": serialise,
        "stop_at_layers": stop_at_layers,
        "first_token_reserve": first_token_reserve,
        "sched": sched,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        raise ConfigError("nothing to change was given", field="set", fix="rose node set --help")
    _show(_client(directory, token_file).set(**given), as_json)


@app.command()
def status(directory: Dir = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """What is in force on this device.

    Exit code 3 where no agent answers: then with what the shared files say of who holds what.
    """
    where = _directory(directory)
    try:
        found = _client(where, token_file).status()
    except EngineError as error:
        for line in standing(where, ordered=False):
            typer.echo(line, err=True)
        error.exit_code = AgentHangs.exit_code
        raise
    _show(found, as_json)


def _directory(given: Path | None) -> Path:
    text = given or os.environ.get(ENV_DIR)
    if not text:
        raise ConfigError("no node directory", field="dir", fix=f"--dir PATH, or set {ENV_DIR}")
    return Path(text)


def _client(directory: Path | None, token_file: Path | None) -> ControlClient:
    return ControlClient(_directory(directory), Tokens.load(token_file, ["node"]))


def _show(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(status, indent=2))
        return
    lent = "" if status["lent_s"] is None else f", lent for {format_s(status['lent_s'])}"
    lending, serving, rollout, engine = (status[k] for k in ("lending", "serving", "rollout", "engine"))
    typer.echo(
        f"node      {status['node_id']} ({status['tier']}{lent}), mode {status['mode']}, epoch {status['epoch']}"
    )
    typer.echo(
        f"lending   {lending['lend_pages']} of at most {lending['cap_pages']} pages: {lending['reason']}; "
        f"headroom {lending['headroom_pages']}, reclaim p99 {format_s(lending['reclaim_p99_s'])}, "
        f"cuts {lending['cuts']}"
    )
    limit = lending.get("max_lend_pages")  # an older agent does not say
    free_rule = " (ROLLOUT STEPS DO NOT WAIT FOR PRODUCTION)" if lending["rule"].startswith("free") else ""
    typer.echo(
        f"set       policy {lending['policy']}, rule {lending['rule']}{free_rule}, {'no limit' if limit is None else f'at most {limit} pages lent'}, "
        f"floor {status['floor_pages']} pages; promised {status['slo_ttft_ms']:g} ms to a first token, {status['slo_tpot_ms']:g} ms between tokens; "
        f"rollouts' share {engine['sched']}"
    )
    device = status["device"]
    free = "unknown" if device["free_bytes"] is None else format_bytes(device["free_bytes"])
    typer.echo(
        f"device    {device['kind']} memory: {free} free, reserve {format_bytes(device['reserve_bytes'])}"
        f"{' (SHORT)' if device['short'] else ''}, {device['breaches']} breaches"
    )
    because = f"{serving['because']}{': ' + serving['found'] if serving['found'] else ''}"
    verdict = "no verdict yet" if serving["support"] == "unknown" else f"{serving['support']} ({because})"
    typer.echo(
        f"serving   {serving['phase']}{'' if serving['alive'] else ' (no process; its last word)'}, {verdict}, "
        f"{serving['used_pages']} used, {serving['reserved_pages']} reserved of {serving['total_pages']} pages, "
        f"claims {serving['claim_pages']}"
        + (f", {serving['stranded_pages']} STRANDED" if serving["stranded_pages"] else "")
        + (", ROSE IS OFF IN IT until its restart, after an error (its log)" if serving["errors"] else "")
    )
    if (limit := lending.get("cache_limit_pages")) is not None:
        loss = lending["hit_rate_loss"]
        typer.echo(
            f"cache     production's prompts missed {serving['lost_tokens']} of {serving['queried_tokens']} tokens for the "
            f"loan's sake{'' if loss is None else f', {loss:.2%} lately'}; so at most {limit} pages are lent"
            + (
                f", and {kept} are kept: their prefixes may be asked for again"
                if (kept := serving["kept_pages"])
                else ""
            )
        )
    if (observed := status["observed"]) is not None:
        pages = observed["mean_pages"]
        typer.echo(
            f"observed  over {format_s(observed['seconds'])}: {pages:.1f} pages ({format_bytes(pages * PAGE_BYTES)}) could "
            f"be lent on average, {observed['least_pages']} at least, {observed['most_pages']} at most; production "
            f"computes {observed['busy_fraction']:.0%} of the time"
        )
    typer.echo(
        f"rollout   {rollout['phase']}{'' if rollout['alive'] else ' (no process; its last word)'}, "
        f"{rollout['reserved_pages']} reserved, {rollout['resident_pages']} resident, "
        f"gate {'open' if rollout['gate_open'] else 'closed'}, {rollout['steps']} steps, "
        f"{rollout['cut_requests']} requests cut"
    )
    audit = status["audit"]
    if audit["looks"]:
        booked = sum(rank["booked_bytes"] for rank in audit["ranks"])
        typer.echo(
            f"audit     {format_bytes(booked)} in the books of {len(audit['ranks'])} ranks; {audit['looks']} looks, "
            f"{audit['disagreements']} disagreed with the kernel"
        )
    typer.echo(
        f"engine    {engine['state']}, version {engine['version']}, {engine['starts']} starts, "
        f"{engine['kills']} kills{_waits(engine)}{_because(engine['error'])}"
    )
    if (sentinel := engine["sentinel"]) is not None:
        dies = (
            f"; a paused engine that it kills dies {sentinel['frozen_dies']}"
            if sentinel["frozen_dies"]
            else ""
        )
        typer.echo(f"sentinel  {sentinel['why']}{dies}")
    for name in ("scheduler", "weights"):
        link = status[name]
        if link is not None:
            detail = ", ".join(f"{key} {value}" for key, value in link.items() if value not in ("", {}))
            typer.echo(f"{name:9} {detail}")
    for name, error in status["errors"].items():
        typer.echo(f"error     {name}: {error}")
