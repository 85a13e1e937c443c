"""Settings of a decision log."""

from __future__ import annotations

from pydantic import Field

from rose.config import Section


class DecisionConfig(Section):
    """The log that ``rose replay`` reads; see ``rose.decisions.log``."""

    max_bytes: int = Field(default=256 * 2**20, ge=0)
    """Of one file, beyond the state it starts with; 0 records nothing."""
    max_files: int = Field(default=4, gt=0)
