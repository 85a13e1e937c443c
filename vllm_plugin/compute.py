"""How a rollout worker on a GPU shares its SMs: the rung of the compute ladder, and putting it in force.

The policy (:mod:`rose.policy.ladder`) chooses from facts and from what the operator asks for; this module finds the facts, and makes a green
context's stream the one that the worker launches on where that is the choice.  A green context that cannot be had after all is the next rung: steps serialised by the gate.
**Nothing here has run on a GPU yet**; the tests run it on a driver in memory.

The stream is made by ``cuGreenCtxStreamCreate`` and belongs to its context wherever it is used: no context is made current to a thread.
Streams of others (copies of sampled tokens, NCCL's) stay where they were.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rose.coserve.cuda_driver import Driver
from rose.errors import LedgerError
from rose.policy.ladder import FORCED, Choice, DeviceFacts, Rung, choose, green_sms

logger = logging.getLogger("vllm.rose")

DEFAULT_SHARE = 0.5
ENV_RUNG = "ROSE_COMPUTE_RUNG"


def facts(
    driver: Driver, *, world_size: int, eager: bool, env: Mapping[str, str] | None = None
) -> DeviceFacts:
    """What the ladder asks, of this worker's device and engine."""
    env = os.environ if env is None else env
    try:
        splits = driver.sm_split()[0] > 0
    except LedgerError:
        splits = False
    return DeviceFacts(
        cuda=True,
        green_contexts=splits,
        driver=driver.version(),
        one_launching_thread=world_size == 1,
        replays_graphs=not eager,
        mig="MIG-" in env.get("CUDA_VISIBLE_DEVICES", ""),
        mps_programs=env.get("ROSE_ALLOW_MPS") == "1",  # the node agent has asked the daemon
    )


def enforce(
    driver: Driver,
    found: DeviceFacts,
    use_stream: Callable[[int], None],
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Choose a rung, put it in force, and say which: the choice as plain data, with ``sms`` where they are split.

    Args:
        use_stream: Makes a stream of the driver the one that this thread launches on.
    """
    env = os.environ if env is None else env
    choice = choose(found, allow_mps=env.get("ROSE_ALLOW_MPS") == "1", force=forced(env))
    sms: int | None = None
    if choice.rung is Rung.GREEN_CONTEXT:
        try:
            total, step, least = driver.sm_split()
            wanted = green_sms(total, share_of(env), step, least)
            stream, sms = driver.green_stream(wanted)
            use_stream(stream)
        except (LedgerError, ValueError, RuntimeError) as error:  # torch raises RuntimeError
            sms = None
            choice = Choice(rung=Rung.HOST_GATE, reason=f"no green context: {error}", serialise=True)
    logger.info("ROSE: compute is shared by %s: %s", choice.rung.value, choice.reason)
    return {**asdict(choice), "sms": sms}


def common_rung(rungs: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """One for a whole engine, whose ranks step together: a rank that needs its steps serialised decides for all."""
    told = [rung for rung in rungs if rung is not None]
    return next((rung for rung in told if rung["serialise"]), told[0] if told else None)


def use_stream(stream: int, device: Any) -> None:
    """Launch this thread's steps on a stream of the driver's from now on."""
    import torch

    torch.cuda.set_stream(torch.cuda.ExternalStream(stream, device=device))


def cap_torch_memory(share: float, device: Any) -> None:
    """torch's own memory stays within ``--gpu-memory-utilization``; KV memory is not torch's."""
    import torch

    torch.cuda.set_per_process_memory_fraction(share, device)


def forced(env: Mapping[str, str]) -> Rung | None:
    """``ROSE_COMPUTE_RUNG``: the rung that the operator asks for; a value that is none asks for nothing."""
    text = env.get(ENV_RUNG, "")
    return Rung(text) if text in FORCED else None


def share_of(env: Mapping[str, str]) -> float:
    """``ROSE_SM_SHARE``; a value that is none is the default."""
    try:
        share = float(env.get("ROSE_SM_SHARE", ""))
    except ValueError:
        return DEFAULT_SHARE
    return share if 0.0 < share <= 1.0 else DEFAULT_SHARE
