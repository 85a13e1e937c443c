"""State hash: published vectors, additivity over any cut, and what it catches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import WeightsError
from rose.weights import statehash


def slow_hash(bits: np.ndarray, start: int = 0) -> int:
    width = bits.dtype.itemsize * 8
    return sum(statehash.mix(((start + i) << width) | int(b)) for i, b in enumerate(bits)) % 2**64


def random_bits(seed: int, size: int, dtype: str = "u2") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2 ** (8 * np.dtype(dtype).itemsize), size, dtype=dtype)


def test_published_vectors() -> None:
    assert statehash.mix(0) == 0
    assert statehash.mix(0x3F80) == 0x939663A267C0B70E
    assert statehash.mix((1 << 16) | 0x8000) == 0x8D223F0720483EB5
    assert statehash.hash_bits(np.array([0x3F80, 0x8000, 0x3F00], np.uint16)) == 0x560F095DCEFFB82C


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4"])
@pytest.mark.parametrize("size", [0, 1, 3, 7, 64, 1001])
def test_full_scan_equals_the_definition(dtype: str, size: int) -> None:
    bits = random_bits(size, size, dtype)
    assert statehash.hash_bits(bits, start=12345) == slow_hash(bits, 12345)


def test_index_beyond_32_bits_counts_in_full() -> None:
    bits = random_bits(1, 5)
    assert statehash.hash_bits(bits, start=2**40) == slow_hash(bits, 2**40)


def test_four_column_shards_sum_to_the_whole_tensor() -> None:
    tensor = random_bits(2, 12 * 8).reshape(12, 8)
    flat_index = np.arange(tensor.size).reshape(tensor.shape)
    total = 0
    for rank in range(4):
        columns = slice(2 * rank, 2 * rank + 2)
        index = np.ascontiguousarray(flat_index[:, columns]).reshape(-1)
        total = statehash.add(total, statehash.hash_at(index, np.ascontiguousarray(tensor[:, columns])))
    assert total == statehash.hash_bits(tensor)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.sampled_from(["u1", "u2", "u4", "u8"]))
def test_incremental_equals_full_scan(seed: int, size: int, dtype: str) -> None:
    old, new = random_bits(seed, size, dtype), random_bits(seed + 1, size, dtype)
    index = np.flatnonzero(old != new)
    moved = statehash.delta_hash(index, old[index], new[index])
    assert statehash.add(statehash.hash_bits(old), moved) == statehash.hash_bits(new)


def test_wrong_base_missing_double_and_swapped_changes_are_caught() -> None:
    old = random_bits(3, 1000)
    new = old.copy()
    index = np.arange(0, 1000, 97)
    new[index] ^= 0x55
    target = statehash.hash_bits(new)
    base = statehash.hash_bits(old)
    moved = statehash.delta_hash(index, old[index], new[index])

    missing = statehash.delta_hash(index[1:], old[index[1:]], new[index[1:]])
    swapped_values = new[index].copy()
    swapped_values[:2] = swapped_values[1::-1]
    swapped = statehash.delta_hash(index, old[index], swapped_values)
    wrong_base = statehash.hash_bits(np.concatenate([old[:1] ^ 1, old[1:]]))

    assert statehash.add(base, moved) == target
    assert statehash.add(base, missing) != target
    assert statehash.add(statehash.add(base, moved), moved) != target
    assert statehash.add(base, swapped) != target
    assert statehash.add(wrong_base, moved) != target


def test_plus_and_minus_zero_differ() -> None:
    assert statehash.hash_bits(np.array([0x0000], np.uint16)) != statehash.hash_bits(
        np.array([0x8000], np.uint16)
    )


def test_64_bit_elements_hash_as_two_halves() -> None:
    values = np.array([1 << 40, 7], np.int64)
    assert statehash.hash_bits(values) == slow_hash(values.view(np.uint32))


def test_a_piece_of_64_bit_elements_hashes_as_its_halves_lie_in_the_whole() -> None:
    values = random_bits(6, 50, "u8")
    halves = values.view(np.uint32)
    assert statehash.hash_bits(values[7:], start=7) == slow_hash(halves[14:], 14)
    index = np.array([0, 3, 9], np.uint32)
    expected = [slow_hash(halves[2 * i + 14 : 2 * i + 16], 2 * i + 14) for i in index.tolist()]
    assert statehash.hash_at(index, values[7 + index], start=7) == sum(expected) % 2**64


def test_64_bit_elements_beyond_31_bits_of_index_count_in_full() -> None:
    index, values = np.array([2**32 - 1], np.uint32), np.array([5], np.uint64)
    assert statehash.hash_at(index, values) == statehash.hash_bits(values, start=2**32 - 1)


def test_read_only_arrays_hash_alike() -> None:
    bits = random_bits(4, 500)
    frozen = bits.copy()
    frozen.flags.writeable = False
    assert statehash.hash_bits(frozen) == statehash.hash_bits(bits)


def test_bad_arrays_are_refused_by_name() -> None:
    bits = random_bits(5, 64).reshape(8, 8)
    with pytest.raises(WeightsError, match=r"^array: needs a C-contiguous"):
        statehash.hash_bits(bits[:, :4])
    with pytest.raises(WeightsError, match=r"^index: 3 indices for 2"):
        statehash.hash_at(np.arange(3), np.zeros(2, np.uint16))
    with pytest.raises(WeightsError, match=r"^array: cannot hash"):
        statehash.hash_bits(np.zeros(2, np.complex128))


@pytest.mark.parametrize("text", ["", "0x00000000000000", "+123456789abcdef", "0" * 17, "A" * 16, None])
def test_hex_form_is_exactly_sixteen_digits(text: str) -> None:
    assert statehash.from_hex(statehash.to_hex(0xAB)) == 0xAB
    with pytest.raises(WeightsError, match="sixteen"):
        statehash.from_hex(text)
