"""Pages that are one file: what they look like, and how they come to be on the disk."""

from __future__ import annotations

import os
from html import escape
from importlib.resources import files
from pathlib import Path

from rose.errors import ConfigError


def style() -> str:
    """CSS of every page and of the charts in it (``s-NAME`` is the colour of a series, see ``rose.evaluation.charts``)."""
    return files("rose.evaluation").joinpath("page.css").read_text(encoding="utf-8")


def whole_page(title: str, body: str, *, refresh_s: int | None = None) -> str:
    """A page that fetches nothing from elsewhere.

    Args:
        title: Plain text.
        body: HTML, between ``<main>`` and its end.
        refresh_s: A browser loads it anew this often; None = never.
    """
    refresh = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{refresh}'
        f"<title>{escape(title)}</title><style>{style()}</style></head><body><main>{body}</main></body></html>\n"
    )


def make_folder(path: Path) -> None:
    """The folder that ``--out`` names, before anything is computed for it.

    Raises:
        ConfigError: Nothing can be written there.
    """
    fix = "a folder that you can write to"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}", field="--out", fix=fix) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written to", field="--out", fix=fix)


def write_whole(path: Path, text: str) -> None:
    """Replace ``path`` as a whole: who reads it meanwhile has the old one."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
