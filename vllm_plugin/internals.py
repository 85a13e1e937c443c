"""vLLM's block pool, scheduler, engine, workers and API server as the rest of the plugin uses them: version-free helpers over private names.

Like :mod:`vllm_plugin.compat`, it is read by :mod:`vllm_plugin.selfcheck` before anything is touched; ``import vllm`` happens inside functions.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rose.policy.coserving.hits import window_blocks
from vllm_plugin import lines
from vllm_plugin.selfcheck import GROUP_BYTES

logger = logging.getLogger("vllm.rose")


@contextlib.contextmanager
def kv_allocation(size_bytes: int, make: Callable[[int], Any]) -> Iterator[list[int]]:
    """While it is active, the first int8 ``torch.zeros`` of exactly ``size_bytes`` is ``make(size)``.

    vLLM allocates the whole KV cache with one such call inside ``initialize_from_config``; zeroing it there
    would touch every page.  Yields the sizes that were asked for: anything but one entry afterwards means that the
    memory behind the cache is not, or not only, what ``make`` gave.
    """
    import torch

    real = torch.zeros
    seen: list[int] = []

    def zeros(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] == size_bytes and kwargs.get("dtype") is torch.int8:
            seen.append(size_bytes)
            if len(seen) == 1:
                return make(size_bytes)
        return real(*args, **kwargs)

    torch.zeros = zeros  # type: ignore[assignment]
    try:
        yield seen
    finally:
        torch.zeros = real  # type: ignore[assignment]


def stamp(scheduler_output: Any, step: int, may_stop: bool = False) -> None:
    """Number a step, and say whether it may stop between two layers; both travel with it to every worker."""
    scheduler_output.rose_step = step
    if may_stop:
        scheduler_output.rose_may_stop = True


def stamp_of(scheduler_output: Any) -> int:
    """Its number; 0 for a step that nobody numbered."""
    return getattr(scheduler_output, "rose_step", 0)


def may_stop(scheduler_output: Any) -> bool:
    """May the step stop between two layers?"""
    return getattr(scheduler_output, "rose_may_stop", False)


def kv_layers(kv_cache_config: Any) -> list[str]:
    """Names of the attention layers that have keys and values, as the model's modules are named."""
    return [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]


def runs_python_between_layers(config: Any) -> bool:
    """Eager, and all layers in each worker."""
    return config.model_config.enforce_eager and config.parallel_config.pipeline_parallel_size == 1


def drafts_with_keys(config: Any) -> bool:
    """Does each step end with a drafter that has layers, and keys and values, of its own?"""
    return config.num_lookahead_tokens > 0


def compute_stream() -> int:
    """CUDA: the stream that the calling thread launches steps on, as the driver knows it.

    torch's word, and not vLLM's ``current_stream``: that one makes a new stream current where none was set yet.
    """
    import torch

    return torch.cuda.current_stream().cuda_stream


# --------------------------------------------------------------------------- scheduler and engine


def block_pool(scheduler: Any) -> Any:
    return scheduler.kv_cache_manager.block_pool


def take_block(pool: Any, block_id: int) -> bool:
    """Remove a free block from the pool (drop its prefix first); False when it is in use."""
    block = pool.blocks[block_id]
    if block.ref_cnt != 0 or block.is_null:
        return False
    pool.free_block_queue.remove(block)
    block.ref_cnt = 1
    return True


def drop_prefixes(pool: Any, block_ids: Iterable[int]) -> None:
    # The last first, as vLLM itself evicts: what is left of a prefix is then its head, which can still be found.
    for block_id in sorted(block_ids, reverse=True):
        pool.evict_blocks({block_id})


def watch_evictions(pool: Any, told: Callable[[bytes], None]) -> Callable[[], None]:
    """Tell the key of every block that ``pool`` drops from its prefix cache and has nowhere else; the answer ends it.

    ``told`` must not raise: it runs inside vLLM's allocation.
    """
    original = pool._maybe_evict_cached_block

    def evict(block: Any) -> Any:
        key = block.block_hash
        evicted = original(block)
        if key is not None and pool.cached_block_hash_to_block.get_one_block(key) is None:
            told(key)
        return evicted

    def unwatch() -> None:
        if vars(pool).get("_maybe_evict_cached_block") is evict:
            del pool._maybe_evict_cached_block

    pool._maybe_evict_cached_block = evict
    return unwatch


def key_suffix(group: int) -> bytes:
    """What follows a block's hash in a key of the prefix cache: the number of its KV group."""
    return group.to_bytes(GROUP_BYTES, "big")


def is_cached(pool: Any, key: bytes) -> bool:
    """Does the prefix cache hold this block of this KV group?"""
    return pool.cached_block_hash_to_block.get_one_block(key) is not None


def group_windows(scheduler: Any) -> list[int | None]:
    """Of each KV group the blocks that it needs of a prefix (:mod:`rose.policy.coserving.hits`)."""
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    windows = [(getattr(spec, "sliding_window", None), spec) for spec in specs]
    # Full attention may be told of a window, too, and keeps all blocks nevertheless.
    return [
        window_blocks(tokens, spec.block_size)
        if tokens and type(spec).__name__ == "SlidingWindowSpec"
        else None
        for tokens, spec in windows
    ]


def num_cached(pool: Any) -> int:
    """Different blocks in the prefix cache."""
    return len(pool.cached_block_hash_to_block)


def looks_for_prefix(pool: Any, request: Any) -> bool:
    """Will vLLM look for a cached prefix of this request?"""
    return pool.enable_caching and not request.skip_reading_prefix_cache


def started(scheduler_output: Any) -> list[str]:
    """Who starts with this step; among them may be some that have had tokens before."""
    return [new.req_id for new in scheduler_output.scheduled_new_reqs]


def new_prompts(scheduler_output: Any, block_tokens: int) -> Iterable[tuple[int, Sequence[int], int]]:
    """Of each request that starts with this step: tokens of its prompt, its blocks in all KV groups, and how many of these it found
    in the cache; they come first."""
    for new in scheduler_output.scheduled_new_reqs:
        num_tokens, num_found = len(new.prompt_token_ids or ()), new.num_computed_tokens // block_tokens
        if len(new.block_ids) == 1:
            yield num_tokens, new.block_ids[0], num_found
            continue
        # Behind a window there is the null block, which is nobody's.
        found = [block for blocks in new.block_ids for block in blocks[:num_found] if block]
        rest = [block for blocks in new.block_ids for block in blocks[num_found:] if block]
        yield num_tokens, found + rest, len(found)


def grown_by(scheduler_output: Any) -> Iterable[Sequence[int]]:
    """The blocks that this step adds to each running request: a sequence of block ids per request and KV group."""
    return itertools.chain.from_iterable(filter(None, scheduler_output.scheduled_cached_reqs.new_block_ids))


def next_to_go(pool: Any, limit: int) -> list[int]:
    """Ids of at most ``limit`` free blocks, those that vLLM would use or evict next first.  Engine thread."""
    queue = pool.free_block_queue
    block, ids = queue.fake_free_list_head.next_free_block, []
    while block is not queue.fake_free_list_tail and len(ids) < limit:
        ids.append(block.block_id)
        block = block.next_free_block
    return ids


def give_blocks(pool: Any, block_ids: Iterable[int]) -> None:
    """Put blocks taken with :func:`take_block` back."""
    pool.free_blocks([pool.blocks[i] for i in block_ids])


def block_ids_of(scheduler: Any, request_id: str) -> Sequence[Sequence[int]]:
    """Block ids a request holds, per KV group; empty when it holds none."""
    try:
        return scheduler.kv_cache_manager.get_block_ids(request_id)
    except KeyError:
        return ()


def drafts_in(scheduler_output: Any) -> tuple[int, int]:
    """With speculative decoding: how many requests of this step have drafts that it verifies, beside a token of their own, and how
    many drafts."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    return len(drafts), sum(map(len, drafts.values()))


def encoder_tokens_in(scheduler_output: Any, scheduler: Any) -> int:
    """What the encoder of a multimodal model makes of this step's images and the like, in tokens."""
    encoded = scheduler_output.scheduled_encoder_inputs
    if not encoded:
        return 0
    requests = scheduler.requests
    return sum(requests[one].get_num_encoder_embeds(item) for one, items in encoded.items() for item in items)


def encoder_budget(scheduler: Any) -> int:
    """Encoder tokens of one step at most."""
    return scheduler.max_num_encoder_input_tokens


def encoder_left(scheduler: Any, request: Any) -> list[tuple[int, int]]:
    """Of a request's images and the like, in their order, those that are still to be encoded: where in the prompt each begins, and what is
    made of it, in tokens.  Any thread.
    """
    if not request.has_encoder_inputs:
        return []
    cached, done = scheduler.encoder_cache_manager.cached, request.num_computed_tokens
    left: dict[str, tuple[int, int]] = {}  # what comes twice is encoded once
    for number, item in enumerate(request.mm_features):
        begins = item.mm_position.offset
        if begins + item.mm_position.length > done and item.identifier not in cached:
            left.setdefault(item.identifier, (begins, request.get_num_encoder_embeds(number)))
    return list(left.values())


def looks_past_last_hit(scheduler: Any) -> bool:
    """Does vLLM compute the last block of a cached prefix again, because its drafter starts from that block's hidden states?"""
    return scheduler.use_eagle_block_drop


def waiting_requests(scheduler: Any, limit: int) -> list[Any]:
    """At most ``limit`` requests that wait for memory or a slot, oldest first.  Any thread."""
    # A queue of vLLM's has an iterator in Python, between which and its first request the engine thread may come in, and a queue that
    # changed meanwhile raises.  So a deque is gone over by its own, made and used in one go inside the interpreter.
    both = (scheduler.kv_holding_waiting, scheduler.waiting)
    if all(isinstance(queue, collections.deque) for queue in both):
        return list(
            itertools.islice(itertools.chain.from_iterable(map(collections.deque.__iter__, both)), limit)
        )
    return list(itertools.islice(itertools.chain(*both), limit))  # by priority: vLLM goes over a copy


LOOKED_PAST = 1024
"""Waiting requests that one look goes over, 0.1 us each."""


def is_blocked(scheduler: Any, request: Any) -> bool:
    """It waits for a grammar, for keys and values from elsewhere, or for its client: no step can help it.  Any thread."""
    return scheduler._is_blocked_waiting_status(request.status)


def wait_for_blocks(scheduler: Any, limit: int) -> list[Any]:
    """The first ``limit`` waiting requests that need nothing but blocks to start.

    Each has a free slot in the batch, and none of them waits for a grammar, a transfer of keys and values, its client, or an adapter's
    slot.  vLLM skips requests that do and puts them back in front of the queue; they are skipped here too.  A request that waits for the
    encoder ends vLLM's search, and this one.  Engine thread, between two steps.
    """
    # Sessions that wait for their client hold a seat, too.
    taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
    seats = scheduler.max_num_active_reqs - taken
    if seats <= 0:
        return []
    blocked = scheduler._is_blocked_waiting_status
    looked_at = itertools.islice(lines.queues_that_start(scheduler), LOOKED_PAST)
    ready = (request for request in looked_at if not blocked(request.status))
    ready = _with_encoder_room(scheduler, _with_adapter_slots(scheduler, ready))
    return list(itertools.islice(ready, min(limit, seats)))


def _with_adapter_slots(scheduler: Any, requests: Iterable[Any]) -> Iterable[Any]:
    """Those of ``requests``, in their order, whose adapter is in a slot already or gets one that is free."""
    config = scheduler.lora_config
    if config is None:
        return requests
    held = {_adapter_of(request) for request in scheduler.running} - {0}

    def has_slot(request: Any) -> bool:
        adapter = _adapter_of(request)
        if adapter and adapter not in held:
            if len(held) >= config.max_loras:
                return False
            held.add(adapter)
        return True

    return filter(has_slot, requests)


def _with_encoder_room(scheduler: Any, requests: Iterable[Any]) -> Iterable[Any]:
    """Those of ``requests`` before the first that begins with an image for which the encoder's step or its cache has no room."""
    budget = scheduler.max_num_encoder_input_tokens
    if not budget:  # no encoder
        return requests
    left = [budget, scheduler.encoder_cache_manager.num_freeable_slots]
    for request in scheduler.running:
        _take_encoder(left, encoder_left(scheduler, request))

    def has_room(request: Any) -> bool:
        items = encoder_left(scheduler, request)
        if items and items[0][0] <= request.num_computed_tokens and items[0][1] > min(left):
            return False
        _take_encoder(left, items)
        return True

    return itertools.takewhile(has_room, requests)


def _take_encoder(left: list[int], items: Iterable[tuple[int, int]]) -> None:
    """Encode ``items`` in their order, as far as the step and the cache have room."""
    for _, tokens in itertools.takewhile(lambda item: item[1] <= min(left), items):
        left[:] = [one - tokens for one in left]


def _adapter_of(request: Any) -> int:
    """0: none."""
    return request.lora_request.lora_int_id if request.lora_request is not None else 0


def blocks_missing(scheduler: Any, request: Any) -> int:
    """Blocks of all KV groups that a waiting request lacks, found prefixes not counted: what vLLM itself will ask its pool for."""
    return scheduler._request_remaining_blocks(request)


def let_past(scheduler: Any, fits: Callable[[Any], bool], limit: int) -> None:
    """First come first served, but for those at the head of the queue that do not fit: the first ``limit`` that do go before them.

    vLLM stops at the first request that it has no blocks for, whoever waits behind it.  Engine thread, between two steps.
    """
    waiting = scheduler.waiting
    if not isinstance(waiting, collections.deque):  # by priority: the order is the operator's
        return
    blocked = list(itertools.takewhile(lambda request: not fits(request), itertools.islice(waiting, limit)))
    if blocked and len(blocked) < len(waiting):
        for _ in blocked:
            waiting.popleft()
        passing = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
        waiting.extendleft(
            reversed([*filter(fits, passing), *blocked, *itertools.filterfalse(fits, passing)])
        )


def has_stages(scheduler: Any) -> bool:
    """Are its workers a pipeline, with a step in each?"""
    return scheduler.use_pp


def state_stride(scheduler: Any) -> int:
    """Hybrid models with a prefix cache: tokens between places where a prompt's step ends, so that its state can be cached; else 0."""
    return scheduler.cache_config.block_size if scheduler.need_mamba_block_aligned_split else 0


def set_cache_salt(request: Any, salt: str) -> None:
    """Key the prefixes of a request that has computed nothing; its block hashes are made anew."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()


def num_waiting(scheduler: Any) -> int:
    return len(scheduler.waiting) + len(scheduler.kv_holding_waiting)


def is_paused(scheduler: Any) -> bool:
    """vLLM's own pause is in force (weight commit, an operator)."""
    from vllm.v1.core.sched.interface import PauseState

    return scheduler.pause_state != PauseState.UNPAUSED


def wake(engine: Any) -> None:
    """Make a blocked engine loop look again.  Any thread."""
    from vllm.v1.engine import EngineCoreRequestType

    engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def call_when_idle(engine: Any, callback: Callable[[], None]) -> None:
    """Run ``callback`` on the engine thread while the engine has nothing to step.  Any thread."""
    engine._idle_state_callbacks.append(lambda _engine: callback())
    wake(engine)


def engine_is_stopping(engine: Any) -> bool:
    return not engine.is_running()


def finish_with_partial_output(scheduler: Any, engine: Any, request_ids: Iterable[str], reason: str) -> int:
    """End requests now, their tokens so far delivered; returns how many.  Engine thread only.

    The client sees HTTP 200, ``finish_reason "abort"`` and ``stop_reason`` = ``reason``.  An error status would
    lose the tokens.
    """
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.request import RequestStatus

    by_client: dict[int, list[Any]] = {}
    for request in scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED):
        by_client.setdefault(request.client_index, []).append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ABORT,
                stop_reason=reason,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
        )
    for client, outputs in by_client.items():
        engine.output_queue.put_nowait(
            (
                client,
                EngineCoreOutputs(outputs=outputs, finished_requests={o.request_id for o in outputs}),
            )
        )
    return sum(len(outputs) for outputs in by_client.values())


def warm_up_if_wanted(worker: Any) -> None:
    """What vLLM's own measure of memory does on the side on a CPU, for a worker that measures nothing."""
    if worker._should_warm_up_model():
        worker.model_runner.warming_up_model()


def has_open_weight_session(worker: Any) -> bool:
    """Whether vLLM has an update of the weights open on this worker."""
    return bool(getattr(worker, "_weight_update_active", False))


def counts_reasoning(chat: Any) -> bool:
    """Whether the answers of vLLM's chat route say how many tokens are reasoning: where a reasoning parser is configured."""
    return bool(getattr(chat, "_include_reasoning_tokens_details", False))


def render_threads(derenderer: Any) -> Any:
    """The threads on which vLLM renders and parses."""
    return derenderer.renderer._executor


def chat_template_kwargs(derenderer: Any, request: Any) -> dict[str, Any]:
    """What a parser of this request is to know of its template."""
    return derenderer._resolve_chat_template_kwargs(request)


def named_logprobs(given: Any, tokenizer: Any, context: list[int], text_offset: int | None) -> Any:
    """Log-probs of the generate route with text in place of ids, in the chat shape, or from ``text_offset`` in that of completions."""
    from vllm.renderers import online_derenderer as d

    named = d._resolve_logprobs(given, tokenizer, initial_context_token_ids=context)
    if text_offset is None:
        return named
    return d._convert_chat_logprobs_to_completion_logprobs(named, initial_text_offset=text_offset)


def say_servers(engine_args: Any, count: int) -> None:
    """As ``vllm serve`` does before it starts ``count`` API servers."""
    engine_args._api_process_count = count
    engine_args._api_process_rank = -1
