"""Update files: what leads an engine from its version to the host copy's.

Deltas of the last few versions are kept, so that an engine some versions behind gets one merged sparse step; an engine that is further
behind, or on an unknown version, gets all tensors.

Not thread-safe: the subscriber (:mod:`rose.weights.subscriber`) holds its lock around each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rose.errors import CapacityError, SectionCorrupt
from rose.lineage import WeightVersion
from rose.weights import boxes, codec, statehash
from rose.weights.host_copy import HostCopy
from rose.weights.manifest import Manifest, ManifestSection
from rose.weights.spec import TensorSpec
from rose.weights.spool import Spool
from rose.weights.update import TensorUpdate, Update, write_update

T = TypeVar("T")
R = TypeVar("R")

_KEPT_FILES, _MAX_KEPT_STEPS = 4, 64
_DECODED_FRACTION = 0.15
"""Of the model's bytes, kept of the newest step as decoded, for the engine that is one version behind: most are."""


@dataclass(slots=True)
class Staged:
    """A section ready to be written: values are final, nothing has changed yet."""

    section: ManifestSection
    values: NDArray[Any]
    idx: NDArray[np.uint32] | None
    """Places counted from the section's start; None: ``values`` is the whole box."""

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.idx is None else self.idx.nbytes)


class Map(Protocol):
    """``work`` on every item, on as many threads as there are."""

    def __call__(self, work: Callable[[T], R], items: Iterable[T], /) -> list[R]: ...


class UpdateFiles:
    """See the module.

    Args:
        host: The copy that the files lead to; they lie in its directory.
        spool: Has the objects of the steps that are kept.
        threads: For the tensors of a file.
        damaged: Called when the copy's memory is found not to be what its state says, before the error.
        chain_fraction: Of the model's bytes: steps larger than that are not kept.
    """

    def __init__(
        self,
        host: HostCopy,
        spool: Spool,
        threads: Map,
        damaged: Callable[[], None],
        *,
        chain_fraction: float,
    ) -> None:
        self._host, self._spool, self._map, self._damaged = host, spool, threads, damaged
        self._chain_fraction = chain_fraction
        self.folder = host.directory / "updates"
        self.folder.mkdir(exist_ok=True)
        self.steps: list[Manifest] = []
        """Deltas whose objects are in the spool, contiguous, ending at the copy's version."""
        self._newest: dict[tuple[str, int], Staged] = {}
        """What the last step of ``steps`` wrote, by tensor and start; empty where it is too much to keep."""
        self._handed_out: list[Path] = []
        """The newest last."""
        self.forget()  # those of an engine that an earlier process fed

    def forget(self) -> None:
        """Drop all: files and steps are of a copy that is no more."""
        self.steps.clear()
        self._newest = {}
        for path in self.folder.iterdir():  # a repaired copy has the same version, and would find them
            path.unlink()

    def remember(self, step: Manifest, staged: Sequence[Staged]) -> None:
        """The host copy took ``step``: keep the deltas that a lagging engine may need, the newest as decoded."""
        self._newest = {}
        if step.base is None:
            self.steps.clear()
        else:
            self.steps.append(step)
            if sum(each.nbytes for each in staged) <= _DECODED_FRACTION * step.bytes_dense:
                self._newest = {(each.section.tensor, each.section.start): each for each in staged}
        budget_bytes = self._chain_fraction * step.bytes_dense
        while self.steps and (
            len(self.steps) > _MAX_KEPT_STEPS or sum(s.bytes_sent for s in self.steps) > budget_bytes
        ):
            self.steps.pop(0)
        if not self.steps:
            self._newest = {}

    def write(self, engine_version: WeightVersion | None) -> Path:
        """The file that leads from ``engine_version`` (None: from anything) to the copy's version.

        Raises:
            SectionCorrupt: The host copy was damaged in memory.
            CapacityError: The disk is full, or has less room than the file takes.
        """
        target = self._host.version
        assert target is not None
        steps = self._steps_from(engine_version)
        base = engine_version if steps else None
        path = self.folder / f"{target}-from-{base or 'any'}.safetensors"
        if not path.exists():
            if not steps:  # every tensor whole
                self._host.require_room(self._host.nbytes)
            tensors = self._tensor_updates(steps)
            update = Update(
                run_id=self._host.run_id, target=target, base=base, model=self._host.model, tensors=tensors
            )
            try:
                write_update(path, update)
            except OSError as error:
                raise CapacityError(
                    f"cannot be written: {error.strerror}", status=507, field=path.name
                ) from error
        self._trim(path)
        return path

    def _steps_from(self, engine_version: WeightVersion | None) -> list[Manifest]:
        """The kept deltas that lead from ``engine_version`` to the copy; empty when they do not."""
        for number, step in enumerate(self.steps):
            if step.base is not None and step.base.identity == engine_version:
                return self.steps[number:]
        return []

    def _tensor_updates(self, steps: list[Manifest]) -> dict[str, TensorUpdate]:
        # Sorted by tensor once: a mixture of experts has tens of thousands of tensors, and as many sections a step.
        before = {tensor.name: tensor.h_before for tensor in steps[0].tensors} if steps else {}
        sections = [(step, step.sections_by_tensor()) for step in steps]

        def make(spec: TensorSpec) -> TensorUpdate | None:
            mine = [
                (step, section) for step, by_tensor in sections for section in by_tensor.get(spec.name, ())
            ]
            return self._tensor_update(spec, before, mine)

        found = dict(zip(self._host.specs, self._map(make, self._host.specs.values()), strict=True))
        for name, tensor in found.items():
            if tensor is None:
                self._damaged()
                raise SectionCorrupt("the host copy is damaged in memory, and is fetched again", field=name)
        return cast("dict[str, TensorUpdate]", found)

    def _tensor_update(
        self,
        spec: TensorSpec,
        before: Mapping[str, str | None],
        sections: Sequence[tuple[Manifest, ManifestSection]],
    ) -> TensorUpdate | None:
        """None: the copy's memory is not what its state says."""
        bits = self._host.bits(spec.name)
        h_after = self._host.h[spec.name]
        h_before = None
        idx: NDArray[Any] | None = None
        val: NDArray[Any] | None = None
        if before:
            h_before = statehash.from_hex(before[spec.name] or "")
            idx, val = self._changed(spec, sections)
        if idx is None:
            # The engine would refuse it, and ask for the same again.
            if statehash.hash_bits(bits) != h_after:
                return None
            return TensorUpdate(spec=spec, h_before=h_before, h_after=h_after, dense=bits.reshape(spec.shape))
        if idx.size == 0:
            return TensorUpdate(spec=spec, h_before=h_before, h_after=h_after)
        return TensorUpdate(
            spec=spec, h_before=h_before, h_after=h_after, idx=idx, val=bits[idx] if val is None else val
        )

    def _changed(
        self, spec: TensorSpec, sections: Sequence[tuple[Manifest, ManifestSection]]
    ) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        """Indices that any of ``sections`` touched, sorted, and the bits there now (None: look); no indices when writing the whole tensor is
        smaller."""
        dtype = np.dtype(np.uint32 if spec.num_elements <= 1 << 32 else np.int64)
        limit = spec.nbytes // (dtype.itemsize + spec.width_bytes) if spec.width_bytes <= 4 else 0
        pieces: list[NDArray[Any]] = []
        values: list[NDArray[Any]] = []
        total = 0
        for step, section in sections:
            if section.encoding == "raw":
                return None, None
            total += section.num_changed
            if total > 2 * limit:  # steps overlap by a quarter or so: the union is above the limit too
                return None, None
            decoded = (
                self._newest.get((spec.name, section.start))
                if self._newest and step is self.steps[-1]
                else None
            )
            if decoded is not None and decoded.idx is not None:
                idx = decoded.idx
                values.append(decoded.values)
            else:
                content = self._spool.read(step, step.objects[section.object])
                payload = memoryview(content)[section.offset : section.offset + section.nbytes]
                delta = codec.decode(payload, section.num_elements, spec.bits_dtype)
                idx = boxes.positions(section.box, delta.idx)
            pieces.append(idx.astype(dtype) + dtype.type(section.start))
        if not pieces:
            return np.empty(0, dtype), None
        merged, val = np.concatenate(pieces), None
        if not bool(
            np.all(merged[1:] > merged[:-1])
        ):  # several steps, pieces with gaps, or sections out of order
            merged = np.unique(merged)
        elif len(values) == len(pieces):
            val = np.concatenate(values)
        return (merged, val) if merged.size <= limit else (None, None)

    def _trim(self, newest: Path) -> None:
        """Drop old update files; an engine that has one open keeps reading it."""
        # In memory, not as the file's time: an engine that is asked again tells by that that it is the same file.
        self._handed_out = [path for path in self._handed_out if path != newest] + [newest]
        for path in self._handed_out[:-_KEPT_FILES]:
            path.unlink(missing_ok=True)
        self._handed_out = self._handed_out[-_KEPT_FILES:]
