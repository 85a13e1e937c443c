"""Boxes: which elements a slice covers, and the proof that pieces are a division of the tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import WeightsError
from rose.weights import boxes, statehash
from rose.weights.boxes import Box


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shape, offset, extent."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    offset, extent = [], []
    for n in shape:
        begin = draw(st.integers(0, n - 1))
        offset.append(begin)
        extent.append(draw(st.integers(1, n - begin)))
    return shape, tuple(offset), tuple(extent)


def elements(box: Box) -> list[int]:
    return [box.start + r * box.stride + i for r in range(box.num_runs) for i in range(box.run)]


@settings(deadline=None)
@given(slices())
def test_the_boxes_of_a_slice_are_its_elements_in_order(case: tuple[tuple[int, ...], ...]) -> None:
    shape, offset, extent = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    wanted = whole[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))].reshape(-1)
    found = boxes.of_slice(shape, offset, extent)
    assert [i for box in found for i in elements(box)] == wanted.tolist()
    assert boxes.problem(found, whole.size, complete=False) is None


@settings(deadline=None)
@given(slices(), st.integers(1, 40))
def test_cutting_keeps_every_element_in_order(case: tuple[tuple[int, ...], ...], limit: int) -> None:
    shape, offset, extent = case
    for box in boxes.of_slice(shape, offset, extent):
        pieces = list(boxes.cut(box, limit))
        assert [i for _, piece in pieces for i in elements(piece)] == elements(box)
        assert all(piece.num_elements <= limit for _, piece in pieces)
        begins = np.cumsum([0, *(piece.num_elements for _, piece in pieces)])
        assert [begin for begin, _ in pieces] == begins[:-1].tolist()


@settings(deadline=None)
@given(slices(), st.integers(0, 2**32 - 1), st.sampled_from(["u1", "u2", "u4", "u8"]))
def test_positions_view_and_hash_name_the_same_elements(
    case: tuple[tuple[int, ...], ...], seed: int, dtype: str
) -> None:
    shape, offset, extent = case
    rng = np.random.default_rng(seed)
    tensor = rng.integers(0, 100, math.prod(shape), dtype=dtype)
    for box in boxes.of_slice(shape, offset, extent):
        at = np.array(elements(box))
        bits = tensor[at]
        index = np.arange(box.num_elements, dtype=np.uint32)
        assert np.array_equal(boxes.positions(box, index) + np.uint32(box.start), at)
        assert np.array_equal(boxes.view(box, tensor).reshape(-1), bits)
        assert boxes.hash_bits(box, bits) == statehash.hash_at(at, bits)
        boxes.view(box, tensor)[:] = 7
        assert (tensor[at] == 7).all()


def test_a_box_hashed_in_many_chunks_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = np.arange(1000, dtype=np.uint16)
    box = Box(3, 1000, 10, 25)
    whole = boxes.hash_bits(box, bits)
    monkeypatch.setattr(boxes, "_CHUNK_ELEMENTS", 37)
    assert boxes.hash_bits(box, bits) == whole


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(1, 7),
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 7), st.integers(1, 7)), max_size=6
    ),
    st.booleans(),
)
def test_the_proof_agrees_with_counting(
    rows: int, columns: int, rectangles: list[tuple[int, int, int, int]], flat: bool
) -> None:
    found: list[Box] = []
    count = np.zeros(rows * columns, int)
    for top, left, height, width in rectangles:
        if flat:  # any contiguous range, across rows too
            begin = min(top * columns + left, rows * columns - 1)
            box = Box.flat(begin, min(height * width, rows * columns - begin))
            found.append(box)
        else:
            offset = min(top, rows - 1), min(left, columns - 1)
            extent = min(height, rows - offset[0]), min(width, columns - offset[1])
            found += boxes.of_slice((rows, columns), offset, extent)
    for box in found:
        count[elements(box)] += 1
    wrong = boxes.problem(found, rows * columns, complete=True)
    if (count > 1).any():
        assert wrong == "pieces overlap"
    elif (count == 0).any():
        assert wrong == f"{(count == 0).sum()} elements are in no piece"
    else:
        assert wrong is None
    assert (boxes.problem(found, rows * columns, complete=False) is None) == (not (count > 1).any())


def test_rows_and_columns_of_one_tensor_are_told_apart() -> None:
    rows, columns = Box.flat(0, 20), Box(20, 15, 5, 10)
    assert boxes.problem([rows, columns, Box(25, 15, 5, 10)], 50, complete=True) is None
    assert boxes.problem([rows, columns, Box(24, 15, 5, 10)], 50, complete=True) == "pieces overlap"


@pytest.mark.parametrize(
    "box",
    [
        Box(-1, 4, 4, 0),
        Box(0, 0, 0, 0),
        Box(90, 11, 11, 0),
        Box(0, 12, 4, 49),  # ends past the tensor
        Box(0, 12, 4, 4),  # no gap: two spellings of one thing
        Box(0, 12, 4, 3),
        Box(0, 12, 5, 10),  # a broken run
        Box(7, 12, 4, 10),  # wraps into the next row
        Box(0, 12, -4, 10),
        Box(0, 12, 4, -10),
        Box(50, 12, 4, -10),
        Box(0, -12, -4, 10),
    ],
)
def test_a_box_that_is_no_slice_is_refused(box: Box) -> None:
    assert boxes.problem([box], 100, complete=False) is not None


def test_two_strides_in_one_tensor_are_refused() -> None:
    wrong = boxes.problem([Box(0, 4, 2, 10), Box(52, 4, 2, 20)], 100, complete=False)
    assert wrong == "pieces are cut along different dimensions: strides [10, 20]"


@pytest.mark.parametrize(
    ("offset", "extent"), [((0,), (4, 2)), ((3, 0), (2, 2)), ((-1, 0), (2, 2)), ((0, 0), (1, -1))]
)
def test_a_slice_outside_its_shape_is_refused(offset: tuple[int, ...], extent: tuple[int, ...]) -> None:
    with pytest.raises(WeightsError):
        boxes.of_slice((4, 2), offset, extent)


def test_an_empty_slice_has_no_boxes() -> None:
    assert boxes.of_slice((4, 2), (0, 0), (0, 2)) == []
    assert boxes.of_slice((), (), ()) == [Box.flat(0, 1)]
