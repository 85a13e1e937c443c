"""Trainers of several ranks in one process, and the ways in which trainers cut a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rose.errors import WeightsError
from rose.weights.params import WeightsParams
from rose.weights.publisher import PublishReport, WeightPublisher
from rose.weights.source import Shard
from rose.weights.store import ObjectStore

Tensors = dict[str, torch.Tensor]
Held = dict[str, Any]
"""What one rank gives to its publisher."""

COLUMNS = ("out", "down")
"""Suffixes of tensors that tensor parallelism cuts along the second dimension."""


class ThreadRanks:
    """``Ranks`` between threads.  :meth:`leave` is the death of a rank: the others' calls fail."""

    def __init__(self, rank: int, size: int, board: _Board) -> None:
        self.rank, self.size, self._board = rank, size, board

    @classmethod
    def group(cls, size: int) -> list[ThreadRanks]:
        board = _Board(size)
        return [cls(rank, size, board) for rank in range(size)]

    def gather(self, data: bytes) -> list[bytes]:
        self._board.given[self.rank] = data
        self._wait()
        found = list(self._board.given) if self.rank == 0 else []
        self._wait()
        return found

    def broadcast(self, data: bytes) -> bytes:
        if self.rank == 0:
            self._board.said = data
        self._wait()
        found = self._board.said
        self._wait()
        return found

    def leave(self) -> None:
        self._board.barrier.abort()

    def _wait(self) -> None:
        try:
            self._board.barrier.wait(30)
        except threading.BrokenBarrierError:
            raise WeightsError("another rank is gone", field="ranks") from None


class _Board:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: list[bytes] = [b""] * size
        self.said = b""


class Trainer:
    """Ranks of one attempt; ``publish`` runs them side by side and returns what rank 0 reports."""

    def __init__(
        self,
        layout: Callable[[Tensors], list[Held]],
        stores: ObjectStore | Sequence[ObjectStore],
        attempt: int,
        params: WeightsParams,
        *,
        run_id: str = "run",
    ) -> None:
        self.weights: Tensors = {}
        self._layout = layout
        self._held: list[Held] = []
        self._size: int | None = None
        self._make = (stores, attempt, params, run_id)
        self.publishers: list[WeightPublisher] = []

    def publish(self, weights: Tensors, version: int) -> PublishReport:
        """Raises what the first failing rank raised."""
        self._held = self._layout(weights)
        if not self.publishers:
            self._start(len(self._held))
        assert self._size == len(self._held)
        with ThreadPoolExecutor(self._size) as pool:
            jobs = [pool.submit(publisher.publish, version) for publisher in self.publishers]
        self.errors = [job.exception() for job in jobs]
        for error in self.errors:
            if error is not None:
                raise error
        reports = [job.result() for job in jobs]
        assert all(
            (r.version, r.state, r.bytes_sent)
            == (reports[0].version, reports[0].state, reports[0].bytes_sent)
            for r in reports
        )
        return reports[0]

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()

    def _start(self, size: int) -> None:
        stores, attempt, params, run_id = self._make
        self._size = size
        self.ranks = ThreadRanks.group(size)
        self.publishers = [
            WeightPublisher(
                lambda rank=rank: self._held[rank],
                stores[rank] if isinstance(stores, Sequence) else stores,
                run_id,
                attempt,
                params,
                ranks=self.ranks[rank],
            )
            for rank in range(size)
        ]


# -- layouts -----------------------------------------------------------------------------------------


def fsdp(size: int) -> Callable[[Tensors], list[Held]]:
    """Every tensor by rows, as FSDP2 cuts them; the last ranks may hold less or nothing."""

    def cut(weights: Tensors) -> list[Held]:
        held: list[Held] = [{} for _ in range(size)]
        for name, tensor in weights.items():
            begin = 0
            for rank, part in enumerate(torch.chunk(tensor, size)):
                offset = (begin, *(0 for _ in tensor.shape[1:]))
                held[rank][name] = Shard(part, tuple(tensor.shape), offset)
                begin += part.shape[0]
        return held

    return cut


def hsdp(replicas: int, size: int) -> Callable[[Tensors], list[Held]]:
    """Replicas of an FSDP group: every piece is held ``replicas`` times."""
    return lambda weights: fsdp(size)(weights) * replicas


def tensor_parallel(size: int) -> Callable[[Tensors], list[Held]]:
    """Matrices by rows or columns; norms on every rank."""

    def cut(weights: Tensors) -> list[Held]:
        held: list[Held] = [{} for _ in range(size)]
        for name, tensor in weights.items():
            if tensor.dim() < 2:
                for each in held:
                    each[name] = tensor.clone()
                continue
            dim = 1 if name.endswith(COLUMNS) else 0
            begin = 0
            for rank, part in enumerate(torch.chunk(tensor, size, dim)):
                offset = [0, 0]
                offset[dim] = begin
                held[rank][name] = Shard(part, tuple(tensor.shape), tuple(offset))
                begin += part.shape[dim]
        return held

    return cut


def grid(size: int) -> Callable[[Tensors], list[Held]]:
    """Tensor parallel by two, and inside each of them FSDP by rows: columns *and* rows of one matrix are cut."""

    def cut(weights: Tensors) -> list[Held]:
        held: list[Held] = []
        for outer in tensor_parallel(2)(weights):
            inner: list[Held] = [{} for _ in range(size)]
            for name, value in outer.items():
                shard = (
                    value
                    if isinstance(value, Shard)
                    else Shard(value, tuple(value.shape), (0,) * value.dim())
                )
                begin = 0
                for rank, part in enumerate(torch.chunk(shard.tensor, size)):
                    offset = (shard.offset[0] + begin, *shard.offset[1:])
                    inner[rank][name] = Shard(part, shard.shape, offset)
                    begin += part.shape[0]
            held += inner
        return held

    return cut


def megatron(
    tp: int, ep: int, pp: int = 1, *, heads: int, kv_heads: int, head: int
) -> Callable[[Tensors], list[Held]]:
    """Megatron's fused matrices: queries, keys and values interleaved by group; gate over up; experts spread; and with
    two stages of a pipeline attention on the first, the MLP on the last."""

    def cut(weights: Tensors) -> list[Held]:
        return [
            {
                name: held
                for name, held in _megatron_rank(
                    weights, rank % tp, rank // tp, tp, ep, heads, kv_heads, head
                ).items()
                if stage in _stages(name, pp, tied="head" not in weights)
            }
            for stage in range(pp)
            for rank in range(tp * ep)
        ]

    return cut


def _stages(name: str, pp: int, tied: bool) -> tuple[int, ...]:
    """A tied embedding is on both ends."""
    if name == "embed" and tied:
        return 0, pp - 1
    return (0,) if name in ("embed", "norm", "q", "k", "v", "out") else (pp - 1,)


def _megatron_rank(
    weights: Tensors, t: int, e: int, tp: int, ep: int, heads: int, kv_heads: int, head: int
) -> Held:
    mine: Held = {}
    rest = dict(weights)
    q, k, v = rest.pop("q"), rest.pop("k"), rest.pop("v")
    per_group = heads // kv_heads * head
    groups = range(t * kv_heads // tp, (t + 1) * kv_heads // tp)
    blocks: list[torch.Tensor] = []
    for g in groups:
        blocks += [q[g * per_group :][:per_group], k[g * head :][:head], v[g * head :][:head]]
    qkv = torch.cat(blocks)  # what Megatron holds: one matrix
    row = 0
    for g in groups:
        for name, whole, begin, count in (
            ("q", q, g * per_group, per_group),
            ("k", k, g * head, head),
            ("v", v, g * head, head),
        ):
            mine.setdefault(name, []).append(Shard(qkv[row : row + count], tuple(whole.shape), (begin, 0)))
            row += count
    for name in [name for name in rest if name.endswith("gate")]:
        gate, up = rest.pop(name), rest.pop(name.removesuffix("gate") + "up")
        if "experts" in name and int(name.split(".")[1]) % ep != e:
            continue
        rows = gate.shape[0] // tp
        fused = torch.cat([gate[t * rows :][:rows], up[t * rows :][:rows]])
        for part, whole in ((name, gate), (name.removesuffix("gate") + "up", up)):
            begin = 0 if part.endswith("gate") else rows
            mine[part] = [Shard(fused[begin : begin + rows], tuple(whole.shape), (t * rows, 0))]
    for name, tensor in rest.items():
        if "experts" in name and int(name.split(".")[1]) % ep != e:
            continue
        if tensor.dim() < 2:
            mine[name] = tensor
            continue
        dim = 1 if name.endswith(COLUMNS) else 0
        offset = [0, 0]
        parts = torch.chunk(tensor, tp, dim)
        offset[dim] = sum(part.shape[dim] for part in parts[:t])
        mine[name] = Shard(parts[t], tuple(tensor.shape), tuple(offset))
    return mine
