"""One optimiser step of RL on recorded trajectories.

:class:`Trainer` is what the loop needs; bring your own by satisfying it.  :class:`TorchTrainer` is ours: a
Hugging Face causal language model (``rose.train.model``) in one process, or on several ranks that all call it alike.

- **A step** (:meth:`TorchTrainer.step`): advantages per group; proximal log-probs of all sampled tokens,
  under the weights as they are now; ``num_epochs`` passes over shuffled minibatches, one AdamW update
  each.  A minibatch is computed in parts of bounded size whose gradients add up.  Masked trajectories, and those
  that could teach nothing (advantage 0, no entropy bonus, no KL penalty), are measured and count in their
  group, but are left out of the updates.
- **Ranks.**  Every rank is given the whole batch and takes each part's samples in turn.  One that has none left
  computes a stand-in of weight 0, because the collectives of a sharded model need everybody.
- **Determinism.**  The same state and the same trajectories, in any order, give the same weights: samples
  are sorted by id and shuffled by a generator that is part of the checkpoint.
- **Identity.**  Who made the weights is ``(attempt, version)``.  Restoring a checkpoint starts a new attempt:
  weights of two lives of a trainer never carry the same name.

Not thread-safe.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rose.errors import TrainError
from rose.train.advantages import Estimator, OverlongParams, group_advantages, overlong_penalty
from rose.train.batch import MAX_PART_TOKENS, Minibatch, TrainingSequence, make_minibatch, split_by_length
from rose.train.checkpoint import Checkpoint
from rose.train.loss import (
    LossParams,
    correction,
    effective_sample_size,
    kl_estimate,
    mismatch,
    policy_loss,
    token_shares,
)
from rose.train.model import Dtype, PolicyModel, whole_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParams:
    """How a step is taken."""

    learning_rate: float = 1e-3
    num_epochs: int = 4
    minibatch_sequences: int = 32
    max_part_tokens: int = MAX_PART_TOKENS
    """Tokens of one forward pass, pads included; a minibatch of more is computed in parts."""
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    estimator: Estimator = "grpo"
    scale_advantages: bool = True
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    loss: LossParams = field(default_factory=LossParams)
    overlong: OverlongParams = field(default_factory=OverlongParams)
    policy_dtype: Dtype = "bfloat16"
    compute_dtype: Dtype = "float32"
    activation_checkpointing: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """What a step did; means are over sampled tokens."""

    num_sequences: int
    num_tokens: int
    num_trained_sequences: int
    """Sequences that took part in the updates."""
    num_updates: int
    learning_rate: float
    loss: float
    entropy: float
    clip_fraction: float
    """Tokens whose gradient the clip stopped, of all tokens of all updates."""
    grad_norm: float
    """Before clipping; mean over the updates."""
    ess: float
    """Effective sample size of the truncated proximal/behaviour weights, as a fraction."""
    truncated_weight_fraction: float
    """Tokens whose proximal/behaviour ratio was above the truncation."""
    kl_reference: float
    """k3 estimate of KL(proximal || reference); 0 where there is no reference."""
    mismatch_kl: float
    ratio_p99: float
    logprob_diff_max: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For the metrics file."""
        return asdict(self)


class Trainer(Protocol):
    """What the loop needs from a trainer."""

    vocab_size: int
    max_tokens: int
    """Longest sequence it takes."""

    @property
    def step_index(self) -> int:
        """Steps taken in this lineage."""
        ...

    @property
    def module(self) -> torch.nn.Module:
        """The masters, under the checkpoint's tensor names: what a publisher reads."""
        ...

    def step(
        self,
        samples: Sequence[TrainingSequence],
        *,
        learning_rate: float | None = None,
        single_update: bool = False,
    ) -> TrainReport:
        """Take one RL step on ``samples``.

        Args:
            learning_rate: None: the configured one.
            single_update: One update on all samples, whatever the configured minibatches and epochs are.
        """
        ...

    def capture(self, *, attempt: int, version: int, consumed: Mapping[int, tuple[str, ...]]) -> Checkpoint:
        """Everything needed to go on from here."""
        ...

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from ``checkpoint``."""
        ...

    def export(self, target: Path) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        ...


class TorchTrainer:
    """See the module's docstring.

    Args:
        model_path: Hugging Face folder; its weights are where training starts.
        params: How a step is taken.
    """

    def __init__(self, model_path: Path, params: TrainerParams | None = None) -> None:
        self.params = params = params or TrainerParams()
        self._policy = PolicyModel(
            model_path,
            policy_dtype=params.policy_dtype,
            compute_dtype=params.compute_dtype,
            activation_checkpointing=params.activation_checkpointing,
        )
        self._reference: PolicyModel | None = None
        if params.loss.kl_weight > 0.0:
            self._reference = PolicyModel(
                model_path, policy_dtype=params.policy_dtype, compute_dtype=params.compute_dtype
            )
        self.vocab_size = self._policy.vocab_size
        self.max_tokens = self._policy.max_tokens
        self._optimizer = torch.optim.AdamW(
            self._policy.masters,
            lr=params.learning_rate,
            betas=(0.9, params.adam_beta2),
            eps=params.adam_epsilon,
            weight_decay=params.weight_decay,
            foreach=True,
        )
        self._shuffle = random.Random(params.seed)
        self._step_index = 0

    @property
    def step_index(self) -> int:
        return self._step_index

    @property
    def module(self) -> torch.nn.Module:
        return self._policy.module

    @property
    def rounded_model(self) -> Any:
        """The model as the engine holds it."""
        return self._policy.computing

    def step(
        self,
        samples: Sequence[TrainingSequence],
        *,
        learning_rate: float | None = None,
        single_update: bool = False,
    ) -> TrainReport:
        """Take one RL step.  All ranks, with the same arguments.

        Args:
            samples: Of one batch, whole groups.
            learning_rate: None = the params'.
            single_update: One update on the whole batch instead of epochs of minibatches.

        Raises:
            TrainError: No sampled token at all, or a gradient that is not finite (its update is not applied).
        """
        started_s = time.monotonic()
        params = self.params
        samples = sorted(samples, key=lambda sample: (sample.trajectory_id, sample.positions))
        if not samples:
            raise TrainError("a step needs at least one sampled token", field="samples")
        rate = params.learning_rate if learning_rate is None else learning_rate
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        proximal, entropy_mean = self._forward(self._policy, samples)
        reference = None if self._reference is None else self._forward(self._reference, samples)[0]
        advantages = self._advantages(samples, proximal, reference)
        trained = [
            index
            for index, sample in enumerate(samples)
            if not sample.masked and (advantages[sample.trajectory_id] != 0.0 or self._trains_anyway)
        ]
        totals = _Totals()
        size = max(1, len(trained)) if single_update else params.minibatch_sequences
        for _ in range(1 if single_update else params.num_epochs):
            self._shuffle.shuffle(trained)
            for start in range(0, len(trained), size):
                chosen = trained[start : start + size]
                self._minibatch(chosen, samples, advantages, proximal, reference, totals)
        self._step_index += 1
        self._policy.gather()
        totals.add_ranks(self._policy.world_size)
        behaviour_N = torch.tensor([value for sample in samples for value in sample.logprobs])
        proximal_N = torch.cat(proximal)
        truncation = params.loss.truncation
        kl = 0.0
        if reference is not None:
            kl = float(kl_estimate(proximal_N, torch.cat(reference), "k3").mean())
        return TrainReport(
            num_sequences=len(samples),
            num_tokens=behaviour_N.numel(),
            num_trained_sequences=len(trained),
            num_updates=totals.num_updates,
            learning_rate=rate,
            loss=totals.loss / max(1, totals.num_updates),
            entropy=entropy_mean,
            clip_fraction=totals.num_held / max(1, totals.num_tokens),
            grad_norm=totals.grad_norm / max(1, totals.num_updates),
            ess=effective_sample_size(correction(behaviour_N, proximal_N, truncation)),
            truncated_weight_fraction=float(((proximal_N - behaviour_N).exp() > truncation).float().mean()),
            kl_reference=kl,
            seconds=time.monotonic() - started_s,
            **mismatch(behaviour_N, proximal_N),
        )

    def log_probs(self, samples: Sequence[TrainingSequence]) -> list[Tensor]:
        """Log-probs of the sampled tokens under the weights as they are now, one tensor per sample.  All ranks."""
        return self._forward(self._policy, samples)[0]

    def capture(self, *, attempt: int, version: int, consumed: Mapping[int, tuple[str, ...]]) -> Checkpoint:
        """See :class:`Trainer`.  All ranks; each gets the whole."""
        return Checkpoint(
            step=self._step_index,
            attempt=attempt,
            version=version,
            consumed=dict(consumed),
            shuffle_state=self._shuffle.getstate(),
            rng={"torch": torch.get_rng_state()},
            weights=self._policy.weights(),
            optimizer=self._policy.optimizer_state(self._optimizer),
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from ``checkpoint``.  All ranks.

        Raises:
            TrainError: The checkpoint is of another model; nothing was changed.
        """
        self._policy.check_names(checkpoint.weights)
        self._policy.restore(checkpoint.weights, checkpoint.optimizer, self._optimizer)
        self._shuffle.setstate(checkpoint.shuffle_state)
        if "torch" in checkpoint.rng:
            torch.set_rng_state(checkpoint.rng["torch"])
        self._step_index = checkpoint.step

    def export(self, target: Path) -> None:
        self._policy.export(target)

    # --- inside a step ---------------------------------------------------------------------------------

    @property
    def _trains_anyway(self) -> bool:
        """Whether a token of advantage 0 has a gradient."""
        loss = self.params.loss
        return loss.entropy_weight > 0.0 or (loss.kl_weight > 0.0 and loss.kl_kind != "reward")

    def _advantages(
        self, samples: Sequence[TrainingSequence], proximal: list[Tensor], reference: list[Tensor] | None
    ) -> dict[str, float]:
        params = self.params
        rewards = {sample.trajectory_id: sample.reward for sample in samples}
        num_sampled = dict.fromkeys(rewards, 0)
        drift = dict.fromkeys(rewards, 0.0)
        for index, sample in enumerate(samples):
            num_sampled[sample.trajectory_id] += len(sample.positions)
            if reference is not None and params.loss.kl_kind == "reward":
                drift[sample.trajectory_id] += float((proximal[index] - reference[index]).sum())
        shaped = {
            name: reward
            + overlong_penalty(num_sampled[name], params.overlong)
            - params.loss.kl_weight * drift[name]
            for name, reward in rewards.items()
        }
        return group_advantages(
            shaped,
            {sample.trajectory_id: sample.group_id for sample in samples},
            estimator=params.estimator,
            scale=params.scale_advantages,
        )

    def _minibatch(
        self,
        chosen: Sequence[int],
        samples: Sequence[TrainingSequence],
        advantages: dict[str, float],
        proximal: list[Tensor],
        reference: list[Tensor] | None,
        totals: _Totals,
    ) -> None:
        """One update on ``samples[chosen]``."""
        loss_params = self.params.loss
        sizes = [len(samples[index].positions) for index in chosen]
        shares = dict(zip(chosen, token_shares(sizes, loss_params.aggregation), strict=True))
        lengths = [len(sample.token_ids) for sample in samples]
        for part in split_by_length(chosen, lengths, self.params.max_part_tokens):
            mine = part[self._policy.rank :: self._policy.world_size]
            if not mine:
                log_probs_N, _ = self._policy.log_probs(_stand_in())
                (0.0 * log_probs_N.sum()).backward()
                self._policy.collect_gradients()
                continue
            batch = make_minibatch(
                [samples[index] for index in mine],
                vocab_size=self.vocab_size,
                advantages=advantages,
                shares=[shares[index] for index in mine],
            )
            current_N, entropy_N = self._policy.log_probs(batch)
            loss, num_held = policy_loss(
                current_N=current_N,
                proximal_N=torch.cat([proximal[index] for index in mine]),
                behaviour_N=batch.behaviour_N,
                advantage_N=batch.advantage_N,
                share_N=batch.share_N,
                params=loss_params,
                reference_N=None if reference is None else torch.cat([reference[index] for index in mine]),
            )
            if loss_params.entropy_weight > 0.0:
                loss = loss - loss_params.entropy_weight * (batch.share_N * entropy_N).sum()
            loss.backward()
            self._policy.collect_gradients()
            totals.loss += float(loss.detach())
            totals.num_held += num_held
            totals.num_tokens += batch.num_tokens
        totals.grad_norm += self._update()
        totals.num_updates += 1

    def _update(self) -> float:
        """Clip, step, round; returns the gradient norm before clipping."""
        found = torch.nn.utils.clip_grad_norm_(self._policy.masters, self.params.max_grad_norm)
        norm = float(whole_of(found))
        if not norm < float("inf"):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainError(f"gradient norm is {norm}", field="grad_norm", fix="lower trainer.learning_rate")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._policy.round_weights()
        return norm

    @torch.no_grad()
    def _forward(self, model: PolicyModel, samples: Sequence[TrainingSequence]) -> tuple[list[Tensor], float]:
        """Log-probs of each sample, and the mean entropy; the same on all ranks."""
        offsets = [0]
        for sample in samples:
            offsets.append(offsets[-1] + len(sample.positions))
        found_N = torch.zeros(offsets[-1])
        entropy_sum = torch.zeros((), dtype=torch.float64)
        lengths = [len(sample.token_ids) for sample in samples]
        for part in split_by_length(range(len(samples)), lengths, self.params.max_part_tokens):
            mine = part[model.rank :: model.world_size]
            if not mine:
                model.log_probs(_stand_in())
                continue
            batch = make_minibatch([samples[index] for index in mine], vocab_size=self.vocab_size)
            log_probs_N, entropy_N = model.log_probs(batch)
            entropy_sum += entropy_N.double().sum()
            sizes = [len(samples[index].positions) for index in mine]
            for index, values_N in zip(mine, log_probs_N.split(sizes), strict=True):
                found_N[offsets[index] : offsets[index + 1]] = values_N
        if model.world_size > 1:
            # Each token is one rank's; the others hold 0 for it.
            dist.all_reduce(found_N)
            dist.all_reduce(entropy_sum)
        values = list(found_N.split([len(sample.positions) for sample in samples]))
        return values, float(entropy_sum) / max(1, offsets[-1])


@dataclass(slots=True)
class _Totals:
    """Sums over the parts that this rank computed."""

    loss: float = 0.0
    num_held: int = 0
    num_tokens: int = 0
    num_updates: int = 0
    grad_norm: float = 0.0

    def add_ranks(self, world_size: int) -> None:
        """Sum what is per rank; updates and norms are the same on all."""
        if world_size > 1:
            sums = torch.tensor([self.loss, self.num_held, self.num_tokens], dtype=torch.float64)
            dist.all_reduce(sums)
            self.loss, self.num_held, self.num_tokens = float(sums[0]), int(sums[1]), int(sums[2])


def _stand_in() -> Minibatch:
    """One token, for a rank that has nothing to do while the others compute."""
    nothing = TrainingSequence(
        trajectory_id="-",
        group_id="-",
        reward=0.0,
        token_ids=(0, 0),
        positions=(1,),
        logprobs=(0.0,),
        temperatures=(1.0,),
        allowed=(None,),
    )
    return make_minibatch([nothing], vocab_size=1)
