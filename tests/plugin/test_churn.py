"""The device never holds more than it has, by the kernel's word, while the loan changes all the time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.plugin.churn import TOTAL_PAGES, Seen, churn
from tests.policy.coserving import live_logs


@dataclass
class Churned:
    seen: Seen
    logs: Path


@pytest.fixture(scope="module")
def churned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Churned]:
    folder = tmp_path_factory.mktemp("churn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROSE_DIR", str(folder / "node"))
        patch.setenv("ROSE_DECISIONS", str(folder / "logs"))
        yield Churned(churn(folder, changes=400, kills=1, seed=7), folder / "logs")


def test_no_page_is_there_twice_under_churn_and_a_kill(churned: Churned) -> None:
    seen = churned.seen
    assert seen.worst_pages <= TOTAL_PAGES
    assert seen.most_lent > 2, "memory really moved"
    assert seen.left_pages == 0, "and production has all of it back"


def test_the_logs_of_both_engines_replay_and_agree_with_the_model(churned: Churned) -> None:
    assert len(live_logs.lives(churned.logs, "rollout")) == 2, "one was killed"

    looked = live_logs.check(churned.logs, total_pages=TOTAL_PAGES, chunk_pages=1)

    assert all(count > 10 for count in looked.values()), looked
