"""What production's prefix cache would still hold had nothing been lent, and the hits that it lost because it does not.

A loan makes the cache smaller in two ways: the chunks that are taken had prefixes in them, and with fewer blocks vLLM evicts
sooner.  Both go through one method of the block pool, which is wrapped on that pool while anything is lent or remembered.  What is
evicted goes into the *ghost*: keys without contents, the oldest falling out as soon as ghost and cache together would fill more
blocks than the device has.  vLLM evicts the least recently used first, so that is what a cache of the whole device would hold:
exactly, while only vLLM evicts; nearly, where chunks are taken out of turn (on random conversations 0.79 to 1.0 of what vLLM's own
counters of two engines differ by).

A prompt *loses* what it would have found in cache and ghost together (:func:`~rose.policy.coserving.hits.longest_hit`) and does not
find in the cache.  Each lost block counts once: the prompt computes it, and then it is in the cache again.

Invariant, asserted by :meth:`check`: cache and ghost together are at most the device's blocks.

Engine thread only (others read the counters).  No wait and no system call; a look at a prompt costs one set operation in C, and
a microsecond more for each block where it does lose something.  Nothing raises into vLLM: an error goes to ``fail``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from rose.policy.coserving.hits import longest_hit
from vllm_plugin import internals

LOOKED_AT = 4096
"""Blocks of one prompt."""
_NEXT_TO_NOTHING = 64
"""One part in so many of the device's blocks: it is never all cached, so a few keys would stay in the ghost for good."""
_MOST_FORGOTTEN = 64
"""Keys that fall out in one call: what vLLM inserted since the last one may be many."""


class GhostCache:
    """The ghost of one engine's prefix cache.

    Args:
        pool: vLLM's ``BlockPool``.
        block_tokens: Of one block.
        fail: Told of an error, once; then nothing is counted any more.
        windows: Of each KV group the blocks that it needs of a prefix, None: all.
        drops_last: vLLM computes the last block of a prefix that it finds anew (for its drafter).

    Attributes:
        queried_tokens: Of all prompts that looked for a prefix, as vLLM counts them.
        lost_tokens: Of these, how many the cache would have had.
        num_forgotten: Keys that were here, so far: asked for again, or gone from that cache as well.
    """

    def __init__(
        self,
        pool: Any,
        block_tokens: int,
        fail: Callable[[BaseException], None],
        windows: Sequence[int | None] = (None,),
        *,
        drops_last: bool = False,
    ) -> None:
        self._pool, self._block_tokens, self._fail = pool, block_tokens, fail
        self._windows, self._drops_last = tuple(windows), drops_last
        self._suffixes = [internals.key_suffix(group) for group in range(len(self._windows))]
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        """Of one group the hashes of blocks, which a request has at hand; of several the keys."""
        self._unwatch: Callable[[], None] | None = None
        self.queried_tokens = 0
        self.lost_tokens = 0
        self.num_forgotten = 0

    def __len__(self) -> int:
        """Blocks that the cache would fill besides those it fills now."""
        return len(self._keys)

    @property
    def watching(self) -> bool:
        """Is the pool's method wrapped?"""
        return self._unwatch is not None

    def watch(self) -> None:
        """Something is about to be lent."""
        if self._unwatch is None:
            self._unwatch = internals.watch_evictions(self._pool, self._evicted)

    def rest(self) -> None:
        """Nothing is lent: stop watching when next to nothing is remembered any more."""
        if self._unwatch is not None and len(self._keys) <= self._pool.num_gpu_blocks // _NEXT_TO_NOTHING:
            self.stop()
            self.clear()

    def stop(self) -> None:
        """The pool's method is vLLM's own again.  Any thread."""
        unwatch, self._unwatch = self._unwatch, None
        if unwatch is not None:
            unwatch()

    def clear(self) -> None:
        """The whole cache was reset: it would hold nothing either."""
        self.num_forgotten += len(self._keys)
        self._keys.clear()

    def on_prompt(self, request: Any) -> None:
        """A request has arrived, and nothing of it is scheduled."""
        if not internals.looks_for_prefix(self._pool, request):
            return
        num_tokens = request.num_tokens
        self.queried_tokens += num_tokens
        keys = self._keys
        if not keys:
            return
        hashes = request.block_hashes
        # The last token is always computed, so that there is something to sample from.
        most = min(LOOKED_AT, (num_tokens - 1) // self._block_tokens)
        if len(hashes) > most:
            hashes = hashes[:most]
        if len(self._windows) == 1 and keys.keys().isdisjoint(hashes):
            return
        self._forget()
        self.lost_tokens += self._lost_of(hashes) * self._block_tokens

    def _lost_of(self, hashes: Sequence[bytes]) -> int:
        """Blocks of this prefix that the cache would have had; they are forgotten here."""
        keys, pool, suffixes, windows = self._keys, self._pool, self._suffixes, self._windows
        alone = len(windows) == 1

        def cached(group: int, index: int) -> bool:
            return internals.is_cached(pool, hashes[index] + suffixes[group])

        def would_be(group: int, index: int) -> bool:
            return (hashes[index] if alone else hashes[index] + suffixes[group]) in keys or cached(
                group, index
            )

        whole = longest_hit(len(hashes), windows, would_be)
        found = longest_hit(whole, windows, cached)
        lost = whole - found
        if lost and not found and self._drops_last:
            lost -= 1  # of nothing that was found there is no last block
        before = len(keys)
        for hashed in hashes[:whole]:
            for suffix in suffixes:
                keys.pop(hashed if alone else hashed + suffix, None)
        self.num_forgotten += before - len(keys)
        return lost

    def check(self) -> None:
        """Assert the invariant; for tests."""
        self._forget(len(self._keys))
        assert len(self._keys) + internals.num_cached(self._pool) <= self._pool.num_gpu_blocks

    def _evicted(self, key: bytes) -> None:
        """vLLM has dropped ``key``, for its own sake or for ours."""
        try:
            keys = self._keys
            if len(self._windows) == 1:
                key = key[: -len(self._suffixes[0])]
            keys[key] = None
            keys.move_to_end(key)
            self._forget()
        except Exception as error:  # noqa: BLE001  # fail-open: this runs in the middle of an allocation
            self.stop()
            self._fail(error)

    def _forget(self, most: int = _MOST_FORGOTTEN) -> None:
        keys = self._keys
        over = len(keys) + internals.num_cached(self._pool) - self._pool.num_gpu_blocks
        for _ in range(min(over, len(keys), most)):
            keys.popitem(last=False)
            self.num_forgotten += 1
