"""From a job's settings to its trainer, its publisher and its store.  Torch is loaded when the first is made, and not before."""

from __future__ import annotations

from glob import escape
from typing import TYPE_CHECKING, Any

from rose.auth import Tokens
from rose.errors import ConfigError
from rose.signatures import PublicKeys, SigningKey
from rose.train.model_folder import WIRE_TYPE, kept_names
from rose.train.train_config import TrainConfig

if TYPE_CHECKING:
    from rose.train.trainer import TrainerParams
    from rose.weights.store import ObjectStore


def trainer_params(config: TrainConfig) -> TrainerParams:
    """How the job's steps are taken."""
    from rose.train.adapter import LoraParams
    from rose.train.advantages import OverlongParams
    from rose.train.guard import GuardParams
    from rose.train.loss import LossParams
    from rose.train.trainer import TrainerParams

    settings, recipe = config.trainer, config.trainer.recipe
    guard = settings.guard
    return TrainerParams(
        learning_rate=settings.learning_rate,
        num_epochs=settings.num_epochs,
        minibatch_sequences=settings.minibatch_sequences,
        count_idle=settings.count_idle,
        max_part_tokens=settings.max_part_tokens,
        packing=settings.packing,
        max_grad_norm=settings.max_grad_norm,
        weight_decay=settings.weight_decay,
        adam_beta2=settings.adam_beta2,
        adam_epsilon=settings.adam_epsilon,
        baseline=recipe.baseline,
        scale_advantages=recipe.scale_advantages,
        loss=LossParams(
            objective=recipe.objective,
            ratio=recipe.ratio,
            clip_low=recipe.clip_low,
            clip_high=recipe.clip_high,
            dual_clip=guard.dual_clip or None,
            correction=settings.correction,
            truncation=settings.truncation,
            truncation_low=settings.truncation_low,
            entropy_weight=settings.entropy_weight,
            aggregation=recipe.aggregation,
            sum_tokens=config.sum_tokens,
            kl_weight=recipe.kl_weight,
            kl_kind=recipe.kl_kind,
        ),
        overlong=OverlongParams(
            max_tokens=settings.overlong.max_tokens,
            buffer_tokens=settings.overlong.buffer_tokens,
            weight=settings.overlong.weight,
            filtering=settings.overlong.filtering,
        ),
        guard=GuardParams(
            kl_target=guard.kl_target,
            adapt_rate=guard.adapt_rate,
            min_informative=config.min_informative_groups,
            proportional=guard.proportional,
            grad_quantile=guard.grad_quantile,
            grad_window=guard.grad_window,
        ),
        policy_dtype=settings.policy_dtype,
        compute_dtype=settings.compute_dtype,
        activation_checkpointing=settings.activation_checkpointing,
        device=settings.device,
        offload=settings.offload,
        lora=(
            LoraParams(
                rank=settings.lora.rank,
                alpha=settings.lora.alpha or 2.0 * settings.lora.rank,
                targets=settings.lora.targets,
                seed=config.seed,
            )
            if settings.lora.rank
            else None
        ),
        streamed=config.streamed,
        seed=config.seed,
    )


def torch_trainer(config: TrainConfig) -> Any:
    """The trainer that ``rose train`` uses unless it is given another."""
    import torch

    from rose.train.trainer import TorchTrainer

    torch.set_num_threads(config.trainer.num_threads)
    return TorchTrainer(config.model, trainer_params(config))


def make_publisher(config: TrainConfig, tokens: Tokens, module: Any, attempt: int) -> Any:
    """A publisher of ``module`` into the configured store; on several ranks, of this rank's part of it.  Rank 0 signs."""
    from rose.weights.params import WeightsParams
    from rose.weights.publisher import WeightPublisher
    from rose.weights.ranks import TorchRanks

    # What the engines hold: the same as the trainer computes with.
    dtype = config.trainer.policy_dtype
    keep = tuple(escape(name) for name in kept_names(config.model, dtype))
    params = WeightsParams(cast=WIRE_TYPE[dtype], keep=keep)
    ranks = TorchRanks() if config.trainer.num_ranks > 1 else None
    store = weight_store(config, tokens, signs=ranks is None or ranks.rank == 0)
    return WeightPublisher(module, store, config.run_id, attempt, params, ranks=ranks)


def weight_store(config: TrainConfig, tokens: Tokens, *, signs: bool = True) -> ObjectStore:
    """Where the job's weights go, signed unless the job says otherwise.

    Args:
        signs: False: of a rank that signs nothing, and has no key.

    Raises:
        ConfigError: There is no key to sign with, or no place.
    """
    from rose.weights.stores import trainer_store

    settings = config.weights
    signs = signs and settings.signed
    if signs:
        signing_key(tokens)
    place = settings.relay_url or settings.directory
    if place is None:
        raise ConfigError("needs relay_url or directory", field="weights")
    return trainer_store(str(place), tokens, signs=signs)


def signing_key(tokens: Tokens) -> SigningKey:
    """The key that nodes pin.

    Raises:
        ConfigError: There is none, or it may sign anchors only, or it is not that of the token file's ``public_key``.
    """
    if not tokens.publish_key:
        raise ConfigError(
            "there is no key to sign weights with",
            field="weights.publish_key",
            fix="rose tokens --upgrade FILE makes one; for a store that nobody else can write to: weights.signed = false",
        )
    key = SigningKey.parse(tokens.publish_key)
    if not key.may_all:
        raise ConfigError("may sign anchors only", field="weights.publish_key", fix="use the trainer's own")
    if (
        tokens.public_key
        and not PublicKeys.parse(key.public).keys <= PublicKeys.parse(tokens.public_key).keys
    ):
        raise ConfigError(
            f"belongs to {key.public}, the token file names another",
            field="weights.publish_key",
            fix="nodes would refuse what it signs: correct public_key, here and in their token files",
        )
    return key
