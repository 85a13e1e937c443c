"""The limit of open files, raised as far as it goes."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator

import pytest

from rose.open_files import raise_limit


@pytest.fixture
def hard() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_one(hard: int, caplog: pytest.LogCaptureFixture) -> None:
    assert raise_limit(1) == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    assert not caplog.records


def test_too_low_a_hard_limit_is_said(hard: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        raise_limit(hard + 1)
    assert f"at most {hard} files" in caplog.text
