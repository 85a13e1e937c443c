"""Programs as manifests and units call them."""

from __future__ import annotations

from collections.abc import Sequence

import click
import typer
from typer.main import get_command

from rose.cli import app as rose
from rose.coserve.cli import app as node
from rose.scheduler.cli import app as scheduler
from rose.weights.cli import relay_app as relay

_PROGRAMS: dict[tuple[str, ...], typer.Typer] = {
    ("rose-scheduler",): scheduler,
    ("rose", "relay"): relay,
    ("rose", "node"): node,
    ("rose",): rose,
}


def check_call(argv: Sequence[str]) -> None:
    """Raises click.UsageError where the program would not take these arguments."""
    name = next(name for name in _PROGRAMS if tuple(argv[: len(name)]) == name)
    command, rest = get_command(_PROGRAMS[name]), list(argv[len(name) :])
    context = click.Context(command, info_name=" ".join(name))
    while isinstance(command, click.Group):
        word, command, rest = command.resolve_command(context, rest)
        assert command is not None, word
    command.make_context(argv[0], rest, resilient_parsing=False)
