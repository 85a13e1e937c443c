"""Which role this process tree has, and the variables that say so; nothing else is read before ROSE is switched on."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence

ENV_ROLE = "ROSE_ROLE"
ENV_DIR = "ROSE_DIR"
ENV_ENGINE = "ROSE_ENGINE"
"""Set by an engine core for its own workers: which engine they belong to.  Not for operators."""
ENV_PEER_PAGES = "ROSE_PEER_PAGES"
"""Set by production's engine core for its own workers: pages that the rollout engine holds at their start.  Not for operators."""
ENV_ALLOW_UNMEASURED = "ROSE_ALLOW_UNMEASURED"
"""``1``: also what is written and not measured, or of a line of vLLM with which no engine has run yet."""
ENV_CORES = "ROSE_CORES"
"""Set by an API server for its engine cores, where there are several: how many.  Each has a directory below ``ROSE_DIR``.  Not for operators."""
ENV_DECISIONS = "ROSE_DECISIONS"
"""Where an engine writes its decision log; without it there is none."""
ENV_DECISIONS_NAME = "ROSE_DECISIONS_NAME"
"""In its files' names, so that engines of several devices can share that directory."""
ENV_DECISIONS_MAX_BYTES, ENV_DECISIONS_MAX_FILES = "ROSE_DECISIONS_MAX_BYTES", "ROSE_DECISIONS_MAX_FILES"
"""Of one file; of files that are kept."""
ROLES = ("serving", "rollout")
BACKEND = "rose"
"""In ``--weight-transfer-config '{"backend": "rose"}'``."""
ENV_WEIGHTS = "ROSE_WEIGHTS"
"""``1``: this process tree wants that back end, without a role.  For where vLLM is not started by a command line that says so: a
configuration file, Ray, a program of one's own."""
_ASKED = re.compile(r"--weight[-_]transfer[-_]config(\.backend)?[=\0]([^\0]*)")


def role() -> str | None:
    """The role of this process tree; None when ROSE is switched off."""
    return os.environ.get(ENV_ROLE) or None


def weights_asked(argv: Sequence[str] | None = None) -> bool:
    """Without a role: does the command line of this process tree, or its environment, ask for our weight transfer?

    Args:
        argv: None: this process's, which processes that vLLM spawns or forks have from their parent.
    """
    if os.environ.get(ENV_WEIGHTS) == "1":
        return True
    for part, value in _ASKED.findall("\0".join(sys.argv if argv is None else argv)):
        if part:
            backend = value
        else:
            try:
                table = json.loads(value)
            except ValueError:  # vLLM says so itself
                continue
            backend = table.get("backend") if isinstance(table, dict) else None
        if backend == BACKEND:
            return True
    return False
