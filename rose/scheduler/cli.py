"""``rose-scheduler``: the daemon that agents, trainers and nodes talk to."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
import uvloop

from rose import compiled
from rose.auth import PARTS, Tokens
from rose.config import load_config
from rose.errors import RoseError
from rose.open_files import raise_limit
from rose.scheduler.app import Scheduler, open_store
from rose.scheduler.claim import owner_of
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.scheduler.standby import StandBy, listening, url_of
from rose.scheduler.store import TrajectoryStore

T = TypeVar("T")


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "logger", "message", "error"?}``; time in seconds since 1970."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


YOUNG_OBJECTS = 20_000
"""New objects between two looks of the garbage collector; a look takes about a millisecond then."""


def _settle(phase: str, info: dict[str, int]) -> None:
    """Objects that outlived two looks are state: trajectories, workers.  No collection looks at them again.

    With 20,000 trajectories one that did took 0.4 s, in which no turn moved.  What is settled is still freed when nobody
    refers to it; only a cycle would stay, and requests leave none (``tests/scheduler/test_memory.py``).
    """
    if phase == "stop" and info["generation"] > 0:
        gc.freeze()


def restrain_collector() -> None:
    """For a process that keeps much and leaves few cycles: look at what is new, now and then, and at nothing else."""
    # A full collection would look at every imported module again and hold up all turns meanwhile.
    gc.collect()
    gc.freeze()
    # What belongs to the requests in flight is more than the usual 700 objects, and gone before anybody needs to look.
    gc.set_threshold(YOUNG_OBJECTS, 2)
    if _settle not in gc.callbacks:
        gc.callbacks.append(_settle)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="Settings (TOML).")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override one setting: a.b=c.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 picks a free one.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="Tokens by role; else ROSE_TOKEN_FILE.")] = None,
    journal: Annotated[Path, typer.Option(help="Directory of the journal.")] = Path("rose-scheduler"),
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="If another one has the journal, follow it and take over when that one is gone."
        ),
    ] = False,
    policy: Annotated[str | None, typer.Option(help="Routing policy.")] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_json: Annotated[bool, typer.Option("--log-json", help="Log one JSON object per line.")] = False,
) -> None:
    """Route the turns of RL rollouts over dedicated and harvested engines.  Prints one line when it is
    ready.

    Two of them with --standby, on one --journal and two ports, replace each other: start both with the same command, and give nodes,
    trainers and agents both addresses.  One that another has taken over from ends with code 75; start it again, and it stands by.
    """
    overrides = list(set_ or [])
    if port is not None:
        overrides.append(f"port={port}")
    if policy is not None:
        overrides.append(f'policy="{policy}"')
    logging.basicConfig(
        level=log_level.upper() if log_level.upper() in ("DEBUG", "INFO", "WARNING", "ERROR") else "INFO",
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    if log_json:
        logging.getLogger().handlers[0].setFormatter(JsonFormatter())
    try:
        settings = load_config(SchedulerConfig, config, overrides)
        tokens = Tokens.load(token_file, PARTS["scheduler"])
        raise_limit(settings.limits.max_connections)
        code = uvloop.run(_serve(settings, tokens, journal, standby=standby))
    except RoseError as error:
        typer.echo(f"rose-scheduler: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


async def _serve(settings: SchedulerConfig, tokens: Tokens, journal: Path, *, standby: bool) -> int:
    """Until a signal, or another takes over; the exit code."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # A second signal ends the drain at once; the journal already holds what matters.
        loop.add_signal_handler(number, lambda: os._exit(130) if stopping.is_set() else stopping.set())
    store = listener = None
    if standby:
        listener = listening(settings)
        store = await _first(_stand_by(settings, tokens, journal, listener), stopping)
        if store is None:
            return 0
    scheduler = Scheduler(settings, tokens, journal, store=store, listener=listener)
    await scheduler.start()
    _say(f"ready at {scheduler.url}")
    logging.getLogger("rose.scheduler").log(
        logging.WARNING if compiled.is_stale else logging.INFO, "%s", compiled.said
    )
    restrain_collector()
    await _first(scheduler.deposed.wait(), stopping)
    if scheduler.deposed.is_set():
        owner = owner_of(journal)
        logging.getLogger("rose.scheduler").error(
            "another rose-scheduler%s has taken over the journal: this one writes nothing more, and ends",
            f" at {owner.url}" if owner is not None and owner.url else "",
        )
        await scheduler.stop(drain_s=0)
        return os.EX_TEMPFAIL
    await scheduler.stop()
    return 0


async def _stand_by(
    settings: SchedulerConfig, tokens: Tokens, journal: Path, listener: socket.socket
) -> TrajectoryStore:
    def following() -> None:
        _say(f"stands by at {url_of(listener.getsockname())}")

    restrain_collector()  # what it follows is much, and stays
    waiting = StandBy(settings, tokens, journal, listener, lambda opened: open_store(settings, opened))
    return await waiting.wait(following)


async def _first(work: Coroutine[Any, Any, T], stopping: asyncio.Event) -> T | None:
    """What ``work`` gives; None where we are to stop before."""
    doing, stopped = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait((doing, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if doing.done():
        return doing.result()
    doing.cancel()
    await asyncio.gather(doing, return_exceptions=True)
    return None


def _say(what: str) -> None:
    typer.echo(f"rose-scheduler {what}")
    sys.stdout.flush()


def main() -> None:
    app()


if __name__ == "__main__":
    main()
