"""The stage ``mps`` says of a client's end what it has seen, of a control program that obeys, one that does not, and one that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import device, figures

CONTROL = """#!/bin/sh
read -r what server client
case "$what" in
  get_server_list) echo 100 ;;
  get_client_list) cat "{folder}/clients" ;;
  terminate_client) {terminate} ;;
esac
"""
ENDS = {
    "obeys": 'grep -vx "$client" "{folder}/clients" > "{folder}/left"; mv "{folder}/left" "{folder}/clients"',
    "ignores": ":",
    "hangs": "exec sleep 3",
}


def control(folder: Path, how: str) -> str:
    """A control program with one client, 4242."""
    (folder / "clients").write_text("4241\n4242\n")
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(CONTROL.format(folder=folder, terminate=ENDS[how].format(folder=folder)))
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("how", "left", "timed_out"), [("obeys", True, False), ("ignores", False, False), ("hangs", False, True)]
)
def test_a_client_was_terminated_where_it_has_left_the_list(
    tmp_path: Path, how: str, left: bool, timed_out: bool
) -> None:
    found = device.terminate(control(tmp_path, how), 4242, limit_s=0.5 if timed_out else 60.0)
    assert found["client_was_listed"]
    assert found["client_left_before_kill"] == left
    assert found["terminate_timed_out"] == timed_out
    assert found["terminate_s"] > 0


def test_one_that_is_no_client_was_not_terminated(tmp_path: Path) -> None:
    found = device.terminate(control(tmp_path, "obeys"), 17, limit_s=60.0)
    assert (found["client_was_listed"], found["client_left_before_kill"]) == (False, False)


@pytest.mark.parametrize(("seconds", "in_time"), [(0.1, True), (0.2, False)])
def test_the_guard_waits_no_longer_for_it_than_it_does_for_any_engine(seconds: float, in_time: bool) -> None:
    ended = figures.termination(listed=True, left=True, seconds=seconds, timed_out=False)
    assert ended["terminate_in_the_guards_time"] == in_time
