"""The cluster file is one that Ray takes, and a job joins the cluster by its address alone."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rose.config import load_config
from rose.train.train_config import TrainConfig

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """Ray's own."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    return json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())


@pytest.fixture
def cluster() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "ray_cluster.yaml").read_text())


def test_ray_takes_the_cluster(schema: dict[str, Any], cluster: dict[str, Any]) -> None:
    jsonschema.validate(cluster, schema)
    assert len(cluster["provider"]["worker_ips"]) == cluster["max_workers"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster | {"max_worker": 3}, schema)  # the schema does look


def test_the_nodes_find_the_head_and_the_dashboard_stays_on_it(cluster: dict[str, Any]) -> None:
    (head,) = [line for line in cluster["head_start_ray_commands"] if "ray start" in line]
    (worker,) = [line for line in cluster["worker_start_ray_commands"] if "ray start" in line]
    port = head.partition("--port=")[2].split()[0]
    assert f"--address=$RAY_HEAD_IP:{port}" in worker
    assert "--dashboard-host=127.0.0.1" in head


@pytest.mark.parametrize("name", ["frozenlake_grpo", "math_tools_dapo", "textgame_async"])
def test_a_job_joins_by_its_address_alone(name: str) -> None:
    laptop = load_config(TrainConfig, EXAMPLES / f"{name}.toml")
    joined = load_config(TrainConfig, EXAMPLES / f"{name}.toml", ['ray.address="auto"'])
    assert laptop.ray.address is None
    assert joined.model_dump(exclude={"ray"}) == laptop.model_dump(exclude={"ray"})
