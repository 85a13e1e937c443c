#!/usr/bin/env python
"""What only a GPU can say, in stages of at most eight minutes, each written down as soon as it is done.

    python benchmarks/gpu_check.py --list
    python benchmarks/gpu_check.py --dry-run                          # what would run here, and why not
    python benchmarks/gpu_check.py --stage vmm --json out/gpu_check.json
    python benchmarks/gpu_check.py --json out/gpu_check.json          # every stage that the file does not have yet

A stage ends as ``done`` (with figures), ``skipped`` (what it needs is not there), ``partial`` (cut off; the figures so far) or
``failed`` (with the error); the next stage runs all the same.  Each runs in a process of its own, so that a fault in one is no fault
of the next.  Nothing changes a setting of the device.  ``--allow-mps`` starts an MPS daemon of our own for the stage ``mps``;
``--trace FILE`` is an Azure LLM inference trace for the stages with two engines, ``--rate`` what production gets of it.  vLLM is found on the Python path
(``docs/gpu.md`` says how where there is no network).  None of this has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from benchmarks.gpu import figures  # noqa: E402
from benchmarks.gpu.common import ALLOW_MPS, PARTIAL, RATE, TRACE, Figures, Skip, be_peer, missing  # noqa: E402
from benchmarks.report import write  # noqa: E402

STAGE_LIMIT_S = 480.0
REPEATS = ("table_1", "table_2", "table_3")
Found = tuple[Figures, dict[str, Any]]


@dataclass(frozen=True)
class Stage:
    """``call`` is a function by module and name: a machine without a GPU imports none of them."""

    module: str
    name: str
    what: str
    needs: tuple[str, ...]
    argument: int | None = None

    def call(self) -> Found:
        import importlib

        function: Callable[..., Any] = getattr(
            importlib.import_module(f"benchmarks.gpu.{self.module}"), self.name
        )
        found = function() if self.argument is None else function(self.argument)
        return found if isinstance(found, tuple) else (found, {})


_DEVICE = ("gpu", "bindings", "torch")
_ENGINE = (*_DEVICE, "vllm")
STAGES: dict[str, Stage] = {
    "machine": Stage("device", "machine", "driver, device, and the rung of the compute ladder", _DEVICE),
    "contract": Stage("device", "contract", "the tests marked gpu", _DEVICE),
    "vmm": Stage("device", "vmm", "map and unmap by size of handle: single, ranged, retained", _DEVICE),
    "fallback": Stage("device", "fallback", "what the shared page behind unmapped addresses costs", _DEVICE),
    "step_self": Stage("device", "step_self", "P99 of a step while this process moves 1 GiB/s", _DEVICE),
    "step_peer": Stage("device", "step_peer", "P99 of a step while another process moves 1 GiB/s", _DEVICE),
    "fence": Stage("device", "fence", "P99 of a step with an event behind each, and how long a fence waits", _DEVICE),
    "handover": Stage("device", "handover", "memory from a peer to us, per GiB", _DEVICE),
    "kill": Stage("device", "kill", "until the memory of a killed process is free", _DEVICE),
    "green": Stage("device", "green", "steps on part of the SMs; P99 beside a peer on all and on half of them", _DEVICE),
    "mps": Stage("device", "mps", "a low-priority client, and its end by terminate_client with kernels in flight", (*_DEVICE, "mps")),
    "kernels": Stage("engines", "kernels", "the kernels a dense bf16 model needs", _ENGINE),
    "engine": Stage("engines", "eager", "one engine of the 8B shape, eager", _ENGINE),
    "engine_v1": Stage("engines", "old_runner", "the same with the first model runner", _ENGINE),
    "engine_graphs": Stage("engines", "graphs", "the same with CUDA graphs", _ENGINE),
    "lend": Stage("engines", "lend", "an engine lends a quarter of its cache and takes it back, eager", _ENGINE),
    "lend_graphs": Stage("engines", "lend_graphs", "the same with CUDA graphs", _ENGINE),
    "activation": Stage("coserve", "activation", "a deployed engine: memory, on to a first token, off", _ENGINE),
    **{
        name: Stage("coserve", "repeat", f"two engines on the busiest 20 s, repeat {number}", _ENGINE, number)
        for number, name in enumerate(REPEATS, start=1)
    },
}  # fmt: skip


def main() -> int:
    args = _arguments()
    os.environ[ALLOW_MPS] = "1" if args.allow_mps else "0"
    if args.trace:
        os.environ[TRACE] = str(args.trace.resolve())
    if args.rate is not None:
        os.environ[RATE] = str(args.rate)
    if args.peer:
        be_peer(args.peer[0], int(args.peer[1]))
        return 0
    if args.inside:
        print(json.dumps(_inside(args.inside)))
        return 0
    if args.list:
        for name, stage in STAGES.items():
            print(f"{name:14} {stage.what}")
        return 0
    no_gpu = missing(("gpu",))
    if args.dry_run:
        for name, stage in STAGES.items():
            print(f"{name:14} {missing(stage.needs) or 'would run'}")
    if args.dry_run or no_gpu is not None:
        print(f"Nothing was measured and nothing was written: {no_gpu or 'this was a dry run'}.")
        return 0 if args.dry_run else 3
    stages = _saved(args.json)
    for name in [args.stage] if args.stage else _left(stages):
        print(f"{name} ...", flush=True)
        stages[name] = _run(name)
        print(
            f"  {stages[name]['state']}: {stages[name].get('reason') or stages[name].get('figures')}",
            flush=True,
        )
        write(args.json, "gpu_check", summary(stages), {"stages": stages})
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, default=Path("out/gpu_check.json"), help="what has been measured so far"
    )
    parser.add_argument("--stage", choices=STAGES, help="only this one, again if the file has it already")
    parser.add_argument("--list", action="store_true", help="the stages, one line each")
    parser.add_argument("--dry-run", action="store_true", help="say of each stage whether it would run here")
    parser.add_argument(
        "--allow-mps",
        action="store_true",
        help="also the stage that puts two processes into one fault domain",
    )
    parser.add_argument(
        "--trace", type=Path, help="Azure LLM inference trace (CSV); without it bursts are generated"
    )
    parser.add_argument(
        "--rate", type=float, help="production requests per second of the stages with two engines"
    )
    parser.add_argument("--inside", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _left(stages: dict[str, Any]) -> list[str]:
    """Stages without a whole result, in their order."""
    return [name for name in STAGES if stages.get(name, {}).get("state") != "done"]


def summary(stages: dict[str, Any]) -> dict[str, Any]:
    """Everything flat, ``stage.figure``; the repeats of the table also put together, as ``table.figure``."""
    flat = {f"{n}.{key}": value for n, one in stages.items() for key, value in one.get("figures", {}).items()}
    flat |= {f"{n}.state": one["state"] for n, one in stages.items()}
    repeats = [stages[n]["figures"] for n in REPEATS if stages.get(n, {}).get("state") == "done"]
    return flat | {f"table.{key}": value for key, value in figures.table_1(repeats).items()}


def _saved(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text())["details"]["stages"])
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"{path} is no result of this program; move it away") from None


def _run(name: str, limit_s: float = STAGE_LIMIT_S) -> dict[str, Any]:
    """One stage in its own process; what it printed last, or what it had when it was cut off, or why there is nothing."""
    reason = missing(STAGES[name].needs)
    if reason is not None:
        return {"state": "skipped", "reason": reason}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        partial = Path(folder) / "partial.json"
        answer = _ask(name, {**os.environ, PARTIAL: str(partial)}, limit_s)
        if answer["state"] == "failed" and partial.exists():
            answer |= {"state": "partial", "figures": json.loads(partial.read_text())}
    return {**answer, "seconds": round(time.monotonic() - begun, 1)}


def _ask(name: str, env: dict[str, str], limit_s: float) -> dict[str, Any]:
    flags = ["--allow-mps"] if env.get(ALLOW_MPS) == "1" else []
    process = subprocess.Popen(
        [sys.executable, __file__, "--inside", name, *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit_s)
        return dict(json.loads(out.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return {"state": "failed", "reason": f"not done after {limit_s:.0f} s"}
    except (ValueError, IndexError):
        return {"state": "failed", "reason": f"ended with {process.returncode}: {err[-400:]}"}
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Also what a stage has started: engines, peers.  Its session is its own."""
    for process_group in (process.pid,):
        try:
            os.killpg(process_group, 9)
        except ProcessLookupError:
            pass
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _inside(name: str) -> dict[str, Any]:
    try:
        found, details = STAGES[name].call()
        return {"state": "done", "figures": found, "details": details}
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
