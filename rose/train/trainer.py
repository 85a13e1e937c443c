"""One optimiser step of RL on recorded trajectories.

:class:`Trainer` is what the loop needs; bring your own by satisfying it.  :class:`TorchTrainer` is ours: a
Hugging Face causal language model in one process.

- **Masters and model.**  The optimiser moves fp32 *masters*; the forward pass uses them rounded to bf16,
  which is what the engine holds, so that both compute the same policy.  The products are fp32: on CPU
  that is as near to the engine as bf16 products are, and faster.  Gradients pass the rounding unchanged.
- **A step** (:meth:`TorchTrainer.step`): advantages per group; proximal log-probs of all sampled tokens,
  under the weights as they are now; ``num_epochs`` passes over shuffled minibatches, one AdamW update
  each.  Masked trajectories, and those that could teach nothing (advantage 0 and no entropy bonus), are measured
  and count in their group, but are left out of the updates.
- **Determinism.**  The same state and the same trajectories, in any order, give the same weights: samples
  are sorted by id and shuffled by a generator that is part of the checkpoint.
- **Identity.**  Who made the weights is ``(attempt, version)``.  Restoring a checkpoint starts a new attempt:
  weights of two lives of a trainer never carry the same name.

Not thread-safe.  Callers: ``rose.train.actors`` (one actor), tests.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rose.errors import ConfigError, TrainError
from rose.train.batch import Minibatch, Sample, make_minibatch, split_by_length
from rose.train.checkpoint import Checkpoint
from rose.train.loss import (
    LossParams,
    entropy,
    group_advantages,
    mismatch,
    policy_loss,
    restricted_log_softmax,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParams:
    """How a step is taken."""

    learning_rate: float = 1e-3
    num_epochs: int = 4
    minibatch_sequences: int = 32
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    scale_advantages: bool = True
    adam_beta2: float = 0.95
    loss: LossParams = field(default_factory=LossParams)
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
    grad_norm: float
    mismatch_kl: float
    ratio_p99: float
    logprob_diff_max: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Trainer(Protocol):
    """What the loop needs from a trainer."""

    @property
    def step_index(self) -> int:
        """Steps taken in this lineage."""
        ...

    @property
    def module(self) -> torch.nn.Module:
        """The masters, under the checkpoint's tensor names: what a publisher reads."""
        ...

    def step(
        self, samples: Sequence[Sample], *, learning_rate: float | None = None, single_update: bool = False
    ) -> TrainReport: ...

    def capture(self, *, attempt: int, version: int, consumed: Mapping[int, tuple[str, ...]]) -> Checkpoint:
        """Everything needed to go on from here."""
        ...

    def restore(self, checkpoint: Checkpoint) -> None: ...


class TorchTrainer:
    """See the module's docstring.

    Args:
        model_path: Hugging Face folder; its weights are where training starts.
        params: How a step is taken.
    """

    def __init__(self, model_path: Path, params: TrainerParams | None = None) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        self.params = params or TrainerParams()
        if not (model_path / "config.json").is_file():
            raise ConfigError(f"{model_path} is not a model folder", field="model")
        try:
            self._master = AutoModelForCausalLM.from_pretrained(
                model_path, dtype=torch.float32, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"{model_path} cannot be loaded: {error}", field="model") from error
        self._model: Any = copy.deepcopy(self._master)
        self._model.eval()  # no dropout: proximal and current must be the same function
        self.vocab_size: int = self._model.config.vocab_size
        self.max_tokens: int = self._model.config.max_position_embeddings
        self._output: Any = self._model.get_output_embeddings()
        self._pairs = list(zip(self._master.parameters(), self._model.parameters(), strict=True))
        self._optimizer = torch.optim.AdamW(
            self._master.parameters(),
            lr=self.params.learning_rate,
            betas=(0.9, self.params.adam_beta2),
            weight_decay=self.params.weight_decay,
            foreach=True,
        )
        self._shuffle = random.Random(self.params.seed)
        self._step_index = 0
        self._round_weights()

    @property
    def step_index(self) -> int:
        return self._step_index

    @property
    def module(self) -> torch.nn.Module:
        return self._master

    @property
    def rounded_model(self) -> Any:
        """The model as the engine holds it (bf16 values in fp32 tensors)."""
        return self._model

    def step(
        self, samples: Sequence[Sample], *, learning_rate: float | None = None, single_update: bool = False
    ) -> TrainReport:
        """Take one RL step.

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
        advantages = group_advantages(
            {sample.trajectory_id: sample.reward for sample in samples},
            {sample.trajectory_id: sample.group_id for sample in samples},
            scale=params.scale_advantages,
        )
        proximal, proximal_entropy = self._proximal(samples, advantages)
        behaviour = torch.tensor([value for sample in samples for value in sample.logprobs])
        apart = mismatch(behaviour, torch.cat(proximal))
        trained = [
            index
            for index, sample in enumerate(samples)
            if not sample.masked
            and (advantages[sample.trajectory_id] != 0.0 or params.loss.entropy_weight > 0.0)
        ]
        lengths = [len(sample.token_ids) for sample in samples]
        num_updates, num_seen, num_held, loss_sum, norm_sum = 0, 0, 0, 0.0, 0.0
        minibatch_sequences = max(1, len(trained)) if single_update else params.minibatch_sequences
        for _ in range(1 if single_update else params.num_epochs):
            self._shuffle.shuffle(trained)
            for start in range(0, len(trained), minibatch_sequences):
                chosen = trained[start : start + minibatch_sequences]
                num_tokens = sum(len(samples[index].positions) for index in chosen)
                for part in split_by_length(chosen, lengths):
                    batch = make_minibatch(
                        [samples[index] for index in part], advantages, vocab_size=self.vocab_size
                    )
                    current_N, entropy_N = self._log_probs(batch)
                    loss, num_held_back = policy_loss(
                        current_N=current_N,
                        proximal_N=torch.cat([proximal[index] for index in part]),
                        behaviour_N=batch.behaviour_N,
                        advantage_N=batch.advantage_N,
                        num_tokens=num_tokens,
                        params=params.loss,
                    )
                    if params.loss.entropy_weight > 0.0:
                        loss = loss - params.loss.entropy_weight * entropy_N.sum() / num_tokens
                    loss.backward()  # parts of a minibatch add up: they share the divisor
                    loss_sum += float(loss.detach())
                    num_held += num_held_back
                norm_sum += self._update()
                num_updates += 1
                num_seen += num_tokens
        self._step_index += 1
        return TrainReport(
            num_sequences=len(samples),
            num_tokens=behaviour.numel(),
            num_trained_sequences=len(trained),
            num_updates=num_updates,
            learning_rate=rate,
            loss=loss_sum / max(1, num_updates),
            entropy=proximal_entropy,
            clip_fraction=num_held / max(1, num_seen),
            grad_norm=norm_sum / max(1, num_updates),
            seconds=time.monotonic() - started_s,
            **apart,
        )

    def log_probs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Log-probs of the sampled tokens under the weights as they are now, one tensor per sample."""
        return self._proximal(samples, {sample.trajectory_id: 0.0 for sample in samples})[0]

    def capture(self, *, attempt: int, version: int, consumed: Mapping[int, tuple[str, ...]]) -> Checkpoint:
        state = self._optimizer.state
        return Checkpoint(
            step=self._step_index,
            attempt=attempt,
            version=version,
            consumed=dict(consumed),
            shuffle_state=self._shuffle.getstate(),
            weights={name: tensor.detach() for name, tensor in self._named_masters()},
            optimizer={
                f"{name}/{key}": value
                for name, tensor in self._named_masters()
                for key, value in state.get(tensor, {}).items()
            },
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from ``checkpoint``.

        Raises:
            TrainError: The checkpoint is of another model; nothing was changed.
        """
        masters = dict(self._named_masters())
        for name, tensor in masters.items():
            saved = checkpoint.weights.get(name)
            if saved is None or saved.shape != tensor.shape:
                raise TrainError(f"tensor {name} is not the model's", field="checkpoint")
        if unknown := set(checkpoint.weights) - set(masters):
            raise TrainError(f"tensor {min(unknown)} is not in the model", field="checkpoint")
        with torch.no_grad():
            for name, tensor in masters.items():
                tensor.copy_(checkpoint.weights[name])
        self._optimizer.state.clear()
        for name, tensor in masters.items():
            slots = {
                key: checkpoint.optimizer[f"{name}/{key}"].clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{name}/{key}" in checkpoint.optimizer
            }
            if slots:
                self._optimizer.state[tensor] = slots
        self._shuffle.setstate(checkpoint.shuffle_state)
        self._step_index = checkpoint.step
        self._round_weights()

    def _named_masters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self._master.named_parameters())  # tied tensors come once

    @torch.no_grad()
    def _round_weights(self) -> None:
        for master, tensor in self._pairs:
            tensor.copy_(master.to(torch.bfloat16))

    def _update(self) -> float:
        """Clip, step, round; returns the gradient norm before clipping."""
        for master, tensor in self._pairs:
            master.grad, tensor.grad = tensor.grad, None
        norm = float(torch.nn.utils.clip_grad_norm_(self._master.parameters(), self.params.max_grad_norm))
        if not norm < float("inf"):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainError(f"gradient norm is {norm}", field="grad_norm", fix="lower train.learning_rate")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._round_weights()
        return norm

    def _log_probs(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and entropies, ``[N]`` each.  Only sampled positions meet the output layer."""
        hidden_BTD = self._model.base_model(input_ids=batch.input_ids_BT, use_cache=False).last_hidden_state
        logits_NV = self._output(hidden_BTD[batch.rows_N, batch.columns_N]).float()
        log_probs_NV = restricted_log_softmax(
            logits_NV, batch.temperature_N, batch.allowed_KV, batch.allowed_index_N
        )
        return log_probs_NV.gather(1, batch.targets_N.unsqueeze(1)).squeeze(1), entropy(log_probs_NV)

    @torch.no_grad()
    def _proximal(
        self, samples: Sequence[Sample], advantages: dict[str, float]
    ) -> tuple[list[Tensor], float]:
        """Log-probs of each sample, and the mean entropy."""
        found: list[Tensor] = [torch.empty(0)] * len(samples)
        entropy_sum, num_tokens = 0.0, 0
        lengths = [len(sample.token_ids) for sample in samples]
        for part in split_by_length(range(len(samples)), lengths):
            batch = make_minibatch([samples[index] for index in part], advantages, vocab_size=self.vocab_size)
            log_probs_N, entropy_N = self._log_probs(batch)
            entropy_sum += float(entropy_N.sum())
            num_tokens += batch.num_tokens
            sizes = [len(samples[index].positions) for index in part]
            for index, values_N in zip(part, log_probs_N.split(sizes), strict=True):
                found[index] = values_N
        return found, entropy_sum / max(1, num_tokens)
