"""Settings of ``[trainer]`` for jobs of a few minutes on a policy of a few hundred thousand weights that begins with random ones.

No recipe for a real model: a rate of 1e-3, and no guard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNGUARDED: Mapping[str, Any] = {
    "kl_target": 0.0,
    "starved": "train",
    "proportional": False,
    "grad_quantile": 0.0,
    "dual_clip": 0.0,
}

TOY_RECIPE: Mapping[str, Any] = {
    "learning_rate": 1e-3,
    "num_epochs": 2,
    "minibatch_sequences": 16,
    "count_idle": False,
    "aggregation": "token",
    "clip_high": 0.28,
    "kl_weight": 0.0,
    "entropy_weight": 0.01,
    "guard": UNGUARDED,
}
