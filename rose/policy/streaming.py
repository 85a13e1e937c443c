"""What of a training step may begin before its batch is complete, so that its update is the one that it would be without.

``log_probs``: those of the policy that the step begins with, and of the reference.  They are of each sequence by itself and of weights that nobody
changes before the step, so they may always begin.

``gradients``: of a step with one update they are a sum over groups, times one number that is known at the end (the divisor of the loss).  That holds while
an advantage is made of its own group's rewards alone.  It does not hold where later minibatches start from weights that earlier ones have moved, or where
a minibatch is drawn from the whole batch: there this is refused.

Which groups are in the batch is the scheduler's rule in either case (first ready first), asked for one group after the other.  Under ``wait`` that rule
looks at what the whole batch would leave behind, so it cannot be asked in parts.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Streamed = Literal["off", "log_probs", "gradients"]
StreamedSetting = Literal["auto", "off", "log_probs", "gradients"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """What the answer depends on, under the names of a job's settings."""

    num_epochs: int
    minibatch_sequences: int
    batch_sequences: int
    """Of a whole batch, when no conversation forks."""
    scale_advantages: str
    on_stale: str | None
    lends_device: bool = False
    """Whether the trainer's device is an engine's during rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingRefusal:
    field: str
    reason: str
    fix: str


def chosen(setting: StreamedSetting, step: StepShape, *, is_synchronous: bool) -> Streamed:
    """What a job has: its own choice, or of ``auto`` gradients, where they are exact and something waits for them.

    A synchronous step waits for its slowest trajectory and then for its trainer: 1.26 times as long as with gradients that began meanwhile.  An asynchronous
    trainer has other groups to compute on, and gained nothing (``benchmarks/training/streamed.py``).  Log-probs alone were not measured.
    """
    if setting != "auto":
        return setting
    return "off" if not is_synchronous or refusal_of("gradients", step) else "gradients"


def refusal_of(streamed: Streamed, step: StepShape) -> StreamingRefusal | None:
    """Why a job may not have it, the first reason; None where it may."""
    return next(iter(refusals_of(streamed, step)), None)


def refusals_of(streamed: Streamed, step: StepShape) -> list[StreamingRefusal]:
    """Every reason why a job may not have it."""
    log_probs = 'use trainer.stream_groups = "log_probs", which is exact with any recipe'
    found: list[StreamingRefusal] = []
    if streamed == "off":
        return found
    if step.on_stale not in ("cancel", "mask"):
        found.append(
            StreamingRefusal(
                field="rollout.on_stale",
                reason="trainer.stream_groups leases group by group, which only the rules 'cancel' and 'mask' allow",
                fix='set rollout.on_stale = "mask" or "cancel"',
            )
        )
    if step.lends_device:
        found.append(
            StreamingRefusal(
                field="lend.node_dir",
                reason="trainer.stream_groups computes during rollouts, on the device that is lent then",
                fix="leave one of the two out",
            )
        )
    if streamed == "log_probs":
        return found
    if step.num_epochs > 1:
        found.append(
            StreamingRefusal(
                field="trainer.num_epochs",
                reason="later epochs start from weights that the first has moved, so gradients cannot begin early",
                fix=f"set it to 1, or {log_probs}",
            )
        )
    if step.minibatch_sequences < step.batch_sequences:
        found.append(
            StreamingRefusal(
                field="trainer.minibatch_sequences",
                reason=f"a batch of {step.batch_sequences} sequences is several minibatches, drawn from all of it",
                fix=f"set it to {step.batch_sequences} or more, or {log_probs}",
            )
        )
    if step.scale_advantages == "batch":
        found.append(
            StreamingRefusal(
                field="trainer.scale_advantages",
                reason="advantages over the deviation of the whole batch are not known before its end",
                fix=log_probs,
            )
        )
    return found
