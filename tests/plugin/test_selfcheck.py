"""The self-check covers every name of vLLM's that the plugin uses, and a name that is gone is refused by name."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import vllm_plugin
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Phase
from rose.errors import ConfigError
from rose.policy.compat import row, row_of_number
from rose.policy.engine_fields import HARMLESS, RESTRICTED
from tests.plugin.conftest import ON_NEWEST, newest_only
from vllm_plugin import compat, lines, selfcheck
from vllm_plugin.selfcheck import Owner, has_name

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = sorted((ROOT / "vllm_plugin").glob("*.py"))
GROUPS = {
    "core": selfcheck.CORE,
    "api": selfcheck.API,
    "worker": selfcheck.WORKER,
    "cpu worker": selfcheck.CPU_WORKER,
    "doctor": selfcheck.DOCTOR,
}
OWNERS = [owner for group in GROUPS.values() for owner in group]
HERE = {name: group for name, group in GROUPS.items() if name != "api" or ON_NEWEST}
"""What the installed line is asked for."""

VLLMS = {"scheduler", "_scheduler", "pool", "_pool", "request", "engine", "_engine", "block", "scheduler_output", "vllm_config"}  # fmt: skip
"""Our names of what is always an object of vLLM's."""
OTHERWISE = {"endpoints.py": set[str](), "engine_control.py": {"_client"}, "kv_memory.py": set[str]()}
"""But in these files, where a request is HTTP's and a pool is of pages."""


# --- what the source uses


@cache
def defined_by(*folders: Path) -> frozenset[str]:
    """Functions, classes, attributes stored on ``self``, fields and constants of every module below ``folders``."""
    found: set[str] = set()
    for folder in folders:
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    found.add(node.name)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.add(node.target.id)
                elif isinstance(node, ast.Assign):
                    found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
                elif (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)
                    and _root(node) == "self"
                ):
                    found.add(node.attr)
    return frozenset(found)


@cache
def theirs() -> frozenset[str]:
    import vllm

    package = Path(vllm.__file__).parent
    parts = (
        "v1/core",
        "v1/engine",
        "v1/executor",
        "v1/worker",
        "v1/metrics",
        "config",
        "distributed/weight_transfer",
    )
    found = defined_by(*(package / part for part in parts))
    return found | defined_by(package / "model_executor/layers/fused_moe/experts") | {"Request"}


@cache
def ours() -> frozenset[str]:
    return defined_by(ROOT / "vllm_plugin", ROOT / "rose")


@cache
def elsewhere() -> set[str]:
    """Attributes of the standard library's and torch's everyday types."""
    import collections
    import inspect
    import logging
    import queue

    import torch

    kinds = (str, bytes, bytearray, list, dict, set, tuple, int, float, Path, collections.deque, torch.Tensor)
    kinds += (
        collections.OrderedDict,
        type(theirs),
        ast.AST,
        inspect.Signature,
        logging.Logger,
        queue.SimpleQueue,
    )
    kinds += (torch.Stream, torch.cuda.Stream)
    return {name for kind in kinds for name in dir(kind)} | {"cuda_stream"}  # of a CUDA build of torch


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _owner_name(node: ast.Attribute) -> str:
    """The last name before the attribute: ``pool`` of ``self.pool.blocks``, ``super`` of ``super().x``."""
    value = node.value
    if isinstance(value, ast.Call):
        value = value.func
    return value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""


def used_in(source: str, file: str = "") -> Iterator[tuple[str, int]]:
    """``(name, line)`` of every name of vLLM's that a module uses: ``module:name`` of an import, else the attribute."""
    tree = ast.parse(source)
    vllms = OTHERWISE.get(file, VLLMS)
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not _module(node).startswith("vllm.")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _module(node).split(".")[0] == "vllm":
            yield from ((f"{node.module}:{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.startswith("vllm."))
        elif isinstance(node, ast.Attribute):
            if _is_vllms(node.attr, _owner_name(node) in {*vllms, "super"}, _root(node) in imported):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = node.args[1]
            owner = ast.Attribute(value=node.args[0], attr="", ctx=ast.Load())
            if isinstance(name, ast.Constant) and _is_vllms(name.value, _owner_name(owner) in vllms, False):
                yield name.value, node.lineno


def _module(node: ast.Import | ast.ImportFrom) -> str:
    return (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name


def _is_vllms(name: str, of_an_object_of_theirs: bool, of_a_module: bool) -> bool:
    if name.startswith("__") or name.startswith("rose"):
        return False
    if of_an_object_of_theirs:
        return name not in elsewhere()
    if name in ours():
        return False
    if name.startswith("_"):
        return True  # torch's count too
    return name in theirs() and name not in elsewhere() and not of_a_module


@cache
def covered() -> set[str]:
    names = {name for owner in OWNERS for name in (*owner.names.split(), *owner.calls)}
    names |= {owner.where for owner in OWNERS}
    modules = [owner.where for owner in OWNERS if ":" not in owner.where]
    names |= {":".join(module.rsplit(".", 1)) for module in modules} | {
        module.rpartition(".")[2] for module in modules
    }
    names |= {f"{owner.where}:{name}" for owner in OWNERS for name in owner.names.split()}
    # Fields of configurations are the allowlist's: one that is gone is refused where it is read.
    names |= {name for fields in HARMLESS.values() for name in fields.split()}
    return names | {field.path.rpartition(".")[2] for field in RESTRICTED}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_name_of_vllm_that_the_plugin_uses_is_checked_at_start(path: Path) -> None:
    missing = {
        f"{path.name}:{line} {name}"
        for name, line in used_in(path.read_text(), path.name)
        if name not in covered()
    }
    assert missing == set(), "put them into vllm_plugin/selfcheck.py"


def test_vllms_private_names_are_in_two_files() -> None:
    """A port to another release begins with these two."""
    private = {
        name
        for owner in OWNERS
        if owner.where.startswith("vllm")
        for name in (*owner.names.split(), *owner.calls)
        if name.startswith("_") and not name.startswith("__")
    }
    assert len(private) > 10
    found = {
        (path.name, name)
        for path in SOURCES
        if path.name not in ("compat.py", "internals.py")
        for used, _ in used_in(path.read_text(), path.name)
        if (name := used.rpartition(":")[2]) in private
    }
    assert found == set()


def test_the_page_names_every_file_that_imports_vllm() -> None:
    def imports(path: Path) -> bool:
        nodes = ast.walk(ast.parse(path.read_text()))
        names = (_module(one) for one in nodes if isinstance(one, (ast.Import, ast.ImportFrom)))
        return any(name.split(".")[0] == "vllm" for name in names)

    page = (ROOT / "docs" / "extending.md").read_text()
    steps = page.partition("## Another vLLM version")[2].partition("\n## ")[0]
    named = set(re.findall(r"`vllm_plugin/(\w+\.py)[:`]", steps))
    assert {path.name for path in SOURCES if imports(path)} == named


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f(scheduler): return scheduler._inner", "_inner"),
        ("def f(anything): return anything._hidden_of_vllm", "_hidden_of_vllm"),
        ("def f(pool): pool.made_up()", "made_up"),
        ("def f(self): return self._scheduler.made_up", "made_up"),
        ("def f(x): return x.structured_output_manager", "structured_output_manager"),
        ("def f(self): super().made_up()", "made_up"),
        ("def f(x): return getattr(x, '_weight_update_passive', 0)", "_weight_update_passive"),
        ("from vllm.v1.core.block_pool import Bathtub", "vllm.v1.core.block_pool:Bathtub"),
        ("import vllm.v1.bathtub as b", "vllm.v1.bathtub"),
    ],
)
def test_the_walk_sees_a_new_use(source: str, name: str) -> None:
    assert name in {found for found, _ in used_in(source)}
    assert name not in covered()


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ndef f(x): return torch.zeros(3)",
        "class A:\n    def f(self): return self._balloon",
        "def f(items): items.append(3)",
        "import threading\nlock = threading.Lock()",
    ],
)
def test_what_is_not_vllms_is_left_alone(source: str) -> None:
    assert "vllm" not in source
    assert [name for name, _ in used_in(source) if not name.startswith("_balloon")] == []


# --- the look at start


def test_nothing_is_wrong_with_the_vllm_that_is_installed() -> None:
    assert selfcheck.problems("serving") == []
    for owners in HERE.values():
        assert selfcheck.problems_of(owners) == []


@pytest.mark.parametrize(
    "owner", [one for group in HERE.values() for one in group], ids=lambda owner: owner.where
)
def test_each_name_that_is_gone_is_named(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, kind = owner.where.partition(":")
    if kind:
        monkeypatch.setattr(sys.modules[module], kind, type(kind, (), {"__slots__": ()}))
    else:
        monkeypatch.setitem(sys.modules, module, type(sys)(module))
    label = kind or module
    names = (*owner.names.split(), *owner.calls)
    own = {one for one in names if not hasattr(object, one) and lines.has(f"{owner.where}:{one}")}
    assert {f"{label}.{name} is gone" for name in own} <= set(owner.problems())


def test_a_module_that_has_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.request", None)
    assert any(
        problem.startswith("vllm.v1.request:Request has moved") for problem in selfcheck.problems("serving")
    )


def test_a_parameter_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "finish_requests", lambda self, ids: None)
    assert selfcheck.problems("serving") == ["Scheduler.finish_requests lacks request_ids, finished_status"]


def test_another_key_of_the_prefix_cache_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "make_block_hash_with_group_id", lambda h, group: b"0:" + h)
    assert selfcheck.problems("serving") == ["keys of the prefix cache are another"]


def test_another_release_line_is_not_looked_at_further(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.33.1+cpu")
    assert selfcheck.problems("serving") == [
        "vLLM 0.33.1+cpu is not of a line that role serving is supported on (0.31, 0.32)"
    ]


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.32.0", "0.32"),
        ("0.32", "0.32"),
        ("0.32.3+cpu", "0.32"),
        ("0.32.0.post2", "0.32"),
        ("0.32.1.dev17+g1a2b3c4.cpu", "0.32"),
        ("0.32.0rc1", "0.32"),
        ("0.31.0+cpu", "0.31"),
        ("0.33.0.dev3", None),
        ("0.33.0rc1", None),
        ("0.3.2", None),
        ("1.0.32", None),
        ("1!0.32.0", None),
        ("0.320.0", None),
        ("dev", None),
        ("", None),
    ],
)
def test_which_line_a_build_is_of_its_release_says(version: str, line: str | None) -> None:
    assert lines.line_of(version) == line


class Plain:
    kept = 1

    def __init__(self) -> None:
        self.stored = 1
        self.other.inner = 2  # type: ignore[attr-defined]
        _ = self.loaded  # type: ignore[attr-defined]

    def late(self) -> None:
        self.made_later = 1


class Child(Plain):
    declared: int

    def __init__(self) -> None:
        super().__init__()
        self.more = 1


@dataclasses.dataclass
class Data:
    made: list[int] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize(
    ("owner", "name", "there"),
    [
        (Plain, "kept", True),
        (Plain, "late", True),
        (Plain, "stored", True),
        (Child, "stored", True),
        (Child, "more", True),
        (Child, "declared", True),
        (Data, "made", True),
        (ast, "parse", True),
        (Plain, "loaded", False),
        (Plain, "made_later", False),
        (Plain, "more", False),
        (Data, "absent", False),
        (ast, "absent", False),
    ],
)
def test_an_attribute_counts_where_the_class_has_it_declares_it_or_stores_it(
    owner: Any, name: str, there: bool
) -> None:
    assert has_name(owner, name) is there


# --- what follows


@pytest.fixture
def lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("ROSE_DIR", str(tmp_path / "n"))
    for name, value in (("_refused", None), ("_refusal", None), ("_applied", {})):
        monkeypatch.setattr(compat, name, value)
    yield NodeDir(tmp_path / "n").serving_lease()
    if compat._refusal is not None:
        compat._refusal.close()


def test_production_stays_stock_where_a_private_name_is_gone(
    lease: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.delattr(BlockPool, "_maybe_evict_cached_block")
    monkeypatch.setenv("ROSE_ROLE", "serving")
    vllm_plugin.register()
    assert compat.applied() == {}
    assert compat.refused() == "BlockPool._maybe_evict_cached_block is gone"
    record = lease.read()
    assert (record.phase, row_of_number(record.row)) == (Phase.OFF, row("unknown_version"))


@newest_only
def test_a_rollout_engine_does_not_start_there(lease: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.delattr(BlockPool, "_maybe_evict_cached_block")
    monkeypatch.setenv("ROSE_ROLE", "rollout")
    with pytest.raises(ConfigError, match="_maybe_evict_cached_block is gone"):
        vllm_plugin.register()


@newest_only
@pytest.mark.parametrize("owners", [selfcheck.API, selfcheck.WORKER, selfcheck.CPU_WORKER])
def test_what_only_a_rollout_engine_needs_ends_that_by_name(
    owners: tuple[Owner, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    selfcheck.require(owners)
    owner = next(one for one in owners if one.names)
    monkeypatch.setitem(sys.modules, owner.where.partition(":")[0], None)
    with pytest.raises(ConfigError, match="has moved"):
        selfcheck.require(owners)
