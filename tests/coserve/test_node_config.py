"""What a node's settings are refused for before anything starts."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("scheduler", "engine"),
    [
        ("http://scheduler.internal:8800", {}),
        ("http://10.0.0.7:8800", {"advertise_url": "http://localhost:8100"}),
        ("http://[2001:db8::1]:8800", {"host": "::1", "advertise_url": "http://[::1]:8100"}),
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
