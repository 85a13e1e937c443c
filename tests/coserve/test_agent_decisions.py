"""What a node agent decided comes out again from its decision log; a changed policy is found; nothing grows."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rose.cli import app
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import NodeState
from rose.decisions.event_format import LENDING
from rose.decisions.log import DecisionLog, logs, replay
from rose.errors import LedgerError
from rose.policy.baselines import POLICIES, make_lending
from rose.policy.lending_events import Mode, ModeSet, Phase, RolloutReported, ServingReported, Tick
from tests.coserve.conftest import TOTAL_PAGES, Device, alive, stop_sentinel, until


async def test_bursts_kills_and_another_policy_replay_to_the_last_action(
    device: Device, tmp_path: Path
) -> None:
    folder = tmp_path / "decisions"
    production = device.produce()
    agent = device.agent(
        "stubborn",
        lending={"reclaim_deadline_s": 0.2, "backstop_s": 0.5},
        decisions={"directory": str(folder)},
    )
    await until(lambda: device.resident_pages() == 16, "all lent")
    pid = device.report()["pid"]
    stop_sentinel(agent)
    production.used = 14
    await until(lambda: not alive(pid), "killed")
    production.used = 0
    await until(lambda: agent.policy.lend_pages > 0, "lent again")
    agent.change(policy="paper")
    await until(lambda: agent.policy.lend_pages == TOTAL_PAGES - 4, "lent by the other policy")
    agent.change(mode=Mode.OFF)
    await device.stop_agents()

    assert [path.name for path in logs(folder)] == ["lending-n0-1.rose", "lending-n0-2.rose"]
    ours, paper = (replay(path) for path in logs(folder))
    assert ours.difference is None
    assert paper.difference is None
    assert ours.num_actions["KillRollout"] >= 1
    assert ours.num_actions["SetLend"] >= 3
    assert paper.num_actions["SetLend"] >= 2
    assert not ours.torn
    for path in logs(folder):
        assert path.stat().st_mode & 0o077 == 0
    found = CliRunner().invoke(app, ["replay", str(folder)])
    assert found.exit_code == 0
    assert "KillRollout" in found.output


async def test_an_agent_that_takes_over_another_policy_logs_what_that_one_answers(
    device: Device, tmp_path: Path
) -> None:
    folder = tmp_path / "decisions"
    with NodeDir(device.dir).node_writer() as writer:  # an agent that was killed left this
        paper = POLICIES.index("paper")
        writer.write(NodeState(mode=Mode.ON, has_serving=1, policy=paper, heartbeat_ns=time.monotonic_ns()))
    device.produce()
    agent = device.agent(decisions={"directory": str(folder)})
    await until(lambda: device.resident_pages() > 0, "lent")
    assert agent.policy_name == "paper"
    await device.stop_agents()

    (path,) = logs(folder)
    found = replay(path)
    assert found.difference is None
    assert found.num_actions["SetLend"] >= 2


def record(folder: Path, *, rounds: int, name: str = "rose", max_bytes: int = 10**9) -> list[int]:
    """A device under a load that swings for minutes, looked at as an agent does; the loans."""
    policy = make_lending(name)
    log = DecisionLog(folder, "lending-n", LENDING, policy, max_bytes=max_bytes, max_files=2)
    log.roll()
    loans: list[int] = []
    held = 0
    for number in range(rounds):
        at_s = 100.0 + 0.05 * number
        used = int(300 + 250 * math.sin(number / 300) + 180 * (number % 700 > 690))
        events = [
            ModeSet(at_s=at_s, mode=Mode.ON) if number % 1000 == 0 else Tick(at_s=at_s),
            ServingReported(
                at_s=at_s,
                alive=number % 1500 > 40,
                phase=Phase.READY,
                total_pages=1000,
                reserved_pages=used,
                used_pages=used,
                pressure_seq=number // 900,
            ),
            RolloutReported(at_s=at_s, alive=True, phase=Phase.READY, reserved_pages=held),
        ]
        for event in events:
            log.record(event, policy.handle(event))
        held += max(-90, min(90, policy.lend_pages - held))
        loans.append(policy.lend_pages)
        log.flush()
    log.close()
    return loans


@pytest.mark.parametrize("name", ["rose", "paper", "static"])
def test_files_of_a_long_run_are_few_and_each_replays_from_the_state_it_starts_with(
    tmp_path: Path, name: str
) -> None:
    loans = record(tmp_path, rounds=2500, name=name, max_bytes=30_000)
    assert len(set(loans)) > 1
    paths = logs(tmp_path)
    assert len(paths) == 2
    assert int(paths[0].stem.rpartition("-")[2]) > 1
    for path in paths:
        found = replay(path)
        assert found.difference is None
        assert found.num_events > 0


def test_a_policy_that_would_lend_otherwise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, rounds=1500)
    monkeypatch.setattr("rose.policy.lending_policy.LendingPolicy.watermark_pages", property(lambda self: 0))
    found = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert found.exit_code == 1
    assert "ServingReported" in found.output


def test_one_folder_may_hold_the_logs_of_several_nodes(tmp_path: Path) -> None:
    record(tmp_path, rounds=200)
    other = DecisionLog(tmp_path, "lending-n-1", LENDING, make_lending("rose"), max_bytes=1, max_files=1)
    other.roll()
    other.close()
    assert [path.name for path in logs(tmp_path)] == ["lending-n-1.rose", "lending-n-1-1.rose"]


def test_a_file_that_is_no_log_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "x-1.rose"
    path.write_bytes(os.urandom(64))
    with pytest.raises(LedgerError, match=r"x-1\.rose"):
        replay(path)
