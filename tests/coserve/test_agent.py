"""The node agent on a device: lends, cuts, kills, restarts, reports, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from rose.coserve.agent import NodeAgent
from rose.coserve.node_dir import NodeDir
from rose.coserve.record_layout import pack_found
from rose.coserve.records import Mode, NodeState, Phase, RankState
from rose.coserve.state_file import StateFile
from rose.errors import ConfigError, EngineError, LedgerError
from rose.policy.compat import Support
from rose.policy.lending_events import ALL_PAGES
from rose.proc import Child
from rose.units import PAGE_BYTES
from tests.coserve.conftest import (
    BY_DEFAULT,
    TOTAL_PAGES,
    Device,
    alive,
    control,
    lent,
    ready,
    ready_in_the_idle_class,
    share_set,
    stop_sentinel,
    until,
)

pytestmark = pytest.mark.timeout(300)  # some engines are of the idle class


async def test_the_engine_gets_its_role_its_class_and_its_flags_and_no_secret_in_argv(device: Device) -> None:
    device.produce()
    agent = device.agent(engine={"args": ["--num-gpu-blocks-override", "64"], **BY_DEFAULT})
    await ready_in_the_idle_class(device, agent)
    report = device.report()
    argv = " ".join(report["argv"][1:])
    assert argv == (
        f"policy --host 127.0.0.1 --port {agent.config.engine.port} --served-model-name policy "
        '--max-model-len 256 --enable-scale-out --weight-transfer-config {"backend":"rose"} '
        "--logprobs-mode processed_logprobs --enforce-eager --no-async-scheduling --num-gpu-blocks-override 64"
    )
    env = report["env"]
    assert env["ROSE_ROLE"] == "rollout"
    assert env["ROSE_DIR"] == str(device.dir)
    assert env["VLLM_PLUGINS"] == "rose"
    assert env["ROSE_NODE_TOKEN"] == env["VLLM_API_KEY"] == agent.engine.token
    assert "ROSE_TOKEN_FILE" not in env
    assert report["idle_class"]
    secrets = {agent.engine.token, device.tokens.node, device.tokens.relay}
    seen = argv + device.log_path.read_text() + repr(agent.config) + repr(agent.status())
    assert not [secret for secret in secrets if secret in seen]


async def test_beside_production_its_cache_is_as_large_as_what_could_ever_be_lent(device: Device) -> None:
    device.produce()
    agent = device.agent(serving={"floor_pages": 5})
    await ready(device, agent)
    argv = device.report()["argv"]
    assert argv[argv.index("--kv-cache-memory-bytes") + 1] == str(TOTAL_PAGES * PAGE_BYTES)
    assert "--enforce-eager" in argv


async def test_an_engine_that_shares_compute_only_waits_until_somebody_says_what_it_may_take(
    device: Device,
) -> None:
    production = device.produce()
    production.support = Support.COMPUTE_ONLY
    agent = device.agent()
    await until(lambda: "lending.max_lend_pages is not set" in (agent.waits_for() or ""))
    assert agent.engine.num_starts == 0
    agent.change(max_lend_pages=7)
    await ready(device, agent)
    argv = device.report()["argv"]
    assert argv[argv.index("--kv-cache-memory-bytes") + 1] == str(7 * PAGE_BYTES)


async def test_an_agent_lifts_what_a_killed_one_left_though_it_wants_no_engine(
    device: Device, left_group: Path
) -> None:
    device.produce()
    device.agent(mode="off")
    await until(lambda: (left_group / "cpu.idle").read_text().strip() == "0")


async def test_the_share_of_an_engine_that_has_ended_is_nobodys_trouble(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """Its cgroup is gone.  Said once an agent's life, the warning would not come again where it is true."""
    device.produce()
    agent = device.agent(engine=BY_DEFAULT)
    await ready_in_the_idle_class(device, agent)
    agent.engine.hurry(True)
    await agent.set_engine(False)
    await until(lambda: not agent.engine.running)
    agent.engine.hurry(not agent.engine.hurried)
    assert "cannot be changed" not in caplog.text


async def test_an_engine_that_production_has_outgrown_is_started_anew(device: Device) -> None:
    """Its cache was made for the budget of a production that shares compute only; the next one could lend all that it has."""
    production = device.produce()
    production.support = Support.COMPUTE_ONLY
    agent = device.agent(lending={"max_lend_pages": 7})
    await ready(device, agent)
    production.support = Support.ELASTIC
    agent.change(max_lend_pages=ALL_PAGES)
    await until(lambda: agent.engine.num_starts == 2)
    await ready(device, agent)
    argv = device.report()["argv"]
    assert argv[argv.index("--kv-cache-memory-bytes") + 1] == str(TOTAL_PAGES * PAGE_BYTES)

    production.support = Support.COMPUTE_ONLY  # addresses that nothing is lent behind cost nothing
    agent.change(max_lend_pages=7)
    await until(lambda: agent.could_lend_pages == 7)
    assert agent.outgrown() is None


async def test_a_policy_that_does_not_fit_beside_production_is_not_started(
    device: Device, tmp_path: Path
) -> None:
    device.produce()
    model = tmp_path / "policy"
    model.mkdir()
    (model / "config.json").touch()
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(1 << 42)  # no machine has 4 TiB to spare
    agent = device.agent(engine={"model": str(model)})
    await until(lambda: "the policy's weights are 4.0 TiB" in (agent.waits_for() or ""))
    assert agent.engine.num_starts == 0


async def test_an_agent_beside_the_directories_of_engine_cores_says_where_they_are(device: Device) -> None:
    for name in (".", "dp0", "dp1"):
        (device.dir / name).mkdir(mode=0o700)
    agent = device.agent()
    await until(lambda: "dp0 and dp1 below" in (agent.waits_for() or ""))
    assert agent.engine.num_starts == 0


async def test_the_engine_is_not_started_before_serving_is_ready(device: Device) -> None:
    production = device.produce()
    production.phase = Phase.STARTING
    agent = device.agent()
    await until(lambda: agent.waits_for() == "serving is not ready")
    await until(lambda: agent.device.lease is not None and agent.device.lease.phase == Phase.STARTING)
    assert agent.engine.num_starts == 0
    production.phase = Phase.READY
    await ready(device, agent)


async def test_idle_memory_is_lent_and_a_burst_takes_it_back_at_once(device: Device) -> None:
    production = device.produce()
    # Far above what a cut takes; a rise of demand counts as one for as long.
    agent = device.agent(engine=BY_DEFAULT, lending={"reclaim_deadline_s": 10.0})
    await ready_in_the_idle_class(device, agent, 16)
    assert agent.status()["lending"]["cap_pages"] == 18
    production.used = 12
    await until(lambda: device.resident_pages() <= TOTAL_PAGES - 12)
    await until(lambda: agent.policy.lend_pages + 12 + agent.policy.headroom_pages <= TOTAL_PAGES)
    assert agent.engine.num_kills == 0
    production.used = 0
    await lent(device, 16)
    assert production.overdrawn == 0


async def test_a_claim_that_stands_during_a_long_step_is_met_once(device: Device) -> None:
    production = device.produce()
    agent = device.agent()
    await lent(device, 16)
    production.needed = 6  # two pages more than it holds; said once, and met in its next report
    await until(lambda: agent.policy.lend_pages <= 14, "the claim is met")
    for _ in range(20):
        assert agent.device.lease is not None
        seen_ns = agent.device.lease.heartbeat_ns
        await until(
            lambda seen_ns=seen_ns: (
                agent.device.lease is not None and agent.device.lease.heartbeat_ns > seen_ns
            )
        )
        assert agent.policy.lend_pages >= 13  # a demand of 6 that may come again, and one page of hysteresis


async def test_the_gate_hears_how_much_of_a_step_production_waits_for(device: Device) -> None:
    device.produce()
    agent = device.agent(engine=BY_DEFAULT)
    await ready_in_the_idle_class(device, agent, 16)
    node = NodeDir(device.dir).node()

    def told() -> int | None:
        state = node.read()
        return state.delay_pct if state is not None else None

    await until(lambda: told() == (100 if agent.engine.describe()["idle_by"] == "class" else 10), "idle")
    await share_set(agent, "normal")
    await until(lambda: told() == 100, "normal: all of it")


async def test_serving_that_starts_again_gets_everything_back(device: Device) -> None:
    production = device.produce()
    device.agent()
    await lent(device, 16)
    production.phase = Phase.STARTING
    await lent(device, 0)
    production.phase = Phase.READY
    await lent(device, 16)


async def test_serving_that_dies_gets_everything_back(device: Device) -> None:
    production = device.produce()
    device.agent()
    await lent(device, 16)
    await production.stop()
    await lent(device, 0)
    device.production = None


async def test_a_node_state_cut_off_under_the_agent_is_put_back(device: Device) -> None:
    device.produce()
    device.agent()
    await until(lambda: readable(device))
    os.truncate(device.dir / "node.state", 0)
    await until(lambda: readable(device))


async def test_an_agent_whose_state_has_no_room_for_its_name_goes_on_with_those_who_know_it(
    device: Device,
) -> None:
    device.produce()
    agent = device.agent()
    await ready(device, agent)
    await lent(device, 16)
    path = device.dir / "node.state"
    path.unlink()
    path.mkdir()  # as a full disk: nothing of ours can be made there
    await until(lambda: "node.state" in agent.errors)
    await lent(device, 16)
    assert agent.engine.num_starts == 1
    path.rmdir()
    await until(lambda: readable(device))
    assert "node.state" not in agent.errors


def readable(device: Device) -> bool:
    """By a newcomer, who looks at the header."""
    try:
        return NodeDir(device.dir).node().read() is not None
    except LedgerError:
        return False


async def test_an_engine_that_keeps_memory_past_the_deadline_is_killed_and_started_again(
    device: Device,
) -> None:
    production = device.produce()
    agent = device.agent("stubborn", lending={"reclaim_deadline_s": 0.2, "backstop_s": 0.5})
    await lent(device, 16)
    pid = device.report()["pid"]
    stop_sentinel(agent)
    production.used = 14
    await until(lambda: not alive(pid), "killed")
    assert "pages held" in agent.engine.error
    assert agent.engine.num_kills == 1
    await until(lambda: agent.engine.num_starts == 2)
    await ready(device, agent)


async def test_a_stopped_engine_is_killed_by_the_deadline_too(device: Device) -> None:
    production = device.produce()
    agent = device.agent(engine=BY_DEFAULT, lending={"reclaim_deadline_s": 0.2, "backstop_s": 0.5})
    await ready_in_the_idle_class(device, agent, 16)
    pid = device.report()["pid"]
    os.kill(pid, signal.SIGSTOP)
    production.used = 14
    await until(lambda: not alive(pid), "killed")


async def test_until_its_last_process_is_gone_a_killed_engine_is_dying_and_has_a_normal_share(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.produce()
    agent = device.agent(engine=BY_DEFAULT)
    await ready_in_the_idle_class(device, agent, 16)
    may_reap, reaps, kill = threading.Event(), threading.Event(), Child.kill

    def slow(child: Child, timeout_s: float = 10.0) -> None:
        if child.spec.name == "rollout engine":
            os.kill(child.pid, signal.SIGKILL)  # its core, and with it its lease; the rest takes its time
            reaps.set()
            may_reap.wait(50)
        kill(child, timeout_s)

    os.kill(agent.engine._child.guard_pid, signal.SIGSTOP)  # type: ignore[union-attr]
    monkeypatch.setattr(Child, "kill", slow)
    killing = asyncio.create_task(agent.engine.kill("a test"))
    await until(reaps.is_set)
    await until(lambda: not agent.device.rollout_alive(), "its lease is free")
    for _ in range(3):
        agent._round()
        assert agent.status()["engine"]["state"] == "dying"
        assert agent.engine.hurried
    may_reap.set()
    await killing
    assert agent.engine.exit_s > 0
    await until(lambda: agent.engine.num_starts == 2)
    await ready_in_the_idle_class(device, agent)


async def test_what_is_left_of_an_engine_whose_core_is_gone_is_ended(device: Device) -> None:
    device.produce()
    agent = device.agent(lending={"dead_after_s": 0.2})
    await ready(device, agent)  # one that dies while it starts is another case
    await lent(device, 16)
    guard = agent.engine._child.guard_pid  # type: ignore[union-attr]
    os.kill(guard, signal.SIGSTOP)  # nobody else ends the rest
    os.kill(device.report()["pid"], signal.SIGKILL)
    await until(lambda: agent.engine.num_kills == 1)
    assert "its engine core is gone" in agent.engine.error
    await until(lambda: not alive(guard))
    await until(lambda: agent.engine.num_starts == 2)


async def test_memory_of_workers_whose_core_is_gone_still_counts_as_held(device: Device) -> None:
    device.produce()
    with NodeDir(device.dir).rank_writer("rollout", 0, 4) as worker:
        worker.write(RankState(resident_pages=3))
        agent = device.agent(mode="observe")
        await until(lambda: agent.policy.held_pages == 3)
        assert agent.policy.is_urgent
    await until(lambda: agent.policy.held_pages == 0)


async def test_an_engine_that_cannot_run_is_started_a_bounded_number_of_times(
    device: Device,
) -> None:
    device.produce()
    agent = device.agent("die", engine={"max_restarts": 1})
    await until(lambda: agent.engine.state == "failed")
    assert agent.engine.num_starts == 2
    assert "no such model" in agent.status()["engine"]["error"]
    assert agent.policy.lend_pages == 0
    assert not agent.engine.running
    await agent.set_engine(True)  # the operator has mended it
    await until(lambda: agent.engine.num_starts > 2)


async def test_an_engine_whose_starts_are_used_up_is_given_up_before_the_pause_that_the_next_would_have(
    device: Device,
) -> None:
    """The pause after a start that took half a minute is longer than anybody waits for the verdict."""
    device.produce()
    agent = device.agent("die", engine={"max_restarts": 0, "restart_pause_s": 600.0})
    await until(lambda: agent.engine.state == "failed")
    assert agent.engine.num_starts == 1
    assert "before it is started again" in (agent.waits_for() or "")


async def test_an_engine_that_the_table_refuses_is_not_started_again(device: Device) -> None:
    """It was started for ever, a minute of production's cores each time, and could not end otherwise."""
    device.produce()
    agent = device.agent("refused", engine={"restart_pause_s": 0.01})
    await until(lambda: agent.engine.state == "failed")
    assert agent.engine.num_starts == 1
    assert "refused" in (agent.waits_for() or "")
    await agent.set_engine(True)  # the operator has mended it
    await until(lambda: agent.engine.num_starts > 1)


async def test_an_engine_killed_from_outside_comes_back_with_another_incarnation(device: Device) -> None:
    device.produce()
    agent = device.agent()
    await ready(device, agent)
    first = agent.engine.incarnation, agent.engine.token
    os.kill(device.report()["pid"], signal.SIGKILL)
    await until(lambda: agent.engine.num_starts == 2)
    await ready(device, agent)
    assert agent.engine.incarnation != first[0]
    assert agent.engine.token != first[1]
    await lent(device, 16)


async def test_a_port_that_is_taken_when_the_engine_comes_back_does_not_end_the_agent(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.produce()
    agent = device.agent()
    await ready(device, agent)
    taken: list[int] = []

    def once(port: int, field: str, host: str) -> None:
        if not taken:
            taken.append(port)
            raise ConfigError("is taken", field=field)

    monkeypatch.setattr("rose.coserve.engine.require_free_port", once)
    os.kill(device.report()["pid"], signal.SIGKILL)
    await until(lambda: agent.engine.num_starts == 2)
    await ready(device, agent)
    assert taken


async def test_the_agent_after_a_killed_one_waits_until_the_dying_engine_has_let_go_of_the_port(
    device: Device,
) -> None:
    killed = NodeDir(device.dir).node_writer()
    killed.write(NodeState(mode=int(Mode.ON), heartbeat_ns=time.monotonic_ns()))
    killed.close()
    dying = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    device.produce()
    agent = device.agent(engine={"port": dying.sockets[0].getsockname()[1], "restart_pause_s": 0.05})
    await until(lambda: "is taken" in agent.engine.error)
    dying.close()
    await ready(device, agent)


async def test_memory_of_a_worker_is_not_given_back_because_its_engines_file_is_damaged(
    device: Device,
) -> None:
    device.produce()
    agent = device.agent("stubborn", lending={"reclaim_deadline_s": 3600.0})
    await lent(device, 16)
    (device.dir / "damaged").write_bytes(b"no lease")
    os.replace(
        device.dir / "damaged", device.dir / "rollout.lease"
    )  # its writer cannot mend what is not its file
    agent.change(mode=Mode.OFF)
    assert not await agent.wait_given_back(0.2)
    assert agent.device.held_pages() == 16
    await agent.engine.kill("it keeps what it owes")


async def test_the_state_file_carries_slo_and_floor_and_its_epoch_rises_with_the_loan(device: Device) -> None:
    production = device.produce()
    agent = device.agent(serving={"slo_ttft_ms": 250.0, "slo_tpot_ms": 40.0, "floor_pages": 10})
    await lent(device, 8)  # 20 - floor 10 - headroom 2
    reader = NodeDir(device.dir).node()
    before = reader.read()
    assert before is not None
    assert (before.slo_ttft_ns, before.slo_tpot_ns, before.floor_pages) == (250_000_000, 40_000_000, 10)
    production.used = 15
    await until(lambda: agent.policy.lend_pages < 8)
    await until(lambda: (reader.read() or before).epoch > before.epoch)


async def test_leaving_ends_the_engine_and_removes_our_files_but_not_productions(device: Device) -> None:
    device.produce()
    device.agent()
    await lent(device, 16)
    pid = device.report()["pid"]
    await device.stop_agents()
    assert not alive(pid)
    assert sorted(path.name for path in device.dir.iterdir()) == ["serving.board", "serving.lease"]


async def test_leaving_a_device_without_serving_leaves_no_directory(device: Device) -> None:
    device.agent("deaf", serving=None, lending={"reclaim_deadline_s": 0.2})
    await lent(device, 16)
    await device.stop_agents()
    assert not device.dir.exists()


async def test_a_second_agent_of_a_device_is_refused_and_harms_nothing(device: Device) -> None:
    device.produce()
    agent = device.agent()
    await ready(device, agent)
    second = device.agent()
    with pytest.raises(LedgerError, match=r"node\.state: another live process writes it"):
        await device.agents[1][1]
    del device.agents[1]
    assert second.engine.num_starts == 0
    assert device.dir.joinpath("agent.sock").exists()
    await lent(device, 16)


async def test_a_taken_port_or_missing_program_ends_the_agent_with_the_field_named(device: Device) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    device.produce()
    device.agent(engine={"port": port})
    with pytest.raises(ConfigError, match=rf"engine\.port: port {port} is taken"):
        await device.agents[0][1]
    server.close()
    device.agents.clear()
    device.agent(engine={"command": ["no-such-program"]})
    with pytest.raises(ConfigError, match="'no-such-program' is no program here"):
        await device.agents[0][1]
    device.agents.clear()
    assert sorted(path.name for path in device.dir.iterdir()) == ["serving.board", "serving.lease"]


async def test_a_model_folder_that_is_not_there_is_said_before_anything_starts(
    device: Device, tmp_path: Path
) -> None:
    device.produce()
    agent = device.agent(engine={"model": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match=r"engine\.model: .*none is not a model folder"):
        await device.agents[0][1]
    device.agents.clear()
    assert agent.engine.num_starts == 0


async def test_an_order_to_lend_is_answered_with_what_is_wrong_and_waits_until_it_is_mended(
    device: Device, tmp_path: Path
) -> None:
    device.produce()
    agent = device.agent(mode="observe", engine={"model": str(tmp_path / "none"), "restart_pause_s": 0.05})
    await until(lambda: device.dir.joinpath("agent.sock").exists())
    async with control(device) as client:
        before = await asyncio.to_thread(client.status)
        assert "none is not a model folder" in before["engine"]["error"]
        told = await asyncio.to_thread(lambda: client.set(mode="on", engine=True))
        assert "none is not a model folder" in told["engine"]["error"]
    await until(lambda: agent.engine.restarts.next_start_s > 0, "it was tried")
    assert not device.agents[0][1].done()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text("{}")
    await ready(device, agent)


async def ends_by_an_error(device: Device, agent: NodeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise EngineError("no more")

    monkeypatch.setattr(agent.device, "look", refused)
    with pytest.raises(EngineError, match="no more"):
        await device.agents[0][1]
    device.agents.clear()


async def test_what_was_ordered_outlives_an_agent_that_an_error_has_ended(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    production = device.produce()
    production.phase = Phase.STARTING
    agent = device.agent()
    await until(lambda: agent.waits_for() == "serving is not ready")
    agent.change(mode=Mode.OBSERVE)
    await ends_by_an_error(device, agent, monkeypatch)
    again = device.agent()
    await until(lambda: again.waits_for() == "mode is observe")


@pytest.mark.parametrize(
    ("since_death_s", "mode"), [(-1.0, Mode.ON), (1.0, Mode.OFF)], ids=["older", "newer"]
)
async def test_an_off_in_a_file_that_was_changed_after_an_agent_died_counts(
    device: Device, monkeypatch: pytest.MonkeyPatch, since_death_s: float, mode: Mode
) -> None:
    device.produce().phase = Phase.STARTING
    agent = device.agent(mode="off")
    await until(agent.config.socket_path.exists, "the agent answers")
    agent.change(mode=Mode.ON)
    await ends_by_an_error(device, agent, monkeypatch)
    died_at_s = time.time()
    again = device.agent(mode="off", changed_at_s=died_at_s + since_death_s)
    await until(lambda: again.waits_for() == ("mode is off" if mode is Mode.OFF else "serving is not ready"))


async def test_an_agent_killed_before_its_first_word_hands_on_what_it_took_over(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered = NodeState(mode=Mode.OFF, heartbeat_ns=time.monotonic_ns())
    NodeDir(device.dir).node_writer(ordered).close()

    def killed(*_: object) -> None:
        raise EngineError("killed")

    monkeypatch.setattr(StateFile, "publish", killed)
    monkeypatch.setattr(StateFile, "close", lambda _: None)
    device.agent()
    with pytest.raises(EngineError, match="killed"):
        await device.agents.pop()[1]

    left = NodeDir(device.dir).node().read()
    assert left is not None
    assert left.mode == Mode.OFF


async def test_a_directory_too_long_for_a_socket_is_refused(device: Device, tmp_path: Path) -> None:
    device.agent(dir=str(tmp_path / ("x" * 100)))
    with pytest.raises(ConfigError, match="too long for a socket"):
        await device.agents[0][1]
    device.agents.clear()


async def test_the_status_names_the_field_and_value_for_which_production_does_not_share(
    device: Device,
) -> None:
    production = device.produce()
    production.phase = Phase.OFF
    production._lease.extra[:] = pack_found("scheduler_config.policy = 'priority'\x1b[2J" + "x" * 1000)
    production.publish()
    agent = device.agent()
    await until(lambda: "(scheduler_config.policy = 'priority'?[2Jxx" in str(agent.waits_for()))
    assert "policy = 'priority'?[2J" in agent.status()["serving"]["found"]
    assert len(agent.status()["serving"]["found"]) <= 256
