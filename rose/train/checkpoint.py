"""Checkpoints of the trainer: complete or absent, sharded, and no pickle.

A checkpoint is a folder ``step-000012.2`` (step, attempt): ``shard-*.safetensors`` (each rank its own part of the fp32 masters as
``weights/NAME`` and of AdamW's moments as ``optimizer/NAME/KEY``, written and read by ``torch.distributed.checkpoint``: nothing is
gathered, and another number of ranks may go on with it) and ``state.json`` (everything else, and the hashes of the others and of itself).
It is written beside its place, synced, and renamed, so a reader sees all of it or nothing;
:func:`load_latest` takes the newest that verifies and says which it had to pass over.

``consumed`` is why a killed trainer neither loses nor repeats a trajectory: the ids that the last steps
were trained on live in the same atom as the weights that they changed.  On restart the scheduler is told
these ids; whatever it had leased out and they do not name becomes leasable again.

Newest means: highest attempt first, then highest step, as weight versions are ordered.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import xxhash

from rose.errors import TrainError
from rose.train.checkpoint_folder import MAX_JSON_BYTES, is_name, name_of, newest_first, order_of

SCHEMA = 2
CONSUMED_STEPS = 64
"""Steps whose ids a checkpoint keeps.  One would do while every step is acknowledged before the next begins; the
rest lets a run that had to pass over damaged checkpoints still name what it used.  Fewer where a step has very many, see :func:`ids_to_keep`."""

DISK_TIMEOUT = timedelta(hours=6)
"""Of a rank that waits for a checkpoint or a model: for the slowest to write or read its part, or for the first to hash all of them.  That of a step is
minutes, which a large model outlasts: masters and moments of 70B weights are 840 GB, at 100 MB/s more than two hours to write and as long to hash.  A rank that dies
meanwhile is noticed at once, by its connection; only one that hangs, or whose host is lost without a word, is waited for."""

Measure = Literal["held_out", "sampled"]
"""Whose success: of an evaluation's held-out tasks, or of the episodes that steps were trained on."""

SHARE = "put it on storage that all nodes share"
"""What to do about a folder of which ranks, or a trainer and the one before, have each their own."""

_STAGING = ".writing-"
_FILES_BYTES = 1024 * 1024
"""Of it for what is known when all is written, names and hashes of the files: enough for ten thousand ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The trainer's state after ``step`` steps.  Tensors are owned by the trainer until saved."""

    step: int
    attempt: int
    version: int
    consumed: Mapping[int, tuple[str, ...]]
    """Trajectory ids by the step that was trained on them; the last :data:`CONSUMED_STEPS` steps."""
    shuffle_state: tuple[Any, ...]
    rng: Mapping[str, bytes] = field(default_factory=dict)
    """States of random generators that the shuffle's is not, by name."""
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """This rank's part: sharded tensors, or whole ones.  Of a checkpoint that was loaded: none; :func:`read_into` reads them from ``path``."""
    optimizer: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By ``NAME/KEY``; as ``weights``."""
    optimizer_steps: Mapping[str, float] = field(default_factory=dict)
    """Updates that each weight has had."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the whole weights; filled in when it is loaded."""
    grad_norms: tuple[float, ...] = ()
    """Of the last updates: what the step guard holds for usual."""
    rate_factor: float = 1.0
    """The step guard's, of the learning rate."""
    base: str = ""
    """Which model training began with (:func:`rose.train.model_folder.identity_of`).  Empty: not said."""
    path: Path | None = None
    """Where it was loaded from."""

    @property
    def consumed_ids(self) -> list[str]:
        return [trajectory_id for step in sorted(self.consumed) for trajectory_id in self.consumed[step]]


def save(checkpoint: Checkpoint, directory: Path, *, keep: int = 3) -> Path:
    """Write ``checkpoint`` below ``directory`` and drop all but the ``keep`` newest and the best.  All ranks, each with its own part.

    Raises:
        TrainError: The disk refused; older checkpoints are untouched.
    """
    place, group = _Place(checkpoint, directory, keep), disk_group()
    with place.written():
        _on_first_rank(place.prepare, group)
        _write_tensors(_tensors_of(checkpoint), place.staging, group)
        _on_first_rank(place.finish, group)
    return place.target


class BackgroundWriter:
    """Writes checkpoints while training goes on, one at a time.

    :meth:`begin` copies what this rank holds into host memory; a thread of each rank writes that, with collectives of a group that no step uses, and the
    first rank's then makes it a checkpoint.  Killed in the middle, it leaves what a torn :func:`save` leaves.
    """

    def __init__(self) -> None:
        self._finisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._begun: Future[None] | None = None

    def begin(self, checkpoint: Checkpoint, directory: Path, *, keep: int = 3) -> None:
        """As :func:`save`, but returns when the tensors may change again.  All ranks.

        Raises:
            TrainError: The disk refused, this one or the one before.
        """
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.finish()
        place, group = _Place(checkpoint, directory, keep), disk_group()
        with place.written():
            _on_first_rank(place.prepare, group)
        # The library's own thread warns, at some later time: that a trainer of one process has no group is no news.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        writing: Any = async_save(
            _tensors_of(checkpoint),
            storage_writer=_writer(place.staging),
            process_group=group,
            no_dist=not _is_distributed(),
        )
        self._begun = self._finisher.submit(_completed, place, writing)

    def finish(self) -> None:
        """Wait until what was begun last is durable.  On the first rank; on another: until its own part is written.

        Raises:
            TrainError: The disk refused; older checkpoints are untouched.
        """
        begun = self._begun
        if begun is not None:
            try:
                begun.result()
            finally:
                self._begun = None


def _completed(place: _Place, writing: Future[Any]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    with place.written():
        try:
            writing.result()
        except CheckpointException as error:
            raise _disk_error(error) from error
        if _rank() == 0:
            place.finish()


class _Place:
    """Where one checkpoint goes, and the first rank's part in writing it."""

    def __init__(self, checkpoint: Checkpoint, directory: Path, keep: int) -> None:
        name = name_of(checkpoint.step, checkpoint.attempt)
        self.target, self.staging = directory / name, directory / f"{_STAGING}{name}"
        self._directory = directory
        self._keep = keep
        self._described = _described(checkpoint)

    def prepare(self) -> None:
        size = len(json.dumps(self._described)) + _FILES_BYTES
        if size > MAX_JSON_BYTES:
            ids = [len(one) for one in self._described["consumed"].values()]
            raise OSError(
                f"state.json would take {size >> 10} KiB, of {MAX_JSON_BYTES >> 10} that are read again: it names the {sum(ids)} trajectories "
                f"of {len(ids)} steps (fewer with a lower trainer.checkpoint_every)"
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        # Of a writer that was killed: one model in size each.
        for torn in self._directory.glob(f"{_STAGING}*"):
            shutil.rmtree(torn, ignore_errors=True)
        self.staging.mkdir()

    def finish(self) -> None:
        """Of tensors in files to a checkpoint; then older ones go."""
        described = dict(self._described)
        described["files"] = {path.name: _digest(path) for path in sorted(self.staging.glob("*.safetensors"))}
        described["xxh3"] = _digest_of_description(described)
        (self.staging / "state.json").write_text(json.dumps(described))
        for path in (*self.staging.iterdir(), self.staging):
            _sync(path)
        # The same step of the same attempt: only a retry after a failed answer writes it.
        if self.target.exists():
            shutil.rmtree(self.target)
        self.staging.rename(self.target)
        _sync(self._directory)
        best = best_of(self._directory)
        for path in newest_first(self._directory)[max(1, self._keep) :]:
            if best is None or path.name != best.name:
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def written(self) -> Iterator[None]:
        """A failure inside is the disk's, and leaves nothing half done."""
        from rose.train.checkpoint_writer import NotShared

        try:
            yield
        except NotShared as error:
            shutil.rmtree(self.staging, ignore_errors=True)
            raise TrainError(str(error), field="output_dir", fix=SHARE) from error
        except OSError as error:
            if _rank() == 0:
                shutil.rmtree(self.staging, ignore_errors=True)
            raise TrainError(
                f"{self.target} cannot be written: {error}", field="checkpoint", fix=self._way_out()
            ) from error

    def _way_out(self) -> str:
        fix = "make room on its disk, then run it again"
        try:
            there, best = newest_first(self._directory), best_of(self._directory)
        except OSError:  # what the disk said first is told
            return fix
        if not there:
            return fix
        fix += f" to go on from {there[0].name}"
        # Not removed here: the newest may be damaged, which is known when it is read.
        older = [path for path in there[1:] if best is None or path.name != best.name]
        rest = f"; {len(older)} older in {self._directory} may be removed, which trainer.keep_checkpoints does only behind a new one"
        return f"{fix}{rest}" if older else fix


def _tensors_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    weights = {f"weights/{name}": tensor for name, tensor in checkpoint.weights.items()}
    return weights | {f"optimizer/{name}": tensor for name, tensor in checkpoint.optimizer.items()}


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    """All of it but its files."""
    return {
        "schema": SCHEMA,
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "version": checkpoint.version,
        "consumed": {str(step): list(ids) for step, ids in checkpoint.consumed.items()},
        "shuffle_state": checkpoint.shuffle_state,
        "rng": {name: state.hex() for name, state in checkpoint.rng.items()},
        "optimizer_steps": dict(checkpoint.optimizer_steps),
        "shapes": {name: list(tensor.shape) for name, tensor in checkpoint.weights.items()},
        "grad_norms": checkpoint.grad_norms,
        "rate_factor": checkpoint.rate_factor,
        "base": checkpoint.base,
    }


def ids_to_keep(
    consumed: Mapping[int, tuple[str, ...]], step: int, num_needed: int
) -> dict[int, tuple[str, ...]]:
    """Of ``consumed`` what a checkpoint of ``step`` is told: the last :data:`CONSUMED_STEPS` steps, or as many of them as half of a state.json has
    room for.

    Args:
        num_needed: Of the newest steps, which a resume has to name: those of them that are among the last :data:`CONSUMED_STEPS` are kept however large they are.
    """
    kept: dict[int, tuple[str, ...]] = {}
    size = 0
    for one in sorted((one for one in consumed if one >= step - CONSUMED_STEPS), reverse=True):
        size += len(json.dumps(consumed[one]))
        if len(kept) >= num_needed and size > MAX_JSON_BYTES // 2:
            break
        kept[one] = consumed[one]
    return {one: kept[one] for one in sorted(kept)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best checkpoint of a run, as ``best.json`` has it."""

    name: str
    success: float
    measure: Measure | None
    """None: of a file that does not say, as earlier versions wrote it."""


def note_best(directory: Path, name: str, success: float, measure: Measure) -> None:
    """Keep the checkpoint ``name`` if no other was as good; the one before goes as it becomes old.

    Only like is compared with like: success on held-out tasks takes the place of sampled success, however high, and sampled success never
    that of success on held-out tasks.  One of which is not known what was measured is compared by its figure alone.

    Raises:
        TrainError: The disk refused.
    """
    staging = directory / f"{_STAGING}best.json"
    try:
        best = best_of(directory)
        if (best is not None and not _is_better(success, measure, best)) or not (directory / name).is_dir():
            return
        staging.write_text(json.dumps({"checkpoint": name, "success": success, "measure": measure}))
        _sync(staging)
        staging.rename(directory / "best.json")
    except OSError as error:
        raise TrainError(f"{directory} cannot be written: {error}", field="checkpoint") from error


def _is_better(success: float, measure: Measure, best: Best) -> bool:
    if best.measure in (None, measure):
        return success > best.success
    return measure == "held_out"


def best_of(directory: Path) -> Best | None:
    """The best checkpoint; None where none was noted, or it is not there."""
    try:
        told = json.loads((directory / "best.json").read_text())
        name, success = str(told["checkpoint"]), float(told["success"])
        measure = told.get("measure")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    known = is_name(name) and math.isfinite(success)
    if not known or measure not in (None, *get_args(Measure)) or not (directory / name).is_dir():
        return None
    return Best(name=name, success=success, measure=measure)


def load(path: Path) -> Checkpoint:
    """Read one checkpoint's description and verify all of its files; :func:`read_into` reads the tensors.

    Raises:
        TrainError: Missing, damaged, or of another schema.
    """
    try:
        if (path / "state.json").stat().st_size > MAX_JSON_BYTES:
            raise TrainError("state.json is too large", field=str(path))
        described = json.loads((path / "state.json").read_text())
        if described.get("schema") != SCHEMA:
            raise TrainError(f"schema {described.get('schema')!r} is not {SCHEMA}", field=str(path))
        if described.get("xxh3") != _digest_of_description(described):
            raise TrainError("state.json does not match its hash", field=str(path))
        found = {file.name for file in path.glob("*.safetensors")}
        if found != set(described["files"]):
            raise TrainError("does not hold the files that it names", field=str(path))
        for name, digest in described["files"].items():
            if _digest(path / name) != digest:
                raise TrainError(f"{name} does not match its hash", field=str(path))
        version, internal, gauss = described["shuffle_state"]
        return Checkpoint(
            step=int(described["step"]),
            attempt=int(described["attempt"]),
            version=int(described["version"]),
            consumed={int(step): tuple(ids) for step, ids in described["consumed"].items()},
            shuffle_state=(version, tuple(internal), gauss),
            rng={name: bytes.fromhex(state) for name, state in described["rng"].items()},
            optimizer_steps={name: float(step) for name, step in described["optimizer_steps"].items()},
            shapes={name: tuple(map(int, shape)) for name, shape in described["shapes"].items()},
            grad_norms=_finite(described["grad_norms"]),
            rate_factor=_finite([described.get("rate_factor", 1.0)])[0],
            base=str(described.get("base", "")),
            path=path,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainError(f"is damaged: {error}", field=str(path)) from error


def read_into(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Fill ``tensors`` from the safetensors files in ``path``, each rank its own part.  All ranks.

    Args:
        tensors: By their names in the files; whole ones, or sharded ones in any way.

    Raises:
        TrainError: A file lacks a tensor, or has it in another shape, or a number in it is not finite.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    try:
        with _alone_without_warning():
            load_tensors(
                dict(tensors),
                storage_reader=_reader(path),
                process_group=disk_group(),
                no_dist=not _is_distributed(),
            )
    # A rank's failure is no Exception but a class of the library's own; what its readers raise has many.
    except (CheckpointException, Exception) as error:
        raise TrainError(f"{path} cannot be read: {_first_of(error)}", field="checkpoint") from error
    for name, tensor in tensors.items():
        local: Any = tensor
        local = local.to_local() if hasattr(local, "to_local") else local
        if not bool(torch.isfinite(local).all()):
            raise TrainError(f"tensor {name} is not finite", field="checkpoint")


def _write_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, group: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

    try:
        with _alone_without_warning():
            save_tensors(
                dict(tensors),
                storage_writer=_writer(folder),
                process_group=group,
                no_dist=not _is_distributed(),
            )
    except CheckpointException as error:
        raise _disk_error(error) from error


def _writer(folder: Path) -> Any:
    from rose.train.checkpoint_writer import OneFolderWriter

    return OneFolderWriter(folder)


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(folder))


def _disk_error(error: Any) -> OSError:
    """What the first rank that failed to write met."""
    from rose.train.checkpoint_writer import NotShared

    found = next((failure[0] for failure in error.failures.values()), None)
    return found if isinstance(found, NotShared) else OSError(_first_of(error))


def _first_of(error: Any) -> str:
    """What the first rank that failed said."""
    said = [str(failure[0]) for failure in getattr(error, "failures", {}).values()] or [str(error)]
    return said[0].splitlines()[0][:200]


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """That a trainer of one process has no process group is no news."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _is_distributed() else 0


def disk_group() -> Any:
    """The ranks once more, with :data:`DISK_TIMEOUT`; all ranks.  None of a trainer of one process.

    Apart from the steps' collectives also because those of two threads in one group would be taken for each other's.  Disks have one at a time: what is
    written in the background has ended on a rank before it begins with another checkpoint, and none is read while one is written.
    """
    return _group_beside(dist.group.WORLD) if _is_distributed() else None


@lru_cache(maxsize=1)
def _group_beside(world: Any) -> Any:
    """``world``: whose ranks they are; another has another group."""
    return dist.new_group(backend="gloo", timeout=DISK_TIMEOUT)


def _on_first_rank(work: Callable[[], None], group: Any) -> None:
    """Rank 0 works, the others wait for it in ``group``; its failure is everybody's."""
    failure: OSError | None = None
    if _rank() == 0:
        try:
            work()
        except OSError as error:
            failure = error
    if _is_distributed():
        failed = torch.tensor([failure is not None])
        dist.broadcast(failed, src=0, group=group)
        if bool(failed) and failure is None:
            failure = OSError("rank 0 could not write")
    if failure is not None:
        raise failure


def load_latest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies (None where none does), and why newer ones were passed over."""
    passed_over: list[str] = []
    for path in newest_first(directory):
        try:
            return load(path), passed_over
        except TrainError as error:
            passed_over.append(str(error))
    return None, passed_over


def to_go_on_from(
    directory: Path, *, num_taken: int | None, most_behind: int
) -> tuple[Checkpoint | None, list[str]]:
    """:func:`load_latest` for a trainer that starts, where going on from nothing would not lose what is there.

    Args:
        num_taken: Steps taken under the trainer that this one replaces; None: it replaces none.
        most_behind: Steps by which the newest checkpoint of a trainer may lie behind it.

    Raises:
        TrainError: There are checkpoints and none can be read, or those of the trainer before are not here.
    """
    found, passed_over = load_latest(directory)
    if found is None and passed_over:
        # Going on from nothing would drop them as its own come, and they may be readable tomorrow.
        raise TrainError(
            f"none of {len(passed_over)} checkpoints can be read, the newest: {passed_over[0]}",
            field="output_dir",
            fix=f"repair them, or move {directory} away to begin anew",
        )
    # A trainer writes one before its first step.
    if num_taken is not None and (
        found is None or (not found.step and not passed_over and num_taken >= most_behind)
    ):
        raise TrainError(
            f"the trainer came back and found no checkpoint, where {num_taken} steps had been taken",
            field="output_dir",
            fix=SHARE,
        )
    return found, passed_over


def latest_attempt(directory: Path) -> int:
    """The highest attempt that any checkpoint, readable or not, names; 0 if there is none."""
    return max((order_of(path)[0] for path in newest_first(directory)), default=0)


def _finite(values: Any) -> tuple[float, ...]:
    found = tuple(float(value) for value in values)
    if not all(map(math.isfinite, found)):
        raise ValueError("a number of the guard is not finite")
    return found


def _digest_of_description(described: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in described.items() if name != "xxh3"}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
