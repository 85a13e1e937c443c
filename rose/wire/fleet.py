"""Bodies of the fleet's switch: ``rose fleet`` to rose-scheduler."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from rose.wire.types import ShortName

Groups = Annotated[tuple[ShortName, ...], Meta(max_length=64)]


class FleetOff(Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /fleet/off``."""

    groups: Groups = ()
    """Empty: all nodes."""


class FleetOn(Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /fleet/on``."""

    groups: Groups = ()
    """Empty: all nodes."""
    canary: Groups = ()
    """Released and watched before the others."""
    watch_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 60.0
    """For each stage."""
