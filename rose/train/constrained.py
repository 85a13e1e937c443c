"""Which turns were drawn from another distribution than the one that the trainer computes.

That one is the model's, at the turn's temperature and over its ``allowed_token_ids``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rose.errors import TrainError
from rose.wire.constraints import constraints_of

Constrained = Literal["leave-out", "train"]
FIX = (
    'ask without them, name them in the `sampling` that trajectories begin with, or set trainer.constrained = "train"; start engines with '
    "--generation-config vllm if it is the model's folder that names them, and with --logprobs-mode processed_logprobs"
)
_REPRODUCED = frozenset(("allowed_token_ids",))


def constraints_on(
    trajectory: Mapping[str, Any], turn: Mapping[str, Any], where: str = "turn"
) -> tuple[str, ...]:
    """What ``turn`` was drawn under that the trainer does not reproduce, in order, and log-probs that are of another distribution.

    What its trajectory was begun with is not among it: that is the job's own choice, and the same for all turns.

    Raises:
        TrainError: The trace makes no sense.
    """
    sampling, named, segments = (turn.get(name) for name in ("sampling", "constraints", "segments"))
    sampling, named, segments = sampling or {}, named or (), segments or ()
    if not isinstance(sampling, Mapping):
        raise TrainError("is not an object", field=f"{where}.sampling")
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        raise TrainError("is not a list of names", field=f"{where}.constraints")
    if not isinstance(segments, list | tuple) or not all(isinstance(one, Mapping) for one in segments):
        raise TrainError("is not a list of objects", field=f"{where}.segments")
    # Journals of before these were named have most of them among the sampling settings.
    found = {*named, *constraints_of(sampling)} - _REPRODUCED - own_constraints(trajectory)
    modes = {str(one["logprobs_mode"]) for one in segments if one.get("logprobs_mode")}
    if sampling.get("temperature") in (None, 1) and not sampling.get("allowed_token_ids"):
        modes.discard("raw_logprobs")
    return tuple(sorted(found | modes - {"processed_logprobs"}))


def own_constraints(trajectory: Mapping[str, Any]) -> set[str]:
    """What the trainer does not reproduce of that which ``trajectory`` was begun with."""
    sampling = trajectory.get("sampling")
    return {*constraints_of(sampling)} - _REPRODUCED if isinstance(sampling, Mapping) else set()
