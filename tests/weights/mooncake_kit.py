"""A Mooncake master of our own, where Mooncake is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mooncake_cluster() -> Iterator[str]:
    """Its address for ``MooncakeStore``; skips, with the reason, where it cannot run."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        pytest.skip("Mooncake is not installed (extra relay-mooncake)")
    check = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, timeout=60
    )
    if check.returncode:
        pytest.skip(f"Mooncake cannot be loaded: {check.stderr.strip().splitlines()[-1][:200]}")
    rpc, metrics = _free_ports(2)
    command = [str(Path(spec.origin).with_name("mooncake_master")), f"--rpc_port={rpc}"]
    command += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics}"]
    master = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + 30
        while not _listens(rpc) or not _listens(metrics):
            if master.poll() is not None or time.monotonic() > until_s:
                pytest.skip("mooncake_master does not start here")
            time.sleep(0.05)  # another program's port: there is no event to wait for
        yield f"127.0.0.1:{rpc}?metrics_port={metrics}&segment_mib=128"
    finally:
        master.terminate()
        master.wait(10)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
