"""The orchestrator over stand-in programs: the whole path, a killed part, Ctrl-C; and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(500)

SCRIPT = Path(__file__).with_name("mini_demo.py")
NUM_PORTS = 5


def free_base_port() -> int:
    """The first of five consecutive free ports."""
    for base in range(21_000 + os.getpid() % 5000, 32_000, NUM_PORTS):
        try:
            for port in range(base, base + NUM_PORTS):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return base
        except OSError:
            continue
    raise AssertionError("no five free ports in a row")


class Demo:
    """A running mini demo; ``output`` so far."""

    def __init__(self, tmp_path: Path) -> None:
        self.out, self.runs = tmp_path / "out", tmp_path / "runs"
        self.base_port = free_base_port()
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), self.out, str(self.base_port), self.runs],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "PYTHONUNBUFFERED": "1"},
        )
        self.output = ""

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"ended without saying '{text}':\n{self.output}")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def named(self, words: str) -> psutil.Process:
        """The program (not its guard) whose command line ends with ``words``."""
        found = []
        for process in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # of those that come and go
                command = " ".join(process.cmdline())
                if command.endswith(words) and "proc_guard" not in command:
                    found.append(process)
        assert len(found) == 1
        return found[0]

    def finish(self) -> int:
        rest, _ = self.process.communicate(timeout=400)
        self.output += rest
        return self.process.returncode

    def check_nothing_left(self, processes: list[psutil.Process]) -> None:
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive
        assert list(self.runs.iterdir()) == []
        for port in range(self.base_port, self.base_port + NUM_PORTS):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    running = Demo(tmp_path)
    yield running
    if running.process.poll() is None:
        running.process.kill()  # the guards end the rest
        running.process.communicate()


@pytest.mark.slow
def test_the_whole_path_with_a_killed_scheduler_ends_with_a_report_and_nothing_left(demo: Demo) -> None:
    demo.read_until("Block 1 of 4, harvesting off")
    processes = demo.children()
    scheduler = demo.named(f"serve {demo.base_port + 2}")
    scheduler.kill()
    demo.read_until("scheduler was started again")

    assert demo.finish() == 0, demo.output

    summary = json.loads((demo.out / "report.json").read_text())["summary"]
    assert summary["production_errors"] == 0
    assert summary["production_requests"] >= 80
    assert summary["success_rate_last"] > summary["success_rate_first"]
    assert 0.2 < summary["harvested_turn_share"] < 0.5
    assert summary["aa_ttft_ratio"] > 0
    assert summary["p99_itl_ratio"] > 0
    assert summary["weight_bytes_sent"] > 0
    details = json.loads((demo.out / "report.json").read_text())["details"]
    assert [phase["name"] for phase in details["phases"]] == [
        *("startup", "alone_1", "switch", "shared", "shared", "switch", "alone_2", "switch", "rest")
    ]
    assert [block["harvesting"] for block in details["blocks"]] == [False, True, True, False]
    assert summary["steps_gain_low"] <= summary["steps_gain"] <= summary["steps_gain_high"]
    assert [event["kind"] for event in details["events"]] == ["kill", "restart"]
    assert "report.html" in demo.output.replace("\n", "")  # a long path is wrapped
    demo.check_nothing_left(processes)


def test_ctrl_c_ends_everything_reports_what_there_was_and_a_second_run_can_start(demo: Demo) -> None:
    demo.read_until("Starting the RL job")
    processes = demo.children()
    assert len(processes) >= 10

    demo.process.send_signal(signal.SIGINT)

    assert demo.finish() == 130
    assert "interrupted; everything is stopped" in demo.output
    assert "Traceback" not in demo.output
    assert json.loads((demo.out / "report.json").read_text())["details"]["complete"] is False
    demo.check_nothing_left(processes)


def test_killed_orchestrator_leaves_no_process_and_the_next_run_sweeps_its_directory(
    demo: Demo, tmp_path: Path
) -> None:
    demo.read_until("Starting the harvested engine")
    processes = demo.children()

    demo.process.kill()
    demo.finish()

    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    from rose.demo.workplace import sweep

    assert len(sweep(demo.runs)) == 1
    assert list(demo.runs.iterdir()) == []


def test_a_taken_port_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    base_port = free_base_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", base_port + 1))
        listener.listen()
        done = subprocess.run(
            [sys.executable, "-m", "rose.cli", "demo", "--base-port", str(base_port), "--out", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert done.returncode == 2
    assert done.stderr.startswith(f"error: relay port: port {base_port + 1} is taken")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
