"""Real processes: started, watched, restarted, ended; and the directory they work in."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rose.demo.supervisor import ProcessSupervisor, Program
from rose.demo.workplace import PREFIX, Workplace, sweep
from rose.errors import ConfigError, EngineError
from rose.proc import ProcSpec
from rose.shared_memory import SharedMemorySweep

SLEEP = "import time; time.sleep(600)"


class Reports(list[tuple[str, str]]):
    def __call__(self, kind: str, text: str) -> None:
        self.append((kind, text))


def program(
    name: str, code: str, log: Path, restarts: int = 0, task: bool = False, ready: bool = False
) -> Program:
    marker = log / f"{name}.ready"
    script = f"open({str(marker)!r}, 'a').write('x'); {code}"
    probe: Callable[[], bool] | None = marker.exists if ready else None
    return Program(
        spec=ProcSpec(name=name, argv=(sys.executable, "-c", script), log_path=log / f"{name}.log"),
        ready=probe,
        timeout_s=30.0,
        restarts=restarts,
        task=task,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - other processes have no event
            await asyncio.sleep(0.02)


def children() -> set[psutil.Process]:
    """This process's, without those that other tests' libraries keep (multiprocessing's trackers)."""
    return set(psutil.Process().children(recursive=True))


async def test_leaving_the_fleet_ends_every_process(tmp_path: Path) -> None:
    before = children()
    spawn = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"
    async with ProcessSupervisor(Reports()) as supervisor:
        await supervisor.start(program("one", SLEEP, tmp_path, ready=True))
        await supervisor.start(program("two", spawn, tmp_path, ready=True))
        await until(lambda: len(children() - before) >= 5)

    assert children() <= before


async def test_an_error_inside_still_ends_every_process(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(ValueError, match="mine"):  # noqa: PT012
        async with ProcessSupervisor(Reports()) as supervisor:
            await supervisor.start(program("one", SLEEP, tmp_path, ready=True))
            raise ValueError("mine")

    assert children() <= before


async def test_cancelled_twice_still_ends_every_process(tmp_path: Path) -> None:
    """A second Ctrl-C while the first is being obeyed."""
    before = children()
    stubborn = "import signal; signal.signal(signal.SIGTERM, lambda *a: None); " + SLEEP
    started = asyncio.Event()

    async def run() -> None:
        async with ProcessSupervisor(Reports()) as supervisor:
            await supervisor.start(program("one", stubborn, tmp_path, ready=True))
            supervisor_stop = supervisor.stop

            async def stop(name: str, grace_s: float = 0.3) -> None:
                await supervisor_stop(name, 0.3)

            supervisor.stop = stop  # type: ignore[method-assign]
            started.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(run())
    await asyncio.wait_for(started.wait(), 30)
    task.cancel()
    await asyncio.sleep(0)  # it is now cleaning up
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert children() <= before


async def test_a_killed_part_is_started_again_and_reported(tmp_path: Path) -> None:
    reports = Reports()
    marker = tmp_path / "one.ready"

    async def work(supervisor: ProcessSupervisor) -> None:
        child = supervisor._children["one"]
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: marker.read_text() == "xx" and len(reports) == 2)

    async with ProcessSupervisor(reports) as supervisor:
        await supervisor.start(program("one", SLEEP, tmp_path, restarts=1, ready=True))
        await supervisor.guarded(work(supervisor))

    assert [kind for kind, _ in reports] == ["kill", "restart"]


async def test_a_part_without_restarts_ends_the_run_with_its_name(tmp_path: Path) -> None:
    async with ProcessSupervisor(Reports()) as supervisor:
        await supervisor.start(program("one", "raise SystemExit(7)", tmp_path))
        with pytest.raises(EngineError, match=r"one: ended with 7 and is not started again.*one\.log"):
            await supervisor.guarded(asyncio.sleep(60))


async def test_a_task_may_end_and_its_code_is_the_callers(tmp_path: Path) -> None:
    async with ProcessSupervisor(Reports()) as supervisor:
        await supervisor.start(program("job", "raise SystemExit(3)", tmp_path, task=True))
        await supervisor.guarded(asyncio.sleep(1.2))  # two looks of the watch

        assert await supervisor.wait_end("job", 60) == 3


async def test_a_task_that_does_not_end_is_an_error(tmp_path: Path) -> None:
    async with ProcessSupervisor(Reports()) as supervisor:
        await supervisor.start(program("job", SLEEP, tmp_path, task=True))
        with pytest.raises(EngineError, match="job: still runs"):
            await supervisor.wait_end("job", 0.1)


def test_the_directory_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with Workplace(tmp_path) as workplace:
        path = workplace.path
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "weights").write_bytes(b"x" * 1000)
    assert not path.exists()


def test_what_a_killed_run_left_is_swept_and_a_live_run_is_not(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from rose.demo.workplace import Workplace\n"
        "w = Workplace(Path(sys.argv[1])); w.__enter__(); print(w.path, flush=True); time.sleep(600)"
    )
    dead = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    assert dead.stdout is not None
    left = Path(dead.stdout.readline().strip())
    foreign = tmp_path / f"{PREFIX}foreign"  # no lock file: not made by us
    foreign.mkdir()
    with Workplace(tmp_path) as alive:
        assert sweep(tmp_path) == []
        dead.kill()
        dead.communicate()

        assert sweep(tmp_path) == [left]
        assert alive.path.exists()
        assert foreign.exists()


def test_an_unwritable_parent_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="run_directory"), Workplace(tmp_path / "file" / "x"):
        pass


def test_shared_memory_that_nobody_uses_any_more_is_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "psm_before").write_bytes(b"x")
    with SharedMemorySweep(tmp_path):
        for name in ("psm_forgotten", "sem.mp-forgotten", "foreign_file"):
            (tmp_path / name).write_bytes(b"x")
            (tmp_path / name).chmod(0o600)  # as they are made: nobody whom we cannot see may have it open
        used = (tmp_path / "psm_mapped").open("wb+")
        used.truncate(4096)
        mapping = mmap.mmap(used.fileno(), 4096)
        used.close()  # in use by its mapping alone

    assert {path.name for path in tmp_path.iterdir()} == {"psm_before", "foreign_file", "psm_mapped"}
    mapping.close()
