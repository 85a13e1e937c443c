"""Stages that need the device and no vLLM: what CUDA's calls cost, and what they cost a step beside them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import figures
from benchmarks.gpu.common import (
    GIB,
    MPS_CONTROL,
    ROOT,
    Background,
    Figures,
    Peer,
    Place,
    Skip,
    arm_times,
    beside,
    decode_step,
    driver,
    keep,
    moving_here,
    place,
    pool,
    rehearsing,
    step_times,
    us,
)
from benchmarks.gpu.kv_plan import KvPlan
from rose.coserve import mps_stop
from rose.errors import LedgerError
from rose.policy.ladder import choose
from rose.policy.ladder import green_sms as sms_of_share
from vllm_plugin import compute
from vllm_plugin.layer_stop import LaunchAhead

ROUNDS = 4
PYTEST_INI = Path(__file__).with_name("pytest.ini")
"""The project's own asks for plugins that a machine without a network may lack."""
CONTRACT = (
    "tests/coserve/test_page_pools.py",
    "tests/plugin/test_gpu_device.py",
    "tests/weights/test_device.py",
)


def machine() -> Figures:
    """Driver, device, and what the compute ladder would choose for a rollout engine, eager and with CUDA graphs."""
    here, cuda = place(), driver()
    torch, on_gpu = here.torch, here.device == "cuda"
    total_sms, step, least = cuda.sm_split()
    free, total = torch.cuda.mem_get_info() if on_gpu else (cuda.free_bytes(), 0)
    found: Figures = {
        "device": torch.cuda.get_device_name(0) if on_gpu else "stand-in",
        "sms": total_sms,
        "sms_split_by": step,
        "sms_split_from": least,
        "granularity": cuda.granularity,
        "free_gib": free / GIB,
        "total_gib": total / GIB,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "driver_cuda": ".".join(map(str, cuda.version())),
        "mps_control": shutil.which(MPS_CONTROL) is not None,
    }
    for name, eager in (("eager", True), ("graphs", False)):
        choice = choose(compute.facts(cuda, world_size=1, eager=eager))
        found[f"rung_{name}"], found[f"rung_{name}_reason"] = choice.rung.value, choice.reason
    return found


def contract() -> Figures:
    """The tests marked ``gpu``: the page pool's contract and the weight codec on this device."""
    driver()
    return marked_gpu(CONTRACT[:1] if rehearsing() else CONTRACT)  # the others launch kernels


def marked_gpu(files: Sequence[str]) -> Figures:
    """The tests marked ``gpu`` of ``files``, in a process of their own.

    Raises:
        LedgerError: One failed, or a file had none that ran.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-v",
                "-m",
                "gpu",
                "-c",
                str(PYTEST_INI),
                "--rootdir",
                str(ROOT),
            ),
            *(f"--junitxml={report}", *files),
        ]
        done = subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, "ROSE_TEST_GPU": "1"})
        if not report.exists():
            raise LedgerError(f"pytest ended with {done.returncode} and no report; its words are in the log")
        return figures.contract(report.read_text(), files)


def vmm() -> Figures:
    """Microseconds per 2 MiB of CUDA's virtual memory calls by size of handle: one by one, by range, with retained handles."""
    gib = place().gib
    rounds: dict[tuple[int, str], tuple[list[float], list[float], int]] = {}
    for handle_mib in (2, 4, 8):
        size = handle_mib << 20
        for way, batch, retain in (("single", 1, 0), ("ranged", 16, 0), ("retained", 16, 4 * gib)):
            arena = pool(handle_bytes=size, retain_bytes=retain).reserve(gib, guard=True)
            batch = min(batch, gib // size)
            ranges = [(start * size, batch * size) for start in range(0, gib // size, batch)]
            mapped: list[float] = []
            unmapped: list[float] = []
            for _ in range(ROUNDS):
                mapped += [us(lambda r=one, a=arena: a.map([r])) for one in ranges]
                unmapped += [us(lambda r=one, a=arena: a.unmap([r])) for one in ranges]
            arena.close()
            rounds[handle_mib, way] = mapped, unmapped, batch * size
            keep(figures.vmm(rounds))
    return figures.vmm(rounds)


def fallback() -> Figures:
    """What the shared fallback page costs on top: map and unmap of 1 GiB of 2 MiB handles without a guard."""
    gib = place().gib
    arena = pool().reserve(gib)
    size = 32 << 20
    ranges = [(start, size) for start in range(0, gib, size)]
    mapped: list[float] = []
    unmapped: list[float] = []
    for _ in range(ROUNDS):
        mapped += [us(lambda r=one: arena.map([r])) for one in ranges]
        unmapped += [us(lambda r=one: arena.unmap([r])) for one in ranges]
    intact = arena.fallback_intact()
    arena.close()
    return {**figures.vmm({(2, "unguarded"): (mapped, unmapped, size)}), "fallback_intact": intact}


def step_self() -> Figures:
    """P99 of a decode-like step while this process maps and unmaps 1 GiB/s, and what it really moved."""
    here, step, arms = _alone_twice()
    with moving_here(here) as moved:
        arms["loaded"], rate = beside(moved, lambda: arm_times(here, step))
    return {**figures.steps(arms), **figures.load(rate, here.gib)}


def step_peer() -> Figures:
    """P99 of a decode-like step while another process maps and unmaps 1 GiB/s, and what it really moved."""
    here, step, arms = _alone_twice()
    with Peer("traffic", here.gib) as peer:
        arms["loaded"], rate = beside(peer.count, lambda: arm_times(here, step))
    return {**figures.steps(arms), **figures.load(rate, here.gib)}


def fence() -> Figures:
    """What the fence's event and its polling cost a step, and how long it waits: an event behind every step."""
    here, step, arms = _alone_twice()
    cuda, waits, stream = driver(), [], here.stream()
    stopping = False

    def watch() -> None:
        while not stopping:
            begun = time.perf_counter()
            event = cuda.record(stream)
            while not cuda.passed(event):
                time.sleep(0.0002)
            cuda.drop(event)
            waits.append((time.perf_counter() - begun) * 1e3)
            time.sleep(0.002)

    watcher = Background(watch)
    watcher.start()
    try:
        arms["loaded"], rate = beside(lambda: len(waits), lambda: arm_times(here, step))
    finally:
        stopping = True
        watcher.finish()
    return {
        "fences_per_s": rate,
        **figures.steps(arms),
        "wait_p50_ms": figures.percentile(waits, 0.5),
        "wait_p99_ms": figures.percentile(waits, 0.99),
    }


def ahead() -> Figures:
    """What a host that stays near its device costs a step, and how long the device goes on when the host stops: with and without."""
    here, step, arms = _alone_twice()
    bound = LaunchAhead(driver(), here.stream)
    bounded = decode_step(here, bound.layer)
    step_times(here, bounded, here.steps // 10)
    arms["bounded"] = arm_times(here, bounded)
    found = figures.steps(arms)
    for name, one in (("free", step), ("bounded", bounded)):
        left: list[float] = []
        for _ in range(here.steps // 4):
            one()
            left.append(us(here.settle) / 1e3)
        found[f"goes_on_{name}_p50_ms"] = figures.percentile(left, 0.5)
        found[f"goes_on_{name}_p99_ms"] = figures.percentile(left, 0.99)
    bound.drop()
    return found


def handover() -> Figures:
    """Memory from a peer to us, by the plan of an engine: its unmap, then our map and zeroing, per GiB; the driver's part of watermark to usable."""
    spans = driver().spans()
    size = 4 * place().gib
    plan = KvPlan(size)
    rounds: list[tuple[float, float]] = []
    found: Figures = {}
    for _ in range(5):
        with Peer("lend", size) as peer:
            arena = pool(reserve_bytes=0).reserve(plan.size, guard=True)
            theirs = float(peer.ask("release"))
            ours = sum(us(lambda a=arena, r=ranges: a.map(r)) for ranges in plan.coming)
            rounds.append((theirs, ours))
            arena.close()
        found = {**figures.handover(rounds, plan.lent_bytes), "spans": spans._asdict()}
        keep(found)
    return found


def kill() -> Figures:
    """Seconds until the memory of a SIGKILLed process with 8 GiB mapped is free."""
    here = place()
    late: list[float] = []
    for _ in range(3):
        before = here.free_bytes()
        peer = Peer("hold", 8 * here.gib)
        held = here.free_bytes()
        if before - held < 7 * here.gib:
            peer.kill()
            raise LedgerError("the peer did not hold its memory")
        late.append(_free_after(here, peer.kill, held + 7 * here.gib))
        keep(figures.after_kill(late))
    return figures.after_kill(late)


def green() -> Figures:
    """A decode-like step on part of the SMs, by their number; and P99 of ours beside a peer's prefill: on all SMs, and on its share."""
    here, cuda = place(), driver()
    total, by, least = cuda.sm_split()
    step, few = decode_step(here), max(20, here.steps * 2 // 5)
    whole = figures.percentile(step_times(here, step, few), 0.5)
    found: Figures = {"whole_device_ms": whole}
    for share in (0.25, 0.5, 0.75):
        stream, sms = cuda.green_stream(sms_of_share(total, share, by, least))
        with here.on_stream(stream):
            found[f"slowdown_{sms}_sms"] = figures.percentile(step_times(here, step, few), 0.5) / whole
        keep(found)
    arms = {"alone": arm_times(here, step), "again": arm_times(here, step)}
    half = sms_of_share(total, 0.5, by, least)
    for name, env in (("peer_on_all", {}), ("peer_on_half", {"ROSE_GPU_CHECK_SMS": str(half)})):
        with Peer("prefill", env=env) as peer:
            arms[name], rate = beside(peer.count, lambda: arm_times(here, step))
        found[f"{name}_steps_per_s"] = rate
        keep({**found, **figures.steps(arms)})
    return {**found, **figures.steps(arms)}


def mps() -> Figures:
    """Two clients of an MPS of our own: P99 beside one of low priority, then that one ended by terminate_client and SIGKILL, kernels in flight."""
    control = shutil.which(MPS_CONTROL)
    if control is None:
        raise Skip(f"{MPS_CONTROL} is not on PATH")
    with tempfile.TemporaryDirectory() as folder:
        env = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in env.values():
            Path(path).mkdir()
        os.environ.update(env)  # before CUDA: we are a client too
        subprocess.run([control, "-d"], check=True, timeout=30)
        try:
            return _beside_a_client(control)
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):  # we are still its client
                subprocess.run([control], input="quit -t 5\n", text=True, timeout=30, check=False)


def _beside_a_client(control: str) -> Figures:
    here, step, arms = _alone_twice()
    low = {"CUDA_MPS_CLIENT_PRIORITY": "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    free = here.free_bytes()
    with Peer("prefill", env=low) as peer:
        arms["loaded"], rate = beside(peer.count, lambda: arm_times(here, step))
        ended = terminate(control, peer.pid)
        free_s = _free_after(here, peer.kill, free - GIB)
    try:
        survived = len(step_times(here, step, 50)) == 50
    except RuntimeError:  # torch's word for a CUDA error
        survived = False
    return {**figures.mps(arms, survived, free_s), **ended, "client_steps_per_s": rate}


def terminate(control: str, pid: int, limit_s: float = 10.0) -> Figures:
    """Have a client's work ended as the guard of a rollout engine does, and look whether it has left the daemon's list."""
    listed, timed_out = _is_client(control, pid), False
    begun = time.monotonic()
    try:
        subprocess.run(
            [sys.executable, "-IS", mps_stop.__file__, control, str(pid)], timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        timed_out = True
    seconds = time.monotonic() - begun
    left = listed and not _is_client(control, pid)
    return figures.termination(listed=listed, left=left, seconds=seconds, timed_out=timed_out)


def _is_client(control: str, pid: int) -> bool:
    return any(
        str(pid) in mps_stop.ask(control, f"get_client_list {server}")
        for server in mps_stop.ask(control, "get_server_list")
    )


def _alone_twice() -> tuple[Place, Any, dict[str, list[float]]]:
    here = place()
    step = decode_step(here)
    step_times(here, step, here.steps // 10)
    return here, step, {name: arm_times(here, step) for name in ("alone", "again")}


def _free_after(here: Place, end: Any, free_bytes: int) -> float:
    """Seconds from ``end`` until that much of the device is free; at most 30."""
    begun = time.monotonic()
    end()
    while here.free_bytes() < free_bytes and time.monotonic() - begun < 30:
        time.sleep(0.001)
    return time.monotonic() - begun
