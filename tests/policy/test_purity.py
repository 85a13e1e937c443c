"""Policies are pure: a fresh interpreter that imports all of them has loaded nothing with side effects."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import rose.policy

FORBIDDEN = {
    *("asyncio", "time", "random", "socket", "logging", "threading", "subprocess"),
    *("numpy", "torch", "ray", "vllm", "vllm_plugin", "aiohttp", "pydantic", "msgspec"),
}
PROBE = """
import importlib, pkgutil, sys
import numpy  # arithmetic of rose.policy.packed; what numpy itself loads is not ours
import rose.policy
before = set(sys.modules)
for module in pkgutil.walk_packages(rose.policy.__path__, "rose.policy."):
    importlib.import_module(module.name)
print(*sorted(set(sys.modules) - before))
"""
SOURCES = sorted(Path(rose.policy.__path__[0]).glob("**/*.py"))


def test_policy_imports_nothing_with_side_effects() -> None:
    # -I -S: nothing that the environment's site files load early can hide an import of ours.
    root = str(Path(rose.policy.__path__[0]).parents[1])
    code = f"import sys; sys.path[:0] = [{root!r}, {sysconfig.get_path('purelib')!r}]; {PROBE}".replace("; \n", "\n", 1)
    out = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    imported = set(out.stdout.split())
    assert {"rose.policy.lending", "rose.policy.admission"} <= imported  # the probe did look
    assert not imported & FORBIDDEN


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_policy_file_names_a_forbidden_module_or_does_io(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "exec", "eval"}, f"{path}:{node.lineno}"
        for name in names:
            if name.split(".")[0] == "numpy" and path.stem == "packed":
                continue
            assert name.split(".")[0] not in FORBIDDEN, f"{path}:{node.lineno} imports {name}"
