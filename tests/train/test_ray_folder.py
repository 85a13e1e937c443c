"""The folder of a private Ray cluster: it goes with its run, and after a run that was killed with the next one."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.train.cluster import own_folder

DRIVER = """
import sys, tempfile
from rose.train.cluster import own_folder
tempfile.tempdir = sys.argv[1]
with own_folder() as folder:
    (folder / "auth_token").write_text("secret")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def driver(place: Path) -> Iterator[subprocess.Popen[str]]:
    """Of a run that is there."""
    command = [sys.executable, "-c", DRIVER, str(place)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def folder_of(driver: subprocess.Popen[str]) -> Path:
    assert driver.stdout is not None
    return Path(driver.stdout.readline().strip())


def test_what_a_killed_driver_left_goes_with_the_next_run(place: Path, driver: subprocess.Popen[str]) -> None:
    left = folder_of(driver)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert (left / "auth_token").exists()
    with own_folder() as folder:
        assert list(place.iterdir()) == [folder]
    assert list(place.iterdir()) == []


def test_what_a_killed_driver_left_stays_while_its_cluster_runs(
    place: Path, driver: subprocess.Popen[str]
) -> None:
    left = folder_of(driver)
    driver.kill()
    driver.wait()
    raylet = place / "raylet"
    raylet.symlink_to("/bin/sh")
    command = [raylet, "-c", "read _", "raylet", f"--session_dir={left}/r/session"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as cluster:
        with own_folder():
            pass
        assert (left / "auth_token").exists()
        cluster.communicate()
    with own_folder():
        pass
    assert not left.exists()


def test_the_folder_of_a_run_that_lives_stays(place: Path, driver: subprocess.Popen[str]) -> None:
    other = folder_of(driver)
    with own_folder() as folder:
        assert folder != other
    assert list(place.iterdir()) == [other]
    assert (other / "auth_token").exists()


def test_a_folder_that_cannot_be_told_to_be_left_stays(place: Path) -> None:
    (place / "rose-ray-begun").mkdir()  # of a run that is just being begun
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "lock").touch()
    (place / "rose-ray-link").symlink_to(place / "elsewhere")
    with own_folder():
        pass
    assert sorted(path.name for path in place.iterdir()) == ["elsewhere", "rose-ray-begun", "rose-ray-link"]
    assert (place / "elsewhere" / "lock").exists()
