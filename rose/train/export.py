"""Which of a run's weights are written as a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

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
        trainer.restore(checkpoints.load(directory / best[0]))
    trainer.export(target)
    if best is not None:
        return f"{best[0]}, the best (success {best[1]:.2f})"
    none = ": no checkpoint was noted as the best" if which == "best" else ""
    return f"the weights of step {trainer.step_index}, the last{none}"
