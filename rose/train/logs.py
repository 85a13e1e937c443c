"""Where a run writes what it measured: ``metrics.jsonl`` always, a page and TensorBoard by default, Weights & Biases and MLflow if asked for.

A sink that fails or hangs is switched off with one warning: a full disk under the plots must not end a training run, nor stop it.  The JSON lines are
the record, and their failure is an error.

After a death steps may be taken again, by the same driver or the next one: numbers of a step come twice, and the later ones count.
"""

from __future__ import annotations

import functools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rose.errors import ConfigError
from rose.train.metrics import MetricsFile, records_of, steps_without_a_line
from rose.train.run_page import RunPage
from rose.train.train_config import TrainConfig

logger = logging.getLogger(__name__)


class Sink(Protocol):
    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class Logs:
    """All sinks of a run."""

    def __init__(self, file: MetricsFile, sinks: list[Sink]) -> None:
        self._file = file
        self._sinks = sinks

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.append(record)
        scalars = scalars_of(record)
        for sink in list(self._sinks):
            try:
                sink.write(int(record["step"]), scalars)
            except Exception as error:  # noqa: BLE001 - foreign code; see the module's docstring
                logger.warning("%s is switched off: %s", _name_of(sink), error)
                self._sinks.remove(sink)

    def restore(self, before: int, num_consumed: Mapping[int, int], pending: int | None) -> list[int]:
        """Have a line for each step before ``before``: of one whose driver did not live to write it what its checkpoint knows, which no board is told.

        Args:
            before: The step to go on at.
            num_consumed: Trajectories of each step, as far as the checkpoint says.
            pending: A step whose line is still to come.

        Returns:
            The steps that had none.
        """
        lost = [step for step in steps_without_a_line(self._file.path, before) if step != pending]
        for step in lost:
            known = {"num_consumed": num_consumed[step]} if step in num_consumed else {}
            self._file.append({"step": step, "restored": True, **known})
        return lost

    def close(self, *, failed: bool = False) -> None:
        """``failed``: the run has not come to its end."""
        for sink in self._sinks:
            try:
                sink.close(failed=failed)
            except Exception as error:  # noqa: BLE001
                logger.warning("%s did not close: %s", _name_of(sink), error)
        self._file.close()


@contextmanager
def open_logs(config: TrainConfig) -> Iterator[Logs]:
    """Open the sinks that the job asks for.

    Raises:
        ConfigError: A sink that was asked for by name is not installed.
    """
    sinks: list[Sink] = []
    metrics = config.output_dir / "metrics.jsonl"
    if config.log.page:
        page = RunPage(config.output_dir / "run.html", config.job, config.num_steps, _facts_of(config))
        for record in records_of(metrics):
            if record.get("restored") is not True:  # it has no numbers, and may stand behind later ones
                page.remember(record["step"], scalars_of(record))
        sinks.append(page)
    if config.log.tensorboard:
        try:
            sinks.append(BackgroundSink(TensorBoardSink(config), max_behind=FEW_STEPS))
        except ImportError:
            logger.warning("no TensorBoard files: tensorboardX is not installed")
    if config.log.wandb_project is not None:
        try:
            sinks.append(WandbSink(config))
        except ImportError as error:
            raise ConfigError(
                "wandb is not installed", field="log.wandb_project", fix="pip install wandb"
            ) from error
    if config.log.mlflow_experiment is not None:
        try:
            sinks.append(BackgroundSink(MlflowSink(config), max_behind=MANY_STEPS))
        except ImportError as error:
            raise ConfigError(
                "mlflow is not installed",
                field="log.mlflow_experiment",
                fix="pip install '.[mlflow]' from a checkout of ROSE",
            ) from error
    logs = Logs(MetricsFile(metrics), sinks)
    try:
        yield logs
    except BaseException:
        logs.close(failed=True)
        raise
    logs.close()


FEW_STEPS, MANY_STEPS = 10, 10_000
"""That may wait to be written: to a local folder, and to a server that is away for a while."""

CLOSE_S = 30.0
"""For what still waits at the end."""


class BackgroundSink:
    """A sink that may hang, called in a thread of its own: no step waits for it, and the end of a run no longer than ``close_s``.

    Args:
        max_behind: Steps that may wait; with more the sink counts as hanging.
    """

    def __init__(self, sink: Sink, *, max_behind: int, close_s: float = CLOSE_S) -> None:
        self.sink, self._close_s = sink, close_s
        self._waiting: queue.Queue[tuple[Callable[[], None], bool]] = queue.Queue(max_behind)
        self._error: Exception | None = None
        # A daemon: the interpreter's end does not wait for it either.
        self._thread = threading.Thread(target=self._work, name=type(sink).__name__, daemon=True)
        self._thread.start()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Raises:
        Exception: What an earlier step met; ``TimeoutError`` where too many wait.
        """
        self._put(functools.partial(self.sink.write, step, dict(scalars)))

    def close(self, *, failed: bool) -> None:
        self._put(functools.partial(self.sink.close, failed=failed), is_last=True)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._waiting.qsize()} calls were not made within {self._close_s:g} s")
        if self._error is not None:
            raise self._error

    def _put(self, call: Callable[[], None], *, is_last: bool = False) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._waiting.put_nowait((call, is_last))
        except queue.Full:
            raise TimeoutError(f"it hangs, and {self._waiting.qsize()} steps wait for it") from None

    def _work(self) -> None:
        is_last = False
        while not is_last:
            call, is_last = self._waiting.get()
            try:
                call()
            except Exception as error:  # noqa: BLE001 - told to the next caller
                self._error = error
                return


def _name_of(sink: Sink) -> str:
    return type(sink.sink if isinstance(sink, BackgroundSink) else sink).__name__


class TensorBoardSink:
    """Event files; look at them with ``tensorboard --logdir OUTPUT_DIR/tensorboard``."""

    def __init__(self, config: TrainConfig) -> None:
        from tensorboardX import SummaryWriter

        self._make_writer: Any = SummaryWriter
        self._directory = str(config.output_dir / "tensorboard")
        self._writer: Any = None
        self._last = -1

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None or step <= self._last:
            self.close(failed=False)
            # A file that says where it begins: TensorBoard leaves out what others have from there on.  Its name has seconds only.
            suffix = f".{time.time_ns()}"
            self._writer = self._make_writer(
                self._directory, purge_step=step, flush_secs=5, filename_suffix=suffix
            )
        self._last = step
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """One run of Weights & Biases for a job's output folder, which keeps its name."""

    def __init__(self, config: TrainConfig) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        remembered = config.output_dir / "wandb-run"
        run_id = remembered.read_text().strip() if remembered.is_file() else secrets.token_hex(8)
        self._run: Any = wandb.init(
            project=config.log.wandb_project,
            name=config.job,
            id=run_id,
            resume="allow",
            dir=str(config.output_dir),
            config=parameters_of(config),
        )
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(run_id)
        # W&B's own steps only go up, and what comes under a lower one is ignored: ours are an axis like any other.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "step": step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowSink:
    """One run of MLflow for a job's output folder, which keeps its name."""

    def __init__(self, config: TrainConfig) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

        self._remembered = config.output_dir / "mlflow-run"
        try:
            self._client: Any = MlflowClient(tracking_uri=config.log.mlflow_uri)
            self._run_id = self._open(config, MlflowException)
            self._tell(parameters_of(config))
        except MlflowException as error:
            raise ConfigError(
                f"MLflow does not take the run: {str(error).splitlines()[0][:200]}", field="log.mlflow_uri"
            ) from error

    def _open(self, config: TrainConfig, error: type[Exception]) -> str:
        """The run of this folder, new where it has none in this store."""
        client, name = self._client, config.log.mlflow_experiment
        if self._remembered.is_file():
            run_id = self._remembered.read_text().strip()
            try:
                client.update_run(run_id, status="RUNNING")
                return run_id
            except error:
                logger.warning("MLflow does not know run %s any more: another begins", run_id[:64])
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        run_id = client.create_run(experiment, run_name=config.job).info.run_id
        self._remembered.parent.mkdir(parents=True, exist_ok=True)
        self._remembered.write_text(run_id)
        return run_id

    def _tell(self, parameters: Mapping[str, Any]) -> None:
        """A parameter of a run never changes; what did is told as a tag."""
        from mlflow.entities import Param, RunTag  # pyright: ignore[reportMissingImports]

        texts = {name: str(value)[:MLFLOW_MAX_CHARS] for name, value in parameters.items()}
        known = self._client.get_run(self._run_id).data.params
        new = [Param(name, text) for name, text in texts.items() if name not in known]
        changed = [RunTag(f"changed.{k}", v) for k, v in texts.items() if known.get(k, v) != v]
        for start in range(0, len(new), MLFLOW_MAX_PARAMETERS):
            self._client.log_batch(self._run_id, params=new[start : start + MLFLOW_MAX_PARAMETERS])
        self._client.log_batch(self._run_id, tags=changed[:MLFLOW_MAX_PARAMETERS])

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


MLFLOW_MAX_PARAMETERS, MLFLOW_MAX_CHARS = 100, 500
"""Of one request, and of a value: what every server takes."""

PRIVATE = frozenset(
    ("settings", "url", "relay_url", "directory", "address", "mlflow_uri", "token_file", "publish_key")
)
"""Settings that may hold a secret, or say where one is; boards are often other people's."""


def parameters_of(config: TrainConfig) -> dict[str, Any]:
    """Every setting of a job by its dotted name, but for :data:`PRIVATE` ones."""
    found: dict[str, Any] = {}

    def walk(name: str, value: Any) -> None:
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, Mapping):
            items = ((key, one) for key, one in value.items() if key not in PRIVATE)
        elif isinstance(value, list):
            items = enumerate(value)
        else:
            found[name] = value
        for key, one in items:
            walk(f"{name}.{key}" if name else str(key), one)

    walk("", config.model_dump(mode="json"))
    return found


def _facts_of(config: TrainConfig) -> dict[str, str]:
    """What the page of a run says of its settings."""
    rollout, trainer = config.rollout, config.trainer
    return {
        "Model": str(config.model),
        "Weights": f"run {config.run_id}",
        "Tasks": ", ".join(
            f"{task.name} ({task.kind})" if task.name else task.kind for task in config.all_tasks
        ),
        "Rollouts": f"{rollout.mode}, {rollout.num_groups} groups of {rollout.group_size}, alpha {config.alpha}",
        "Recipe": f"{trainer.algorithm}, learning rate {trainer.learning_rate:g}, seed {config.seed}",
    }


GROUPS = {
    "run": ("attempt",),
    "reward": (
        "success_rate",
        "sampled_success_rate",
        "reward_mean",
        "sampled_mean",
        "truncated_fraction",
        "turns_mean",
        "cut_turn_fraction",
    ),
    "policy": (
        "entropy",
        "loss",
        "clip_fraction",
        "grad_norm",
        "kl_reference",
        "mismatch_kl",
        "ratio_p99",
        "logprob_diff_max",
        "ess",
        "truncated_weight_fraction",
        "lr",
        "learning_rate",
    ),
    "guard": (
        "update_kl",
        "informative_fraction",
        "step_share",
        "grad_limit",
        "num_clipped_updates",
        "num_shortened_updates",
        "num_starved",
        "num_starved_leases",
        "num_overlong",
        "num_begun_in_vain",
    ),
    "batch": (
        "num_trajectories",
        "num_tokens",
        "num_prompt_tokens",
        "prefill_per_decode",
        "num_trained_sequences",
        "num_filtered_groups",
        "num_failed_groups",
        "num_malformed",
        "acceptance",
        "num_stale",
        "lag_max",
        "lag_mean",
        "alpha",
        "alpha_accepted",
        "idle",
        "num_env_retries",
        "num_resumed_turns",
        "num_kv_mixed_turns",
        "num_side_turns",
        "num_constrained_turns",
    ),
    "time": ("step_s", "rollout_s", "train_s", "checkpoint_s", "publish_s", "streamed_s", "eval_s"),
}
"""How scalars are grouped on a board; what is in no group stays in ``metrics.jsonl`` alone."""
TAIL = ("is_long", "num_again", "num_put_by", "length_ratio")
"""Of ``tail_batching``; the rest of it is for the next driver."""


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """``group/name`` -> value, of one step's record."""
    found = {
        f"{group}/{name}": float(record[name])
        for group, names in GROUPS.items()
        for name in names
        if isinstance(record.get(name), int | float)
    }
    for tier, counts in (record.get("tiers") or {}).items():
        found |= {f"tier/{tier}_{name}": float(value) for name, value in counts.items()}
    evaluated = record.get("eval") or {}
    boards = {"eval": evaluated, "task": {"tasks": record.get("tasks") or {}}}
    boards |= {
        f"eval_{name}": part
        for name, part in evaluated.items()
        if isinstance(part, Mapping) and name != "tasks"
    }
    for board, told in boards.items():
        found |= {f"{board}/{k}": float(v) for k, v in told.items() if isinstance(v, int | float)}
        for task, values in (told.get("tasks") or {}).items():
            found |= {f"{board}/{task}_{name}": float(value) for name, value in values.items()}
    for task, values in (record.get("sampled_tasks") or {}).items():
        found[f"task/{task}_sampled_success_rate"] = float(values["success_rate"])
    found |= {f"alpha/num_{cause}": float(n) for cause, n in (record.get("alpha_changes") or {}).items()}
    tail = record.get("tail_batching") or {}
    found |= {f"tail/{name}": float(tail[name]) for name in TAIL if name in tail}
    for name, value in (record.get("update") or {}).items():
        if isinstance(value, int | float):
            found[f"update/{name}"] = float(value)
    for cause, row in (record.get("discards_by_length") or {}).items():
        found |= {f"discards/{cause}_quarter_{at}": float(value) for at, value in enumerate(row, start=1)}
    for index, value in enumerate(record.get("reward_by_length") or ()):
        found[f"reward_by_length/quarter_{index + 1}"] = float(value)
    return found
