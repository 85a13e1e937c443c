"""The weights taken out and used alone: what requirements/weights.txt lists is enough."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import importlib, importlib.abc, json, pkgutil, sys
blocked = set(json.loads(sys.argv[1]))
class Gate(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in blocked or name.startswith(("rose.scheduler", "rose.coserve", "rose.train", "rose.policy", "rose.config")):
            raise ImportError(name)
sys.meta_path.insert(0, Gate())
import rose.weights
failed = {}
for module in pkgutil.iter_modules(rose.weights.__path__):
    try:
        importlib.import_module("rose.weights." + module.name)
    except ImportError as error:
        failed[module.name] = str(error)
import numpy as np
from rose.weights.publisher import WeightPublisher
from rose.testing.memory_store import MemoryStore
from rose.weights.subscriber import WeightSubscriber
store, held = MemoryStore(), {"w": np.arange(64, dtype=np.float32)}
publisher = WeightPublisher(lambda: held, store, "run", 1)
reader = WeightSubscriber(store, "run", sys.argv[2])
versions = []
for version in range(2):
    held["w"] = held["w"] + 1
    publisher.publish(version)
    versions.append(str(reader.poll(10)))
reader.close()
publisher.close()
print(json.dumps([failed, versions]))
"""


def names(lines: list[str]) -> set[str]:
    found = (re.match(r"[A-Za-z0-9._-]+", line.strip()) for line in lines)
    return {match.group().lower().replace("_", "-") for match in found if match}


def closure(roots: set[str]) -> set[str]:
    """Distributions that come with these, extras left out."""
    found: set[str] = set()
    open_ones = set(roots)
    while open_ones:
        name = open_ones.pop()
        found.add(name)
        try:
            needed = [each for each in requires(name) or [] if "extra ==" not in each]
        except PackageNotFoundError:
            continue
        open_ones |= names(needed) - found
    return found


def test_publisher_relay_and_subscriber_need_only_what_the_list_says(tmp_path: Path) -> None:
    lines = (ROOT / "requirements/weights.txt").read_text().splitlines()
    allowed = closure(names([line for line in lines if not line.startswith("#")]))
    blocked = [
        module
        for module, places in packages_distributions().items()
        if not {place.lower().replace("_", "-") for place in places} & (allowed | {"rose-rl", "setuptools"})
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(blocked), str(tmp_path / "copy")],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    failed, versions = json.loads(done.stdout)
    assert set(failed) <= {"device", "mooncake_store"}  # torch's tensors, and another store's extra
    assert versions == ["1.0", "1.1"]


def test_the_lists_bounds_are_the_projects() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = (ROOT / "requirements/weights.txt").read_text().splitlines()
    assert {line for line in lines if line and not line.startswith("#")} <= set(table)


def test_the_list_has_nothing_that_no_module_imports() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "rose").rglob("*.py"))
    listed = names(
        [line for line in (ROOT / "requirements/weights.txt").read_text().splitlines() if line[0] != "#"]
    )
    imported = {
        name for name in listed if re.search(rf"^\s*(?:import|from) {name.replace('-', '_')}\b", source, re.M)
    }
    assert listed == imported
