"""A tiny model's configuration, a relay, and the node directory of a serving engine without one; files that need others define their own."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.auth import Tokens
from rose.testing.relay_thread import RelayThread
from rose.weights.file_store import FileStore
from rose.weights.http_store import HttpStore
from rose.weights.store import ObjectStore
from tests.plugin import harness
from tests.tiny_model import write_tiny_model
from vllm_plugin.lines import LINES, line_of

OF_A_POLICY = (
    "test_faults_engine.py",
    "test_parses.py",
    "test_rollout_engine.py",
    "test_weights_commit.py",
    "test_weights_engine.py",
    "test_weights_ranks_engine.py",
    "test_weights_routes.py",
    "test_weights_stock_engine.py",
    "test_weights_versions_engine.py",
)
"""Files whose engines roll out, or take a policy's weights: of the newest line alone."""
ON_NEWEST = line_of(importlib.metadata.version("vllm")) in LINES["rollout"]
newest_only = pytest.mark.skipif(not ON_NEWEST, reason="asks what only the newest line of vLLM has")
if not ON_NEWEST:
    os.environ["ROSE_ALLOW_UNMEASURED"] = "1"  # `make lines` is how such a line is tried
    collect_ignore = list(OF_A_POLICY)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return harness.engine_config(folder)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """As trainers and readers reach it."""
    tokens = Tokens.generate()
    files = FileStore(tmp_path_factory.mktemp("relay"), durable=False)
    with RelayThread(files, tokens) as thread:
        store = HttpStore(thread.url, tokens.publish)
        yield store
        store.close()


@pytest.fixture
def node_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "node"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("ROSE_DIR", str(path))
    monkeypatch.setenv("ROSE_ROLE", "serving")
    return path


@pytest.fixture
def rank(node_dir: Path) -> Iterator[Any]:
    writer = harness.write_rank(node_dir, "serving", mapped=True)
    yield writer
    writer.close()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of the plugin, with their level."""
    plugin = logging.getLogger("vllm.rose")
    monkeypatch.setattr(plugin, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    lines: list[str] = []
    caplog.set_level(logging.INFO, plugin.name)
    # One handler serves all tests of a process.
    monkeypatch.setattr(
        caplog.handler, "emit", lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    )
    return lines
