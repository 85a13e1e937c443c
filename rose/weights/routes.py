"""Which manifests lead a reader from what it holds to a run's head: a chain of deltas, or an anchor and the rest.

Decides only; the subscriber fetches and applies.  The chain is taken while it starts at the version held and costs
at most ``chain_fraction`` of a full copy up to the newest anchor; else the newest anchor at or before the head, and
the deltas after it.  A delta's base has its own attempt (the manifest's rule), so a reader of an older attempt can
only be led to the new attempt's anchor: lineages never mix.
"""

from __future__ import annotations

from collections.abc import Callable

from rose.errors import NotFound, SectionCorrupt
from rose.lineage import WeightVersion
from rose.weights.manifest import Kind, Manifest

MAX_CHAIN = 10_000
Read = Callable[[WeightVersion, Kind], Manifest]


def route(
    held: WeightVersion | None, newest: Manifest, read: Read, *, chain_fraction: float = 0.8
) -> list[Manifest]:
    """Manifests to apply, in order, ending with ``newest``; the first may be an anchor.

    Args:
        held: What the reader has; None for nothing.
        newest: The head's manifest.
        read: Gives the manifest of a version; raises NotFound when it has been deleted.

    Raises:
        NotFound: Not even the anchor's chain is complete.
        SectionCorrupt: Manifests contradict each other.
    """
    anchor = WeightVersion(*newest.anchor)
    after_anchor: list[Manifest] = []  # newest first
    step = newest
    while step.identity > anchor:
        after_anchor.append(step)
        base = _base(step, len(after_anchor))
        if base == held:
            return after_anchor[::-1]
        if base == anchor:
            break
        step = read(base, _kind(step))
        _expect_step(step, base)
    if newest.kind != "anchor" and held is not None and held.attempt == anchor.attempt and held < anchor:
        chain = _chain_below(held, anchor, after_anchor, read, chain_fraction * newest.bytes_dense)
        if chain is not None:
            return chain[::-1]
    whole = newest if newest.kind == "anchor" else read(anchor, "anchor")
    _expect_step(whole, anchor)
    return [whole, *after_anchor[::-1]]


def _chain_below(
    held: WeightVersion, anchor: WeightVersion, after_anchor: list[Manifest], read: Read, limit_bytes: float
) -> list[Manifest] | None:
    """The chain from ``held`` past the anchor, newest first; None when the anchor is the better way."""
    chain = list(after_anchor)
    spent_bytes = 0
    step = after_anchor[-1] if after_anchor else None
    kind: Kind = _kind(step) if step is not None else "delta"
    at = anchor
    while kind == "delta":
        try:
            step = read(at, "delta")
        except (NotFound, SectionCorrupt):
            return None
        _expect_step(step, at)
        chain.append(step)
        spent_bytes += step.bytes_sent
        at, kind = _base(step, len(chain)), _kind(step)
        if spent_bytes > limit_bytes or at < held:
            return None
        if at == held:
            return chain
    return None


def _base(step: Manifest, length: int) -> WeightVersion:
    if step.base is None or length > MAX_CHAIN:
        raise SectionCorrupt(
            f"chain does not reach its anchor {step.anchor}", field=f"manifest {step.identity}"
        )
    return step.base.identity


def _kind(step: Manifest) -> Kind:
    return "delta" if step.base is None else step.base.kind


def _expect_step(step: Manifest, identity: WeightVersion) -> None:
    if step.identity != identity:
        raise SectionCorrupt(f"is {step.identity}", field=f"manifest {identity}")
