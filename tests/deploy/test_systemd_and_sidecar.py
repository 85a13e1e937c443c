"""Every shipped settings file is one that the program takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from rose.auth import PARTS, Tokens
from rose.config import load_config
from rose.coserve.node_config import NodeConfig
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import NodeState
from rose.errors import ConfigError
from rose.private_dir import private_dir
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.wire.hosts import host_name
from tests.deploy.programs import check_call, start_of
from tests.users import STRANGER, act_as, needs_root, volume

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SYSTEMD = DEPLOY / "systemd"
SIDECAR = DEPLOY / "kubernetes" / "sidecar.yaml"


def test_the_nodes_settings_load() -> None:
    config = load_config(NodeConfig, SYSTEMD / "node.toml", [])
    assert config.mode == "observe"
    assert config.node_id == f"{host_name() or 'localhost'}-gpu0"  # copied from host to host as it is
    assert config.lending.max_slo_breaches > 0


def test_the_scheduler_s_settings_load_and_are_those_that_the_nodes_ask() -> None:
    scheduler = load_config(SchedulerConfig, SYSTEMD / "scheduler.toml", [])
    node = load_config(NodeConfig, SYSTEMD / "node.toml", [])
    assert scheduler.host == "0.0.0.0"
    assert node.scheduler is not None
    assert node.scheduler.url.endswith(f":{scheduler.port}")
    assert node.weights is not None
    relay = (SYSTEMD / "rose-relay.service").read_text()
    assert f"--port {node.weights.relay_url.rpartition(':')[2]} " in relay


def test_both_containers_of_the_sidecar_share_directory_user_and_volume() -> None:
    pod = yaml.safe_load(SIDECAR.read_text())["spec"]
    production, node = pod["containers"]
    mounts = [{m["name"]: m["mountPath"] for m in one["volumeMounts"]}["rose"] for one in (production, node)]
    assert mounts[0] == mounts[1]
    environment = {one["name"]: one["value"] for one in production["env"]}
    assert environment["ROSE_ROLE"] == "serving"
    assert environment["ROSE_DIR"].startswith(mounts[0])
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert not pod.get("shareProcessNamespace", False)


def test_both_containers_of_the_sidecar_call_what_their_images_have() -> None:
    """Arguments alone are added to an image's entry point, and that of vLLM's image is ``vllm serve``."""
    pod = yaml.safe_load(SIDECAR.read_text())["spec"]
    production, node = (start_of(container) for container in pod["containers"])
    assert production == ["vllm", "serve", "/models/production"]
    check_call(node)
    (copy,) = pod["initContainers"]
    assert start_of(copy)[0] == "install"
    environment = {one["name"] for one in pod["containers"][1]["env"]}
    assert "ROSE_TOKEN_FILE" in environment


def test_the_sidecar_asks_for_as_much_as_the_chart_s_agents_and_says_where_its_settings_come_from() -> None:
    text = SIDECAR.read_text()
    (node,) = (one for one in yaml.safe_load(text)["spec"]["containers"] if one["name"] == "rose-node")
    values = yaml.safe_load((DEPLOY / "helm" / "rose" / "values.yaml").read_text())
    assert node["resources"] == values["node"]["resources"]
    assert "kubectl create configmap rose-node --from-file=node.toml" in text


def test_the_sidecar_s_agent_meets_production_and_is_reached_with_the_shipped_settings() -> None:
    """``node.toml`` is written for a unit: what differs in a pod, the container says itself."""
    pod = yaml.safe_load(SIDECAR.read_text())["spec"]
    production, node = pod["containers"]
    argv = start_of(node)
    given = [argv[at + 1].replace("$(POD_IP)", "10.1.2.3") for at, one in enumerate(argv) if one == "--set"]
    config = load_config(NodeConfig, SYSTEMD / "node.toml", given)
    (pod_ip,) = (one["valueFrom"] for one in node["env"] if one["name"] == "POD_IP")
    assert pod_ip == {"fieldRef": {"fieldPath": "status.podIP"}}
    of_production = {one["name"]: one["value"] for one in production["env"]}
    of_node = {one["name"]: one.get("value") for one in node["env"]}
    assert of_production["ROSE_DIR"] == str(config.dir) == of_node["ROSE_DIR"]
    config.require_reachable()
    assert config.engine.host == "0.0.0.0"
    assert config.engine_url == f"http://10.1.2.3:{config.engine.port}"
    assert node["ports"] == [{"containerPort": config.engine.port}]
    mounted = {mount["mountPath"]: mount for mount in node["volumeMounts"]}
    assert config.engine.log_path is not None
    assert config.decisions.directory is not None
    for written in (config.engine.log_path, config.decisions.directory):
        (mount,) = (each for at, each in mounted.items() if written.is_relative_to(at))
        assert not mount.get("readOnly"), written


def test_the_units_name_programs_and_directories_that_belong_together() -> None:
    unit = (SYSTEMD / "rose-node@.service").read_text()
    drop_in = (SYSTEMD / "production.conf").read_text()
    assert "rose node run --config /etc/rose/%i.toml" in unit
    directory = load_config(NodeConfig, SYSTEMD / "node.toml", []).dir
    assert f"ROSE_DIR={directory}" in drop_in
    assert f"d {directory} 0700" in (SYSTEMD / "tmpfiles.conf").read_text()


def test_units_on_one_host_have_a_token_file_each_with_what_their_program_needs() -> None:
    """Their users differ, and a token file is one user's alone."""
    page = (DEPLOY.parent / "docs" / "deploying.md").read_text()
    files: set[str] = set()
    for name, unit in (("scheduler", "rose-scheduler"), ("relay", "rose-relay"), ("node", "rose-node@")):
        text = (SYSTEMD / f"{unit}.service").read_text()
        (user,) = re.findall(r"^User=(\S+)$", text, re.M)
        (file,) = re.findall(r"^Environment=ROSE_TOKEN_FILE=(\S+)$", text, re.M)
        made = f"-o {user} -g {user} -m 0600 tokens/{name}.toml {file}"
        assert f"install {made}\n" in text
        assert f"install -D {made} " in page
        assert name in PARTS
        files.add(file)
    assert len(files) == 3
    operating = (DEPLOY.parent / "docs" / "operating.md").read_text()
    assert f"sudo -u {user} env ROSE_TOKEN_FILE={file} " in operating


def test_an_agent_with_wrong_settings_is_not_started_again_and_again() -> None:
    unit = (SYSTEMD / "rose-node@.service").read_text()
    assert f"RestartPreventExitStatus={ConfigError.exit_code}\n" in unit


def test_the_policys_weights_lie_on_a_disk_in_both_examples() -> None:
    config = load_config(NodeConfig, SYSTEMD / "node.toml", [])
    assert not config.weights_dir.is_relative_to(config.dir)
    assert "CacheDirectory=rose\n" in (SYSTEMD / "rose-node@.service").read_text()
    pod = yaml.safe_load(SIDECAR.read_text())["spec"]
    node = next(one for one in pod["containers"] if one["name"] == "rose-node")
    cache = next(one["value"] for one in node["env"] if one["name"] == "XDG_CACHE_HOME")
    volume = next(m["name"] for m in node["volumeMounts"] if m["mountPath"] == cache)
    assert "medium" not in next(v["emptyDir"] for v in pod["volumes"] if v["name"] == volume)


@pytest.mark.parametrize("name", ["rose-scheduler", "rose-relay"])
def test_a_daemon_s_unit_calls_a_program_that_there_is(name: str) -> None:
    unit = (SYSTEMD / f"{name}.service").read_text()
    (command,) = re.findall(r"^ExecStart=/opt/rose/bin/(.*)$", unit, re.M)
    check_call(command.split())
    state = re.search(r"^StateDirectory=(\S+)$", unit, re.M)
    assert state is not None
    assert f"/var/lib/{state[1]}/" in command


def share_the_node_directory(path: Path) -> None:
    """What the agent and production do in it."""
    with NodeDir(path).node_writer() as writer:
        writer.write(NodeState(lend_pages=7))
        found = NodeDir(path).node().read()
        assert found is not None
        assert found.lend_pages == 7


@needs_root
def test_the_pods_user_takes_its_volumes_and_its_tokens(public: Path) -> None:
    """As the kubelet gives them: a secret is root's with fsGroup, an emptyDir too, setgid and open to all."""
    pod = yaml.safe_load(SIDECAR.read_text())["spec"]
    uid, group = pod["securityContext"]["runAsUser"], pod["securityContext"]["fsGroup"]
    production, node = pod["containers"]
    (copy,) = pod["initContainers"]
    secret = public / "tokens-secret"
    secret.mkdir()
    of_secret = next(v["secret"] for v in pod["volumes"] if v["name"] == "tokens-secret")
    (item,) = of_secret["items"]
    Tokens.generate().only(PARTS[Path(item["key"]).stem]).save(secret / item["path"])
    (secret / "tokens.toml").chmod(of_secret["defaultMode"])
    os.chown(secret / "tokens.toml", 0, group)

    def there(container: dict[str, object], text: str) -> str:
        """Where a path of that container lies on this machine."""
        mounts: list[dict[str, str]] = container["volumeMounts"]  # pyright: ignore[reportAssignmentType]
        for mount in mounts:
            if text == mount["mountPath"] or text.startswith(mount["mountPath"] + "/"):
                return str(public / mount["name"]) + text.removeprefix(mount["mountPath"])
        return text

    def run() -> None:
        subprocess.run([there(copy, one) for one in copy["command"]], check=True)
        of_node = {one["name"]: one.get("value", "") for one in node["env"]}
        assert Tokens.load(there(node, of_node["ROSE_TOKEN_FILE"]), PARTS["node"]).names == PARTS["node"]
        directory = next(one["value"] for one in production["env"] if one["name"] == "ROSE_DIR")
        share_the_node_directory(Path(there(production, directory)))
        private_dir(Path(there(node, of_node["XDG_CACHE_HOME"])) / "rose" / "host7-gpu0").make()

    with volume(public / "rose", group), volume(public / "tokens", group), volume(public / "weights", group):
        act_as(uid, run)


@needs_root
@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="needs systemd-tmpfiles")
def test_the_units_user_takes_the_directories_that_systemd_makes_for_it(public: Path) -> None:
    (public / "etc").mkdir()
    (public / "etc" / "passwd").write_text(f"root:x:0:0::/:\nvllm:x:{STRANGER}:{STRANGER}::/:\n")
    (public / "etc" / "group").write_text(f"root:x:0:\nvllm:x:{STRANGER}:\n")
    made = ["systemd-tmpfiles", "--create", f"--root={public}", str(SYSTEMD / "tmpfiles.conf")]
    subprocess.run(made, check=True, capture_output=True)
    unit = (SYSTEMD / "rose-node@.service").read_text()
    assert "User=vllm\n" in unit
    tokens = next(line for line in unit.splitlines() if "install -o vllm" in line).partition("install ")[2]
    source = public / "tokens.toml"
    Tokens.generate().save(source)
    (public / "etc" / "rose").mkdir()
    options = tokens.replace("vllm", str(STRANGER)).split()[:-2]
    subprocess.run(["install", *options, source, public / "etc" / "rose" / "tokens.toml"], check=True)
    directory = load_config(NodeConfig, SYSTEMD / "node.toml", []).dir

    def run() -> None:
        share_the_node_directory(public / directory.relative_to("/"))
        Tokens.load(public / "etc" / "rose" / "tokens.toml")

    act_as(STRANGER, run)
