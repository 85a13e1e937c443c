"""How much of a prompt a prefix cache of several KV groups holds, as vLLM's coordinator finds it.

A group of full attention needs every block of the prefix; a group with a sliding window needs the last few only, or all there are if
the prefix is shorter.  The hit is the longest prefix with which every group is content.

Pure.  Formula: vLLM 0.32's ``HybridKVCacheCoordinator.find_longest_cache_hit`` for groups of equal block size, without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def window_blocks(window_tokens: int, block_tokens: int) -> int:
    """Blocks behind one another that a group with such a window has to find."""
    return max(1, -(-(window_tokens - 1) // block_tokens))


def longest_hit(most: int, windows: Sequence[int | None], has: Callable[[int, int], bool]) -> int:
    """Blocks of the longest prefix that every group has, at most ``most``.

    Args:
        most: Blocks of the prompt that may be found.
        windows: Of each group the blocks that it needs at the end of the prefix; None: all of them.
        has: Whether a group has the block at an index.
    """
    length = most
    for group, window in enumerate(windows):
        if window is None:
            length = next((index for index in range(length) if not has(group, index)), length)
    sliding = [(group, window) for group, window in enumerate(windows) if window is not None]
    before = -1
    while length and before != length:
        before = length
        for group, window in sliding:
            length = _window_hit(length, window, group, has)
    return length


def _window_hit(length: int, window: int, group: int, has: Callable[[int, int], bool]) -> int:
    run = 0
    for index in range(length - 1, -1, -1):
        run = run + 1 if has(group, index) else 0
        if run >= window:
            return index + run
    return run
