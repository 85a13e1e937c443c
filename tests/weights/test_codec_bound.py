"""The bounds that the weight benchmark compares with, on steps whose entropy is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.weight_transfer import weights_rivals as rivals
from benchmarks.weight_transfer.weights_data import Pair
from rose.weights import codec


def test_the_bounds_of_a_step_that_can_be_counted_by_hand() -> None:
    # 1024 elements of exponent 0x7F, of which 256 go up one place and 256 down one; 1024 more that never change.
    old = np.concatenate([np.full(1024, 0x3F80 + 64, np.uint16), np.full(1024, 0x4100, np.uint16)])
    d = np.zeros(2048, np.uint16)
    d[:512] = np.tile(np.array([1, 0xFFFF], np.uint16), 256)
    pair = Pair("w", (2048,), old, codec.add_difference(old, d))
    # A quarter of all change: 2048 * H(1/4); and one bit for each sign.
    assert rivals.shannon_bits(pair) == pytest.approx(2048 * (2 - 0.75 * np.log2(3)) + 512)
    # Who knows the exponents codes 512 of 1024 and nothing of the rest.
    assert rivals.side_information_bits(pair) == pytest.approx(1024 + 512)


def test_unchanged_tensors_cost_nothing_but_the_dense_rival() -> None:
    old = np.arange(5000, dtype=np.uint16)
    found = rivals.sizes([Pair("w", (5000,), old, old.copy())])
    assert found["changes"] == found["shannon"] == found["planes"] == found["gaps_u16_zstd"] == 0
    assert 0 < found["xor_zstd"] < 100
