"""Published recipes of policy-gradient training, by name: ``trainer.algorithm``.

Each sets what its paper's formula says, and nothing else; a setting that a job names itself stands.  With ``r`` the rewards of a
group, ``ratio_t`` = current / proximal of a token, and ``o_i`` the sampled tokens of a trajectory:

==============  =======================  =====================================================  ==============================
name            advantage                one token                                              weighs
==============  =======================  =====================================================  ==============================
``grpo``        (r - mean) / std         min(ratio A, clip(ratio, 0.8, 1.2) A) - 0.04 k3        1 / (G ``|o_i|``)
``dapo``        (r - mean) / std         the same, clip at 0.8 and 1.28, no KL                  1 / sum of all ``|o_i|``
``dr_grpo``     r - mean                 the same, clip at 0.8 and 1.2, no KL                   1 / (G L), L a constant
``rloo``        r - mean of the others   A log p, KL (0.03) taken off the reward                1 / G
``gspo``        (r - mean) / std         as ``grpo`` with the trajectory's ratio (the           1 / (G ``|o_i|``)
                                         geometric mean of its tokens'), 1 - 3e-4 to 1 + 4e-4
``cispo``       (r - mean) / std         clip(ratio, 0, 5) A log p, the clip without gradient   1 / sum of all ``|o_i|``
``lite_ppo``    (r - mean) / std of      min(ratio A, clip(ratio, 0.8, 1.2) A), no KL           1 / sum of all ``|o_i|``
                the whole batch
==============  =======================  =====================================================  ==============================

Shao et al. 2024 (DeepSeekMath); Yu et al. 2025 (DAPO: with dynamic sampling; overlong shaping and filtering need lengths, so they
are the job's to set); Liu et al. 2025 (Dr. GRPO: the formula has no divisor but G, its authors' code divides by the budget of
tokens, as here); Ahmadian et al. 2024 (RLOO); Zheng et al. 2025 (GSPO); MiniMax 2025 (CISPO: no lower bound; its upper one is not published, 5 is
what ScaleRL found robust); Liu et al. 2025 ("Tricks or Traps", Lite PPO).

What is added to any of them is set apart: the correction of what engine and trainer differ (:mod:`rose.train.loss`), and the step
guard (:mod:`rose.train.guard`).

Pure; loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo", "lite_ppo"]

Baseline = Literal["mean", "others"]
"""What a reward is compared with: the mean of its group, or of the others in it."""

AdvantageScale = Literal["group", "batch", "none"]
"""Whose standard deviation advantages are divided by."""

Objective = Literal["clip", "cispo", "reinforce"]

Ratio = Literal["token", "sequence"]

Aggregation = Literal["token", "sequence", "sum"]

KLKind = Literal["k2", "k3", "reward"]

Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a formula consists of; see :mod:`rose.train.loss` and :mod:`rose.train.advantages`."""

    baseline: Baseline = "mean"
    scale_advantages: AdvantageScale = "group"
    objective: Objective = "clip"
    ratio: Ratio = "token"
    aggregation: Aggregation = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_weight: float = 0.0
    kl_kind: KLKind = "k3"
    dynamic_sampling: bool = False


RECIPES: Mapping[Algorithm, Recipe] = {
    "grpo": Recipe(aggregation="sequence", kl_weight=0.04),
    "dapo": Recipe(clip_high=0.28, dynamic_sampling=True),
    "dr_grpo": Recipe(scale_advantages="none", aggregation="sum"),
    "rloo": Recipe(
        baseline="others",
        scale_advantages="none",
        objective="reinforce",
        aggregation="sum",
        kl_weight=0.03,
        kl_kind="reward",
    ),
    "gspo": Recipe(ratio="sequence", aggregation="sequence", clip_low=3e-4, clip_high=4e-4),
    "cispo": Recipe(objective="cispo", clip_low=1.0, clip_high=4.0),
    "lite_ppo": Recipe(scale_advantages="batch"),
}
