#!/usr/bin/env python
"""What only a GPU can say, in stages of at most eight minutes, each written down as soon as it is done.

    python benchmarks/gpu_check.py --list
    python benchmarks/gpu_check.py --stage vmm --json out/gpu_check.json
    python benchmarks/gpu_check.py --json out/gpu_check.json          # every stage that the file does not have yet

A stage ends as ``done`` (with figures), ``skipped`` (what it needs is not there) or ``failed`` (with the error); the next
stage runs all the same.  Each runs in a process of its own, so that a fault in one is no fault of the next.  Nothing
changes a setting of the device.  None of this has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from benchmarks.report import percentile, write  # noqa: E402
from rose.errors import LedgerError  # noqa: E402
from rose.units import PAGE_BYTES  # noqa: E402

STAGE_LIMIT_S = 480.0
GIB = 1 << 30
Figures = dict[str, Any]


class Skip(Exception):
    """This machine lacks what a stage needs."""


def stage_machine() -> Figures:
    """Driver, device, what the compute ladder would choose."""
    import os
    import shutil

    from rose.policy.ladder import DeviceFacts, choose

    torch = _torch()
    runtime = torch.version.cuda or "0.0"
    green = _has_green_contexts()
    major, minor = (int(part) for part in runtime.split(".")[:2])
    facts = DeviceFacts(
        cuda=True,
        green_contexts=green,
        driver=(major, minor),
        one_launching_thread=True,
        mig="MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        mps_programs=shutil.which("nvidia-cuda-mps-control") is not None,
    )
    free, total = torch.cuda.mem_get_info()
    choice = choose(facts)
    return {
        "device": torch.cuda.get_device_name(0),
        "sms": torch.cuda.get_device_properties(0).multi_processor_count,
        "free_gib": free / GIB,
        "total_gib": total / GIB,
        "cuda": runtime,
        "green_contexts": green,
        "rung": choice.rung.value,
        "rung_reason": choice.reason,
    }


def stage_vmm() -> Figures:
    """Microseconds per 2 MiB of CUDA's virtual memory calls: handle by handle, by range, with retained handles."""
    _torch()
    found: Figures = {}
    for handle_mib in (2, 16, 64):
        size = handle_mib << 20
        for name, batch, retain in (("single", 1, 0), ("ranged", 16, 0), ("retained", 16, 4 * GIB)):
            arena = _pool(handle_bytes=size, retain_bytes=retain).reserve(GIB, guard=True)
            batch = min(batch, GIB // size)
            mapped, unmapped = _map_rounds(arena, size, batch)
            # Behind the first round: it creates what `retained` keeps.
            pages = batch * size / PAGE_BYTES
            for what, values in (("map", mapped), ("unmap", unmapped)):
                later = [value / pages for value in values[len(values) // 4 :]]
                key = f"{what}_us_per_page_{handle_mib}mib_{name}"
                found[f"{key}_p50"] = percentile(later, 0.5)
                found[f"{key}_p99"] = percentile(later, 0.99)
            arena.close()
    per_gib = found["map_us_per_page_64mib_ranged_p50"] * (GIB // PAGE_BYTES) / 1e3
    return {**found, "map_ms_per_gib": per_gib, "moonshot_20_ms_per_gib_met": per_gib <= 20.0}


def stage_contract() -> Figures:
    """The page pool's contract on this device: the tests marked ``gpu``."""
    _pool()
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/coserve/test_page_pools.py"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LedgerError(f"pytest ended with {done.returncode}: {done.stdout[-600:]}")
    return {"summary": done.stdout.strip().splitlines()[-1]}


def stage_step_self() -> Figures:
    """P99 of a decode-like step while this process maps and unmaps 1 GiB/s."""
    return _step_under_traffic(in_peer=False)


def stage_step_peer() -> Figures:
    """P99 of a decode-like step while another process maps and unmaps 1 GiB/s."""
    return _step_under_traffic(in_peer=True)


def stage_kill() -> Figures:
    """Seconds until the memory of a SIGKILLed process with 8 GiB mapped is free."""
    torch = _torch()
    late: list[float] = []
    for _ in range(3):
        before, _total = torch.cuda.mem_get_info()
        peer = _peer(8 * GIB, traffic=False)
        held, _total = torch.cuda.mem_get_info()
        begun = time.monotonic()
        peer.kill()
        peer.wait()
        while torch.cuda.mem_get_info()[0] < held + 7 * GIB and time.monotonic() - begun < 30:
            time.sleep(0.001)
        late.append(time.monotonic() - begun)
        if before - held < 7 * GIB:
            raise LedgerError("the peer did not hold its memory")
    return {"free_after_kill_s_max": max(late), "limit_500_ms_met": max(late) <= 0.5}


def stage_green() -> Figures:
    """Slow-down of a decode-like step on a part of the SMs, by their number."""
    torch = _torch()
    if not _has_green_contexts():
        raise Skip("torch offers no green contexts")
    from torch.cuda.green_contexts import GreenContext

    total = torch.cuda.get_device_properties(0).multi_processor_count
    step = _decode_step(torch)
    whole = percentile(_step_times(torch, step, 200), 0.5)
    found: Figures = {"whole_device_ms": whole}
    for share in (0.25, 0.5, 0.75):
        sms = max(8, int(total * share) // 8 * 8)
        context = GreenContext.create(num_sms=sms, device_id=0)
        with torch.cuda.stream(context.Stream()):
            found[f"slowdown_{sms}_sms"] = percentile(_step_times(torch, step, 200), 0.5) / whole
    return found


def stage_engine() -> Figures:
    """One vLLM engine of the 8B shape with dummy weights, eager: does 0.32 run here, and how long is a decode step?"""
    torch = _torch()
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise Skip(f"vLLM is not installed: {error}") from error
    import tempfile

    shape = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16", "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        begun = time.monotonic()
        engine = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
            gpu_memory_utilization=0.5, max_model_len=4096,
        )  # fmt: skip
        started_s = time.monotonic() - begun
        prompts: Any = [{"prompt_token_ids": [7 + i] * 512} for i in range(32)]
        sampling = SamplingParams(max_tokens=128, ignore_eos=True, detokenize=False)
        engine.generate(prompts, sampling, use_tqdm=False)
        begun = time.monotonic()
        engine.generate(prompts, sampling, use_tqdm=False)
        took_s = time.monotonic() - begun
    return {
        "start_s": started_s,
        "tokens_per_s": 32 * 128 / took_s,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }


def stage_coserve() -> Figures:
    """Two engines with the 7B and 8B shapes on the busiest 20 s of a trace, and the paper's table 1."""
    raise Skip("the CUDA page pool is not wired into a vLLM worker yet")


STAGES: dict[str, Callable[[], Figures]] = {
    "machine": stage_machine,
    "contract": stage_contract,
    "vmm": stage_vmm,
    "step_self": stage_step_self,
    "step_peer": stage_step_peer,
    "kill": stage_kill,
    "green": stage_green,
    "engine": stage_engine,
    "coserve": stage_coserve,
}


# --- helpers


def _map_rounds(arena: Any, size: int, batch: int) -> tuple[list[float], list[float]]:
    """Microseconds of each ``map`` and each ``unmap`` of ``batch`` handles, over all of 1 GiB, four times."""
    ranges = [(start * size, batch * size) for start in range(0, GIB // size, batch)]
    mapped: list[float] = []
    unmapped: list[float] = []
    for _ in range(4):
        mapped += [_us(lambda r=one: arena.map([r])) for one in ranges]
        unmapped += [_us(lambda r=one: arena.unmap([r])) for one in ranges]
    return mapped, unmapped


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise Skip("torch is not installed") from error
    if not torch.cuda.is_available():
        raise Skip("no CUDA device")
    torch.cuda.init()
    return torch


def _pool(**settings: Any) -> Any:
    from rose.coserve.cuda_pages import CudaPagePool

    try:
        return CudaPagePool(0, **settings)
    except LedgerError as error:
        raise Skip(str(error)) from error


def _has_green_contexts() -> bool:
    try:
        from torch.cuda.green_contexts import GreenContext  # noqa: F401
    except ImportError:
        return False
    return True


def _us(call: Callable[[], Any]) -> float:
    begun = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begun) / 1e3


def _decode_step(torch: Any) -> Callable[[], None]:
    """What a decode step does to the device: it reads all weights once (36 layers of 8B, a batch of 16)."""
    weights = [torch.randn(4096, 24576, device="cuda", dtype=torch.bfloat16) for _ in range(36)]
    batch = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for weight in weights:
            batch @ weight

    return step


def _step_times(torch: Any, step: Callable[[], None], count: int) -> list[float]:
    """Milliseconds of each step, the host's wait included."""
    found: list[float] = []
    for _ in range(count):
        begun = time.perf_counter()
        step()
        torch.cuda.current_stream().synchronize()
        found.append((time.perf_counter() - begun) * 1e3)
    return found


def _step_under_traffic(*, in_peer: bool) -> Figures:
    import threading

    torch = _torch()
    step = _decode_step(torch)
    _step_times(torch, step, 50)
    alone = _step_times(torch, step, 500)
    again = _step_times(torch, step, 500)
    if in_peer:
        peer = _peer(2 * GIB, traffic=True)
        try:
            loaded = _step_times(torch, step, 500)
        finally:
            peer.kill()
            peer.wait()
    else:
        stopping = threading.Event()
        mover = threading.Thread(target=_move, args=(2 * GIB, stopping.is_set))
        mover.start()
        try:
            loaded = _step_times(torch, step, 500)
        finally:
            stopping.set()
            mover.join()
    found: Figures = {}
    for name, values in (("alone", alone), ("again", again), ("loaded", loaded)):
        found |= {
            f"{name}_p50_ms": percentile(values, 0.5),
            f"{name}_p99_ms": percentile(values, 0.99),
        }
    found["p99_ratio"] = found["loaded_p99_ms"] / found["alone_p99_ms"]
    found["aa_p99_ratio"] = found["again_p99_ms"] / found["alone_p99_ms"]
    return found


def _move(size: int, stop: Callable[[], bool], rate_bytes_s: float = GIB) -> None:
    """Map and unmap ``rate_bytes_s`` in pieces of 64 MiB until told to stop."""
    piece = 64 << 20
    arena = _pool(handle_bytes=PAGE_BYTES).reserve(size, guard=True)
    index = 0
    begun = time.monotonic()
    moved = 0
    while not stop():
        offset = index % (size // piece) * piece
        arena.map([(offset, piece)])
        arena.unmap([(offset, piece)])
        index, moved = index + 1, moved + piece
        time.sleep(max(0.0, begun + moved / rate_bytes_s - time.monotonic()))
    arena.close()


def _peer(size: int, *, traffic: bool) -> subprocess.Popen[str]:
    """Another process that holds ``size`` bytes, or moves memory; returns when it is at it."""
    command = [sys.executable, __file__, "--peer", str(size), "traffic" if traffic else "hold"]
    peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert peer.stdout is not None
    if peer.stdout.readline().strip() != "up":
        raise LedgerError("the peer did not start")
    return peer


def _be_peer(size: int, what: str) -> None:
    if what == "hold":
        arena = _pool().reserve(size, guard=True)
        arena.map([(0, size)])
        print("up", flush=True)
        time.sleep(600)
    print("up", flush=True)
    until_s = time.monotonic() + 120
    _move(size, lambda: time.monotonic() > until_s)


# --- running


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("out/gpu_check.json"))
    parser.add_argument("--stage", choices=STAGES, help="only this one, again if the file has it already")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--inside", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        _be_peer(int(args.peer[0]), args.peer[1])
        return 0
    if args.inside:
        print(json.dumps(_inside(args.inside)))
        return 0
    if args.list:
        for name, stage in STAGES.items():
            print(f"{name:12} {(stage.__doc__ or '').splitlines()[0]}")
        return 0
    stages = _saved(args.json)
    for name in (
        [args.stage] if args.stage else [n for n in STAGES if stages.get(n, {}).get("state") != "done"]
    ):
        print(f"{name} ...", flush=True)
        stages[name] = _run(name)
        print(
            f"  {stages[name]['state']}: {stages[name].get('reason') or stages[name].get('figures')}",
            flush=True,
        )
        summary = {
            f"{n}.{key}": value for n, one in stages.items() for key, value in one.get("figures", {}).items()
        }
        summary |= {f"{n}.state": one["state"] for n, one in stages.items()}
        write(args.json, "gpu_check", summary, {"stages": stages})
    return 0


def _saved(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text())["details"]["stages"])
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"{path} is no result of this program; move it away") from None


def _run(name: str) -> dict[str, Any]:
    """One stage in its own process; what it printed last, or why there is nothing."""
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--inside", name],
            capture_output=True, text=True, timeout=STAGE_LIMIT_S, check=False,
        )  # fmt: skip
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        answer = {"state": "failed", "reason": f"not done after {STAGE_LIMIT_S:.0f} s"}
    except (ValueError, IndexError):
        answer = {"state": "failed", "reason": f"ended with {done.returncode}: {done.stderr[-400:]}"}
    return {**answer, "seconds": round(time.monotonic() - begun, 1)}


def _inside(name: str) -> dict[str, Any]:
    try:
        return {"state": "done", "figures": STAGES[name]()}
    except Skip as reason:
        return {"state": "skipped", "reason": str(reason)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the next stage runs
        return {
            "state": "failed",
            "reason": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc()[-2000:],
        }


if __name__ == "__main__":
    sys.exit(main())
