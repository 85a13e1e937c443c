"""How long a weight update takes to reach an engine, and how many bytes it moves.

Dedicated engines get a broadcast inside the training cluster.  Engines elsewhere pull through a relay; the relay's uplink is
shared by all of them, and each rank of an engine takes time for the dense bytes of its own shard, which it encodes or applies
beside the other ranks: a host in tensor parallel takes its share of what one GPU would.
With ``prefetch`` pushing and pulling overlap and each receiver pulls once; without it they follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.sim.scenario import LinksSection
from rose.sim.systems import BYTES_PER_CHANGE, System
from rose.sim.tables import ModelSpec

BITS = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Seconds from the end of training to the new version in an engine; bytes through the relay, all receivers."""

    dedicated_s: float
    extra_s: float
    relay_bytes: float


def update_bytes(system: System, model: ModelSpec, changed_fraction: float) -> float:
    """One update, once."""
    if system.format == "full":
        return model.weight_bytes
    return model.num_params * changed_fraction * BYTES_PER_CHANGE[system.format]


def transfer(
    system: System,
    model: ModelSpec,
    links: LinksSection,
    num_extra: int,
    changed_fraction: float,
    *,
    num_ranks: int,
    full: bool,
) -> Transfer:
    """``num_ranks``: of a receiver, among which it divides the model.  ``full``: receivers that hold no earlier version (a new engine), whatever the format."""
    size = model.weight_bytes if full else update_bytes(system, model, changed_fraction)
    dedicated_s = model.weight_bytes * BITS / (links.cluster_gbps * 1e9)
    if not num_extra:
        return Transfer(dedicated_s=dedicated_s, extra_s=0.0, relay_bytes=0.0)
    host_s = model.weight_bytes / num_ranks / (links.host_path_gb_s * 1e9)
    push_s = size * BITS / (links.relay_gbps * 1e9)
    fan_s = num_extra * push_s
    pull_s = size * BITS / (links.host_gbps * 1e9)
    extra_s = max(host_s, push_s, fan_s, pull_s) if system.prefetch else host_s + push_s + max(fan_s, pull_s)
    return Transfer(dedicated_s=dedicated_s, extra_s=extra_s, relay_bytes=size * num_extra)
