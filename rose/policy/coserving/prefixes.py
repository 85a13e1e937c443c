"""What production's cached prefixes may be lent for: the price of each chunk, from what content of its age has given lately.

A page that no request holds is seldom empty: it keeps prefixes, and lending it costs the prompts that would have found them.  What
they would have found cannot be known, but it can be bounded by what content *of the same age* gave: the book notes when each block
was last used, at which age blocks are found again, and how long blocks of each age lay there without.  Age is counted in
prompts: while nobody asks nothing grows old, for nobody can have asked in vain.

The *rate* of an age is ``(tokens found + one prompt) / (tokens that lay there x tokens asked for)``.  The prompt that was not seen
is Laplace's: where next to nothing has been watched, everything has to be expected.  What is lent is missed at any age that it would have
reached, so content has the highest rate of its own age and all older ones that content gets here: an engine that has just started knows
none of them, and lends nothing of its cache.  So a loan grows into the cache as evidence does: in steps, the cheapest chunks first, each of
which leaves room in the bound.

A chunk's *price*, the part of all asked tokens that is expected to be missed without it, is the sum over its blocks.  The prices of what has been
lent lately, or what prompts have really missed where that is more, and the prices of what is offered are together at most the bound.

What this rests on: traffic that finds old content as often as it did in the last thousands of prompts.  Where that changes, what is
really missed is counted (``vllm_plugin/ghost.py``) and taken back for (:mod:`rose.policy.cold_cache`).

Cost: a few additions per prompt and one per block that it uses, of which every ``sample_every``-th is looked at.  Nothing is called on the step path.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

AGES = (16, 64, 256, 1024)
"""Where one class of ages ends and the next begins, in prompts."""
HALF_LIFE = 2048
"""After so many prompts what was counted counts half."""
_SAMPLED_BLOCKS = 4096
_SAMPLED_PER_CHUNK = 4
_NEVER = 0


class PrefixBook:
    """See the module.

    Args:
        num_chunks: Of production's KV memory.
        chunk_blocks: Blocks of each; block ``b`` lies in chunk ``b // chunk_blocks``.
        block_tokens: Of one block.
        cached: Blocks that hold prefixes already; they count as used now.
        lost_tokens: What prompts had missed before.
    """

    def __init__(
        self,
        num_chunks: int,
        chunk_blocks: int,
        block_tokens: int,
        *,
        cached: Iterable[int] = (),
        lost_tokens: int = 0,
    ) -> None:
        self._chunk_blocks = chunk_blocks
        self._num_blocks = num_chunks * chunk_blocks
        most = max(1, chunk_blocks // _SAMPLED_PER_CHUNK)
        self.sample_every = max(1, min(most, self._num_blocks // _SAMPLED_BLOCKS))
        self._sample_tokens = self.sample_every * block_tokens
        """What one block that is looked at stands for."""
        self._prompt = 1
        self._used = [_NEVER] * -(-self._num_blocks // self.sample_every)
        """By which prompt each was used last."""
        self._by_prompt: dict[int, int] = {}
        """How many were used last by each of the prompts that are not in the oldest class yet."""
        classes = len(AGES) + 1
        self._there = [0] * classes
        self._found = [0.0] * classes
        self._watched = [0.0] * classes
        """Blocks there, times tokens asked for."""
        self._num_prompts = 0.0
        self._asked_tokens = 0.0
        self._lost_tokens = 0.0
        self._lost_total = lost_tokens
        self._spent = 0.0
        self._until_half = HALF_LIFE
        self._offered: dict[int, float] = {}
        self.use(cached)

    @property
    def missed(self) -> float:
        """The part of all asked tokens that loans have cost lately, or will have by what was paid for them."""
        return max(self._lost_tokens / max(1.0, self._asked_tokens), self._spent)

    def ask(self, num_tokens: int, blocks: Sequence[int], num_found: int) -> None:
        """A prompt of ``num_tokens`` has got ``blocks``, of which it found the first ``num_found`` in the cache."""
        self._next_prompt()
        self._num_prompts += 1
        self._asked_tokens += num_tokens
        for number, there in enumerate(self._there):
            self._watched[number] += there * num_tokens
        for place in self._sampled(blocks[:num_found]):
            used = self._used[place]
            if used != _NEVER:
                self._found[self._class_of(used)] += 1
        self.use(blocks)

    def use(self, blocks: Iterable[int]) -> None:
        """A request holds ``blocks``: nobody else has used them later."""
        for place in self._sampled(blocks):
            self._note(place, self._prompt)
            if self._offered:
                self._offered.pop(place * self.sample_every // self._chunk_blocks, None)

    def lost(self, total_tokens: int) -> None:
        """What prompts have missed for the loans' sake so far, a running total."""
        self._lost_tokens += max(0, total_tokens - self._lost_total)
        self._lost_total = total_tokens

    @property
    def offered(self) -> tuple[int, ...]:
        """Of the last offer what nobody has used and nobody has taken since."""
        return tuple(self._offered)

    def offer(self, max_loss: float, most: int) -> tuple[int, ...]:
        """At most ``most`` chunks that hold prefixes and may be lent, the cheapest first.

        Args:
            max_loss: The part of all asked tokens that loans may cost.
        """
        room = max_loss - self.missed
        self._offered = {}
        if room <= 0 or not self._num_prompts:
            return ()
        rates = self._rates()
        prices: dict[int, float] = {}
        for place, used in enumerate(self._used):
            if used != _NEVER:
                chunk = place * self.sample_every // self._chunk_blocks
                prices[chunk] = prices.get(chunk, 0.0) + rates[self._class_of(used)]
        prices.pop(0, None)  # vLLM's null block is never lent
        for chunk in sorted(prices, key=lambda chunk: (prices[chunk], -chunk)):
            room -= prices[chunk]
            if room < 0 or len(self._offered) == most:
                break
            self._offered[chunk] = prices[chunk]
        return self.offered

    def _rates(self) -> list[float]:
        """For content of each class: the part of all asked tokens that one block looked at is expected to give, at its age or at any that it
        has yet to reach."""
        prompt_tokens = self._asked_tokens / self._num_prompts
        rates = [0.0] * len(self._there)
        for number, (found, watched) in enumerate(zip(self._found, self._watched, strict=True)):
            if number and self._prompt > AGES[number - 1] and not any(self._there[number:]):
                break  # nothing gets so old here
            known = found * self._sample_tokens + prompt_tokens
            rates[number] = known / watched if watched else math.inf
        for number in reversed(range(len(rates) - 1)):
            rates[number] = max(rates[number], rates[number + 1])
        return rates

    def gone(self, chunk: int) -> None:
        """A chunk has left the block pool, and what it held with it."""
        self._spent += self._offered.pop(chunk, 0.0)
        for block in range(chunk * self._chunk_blocks, (chunk + 1) * self._chunk_blocks):
            if block % self.sample_every == 0:
                self._note(block // self.sample_every, _NEVER)

    def check(self) -> None:
        """Assert what always holds; for tests."""
        there = [0] * len(self._there)
        by_prompt: dict[int, int] = {}
        for used in self._used:
            if used != _NEVER:
                number = self._class_of(used)
                there[number] += 1
                if number < len(AGES):
                    by_prompt[used] = by_prompt.get(used, 0) + 1
        assert there == self._there
        assert by_prompt == {used: count for used, count in self._by_prompt.items() if count}

    def _sampled(self, blocks: Iterable[int]) -> list[int]:
        every, end = self.sample_every, self._num_blocks
        return [block // every for block in blocks if block % every == 0 and block < end]

    def _class_of(self, used: int) -> int:
        return bisect_right(AGES, self._prompt - used)

    def _note(self, place: int, prompt: int) -> None:
        used = self._used[place]
        if used == prompt:
            return
        if used != _NEVER:
            number = self._class_of(used)
            self._there[number] -= 1
            if number < len(AGES):
                self._by_prompt[used] -= 1
        self._used[place] = prompt
        if prompt != _NEVER:
            self._there[0] += 1
            self._by_prompt[prompt] = self._by_prompt.get(prompt, 0) + 1

    def _next_prompt(self) -> None:
        self._prompt += 1
        for number, age in enumerate(AGES):
            older = self._by_prompt.get(self._prompt - age, 0)
            self._there[number] -= older
            self._there[number + 1] += older
        self._by_prompt.pop(self._prompt - AGES[-1], None)
        self._until_half -= 1
        if not self._until_half:
            self._until_half = HALF_LIFE
            self._found = [one / 2 for one in self._found]
            self._watched = [one / 2 for one in self._watched]
            self._num_prompts /= 2
            self._asked_tokens /= 2
            self._lost_tokens /= 2
            self._spent /= 2
