"""``rose profile`` on engines that are scripts: what it refuses before it measures, and how it ends where nothing can be measured."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from rose.config import validate
from rose.coserve import profile_engine
from rose.coserve.node_config import NodeConfig
from rose.coserve.profile_engine import measure, profile_main
from rose.coserve.step_profile import Profile
from rose.errors import ConfigError, EngineError
from rose.proc import free_port

PROFILE = Profile(
    model="policy",
    base_s=1e-2,
    prefill_token_s=1e-5,
    decode_s=1e-4,
    context_token_s=1e-7,
    mae_fraction=0.02,
    median_error_fraction=0.01,
    num_steps=300,
    num_held_out=100,
)


def settings(tmp_path: Path, program: str, **engine: object) -> NodeConfig:
    """Of an engine that is a Python program."""
    script = tmp_path / "engine.py"
    script.write_text(program)
    table = {
        "node_id": "n0",
        "dir": str(tmp_path / "n"),
        "engine": {
            "model": "policy",
            "command": [sys.executable, str(script)],
            "port": free_port(),
            "max_model_len": 256,
            "sched": "normal",
            "log_path": str(tmp_path / "engine.log"),
            "stop_grace_s": 0.2,
            **engine,
        },
    }
    return validate(NodeConfig, table)


async def test_an_engine_that_dies_is_not_waited_for(tmp_path: Path) -> None:
    dies = settings(tmp_path, "raise SystemExit('CUDA out of memory')", start_timeout_s=3600.0)
    with pytest.raises(EngineError) as ended:
        await measure(dies, 5.0, lambda _: None)
    assert "CUDA out of memory" in str(ended.value)
    assert str(tmp_path / "engine.log") in str(ended.value)


async def test_what_refuses_a_start_is_said_at_once(tmp_path: Path) -> None:
    """An agent would try again, for as long as a start may take."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        lacks = settings(tmp_path, "", port=taken.getsockname()[1], start_timeout_s=3600.0)
        with pytest.raises(EngineError, match=r"engine\.port"):
            await measure(lacks, 5.0, lambda _: None)


async def test_an_engine_that_is_not_ready_in_time_is_an_error_with_its_log(tmp_path: Path) -> None:
    hangs = settings(tmp_path, "import time\ntime.sleep(3600)", start_timeout_s=0.5)
    with pytest.raises(EngineError) as late:
        await measure(hangs, 5.0, lambda _: None)
    assert str(tmp_path / "engine.log") in str(late.value)


def node_toml(tmp_path: Path) -> Path:
    file = tmp_path / "node.toml"
    file.write_text(f'dir = "{tmp_path / "n"}"\n[engine]\nmodel = "policy"\nmax_model_len = 256\n')
    return file


def test_a_folder_that_is_not_there_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> Profile:
        raise AssertionError("measured")

    monkeypatch.setattr(profile_engine, "measure", never)
    with pytest.raises(ConfigError, match="missing"):
        profile_main(node_toml(tmp_path), out=tmp_path / "missing" / "p.json")
    with pytest.raises(ConfigError, match="directory"):
        profile_main(node_toml(tmp_path), out=tmp_path)
    assert not (tmp_path / "missing").exists()


def test_a_profile_that_cannot_be_written_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measured(*_: object) -> Profile:
        return PROFILE

    monkeypatch.setattr(profile_engine, "measure", measured)
    with pytest.raises(ConfigError, match="No space left"):
        profile_main(node_toml(tmp_path), out=Path("/dev/full"))
    assert PROFILE.to_json() in capsys.readouterr().out
