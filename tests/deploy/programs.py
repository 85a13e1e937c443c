"""Programs as manifests and units call them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


_DOCKERFILE = (Path(__file__).resolve().parents[2] / "deploy" / "Dockerfile").read_text()
_OF_BASES = {
    "${VLLM_IMAGE}": ["vllm", "serve"],  # docker/Dockerfile of vLLM 0.32, stage vllm-openai
    "${PYTHON_IMAGE}": [],
    "${RAY_IMAGE}": [],
}
"""Entry points of the images that ours are made from."""


def start_of(container: Mapping[str, Any]) -> list[str]:
    """What Kubernetes starts for a container whose image ``deploy/Dockerfile`` makes."""
    image = container["image"].rpartition("/")[2]
    targets = {name: target for target, name in re.findall(r"--target (\w+)\s+-t (\S+)", _DOCKERFILE)}
    command = container.get("command") or _entry_point(targets[image])
    return [*command, *container.get("args", ())]


def _entry_point(target: str) -> list[str]:
    if target in _OF_BASES:
        return _OF_BASES[target]
    stage = re.search(rf"^FROM (\S+) AS {target}$(.*?)(?=^FROM |\Z)", _DOCKERFILE, re.M | re.S)
    assert stage is not None, target
    own = re.findall(r"^ENTRYPOINT (.*)$", stage[2], re.M)
    return json.loads(own[-1]) if own else _entry_point(stage[1])


def check_call(argv: Sequence[str]) -> None:
    """Raises click.UsageError where the program would not take these arguments."""
    name = next(name for name in _PROGRAMS if tuple(argv[: len(name)]) == name)
    command, rest = get_command(_PROGRAMS[name]), list(argv[len(name) :])
    context = click.Context(command, info_name=" ".join(name))
    while isinstance(command, click.Group):
        word, command, rest = command.resolve_command(context, rest)
        assert command is not None, word
    command.make_context(argv[0], rest, resilient_parsing=False)
