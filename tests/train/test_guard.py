"""The step guard: each part stops what it is for, tells that it did, and does nothing when it is off."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.train import checkpoint as checkpoints
from rose.train.advantages import OverlongParams
from rose.train.batch import TrainingSequence, samples_of
from rose.train.guard import MIN_RATE_FACTOR, GuardParams, StepGuard, probe_of
from rose.train.last_update import keep_of_last
from rose.train.loss import LossParams
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


def test_a_step_moves_the_policy_no_further_than_it_may_and_every_minibatch_has_its_share(
    policy_model: Path,
) -> None:
    free = TorchTrainer(policy_model, replace(BASE, guard=GuardParams(kl_target=100.0))).step(samples())
    assert (free.num_updates, free.num_shortened_updates) == (8, 0)

    target = free.update_kl / 4
    held = TorchTrainer(policy_model, replace(BASE, guard=GuardParams(kl_target=target))).step(samples())

    assert target / 8 < held.update_kl <= target
    assert held.num_updates == 8
    assert 1 <= held.num_shortened_updates <= 8


@pytest.mark.parametrize("single", [False, True])
def test_the_first_and_the_only_update_of_a_step_is_held_back_too(policy_model: Path, single: bool) -> None:
    free = TorchTrainer(policy_model, replace(BASE, guard=GuardParams(kl_target=100.0)))
    reached = free.step(samples(), single_update=True).update_kl

    trainer = TorchTrainer(policy_model, replace(BASE, guard=GuardParams(kl_target=reached / 8)))
    held = trainer.step(samples(), single_update=single)

    assert held.update_kl <= reached / 8
    assert held.num_shortened_updates >= 1


def test_what_a_step_may_move_holds_for_groups_that_taught_nothing(policy_model: Path) -> None:
    """They are not in the loss: only the guard looks at them."""
    batch = samples(equal=3)
    idle = [one for one in batch if one.group_id != "g3"]
    base = replace(BASE, minibatch_sequences=16)

    def moved(guard: GuardParams) -> float:
        trainer = TorchTrainer(policy_model, replace(base, guard=guard))
        before = torch.cat(trainer.log_probs(idle))
        trainer.step(batch)
        return float((torch.cat(trainer.log_probs(idle)) - before).square().mean()) / 2

    free = moved(GuardParams())
    assert moved(GuardParams(kl_target=free / 20)) <= free / 10


def test_an_update_that_cannot_be_made_small_enough_leaves_no_trace(policy_model: Path) -> None:
    trainer = TorchTrainer(policy_model, replace(BASE, guard=GuardParams(kl_target=1e-30)))
    before = weights(trainer)
    report = trainer.step(samples())
    assert (report.num_shortened_updates, report.num_updates) == (8, 8)
    assert torch.allclose(before, weights(trainer), atol=1e-8, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_part_of_an_update_is_that_part_of_the_way(decay: float) -> None:
    """Against weights that were kept; also where it is taken back in two goes."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(7, 5, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.01, betas=(0.9, 0.95), eps=1e-3, weight_decay=decay)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        start = weight.detach().clone()
        optimizer.step()
    way = weight.detach() - start

    before = 1.0
    for now in (0.5, 0.25, 0.0, 1.0):
        keep_of_last(optimizer, [weight], before=before, now=now)
        assert torch.allclose(weight.detach(), start + now * way, rtol=1e-12, atol=1e-15)
        before = now


def test_an_update_is_halved_until_it_is_small_enough() -> None:
    guard = StepGuard(GuardParams(kl_target=0.1))
    assert guard.smaller(1.0, 0.1, 0.1) == 1.0
    kept = [1.0]
    while (now := guard.smaller(kept[-1], 0.2, 0.1)) != kept[-1]:
        kept.append(now)
    assert kept == [1.0, 0.5, 0.25, 0.125, 0.0625, 0.0]
    assert guard.smaller(0.5, float("nan"), 0.1) == 0.25


def test_what_is_allowed_grows_with_the_updates_of_a_step() -> None:
    guard = StepGuard(GuardParams(kl_target=0.1))
    assert [guard.allowed(done, 4) for done in (1, 2, 3, 4)] == pytest.approx([0.025, 0.05, 0.075, 0.1])


@pytest.mark.parametrize(("equal", "share"), [(3, 0.25), (2, 0.5), (0, 1.0)])
def test_a_step_goes_less_far_by_the_groups_that_can_only_lose(
    policy_model: Path, equal: int, share: float
) -> None:
    """AdamW's own step is nearly as long whatever part of the batch has a gradient."""

    def way(equal: int, proportional: bool) -> float:
        trainer = TorchTrainer(policy_model, replace(BASE, guard=GuardParams(proportional=proportional)))
        before = weights(trainer)
        report = trainer.step(samples(equal=equal), single_update=True)
        assert report.step_share == (share if proportional else 1.0)
        return float((weights(trainer) - before).norm())

    assert way(equal, False) > 0.9 * way(0, False)
    assert way(equal, True) == pytest.approx(share * way(equal, False), rel=1e-3)


def test_groups_that_fail_as_a_whole_do_not_shorten_a_step(policy_model: Path) -> None:
    """They have nothing to lose, and a job that succeeds seldom has many."""
    batch = [replace(one, reward=0.0) if one.group_id != "g3" else one for one in samples()]
    params = replace(BASE, guard=GuardParams(proportional=True))
    report = TorchTrainer(policy_model, params).step(batch, single_update=True)
    assert (report.step_share, report.informative_fraction) == (1.0, 0.25)


def test_the_trust_region_of_a_step_follows_its_share(policy_model: Path) -> None:
    params = replace(BASE, guard=GuardParams(kl_target=1e-3, proportional=True))
    assert TorchTrainer(policy_model, params).step(samples(equal=3)).update_kl <= 1e-3 / 16
    assert StepGuard(params.guard).allowed(1, 2, share=0.25) == pytest.approx(1e-3 / 32)


def test_updates_that_go_too_far_make_the_rate_smaller_and_room_makes_it_larger() -> None:
    guard = StepGuard(GuardParams(kl_target=0.1, adapt_rate=True))
    assert guard.rate_factor == 1.0
    guard.updated(0.1, 0.1, shortened=True)
    guard.updated(0.01, 0.1, shortened=True)
    assert guard.rate_factor == pytest.approx(1 / 2.25)
    guard.updated(0.06, 0.1, shortened=False)
    assert guard.rate_factor == pytest.approx(1 / 2.25)
    for _ in range(20):
        guard.updated(0.01, 0.1, shortened=False)
    assert guard.rate_factor == 1.0  # never above the job's own
    for _ in range(50):
        guard.updated(0.1, 0.1, shortened=True)
    assert guard.rate_factor == MIN_RATE_FACTOR

    other = StepGuard(guard.params)
    other.restore(guard.norms, guard.rate_factor)
    assert other.rate_factor == guard.rate_factor
    assert StepGuard(replace(guard.params, kl_target=0.0)).rate_factor == 1.0


def test_a_step_tells_the_rate_that_it_was_taken_at(policy_model: Path) -> None:
    params = replace(BASE, guard=GuardParams(kl_target=1e-6, adapt_rate=True))
    rates = [1e-3 / 1.5**done for done in range(8)]
    report = TorchTrainer(policy_model, params).step(samples())
    assert report.learning_rate == pytest.approx(sum(rates) / 8)


def test_a_probe_has_one_sequence_of_each_group_before_a_second_of_any() -> None:
    groups = [f"g{index // 16}" for index in range(128)]
    for size in (4, 8, 11, 128, 500):
        found = probe_of(groups, size, seed=3)
        assert len(found) == len(set(found)) == min(size, 128)
        counts = Counter(groups[index] for index in found)
        assert max(counts.values()) - min((counts[f"g{index}"] for index in range(8)), default=0) <= 1
    assert probe_of(groups, 8, seed=3) != probe_of(groups, 8, seed=4)
    assert probe_of(groups, 8, seed=3) == probe_of(groups, 8, seed=3)


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


@pytest.mark.parametrize(
    "shaping",
    [
        {"loss": LossParams(kl_weight=0.1, kl_kind="reward")},
        {"overlong": OverlongParams(max_tokens=6, buffer_tokens=6)},
    ],
)
def test_what_is_taken_off_rewards_does_not_make_a_group_informative(
    policy_model: Path, shaping: dict[str, Any]
) -> None:
    """Where the task rewards a whole group alike, it is the penalties that differ: they say nothing of the task."""
    trainer = TorchTrainer(policy_model, replace(BASE, guard=GuardParams(min_informative=1), **shaping))
    assert not trainer.step(samples(1)).num_starved  # and now the policy has left the first model
    before = weights(trainer)

    report = trainer.step(samples(2, equal=4))

    assert (report.num_starved, report.informative_fraction, report.num_updates) == (1, 0.0, 0)
    assert torch.equal(before, weights(trainer))
    assert trainer.step(samples(2, equal=3)).informative_fraction == 0.25


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
    params = replace(
        BASE, guard=GuardParams(grad_quantile=0.5, grad_window=8, kl_target=1e-4, adapt_rate=True)
    )
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


def best(directory: Path) -> tuple[str, float]:
    found = checkpoints.best_of(directory)
    assert found is not None
    return found.name, found.success


def test_the_best_checkpoint_is_kept_beside_the_newest(policy_model: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(policy_model, BASE)
    captured = trainer.capture(attempt=1, version=0, consumed={})

    def save(step: int, success: float) -> None:
        checkpoints.save(replace(captured, step=step), tmp_path, keep=2)
        checkpoints.note_best(tmp_path, checkpoints.name_of(step, 1), success, "sampled")

    for step, success in enumerate([0.1, 0.8, 0.5, 0.8, 0.3, 0.2]):
        save(step, success)

    assert best(tmp_path) == ("step-000001.1", 0.8)
    kept = sorted(path.name for path in tmp_path.glob("step-*"))
    assert kept == ["step-000001.1", "step-000004.1", "step-000005.1"]
    newest, _ = checkpoints.load_latest(tmp_path)
    assert newest is not None
    assert newest.step == 5  # the run goes on from the newest


def test_the_best_of_what_was_sampled_gives_way_to_held_out_tasks_and_not_the_other_way_round(
    tmp_path: Path,
) -> None:
    for step, success, measure, of in (
        (1, 0.9, "sampled", 1),
        (2, 0.4, "held_out", 2),
        (3, 0.95, "sampled", 2),
        (4, 0.3, "held_out", 2),
        (5, 0.5, "held_out", 5),
    ):
        name = checkpoints.name_of(step, 1)
        (tmp_path / name).mkdir()
        checkpoints.note_best(tmp_path, name, success, measure)
        assert best(tmp_path)[0] == checkpoints.name_of(of, 1)


@pytest.mark.parametrize("measure", ["sampled", "held_out"])
def test_a_best_of_before_is_compared_by_its_figure(tmp_path: Path, measure: checkpoints.Measure) -> None:
    """Its file did not say what was measured; a job that goes on mostly measures the same."""
    for step in range(3):
        (tmp_path / checkpoints.name_of(step, 1)).mkdir()
    (tmp_path / "best.json").write_text('{"checkpoint": "step-000000.1", "success": 0.75}')
    checkpoints.note_best(tmp_path, "step-000001.1", 0.7, measure)
    assert best(tmp_path) == ("step-000000.1", 0.75)
    checkpoints.note_best(tmp_path, "step-000002.1", 0.8, measure)
    assert best(tmp_path) == ("step-000002.1", 0.8)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"checkpoint": "../x", "success": 1}', '{"checkpoint": 1, "success": "x"}']
)
def test_nonsense_about_the_best_is_no_checkpoint(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.json").write_text(text)
    assert checkpoints.best_of(tmp_path) is None
