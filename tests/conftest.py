"""Tests marked ``gpu`` are skipped where there is no NVIDIA GPU, and listed by name at the end of the run.

What engines that tests kill leave in shared memory goes with the run.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.shared_memory import SharedMemorySweep

_SKIPPED = pytest.StashKey[list[str]]()
_OUTPUT = "rose_gpu_skipped"


def has_gpu() -> bool:
    """The driver's control device: asking CUDA itself would cost every run an import of torch.

    ``ROSE_TEST_GPU=1``: the driver's stand-in is in its place (``benchmarks/gpu_check.py --rehearse``).
    """
    return Path("/dev/nvidiactl").exists() or os.environ.get("ROSE_TEST_GPU") == "1"


@pytest.fixture(scope="session", autouse=True)
def shared_memory_sweep() -> Iterator[None]:
    with SharedMemorySweep():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """All that is imported and collected stays: a million objects, which each full collection, during this and during every test, would go
    through in half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # bindings that look for leaks at the end would find all of it
        gc.enable()


@pytest.fixture
def only_new_garbage() -> None:
    """The collector looks at nothing older than the test: what others have imported takes it a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory as /dev/shm is: anybody's, and sticky."""
    path = Path(tempfile.mkdtemp(prefix="rose-public-", dir="/dev/shm"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput[_OUTPUT] = config.stash.get(_SKIPPED, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker collects all tests, so one list is as good as another."""
    node.config.stash[_SKIPPED] = getattr(node, "workeroutput", {}).get(_OUTPUT, [])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _beside_light_ones(items)
    skipped = config.stash.setdefault(_SKIPPED, [])
    if has_gpu():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
            skipped.append(item.nodeid)


def _beside_light_ones(items: list[pytest.Item]) -> None:
    """The quickstarts come before the policies: they start a dozen programs, and tests of policies are one process."""
    ours = [item for item in items if item.path.name == "test_quickstarts.py"]
    others = [item for item in items if item.path.name != "test_quickstarts.py"]
    at = next((at for at, item in enumerate(others) if item.nodeid.startswith("tests/policy/")), len(others))
    items[:] = [*others[:at], *ours, *others[at:]]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("tests that need a GPU")
    skipped = config.stash.get(_SKIPPED, [])
    if has_gpu():
        terminalreporter.line("this machine has one: they were run")
    elif not skipped:
        terminalreporter.line("none among the tests that were collected")
    else:
        terminalreporter.line(f"skipped, no GPU here: {len(skipped)}")
        for name in skipped:
            terminalreporter.line(f"  {name}")
