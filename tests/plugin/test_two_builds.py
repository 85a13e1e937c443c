"""Production keeps its process for weeks: an agent of another build beside it is refused by name.

Each side runs from its own copy of the packages; another format on one side is a newer or an older one on the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rose.errors import RoseError
from rose.node_client import ControlClient
from tests.builds import ROOT, copy_of_the_build
from tests.plugin.churn import TOTAL_PAGES, Child
from tests.plugin.test_frozen import write_host

pytestmark = pytest.mark.timeout(300)
FIX = "run the same ROSE version in every process of the device"
LAYOUT, RECORDS = "rose/coserve/record_layout.py", "rose/coserve/records.py"
CHANGES = {
    "a newer ledger": (LAYOUT, "\nVERSION = 3\n", "\nVERSION = 4\n", "ledger version"),
    "an older ledger": (LAYOUT, "\nVERSION = 3\n", "\nVERSION = 2\n", "ledger version"),
    "a report with another field": (
        RECORDS,
        "    touched_bytes: int = 0\n",
        "    touched_bytes: int = 0\n    new_bytes: int = 0\n",
        "was written by another ROSE version",
    ),
}
LOOK = """
import os
from rose.coserve.node_dir import NodeDir
reader = NodeDir(os.environ["ROSE_DIR"]).serving_lease()
record = reader.read()
print(record.phase, record.reserved_pages, record.errors, reader.alive())
"""
"""Production's lease as production's own build reads it."""


def until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < until_s, f"{what} did not come true"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("other", "change"),
    [
        ("plugin", "a newer ledger"),
        ("plugin", "a report with another field"),
        ("agent", "an older ledger"),
        ("agent", "a report with another field"),
    ],
)
def test_a_build_of_another_format_is_refused_by_name_and_production_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, other: str
) -> None:
    file, old, new, says = CHANGES[change]
    build = copy_of_the_build(tmp_path / "build", file=file, old=old, new=new)
    here = {"plugin": ROOT, "agent": ROOT} | {other: build}
    tokens = write_host(tmp_path, monkeypatch)
    serving = Child("serving", tmp_path / "model")
    monkeypatch.setenv("PYTHONPATH", str(here["plugin"]))
    monkeypatch.chdir(here["plugin"])
    serving.start()
    with (tmp_path / "agent.log").open("w") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "rose.cli", "node", "run", "--config", str(tmp_path / "node.toml")],
            stdout=log,
            stderr=log,
            cwd=here["agent"],
            env={**os.environ, "PYTHONPATH": str(here["agent"])},
        )
    client = ControlClient(tmp_path / "n", tokens)
    waits_for = ""

    def refused() -> bool:
        nonlocal waits_for
        assert serving.resident_pages() == TOTAL_PAGES, "nothing is lent to one that is not understood"
        try:
            waits_for = client.status()["engine"]["waits_for"] or ""
        except RoseError:
            return False
        return "serving.lease" in waits_for

    try:
        until(refused, "the agent names the file")
        assert says in waits_for
        assert FIX in waits_for
        assert client.status()["engine"]["starts"] == 0
        lease = subprocess.run(
            [sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, cwd=here["plugin"]
        )
        assert lease.stdout.split() == ["2", str(TOTAL_PAGES), "0", "True"], (
            "production is ready, without an error"
        )
        assert serving.process.poll() is None
    finally:
        client.close()
        agent.terminate()
        agent.wait(60)
        serving.kill()
