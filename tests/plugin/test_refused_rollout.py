"""A real rollout engine that the compatibility table refuses: it ends with the words by which its agent knows that another start would end as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.coserve.engine_keeper import REFUSED
from tests.engine_launcher import EngineServer, EngineStartError
from tests.plugin.stand_in import Host
from tests.tiny_shapes import write_shape

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_rollout_engine_that_is_refused_says_so_in_words_that_its_agent_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "n").mkdir(mode=0o700)
    host = Host(tmp_path / "n")
    tail = EngineServer.log_tail
    monkeypatch.setattr(EngineServer, "log_tail", lambda server, lines: tail(server, 5000))
    args = ("--load-format=dummy", "--enforce-eager", f"--kv-cache-memory-bytes={32 << 20}")
    server = EngineServer(
        write_shape(tmp_path / "model", "gemma3"),
        role="rollout",
        env={"ROSE_DIR": str(tmp_path / "n")},
        args=args,
    )
    try:
        with pytest.raises(EngineStartError) as caught, server:
            pass
    finally:
        host.close()
    assert f"{REFUSED}several KV cache groups" in str(caught.value)
