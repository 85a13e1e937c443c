"""The Helm chart: what it renders is consistent in itself, and its settings are those that the programs take."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rose.auth import PARTS
from rose.config import load_config
from rose.coserve.node_config import NodeConfig, cache_directory
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.train.train_config import TrainConfig
from tests.deploy.chart import Template, TemplateError, render
from tests.deploy.programs import check_call, start_of

ROOT = Path(__file__).resolve().parents[2]
ALL = {"train": {"enabled": True}}
TWO = {
    "node": {
        "devices": [
            {"name": "gpu0", "visible": "0", "port": 8100},
            {"name": "gpu1", "visible": "1", "port": 8101},
        ]
    }
}
SCHEMAS = tomllib.loads((ROOT / "deploy" / "schemas.toml").read_text())
KINDS = {
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "Service": "io.k8s.api.core.v1.Service",
    "StatefulSet": "io.k8s.api.apps.v1.StatefulSet",
    "DaemonSet": "io.k8s.api.apps.v1.DaemonSet",
    "Pod": "io.k8s.api.core.v1.Pod",
    "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
}


@pytest.fixture(scope="module")
def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    found = render(ALL, TWO)
    named = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(named) == len(found)
    return named


def pods_of(manifest: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Pod templates."""
    match manifest["kind"]:
        case "StatefulSet" | "DaemonSet":
            yield manifest["spec"]["template"]
        case "RayJob":
            cluster = manifest["spec"]["rayClusterSpec"]
            yield cluster["headGroupSpec"]["template"]
            yield from (group["template"] for group in cluster["workerGroupSpecs"])
        case _:
            pass


def environment_of(container: Mapping[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", f"<{one['name']}>") for one in container.get("env", ())}


def expanded(text: str, env: Mapping[str, str]) -> str:
    """As Kubernetes does with ``$(NAME)``; what it takes from the pod stands as the variable's name in small letters."""
    return re.sub(r"\$\((\w+)\)", lambda found: env[found[1]].strip("<>").lower(), text)


def test_every_part_is_there(manifests: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert set(manifests) == {
        ("ConfigMap", "rose-scheduler"), ("Service", "rose-scheduler"), ("StatefulSet", "rose-scheduler"),
        ("Service", "rose-relay"), ("StatefulSet", "rose-relay"),
        ("ConfigMap", "rose-node"), ("DaemonSet", "rose-node"),
        ("ConfigMap", "rose-train"), ("RayJob", "rose-train"), ("NetworkPolicy", "rose-train"),
    }  # fmt: skip


@pytest.mark.parametrize("part", ["scheduler", "relay", "node", "train"])
def test_a_part_that_is_switched_off_leaves_nothing(part: str) -> None:
    names = {each["metadata"]["name"] for each in render(ALL, {part: {"enabled": False}})}
    assert f"rose-{part}" not in names
    assert len(names) == 3


def test_what_a_pod_mounts_it_has(manifests: dict[tuple[str, str], dict[str, Any]]) -> None:
    config_maps = {name for kind, name in manifests if kind == "ConfigMap"}
    for manifest in manifests.values():
        claims = (
            {each["metadata"]["name"] for each in manifest["spec"].get("volumeClaimTemplates", ())}
            if "spec" in manifest
            else set()
        )
        for pod in pods_of(manifest):
            spec = pod["spec"]
            volumes = {each["name"]: each for each in spec["volumes"]}
            for container in [*spec["initContainers"], *spec["containers"]]:
                mounted = {each["name"] for each in container["volumeMounts"]}
                assert mounted <= {*volumes, *claims}, container["name"]
            assert {
                each["configMap"]["name"] for each in volumes.values() if "configMap" in each
            } <= config_maps


def test_every_call_is_one_that_its_program_takes(manifests: dict[tuple[str, str], dict[str, Any]]) -> None:
    calls = [manifests["RayJob", "rose-train"]["spec"]["entrypoint"].split()]
    for manifest in manifests.values():
        containers = [each for pod in pods_of(manifest) for each in pod["spec"]["containers"]]
        calls += [start_of(each) for each in containers if "args" in each]
    assert len(calls) == 5
    for call in calls:
        check_call(call)


def test_selectors_find_their_pods_and_services_their_ports(
    manifests: dict[tuple[str, str], dict[str, Any]],
) -> None:
    for (kind, name), manifest in manifests.items():
        if kind in ("StatefulSet", "DaemonSet"):
            labels = manifest["spec"]["template"]["metadata"]["labels"]
            assert manifest["spec"]["selector"]["matchLabels"].items() <= labels.items()
        if kind == "Service":
            template = manifests["StatefulSet", name]["spec"]["template"]
            assert manifest["spec"]["selector"].items() <= template["metadata"]["labels"].items()
            (container,) = template["spec"]["containers"]
            ports = {each["name"]: each["containerPort"] for each in container["ports"]}
            (port,) = manifest["spec"]["ports"]
            assert ports[port["targetPort"]] == port["port"]


def test_each_device_has_an_agent_that_takes_its_settings(
    manifests: dict[tuple[str, str], dict[str, Any]], tmp_path: Path
) -> None:
    config = tmp_path / "node.toml"
    config.write_text(manifests["ConfigMap", "rose-node"]["data"]["node.toml"])
    spec = manifests["DaemonSet", "rose-node"]["spec"]["template"]["spec"]
    taken = []
    for container in spec["containers"]:
        env = environment_of(container)
        said = [expanded(each, env) for each in container["args"]]
        assert said[:5] == ["rose", "node", "run", "--config", "/etc/rose/node.toml"]
        assert said[5::2] == ["--set"] * len(said[6::2])
        node = load_config(NodeConfig, config, said[6::2])
        assert str(node.dir) == env["ROSE_DIR"]
        assert node.mode == "observe"
        assert node.engine.advertise_url == f"http://pod_ip:{node.engine.port}"
        assert [each["containerPort"] for each in container["ports"]] == [node.engine.port]
        taken.append((node.node_id, str(node.dir), node.engine.port, env["NVIDIA_VISIBLE_DEVICES"]))
    assert taken == [
        ("node_name-gpu0", "/run/rose/gpu0", 8100, "0"),
        ("node_name-gpu1", "/run/rose/gpu1", 8101, "1"),
    ]


def test_the_policy_s_weights_lie_on_a_disk(manifests: dict[tuple[str, str], dict[str, Any]]) -> None:
    spec = manifests["DaemonSet", "rose-node"]["spec"]["template"]["spec"]
    volumes = {each["name"]: each for each in spec["volumes"]}
    for container in spec["containers"]:
        where = cache_directory(environment_of(container), uid=spec["securityContext"]["runAsUser"])
        (volume,) = [
            each["name"] for each in container["volumeMounts"] if where.is_relative_to(each["mountPath"])
        ]
        assert volumes[volume]["emptyDir"].get("medium") is None
        assert not where.is_relative_to(environment_of(container)["ROSE_DIR"])


def test_engines_and_jobs_find_scheduler_and_relay(
    manifests: dict[tuple[str, str], dict[str, Any]], tmp_path: Path
) -> None:
    loaded = {}
    for part, name, kind in (
        ("scheduler", "scheduler.toml", SchedulerConfig),
        ("train", "job.toml", TrainConfig),
    ):
        (tmp_path / name).write_text(manifests["ConfigMap", f"rose-{part}"]["data"][name])
        loaded[part] = load_config(kind, tmp_path / name)
    (tmp_path / "node.toml").write_text(manifests["ConfigMap", "rose-node"]["data"]["node.toml"])
    node = load_config(NodeConfig, tmp_path / "node.toml", ['node_id="a"', 'dir="/run/rose/a"'])
    scheduler, train = loaded["scheduler"], loaded["train"]
    at = {
        name: f"http://{name}:{each['spec']['ports'][0]['port']}"
        for (kind, name), each in manifests.items()
        if kind == "Service"
    }

    assert scheduler.host == "0.0.0.0"
    assert at["rose-scheduler"].endswith(f":{scheduler.port}")
    assert node.scheduler is not None
    assert node.weights is not None
    assert node.scheduler.url == train.scheduler.url == at["rose-scheduler"]
    assert node.weights.relay_url == train.weights.relay_url == at["rose-relay"]
    assert node.weights.run_id == train.run_id
    assert node.engine.served_model_name == train.scheduler.model


def test_ray_takes_commands_from_who_has_its_token_alone(
    manifests: dict[tuple[str, str], dict[str, Any]],
) -> None:
    cluster = manifests["RayJob", "rose-train"]["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(int(part) for part in cluster["rayVersion"].split(".")) >= (2, 52), (
        "older ones know no token"
    )


def test_nobody_but_the_job_and_its_operator_reaches_ray(
    manifests: dict[tuple[str, str], dict[str, Any]],
) -> None:
    policy = manifests["NetworkPolicy", "rose-train"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    labels = {
        (kind, name): [pod["metadata"]["labels"] for pod in pods_of(manifest)]
        for (kind, name), manifest in manifests.items()
    }

    def matching(selector: dict[str, Any]) -> set[tuple[str, str]]:
        assert set(selector) == {"matchLabels"}
        assert selector["matchLabels"], "which would be everybody"
        return {
            key
            for key, pods in labels.items()
            for each in pods
            if selector["matchLabels"].items() <= each.items()
        }

    among, operator = policy["ingress"]
    assert len(labels["RayJob", "rose-train"]) == 2
    for pod in labels["RayJob", "rose-train"]:
        assert policy["podSelector"]["matchLabels"].items() <= pod.items()
    assert matching(policy["podSelector"]) == {("RayJob", "rose-train")}
    assert [matching(each["podSelector"]) for each in among["from"]] == [{("RayJob", "rose-train")}]
    assert [matching(each["podSelector"]) for each in operator["from"]] == [set(), set()]
    head = manifests["RayJob", "rose-train"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    ports = {each["name"]: each["containerPort"] for each in head["containers"][0]["ports"]}
    assert [ports[each["port"]] for each in operator["ports"]] == [8265]


def test_a_scheduler_without_engines_is_reached_by_the_nodes_that_bring_them(
    manifests: dict[tuple[str, str], dict[str, Any]],
) -> None:
    (container,) = manifests["StatefulSet", "rose-scheduler"]["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"


def test_running_turns_may_end_before_the_scheduler_is_killed(
    manifests: dict[tuple[str, str], dict[str, Any]],
) -> None:
    spec = manifests["StatefulSet", "rose-scheduler"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > SchedulerConfig().timeouts.drain_s


def num_bytes(amount: str) -> int:
    """``16Gi``, as the chart says amounts of memory and disk."""
    assert amount.endswith("Gi"), amount
    return int(amount.removesuffix("Gi")) * 2**30


TURNS_STATE_BYTES = 80 * 2**20
"""What ``decisions-N.rose`` starts with, beside its ``max_bytes``: about 250 bytes for each of ``limits.max_trajectories``, 1,400 for each of
``max_running`` turns and 1,050 for each of ``max_workers`` are 66 MB."""
DEVICES_STATE_BYTES = 8 * 2**20
"""The same of ``provisioning-N.rose``: 450 bytes for each device are 2 MB."""
FOR_FILES = 0.95
"""Of a volume; the rest is the file system's own."""


def test_the_scheduler_refuses_before_its_pod_is_out_of_memory_or_disk(
    manifests: dict[tuple[str, str], dict[str, Any]], tmp_path: Path
) -> None:
    """What it holds takes up to 1.2 times the bytes that it counts (tests/scheduler/test_budget.py).  Its journal is at most twice as
    large as it was after the last compaction, and the next one writes what is held beside that.  Decision logs lie in the same volume."""
    config = tmp_path / "scheduler.toml"
    config.write_text(manifests["ConfigMap", "rose-scheduler"]["data"]["scheduler.toml"])
    scheduler = load_config(SchedulerConfig, config)
    limits = scheduler.limits
    spec = manifests["StatefulSet", "rose-scheduler"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (claim,) = spec["volumeClaimTemplates"]
    itself = 2**30
    memory = 1.2 * (limits.max_held_bytes + limits.retained_bytes) + limits.max_intake_bytes + itself
    states = [TURNS_STATE_BYTES] + [DEVICES_STATE_BYTES] * (scheduler.provisioning.mode != "off")
    logs = sum(scheduler.decisions.max_files * (scheduler.decisions.max_bytes + each) for each in states)
    disk = 3 * max(limits.max_held_bytes, scheduler.journal.compact_bytes) + logs
    assert memory <= num_bytes(container["resources"]["limits"]["memory"])
    assert disk <= FOR_FILES * num_bytes(claim["spec"]["resources"]["requests"]["storage"])
    assert limits.max_job_bytes < limits.max_held_bytes, "one job would keep all others out"


def test_all_pods_run_as_the_engines_user(manifests: dict[tuple[str, str], dict[str, Any]]) -> None:
    for manifest in manifests.values():
        for pod in pods_of(manifest):
            assert pod["spec"]["securityContext"]["runAsUser"] == 1000
            as_root = [
                each["name"]
                for each in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
                if each.get("securityContext", {}).get("runAsUser", 1000) != 1000
            ]
            assert as_root == (["directories"] if manifest["kind"] == "DaemonSet" else [])


def test_every_program_reads_a_token_file_of_its_own_user(
    manifests: dict[tuple[str, str], dict[str, Any]],
) -> None:
    for manifest in manifests.values():
        for pod in pods_of(manifest):
            (copy,) = [each for each in pod["spec"]["initContainers"] if each["name"] == "tokens"]
            assert copy["command"][:3] == ["install", "-m", "0600"]
            assert copy["command"][3:6] == ["-t", "/tokens", "/secret/tokens.toml"]
            for container in pod["spec"]["containers"]:
                assert environment_of(container)["ROSE_TOKEN_FILE"] == "/tokens/tokens.toml"


def test_a_pod_has_no_token_that_its_program_does_not_need(
    manifests: dict[tuple[str, str], dict[str, Any]],
) -> None:
    taken: dict[str, set[str]] = {}
    for (_, name), manifest in manifests.items():
        for pod in pods_of(manifest):
            volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
            (copy,) = [each for each in pod["spec"]["initContainers"] if each["name"] == "tokens"]
            copied = copy["command"][5:]
            (source,) = [each for each in copy["volumeMounts"] if copied[0].startswith(each["mountPath"])]
            items = volumes[source["name"]]["secret"]["items"]
            assert copied == [f"{source['mountPath']}/{item['path']}" for item in items]
            taken.setdefault(name, set()).update(item["key"] for item in items)
    expected = {f"rose-{part}": {f"{part}.toml"} for part in PARTS}
    expected["rose-train"].add("train.key")  # which signs weights: nobody else's
    assert taken == expected


@pytest.fixture(scope="module")
def published() -> Path:
    """Where the published schemas lie whose sums ``deploy/schemas.toml`` has."""
    folder = os.environ.get("ROSE_SCHEMAS")
    if folder is None:
        pytest.skip("needs the files of deploy/schemas.toml in the folder that ROSE_SCHEMAS names")
    for name, about in SCHEMAS.items():
        data = (Path(folder) / about["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == about["sha256"], name
    return Path(folder)


def closed(schema: Any) -> Any:
    """Every object with properties refuses others, as ``kubectl`` does; numbers may be written where text is meant as an amount."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "int-or-string" or schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string", "number"]}
    found = {key: closed(value) for key, value in schema.items() if key not in ("format", "default")}
    if (
        isinstance(found.get("properties"), dict)
        and found.get("type", "object") == "object"
        and "x-kubernetes-preserve-unknown-fields" not in found
    ):
        found.setdefault("additionalProperties", False)
    return found


def test_the_manifests_are_what_the_published_schemas_say(
    published: Path, manifests: dict[tuple[str, str], dict[str, Any]]
) -> None:
    kubernetes = json.loads((published / SCHEMAS["kubernetes"]["file"]).read_text())
    definitions = closed(kubernetes["definitions"])
    definitions["io.k8s.apimachinery.pkg.api.resource.Quantity"] = {"type": ["string", "number"]}
    crd = yaml.load(
        (published / SCHEMAS["rayjob"]["file"]).read_text(),
        Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),
    )
    (ray,) = [each for each in crd["spec"]["versions"] if each["name"] == "v1"]
    rayjob = closed(ray["schema"]["openAPIV3Schema"])
    rayjob["properties"]["metadata"] = {
        "$ref": "#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
    }
    sidecar = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "sidecar.yaml").read_text())
    problems = []
    for manifest in [*manifests.values(), sidecar]:
        kind = manifest["kind"]
        schema = rayjob if kind == "RayJob" else {"$ref": f"#/definitions/{KINDS[kind]}"}
        check = jsonschema.Draft7Validator({**schema, "definitions": definitions})
        problems += [
            f"{kind} {error.json_path}: {error.message[:200]}" for error in check.iter_errors(manifest)
        ]
    assert not problems


@pytest.mark.parametrize(
    "text",
    [
        "a: {{ .Values.one }}\n  {{- if .Values.none }}\nb\n  {{- end }}\nc\n",
        "{{- range .Values.many }}\n- {{ .name }}: {{ $.Values.one }}\n{{- end }}\nend",
        "x\n{{- with .Values.map }}\n  {{ .key }}\n{{- else }}\nnone\n{{- end }}\ny {{- /* gone */ -}} z",
        "{{ if .Values.zero -}}\n yes\n{{ else }}no{{ end -}}\n  tail",
        "{{ with .Values.none }}a{{ end }}|{{ range .Values.nothing }}b{{ else }}c{{ end }}|",
    ],
)  # fmt: skip
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which has Go's template engine")
def test_control_structures_and_white_space_are_go_s(text: str, tmp_path: Path) -> None:
    """By ``kubectl config view``, whose output a Go template shapes: the values travel as an extension of a configuration."""
    root = {
        "Values": {
            "one": "1",
            "none": False,
            "zero": 0,
            "nothing": [],
            "many": [{"name": "a"}, {"name": "b"}],
            "map": {"key": "v"},
        }
    }
    config = {"apiVersion": "v1", "kind": "Config", "extensions": [{"name": "root", "extension": root}]}
    (tmp_path / "config").write_text(json.dumps(config))
    wrapped = '{{define "t"}}' + text + '{{end}}{{template "t" (index .extensions 0).extension}}'
    (tmp_path / "template").write_text(wrapped)
    asked = [
        "kubectl",
        "config",
        "view",
        "--kubeconfig",
        tmp_path / "config",
        "-o",
        f"go-template-file={tmp_path / 'template'}",
    ]
    go = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout

    assert Template(text).render(root) == [go]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ .Values.misspelt }}", "there is no misspelt"),
        ("{{ .Values.one | title }}", "title"),
        ("{{ if .Values.one }}", "has no end"),
        ("{{ .Values.map }}", "dict as text"),
    ],
)
def test_what_is_not_known_is_an_error_and_not_empty(text: str, says: str) -> None:
    with pytest.raises(TemplateError, match=says):
        Template(text).render({"Values": {"one": "1", "map": {}}})
