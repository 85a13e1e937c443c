"""Every shipped settings file is one that the program takes."""

from __future__ import annotations

from pathlib import Path

import yaml

from rose.config import load_config
from rose.coserve.config import NodeConfig

DEPLOY = Path(__file__).resolve().parent.parent / "examples" / "deploy"


def test_the_nodes_settings_load() -> None:
    config = load_config(NodeConfig, DEPLOY / "node.toml", [])
    assert config.mode == "observe"
    assert config.lending.max_slo_breaches > 0


def test_both_containers_of_the_sidecar_share_directory_user_and_volume() -> None:
    pod = yaml.safe_load((DEPLOY / "sidecar.yaml").read_text())["spec"]
    production, node = pod["containers"]
    mounts = [{m["name"]: m["mountPath"] for m in one["volumeMounts"]}["rose"] for one in (production, node)]
    assert mounts[0] == mounts[1]
    environment = {one["name"]: one["value"] for one in production["env"]}
    assert environment["ROSE_ROLE"] == "serving"
    assert environment["ROSE_DIR"].startswith(mounts[0])
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert not pod.get("shareProcessNamespace", False)


def test_the_units_name_programs_and_directories_that_belong_together() -> None:
    unit = (DEPLOY / "rose-node@.service").read_text()
    drop_in = (DEPLOY / "production.conf").read_text()
    assert "rose node run --config /etc/rose/%i.toml" in unit
    directory = load_config(NodeConfig, DEPLOY / "node.toml", []).dir
    assert f"ROSE_DIR={directory}" in drop_in
    assert f"d {directory} 0700" in (DEPLOY / "tmpfiles.conf").read_text()


def test_the_policys_weights_lie_on_a_disk_in_both_examples() -> None:
    config = load_config(NodeConfig, DEPLOY / "node.toml", [])
    assert not config.weights_dir.is_relative_to(config.dir)
    assert "CacheDirectory=rose\n" in (DEPLOY / "rose-node@.service").read_text()
    pod = yaml.safe_load((DEPLOY / "sidecar.yaml").read_text())["spec"]
    node = next(one for one in pod["containers"] if one["name"] == "rose-node")
    cache = next(one["value"] for one in node["env"] if one["name"] == "XDG_CACHE_HOME")
    volume = next(m["name"] for m in node["volumeMounts"] if m["mountPath"] == cache)
    assert "medium" not in next(v["emptyDir"] for v in pod["volumes"] if v["name"] == volume)
