"""The accelerator's encoder writes the bytes of the CPU codec; its apply step gives the same bits and hash.

On a machine without a device the kernels run in Triton's interpreter, in a process of their own because Triton reads
that setting when it is imported; the test marked ``gpu`` runs the same cases on the device.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CASES = [
    ("empty", 0, 0.0, 16),
    ("one", 1, 1.0, 16),
    ("sparse", 70_000, 0.01, 16),
    ("unchanged", 3000, 0.0, 16),
    ("every-pattern", 9000, 0.3, 16),
    ("dense", 4097, 1.0, 16),
    ("fp8", 67_000, 0.02, 8),
]


def check(device: str) -> None:
    """All cases on ``device``; called in this process or in one that interprets."""
    import numpy as np
    import torch

    from rose.weights import codec
    from rose.weights import device as ours

    rng = np.random.default_rng(0)
    for name, size, density, width in CASES:
        old = rng.integers(0, 2**width, size, dtype=f"u{width // 8}")
        small = name in ("sparse", "fp8")
        step = rng.integers(1, 4 if small else 2**width, size).astype(old.dtype)
        new = np.where(rng.random(size) < density, old + step, old).astype(old.dtype)
        expected = codec.encode(old, new, start=12_345)
        assert expected is not None
        kind = np.uint8 if width == 8 else np.int16

        def put(bits: np.ndarray, kind: type = kind) -> torch.Tensor:
            return torch.from_numpy(bits.view(kind).copy()).to(device)

        found = ours.encode(put(old), put(new), start=12_345)
        assert found == expected, name
        if expected.num_changed:
            assert ours.encode(put(old), put(new), max_changes=expected.num_changed - 1) is None
        delta = codec.decode(expected.data, size, old.dtype)
        bits = put(old)
        idx = torch.from_numpy(delta.idx.astype(np.int64)).to(device)
        before, after, dh = ours.stage(bits, idx, put(delta.d), start=12_345)
        assert dh == expected.dh, name
        assert torch.equal(bits, put(old)), name
        ours.scatter(bits, idx, after)
        assert torch.equal(bits, put(new)), name
        ours.scatter(bits, idx, before)
        assert torch.equal(bits, put(old)), name


@pytest.mark.timeout(600)  # 6 s of a core that is free
def test_the_interpreted_kernels_agree_with_the_cpu_codec() -> None:
    pytest.importorskip("triton")
    code = "from tests.weights.test_device import check; check('cpu'); print('all agree')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert "all agree" in done.stdout, done.stderr[-3000:]


@pytest.mark.gpu
def test_the_device_agrees_with_the_cpu_codec() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    check("cuda")
