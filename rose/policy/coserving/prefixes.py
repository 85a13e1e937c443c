"""What production's cached prefixes may be lent for: the price of each chunk, from what content of its age has given lately.

A page that no request holds is seldom empty: it keeps prefixes, and lending it costs the prompts that would have found them.  What
they would have found cannot be known, but it can be bounded by what content *of the same age* gave: the book notes when each block
was last used, at which age blocks are found again, and how long blocks of each age lay there without.  Age is counted in
prompts: while nobody asks nothing grows old, for nobody can have asked in vain.

The *rate* of an age is ``(tokens found + one prompt) / (tokens that lay there x tokens asked for)``.  The prompt that was not seen
is Laplace's: where next to nothing has been watched, everything has to be expected.  So a loan grows into the cache as evidence does: in steps,
the cheapest chunks first, each of which leaves room in the bound.

A block's *price* is the share of all prompt tokens that is expected to be missed without it.  It is the rate of the block's own age, plus the
rates of the older ages that the block might still have reached.  Each of those counts in proportion: if only a sixteenth of the
content of this age ever gets that old, a sixteenth of that rate is added.  An age that no block has reached yet has the highest price, because
nothing is known of it, until the cache is full and blocks are evicted before they get that old.  So an engine that has just started lends
nothing of its cache.  A chunk's price is the sum over its blocks.

The bound: the price of what is offered plus the price of what is on loan, both at today's rates, stays within it.  If prompts have lately
missed more than the price of the loan says, what they missed counts instead.

The book goes on learning from blocks that are on loan.  The caller keeps the keys that a cache of the whole device would hold, and reports how
many prompts missed some of them and how many keys are left.  What that larger cache would have evicted too is no loss.

What this rests on: traffic that finds old content as often as it did in the last thousands of prompts.  Where that changes, what is
really missed is counted (``vllm_plugin/ghost.py``) and taken back for (:mod:`rose.policy.cold_cache`).

Cost: a few additions per prompt and one per block that it uses, of which every ``sample_every``-th is looked at.  Nothing is called on the step path.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence

AGES = (16, 64, 256, 1024)
"""Where one class of ages ends and the next begins, in prompts."""
HALF_LIFE = 2048
"""After so many prompts what was counted counts half."""
_SAMPLED_BLOCKS = 4096
_SAMPLED_PER_CHUNK = 4
_NEVER = 0


class _Ages:
    """How many blocks are of which class of ages.

    Attributes:
        classes: The count of each class.
    """

    def __init__(self) -> None:
        self.classes = [0] * (len(AGES) + 1)
        self._prompt = 1
        self._by_prompt: dict[int, int] = {}
        """How many were used last by each of the prompts that are not in the oldest class yet."""

    def class_of(self, used: int) -> int:
        return bisect_right(AGES, self._prompt - used)

    def add(self, used: int, count: int) -> None:
        """So many more (or fewer) that prompt ``used`` was the last to use."""
        number = self.class_of(used)
        self.classes[number] += count
        if number < len(AGES):
            self._by_prompt[used] = self._by_prompt.get(used, 0) + count

    def next_prompt(self) -> None:
        self._prompt += 1
        for number, age in enumerate(AGES):
            older = self._by_prompt.get(self._prompt - age, 0)
            self.classes[number] -= older
            self.classes[number + 1] += older
        self._by_prompt.pop(self._prompt - AGES[-1], None)

    def check(self, used: Iterable[int]) -> None:
        """Assert that these are the ages of blocks that were last used so; for tests."""
        ages = _Ages()
        ages._prompt = self._prompt
        for one in used:
            ages.add(one, 1)
        assert ages.classes == self.classes
        assert ages._by_prompt == {one: count for one, count in self._by_prompt.items() if count}


class PrefixBook:
    """See the module.

    Args:
        num_chunks: Of production's KV memory.
        chunk_blocks: Blocks of each; block ``b`` lies in chunk ``b // chunk_blocks``.
        block_tokens: Of one block.
    """

    def __init__(self, num_chunks: int, chunk_blocks: int, block_tokens: int) -> None:
        self._chunk_blocks = chunk_blocks
        self._num_blocks = num_chunks * chunk_blocks
        most = max(1, chunk_blocks // _SAMPLED_PER_CHUNK)
        self.sample_every = max(1, min(most, self._num_blocks // _SAMPLED_BLOCKS))
        self._sample_tokens = self.sample_every * block_tokens
        """What one block that is looked at stands for."""
        self._prompt = 1
        self._used = [_NEVER] * -(-self._num_blocks // self.sample_every)
        """By which prompt each was used last."""
        self._there = _Ages()
        self._gone = _Ages()
        """Blocks there were, until they were lent, and would be in a cache of the whole device."""
        self._lent_now: dict[int, int] = {}
        self._lent: deque[tuple[int, dict[int, int]]] = deque()
        """How many keys that cache will have forgotten when it has forgotten these, and how many blocks of each prompt they are."""
        classes = len(AGES) + 1
        self._found = [0.0] * classes
        self._watched = [0.0] * classes
        """Blocks there or lent, times tokens asked for."""
        self._was_watched = [0.0] * classes
        """When it was last made less."""
        self._num_prompts = 0.0
        self._asked_tokens = 0.0
        self._lost_tokens = 0.0
        self._lost_total = 0
        self._was_full = False
        """Has content had to make room, since the cache was empty?"""
        self._until_half = HALF_LIFE
        self._offered: dict[int, None] = {}

    @property
    def missed(self) -> float:
        """The part of all asked tokens that loans have cost lately, or are expected to cost."""
        expected = sum(
            gone * price for gone, price in zip(self._gone.classes, self._prices(), strict=True) if gone
        )
        return max(self._lost_tokens / max(1.0, self._asked_tokens), expected)

    def ask(self, num_tokens: int, blocks: Sequence[int], num_found: int) -> None:
        """A prompt of ``num_tokens`` has got ``blocks``, of which it found the first ``num_found`` in the cache."""
        self._next_prompt()
        self._num_prompts += 1
        self._asked_tokens += num_tokens
        for number, count in enumerate(self._counts):
            self._watched[number] += count * num_tokens
        for place in self._sampled(blocks[:num_found]):
            used = self._used[place]
            if used != _NEVER:
                self._found[self._there.class_of(used)] += 1
        self.use(blocks)

    def use(self, blocks: Iterable[int]) -> None:
        """A request holds ``blocks``: nobody else has used them later."""
        for place in self._sampled(blocks):
            self._note(place, self._prompt)
            if self._offered:
                self._offered.pop(place * self.sample_every // self._chunk_blocks, None)

    def lost(self, total_tokens: int) -> None:
        """What prompts have missed for the loans' sake so far, a running total."""
        lost = max(0, total_tokens - self._lost_total)
        if lost:
            self._offered = {}  # worked out before this was known
        self._lost_tokens += lost
        self._lost_total = total_tokens
        gone = sum(self._gone.classes)
        for number, one in enumerate(self._gone.classes):
            if one:
                self._found[number] += lost / self._sample_tokens * one / gone

    def remember(self, num_keys: int, num_forgotten: int, *, is_full: bool) -> None:
        """Look at a cache of the whole device: at those of its keys that are not in this one.

        Args:
            num_keys: How many there are; those of chunks that have gone since the last look are among them.
            num_forgotten: How many were there and are not any more, a running total; the oldest go first.
            is_full: Has such a cache next to no room left?
        """
        self._was_full |= is_full
        if self._lent_now:
            self._lent.append((num_forgotten + num_keys, self._lent_now))
            self._lent_now = {}
        while self._lent and self._lent[0][0] <= num_forgotten:
            for used, count in self._lent.popleft()[1].items():
                self._gone.add(used, -count)

    def clear(self) -> None:
        """The cache was reset, and nothing is there.  What was learned stays."""
        for place, used in enumerate(self._used):
            if used != _NEVER:
                self._note(place, _NEVER)
        self._was_full = False
        self._offered = {}

    @property
    def offered(self) -> tuple[int, ...]:
        """Of the last offer what nobody has used and nobody has taken since."""
        return tuple(self._offered)

    def offer(self, max_loss: float) -> tuple[int, ...]:
        """The chunks that hold prefixes and may all be lent, the cheapest first.

        Args:
            max_loss: The part of all asked tokens that loans may cost.
        """
        room = max_loss - self.missed
        self._offered = {}
        if room <= 0:
            return ()
        of_class = self._prices()
        prices: dict[int, float] = {}
        for place, used in enumerate(self._used):
            if used != _NEVER:
                chunk = place * self.sample_every // self._chunk_blocks
                prices[chunk] = prices.get(chunk, 0.0) + of_class[self._there.class_of(used)]
        prices.pop(0, None)  # vLLM's null block is never lent
        for chunk in sorted(prices, key=lambda chunk: (prices[chunk], -chunk)):
            room -= prices[chunk]
            if room < 0:
                break
            self._offered[chunk] = None
        return self.offered

    def _prices(self) -> list[float]:
        """Of one block that is looked at, by its class."""
        asked = max(1.0, self._asked_tokens)
        prompt_tokens = asked / max(1.0, self._num_prompts)
        counts = self._counts
        rates, shares = [0.0] * len(counts), [0.0] * len(counts)
        for number, (count, found, watched) in enumerate(
            zip(counts, self._found, self._watched, strict=True)
        ):
            if not watched:
                if number and not count and self._was_full:
                    break  # nothing gets so old here
                rates[number] = math.inf
                continue
            rates[number] = (found * self._sample_tokens + prompt_tokens) / watched
            shares[number] = max(count, watched / asked)
        prices: list[float] = []
        for number, rate in enumerate(rates):
            for older in range(number + 1, len(rates)):
                if rates[older] == math.inf:
                    rate = math.inf
                elif shares[older]:
                    rate += rates[older] * min(1.0, shares[older] / (shares[number] or math.inf))
            prices.append(rate)
        return prices

    def gone(self, chunk: int) -> None:
        """A chunk has left the block pool, and what it held with it."""
        self._offered.pop(chunk, None)
        for block in range(chunk * self._chunk_blocks, (chunk + 1) * self._chunk_blocks):
            if block % self.sample_every == 0:
                used = self._used[block // self.sample_every]
                if used != _NEVER:
                    self._gone.add(used, 1)
                    self._lent_now[used] = self._lent_now.get(used, 0) + 1
                    self._note(block // self.sample_every, _NEVER)

    def check(self) -> None:
        """Assert what always holds; for tests."""
        self._there.check(used for used in self._used if used != _NEVER)
        lent = [self._lent_now, *(batch for _, batch in self._lent)]
        self._gone.check(used for batch in lent for used, count in batch.items() for _ in range(count))

    @property
    def _counts(self) -> list[int]:
        """Of each class, lent or not."""
        return [there + gone for there, gone in zip(self._there.classes, self._gone.classes, strict=True)]

    def _sampled(self, blocks: Iterable[int]) -> list[int]:
        every, end = self.sample_every, self._num_blocks
        return [block // every for block in blocks if block % every == 0 and block < end]

    def _note(self, place: int, prompt: int) -> None:
        used = self._used[place]
        if used == prompt:
            return
        if used != _NEVER:
            self._there.add(used, -1)
        self._used[place] = prompt
        if prompt != _NEVER:
            self._there.add(prompt, 1)

    def _next_prompt(self) -> None:
        self._prompt += 1
        self._there.next_prompt()
        self._gone.next_prompt()
        self._until_half -= 1
        if not self._until_half:
            self._until_half = HALF_LIFE
            for number, (before, watched) in enumerate(zip(self._was_watched, self._watched, strict=True)):
                if watched >= 1.5 * before:  # nothing is forgotten of what nothing new was seen
                    self._found[number] /= 2
                    self._watched[number] = self._was_watched[number] = watched / 2
            self._num_prompts /= 2
            self._asked_tokens /= 2
            self._lost_tokens /= 2
