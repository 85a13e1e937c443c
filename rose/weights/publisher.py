"""The trainer's side: turn the weights of this moment into a version that engines can fetch.

Main path, :meth:`WeightPublisher.publish`, in four rounds of all ranks (:func:`rose.weights.ranks.agree`): *open*
(what is published, who publishes which piece), *diff* (each rank encodes and uploads what changed in its own shard;
nothing is gathered), *describe* (rank 0 merges the descriptions and writes the manifest), *point* (rank 0 moves the
run's head; then every rank advances its baseline).  A trainer of one process runs the same rounds alone.

* The **baseline** (:mod:`rose.weights.baseline`) is a copy of what was last *published*.  It advances only once
  manifest and head are durable; after any failure the next publish is again a correct step from what readers hold.
* A version is final.  Publishing it again with the same weights succeeds and sends nothing; with others it is
  refused.  An attempt that another process has used, or an older one, is refused: a restarted trainer takes the
  next attempt.  Of two trainers with one run id, one is refused at its next publish.
* Through a :class:`~rose.weights.sealed.SealedStore` what is published is **signed**; rank 0 alone has the key.
* First an **anchor** (everything raw), then deltas; above ``anchor_density`` the version is an anchor instead.  Later
  anchors are composed from the one before and the deltas, by a thread of rank 0 that no publish and no training step
  waits for (:mod:`rose.weights.upkeep`); the next version after one is there starts from it.
* A **full store** (507) is answered by deleting: what no reader can need, then what only leases keep, at last the head's
  own chain, after which the version goes as an anchor.  So a run goes on while one full copy and one version fit.

The weights must not change while :meth:`publish` runs; :meth:`publish_async` takes a copy first and lets the trainer
go on.  One lock: any thread may call, one publish runs at a time.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rose.errors import ConfigError, Conflict, NotFound, SectionCorrupt, VersionRefused, WeightsError
from rose.lineage import WeightVersion
from rose.weights import (
    ending,
    layout,
    manifest,
    replicas,
    sealed,
    settings,
    standing,
    statehash,
    stored_manifests,
)
from rose.weights.baseline import Baseline, Change, state_after
from rose.weights.buckets import Buckets
from rose.weights.chain import Chain, chain_of
from rose.weights.layout import HeldBoxes
from rose.weights.manifest import Base, Head, Kind, Manifest, ObjectRef
from rose.weights.params import WeightsParams, given
from rose.weights.ranks import Ranks, SoloRank, StoreFull, agree
from rose.weights.retention import Need
from rose.weights.rounds import (
    ZERO,
    Counted,
    Counts,
    Described,
    Nothing,
    Opened,
    Opening,
    RankShare,
    State,
    added,
    manifest_of,
)  # fmt: skip
from rose.weights.source import TensorBox, collect
from rose.weights.spec import TensorSpec, model_digest
from rose.weights.store import ObjectStore
from rose.weights.upkeep import News, Upkeep

__all__ = ["PublishReport", "WeightPublisher", "WeightsParams"]

_log = logging.getLogger(__name__)
P = TypeVar("P")
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """What one publish did, all ranks together; the same on every rank.

    Args:
        kind: ``delta`` or ``anchor``.
        bytes_dense: A full copy of the model as the engines hold it.
        bytes_sent: Objects of this version, as a reader pulls them; 0 when it was published before.
        bytes_anchor: Objects of an anchor that was composed since the publish before, else 0.
        density: ``num_changed / num_elements``.
        state: State hash by tensor name, in hex.
    """

    version: WeightVersion
    kind: Kind
    bytes_dense: int
    bytes_sent: int
    bytes_anchor: int
    num_changed: int
    num_elements: int
    density: float
    seconds: float
    state: Mapping[str, str] = field(repr=False)


@dataclass(slots=True)
class _Pending:
    """A version whose head may or may not have moved: the answer was lost."""

    head: Head
    anchor: WeightVersion
    changes: list[Change]
    nbytes: int
    """Of its objects and its manifest."""


class WeightPublisher:
    """Publishes the versions of one attempt of one run; see the module's docstring.

    Args:
        tensors: A torch module, or a function returning tensors by name (:mod:`rose.weights.source`).
        store: Where to; see :mod:`rose.weights.store`.
        attempt: Raised by one at every restart of the trainer.
        ranks: The processes that hold the model together; None for this one alone.  All of them make the same
            calls in the same order, and get the same report or all an error.

    Memory: one copy of this rank's shard in the engines' type, two buckets, and the compressed delta.
    """

    def __init__(
        self,
        tensors: Any,
        store: ObjectStore,
        run_id: str,
        attempt: int,
        params: WeightsParams | None = None,
        *,
        ranks: Ranks | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._source = tensors
        self._store = store
        self._run_id = manifest.check_run_id(run_id)
        self._attempt = WeightVersion(attempt, 0).attempt
        self._params = given(params)
        self._ranks: Ranks = ranks or SoloRank()
        self._lock = threading.Lock()
        self._baseline = Baseline(self._params)
        self._claims: list[HeldBoxes] = []
        self._mine: list[int] | None = None  # numbers of the pieces that this rank publishes
        self._shared: list[int] = []  # and of those that another rank has too
        self._turns = 1
        self._num_published = 0
        self._specs: dict[str, TensorSpec] = {}  # of the whole model; rank 0 only
        self._model = ""
        self._published: WeightVersion | None = None
        self._kind: Kind = "anchor"
        self._chain: Chain | None = None  # what leads to the head; rank 0 only
        self._upkeep = Upkeep(store, run_id, self._params) if self._ranks.rank == 0 else None
        self._pending: _Pending | None = None
        self._damaged = self._closed = False
        self._background: Future[PublishReport] | None = None

    @property
    def published(self) -> WeightVersion | None:
        """The last version that is durable."""
        return self._published

    def publish(self, version: int, *, step: int | None = None, lr: float | None = None) -> PublishReport:
        """Make the present weights version ``attempt.version``.

        Args:
            step: RL step, for people.
            lr: Learning rate, for people.

        Raises:
            VersionRefused: Going back, other weights under a number that is spent, another trainer on this run,
                or another model.
            WeightsError: A tensor that cannot travel, copies on two ranks that differ, a store that lost bytes, or a rank that
                is gone.
            CapacityError: The store cannot be reached or is full.
            RequestError: The store refused; it says why.

        After any of these the baseline is what readers hold, and publishing again is right: the same weights under
        the same number, changed ones under the next, since the one that failed may be spent.
        """
        identity = self._next(version)
        with self._lock:
            return self._publish_with_room(identity, self._collect, step, lr)

    def _next(self, version: int) -> WeightVersion:
        if self._closed:
            raise WeightsError("is closed", field="publisher")
        if os.getpid() != self._pid:
            raise WeightsError(
                "was made by another process", field="publisher", fix="make one after the fork"
            )
        return WeightVersion(self._attempt, version)

    def publish_async(
        self, version: int, *, step: int | None = None, lr: float | None = None
    ) -> Future[PublishReport]:
        """Copy the weights now, publish the copy in a background thread.

        Waits for an earlier background publish first, so that one extra copy exists at most.
        """
        identity = self._next(version)
        if self._background is not None:
            wait([self._background])
        needed = None if self._mine is None else {*self._mine, *self._to_compare()}
        copies = [
            piece.copied() if needed is None or number in needed else piece
            for number, piece in enumerate(self._collect())
        ]

        def work() -> PublishReport:
            with self._lock:
                return self._publish_with_room(identity, lambda: copies, step, lr)

        self._background = ending.begin(work, "rose-publish")
        self._background.add_done_callback(lambda done: _say(identity, done))
        return self._background

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until anchors that are due are composed and what may go is deleted; False when ``timeout_s`` passed.

        A trainer need not: it is for the end of a run, and for tests.
        """
        return self._upkeep is None or self._upkeep.wait(timeout_s)

    def close(self) -> None:
        """Wait for a background publish, on the way out of Ctrl-C two seconds at most; an anchor that is being composed is given up.
        Nothing is published after it."""
        self._closed = True
        if os.getpid() != self._pid:
            return
        timeout_s = ending.PATIENCE_S if isinstance(sys.exc_info()[1], KeyboardInterrupt) else None
        if self._background is not None:
            wait([self._background], timeout_s)
        if self._upkeep is not None:
            self._upkeep.close(timeout_s)

    # -- one publish, round by round

    def _publish_with_room(
        self,
        identity: WeightVersion,
        source: Callable[[], list[TensorBox]],
        step: int | None,
        lr: float | None,
    ) -> PublishReport:
        """Publish; where the store is full, make room and try again.  All ranks alike."""
        needs = [Need.FULL, Need.LAST] if self._params.collect else []
        while True:
            try:
                return self._publish(identity, source, step, lr)
            except StoreFull as error:
                if not needs:
                    raise settings.too_large(error, self._specs) from error
                need = needs.pop(0)
                self._make_room(need)

    def _make_room(self, need: Need) -> None:
        if self._upkeep is not None:
            self._upkeep.make_room(need)
            self._damaged = (
                self._damaged or need is Need.LAST
            )  # without its chain nobody could follow a delta

    def _collect(self) -> list[TensorBox]:
        return collect(self._source, cast=self._params.cast, keep=self._params.keep)

    def _agree(
        self, work: Callable[[], P], decide: Callable[[list[P]], V], part_type: type[P], verdict_type: type[V]
    ) -> V:
        return agree(self._ranks, work, decide, part_type, verdict_type)

    def _buckets(self, identity: WeightVersion, bound: bool) -> Buckets:
        most, rank = self._params.bucket_bytes, self._ranks.rank
        return Buckets(self._store, self._run_id, identity, rank, most, bound=bound)

    def _publish(
        self,
        identity: WeightVersion,
        source: Callable[[], list[TensorBox]],
        step: int | None,
        lr: float | None,
    ) -> PublishReport:
        started_s = time.monotonic()
        pieces: list[TensorBox] = []
        bytes_anchor = self._heed_upkeep()
        self._keep_within(self._params.max_store_bytes if self._params.collect else None)

        def opening() -> Opening:
            pieces.extend(source())
            return self._opening(identity, pieces)

        opened = self._agree(opening, self._open, Opening, Opened)
        head = opened.head
        self._resolve_pending(head)
        standing.admit(identity, head, self._published)
        if opened.owned is not None:
            if self._ranks.rank == 0:
                settings.say_of_rounding(pieces)
            self._mine, self._claims = opened.owned[self._ranks.rank], layout.claims_of(pieces)
            self._shared = opened.shared[self._ranks.rank] if opened.shared is not None else []
            self._turns = opened.turns
            self._baseline.hold([pieces[number] for number in self._mine])
        assert self._mine is not None
        mine = [pieces[number] for number in self._mine]
        if head is not None and head.identity == identity:
            return self._again(head, mine, started_s)

        moved_back = head is not None and head.identity != self._published
        whole = self._published is None or head is None or moved_back or opened.damaged
        with self._buckets(identity, opened.bound) as buckets:
            changes: list[Change] = []

            def diff() -> Counted:
                copies = [
                    replicas.copy_of(self._claims[number], pieces[number], self._params.fragment_elements)
                    for number in self._to_compare()
                ]
                changes.extend(self._baseline.changes(mine, whole, buckets))
                return Counted(num_changed=sum(change.num_changed for change in changes), copies=copies)

            counts = self._agree(diff, lambda parts: self._count(parts, whole), Counted, Counts)

            def part() -> RankShare:
                if counts.kind == "anchor":
                    self._baseline.make_whole(changes, buckets)
                return self._part(changes, buckets.close())

            described = self._agree(
                part,
                lambda parts: self._describe(identity, counts.kind, parts, counts.num_changed, step, lr),
                RankShare,
                Described,
            )
        report = PublishReport(
            version=identity,
            kind=counts.kind,
            bytes_dense=described.bytes_dense,
            bytes_sent=described.bytes_sent,
            bytes_anchor=bytes_anchor,
            num_changed=counts.num_changed,
            num_elements=described.num_elements,
            density=counts.num_changed / described.num_elements if described.num_elements else 0.0,
            seconds=time.monotonic() - started_s,
            state=described.state,
        )
        self._set_head(described, head, changes)
        return replace(report, seconds=time.monotonic() - started_s)

    def _heed_upkeep(self) -> int:
        """What upkeep did since the last publish; returns the bytes of a new anchor."""
        news = News() if self._upkeep is None else self._upkeep.news()
        self._damaged = self._damaged or news.broken
        if news.anchor is None or self._chain is None or news.anchor not in self._chain.versions:
            return 0
        self._chain = self._chain.from_anchor(news.anchor)
        return news.bytes_anchor

    def _to_compare(self) -> list[int]:
        """Numbers of the pieces that this rank and another hold, and compare at the next version."""
        if not self._params.check_replicas:
            return []
        return replicas.due(self._claims, self._shared, self._num_published, self._turns)

    def _keep_within(self, most_bytes: int | None) -> None:
        """The chain alone is too large, because no anchor fits beside it: begin anew."""
        if most_bytes is not None and self._chain is not None and self._chain.nbytes > most_bytes:
            self._make_room(Need.LAST)

    # -- open

    def _opening(self, identity: WeightVersion, pieces: list[TensorBox]) -> Opening:
        claims = layout.claims_of(pieces)
        if self._mine is not None:
            standing.same_model(self._claims, claims)
        if self._published is not None and not self._baseline.scrub(1 / self._params.anchor_every):
            _log.warning("baseline is damaged in memory; the next version is whole")
            self._damaged = True
        return Opening(
            identity=str(identity),
            published=None if self._published is None else str(self._published),
            pending=None if self._pending is None else self._pending.head,
            damaged=self._damaged,
            claims=claims if self._mine is None else None,
        )

    def _open(self, openings: Sequence[Opening]) -> Opened:
        head = self._store.get_head(self._run_id)
        stands = {
            (
                each.identity,
                str(head.identity) if head is not None and each.pending == head else each.published,
            )
            for each in openings
        }
        if len(stands) != 1:
            raise WeightsError(
                f"ranks are at different versions: {sorted(map(str, stands))[:3]}",
                field="ranks",
                fix="restart the trainer with the next attempt",
            )
        owned = shared = None
        turns = 1
        claims = [each.claims for each in openings if each.claims is not None]
        if claims:
            if len(claims) != len(openings):
                raise WeightsError("some ranks have begun, others not", field="ranks")
            division = layout.assign(claims)
            if not division.specs:
                raise ConfigError("no rank gave any", field="tensors", fix="load the model first")
            owned, shared, self._specs = division.owned, division.shared, division.specs
            turns = replicas.turns(sum(map(len, shared)) // len(openings), self._params.anchor_every)
            self._model = model_digest(self._specs.values())
            settings.check(self._params, self._specs)
        damaged = any(each.damaged for each in openings)
        bound = sealed.is_sealed(self._store)
        return Opened(head=head, damaged=damaged, bound=bound, owned=owned, shared=shared, turns=turns)

    def _resolve_pending(self, head: Head | None) -> None:
        """An earlier publish whose head's fate was unknown: it landed, or it never will."""
        pending, self._pending = self._pending, None
        if pending is not None and head == pending.head:
            self._advance(pending)

    # -- diff and describe

    def _count(self, parts: Sequence[Counted], whole: bool) -> Counts:
        replicas.compare([part.copies for part in parts])
        num_changed = sum(part.num_changed for part in parts)
        num_elements = sum(spec.num_elements for spec in self._specs.values())
        dense = num_elements > 0 and num_changed / num_elements > self._params.anchor_density
        return Counts(kind="anchor" if whole or dense else "delta", num_changed=num_changed)

    def _part(self, changes: Sequence[Change], objects: tuple[ObjectRef, ...]) -> RankShare:
        return RankShare(
            objects=objects,
            sections=tuple(change.section for change in changes if change.section is not None),
            before={name: statehash.to_hex(h) for name, h in self._baseline.state().items()},
            after={name: statehash.to_hex(h) for name, h in state_after(changes).items()},
        )

    def _describe(
        self,
        identity: WeightVersion,
        kind: Kind,
        parts: Sequence[RankShare],
        num_changed: int,
        step: int | None,
        lr: float | None,
    ) -> Described:
        base = None
        anchor = identity
        if kind == "delta":
            assert self._published is not None
            assert self._chain is not None
            base = Base(attempt=self._attempt, version=self._published.version, kind=self._kind)
            anchor = self._chain.anchor
        record = manifest_of(
            parts,
            self._specs,
            run_id=self._run_id,
            identity=identity,
            kind=kind,
            base=base,
            anchor=anchor,
            model=self._model,
            num_changed=num_changed,
            created_s=time.time(),
            lr=lr,
            step=step,
        )
        reference = stored_manifests.write(self._store, record)
        head = Head(
            schema=manifest.SCHEMA,
            run_id=self._run_id,
            attempt=identity.attempt,
            version=identity.version,
            kind=kind,
            manifest=reference,
        )
        return Described(
            head=head,
            anchor=record.anchor,
            bytes_dense=record.bytes_dense,
            bytes_sent=record.bytes_sent,
            num_elements=record.num_elements,
            state=record.state(),
        )

    # -- point

    def _set_head(self, described: Described, before: Head | None, changes: list[Change]) -> None:
        head = described.head
        self._pending = _Pending(
            head, WeightVersion(*described.anchor), changes, described.bytes_sent + head.manifest.nbytes
        )

        def move(_: Sequence[Nothing]) -> Nothing:
            try:
                self._store.set_head(head, expected=None if before is None else before.identity)
            except Conflict as error:
                passed_over = sealed.passed_over(self._store)
                raise VersionRefused(
                    passed_over or str(error),
                    field="run_id" if passed_over is None else "public_key",
                    fix=standing.ANOTHER_TRAINER
                    if passed_over is None
                    else "pin that key here too while a new key takes over",
                ) from error
            return Nothing()

        self._agree(Nothing, move, Nothing, Nothing)
        pending, self._pending = self._pending, None
        self._advance(pending)

    def _advance(self, pending: _Pending) -> None:
        """The head has moved: the baseline becomes what was published."""
        self._published, self._kind = pending.head.identity, pending.head.kind
        self._num_published += 1
        if self._kind == "anchor":
            self._chain = Chain(anchor=pending.anchor, deltas=(), bytes_anchor=pending.nbytes)
            self._damaged = False
        elif self._chain is not None:
            self._chain = self._chain.then(pending.head.identity, pending.nbytes)
        self._baseline.advance(pending.changes)
        if self._upkeep is not None and self._chain is not None:
            self._upkeep.published(self._chain)

    def _again(self, head: Head, mine: list[TensorBox], started_s: float) -> PublishReport:
        """The head is at this very version: agree if the weights are the same, refuse if not."""
        identity, adopting = head.identity, self._published is None

        def refuse() -> VersionRefused:
            return VersionRefused(f"{identity} is published with other weights", field="version")

        def look() -> State:
            if adopting:  # a restarted process that finds its version published
                self._baseline.adopt(mine)
            elif not self._baseline.holds(mine):
                raise refuse()
            return State(state={name: statehash.to_hex(h) for name, h in self._baseline.state().items()})

        def compare(parts: Sequence[State]) -> Described:
            record = stored_manifests.read(self._store, self._run_id, identity, head.kind)
            state = dict.fromkeys(self._specs, ZERO) | added([part.state for part in parts])
            if record.model != self._model or record.state() != state:
                raise refuse()
            if adopting:
                self._adopt_chain(record)
            return Described(
                head=head,
                anchor=record.anchor,
                bytes_dense=record.bytes_dense,
                bytes_sent=0,
                num_elements=record.num_elements,
                state=state,
            )

        try:
            described = self._agree(look, compare, State, Described)
        except BaseException:
            if adopting:
                self._baseline.forget()
            raise
        if adopting:
            self._published, self._kind = identity, head.kind
        return PublishReport(
            version=identity,
            kind=head.kind,
            bytes_dense=described.bytes_dense,
            bytes_sent=0,
            bytes_anchor=0,
            num_changed=0,
            num_elements=described.num_elements,
            density=0.0,
            seconds=time.monotonic() - started_s,
            state=described.state,
        )

    def _adopt_chain(self, record: Manifest) -> None:
        """Learn what leads to a head that another process published; a chain that is not whole ends here."""
        try:
            self._chain = chain_of(self._store, self._run_id, record)
        except (NotFound, SectionCorrupt) as error:
            _log.warning("the chain of %s is not whole, the next version is: %s", record.identity, error)
            self._damaged = True


def _say(version: WeightVersion, done: Future[PublishReport]) -> None:
    """A failure that nobody asks for."""
    if not done.cancelled() and done.exception() is not None:
        _log.warning("%s was not published: %s", version, done.exception())
