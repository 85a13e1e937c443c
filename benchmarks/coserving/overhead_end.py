"""End to end: vLLM's own server against the same server with ROSE in role ``serving`` and nothing harvested.

Processes of the same program differ by several per cent, by what the kernel and the allocator gave them, so what is counted is servers:
:data:`SERVERS` of each kind.  Two of each are up at once and serve the same load in turn, one after the other in each round; those whose turn it is not are
stopped (SIGSTOP), or their workers would spin on the core.  Then they end and the next four start.  A turn is one request with as many
prompts as the step has room for, all decoded together: what is timed is the whole way through API server, engine core, worker and back, on one core, with
a real model.  A node agent's file says ``observe``.

- ``end_ratio``: time of a turn with ROSE over without, one number for each pair of servers that were up together (the median of its
  rounds); the median of the pairs, its interval over pairs.  ``end_aa_ratio``: the same of pairs of stock servers, ``end_bb_ratio``: of pairs with ROSE, half as many.
- ``end_cpu_ratio``: the same of the CPU time of all processes of the server: what a core that is not full would not show.
- ``end_bar``: what ``end_ratio`` may be: :data:`MOST`, or what equal servers show here (the far ends of the intervals of A/A and B/B), whichever is more.
  ``end_limit_met`` is null where fewer than :data:`SERVERS` of each kind have run, or the bar is above :data:`LOUD`: such a run says nothing of a cost.
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
SERVERS = 8
"""Of each kind, for a verdict."""
MOST, LOUD = 1.01, 1.05


def end_to_end(
    num_requests: int, num_servers: int, num_rounds: int, kind: Kind
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flat summary and details of ``num_servers`` (an even number) of each kind, ``num_rounds`` turns of each server."""
    from tests.tiny_model import write_tiny_model

    args = (
        f"--max-num-seqs={num_requests}",
        "--max-num-batched-tokens=8192",
        f"--kv-cache-memory-bytes={256 << 20}",
        "--no-enable-prefix-caching",
    )
    seconds: dict[str, list[float]] = {}
    cpu_s: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="rose-overhead-", dir="/dev/shm") as text:
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
        for first in range(0, num_servers, 2):
            names = [f"{what}_{first + one}" for one in range(2) for what in ("stock", "rose")]
            took = _four(names, folder, model, (*args, *more), kind, num_requests, num_rounds)
            seconds |= {name: [one for one, _ in found] for name, found in took.items()}
            cpu_s |= {name: [one for _, one in found] for name, found in took.items()}
    return summary(seconds, cpu_s), {"seconds": seconds, "cpu_s": cpu_s}


def _four(
    names: list[str],
    folder: Path,
    model: Path,
    args: tuple[str, ...],
    kind: Kind,
    num_requests: int,
    num_rounds: int,
) -> dict[str, list[tuple[float, float]]]:
    """Start these servers, time their turns (:func:`_turn`), end them."""
    from tests.engine_launcher import EngineServer

    took: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        servers: dict[str, Any] = {}
        for name in names:
            ours = name.startswith("rose")
            env = {"ROSE_DIR": str(folder / name)} if ours else {}
            for one in _directories(folder / name, kind) if ours else []:
                _agents_file(one, stack)
            role = "serving" if ours else None
            servers[name] = stack.enter_context(EngineServer(model, role=role, env=env, args=args))
            # One that is stopped would not hear that it shall end.
            stack.callback(_signal, servers[name], signal.SIGCONT)
            print(f"{name} answers after {servers[name].start_s:.0f} s", flush=True)
            _turn(servers[name], num_requests, kind)
            _signal(servers[name], signal.SIGSTOP)
        for number in range(num_rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                took[name].append(_turn(servers[name], num_requests, kind))
                _signal(servers[name], signal.SIGSTOP)
        for name in names:
            for one in _directories(folder / name, kind) if name.startswith("rose") else []:
                _require_in_force(one)
    return took


def _directories(path: Path, kind: Kind) -> list[Path]:
    """Of a server's engine cores."""
    from rose.coserve.node_dir import core_dir

    return [path] if kind.num_cores == 1 else [core_dir(path, core) for core in range(kind.num_cores)]


def _agents_file(path: Path, stack: contextlib.ExitStack) -> Path:
    """What a node agent in mode ``observe`` says, for as long as the benchmark runs."""
    from rose.coserve.node_dir import NodeDir
    from rose.coserve.records import Mode, NodeState
    from tests.plugin.stand_in import Beating

    writer = stack.enter_context(Beating(NodeDir(path).node_writer()))
    writer.write(NodeState(mode=Mode.OBSERVE, has_serving=1, slo_ttft_ns=10**9, slo_tpot_ns=10**8))
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


def summary(seconds: dict[str, list[float]], cpu_s: dict[str, list[float]]) -> dict[str, Any]:
    """Of each server's turns, in order: ``stock_0``, ``rose_0``, ``stock_1``, ...; 0 and 1 were up together, 2 and 3, and so on."""
    from rose.evaluation.statistics import median_ratio

    num_servers = len(seconds) // 2
    ours = [(f"rose_{one}", f"stock_{one}") for one in range(num_servers)]
    stock = [(f"stock_{one + 1}", f"stock_{one}") for one in range(0, num_servers, 2)]
    both = [(f"rose_{one + 1}", f"rose_{one}") for one in range(0, num_servers, 2)]
    found: dict[str, Any] = {
        "end_servers": num_servers,
        "end_rounds": len(seconds["stock_0"]),
        "end_token_ms": float(np.median(seconds["stock_0"])) / OUTPUT_TOKENS * 1e3,
    }
    for name, pairs, of in (
        ("end_ratio", ours, seconds),
        ("end_aa_ratio", stock, seconds),
        ("end_bb_ratio", both, seconds),
        ("end_cpu_ratio", ours, cpu_s),
        ("end_cpu_aa_ratio", stock, cpu_s),
    ):
        each = np.array([np.median(np.array(of[above]) / np.array(of[below])) for above, below in pairs])
        value, low, high = median_ratio(each, np.ones(len(each)))
        found |= {name: value, f"{name}_low": low, f"{name}_high": high}
    ends = [found[f"{name}_ratio_{end}"] for name in ("end_aa", "end_bb") for end in ("low", "high")]
    found["end_bar"] = max(MOST, *(max(end, 1.0 / end) for end in ends))
    says = num_servers >= SERVERS and found["end_bar"] <= LOUD
    # Of the interval's end: beside louder servers it is no easier to meet.
    found["end_limit_met"] = found["end_ratio_high"] <= found["end_bar"] if says else None
    return found
