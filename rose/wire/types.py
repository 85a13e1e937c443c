"""Kinds of values in bodies, with their bounds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rose import lineage

MAX_COUNT = 2**53
"""Survives a JSON number in any client."""
_PRINTABLE = r"^(?![\s\S]*[\x00-\x1f\x7f])"

Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=_PRINTABLE)]
ShortName = Annotated[str, Meta(min_length=1, max_length=128, pattern=_PRINTABLE)]
LongName = Annotated[str, Meta(min_length=1, max_length=512, pattern=_PRINTABLE)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Meta(ge=1, le=65_536)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
SomeSeconds = Annotated[float, Meta(ge=1e-6, le=1e9)]
Slack = Annotated[float, Meta(ge=-1e9, le=1e9)]
VersionText = Annotated[str, Meta(pattern=f"^{lineage.VERSION_PATTERN}$", max_length=40)]
"""``attempt.version``."""
RunName = Annotated[str, Meta(min_length=1, max_length=64, pattern=f"^{lineage.RUN_PATTERN}$")]
"""Of whose weights: :mod:`rose.lineage`."""
VersionPart = Annotated[int, Meta(ge=0, le=lineage.LIMIT - 1)]
