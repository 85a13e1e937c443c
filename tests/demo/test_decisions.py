"""The decision logs of a run outlive its private directory, in place of an earlier run's; its journal does not."""

from __future__ import annotations

from pathlib import Path

from rose.demo import programs
from rose.demo.demo_config import load_demo_config


def test_decisions_are_kept_and_tokens_are_not(tmp_path: Path) -> None:
    root, out = tmp_path / "run", tmp_path / "out"
    plan = programs.DemoPlan(
        config=load_demo_config(None, {"out": out}), cores=(0, 0), root=root, logs=out / "logs"
    )
    assert plan.keep_decisions() is None  # it never got that far
    (root / "journal").mkdir(parents=True)
    (root / "decisions").mkdir()
    (out / "decisions").mkdir(parents=True)
    (out / "decisions" / "decisions-9.rose").write_bytes(b"of an earlier run")
    (root / "journal" / "journal.rose").write_bytes(b"tokens")
    (root / "journal" / "decisions-1.rose").write_bytes(b"turns")
    (root / "decisions" / "lending-harvested-1.rose").write_bytes(b"loans")
    kept = plan.keep_decisions()
    assert kept == out / "decisions"
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == {
        "decisions-1.rose": b"turns",
        "lending-harvested-1.rose": b"loans",
    }
