"""What can be seen to be wrong with a job before anything of it is started.

``rose train`` looks at :func:`checks_of` at every start, through :func:`check_job`, and meets what :func:`checks_of_the_start` looks at on its way.  ``rose train
--check`` says what each of them found, starts nothing and writes nothing.

Neither torch nor Ray's cluster is started or loaded for it, so what only a loaded model tells is not seen: whether it is computed as engines compute it, or may be packed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from rose.auth import Tokens
from rose.config import Section
from rose.errors import ConfigError
from rose.policy.streaming import refusals_of
from rose.train.build import signing_key, weight_store
from rose.train.checkpoint_folder import Trained, check_fits, told_shapes
from rose.train.client import SchedulerClient
from rose.train.cluster import find_cluster, private_cpus
from rose.train.device_loan import DeviceLoan
from rose.train.env_manager import family_of
from rose.train.model_folder import check_chat_template, check_ranks, check_type, identity_of
from rose.train.recipes import Recipe
from rose.train.rewards import make_reward
from rose.train.rollout import single_token_ids
from rose.train.settings_check import check_effects, check_model_settings, check_private_gpus
from rose.train.train_config import JobTask, TrainConfig
from rose.train.workers import Parts

T = TypeVar("T")

ASK_S = 10.0
"""For an answer of the scheduler."""
MAX_NAMED = 5
"""Runs that a remark names."""


class Remark(str):
    """What was found is as it should not stay; a start is not refused for it."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCheck:
    """One thing that a job needs."""

    name: str
    look: Callable[[], str]
    """What was found, in short, as a :class:`Remark` where somebody should look at it.  Raises a :class:`~rose.errors.RoseError` where the job cannot run with it, and whatever the job's own code raises."""
    needs: tuple[str, ...] = ()
    """Checks by name; where one of them has failed there is nothing to look at."""


def check_job(config: TrainConfig, parts: Parts | None = None) -> None:
    """Find what is wrong with a job without starting anything; what is said of our trainer or publisher, not where ``parts`` has another.

    Raises:
        ConfigError: The first thing that is.
    """
    for check in checks_of(config, parts):
        check.look()


def checks_of(config: TrainConfig, parts: Parts | None = None) -> list[JobCheck]:
    """What a job says by itself and by its files, in the order in which it is looked at."""
    found = [
        JobCheck(name="settings", look=partial(_settings, config)),
        JobCheck(name="model", look=partial(_model, config, parts)),
        JobCheck(name="tokenizer", look=partial(_tokenizer, config), needs=("model",)),
        JobCheck(name="chat template", look=partial(_chat_template, config), needs=("model",)),
    ]
    for task in config.all_tasks:
        of = f" of {task.name}" if task.name else ""
        found += [
            JobCheck(name=f"environment{of}", look=partial(_environment, config, task)),
            JobCheck(name=f"reward{of}", look=partial(_reward, task)),
        ]
    return found


def checks_of_the_start(config: TrainConfig) -> list[JobCheck]:
    """What else a start needs: tokens, libraries, and whoever it talks to."""
    found = [
        JobCheck(name="token file", look=partial(_tokens, config)),
        JobCheck(name="libraries", look=partial(_libraries, config)),
        JobCheck(name="Ray", look=partial(_ray, config), needs=("libraries",)),
        JobCheck(name="scheduler", look=partial(_scheduler, config), needs=("token file",)),
        JobCheck(name="engines", look=partial(_engines, config), needs=("token file", "scheduler")),
        JobCheck(name="weights", look=partial(_weights, config), needs=("token file",)),
    ]
    if config.lend.node_dir is not None:
        found.append(JobCheck(name="lend", look=partial(_lend, config), needs=("token file",)))
    return found


def tokens_of(config: TrainConfig) -> Tokens:
    """The job's, with what it needs of them.

    Raises:
        ConfigError: The file cannot be read, or lacks one.
    """
    asks_relay = (config.weights.relay_url or "").startswith(("http://", "https://"))
    needs = ["environment", "trainer"]
    needs += ["publish"] if asks_relay else []
    needs += ["publish_key"] if config.weights.signed else []
    return Tokens.load(config.token_file, needs, key_file=config.weights.publish_key)


def _settings(config: TrainConfig) -> str:
    if config.lend.node_dir is not None and config.rollout.mode != "synchronous":
        raise ConfigError(
            "is for synchronous runs: the trainer of another hardly waits, and lending its device there has not been tried",
            field="lend.node_dir",
        )
    if config.eval.background and config.rollout.mode != "synchronous":
        raise ConfigError(
            "is for synchronous runs: in another new versions are published while held-out episodes are played",
            field="eval.background",
            fix="leave it out: episodes of training go on during an evaluation there",
        )
    if config.rollout.adaptive_alpha.enabled:
        _check_adaptive_alpha(config)
    if config.rollout.tail_batching.extra_groups:
        _check_tail_batching(config)
    if refused := refusals_of(config.streamed, config.step_shape):
        first, *others = refused
        also = "".join(f"; and {one.field}: {one.reason}: {one.fix}" for one in others)
        raise ConfigError(first.reason, field=first.field, fix=f"{first.fix}{also}")
    check_effects(config)
    return "go together"


def _check_tail_batching(config: TrainConfig) -> None:
    field = "rollout.tail_batching.extra_groups"
    if config.rollout.mode != "synchronous":
        raise ConfigError(
            "is for synchronous runs: others do not wait for the longest", field=field, fix="set it to 0"
        )
    if config.has_dynamic_sampling:
        raise ConfigError(
            "does not go with dynamic sampling, which begins groups until enough of them differ",
            field=field,
            fix="set it to 0, or trainer.dynamic_sampling.enabled = false",
        )


def _check_adaptive_alpha(config: TrainConfig) -> None:
    rollout, adaptive = config.rollout, config.rollout.adaptive_alpha
    if rollout.mode != "asynchronous":
        raise ConfigError(
            "is for asynchronous runs: in others samples are of the present weights",
            field="rollout.adaptive_alpha",
        )
    if rollout.on_stale is None:
        raise ConfigError(
            "rollout.adaptive_alpha needs a rule: without one the scheduler keeps to its own bound",
            field="rollout.on_stale",
            fix='set it to "cancel", "mask" or "wait"',
        )
    if not adaptive.least <= config.alpha <= adaptive.most:
        raise ConfigError(
            f"is {config.alpha}, outside rollout.adaptive_alpha ({adaptive.least} to {adaptive.most})",
            field="rollout.alpha",
        )


def _model(config: TrainConfig, parts: Parts | None) -> str:
    if not (config.model / "config.json").is_file():
        raise ConfigError(f"{config.model} is not a model folder", field="model")
    if parts is None or parts.make_publisher is None:
        check_type(config.model, config.trainer.policy_dtype)
    if config.trainer.num_ranks > 1 and (parts is None or parts.make_trainer is None):
        check_ranks(config.model)
    check_model_settings(config)
    return f"{config.model}, published in {config.trainer.policy_dtype}"


def _tokenizer(config: TrainConfig) -> str:
    single_token_ids(config.model, ())  # an engine cannot render for a model without one
    return "tokenizer.json can be read"


def _chat_template(config: TrainConfig) -> str:
    check_chat_template(config.model)
    return "is there"


def _environment(config: TrainConfig, task: JobTask) -> str:
    family = family_of(task)
    field = f"tasks.{task.name}" if task.name else "env"
    named = {one.name for one in config.tasks if one.max_tokens is not None}
    if family.allowed_texts is None and config.rollout.max_tokens is None and task.name not in named:
        raise ConfigError(
            "is required where answers are free text, and counts the tokens of one turn",
            field="rollout.max_tokens",
            fix="512, say, or max_tokens of the task",
        )
    num_tasks = len(family.tasks())
    if not num_tasks:
        raise ConfigError("the environment has no tasks", field=field)
    held_out = ""
    if config.eval.every_steps or config.eval.at_end:
        num_held_out = len(family.held_out_tasks(config.eval.num_tasks))
        if not num_held_out:
            fix = "set eval.every_steps = 0 and eval.at_end = false"
            raise ConfigError("the environment has no held-out tasks", field=field, fix=fix)
        held_out = f", {num_held_out} held out"
    if family.allowed_texts is None:
        answers = f"free text of at most {task.max_tokens} tokens a turn"
    else:
        answers = f"{len(single_token_ids(config.model, family.allowed_texts))} answers, each one token"
    return f"{task.kind}, {num_tasks} tasks{held_out}, {answers}"


def _reward(task: JobTask) -> str:
    if task.reward.kind != "environment":
        make_reward(task.reward.kind, task.reward.settings)
    return task.reward.kind


def _tokens(config: TrainConfig) -> str:
    tokens = tokens_of(config)
    if not config.weights.signed:
        return "has what the job needs; weights are not signed"
    return f"has what the job needs; weights are signed with {signing_key(tokens).public}"


def _libraries(config: TrainConfig) -> str:
    wanted = {"torch": "", "transformers": "", "ray": "ray"}
    if config.trainer.lora.rank:
        wanted["peft"] = "trainer.lora.rank"
    if config.log.wandb_project is not None:
        wanted["wandb"] = "log.wandb_project"
    if config.log.mlflow_experiment is not None:
        wanted["mlflow"] = "log.mlflow_experiment"
    for name, field in wanted.items():
        if find_spec(name) is None:
            extra = "mlflow" if name == "mlflow" else "train"
            fix = (
                "pip install wandb"
                if name == "wandb"
                else f"pip install '.[{extra}]' from a checkout of ROSE"
            )
            raise ConfigError(f"{name} is not installed", field=field or None, fix=fix)
    return ", ".join(wanted)


def _ray(config: TrainConfig) -> str:
    address = find_cluster(config.ray.address)
    if address is None:
        check_private_gpus(config)
        return f"a private cluster of {private_cpus(config)} CPUs will be started"
    return f"the cluster at {address} will be joined; whether it has room was not asked"


def _asked(config: TrainConfig, question: Callable[[SchedulerClient], Coroutine[Any, Any, T]]) -> T:
    """An answer of the scheduler's.

    Raises:
        ConfigError: There is none in time.
        RoseError: It refuses.
    """
    token, url = tokens_of(config).trainer, config.scheduler.url

    async def in_time() -> T:
        try:
            async with (
                asyncio.timeout(ASK_S),
                SchedulerClient(url, trainer_token=token, retry_s=0.0) as client,
            ):
                return await question(client)
        except TimeoutError:
            raise ConfigError(f"{url} did not answer in {ASK_S:.0f} s", field="scheduler.url") from None

    return asyncio.run(in_time())


def _scheduler(config: TrainConfig) -> str:
    found = _asked(config, lambda client: client.latest_attempt(config.job))
    known = f"knows attempt {found} of {config.job}" if found else f"has not heard of {config.job}"
    return f"{config.scheduler.url} takes the trainer's token, and {known}"


def _engines(config: TrainConfig) -> str:
    """A node may come, or be given another run by the scheduler, before a turn is sampled: no more than a remark."""
    runs = _asked(config, lambda client: client.runs_of_engines())
    if not runs:
        return "none is there yet"
    run, has = config.run_id, runs.count(config.run_id)
    if has or "" in runs:
        unnamed = f", {runs.count('')} have named none yet" if "" in runs else ""
        return f"{has} of {len(runs)} {'has' if has == 1 else 'have'} run {run}{unnamed}"
    others = ", ".join(sorted(set(runs))[:MAX_NAMED])
    return Remark(
        f"none of {len(runs)} has run {run}: they have {others}; turns of this job wait until a node has "
        f'run_id = "{run}" in its [weights], or weights.run_id of the job is theirs'
    )


def _weights(config: TrainConfig) -> str:
    place, run = config.weights.directory or config.weights.relay_url, config.run_id
    if config.weights.directory is not None:
        check_writable(config.weights.directory, "weights.directory")
        return f"{place} can be written, run {run}"
    store = weight_store(config, tokens_of(config))
    try:
        head = store.wait_head(run, None, 0.0)
    finally:
        store.close()
    newest = "has published nothing" if head is None else f"is at {head.attempt}.{head.version}"
    return f"{place} answers, run {run} {newest}"


def _lend(config: TrainConfig) -> str:
    loan = DeviceLoan(config.lend, tokens_of(config))
    try:
        loan.check()
    finally:
        loan.close()
    return f"the node at {config.lend.node_dir} borrows this device"


def check_writable(directory: Path, field: str) -> None:
    """Whether a folder is there to write into, or can be made; makes none.

    Raises:
        ConfigError: It is neither.
    """
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{directory} cannot be written: {there} does not allow it", field=field)


def check_checkpoint(config: TrainConfig, path: Path) -> None:
    """Whether the job trains what a checkpoint holds, as far as its files say; a start asks the loaded model too.

    Raises:
        TrainError: It does not.
        WeightsError: A file of the model cannot be read.
    """
    told = told_shapes(path)
    if told is None or not config.model.is_dir():
        return
    lora = config.trainer.lora
    trained = Trained(
        folder=config.model, base=identity_of(config.model), rank=lora.rank, targets=lora.targets
    )
    check_fits(*told, path, trained)


def settings_of(config: TrainConfig) -> Iterator[tuple[str, Any, str]]:
    """Every setting as it will be in force: dotted name, value, and where it is from (``job``, ``default``, a recipe's name, or ``follows`` from others).

    Of tables named ``settings`` only the names are told: their values may be secret.
    """
    recipe = {one.name: f"trainer.{one.name}" for one in fields(Recipe) if one.name != "dynamic_sampling"}
    in_force: dict[str, Any] = {path: getattr(config.trainer.recipe, name) for name, path in recipe.items()}
    in_force |= {
        "rollout.alpha": config.alpha,
        "rollout.on_stale": config.stale_rule,
        "trainer.dynamic_sampling.enabled": config.has_dynamic_sampling,
        "trainer.stream_groups": config.streamed,
        "trainer.sum_tokens": config.sum_tokens,
        "weights.run_id": config.run_id,
    }
    if config.trainer.lora.rank:
        in_force["trainer.lora.alpha"] = config.trainer.lora.alpha or 2.0 * config.trainer.lora.rank
    if not config.tasks:
        in_force["rollout.max_tokens"] = config.all_tasks[0].max_tokens

    def walk(path: str, section: Section, is_own: bool) -> Iterator[tuple[str, Any, str]]:
        for name in type(section).model_fields:
            value, here = getattr(section, name), f"{path}{name}"
            own = is_own and name in section.model_fields_set
            if isinstance(value, Section):
                yield from walk(f"{here}.", value, own)
            elif name == "tasks":
                for one in config.tasks:
                    yield from walk(f"{here}.{one.name}.", one, own)
            elif name == "settings":
                yield here, ", ".join(sorted(value)) or None, "job" if own else "default"
            else:
                origin = "job" if own else "default"
                if here in in_force and in_force[here] != value:
                    by_recipe = here in recipe.values() or here == "trainer.dynamic_sampling.enabled"
                    follows = config.trainer.algorithm if by_recipe else "follows"
                    value, origin = in_force[here], f"job ({value})" if own else follows
                yield here, value, origin

    return walk("", config, True)
