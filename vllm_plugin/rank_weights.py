"""The policy weights of one worker rank: version, state hashes, one staged update and its undo log.

An update goes through four steps, each of which leaves the rank in a known state:

* *stage* (background thread): reads the file, proves base and contents, computes where every value goes.  It
  reads model memory and changes nothing.
* *commit* (engine thread, between two steps): writes the new bits, reads them back and compares.  Nothing is
  decoded, hashed or read from a file while requests wait: staging has done that.
* *undo* (engine thread, between two steps): writes the old bits back and proves them by a full scan.
* *finish* (engine thread): makes the new version official and drops the undo log.

A commit that fails undoes itself.  One that succeeded can still be undone until ``finish``, because another
rank may have failed: the caller decides for all ranks (:mod:`vllm_plugin.engine_control`).

A *whole* version into a model on a device is what an engine takes before its first turn.  It streams: staging proves the file and keeps
nothing of it but the open file, commit reads that again, tensor by tensor and a slice at a time, and there is no way back, so whatever fails
then breaks the rank.  The file may lose its name meanwhile: a host copy that changes hands deletes what the one before handed out.  The device
holds one tensor more than the model.

What proves an update: the header lists the state hash of *every* tensor before and after.  A tensor that
this rank holds whole is compared here; of one that is cut across ranks, :meth:`RankWeights.report` gives this
rank's part and :func:`~vllm_plugin.weight_vote.judge` compares the sums of all ranks.  Commit is not possible before that vote.

Invariants: the running hashes are those of the memory; ``version`` is the version that the memory holds,
save between a successful commit and ``finish``; a failed stage changes nothing; nothing here raises into
vLLM's RPC loop (:mod:`vllm_plugin.weights` turns errors into answers).

Memory while staged, of the host whatever the model is on: 8 bytes of destination, 4-8 of index and twice the element per
sparse change; twice the tensor for a dense one that does not stream.  On a device commit has, of the one tensor that it writes, 8 bytes
and twice the element per sparse change, 12 for bf16, or the tensor once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch

from rose.errors import RoseError, SectionCorrupt, VersionRefused, WeightsError, WrongBase
from rose.lineage import Lineage, WeightVersion
from rose.weights import indexed, statehash
from rose.weights.spec import differences, model_digest
from rose.weights.update import TensorUpdate, UpdateFile
from rose.wire.errors import error_data
from vllm_plugin.plan import BoxMap, ShardPlan
from vllm_plugin.staged_update import StagedTensor, StagedUpdate, UpdatePhase, UpdateSlot
from vllm_plugin.weight_bits import BoxUpdate, flat_of, hash_box, hash_piece, parked, put, signed

logger = logging.getLogger("vllm.rose")

STREAM_SLICE_S = 0.05
"""Of a version that streams: between two slices the engine answers, and gives memory back."""


class RankWeights:
    """See the module.

    Args:
        plan: Of this rank.
        version: What the model was loaded as.
        run: Whose that is; empty: nobody has said.
        streams: Whole versions stream; None: where the model is on a device.
        num_threads: That stage, beside the engine's steps.

    Any thread may call :meth:`stage` and :meth:`report`; :meth:`commit`, :meth:`undo`, :meth:`finish` and
    :meth:`scan` belong to the thread that runs the model.
    """

    def __init__(
        self,
        plan: ShardPlan,
        version: WeightVersion,
        run: str = "",
        *,
        streams: bool | None = None,
        num_threads: int = 1,
    ) -> None:
        self.plan = plan
        self._num_threads = num_threads
        on_device = any(target.flat.device.type != "cpu" for target in plan.targets)
        self._streams = on_device if streams is None else streams
        self.version = version
        self.run = run
        self.model = model_digest(plan.tensors.values())
        self.hashes = self.scan()
        self._lock = threading.Lock()
        self._slot = UpdateSlot()
        self._thread: threading.Thread | None = None

    # -- looking ----------------------------------------------------------------------------------

    def scan(self) -> dict[str, int]:
        """This rank's hash of every tensor it holds, from memory; reads every weight."""
        return {name: self._scan_tensor(name) for name, boxes in self.plan.boxes.items() if boxes}

    def _scan_tensor(self, name: str) -> int:
        total = 0
        for box in self.plan.boxes[name]:
            if not box.mirror:
                total = statehash.add(total, hash_box(box, box.view(self._bits(box))))
        return total

    def report(self) -> dict[str, Any]:
        """Version and phase, and for a staged update the hashes of tensors that this rank holds in part.

        Plain data; hashes in hex.  :func:`~vllm_plugin.weight_vote.judge` reads the reports of all ranks.
        """
        with self._lock:
            slot = self._slot
            staged = slot.staged
            return {
                "version": str(self.version),
                "run": self.run,
                "phase": str(slot.phase),
                "target": None if slot.target is None else str(slot.target),
                "target_run": "" if staged is None else staged.run,
                "error": None if slot.error is None else error_data(slot.error),
                "num_changed": 0 if staged is None else staged.num_changed,
                "stage_s": 0.0 if staged is None else staged.stage_s,
                "header": None if staged is None else staged.header,
                "partial": {} if staged is None else staged.partial,
                "plan": self.plan.digest,
                "fallback": dict(sorted(self.plan.fallback.items())),
                "holes": list(self.plan.holes),
            }

    # -- staging ----------------------------------------------------------------------------------

    def prefetch(self, path: str, target: WeightVersion, run: str = "") -> None:
        """Start to stage ``path`` in a background thread.  Asking again for the same file is free.

        Args:
            run: Whose weights the file holds; empty: those of the run in place.  Weights of another are refused unless they are
                asked for by its name.

        Raises:
            VersionRefused: ``target`` is of the run in place and not newer.
            WeightsError: Another version is being staged or committed, or the rank is broken.
        """
        source = _identity(path)
        with self._lock:
            slot = self._slot
            # It is open: that the name is gone, or another file's while it is being read, changes nothing.
            is_at_hand = slot.phase is UpdatePhase.STAGING or (
                slot.phase is UpdatePhase.STAGED and source in (slot.source, None)
            )
            if is_at_hand and (slot.target, slot.path) == (target, path):
                return
            if slot.phase in (
                UpdatePhase.STAGING,
                UpdatePhase.STREAMING,
                UpdatePhase.COMMITTED,
                UpdatePhase.BROKEN,
            ):
                raise WeightsError(f"the engine is {slot.phase} with {slot.target}", field="version")
            if run in ("", self.run) and target <= self.version:
                raise VersionRefused(f"{target} is not newer than {self.version}", field="version")
            slot.drop()
            self._slot = UpdateSlot(phase=UpdatePhase.STAGING, target=target, path=path, source=source)
            self._thread = threading.Thread(
                target=self._stage_into, args=(self._slot, path, run), name="rose-weights-stage", daemon=True
            )
            self._thread.start()

    def _stage_into(self, slot: UpdateSlot, path: str, run: str) -> None:
        assert slot.target is not None
        error: RoseError | None = None
        staged: StagedUpdate | None = None
        try:
            staged = self._stage(path, slot.target, run, slot.cancelled)
        except RoseError as refused:
            error = refused
        except Exception as failed:  # the boundary of a thread: whatever it was, the engine goes on
            logger.exception("ROSE: staging %s failed", slot.target)
            error = WeightsError(f"staging failed: {failed!r}"[:300])
        with self._lock:
            if self._slot is slot:
                slot.staged, slot.error = staged, error
                slot.phase = UpdatePhase.STAGED if staged is not None else UpdatePhase.FAILED
            elif staged is not None:
                staged.close()

    def discard(self) -> None:
        """Forget the update at hand; a staging thread stops at its next tensor.

        Raises:
            WeightsError: It is committed already (undo or finish it), or the rank is broken.
        """
        with self._lock:
            if self._slot.phase in (UpdatePhase.STREAMING, UpdatePhase.COMMITTED, UpdatePhase.BROKEN):
                raise WeightsError(f"the engine is {self._slot.phase}", field="version")
            self._slot.cancelled.set()
            self._slot.drop()
            self._slot = UpdateSlot()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the staging thread, if there is one."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _stage(self, path: str, target: WeightVersion, run: str, cancelled: threading.Event) -> StagedUpdate:
        began_s = time.monotonic()
        pieces: list[BoxUpdate] = []
        hashes: dict[str, int] = {}
        partial: dict[str, dict[str, Any]] = {}
        num_changed = 0
        left: list[str] | None = None
        with ExitStack() as opened:
            file = opened.enter_context(UpdateFile(path))
            if self._streams and file.base is None:
                left = []
            if file.target != target:
                raise WeightsError(f"the file holds {file.target}, not {target}", field="version")
            if file.header.run_id != (run or self.run or file.header.run_id):
                raise WrongBase(
                    f"the file is of run {file.header.run_id}, not of {run or self.run}",
                    field="run",
                    fix="name the run whose weights are wanted",
                )
            if file.header.model != self.model:
                unlike = differences(self.plan.tensors, file.specs)
                raise WrongBase(f"of another model than this engine's: {unlike}", field="model")

            def stage(name: str) -> StagedTensor:
                if cancelled.is_set():
                    raise WeightsError(f"staging of {target} was cancelled", field="version")
                with torch.no_grad():  # a thread's own
                    return self._stage_tensor(file, name, streams=left is not None)

            for name, found in zip(file, self._in_turn(stage, file), strict=True):
                pieces += found.pieces
                num_changed += found.num_changed
                if found.hash is not None:
                    hashes[name] = found.hash
                if found.partial is not None:
                    partial[name] = found.partial
                if found.streams and left is not None:
                    left.append(name)
            if left is not None:
                opened.pop_all()
        return StagedUpdate(
            target=target,
            run=file.header.run_id,
            pieces=pieces,
            hashes=hashes,
            partial=partial,
            header=hashlib.blake2b(msgspec.json.encode(file.header), digest_size=16).hexdigest(),
            num_changed=num_changed,
            stage_s=time.monotonic() - began_s,
            left=left,
            file=None if left is None else file,
        )

    def _in_turn(self, work: Callable[[str], StagedTensor], names: Iterable[str]) -> Iterator[StagedTensor]:
        """In the order of ``names``, on all threads."""
        if self._num_threads == 1:
            yield from map(work, names)
            return
        threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="rose-stage")
        try:
            yield from threads.map(work, names)
        finally:
            threads.shutdown(cancel_futures=True)

    def _stage_tensor(self, file: UpdateFile, name: str, *, streams: bool) -> StagedTensor:
        """What becomes of one tensor; several threads may ask, each for another."""
        row = file.header.tensors[name]
        if name in self.plan.fallback:
            if row.num_changed:
                raise WeightsError(f"cannot be patched: {self.plan.fallback[name]}", field=name)
            self._need_label(file, name)
            return StagedTensor()
        if not self.plan.boxes[name]:
            return (
                StagedTensor()
            )  # another rank's, or one that the model's loader skips; judge() tells them apart
        before = None if row.h_before is None else statehash.from_hex(row.h_before)
        whole = self.plan.is_whole(name)
        after = held = self.hashes[name]
        if whole and before is not None and before != held:
            raise WrongBase(f"holds {statehash.to_hex(held)}, the update is for {row.h_before}", field=name)
        found = StagedTensor()
        if row.num_changed and streams:
            found.hash = after = self._hash_dense(file.view(name))
            found.num_changed = sum(box.num_elements for box in self.plan.boxes[name])
            found.streams = True
        elif row.num_changed:
            found.pieces, after = self._place(file.view(name))
            found.hash = after
            found.num_changed = sum(piece.new.numel() for piece in found.pieces)
        if not whole:
            found.partial = {
                "before": row.h_before,
                "after": row.h_after,
                "num_elements": self.plan.tensors[name].num_elements,
                "parts": self._parts(name, held, after),
            }
        elif after != statehash.from_hex(row.h_after):
            raise SectionCorrupt(
                f"would become {statehash.to_hex(after)}, the header says {row.h_after}", field=name
            )
        return found

    def _need_label(self, file: UpdateFile, name: str) -> None:
        """A tensor that we cannot hash is taken on the word of the version alone."""
        known = self.run in ("", file.header.run_id) and file.base == self.version
        if file.base is not None and not known:
            raise WrongBase(
                f"the update is for {file.header.run_id}@{file.base}, the engine holds {Lineage(self.run, self.version)}, "
                f"and {name} cannot be checked",
                field="base",
            )

    def _parts(self, name: str, before: int, after: int) -> dict[str, Any]:
        regions = [
            [list(box.shape), list(box.src_strides), box.src_offset]
            for box in self.plan.boxes[name]
            if not box.mirror
        ]
        return {
            "regions": regions,
            "num_elements": sum(box.num_elements for box in self.plan.boxes[name] if not box.mirror),
            "before": statehash.to_hex(before),
            "after": statehash.to_hex(after),
        }

    def _hash_dense(self, tensor: TensorUpdate) -> int:
        """This rank's hash of a tensor that comes whole."""
        flat = flat_of(tensor)
        total = 0
        for box in self.plan.boxes[tensor.spec.name]:
            if not box.mirror:
                total = statehash.add(total, hash_box(box, box.source_view(flat)))
        return total

    def _place(self, tensor: TensorUpdate) -> tuple[list[BoxUpdate], int]:
        """Destinations, old and new bits of one changed tensor, and this rank's hash of it afterwards.

        The old bits are read from the live model, so a memory that is not what the running hash says shows up
        as a wrong result here.
        """
        name = tensor.spec.name
        after = self.hashes[name]
        pieces: list[BoxUpdate] = []
        for box in self.plan.boxes[name]:
            piece = self._piece(tensor, box)
            if piece is None:
                continue
            pieces.append(piece)
            if not box.mirror:
                after = statehash.add(
                    after, statehash.subtract(hash_piece(piece, piece.new), hash_piece(piece, piece.old))
                )
        return pieces, after

    def _piece(self, tensor: TensorUpdate, box: BoxMap) -> BoxUpdate | None:
        bits = self._bits(box)
        if tensor.dense is not None:
            flat = flat_of(tensor)
            new = box.source_view(flat).clone(memory_format=torch.contiguous_format)
            return BoxUpdate(
                name=tensor.spec.name, box=box, storage=None, index=None, new=parked(new, bits),
                old=parked(box.view(bits).to("cpu", copy=True), bits),
            )  # fmt: skip
        assert tensor.idx is not None
        assert tensor.val is not None
        inside, index, found = box.locate(tensor.idx)
        if found.size == 0:
            return None
        storage = torch.from_numpy(found)
        values = tensor.val[inside].copy() if isinstance(inside, slice) else tensor.val[inside]
        if bits.device.type == "cpu":  # loads the compiled loops, so that no commit waits for a compiler
            nothing = np.empty(0, tensor.spec.bits_dtype)
            indexed.put(nothing, np.empty(0, np.int64), nothing)
        return BoxUpdate(
            name=tensor.spec.name,
            box=box,
            storage=parked(storage, bits),
            index=index,
            new=parked(torch.from_numpy(signed(values)), bits),
            old=parked(bits.index_select(0, storage.to(bits.device)).cpu(), bits),
        )

    # -- changing ---------------------------------------------------------------------------------

    @property
    def more(self) -> bool:
        """Does a version stream of which :meth:`commit` has not written all?"""
        return self._slot.phase is UpdatePhase.STREAMING

    def commit(self, target: WeightVersion) -> float:
        """Write the staged update and prove it; returns the seconds it took.  One that streams is written a slice at a call, until
        there is no :attr:`more`; a call behind the last changes nothing.

        Raises:
            WeightsError: Nothing is staged for ``target``; or the memory did not become what was staged, in which case the old bits
                are back.
        """
        with self._lock:
            slot = self._slot
            staged = slot.staged
            going_on = (
                slot.phase in (UpdatePhase.STREAMING, UpdatePhase.COMMITTED)
                and staged is not None
                and staged.left is not None
            )
            if (
                (slot.phase is not UpdatePhase.STAGED and not going_on)
                or slot.target != target
                or staged is None
            ):
                raise WeightsError(f"{target} is not staged: the engine is {slot.phase}", field="version")
            began_s = time.monotonic()
            if staged.left is not None:
                self._stream(slot, staged, staged.left)
                return time.monotonic() - began_s
            try:
                with torch.no_grad():
                    self._write(staged.pieces)
            except Exception as error:
                logger.exception("ROSE: commit of %s failed, undoing", target)
                self._take_back(slot, staged)
                if not isinstance(error, RoseError):
                    raise WeightsError(f"commit failed and was undone: {error!r}"[:300]) from error
                raise
            slot.phase = UpdatePhase.COMMITTED
            return time.monotonic() - began_s

    def undo(self) -> None:
        """Take a commit back; does nothing when there is none.

        Raises:
            WeightsError: The old state could not be proved; the rank is broken.
        """
        with self._lock:
            slot = self._slot
            if slot.phase is UpdatePhase.COMMITTED and slot.staged is not None:
                slot.error = WeightsError(f"{slot.target} was undone", field="version")
                self._take_back(slot, slot.staged)
            elif slot.phase is UpdatePhase.STREAMING:
                self._break(slot, WeightsError(f"{slot.target} is in place in part", field="version"))

    def finish(self) -> WeightVersion:
        """Make a commit final, or drop an update that was undone; returns the version in place."""
        with self._lock:
            slot = self._slot
            if slot.phase is UpdatePhase.COMMITTED and slot.staged is not None:
                self.version, self.run = slot.staged.target, slot.staged.run
                self.hashes |= slot.staged.hashes
                self._slot = UpdateSlot()
            return self.version

    def _write(self, pieces: Sequence[BoxUpdate]) -> None:
        """Write and read back.  Equal bits have the hash that staging proved; no need to compute it again."""
        doubts = [(piece.name, put(self._bits(piece.box), piece, piece.new)) for piece in pieces]
        for name, differs in doubts:  # a device is waited for once everything is on its way
            if bool(differs):
                raise WeightsError("does not hold what was written", field=name)

    def _stream(self, slot: UpdateSlot, staged: StagedUpdate, left: list[str]) -> None:
        """Write the next tensors of a whole version, for a slice of time."""
        file, until_s = staged.file, time.monotonic() + STREAM_SLICE_S
        assert file is not None
        if left and file.was_written_to():
            error = WeightsError("was written to since it was staged", field=file.path.name)
            if slot.phase is UpdatePhase.STAGED:
                slot.phase, slot.error = UpdatePhase.FAILED, error
                slot.drop()
                raise error
            self._break(slot, error)
        try:
            with torch.no_grad():
                while left:
                    slot.phase = UpdatePhase.STREAMING
                    self._overwrite(file.read(left[0]), staged.hashes[left[0]])
                    del left[0]
                    if time.monotonic() >= until_s:
                        break
        except Exception as error:
            logger.exception("ROSE: %s is in place in part", slot.target)
            own = error if isinstance(error, RoseError) else WeightsError(f"commit failed: {error!r}"[:300])
            self._break(slot, own)
        if not left:  # of a rank that holds none of its tensors at the first call
            slot.phase = UpdatePhase.COMMITTED
            staged.close()

    def _overwrite(self, tensor: TensorUpdate, after: int) -> None:
        """Write a whole tensor, read it back, and prove that it is what was staged."""
        name, flat, total = tensor.spec.name, flat_of(tensor), 0
        for box in self.plan.boxes[name]:
            values = box.source_view(flat)
            piece = BoxUpdate(name=name, box=box, storage=None, index=None, new=values, old=values)
            self._write([piece])
            if not box.mirror:
                total = statehash.add(total, hash_box(box, values))
        if total != after:
            raise SectionCorrupt(f"became {statehash.to_hex(total)} since it was staged", field=name)

    def _break(self, slot: UpdateSlot, error: RoseError) -> NoReturn:
        slot.phase, slot.error = UpdatePhase.BROKEN, error
        slot.drop()
        raise error

    def _take_back(self, slot: UpdateSlot, staged: StagedUpdate) -> None:
        if staged.left is not None:
            self._break(slot, WeightsError(f"{slot.target} streamed in: nothing leads back", field="version"))
        with torch.no_grad():
            for piece in reversed(staged.pieces):
                put(self._bits(piece.box), piece, piece.old)
            wrong = [name for name in staged.hashes if self._scan_tensor(name) != self.hashes[name]]
        slot.staged = None
        if wrong:
            slot.phase = UpdatePhase.BROKEN
            slot.error = WeightsError("does not hold its old values after an undo", field=wrong[0])
            raise slot.error
        slot.phase = UpdatePhase.FAILED
        if slot.error is None:
            slot.error = WeightsError(f"commit of {slot.target} failed and was undone", field="version")

    def _bits(self, box: BoxMap) -> torch.Tensor:
        return self.plan.targets[box.target].bits()


def _identity(path: str) -> tuple[int, ...] | None:
    """Tells a file from another that took its name; None: there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
