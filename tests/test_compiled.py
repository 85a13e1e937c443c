"""Compiled policies (``rose/compiled.py``): never of other sources than those that lie there, and the same to the last byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rose import compiled
from rose.decisions.log import logs
from rose.policy.routing import POLICY_NAMES
from scripts import compile_policies

ROOT = Path(compiled.ROOT)
RUN = """
import sys
from pathlib import Path
out = Path(sys.argv[1])
import rose.compiled, rose.policy.turns, rose.sim.device
from rose.policy.routing import POLICY_NAMES
from rose.sim.world import simulate
from tests.policy import reference
from tests.scheduler.test_decisions import live
from tests.sim.test_world import tiny
for policy in POLICY_NAMES:
    live(out / policy, policy)
for system in ("rose", "paper", "static", "trainers"):
    simulate(tiny(), system, journal_path=out / f"{system}.journal", check=True)
differences = [reference.disagreement(POLICY_NAMES[n % len(POLICY_NAMES)], 7_000_000 + n) for n in range(200)]
print(rose.policy.turns.__file__, rose.sim.device.__file__, [text for text in differences if text])
"""
REPLAY = """
import sys
from pathlib import Path
from rose.decisions.log import replay
import rose.policy.turns
for name in sys.argv[1:]:
    found = replay(Path(name))
    assert found.difference is None, (name, found.difference)
    print(found.num_events)
"""
SAY = "import rose.compiled, rose.policy.turns; print(rose.compiled.said); print(rose.policy.turns.__file__)"


def python(
    code: str, *words: object, choice: str | None = None, root: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter; ``choice`` is its ROSE_COMPILED."""
    env = {name: value for name, value in os.environ.items() if name != "ROSE_COMPILED"}
    env["PYTHONPATH"] = str(root)
    if choice is not None:
        env["ROSE_COMPILED"] = choice
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)


def fake_build(folder: Path, **changes: object) -> Path:
    source = "rose/policy/speed.py"
    stamp: dict[str, object] = {
        "suffix": compiled.SUFFIX,
        "sources": {source: compiled.digest_of(source)},
        "modules": {"rose.policy.speed": "speed.so"},
        "annotations": {},
    }
    (folder / "speed.so").write_bytes(b"")
    (folder / compiled.STAMP).write_text(json.dumps(stamp | changes))
    return folder


def test_a_build_of_these_sources_may_be_used(tmp_path: Path) -> None:
    assert compiled.read_stamp(str(fake_build(tmp_path))) == (
        {"rose.policy.speed": str(tmp_path / "speed.so")},
        {},
        "",
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sources": {"rose/policy/speed.py": "0" * 64}}, "rose/policy/speed.py is not what was compiled"),
        ({"sources": {"rose/policy/gone.py": "0" * 64}}, "rose/policy/gone.py is not what was compiled"),
        ({"suffix": ".cpython-310.so"}, "it is for .cpython-310.so"),
        ({"modules": {"rose.policy.turns": "turns.so"}}, "turns.so is missing"),
        ({"modules": None}, "its stamp cannot be read"),
        ({"sources": 3}, "its stamp cannot be read"),
    ],
)
def test_any_other_build_is_left_alone_and_says_why(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    files, _, said = compiled.read_stamp(str(fake_build(tmp_path, **changes)))
    assert (files, why in said) == ({}, True), said


def test_a_build_without_a_stamp_or_with_half_of_one_is_left_alone(tmp_path: Path) -> None:
    assert "cannot be read" in compiled.read_stamp(str(tmp_path))[2]
    (fake_build(tmp_path) / compiled.STAMP).write_text('{"suffix": ')
    assert "cannot be read" in compiled.read_stamp(str(tmp_path))[2]


def test_who_asks_for_a_build_that_does_not_fit_gets_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    nothing = python(SAY, choice=str(tmp_path / "nothing"))
    assert "there is no build in" in nothing.stderr
    assert compiled.FIX in nothing.stderr
    stale = fake_build(tmp_path, sources={"rose/policy/speed.py": "0" * 64})
    assert (
        f"rose/policy/speed.py is not what was compiled; {compiled.FIX}"
        in python(SAY, choice=str(stale)).stderr
    )


def test_the_stamp_covers_every_source_that_the_types_come_from() -> None:
    covered = set(compile_policies.closure(compile_policies.SOURCES))
    assert covered >= set(compile_policies.SOURCES)
    assert {
        "rose/errors.py",
        "rose/policy/turn_events.py",
        "rose/sim/scenario.py",
    } <= covered  # not all are compiled


# --- with a build of its own ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("compiled") / "build"
    compile_policies.build(folder, compile_policies.tools())
    return folder


@pytest.mark.conformance
@pytest.mark.timeout(900)
def test_decisions_and_simulations_are_the_same_to_the_last_byte(build: Path, tmp_path: Path) -> None:
    arms = {"python": "0", "compiled": str(build)}
    for name, choice in arms.items():
        (tmp_path / name).mkdir()
        done = python(RUN, tmp_path / name, choice=choice)
        assert done.returncode == 0, done.stderr
        turns, device, differences = done.stdout.strip().split(" ", 2)
        assert {Path(turns).suffix, Path(device).suffix} == {".py" if name == "python" else ".so"}
        assert differences == "[]"  # from a brute-force choice
    for journal in sorted((tmp_path / "python").glob("*.journal")):
        assert len(journal.read_bytes()) > 1000
        assert journal.read_bytes() == (tmp_path / "compiled" / journal.name).read_bytes(), journal.name
    for name, choice in arms.items():
        written = [path for policy in POLICY_NAMES for path in logs(tmp_path / name / policy)]
        for replayed_by in (choice, *({*arms.values()} - {choice})):
            done = python(REPLAY, *written, choice=replayed_by)
            assert done.returncode == 0, done.stderr
            assert done.stdout.split() == ["400"] * len(POLICY_NAMES)


@pytest.mark.conformance
@pytest.mark.timeout(900)
def test_an_edited_source_is_what_runs_however_new_the_build(build: Path, tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "rose", tmp_path / "rose", ignore=shutil.ignore_patterns("_compiled", "__pycache__")
    )
    shutil.copytree(build, tmp_path / "rose" / "_compiled")
    said, file = python(SAY, root=tmp_path).stdout.splitlines()
    assert (said.startswith("the policies run compiled"), Path(file).suffix) == (True, ".so")
    source = tmp_path / "rose" / "policy" / "speed.py"
    before = source.stat()
    source.write_text(source.read_text() + "\n")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))  # older than the build, by its date
    said, file = python(SAY, root=tmp_path).stdout.splitlines()
    assert "rose/policy/speed.py is not what was compiled" in said
    assert Path(file).suffix == ".py"
    assert "rose/policy/speed.py is not what was compiled" in python(SAY, choice="1", root=tmp_path).stderr
