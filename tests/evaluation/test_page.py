"""What a page looks like on a narrow screen."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rose.evaluation.page import whole_page
from tests.scheduler.browser import CHROMIUM, Browser


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
def test_a_long_path_does_not_widen_a_page(tmp_path: Path) -> None:
    """On 400 pixels the name of a trace's file went over the edge."""
    page = tmp_path / "page.html"
    page.write_text(whole_page("t", f'<p class="lead">Traffic: {"/folder_of_traces" * 8}.csv, 1 hour</p>'))

    async def width() -> int:
        async with Browser(width=500) as browser:
            await browser.open(page.as_uri())
            inner, whole = await browser.run("[innerWidth, document.documentElement.scrollWidth]")
            assert inner == 500
            return whole

    assert asyncio.run(width()) <= 500
