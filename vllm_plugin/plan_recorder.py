"""Make a shard plan by *recording the model's own loader*, and prove it.

``load_weights`` runs over scratch tensors that have the checkpoint's names and shapes and no content, under a dispatch mode that notes
every copy into model memory and performs none.  Fused projections, tensor-parallel slices, padded vocabularies and tied embeddings
come out right because vLLM's code decided them, not ours.  Recording changes no bit and no identity of the model.

A copy becomes a :class:`~vllm_plugin.plan.BoxMap`.  A tensor whose load is anything else (cast, transposed copy, in-place arithmetic, a
parameter rewritten after loading) goes to the plan's ``fallback`` with the reason.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rose.weights.spec import TensorSpec
from vllm_plugin.checkpoint import DTYPES
from vllm_plugin.cover import Region, cover, is_nested
from vllm_plugin.plan import BoxMap, ShardPlan, TargetStorage, digest_of

ALIGN_BYTES = 64
_MAP_NORESERVE = 0x4000  # Linux; Python 3.11's mmap does not name it

Weights = Iterable[tuple[str, torch.Tensor]]


def record(
    model: torch.nn.Module, tensors: Sequence[TensorSpec], load: Callable[[Weights], Any] | None = None
) -> ShardPlan:
    """Record where ``load`` (default: ``model.load_weights``) puts each tensor.  The model stays as it was."""
    loader: Callable[[Weights], Any] = load or getattr(model, "load_weights")  # noqa: B009 - every vLLM model
    targets, owners = _targets(model)
    scratch = _Scratch(tensors)
    recorder = _Recorder(scratch, targets, owners)
    before = _identities(model)
    with torch.no_grad():
        try:
            with recorder:
                loader(scratch.weights(tensors))
        except Exception:  # noqa: BLE001 - a loader that dislikes one tensor must not cost us the others
            recorder.reset()
            for tensor in tensors:
                try:
                    with recorder:
                        loader(scratch.weights([tensor]))
                except Exception as error:  # noqa: BLE001
                    recorder.give_up({tensor.name}, f"the loader refused it: {_one_line(error)}")
    replaced = _restore(model, before)
    return _prove(tensors, targets, recorder, replaced)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


# -- the model's memory ----------------------------------------------------------------------------


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, is a parameter) of everything a loader may write, repeats of tied tensors included."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, True
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, buffer, False


def _targets(model: torch.nn.Module) -> tuple[list[TargetStorage], dict[int, int]]:
    """Storages of parameters and buffers, and the index of each by storage address."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    parameters: dict[int, list[Region]] = {}
    for name, tensor, is_parameter in _named_tensors(model):
        if tensor.numel() == 0 or tensor.is_meta:
            continue
        address = tensor.untyped_storage().data_ptr()
        names.setdefault(address, []).append(name)
        tensors.setdefault(address, tensor.data)
        if is_parameter:
            region = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            parameters.setdefault(address, []).append(region)
    targets, owners = [], {}
    for address, tensor in tensors.items():
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
        owners[address] = len(targets)
        regions = tuple(parameters.get(address, ()))
        targets.append(TargetStorage(names=tuple(names[address]), flat=flat, parameters=regions))
    return targets, owners


def _identities(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor, int]]:
    return {name: (tensor, tensor.data, tensor.data_ptr()) for name, tensor, _ in _named_tensors(model)}


def _restore(
    model: torch.nn.Module, before: Mapping[str, tuple[torch.Tensor, torch.Tensor, int]]
) -> set[str]:
    """Undo ``parameter.data = ...`` and attribute replacement; returns the names where it happened."""
    replaced: set[str] = set()
    for name, tensor, is_parameter in list(_named_tensors(model)):
        if name not in before:
            continue
        original, data, address = before[name]
        if tensor is original and tensor.data_ptr() == address:
            continue
        replaced.add(name)
        original.data = data
        module_name, _, attribute = name.rpartition(".")
        module = model.get_submodule(module_name)
        (module._parameters if is_parameter else module._buffers)[attribute] = original  # type: ignore[index]
    return replaced


# -- recording -------------------------------------------------------------------------------------


class _Scratch:
    """One run of address space in which every checkpoint tensor has its own place; no memory behind it.

    The place names the tensor, whatever the loader did to the view on the way, and in whatever order.
    """

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self.begins: list[int] = []
        self.tensors = list(tensors)
        size = 0
        for tensor in tensors:
            self.begins.append(size)
            length = tensor.nbytes
            size += -(-max(length, 1) // ALIGN_BYTES) * ALIGN_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._mapping = mmap.mmap(-1, max(size, ALIGN_BYTES), flags=flags)
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()
        self._index = {tensor.name: i for i, tensor in enumerate(self.tensors)}

    def weights(self, tensors: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in tensors:
            begin = self.begins[self._index[tensor.name]]
            length = tensor.nbytes
            yield (
                tensor.name,
                self._bytes[begin : begin + length].view(DTYPES[tensor.dtype]).view(tensor.shape),
            )

    def owner(self, tensor: torch.Tensor) -> tuple[TensorSpec, int] | None:
        """The checkpoint tensor a view belongs to, and the element at which the view begins."""
        if tensor.device.type != "cpu" or tensor.untyped_storage().data_ptr() != self.address:
            return None
        begin = tensor.storage_offset() * tensor.element_size()
        position = bisect.bisect_right(self.begins, begin) - 1
        meta = self.tensors[position]
        return meta, (begin - self.begins[position]) // meta.width_bytes


class _Recorder(TorchDispatchMode):
    """Notes every write into model memory and performs none."""

    def __init__(
        self, scratch: _Scratch, targets: Sequence[TargetStorage], owners: Mapping[int, int]
    ) -> None:
        super().__init__()
        self._scratch = scratch
        self._targets = targets
        self._owners = owners
        self.reset()

    def reset(self) -> None:
        self.boxes: dict[str, list[BoxMap]] = {}
        self.filled: dict[int, list[BoxMap]] = {}
        self.reasons: dict[str, str] = {}
        # Tensors computed from scratch tensors, and from which.  The tensor is kept so that its address stays
        # its own until the recording ends.
        self._derived: dict[int, tuple[set[str], torch.Tensor]] = {}

    def give_up(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self.reasons.setdefault(name, reason)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for written in self._written(func, args, kwargs):
            if self._scratch.owner(written) is not None:
                self.give_up(self._names(written), f"the loader changes it with {func}")
                return written
            if written.untyped_storage().data_ptr() in self._owners:
                self._note(func, written, args, kwargs)
                return written
        names: set[str] = set()
        for tensor in _tensors_in((args, kwargs)):
            names |= self._names(tensor)
        if names and func is torch.ops.aten._local_scalar_dense.default:
            self.give_up(names, "the loader acts on its values")
        result = func(*args, **kwargs)
        if names:
            for tensor in _tensors_in(result):
                if self._scratch.owner(tensor) is None:
                    address = tensor.untyped_storage().data_ptr()
                    known, _ = self._derived.get(address, (set(), tensor))
                    self._derived[address] = (known | names, tensor)
        return result

    @staticmethod
    def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """The arguments that ``func`` writes."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                yield from (tensor for tensor in _tensors_in(value) if not tensor.is_meta)

    def _names(self, tensor: torch.Tensor) -> set[str]:
        if tensor.is_meta:
            return set()
        owner = self._scratch.owner(tensor)
        if owner is not None:
            return {owner[0].name}
        known = self._derived.get(tensor.untyped_storage().data_ptr())
        return set() if known is None else known[0]

    def _note(self, func: Any, written: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if written.numel() == 0:
            return
        target = self._owners[written.untyped_storage().data_ptr()]
        aten = torch.ops.aten
        if func in (aten.fill_.Scalar, aten.zero_.default):
            region = _box(target, written.shape, 0, (0,) * written.dim(), written)
            self.filled.setdefault(target, []).append(region)
            return
        sources: set[str] = set()
        for tensor in _tensors_in((args, kwargs)):
            sources |= self._names(tensor)
        if func is not aten.copy_.default:
            self.give_up(sources, f"the loader writes it with {func}")
            return
        source = args[1]
        owner = self._scratch.owner(source)
        if owner is None:
            self.give_up(sources, "the loader converts or rearranges it before the copy")
            return
        meta, offset = owner
        model_dtype = self._targets[target].flat.dtype
        if not source.dtype == DTYPES[meta.dtype] == written.dtype == model_dtype:
            self.give_up({meta.name}, f"the checkpoint has {meta.dtype}, the model {model_dtype}")
        elif source.shape != written.shape:
            self.give_up({meta.name}, f"shape {tuple(source.shape)} is broadcast to {tuple(written.shape)}")
        else:
            box = _box(target, written.shape, offset, source.stride(), written)
            if is_nested(box.shape, box.src_strides) and is_nested(box.shape, box.dst_strides):
                self.boxes.setdefault(meta.name, []).append(box)
            else:
                self.give_up({meta.name}, "the copied piece is not an affine box")


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)


def _box(
    target: int, shape: Sequence[int], offset: int, strides: Sequence[int], written: torch.Tensor
) -> BoxMap:
    """Canonical box: axes of one element dropped, the rest ordered by source stride and merged."""
    axes = [
        axis
        for axis in zip(shape, strides, written.stride(), strict=True)
        if axis[0] != 1
    ]  # fmt: skip
    axes.sort(key=lambda axis: (-axis[1], -axis[2]))
    merged: list[tuple[int, int, int]] = []
    for size, src, dst in axes:
        if merged and merged[-1][1] == size * src and merged[-1][2] == size * dst:
            merged[-1] = (merged[-1][0] * size, src, dst)
        else:
            merged.append((size, src, dst))
    if not merged:
        merged = [(1, 1, 1)]
    return BoxMap(
        target=target,
        shape=tuple(axis[0] for axis in merged),
        src_offset=offset,
        src_strides=tuple(axis[1] for axis in merged),
        dst_offset=int(written.storage_offset()),
        dst_strides=tuple(axis[2] for axis in merged),
    )


# -- proof -----------------------------------------------------------------------------------------


def _prove(
    tensors: Sequence[TensorSpec], targets: Sequence[TargetStorage], recorder: _Recorder, replaced: set[str]
) -> ShardPlan:
    fallback = dict(recorder.reasons)
    boxes: dict[str, tuple[BoxMap, ...]] = {}
    for tensor in tensors:
        marked = _mark_mirrors(tensor, recorder.boxes.get(tensor.name, []))
        if marked is None:
            fallback.setdefault(tensor.name, "its pieces overlap in the checkpoint")
        boxes[tensor.name] = marked or ()
        for box in boxes[tensor.name]:
            lost = replaced.intersection(targets[box.target].names)
            if lost:
                fallback.setdefault(tensor.name, f"the loader replaces the memory of {min(lost)}")
    for name, shared in _written_twice(targets, boxes).items():
        fallback.setdefault(name, f"another tensor writes {shared} too")
    for name in fallback:
        boxes[name] = ()
    holes = _holes(targets, boxes, recorder.filled)
    if holes:
        # Something wrote there that left no trace: no tensor without a trace can be trusted.
        for name, held in boxes.items():
            if not held:
                fallback.setdefault(name, f"left no trace, while {holes[0]} is not fully written")
    return ShardPlan(
        tensors={tensor.name: tensor for tensor in tensors},
        boxes=boxes,
        fallback=fallback,
        holes=tuple(holes),
        targets=targets,
        digest=digest_of(tensors, boxes),
    )


def _mark_mirrors(tensor: TensorSpec, boxes: Sequence[BoxMap]) -> tuple[BoxMap, ...] | None:
    """Flag exact repeats of a source region; None when regions overlap in any other way."""
    marked: list[BoxMap] = []
    seen: set[tuple[Any, ...]] = set()
    for box in dict.fromkeys(boxes):  # the same copy made twice is one box
        region = (box.shape, box.src_offset, box.src_strides)
        marked.append(replace(box, mirror=region in seen))
        seen.add(region)
    own = [(box.shape, box.src_strides, box.src_offset) for box in marked if not box.mirror]
    twice, _ = cover(tensor.num_elements, own, [], [])
    return None if twice else tuple(marked)


def _written_twice(targets: Sequence[TargetStorage], boxes: Mapping[str, Sequence[BoxMap]]) -> dict[str, str]:
    """Checkpoint tensors whose destination another box covers too, with the parameter's name."""
    by_target: dict[int, list[tuple[str, BoxMap]]] = {}
    for name, held in boxes.items():
        for box in held:
            by_target.setdefault(box.target, []).append((name, box))
    found: dict[str, str] = {}
    for index, entries in by_target.items():
        regions = [_destination(box) for _, box in entries]
        twice, _ = cover(targets[index].flat.numel(), regions, [], [])
        if twice:
            found |= {name: targets[index].names[0] for name, _ in entries}
    return found


def _holes(
    targets: Sequence[TargetStorage],
    boxes: Mapping[str, Sequence[BoxMap]],
    filled: Mapping[int, Sequence[BoxMap]],
) -> list[str]:
    """Parameters with an element that neither a box nor a constant fill reaches."""
    written: dict[int, list[Region]] = {}
    for held in boxes.values():
        for box in held:
            written.setdefault(box.target, []).append(_destination(box))
    holes: list[str] = []
    for index, target in enumerate(targets):
        fills = [_destination(box) for box in filled.get(index, [])]
        _, hole = cover(target.flat.numel(), written.get(index, []), fills, target.parameters)
        if hole:
            holes.append(target.names[0])
    return holes


def _destination(box: BoxMap) -> Region:
    return box.shape, box.dst_strides, box.dst_offset
