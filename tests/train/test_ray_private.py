"""The names of Ray's own that `rose.train.ray_private` uses do in the installed Ray what they are used for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("ray")

from rose.train.ray_private import on_loopback, reread_authentication

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def test_a_node_stays_on_loopback_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    monkeypatch.setattr(services, "node_ip_address_from_perspective", lambda *_: "192.0.2.1")
    environment = dict(os.environ)
    with on_loopback():
        assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
    assert services.resolve_ip_for_localhost("127.0.0.1") == "192.0.2.1"
    assert dict(os.environ) == environment


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


def test_no_other_module_reaches_into_ray() -> None:
    rose = Path(__file__).parents[2] / "rose"
    inside = {"ray._", "from ray import _"}
    found = {
        path.name
        for path in rose.rglob("*.py")
        if any(word in line for line in path.read_text().splitlines() for word in inside if "``" not in line)
    }
    assert found == {"ray_private.py"}
