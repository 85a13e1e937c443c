"""The price of production's cached prefixes: a loan costs its prompts at most the bound, and cold memory is lent nevertheless."""

from __future__ import annotations

import itertools
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
        self.away: list[int] = []
        self.ghost: set[int] = set()
        self.forgotten = 0
        self.asked = self.missed = self.lent = 0

    def ask(self, prompt: int) -> None:
        tokens = PROMPT_BLOCKS * BLOCK_TOKENS
        self.asked += tokens
        found = prompt in self.ours
        if prompt in self.whole and not found:
            self.missed += tokens
        chunk = self.ours.pop(prompt) if found else self.room()
        self.ours[prompt] = chunk
        self.whole[prompt] = None
        self.whole.move_to_end(prompt)
        if len(self.whole) > self.num_chunks - 1:
            self.whole.popitem(last=False)
        blocks = range(chunk * CHUNK_BLOCKS, (chunk + 1) * CHUNK_BLOCKS)
        self.book.ask(tokens, blocks, PROMPT_BLOCKS if found else 0)
        self.tell()

    def tell(self) -> None:
        """What the ghost of the whole device's cache says."""
        self.book.lost(self.missed)
        now = self.whole.keys() - self.ours.keys()
        self.forgotten += PROMPT_BLOCKS * len(self.ghost - now)
        self.ghost = now
        full = len(self.whole) == self.num_chunks - 1
        self.book.remember(PROMPT_BLOCKS * len(now), self.forgotten, is_full=full)

    def room(self) -> int:
        return self.free.pop() if self.free else self.ours.popitem(last=False)[1]

    def lend(self, most: int, *, guarded: bool = True) -> int:
        """Free chunks first, then cached ones: those that are offered, or without a guard any."""
        before = self.lent
        while self.free and self.lent - before < most:
            self.away.append(self.free.pop())
            self.book.gone(self.away[-1])
            self.lent += 1
        short = most - (self.lent - before)
        chunks = (self.book.offer(BOUND) if guarded else tuple(self.ours.values()))[:short]
        for chunk in chunks:
            for prompt, at in list(self.ours.items()):
                if at == chunk:
                    del self.ours[prompt]
            self.book.gone(chunk)
            self.lent += 1
            self.away.append(chunk)
        self.tell()
        self.book.check()
        return self.lent - before

    def take_back(self) -> None:
        self.free += self.away
        self.lent -= len(self.away)
        self.away.clear()

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
    offered = cache.book.offer(BOUND)
    assert [cache.book.offer(BOUND) for _ in range(1000)] == [offered] * 1000


def test_what_was_paid_for_is_not_lent_a_second_time() -> None:
    cache = Cache(3000)
    for prompt in range(1060):
        cache.ask(prompt)
    cache.lend(len(cache.free))
    assert 0 < cache.lend(1000) < 200
    assert [cache.lend(1000) for _ in range(5)] == [0] * 5


def test_loans_that_come_and_go_do_not_use_the_bound_up() -> None:
    """What was paid for is owed while a cache of the whole device would have it, and no longer."""
    cache = Cache(60)
    prompts = iter(range(100_000))
    lent: list[int] = []
    for _ in range(30):
        for prompt in itertools.islice(prompts, 300):
            cache.ask(prompt)
        lent.append(cache.lend(50))
        cache.take_back()
    assert lent == [50] * 30


def test_content_that_lies_lent_goes_on_proving_that_nobody_wants_it() -> None:
    cache = Cache(400)
    for prompt in range(500):
        cache.ask(prompt)
    assert 0 < cache.lend(399) < 300
    owed = cache.book.missed
    for prompt in range(1000, 1100):
        cache.ask(prompt)
    assert cache.book.missed < 0.9 * owed
    assert cache.lend(399) > 0


def test_prompts_that_miss_what_was_lent_make_the_rest_dearer() -> None:
    cache = Cache(200)
    for prompt in range(3000):
        cache.ask(prompt)
    before = len(cache.book.offer(BOUND))
    gone = list(cache.ours)[:50]
    cache.lend(50)
    for prompt in gone[:10]:
        cache.ask(prompt)
    assert len(cache.book.offer(BOUND)) < before - 60


def test_a_few_blocks_that_get_older_than_all_others_do_not_make_those_dear() -> None:
    """Some of the cache is a little older than where a class of ages begins; it was watched as often as the rest."""
    cache = Cache(AGES[1] + 6)
    for prompt in range(600):
        cache.ask(prompt)
    assert cache.lend(60) == 60


def test_what_prompts_really_miss_counts_against_the_bound() -> None:
    cache = Cache(200)
    for prompt in range(3000):
        cache.ask(prompt)
    book = cache.book
    assert book.offer(BOUND)
    book.lost(cache.missed + int(0.02 * 3000 * PROMPT_BLOCKS * BLOCK_TOKENS))
    assert book.offer(BOUND) == ()
    for _ in range(4 * HALF_LIFE):
        cache.book.ask(64, (), 0)
    assert book.missed < BOUND


def test_the_chunk_of_the_null_block_is_never_offered() -> None:
    book = PrefixBook(4, CHUNK_BLOCKS, BLOCK_TOKENS)
    for _ in range(5000):
        book.ask(64, range(16), 0)
    book.remember(0, 0, is_full=True)
    assert set(book.offer(1.0)) == {1, 2, 3}


def test_a_reset_of_the_cache_forgets_what_was_there_and_not_what_was_learned() -> None:
    cache = Cache(100)
    for prompt in range(1000):
        cache.ask(prompt)
    cache.book.clear()
    assert cache.book.offer(BOUND) == ()
    assert cache.book.missed == 0
    cache.ours.clear()
    cache.whole.clear()
    cache.free = list(range(1, 100))
    for prompt in range(1000, 1090):
        cache.ask(prompt)
    assert cache.lend(99) == 9  # nothing had to make room yet: who knows how old it will get
    cache.take_back()
    for prompt in range(1090, 1110):
        cache.ask(prompt)
    assert cache.lend(90) == 90


def test_of_a_large_device_a_sample_is_looked_at_and_answers_alike() -> None:
    offers = []
    for block_tokens, chunk_blocks, chunks in ((16, 64, 512), (128, 8, 512)):
        book = PrefixBook(chunks, chunk_blocks, block_tokens)
        for number in range(2000):
            first = number % chunks * chunk_blocks
            book.ask(1024, range(first, first + chunk_blocks), 0)
        book.remember(0, 0, is_full=True)
        offers.append(len(book.offer(BOUND)))
        assert len(book._used) <= 4096
    assert offers[0] > 100
    assert offers[0] == pytest.approx(offers[1], rel=0.05)


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.lists(st.integers(0, 47), max_size=6), st.integers(0, 6)),
            st.tuples(st.just("use"), st.lists(st.integers(0, 47), max_size=3), st.just(0)),
            st.tuples(st.just("gone"), st.lists(st.integers(0, 11), max_size=2), st.just(0)),
            st.tuples(st.just("wait"), st.just([]), st.sampled_from((1, *AGES))),
            st.tuples(st.just("look"), st.just([]), st.integers(0, 6)),
            st.tuples(st.just("lost"), st.just([]), st.integers(1, 60)),
            st.tuples(st.just("clear"), st.just([]), st.just(0)),
        ),
        max_size=60,
    ),
    bound=st.floats(0.001, 1.0),
)
def test_its_books_agree_with_themselves_and_an_offer_stays_within_the_bound(
    events: list[tuple[str, list[int], int]], bound: float
) -> None:
    book = PrefixBook(12, CHUNK_BLOCKS, BLOCK_TOKENS)
    forgotten = lost = 0
    for what, numbers, count in events:
        if what == "ask":
            book.ask(100, numbers, min(count, len(numbers)))
        elif what == "use":
            book.use(numbers)
        elif what == "wait":
            for _ in range(count):
                book.ask(10, (), 0)
        elif what == "look":
            forgotten += count
            book.remember(count, forgotten, is_full=count > 3)
        elif what == "lost":
            lost += count
            book.lost(lost)
        elif what == "clear":
            book.clear()
        else:
            for chunk in numbers:
                book.gone(chunk)
        before = book.missed
        offered = book.offer(bound)
        assert len(set(offered)) == len(offered)
        for chunk in offered:
            book.gone(chunk)
        assert book.missed <= max(before, bound) + 1e-9
        book.check()
