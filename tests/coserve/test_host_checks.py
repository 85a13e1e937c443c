"""What ``rose doctor`` says of a host that is broken in each way: every line is a thing really tried, and says what to do."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rose.auth import Tokens
from rose.coserve import host_checks, outside
from rose.coserve.free_memory import GpuMemory
from rose.coserve.host_checks import Level
from rose.coserve.node_config import DeviceConfig, SchedulerLink, WeightsLink
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import NodeState
from rose.errors import LedgerError
from rose.proc import free_port
from rose.scheduler.app import Scheduler
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.testing.relay_thread import RelayThread
from rose.weights.file_store import FileStore
from tests.coserve.conftest import on_scratch, only
from tests.users import STRANGER, needs_root, volume

SHM = Path("/dev/shm")


def saved_tokens(path: Path) -> Tokens:
    tokens = Tokens.generate()
    tokens.save(path)
    return tokens


# --- the kernel


def test_locks_and_futexes_work_here_and_nothing_is_left(scratch: Path) -> None:
    check = host_checks.check_kernel(scratch)
    assert (check.level, check.fix) == (Level.OK, "")
    assert list(scratch.iterdir()) == []


def test_a_kernel_without_futexes_is_found(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rose.coserve.kernel._SYS_FUTEX", -1
    )  # as on an architecture that is not in the table
    check = host_checks.check_kernel(scratch)
    assert check.level is Level.FAIL
    assert "futexes do not wait" in check.says


def test_a_kernel_whose_locks_stop_nobody_is_found(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.coserve.ledger.take_lock", lambda *_: True)
    check = host_checks.check_kernel(scratch)
    assert check.level is Level.FAIL
    assert "lock" in check.says


def test_an_idle_child_is_really_made_and_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_checks.check_idle_class().level is Level.OK
    monkeypatch.setattr("rose.proc_share.IdleShare.lift", lambda *_: False)
    check = host_checks.check_idle_class()
    assert check.level is Level.WARN
    assert "not be lifted" in check.says
    assert "CAP_SYS_NICE" in check.fix


@pytest.mark.parametrize(
    ("kinds", "level", "word"),
    [
        (["v2"], Level.OK, "can be killed"),
        (["v1"], Level.WARN, "only when it thaws"),
        (["v1", "v2"], Level.WARN, "v1 and v2"),
        ([], Level.WARN, "no cgroup hierarchy"),
    ],
)
def test_the_versions_of_cgroups_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, kinds: list[Any], level: Level, word: str
) -> None:
    places = [outside.Place(kind, SHM, SHM) for kind in kinds]
    monkeypatch.setattr(outside, "places", lambda: places)
    check = host_checks.check_cgroups()
    assert (check.level, word in check.says) == (level, True)


@needs_root
def test_a_small_shared_memory_is_found(scratch: Path) -> None:
    assert host_checks.check_shared_memory(scratch / "none").level is Level.FAIL
    with volume(scratch / "small", 0) as small:  # 1 MiB
        check = host_checks.check_shared_memory(small)
    assert check.level is Level.WARN
    assert "--shm-size" in check.fix


def test_cores_that_are_not_ours_are_found() -> None:
    check = host_checks.check_cores((4096,))
    assert (check.level, "4096" in check.says) == (Level.FAIL, True)
    assert host_checks.check_cores().says == str(len(os.sched_getaffinity(0)))


def test_one_core_is_said_to_be_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert host_checks.check_cores().level is Level.WARN


def test_less_memory_than_the_reserve_is_found() -> None:
    assert host_checks.check_memory(DeviceConfig()).level is Level.OK
    check = host_checks.check_memory(DeviceConfig(reserve_bytes=1 << 46))
    assert check.level is Level.WARN
    assert "nothing would be lent" in check.says


# --- the node directory


def test_a_directory_that_is_not_there_is_not_made(scratch: Path) -> None:
    check = only(host_checks.check_directory(scratch / "n"))
    assert (check.level, "can be made" in check.says) == (Level.OK, True)
    assert not (scratch / "n").exists()


def test_an_open_directory_is_found_with_the_command_that_mends_it(scratch: Path) -> None:
    (scratch / "n").mkdir(mode=0o700)
    (scratch / "n").chmod(0o755)
    check = only(host_checks.check_directory(scratch / "n"))
    assert check.level is Level.FAIL
    assert check.fix.startswith(f"chmod 700 {scratch / 'n'} if nothing else uses it")


def test_a_link_is_found(scratch: Path) -> None:
    (scratch / "n").symlink_to(scratch)
    assert "is a symbolic link" in only(host_checks.check_directory(scratch / "n")).says


def test_a_parent_that_others_write_is_found(scratch: Path) -> None:
    scratch.chmod(0o777)
    assert "others may write there" in only(host_checks.check_directory(scratch / "n")).says


@needs_root
def test_another_users_directory_is_found(scratch: Path) -> None:
    (scratch / "n").mkdir(mode=0o700)
    os.chown(scratch / "n", STRANGER, STRANGER)
    assert f"belongs to user {STRANGER}" in only(host_checks.check_directory(scratch / "n")).says


def test_a_file_where_the_directory_should_be_is_found(scratch: Path) -> None:
    (scratch / "n").write_text("")
    assert "is not a directory" in only(host_checks.check_directory(scratch / "n")).says


@needs_root
def test_a_full_file_system_is_found(scratch: Path) -> None:
    with volume(scratch / "small", 0) as small:  # 1 MiB
        checks = host_checks.check_directory(small / "n")
    assert [check.level for check in checks] == [Level.FAIL]
    assert "left" in checks[0].says


def test_a_directory_on_a_disk_is_found(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "file_system", lambda path: "ext4")
    check = only(host_checks.check_directory(scratch / "n"))
    assert (check.level, "on ext4" in check.says) == (Level.WARN, True)


def test_the_file_system_is_the_kernels_word() -> None:
    assert host_checks.file_system(SHM / "anything") == "tmpfs"
    assert host_checks.file_system(Path("/proc/self")) == "proc"


def test_a_file_of_another_version_is_found(scratch: Path) -> None:
    directory = NodeDir(scratch / "n")
    with directory.serving_lease_writer():
        path = scratch / "n" / "serving.lease"
        assert only(host_checks.check_directory(scratch / "n")).level is Level.OK
        data = bytearray(path.read_bytes())
        data[8] ^= 0xFF
        path.write_bytes(data)
        check = only(host_checks.check_directory(scratch / "n"))
    assert check.level is Level.FAIL
    assert check.says.startswith("serving.lease: ")


# --- tokens


def test_a_good_token_file_is_used_and_never_shown(scratch: Path) -> None:
    tokens = saved_tokens(scratch / "t")
    check, found = host_checks.check_tokens(scratch / "t")
    assert (check.level, found) == (Level.OK, replace(tokens, publish_key=""))
    assert tokens.admin not in repr(check)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: path.chmod(0o644), "open to others"),
        (lambda path: path.write_text("agent = 'short'"), "16 characters"),
        (lambda path: path.write_text("["), "not readable TOML"),
    ],
)
def test_a_bad_token_file_is_found(scratch: Path, spoil: Any, word: str) -> None:
    saved_tokens(scratch / "t")
    spoil(scratch / "t")
    check, found = host_checks.check_tokens(scratch / "t")
    assert (check.level, found) == (Level.FAIL, None)
    assert word in check.says


def test_a_file_without_environments_is_to_be_upgraded(scratch: Path) -> None:
    saved_tokens(scratch / "t")
    lines = (scratch / "t").read_text().splitlines()
    (scratch / "t").write_text("\n".join(line for line in lines if not line.startswith("environment")))
    check, found = host_checks.check_tokens(scratch / "t")
    assert (check.level, found is not None) == (Level.WARN, True)
    assert check.fix.startswith("rose tokens --upgrade")


# --- what the rollout engine needs


def test_a_taken_port_is_found_unless_it_is_this_nodes_own(scratch: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = on_scratch(scratch, engine={"port": taken.getsockname()[1]})
        assert "is taken" in only(list(host_checks.check_engine_files(config))).says
        with NodeDir(config.dir).node_writer() as agent:
            agent.write(NodeState())
            assert list(host_checks.check_engine_files(config)) == []


def test_a_folder_without_a_model_and_a_profile_that_is_none_are_found(scratch: Path) -> None:
    (scratch / "m").mkdir()
    config = on_scratch(scratch, engine={"model": str(scratch / "m")})
    assert "no config.json" in only(list(host_checks.check_engine_files(config))).says
    config = on_scratch(scratch, engine={"profile": str(scratch / "none")})
    assert only(list(host_checks.check_engine_files(config))).level is Level.FAIL


@needs_root
def test_weights_without_room_or_in_an_open_directory_are_found(scratch: Path) -> None:
    (scratch / "m").mkdir()
    (scratch / "m" / "config.json").write_text("{}")
    (scratch / "m" / "a.safetensors").write_bytes(bytes(1 << 20))
    with volume(scratch / "small", 0) as small:  # 1 MiB, and 2.2 are needed
        link = {"relay_url": "http://127.0.0.1:1", "run_id": "r", "directory": str(small / "w")}
        config = on_scratch(scratch, engine={"model": str(scratch / "m")}, weights=link)
        check = only(list(host_checks.check_engine_files(config)))
    assert (check.name, check.level) == ("weights.directory", Level.FAIL)
    (scratch / "w").mkdir()
    (scratch / "w").chmod(0o755)
    config = on_scratch(scratch, weights=link | {"directory": str(scratch / "w")})
    assert "open to others" in only(list(host_checks.check_engine_files(config))).says


# --- a GPU, by what NVML says


class Gpu(GpuMemory):
    """Boundary: NVML."""

    mig = False

    def __init__(self, index: int) -> None:
        if index > 0:
            raise LedgerError("NVML: Invalid Argument", field="device.gpu")

    def free_bytes(self) -> int:
        return 70 << 30

    def total_bytes(self) -> int:
        return 80 << 30

    def driver_version(self) -> str:
        return "570.1"

    def is_cut_up(self) -> bool:
        return self.mig


def test_a_host_without_a_gpu_has_no_line_of_one(tmp_path: Path) -> None:
    assert host_checks.check_gpu(None, tmp_path / "none") == []


def test_what_is_wrong_with_a_gpu_is_found(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_checks, "GpuMemory", Gpu)
    driver = tmp_path / "version"
    driver.write_text("")
    assert "driver 570.1, 70.0 GiB of 80.0 GiB free" in only(host_checks.check_gpu(None, driver)).says
    on_gpu = {"kind": "gpu"}
    assert only(host_checks.check_gpu(on_scratch(scratch, device=on_gpu), driver)).level is Level.OK
    assert [one.level for one in host_checks.check_gpu(on_scratch(scratch), driver)] == [Level.OK, Level.WARN]
    absent = only(host_checks.check_gpu(on_scratch(scratch, device=on_gpu | {"gpu": 3}), driver))
    assert (absent.level, "device.gpu" in absent.says) == (Level.FAIL, True)
    monkeypatch.setattr(Gpu, "mig", True)
    assert host_checks.check_gpu(None, driver)[-1].fix == "nvidia-smi -i 0 -mig 0"
    monkeypatch.setattr(Gpu, "mig", False)
    config = on_scratch(scratch, device=on_gpu, engine={"allow_mps": True})
    assert host_checks.check_gpu(config, driver)[-1].name == "MPS"


# --- who should answer


def test_the_relay_is_asked_with_its_token(scratch: Path, tmp_path: Path) -> None:
    tokens = saved_tokens(scratch / "t")
    with RelayThread(FileStore(tmp_path / "store"), tokens) as relay:
        link = WeightsLink(relay_url=relay.url, run_id="r")
        assert host_checks.check_relay(link, tokens).level is Level.OK
        stranger = host_checks.check_relay(link, Tokens.generate())
        nobodys = host_checks.check_relay(link, replace(tokens, public_key=""))
        assert (nobodys.level, "weights.public_key" in nobodys.says) == (Level.FAIL, True)
        assert "--upgrade" in nobodys.fix
        trusted = link.model_copy(update={"signed": False})
        assert host_checks.check_relay(trusted, replace(tokens, public_key="")).level is Level.OK
        dead = f"http://127.0.0.1:{free_port()}"
        second = host_checks.check_relay(WeightsLink(relay_url=f"{relay.url},{dead}", run_id="r"), tokens)
    assert (stranger.level, "does not know our token" in stranger.says) == (Level.FAIL, True)
    assert (second.level, dead in second.says) == (Level.FAIL, True)
    gone = host_checks.check_relay(link, tokens)
    assert (gone.level, "no answer" in gone.says) == (Level.FAIL, True)


async def test_the_scheduler_is_asked_with_our_token(scratch: Path) -> None:
    tokens = saved_tokens(scratch / "t")
    scheduler = Scheduler(SchedulerConfig(port=0), tokens, scratch / "journal")
    await scheduler.start()
    try:
        link = SchedulerLink(url=scheduler.url)
        known = await asyncio.to_thread(host_checks.check_scheduler, link, tokens)
        stranger = await asyncio.to_thread(host_checks.check_scheduler, link, Tokens.generate())
    finally:
        await scheduler.stop()
    assert known.level is Level.OK
    assert (stranger.level, "does not know our token" in stranger.says) == (Level.FAIL, True)


def test_a_scheduler_that_is_away_is_found_and_its_password_is_not_shown(scratch: Path) -> None:
    link = SchedulerLink(url=f"http://me:hunter2@127.0.0.1:{free_port()}")
    check = host_checks.check_scheduler(link, saved_tokens(scratch / "t"))
    assert check.level is Level.FAIL
    assert "hunter2" not in repr(check)
