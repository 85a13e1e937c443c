"""Choose how a rollout engine shares compute with production on this device: the rungs of the ladder, and why each.

The token budget of every rollout step (``rose.policy.admission``) is always there.  On top of it the device gets the best
rung that it offers:

CPU   an idle share of the cores (``rose.proc_share``), else the token budget alone;
CUDA  *host gating*: rollout steps are serialised with production's.  Without MPS the kernels of two processes take turns in
      time slices on the whole device, so a step that overlaps takes slices from production, whatever part of the SMs a
      green context gives it: green contexts divide one process, or the clients of one MPS server;
MPS   only where the operator allows it (``allow_mps``): a fault in a rollout kernel then ends production too.  Rollouts are a client
      below normal priority on a share of the SMs, or, where it is asked for, launch on a green context.

A rung can be asked for (``engine.compute_rung``), so that each can be measured; one that the device does not give is the host gate.

Pure: facts in, choice out.  Nothing of the CUDA rungs has been measured yet; ``benchmarks/gpu_check.py`` is how.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MIN_GREEN_DRIVER = (12, 4)


class Rung(StrEnum):
    """What protects production's compute besides the token budget."""

    BUDGET = "budget"
    """Nothing: the token budget alone."""
    IDLE_SHARE = "idle-share"
    """CPU: the kernel gives the rollout engine what is left."""
    GREEN_CONTEXT = "green-context"
    """CUDA: the rollout engine's kernels run on a part of the SMs, beside production's under MPS."""
    HOST_GATE = "host-gate"
    """CUDA: no rollout step beside a serving step."""
    MPS = "mps"
    """CUDA: one server for both processes, rollouts below normal priority.  One fault domain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """What was found on the device."""

    cuda: bool
    idle_share: bool = False
    green_contexts: bool = False
    """The driver's bindings offer them."""
    driver: tuple[int, int] = (0, 0)
    """CUDA version of the driver."""
    one_launching_thread: bool = False
    """A green context is current to one thread; engines with auxiliary launching threads break out of it."""
    replays_graphs: bool = False
    mig: bool = False
    mps_programs: bool = False
    """A control daemon answers."""
    same_user: bool = True
    """Both engines run as one user, as one MPS server demands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    rung: Rung
    reason: str
    serialise: bool = False
    """``AdmissionParams.serialise`` of the rollout engine."""


FORCED = (Rung.HOST_GATE, Rung.GREEN_CONTEXT, Rung.MPS)
"""What can be asked for on a GPU."""


def choose(facts: DeviceFacts, *, allow_mps: bool = False, force: Rung | None = None) -> Choice:
    """The rung for this device, and why no better one.

    Args:
        force: The rung that the operator asks for, of :data:`FORCED`.  A green context without MPS is in force when it is asked for,
            and its reason says what it is not; nothing forces MPS where it is not allowed.
    """
    if not facts.cuda:
        if facts.idle_share:
            return Choice(rung=Rung.IDLE_SHARE, reason="the kernel gives rollouts an idle share of the cores")
        return Choice(rung=Rung.BUDGET, reason="the kernel offers no idle share")
    no_mps = _why_no_mps(facts) if allow_mps else "MPS is not allowed"
    if force is Rung.GREEN_CONTEXT:
        blocked = _why_no_green(facts)
        if blocked is not None:
            return _gate(f"a green context was asked for: {blocked}")
        told = "" if no_mps is None else f"; {no_mps}, so both engines still take time slices from each other"
        return Choice(rung=Rung.GREEN_CONTEXT, reason=f"it was asked for{told}")
    if force is Rung.HOST_GATE:
        return _gate("it was asked for")
    if no_mps is not None:
        return _gate(f"{no_mps}; without it two engines take time slices from each other")
    return Choice(rung=Rung.MPS, reason="the operator allows MPS: one fault domain with production")


def _gate(reason: str) -> Choice:
    return Choice(rung=Rung.HOST_GATE, reason=reason, serialise=True)


def _why_no_mps(facts: DeviceFacts) -> str | None:
    if facts.mig:
        return "a MIG slice"
    if not facts.mps_programs:
        return "no MPS control daemon answers"
    return None if facts.same_user else "the engines run as different users"


def _why_no_green(facts: DeviceFacts) -> str | None:
    if facts.mig:
        return "no green contexts in a MIG slice"
    if not facts.green_contexts:
        return "no green contexts on offer"
    if facts.driver < MIN_GREEN_DRIVER:
        return f"the driver speaks CUDA {facts.driver[0]}.{facts.driver[1]}; green contexts need 12.4"
    if facts.replays_graphs:
        return (
            "the engine replays CUDA graphs, which run where they were captured (--enforce-eager would not)"
        )
    return None if facts.one_launching_thread else "the engine launches kernels from several threads"


def green_sms(total: int, share: float, step: int, least: int) -> int:
    """How many SMs a share is: a multiple of ``step``, at least ``least``, and never all of them.

    Raises:
        ValueError: The device cannot be split like that.
    """
    step = max(1, step)
    floor = -(-least // step) * step
    wanted = min(max(round(total * share) // step * step, floor), (total - 1) // step * step)
    if wanted <= 0 or wanted < floor:
        raise ValueError(f"{total} SMs cannot be split in multiples of {step}, {least} at least")
    return wanted
