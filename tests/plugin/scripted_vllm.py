"""vLLM's scheduler, block pool and engine core as far as both sides of the plugin look at them, without vLLM: 512 blocks in 16 chunks of one page."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace

from vllm_plugin import internals

TOTAL_PAGES = 16
BLOCKS = 512
LAYER_PAGE = 32 << 10
"""Of a block in one of two layers: 32 blocks are a chunk of one page."""


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt, self.is_null, self.block_hash = block_id, 0, False, None


class Pool:
    """vLLM's block pool as the balloon knows it, without a prefix cache."""

    enable_caching = False

    def __init__(self) -> None:
        self.num_gpu_blocks = BLOCKS
        self.blocks = [Block(number) for number in range(BLOCKS)]
        self._free = dict.fromkeys(range(1, BLOCKS))
        self.blocks[0].is_null = True
        tail = SimpleNamespace()
        self.cached_block_hash_to_block: dict[bytes, Block] = {}
        self.free_block_queue = SimpleNamespace(
            remove=lambda block: self._free.pop(block.block_id),
            fake_free_list_head=SimpleNamespace(next_free_block=tail),
            fake_free_list_tail=tail,
        )

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        return

    def _maybe_evict_cached_block(self, block: Block) -> bool:
        return False

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._free[block.block_id] = None

    def take_all(self) -> list[Block]:
        taken = [self.blocks[number] for number in self._free]
        self._free.clear()
        for block in taken:
            block.ref_cnt = 1
        return taken


class Scheduler(SimpleNamespace):
    """vLLM's, as far as both sides look at it."""

    def __init__(self) -> None:
        spec = SimpleNamespace(sliding_window=None, block_size=128, page_size_bytes=LAYER_PAGE)
        layers = ["layer.0", "layer.1"]
        group = SimpleNamespace(layer_names=layers, kv_cache_spec=spec)
        self.pool = Pool()
        tensor = SimpleNamespace(
            size=2 * BLOCKS * LAYER_PAGE,
            layers=layers,
            layer_stride=BLOCKS * LAYER_PAGE,
            block_stride=LAYER_PAGE,
            offset=0,
        )
        super().__init__(
            kv_cache_manager=SimpleNamespace(block_pool=self.pool),
            kv_cache_config=SimpleNamespace(
                num_blocks=BLOCKS, kv_cache_groups=[group], kv_cache_tensors=[tensor]
            ),
            cache_config=SimpleNamespace(block_size=128),
            block_size=128,
            use_eagle_block_drop=False,
            use_pp=False,
            need_mamba_block_aligned_split=False,
            max_num_scheduled_tokens=1024,
            max_num_encoder_input_tokens=0,
            running=[],
            waiting=deque(),
            kv_holding_waiting=[],
            requests={},
        )


class Core(SimpleNamespace):
    """vLLM's engine core: a queue, and what it runs when idle."""

    def __init__(self) -> None:
        super().__init__(input_queue=queue.Queue(), _idle_state_callbacks=[], is_running=lambda: True)

    def run_callbacks(self, wait_s: float | None) -> None:
        try:
            self.input_queue.get(timeout=wait_s)
        except queue.Empty:
            pass
        while self._idle_state_callbacks:
            self._idle_state_callbacks.pop(0)(self)


def without_vllm() -> None:
    """The two calls of ours that need vLLM itself."""
    internals.wake = lambda engine: engine.input_queue.put_nowait(None)
    internals.finish_with_partial_output = lambda *_: 0
