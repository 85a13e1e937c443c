"""One optimiser step of RL on recorded trajectories.

:class:`TorchTrainer` is our :class:`rose.train.protocol.Trainer`: a
Hugging Face causal language model (``rose.train.model``) in one process, or on several ranks that all call it alike.

- **A step** (:meth:`TorchTrainer.step`): advantages per group; proximal log-probs of all sampled tokens,
  under the weights as they are now; ``num_epochs`` passes over shuffled minibatches, one AdamW update
  each.  A minibatch is computed in parts of bounded size whose gradients add up.  Masked trajectories, and those that were cut
  where these are filtered, are measured and count in their group, but are left out of the updates.  Idle ones, which could teach nothing (advantage 0, no entropy
  bonus, no KL penalty), are not computed, but keep their places in minibatches and in the divisor (``count_idle``).
- **Streamed** (:meth:`TorchTrainer.begin`): groups whose batch is not complete yet are computed as far as ``streamed`` says, and the step takes it from there.  Whatever
  does not turn out to be exact then (another batch, several minibatches, other advantages) is computed again.
- **The guard** (``rose.train.guard``) clips, takes back what goes too far, or leaves the step out.
- **Ranks.**  Every rank knows of the whole batch who is in it and how long, and of its own share the tokens (``rose.train.batch.share_of``).  One that has
  nothing of a part computes a stand-in of weight 0, because the collectives of a sharded model need everybody.
- **Determinism.**  The same state and the same trajectories, in any order, give the same weights: samples
  are sorted by id and shuffled by a generator that is part of the checkpoint.  (Streamed gradients are summed in the order in which groups came.)
- **Identity.**  Who made the weights is ``(attempt, version)``.  Restoring a checkpoint starts a new attempt:
  weights of two lives of a trainer never carry the same name.

Not thread-safe.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rose.errors import TrainError
from rose.policy.streaming import Streamed
from rose.train import checkpoint as checkpoints
from rose.train.adapter import LoraParams, left_out
from rose.train.advantages import OverlongParams, group_advantages, overlong_penalty
from rose.train.batch import (
    MAX_PART_TOKENS,
    TrainingSequence,
    episode_sizes,
    in_order,
    make_minibatch,
    owners_of,
    split_by_length,
)
from rose.train.checkpoint import Checkpoint
from rose.train.guard import GuardParams, StepGuard, probe_of
from rose.train.last_update import keep_of_last
from rose.train.loss import (
    LossParams,
    correction,
    effective_sample_size,
    kl_estimate,
    mismatch,
    outside_fraction,
    policy_loss,
    share_divisor,
    undivided_shares,
)
from rose.train.model import ComputingModel, Device, Dtype, FrozenModel, PolicyModel, local_of, whole_of
from rose.train.packing import pack_by_length
from rose.train.protocol import TrainReport
from rose.train.recipes import AdvantageScale, Baseline
from rose.train.step_parts import Chosen, EarlyGradients, Totals, chosen_of, key_of, stand_in


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParams:
    """How a step is taken."""

    learning_rate: float
    num_epochs: int = 4
    minibatch_sequences: int = 32
    count_idle: bool = True
    """Whether sequences of advantage 0 take their places in minibatches and in the divisor of the loss."""
    max_part_tokens: int = MAX_PART_TOKENS
    """Tokens of one forward pass, pads included; a minibatch of more is computed in parts."""
    packing: bool = False
    """Sequences of a part in one row instead of padded to the longest (``rose.train.packing``)."""
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    baseline: Baseline = "mean"
    scale_advantages: AdvantageScale = "group"
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    loss: LossParams = field(default_factory=LossParams)
    overlong: OverlongParams = field(default_factory=OverlongParams)
    guard: GuardParams = field(default_factory=GuardParams)
    policy_dtype: Dtype = "bfloat16"
    compute_dtype: Dtype | None = None
    """None = as suits the device, see :attr:`computes_in`."""
    activation_checkpointing: bool = False
    device: Device = "cpu"
    offload: bool = False
    """Masters and moments in host memory."""
    lora: LoraParams | None = None
    """Train adapters instead of the whole model."""
    streamed: Streamed = "off"
    """What :meth:`TorchTrainer.begin` computes."""
    seed: int = 0

    @property
    def computes_in(self) -> Dtype:
        """What matrices are multiplied in.  A GPU does so in bf16 many times as fast as in fp32, and its engines do; a CPU does not."""
        return self.compute_dtype or ("bfloat16" if self.device == "cuda" else "float32")


class TorchTrainer:
    """See the module's docstring.

    Args:
        model_path: Hugging Face folder; its weights are where training starts.
        params: How a step is taken.
    """

    def __init__(self, model_path: Path, params: TrainerParams) -> None:
        self.params = params
        self._policy = PolicyModel(
            model_path,
            policy_dtype=params.policy_dtype,
            compute_dtype=params.computes_in,
            device=params.device,
            activation_checkpointing=params.activation_checkpointing,
            offload=params.offload,
            lora=params.lora,
            packing=params.packing,
        )
        self._reference: FrozenModel | None = None
        """The model that training began with; none where only adapters are trained beside it."""
        if params.loss.kl_weight > 0.0 and params.lora is None:
            self._reference = FrozenModel(
                model_path,
                policy_dtype=params.policy_dtype,
                compute_dtype=params.computes_in,
                device=params.device,
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
        self._guard = StepGuard(params.guard)
        self._moved: list[Tensor] = []
        """By the last update."""
        self._begun = EarlyGradients()
        self._writer = checkpoints.BackgroundWriter()
        self._step_index = 0

    @property
    def step_index(self) -> int:
        return self._step_index

    @property
    def module(self) -> torch.nn.Module:
        return self._policy.module

    @property
    def masters(self) -> Sequence[Any]:
        """What the optimiser moves: this rank's part."""
        return self._policy.masters

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
        """Take one RL step.  All ranks.

        Args:
            samples: Of one batch, whole groups; on each rank its share of it, or all.
            learning_rate: None = the params'.
            single_update: One update on the whole batch instead of epochs of minibatches.

        Raises:
            TrainError: No sampled token at all, a branch that is there twice, or a gradient that is not finite (its update is not applied).
        """
        started_s = time.monotonic()
        params = self.params
        samples = in_order(samples)
        if not samples:
            raise TrainError("a step needs at least one sampled token", field="samples")
        rate = params.learning_rate if learning_rate is None else learning_rate
        owners = owners_of(samples, self._policy.world_size)
        num_early = len(self._begun.advantages)
        if not self._begun.is_of(samples):
            self.forget()
            self._measure(samples, owners)
        begun = self._begun
        proximal = [begun.proximal[key_of(sample)] for sample in samples]
        reference = [begun.reference[key_of(sample)] for sample in samples] if begun.reference else None
        advantages = self._advantages(samples, proximal, reference)
        chosen = self._chosen(samples, advantages)
        starved = self._guard.is_starved(chosen.num_informative)
        size = max(1, len(chosen.taken)) if single_update else params.minibatch_sequences
        totals, minibatches, episodes = Totals(), list[list[int]](), episode_sizes(samples)
        if not starved:
            minibatches = self._minibatches(chosen, size, 1 if single_update else params.num_epochs)
        wanted = {key_of(samples[index]): advantages[samples[index].trajectory_id] for index in chosen.active}
        early = begun.totals if len(minibatches) == 1 and begun.advantages == wanted else None
        if early is None:
            self._optimizer.zero_grad(set_to_none=True)
        if not starved:
            probe = self._probe(samples)
            totals.share = self._guard.share_of(chosen.num_solved, chosen.num_groups)
            for done, part in enumerate(minibatches, start=1):
                self._set_rate(rate * totals.share * self._guard.rate_factor)
                active = [index for index in part if index in chosen.active]
                found = early or self._gradients(active, samples, owners, advantages, proximal, reference)
                sizes, wholes = [len(samples[one].positions) for one in part], [episodes[one] for one in part]
                moved = self._apply(found, share_divisor(sizes, wholes, params.loss.aggregation), totals)
                if probe and moved:
                    allowed = self._guard.allowed(done, len(minibatches), totals.share)
                    self._hold_back(probe, samples, owners, proximal, allowed, totals)
            self._policy.merge()
        self._step_index += 1
        self._begun = EarlyGradients()
        proximal_N = torch.cat(proximal)
        behaviour_N = torch.tensor([value for sample in samples for value in sample.logprobs])
        if behaviour_N.numel() < proximal_N.numel():
            behaviour_N = proximal_N  # on a rank with a share of the batch, whose report is nobody's
        sequence_N = torch.repeat_interleave(torch.tensor([len(sample.positions) for sample in samples]))
        weight_N = correction(behaviour_N, proximal_N, sequence_N, params.loss)
        kl = 0.0
        if reference is not None:
            kl = float(kl_estimate(proximal_N, torch.cat(reference), "k3").mean())
        return TrainReport(
            num_sequences=len(samples),
            num_tokens=proximal_N.numel(),
            num_trained_sequences=0 if starved else len(chosen.active),
            num_updates=totals.num_updates,
            learning_rate=totals.rate / totals.num_updates if totals.num_updates else rate,
            loss=totals.loss / max(1, totals.num_updates),
            entropy=begun.entropy_sum / max(1, proximal_N.numel()),
            clip_fraction=totals.num_held / max(1, totals.num_tokens),
            grad_norm=totals.grad_norm / max(1, totals.num_updates),
            ess=effective_sample_size(weight_N),
            truncated_weight_fraction=outside_fraction(behaviour_N, proximal_N, sequence_N, params.loss),
            kl_reference=kl,
            seconds=time.monotonic() - started_s,
            informative_fraction=chosen.num_informative / chosen.num_groups,
            step_share=totals.share,
            update_kl=totals.update_kl,
            grad_limit=totals.grad_limit,
            num_clipped_updates=totals.num_clipped,
            num_shortened_updates=totals.num_shortened,
            num_starved=int(starved),
            num_overlong=chosen.num_overlong,
            num_begun_in_vain=num_early if early is None else 0,
            **mismatch(behaviour_N, proximal_N),
        )

    def begin(self, samples: Sequence[TrainingSequence]) -> None:
        """Compute what can be of a step whose batch is not complete.  All ranks.

        Args:
            samples: Whole groups that the step will be given, and that it did not begin with before; on each rank its share of them, or all.
        """
        samples, params = in_order(samples), self.params
        owners = owners_of(samples, self._policy.world_size)
        proximal, reference = self._measure(samples, owners)
        if params.streamed != "gradients":
            return
        advantages = self._advantages(samples, proximal, reference)
        active = sorted(self._chosen(samples, advantages).active)
        found = self._gradients(active, samples, owners, advantages, proximal, reference)
        self._begun.totals = (self._begun.totals or Totals()).plus(found)
        told = {key_of(samples[index]): advantages[samples[index].trajectory_id] for index in active}
        self._begun.advantages |= told

    def forget(self) -> None:
        """What the step has begun with will not be its batch."""
        self._begun = EarlyGradients()
        self._optimizer.zero_grad(set_to_none=True)

    def log_probs(self, samples: Sequence[TrainingSequence]) -> list[Tensor]:
        """Log-probs of the sampled tokens under the weights as they are now, one tensor per sample.  All ranks."""
        return self._forward(self._policy, samples, owners_of(samples, self._policy.world_size))[0]

    def capture(self, *, attempt: int, version: int, consumed: Mapping[int, tuple[str, ...]]) -> Checkpoint:
        """Everything needed to go on from here: this rank's part of it."""
        moments, steps = self._policy.optimizer_state(self._optimizer)
        return Checkpoint(
            step=self._step_index,
            attempt=attempt,
            version=version,
            consumed=dict(consumed),
            shuffle_state=self._shuffle.getstate(),
            grad_norms=self._guard.norms,
            rate_factor=self._guard.rate_factor,
            base=self._policy.base,
            rng={"torch": torch.get_rng_state().numpy().tobytes()},
            weights=self._policy.weights(),
            optimizer=moments,
            optimizer_steps=steps,
        )

    def save(
        self,
        directory: Path,
        *,
        attempt: int,
        version: int,
        consumed: Mapping[int, tuple[str, ...]],
        keep: int,
    ) -> None:
        """See :class:`rose.train.protocol.Trainer`.  All ranks."""
        self._writer.finish()
        captured = self.capture(attempt=attempt, version=version, consumed=consumed)
        checkpoints.save(captured, directory, keep=keep)

    def begin_save(
        self,
        directory: Path,
        *,
        attempt: int,
        version: int,
        consumed: Mapping[int, tuple[str, ...]],
        keep: int,
    ) -> None:
        """See :class:`rose.train.protocol.Trainer`.  All ranks."""
        captured = self.capture(attempt=attempt, version=version, consumed=consumed)
        self._writer.begin(captured, directory, keep=keep)

    def finish_save(self) -> None:
        """See :class:`rose.train.protocol.Trainer`."""
        self._writer.finish()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from ``checkpoint``.  All ranks.

        Raises:
            TrainError: The checkpoint is of another model, or of adapters of another; nothing was changed.
        """
        self._policy.restore(checkpoint, self._optimizer)
        self.forget()
        self._shuffle.setstate(checkpoint.shuffle_state)
        if "torch" in checkpoint.rng:
            torch.set_rng_state(torch.frombuffer(bytearray(checkpoint.rng["torch"]), dtype=torch.uint8))
        self._guard.restore(checkpoint.grad_norms, checkpoint.rate_factor)
        self._step_index = checkpoint.step

    def export(self, target: Path) -> None:
        self._policy.export(target)

    # --- inside a step ---------------------------------------------------------------------------------

    def _measure(
        self, samples: Sequence[TrainingSequence], owners: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Log-probs of ``samples``, proximal and reference, which the step then has.

        Raises:
            TrainError: A branch is among them twice.
        """
        begun, keys = self._begun, [key_of(sample) for sample in samples]
        if twice := [key for key, count in Counter(keys).items() if count > 1]:
            name, branch = twice[0]
            raise TrainError(f"branch {branch} of trajectory {name} is there twice", field="samples")
        proximal, entropy_sum = self._forward(self._policy, samples, owners)
        reference = self._reference_log_probs(samples, owners)
        begun.proximal |= dict(zip(keys, proximal, strict=True))
        begun.reference |= dict(zip(keys, reference or (), strict=reference is not None))
        begun.entropy_sum += entropy_sum
        return proximal, reference

    def _reference_log_probs(
        self, samples: Sequence[TrainingSequence], owners: Sequence[int]
    ) -> list[Tensor] | None:
        """Under the weights that training began with; None where nobody asks.  Of adapters these are the model without them."""
        if self._reference is not None:
            return self._forward(self._reference, samples, owners)[0]
        if self.params.loss.kl_weight == 0.0:
            return None
        with left_out(self._policy.computing):
            return self._forward(self._policy, samples, owners)[0]

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
        episodes = episode_sizes(samples)
        num_sampled = {sample.trajectory_id: size for sample, size in zip(samples, episodes, strict=True)}
        drift = dict.fromkeys(rewards, 0.0)
        for index, sample in enumerate(samples):
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
            baseline=params.baseline,
            scale=params.scale_advantages,
        )

    def _chosen(self, samples: Sequence[TrainingSequence], advantages: Mapping[str, float]) -> Chosen:
        params = self.params
        return chosen_of(
            samples,
            advantages,
            overlong_filtering=params.overlong.filtering,
            idle_train=self._trains_anyway,
            count_idle=params.count_idle,
        )

    def _minibatches(self, chosen: Chosen, size: int, num_epochs: int) -> list[list[int]]:
        """Every epoch's minibatches, shuffled anew; those in which nothing is active are left out."""
        found: list[list[int]] = []
        order = list(chosen.taken)
        for _ in range(num_epochs):
            self._shuffle.shuffle(order)
            parts = (order[start : start + size] for start in range(0, len(order), size))
            found += [part for part in parts if any(index in chosen.active for index in part)]
        return found

    def _parts(
        self, indices: Iterable[int], samples: Sequence[TrainingSequence], owners: Sequence[int]
    ) -> list[list[int]]:
        """Of one forward pass each, on all ranks the same."""
        lengths, most = [sample.length for sample in samples], self.params.max_part_tokens
        if not self.params.packing:
            return split_by_length(indices, lengths, most)
        row_tokens = self._policy.row_tokens
        return pack_by_length(indices, lengths, owners, max_tokens=most, max_row_tokens=row_tokens)

    def _gradients(
        self,
        active: Sequence[int],
        samples: Sequence[TrainingSequence],
        owners: Sequence[int],
        advantages: Mapping[str, float],
        proximal: Sequence[Tensor],
        reference: Sequence[Tensor] | None,
    ) -> Totals:
        """Add the gradients of ``samples[active]`` to the masters', not divided yet; what this rank summed."""
        loss_params = self.params.loss
        episodes = episode_sizes(samples)
        wholes = [episodes[index] for index in active]
        undivided = undivided_shares(wholes, loss_params.aggregation, loss_params.sum_tokens)
        shares = dict(zip(active, undivided, strict=True))
        found = Totals()
        for part in self._parts(active, samples, owners):
            mine = [index for index in part if owners[index] == self._policy.rank]
            if not mine:
                log_probs_N, _ = self._policy.log_probs(stand_in().to(self._policy.device))
                (0.0 * log_probs_N.sum()).backward()
                self._policy.collect_gradients()
                continue
            batch = make_minibatch(
                [samples[index] for index in mine],
                vocab_size=self.vocab_size,
                advantages=advantages,
                shares=[shares[index] for index in mine],
                packed=self.params.packing,
            ).to(self._policy.device)
            current_N, entropy_N = self._policy.log_probs(batch)
            proximal_N, reference_N = (
                None if one is None else torch.cat([one[index] for index in mine]).to(self._policy.device)
                for one in (proximal, reference)
            )
            assert proximal_N is not None
            loss, num_held = policy_loss(
                current_N=current_N,
                proximal_N=proximal_N,
                behaviour_N=batch.behaviour_N,
                advantage_N=batch.advantage_N,
                share_N=batch.share_N,
                sequence_N=batch.sequence_N,
                params=loss_params,
                reference_N=reference_N,
            )
            if loss_params.entropy_weight > 0.0:
                loss = loss - loss_params.entropy_weight * (batch.share_N * entropy_N).sum()
            loss.backward()
            self._policy.collect_gradients()
            found.loss += float(loss.detach())
            found.num_held += int(num_held)
            found.num_tokens += batch.num_tokens
        return found

    def _apply(self, found: Totals, divisor: float, totals: Totals) -> bool:
        """One update by the gradients of a minibatch, which are divided first; whether there was anything to update by, on all ranks the same."""
        for master in self._policy.masters:
            if master.grad is not None:
                local_of(master.grad).div_(divisor)
        found.add_ranks(self._policy.world_size)
        totals.num_held += found.num_held
        totals.num_tokens += found.num_tokens
        totals.grad_limit = self._guard.grad_limit(self.params.max_grad_norm)
        norm = self._update(totals.grad_limit)
        if norm == 0.0:
            return False
        totals.loss += found.loss / divisor
        totals.rate += self._optimizer.param_groups[0]["lr"]
        self._guard.saw(norm)
        totals.grad_norm += norm
        totals.num_clipped += norm > totals.grad_limit
        totals.num_updates += 1
        return True

    def _probe(self, samples: Sequence[TrainingSequence]) -> list[int]:
        """Indices of the sequences on which the guard measures; none where it does not.  A third of an update's work at most, unless groups are many."""
        if not self._guard.measures:
            return []
        groups = [sample.group_id for sample in samples]
        return probe_of(groups, self.params.minibatch_sequences, self._step_index)

    def _set_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _hold_back(
        self,
        probe: Sequence[int],
        samples: Sequence[TrainingSequence],
        owners: Sequence[int],
        proximal: list[Tensor],
        allowed: float,
        totals: Totals,
    ) -> None:
        """Leave as much of the last update in the weights as the guard does."""
        seen = [samples[index] for index in probe]
        probe_owners = [owners[index] for index in probe]
        started_N = torch.cat([proximal[index] for index in probe])
        kept = 1.0
        while True:
            current_N = torch.cat(self._forward(self._policy, seen, probe_owners)[0])
            # Half the square of the log-ratio: one rare token that became likely is one token, not a hundred.
            totals.update_kl = float(kl_estimate(current_N, started_N, "k2").mean())
            smaller = self._guard.smaller(kept, totals.update_kl, allowed)
            if smaller == kept:
                break
            keep_of_last(self._optimizer, self._moved, before=kept, now=smaller)
            self._policy.round_weights()
            kept = smaller
        totals.num_shortened += kept < 1.0
        self._guard.updated(totals.update_kl, allowed, shortened=kept < 1.0)

    def _update(self, limit: float) -> float:
        """Clip, step, round; returns the gradient norm before clipping.  Of 0 nothing is done: AdamW would go on by what it remembers, and decay weights."""
        found = torch.nn.utils.clip_grad_norm_(self._policy.masters, limit)
        norm = float(whole_of(found))
        if not norm < float("inf"):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainError(f"gradient norm is {norm}", field="grad_norm", fix="lower trainer.learning_rate")
        self._moved = [tensor for tensor in self._policy.masters if tensor.grad is not None]
        if norm == 0.0:
            self._optimizer.zero_grad(set_to_none=True)
            return norm
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._policy.round_weights()
        return norm

    @torch.no_grad()
    def _forward(
        self, model: ComputingModel, samples: Sequence[TrainingSequence], owners: Sequence[int]
    ) -> tuple[list[Tensor], float]:
        """Log-probs of each sample, and the sum of entropies; the same on all ranks.  ``owners``: who computes which."""
        offsets = [0]
        for sample in samples:
            offsets.append(offsets[-1] + len(sample.positions))
        found_N = torch.zeros(offsets[-1])
        entropy_sum = torch.zeros((), dtype=torch.float64)
        for part in self._parts(range(len(samples)), samples, owners):
            mine = [index for index in part if owners[index] == model.rank]
            if not mine:
                model.log_probs(stand_in().to(model.device))
                continue
            own = [samples[index] for index in mine]
            batch = make_minibatch(own, vocab_size=self.vocab_size, packed=self.params.packing)
            log_probs_N, entropy_N = (one.cpu() for one in model.log_probs(batch.to(model.device)))
            entropy_sum += entropy_N.double().sum()
            sizes = [len(samples[index].positions) for index in mine]
            for index, values_N in zip(mine, log_probs_N.split(sizes), strict=True):
                found_N[offsets[index] : offsets[index + 1]] = values_N
        if model.world_size > 1:
            # Each token is one rank's; the others hold 0 for it.
            dist.all_reduce(found_N)
            dist.all_reduce(entropy_sum)
        values = list(found_N.split([len(sample.positions) for sample in samples]))
        return values, float(entropy_sum)
