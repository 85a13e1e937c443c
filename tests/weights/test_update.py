"""The update file: what goes in comes out, and a file that breaks a rule is refused whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rose.errors import SectionCorrupt, WeightsError
from rose.lineage import WeightVersion
from rose.weights import statehash
from rose.weights.spec import TensorSpec, model_digest
from rose.weights.update import Header, TensorUpdate, Update, UpdateFile, read_update, write_update

SPECS = [
    TensorSpec("w", "BF16", (4, 8)),
    TensorSpec("norm", "BF16", (8,)),
    TensorSpec("scale", "F32", (3,)),
    TensorSpec("code", "F8_E4M3", (2, 2)),
    TensorSpec("empty", "BF16", (0, 4)),
]


def make_update() -> Update:
    w, norm, scale, code, empty = SPECS
    idx = np.array([0, 5, 31], np.uint32)
    tensors = [
        TensorUpdate(spec=w, h_before=1, h_after=2, idx=idx, val=np.array([7, 8, 9], np.uint16)),
        TensorUpdate(spec=norm, h_before=3, h_after=3),
        TensorUpdate(spec=scale, h_before=4, h_after=5, dense=np.array([1, 2, 2**32 - 1], np.uint32)),
        TensorUpdate(
            spec=code, h_before=6, h_after=7, idx=np.array([3], np.int64), val=np.array([255], np.uint8)
        ),
        TensorUpdate(spec=empty, h_before=0, h_after=0),
    ]
    return Update(
        run_id="run",
        target=WeightVersion(2, 17),
        base=WeightVersion(2, 16),
        model=model_digest(SPECS),
        tensors={tensor.spec.name: tensor for tensor in tensors},
    )


def test_a_tensor_without_axes_stays_one(tmp_path: Path) -> None:
    spec = TensorSpec("scale", "F32", ())
    tensor = TensorUpdate(spec=spec, h_before=None, h_after=1, dense=np.array(7, np.uint32))
    update = Update(
        run_id="run",
        target=WeightVersion(1, 0),
        base=None,
        model=model_digest([spec]),
        tensors={"scale": tensor},
    )
    write_update(tmp_path / "update", update)
    read = read_update(tmp_path / "update").tensors["scale"].dense
    assert read is not None
    assert (read.shape, read.dtype, int(read)) == ((), np.dtype("<u4"), 7)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "update.safetensors"
    write_update(path, make_update())
    return path


def rewrite(path: Path, arrays: dict[str, Any] | None = None, **header: Any) -> None:
    """Replace arrays (None deletes) and header fields of a written file, as a hostile writer would."""
    with UpdateFile(path) as file:
        table = msgspec.to_builtins(file.header)
    stored = load_file(path)
    stored.update(arrays or {})
    table.update(header)
    text = msgspec.json.encode(table).decode()
    save_file({k: v for k, v in stored.items() if v is not None}, path, metadata={"rose": text})


def test_round_trip_keeps_every_bit_and_hash(path: Path) -> None:
    read = read_update(path)
    wrote = make_update()
    assert (read.run_id, read.target, read.base, read.model) == ("run", wrote.target, wrote.base, wrote.model)
    assert list(read.tensors) == [spec.name for spec in SPECS]
    for name, tensor in read.tensors.items():
        other = wrote.tensors[name]
        assert (tensor.spec, tensor.h_before, tensor.h_after) == (other.spec, other.h_before, other.h_after)
        for kind in ("dense", "idx", "val"):
            a, b = getattr(tensor, kind), getattr(other, kind)
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.dtype == b.dtype
                assert np.array_equal(a, b)
    assert read.num_changed == 3 + 3 + 1
    assert list(path.parent.iterdir()) == [path]  # no temporary file is left


@pytest.mark.parametrize("library", [False, True], ids=["ours", "safetensors"])
def test_a_view_is_what_was_written_wherever_it_lies(path: Path, library: bool) -> None:
    if library:  # another order of the arrays, and another place for each
        rewrite(path)
    wrote = make_update()
    with UpdateFile(path) as file:
        views = {name: file.view(name) for name in file}
    path.unlink()
    for name, view in views.items():  # after the file was closed, and without its name
        for kind in ("dense", "idx", "val"):
            a, b = getattr(view, kind), getattr(wrote.tensors[name], kind)
            assert (a is None) == (b is None)
            if a is not None:
                assert a.flags.aligned
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                assert np.array_equal(a, b)


def test_our_files_need_no_copy_to_be_read_in_place(tmp_path: Path) -> None:
    """Arrays of two bytes lie behind those of four, so that these are where a processor wants them."""
    specs = [TensorSpec(name, "BF16", (9,)) for name in "abc"]
    tensors = {
        spec.name: TensorUpdate(
            spec=spec, h_before=1, h_after=2, idx=np.array([3], np.uint32), val=np.array([4], np.uint16)
        )
        for spec in specs
    }
    update = Update(
        run_id="run",
        target=WeightVersion(1, 1),
        base=WeightVersion(1, 0),
        model=model_digest(specs),
        tensors=tensors,
    )
    write_update(tmp_path / "u", update)
    with UpdateFile(tmp_path / "u") as file:
        assert all(file.view(name).idx.base is not None for name in "abc")  # a view of the file's memory


def test_a_dense_update_needs_no_base(tmp_path: Path) -> None:
    spec = SPECS[0]
    bits = np.arange(32, dtype=np.uint16).reshape(4, 8)
    tensor = TensorUpdate(spec=spec, h_before=None, h_after=statehash.hash_bits(bits), dense=bits)
    update = Update(
        run_id="run", target=WeightVersion(1, 0), base=None, model=model_digest([spec]), tensors={"w": tensor}
    )
    write_update(tmp_path / "u", update)
    assert read_update(tmp_path / "u").tensors["w"].num_changed == 32
    with pytest.raises(WeightsError, match="every tensor dense"):
        write_update(tmp_path / "v", replace(update, tensors={"w": replace(tensor, dense=None)}))
    assert not (tmp_path / "v").exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"idx/w": np.array([5, 0, 31], np.uint32)}, "increase strictly"),
        ({"idx/w": np.array([0, 5, 5], np.uint32)}, "increase strictly"),
        ({"idx/w": np.array([0, 5, 32], np.uint32)}, "increase strictly within 0..31"),
        ({"idx/code": np.array([-1], np.int64)}, "increase strictly"),
        ({"idx/w": np.array([0, 5], np.uint32)}, "values are"),
        ({"idx/w": np.array([0.0, 1.0, 2.0], np.float32)}, "indices are float32"),
        ({"idx/w": np.array([[0, 5, 31]], np.uint32)}, "1-D"),
        ({"val/w": np.array([7, 8, 9], np.uint32)}, "values are"),
        ({"val/w": None}, "belong together"),
        ({"idx/w": None, "val/w": None}, "no data does"),
        ({"dense/w": np.zeros((4, 8), np.uint16)}, "both dense and sparse"),
        ({"dense/scale": np.zeros(3, np.uint16)}, "dense bits are"),
        ({"dense/scale": np.zeros((3, 1), np.uint32)}, "dense bits have shape"),
        ({"dense/ghost": np.zeros(3, np.uint32)}, "unknown array 'dense/ghost'"),
        ({"more/w": np.zeros(3, np.uint32)}, "unknown array"),
        ({"idx/w": np.array([0], np.uint32), "val/w": np.array([1], np.uint16)}, "its header says 3"),
        ({"idx/w": np.zeros(0, np.uint32), "val/w": np.zeros(0, np.uint16)}, "change of nothing"),
    ],
)
def test_bad_arrays_are_refused(path: Path, arrays: dict[str, Any], message: str) -> None:
    rewrite(path, arrays)
    with pytest.raises(SectionCorrupt, match=message) as caught:
        read_update(path)
    assert caught.value.field == path.name


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"schema": 2}, "schema 2"),
        ({"attempt": -1}, "attempt"),
        ({"base": None}, "exactly when"),
        ({"base": [1]}, "malformed"),
        ({"model": "0" * 64}, "digest"),
        ({"surprise": 1}, "malformed"),
        ({"tensors": {}}, "digest"),
        ({"run_id": 5}, "malformed"),
    ],
)
def test_bad_headers_are_refused(path: Path, header: dict[str, Any], message: str) -> None:
    rewrite(path, **header)
    with pytest.raises(SectionCorrupt, match=message):
        read_update(path)


def test_an_absurd_shape_is_refused_before_anything_is_allocated(path: Path) -> None:
    with UpdateFile(path) as file:
        table = msgspec.to_builtins(file.header)["tensors"]
    table["w"]["shape"] = [2**40, 2**40]
    rewrite(path, tensors=table)
    with pytest.raises(SectionCorrupt, match=r"w\.shape"):
        read_update(path)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated_files_are_refused(path: Path, keep: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(SectionCorrupt):
        read_update(path)


def test_trailing_bytes_missing_file_and_size_limit_are_refused(path: Path) -> None:
    with pytest.raises(SectionCorrupt, match="at most 10"):
        read_update(path, max_bytes=10)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(SectionCorrupt):
        read_update(path)
    path.unlink()
    with pytest.raises(SectionCorrupt, match="No such file"):
        read_update(path)


def test_header_is_the_documented_json(path: Path) -> None:
    with UpdateFile(path) as file:
        assert isinstance(file.header, Header)
        assert msgspec.to_builtins(file.header.tensors["w"]) == {
            "dtype": "BF16",
            "shape": [4, 8],
            "h_before": "0000000000000001",
            "h_after": "0000000000000002",
            "num_changed": 3,
        }


def test_64_bit_tensors_travel_dense_only(tmp_path: Path) -> None:
    spec = TensorSpec("long", "I64", (4,))
    sparse = TensorUpdate(
        spec=spec, h_before=0, h_after=1, idx=np.array([0], np.uint32), val=np.array([1], np.uint64)
    )
    update = Update(
        run_id="run",
        target=WeightVersion(1, 1),
        base=WeightVersion(1, 0),
        model=model_digest([spec]),
        tensors={"long": sparse},
    )
    with pytest.raises(WeightsError, match="dense only"):
        write_update(tmp_path / "u", update)
