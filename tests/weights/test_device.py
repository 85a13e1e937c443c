"""The accelerator's encoder writes the bytes of the CPU codec, and a publisher whose tensors are there uses it.

On a machine without a device the kernels run in Triton's interpreter, in a process of their own because Triton reads
that setting when it is imported; the test marked ``gpu`` runs the same cases on the device.
"""

from __future__ import annotations

import dataclasses
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
        assert ours.encode_against(old, put(new), start=12_345) == expected, name


def check_publisher(device: str) -> None:
    """What a publisher of tensors on ``device`` sends is what one of the same tensors on the host sends, a delta and a raw tensor."""
    import torch

    from rose.testing.memory_store import MemoryStore
    from rose.weights import device as ours
    from rose.weights import source
    from rose.weights.params import WeightsParams
    from rose.weights.publisher import WeightPublisher

    encoded = []
    real = ours.encode_against
    ours.encode_against = lambda *args, **how: encoded.append(args[0].size) or real(*args, **how)
    sent = []
    for there in (False, True):
        source.on_gpu = lambda _, there=there: there
        generator = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)
            for name, shape in {"few": (700, 100), "all": (50, 8), "none": (64,)}.items()
        }
        store = MemoryStore()
        publisher = WeightPublisher(
            lambda w=weights: w, store, "run", 1, WeightsParams(fragment_elements=65_536)
        )
        publisher.publish(1)
        weights["few"].view(-1)[::97] += 0.25
        weights["all"] *= -3.0
        report = publisher.publish(2)
        publisher.close()
        assert report.kind == "delta"
        keys = [
            key for key in store.list("run/") if not key.endswith(".json")
        ]  # a manifest tells when it was made
        sent.append({key: store.get(key) for key in keys})
    assert sent[0] == sent[1]
    assert sum(encoded) == 700 * 100 + 50 * 8 + 64


@pytest.mark.timeout(600)  # 6 s of a core that is free
def test_the_interpreted_kernels_agree_with_the_cpu_codec() -> None:
    pytest.importorskip("triton")
    code = "from tests.weights import test_device as t; t.check('cpu'); t.check_publisher('cpu'); print('all agree')"
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
    check_publisher("cuda")


def test_a_device_that_cannot_encode_leaves_it_to_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No compiler for Triton, say, or no memory left: what is published is the same."""
    import numpy as np

    from rose.testing.memory_store import MemoryStore
    from rose.weights import baseline
    from rose.weights.publisher import WeightPublisher
    from rose.weights.source import RawBits, collect

    asked = []

    def fails(start: int, stop: int) -> None:
        asked.append(start)
        raise RuntimeError("no compiler")

    bits = np.arange(4000, dtype=np.uint16)
    monkeypatch.setattr(
        "rose.weights.publisher.collect",
        lambda *args, **how: [
            dataclasses.replace(piece, read_there=fails) for piece in collect(*args, **how)
        ],
    )
    publisher = WeightPublisher(lambda: {"w": RawBits(bits, "BF16")}, MemoryStore(), "run", 1)
    publisher.publish(1)
    with caplog.at_level("WARNING", logger=baseline.__name__):
        for version in (2, 3):
            bits[version] ^= 1
            assert publisher.publish(version).num_changed == 1
    publisher.close()
    assert len(asked) == 1
    assert "encoded by the host" in caplog.text
