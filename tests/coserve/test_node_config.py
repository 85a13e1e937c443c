"""What a node's settings are refused for before anything starts."""

from __future__ import annotations

import socket

import pytest

from rose.config import validate
from rose.coserve.engine import RolloutEngine
from rose.coserve.node_config import NodeConfig
from rose.errors import ConfigError


def config(scheduler: str, **engine: str) -> NodeConfig:
    return NodeConfig.model_validate(
        {
            "node_id": "a",
            "dir": "/run/rose/a",
            "engine": {"model": "m", "max_model_len": 512, **engine},
            "scheduler": {"url": scheduler},
        }
    )


def test_a_device_is_lent_by_production_or_by_a_trainer_not_by_both() -> None:
    table = {"node_id": "a", "dir": "/run/rose/a", "engine": {"model": "m", "max_model_len": 512}}
    assert validate(NodeConfig, {**table, "borrowed": True}).tier == "borrowed"
    with pytest.raises(ConfigError, match=r"borrowed is for a device without \[serving\]"):
        validate(NodeConfig, {**table, "borrowed": True, "serving": {}})


@pytest.mark.parametrize("option", ["--async-scheduling", "--async_scheduling"])
def test_steps_that_begin_before_the_last_has_ended_are_refused_beside_production_only(option: str) -> None:
    table = {"dir": "/run/rose/a", "engine": {"model": "m", "max_model_len": 512, "args": [option]}}
    assert validate(NodeConfig, table).engine.args == (option,)
    with pytest.raises(ConfigError, match=r"engine\.args has --async-scheduling"):
        validate(NodeConfig, {**table, "serving": {}})


def test_a_file_that_says_no_mode_lends_nothing_of_production() -> None:
    table = {"node_id": "a", "dir": "/run/rose/a", "engine": {"model": "m", "max_model_len": 512}}
    assert validate(NodeConfig, {**table, "serving": {}}).mode == "observe"
    assert validate(NodeConfig, {**table, "serving": {}, "mode": "on"}).mode == "on"
    assert validate(NodeConfig, table).mode == "on"
    assert validate(NodeConfig, {**table, "borrowed": True}).mode == "on"


def test_a_file_that_is_right_for_many_hosts_gives_each_of_their_devices_a_name_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {"dir": "/run/rose/gpu 0", "engine": {"model": "m", "max_model_len": 512}}
    for host, node_id in (("host7", "host7-gpu_0"), ("h" * 64, "h" * 64 + "-gpu_0"), ("", "localhost-gpu_0")):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert validate(NodeConfig, table).node_id == node_id
    assert validate(NodeConfig, {**table, "node_id": "mine"}).node_id == "mine"
    with pytest.raises(ConfigError, match="dir"):
        validate(NodeConfig, {"engine": table["engine"]})


@pytest.mark.parametrize(
    ("scheduler", "engine"),
    [
        ("http://scheduler.internal:8800", {}),
        ("http://10.0.0.7:8800", {"advertise_url": "http://localhost:8100"}),
        ("http://[2001:db8::1]:8800", {"host": "::1", "advertise_url": "http://[::1]:8100"}),
        ("http://scheduler.internal:8800", {"host": "::1"}),
        ("http://scheduler.internal:8800", {"host": "0.0.0.0"}),
        ("http://scheduler.internal:8800", {"host": "::"}),
        ("http://scheduler.internal:8800", {"host": "0.0.0.0", "advertise_url": "http://0.0.0.0:8100"}),
    ],
)
def test_an_engine_that_its_scheduler_cannot_reach_is_refused(scheduler: str, engine: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        config(scheduler, **engine).require_reachable()
    assert refused.value.field == "engine.advertise_url"


@pytest.mark.parametrize(
    ("scheduler", "engine"),
    [
        ("http://127.0.0.1:8800", {}),
        ("http://localhost:8800", {"host": "127.0.0.1"}),
        ("http://scheduler.internal:8800", {"advertise_url": "http://host7:8100"}),
        ("http://scheduler.internal:8800", {"host": "10.0.0.8"}),
    ],
)
def test_an_engine_that_its_scheduler_can_reach_is_not(scheduler: str, engine: dict[str, str]) -> None:
    config(scheduler, **engine).require_reachable()


@pytest.mark.parametrize(
    ("host", "url"),
    [("::1", "http://[::1]:8100"), ("10.0.0.8", "http://10.0.0.8:8100"), ("h7", "http://h7:8100")],
)
def test_an_engines_url_has_brackets_around_an_ipv6_address(host: str, url: str) -> None:
    assert config("http://localhost:8800", host=host).engine_url == url


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8100"),
        ("", "http://127.0.0.1:8100"),
        ("::", "http://[::1]:8100"),
        ("0::0", "http://[::1]:8100"),
    ],
)
def test_an_engine_that_listens_on_every_address_is_called_on_this_hosts_own(host: str, url: str) -> None:
    settings = config("http://localhost:8800", host=host)
    assert (settings.engine_url, RolloutEngine(settings).url) == (url, url)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nod_id": "x"}, r"nod_id: unknown key \(did you mean 'node_id'\?\)"),
        ({"engine": {"model": "m", "max_model_len": 8, "prot": 1}}, r"engine\.prot: unknown key.*'port'"),
        (
            {"engine": {"model": "m", "max_model_length": 8}},
            r"engine\.max_model_length: unknown.*'max_model_len'",
        ),
        ({"engine": {"model": "m"}}, r"engine\.max_model_len: is required"),
        ({"engine": {"model": "m", "max_model_len": 8, "port": 70000}}, r"engine\.port"),
        ({"serving": {"slo_ttft_ms": 0}}, r"serving\.slo_ttft_ms"),
        ({"lending": {"min_headroom_fraction": 1.5}}, r"lending\.min_headroom_fraction"),
        ({"lending": {"cool_down_s": float("inf")}}, r"lending\.cool_down_s"),
        ({"node_id": "../x"}, "node_id"),
        ({"scheduler": {"url": "ftp://x"}}, r"scheduler\.url"),
        ({"scheduler": {"url": "http://x:8800,http://y:8800/v1/"}}, r"scheduler\.url: .*ends with /v1"),
        ({"mode": "maybe"}, "mode"),
        ({"dir": "rose/gpu0"}, r"dir: .*is relative"),
    ],
)
def test_bad_settings_name_their_field(change: dict[str, object], message: str) -> None:
    table = {"node_id": "n", "dir": "/x", "engine": {"model": "m", "max_model_len": 8}, **change}
    with pytest.raises(ConfigError, match=message):
        validate(NodeConfig, table)
