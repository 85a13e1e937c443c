"""Compile the modules that decisions and simulations spend their time in, with mypyc.  An option: without it all runs as Python.

    python scripts/compile_policies.py            # about a minute; ends with what is in force
    python scripts/compile_policies.py --clean    # remove the build

mypyc and setuptools come from ``requirements/compile.txt``, into an environment of their own in ``build/compile`` (this one stays what
its lock says); a C compiler and Python's headers have to be there.  The result is ``rose/_compiled``: see ``rose/compiled.py``, which decides
whether it is used.  Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "compile.txt"
TOOLS = ROOT / "build" / "compile"
GROUP = "rose_compiled"
"""Of the library that all modules share."""

POLICY = (
    *(
        "admission",
        "affinity",
        "assigning",
        "baselines",
        "borrowed",
        "cold_cache",
        "concurrency",
        "contention",
        "draining",
    ),
    *("deadlines", "fleet", "growth", "lending", "lending_events", "lending_policy", "migration", "pace"),
    *("packed", "placing", "remaining", "rounds", "routing", "speed", "stop_reasons", "turn", "turn_events"),
    *("turn_life", "turns", "worker"),
)
SIMULATOR = ("board", "cluster", "device", "engine", "events", "memory")
SOURCES = (
    "rose/lineage.py",
    *(f"rose/policy/{name}.py" for name in POLICY),
    *(f"rose/sim/{name}.py" for name in SIMULATOR),
)
"""Where a profile of ``benchmarks/routing.py`` and of an exact simulation has its time."""

BUILD = f"""
import sys
from mypyc.build import mypycify
from setuptools import setup
python, *sources = sys.argv[3:]
sys.argv[3:] = []
options = ["--follow-imports=silent", "--ignore-missing-imports", "--python-executable", python, *sources]
setup(name="rose-compiled", packages=[], ext_modules=mypycify(options, opt_level="1", group_name="{GROUP}"))
"""
# -O1: a decision is mostly calls into the interpreter's library and numpy's, and the C is long.


def step(message: str) -> None:
    print(f"compile: {message}", flush=True)


def imported(source: str) -> set[str]:
    """Paths of the modules of ``rose`` that this one imports, also for its annotations alone."""
    package = source.split("/")[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / source).read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            name = node.module or "" if not node.level else ".".join(filter(None, base))
            names |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    paths = {f"{name.replace('.', '/')}{end}" for name in names for end in (".py", "/__init__.py")}
    return {path for path in paths if path.startswith("rose/") and (ROOT / path).is_file()}


def closure(sources: tuple[str, ...]) -> list[str]:
    """``sources``, and all that mypy read to know their types: a change of any of them makes the build stale."""
    found, new = set[str](), set(sources)
    while new:
        found |= new
        new = {path for source in new for path in imported(source)} - found
    return sorted(found)


def annotated(source: str) -> dict[str, dict[str, str]]:
    """Class -> field -> its type in words, as ``from __future__ import annotations`` would have it."""
    return {
        node.name: {
            part.target.id: ast.unparse(part.annotation)
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        }
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


MARK = "@mypyc_attr(serializable=True, allow_interpreted_subclasses=True)"
"""Of mypy 2.4.1's two flags the first alone leaves ``__init__`` out everywhere, and the second alone lets no attribute be unset."""


def marked(source: str) -> str:
    """``source`` with a mark on each class that has an ``__init__``: objects of it may also be made without, as a decision log is read
    (``rose.decisions.freeze``).  mypyc would run it in ``__new__``.  Sources cannot have the mark themselves: it is mypyc's, and nothing at run time."""
    lines = source.split("\n")
    body = ast.parse(source).body
    classes = [node for node in body if isinstance(node, ast.ClassDef) and any(
        isinstance(part, ast.FunctionDef) and part.name == "__init__" for part in node.body
    )]  # fmt: skip
    for node in reversed(classes):
        lines.insert(node.lineno - 1, MARK)
    if classes:
        after = next(node.end_lineno or 0 for node in body if isinstance(node, ast.ImportFrom))
        lines.insert(
            after, "import typing as _t\nif _t.TYPE_CHECKING:\n    from mypy_extensions import mypyc_attr"
        )
    return "\n".join(lines)


def tools() -> Path:
    """A Python with mypyc, of this Python's version."""
    python = TOOLS / "bin" / "python"
    stamp = TOOLS / "requirements.txt"
    wanted = REQUIREMENTS.read_text()
    if not stamp.is_file() or stamp.read_text() != wanted:
        step(f"installing {REQUIREMENTS.relative_to(ROOT)} into {TOOLS.relative_to(ROOT)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(TOOLS)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-input"]
        subprocess.run([*pip, "-r", str(REQUIREMENTS)], check=True)
        stamp.write_text(wanted)
    return python


def build(out: Path, python: Path) -> None:
    """Compile into ``out``, in place of what is there.

    Args:
        python: One that has mypyc, of the version of this one.

    Raises:
        RuntimeError: mypyc or the C compiler refused; with what they said.
    """
    sys.path.insert(0, str(ROOT))
    from rose.compiled import STAMP, SUFFIX, digest_of

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=out.parent) as beside:
        work, made = Path(folder), Path(beside) / "made"
        made.mkdir()
        # A copy: sources that are edited meanwhile make neither a mixture nor a stamp that lies.
        digests = {path: digest_of(path) for path in closure(SOURCES)}
        for file in sorted((ROOT / "rose").glob("**/*.py")):
            copy = work / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(marked(file.read_text()) if "policy" in copy.parts else file.read_text())
        command = [str(python), "-c", BUILD, "build_ext", "--inplace", sys.executable, *SOURCES]
        run = subprocess.run(
            command, cwd=work, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            env={**os.environ, "CFLAGS": "-g0", "MYPYPATH": ""},
        )  # fmt: skip
        if run.returncode:
            raise RuntimeError(run.stdout[-4000:])
        modules: dict[str, str] = {}
        for file in sorted(work.glob(f"**/*{SUFFIX}")):
            if "build" not in file.relative_to(work).parts[:1]:
                name = file.relative_to(work).as_posix().removesuffix(SUFFIX).replace("/", ".")
                modules[name] = name + SUFFIX
                shutil.move(file, made / modules[name])
        missing = [s for s in SOURCES if s.removesuffix(".py").replace("/", ".") not in modules]
        if missing or len(modules) != len(SOURCES) + 1:
            raise RuntimeError(f"not made: {missing}; made: {sorted(modules)}")
        annotations = {
            source.removesuffix(".py").replace("/", "."): annotated((work / source).read_text())
            for source in SOURCES
        }
        stamp = {"suffix": SUFFIX, "modules": modules, "sources": digests, "annotations": annotations}
        (made / STAMP).write_text(json.dumps(stamp, indent=1))
        if out.exists():
            out.rename(Path(beside) / "old")
        made.rename(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clean", action="store_true", help="remove the build, and the tools that made it")
    parser.add_argument("--out", type=Path, default=ROOT / "rose" / "_compiled", help="where the build goes")
    arguments = parser.parse_args()
    if arguments.clean:
        for folder in (arguments.out, TOOLS):
            shutil.rmtree(folder, ignore_errors=True)
        step("removed; the policies run as Python")
        return 0
    started_s = time.monotonic()
    os.environ["ROSE_COMPILED"] = "0"  # of this process; a build that does not fit must not end it
    python = tools()
    step(f"compiling {len(SOURCES)} modules")
    try:
        build(arguments.out.resolve(), python)
    except RuntimeError as error:
        print(f"compile: failed; what was there is as it was\n{error}", file=sys.stderr)
        return 1
    step(f"done in {time.monotonic() - started_s:.0f} s: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
