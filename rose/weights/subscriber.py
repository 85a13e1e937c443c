"""The node's side: keep a copy of the policy current, and hand the engine the step it is missing.

Main path: :meth:`WeightSubscriber.poll` waits for a newer head, walks to it (a chain of deltas, or an anchor;
:mod:`rose.weights.routes`), and for every version on the way: pull its objects, check their checksums, decode, check
that every state hash comes out as the manifest says, and only then change the host copy
(:mod:`rose.weights.host_copy`).  :meth:`WeightSubscriber.fetch` then writes the *update file*
(:mod:`rose.weights.update_files`) that leads an engine from its version to the copy's.

What it guarantees:

* The host copy is always one published version, proven by state hashes, or nothing.  A corrupt, truncated or
  missing piece changes nothing; it is fetched again, and where the anchor leads past it, the anchor is taken.
* A delta that does not fit what we hold (a state hash comes out wrong) means that the copy is damaged: the anchor.
* Through a :class:`~rose.weights.sealed.SealedStore` it takes what a pinned key signed, objects by their BLAKE3 digests, and no head
  older than one that it saw before (:mod:`rose.weights.freshness`).
* A broken transfer goes on where it stopped, also after a restart of this process or of the relay.
* Objects of a version that is being published are pulled ahead of its head, where the store tells of them (:mod:`rose.weights.ahead`).
* A new attempt leads to its own anchor; a delta is applied only to its base.

Blocking; any thread may call.  Until the version that a poll pulls is whole, :meth:`WeightSubscriber.fetch` goes on with the one at hand.
"""

from __future__ import annotations

import logging
import mmap
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rose.errors import (
    CapacityError,
    Gone,
    NotFound,
    RolledBack,
    RoseError,
    SectionCorrupt,
    WeightsError,
    WrongBase,
)
from rose.lineage import WeightVersion
from rose.weights import boxes, codec, manifest, sealed, statehash, stored_manifests
from rose.weights.ahead import Ahead
from rose.weights.freshness import Freshness
from rose.weights.host_copy import HostCopy
from rose.weights.leases import holder_name
from rose.weights.manifest import MAX_STORED_BYTES, Head, Kind, Manifest, ManifestSection
from rose.weights.params import WeightsParams, given
from rose.weights.routes import route
from rose.weights.spec import TensorSpec, differences
from rose.weights.spool import Spool
from rose.weights.statehash import Bits
from rose.weights.store import ObjectStore
from rose.weights.update_files import Staged, UpdateFiles

_log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")

MOST_PULLS = 8
"""Objects at once: what one connection does not fill, a few do."""

_LEASE_S = 600.0


class WeightSubscriber:
    """Follows one run; see the module's docstring.

    Args:
        store: Where from; see :mod:`rose.weights.store`.
        directory: Owned by this subscriber: host copy, spool, update files.  About 2.2 copies of the model while
            an anchor arrives, 1.1 otherwise, and what the last four update files take.
        owns_store: Close the store with the subscriber, which also ends a poll that waits in another thread.

    Raises:
        ConfigError: The directory is in use or cannot be written.
    """

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        directory: Path | str,
        params: WeightsParams | None = None,
        *,
        owns_store: bool = False,
    ) -> None:
        self._store, self._owns_store = store, owns_store
        self._run_id = manifest.check_run_id(run_id)
        self._params = given(params)
        threads = self._params.num_threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="rose-decode") if threads > 1 else None
        pulls = min(threads, MOST_PULLS)
        self._pulls = ThreadPoolExecutor(pulls, thread_name_prefix="rose-pull") if threads > 1 else None
        self._following = threading.Lock()
        """Held by who pulls.  Taken before ``_lock``, which guards what lies in the directory and what the copy is."""
        self._lock = threading.Lock()
        self._host = HostCopy(directory, run_id)
        self._holder = f"sub-{holder_name(self._host.directory)}"
        self._spool = Spool(self._host.directory / "spool", store, self._renew_lease)
        self._ahead = Ahead(
            store, run_id, self._spool, held=lambda: self.version, has_room=self._has_room_ahead, num_pulls=pulls
        )  # fmt: skip
        self._files = UpdateFiles(
            self._host, self._spool, self._map, self._forget_copy, chain_fraction=self._params.chain_fraction
        )
        self._fresh = Freshness(self._host.directory / "seen", run_id, counts=sealed.is_sealed(store))
        self._told: WeightVersion | None = None
        self._failed: Manifest | None = None  # the step that did not work
        self._given_up: WeightVersion | None = None  # the version whose anchor did not help
        self._refused, self._is_closed = "", False
        self._leased_once = False
        self._leased: WeightVersion | None = None
        self._leased_at_s = 0.0

    @property
    def version(self) -> WeightVersion | None:
        """What the host copy is."""
        return self._host.version

    def require(self, version: WeightVersion) -> None:
        """The trainer has published ``version``: an older head is refused from now on, where signatures count.  Does not block."""
        self._fresh.require(version)

    def poll(self, timeout_s: float) -> WeightVersion | None:
        """Bring the host copy to the run's head.

        Returns:
            The version, when it is another than the last call returned; None when ``timeout_s`` passed.

        Raises:
            SectionCorrupt, WrongBase: The newest version cannot be had intact, or lies behind the copy; the copy is
                what it was (or an intermediate version).  Worth another call after a pause.  NotAuthentic and RolledBack are among them.
            CapacityError: The store cannot be reached, or the directory has less room than the version takes.
        """
        if self._is_closed:
            raise WeightsError("is closed", field="subscriber")
        if self._params.pull_ahead:
            self._ahead.start()
        held = self.version
        fresh = held is not None and held != self._told  # restored from disk: tell at once
        try:
            head = self._store.wait_head(self._run_id, held, 0.0 if fresh else timeout_s)
            if head is None:
                self._check_not_behind(held)
                if not self._leased_once:  # what an earlier process of this directory held, and died with
                    self._lease(None)
        except (CapacityError, WeightsError) as error:
            said, self._refused = self._refused, str(error)
            # The copy is good without the relay; that a relay is away is no news, that it lies is said before.
            if not fresh or not (isinstance(error, CapacityError) or said == str(error)):
                raise
            head = None
        with self._following:
            if head is not None:
                self._host.require_there()
                self._fresh.see(head.identity)
                self._advance(head)
            with self._lock:
                if self.version is None or self.version == self._told:
                    return None
                self._told = self.version
                return self._told

    def fetch(self, version: WeightVersion, engine_version: WeightVersion | None) -> Path:
        """Write the update file that leads an engine from ``engine_version`` (None: from anything) to ``version``.

        The file holds one merged sparse step when the deltas in between are at hand and it pays, else every
        tensor whole.  It stays until a few later ones have been written.

        Raises:
            Gone: The host copy is not at ``version`` (any more); poll tells where it is.
            SectionCorrupt: The host copy was damaged in memory; the next poll starts from an anchor.
            CapacityError: The disk is full, or has less room than the file takes.
        """
        with self._lock:
            if self.version is None or version != self.version:
                raise Gone(f"the host copy is at {self.version}, not at {version}", field="version")
            self._host.require_there()
            return self._files.write(engine_version)

    def state(self) -> dict[str, str]:
        """State hash by tensor name, in hex."""
        with self._lock:
            return {name: statehash.to_hex(h) for name, h in self._host.h.items()}

    def scan(self) -> list[str]:
        """Hash every byte of the copy; returns the names of damaged tensors.  A rare scrub, 8 GB/s per core.

        A damaged copy is dropped: the next poll starts from an anchor.
        """
        with self._lock:
            found = self._host.scan()
            damaged = sorted(name for name, h in self._host.h.items() if found.get(name) != h)
            if damaged:
                self._forget_copy()
            return damaged

    def close(self) -> None:
        """Give the directory back; the copy stays for the next process."""
        self._is_closed = True
        if self._owns_store:
            self._store.close()
        self._ahead.close()
        with self._following, self._lock:
            self._host.close()
            for pool in (self._pool, self._pulls):
                if pool is not None:
                    pool.shutdown()

    def _map(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """``work`` on every item, on all threads; sections and tensors touch nothing of each other."""
        if self._pool is None:
            return [work(item) for item in items]
        return list(self._pool.map(work, items))

    # -- following the head

    def _check_not_behind(self, held: WeightVersion | None) -> None:
        head = self._store.get_head(self._run_id)
        self._fresh.check(None if head is None else head.identity)
        if head is not None and held is not None and head.identity < held:
            raise RolledBack(
                f"head is at {head.identity}, the host copy at {held}",
                field="run_id",
                fix=f"another run used this name; remove {self._host.directory}",
            )

    def _advance(self, head: Head) -> None:
        if self.version is not None and head.identity <= self.version:
            return
        self._lease(head.identity)
        try:
            self._advance_to(self._read_head(head))
        except NotFound as error:
            self._lease(None)
            # Deleted while we read, for lack of a lease: the head has moved on by then.
            raise SectionCorrupt(f"{head.identity} is incomplete: {error}", field="store") from error
        except WeightsError:
            self._lease(None)
            raise
        self._lease(None)  # after any other error the store is away, and the lease ends by itself

    def _advance_to(self, newest: Manifest) -> None:
        """By the cheapest way; by the anchor when that fails and the anchor can help."""
        self._failed = None
        try:
            self._follow(self._route(self.version, newest))
        except (SectionCorrupt, WrongBase) as error:
            if self._given_up == newest.identity:
                raise
            whole = self._route(None, newest)
            if isinstance(error, SectionCorrupt) and _contains(whole, self._failed):
                raise  # the damaged piece is needed either way
            _log.warning("%s; taking the anchor %s instead", error, whole[0].identity)
            try:
                self._follow(whole)
            except (SectionCorrupt, WrongBase):
                self._given_up = newest.identity  # a full copy is pulled once per version, not at every poll
                raise
        self._given_up = None

    def _route(self, held: WeightVersion | None, newest: Manifest) -> list[Manifest]:
        def read(version: WeightVersion, kind: Kind) -> Manifest:
            return stored_manifests.read(self._store, self._run_id, version, kind)

        return route(held, newest, read, chain_fraction=self._params.chain_fraction)

    def _read_head(self, head: Head) -> Manifest:
        data = self._store.get(head.manifest.key, max_bytes=MAX_STORED_BYTES)
        if not sealed.check_content(head.manifest, data):
            self._store.distrust(head.manifest.key)
            raise SectionCorrupt("is not what the head names", field=head.manifest.key)
        return manifest.decode_manifest(data, self._run_id, head.identity, head.kind)

    def _follow(self, steps: list[Manifest]) -> None:
        # First: on a full disk, what is left of a version that is now passed over would keep all others out.
        with self._lock:
            self._spool.clear([*self._files.steps, *steps])
        self._host.require_room(self._bytes_to_pull(steps))
        for step in steps:
            self._failed = step
            self._check_base(step)
            staged = self._stage(step)
            with self._lock:
                # Again: whoever asked for a file meanwhile may have found the copy damaged.
                self._check_base(step)
                self._commit(step, staged)
                self._files.remember(step, staged)
                self._spool.clear(self._files.steps)
        self._failed = None

    def _check_base(self, step: Manifest) -> None:
        name = f"version {step.identity}"
        if step.base is None:
            return
        if step.base.identity != self.version:
            raise WrongBase(f"starts from {step.base.identity}, the copy is at {self.version}", field=name)
        if step.model != self._host.model:
            raise WrongBase(f"is of another model: {differences(self._host.specs, step.specs())}", field=name)
        held = self._host.h
        wrong = [t.name for t in step.tensors if t.h_before != statehash.to_hex(held[t.name])]
        if wrong:
            raise WrongBase(f"state differs before it in {', '.join(wrong[:5])}", field=name)

    def _stage(self, step: Manifest) -> list[Staged]:
        """Pull, check and decode everything; the host copy is only read."""
        specs = step.specs()
        sections: dict[int, list[ManifestSection]] = {}
        for section in step.sections:
            sections.setdefault(section.object, []).append(section)

        def pull(number: int) -> mmap.mmap | bytes:
            return self._spool.pull(step, step.objects[number])

        def stage(section: ManifestSection, content: mmap.mmap | bytes) -> Staged:
            payload = memoryview(content)[section.offset : section.offset + section.nbytes]
            return self._stage_section(step, section, payload, specs[section.tensor])

        numbers = range(len(step.objects))
        if self._pool is None or self._pulls is None:
            staged: list[Staged] = []
            for number in numbers:
                content = pull(number)
                staged += [stage(section, content) for section in sections.get(number, ())]
            return staged
        # Sections are decoded as their objects arrive, and no thread pulls or decodes any more when this returns.
        pulls = {self._pulls.submit(pull, number): number for number in numbers}
        stages: list[Future[Staged]] = []
        try:
            for pulled in as_completed(pulls):
                content = pulled.result()
                stages += [
                    self._pool.submit(stage, section, content) for section in sections.get(pulls[pulled], ())
                ]
            return [done.result() for done in stages]
        finally:
            left: list[Future[Any]] = [*pulls, *stages]
            for future in left:
                future.cancel()
            wait(left)

    def _stage_section(
        self, step: Manifest, section: ManifestSection, payload: memoryview, spec: TensorSpec
    ) -> Staged:
        name = f"{step.identity} {section.tensor} at {section.start}"
        if manifest.digest(payload) != section.xxh3:
            raise SectionCorrupt("checksum is wrong", field=name)
        if section.encoding == "planes":
            delta = codec.decode(payload, section.num_elements, spec.bits_dtype)
            delta = replace(delta, idx=boxes.positions(section.box, delta.idx))
            _, values, dh = codec.stage(self._span(section), delta, start=section.start)
            staged = Staged(section, values, delta.idx)
        else:
            values = np.frombuffer(payload, spec.bits_dtype)
            dh = boxes.hash_bits(section.box, values)
            if step.base is not None:
                present = boxes.view(section.box, self._host.bits(section.tensor))
                before = boxes.hash_bits(section.box, np.ascontiguousarray(present).reshape(-1))
                dh = statehash.subtract(dh, before)
            staged = Staged(section, values, None)
        if statehash.to_hex(dh) != section.dh:
            # Every byte arrived as sent.  Of a delta, what it is applied to is wrong; of an anchor, the sender.
            error = SectionCorrupt if step.base is None else WrongBase
            raise error("state hash comes out wrong", field=name)
        return staged

    def _span(self, section: ManifestSection) -> Bits:
        """The host copy from the first to the last element of the section's box."""
        return self._host.bits(section.tensor)[section.start : section.box.end]

    def _commit(self, step: Manifest, staged: list[Staged]) -> None:
        """Write what was staged.  No check is left that could fail half-way."""
        if step.base is None:
            self._host.reshape(step.specs().values())  # refused, for lack of room, before anything changes
        self._host.begin()
        self._map(self._write, staged)
        # _stage proved each section's dH and the manifest that they add up, so this is the state.
        h = {tensor.name: statehash.from_hex(tensor.h_after) for tensor in step.tensors}
        self._host.finish(step.identity, h)

    def _write(self, piece: Staged) -> None:
        if piece.idx is None:
            place = boxes.view(piece.section.box, self._host.bits(piece.section.tensor))
            place[:] = piece.values.reshape(place.shape)
        else:
            codec.scatter(self._span(piece.section), piece.idx, piece.values)

    def _forget_copy(self) -> None:
        self._host.begin()
        self._files.forget()
        self._told = None  # what was handed out may be damaged too: the repaired copy is news

    # -- spool

    def _bytes_to_pull(self, steps: Sequence[Manifest]) -> int:
        """What following ``steps`` adds to the directory: their objects, and a host copy where there is none of this model."""
        num_bytes = self._spool.missing_bytes(steps)
        if steps and steps[0].base is None and steps[0].model != self._host.model:
            num_bytes += max(0, steps[0].bytes_dense - self._host.nbytes)  # the other model's goes first
        return num_bytes

    def _has_room_ahead(self, num_bytes: int) -> bool:
        """What comes early must not keep out what is needed: a copy of the model is left free beside it."""
        return shutil.disk_usage(self._host.directory).free - num_bytes > 1.2 * self._host.nbytes

    def _lease(self, version: WeightVersion | None) -> None:
        """Keep what we are about to read from being deleted; a store that cannot is not a reason to stop."""
        self._leased, self._leased_at_s, self._leased_once = version, time.monotonic(), True
        try:
            self._store.lease(self._run_id, self._holder, version, _LEASE_S)
        except RoseError as error:
            _log.info("no lease on %s: %s", version, error)

    def _renew_lease(self) -> None:
        """A transfer may take longer than a lease."""
        if self._leased is not None and time.monotonic() - self._leased_at_s > _LEASE_S / 3:
            self._lease(self._leased)


def _contains(steps: list[Manifest], wanted: Manifest | None) -> bool:
    """False for None: the way itself could not be read, so another one may be."""
    return wanted is not None and any((s.identity, s.kind) == (wanted.identity, wanted.kind) for s in steps)
