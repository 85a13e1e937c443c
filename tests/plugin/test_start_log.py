"""What production's log says of its start: that it shares and what, or the true reason first."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from tests.plugin import harness


@pytest.mark.parametrize("elastic", [True, False])
def test_a_good_start_is_one_line_that_says_what_may_be_lent_of_what(
    config: Any, node_dir: Path, rank: Any, said: list[str], monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    from vllm_plugin import compat
    from vllm_plugin.scheduler import ServingScheduler

    if not elastic:
        monkeypatch.setattr(config.parallel_config, "worker_cls", compat.STOCK_CPU_WORKER)
    scheduler = harness.build(ServingScheduler, config)
    scheduler.rose_attach(harness.engine())
    scheduler.rose.stop()

    shares = "at most 30.0 MiB of 32.0 MiB" if elastic else "compute only, none of 32.0 MiB"
    assert [line for line in said if line.startswith("INFO")] == [
        f"INFO ROSE is on: {shares} KV memory may be lent; to see how it stands: rose node status --dir {node_dir}"
    ]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("second production", r"another live process writes it .*; it is of pid PID:"),
        ("open directory", "is open to others"),
    ],
)
def test_a_directory_that_cannot_be_used_is_said_first_and_no_rollout_engine_is_blamed(
    node_dir: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, wrong: str, reason: str
) -> None:
    from vllm_plugin import compat

    monkeypatch.setattr(compat, "_starting", None)
    first = NodeDir(node_dir).serving_lease_writer()
    if wrong == "open directory":
        os.chmod(node_dir, 0o755)
    compat._take_everything_back()
    first.close()

    (line,) = said
    assert line.startswith(f"ERROR ROSE cannot use its node directory: {node_dir}")
    assert re.search(reason.replace("PID", str(os.getpid())), line)
    assert compat.starting_lease() is None
