"""May this trainer publish this version, by what is published already?  The refusals of a publisher, each with its fix.

Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rose.errors import VersionRefused
from rose.lineage import WeightVersion
from rose.weights.layout import HeldBoxes
from rose.weights.manifest import Head, Manifest
from rose.weights.spec import TensorSpec, differences

_log = logging.getLogger(__name__)
ANOTHER_TRAINER = "another trainer writes to this run; give each its own run_id"


def admit(identity: WeightVersion, head: Head | None, published: WeightVersion | None) -> None:
    """Raises VersionRefused for a version that would contradict what is published.

    Args:
        head: Where the run is.
        published: What this publisher published last.
    """
    if published is not None:
        if identity < published:
            raise VersionRefused(f"{published} is published, {identity} goes back", field="version")
        if head is not None and head.identity < published:  # no trainer moves a head back
            _log.warning(
                "the store went back from %s to %s; the next version is whole", published, head.identity
            )
        elif head is not None and head.identity != published:
            raise VersionRefused(
                f"head is at {head.identity}, this trainer published {published}",
                field="run_id",
                fix=ANOTHER_TRAINER,
            )
    elif head is not None:
        if head.attempt > identity.attempt:
            raise VersionRefused(
                f"attempt {head.attempt} has begun, this is attempt {identity.attempt}", field="attempt"
            )
        if head.attempt == identity.attempt and head.identity != identity:
            raise VersionRefused(
                f"attempt {identity.attempt} is in use, at {head.identity}",
                field="attempt",
                fix=f"a restarted trainer takes attempt {identity.attempt + 1}",
            )


def same_model(before: Sequence[HeldBoxes], now: Sequence[HeldBoxes]) -> None:
    """Raises VersionRefused where a rank holds other pieces than at its first publish."""
    if before == now:
        return
    unlike = differences(_specs(before), _specs(now)) or _divided(before, now)
    raise VersionRefused(
        f"tensors changed their names, types, shapes or division since the first publish: {unlike}",
        field="model",
        fix="another model is another run_id; a division or a type that changes needs the next attempt",
    )


def same_weights(existing: Manifest, record: Manifest) -> None:
    """Raises VersionRefused where a manifest that is in the way, and that no head names, says something else than ours."""
    same_base = existing.base == record.base or existing.kind != record.kind
    if existing.model != record.model or existing.state() != record.state() or not same_base:
        raise VersionRefused(
            f"{record.identity} was begun with other weights and did not become the head: its number is spent",
            field="version",
            fix="take the next version",
        )


def _specs(claims: Sequence[HeldBoxes]) -> dict[str, TensorSpec]:
    return {claim.name: TensorSpec(claim.name, claim.dtype, claim.shape) for claim in claims}


def _divided(before: Sequence[HeldBoxes], now: Sequence[HeldBoxes]) -> str:
    moved = sorted({claim.name for claim in set(before) ^ set(now)})
    return f"{', '.join(moved[:3]) or 'their order'} is divided in another way"
