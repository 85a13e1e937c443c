"""Balloon on vLLM's real block pool: what it takes, what it leaves, and that nothing is handed out twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from rose.policy.coserving.runs import fewest_runs
from vllm_plugin.capacity import Balloon

CHUNK = 4
NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def block_pool_class() -> Any:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool


@pytest.fixture
def pool(block_pool_class: Any) -> Any:
    return block_pool_class(num_gpu_blocks=NUM_BLOCKS, enable_caching=True, hash_block_size=16)


@pytest.fixture
def balloon(pool: Any) -> Iterator[Balloon]:
    balloon = Balloon(pool, CHUNK)
    yield balloon
    balloon.check()


def test_inflating_takes_free_blocks_from_the_pool(pool: Any, balloon: Balloon) -> None:
    free = pool.get_num_free_blocks()

    assert len(balloon.inflate_free(5, budget_s=1.0)) == 5

    assert pool.get_num_free_blocks() == free - 5 * CHUNK
    assert balloon.num_used_blocks == 0


@pytest.mark.parametrize(
    ("chunks", "count", "chosen"),
    [
        ([5, 1, 2, 3, 9], 2, [1, 2]),
        ([1, 2, 3, 4, 7, 8], 2, [7, 8]),  # the long run stays whole
        ([1, 3, 4, 6], 3, [3, 4, 1]),
        ([1, 3, 5], 2, [1, 3]),
        ([2, 1], 5, [1, 2]),
        ([1, 2], 0, []),
        ([1, 2], -1, []),
        ([], 3, []),
    ],
)
def test_neighbours_are_chosen_where_there_is_a_choice(
    chunks: list[int], count: int, chosen: list[int]
) -> None:
    assert fewest_runs(chunks, count) == chosen


def test_unused_chunks_are_taken_side_by_side(pool: Any, balloon: Balloon) -> None:
    held = pool.get_new_blocks(NUM_BLOCKS - 1)
    used = {15, 13, 10, 6}  # of sixteen chunks
    pool.free_blocks([block for block in held if block.block_id // CHUNK not in used])

    assert sorted(balloon.inflate_free(3, budget_s=1.0)) == [7, 8, 9]
    assert sorted(balloon.inflate_free(3, budget_s=1.0)) == [3, 4, 5]
    assert sorted(balloon.inflate_free(9, budget_s=1.0)) == [1, 2, 11, 12, 14]


def test_a_chunk_that_was_seen_unused_and_is_used_by_now_costs_nobody_his_memory(
    pool: Any, balloon: Balloon
) -> None:
    """A cut takes requests' memory where the balloon does not find enough that is unused."""
    held = pool.get_new_blocks(NUM_BLOCKS - 1)
    pool.free_blocks([block for block in held if block.block_id // CHUNK in {3, 5, 7, 8}])
    assert balloon.inflate_free(2, budget_s=1.0) == [8, 7]
    again = pool.get_new_blocks(CHUNK)  # chunk 3 or 5, which were seen
    assert balloon.inflate_free(1, budget_s=1.0) != [again[0].block_id // CHUNK]
    assert len(balloon.inflated) == 3


def test_deflating_gives_them_back(pool: Any, balloon: Balloon) -> None:
    free = pool.get_num_free_blocks()
    taken = balloon.inflate_free(5, budget_s=1.0)

    assert balloon.deflate(taken) == 5

    assert pool.get_num_free_blocks() == free
    assert not balloon.inflated


@pytest.mark.parametrize("how", ["let out", "freed"])
def test_what_came_free_behind_a_look_that_found_no_more_is_found_by_the_next(
    pool: Any, balloon: Balloon, how: str
) -> None:
    """Beside a chunk that is kept for its prefix, or every look would begin anew anyhow."""
    held = pool.get_new_blocks(NUM_BLOCKS - 1)
    kept, late = held[5 * CHUNK], [block for block in held if block.block_id // CHUNK == 9]
    kept._block_hash = b"a prefix"
    pool.free_blocks([block for block in held if block not in late])
    taken = balloon.inflate_free(15, budget_s=1.0, cached=())
    assert balloon.exhausted

    if how == "freed":
        pool.free_blocks(late)
        balloon.note_freed()
        assert balloon.inflate_free(1, budget_s=1.0, cached=()) == [9]
    else:
        balloon.deflate(taken[:3])
        assert sorted(balloon.inflate_free(3, budget_s=1.0, cached=())) == sorted(taken[:3])
        pool.free_blocks(late)
    kept._block_hash = None


def test_a_chunk_with_a_block_in_use_is_left_alone(pool: Any, balloon: Balloon) -> None:
    held = pool.get_new_blocks(1)[0]  # the first free block is 1, in chunk 0
    chunk = held.block_id // CHUNK

    assert not balloon.inflate(chunk)
    assert pool.blocks[held.block_id].ref_cnt == 1
    assert chunk not in balloon.inflated


def test_the_null_block_is_never_taken_even_with_its_whole_chunk(pool: Any, balloon: Balloon) -> None:
    assert balloon.inflate(0)

    assert pool.null_block.is_null
    assert pool.null_block.ref_cnt == 0
    assert balloon.num_inflated_blocks == CHUNK - 1
    balloon.deflate([0])
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_everything_inflated_leaves_nothing_to_allocate(pool: Any, balloon: Balloon) -> None:
    for chunk in range(balloon.num_chunks):
        balloon.inflate(chunk)

    assert pool.get_num_free_blocks() == 0
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        pool.get_new_blocks(1)


def test_cheapest_victims_come_first(pool: Any, balloon: Balloon) -> None:
    first, second, third = (pool.get_new_blocks(count) for count in (3, CHUNK + 1, CHUNK - 1))
    requests = [
        (name, tokens, [block.block_id for block in blocks])
        for name, tokens, blocks in (("short", 10, first), ("long", 70, second), ("middle", 40, third))
    ]  # chunk 0: short; chunk 1: long; chunk 2: long and middle; the others are free

    assert balloon.cheapest_victims(13, requests) == ([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [])
    assert balloon.cheapest_victims(14, requests) == ([*range(3, 16), 1], ["long"])
    assert balloon.cheapest_victims(99, requests) == ([*range(3, 16), 1, 2], ["long", "middle"])


def test_a_request_that_is_lost_already_costs_nothing_more(pool: Any, balloon: Balloon) -> None:
    pool.get_new_blocks(3)
    requests = [
        ("wide", 50, [4, 8, 12]),  # chunks 1, 2, 3
        ("narrow", 40, [16]),
        ("other", 40, [20]),
    ]
    balloon.inflate_free(10, budget_s=1.0)
    left = sorted(set(range(1, 16)) - balloon.inflated)
    assert left == [1, 2, 3, 4, 5]

    assert balloon.cheapest_victims(5, requests) == ([4, 5, 1, 2, 3], ["narrow", "other", "wide"])
    assert balloon.cheapest_victims(3, [("wide", 30, [4, 8, 12]), *requests[1:]]) == ([1, 2, 3], ["wide"])


@pytest.mark.parametrize("seed", range(5))
def test_no_block_is_ever_handed_out_twice(pool: Any, balloon: Balloon, seed: int) -> None:
    rng = random.Random(seed)
    held: list[Any] = []
    for _ in range(2000):
        match rng.randrange(4):
            case 0:
                count = rng.randint(1, 6)
                if count <= pool.get_num_free_blocks():
                    held += pool.get_new_blocks(count)
            case 1 if held:
                rng.shuffle(held)
                count = rng.randint(1, len(held))
                pool.free_blocks([held.pop() for _ in range(count)])
            case 2:
                balloon.inflate_free(rng.randint(1, 4), budget_s=1.0)
            case 3 if balloon.inflated:
                balloon.deflate(rng.sample(sorted(balloon.inflated), rng.randint(1, len(balloon.inflated))))
        ids = [block.block_id for block in held]
        assert len(set(ids)) == len(ids)
        assert not {i // CHUNK for i in ids} & balloon.inflated
        assert balloon.num_used_blocks == len(held)
        assert pool.get_num_free_blocks() + len(held) + balloon.num_inflated_blocks == NUM_BLOCKS - 1
        balloon.check()
