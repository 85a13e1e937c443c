"""``docker pause`` of agent and rollout engine together: production is outside, and so is the sentinel."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rose.auth import Tokens
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import RankState, ServingLease
from rose.errors import RoseError
from rose.node_client import ControlClient
from rose.proc import free_port
from rose.proc_tree import is_dying
from tests.freezer import Freezer, freezer
from tests.plugin.churn import TOTAL_PAGES, Child
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(300)
FAKE_ENGINE = Path(__file__).parents[1] / "coserve" / "fake_engine.py"
CONFIG = """
node_id = "n0"
dir = "{dir}"
token_file = "{tokens}"
mode = "on"
[serving]
[engine]
model = "policy"
command = ["{python}", "{engine}"]
port = {port}
max_model_len = 256
stop_grace_s = 0.2
restart_pause_s = 0.001
sched = "normal"
log_path = "{log}"
env = {{ FAKE_REPORT = "{report}" }}
[lending]
reclaim_deadline_s = 0.5
grow_period_s = 0.05
cool_down_s = 0.2
growth_window_s = 1.0
use_window_s = 0.01
period_s = 0.02
"""


def until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < until_s, f"{what} did not come true"
        time.sleep(0.02)


@dataclass
class Host:
    """Production outside, an agent and its engine inside of a group that can be frozen."""

    group: Freezer
    serving: Child
    dir: NodeDir
    report: Path
    tokens: Tokens

    def held(self) -> int:
        """What the rollout engine has mapped, by the last word of its worker; a frozen one cannot change it."""
        reader = self.dir.rank("rollout", 0)
        record: RankState | None = reader.read() if reader.alive() else None
        reader.close()
        return record.resident_pages if record is not None else 0

    def lease(self) -> ServingLease:
        record = self.dir.serving_lease().read()
        assert record is not None
        return record

    def fits(self) -> None:
        before = self.held()
        assert self.serving.resident_pages() + min(before, self.held()) <= TOTAL_PAGES, (
            "a page is there twice"
        )

    def is_lent(self) -> bool:
        self.fits()
        return self.held() > 2 and self.serving.resident_pages() < TOTAL_PAGES - 2

    def all_back(self) -> bool:
        self.fits()
        lease = self.lease()
        return self.serving.resident_pages() == TOTAL_PAGES and not lease.stranded_pages and not lease.errors


def write_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tokens:
    """Node directory ``n``, ``node.toml``, its tokens and a ``model`` below ``folder``, for production in this environment."""
    (folder / "n").mkdir(mode=0o700)
    monkeypatch.setenv("ROSE_DIR", str(folder / "n"))
    write_tiny_model(folder / "model")
    tokens = Tokens.generate()
    tokens.save(folder / "tokens.toml")
    (folder / "node.toml").write_text(
        CONFIG.format(
            dir=folder / "n",
            tokens=folder / "tokens.toml",
            python=sys.executable,
            engine=FAKE_ENGINE,
            port=free_port(),
            log=folder / "engine.log",
            report=folder / "report",
        )
    )
    return tokens


@pytest.fixture(params=[pytest.param("v1", marks=pytest.mark.conformance), "v2"])
def host(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    tokens = write_host(tmp_path, monkeypatch)
    node = NodeDir(tmp_path / "n")
    with freezer(request.param) as group:
        serving = Child("serving", tmp_path / "model")
        command = group.command(
            sys.executable, "-m", "rose.cli", "node", "run", "--config", str(tmp_path / "node.toml")
        )
        with (tmp_path / "agent.log").open("w") as log:
            agent = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            serving.start()
            host = Host(group, serving, node, tmp_path / "report", tokens)
            until(host.is_lent, "memory is lent")
            yield host
        finally:
            group.thaw()
            agent.terminate()
            agent.wait(60)
            serving.kill()


def test_production_has_all_back_from_a_frozen_peer_as_soon_as_the_kernel_lets_it(host: Host) -> None:
    client = ControlClient(host.dir.path, host.tokens)
    # The engine may be up, and hold memory, before the sentinel has left the group that it was started in.
    until(lambda: client.status()["engine"]["sentinel"]["outside"] is True, "the sentinel is outside")
    engine = int(json.loads(host.report.read_text())["pid"])
    host.group.freeze()
    if host.group.version == "v2":
        until(host.all_back, "all memory is back while the agent is frozen")
        assert host.group._frozen()
    else:
        until(lambda: is_dying(engine), "the sentinel killed the engine, which dies at the thaw")
        until(lambda: host.lease().stranded_pages > 0, "production says what it cannot get")
        held, said = host.held(), host.dir.rollout_lease().read()
        assert said is not None
        # Frozen while it grew, it has said more than it has mapped: production goes by what it said.
        assert held <= host.lease().stranded_pages <= max(held, said.reserved_pages)
        assert host.lease().lent_pages == 0, "nothing more is lent"
        host.fits()
    host.group.thaw()
    if host.group.version == "v1":
        until(lambda: host.held() != held, "the dead engine's pages are gone")

    def lends_again() -> bool:
        try:
            return client.status()["engine"]["starts"] >= 2 and host.is_lent()
        except RoseError:
            return False

    until(lends_again, "the agent goes on by itself, with another engine")
    assert host.lease().errors == 0
    client.close()
