"""Environments and rewards of a job's own, ``module:name`` in its settings."""

from __future__ import annotations

import importlib
from typing import Any

from rose.errors import ConfigError


def import_own(kind: str, *, field: str) -> Any:
    """What ``module:name`` names.

    Args:
        field: Whose value it is.

    Raises:
        ConfigError: It cannot be imported.
    """
    module, _, name = kind.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        fix = None
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            # A console script's path has neither the working directory nor that of job.toml.
            fix = f"PYTHONPATH=FOLDER rose train ..., on every node; FOLDER is where {error.name} lies"
        raise ConfigError(f"{kind} cannot be imported: {error}", field=field, fix=fix) from error
