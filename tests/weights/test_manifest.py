"""Manifests, heads and versions: what they say is read back, and what contradicts itself is refused."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from rose.errors import RequestError, SectionCorrupt
from rose.lineage import WeightVersion
from rose.weights import manifest, statehash
from rose.weights.manifest import Kind
from rose.weights.spec import TensorSpec, model_digest

XXH3 = "0123456789abcdef" * 2
SPECS = [TensorSpec("w", "BF16", (10, 10)), TensorSpec("s", "F32", (4,)), TensorSpec("none", "BF16", (0,))]


def V(text: str) -> WeightVersion:
    return WeightVersion.parse(text)


def delta() -> dict[str, Any]:
    """Version 1.5 from 1.4: two planes sections of w, one raw of s."""

    def section(tensor: str, start: int, num: int, offset: int, nbytes: int, encoding: str, dh: int) -> Any:
        return {
            "object": 0,
            "offset": offset,
            "nbytes": nbytes,
            "xxh3": XXH3,
            "encoding": encoding,
            "tensor": tensor,
            "start": start,
            "num_elements": num,
            "num_changed": 2,
            "dh": statehash.to_hex(dh),
        }

    return {
        "schema": manifest.SCHEMA,
        "run_id": "run",
        "attempt": 1,
        "version": 5,
        "kind": "delta",
        "base": {"attempt": 1, "version": 4, "kind": "anchor"},
        "anchor": [1, 4],
        "model": model_digest(SPECS),
        "objects": [{"key": f"run/1.5/00000-{XXH3}", "nbytes": 100, "xxh3": XXH3}],
        "sections": [
            section("w", 0, 50, 0, 40, "planes", 7),
            section("w", 60, 40, 40, 40, "planes", 2**64 - 3),
            section("s", 0, 4, 80, 16, "raw", 1),
        ],
        "tensors": [
            {
                "name": "w",
                "dtype": "BF16",
                "shape": [10, 10],
                "h_before": "0" * 16,
                "h_after": "0" * 15 + "4",
            },
            {"name": "s", "dtype": "F32", "shape": [4], "h_before": "f" * 16, "h_after": "0" * 16},
            {"name": "none", "dtype": "BF16", "shape": [0], "h_before": "0" * 16, "h_after": "0" * 16},
        ],
        "num_changed": 6,
        "num_elements": 104,
        "bytes_dense": 216,
        "bytes_sent": 100,
        "density": 0.06,
        "created_s": 1.0,
        "lr": None,
        "step": 3,
    }


def anchor() -> dict[str, Any]:
    """Version 1.4, complete."""
    table = delta()
    table |= {"version": 4, "kind": "anchor", "base": None}
    table["objects"] = [{"key": f"run/1.4/00000-{XXH3}", "nbytes": 216, "xxh3": XXH3}]
    w, _, s = table["sections"]
    w |= {"num_elements": 100, "nbytes": 200, "encoding": "raw"}
    s |= {"offset": 200}
    table["sections"] = [w, s]
    for tensor, h in zip(table["tensors"], (7, 1, 0), strict=True):
        tensor |= {"h_before": None, "h_after": statehash.to_hex(h)}
    return table


def read(table: Any, version: str = "1.5", kind: Kind = "delta") -> manifest.Manifest:
    return manifest.decode_manifest(msgspec.json.encode(table), "run", V(version), kind)


def edited(table: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """``table`` with one place replaced: ``edited(t, "sections.0.start", 3)``."""
    result = copy.deepcopy(table)
    *parts, last = path.split(".")
    place: Any = result
    for part in parts:
        place = place[int(part)] if isinstance(place, list) else place[part]
    place[int(last) if isinstance(place, list) else last] = value
    return result


def test_a_manifest_is_read_back_as_written() -> None:
    for table, version, kind in [(delta(), "1.5", "delta"), (anchor(), "1.4", "anchor")]:
        record = read(table, version, kind)  # type: ignore[arg-type]
        assert msgspec.json.decode(manifest.encode(record)) == table
        assert record.state() == {t["name"]: t["h_after"] for t in table["tensors"]}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", 1, "schema 1"),
        ("run_id", "other", "another run"),
        ("version", 6, "says it is 1.6"),
        ("kind", "anchor", "says it is a anchor"),
        ("surprise", 1, "malformed"),
        ("attempt", -1, "whole number"),
        ("base", None, "needs a base"),
        ("base.version", 5, "base 1.5 of 1.5"),
        ("base.version", 6, "base 1.6 of 1.5"),
        ("base.attempt", 2, "base 2.4 of 1.5"),
        ("base.attempt", 0, "base 0.4 of 1.5"),
        ("anchor", [1, 5], "anchor 1.5 of 1.5"),
        ("anchor", [0, 4], "anchor 0.4 of 1.5"),
        ("model", "0" * 64, "digest"),
        ("objects.0.key", "run/1.4/x", "outside run/1.5/"),
        ("objects.0.key", "run/1.5/../../etc/passwd", "not an object key"),
        ("objects.0.key", "/etc/passwd", "not an object key"),
        ("objects.0.nbytes", -1, "-1 bytes"),
        ("objects.0.nbytes", 2**40, "limit"),
        ("objects.0.nbytes", 95, "outside its object"),
        ("objects.0.xxh3", "short", "no xxh3_128"),
        (
            "objects",
            [
                {"key": f"run/1.5/{folder}00000-{XXH3}", "nbytes": 100, "xxh3": XXH3}
                for folder in ("", "sub/")
            ],
            "object is named twice",
        ),
        ("sections.0.object", 1, "no object 1"),
        ("sections.0.object", -1, "no object -1"),
        ("sections.0.offset", -1, "outside its object"),
        ("sections.0.offset", 2**62, "outside its object"),
        ("sections.0.nbytes", -1, "outside its object"),
        ("sections.2.offset", 90, "outside its object"),
        ("sections.0.tensor", "ghost", "no such tensor"),
        ("sections.0.start", -1, "outside the tensor"),
        ("sections.1.start", 61, "outside the tensor"),
        ("sections.0.num_elements", 0, "2 changes"),
        ("sections.0.num_elements", 61, "overlap"),
        ("sections.1.start", 49, "overlap"),
        ("sections.0.run", 10, "belong together"),
        ("sections.0.stride", 10, "belong together"),
        ("sections.0.surprise", 10, "malformed"),
        ("sections.0.num_changed", 51, "51 changes"),
        ("sections.0.num_changed", -1, "-1 changes"),
        ("sections.0.xxh3", "X" * 32, "no xxh3_128"),
        ("sections.0.encoding", "pickle", "malformed"),
        ("sections.0.encoding", "raw", "raw of another size"),
        ("sections.2.nbytes", 15, "raw of another size"),
        ("sections.0.dh", "0" * 16, "do not add up"),
        ("sections.0.dh", "xyz", "sixteen"),
        ("tensors.0.h_after", "0" * 16, "do not add up"),
        ("tensors.0.h_before", None, "h_before is missing"),
        ("tensors.0.h_before", "1" * 16, "do not add up"),
        ("tensors.1.name", "w", "named twice"),
        ("tensors.0.dtype", "BF17", "unknown element type"),
        ("tensors.0.shape", [100], "digest"),
        ("tensors.0.shape", [-10, -10], "bad shape"),
        ("tensors.0.shape", [2**50], "bad shape"),
        ("tensors.0.shape", [2**40, 2**40], "more than"),
    ],
)
def test_a_delta_that_contradicts_itself_is_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(SectionCorrupt, match=message) as caught:
        read(edited(delta(), path, value))
    assert caught.value.field == "manifest 1.5"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("base", {"attempt": 1, "version": 3, "kind": "delta"}, "has no base"),
        ("anchor", [1, 3], "its own anchor"),
        ("sections.0.encoding", "planes", "planes in an anchor"),
        ("sections", [], "100 elements are in no piece"),
        ("sections.0.num_elements", 99, "raw of another size"),
        ("sections.0.start", 1, "outside the tensor"),
        ("tensors.0.h_before", "0" * 16, "no h_before"),
    ],
)
def test_an_anchor_with_holes_or_a_base_is_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(SectionCorrupt, match=message):
        read(edited(anchor(), path, value), "1.4", "anchor")


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"schema": 1}', b"9" * 5000])
def test_text_that_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(SectionCorrupt):
        manifest.decode_manifest(data, "run", V("1.5"), "delta")
    with pytest.raises(SectionCorrupt):
        manifest.decode_head(data, "run")


def test_an_oversized_manifest_is_refused_unread() -> None:
    with pytest.raises(SectionCorrupt, match="at most"):
        manifest.decode_manifest(bytes(manifest.MAX_MANIFEST_BYTES + 1), "run", V("1.5"), "delta")


HEAD = {
    "schema": manifest.SCHEMA,
    "run_id": "run",
    "attempt": 1,
    "version": 5,
    "kind": "delta",
    "manifest": {"key": "run/1.5/delta.json", "nbytes": 5, "xxh3": XXH3},
}


def test_a_head_is_read_back_as_written() -> None:
    head = manifest.decode_head(msgspec.json.encode(HEAD), "run")
    assert head.identity == V("1.5")
    assert msgspec.json.decode(manifest.encode(head)) == HEAD


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", 0, "schema 0"),
        ("run_id", "other", "another run"),
        ("kind", "anchor", "another manifest"),
        ("version", 6, "another manifest"),
        ("manifest.key", "run/../x", "not an object key"),
        ("manifest.nbytes", 2**40, "limit"),
        ("manifest.xxh3", "", "xxh3"),
        ("more", 1, "malformed"),
    ],
)
def test_a_head_that_points_elsewhere_is_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(SectionCorrupt, match=message):
        manifest.decode_head(msgspec.json.encode(edited(HEAD, path, value)), "run")


def test_versions_are_ordered_by_attempt_first() -> None:
    texts = ["1.0", "1.9", "1.10", "1.120", "2.0", "2.100", "10.0"]
    assert [str(v) for v in sorted(V(t) for t in reversed(texts))] == texts


@pytest.mark.parametrize(
    "text", ["", "1", "1.", ".1", "1.2.3", "01.2", "1.02", "-1.2", "+1.2", "1.2 ", "1.2\n", "a.b"]
)
def test_a_version_has_one_spelling(text: str) -> None:
    with pytest.raises(RequestError, match=r"ATTEMPT\.VERSION"):
        V(text)


@pytest.mark.parametrize(("attempt", "version"), [(-1, 0), (0, -1), (10**10, 0), (True, 0), (1.0, 0)])
def test_versions_outside_the_range_are_refused(attempt: Any, version: Any) -> None:
    with pytest.raises(RequestError, match="whole number"):
        WeightVersion(attempt, version)


def test_versions_are_found_among_foreign_keys() -> None:
    keys = ["run/1.10/a", "run/1.9/b", "run/1.9/c", "run/x/d", "run/1.1", "other/1.3/a", "run/1.2/a/b"]
    assert [str(v) for v in manifest.versions_in(keys, "run")] == ["1.9", "1.10"]
