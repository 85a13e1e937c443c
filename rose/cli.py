"""The ``rose`` command: names every program of ROSE and starts the one that was asked for.

Decides nothing itself.  Each command imports its part when it runs, so that ``rose --help`` is quick and
``rose node status`` works where torch, vLLM and Ray are not installed.

Every :class:`~rose.errors.RoseError` ends as one red line on stderr and exit code 2; the last line that a
user reads is what to fix.  130 after Ctrl-C.  A traceback means a bug.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from rose.errors import ConfigError, RoseError

EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="rose",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    help="Reinforcement-learning rollouts on the idle part of GPUs that already serve production traffic.",
    epilog="Start with [bold]rose demo[/bold]: the whole job on this machine, no GPU needed, in minutes.",
)

# Sub-programs parse their own arguments, --help included.
_PASS_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    if show_version:
        try:
            typer.echo(f"rose {version('rose-rl')}")
        except PackageNotFoundError:
            typer.echo("rose (not installed)")
        raise typer.Exit


@app.command()
def demo(
    config: Annotated[
        Path | None, typer.Option(help="Settings as TOML; see rose/demo/demo_config.py for every key.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of models, maps and traffic.")] = None,
    steps: Annotated[int | None, typer.Option(help="RL steps.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Azure LLM inference trace (CSV) to replay instead of the traffic generator."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Length of one block of the measurement: a period of traffic.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Production requests per second, on average.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where report.json and report.html go.")] = None,
    base_port: Annotated[int | None, typer.Option(help="First of the loopback ports in use.")] = None,
    run_directory: Annotated[
        Path | None, typer.Option(help="Parent of this run's private directory; a tmpfs is best.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Any other setting, as key=value; repeatable.")
    ] = None,
) -> None:
    """Run the main job on this machine and measure it.

    Starts a production vLLM server, replays bursty traffic at it, and trains a small policy by
    reinforcement learning with real rollouts, a part of them on production's own core.
    Writes [bold]out/demo/report.html[/bold]: what production's users felt, what the policy
    learned, and what ran where.

    Ctrl-C stops everything it started.
    """
    from rose.demo.demo_config import load_demo_config
    from rose.demo.run import run_demo

    named = {
        "seed": seed,
        "steps": steps,
        "trace": trace,
        "traffic.period_s": seconds,
        "traffic.mean_rate_hz": rate,
        "out": out,
        "base_port": base_port,
        "run_directory": run_directory,
    }
    given = {name: value for name, value in named.items() if value is not None}
    raise typer.Exit(run_demo(load_demo_config(config, given, overrides or [])))


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="The job, as TOML; see examples/.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting: a.b=value; repeatable.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Start nothing: say of all that a start needs whether it is there, and every setting.",
        ),
    ] = False,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="last|best",
            help="Start nothing: write output_dir/model, a Hugging Face folder, from the newest or the best checkpoint.",
        ),
    ] = None,
) -> None:
    """Train a policy: environments, rollouts through rose-scheduler, optimiser steps, weight updates.

    The same command again goes on from the last checkpoint in the job's output_dir.

    rose train --config job.toml --check

    says beforehand what would be refused: settings, model folder, tokenizer, chat template, environment, reward, token file, libraries, Ray,
    and whether scheduler and relay answer; then all settings as they will be in force. Exit code 0, or 2 where something is wrong.
    """
    if check and export is not None:
        raise ConfigError("does not go with --export", field="--check")
    if export is not None:
        result = _load("rose.train.cli", "export_main", "train")(config, overrides or [], export)
    else:
        main = "check_main" if check else "train_main"
        result = _load("rose.train.cli", main, "train")(config, overrides or [])
    raise typer.Exit(result if isinstance(result, int) else 0)


@app.command(**_PASS_ON)
def node(context: typer.Context) -> None:
    """Co-serving on this host: run | on | off | set | status."""
    _forward("rose.coserve.cli", "app", "node", context.args)


@app.command()
def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- vllm serve MODEL ARGS...]",
            help="Production's command line as it is; variables may stand before it.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="node.toml: also the rollout engine, and what it needs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """What would run here, which row of the compatibility table decides, and what to do. Starts and changes nothing.

    rose doctor --config node.toml -- vllm serve MODEL --dtype bfloat16 ...

    Exit code 0: all can run (if with less than it could); 1: something would be refused or fail; 2: wrong usage.
    """
    run: Any = _load("rose.coserve.doctor", "doctor", "doctor")
    raise typer.Exit(run(config, command or [], as_json=as_json))


@app.command(**_PASS_ON)
def profile(context: typer.Context) -> None:
    """Measure an engine's step times for admission: how long is a step of so many tokens?"""
    _forward("rose.coserve.profile_engine", "profile_main", "profile", context.args)


@app.command(**_PASS_ON)
def scheduler(context: typer.Context) -> None:
    """The rollout scheduler and its OpenAI-compatible endpoint (the same as rose-scheduler)."""
    _forward("rose.scheduler.cli", "main", "scheduler", context.args)


@app.command()
def replay(
    path: Annotated[
        Path,
        typer.Argument(
            help="A decision log, or a folder of them: a scheduler's --journal, a node's decisions.directory, "
            "out/demo/decisions."
        ),
    ],
) -> None:
    """Feed a recorded run to the policies again, and compare every decision: where each turn went, what each
    device lent.

    Ends with 0 when each action is the same as then, and with 1 at the first that is not: after a change of the
    policies, that is the first event they would have treated otherwise.
    """
    from rose.decisions.log import logs, replay
    from rose.progress import Bars

    console = Console(soft_wrap=True)
    for log in logs(path):
        with Bars(1) as progress:
            task = progress.add_task(log.name, total=1.0)
            found = replay(log, lambda share, task=task: progress.update(task, completed=share))
        done = ", ".join(f"{count} {name}" for name, count in sorted(found.num_actions.items()))
        tail = "; its last frame is torn" if found.torn else ""
        console.print(Text(f"{log.name}: {found.num_events} events, same actions ({done or 'none'}){tail}"))
        if found.ends:
            console.print(Text(f"{log.name}: at its end {found.ends}"))
        if found.difference is not None:
            console.print(Text(f"{log.name}: {found.difference}", style="red"))
            raise typer.Exit(1)


@app.command(**_PASS_ON)
def traj(context: typer.Context) -> None:
    """Look at trajectories of a running scheduler: show | ls | export."""
    _forward("rose.scheduler.console", "app", "traj", context.args)


@app.command(**_PASS_ON)
def top(context: typer.Context) -> None:
    """Workers and turns of a running scheduler, live."""
    _forward("rose.scheduler.console", "top", "top", context.args)


@app.command(**_PASS_ON)
def fleet(context: typer.Context) -> None:
    """Harvesting of all nodes of a running scheduler: status | off | on."""
    _forward("rose.scheduler.fleet_cli", "app", "fleet", context.args)


@app.command(**_PASS_ON)
def relay(context: typer.Context) -> None:
    """The weight relay: versioned objects over HTTP, from the trainer to the nodes."""
    _forward("rose.weights.cli", "relay_main", "relay", context.args)


@app.command(**_PASS_ON)
def weights(context: typer.Context) -> None:
    """Look at published weight versions: ls | verify."""
    _forward("rose.weights.cli", "app", "weights", context.args)


@app.command(**_PASS_ON)
def sim(context: typer.Context) -> None:
    """Simulate this and other systems on a fleet, with the daemons' own policies."""
    _forward("rose.sim.cli", "sim", "sim", context.args)


@app.command(**_PASS_ON)
def plan(context: typer.Context) -> None:
    """What rollouts a serving fleet can lend, at what risk, worth how many GPUs and how much money: from its own metrics."""
    _forward("rose.sim.plan_cli", "plan", "plan", context.args)


@app.command()
def tokens(
    path: Annotated[Path, typer.Argument(help="The token file to write, with mode 0600.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Add what a file of an earlier version lacks; the rest stays.")
    ] = False,
    split: Annotated[
        Path | None,
        typer.Option(
            "--split",
            help="Also write, into this folder, a file for each program, with no more than it needs; of the token file that there is, or of a new one.",
        ),
    ] = None,
    anchor_key: Annotated[
        Path | None,
        typer.Option(
            "--anchor-key",
            help="Write, with mode 0600, a key that may sign anchors and nothing else, for a program that composes them beside the trainer.",
        ),
    ] = None,
) -> None:
    """Make a token file: one random bearer token for each role; and beside it the key that signs weights.

    [bold]agent[/bold] may chat; [bold]environment[/bold] also begins trajectories and sets their rewards. An agent that must
    not reach its own reward gets neither, but the key of its trajectory, from POST /rose/v1/trajectories.

    Every program of ROSE reads it through [bold]--token-file[/bold] or [bold]ROSE_TOKEN_FILE[/bold].

    [bold]TOKENS.key[/bold], beside TOKENS.toml, is the trainer's: whoever has it chooses the weights of every engine. The line
    [bold]public_key[/bold] of the token file is its other half: nodes take what it signed, and nothing else.
    """
    from rose.auth import PARTS, Tokens, key_beside, key_text, read_key, write_own

    keeps = (split is not None or anchor_key is not None) and path.exists() and not force and not upgrade
    if path.exists() and not force and not upgrade and not keeps:
        raise ConfigError(
            f"{path} exists",
            field="path",
            fix="--upgrade adds what it lacks; --force replaces it and its key, and locks its users out",
        )
    key = key_beside(path)
    if keeps or upgrade:
        made = Tokens.load(path)
        if made.public_key and key.exists():
            made = replace(made, publish_key=read_key(key).text)
        if upgrade:
            made = made.upgraded()
    else:
        if key.exists() and not force:
            raise ConfigError(f"{key} exists", field="path", fix="name another file, or --force replaces it")
        made = Tokens.generate()
    files = {} if keeps else {path: made}
    if split is not None:
        files |= {split / f"{part}.toml": made.only(names) for part, names in PARTS.items()}
    try:
        for file, tokens in files.items():
            tokens.save(file)
            typer.echo(f"wrote {file}" + (f" and {key_beside(file)}" if tokens.publish_key else ""))
        if anchor_key is not None:
            delegated = read_key(key).delegate()
            write_own(anchor_key, key_text(delegated.text))
            typer.echo(f"wrote {anchor_key}")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}", field="path") from error


def _load(module: str, name: str, command: str) -> Any:
    """Import a part; a library that is not installed is the user's to add, not a traceback."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "rose":
            raise
        raise ConfigError(
            f"needs '{error.name}', which is not installed",
            field=f"rose {command}",
            fix="from a checkout of ROSE: make setup, then its .venv/bin/rose; on a GPU pip install '.[gpu]', to train also '.[train]'",
        ) from error


def _forward(module: str, name: str, command: str, arguments: Sequence[str]) -> None:
    """Hand ``arguments`` to a part's own command line; it ends by itself.

    A part offers a ``typer.Typer``, a function with typer's annotations, or a ``main()`` that reads ``sys.argv``.
    """
    program = f"rose {command}"
    target = _load(module, name, command)
    if not isinstance(target, typer.Typer) and inspect.signature(target).parameters:
        function, target = target, typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        target.command()(function)
    if isinstance(target, typer.Typer):
        typer.main.get_command(target)(args=list(arguments), prog_name=program)
    else:
        sys.argv = [program, *arguments]
        result = target()
        raise typer.Exit(result if isinstance(result, int) else 0)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except RoseError as error:
        # Text, not markup: a message may hold square brackets.
        Console(stderr=True, soft_wrap=True).print(
            Text("error: ", style="bold red") + Text(str(error), style="red")
        )
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
