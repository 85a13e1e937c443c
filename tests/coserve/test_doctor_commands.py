"""Whether ``rose doctor`` finds production and its agent in one directory: vLLM gives each engine core of several one of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rose.config import validate
from rose.coserve import doctor
from rose.coserve.doctor import Command
from rose.coserve.node_config import NodeConfig


@pytest.mark.parametrize(
    ("num_cores", "name", "sees"),
    [
        (1, "", True),
        (1, "dp0", False),
        (2, "", False),
        (2, "dp0", True),
        (2, "dp1", True),
        (2, "dp2", False),
        (2, "dp01", False),
        (None, "", True),
        (None, "dp1", True),
        (None, "elsewhere", False),
    ],
)
def test_who_is_where_no_engine_core_is_would_never_see_production(
    tmp_path: Path, num_cores: int | None, name: str, sees: bool
) -> None:
    engine = {"model": "policy", "max_model_len": 512}
    table = {"node_id": "a", "dir": str(tmp_path / "n" / name), "serving": {}, "engine": engine}
    command = Command(python=sys.executable, args=(), env={"ROSE_DIR": str(tmp_path / "n")})
    check = next(doctor._host(validate(NodeConfig, table), command, num_cores))
    assert ("neither would see the other" not in check.says) == sees
