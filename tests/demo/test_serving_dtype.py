"""What production of the demo computes in."""

from __future__ import annotations

import pytest

from rose.demo.programs import serving_dtype


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", "bfloat16"),
        ("flags\t\t: fpu avx2 amx_bf16 amx_tile", "bfloat16"),
        ("Features\t: fp asimd bf16", "bfloat16"),
        ("flags\t\t: fpu avx2 vaes", "float32"),
    ],
)
def test_production_computes_in_what_its_cpu_multiplies(flags: str, dtype: str) -> None:
    assert serving_dtype(f"processor\t: 0\nmodel name\t: x\n{flags}\nbogomips\t: 1\n") == dtype
