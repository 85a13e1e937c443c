"""Stages that need the device and no vLLM: what CUDA's calls cost, and what they cost a step beside them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import figures
from benchmarks.gpu.common import (
    GIB,
    MPS_CONTROL,
    ROOT,
    Figures,
    Peer,
    Skip,
    decode_step,
    driver,
    keep,
    moving_here,
    pool,
    step_times,
    torch_on_gpu,
    us,
)
from rose.coserve import mps_stop
from rose.errors import LedgerError
from rose.policy.ladder import choose
from rose.policy.ladder import green_sms as sms_of_share
from vllm_plugin import compute

ROUNDS = 4
STEPS = 500


def machine() -> Figures:
    """Driver, device, and what the compute ladder would choose for a rollout engine, eager and with CUDA graphs."""
    torch = torch_on_gpu()
    cuda = driver()
    total_sms, step, least = cuda.sm_split()
    free, total = torch.cuda.mem_get_info()
    found: Figures = {
        "device": torch.cuda.get_device_name(0),
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
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "tests/coserve/test_page_pools.py",
        "tests/plugin/test_gpu_device.py",
        "tests/weights/test_device.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LedgerError(f"pytest ended with {done.returncode}: {done.stdout[-600:]}")
    return {"summary": done.stdout.strip().splitlines()[-1]}


def vmm() -> Figures:
    """Microseconds per 2 MiB of CUDA's virtual memory calls by size of handle: one by one, by range, with retained handles."""
    driver()
    rounds: dict[tuple[int, str], tuple[list[float], list[float], int]] = {}
    for handle_mib in (2, 16, 64):
        size = handle_mib << 20
        for way, batch, retain in (("single", 1, 0), ("ranged", 16, 0), ("retained", 16, 4 * GIB)):
            arena = pool(handle_bytes=size, retain_bytes=retain).reserve(GIB, guard=True)
            batch = min(batch, GIB // size)
            ranges = [(start * size, batch * size) for start in range(0, GIB // size, batch)]
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
    driver()
    arena = pool().reserve(GIB)
    size = 32 << 20
    ranges = [(start, size) for start in range(0, GIB, size)]
    mapped: list[float] = []
    unmapped: list[float] = []
    for _ in range(ROUNDS):
        mapped += [us(lambda r=one: arena.map([r])) for one in ranges]
        unmapped += [us(lambda r=one: arena.unmap([r])) for one in ranges]
    intact = arena.fallback_intact()
    arena.close()
    return {**figures.vmm({(2, "unguarded"): (mapped, unmapped, size)}), "fallback_intact": intact}


def step_self() -> Figures:
    """P99 of a decode-like step while this process maps and unmaps 1 GiB/s."""
    torch, step, arms = _alone_twice()
    with moving_here(2 * GIB):
        arms["loaded"] = step_times(torch, step, STEPS)
    return figures.steps(arms)


def step_peer() -> Figures:
    """P99 of a decode-like step while another process maps and unmaps 1 GiB/s."""
    torch, step, arms = _alone_twice()
    with Peer("traffic", 2 * GIB):
        arms["loaded"] = step_times(torch, step, STEPS)
    return figures.steps(arms)


def fence() -> Figures:
    """What the fence's event and its polling cost a step, and how long it waits: an event behind every step."""
    torch, step, arms = _alone_twice()
    cuda, waits = driver(), []
    stream = torch.cuda.current_stream().cuda_stream
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

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        arms["loaded"] = step_times(torch, step, STEPS)
    finally:
        stopping = True
        watcher.join()
    return {
        **figures.steps(arms),
        "wait_p50_ms": figures.percentile(waits, 0.5),
        "wait_p99_ms": figures.percentile(waits, 0.99),
    }


def handover() -> Figures:
    """Memory from a peer to us: its unmap, then our map and zeroing, per GiB; the driver's part of watermark to usable."""
    torch_on_gpu()
    size = 4 * GIB
    rounds: list[tuple[float, float]] = []
    for _ in range(5):
        with Peer("hold", size) as peer:
            arena = pool(reserve_bytes=0).reserve(size, guard=True)
            theirs = float(peer.ask("release"))
            ours = us(lambda a=arena: a.map([(0, size)]))
            rounds.append((theirs, ours))
            arena.close()
        keep(figures.handover(rounds, size))
    return figures.handover(rounds, size)


def kill() -> Figures:
    """Seconds until the memory of a SIGKILLed process with 8 GiB mapped is free."""
    torch = torch_on_gpu()
    late: list[float] = []
    for _ in range(3):
        before, _total = torch.cuda.mem_get_info()
        peer = Peer("hold", 8 * GIB)
        held, _total = torch.cuda.mem_get_info()
        if before - held < 7 * GIB:
            peer.kill()
            raise LedgerError("the peer did not hold its memory")
        late.append(_free_after(torch, peer.kill, held + 7 * GIB))
        keep(figures.after_kill(late))
    return figures.after_kill(late)


def green() -> Figures:
    """A decode-like step on part of the SMs, by their number; and P99 of ours beside a peer's prefill: on all SMs, and on its share."""
    torch = torch_on_gpu()
    cuda = driver()
    total, by, least = cuda.sm_split()
    step = decode_step(torch)
    whole = figures.percentile(step_times(torch, step, 200), 0.5)
    found: Figures = {"whole_device_ms": whole}
    for share in (0.25, 0.5, 0.75):
        stream, sms = cuda.green_stream(sms_of_share(total, share, by, least))
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            found[f"slowdown_{sms}_sms"] = figures.percentile(step_times(torch, step, 200), 0.5) / whole
        keep(found)
    arms = {"alone": step_times(torch, step, STEPS), "again": step_times(torch, step, STEPS)}
    half = sms_of_share(total, 0.5, by, least)
    for name, env in (("peer_on_all", {}), ("peer_on_half", {"ROSE_GPU_CHECK_SMS": str(half)})):
        with Peer("prefill", env=env):
            arms[name] = step_times(torch, step, STEPS)
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
    torch, step, arms = _alone_twice()
    low = {"CUDA_MPS_CLIENT_PRIORITY": "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    free, _total = torch.cuda.mem_get_info()
    with Peer("prefill", env=low) as peer:
        arms["loaded"] = step_times(torch, step, STEPS)
        servers = mps_stop.ask(control, "get_server_list")
        clients = mps_stop.ask(control, f"get_client_list {servers[0]}") if servers else []
        seen = str(peer.pid) in clients
        subprocess.run(
            [sys.executable, "-IS", mps_stop.__file__, control, str(peer.pid)], timeout=10, check=False
        )
        free_s = _free_after(torch, peer.kill, free - GIB)
    try:
        survived = len(step_times(torch, step, 50)) == 50
    except RuntimeError:  # torch's word for a CUDA error
        survived = False
    return figures.mps(arms, survived, free_s, seen)


def _alone_twice() -> tuple[Any, Any, dict[str, list[float]]]:
    torch = torch_on_gpu()
    step = decode_step(torch)
    step_times(torch, step, 50)
    return torch, step, {"alone": step_times(torch, step, STEPS), "again": step_times(torch, step, STEPS)}


def _free_after(torch: Any, end: Any, free_bytes: int) -> float:
    """Seconds from ``end`` until that much of the device is free; at most 30."""
    begun = time.monotonic()
    end()
    while torch.cuda.mem_get_info()[0] < free_bytes and time.monotonic() - begun < 30:
        time.sleep(0.001)
    return time.monotonic() - begun
