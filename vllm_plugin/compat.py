"""The only file that knows vLLM's private names.  Written for vLLM 0.32.

What it gives the rest of the plugin: patches that can be listed, checked and taken back
(:func:`switch_on`, :func:`applied`), and version-free helpers on vLLM's objects.

Rules:
- :mod:`vllm_plugin.selfcheck` looks before anything is touched: version, every hook and every name that is used.
  With a problem, role ``serving`` stays stock vLLM and role ``rollout`` refuses to start.
- Patches are idempotent; each remembers what it replaced.
- ``import vllm`` happens inside functions: vLLM loads this module in every process it starts.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rose.coserve.ledger import RecordWriter
from rose.coserve.node_dir import NodeDir
from rose.coserve.record_layout import pack_found
from rose.coserve.records import Phase, ServingLease
from rose.errors import ConfigError, RoseError
from rose.policy.compat import UNLISTED, Row, Support, judge, row
from rose.units import PAGE_BYTES
from vllm_plugin.features import Device, Findings, findings, kv_findings
from vllm_plugin.kv_layout import CountedCache
from vllm_plugin.roles import ENV_ENGINE
from vllm_plugin.selfcheck import GROUP_BYTES, problems

logger = logging.getLogger("vllm.rose")

SCHEDULER_FACTORY = "vllm_plugin.scheduler.make_scheduler"
CPU_WORKER = "vllm_plugin.worker.RoseCPUWorker"
STOCK_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
GPU_WORKER = "vllm_plugin.gpu_worker.RoseGPUWorker"
STOCK_GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"
_WORKERS = {"cpu": (CPU_WORKER, STOCK_CPU_WORKER), "cuda": (GPU_WORKER, STOCK_GPU_WORKER)}
ENV_ALLOW_UNMEASURED = "ROSE_ALLOW_UNMEASURED"
"""``1``: also what the compatibility table calls written and not measured."""

RECLAIMED = "rose:kv_reclaimed"
"""``stop_reason`` of a request that lost its KV memory; its tokens so far are valid."""
TOO_LARGE = "rose:exceeds_budget"
"""``stop_reason`` of a request that the present KV budget can never hold."""

START_WAIT_S = 1.0
"""Longest wait of production's start for memory that the rollout engine still holds: it dies at its deadline anyway."""

OS_PAGE_BYTES = 4096

SPIN_SLEEP_S = 200e-6
"""vLLM's CPU workers spin on ``sched_yield`` for a second after each step.  On a shared core that starves an
idle-class neighbour although nothing is computed; this sleep brought such a worker from 93 % to 48 % of the core
with TTFT and inter-token latency unchanged within the noise.  Production sleeps only while such a neighbour may run
(:func:`let_spin`): on cores of its own a sleep makes each message later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One replaced attribute."""

    name: str
    owner: Any
    attribute: str
    original: Any
    replacement: Any


_applied: dict[str, Patch] = {}
_refused: str | None = None


def applied() -> dict[str, Patch]:
    """Patches of this process by name; empty when ROSE is off."""
    return dict(_applied)


def refused() -> str | None:
    """Why ROSE is not in force in this process although ``ROSE_ROLE`` is set; None when it is."""
    return _refused


def _patch(name: str, owner: Any, attribute: str, wrap: Callable[[Any], Any]) -> None:
    if name in _applied:
        return
    original = getattr(owner, attribute)
    replacement = wrap(original)
    setattr(owner, attribute, replacement)
    _applied[name] = Patch(
        name=name, owner=owner, attribute=attribute, original=original, replacement=replacement
    )


# --------------------------------------------------------------------------- how an engine stands


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What an engine can share, the row of the table that says so, and what of its configuration the row was found by."""

    support: Support
    row: Row
    found: str = ""

    def __str__(self) -> str:
        found = f" ({self.found})" if self.found else ""
        return f"{self.row.feature}{found}: {self.row.reason}"


def touched(config: Any, kv_cache_config: Any = None) -> Findings:
    """Rows that an engine touches by its ``VllmConfig``, and by its ``KVCacheConfig`` too where that is known already.

    Raises:
        Exception: Something of the configuration is not what it was: no engine that we know.
    """
    kind = device()
    worker, stock_worker = _WORKERS.get(kind, ("", ""))
    found = findings(config, device=kind, stock_worker=stock_worker, ours=(SCHEDULER_FACTORY, worker))
    return found if kv_cache_config is None else found | kv_findings(kv_cache_config, piece_bytes(config))


def standing_of(config: Any, role: str, kv_cache_config: Any = None) -> Standing:
    """How an engine stands.  Raises as :func:`touched`."""
    return standing_by(touched(config, kv_cache_config), role)


def standing_by(found: Findings, role: str) -> Standing:
    """How an engine stands that touches these rows."""
    allowed = os.environ.get(ENV_ALLOW_UNMEASURED) == "1"
    support, because = judge(role, found or ("decoder",), allow_unmeasured=allowed)
    if support is Support.ELASTIC and device() == "cuda":
        because = row("gpu")  # the row by which it takes part: nobody has measured it
    return Standing(support=support, row=because, found=found.get(because.name, ""))


def take_places(config: Any, standing: Standing) -> None:
    """Put our scheduler, and our worker where its memory is elastic, into the configuration of an engine that is not refused."""
    config.scheduler_config.scheduler_cls = SCHEDULER_FACTORY
    if standing.support is Support.ELASTIC:
        config.parallel_config.worker_cls = _WORKERS[device()][0]


def require_elastic(kv_cache_config: Any, piece_bytes: int) -> None:
    """In a worker: raise where the memory of such a cache must not be taken away.

    Raises:
        ConfigError: Of several groups, of another kind, or of a geometry that does not add up.
    """
    found = kv_findings(kv_cache_config, piece_bytes)
    support, because = judge("serving", found)
    if support is not Support.ELASTIC:
        raise ConfigError(str(Standing(support=support, row=because, found=found[because.name])))


def counted(kv_cache_config: Any) -> CountedCache:
    """What the books need to know of a KV cache whose memory stays where it is."""
    return CountedCache.of(kv_cache_config)


def device() -> Device:
    """vLLM's platform."""
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else "cuda" if current_platform.is_cuda() else "other"


def is_elastic(config: Any) -> bool:
    """Does this configuration, as :func:`switch_on` left it, have KV memory that can be given back?"""
    return config.parallel_config.worker_cls in (CPU_WORKER, GPU_WORKER)


def is_on_gpu(config: Any) -> bool:
    return config.parallel_config.worker_cls == GPU_WORKER


def piece_bytes(config: Any) -> int:
    """In which pieces the KV memory of such an engine comes and goes."""
    return PAGE_BYTES if is_on_gpu(config) else OS_PAGE_BYTES


# --------------------------------------------------------------------------- switching on


def switch_on(role: str) -> None:
    """Apply the patches of ``role`` in this process.

    Raises:
        ConfigError: Role ``rollout`` only: ``ROSE_DIR`` is missing, or this vLLM is not one we know.  Role
            ``serving`` never raises: production stays stock and one line says why.
    """
    global _refused
    from vllm_plugin.roles import ENV_DIR, ENV_ROLE, ROLES

    if role not in ROLES:  # a typo in production's environment must not stop production
        _give_up("serving", f"{ENV_ROLE}='{role}' is not a role; known: {', '.join(ROLES)}")
        return
    if not os.environ.get(ENV_DIR):
        _give_up(role, f"{ENV_DIR} is not set; it names the node directory")
        return
    if _applied or _refused:
        return
    found = problems()
    if found:
        _give_up(role, "; ".join(found), row("unknown_version"))
        return
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.executor.abstract import Executor

    _patch("executor", Executor, "__init__", lambda f: _wrap_executor(f, role))
    _patch("engine config", EngineArgs, "create_engine_config", lambda f: _wrap_config(f, role))
    _patch("busy loop", EngineCoreProc, "run_busy_loop", _wrap_busy_loop)
    EngineCore.rose_call = _rose_call  # type: ignore[attr-defined]  # an addition; nothing of vLLM's is replaced


_starting: RecordWriter[ServingLease] | None = None
"""Writer of ``serving.lease`` from before the device is touched until the scheduler takes it over."""


def _wrap_executor(original: Callable[..., Any], role: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        # The engine core is about to start its workers, and production's will size their memory by what is free.
        if vllm_config.scheduler_config.scheduler_cls == SCHEDULER_FACTORY:
            os.environ[ENV_ENGINE] = str(secrets.randbits(62) | 1)
            if role == "serving":
                _take_everything_back()
        return original(self, vllm_config, *args, **kwargs)

    return init


def _take_everything_back() -> None:
    """Say ``starting`` and wait, for a moment, until the rollout engine holds nothing.  Never raises."""
    global _starting
    try:
        node_dir = NodeDir(os.environ["ROSE_DIR"])
        if _starting is None:
            _starting = node_dir.serving_lease_writer()
        _starting.write(ServingLease(phase=Phase.STARTING, heartbeat_ns=time.monotonic_ns()))
        _starting.wake()
        peer, until_s = node_dir.rollout_lease(), time.monotonic() + START_WAIT_S
        while (left_s := until_s - time.monotonic()) > 0 and peer.alive():
            word, record = peer.word(), peer.read()
            if record is None or record.reserved_pages == 0:
                break
            peer.wait(word, left_s)
        peer.close()
    except Exception as error:  # noqa: BLE001  # fail-open: production starts whatever is the matter with our files
        logger.warning("ROSE: the rollout engine may not have given everything back: %r", error)


def starting_lease() -> RecordWriter[ServingLease] | None:
    """The writer that said ``starting``, once; the caller owns it from now on."""
    global _starting
    writer, _starting = _starting, None
    return writer


_refusal: Any = None
"""Writer of ``serving.lease`` while production runs without us: it is how ``rose node status`` knows why."""


def stay_stock(error: Exception | Standing) -> None:
    """Production's scheduler could not be made to share: say why in the lease.  Never raises."""
    if isinstance(error, Standing):
        _give_up("serving", str(error), error.row, error.found)
        return
    because = row("small_cache") if isinstance(error, ConfigError) else UNLISTED
    _give_up("serving", f"{type(error).__name__}: {error}", because)


def _give_up(role: str, reason: str, because: Row = UNLISTED, found: str | None = None) -> None:
    """``found``: what of the configuration the row was found by; None: the reason itself says all there is."""
    global _refused, _refusal
    _refused = reason
    if role == "rollout":
        raise ConfigError(reason, field="ROSE_ROLE=rollout")
    logger.error("ROSE is off, serving goes on as without it: %s", reason)
    if _refusal is None and os.environ.get("ROSE_DIR"):
        try:
            _refusal = starting_lease() or NodeDir(os.environ["ROSE_DIR"]).serving_lease_writer()
            _refusal.extra[:] = pack_found(reason if found is None else found)
            _refusal.write(
                ServingLease(phase=Phase.OFF, row=because.number, heartbeat_ns=time.monotonic_ns())
            )
        except (
            RoseError,
            OSError,
        ) as error:  # another process of this server was first, or there is no directory
            logger.debug("ROSE: the refusal is not in the node directory: %s", error)


def _wrap_config(original: Callable[..., Any], role: str) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        try:
            standing = standing_of(config, role)
        except Exception as error:  # noqa: BLE001  # an attribute that moved must not stop production
            _give_up(role, f"the configuration could not be read: {error!r}", row("unknown_version"))
            return config
        if standing.support is Support.REFUSED:
            _give_up(role, str(standing), standing.row, standing.found)
            return config
        take_places(config, standing)
        if standing.support is Support.ELASTIC:
            if standing.row.unmeasured is not None:
                logger.warning("ROSE shares what nobody has measured: %s", standing.row.feature)
        else:
            logger.warning("ROSE shares compute only: %s", standing)
        return config

    return create_engine_config


def _wrap_busy_loop(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run_busy_loop(self: Any) -> Any:
        attach = getattr(self.scheduler, "rose_attach", None)
        if attach is not None:
            patch_spin()  # this process waits for its workers' answers in the same way
            attach(self)
        return original(self)

    return run_busy_loop


def _rose_call(self: Any, name: str, argument: Any = None) -> Any:
    """Utility method of ``EngineCore``: one of a fixed table of calls, on the engine thread."""
    table = getattr(self.scheduler, "rose_calls", None)
    if table is None or name not in table:
        raise ValueError(f"unknown ROSE call {name!r}")
    return table[name](argument)


_spins = False


def let_spin(on: bool) -> None:
    """Of this process: wait as vLLM does (there is no neighbour on its core), or sleep.  Any thread."""
    global _spins
    if on == _spins:
        return
    _spins = on
    patch = _applied.get("spin")
    if patch is not None:
        # vLLM's own function and nothing around it: a frame more makes each turn of the spin longer.
        setattr(patch.owner, patch.attribute, patch.original if on else patch.replacement)


def patch_spin() -> None:
    """CPU only: make it possible to let the message queue sleep instead of spinning; see :data:`SPIN_SLEEP_S`.

    Never raises: it saves time, nothing hangs on it, and production calls it before it serves.
    """
    try:
        from vllm.distributed.device_communicators import shm_broadcast
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            _patch("spin", shm_broadcast, "sched_yield", _wrap_yield)
            # Production's queue is vLLM's until a rollout engine may run beside it.
            let_spin(os.environ.get("ROSE_ROLE") == "serving")
    except Exception as error:  # noqa: BLE001  # see above
        logger.warning("ROSE: vLLM's message queue spins on: %r", error)


def _wrap_yield(stock: Callable[[], None]) -> Callable[[], None]:
    del stock
    return _sleep


def _sleep() -> None:
    time.sleep(SPIN_SLEEP_S)


def stay_eager(config: Any) -> None:
    """Rollout role, ``--enforce-eager``: compile nothing later either.

    vLLM's sampler has functions under ``torch.compile`` that are compiled at their first use (log-probs among
    them), eager mode or not.  That is one step of several seconds, in which no memory can be given back: such
    engines were killed at the reclaim deadline.
    """
    from vllm.config import CompilationMode

    if config.compilation_config.mode == CompilationMode.NONE:
        import torch._dynamo

        torch._dynamo.config.disable = True


def patch_cpu_gemm() -> None:
    """CPU only, rollout role: keep linear weights in place instead of packing and freeing them.

    vLLM's CPU build repacks every linear layer and drops the original parameter; a weight update
    would then find nothing to write to.
    """
    import torch.nn.functional as F
    import vllm.model_executor.layers.utils as layer_utils

    def keep_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    _patch("cpu gemm", layer_utils, "dispatch_cpu_unquantized_gemm", lambda _: keep_weight)


def patch_cpu_experts() -> None:
    """CPU only, rollout role: keep unquantised experts as the checkpoint has them; see :mod:`vllm_plugin.experts`.

    An activation that is not among those stays with vLLM's kernel: its experts are packed, and an update that changes
    them is refused by name.
    """
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    from vllm_plugin.experts import plain_experts

    names = {MoEActivation.SILU: "silu", MoEActivation.GELU: "gelu", MoEActivation.GELU_TANH: "gelu_tanh"}

    def keep(stock: Any) -> Any:
        def process_weights_after_loading(self: Any, layer: Any) -> None:
            if self.moe_config.activation not in names:
                stock(self, layer)

        return process_weights_after_loading

    def wrap_apply(stock: Any) -> Any:
        signature = inspect.signature(stock)

        def apply(self: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(self, *args, **kwargs).arguments
            name = names.get(self.moe_config.activation)
            if name is None:
                stock(self, *args, **kwargs)
                return
            ids = given["topk_ids"]
            if given["expert_map"] is not None:
                ids = given["expert_map"][ids]
            plain_experts(
                given["output"],
                given["hidden_states"],
                given["w1"],
                given["w2"],
                self.w1_bias,
                self.w2_bias,
                given["topk_weights"],
                ids,
                name,
                not given["apply_router_weight_on_input"],
            )

        return apply

    _patch("cpu experts' memory", CPUUnquantizedExperts, "process_weights_after_loading", keep)
    _patch("cpu experts", CPUUnquantizedExperts, "apply", wrap_apply)


# --------------------------------------------------------------------------- KV memory


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


def stamp(scheduler_output: Any, step: int) -> None:
    """Number a step; the number travels with it to every worker."""
    scheduler_output.rose_step = step


def stamp_of(scheduler_output: Any) -> int:
    """Its number; 0 for a step that nobody numbered."""
    return getattr(scheduler_output, "rose_step", 0)


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
    """Tell the hash of every block that ``pool`` drops from its prefix cache and has nowhere else; the answer ends it.

    ``told`` must not raise: it runs inside vLLM's allocation.
    """
    original = pool._maybe_evict_cached_block

    def evict(block: Any) -> Any:
        key = block.block_hash
        evicted = original(block)
        if key is not None and pool.cached_block_hash_to_block.get_one_block(key) is None:
            told(key[:-GROUP_BYTES])
        return evicted

    def unwatch() -> None:
        if vars(pool).get("_maybe_evict_cached_block") is evict:
            del pool._maybe_evict_cached_block

    pool._maybe_evict_cached_block = evict
    return unwatch


_GROUP = (0).to_bytes(GROUP_BYTES, "big")
"""Behind a block's hash in a key of the prefix cache: the number of its KV group, of which there is one."""


def is_cached(pool: Any, block_hash: bytes) -> bool:
    """Does the prefix cache hold this block?"""
    return pool.cached_block_hash_to_block.get_one_block(block_hash + _GROUP) is not None


def num_cached(pool: Any) -> int:
    """Different blocks in the prefix cache."""
    return len(pool.cached_block_hash_to_block)


def looks_for_prefix(pool: Any, request: Any) -> bool:
    """Will vLLM look for a cached prefix of this request?"""
    return pool.enable_caching and not request.skip_reading_prefix_cache


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


def waiting_requests(scheduler: Any, limit: int) -> list[Any]:
    """At most ``limit`` requests that wait for memory or a slot, oldest first.  Any thread."""
    # In one go inside the interpreter: a loop here could be interrupted by the engine thread, and a queue that
    # changed meanwhile raises.
    both = itertools.chain(scheduler.kv_holding_waiting, scheduler.waiting)
    return list(itertools.islice(both, limit))


LOOKED_PAST = 1024
"""Waiting requests that one look goes over, 0.1 us each."""


def wait_for_blocks(scheduler: Any, limit: int) -> list[Any]:
    """The first ``limit`` requests that blocks alone could set running: there is a seat for each, and none of them waits for a grammar, for
    keys and values from elsewhere, or for its client.  vLLM puts those back in front of the queue, so they are looked past, not counted.
    Engine thread, between two steps.
    """
    from vllm.v1.core.sched.interface import PauseState

    # Sessions that wait for their client hold a seat, too.
    taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
    seats = scheduler.max_num_active_reqs - taken
    paused = scheduler.pause_state
    if seats <= 0 or paused == PauseState.PAUSED_ALL:
        return []
    queues = itertools.chain(
        scheduler.kv_holding_waiting, scheduler.waiting if paused == PauseState.UNPAUSED else ()
    )
    blocked = scheduler._is_blocked_waiting_status
    looked_at = itertools.islice(queues, LOOKED_PAST)
    ready = (request for request in looked_at if not blocked(request.status))
    return list(itertools.islice(ready, min(limit, seats)))


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
