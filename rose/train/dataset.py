"""Tasks from JSONL files: one JSON object per line, checked before anything starts.

Files are data from elsewhere: sizes are bounded, and an error names the line and the field.

Callers: environment families (``settings.path``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rose.errors import ConfigError

MAX_LINE_BYTES = 1 << 20
MAX_TASKS = 1_000_000


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
    for name, kind in fields.items():
        if name not in task:
            raise ConfigError("is missing", field=f"{where}.{name}")
        if isinstance(task[name], bool) or not isinstance(task[name], kind):
            raise ConfigError(f"{task[name]!r:.40} has the wrong type", field=f"{where}.{name}")
    return task
