"""Settings that a job names and that have no effect, or cannot be right with its model or on its machine.

Of what a job does not name nothing is refused, nor of what it names as it is without it.  A part that is switched off outright (``overlong.max_tokens = 0``,
``guard.grad_quantile = 0``, ``guard.starved = "train"``) may have settings that wait for it to be switched on.

Reads the model folder's headers and ``config.json`` at most; loads no torch.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from rose.config import Section
from rose.errors import ConfigError
from rose.train.model_folder import layers_named
from rose.train.recipes import RECIPES
from rose.train.train_config import RewardSettings, TrainConfig

DEVICES = Path("/dev")
"""Where the driver has a file ``nvidia0`` for each GPU."""


def check_effects(config: TrainConfig) -> None:
    """Look for what has no effect beside the job's other settings, and for numbers that contradict each other.

    Raises:
        ConfigError: The first that is found.
    """
    _check_loss(config)
    off = "max_tokens = 0 said outright lets it stand"
    _check_part(
        config.trainer.overlong,
        "trainer.overlong",
        ("buffer_tokens", "weight"),
        switch=("max_tokens",),
        fix=f"set trainer.overlong.max_tokens; {off}",
    )
    _check_part(
        config.rollout.adaptive_alpha,
        "rollout.adaptive_alpha",
        ("least", "most", "kl_target", "idle_target", "window"),
        switch=("enabled",),
        fix="set rollout.adaptive_alpha.enabled = true; false said outright lets it stand",
    )
    _check_part(
        config.eval,
        "eval",
        tuple(name for name in type(config.eval).model_fields if name not in ("every_steps", "at_end")),
        switch=("every_steps", "at_end"),
        fix="set eval.every_steps or eval.at_end; every_steps = 0 said outright lets it stand",
    )
    _check_part(
        config.rollout.tail_batching,
        "rollout.tail_batching",
        ("patience",),
        switch=("extra_groups",),
        fix="set rollout.tail_batching.extra_groups; 0 said outright lets it stand",
    )
    _check_part(
        config.lend,
        "lend",
        ("hold_s", "wait_s"),
        switch=("node_dir",),
        fix="set lend.node_dir, or leave it out",
    )
    for task in config.tasks:
        _check_reward(task.reward, f"tasks.{task.name}.reward")
    _check_reward(config.reward, "reward")
    overlong = config.trainer.overlong
    if 0 < overlong.max_tokens < overlong.buffer_tokens:
        raise ConfigError(
            f"is {overlong.buffer_tokens}, more than trainer.overlong.max_tokens: every answer, however short, would lose reward",
            field="trainer.overlong.buffer_tokens",
            fix=f"at most {overlong.max_tokens}",
        )
    if config.trainer.fine_tuning_steps > config.num_steps:
        raise ConfigError(
            f"is {config.trainer.fine_tuning_steps}, and the run has {config.num_steps} steps (num_steps)",
            field="trainer.fine_tuning_steps",
            fix=f"at most {config.num_steps}",
        )


def _check_loss(config: TrainConfig) -> None:
    trainer, recipe = config.trainer, config.trainer.recipe
    objective = recipe.objective
    preset = RECIPES[trainer.algorithm]
    without = f"has no effect on the objective {objective!r} ({trainer.algorithm})"
    fix = "leave it out, or set trainer.objective to one that has it"
    if objective == "reinforce":
        for name in ("clip_low", "clip_high", "ratio"):
            if getattr(trainer, name) not in (None, getattr(preset, name)):
                raise ConfigError(without, field=f"trainer.{name}", fix=fix)
    if objective != "clip" and trainer.guard.dual_clip > 0 and _is_named(trainer.guard, "dual_clip"):
        raise ConfigError(without, field="trainer.guard.dual_clip", fix=fix)
    if not recipe.kl_weight and trainer.kl_weight is None and trainer.kl_kind not in (None, preset.kl_kind):
        raise ConfigError(
            f"has no effect: the KL penalty of {trainer.algorithm} has no weight",
            field="trainer.kl_kind",
            fix="set trainer.kl_weight; 0 said outright lets it stand",
        )
    if recipe.aggregation != "sum" and trainer.sum_tokens is not None:
        raise ConfigError(
            f"has no effect with aggregation = {recipe.aggregation!r}",
            field="trainer.sum_tokens",
            fix='set trainer.aggregation to "sum", or leave it out',
        )
    if trainer.guard.starved == "skip" and _is_named(trainer.guard, "max_rounds"):
        raise ConfigError(
            "counts the leases of a step that waits, and starved = 'skip' does not",
            field="trainer.guard.max_rounds",
            fix='set trainer.guard.starved to "wait", or leave it out',
        )
    if not trainer.correction.endswith("mask") and _is_named(trainer, "truncation_low"):
        raise ConfigError(
            f"is the lower bound of masks, and trainer.correction = {trainer.correction!r} has none",
            field="trainer.truncation_low",
            fix='set trainer.correction to "token_mask" or "sequence_mask", or leave it out',
        )
    if trainer.correction == "none" and _is_named(trainer, "truncation"):
        raise ConfigError(
            "has no effect with trainer.correction = 'none'",
            field="trainer.truncation",
            fix="leave it out, or set another trainer.correction",
        )


def _check_reward(reward: RewardSettings, where: str) -> None:
    """Refuse what says how others score, where environments do."""
    for name in type(reward).model_fields if reward.kind == "environment" else ():
        if name != "kind" and _is_named(reward, name):
            raise ConfigError(
                "has no effect: its environment scores an episode",
                field=f"{where}.{name}",
                fix=f"leave it out, or set {where}.kind",
            )


def _check_part(
    part: Section, where: str, names: tuple[str, ...], *, switch: tuple[str, ...], fix: str
) -> None:
    """Refuse settings of a part that is off, unless the job says outright that it is."""
    if any(getattr(part, name) for name in switch) or set(switch) & part.model_fields_set:
        return
    for name in names:
        if _is_named(part, name):
            raise ConfigError("has no effect: this part is off", field=f"{where}.{name}", fix=fix)


def _is_named(part: Section, name: str) -> bool:
    """Whether the job names it, with another value than it has by default."""
    default = type(part).model_fields[name].get_default(call_default_factory=True)
    return name in part.model_fields_set and getattr(part, name) != default


def check_model_settings(config: TrainConfig) -> None:
    """Look for settings that cannot be right for the job's model.

    Raises:
        ConfigError: Adapters in layers that it has not, or turns as long as its context.
        WeightsError: A header cannot be read.
    """
    targets = config.trainer.lora.targets if config.trainer.lora.rank else ()
    known = layers_named(config.model) if targets else set[str]()
    ends = {name.rpartition(".")[2] for name in known}
    for target in targets:
        if known and not any(f".{name}".endswith(f".{target}") for name in known):
            near = difflib.get_close_matches(target, ends, n=1)
            fix = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(sorted(ends))}"
            raise ConfigError(
                f"no layer of {config.model} is called '{target}'", field="trainer.lora.targets", fix=fix
            )
    most = _positions(config.model)
    for task in config.all_tasks if most else ():
        if task.max_tokens >= most:
            own = any(one.name == task.name and one.max_tokens is not None for one in config.tasks)
            raise ConfigError(
                f"is {task.max_tokens}, and the model has {most} positions for prompt and answer together (max_position_embeddings)",
                field=f"tasks.{task.name}.max_tokens" if own else "rollout.max_tokens",
                fix=f"{most - 1} at most, and less by what prompts need",
            )


def _positions(folder: Path) -> int:
    """Of the model's context; 0 where its ``config.json`` does not say."""
    try:
        told = json.loads((folder / "config.json").read_text())
        found = told.get("max_position_embeddings") or told["text_config"]["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
    return found if isinstance(found, int) else 0


def check_private_gpus(config: TrainConfig) -> None:
    """Whether this machine has the GPUs that the job's ranks want of a private cluster; CPUs it is given as many as they want
    (:func:`rose.train.cluster.private_cpus`).

    Raises:
        ConfigError: It has not.
    """
    num_ranks = config.trainer.num_ranks
    if config.trainer.device != "cuda" or (DEVICES / "dxg").exists():  # WSL has one file for all
        return
    num_gpus = len([*DEVICES.glob("nvidia[0-9]*")])
    if num_gpus < num_ranks:
        raise ConfigError(
            f"this machine has {num_gpus} GPUs, and 'cuda' wants one for each of {num_ranks} trainer ranks",
            field="trainer.device",
            fix='set it to "cpu", or join a cluster that has them (ray.address)',
        )
