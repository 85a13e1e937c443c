"""The container files, as far as they can be read without building: what they copy, install, start, and that versions agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from tests.deploy.programs import check_call
from vllm_plugin.lines import LINES

ROOT = Path(__file__).resolve().parents[2]
FILE = (ROOT / "deploy" / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = re.findall(r"^FROM \S+ AS (\w+)$", FILE, re.M)


def argument(name: str) -> str:
    found = re.search(rf"^ARG {name}=(\S+)$", FILE, re.M)
    assert found is not None
    return found[1]


def test_the_targets_are_those_that_are_told_and_every_image_is_one() -> None:
    assert [*TARGETS] == ["wheel", "serving", "node", "daemons", "train"]
    built = dict(re.findall(r"--target (\w+)\s+-t (\S+)", FILE))
    assert list(built) == TARGETS[1:]
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "rose" / "values.yaml").read_text())
    wanted = {name: values[name]["image"] for name in ("scheduler", "relay", "node", "train")}
    assert wanted == {
        "scheduler": built["daemons"],
        "relay": built["daemons"],
        "node": built["node"],
        "train": built["train"],
    }


def test_what_is_copied_is_there_and_let_through() -> None:
    lines = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    let_through = [each[1:] for each in lines if each.startswith("!")]
    copied = [word for line in re.findall(r"^COPY (.*)$", FILE, re.M) for word in line.split()[:-1]]
    assert "*" in lines
    assert sorted(copied) == sorted(let_through)
    assert not [each for each in copied if not (ROOT / each).exists()]


def test_versions_are_those_of_the_project() -> None:
    assert argument("VLLM_IMAGE").rpartition(":")[2].startswith(f"v{LINES['rollout'][-1]}.")
    pins = {
        each.partition("==")[0]: each.partition("==")[2]
        for extra in PROJECT["optional-dependencies"].values()
        for each in extra
    }
    assert argument("VLLM_IMAGE").endswith(f":v{pins['vllm']}")
    assert argument("RAY_IMAGE").rpartition(":")[2].startswith(f"{pins['ray']}-py311")
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "rose" / "values.yaml").read_text())
    assert values["train"]["rayVersion"] == pins["ray"]
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "rose" / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == PROJECT["version"]
    assert all(
        values[name]["image"].endswith(f":{PROJECT['version']}")
        for name in ("scheduler", "relay", "node", "train")
    )


def test_extras_and_programs_are_there() -> None:
    extras = re.findall(r"\)\[(\w[\w-]*)\]", FILE)
    assert extras
    assert not [each for each in extras if each not in PROJECT["optional-dependencies"]]
    calls = [re.findall(r'"([^"]*)"', words) for words in re.findall(r"^CMD (.*)$", FILE, re.M)]
    assert calls
    for call in calls:
        check_call(call)


def test_the_gpu_extra_has_what_is_imported_and_nothing_else() -> None:
    """A package of an extra that nothing imports is downloaded for nothing."""
    modules = {"vllm": "vllm", "nvidia-ml-py": "pynvml", "cuda-bindings": "cuda.bindings"}
    extras = PROJECT["optional-dependencies"]
    assert extras["gpu"][0] == "rose-rl[cuda]"
    wanted = {re.split(r"[=<>\[]", each)[0] for each in (*extras["cuda"], *extras["gpu"][1:])}
    assert wanted == set(modules)
    source = "".join(
        path.read_text() for room in ("rose", "vllm_plugin") for path in (ROOT / room).rglob("*.py")
    )
    assert not [
        each
        for each in modules.values()
        if not re.search(rf"^\s*(import|from) {re.escape(each)}\b", source, re.M)
    ]
