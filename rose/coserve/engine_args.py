"""What the command line of a rollout engine beside production needs and its operator did not give.

Reads the arguments and the model's folder; the sizes themselves are :mod:`rose.policy.engine_start`'s.  vLLM takes 92 % of the
device where nobody says how large the KV cache is, and compiles where nobody forbids it: a step of several seconds, on
production's cores, in which no memory can be given back.  On a GPU it also schedules a step while the last one runs, where nobody
forbids it: the gate would decide that step too early, and the time of one would be learned as another's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rose.coserve.node_config import EngineConfig
from rose.policy.engine_start import EngineSize

_KV_SIZE = ("--kv-cache-memory-bytes", "--num-gpu-blocks-override")
_KV_SIZE_ENV = "VLLM_CPU_KVCACHE_SPACE"
_COMPILING = ("--enforce-eager", "--no-enforce-eager", "--optimization-level", "--compilation-config")
_SHORT_COMPILING = ("-O", "-cc")
_SYNCHRONOUS = ("--no-async-scheduling",)
_MEMORY_SHARE = ("--gpu-memory-utilization",)
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")


def says_kv_size(engine: EngineConfig, env: Mapping[str, str] | None = None) -> bool:
    """Did the operator say how large the KV cache is?  ``env``: of this process; None = ours."""
    env = os.environ if env is None else env
    return bool(engine.says(*_KV_SIZE) or {**env, **engine.env}.get(_KV_SIZE_ENV))


def says_memory_share(engine: EngineConfig) -> bool:
    return engine.says(*_MEMORY_SHARE)


def derived_args(engine: EngineConfig, size: EngineSize | None) -> tuple[str, ...]:
    """Arguments ahead of the operator's; none on a device without production (``size`` is None), which the engine has to itself."""
    if size is None:
        return ()
    found: list[str] = []
    if not says_kv_size(engine):
        found += ["--kv-cache-memory-bytes", str(size.kv_bytes)]
    if not engine.says(*_COMPILING) and not any(a.startswith(_SHORT_COMPILING) for a in engine.args):
        found.append("--enforce-eager")
    if size.memory_share is not None and not says_memory_share(engine):
        found += ["--gpu-memory-utilization", f"{size.memory_share:.2f}"]
    if not engine.says(*_SYNCHRONOUS):
        found += _SYNCHRONOUS
    return tuple(found)


def weights_bytes(model: str) -> int | None:
    """Of the checkpoint in the folder ``model``; None where it is a name, or a folder without any."""
    folder = Path(model).expanduser()
    for pattern in _WEIGHT_FILES:
        if sizes := [path.stat().st_size for path in folder.glob(pattern)]:
            return sum(sizes)
    return None
