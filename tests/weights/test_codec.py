"""The planes codec: exact for every pair of bit patterns, small, and closed against hostile payloads."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import SectionCorrupt, WeightsError
from rose.weights import codec, statehash
from rose.weights.codec import Delta
from rose.weights.kernels import SEGMENT

HEADER = struct.Struct("<BBBBII5I")
ALL_16 = np.arange(65_536, dtype=np.uint16)


def key(u: int) -> int:
    """The published definition, in plain Python."""
    return u ^ 0xFFFF if u & 0x8000 else u | 0x8000


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
    encoded = codec.encode(pairs[:, 0].copy(), pairs[:, 1].copy())
    assert encoded is not None
    assert encoded.data[-2:] == bytes([1, 251])  # the ulp stream holds their zigzags, stored as they are


def test_special_floats_survive_every_transition() -> None:
    # +-0, smallest and largest denormals, +-1, +-max, +-Inf, quiet and signalling NaNs with payloads
    half = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]
    specials = np.array(half + [u | 0x8000 for u in half], np.uint16)
    old, new = (a.reshape(-1).copy() for a in np.meshgrid(specials, specials))
    roundtrip(old, new)


@pytest.mark.parametrize("t", [1, -1, 127, -127, 128, -128, 129, 32767, -32768])
def test_steps_around_the_escape_limit(t: int) -> None:
    old = np.full(10, 0x3F80, np.uint16)
    d = np.zeros(10, np.uint16)
    d[4] = t % 65_536
    data = roundtrip(old, codec.add_difference(old, d))
    escaped = HEADER.unpack_from(data)[-1]
    assert escaped == (0 if -127 <= t <= 127 else 2)


def test_8_bit_elements_use_255_as_an_ordinary_value() -> None:
    old = np.arange(256, dtype=np.uint8).repeat(256)
    new = np.tile(np.arange(256, dtype=np.uint8), 256)
    data = roundtrip(old, new)
    assert HEADER.unpack_from(data)[-1] == 0  # no escape stream


# --- shapes and densities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 65_535, 65_536, 65_537, 3 * 65_536 + 5])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("dtype", ["u1", "u2"])
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
    assert struct.unpack_from("<I", data, HEADER.size)[0] == SEGMENT


def test_busy_and_quiet_segments_give_the_same_stream() -> None:
    # The compare loop changes its method with the density of the segment before; the result may not.
    quiet_old, quiet_new = nudged(1, SEGMENT, 0.005)
    busy_old, busy_new = nudged(2, SEGMENT, 0.1)
    order = [0, 1, 1, 0, 0, 1]
    old = np.concatenate([(quiet_old, busy_old)[i] for i in order])
    new = np.concatenate([(quiet_new, busy_new)[i] for i in order])
    roundtrip(old, new)


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


def test_training_steps_cost_less_than_a_third_of_coo() -> None:
    old, new = nudged(6, 1 << 20, 0.01)
    encoded = codec.encode(old, new)
    assert encoded is not None
    assert len(encoded.data) / encoded.num_changed < 1.45  # COO with int32 indices takes 6


# --- squash -----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from(["u1", "u2"]))
def test_squashing_a_chain_equals_applying_it(seed: int, length: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 400))
    states = [random_pair(seed, size, 1.0, dtype)[0]]
    for _ in range(length):
        new = states[-1].copy()
        at = rng.integers(0, size, 30)
        new[at] = rng.choice(states)[at] if rng.random() < 0.5 else rng.integers(0, 4, 30, dtype=dtype)
        states.append(new)
    squashed: Delta | None = None
    for before, after in pairwise(states):
        encoded = codec.encode(before, after)
        assert encoded is not None
        delta = codec.decode(encoded.data, size, before.dtype)
        squashed = delta if squashed is None else codec.squash(squashed, delta)
    assert squashed is not None
    direct = codec.encode(states[0], states[-1])
    assert direct is not None
    # Equal as payloads: no base was needed, reverts are gone, and large sums escape as the encoder would.
    assert codec.encode_delta(squashed, size) == direct.data
    assert np.array_equal(squashed.idx, np.flatnonzero(states[0] != states[-1]))


def test_a_revert_vanishes() -> None:
    there = Delta(idx=np.array([3, 9], np.uint32), d=np.array([5, 0xFFFF], np.uint16))
    back = Delta(idx=np.array([3, 7], np.uint32), d=np.array([0xFFFB, 2], np.uint16))
    both = codec.squash(there, back)
    assert (both.idx.tolist(), both.d.tolist()) == ([7, 9], [2, 0xFFFF])


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


# --- hostile payloads -------------------------------------------------------------------------------------


def build(
    num_elements: int = 10,
    counts: list[int] | bytes = b"\x02\0\0\0",
    gaps: list[int] = [1, 2],  # noqa: B006 (never mutated)
    ulp: bytes = b"\x01\x02",
    escape: bytes = b"",
    **header: int,
) -> bytes:
    """A payload of stored streams, each part replaceable; by default two changes at 1 and 4."""
    counts = counts if isinstance(counts, bytes) else struct.pack(f"<{len(counts)}I", *counts)
    lo, hi = bytes(g & 255 for g in gaps), bytes(g >> 8 for g in gaps)
    streams = [counts, lo, hi, ulp, escape]
    values = {"format": 1, "bits": 16, "flags": 0, "zero": 0, "n": num_elements, "k": len(gaps)} | header
    return HEADER.pack(*values.values(), *map(len, streams)) + b"".join(streams)


def test_the_builder_builds_what_the_codec_reads() -> None:
    delta = codec.decode(build(), 10)
    assert (delta.idx.tolist(), delta.d.tolist()) == ([1, 4], [0xFFFF, 1])
    assert codec.encode_delta(delta, 10) == build()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (build(ulp=b"\x01\x00"), "change by zero"),
        (build(gaps=[1, 8]), "past the end"),
        (build(gaps=[10, 2]), "past the end"),
        (build(gaps=[65_535, 2]), "past the end"),
        (build(counts=[3]), "add up"),
        (build(counts=[1]), "add up"),
        (build(counts=[2, 0]), r"planes\.count: 8 bytes, needs 4"),
        (build(num_elements=11), "is for 11 elements"),
        (build(bits=8), "of 8 bits"),
        (build(format=2), "unknown format"),
        (build(zero=1), "unknown format"),
        (build(flags=0x20), "unknown format"),
        (build(flags=1), "frame"),
        (build(k=11), "11 changes of 10"),
        (build(k=1), "add up"),
        (build(ulp=b"\x01"), r"planes\.ulp: 1 bytes, needs 2"),
        (build(ulp=b"\x01\x02\x03"), r"planes\.ulp"),
        (build(ulp=b"\x01\xff"), r"planes\.escape: 0 bytes, needs 2"),
        (build(escape=b"\x80\x00"), r"planes\.escape: 2 bytes, needs 0"),
        (build(ulp=b"\x01\xff", escape=b"\x00\x00"), "needs none"),
        (build(ulp=b"\x01\xff", escape=b"\x7f\x00"), "needs none"),
        (build(ulp=b"\x01\xff", escape=b"\x81\xff"), "needs none"),
        (build() + b"\0", "header says"),
        (build()[:-1], "header says"),
        (build()[:31], "a header has 32"),
        (b"", "a header has 32"),
    ],
)
def test_malformed_payloads_are_refused(payload: bytes, message: str) -> None:
    with pytest.raises(SectionCorrupt, match=message):
        codec.decode(payload, 10)


def frame_build(frame: bytes, num_elements: int = 10) -> bytes:
    """The builder's payload with its ``count`` stream replaced by a zstd frame."""
    plain = build()
    values = list(HEADER.unpack_from(plain))
    values[2], values[4], values[6] = 1, num_elements, len(frame)
    return HEADER.pack(*values) + frame + plain[HEADER.size + 4 :]


def test_a_decompression_bomb_is_refused_unread() -> None:
    bomb = zstandard.compress(bytes(1 << 28), 1)
    assert len(bomb) < 1 << 16
    with pytest.raises(SectionCorrupt, match=r"planes\.count: the frame declares another size"):
        codec.decode(frame_build(bomb), 10)


def test_frames_that_lie_are_refused() -> None:
    good = zstandard.compress(struct.pack("<I", 2), 1)
    assert codec.decode(frame_build(good), 10).idx.tolist() == [1, 4]
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(struct.pack("<I", 2))
    for frame in (good + b"x", good[:-1], good + good, b"junk", unsized):
        with pytest.raises(SectionCorrupt, match=r"planes\.count"):
            codec.decode(frame_build(frame), 10)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bits_are_refused_or_stay_inside_the_run(data: st.DataObject) -> None:
    old, new = nudged(9, 70_000, 0.01)
    encoded = codec.encode(old, new)
    assert encoded is not None
    payload = bytearray(encoded.data)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        delta = codec.decode(bytes(payload), old.size)
    except SectionCorrupt:
        return
    assert delta.idx.size == 0 or int(delta.idx[-1]) < old.size
    assert bool(np.all(delta.idx[1:] > delta.idx[:-1]))
    assert bool(np.all(delta.d != 0))


def test_only_8_and_16_bit_elements_are_coded() -> None:
    with pytest.raises(WeightsError, match="8- and 16-bit"):
        codec.encode(np.zeros(4, np.uint32), np.zeros(4, np.uint32))
    with pytest.raises(WeightsError, match="alike"):
        codec.encode(np.zeros(4, np.uint16), np.zeros(5, np.uint16))
