"""The ranks of one trainer, as the publisher needs them: rounds in which all work and rank 0 decides (:func:`agree`).

Only descriptions travel this way (which pieces a rank holds, which objects it wrote); weights go from each rank to
the store.  Messages are bytes in JSON, so nothing is unpickled.

:class:`TorchRanks` speaks through ``torch.distributed`` in a group of its own: publishing in a background thread
must not get between the collectives of training.  torch is imported only there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from rose import errors
from rose.errors import CapacityError, ConfigError, RoseError, WeightsError

P = TypeVar("P")
V = TypeVar("V")

MAX_MESSAGE_BYTES = 1 << 30


class Ranks(Protocol):
    """All ranks call the same methods in the same order; each call waits for the others.

    Raises, from both calls:
        WeightsError: Another rank is gone.
    """

    @property
    def rank(self) -> int:
        """Of this process: 0 .. ``size`` - 1."""
        ...

    @property
    def size(self) -> int:
        """How many processes hold the model together."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """On rank 0: what each rank gave, in order.  Elsewhere: nothing."""
        ...

    def broadcast(self, data: bytes) -> bytes:
        """What rank 0 gave; the others' argument is ignored."""
        ...


class SoloRank:
    """A trainer of one process."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data


class TorchRanks:
    """The ranks of ``torch.distributed``, which must be initialised.

    Args:
        group: A gloo group of the ranks that publish, used for nothing else.  None: one is made of all ranks, so all
            of them must construct this together.  Data-parallel replicas need not take part.
        timeout_s: How long one call waits for the slowest rank, in a group made here.
    """

    def __init__(self, group: Any = None, *, timeout_s: float = 600.0) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised", field="ranks")
        self._dist: Any = dist
        self._group: Any = group or dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo")
        self._root: int = dist.get_global_rank(self._group, 0)
        self.rank: int = dist.get_rank(self._group)
        self.size: int = dist.get_world_size(self._group)
        if self.rank < 0:
            raise ConfigError(f"rank {dist.get_rank()} is not in the group", field="ranks")

    def gather(self, data: bytes) -> list[bytes]:
        torch = sys.modules["torch"]
        each = [self._sizes(0) for _ in range(self.size)]
        self._call(lambda: self._dist.all_gather(each, self._sizes(len(data)), group=self._group))
        sizes = [int(size.item()) for size in each]
        longest = max(sizes)
        if longest > MAX_MESSAGE_BYTES:
            raise WeightsError(f"a message of {longest} bytes, at most {MAX_MESSAGE_BYTES}", field="ranks")
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        self._call(lambda: self._dist.gather(padded, parts, dst=self._root, group=self._group))
        if parts is None:
            return []
        return [part[:n].numpy().tobytes() for part, n in zip(parts, sizes, strict=True)]

    def broadcast(self, data: bytes) -> bytes:
        torch = sys.modules["torch"]
        size = self._sizes(len(data))
        self._call(lambda: self._dist.broadcast(size, src=self._root, group=self._group))
        buffer = torch.empty(int(size.item()), dtype=torch.uint8)
        if self.rank == 0 and data:
            buffer[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._call(lambda: self._dist.broadcast(buffer, src=self._root, group=self._group))
        return buffer.numpy().tobytes()

    def _call(self, call: Any) -> None:
        try:
            call()
        except RuntimeError as error:  # gloo's word for a peer that is gone or too slow
            raise WeightsError(
                f"another rank is gone: {str(error).splitlines()[0][:200]}", field="ranks"
            ) from error

    @staticmethod
    def _sizes(size: int) -> Any:
        torch = sys.modules["torch"]
        return torch.tensor([size], dtype=torch.int64)


class StoreFull(CapacityError):
    """Every rank that failed found the store full; raised on all of them alike, so that all may try again."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message, status=507, field=field)


class _Failure(msgspec.Struct, frozen=True):
    kind: str
    message: str
    field: str | None
    fix: str | None
    full: bool = False


class _Said(msgspec.Struct, frozen=True):
    failure: _Failure | None
    part: msgspec.Raw = msgspec.Raw(b"null")


def agree(
    ranks: Ranks,
    work: Callable[[], P],
    decide: Callable[[list[P]], V],
    part_type: type[P],
    verdict_type: type[V],
) -> V:
    """One round: every rank works, rank 0 decides on what all of them found, every rank gets its verdict.

    When any rank fails, all raise: the rank itself its own error, the others one that names it.  Nobody is left
    waiting, and ``decide`` is not called.

    Raises:
        StoreFull: Nothing worse than a full store happened anywhere.
        RoseError: What ``work`` or ``decide`` raised, somewhere.
    """
    if ranks.size == 1:
        try:
            return decide([work()])
        except CapacityError as error:
            if _is_full(error):
                raise StoreFull(error.message, field=error.field) from error
            raise
    part: P | None = None
    failed: BaseException | None = None
    try:
        part = work()
    except BaseException as error:  # noqa: BLE001 - the others wait for a word; it is raised below
        failed = error
    said = _Said(None, msgspec.Raw(msgspec.json.encode(part))) if failed is None else _Said(_describe(failed))
    gathered = ranks.gather(msgspec.json.encode(said))
    answer = b""
    if ranks.rank == 0:
        try:
            answer = msgspec.json.encode(_verdict(gathered, decide, part_type))
        except BaseException as error:  # noqa: BLE001 - as above
            failed = failed or error
            answer = msgspec.json.encode(_Said(_describe(error)))
    answer = ranks.broadcast(answer)
    verdict = msgspec.json.decode(answer, type=_Said)
    if failed is not None:
        if verdict.failure is not None and verdict.failure.full:
            raise _error(verdict.failure) from failed
        raise failed
    if verdict.failure is not None:
        raise _error(verdict.failure)
    return msgspec.json.decode(verdict.part, type=verdict_type)


def _verdict(gathered: list[bytes], decide: Callable[[list[P]], V], part_type: type[P]) -> _Said:
    said = [msgspec.json.decode(data, type=_Said) for data in gathered]
    failures = [(rank, each.failure) for rank, each in enumerate(said) if each.failure is not None]
    if failures:
        rank, failure = failures[0]
        message = f"rank {rank}: {failure.message}" if rank else failure.message
        full = all(each.full for _, each in failures)
        return _Said(msgspec.structs.replace(failure, message=message, full=full))
    verdict = decide([msgspec.json.decode(each.part, type=part_type) for each in said])
    return _Said(None, msgspec.Raw(msgspec.json.encode(verdict)))


def _describe(error: BaseException) -> _Failure:
    if isinstance(error, RoseError):
        return _Failure(type(error).__name__, error.message, error.field, error.fix, _is_full(error))
    return _Failure("WeightsError", f"failed: {type(error).__name__}", None, None)


def _is_full(error: BaseException) -> bool:
    return isinstance(error, CapacityError) and error.status == 507


def _error(failure: _Failure) -> RoseError:
    if failure.full:
        return StoreFull(failure.message, field=failure.field)
    kind = getattr(errors, failure.kind, WeightsError)
    error = kind(failure.message, field=failure.field)
    error.fix = failure.fix
    return error
