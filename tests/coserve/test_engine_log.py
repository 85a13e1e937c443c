"""Where the rollout engine's output goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rose.config import validate
from rose.coserve.engine_log import EngineLog
from rose.coserve.node_config import NodeConfig
from tests.coserve.conftest import Device, until


def config(path: Path, **engine: Any) -> NodeConfig:
    table = {"node_id": "n0", "dir": str(path / "n"), "engine": {"model": "m", "max_model_len": 8, **engine}}
    return validate(NodeConfig, table)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    return tmp_path / "cache"


async def test_an_engine_that_does_not_start_leaves_its_last_words_in_a_file_that_nobody_had_to_name(
    device: Device, cache: Path
) -> None:
    device.produce()
    agent = device.agent("die", engine={"log_path": None})
    path = cache / "logs" / "n0-engine.log"
    await until(lambda: "before it was ready" in agent.engine.error)
    assert f"the end of {path}:\n" in agent.engine.error
    assert "no such model" in agent.engine.error
    assert path.stat().st_mode & 0o777 == 0o600
    assert agent.status()["engine"]["log"] == str(path)


def test_what_is_kept_is_bounded_under_an_engine_that_goes_on_writing(tmp_path: Path) -> None:
    log = EngineLog(config(tmp_path), max_bytes=10)
    path = log.begin()
    assert path is not None
    with path.open("a") as engine:
        for text in ("first of all\n", "second of all\n", "third\n"):
            engine.write(text)
            engine.flush()
            if log.is_full():
                log.roll()
    assert path.read_text() == "third\n"
    before = path.with_name("n0-engine.log.1")
    assert before.read_text() == "nd of all\n"
    assert before.stat().st_mode & 0o777 == 0o600


def test_a_place_that_nobody_named_and_that_cannot_be_written_is_no_reason_to_start_nothing(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.touch()
    assert EngineLog(config(tmp_path)).begin() is None
    assert "output is thrown away" in caplog.text
    assert EngineLog(config(tmp_path, log_path="/proc/x/y")).begin() == Path("/proc/x/y")


def test_what_is_no_file_is_left_as_it_is(tmp_path: Path) -> None:
    assert not EngineLog(config(tmp_path, log_path=os.devnull), max_bytes=-1).is_full()
