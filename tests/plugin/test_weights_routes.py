"""The endpoint plugin before there is an engine: which routes exist, and when the server must not start."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rose.errors import ConfigError, NotFound, RequestError
from vllm_plugin.endpoints import kv_mode, make_plugin, update_path

TOKEN = "0123456789abcdef"


@pytest.fixture
def app() -> FastAPI:
    return FastAPI(openapi_url=None, docs_url=None, redoc_url=None)


@pytest.mark.parametrize("role", [None, "", "serving", "nonsense"])
def test_only_a_rollout_engine_has_routes(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, role: str | None
) -> None:
    monkeypatch.delenv("ROSE_NODE_TOKEN", raising=False)
    if role is None:
        monkeypatch.delenv("ROSE_ROLE", raising=False)
    else:
        monkeypatch.setenv("ROSE_ROLE", role)
    make_plugin().attach_router(app)
    assert app.routes == []


@pytest.mark.parametrize("token", [None, "", "short"])
def test_a_rollout_engine_does_not_start_without_a_node_token(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    monkeypatch.setenv("ROSE_ROLE", "rollout")
    if token is None:
        monkeypatch.delenv("ROSE_NODE_TOKEN", raising=False)
    else:
        monkeypatch.setenv("ROSE_NODE_TOKEN", token)
    with pytest.raises(ConfigError, match="ROSE_NODE_TOKEN"):
        make_plugin().attach_router(app)
    assert app.routes == []


def test_routes_answer_503_until_the_engine_is_there(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_ROLE", "rollout")
    monkeypatch.setenv("ROSE_NODE_TOKEN", TOKEN)
    make_plugin().attach_router(app)
    with TestClient(app) as client:
        answer = client.get("/rose/status", headers={"Authorization": f"Bearer {TOKEN}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")


def test_update_files_are_read_from_the_two_folders_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, weights, outside = (tmp_path / name for name in ("node", "weights", "weights-not"))
    for folder in (node, weights, outside):
        folder.mkdir()
        (folder / "u").write_bytes(b"x")
    monkeypatch.setenv("ROSE_DIR", str(node))
    monkeypatch.setenv("ROSE_WEIGHTS_DIR", str(weights))
    assert update_path(str(node / "u")) == str(node / "u")
    assert update_path(str(weights / ".." / "weights" / "u")) == str(weights / "u")
    for path in (outside / "u", weights / ".." / "weights-not" / "u"):
        with pytest.raises(RequestError, match="must lie below") as caught:
            update_path(str(path))
        assert caught.value.status == 403
    with pytest.raises(NotFound):
        update_path(str(weights / "absent"))
    with pytest.raises(RequestError, match="regular file"):
        update_path(str(weights))


def test_the_request_decides_about_the_kv_cache_and_the_environment_is_its_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ROSE_WEIGHTS_KV", raising=False)
    assert kv_mode(None) == "reset"
    monkeypatch.setenv("ROSE_WEIGHTS_KV", "keep")
    assert (kv_mode(None), kv_mode("reset")) == ("keep", "reset")
    with pytest.raises(RequestError, match="kv"):
        kv_mode("pepper")
    monkeypatch.setenv("ROSE_WEIGHTS_KV", "pepper")
    with pytest.raises(ConfigError, match="ROSE_WEIGHTS_KV"):
        kv_mode(None)
