"""How ``rose doctor`` reads a command line of production's: as vLLM does, which gives each engine core a node directory of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rose.config import validate
from rose.coserve import doctor
from rose.coserve.doctor import Command
from rose.coserve.node_config import NodeConfig


def seen_by_the_agent(tmp_path: Path, name: str, args: str) -> bool:
    """Does production with ROSE_DIR ``n`` and these arguments use ``n/NAME``, where an agent is?"""
    engine = {"model": "policy", "max_model_len": 512}
    table = {"node_id": "a", "dir": str(tmp_path / "n" / name), "serving": {}, "engine": engine}
    command = Command(python=sys.executable, args=tuple(args.split()), env={"ROSE_DIR": str(tmp_path / "n")})
    check = next(doctor._host(validate(NodeConfig, table), command))
    return "neither would see the other" not in check.says


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ("m", ""),
        ("--data-parallel-size 2", "dp1"),
        ("--data-parallel-size=2", "dp0"),
        ("--data_parallel_size 2", "dp1"),
        ("--data_parallel_size=2", "dp1"),
        ("-dp 2", "dp1"),
        ("-dp=2", "dp1"),
        ("-dp 1 -dp 2", "dp1"),
        ("--data-parallel-size 1", ""),
        ("--data-parallel-size 2 --data_parallel_rank 1", ""),
    ],
)
def test_an_agent_in_the_directory_of_a_core_that_there_is_sees_production(
    tmp_path: Path, args: str, name: str
) -> None:
    assert seen_by_the_agent(tmp_path, name, args)


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ("m", "dp0"),
        ("--data-parallel-size 1", "dp0"),
        ("-dp=1", "dp0"),
        ("-dp 2 -dp 1", "dp0"),
        ("--data-parallel-size 2", ""),
        ("--data-parallel-size 2", "dp7"),
        ("--data-parallel-size 2", "dp2"),
        ("--data-parallel-size 2", "dp01"),
        ("--data-parallel-size two", "dp0"),
        ("--data-parallel-size", "dp0"),
        ("--data-parallel-size 2 --data_parallel_rank 1", "dp0"),
    ],
)
def test_an_agent_in_the_directory_of_a_core_that_there_is_not_would_never_see_it(
    tmp_path: Path, args: str, name: str
) -> None:
    assert not seen_by_the_agent(tmp_path, name, args)
