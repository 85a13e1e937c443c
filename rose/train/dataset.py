"""Tasks from JSONL files, one JSON object per line, or from folders that the ``datasets`` library saved; checked before anything starts.

Files are data from elsewhere: sizes are bounded, and an error names the line and the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rose.errors import ConfigError

MAX_LINE_BYTES = 1 << 20
MAX_TASKS = 1_000_000


def load_tasks(
    path: Path | str, fields: Mapping[str, type[Any] | tuple[type[Any], ...]]
) -> list[dict[str, Any]]:
    """Read the tasks of a JSONL file, or of a folder made by ``datasets.Dataset.save_to_disk``.

    Args:
        fields: Required fields and their types.  Of a folder no other column is read.

    Raises:
        ConfigError: As :func:`load_jsonl`; a folder that is no data set, or ``datasets`` is not installed.
    """
    if not Path(path).is_dir():
        return load_jsonl(path, fields)
    try:
        from datasets import Dataset, load_from_disk  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        fix = "pip install datasets, or give a JSONL file"
        raise ConfigError("datasets is not installed", field="env.settings.path", fix=fix) from error
    try:
        found: Any = load_from_disk(str(path))
    except Exception as error:  # the library raises whatever it likes
        raise ConfigError(f"{path} is no saved data set: {error}", field="env.settings.path") from error
    if not isinstance(found, Dataset):
        fix = f"name one of its splits: {', '.join(map(str, found))}"
        raise ConfigError(f"{path} holds several splits", field="env.settings.path", fix=fix)
    if not 0 < len(found) <= MAX_TASKS:
        raise ConfigError(f"{path} holds {len(found)} tasks, not 1 to {MAX_TASKS}", field="env.settings.path")
    rows: Any = found.select_columns([name for name in fields if name in found.column_names])
    return [_checked(dict(row), f"{path}:{number}", fields) for number, row in enumerate(rows, start=1)]


def load_jsonl(
    path: Path | str, fields: Mapping[str, type[Any] | tuple[type[Any], ...]]
) -> list[dict[str, Any]]:
    """Read the tasks of ``path``; blank lines are skipped.

    Args:
        fields: Required fields and their types.

    Raises:
        ConfigError: No file, no task, a line that is no JSON object, or a field that is missing or of another type.
    """
    tasks: list[dict[str, Any]] = []
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"line {number} is longer than {MAX_LINE_BYTES} bytes", field=str(path))
                if len(tasks) == MAX_TASKS:
                    raise ConfigError(f"holds more than {MAX_TASKS} tasks", field=str(path))
                tasks.append(_task(line, f"{path}:{number}", fields))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field="env.settings.path") from error
    if not tasks:
        raise ConfigError(f"{path} holds no task", field="env.settings.path")
    return tasks


def _task(line: bytes, where: str, fields: Mapping[str, type[Any] | tuple[type[Any], ...]]) -> dict[str, Any]:
    try:
        task = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", field=where) from error
    if not isinstance(task, dict):
        raise ConfigError("is not a JSON object", field=where)
    return _checked(task, where, fields)


def _checked(
    task: dict[str, Any], where: str, fields: Mapping[str, type[Any] | tuple[type[Any], ...]]
) -> dict[str, Any]:
    for name, kind in fields.items():
        if name not in task:
            raise ConfigError("is missing", field=f"{where}.{name}")
        if isinstance(task[name], bool) or not isinstance(task[name], kind):
            raise ConfigError(f"{task[name]!r:.40} has the wrong type", field=f"{where}.{name}")
    return task
