"""Steps of an engine, for ``rose profile``; and the coefficients that came of it.

``ROSE_STEP_LOG=FILE``: append ``prefill_tokens num_decodes context_tokens seconds`` of every step, buffered, at most
:data:`MAX_STEPS` lines.  ``ROSE_STEP_PROFILE=FILE``: start from these coefficients instead of the built-in ones.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from rose.errors import ConfigError
from rose.policy.admission import StepModel

logger = logging.getLogger("vllm.rose")

ENV_LOG, ENV_PROFILE = "ROSE_STEP_LOG", "ROSE_STEP_PROFILE"
MAX_STEPS = 500_000
MAX_PROFILE_BYTES = 1 << 16
COEFFICIENTS = ("base_s", "prefill_token_s", "decode_s", "context_token_s")


class StepLog:
    """Open when the environment asks for it; else every call costs one comparison."""

    def __init__(self) -> None:
        path = os.environ.get(ENV_LOG)
        self._file: Any = open(path, "a", buffering=1 << 14) if path else None  # noqa: SIM115 - as long as the engine
        self._left = MAX_STEPS

    def write(self, prefill_tokens: int, num_decodes: int, context_tokens: int, seconds: float) -> None:
        if self._file is not None and self._left > 0:
            self._left -= 1
            self._file.write(f"{prefill_tokens} {num_decodes} {context_tokens} {seconds:.6f}\n")

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()


def first_model() -> StepModel:
    """The step model to start from.  A profile that cannot be used is said once and left."""
    path = os.environ.get(ENV_PROFILE)
    if not path:
        return StepModel()
    try:
        if Path(path).stat().st_size > MAX_PROFILE_BYTES:
            raise ConfigError("is too large", field=path)
        table = json.loads(Path(path).read_bytes())
        return StepModel(**{name: float(table[name]) for name in COEFFICIENTS})
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        logger.error("ROSE: %s=%s is not used: %s", ENV_PROFILE, path, error)
        return StepModel()
