"""How every ROSE program reads its configuration: one typed TOML file, checked whole before anything starts.

A program's settings are a :class:`Section` beside the program (``rose.scheduler.scheduler_config`` and so on).
:func:`load_config` reads the file, applies ``a.b=value`` overrides from the command line, and
either returns a frozen tree or raises one :class:`~rose.errors.ConfigError` that names the field.
An unknown key is an error that names the nearest valid one: a misspelt key must not be a default.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from rose.errors import ConfigError

REQUIRED = "required"
"""Type of a ``PydanticCustomError`` for a value that has no default; its message says how to choose one."""


class Section(BaseModel):
    """Base of every settings table: frozen, unknown keys refused, no silent conversion of text to numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, use_attribute_docstrings=True)


class FiniteSection(Section):
    """A table whose numbers are all finite: where infinity would be a bound that never holds, or a weight that makes everything NaN."""

    model_config = ConfigDict(allow_inf_nan=False)


S = TypeVar("S", bound=Section)


def load_config(cls: type[S], path: Path | str | None = None, overrides: Iterable[str] = ()) -> S:
    """Read ``path`` (TOML; None = defaults), apply ``key.path=toml-value`` overrides, validate.

    Raises:
        ConfigError: File missing or not TOML, unknown key, wrong type, value out of range.
    """
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = tomllib.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist", field="config") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", field="config") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not TOML: {error}", field="config") from error
    for override in overrides:
        apply_override(table, override)
    return validate(cls, table)


def validate(cls: type[S], table: Mapping[str, Any]) -> S:
    """Build ``cls`` from plain data; see :func:`load_config`."""
    try:
        return cls.model_validate(table)
    except ValidationError as error:
        # A misspelt key is also a missing one; the misspelling is what to fix.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        location = [str(part) for part in first["loc"]]
        name = ".".join(location)
        if first["type"] == "extra_forbidden":
            known = _fields_at(cls, location[:-1])
            near = difflib.get_close_matches(location[-1], known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known here: {', '.join(sorted(known))}"
            raise ConfigError("unknown key", field=name, fix=hint) from None
        if first["type"] in ("missing", REQUIRED):
            fix = first["msg"] if first["type"] == REQUIRED else None
            raise ConfigError("is required", field=name, fix=fix) from None
        given = repr(first.get("input"))
        given = given if len(given) <= 60 else given[:57] + "..."
        words = first["msg"].removeprefix("Value error, ")
        words = words[:1].lower() + words[1:]  # a pattern keeps its letters
        if isinstance(
            first.get("input"), Mapping
        ):  # of a table, whose values may be secret, the words say enough
            raise ConfigError(words, field=name or None) from None
        raise ConfigError(f"{words}, got {given}", field=name or None) from None


def apply_override(table: dict[str, Any], override: str) -> None:
    """Set ``key.path=toml-value`` in ``table``, in place.

    Raises:
        ConfigError: It is not of that form, or the path leads through a value.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"'{override}' is not of the form a.b=value", field="--set")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string; the type check follows
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"'{part}' is a value, not a table", field="--set")
    table[parts[-1]] = value


def _fields_at(cls: type[BaseModel], location: list[str]) -> list[str]:
    """Names valid at ``location``; walks nested sections, through Optional and containers."""
    for part in location:
        info = cls.model_fields.get(part)
        if info is None:
            continue  # a list index or a mapping key: the element type was entered already
        candidates = [info.annotation]
        found: type[BaseModel] | None = None
        while candidates:
            candidate = candidates.pop()
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                found = candidate
                break
            candidates.extend(get_args(candidate))
        if found is None:
            return []
        cls = found
    return list(cls.model_fields)
