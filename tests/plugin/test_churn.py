"""The device never holds more than it has, by the kernel's word, while the loan changes all the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugin.churn import TOTAL_PAGES, churn


def test_no_page_is_there_twice_under_churn_and_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_DIR", str(tmp_path / "node"))
    seen = churn(tmp_path, changes=300, kills=1, seed=7)
    assert seen.worst_pages <= TOTAL_PAGES
    assert seen.most_lent > 2, "memory really moved"
    assert seen.left_pages == 0, "and production has all of it back"
