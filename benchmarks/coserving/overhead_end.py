"""End to end: vLLM's own server against the same server with ROSE in role ``serving`` and nothing harvested.

Two servers of each kind, because two processes of the same program differ by what the kernel and the allocator gave them.  All four serve
the same load in turn, one after the other in each round; those whose turn it is not are stopped (SIGSTOP), or their workers would spin on
the core.  A turn is one request with as many prompts as the step has room for, all decoded together: what is timed is the whole way
through API server, engine core, worker and back, on one core, with a real model.  A node agent's file says ``observe``.

- ``end_ratio``: time of a turn with ROSE over without, both servers of a kind together, paired by round; ``end_aa_ratio``: the two stock
  servers against each other, ``end_bb_ratio``: the two with ROSE.
- ``end_cpu_ratio``: the same of the CPU time of all processes of the server: what a core that is not full would not show.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.engine_kinds import Kind

PROMPT_TOKENS, OUTPUT_TOKENS = 20, 40
PAUSE_S = 0.05
STOCK, ROSE = ("stock_1", "stock_2"), ("rose_1", "rose_2")


def end_to_end(num_requests: int, num_rounds: int, kind: Kind) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flat summary and details."""
    from tests.engine_launcher import EngineServer
    from tests.tiny_model import write_tiny_model

    args = (
        f"--max-num-seqs={num_requests}",
        "--max-num-batched-tokens=8192",
        f"--kv-cache-memory-bytes={256 << 20}",
        "--no-enable-prefix-caching",
    )
    seconds: dict[str, list[float]] = {name: [] for name in (*STOCK, *ROSE)}
    cpu_s: dict[str, list[float]] = {name: [] for name in seconds}
    with (
        tempfile.TemporaryDirectory(prefix="rose-overhead-", dir="/dev/shm") as text,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(text)
        write_tiny_model(
            folder / "plain",
            num_layers=4,
            hidden_size=256,
            head_size=64,
            intermediate_size=768,
            vocab_size=2000,
        )
        model, more = kind.prepare(folder / "plain", folder)
        args = (*args, *more)
        servers: dict[str, Any] = {}
        for name in seconds:
            env = {"ROSE_DIR": str(folder / name)} if name in ROSE else {}
            for one in _directories(folder / name, kind) if name in ROSE else []:
                _agents_file(one, stack)
            role = "serving" if name in ROSE else None
            servers[name] = stack.enter_context(EngineServer(model, role=role, env=env, args=args))
            # One that is stopped would not hear that it shall end.
            stack.callback(_signal, servers[name], signal.SIGCONT)
            print(f"{name} answers after {servers[name].start_s:.0f} s", flush=True)
            _turn(servers[name], num_requests, kind)
            _signal(servers[name], signal.SIGSTOP)
        names = list(servers)
        for number in range(num_rounds):
            for name in names[number % 4 :] + names[: number % 4]:
                took_s, used_s = _turn(servers[name], num_requests, kind)
                _signal(servers[name], signal.SIGSTOP)
                seconds[name].append(took_s)
                cpu_s[name].append(used_s)
        for name in ROSE:
            for one in _directories(folder / name, kind):
                _require_in_force(one)
    return _summary(seconds, cpu_s), {"seconds": seconds, "cpu_s": cpu_s}


def _directories(path: Path, kind: Kind) -> list[Path]:
    """Of a server's engine cores."""
    from rose.coserve.node_dir import core_dir

    return [path] if kind.num_cores == 1 else [core_dir(path, core) for core in range(kind.num_cores)]


def _agents_file(path: Path, stack: contextlib.ExitStack) -> Path:
    """What a node agent in mode ``observe`` says, for as long as the benchmark runs."""
    from rose.coserve.node_dir import NodeDir
    from rose.coserve.records import Mode, NodeState

    writer = stack.enter_context(NodeDir(path).node_writer())
    writer.write(
        NodeState(
            mode=Mode.OBSERVE,
            has_serving=1,
            slo_ttft_ns=10**9,
            slo_tpot_ns=10**8,
            heartbeat_ns=time.monotonic_ns() + 10**13,
        )
    )
    return path


def _require_in_force(path: Path) -> None:
    from rose.coserve.node_dir import NodeDir
    from rose.coserve.records import Phase

    lease, board = NodeDir(path).serving_lease().read(), NodeDir(path).serving_board().read()
    if lease is None or lease.phase != Phase.READY or board is None or not board.step:
        raise SystemExit(f"ROSE was not in force in {path.name}: {lease}")


def _turn(server: Any, num_requests: int, kind: Kind) -> tuple[float, float]:
    """Seconds and CPU seconds of one turn of a server that is stopped, or has just started."""
    _signal(server, signal.SIGCONT)
    _complete(server, 2, 2, kind)  # its pages and its code are back in the caches
    time.sleep(PAUSE_S)
    before_s, begun_s = _cpu_s(server), time.perf_counter()
    _complete(server, num_requests, OUTPUT_TOKENS, kind)
    return time.perf_counter() - begun_s, _cpu_s(server) - before_s


def _complete(server: Any, num_prompts: int, num_tokens: int, kind: Kind) -> None:
    prompts = [[10 + (number + k) % 1000 for k in range(PROMPT_TOKENS)] for number in range(num_prompts)]
    answer = server.post(
        "/v1/completions",
        {
            "model": kind.model_of(1, str(server.model_dir)),
            "prompt": prompts,
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        },
    )
    answer.raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == num_prompts * num_tokens


def _signal(server: Any, number: int) -> None:
    for process in server.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _cpu_s(server: Any) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in server.processes())


def _summary(seconds: dict[str, list[float]], cpu_s: dict[str, list[float]]) -> dict[str, Any]:
    from rose.evaluation.statistics import median_ratio

    wall = {name: np.array(each) for name, each in seconds.items()}
    cpu = {name: np.array(each) for name, each in cpu_s.items()}
    summary: dict[str, Any] = {
        "end_rounds": len(seconds[STOCK[0]]),
        "end_token_ms": float(np.median(wall[STOCK[0]])) / OUTPUT_TOKENS * 1e3,
    }
    pairs = {
        "end_ratio": (wall[ROSE[0]] + wall[ROSE[1]], wall[STOCK[0]] + wall[STOCK[1]]),
        "end_aa_ratio": (wall[STOCK[1]], wall[STOCK[0]]),
        "end_bb_ratio": (wall[ROSE[1]], wall[ROSE[0]]),
        "end_cpu_ratio": (cpu[ROSE[0]] + cpu[ROSE[1]], cpu[STOCK[0]] + cpu[STOCK[1]]),
        "end_cpu_aa_ratio": (cpu[STOCK[1]], cpu[STOCK[0]]),
    }
    for name, (above, below) in pairs.items():
        value, low, high = median_ratio(above, below)
        summary |= {name: value, f"{name}_low": low, f"{name}_high": high}
    summary["end_limit_met"] = summary["end_ratio_low"] <= 1.0 <= summary["end_ratio_high"]
    return summary
