"""The planes codec is closed against payloads that no encoder wrote: refused with a reason, or inside the run."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import SectionCorrupt
from rose.weights import codec
from rose.weights.kernels import SEGMENT
from tests.weights import planes_reference as reference
from tests.weights.planes_reference import HEADER, directory_entry, payload, planes
from tests.weights.test_codec import payload_of

TWO = planes([1, 4], [-1, 3], 10)
"""Changes at 1 and 4 of ten elements, the second a big step: two low bits per gap."""


ALL = "".join(TWO.values())


def two(**planes: str) -> bytes:
    """The payload of :data:`TWO` with planes replaced."""
    return payload(10, [TWO | planes])


def raw(text: str, changes: int, big: int) -> bytes:
    """A payload of ten elements with any bits and any counts."""
    segment = {"sign": "", "size_high": "", "text": text}
    return payload(10, [segment], changes=changes, entry=directory_entry(changes, big, len(text)))


def entry(changes: int = 2, big: int = 1, bits: int | None = None) -> int:
    return directory_entry(changes, big, len(ALL) if bits is None else bits)


def test_the_builder_builds_what_the_codec_reads() -> None:
    good = payload(10, [TWO])
    delta = codec.decode(good, 10)
    assert (delta.idx.tolist(), delta.d.tolist()) == ([1, 4], [0xFFFF, 3])
    assert payload_of(delta, 10) == good


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "header and directory have more"),
        (payload(10, [TWO])[: HEADER.size + 7], "header and directory have more"),
        (payload(10, [TWO])[:-1], r"planes\.bits: \d bytes for"),
        (payload(10, [TWO]) + b"\0", r"planes\.bits: \d bytes for"),
        (payload(10, [TWO], format=1), r"unknown format 1\.0"),
        (payload(10, [TWO], zero=7), r"unknown format 2\.7"),
        (payload(10, [TWO], bits=8), "10 elements of 8 bits, not 10 of 16"),
        (payload(10, [TWO], elements=11), "is for 11 elements"),
        (payload(10, [TWO], changes=3), "add up"),
        (payload(10, [TWO], changes=2**32 - 1), "add up"),
        (payload(10, [TWO], changes=11, entry=entry(changes=11)), "add up"),
        (payload(10, [TWO], entry=entry(big=3)), "add up"),
        (payload(10, [TWO], entry=entry(bits=40)), r"planes\.bits: 2 bytes for 40 bits"),
        (payload(10, [TWO], changes=9, entry=entry(changes=9)), r"9 changes in \d+ bits"),
        (payload(10, [TWO], changes=0, entry=entry(changes=0, big=0)), "belong to no plane"),
        (raw(ALL, 0, 0), "belong to no plane"),
        (raw(ALL + "0", 2, 1), "belong to no plane"),
        (raw(ALL[:-1], 2, 1), "fewer bits"),
        (raw(ALL[:8], 2, 1), "fewer bits"),
        (raw("0" * 13, 2, 1), "fewer bits"),
        (two(gap_high="00000011"), "past the end"),
        (two(big_high="001"), "past the end"),
        (two(size_high="0" * 15 + "1", size_low="1" * 15), "no element can take"),
        (two(size_high="0" * 31 + "1", size_low="1" * 31), "no element can take"),
    ],
)
def test_malformed_payloads_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(SectionCorrupt, match=message):
        codec.decode(data, 10)


@pytest.mark.parametrize(("bits", "dtype"), [(8, "u1"), (16, "<u2"), (32, "<u4")])
def test_the_largest_step_has_one_sign(bits: int, dtype: str) -> None:
    # +2**15 and -2**15 are the same change mod 2**16: two payloads for one delta are one too many.
    largest = 1 << (bits - 1)
    good = payload(10, [planes([3], [-largest], 10)], bits=bits)
    assert codec.decode(good, 10, dtype).d.tolist() == [largest]
    with pytest.raises(SectionCorrupt, match="no element can take"):
        codec.decode(payload(10, [planes([3], [largest], 10)], bits=bits), 10, dtype)


def test_bits_after_the_last_are_refused() -> None:
    data = bytearray(payload(10, [TWO]))
    assert len(ALL) % 8
    data[-1] |= 0x80
    with pytest.raises(SectionCorrupt, match="bits after the last"):
        codec.decode(bytes(data), 10)


def test_a_payload_cannot_make_the_decoder_allocate() -> None:
    """The directory claims full segments of a large run; the payload has a few bytes."""
    num_segments = 1000
    for bits_each in (0, 1, 2**30 - 1):
        entries = [directory_entry(SEGMENT, SEGMENT, bits_each)] * num_segments
        header = HEADER.pack(2, 16, 0, num_segments * SEGMENT, num_segments * SEGMENT)
        data = (
            header
            + struct.pack(f"<{num_segments}Q", *entries)
            + bytes(num_segments * bits_each // 8 if bits_each < 2 else 64)
        )
        tracemalloc.start()
        with pytest.raises(SectionCorrupt, match=r"changes in|bytes for"):
            codec.decode(data, num_segments * SEGMENT)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 1 << 20  # the run itself would take 131 MB


def test_segments_cannot_borrow_bits_from_each_other() -> None:
    first, second = planes([5], [1], SEGMENT), planes([9], [1], SEGMENT)
    good = payload(2 * SEGMENT, [first, second])
    assert codec.decode(good, 2 * SEGMENT).idx.tolist() == [5, SEGMENT + 9]
    size = len("".join(first.values()))
    shifted = bytearray(good)
    struct.pack_into(
        "<2Q", shifted, HEADER.size, directory_entry(1, 0, size - 1), directory_entry(1, 0, size + 1)
    )
    with pytest.raises(SectionCorrupt):
        codec.decode(bytes(shifted), 2 * SEGMENT)


@pytest.fixture(scope="module")
def training_step() -> tuple[bytes, int]:
    """A payload of 70,000 elements with steps of many sizes."""
    rng = np.random.default_rng(9)
    old = (rng.standard_normal(70_000, dtype=np.float32) * 0.02).view(np.uint32) >> 16
    size = np.where(rng.random(70_000) < 0.9, 1, rng.integers(2, 3000, 70_000))
    step = (rng.random(70_000) < 0.01) * rng.choice([-1, 1], 70_000) * size
    encoded = codec.encode(old.astype(np.uint16), ((old + step) & 0xFFFF).astype(np.uint16))
    assert encoded is not None
    return encoded.data, 70_000


def refused_or_inside(data: bytes, num_elements: int) -> bool:
    """Decode; True if refused.  What is accepted must be a delta, and the only encoding of it."""
    try:
        delta = codec.decode(data, num_elements)
    except SectionCorrupt:
        return True
    assert delta.idx.size == 0 or int(delta.idx[-1]) < num_elements
    assert bool(np.all(delta.idx[1:] > delta.idx[:-1]))
    assert bool(np.all(delta.d != 0))
    assert payload_of(delta, num_elements) == data
    return False


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bits_are_refused_or_stay_inside_the_run(
    training_step: tuple[bytes, int], data: st.DataObject
) -> None:
    payload = bytearray(training_step[0])
    for _ in range(data.draw(st.integers(1, 4))):
        # Half of them in header and directory, where a flip does most.
        top = len(payload) - 1 if data.draw(st.booleans()) else HEADER.size + 15
        payload[data.draw(st.integers(0, top))] ^= data.draw(st.integers(1, 255))
    refused_or_inside(bytes(payload), training_step[1])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_cut_doubled_and_reordered_payloads_are_refused(
    training_step: tuple[bytes, int], data: st.DataObject
) -> None:
    payload, size = training_step
    cut = data.draw(st.integers(1, len(payload) - 1))
    for broken in (payload[:cut], payload[cut:], payload + payload[cut:], payload[cut:] + payload[:cut]):
        assert refused_or_inside(broken, size)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 300), st.integers(0, 20), st.integers(0, 20))
def test_random_bits_are_refused_or_stay_inside_the_run(
    bits: bytes, num_elements: int, changes: int, big: int
) -> None:
    header = HEADER.pack(2, 16, 0, num_elements, changes)
    refused_or_inside(
        header + struct.pack("<Q", directory_entry(changes, big, 8 * len(bits))) + bits, num_elements
    )


def test_the_reference_knows_the_published_widths() -> None:
    # A. Kiely's optimum for the density p is the least w with (1-p) ** 2**w <= golden ratio - 1.
    for places, taken in [(65_536, k) for k in (1, 10, 163, 655, 1703, 20_000, 40_000, 65_536)] + [
        (9, 1),
        (3, 3),
    ]:
        width = reference.width_of(places, taken)
        assert codec.rice_width(places, taken) == width
        p = taken / places
        if p < 0.3:  # where the approximation of the logarithm holds
            ideal = next(w for w in range(40) if (1 - p) ** (2**w) <= 0.6181)
            assert abs(width - ideal) <= (1 if taken * 2**width * 160 == 77 * (2 * places - taken) else 0)
