"""One meaning per name: no two public classes of the product are called alike, and what is to be installed is called as it can be."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED: dict[str, str] = {}
"""Name -> why two classes may have it."""


def public_classes() -> dict[str, list[str]]:
    """Name -> the files that define a class of it at their top."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in ("rose", "vllm_plugin"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_bytes()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_no_two_public_classes_share_a_name() -> None:
    shared = {name: files for name, files in public_classes().items() if len(files) > 1}
    assert {name: files for name, files in shared.items() if name not in ALLOWED} == {}
    assert set(ALLOWED) <= set(shared), "is shared no longer"


def test_messages_install_from_a_checkout_as_the_documents_do() -> None:
    """ROSE is in no package index: `pip install rose-rl` finds nothing, or somebody else's."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in ("rose", "vllm_plugin", "examples", "benchmarks", "tests")
        for path in sorted((ROOT / package).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"pip install .?rose-rl", line) and path != Path(__file__)
    ]
    assert found == []
