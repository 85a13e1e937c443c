"""What a GPU stage may keep: a contract whose tests ran, also without this project's plugins, and steps beside a load that ran."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.gpu import common, device, figures, train
from rose.config import validate
from rose.coserve.cuda_pages import CudaPagePool
from rose.coserve.node_config import NodeConfig
from rose.errors import LedgerError
from rose.units import PAGE_BYTES
from tests.coserve.memory_driver import MemoryDriver

GIB = 1 << 30
pytestmark = pytest.mark.timeout(300)
WITHOUT_GPU = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")


# --- the tests marked gpu, on a machine that lacks what pyproject.toml configures

LACKS = ("-p", "no:asyncio", "-p", "no:timeout", "-p", "no:hypothesispytest")


FILES = (*device.CONTRACT, *train.CONTRACT)


def collected(*options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *LACKS,
        *options,
        "--collect-only",
        "-m",
        "gpu",
        *FILES,
    ]
    return subprocess.run(
        command, cwd=common.ROOT, capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip


def test_the_tests_marked_gpu_are_found_without_the_plugins_of_this_project() -> None:
    done = collected("-c", str(device.PYTEST_INI), "--rootdir", str(common.ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    for file in FILES:
        assert f"{file}::" in done.stdout


def junit(*cases: tuple[str, str, str]) -> str:
    tests = "".join(
        f'<testcase classname="{file}" name="{name}">{body}</testcase>' for file, name, body in cases
    )
    return f"<testsuites><testsuite>{tests}</testsuite></testsuites>"


SKIPPED, FAILED = '<skipped message="no device"/>', '<failure message="no"/>'


def test_a_contract_is_the_tests_that_passed_and_the_names_of_those_that_did_not_run() -> None:
    report = junit(
        ("tests.a.test_x", "one", ""), ("tests.a.test_x", "two[y]", SKIPPED), ("tests.test_z", "three", "")
    )
    assert figures.contract(report, ["tests/a/test_x.py", "tests/test_z.py"]) == {
        "passed": 2,
        "skipped": 1,
        "skipped_names": ["tests.a.test_x::two[y]"],
    }


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (junit(), "no test ran of tests/test_z.py"),
        (junit(("tests.test_z", "one", SKIPPED)), "no test ran of tests/test_z.py"),
        (junit(("tests.test_z", "one", ""), ("tests.test_z", "two", FAILED)), "1 tests failed: tests.test_z::two"),
        (junit(("tests.test_zz", "one", "")), "no test ran of tests/test_z.py"),
    ],
)  # fmt: skip
def test_a_contract_that_ran_no_test_is_not_kept(report: str, reason: str) -> None:
    with pytest.raises(LedgerError, match=reason):
        figures.contract(report, ["tests/test_z.py"])


# --- a load that did not run is no load


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryDriver:
    driver = MemoryDriver(capacity_pages=4096)
    monkeypatch.setattr(common, "pool", lambda **settings: CudaPagePool(driver=driver, **settings))
    return driver


HERE = common.Place(None, "cpu", 32 * PAGE_BYTES, 1)


def test_what_was_moved_beside_the_steps_is_told(memory: MemoryDriver) -> None:
    with common.moving_here(HERE) as moved:
        at_first = moved()

        def steps() -> list[float]:
            while moved() == at_first:
                time.sleep(0.001)
            return [1.0]

        found, rate = common.beside(moved, steps)
    assert found == [1.0]
    assert rate > 0
    told = figures.load(rate, HERE.gib)
    assert told["load_gib_s"] == pytest.approx(rate / GIB)
    assert told["load_met"] is (rate >= 0.9 * HERE.gib)


def test_a_mover_that_can_map_nothing_fails_its_stage(memory: MemoryDriver) -> None:
    memory.fail_at = {"create": 1}
    with pytest.raises(LedgerError, match="OUT_OF_MEMORY"), common.moving_here(HERE):
        pytest.fail("the steps must not begin")


def test_a_mover_that_dies_while_the_steps_run_fails_its_stage(memory: MemoryDriver) -> None:
    def steps() -> None:
        memory.capacity = 0
        for thread in threading.enumerate():
            if isinstance(thread, common.Background):
                thread.join(30)

    with pytest.raises(LedgerError, match="free on the device"), common.moving_here(HERE):
        steps()


def test_an_arm_of_quick_steps_lasts_until_a_load_in_pieces_has_been_seen() -> None:
    """Forty steps of a millisecond were over between two pieces of a load that ran as it should."""
    found, rate = common.beside(
        lambda: int(16 * time.monotonic()), lambda: common.arm_times(HERE, lambda: None)
    )
    assert len(found) > HERE.steps
    assert 0 < rate < 32


def test_steps_beside_nothing_are_not_kept() -> None:
    with pytest.raises(LedgerError, match="nothing ran beside"):
        common.beside(lambda: 7, lambda: [1.0])


@WITHOUT_GPU
def test_a_peer_that_cannot_move_memory_did_not_start() -> None:
    with pytest.raises(LedgerError, match="'traffic' did not start"):
        common.Peer("traffic", GIB)


@pytest.fixture
def dead_peer(monkeypatch: pytest.MonkeyPatch) -> common.Peer:
    monkeypatch.setenv(common.REHEARSE, "1")
    peer = common.Peer("decode")
    assert peer.count() >= 0
    os.kill(peer.pid, signal.SIGKILL)
    os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)
    return peer


def test_a_peer_that_dies_is_noticed_at_its_next_answer_and_at_the_end(dead_peer: common.Peer) -> None:
    with pytest.raises(LedgerError, match="'decode' has died"):
        dead_peer.count()
    with pytest.raises(LedgerError, match="'decode' has died"), dead_peer:
        pass


def test_no_copy_of_weights_outlives_the_stage_that_made_it(tmp_path: Path) -> None:
    """The same run's copies of an earlier try are of other versions, and refused: the stage would fail at each try after its first."""
    from benchmarks.gpu import weights

    settings = weights.node_settings("cpu", tmp_path / "memory", tmp_path / "disk")
    config = validate(NodeConfig, settings)
    assert config.weights_dir == tmp_path / "disk"
