"""Manifests and heads: what one published version consists of, in JSON with a schema number.

A version ``A.V`` of run ``R`` is a set of immutable objects under ``R/A.V/`` and one or two manifests::

    R/A.V/delta.json     how to get here from ``base``
    R/A.V/anchor.json    everything, for a reader that has nothing (the first version, every Nth, a dense one)

Objects are written first, then the manifest, then the run's head names the version: a reader that follows heads
never meets a missing piece.  A version that is both delta and anchor has the same state either way.

A *section* is one box (:mod:`rose.weights.boxes`) of one tensor inside one object, encoded ``planes`` or ``raw``:
what one trainer rank holds of it, or a part of that.  Its ``dh`` is by how much the box moves its tensor's state
hash (from nothing, in an anchor).

:func:`decode_manifest` refuses anything that contradicts itself: keys outside the version's folder, sections
outside their object or tensor, overlaps, a base of another attempt, hashes that do not add up, an anchor with holes.
What it lets pass can be trusted in shape; contents are checked against ``xxh3`` (transport) and ``dh`` (meaning).

Lineages cannot mix: a delta's base has the delta's own attempt.

**Signed** (:mod:`rose.weights.sealed`), a manifest is a line ``rose-seal SEAL`` before the JSON, a head has its seal in itself, and
every object is named with its BLAKE3 digest.  Here seals are carried and not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
import xxhash
from blake3 import blake3

from rose.errors import RequestError, SectionCorrupt, WeightsError
from rose.lineage import WeightVersion, check_run
from rose.signatures import MAX_SEAL_CHARS
from rose.weights import boxes, statehash
from rose.weights.boxes import Box
from rose.weights.spec import MAX_TENSORS, TensorSpec, model_digest

__all__ = ["Head", "Kind", "Manifest", "ManifestSection", "ObjectRef", "TensorState", "WeightVersion"]

SCHEMA = 2
MAX_MANIFEST_BYTES = 256 << 20
"""About what a million sections take.  A mixture of experts of 235 B has 37,000 tensors; with eight ranks that each
hold a part of every tensor its manifest takes 75 MiB."""
MAX_OBJECT_BYTES = 1 << 30
MAX_OBJECTS = 100_000
MAX_SECTIONS = 1_000_000

Kind = Literal["delta", "anchor"]
Encoding = Literal["planes", "raw"]
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._-]{0,127}){0,7}")
_XXH3 = re.compile(r"[0-9a-f]{32}")
_BLAKE3 = re.compile(r"[0-9a-f]{64}")
_SEAL_LINE = b"rose-seal "
_MAX_SEAL_BYTES = len(_SEAL_LINE) + MAX_SEAL_CHARS + 1
MAX_STORED_BYTES = MAX_MANIFEST_BYTES + _MAX_SEAL_BYTES
"""Of a manifest with its seal."""


class ObjectRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    key: str
    nbytes: int
    xxh3: str
    """xxh3_128 over the object's bytes, in hex."""
    blake3: str | None = None
    """BLAKE3 over the same, in hex; None where nothing is signed."""


class ManifestSection(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    object: int
    """Index into the manifest's ``objects``."""
    offset: int
    nbytes: int
    xxh3: str
    encoding: Encoding
    tensor: str
    start: int
    """Flat index of the box's first element in its tensor."""
    num_elements: int
    num_changed: int
    dh: str
    run: int = 0
    stride: int = 0
    """Of a box with gaps: ``run`` elements every ``stride``.  Both 0: one contiguous range."""

    @property
    def box(self) -> Box:
        return Box(self.start, self.num_elements, self.run or self.num_elements, self.stride)


class TensorState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    h_before: str | None
    """State hash in the base; null in an anchor."""
    h_after: str


class Base(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    attempt: int
    version: int
    kind: Kind
    """Which manifest of the base to read next when walking back: ``delta`` where there is one."""

    @property
    def identity(self) -> WeightVersion:
        return WeightVersion(self.attempt, self.version)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to reach one version.  ``density``, ``lr``, ``step``, ``created_s`` are for people only."""

    schema: int
    run_id: str
    attempt: int
    version: int
    kind: Kind
    base: Base | None
    anchor: tuple[int, int]
    """The newest version at or before this one that has an anchor manifest."""
    model: str
    objects: tuple[ObjectRef, ...]
    sections: tuple[ManifestSection, ...]
    tensors: tuple[TensorState, ...]
    num_changed: int
    num_elements: int
    bytes_dense: int
    bytes_sent: int
    density: float
    created_s: float
    lr: float | None = None
    step: int | None = None

    @property
    def identity(self) -> WeightVersion:
        return WeightVersion(self.attempt, self.version)

    def specs(self) -> dict[str, TensorSpec]:
        return {t.name: TensorSpec(t.name, t.dtype, t.shape) for t in self.tensors}

    def state(self) -> dict[str, str]:
        """State hash after this version, by tensor name."""
        return {tensor.name: tensor.h_after for tensor in self.tensors}

    def sections_by_tensor(self) -> dict[str, list[ManifestSection]]:
        found: dict[str, list[ManifestSection]] = {}
        for section in self.sections:
            found.setdefault(section.tensor, []).append(section)
        return found


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The newest version of a run, and the manifest to read first."""

    schema: int
    run_id: str
    attempt: int
    version: int
    kind: Kind
    manifest: ObjectRef
    seal: Annotated[str, msgspec.Meta(max_length=MAX_SEAL_CHARS)] | None = None
    """Over the head without it."""

    @property
    def identity(self) -> WeightVersion:
        return WeightVersion(self.attempt, self.version)


# --- keys -------------------------------------------------------------------------------------------------


def check_run_id(run_id: str) -> str:
    """See :func:`rose.lineage.check_run`."""
    return check_run(run_id, field="run_id")


def check_key(key: str) -> str:
    """A store key: up to eight segments like run ids, joined by '/'.  No segment can be '..' or hidden.

    Raises:
        RequestError: Anything else.
    """
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise RequestError(f"{str(key)[:80]!r} is not an object key", field="key")
    return key


def version_prefix(run_id: str, identity: WeightVersion) -> str:
    return f"{check_run_id(run_id)}/{identity}/"


def manifest_key(run_id: str, identity: WeightVersion, kind: Kind) -> str:
    return f"{version_prefix(run_id, identity)}{kind}.json"


COMPOSED = "composed"
"""Who wrote an object, in its key: a trainer rank by its number, or this for an anchor composed in the store."""


def object_key(run_id: str, identity: WeightVersion, writer: int | str, bucket: int, xxh3: str) -> str:
    """Content-addressed: a retry of the same bytes meets itself, other bytes get another name."""
    by = writer if isinstance(writer, str) else f"{writer:04d}"
    return f"{version_prefix(run_id, identity)}{by}.{bucket:05d}-{xxh3}"


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3_128 in hex: the transport checksum."""
    return xxhash.xxh3_128_hexdigest(data)


# --- wire -------------------------------------------------------------------------------------------------


def encode(record: Manifest | Head) -> bytes:
    return msgspec.json.encode(record)


def strong_digest(data: bytes | bytearray | memoryview) -> str:
    """BLAKE3 in hex: nobody can make other bytes of the same digest."""
    return blake3(data).hexdigest()


def is_manifest(key: str) -> bool:
    """Whether an object key is a manifest's."""
    return key.endswith(("/delta.json", "/anchor.json"))


def with_seal(body: bytes, seal: str) -> bytes:
    """The manifest as it is stored."""
    return b"".join((_SEAL_LINE, seal.encode(), b"\n", body))


def split_seal(data: bytes | bytearray | memoryview) -> tuple[str | None, memoryview]:
    """The seal of a stored manifest, None where it has none, and the JSON."""
    view = memoryview(data)
    if bytes(view[: len(_SEAL_LINE)]) != _SEAL_LINE:
        return None, view
    line, end, _ = bytes(view[:_MAX_SEAL_BYTES]).partition(b"\n")
    return (
        (line[len(_SEAL_LINE) :].decode("ascii", "replace"), view[len(line) + 1 :]) if end else (None, view)
    )


def encode_manifest(record: Manifest) -> bytes:
    """The manifest's bytes.

    Raises:
        WeightsError: Readers would refuse it for its size.
    """
    data = encode(record)
    for count, most, what in (
        (len(record.objects), MAX_OBJECTS, "objects"),
        (len(record.sections), MAX_SECTIONS, "sections"),
        (len(data), MAX_MANIFEST_BYTES, "bytes"),
    ):
        if count > most:
            raise WeightsError(
                f"the manifest would have {count} {what}, at most {most}",
                field=f"version {record.identity}",
                fix="divide tensors among fewer ranks: whole experts and layers per rank, larger buckets",
            )
    return data


def decode_head(data: bytes | bytearray | memoryview, run_id: str) -> Head:
    """Read and check a head of ``run_id``.

    Raises:
        SectionCorrupt: Malformed, of another schema or run, or pointing outside its version.
    """
    try:
        head = msgspec.json.decode(data, type=Head)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SectionCorrupt(f"head of {run_id} is malformed: {error}", field="head") from None
    with _Refuse("head"):
        _expect(head.schema == SCHEMA, f"schema {head.schema}, this reader knows {SCHEMA}")
        _expect(head.run_id == run_id, "names another run")
        _check_object(head.manifest, MAX_STORED_BYTES)
        _expect(head.manifest.key == manifest_key(run_id, head.identity, head.kind), "names another manifest")
    return head


def decode_manifest(
    data: bytes | bytearray | memoryview, run_id: str, identity: WeightVersion, kind: Kind
) -> Manifest:
    """Read and check the manifest of one version; see the module's docstring for what is refused.

    Raises:
        SectionCorrupt: The text is malformed or contradicts itself.
    """
    name = f"manifest {identity}"
    _, body = split_seal(data)
    if len(body) > MAX_MANIFEST_BYTES:
        raise SectionCorrupt(f"{len(body)} bytes, at most {MAX_MANIFEST_BYTES}", field=name)
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SectionCorrupt(f"is malformed: {error}", field=name) from None
    with _Refuse(name):
        _expect(manifest.schema == SCHEMA, f"schema {manifest.schema}, this reader knows {SCHEMA}")
        _expect(manifest.run_id == run_id, "names another run")
        _expect(manifest.identity == identity, f"says it is {manifest.identity}")
        _expect(manifest.kind == kind, f"says it is a {manifest.kind}")
        _check(manifest)
    return manifest


class _Refuse:
    """Rename what the shared checks raise into SectionCorrupt that names the document."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, WeightsError | RequestError):
            raise SectionCorrupt(str(error), field=self.name) from error


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise WeightsError(message)


def _check(manifest: Manifest) -> None:
    """The invariants of a manifest, once, in the order of the docstring."""
    identity = manifest.identity
    anchor = WeightVersion(*manifest.anchor)
    if manifest.kind == "anchor":
        _expect(manifest.base is None, "an anchor has no base")
        _expect(anchor == identity, "an anchor is its own anchor")
    else:
        _expect(manifest.base is not None, "a delta needs a base")
        assert manifest.base is not None
        base = manifest.base.identity
        _expect(base.attempt == identity.attempt and base < identity, f"base {base} of {identity}")
        _expect(anchor.attempt == identity.attempt and anchor <= base, f"anchor {anchor} of {identity}")

    _expect(len(manifest.objects) <= MAX_OBJECTS, f"more than {MAX_OBJECTS} objects")
    _expect(len(manifest.sections) <= MAX_SECTIONS, f"more than {MAX_SECTIONS} sections")
    _expect(len(manifest.tensors) <= MAX_TENSORS, f"more than {MAX_TENSORS} tensors")
    prefix = version_prefix(manifest.run_id, identity)
    for reference in manifest.objects:
        _check_object(reference, MAX_OBJECT_BYTES)
        _expect(reference.key.startswith(prefix), f"object '{reference.key}' is outside {prefix}")
    # By the last part of their keys: that is what readers' files are called.
    names = {reference.key.rpartition("/")[2] for reference in manifest.objects}
    _expect(len(names) == len(manifest.objects), "an object is named twice")

    specs = manifest.specs()
    _expect(len(specs) == len(manifest.tensors), "a tensor is named twice")
    _expect(manifest.model == model_digest(specs.values()), "'model' is not the digest of the tensors")
    for section in manifest.sections:
        _check_section(section, manifest, specs)
    by_tensor = manifest.sections_by_tensor()
    for tensor in manifest.tensors:
        _check_tensor(tensor, by_tensor.get(tensor.name, []), specs[tensor.name], manifest.kind)


def _check_object(reference: ObjectRef, limit: int) -> None:
    check_key(reference.key)
    _expect(0 <= reference.nbytes <= limit, f"'{reference.key}' has {reference.nbytes} bytes, limit {limit}")
    _expect(_XXH3.fullmatch(reference.xxh3) is not None, f"'{reference.key}' has no xxh3_128")
    bound = reference.blake3 is None or _BLAKE3.fullmatch(reference.blake3) is not None
    _expect(bound, f"'{reference.key}' has a BLAKE3 digest that is none")


def _check_section(section: ManifestSection, manifest: Manifest, specs: dict[str, TensorSpec]) -> None:
    where = f"section of '{section.tensor[:80]}' at {section.start}"
    _expect((section.run == 0) == (section.stride == 0), f"{where}: run and stride belong together")
    _expect(0 <= section.object < len(manifest.objects), f"{where}: no object {section.object}")
    _expect(
        section.offset >= 0
        and section.nbytes >= 0
        and section.offset + section.nbytes <= manifest.objects[section.object].nbytes,
        f"{where}: reaches outside its object",
    )
    spec = specs.get(section.tensor)
    _expect(spec is not None, f"{where}: no such tensor")
    assert spec is not None
    _expect(0 <= section.num_changed <= section.num_elements, f"{where}: {section.num_changed} changes")
    _expect(_XXH3.fullmatch(section.xxh3) is not None, f"{where}: no xxh3_128")
    if section.encoding == "planes":
        _expect(manifest.kind == "delta", f"{where}: planes in an anchor")
        _expect(spec.sparse_codec, f"{where}: planes cannot code {spec.dtype}")
    else:
        _expect(section.nbytes == section.num_elements * spec.width_bytes, f"{where}: raw of another size")


def _check_tensor(tensor: TensorState, sections: list[ManifestSection], spec: TensorSpec, kind: Kind) -> None:
    wrong = boxes.problem([section.box for section in sections], spec.num_elements, complete=kind == "anchor")
    _expect(wrong is None, f"'{tensor.name}': {wrong}")
    total = 0
    for section in sections:
        total = statehash.add(total, statehash.from_hex(section.dh))
    before = 0
    if kind == "anchor":
        _expect(tensor.h_before is None, f"'{tensor.name}': an anchor has no h_before")
    else:
        _expect(tensor.h_before is not None, f"'{tensor.name}': h_before is missing")
        assert tensor.h_before is not None
        before = statehash.from_hex(tensor.h_before)
    _expect(
        statehash.add(before, total) == statehash.from_hex(tensor.h_after),
        f"'{tensor.name}': state hashes do not add up",
    )


def versions_in(keys: list[str], run_id: str) -> Iterator[WeightVersion]:
    """The versions that have at least one key under ``run_id/``, ascending; other keys are ignored."""
    found: set[WeightVersion] = set()
    for key in keys:
        parts = key.split("/")
        if len(parts) == 3 and parts[0] == run_id:
            try:
                found.add(WeightVersion.parse(parts[1]))
            except RequestError:
                continue
    yield from sorted(found)
