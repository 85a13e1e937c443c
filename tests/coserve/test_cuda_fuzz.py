"""Arenas on the stand-in for CUDA's driver, in random order, with failing calls and processes that are killed: no fault, no leak."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.coserve import cuda_driver
from rose.coserve.cuda_driver import CudaDriver
from tests.coserve import fakecuda
from tests.coserve.cuda_fuzz import QUIRKS, lives, race
from tests.coserve.fakecuda import Device

pytestmark = fakecuda.ONLY_WITHOUT_A_GPU


@pytest.mark.parametrize("quirks", sorted(set(QUIRKS)))
def test_any_order_of_calls_of_which_any_may_fail_leaves_no_fault_and_no_leak(
    tmp_path: Path, quirks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "_PATIENT_PAUSE_S", 0.0)
    with Device(tmp_path, pages=20).plugged(seed=1, quirks=quirks) as gpu:
        calls, refused = lives(gpu, range(20))
        assert gpu.left() == {}
    assert calls > 600
    assert refused > 20


def test_processes_race_for_one_device_while_others_are_killed(tmp_path: Path) -> None:
    device = Device(tmp_path, pages=20)
    done = race(device, seed=1, num_kills=3)
    assert done["killed"] >= 3
    assert done["refused"] > 0
    with device.plugged() as gpu:
        CudaDriver(0)
        assert gpu.left() == {}
