"""Production keeps its process for weeks: an agent of another build beside it works with it where their formats agree, and is refused by name
where they do not.

Each side runs from its own copy of the packages; another format on one side is a newer or an older one on the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rose.auth import Tokens
from rose.coserve.node_dir import NodeDir
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
    "other numbers of a policy": (
        "rose/policy/coserving/serving.py",
        "\nSTRANDED_AFTER_S = 3.0\n",
        "\nSTRANDED_AFTER_S = 2.0\n",
        "",
    ),
}
SAME_FORMATS = "other numbers of a policy"
LOOK = """
import os
from rose.coserve.node_dir import NodeDir
reader = NodeDir(os.environ["ROSE_DIR"]).serving_lease()
record = reader.read()
print(record.phase, record.reserved_pages, record.errors, reader.alive())
"""
"""Production's lease as production's own build reads it."""
READY = "2"


def until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < until_s, f"{what} did not come true"
        time.sleep(0.05)


@dataclass
class Production:
    """It, the packages it runs from, and what an agent beside it needs."""

    folder: Path
    build: Path
    tokens: Tokens
    child: Child

    def lease(self) -> list[str]:
        return subprocess.run(
            [sys.executable, "-c", LOOK],
            capture_output=True,
            text=True,
            check=True,
            cwd=self.build,
            env=environment(self.build, self.folder),
        ).stdout.split()


def environment(build: Path, folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(build), "ROSE_DIR": str(folder / "n")}


def build_with(folder: Path, change: str | None) -> Path:
    if change is None:
        return ROOT
    file, old, new, _ = CHANGES[change]
    return copy_of_the_build(folder / "build", file=file, old=old, new=new)


class Productions:
    """One at a time, kept for all agents that are tried beside it one after the other: its start is what takes long."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._running: tuple[str | None, Production] | None = None

    def of(self, change: str | None) -> Production:
        """Of the build with this change; None: of ours."""
        if self._running is None or self._running[0] != change:
            self.end()
            self._running = change, self._start(change)
        return self._running[1]

    def _start(self, change: str | None) -> Production:
        folder = self._folders.mktemp("production")
        build = build_with(folder, change)
        child = Child("serving", folder / "model", interpreter=change is not None)
        with pytest.MonkeyPatch.context() as patch:
            tokens = write_host(folder, patch)
            patch.setenv("PYTHONPATH", str(build))
            patch.chdir(build)
            child.start()
        return Production(folder, build, tokens, child)

    def end(self) -> None:
        if self._running is not None:
            self._running[1].child.kill()
            self._running = None


@pytest.fixture(scope="module")
def productions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Productions]:
    productions = Productions(tmp_path_factory)
    yield productions
    productions.end()


@contextmanager
def agent_beside(production: Production, build: Path, log_path: Path) -> Iterator[ControlClient]:
    """Its agent runs from that build; who asks it, from ours."""
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rose.cli", "node", "run", f"--config={production.folder / 'node.toml'}"],
            stdout=log,
            stderr=log,
            cwd=build,
            env=environment(build, production.folder),
        )
    client = ControlClient(production.folder / "n", production.tokens)
    try:
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize(
    ("plugin", "agent"),
    [
        (None, SAME_FORMATS),
        # The newer one is on either side.
        pytest.param(SAME_FORMATS, None, marks=pytest.mark.conformance),
    ],
)
def test_builds_whose_formats_agree_lend_and_give_back_together(
    tmp_path: Path, productions: Productions, plugin: str | None, agent: str | None
) -> None:
    production = productions.of(plugin)
    serving, node = production.child, NodeDir(production.folder / "n")

    def is_lent() -> bool:
        with closing(node.rank("rollout", 0)) as reader:
            worker = reader.read()
        return worker is not None and worker.resident_pages > 2 and serving.resident_pages() < TOTAL_PAGES - 2

    with agent_beside(production, build_with(tmp_path, agent), tmp_path / "agent.log") as client:
        until(is_lent, "memory is lent")
        assert client.status()["serving"]["support"] == "elastic"
        answer = client.off(30.0, engine=False)

        assert answer["given_back"]
        until(lambda: serving.resident_pages() == TOTAL_PAGES, "production has all of its memory")
        assert production.lease() == [READY, str(TOTAL_PAGES), "0", "True"]


@pytest.mark.parametrize(
    ("plugin", "agent"),
    [
        (None, "an older ledger"),
        (None, "a newer ledger"),
        (None, "a report with another field"),
        # As an older one on the other side.
        pytest.param("a newer ledger", None, marks=pytest.mark.conformance),
        pytest.param("a report with another field", None, marks=pytest.mark.conformance),
    ],
)
def test_a_build_of_another_format_is_refused_by_name_and_production_goes_on(
    tmp_path: Path, productions: Productions, plugin: str | None, agent: str | None
) -> None:
    production = productions.of(plugin)
    says = CHANGES[agent or plugin or ""][3]
    serving, build = production.child, build_with(tmp_path, agent)
    waits_for = ""

    def refused(client: ControlClient) -> bool:
        nonlocal waits_for
        assert serving.resident_pages() == TOTAL_PAGES, "nothing is lent to one that is not understood"
        try:
            waits_for = client.status()["engine"]["waits_for"] or ""
        except RoseError:
            return False
        return "serving.lease" in waits_for

    with agent_beside(production, build, tmp_path / "agent.log") as client:
        until(lambda: refused(client), "the agent names the file")
        assert says in waits_for
        assert FIX in waits_for
        assert client.status()["engine"]["starts"] == 0
        assert production.lease() == [READY, str(TOTAL_PAGES), "0", "True"], (
            "production is ready, without an error"
        )
        assert serving.process.poll() is None
