"""`make bench-full` is stopped and goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import run


@pytest.fixture
def partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs keep what they have found, with something of a long one."""
    monkeypatch.setattr(run, "PARTIAL", tmp_path)
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


@pytest.mark.parametrize(("name", "kept"), [("policies", True), ("coserve", False)])
def test_only_long_benchmarks_are_given_what_they_had(partial: Path, name: str, kept: bool) -> None:
    program = partial / f"{name}.py"
    program.write_text(
        "import json, pathlib, sys\n"
        "path = pathlib.Path(sys.argv[2])\n"
        "path.write_text(json.dumps({'summary': {'kept': path.exists(), 'args': sys.argv[3:]}}))\n"
    )

    found = run.run_one(program, limit_s=60, quick=False, resume=True)

    assert found is not None
    args = ["--cache", str(partial / "policies.jsonl")] if kept else []
    assert found["summary"] == {"kept": kept, "args": args}
