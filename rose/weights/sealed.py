"""A store in front of any other that signs what a trainer writes, and believes only what a pinned key signed.

Publisher, composer, subscriber and retention go through it as through the store that it wraps.  It judges the two documents that
everything else hangs on:

* a **head** has its seal in itself; it names its manifest with a BLAKE3 digest;
* a **manifest** is stored behind its seal, signed as a delta or as an anchor of its run, and names its objects with BLAKE3
  digests, which whoever reads them compares (:func:`require_bound`).

A reader gets :class:`~rose.errors.NotAuthentic` with the reason.  A **trainer** is not kept from publishing by what somebody else wrote:
to it a head that is not authentic is none, and a manifest in its way is deleted (:func:`remove_forged`).

Signatures do not say that a document is the newest.  A subscriber keeps the highest version that it saw, and hears from the
scheduler what the trainer has published (:meth:`rose.weights.subscriber.WeightSubscriber.require`).  A run's name belongs to one
lineage per key: what was signed under it once stays authentic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from rose.errors import ConfigError, NotAuthentic, SectionCorrupt
from rose.lineage import WeightVersion
from rose.signatures import PublicKeys, SigningKey
from rose.weights import manifest
from rose.weights.manifest import MAX_OBJECT_BYTES, Head, ObjectRef
from rose.weights.store import Buffer, Content, MovesHeads, ObjectStat, ObjectStore
from rose.weights.upcoming import Upcoming

_log = logging.getLogger(__name__)


class SealedStore:
    """See the module.

    Args:
        store: Wrapped, and closed with this.
        trusted: Whose signatures count; None: those of ``key``.
        key: Of the trainer, or one that may sign anchors; None where nothing is written.

    Raises:
        ConfigError: Neither is given, or the key's own signatures would not count.
    """

    def __init__(
        self, store: ObjectStore, *, trusted: PublicKeys | None = None, key: SigningKey | None = None
    ) -> None:
        if trusted is None:
            if key is None:
                raise ConfigError("needs a public key, or the key to sign with", field="public_key")
            trusted = PublicKeys.parse(key.public)
        elif key is not None and not PublicKeys.parse(key.public).keys <= trusted.keys:
            raise ConfigError(
                f"belongs to {key.public}, which is not pinned",
                field="publish_key",
                fix="nodes would refuse what it signs: use the key of that public_key, or pin its own",
            )
        self._store, self.trusted, self.key = store, trusted, key
        self.told = ""
        """Why the last head that was read counts as none; empty: it counts."""
        if self.is_trainers and isinstance(store, MovesHeads):
            store.believes = believer(trusted)

    def __repr__(self) -> str:
        return f"SealedStore({self._store!r})"

    @property
    def is_trainers(self) -> bool:
        """Whether heads are signed here."""
        return self.key is not None and self.key.may_all

    def seal(self, kind: str, run_id: str, data: bytes) -> bytes:
        """A manifest as it is stored.

        Raises:
            ConfigError: There is no key that may sign it.
        """
        if self.key is None:
            raise ConfigError("is needed to publish", field="publish_key", fix="open_store(..., key=...)")
        return manifest.with_seal(data, self.key.seal(kind, run_id, data))

    # -- objects

    def put_new(self, key: str, data: Buffer) -> None:
        self._store.put_new(key, data)

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> Content:
        data = self._store.get(key, max_bytes=max_bytes)
        if manifest.is_manifest(key):
            run_id, _, name = key.partition("/")
            kind = name.rpartition("/")[2].removesuffix(".json")
            seal, body = manifest.split_seal(data)
            try:
                self.trusted.check(kind, run_id, body, seal, name=key)
            except NotAuthentic:
                self._store.distrust(key)
                raise
        return data

    def get_range(self, key: str, offset: int, nbytes: int) -> Content:
        return self._store.get_range(key, offset, nbytes)

    def stat(self, key: str) -> ObjectStat:
        return self._store.stat(key)

    def list(self, prefix: str) -> list[str]:
        return self._store.list(prefix)

    def delete(self, key: str) -> bool:
        return self._store.delete(key)

    def distrust(self, key: str) -> None:
        self._store.distrust(key)

    # -- heads and leases

    def set_head(self, head: Head, *, expected: WeightVersion | None) -> None:
        if self.key is None:
            raise ConfigError("is needed to publish", field="publish_key", fix="open_store(..., key=...)")
        self._store.set_head(sealed_head(head, self.key), expected=expected)

    def get_head(self, run_id: str) -> Head | None:
        return self._judged(lambda: self._store.get_head(run_id))

    def wait_head(self, run_id: str, after: WeightVersion | None, timeout_s: float) -> Head | None:
        return self._judged(lambda: self._store.wait_head(run_id, after, timeout_s))

    def runs(self) -> list[str]:
        return self._store.runs()

    def _judged(self, read: Callable[[], Head | None]) -> Head | None:
        """The head without its seal.  Raises NotAuthentic, or SectionCorrupt, where we are not the trainer."""
        try:
            head = read()
            if head is None:
                self.told = ""
                return None
            check_head(head, self.trusted)
            self.told = ""
        except SectionCorrupt as error:
            if not self.is_trainers:
                raise
            if str(error) != self.told:
                self.told = str(error)
                _log.warning("%s; it is passed over, and the next version is whole", error)
            return None
        return msgspec.structs.replace(head, seal=None)

    def upcoming(self, run_id: str, mark: str, timeout_s: float) -> Upcoming | None:
        return self._store.upcoming(run_id, mark, timeout_s)

    def lease(self, run_id: str, holder: str, version: WeightVersion | None, ttl_s: float) -> None:
        self._store.lease(run_id, holder, version, ttl_s)

    def leases(self, run_id: str) -> list[WeightVersion]:
        return self._store.leases(run_id)

    def close(self) -> None:
        self._store.close()


def sealed_head(head: Head, key: SigningKey) -> Head:
    """The head with its seal."""
    bare = msgspec.structs.replace(head, seal=None)
    return msgspec.structs.replace(bare, seal=key.seal("head", head.run_id, manifest.encode(bare)))


def check_head(head: Head, trusted: PublicKeys) -> None:
    """Raises NotAuthentic where no key of ``trusted`` signed this head, or its manifest is not bound to it."""
    name = f"head {head.identity} of {head.run_id}"
    bare = msgspec.structs.replace(head, seal=None)
    trusted.check("head", head.run_id, manifest.encode(bare), head.seal, name=name)
    if head.manifest.blake3 is None:
        raise NotAuthentic("names no BLAKE3 digest", field=name)


def believer(trusted: PublicKeys) -> Callable[[Head], bool]:
    """What :attr:`rose.weights.store.MovesHeads.believes` asks."""

    known: dict[str, tuple[Head, bool]] = {}  # of each run the last one: every reader asks for it

    def believes(head: Head) -> bool:
        before = known.get(head.run_id)
        if before is not None and before[0] == head:
            return before[1]
        try:
            check_head(head, trusted)
            good = True
        except NotAuthentic as error:
            _log.warning("%s; it counts as none", error)
            good = False
        known[head.run_id] = head, good
        return good

    return believes


def is_sealed(store: ObjectStore) -> bool:
    """Whether signatures count."""
    return isinstance(store, SealedStore)


def stored_manifest(store: ObjectStore, record: manifest.Manifest) -> bytes:
    """The bytes of a manifest as they go to ``store``: signed, where it signs.

    Raises:
        WeightsError: Readers would refuse it for its size.
    """
    data = manifest.encode_manifest(record)
    return store.seal(record.kind, record.run_id, data) if isinstance(store, SealedStore) else data


def passed_over(store: ObjectStore) -> str | None:
    """Why the head that is there counts as none to this trainer; None: none was passed over."""
    return store.told or None if isinstance(store, SealedStore) else None


def remove_forged(store: ObjectStore, key: str, error: SectionCorrupt) -> bool:
    """Delete a manifest that is in a trainer's way and that nobody signed; False: it is not ours to judge."""
    if not isinstance(store, SealedStore) or not store.is_trainers:
        return False
    _log.warning("%s; it is deleted", error)
    store.delete(key)
    return True


def reference_of(store: ObjectStore, key: str, data: bytes | bytearray) -> ObjectRef:
    """How a head names a stored manifest."""
    strong = manifest.strong_digest(data) if is_sealed(store) else None
    return ObjectRef(key=key, nbytes=len(data), xxh3=manifest.digest(data), blake3=strong)


def require_bound(store: ObjectStore, reference: ObjectRef) -> None:
    """Raises NotAuthentic where signatures count and a manifest does not bind this object."""
    if is_sealed(store) and reference.blake3 is None:
        raise NotAuthentic("is named without a BLAKE3 digest", field=reference.key)


def check_content(reference: ObjectRef, data: bytes | bytearray | memoryview) -> bool:
    """Whether these are the object's bytes: by the digest where there is one, which no other bytes have, else by the checksum."""
    if len(data) != reference.nbytes:
        return False
    if reference.blake3 is None:
        return manifest.digest(data) == reference.xxh3
    return manifest.strong_digest(data) == reference.blake3
