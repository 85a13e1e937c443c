"""What a job sets and what has no effect, or cannot be right, is refused by its name before anything starts; what a recipe or a default sets is not."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rose.errors import ConfigError
from rose.train.check import check_job, checks_of_the_start
from rose.train.recipes import RECIPES
from rose.train.train_config import TrainConfig


def job(model: Path, table: dict[str, Any]) -> TrainConfig:
    trainer = {"learning_rate": 1e-6} | table.get("trainer", {})
    return TrainConfig.model_validate(
        {"model": model, "weights": {"directory": "x"}} | table | {"trainer": trainer}
    )


def of(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


@pytest.mark.parametrize(
    ("text", "field", "fix"),
    [
        ('trainer = { algorithm = "rloo", clip_low = 0.1 }', "trainer.clip_low", "objective"),
        ('trainer = { algorithm = "rloo", clip_high = 0.3 }', "trainer.clip_high", "objective"),
        ('trainer = { algorithm = "rloo", ratio = "sequence" }', "trainer.ratio", "objective"),
        ('trainer = { algorithm = "rloo", guard.dual_clip = 2.0 }', "trainer.guard.dual_clip", "objective"),
        ('trainer = { algorithm = "cispo", guard.dual_clip = 2.0 }', "trainer.guard.dual_clip", "objective"),
        ("trainer = { truncation_low = 0.5 }", "trainer.truncation_low", "token_mask"),
        ('trainer = { correction = "none", truncation = 5.0 }', "trainer.truncation", "correction"),
        ("trainer = { overlong.buffer_tokens = 100 }", "trainer.overlong.buffer_tokens", "max_tokens"),
        ("trainer = { overlong.weight = 0.5 }", "trainer.overlong.weight", "max_tokens"),
        ("eval = { sampled_episodes = 4 }", "eval.sampled_episodes", "every_steps"),
        ("eval = { num_training_tasks = 4 }", "eval.num_training_tasks", "every_steps"),
        ('rollout = { mode = "asynchronous", adaptive_alpha.most = 3 }', "rollout.adaptive_alpha.most", "enabled"),
        ('trainer = { algorithm = "dapo", kl_kind = "k2" }', "trainer.kl_kind", "kl_weight"),
        ("trainer = { sum_tokens = 512 }", "trainer.sum_tokens", "aggregation"),
        ('trainer = { guard = { starved = "skip", max_rounds = 8 } }', "trainer.guard.max_rounds", "wait"),
        ("rollout = { tail_batching.patience = 4 }", "rollout.tail_batching.patience", "extra_groups"),
        ("lend = { hold_s = 30.0 }", "lend.hold_s", "node_dir"),
        ("reward = { max_workers = 8 }", "reward.max_workers", "reward.kind"),
        ("reward = { settings = { url = 'http://x' } }", "reward.settings", "reward.kind"),
        (
            'tasks = [{ name = "a", kind = "frozenlake", reward = { timeout_s = 5.0 } }]',
            "tasks.a.reward.timeout_s",
            "tasks.a.reward.kind",
        ),
        ("trainer = { overlong = { max_tokens = 10, buffer_tokens = 100 } }", "trainer.overlong.buffer_tokens", "10"),
        (
            "num_steps = 2\ntrainer = { fine_tuning_steps = 5, fine_tuning_learning_rate = 1e-6 }",
            "trainer.fine_tuning_steps",
            "2",
        ),
        ('trainer = { lora = { rank = 4, targets = ["q_prj"] } }', "trainer.lora.targets", "q_proj"),
        ("rollout = { max_tokens = 2000 }", "rollout.max_tokens", "1023"),
        (
            'tasks = [{ name = "a", kind = "math_tools", max_tokens = 1024 }]',
            "tasks.a.max_tokens",
            "1023",
        ),
    ],
)  # fmt: skip
def test_a_setting_that_has_no_effect_or_cannot_be_right_is_refused(
    policy_model: Path, text: str, field: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_job(job(policy_model, of(text)))
    assert caught.value.field == field
    assert fix in str(caught.value.fix)


@pytest.mark.parametrize("algorithm", RECIPES)
def test_what_a_recipe_or_a_default_sets_is_not_refused(policy_model: Path, algorithm: str) -> None:
    check_job(job(policy_model, {"trainer": {"algorithm": algorithm}}))


@pytest.mark.parametrize(
    "text",
    [
        'trainer = { algorithm = "rloo", objective = "clip", clip_low = 0.1 }',
        'trainer = { algorithm = "cispo", guard.dual_clip = 0.0, clip_high = 3.0 }',
        'trainer = { correction = "token_mask", truncation_low = 0.5, truncation = 3.0 }',
        'trainer = { correction = "none", truncation = 2.0, truncation_low = 0.0 }',  # as it is without them
        "trainer = { overlong = { max_tokens = 0, buffer_tokens = 100 } }",  # switched off outright
        'trainer = { algorithm = "dapo", kl_weight = 0.0, kl_kind = "k2" }',
        'trainer = { guard = { starved = "train", min_informative = 0.5, max_rounds = 8 } }',
        "trainer = { guard = { grad_quantile = 0.0, grad_window = 128 } }",
        "rollout = { tail_batching = { extra_groups = 0, patience = 4 } }",
        "reward = { settings = {}, max_workers = 4 }",  # as it is without them
        'trainer = { aggregation = "sum", sum_tokens = 512 }',
        'trainer = { algorithm = "dapo", kl_weight = 0.01, kl_kind = "k2" }',
        'reward = { kind = "exact_match", max_workers = 8 }',
        "trainer = { dynamic_sampling.max_rounds = 4 }",  # of groups in which nothing was sampled, too
        "eval = { every_steps = 0, sampled_episodes = 4 }",
        "rollout = { adaptive_alpha = { enabled = false, most = 3 } }",
        'trainer = { lora = { rank = 4, targets = ["q_proj", "model.layers.0.mlp.down_proj"] } }',
        "rollout = { max_tokens = 1023 }",
        "num_steps = 2\ntrainer = { fine_tuning_steps = 2, fine_tuning_learning_rate = 1e-6 }",
    ],
)
def test_what_has_an_effect_or_was_switched_off_outright_is_taken(policy_model: Path, text: str) -> None:
    check_job(job(policy_model, of(text)))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("trainer", "kl_weight"),
        ("trainer", "max_grad_norm"),
        ("trainer", "truncation"),
        ("scheduler", "turn_timeout_s"),
        ("reward", "timeout_s"),
        ("rollout", "temperature"),
        ("eval", "temperature"),
    ],
)
def test_a_number_that_is_not_finite_is_refused(section: str, name: str, value: float) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        job(Path("m"), {section: {name: value}})


def test_every_reason_against_streaming_is_told_at_once(policy_model: Path) -> None:
    text = 'trainer = { stream_groups = "gradients", num_epochs = 2, minibatch_sequences = 128 }'
    with pytest.raises(ConfigError) as caught:
        check_job(job(policy_model, of(text)))
    assert caught.value.field == "rollout.on_stale"
    assert "trainer.num_epochs: " in str(caught.value)
    assert "minibatch" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "num_cpus"),
    [
        ("", 2),
        ("trainer = { num_ranks = 4 }", 5),
        ("env = { num_managers = 2 }", 3),
        ("ray = { num_cpus = 8 }", 8),
    ],
)
def test_a_private_cluster_is_said_as_it_will_be_started(
    policy_model: Path, text: str, num_cpus: int
) -> None:
    table = of(text)
    config = job(policy_model, table | {"ray": {"address": "local"} | table.get("ray", {})})
    (ray,) = [check for check in checks_of_the_start(config) if check.name == "Ray"]
    assert ray.look() == f"a private cluster of {num_cpus} CPUs will be started"


def test_a_gpu_that_this_machine_has_not_is_missed(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.train.settings_check.DEVICES", tmp_path)
    config = job(policy_model, {"ray": {"address": "local"}, "trainer": {"device": "cuda"}})
    (ray,) = [check for check in checks_of_the_start(config) if check.name == "Ray"]
    with pytest.raises(ConfigError, match=r"trainer\.device: .*0 GPUs.*1"):
        ray.look()
    (tmp_path / "nvidia0").touch()
    assert ray.look() == "a private cluster of 2 CPUs will be started"
