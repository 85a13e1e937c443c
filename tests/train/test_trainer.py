"""TorchTrainer: its gradient, its rounding, its reproducibility, and its checkpoints."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.auth import Tokens
from rose.errors import ConfigError, TrainError
from rose.train import checkpoint as checkpoints
from rose.train.batch import TrainingSequence, samples_of
from rose.train.build import make_publisher, torch_trainer, trainer_params
from rose.train.loading import empty_modules, load_module
from rose.train.loss import LossParams
from rose.train.model import Dtype
from rose.train.train_config import TrainConfig
from rose.train.trainer import TorchTrainer, TrainerParams
from rose.train.workers import TrainWorker
from tests.train.traces import random_batch


def samples(seed: int, **size: int) -> list[TrainingSequence]:
    return [
        sample
        for one in random_batch(seed, **size)
        for sample in samples_of(one, vocab_size=320, max_tokens=1024)
    ]


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.module.named_parameters()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def trainer(policy_model: Path) -> TorchTrainer:
    return TorchTrainer(policy_model, TrainerParams(learning_rate=1e-3, minibatch_sequences=8, num_epochs=2))


def test_log_probs_do_not_depend_on_what_a_trajectory_is_batched_with(trainer: TorchTrainer) -> None:
    batch = samples(1)
    together = trainer.log_probs(batch)
    for sample, log_probs_N in zip(batch, together, strict=True):
        assert torch.allclose(trainer.log_probs([sample])[0], log_probs_N, atol=1e-5)


def test_forward_weights_are_the_masters_rounded_to_bf16(trainer: TorchTrainer) -> None:
    trainer.step(samples(2))
    moved = False
    for master, tensor in zip(trainer.module.parameters(), trainer.rounded_model.parameters(), strict=True):
        assert torch.equal(tensor, master.to(torch.bfloat16).float())
        moved |= not torch.equal(tensor, master)
    assert moved  # the masters hold more than the engine does


def test_small_rates_reach_the_masters_and_leave_most_rounded_weights_alone(trainer: TorchTrainer) -> None:
    masters = weights(trainer)
    rounded = [tensor.detach().clone() for tensor in trainer.rounded_model.parameters()]

    trainer.step(samples(3), learning_rate=5e-6)

    assert not equal(masters, weights(trainer))
    pairs = list(zip(rounded, trainer.rounded_model.parameters(), strict=True))
    changed = sum(int((old != new).sum()) for old, new in pairs)
    assert 0 < changed < 0.5 * sum(old.numel() for old in rounded)


def test_a_large_epsilon_moves_weights_by_the_size_of_their_gradients(policy_model: Path) -> None:
    """The same update twice: AdamW's own moves every weight that has a gradient equally far, one with a floor under its divisor few."""

    def moves(rate: float, epsilon: float) -> torch.Tensor:
        made = TorchTrainer(policy_model, TrainerParams(learning_rate=rate, adam_epsilon=epsilon))
        before = weights(made)
        made.step(samples(3), single_update=True)
        after = weights(made)
        return torch.cat([(after[name] - before[name]).abs().flatten() for name in before])

    equal_steps, by_size = moves(1e-4, 1e-8), moves(1e-4, 1e-2)
    moved = equal_steps > 0
    assert equal_steps[moved].quantile(0.1) > 0.9e-4
    assert by_size[moved].quantile(0.1) < 0.1 * by_size[moved].max()


def test_a_single_update_takes_the_whole_batch_at_once(trainer: TorchTrainer) -> None:
    assert trainer.step(samples(3), single_update=True).num_updates == 1


def test_a_batch_without_any_gradient_moves_nothing(policy_model: Path) -> None:
    """Not by the momentum of the steps before, and the guard has no norm of it: what it clips at would be 0 in the end."""
    masked = LossParams(correction="token_mask", truncation=2.0)
    trainer = TorchTrainer(
        policy_model, TrainerParams(learning_rate=1e-3, weight_decay=0.1, minibatch_sequences=8, loss=masked)
    )
    batch = samples(3)
    trainer.step(
        [
            replace(one, logprobs=tuple(found.tolist()))
            for one, found in zip(batch, trainer.log_probs(batch), strict=True)
        ]
    )
    before, norms = weights(trainer), trainer._guard.norms
    assert norms

    far = [replace(one, logprobs=(-50.0,) * len(one.logprobs)) for one in samples(4)]
    report = trainer.step(far)

    assert equal(weights(trainer), before)
    assert trainer._guard.norms == norms
    assert (report.num_updates, report.grad_norm, report.ess) == (0, 0.0, 0.0)
    assert (report.learning_rate, report.clip_fraction) == (1e-3, 0.0)
    json.dumps(asdict(report), allow_nan=False)


def test_the_same_batch_in_any_order_gives_the_same_weights(policy_model: Path) -> None:
    found = []
    for batch in (samples(4), samples(4)[::-1]):
        trainer = TorchTrainer(
            policy_model, TrainerParams(learning_rate=1e-3, minibatch_sequences=4, num_epochs=2)
        )
        trainer.step(batch)
        found.append(weights(trainer))
    assert equal(*found)


def test_masked_and_undecided_trajectories_are_measured_but_not_trained(policy_model: Path) -> None:
    batch = random_batch(5, num_groups=1, group_size=4)
    decided = [one | {"stale": True} for one in batch]
    undecided = [one | {"reward": 0.5} for one in batch]
    for traces in (decided, undecided):
        trainer = TorchTrainer(policy_model, TrainerParams(learning_rate=1e-3))
        before = weights(trainer)
        taken = [one for trace in traces for one in samples_of(trace, vocab_size=320, max_tokens=1024)]

        report = trainer.step(taken)

        assert (report.num_trained_sequences, report.num_updates) == (0, 0)
        assert report.num_tokens == sum(len(one.positions) for one in taken)
        assert equal(before, weights(trainer))


def test_training_makes_rewarded_actions_likelier(trainer: TorchTrainer) -> None:
    batch = samples(6)
    advantages = {one.trajectory_id: 1.0 if one.reward else -1.0 for one in batch}

    def gain() -> float:
        return sum(
            advantages[one.trajectory_id] * float(found.sum())
            for one, found in zip(batch, trainer.log_probs(batch), strict=True)
        )

    before = gain()
    report = trainer.step(batch)
    assert gain() > before + 1.0
    assert report.num_updates == 4  # 16 trajectories in minibatches of 8, twice


def test_resume_goes_on_exactly_as_if_nothing_had_happened(policy_model: Path, tmp_path: Path) -> None:
    params = TrainerParams(learning_rate=1e-3, minibatch_sequences=4, num_epochs=2, seed=9)
    steady = TorchTrainer(policy_model, params)
    steady.step(samples(7))
    path = checkpoints.save(steady.capture(attempt=1, version=1, consumed={0: ("t1", "t2")}), tmp_path)
    steady.step(samples(8))

    resumed = TorchTrainer(policy_model, params)
    resumed.restore(checkpoints.load(path))
    assert resumed.step_index == 1
    resumed.step(samples(8))

    assert equal(weights(steady), weights(resumed))
    assert checkpoints.load(path).consumed_ids == ["t1", "t2"]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    trainer: TorchTrainer, tmp_path: Path
) -> None:
    checkpoints.save(trainer.capture(attempt=1, version=0, consumed={}), tmp_path)
    trainer.step(samples(9))
    newest = checkpoints.save(trainer.capture(attempt=1, version=1, consumed={}), tmp_path)
    (file,) = newest.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    found, passed_over = checkpoints.load_latest(tmp_path)

    assert found is not None
    assert found.step == 0
    assert len(passed_over) == 1
    assert "does not match its hash" in passed_over[0]


def test_a_checkpoint_that_was_cut_short_does_not_exist(
    trainer: TorchTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(trainer.capture(attempt=1, version=0, consumed={}), tmp_path)

    def disk_full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_write_tensors", disk_full)
    with pytest.raises(TrainError, match="cannot be written"):
        checkpoints.save(trainer.capture(attempt=1, version=1, consumed={}), tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["step-000000.1"]


def test_what_a_killed_writer_left_is_removed_by_the_next(trainer: TorchTrainer, tmp_path: Path) -> None:
    torn = tmp_path / ".writing-abc"
    torn.mkdir()
    (torn / "shard.safetensors").write_bytes(b"half")
    checkpoints.save(trainer.capture(attempt=1, version=0, consumed={}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000.1"]


@pytest.mark.parametrize(
    "change", [{"shuffle_state": [3, [1, 2], None]}, {"version": 10**400}, {"consumed": {"0": 5}}]
)
def test_a_description_that_no_trainer_can_take_is_damage(
    trainer: TorchTrainer, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Only the tensors have a hash: the rest must prove itself, or nobody would go on to the one before."""
    path = checkpoints.save(trainer.capture(attempt=1, version=0, consumed={}), tmp_path)
    described = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(described | change))
    found, passed_over = checkpoints.load_latest(tmp_path)
    assert found is None
    assert len(passed_over) == 1


def test_only_the_newest_checkpoints_are_kept_and_a_later_attempt_is_newer(
    trainer: TorchTrainer, tmp_path: Path
) -> None:
    captured = trainer.capture(attempt=1, version=0, consumed={})
    for attempt, step in [(1, 5), (1, 6), (2, 3), (2, 4)]:
        checkpoints.save(replace(captured, version=step, attempt=attempt, step=step), tmp_path, keep=3)

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000003.2", "step-000004.2", "step-000006.1"]
    found, _ = checkpoints.load_latest(tmp_path)
    assert found is not None
    assert (found.attempt, found.step) == (2, 4)
    assert checkpoints.latest_attempt(tmp_path) == 2


def test_consumed_ids_are_kept_for_a_bounded_number_of_steps() -> None:
    """Also where a resume would name more."""
    consumed = {step: (f"t{step}",) for step in range(100)}
    for num_needed in (5, 68):
        assert list(checkpoints.ids_to_keep(consumed, 100, num_needed)) == list(range(36, 100))


def test_a_checkpoint_whose_description_could_not_be_read_again_is_not_written(
    trainer: TorchTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "MAX_JSON_BYTES", 2 << 20)
    captured = trainer.capture(attempt=1, version=0, consumed={})
    checkpoints.save(captured, tmp_path)
    consumed = {0: tuple(f"t-{number:020x}" for number in range(80_000))}
    with pytest.raises(
        TrainError, match=r"step-000001\.1 cannot be written: state\.json .* 80000 traj"
    ) as caught:
        checkpoints.save(replace(captured, step=1, consumed=consumed), tmp_path)
    assert caught.value.field == "checkpoint"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000.1"]


async def test_ids_of_older_steps_give_way_where_a_step_has_very_many(
    trainer: TorchTrainer, policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that a resume has to name."""
    monkeypatch.setattr(checkpoints, "MAX_JSON_BYTES", 4 << 20)
    table = {
        "model": policy_model,
        "output_dir": tmp_path,
        "weights": {"directory": tmp_path / "store"},
        "trainer": {"learning_rate": 1e-3, "checkpoint_every": 4, "background_checkpoints": True},
    }
    worker = TrainWorker(TrainConfig.model_validate(table), Tokens.generate())
    worker._trainer, trainer._step_index = trainer, 64
    for num_ids, least, most in ((2_000, 12, 63), (8_000, 12, 12)):
        worker._consumed = {
            step: tuple(f"t-{step:010x}{number:010x}" for number in range(num_ids)) for step in range(64)
        }
        await worker._save()
        newest, passed_over = checkpoints.load_latest(tmp_path / "checkpoints")
        assert newest is not None
        assert passed_over == []
        assert list(newest.consumed) == list(range(64 - len(newest.consumed), 64))
        assert least <= len(newest.consumed) <= most


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    trainer: TorchTrainer, tmp_path: Path
) -> None:
    path = checkpoints.save(trainer.capture(attempt=1, version=0, consumed={}), tmp_path)
    loaded = checkpoints.load(path)
    before = weights(trainer)
    foreign = {name: (3,) if "q_proj" in name else shape for name, shape in loaded.shapes.items()}
    for shapes in (foreign, {**loaded.shapes, "extra": (3,)}):
        with pytest.raises(
            TrainError, match=r"step-000000\.1 is of another model than .*output_dir"
        ) as caught:
            trainer.restore(replace(loaded, shapes=shapes))
        assert caught.value.field == "model"
    with pytest.raises(TrainError, match=r"step-000000\.1 is of another model than .*, whose weights"):
        trainer.restore(replace(loaded, base="0" * 32))  # of the same shapes
    assert equal(before, weights(trainer))


def test_a_checkpoint_that_finds_no_room_says_what_may_be_removed(
    trainer: TorchTrainer, tmp_path: Path
) -> None:
    def save(attempt: int) -> None:
        checkpoints.save(trainer.capture(attempt=attempt, version=0, consumed={}), tmp_path)

    (tmp_path / ".writing-step-000000.1").touch()  # no folder can be made there
    with pytest.raises(TrainError, match=r"cannot be written.*\(make room on its disk, then run it again\)"):
        save(1)
    for attempt in (2, 3):
        save(attempt)
    (tmp_path / ".writing-step-000000.4").touch()
    with pytest.raises(TrainError, match="cannot be written") as caught:
        save(4)
    assert caught.value.fix == (
        f"make room on its disk, then run it again to go on from step-000000.3; 1 older in {tmp_path} may be removed, "
        "which trainer.keep_checkpoints does only behind a new one"
    )


def test_a_folder_that_cannot_be_listed_either_hides_no_error(trainer: TorchTrainer, tmp_path: Path) -> None:
    folder = tmp_path / ("n" * 300)  # longer than a name may be: whatever looks at it fails
    with pytest.raises(TrainError, match=r"cannot be written: .*File name too long") as caught:
        checkpoints.save(trainer.capture(attempt=1, version=0, consumed={}), folder)
    assert caught.value.fix == "make room on its disk, then run it again"
    with pytest.raises(TrainError, match=r"cannot be written: .*File name too long"):
        checkpoints.note_best(folder, "step-000000.1", 1.0, "sampled")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 2, "files": {}}'])
def test_nonsense_in_a_checkpoint_is_a_clear_error(trainer: TorchTrainer, tmp_path: Path, text: str) -> None:
    path = checkpoints.save(trainer.capture(attempt=1, version=0, consumed={}), tmp_path)
    (path / "state.json").write_text(text)
    with pytest.raises(TrainError) as caught:
        checkpoints.load(path)
    assert caught.value.field == str(path)


def test_a_checkpoint_holds_no_pickle(trainer: TorchTrainer, tmp_path: Path) -> None:
    trainer.step(samples(10))
    path = checkpoints.save(trainer.capture(attempt=1, version=1, consumed={}), tmp_path)
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    assert json.loads((path / "state.json").read_text())["step"] == 1


@pytest.mark.skipif(any(find_spec(name) for name in ("flash_attn", "kernels")), reason="they are installed")
def test_attention_whose_kernels_are_not_installed_is_named(policy_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attn_implementation": "flash_attention_2"}))
    with pytest.raises(ConfigError, match=r"model: .*cannot be loaded: FlashAttention2"):
        TorchTrainer(folder, TrainerParams(learning_rate=1e-3))


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a model folder"):
        TorchTrainer(tmp_path, TrainerParams(learning_rate=1e-3))


@pytest.mark.parametrize(
    ("setting", "value", "where"),
    [
        ("learning_rate", 0.5, "learning_rate"),
        ("num_epochs", 7, "num_epochs"),
        ("minibatch_sequences", 7, "minibatch_sequences"),
        ("max_part_tokens", 7, "max_part_tokens"),
        ("packing", True, "packing"),
        ("max_grad_norm", 0.5, "max_grad_norm"),
        ("weight_decay", 0.5, "weight_decay"),
        ("adam_beta2", 0.5, "adam_beta2"),
        ("adam_epsilon", 0.5, "adam_epsilon"),
        ("baseline", "others", "baseline"),
        ("scale_advantages", "batch", "scale_advantages"),
        ("count_idle", False, "count_idle"),
        ("policy_dtype", "float32", "policy_dtype"),
        ("compute_dtype", "bfloat16", "compute_dtype"),
        ("activation_checkpointing", True, "activation_checkpointing"),
        ("offload", True, "offload"),
        ("clip_low", 0.5, "loss.clip_low"),
        ("clip_high", 0.5, "loss.clip_high"),
        ("objective", "cispo", "loss.objective"),
        ("ratio", "sequence", "loss.ratio"),
        ("sum_tokens", 7, "loss.sum_tokens"),
        ("correction", "sequence_mask", "loss.correction"),
        ("truncation", 7.0, "loss.truncation"),
        ("truncation_low", 0.5, "loss.truncation_low"),
        ("entropy_weight", 0.5, "loss.entropy_weight"),
        ("aggregation", "sequence", "loss.aggregation"),
        ("kl_weight", 0.5, "loss.kl_weight"),
        ("kl_kind", "reward", "loss.kl_kind"),
        ("overlong", {"max_tokens": 7}, "overlong.max_tokens"),
        ("overlong", {"max_tokens": 7, "buffer_tokens": 3}, "overlong.buffer_tokens"),
        ("overlong", {"weight": 0.5}, "overlong.weight"),
        ("overlong", {"filtering": True}, "overlong.filtering"),
        ("lora", {"rank": 4}, "lora.rank"),
        ("lora", {"rank": 4, "alpha": 5.0}, "lora.alpha"),
        ("lora", {"rank": 4, "targets": ("q_proj",)}, "lora.targets"),
        ("guard", {"kl_target": 0.5}, "guard.kl_target"),
        ("guard", {"adapt_rate": False}, "guard.adapt_rate"),
        ("guard", {"proportional": False}, "guard.proportional"),
        ("guard", {"grad_quantile": 0.5}, "guard.grad_quantile"),
        ("guard", {"grad_window": 7}, "guard.grad_window"),
        ("guard", {"dual_clip": 7.0}, "loss.dual_clip"),
    ],
)
def test_a_jobs_settings_reach_its_trainer(policy_model: Path, setting: str, value: Any, where: str) -> None:
    job = {
        "job": "j",
        "model": str(policy_model),
        "weights": {"directory": "w"},
        "env": {"kind": "frozenlake"},
        "trainer": {"learning_rate": 1e-3, setting: value},
    }
    found: Any = torch_trainer(TrainConfig.model_validate(job))
    expected = value
    for name in ("params", *where.split(".")):
        found = getattr(found, name)
        expected = expected[name] if isinstance(expected, dict) and name in expected else expected
    assert found == expected


@pytest.mark.parametrize(
    ("device", "own", "wanted"),
    [("cpu", None, "float32"), ("cuda", None, "bfloat16"), ("cuda", "float32", "float32")],
)
def test_products_are_of_the_devices_type_unless_the_job_says_otherwise(
    tmp_path: Path, device: str, own: str | None, wanted: str
) -> None:
    job = {
        "model": tmp_path,
        "weights": {"directory": tmp_path},
        "trainer": {"learning_rate": 1e-3, "device": device, "compute_dtype": own},
    }
    assert trainer_params(TrainConfig.model_validate(job)).computes_in == wanted


@pytest.mark.parametrize("family", ["granite", "gemma2", "cohere"])
def test_a_model_that_does_more_with_its_logits_is_refused(tmp_path: Path, family: str) -> None:
    """The trainer applies the output layer itself: it would train another policy than the engines sample from."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        family, vocab_size=64, num_key_value_heads=2, head_dim=16, pad_token_id=0, **shape
    )
    if family == "granite":
        config.logits_scaling = 8.0
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(20.0)  # logits of the size that a trained model has
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"model: .*\({family}\) scales or caps its logits"):
        TorchTrainer(tmp_path, TrainerParams(learning_rate=1e-3))


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_weights_are_published_as_the_trainer_computes_with_them(
    policy_model: Path, tmp_path: Path, dtype: str, size: int
) -> None:
    job = {
        "model": policy_model,
        "weights": {"directory": tmp_path},
        "trainer": {"learning_rate": 1e-3, "policy_dtype": dtype},
    }
    config = TrainConfig.model_validate(job)
    module = TorchTrainer(policy_model, TrainerParams(learning_rate=1e-3)).module
    report = make_publisher(config, Tokens.generate(), module, 1).publish(0)
    assert report.bytes_dense == size * sum(tensor.numel() for tensor in module.parameters())


def test_several_files_of_a_folder_are_read_by_shards_as_one_process_reads_them(
    policy_model: Path, tmp_path: Path
) -> None:
    """And the parameters of an empty model take no memory until they are filled."""
    whole = load_module(policy_model)
    whole.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    skeleton, empty = empty_modules(tmp_path, torch.float32)
    assert all(tensor.is_meta for tensor in skeleton.parameters())
    assert [name for name, _ in empty.named_parameters()] == [name for name, _ in whole.named_parameters()]
    for (name, ours), (_, theirs) in zip(empty.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name

    checkpoints.read_into({name: tensor.detach() for name, tensor in empty.named_parameters()}, tmp_path)

    for ours, theirs in zip(empty.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    ids_BT = torch.arange(5).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(empty.eval()(ids_BT).logits, whole.eval()(ids_BT).logits)


def test_buffers_of_a_folder_are_read_by_shards_too(tmp_path: Path) -> None:
    """Gemma 4 multiplies what each layer gives by one: as it is made, that is 1."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    more = {
        "num_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **shape, **more))
    scalars = [name for name, _ in made.named_buffers() if name.endswith("layer_scalar")]
    for number, name in enumerate(scalars, start=1):
        made.get_buffer(name).fill_(0.25 * number)
    made.save_pretrained(tmp_path)

    for one in empty_modules(tmp_path, torch.bfloat16):
        assert [one.get_buffer(name).item() for name in scalars] == [0.25, 0.5]


def test_a_folder_that_lacks_a_tensor_is_refused(policy_model: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="cannot be read"):
        checkpoints.read_into({"nowhere": torch.zeros(3)}, policy_model)


@pytest.mark.usefixtures("only_new_garbage")
@pytest.mark.parametrize(("compute", "size"), [("float32", 4), ("bfloat16", 2)])
def test_the_first_model_is_held_once_and_in_the_type_that_it_computes_in(
    policy_model: Path, compute: Dtype, size: int
) -> None:
    """Nobody trains it: it needs no masters."""

    def held_bytes() -> int:
        gc.collect()
        alive = [one for one in gc.get_objects() if type(one) is torch.nn.Parameter]
        return sum({one.data_ptr(): one.nbytes for one in alive}.values())

    params = TrainerParams(learning_rate=1e-3, compute_dtype=compute)
    held = [held_bytes()]
    made = []
    for kl_weight in (0.0, 0.1):
        made.append(TorchTrainer(policy_model, replace(params, loss=LossParams(kl_weight=kl_weight))))
        held.append(held_bytes())
    without, beside = held[1] - held[0], held[2] - held[1]
    whole = sum(tensor.numel() for tensor in made[0].module.parameters())
    assert beside - without == size * whole
    reports = [made[1].step(samples(seed)) for seed in (3, 4)]
    assert reports[0].kl_reference == 0.0  # both began alike, rounded as the engines are
    assert reports[1].kl_reference > 0.0


def test_masters_in_host_memory_change_nothing(policy_model: Path) -> None:
    """Here everything is in host memory: the path is the one of a GPU, and so are its sums."""
    found = []
    for offload in (False, True):
        made = TorchTrainer(policy_model, TrainerParams(learning_rate=1e-3, num_epochs=1, offload=offload))
        made.step(samples(3))
        found.append(weights(made))
    assert equal(*found)
