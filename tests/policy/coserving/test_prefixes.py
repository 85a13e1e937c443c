"""The price of production's cached prefixes: a loan costs its prompts at most the bound, and cold memory is lent nevertheless."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.policy.coserving.prefixes import AGES, HALF_LIFE, PrefixBook

CHUNK_BLOCKS, BLOCK_TOKENS, PROMPT_BLOCKS = 4, 16, 4
BOUND = 0.01


class Cache:
    """Production's prefix cache of whole prompts, the least recently used going first, and one of the same device with nothing lent.

    A prompt fills one chunk, so what a chunk costs is what its prompt costs.
    """

    def __init__(self, num_chunks: int) -> None:
        self.book = PrefixBook(num_chunks, CHUNK_BLOCKS, BLOCK_TOKENS)
        self.num_chunks = num_chunks
        self.free = list(range(1, num_chunks))
        self.ours: OrderedDict[int, int] = OrderedDict()
        """Prompt -> chunk."""
        self.whole: OrderedDict[int, None] = OrderedDict()
        self.asked = self.missed = self.lent = 0

    def ask(self, prompt: int) -> None:
        tokens = PROMPT_BLOCKS * BLOCK_TOKENS
        self.asked += tokens
        found = prompt in self.ours
        if prompt in self.whole and not found:
            self.missed += tokens
        self.book.lost(self.missed)
        chunk = self.ours.pop(prompt) if found else self.room()
        self.ours[prompt] = chunk
        self.whole[prompt] = None
        self.whole.move_to_end(prompt)
        if len(self.whole) > self.num_chunks - 1:
            self.whole.popitem(last=False)
        blocks = range(chunk * CHUNK_BLOCKS, (chunk + 1) * CHUNK_BLOCKS)
        self.book.ask(tokens, blocks, PROMPT_BLOCKS if found else 0)

    def room(self) -> int:
        return self.free.pop() if self.free else self.ours.popitem(last=False)[1]

    def lend(self, most: int, *, guarded: bool = True) -> int:
        """Free chunks first, then cached ones: those that are offered, or without a guard any."""
        before = self.lent
        while self.free and self.lent - before < most:
            self.book.gone(self.free.pop())
            self.lent += 1
        short = most - (self.lent - before)
        chunks = self.book.offer(BOUND, short) if guarded else list(self.ours.values())[:short]
        for chunk in chunks:
            for prompt, at in list(self.ours.items()):
                if at == chunk:
                    del self.ours[prompt]
            self.book.gone(chunk)
            self.lent += 1
        self.book.check()
        return self.lent - before

    def loss(self, prompts: list[int]) -> float:
        """Of the tokens that ``prompts`` ask for."""
        asked, missed = self.asked, self.missed
        for prompt in prompts:
            self.ask(prompt)
        return (self.missed - missed) / (self.asked - asked)


def traffic(rng: random.Random, count: int, again: float, apart: tuple[int, int]) -> list[int]:
    """New prompts, of which a part comes again ``apart`` prompts later."""
    said: list[int] = []
    for number in range(count):
        back = rng.randint(*apart)
        said.append(said[-back] if rng.random() < again and back <= len(said) else 1_000_000 + number)
    return said


def test_a_loan_of_all_cached_pages_whose_prompts_come_again_costs_a_point_at_most() -> None:
    """Without the guard one loan takes all that is cached, and a tenth of what is asked for is lost."""
    loss = {}
    for guarded in (False, True):
        cache = Cache(400)
        said = traffic(random.Random(1), 3000, 0.1, (20, 300))
        for prompt in said[:2400]:
            cache.ask(prompt)
        cache.lend(380, guarded=guarded)
        loss[guarded] = cache.loss(said[2400:])
    assert loss[False] > 0.09
    assert loss[True] <= BOUND


@pytest.mark.parametrize("count", [1, 10, 100, 300, 1000])
def test_prompts_that_all_come_again_once_lose_nothing(count: int) -> None:
    """Nothing has come again so far, but nothing is as old yet as it will be then."""
    cache = Cache(count + 10)
    for prompt in range(count):
        cache.ask(prompt)
    assert cache.lend(count + 9) == 9  # what was never used
    assert cache.loss(list(range(count))) == 0


def test_what_nobody_asks_for_again_is_lent() -> None:
    cache = Cache(200)
    for prompt in range(3000):
        cache.ask(prompt)
    assert cache.lend(150) == 150


def test_beside_one_prompt_that_everybody_shares_the_rest_is_lent() -> None:
    """Two prompts in three find what was used a moment ago: that says nothing against what has lain there for long."""
    cache = Cache(400)
    for number in range(9000):
        cache.ask(0 if number % 3 else number)
    assert cache.lend(250) == 250
    assert 0 in cache.ours
    assert cache.loss([0] * 100) == 0


def test_old_content_that_is_asked_for_is_kept_and_older_is_lent() -> None:
    """Prompts come again after 20 to 60 others and never later."""
    cache = Cache(400)
    said = traffic(random.Random(3), 9000, 0.5, (20, 60))
    for prompt in said[:8400]:
        cache.ask(prompt)
    assert cache.lend(399) >= 100
    assert cache.loss(said[8400:]) <= BOUND


def test_while_nobody_asks_nothing_grows_old() -> None:
    cache = Cache(100)
    for prompt in range(90):
        cache.ask(prompt)
    cache.lend(9)
    offered = cache.book.offer(BOUND, 99)
    assert [cache.book.offer(BOUND, 99) for _ in range(1000)] == [offered] * 1000


def test_what_was_paid_for_is_not_lent_a_second_time() -> None:
    cache = Cache(3000)
    for prompt in range(1060):
        cache.ask(prompt)
    cache.lend(len(cache.free))
    assert 0 < cache.lend(1000) < 100
    assert [cache.lend(1000) for _ in range(5)] == [0] * 5


def test_what_prompts_really_miss_counts_against_the_bound() -> None:
    cache = Cache(200)
    for prompt in range(3000):
        cache.ask(prompt)
    book = cache.book
    assert book.offer(BOUND, 10)
    book.lost(cache.missed + int(0.02 * 3000 * PROMPT_BLOCKS * BLOCK_TOKENS))
    assert book.offer(BOUND, 10) == ()
    for _ in range(4 * HALF_LIFE):
        cache.book.ask(64, (), 0)
    assert book.missed < BOUND


def test_the_chunk_of_the_null_block_is_never_offered() -> None:
    book = PrefixBook(4, CHUNK_BLOCKS, BLOCK_TOKENS)
    for _ in range(5000):
        book.ask(64, range(16), 0)
    assert 0 not in book.offer(1.0, 99)


def test_prefixes_that_were_there_before_it_looked_count_as_used() -> None:
    book = PrefixBook(4, CHUNK_BLOCKS, BLOCK_TOKENS, cached=range(8, 12))
    assert book.offer(1.0, 99) == ()
    for _ in range(1500):
        book.ask(64, (), 0)
    assert book.offer(1.0, 99) == (2,)


def test_of_a_large_device_a_sample_is_looked_at_and_answers_alike() -> None:
    offers = []
    for block_tokens, chunk_blocks, chunks in ((16, 64, 512), (128, 8, 512)):
        book = PrefixBook(chunks, chunk_blocks, block_tokens)
        for number in range(2000):
            first = number % chunks * chunk_blocks
            book.ask(1024, range(first, first + chunk_blocks), 0)
        offers.append(len(book.offer(BOUND, chunks)))
        assert len(book._used) <= 4096
    assert offers[0] == pytest.approx(offers[1], rel=0.05)


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.lists(st.integers(0, 47), max_size=6), st.integers(0, 6)),
            st.tuples(st.just("use"), st.lists(st.integers(0, 47), max_size=3), st.just(0)),
            st.tuples(st.just("gone"), st.lists(st.integers(0, 11), max_size=2), st.just(0)),
            st.tuples(st.just("wait"), st.just([]), st.sampled_from((1, *AGES))),
        ),
        max_size=60,
    ),
    bound=st.floats(0.001, 1.0),
)
def test_its_books_agree_with_themselves_and_an_offer_stays_within_the_bound(
    events: list[tuple[str, list[int], int]], bound: float
) -> None:
    book = PrefixBook(12, CHUNK_BLOCKS, BLOCK_TOKENS)
    for what, numbers, count in events:
        if what == "ask":
            book.ask(100, numbers, min(count, len(numbers)))
        elif what == "use":
            book.use(numbers)
        elif what == "wait":
            for _ in range(count):
                book.ask(10, (), 0)
        else:
            for chunk in numbers:
                book.gone(chunk)
        before = book.missed
        offered = book.offer(bound, 12)
        assert len(set(offered)) == len(offered)
        for chunk in offered:
            book.gone(chunk)
        assert book.missed <= max(before, bound) + 1e-9
        book.check()
