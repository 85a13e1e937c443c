"""Which of a run's weights are written as a Hugging Face checkpoint: at its end (:func:`export_of`), or from its folder (:func:`export_from`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rose.errors import ConfigError, TrainError
from rose.train.build import trainer_params
from rose.train.train_config import TrainConfig

Which = Literal["last", "best"]


def export_of(trainer: Any, directory: Path, target: Path, which: Which) -> str:
    """Have ``trainer`` write ``target``: the weights that it has, or those of the best checkpoint, which it then has.

    Args:
        trainer: A :class:`rose.train.protocol.Trainer`.
        directory: Of the checkpoints.
        which: ``best``: of what the run has noted (:func:`rose.train.checkpoint.note_best`); where it has noted none, what the trainer has.

    Returns:
        In words, which they are.

    Raises:
        TrainError: The best checkpoint is damaged or of another model, or the disk refused.
    """
    from rose.train import checkpoint as checkpoints  # loads torch, which only the trainer's process needs

    best = checkpoints.best_of(directory) if which == "best" else None
    if best is not None:
        trainer.restore(checkpoints.load(directory / best.name))
    trainer.export(target)
    if best is not None:
        return f"{best.name}, the best (success {best.success:.2f})"
    none = ": no checkpoint was noted as the best" if which == "best" else ""
    return f"the weights of step {trainer.step_index}, the last{none}"


def export_from(config: TrainConfig, which: Which, target: Path) -> str:
    """Write ``target`` from a checkpoint of the job, whether it runs or not; starts and changes nothing else.

    This process holds the whole model: in fp32, and once more as it is computed.

    Args:
        which: ``last``: the newest checkpoint that can be read.

    Returns:
        In words, which it was.

    Raises:
        ConfigError: There is none.
        TrainError: It is damaged or of another model, or the disk refused.
    """
    from rose.train import checkpoint as checkpoints
    from rose.train.model import PolicyModel

    directory = config.output_dir / "checkpoints"
    best = checkpoints.best_of(directory) if which == "best" else None
    if best is not None:
        found, words = checkpoints.load(directory / best.name), f"the best (success {best.success:.2f})"
    elif which == "best":
        fix = "--export last takes the newest"
        raise ConfigError(f"{directory} has none that was noted as the best", field="--export", fix=fix)
    else:
        newest, passed_over = checkpoints.load_latest(directory)
        if newest is None and passed_over:
            raise TrainError(f"none can be read, the newest: {passed_over[0]}", field="output_dir")
        if newest is None:
            raise ConfigError(f"there is no checkpoint in {directory}", field="output_dir")
        found, words = (
            newest,
            "the last" if not passed_over else f"the last but {len(passed_over)} that are damaged",
        )
    params = trainer_params(config)
    policy = PolicyModel(
        config.model,
        policy_dtype=params.policy_dtype,
        compute_dtype=params.computes_in,
        device="cpu",
        lora=params.lora,
    )
    policy.restore(found)
    policy.export(target)
    return f"{checkpoints.name_of(found.step, found.attempt)}, {words}"
