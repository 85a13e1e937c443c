"""``rose train``: read the job, run it, show each step; or say what a start would find (:func:`check_main`).  Loads neither torch nor Ray itself.

In a terminal a bar shows the run and, below it, the episodes of the step; elsewhere each step is one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rose.config import load_config
from rose.errors import ConfigError, RoseError
from rose.train.check import (
    JobCheck,
    Remark,
    check_checkpoint,
    check_writable,
    checks_of,
    checks_of_the_start,
    settings_of,
    tokens_of,
)
from rose.train.checkpoint_folder import newest_first
from rose.train.evaluation import told_in_short
from rose.train.train_config import TrainConfig

_WATCH_S = 1.0
STOPPED = "stopped by Ctrl-C: run it again to go on from its last checkpoint, if there is one"


def train_main(config: Path | str | None, overrides: Sequence[str] = ()) -> int:
    """Run the job of a TOML file with ``a.b=value`` overrides; 0 when its last step is done.

    Raises:
        RoseError: The job cannot start or cannot go on; its text is one line.
    """
    job = load_config(TrainConfig, config, overrides)
    tokens = tokens_of(job)
    from rose.train.loop import run_training

    console = Console(markup=False)
    try:
        with Screen(job, console) as screen:
            watch_s = _WATCH_S if console.is_terminal else None
            result = run_training(job, tokens, progress=screen.show, watch_s=watch_s)
    except KeyboardInterrupt:
        Console(stderr=True, soft_wrap=True).print(STOPPED)
        raise
    if result.exported:
        console.print(f"exported: {job.output_dir / 'model'}, {result.exported}")
    if result.success_last is None:
        console.print(f"nothing left to do: {result.num_steps} steps are done in {job.output_dir}")
        return 0
    held_out = "" if result.success_held_out is None else f", {result.success_held_out:.2f} on held-out tasks"
    console.print(
        f"done: {result.num_steps} steps, success {result.success_first:.2f} -> {result.success_last:.2f}{held_out}, "
        f"attempt {result.attempt}, {result.num_restarts} restarts; see {job.output_dir / 'metrics.jsonl'}"
    )
    if job.log.page:
        console.print(f"page: {job.output_dir / 'run.html'}")
    if job.log.tensorboard:
        console.print(f"plots: tensorboard --logdir {job.output_dir / 'tensorboard'}")
    return 0


def check_main(config: Path | str | None, overrides: Sequence[str] = ()) -> int:
    """Say of everything that a start needs whether it is there, and which settings will be in force; starts nothing.  0, or 2 where something is wrong.

    Raises:
        ConfigError: The file holds no job.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    job = load_config(TrainConfig, config, overrides)
    console.print(f"ok  job: {config} is read")
    failed: set[str] = set()
    checks = [
        *checks_of(job),
        JobCheck(name="output_dir", look=partial(_output_dir, job)),
        *checks_of_the_start(job),
    ]
    for check in checks:
        if lacking := [name for name in check.needs if name in failed]:
            failed.add(check.name)
            console.print(f"--  {check.name}: was not looked at without {lacking[0]}")
            continue
        try:
            found = check.look()
            is_remark = isinstance(found, Remark)
            console.print(
                f"{'!!' if is_remark else 'ok'}  {check.name}: {found}", style="yellow" if is_remark else None
            )
        except Exception as error:  # noqa: BLE001 - the job's own code may raise anything
            failed.add(check.name)
            said = str(error) if isinstance(error, RoseError) else f"{type(error).__name__}: {error}"
            console.print(f"NO  {check.name}: {said}", style="red")
    console.print("\nsettings in force (of tables named settings: their keys)")
    for name, value, origin in settings_of(job):
        console.print(f"{name:<36} {_shown(value):<24} {origin}")
    console.print(
        "\nnot looked at: the model's weights, room in Ray's cluster, what engines do, services of rewards"
    )
    console.print(f"{len(failed)} of {len(checks)} checks failed" if failed else "the job can be started")
    return 2 if failed else 0


def export_main(config: Path | str | None, overrides: Sequence[str], which: str) -> int:
    """Write the job's ``output_dir/model`` from its ``last`` or ``best`` checkpoint; starts nothing.

    Raises:
        RoseError: There is none, or it cannot be exported.
    """
    from rose.train.export import export_from

    if which not in ("last", "best"):
        raise ConfigError(f"is {which!r:.40}, and can be last or best", field="--export")
    job = load_config(TrainConfig, config, overrides)
    target = job.output_dir / "model"
    with Console(stderr=True).status(f"reading the {which} checkpoint, writing {target}"):
        words = export_from(job, which, target)
    Console(soft_wrap=True, highlight=False, markup=False).print(f"exported: {target}, {words}")
    return 0


def _output_dir(job: TrainConfig) -> str:
    from rose.train.loop import sole_driver

    directory = job.output_dir
    check_writable(directory, "output_dir")
    if (directory / "driver.lock").exists():
        with sole_driver(directory):
            pass
    there = newest_first(directory / "checkpoints")
    if not there:
        return f"{directory}, begins anew"
    check_checkpoint(job, there[0])
    return f"{directory} has checkpoints: goes on from {there[0].name}, or the newest that can be read"


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


class Screen:
    """Shows what the loop reports; a context manager."""

    def __init__(self, job: TrainConfig, console: Console) -> None:
        self._job = job
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._steps = self._bars.add_task("steps", total=job.num_steps)
        per_step = job.rollout.num_groups * job.rollout.group_size
        self._episodes = self._bars.add_task("starting Ray", total=per_step)
        self._ended_before = 0

    def __enter__(self) -> Screen:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, record: Mapping[str, Any]) -> None:
        if record.get("event") == "rollout":
            ended = max(0, record["ended"] - self._ended_before)
            self._bars.update(self._episodes, completed=ended, description="episodes of this step")
            return
        if record.get("event") == "attempt":
            self._bars.update(self._steps, completed=record["step"])
        elif "event" not in record:
            self._bars.update(self._steps, completed=record["step"] + 1)
            self._ended_before += record["num_episodes"]
            self._bars.update(self._episodes, completed=0)
        # Its texts are others': what an environment says may hold square brackets.
        self._console.print(_line(record, self._job.num_steps), soft_wrap=True, markup=False)


def _line(record: Mapping[str, Any], num_steps: int) -> str:
    if record.get("event") == "attempt":
        passed_over = "".join(f"\npassed over: {why}" for why in record.get("passed_over") or ())
        verb = "goes on" if record["step"] else "begins"  # steps are counted from 1, as in their lines
        return f"attempt {record['attempt']} {verb} at step {record['step'] + 1}{passed_over}"
    if record.get("event") == "restored":
        return f"warning: {record['text']}"
    if record.get("event") == "cluster":
        return f"joined the Ray cluster at {record['address']}: nodes {record['num_nodes']}, CPUs {record['num_cpus']}"
    if record.get("event") == "actor_died":
        return f"{record['actor']} died and is replaced: {record['reason']}"
    tiers = record["tiers"]
    shares = ", ".join(f"{tier} {counts['turns']}" for tier, counts in tiers.items())
    update = record["update"]
    held_out = f"  held-out {told_in_short(record['eval'])}" if "eval" in record else ""
    if "eval_error" in record:
        held_out = f"  held-out failed: {record['eval_error']}"
    by_task = (record.get("sampled_tasks") or {}).items()
    success = f"success {record['sampled_success_rate']:.2f}"
    success += "".join(f"  {name} {one['success_rate']:.2f}" for name, one in by_task)
    if record.get("num_filtered_groups"):
        success += f"  (trained on {record['success_rate']:.2f})"
    lag = f"  lag {record['lag_max']}" if record["lag_max"] else ""
    if "alpha_cause" in record:
        lag += f"  alpha {record['alpha']} ({record['alpha_cause']})"
    return (
        f"step {record['step'] + 1:>3}/{num_steps}  {success}{held_out}  "
        f"turns {record['num_turns']} ({shares})  entropy {record['entropy']:.2f}  "
        f"kl {record['mismatch_kl']:.1e}{lag}  lr {record['lr']:.0e}  "
        f"rollout {record['rollout_s']:.1f} s, train {record['train_s']:.1f} s, "
        f"publish {record['publish_s']:.1f} s  {update['kind']} {update['bytes_sent']} B "
        f"({update['density']:.1%} changed)"
    )
