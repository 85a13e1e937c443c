"""The ghost of production's prefix cache: what it counts as lost is what a cache of the whole device would have found.

vLLM's real scheduler twice, without a model: one with ROSE and a loan, one stock.  Both get the same prompts, and vLLM's own
counters of prefix hits are the judge.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState
from rose.policy.coserving.hits import longest_hit, window_blocks
from tests.plugin import harness
from tests.plugin.stand_in import Beating
from tests.plugin.test_kv_cache_table import cache_of
from tests.tiny_model import write_tiny_model
from tests.tiny_shapes import write_shape

BLOCK, CHUNK_BLOCKS = harness.BLOCK_TOKENS, 32


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = tmp_path_factory.mktemp("model")
    write_tiny_model(model)
    config = harness.engine_config(model)
    config.cache_config.enable_prefix_caching = True
    return config


@dataclass
class Pair:
    """The same traffic for an engine that lends and for one that does not."""

    ours: Any
    stock: Any
    number: int = 0

    def __post_init__(self) -> None:
        self.counted = [[0, 0], [0, 0]]
        """Tokens queried and hit: ours, stock.  vLLM hands its counters out and begins anew with every step."""
        for scheduler, sums in zip((self.ours, self.stock), self.counted, strict=True):
            scheduler.kv_cache_manager.record_prefix_cache_stats = functools.partial(_count, sums)

    def say(self, prompt: list[int], max_tokens: int = 2, adapter: int = 0) -> None:
        """One request, to its end, on both."""
        self.number += 1
        for scheduler in (self.ours, self.stock):
            scheduler.add_request(_request(f"r{self.number}", prompt, max_tokens, adapter))
            while scheduler.requests:
                harness.step(scheduler)
        self.ours.rose.ghost.check()

    def missed(self) -> int:
        """Prefix hits in tokens that stock had and ours had not, by vLLM's count."""
        return self.counted[1][1] - self.counted[0][1]

    def lend(self, chunks: int) -> None:
        """The agent asks for so many; nothing else runs meanwhile."""
        self.ours.rose.seam.target_chunks = chunks
        for _ in range(1000):
            self.ours.rose.before_schedule()
            if len(self.ours.rose.balloon.inflated) == chunks:
                return
        raise AssertionError(f"{len(self.ours.rose.balloon.inflated)} of {chunks} chunks")

    def give_back(self) -> None:
        """Everything is mapped again."""
        side = self.ours.rose
        side.seam.target_chunks = 0
        side.seam.mapped.extend(sorted(side.balloon.inflated))
        while side.balloon.inflated:
            side.before_schedule()


def _count(sums: list[int], request: Any, num_hits: int) -> None:
    sums[0] += request.num_tokens
    sums[1] += num_hits


def _request(name: str, prompt: list[int], max_tokens: int, adapter: int = 0) -> Any:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        lora_request=LoRARequest(f"adapter {adapter}", adapter, "nowhere") if adapter else None,
    )


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Any]:
    """The node agent's file: mode on, nothing lent yet."""
    with Beating(NodeDir(tmp_path / "n").node_writer()) as node:
        node.write(NodeState(mode=Mode.ON, has_serving=1))
        yield node


@pytest.fixture
def pair(config: Any, tmp_path: Path, agent: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    yield from _pair(config, None, 16, tmp_path / "n", monkeypatch)


@pytest.fixture
def eagle_pair(tmp_path: Path, agent: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    model = str(write_shape(tmp_path / "model", "llama"))
    speculative = {"method": "eagle", "model": model, "num_speculative_tokens": 2}
    config = harness.engine_config(Path(model), enable_prefix_caching=True, speculative_config=speculative)
    yield from _pair(config, None, 16, tmp_path / "n", monkeypatch)


@pytest.fixture
def pair_of_groups(
    config: Any, tmp_path: Path, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    """Gemma 3's groups: five with a window of one block, one of full attention; 1536 blocks, 24 chunks of 64."""
    cache = cache_of(config, "gemma3")
    monkeypatch.setattr(config.cache_config, "num_gpu_blocks", cache.num_blocks)
    yield from _pair(config, cache, 24, tmp_path / "n", monkeypatch)


def _pair(
    config: Any, cache: Any, num_chunks: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_plugin.scheduler import ServingScheduler

    monkeypatch.setenv("ROSE_ROLE", "serving")
    monkeypatch.setenv("ROSE_DIR", str(path))
    rank = harness.write_rank(path, "serving", mapped=True, num_chunks=num_chunks)
    pair = Pair(harness.build(ServingScheduler, config, cache), harness.build(Scheduler, config, cache))
    assert pair.ours.rose is not None
    yield pair
    assert pair.ours.rose.failed is None
    pair.ours.rose.balloon.check()
    for writer in (pair.ours.rose._lease, pair.ours.rose._board.file, pair.ours.rose._pagers, rank):
        writer.close()


def _prompt(rng: random.Random, blocks: int = 3) -> list[int]:
    return [rng.randrange(1000) for _ in range(blocks * BLOCK + 5)]


def test_with_nothing_lent_nothing_is_lost_and_the_pool_is_vllms_own(pair: Pair) -> None:
    rng = random.Random(0)
    prompts = [_prompt(rng) for _ in range(300)]  # 900 blocks: more than there are
    for prompt in [*prompts, *prompts[-100:]]:
        pair.say(prompt)
    ghost = pair.ours.rose.ghost
    assert (ghost.lost_tokens, len(ghost), pair.missed()) == (0, 0, 0)
    assert "_maybe_evict_cached_block" not in vars(pair.ours.kv_cache_manager.block_pool)


def test_prompts_are_counted_as_vllm_counts_its_queries(pair: Pair) -> None:
    rng = random.Random(0)
    for _ in range(10):
        pair.say(_prompt(rng))
    assert pair.ours.rose.ghost.queried_tokens == pair.counted[1][0]


def test_prefixes_in_the_chunks_that_are_taken_are_lost_once(pair: Pair) -> None:
    rng = random.Random(1)
    prompts = [_prompt(rng) for _ in range(100)]
    for prompt in prompts:
        pair.say(prompt)
    pair.lend(15)  # all but the chunk of the null block
    assert pair.ours.rose.ghost.lost_tokens == 0
    for _ in range(2):
        pair.say(prompts[-1])
    assert pair.ours.rose.ghost.lost_tokens == pair.missed() == 3 * BLOCK


def test_a_drafter_computes_the_last_block_of_what_is_found_anew(eagle_pair: Pair) -> None:
    """Of three cached blocks vLLM takes two; with nothing found, two are lost."""
    rng = random.Random(1)
    prompts = [_prompt(rng) for _ in range(100)]
    for prompt in prompts:
        eagle_pair.say(prompt)
    eagle_pair.lend(15)
    for _ in range(2):
        eagle_pair.say(prompts[-1])
    assert eagle_pair.ours.rose.ghost.lost_tokens == eagle_pair.missed() == 2 * BLOCK


def test_prefixes_that_a_smaller_cache_evicts_sooner_are_lost_too(pair: Pair) -> None:
    """Memory was empty when it was lent: nothing was taken from the cache, but it cannot grow."""
    rng = random.Random(2)
    pair.lend(12)  # 128 of 512 blocks are left
    prompts = [_prompt(rng) for _ in range(100)]
    for prompt in prompts:
        pair.say(prompt)
    assert pair.ours.rose.ghost.lost_tokens == pair.missed() == 0
    for prompt in prompts:
        pair.say(prompt)
    assert pair.ours.rose.ghost.lost_tokens == pair.missed() == 100 * 3 * BLOCK


def test_a_prompts_prefix_under_another_adapter_is_another_one(pair: Pair) -> None:
    rng = random.Random(8)
    prompts = [_prompt(rng) for _ in range(40)]
    for prompt in prompts:
        for adapter in (0, 1):
            pair.say(prompt, adapter=adapter)
    pair.lend(15)
    for prompt in prompts:
        pair.say(prompt, adapter=2)
    assert pair.ours.rose.ghost.lost_tokens == pair.missed() == 0
    pair.say(prompts[0], adapter=1)
    assert pair.ours.rose.ghost.lost_tokens == pair.missed() == 3 * BLOCK


def test_what_a_cache_of_the_whole_device_would_have_evicted_is_not_lost(pair: Pair) -> None:
    rng = random.Random(3)
    pair.lend(12)
    prompts = [_prompt(rng) for _ in range(400)]  # 1200 blocks
    for prompt in [*prompts, *prompts]:
        pair.say(prompt)
    assert pair.ours.rose.ghost.lost_tokens == pair.missed() == 0


def test_what_was_dropped_is_lost_also_after_the_memory_is_back_until_it_would_be_gone(pair: Pair) -> None:
    rng = random.Random(4)
    prompts = [_prompt(rng) for _ in range(100)]
    for prompt in prompts:
        pair.say(prompt)
    pair.lend(15)
    pair.give_back()
    pair.say(prompts[50])
    assert pair.ours.rose.ghost.lost_tokens == pair.missed() == 3 * BLOCK
    for _ in range(300):
        pair.say(_prompt(rng))
    assert len(pair.ours.rose.ghost) == 0
    assert "_maybe_evict_cached_block" not in vars(pair.ours.kv_cache_manager.block_pool)


def _converse(pair: Pair, rng: random.Random, *, turns: int, loans: list[int]) -> None:
    """Turns that go on from their own past, beside loans that come and go."""
    talks: list[list[int]] = []
    for turn in range(turns):
        if turn % 100 == 30:
            pair.give_back()
            pair.lend(rng.choice(loans))
        if len(talks) < 40 or rng.random() < 0.1:
            talks.append(_prompt(rng, 1))
            talk = talks[-1]
        else:
            talk = rng.choice(talks[-60:])
            talk += [rng.randrange(1000) for _ in range(rng.choice([20, BLOCK]))]
        if len(talk) > 440:
            talks.remove(talk)
            continue
        pair.say(talk)


@pytest.mark.parametrize("seed", range(8))
def test_on_conversations_the_count_is_vllms_own_difference(pair: Pair, seed: int) -> None:
    """Turns that go on from their own past, loans that come and go.  Chunks are taken out of turn, so it is no exact count: what
    has been computed again is in the ghost's cache at another place in the order than in stock's."""
    _converse(pair, random.Random(seed), turns=400, loans=[4, 8, 12])
    counted, missed = pair.ours.rose.ghost.lost_tokens, pair.missed()
    assert missed > 0
    assert 0.75 * missed <= counted <= 1.1 * missed


def test_what_lies_behind_a_lost_block_is_lost_with_it(pair: Pair) -> None:
    """Prefixes that run from a chunk into the next one, and the first of the two is lent: vLLM finds nothing of them."""
    rng = random.Random(13)
    prompts = [_prompt(rng) for _ in range(40)]
    for prompt in prompts:
        pair.say(prompt)
    side = pair.ours.rose
    side.ghost.watch()
    assert side.balloon.inflate(2)
    for prompt in prompts:
        pair.say(prompt)
    assert side.ghost.lost_tokens == pair.missed() > CHUNK_BLOCKS * BLOCK


def test_a_reset_of_the_cache_is_no_loss(pair: Pair) -> None:
    rng = random.Random(5)
    prompts = [_prompt(rng) for _ in range(100)]
    for prompt in prompts:
        pair.say(prompt)
    pair.lend(15)
    assert len(pair.ours.rose.ghost) > 0
    for scheduler in (pair.ours, pair.stock):
        assert scheduler.reset_prefix_cache()
    for prompt in prompts:
        pair.say(prompt)
    assert pair.ours.rose.ghost.lost_tokens == pair.missed() == 0


def test_the_least_recently_used_prefixes_are_lent_first(pair: Pair) -> None:
    rng = random.Random(6)
    prompts = [_prompt(rng) for _ in range(170)]  # 510 of 512 blocks
    for prompt in prompts:
        pair.say(prompt)
    pair.lend(8)
    for prompt in prompts[-60:]:
        pair.say(prompt)
    assert pair.ours.rose.ghost.lost_tokens == pair.missed() == 0


def lend_within(pair: Pair, chunks: int, max_loss: float) -> int:
    """The agent asks for so many and states a bound; how many are lent."""
    side = pair.ours.rose
    side.prefixes.look(max_loss, released=[], short=chunks)
    side.seam.target_chunks = chunks
    for _ in range(300):
        side.before_schedule()
    side.seam.target_chunks = 0
    return len(side.balloon.inflated)


def test_cached_chunks_whose_prompts_have_not_come_again_yet_are_not_lent(pair: Pair) -> None:
    """All cached pages at once, and then all their prompts again: without the bound everything is lost."""
    rng = random.Random(8)
    prompts = [_prompt(rng) for _ in range(100)]
    for prompt in prompts:
        pair.say(prompt)

    lent = lend_within(pair, 15, 0.01)
    for prompt in prompts:
        pair.say(prompt)

    assert 0 < lent < 15  # what holds no prefix
    assert pair.missed() <= 0.01 * pair.counted[1][0]


def test_cached_chunks_that_nobody_asks_for_are_lent(pair: Pair) -> None:
    """It has learned that before anybody asked for memory, or stated a bound."""
    rng = random.Random(9)
    for _ in range(700):
        pair.say(_prompt(rng))

    assert lend_within(pair, 15, 0.01) == 15


@pytest.mark.parametrize("bound", [0.0, 1.0])
def test_without_a_bound_all_cached_chunks_are_lent(pair: Pair, bound: float) -> None:
    rng = random.Random(10)
    for _ in range(200):
        pair.say(_prompt(rng))

    assert lend_within(pair, 15, bound) == 15


def test_what_lent_content_has_cost_keeps_more_from_being_lent(pair: Pair) -> None:
    rng = random.Random(12)
    prompts = [_prompt(rng) for _ in range(700)]
    for prompt in prompts:
        pair.say(prompt)
    assert lend_within(pair, 5, 0.01) == 5
    for prompt in prompts[-170:]:  # all that there was
        pair.say(prompt)
    assert pair.missed() > 0

    side = pair.ours.rose
    side.prefixes.look(0.01, released=sorted(side.balloon.inflated), short=10)
    assert side.prefixes.offered == ()
    assert side.prefixes.num_kept == 10


def test_after_a_reset_of_the_cache_everything_may_be_lent(pair: Pair) -> None:
    rng = random.Random(11)
    for _ in range(100):
        pair.say(_prompt(rng))
    for scheduler in (pair.ours, pair.stock):
        assert scheduler.reset_prefix_cache()

    assert lend_within(pair, 15, 0.01) == 15


def test_an_error_in_the_middle_of_an_allocation_switches_off_and_vllm_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, side = random.Random(7), pair.ours.rose
    pair.lend(12)
    monkeypatch.setattr(side.ghost, "_keys", None)
    for number in range(100):
        pair.ours.add_request(_request(f"x{number}", _prompt(rng), 2))
        while pair.ours.requests:
            harness.step(pair.ours)
    failed, side.failed = side.failed, None
    assert "NoneType" in failed
    assert "_maybe_evict_cached_block" not in vars(pair.ours.kv_cache_manager.block_pool)


def rounds_until_quiet(side: Any, most: int = 200) -> int:
    """Rounds of the background thread that follow each other at once beside an idle engine, at most ``most``."""
    for rounds in range(1, most):
        side.rounds.round()
        while side.seam.engine._idle_state_callbacks:
            side.seam.engine._idle_state_callbacks.pop()(side.seam.engine)
        if not side.seam.notifier.wait(0.0):
            return rounds
    return most


def test_an_idle_engine_is_left_alone_while_what_is_asked_for_lies_in_kept_chunks(
    pair: Pair, agent: Any
) -> None:
    rng = random.Random(13)
    for _ in range(200):
        pair.say(_prompt(rng))
    side = pair.ours.rose
    side.seam.engine = harness.engine()
    wish = NodeState(mode=Mode.ON, has_serving=1, lend_pages=15, max_loss_ppm=10_000)
    agent.write(wish)
    side.seam.notifier.wait(0.0)  # of the steps before

    assert rounds_until_quiet(side) < 20
    assert side.prefixes.num_kept > 0
    side.rounds.round()  # the next one, on the timer
    assert not side.seam.engine._idle_state_callbacks

    agent.write(replace(wish, max_loss_ppm=0))  # now any cached chunk may go
    rounds_until_quiet(side)
    assert len(side.balloon.inflated) == 15


# --- several KV groups


def test_of_several_groups_what_all_of_them_had_is_lost_once(pair_of_groups: Pair) -> None:
    pair, rng = pair_of_groups, random.Random(21)
    prompts = [_prompt(rng) for _ in range(60)]  # 3 blocks in each of six groups
    for prompt in prompts:
        pair.say(prompt)
    pair.lend(23)
    for _ in range(2):
        pair.say(prompts[-1])
    assert pair.ours.rose.ghost.lost_tokens == pair.missed() == 3 * BLOCK


def test_of_several_groups_a_smaller_cache_loses_what_it_evicts_sooner(pair_of_groups: Pair) -> None:
    pair, rng = pair_of_groups, random.Random(22)
    pair.lend(20)  # 256 of 1536 blocks are left, 14 prompts' worth
    prompts = [_prompt(rng) for _ in range(50)]
    for prompt in [*prompts, *prompts]:
        pair.say(prompt)
    assert pair.missed() > 0
    assert pair.ours.rose.ghost.lost_tokens == pair.missed()


@pytest.mark.parametrize("seed", range(4))
def test_on_conversations_with_several_groups_the_count_is_near_vllms(
    pair_of_groups: Pair, seed: int
) -> None:
    pair = pair_of_groups
    _converse(pair, random.Random(seed), turns=300, loans=[12, 16, 20])
    counted, missed = pair.ours.rose.ghost.lost_tokens, pair.missed()
    assert missed > 0
    assert 0.75 * missed <= counted <= 1.25 * missed


@settings(max_examples=200)
@given(
    num_blocks=st.integers(0, 12),
    windows=st.lists(st.sampled_from([None, None, 64, 200, 300, 600]), min_size=1, max_size=4),
    data=st.data(),
)
def test_the_longest_hit_is_the_one_that_vllms_coordinator_finds(
    num_blocks: int, windows: list[int | None], data: st.DataObject
) -> None:
    import torch
    from vllm.v1 import kv_cache_interface as k
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator

    common = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    full = k.FullAttentionSpec(**common)
    specs = [k.SlidingWindowSpec(**common, sliding_window=one) if one else full for one in windows]
    groups = [k.KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    coordinator = get_kv_cache_coordinator(
        kv_cache_config=k.KVCacheConfig(16, [], groups),
        max_model_len=BLOCK * 16,
        max_in_flight_tokens=BLOCK,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
    )
    has = {
        (group, index): data.draw(st.booleans())
        for group in range(len(windows))
        for index in range(num_blocks)
    }
    block = coordinator.block_pool.blocks[1]
    coordinator.block_pool.get_cached_block = lambda key, ids: (
        [block] * len(ids) if all(has[one, int(key)] for one in ids) else None
    )
    found = coordinator.find_longest_cache_hit(
        [str(i).encode() for i in range(num_blocks)], num_blocks * BLOCK
    )
    needed = [window_blocks(one, BLOCK) if one else None for one in windows]
    assert longest_hit(num_blocks, needed, lambda group, index: has[group, index]) * BLOCK == found[1]


def _found_nothing(side: Any) -> None:
    side.search.looked(time.monotonic(), side.prefixes.offered, num_missing=1, none_left=True)
    assert not may_find_more(side)


def may_find_more(side: Any) -> bool:
    return side.search.may_find_more(time.monotonic(), side.prefixes.offered)


def test_an_idle_engine_is_asked_at_once_for_what_has_just_come_back(pair: Pair) -> None:
    """A loan that is taken back and given again waited five seconds for it."""
    side = pair.ours.rose
    pair.lend(3)
    _found_nothing(side)
    pair.give_back()
    assert may_find_more(side)


def test_an_idle_engine_is_asked_at_once_for_what_its_last_request_held(pair: Pair) -> None:
    side = pair.ours.rose
    pair.ours.add_request(_request("last", list(range(40)), 2))
    harness.step(pair.ours)
    _found_nothing(side)
    while pair.ours.requests:
        harness.step(pair.ours)
    assert may_find_more(side)
