"""The step guard: each part stops what it is for, tells that it did, and does nothing when it is off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rose.train import checkpoint as checkpoints
from rose.train.batch import TrainingSequence, samples_of
from rose.train.guard import GuardParams, StepGuard
from rose.train.trainer import TorchTrainer, TrainerParams
from tests.train.traces import random_batch

BASE = TrainerParams(learning_rate=1e-3, minibatch_sequences=4, num_epochs=2)


def samples(seed: int = 1, *, equal: int = 0) -> list[TrainingSequence]:
    """Four groups of four; the rewards of the first ``equal`` groups are equal."""
    traces = [
        one | ({"reward": 1.0} if int(one["group_id"][1:]) < equal else {}) for one in random_batch(seed)
    ]
    return [sample for one in traces for sample in samples_of(one, vocab_size=320, max_tokens=1024)]


def weights(trainer: TorchTrainer) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten().clone() for tensor in trainer.module.parameters()])


def test_a_step_ends_where_the_policy_has_moved_far_enough(policy_model: Path) -> None:
    free = TorchTrainer(policy_model, BASE).step(samples())
    assert (free.num_updates, free.num_skipped_updates) == (8, 0)
    assert free.update_kl > 1e-3

    target = free.update_kl / 4
    trainer = TorchTrainer(policy_model, replace(BASE, guard=GuardParams(kl_target=target)))
    held = trainer.step(samples())

    assert 1 <= held.num_updates < 8
    assert held.num_updates + held.num_skipped_updates == 8
    assert held.update_kl > target  # what it measured before the update that it left out


def test_the_update_that_is_left_out_leaves_no_trace(policy_model: Path) -> None:
    """Its gradient was computed, and must not be in the next step's."""
    params = replace(BASE, minibatch_sequences=16, guard=GuardParams(kl_target=1e-9))
    once = TorchTrainer(policy_model, replace(params, num_epochs=1))
    held = TorchTrainer(policy_model, params)
    assert once.step(samples()).num_updates == 1
    report = held.step(samples())
    assert (report.num_updates, report.num_skipped_updates) == (1, 1)
    assert torch.equal(weights(once), weights(held))


def test_the_first_update_of_a_step_is_never_left_out(policy_model: Path) -> None:
    """Before it the policy is where the step began, but for rounding."""
    params = replace(BASE, guard=GuardParams(kl_target=1e-6))
    assert TorchTrainer(policy_model, params).step(samples()).num_updates >= 1


@pytest.mark.parametrize(("equal", "is_starved"), [(2, False), (3, True), (4, True)])
def test_a_batch_of_too_few_groups_with_unequal_rewards_changes_nothing(
    policy_model: Path, equal: int, is_starved: bool
) -> None:
    trainer = TorchTrainer(policy_model, replace(BASE, guard=GuardParams(min_informative=2)))
    before = weights(trainer)

    report = trainer.step(samples(equal=equal))

    assert report.num_starved == is_starved
    assert report.informative_fraction == (4 - equal) / 4
    assert torch.equal(before, weights(trainer)) == is_starved
    assert (report.num_updates == 0) == is_starved
    assert report.num_tokens > 0  # measured all the same


def test_an_entropy_bonus_does_not_train_on_a_starved_batch(policy_model: Path) -> None:
    """Else AdamW would make full steps of the bonus alone."""
    params = replace(BASE, loss=replace(BASE.loss, entropy_weight=0.01), guard=GuardParams(min_informative=1))
    assert TorchTrainer(policy_model, params).step(samples(equal=4)).num_updates == 0


def test_idle_sequences_count_in_the_divisor_and_in_the_number_of_updates(policy_model: Path) -> None:
    """Three of four groups are idle: the gradient is the share of the tokens that are not, of what it is without them."""
    batch = samples(equal=3)
    found = [
        TorchTrainer(policy_model, replace(BASE, count_idle=count)).step(batch, single_update=True)
        for count in (True, False)
    ]
    active = sum(len(one.positions) for one in batch if one.group_id == "g3")
    share = active / sum(len(one.positions) for one in batch)
    assert found[0].grad_norm == pytest.approx(share * found[1].grad_norm, rel=1e-4)
    assert found[0].num_trained_sequences == found[1].num_trained_sequences == 4

    params = replace(BASE, minibatch_sequences=2, num_epochs=1)
    assert TorchTrainer(policy_model, replace(params, count_idle=False)).step(batch).num_updates == 2
    assert TorchTrainer(policy_model, params).step(batch).num_updates in (2, 3, 4)  # as they are dealt


def test_a_gradient_is_clipped_at_what_is_usual() -> None:
    guard = StepGuard(GuardParams(grad_quantile=0.75, grad_window=8))
    for norm in (1.0, 2.0):
        assert guard.grad_limit(100.0) == 100.0  # too little is known
        guard.saw(norm)
    for norm in (3.0, 4.0, 5.0):
        guard.saw(norm)
    assert guard.grad_limit(100.0) == 4.0  # the fourth of five
    assert guard.grad_limit(0.5) == 0.5
    for _ in range(8):
        guard.saw(9.0)
    assert guard.norms == (9.0,) * 8  # what is older is forgotten
    assert StepGuard(GuardParams()).grad_limit(7.0) == 7.0


def test_an_unusual_gradient_is_counted_and_cut(policy_model: Path) -> None:
    params = replace(BASE, max_grad_norm=1e6, guard=GuardParams(grad_quantile=0.5, grad_window=8))
    trainer = TorchTrainer(policy_model, params)
    first = trainer.step(samples(1))
    assert 0 < first.num_clipped_updates < first.num_updates
    assert first.grad_limit < 1e6


def test_what_is_usual_survives_a_checkpoint(policy_model: Path, tmp_path: Path) -> None:
    params = replace(BASE, guard=GuardParams(grad_quantile=0.5, grad_window=8, kl_target=1.0))
    steady = TorchTrainer(policy_model, params)
    steady.step(samples(1))
    path = checkpoints.save(steady.capture(attempt=1, version=1, consumed={}), tmp_path)
    steady.step(samples(2))

    resumed = TorchTrainer(policy_model, params)
    resumed.restore(checkpoints.load(path))
    resumed.step(samples(2))

    assert torch.equal(weights(steady), weights(resumed))


def test_cut_trajectories_are_left_out_where_asked_for(policy_model: Path) -> None:
    traces = random_batch(3)
    for one in traces[:5]:
        one["info"] = {"truncated": True}
    traces[6]["turns"][-1]["finish_reason"] = "length"
    batch = [sample for one in traces for sample in samples_of(one, vocab_size=320, max_tokens=1024)]
    assert sum(sample.truncated for sample in batch) == 6

    filtering = replace(BASE, overlong=replace(BASE.overlong, filtering=True))
    report = TorchTrainer(policy_model, filtering).step(batch)
    assert (report.num_overlong, report.num_trained_sequences) == (6, 10)
    assert TorchTrainer(policy_model, BASE).step(batch).num_trained_sequences == 16


def test_the_best_checkpoint_is_kept_beside_the_newest(policy_model: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(policy_model, BASE)
    captured = trainer.capture(attempt=1, version=0, consumed={})

    def save(step: int, success: float) -> None:
        checkpoints.save(replace(captured, step=step), tmp_path, keep=2)
        checkpoints.note_best(tmp_path, checkpoints.name_of(step, 1), success)

    for step, success in enumerate([0.1, 0.8, 0.5, 0.8, 0.3, 0.2]):
        save(step, success)

    assert checkpoints.best_of(tmp_path) == ("step-000001.1", 0.8)
    kept = sorted(path.name for path in tmp_path.glob("step-*"))
    assert kept == ["step-000001.1", "step-000004.1", "step-000005.1"]
    newest, _ = checkpoints.load_latest(tmp_path)
    assert newest is not None
    assert newest.step == 5  # the run goes on from the newest


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"checkpoint": "../x", "success": 1}', '{"checkpoint": 1, "success": "x"}']
)
def test_nonsense_about_the_best_is_no_checkpoint(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.json").write_text(text)
    assert checkpoints.best_of(tmp_path) is None
