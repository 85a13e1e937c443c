"""Settings of a job's ``[trainer]``: the recipe, how it is stepped, the guard, and the machine it runs on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rose.config import REQUIRED, FiniteSection
from rose.policy.streaming import StreamedSetting
from rose.train.constrained import Constrained
from rose.train.recipes import (
    RECIPES,
    AdvantageScale,
    Aggregation,
    Algorithm,
    Baseline,
    Correction,
    KLKind,
    Objective,
    Ratio,
    Recipe,
)

USUAL_RATES = "usual are 1e-6 for a model of 1B parameters and more, 1e-5 for a smaller one, 1e-3 for a toy of the demo's size"


def _chosen(rate: float) -> float:
    if isinstance(rate, float) and math.isnan(rate):
        raise PydanticCustomError(REQUIRED, USUAL_RATES)
    return rate


class DynamicSampling(FiniteSection):
    """DAPO: groups of equal rewards are sampled anew, as whole groups."""

    enabled: bool | None = None
    """None = as the recipe has it."""
    max_rounds: int = Field(default=8, ge=1, le=1000)
    """Leases of one step; then it trains on the groups it has."""


class Overlong(FiniteSection):
    """DAPO: a trajectory near the limit of its length loses reward, or is left out where it was cut."""

    max_tokens: int = Field(default=0, ge=0)
    """Sampled tokens from which the whole weight is lost; 0 = off."""
    buffer_tokens: int = Field(default=1, ge=1)
    weight: float = Field(default=1.0, ge=0)
    filtering: bool = False
    """Leave trajectories that were cut at a limit (their turns, their context, or the last turn's tokens) out of the update.  Not for answers of a fixed
    length, which always end at one."""


class GuardSettings(FiniteSection):
    """What keeps a step from doing harm.  On by default; each part is switched off by itself, and what it does is counted in the step's metrics."""

    kl_target: float = Field(default=0.05, ge=0)
    """How far a step may move the policy from its weights at the start of the step, in nats per token (KL divergence); each update gets an
    equal share.  It is measured after each update, on sequences of all groups, and an update that goes too far is halved until it does
    not.  0 = off."""
    adapt_rate: bool = True
    """Take smaller updates after one that went too far, and larger ones again, up to the job's rate, where there is room.  Not without ``kl_target``."""
    starved: Literal["wait", "skip", "train"] = "wait"
    """What becomes of a batch in which too few groups have unequal rewards: ``wait`` samples more groups, for ``max_rounds`` leases at most, and then
    changes nothing; ``skip`` changes nothing at once; ``train`` switches this off."""
    min_informative: float = Field(default=0.2, gt=0, le=1)
    """Share of the groups that have to have unequal rewards."""
    proportional: bool = True
    """A step moves the policy less far by the share of its groups that succeed as a whole (equal rewards, above the batch's mean): they are not in the loss,
    and can only lose.  The rate is multiplied by what is left, and ``kl_target`` by its square."""
    max_rounds: int = Field(default=4, ge=1, le=1000)
    grad_quantile: float = Field(default=0.9, ge=0, le=1)
    """Gradients are clipped at this quantile of the norms of the last ``grad_window`` updates, once a quarter of as many are known; ``max_grad_norm`` holds as
    well.  0 = off."""
    grad_window: int = Field(default=64, ge=4, le=65536)
    dual_clip: float = Field(default=3.0, ge=0)
    """Bound of the loss of a token of negative advantage whose probability has grown, in multiples of its advantage; above 1.  0 = off."""
    keep_best: bool = True
    """Keep the checkpoint with the best success beside the newest ones: on held-out tasks where they are played on the way (``eval.every_steps``),
    else sampled, over five steps.  The two are not compared with each other."""

    @model_validator(mode="after")
    def _dual_clip(self) -> Self:
        if 0.0 < self.dual_clip <= 1.0:
            raise ValueError("dual_clip needs to be above 1, or 0 for none")
        return self


class LoraSettings(FiniteSection):
    """Train adapters of small rank (PEFT), and leave the model as it is.  Versions are published merged: engines need nothing for it."""

    rank: int = Field(default=0, ge=0, le=1024)
    """0 = train the whole model."""
    alpha: float | None = Field(default=None, gt=0)
    """Of the adapter's factor, ``alpha / rank``.  None = twice the rank."""
    targets: tuple[str, ...] = ()
    """Last parts of the names of linear layers (``q_proj``).  Empty = all but the output layer."""

    @model_validator(mode="after")
    def _of_adapters(self) -> Self:
        if not self.rank and "rank" not in self.model_fields_set:
            for name in sorted(self.model_fields_set):
                raise ValueError(f"{name} needs rank above 0, or rank = 0 said outright")
        return self


class TrainerSettings(FiniteSection):
    algorithm: Algorithm = "grpo"
    """A published recipe, ``rose.train.recipes``: it sets what is not set here."""
    learning_rate: Annotated[float, BeforeValidator(_chosen)] = Field(
        default=math.nan, validate_default=True, gt=0, le=1
    )
    """After the warm-up, before the decay.  Has no default: what suits one model ruins another."""
    warmup_steps: int = Field(default=0, ge=0)
    """The first steps, over which the rate rises in equal parts."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls towards 0 between warm-up and fine-tuning."""
    fine_tuning_steps: int = Field(default=0, ge=0)
    """The last steps are as in real fine-tuning, one update at a small rate: most bf16 weights do not change."""
    fine_tuning_learning_rate: float | None = Field(default=None, gt=0, le=1)
    num_epochs: int = Field(default=1, ge=1, le=64)
    minibatch_sequences: int = Field(default=64, ge=1)
    count_idle: bool = True
    """Whether sequences of advantage 0 take their places in minibatches and in the divisor of the loss, as the formulas have it.  Else
    they are left out of both, and the rest weighs more."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta2: float = Field(default=0.95, gt=0, lt=1)
    """How long AdamW remembers the size of gradients: 0.95 about 20 updates, 0.999 about 1,000."""
    adam_epsilon: float = Field(default=1e-8, gt=0, le=1)
    """AdamW's divisor never falls below it.  Above the size of most gradients (1e-2, say) a step is as large as its gradient instead of the same for
    every weight: few bf16 weights change, and updates are sparse."""

    baseline: Baseline | None = None
    """What a reward is compared with: the mean of its group, or of the others in it.  None = as the recipe has it, and so on."""
    scale_advantages: AdvantageScale | None = None
    """Whose standard deviation advantages are divided by."""
    objective: Objective | None = None
    ratio: Ratio | None = None
    aggregation: Aggregation | None = None
    """What weighs the same in the loss: every token, every sequence, or every token over the constant ``sum_tokens``."""
    sum_tokens: int | None = Field(default=None, ge=1)
    """None = 1 for ``rloo``, for others the most tokens that a turn may sample."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    clip_high: float | None = Field(default=None, gt=0)
    kl_weight: float | None = Field(default=None, ge=0)
    """Of the divergence from the model that training began with; above 0 it is held in memory beside the policy, unless adapters alone are
    trained."""
    kl_kind: KLKind | None = None
    entropy_weight: float = Field(default=0.0, ge=0, le=1)
    correction: Correction = "token_truncate"
    """What is done about the difference of engine and trainer: the weight proximal/behaviour of each token, or of its sequence as a whole, is truncated at
    ``truncation``, or masked where it is out of bounds."""
    truncation: float = Field(default=2.0, ge=1)
    truncation_low: float = Field(default=0.0, ge=0, lt=1)
    """Lower bound, of masks alone."""
    constrained: Constrained = "leave-out"
    """What becomes of turns that an agent had drawn under a grammar, top_p or the like (``rose.train.constrained``): left out of the loss, as context of
    the turns after them, or trained on like others."""
    overlong: Overlong = Overlong()
    dynamic_sampling: DynamicSampling = DynamicSampling()
    guard: GuardSettings = GuardSettings()
    lora: LoraSettings = LoraSettings()

    policy_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """In which the engines hold the weights; the fp32 masters are rounded to it."""
    compute_dtype: Literal["bfloat16", "float32"] | None = None
    """In which products are computed.  None = as suits the device: bfloat16 on GPUs, as engines there do, float32 on CPUs, where it is faster."""
    activation_checkpointing: bool = False
    max_part_tokens: int = Field(default=16_384, ge=1)
    """Tokens of one forward pass; gradients of a minibatch add up over as many as it takes."""
    packing: bool = False
    """Lay the sequences of a part one behind the other in one row, ids and positions ``[1, sum of their lengths]``, instead of padding them to the longest,
    ``[sequences, longest]``: no pads, the same minibatches, and the same loss but for rounding.  With PyTorch's attention (SDPA) the row's dense mask costs more than
    pads do: time and memory of a layer grow with the square of the row, so that rows of several sequences end at 2,048 tokens.  With flash attention
    (``attn_implementation`` in the model's ``config.json``) there is no mask; that has not run on a GPU yet.  Only for models that were shown to compute a
    packed sequence as a padded one (``rose.train.packing``); others are refused."""
    num_ranks: int = Field(default=1, ge=1, le=4096)
    """Processes that share the model (FSDP2)."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What each rank computes on: ``cuda`` asks Ray for a GPU for each.  Ranks speak through gloo, and through NCCL on GPUs."""
    offload: bool = False
    """Keep fp32 masters and AdamW's moments in host memory, where GPUs compute."""
    stream_groups: StreamedSetting = "auto"
    """Compute on the groups that are complete while the others are still played; the step's update is the same.  ``log_probs``: those of the step's first
    weights, with any recipe.  ``gradients``: these too, where a step is one update and an advantage its group's (``rose.policy.streaming``).
    ``auto``: gradients in a synchronous run where they are exact, else off."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """Threads of torch, per rank."""
    keep_checkpoints: int = Field(default=3, ge=1)
    checkpoint_every: int = Field(default=1, ge=1, le=32)
    """Steps.  What was trained since the last checkpoint is trained again after a death; ``scheduler.lease_ttl_s`` has to be longer than all of them take."""
    background_checkpoints: bool = False
    """Train on while a checkpoint is written; its tensors are copied to host memory first.  It counts when it is durable, so that leases wait for
    twice ``checkpoint_every`` steps at most.  The last one of a run is waited for."""

    @model_validator(mode="after")
    def _fine_tuning_has_a_rate(self) -> Self:
        if self.fine_tuning_steps and self.fine_tuning_learning_rate is None:
            raise ValueError("fine_tuning_steps needs fine_tuning_learning_rate")
        if self.fine_tuning_learning_rate is not None and "fine_tuning_steps" not in self.model_fields_set:
            raise ValueError(
                "fine_tuning_learning_rate needs fine_tuning_steps, 0 where there are to be none"
            )
        return self

    @property
    def recipe(self) -> Recipe:
        """The published one, with what the job sets itself in its place."""
        names = set(Recipe.__dataclass_fields__) - {"dynamic_sampling"}
        own = {name: value for name in sorted(names) if (value := getattr(self, name)) is not None}
        return replace(RECIPES[self.algorithm], **own)
