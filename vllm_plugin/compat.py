"""What an engine can share, and the patches that put ROSE in force.  What differs between lines of vLLM is in :mod:`vllm_plugin.lines`.

This file and :mod:`vllm_plugin.internals`, which works on the objects of a running engine, are the only ones that know vLLM's private
names.  Patches can be listed (:func:`applied`).

Rules:
- :mod:`vllm_plugin.selfcheck` looks before anything is touched: version, every hook and every name that is used.
  With a problem, role ``serving`` stays stock vLLM and role ``rollout`` refuses to start.
- Patches are idempotent; each remembers what it replaced.
- ``import vllm`` happens inside functions: vLLM loads this module in every process it starts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.coserve.kernel import lock_holders
from rose.coserve.ledger import RecordWriter, WriterLives
from rose.coserve.node_dir import NodeDir, core_dir
from rose.coserve.record_layout import pack_found
from rose.coserve.records import Phase, ServingLease
from rose.errors import ConfigError, RoseError
from rose.policy.compat import UNLISTED, Row, Support, judge, row
from rose.policy.engine_start import REFUSED_ROLE
from rose.policy.lending_events import ALL_PAGES
from rose.units import PAGE_BYTES
from vllm_plugin import lines
from vllm_plugin.features import Device, Findings, Front, findings, kv_findings
from vllm_plugin.kv_layout import CountedCache
from vllm_plugin.peers import Peers, Trouble
from vllm_plugin.roles import ENV_ALLOW_UNMEASURED, ENV_CORES, ENV_DIR, ENV_ENGINE, ENV_PEER_PAGES
from vllm_plugin.selfcheck import problems

logger = logging.getLogger("vllm.rose")

SCHEDULER_FACTORY = "vllm_plugin.scheduler.make_scheduler"
CPU_WORKER = "vllm_plugin.worker.RoseCPUWorker"
STOCK_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
GPU_WORKER = "vllm_plugin.gpu_worker.RoseGPUWorker"
STOCK_GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"
_WORKERS = {"cpu": (CPU_WORKER, STOCK_CPU_WORKER), "cuda": (GPU_WORKER, STOCK_GPU_WORKER)}

START_WAIT_S = 1.0
"""Longest wait of production's start for memory that the rollout engine still holds: it dies at its deadline anyway, and where it does not,
production starts with the rest."""
START_LOOK_S = 0.01

OS_PAGE_BYTES = 4096


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


_GRPC_SERVER = "smg_grpc_servicer"
"""What vLLM's server over gRPC is made of: it imports it before it makes its configuration, and nothing else of vLLM does."""


def front_of(call: Mapping[str, Any]) -> Front:
    """How the server of this process was started.  ``call``: keywords of its ``create_engine_config``."""
    if call.get("headless"):
        return "headless"
    return "grpc" if _GRPC_SERVER in sys.modules else "http"


def touched(config: Any, kv_cache_config: Any = None, *, front: Front = "http") -> Findings:
    """Rows that an engine touches by its ``VllmConfig``, and by its ``KVCacheConfig`` too where that is known already.

    Raises:
        Exception: Something of the configuration is not what it was: no engine that we know.
    """
    kind = device()
    worker, stock_worker = _WORKERS.get(kind, ("", ""))
    ours = (SCHEDULER_FACTORY, worker)
    found = findings(config, device=kind, stock_worker=stock_worker, ours=ours, front=front)
    if kv_cache_config is not None:
        found |= kv_findings(kv_cache_config, piece_bytes(config), drafts=has_drafts(config))
    return of_line(found)


def of_line(found: Findings) -> Findings:
    """These rows, and what there is to say of them on the installed line of vLLM."""
    return {**found, **lines.untried(found)}


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


def has_drafts(config: Any) -> bool:
    """Is there speculative decoding, of whatever kind?"""
    return config.speculative_config is not None


def require_elastic(kv_cache_config: Any, piece_bytes: int, role: str, *, drafts: bool) -> None:
    """In a worker: raise where the memory of such a cache must not be taken away.

    Raises:
        ConfigError: Of a kind that nobody tried, or of a geometry that does not add up.
    """
    found = of_line(kv_findings(kv_cache_config, piece_bytes, drafts=drafts))
    support, because = judge(role, found)
    if support is not Support.ELASTIC:
        standing = str(Standing(support=support, row=because, found=found[because.name]))
        raise ConfigError(standing, field=REFUSED_ROLE if role == "rollout" else None)


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
    from vllm_plugin.roles import ENV_ROLE, ROLES

    if role not in ROLES:  # a typo in production's environment must not stop production
        _give_up("serving", f"{ENV_ROLE}='{role}' is not a role; known: {', '.join(ROLES)}")
        return
    if not os.environ.get(ENV_DIR):
        _give_up(role, f"{ENV_DIR} is not set; it names the node directory")
        return
    if _applied or _refused:
        return
    found = problems(role)
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
            if os.environ.pop(ENV_CORES, None) is not None:  # else the next would be a directory further down
                core = vllm_config.parallel_config.data_parallel_index
                os.environ[ENV_DIR] = str(core_dir(os.environ[ENV_DIR], core))
            if role == "serving":
                _take_everything_back(is_elastic(vllm_config))
        return original(self, vllm_config, *args, **kwargs)

    return init


def _take_everything_back(elastic: bool = True) -> None:
    """Say ``starting`` and wait, for a moment, until the rollout engine holds nothing; our workers, which all have to know the same, find
    in their environment what it holds then, where their memory is ``elastic``.  Never raises."""
    global _starting
    os.environ.pop(ENV_PEER_PAGES, None)
    try:
        node_dir = NodeDir(os.environ["ROSE_DIR"])
        if _starting is None:
            _starting = node_dir.serving_lease_writer()
        _starting.write(ServingLease(phase=Phase.STARTING, heartbeat_ns=time.monotonic_ns()))
        _starting.wake()
    except Exception as error:  # noqa: BLE001  # fail-open: production starts whatever is the matter with our files
        # Another production has it, or another user.
        says = str(error) if isinstance(error, RoseError) else repr(error)
        lease = Path(os.environ.get(ENV_DIR, "")) / "serving.lease"
        if isinstance(error, WriterLives) and (writers := lock_holders(lease)):
            says += f"; it is of pid {', '.join(map(str, writers))}: end that if it is a production that has ended but for this process"
        logger.error("ROSE cannot use its node directory: %s", says)
        return
    try:
        peers, until_s = Peers(node_dir, Trouble()), time.monotonic() + START_WAIT_S
        # Workers may hold memory for a moment longer than their core lives: nobody wakes us for them.
        while (held := peers.pages()) and time.monotonic() < until_s:
            time.sleep(START_LOOK_S)
        peers.close()
    except Exception as error:  # noqa: BLE001  # fail-open
        logger.warning("ROSE: the rollout engine may not have given everything back: %r", error)
        return
    if not elastic:  # its memory is beside theirs
        return
    if held >= ALL_PAGES:
        # Of another version, which cannot read that we start and gives back for that.  Without any memory production would not serve.
        logger.error(
            "ROSE: what the rollout engine of %s holds cannot be read; production starts with all of its memory",
            node_dir.path,
        )
    elif held:
        os.environ[ENV_PEER_PAGES] = str(held)
        logger.error(
            "ROSE: the rollout engine of %s holds %d pages of 2 MiB after %g s (frozen?); production starts without them, and takes "
            "each as soon as it is given back; kill or thaw that engine",
            node_dir.path,
            held,
            START_WAIT_S,
        )


def starting_lease() -> RecordWriter[ServingLease] | None:
    """The writer that said ``starting``, once; the caller owns it from now on."""
    global _starting
    writer, _starting = _starting, None
    return writer


_refusal: contextlib.ExitStack | None = None
"""Writers of ``serving.lease`` while production runs without us: they are how ``rose node status`` knows why."""


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
        raise ConfigError(reason, field=REFUSED_ROLE)
    logger.error("ROSE is off, serving goes on as without it: %s", reason)
    if _refusal is None and os.environ.get(ENV_DIR):
        _refusal = contextlib.ExitStack()
        started = starting_lease()
        for node_dir in _node_dirs():
            try:
                writer = _refusal.enter_context(started or NodeDir(node_dir).serving_lease_writer())
                writer.extra[:] = pack_found(reason if found is None else found)
                writer.write(
                    ServingLease(phase=Phase.OFF, row=because.number, heartbeat_ns=time.monotonic_ns())
                )
            except (
                RoseError,
                OSError,
            ) as error:  # another process of this server was first, or there is no directory
                logger.debug("ROSE: the refusal is not in the node directory: %s", error)


def _node_dirs() -> list[Path]:
    """Node directories of the engine cores that this process starts, or its own if it is one."""
    base = Path(os.environ[ENV_DIR])
    return [core_dir(base, core) for core in range(int(os.environ.get(ENV_CORES) or 0))] or [base]


def num_cores_below(config: Any) -> int:
    """How many engine cores of one server have a directory each below its ``ROSE_DIR``; 1: the one core uses that itself."""
    parallel = config.parallel_config
    return 1 if parallel.data_parallel_external_lb else max(1, parallel.data_parallel_size)


def _name_directories(config: Any, role: str) -> None:
    """In an API server: tell the engine cores that it will start whether each has a directory of its own."""
    os.environ.pop(ENV_CORES, None)
    if role == "serving" and (num_cores := num_cores_below(config)) > 1:
        os.environ[ENV_CORES] = str(num_cores)


def _wrap_config(original: Callable[..., Any], role: str) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        try:
            _name_directories(config, role)
            standing = standing_by(touched(config, front=front_of(kwargs)), role)
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


PARKED_MS = 50
"""A parked reader looks again after this time, which bounds what a lost wake-up costs."""
WORDS_KEPT = 64
"""Wake-ups that are queued for a reader.  vLLM's writer queues one and drops a second within about a millisecond; a parked reader would then
read that message late."""
_QUEUE_PATCHES = ("queue wait", "queue word")
_spins = False


def let_spin(on: bool) -> None:
    """Of this process: wait for messages as vLLM does (there is no neighbour on its core), or parked.  Any thread."""
    global _spins
    if on == _spins:
        return
    _spins = on
    for name in _QUEUE_PATCHES:
        patch = _applied.get(name)
        if patch is not None:
            # vLLM's own function and nothing around it: a frame more makes each turn of the spin longer.
            setattr(patch.owner, patch.attribute, patch.original if on else patch.replacement)


def patch_spin() -> None:
    """CPU only: make it possible to let readers of the message queue park at once instead of spinning.

    vLLM's CPU workers, and its engine core while a step runs, spin on ``sched_yield`` for a second after each message, and only then
    wait for the writer's word.  On a shared core the spin starves an idle-class neighbour although nothing is computed, so production
    parks at once while such a neighbour may run (:func:`let_spin`).  It does not poll: with a sleep of 200 us instead of the spin, the
    engine core's polling took so much of the worker's core that a step of 22 ms took 29.

    Never raises: it saves time, nothing hangs on it, and production calls it before it serves.
    """
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            _patch("queue wait", SpinCondition, "wait", _wrap_wait)
            _patch("queue word", SpinCondition, "notify", _wrap_notify)
            # Production's queue is vLLM's until a rollout engine may run beside it.
            let_spin(os.environ.get("ROSE_ROLE") == "serving")
    except Exception as error:  # noqa: BLE001  # see above
        logger.warning("ROSE: vLLM's message queue spins on: %r", error)


def _wrap_wait(stock: Callable[..., None]) -> Callable[..., None]:
    def park(self: Any, timeout_ms: int | None = None) -> None:
        self.last_read = -math.inf  # by this, vLLM takes the queue for long idle
        stock(self, PARKED_MS if timeout_ms is None else min(timeout_ms, PARKED_MS))

    return park


def _wrap_notify(stock: Callable[..., None]) -> Callable[..., None]:
    import zmq

    def notify(self: Any) -> None:
        # Each time: it holds for the readers that have connected by now.
        self.local_notify_socket.setsockopt(zmq.SNDHWM, WORDS_KEPT)
        stock(self)

    return notify


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
    """CPU only, rollout role and stock servers that ask for our weights: keep linear weights in place instead of packing and freeing them.

    vLLM's CPU build repacks every linear layer and drops the original parameter; a weight update
    would then find nothing to write to.
    """
    import torch.nn.functional as F
    import vllm.model_executor.layers.utils as layer_utils

    def keep_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    _patch("cpu gemm", layer_utils, "dispatch_cpu_unquantized_gemm", lambda _: keep_weight)


def patch_cpu_experts() -> None:
    """CPU only, as :func:`patch_cpu_gemm`: keep unquantised experts as the checkpoint has them; see :mod:`vllm_plugin.experts`.

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
