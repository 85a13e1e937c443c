"""The plan by which stages without an engine move memory."""

from __future__ import annotations

from benchmarks.gpu.kv_plan import CHUNK_BYTES, LAYERS, KvPlan
from rose.units import PAGE_BYTES


def test_what_is_lent_is_one_run_of_whole_pages_in_each_layer() -> None:
    plan = KvPlan(1 << 30)
    assert plan.lent_bytes == 19 * CHUNK_BYTES  # of 56 MiB
    assert len(plan.going) == LAYERS
    assert all(offset % PAGE_BYTES == length % PAGE_BYTES == 0 for offset, length in plan.going)
    assert sum(length for _, length in plan.going) == plan.lent_bytes
    assert max(offset + length for offset, length in plan.going) == plan.size == 2 * plan.lent_bytes


def test_what_comes_slice_by_slice_is_what_went() -> None:
    plan = KvPlan(1 << 30)
    assert [len(ranges) for ranges in plan.coming] == [LAYERS] * 3
    pages = {
        page
        for ranges in plan.coming
        for offset, length in ranges
        for page in range(offset // PAGE_BYTES, (offset + length) // PAGE_BYTES)
    }
    assert len(pages) * PAGE_BYTES == plan.lent_bytes
    assert pages == {
        page
        for offset, length in plan.going
        for page in range(offset // PAGE_BYTES, (offset + length) // PAGE_BYTES)
    }
