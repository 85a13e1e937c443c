"""Which environments there are by name, and how one is made from a job's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rose.errors import ConfigError
from rose.train.envs.base import Family
from rose.train.envs.delayed import DelayedFamily, EnvLatency
from rose.train.envs.frozenlake import FrozenLakeFamily, FrozenLakeParams
from rose.train.envs.frozenlake_plan import LakePlanFamily
from rose.train.envs.math_tools import MathFamily, MathParams
from rose.train.envs.own_code import import_own
from rose.train.envs.text_game import TextGameFamily, TextGameParams

FAMILIES: dict[str, Callable[..., Family]] = {
    "frozenlake": lambda **settings: FrozenLakeFamily(FrozenLakeParams(**settings)),
    "frozenlake_plan": lambda **settings: LakePlanFamily(FrozenLakeParams(**settings)),
    "math_tools": lambda **settings: MathFamily(MathParams(**settings)),
    "text_game": lambda **settings: TextGameFamily(TextGameParams(**settings)),
}
"""Kinds known by name."""


def make_family(kind: str, settings: Mapping[str, Any], latency: EnvLatency | None = None) -> Family:
    """Build a family from configuration.

    Args:
        kind: A name of :data:`FAMILIES`, or ``module:factory`` of your own, importable where the environments run.

    Raises:
        ConfigError: Unknown kind, or settings that the kind does not know.
    """
    factory: Any = FAMILIES.get(kind)
    if factory is None and ":" in kind:
        factory = import_own(kind, field="env.kind")
    if factory is None:
        known = [*sorted(FAMILIES), "module:factory"]
        raise ConfigError(f"unknown environment '{kind}'", field="env.kind", fix=f"one of {known}")
    try:
        family = factory(**settings)
    except TypeError as error:
        raise ConfigError(f"{error}", field="env.settings") from error
    return family if latency is None or latency.median_s == 0.0 else DelayedFamily(family, latency)
