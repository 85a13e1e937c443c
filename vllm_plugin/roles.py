"""Which role this process tree has, and the variables that say so; nothing else is read before ROSE is switched on."""

from __future__ import annotations

import os

ENV_ROLE = "ROSE_ROLE"
ENV_DIR = "ROSE_DIR"
ENV_ENGINE = "ROSE_ENGINE"
"""Set by an engine core for its own workers: which engine they belong to.  Not for operators."""
ENV_CORES = "ROSE_CORES"
"""Set by an API server for its engine cores, where there are several: how many.  Each has a directory below ``ROSE_DIR``.  Not for operators."""
ENV_DECISIONS = "ROSE_DECISIONS"
"""Where an engine writes its decision log; without it there is none."""
ENV_DECISIONS_NAME = "ROSE_DECISIONS_NAME"
"""In its files' names, so that engines of several devices can share that directory."""
ENV_DECISIONS_MAX_BYTES, ENV_DECISIONS_MAX_FILES = "ROSE_DECISIONS_MAX_BYTES", "ROSE_DECISIONS_MAX_FILES"
"""Of one file; of files that are kept."""
ROLES = ("serving", "rollout")


def role() -> str | None:
    """The role of this process tree; None when ROSE is switched off."""
    return os.environ.get(ENV_ROLE) or None
