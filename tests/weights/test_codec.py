"""The planes codec: exact for every pair of bit patterns, byte for byte what its text says, and small."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import WeightsError
from rose.weights import codec, indexed, statehash
from rose.weights.codec import Delta
from rose.weights.kernels import SEGMENT
from tests.weights import planes_reference as reference
from tests.weights.planes_reference import key

ALL_16 = np.arange(65_536, dtype=np.uint16)


def payload_of(delta: Delta, num_elements: int) -> bytes:
    """The one payload that says ``delta``."""
    old = np.zeros(num_elements, delta.d.dtype)
    new = old.copy()
    codec.apply(new, delta)
    encoded = codec.encode(old, new)
    assert encoded is not None
    return encoded.data


def random_pair(seed: int, size: int, density: float, dtype: str = "u2") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    top = 2 ** (8 * np.dtype(dtype).itemsize)
    old = rng.integers(0, top, size, dtype=dtype)
    new = np.where(rng.random(size) < density, rng.integers(0, top, size, dtype=dtype), old)
    return old, new


def nudged(seed: int, size: int, density: float) -> tuple[np.ndarray, np.ndarray]:
    """bf16 weights and steps of +-1 ULP: what training gives."""
    rng = np.random.default_rng(seed)
    old = (rng.standard_normal(size, dtype=np.float32) * 0.02).view(np.uint32) >> 16
    step = (rng.random(size) < density) * rng.choice([-1, 1], size)
    return old.astype(np.uint16), ((old + step) & 0xFFFF).astype(np.uint16)


def roundtrip(old: np.ndarray, new: np.ndarray, start: int = 0) -> bytes:
    """Encode, decode, apply; asserts bits and hashes; returns the payload."""
    encoded = codec.encode(old, new, start=start)
    assert encoded is not None
    delta = codec.decode(encoded.data, old.size, old.dtype)
    assert np.array_equal(delta.idx, np.flatnonzero(old != new))
    assert encoded.num_changed == delta.idx.size
    got = old.copy()
    assert codec.apply(got, delta, start=start) == encoded.dh
    assert np.array_equal(got, new)
    before, after = statehash.hash_bits(old, start=start), statehash.hash_bits(new, start=start)
    assert statehash.add(before, encoded.dh) == after
    return encoded.data


# --- values -----------------------------------------------------------------------------------------------


def test_difference_from_the_smallest_key_is_the_published_key() -> None:
    # key(0xFFFF) is 0, so the difference from it is the key itself, for all 2**16 values.
    keys = codec.difference(np.full(65_536, 0xFFFF, np.uint16), ALL_16)
    assert keys.tolist() == [key(u) for u in range(65_536)]
    assert len(set(keys.tolist())) == 65_536
    for u, k in [(0x0000, 0x8000), (0x8000, 0x7FFF), (0x7F80, 0xFF80), (0xFF80, 0x007F), (0x7FC0, 0xFFC0)]:
        assert keys[u] == k
    assert keys[0xFFC1] == 0x003E


@pytest.mark.parametrize("dtype", ["u1", "u2"])
def test_every_difference_from_every_sign_inverts(dtype: str) -> None:
    top = 2 ** (8 * np.dtype(dtype).itemsize)
    every = np.arange(top).astype(dtype)
    for value in {0, 1, top // 2 - 1, top // 2, top // 2 + 1, top - 1, 0x3F80 % top}:
        old = np.full(top, value, dtype)
        assert np.array_equal(codec.add_difference(old, codec.difference(old, every)), every)
        new = codec.add_difference(old, every)
        assert np.array_equal(codec.difference(old, new), every)


def test_published_steps() -> None:
    pairs = np.array([[0x0000, 0x8000], [0xFFC1, 0x7FC0]], np.uint16)
    d = codec.difference(pairs[:, 0].copy(), pairs[:, 1].copy())
    assert d.tolist() == [0xFFFF, 0xFF82]  # t = -1 and t = -126


def test_special_floats_survive_every_transition() -> None:
    # +-0, smallest and largest denormals, +-1, +-max, +-Inf, quiet and signalling NaNs with payloads
    half = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]
    specials = np.array(half + [u | 0x8000 for u in half], np.uint16)
    old, new = (a.reshape(-1).copy() for a in np.meshgrid(specials, specials))
    roundtrip(old, new)


@pytest.mark.parametrize("t", [1, -1, 2, -2, 3, -3, 127, -128, 255, 256, 257, 32767, -32767, -32768])
def test_steps_of_every_size_are_exact(t: int) -> None:
    old = np.full(10, 0x3F80, np.uint16)
    d = np.zeros(10, np.uint16)
    d[4] = t % 65_536
    roundtrip(old, codec.add_difference(old, d))


def test_every_pair_of_8_bit_elements_is_exact() -> None:
    old = np.arange(256, dtype=np.uint8).repeat(256)
    roundtrip(old, np.tile(np.arange(256, dtype=np.uint8), 256))


def test_32_bit_floats_are_exact_from_the_smallest_step_to_the_largest() -> None:
    values = [0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00001, 0x7FFFFFFF]
    specials = np.array(values + [u | 1 << 31 for u in values], np.uint32)
    old, new = (a.reshape(-1).copy() for a in np.meshgrid(specials, specials))
    roundtrip(old, new)


# --- against the format's text ----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 700), st.sampled_from([8, 16, 32]), st.floats(0, 1))
def test_payload_is_the_published_format(seed: int, size: int, bits: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 2**bits, size, dtype=f"u{bits // 8}")
    step = np.where(rng.random(size) < 0.7, rng.integers(1, 4, size), rng.integers(0, 2**bits, size))
    new = old + (step * (rng.random(size) < density)).astype(old.dtype)
    encoded = codec.encode(old, new)
    assert encoded is not None
    assert encoded.data == reference.encode(old.tolist(), new.tolist(), bits)


def test_segments_follow_each_other_bit_by_bit() -> None:
    old, new = nudged(4, 2 * SEGMENT + 100, 0.01)
    encoded = codec.encode(old, new)
    assert encoded is not None
    assert encoded.data == reference.encode(old.tolist(), new.tolist())


# --- shapes and densities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 65_535, 65_536, 65_537, 3 * 65_536 + 5])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4"])
def test_any_size_and_density_is_exact(size: int, density: float, dtype: str) -> None:
    roundtrip(*random_pair(size, size, density, dtype), start=3 * SEGMENT)


@pytest.mark.parametrize("position", [0, 3, 65_535, 65_536, 131_071, 131_072, 131_074])
def test_one_changed_element_anywhere(position: int) -> None:
    old = np.zeros(2 * SEGMENT + 3, np.uint16)
    new = old.copy()
    new[position] = 1
    roundtrip(old, new)


def test_a_full_segment_counts_65536() -> None:
    old = np.zeros(SEGMENT, np.uint16)
    data = roundtrip(old, old + np.uint16(1))
    assert reference.payload(SEGMENT, [reference.planes(range(SEGMENT), [1] * SEGMENT, SEGMENT)]) == data


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4"])
def test_the_worst_case_fits_the_room_made_for_it(dtype: str) -> None:
    """Every change at the largest size there is, at the densities where gaps cost most."""
    rng = np.random.default_rng(0)
    top = 8 * np.dtype(dtype).itemsize
    for density in (0.001, 0.02, 0.35, 0.5, 1.0):
        size = 3 * SEGMENT + 17
        changed = rng.random(size) < density
        d = np.where(changed, (1 << (top - 1)) - rng.integers(0, 3, size), 0).astype(dtype)
        old = np.zeros(size, dtype)
        new = codec.add_difference(old, d)
        exact = codec.encode(old, new, max_changes=int(np.count_nonzero(changed)))
        assert exact is not None
        assert np.array_equal(codec.decode(exact.data, size, old.dtype).d, d[changed])


def test_unaligned_and_read_only_inputs_encode_alike() -> None:
    old, new = nudged(3, 1001, 0.05)
    shifted = np.zeros(2 * 1001 + 1, np.uint8)
    shifted[1:] = old.view(np.uint8)
    unaligned = shifted[1:].view(np.uint16)
    frozen = new.copy()
    frozen.flags.writeable = False
    assert roundtrip(unaligned, frozen) == roundtrip(old, new)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2999), st.integers(0, 0xFFFF)), max_size=60),
    st.integers(1, 3000),
    st.integers(0, 2**40),
)
def test_arbitrary_changes_are_exact(changes: list[tuple[int, int]], size: int, start: int) -> None:
    old = np.random.default_rng(size).integers(0, 65_536, size, dtype=np.uint16)
    new = old.copy()
    for position, value in changes:
        new[position % size] = value
    roundtrip(old, new, start=start)


def test_more_changes_than_allowed_gives_none() -> None:
    old, new = random_pair(5, 1000, 1.0)
    changed = int(np.count_nonzero(old != new))
    assert codec.encode(old, new, max_changes=changed - 1) is None
    assert codec.encode(old, new, max_changes=changed) is not None


def test_training_steps_cost_within_three_percent_of_their_entropy() -> None:
    old, new = nudged(6, 1 << 20, 0.01)
    encoded = codec.encode(old, new)
    assert encoded is not None
    p = encoded.num_changed / old.size
    entropy_bits = -(np.log2(p) + (1 - p) / p * np.log2(1 - p)) + 1  # of the place, and of the sign
    assert 8 * len(encoded.data) / encoded.num_changed < 1.03 * entropy_bits


# --- stage ------------------------------------------------------------------------------------------------


def test_stage_changes_nothing_and_scatter_undoes_itself() -> None:
    old, new = nudged(7, 10_000, 0.05)
    encoded = codec.encode(old, new)
    assert encoded is not None
    delta = codec.decode(encoded.data, old.size)
    bits = old.copy()
    undo, values, dh = codec.stage(bits, delta)
    assert np.array_equal(bits, old)
    assert dh == encoded.dh
    codec.scatter(bits, delta.idx, values)
    codec.scatter(bits, delta.idx, values)  # replayed
    assert np.array_equal(bits, new)
    codec.scatter(bits, delta.idx, undo)
    assert np.array_equal(bits, old)


def test_stage_on_a_wrong_base_moves_the_hash_elsewhere() -> None:
    old, new = nudged(8, 10_000, 0.05)
    encoded = codec.encode(old, new)
    assert encoded is not None
    delta = codec.decode(encoded.data, old.size)
    other = old.copy()
    other[delta.idx[0]] ^= 1
    assert codec.stage(other, delta)[2] != encoded.dh


def test_a_delta_longer_than_its_target_is_refused() -> None:
    delta = Delta(idx=np.array([10], np.uint32), d=np.array([1], np.uint16))
    bits = np.zeros(10, np.uint16)
    with pytest.raises(WeightsError, match="past the run"):
        codec.apply(bits, delta)
    with pytest.raises(WeightsError, match="past the run"):
        codec.scatter(bits, delta.idx, delta.d)


def test_only_8_16_and_32_bit_elements_are_coded() -> None:
    with pytest.raises(WeightsError, match="8-, 16- and 32-bit"):
        codec.encode(np.zeros(4, np.uint64), np.zeros(4, np.uint64))
    with pytest.raises(WeightsError, match="alike"):
        codec.encode(np.zeros(4, np.uint16), np.zeros(5, np.uint16))


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 5000])
def test_put_writes_every_value_and_says_that_memory_holds_them(size: int) -> None:
    bits = np.zeros(20_000, np.uint16)
    index = np.arange(size, dtype=np.int64) * 3 + 1
    values = np.arange(1, size + 1, dtype=np.uint16)
    assert indexed.put(bits, index, values)
    assert np.array_equal(bits[index], values)
    assert int(bits.sum()) == int(values.astype(np.int64).sum())  # and nothing else


@pytest.mark.parametrize("at", [1, 1023, 1500, 2999])
def test_put_reads_back_what_memory_holds(at: int) -> None:
    """Two values for one place: memory can hold only one of them."""
    index = np.arange(3000, dtype=np.int64)
    values = np.full(3000, 7, np.uint16)
    index[at], values[at] = index[at - 1], 8
    assert not indexed.put(np.zeros(3000, np.uint16), index, values)
