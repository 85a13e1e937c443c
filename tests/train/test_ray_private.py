"""The names of Ray's own that `rose.train.ray_private` uses do in the installed Ray what they are used for."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rose.errors import ConfigError
from rose.train import ray_private
from rose.train.cluster import find_cluster
from rose.train.ray_private import (
    cluster_started_here,
    on_loopback,
    raylets,
    reread_authentication,
    without_helpers,
)
from tests.engine_launcher import free_port

pytest.importorskip("ray")

from ray._private.utils import write_ray_address

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def test_a_node_stays_on_loopback_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    monkeypatch.setattr(services, "node_ip_address_from_perspective", lambda *_: "192.0.2.1")
    environment = dict(os.environ)
    with on_loopback():
        assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
    assert services.resolve_ip_for_localhost("127.0.0.1") == "192.0.2.1"
    assert dict(os.environ) == environment


def test_a_node_starts_what_nobody_asks_outside_only() -> None:
    from ray._private.node import Node

    start, node = [getattr(Node, name) for name in ray_private.HELPERS], object()
    with without_helpers():
        assert [getattr(Node, name)(node) for name in ray_private.HELPERS] == [None] * 3
    assert [getattr(Node, name) for name in ray_private.HELPERS] == start


def test_token_and_mode_are_those_that_the_environment_names_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode

    def now() -> tuple[AuthenticationMode, str]:
        reread_authentication()
        return get_authentication_mode(), AuthenticationTokenLoader.instance().get_raw_token()

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    try:
        for token in ("a" * 64, "b" * 64):
            path = tmp_path / token
            path.write_text(token)
            monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
            assert now() == (AuthenticationMode.TOKEN, token)
        monkeypatch.delenv("RAY_AUTH_MODE")
        assert now()[0] == AuthenticationMode.DISABLED
    finally:
        monkeypatch.undo()
        reread_authentication()


@pytest.fixture
def address_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As ``ray start`` left it, whose node is this process."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    node = (psutil.Process(), ["raylet", "--gcs-address=10.0.0.1:6379"])
    monkeypatch.setattr(ray_private, "raylets", lambda: [node])
    (tmp_path / "ray").mkdir()
    write_ray_address("10.0.0.1:6379")
    path = tmp_path / "ray" / "ray_current_cluster"
    path.chmod(0o644)
    return path


def test_the_cluster_that_was_started_here_is_found(address_file: Path) -> None:
    assert cluster_started_here() == "10.0.0.1:6379"
    assert find_cluster(None) == find_cluster("auto") == "auto"
    assert find_cluster("local") is None


def test_a_cluster_whose_node_is_gone_is_not_found(address_file: Path) -> None:
    address_file.write_text("10.0.0.2:6379")
    assert cluster_started_here() is None
    assert find_cluster(None) is None
    with pytest.raises(ConfigError, match="no Ray cluster of yours runs on this machine"):
        find_cluster("auto")


def test_an_address_that_others_may_write_is_not_joined(
    address_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address_file.chmod(0o666)
    assert cluster_started_here() is None
    assert "could be somebody else's" in caplog.text


def test_an_address_behind_a_link_is_not_joined(address_file: Path, tmp_path: Path) -> None:
    address_file.rename(tmp_path / "elsewhere")
    address_file.symlink_to(tmp_path / "elsewhere")
    assert cluster_started_here() is None


def test_the_nodes_of_another_user_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(uid: int) -> Any:
        uids = psutil.Process().uids()._replace(effective=uid)
        return SimpleNamespace(info={"name": "raylet", "cmdline": [str(uid)], "uids": uids})

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(psutil, "process_iter", lambda _: [node(0), node(1000), node(1001)])
    assert [arguments for _, arguments in raylets()] == [["0"], ["1000"]]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://127.0.0.1:8265", "RAY_ADDRESS: .* is the address of a dashboard"),
        ("127.0.0.1:{closed}", "RAY_ADDRESS: nothing answers at 127.0.0.1"),
        ("127.0.0.1:no", "RAY_ADDRESS: nothing answers at 127.0.0.1:no"),
    ],
)
def test_an_address_that_is_no_cluster_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str, message: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address.format(closed=free_port()))
    with pytest.raises(ConfigError, match=message):
        find_cluster(None)


def test_no_other_module_reaches_into_ray() -> None:
    rose = Path(__file__).parents[2] / "rose"
    inside = {"ray._", "from ray import _"}
    found = {
        path.name
        for path in rose.rglob("*.py")
        if any(word in line for line in path.read_text().splitlines() for word in inside if "``" not in line)
    }
    assert found == {"ray_private.py"}
