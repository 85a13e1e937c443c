"""`make bench-full` is stopped and goes on."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import run


@pytest.fixture
def partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs keep what they have found, with something of a long one."""
    monkeypatch.setattr(run, "PARTIAL", tmp_path)
    monkeypatch.setattr(run, "WHOLE", {"coserve": ("--segments", "6")})
    monkeypatch.setattr(run, "CACHES", {"policies": ("--cache", tmp_path / "policies.jsonl")})
    for name in ("policies.json", "policies.jsonl", "coserve.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_a_run_of_the_same_commit_goes_on(partial: Path) -> None:
    run.Done(partial / "full.json", "abc").add("coserve")
    (partial / "policies.jsonl").write_text("found later")

    assert run.Done(partial / "full.json", "abc").names == ["coserve"]
    assert (partial / "policies.jsonl").exists()


@pytest.mark.parametrize("earlier", [None, "abc"])
def test_a_run_of_another_commit_begins_anew(partial: Path, earlier: str | None) -> None:
    if earlier is not None:
        run.Done(partial / "full.json", earlier).add("coserve")
        (partial / "policies.jsonl").write_text("of the earlier commit")

    assert run.Done(partial / "full.json", "def").names == []
    assert sorted(path.name for path in partial.iterdir()) == ["coserve.json", "full.json"]


def test_a_run_that_ended_leaves_nothing_to_go_on_from(partial: Path) -> None:
    done = run.Done(partial / "full.json", "abc")
    done.add("coserve")
    done.forget()

    assert run.Done(partial / "full.json", "abc").names == []


@pytest.mark.parametrize(
    ("name", "quick", "kept", "args"),
    [
        ("policies", False, True, ["--cache", "{}/policies.jsonl"]),
        ("coserve", False, False, ["--segments", "6"]),
        ("coserve", True, False, ["--quick"]),
    ],
)
def test_a_program_is_given_what_it_had_only_where_it_is_long(
    partial: Path, name: str, quick: bool, kept: bool, args: list[str]
) -> None:
    program = partial / f"{name}.py"
    program.write_text(
        "import json, pathlib, sys\n"
        "path = pathlib.Path(sys.argv[2])\n"
        "path.write_text(json.dumps({'summary': {'kept': path.exists(), 'args': sys.argv[3:]}}))\n"
    )

    found = run.run_one(program, limit_s=60, quick=quick, resume=True)

    assert found is not None
    assert found["summary"] == {"kept": kept, "args": [one.format(partial) for one in args]}


@pytest.mark.parametrize("name", sorted({*run.WHOLE, *run.CACHES}))
def test_programs_have_the_options_that_they_are_given(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported most of what they import: ten seconds less."""
    program = run.program_of(name)
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    monkeypatch.setattr(sys, "path", [str(program.parent), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    told = capsys.readouterr().out
    assert ended.value.code == 0
    given = [str(part) for part in (*run.WHOLE.get(name, ()), *run.CACHES.get(name, ()))]

    assert all(f"{option} " in told for option in given if option.startswith("--"))


@pytest.mark.parametrize("name", sorted({*run.MINUTES, *run.LONG}))
def test_each_benchmark_has_a_program(name: str) -> None:
    assert "--json" in run.program_of(name).read_text()
