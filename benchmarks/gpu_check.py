#!/usr/bin/env python
"""What only a GPU can say, in the minutes that there are: stages, most telling first, each written down as soon as it has ended.

    python benchmarks/gpu_check.py --list
    python benchmarks/gpu_check.py --dry-run                          # what would run here, and why not
    python benchmarks/gpu_check.py --until 570 --out out/gpu_check    # all that fit into 570 s; once more: all that are left
    python benchmarks/gpu_check.py --stage vmm --out out/gpu_check    # this one, also if the folder has it
    python benchmarks/gpu_check.py --rehearse --until 900 --out out/gpu_rehearsal    # without a GPU (docs/gpu.md)

A stage is not started when the seconds that it needs are not left.  It runs below a guard and ends as ``done`` (with figures), ``skipped`` (what
it needs is not there), ``partial`` (cut off; the figures so far) or ``failed`` (with the reason and the end of its log); the next one
runs all the same.  The folder keeps the attempts of all calls and all that they printed: take it along, and the next call goes on.
Nothing changes a setting of the device, and nothing asks a network.  ``--allow-mps`` starts an MPS daemon of our own for the stage ``mps``;
``--trace FILE`` is an Azure LLM inference trace for the stages with two engines, ``--rate`` what production gets of it.  vLLM is found on the Python path
(``docs/gpu.md`` says how where there is no network).  None of this has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu import ready, stages
from benchmarks.gpu.common import (
    ALLOW_MPS,
    GRAPHS,
    MEMORY,
    PARTIAL,
    RATE,
    REHEARSE,
    ROOT,
    TRACE,
    Skip,
    be_peer,
    missing,
)
from benchmarks.gpu.record import FILE, Record, only_user, put
from benchmarks.gpu.rehearsal import StandIn
from benchmarks.gpu.runner import Runner

UNTIL_S = 570.0
"""Where a command is ended after ten minutes."""
CLOSE_S = 5.0
"""Of the time, to end a stage and write it down."""


def main() -> int:
    began_s = time.monotonic()
    args = _arguments()
    os.environ[ALLOW_MPS] = "1" if args.allow_mps else "0"
    os.environ[REHEARSE] = "1" if args.rehearse else "0"
    if args.trace:
        os.environ[TRACE] = str(args.trace.resolve())
    if args.rate is not None:
        os.environ[RATE] = str(args.rate)
    if args.peer:
        be_peer(args.peer[0], int(args.peer[1]))
        return 0
    table = stages.table(args.rehearse)
    if args.inside:
        return _inside(table[args.inside], args.answer)
    blocked = {
        name: reason for name in table if (reason := _why_not(name, table[name], args.rehearse)) is not None
    }
    if args.list or args.dry_run:
        chosen = {name: stage for name, stage in table.items() if not args.stage or name in args.stage}
        return _dry_run(args, chosen) if args.dry_run else _list(chosen)
    no_gpu = None if args.rehearse else missing(("gpu",))
    if no_gpu is not None:
        print(f"Nothing was measured and nothing was written: {no_gpu}.")
        return 3
    with only_user(args.out):
        return _measure(args, table, blocked, began_s)


def _measure(
    args: argparse.Namespace, table: dict[str, stages.Stage], blocked: dict[str, str], began_s: float
) -> int:
    """One call on its folder; its exit status."""
    record = Record(args.out, rehearsal=args.rehearse)
    print(record.beginning(), flush=True)
    record.begin(args.until, blocked)
    runner = Runner()
    with tempfile.TemporaryDirectory() as folder:
        stand_in = StandIn(Path(folder)) if args.rehearse and missing(("driver",)) is None else None
        tried = _run_all(args, table, blocked, record, runner, stand_in, began_s)
    _what_next(args, table, blocked, record)
    if runner.stopping:
        return 130
    best = record.best()
    return int(any(best[name]["state"] not in (table[name].ends, "skipped") for name in tried))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--until", type=float, default=UNTIL_S, metavar="SECONDS", help="be done by then, counted from now")
    add(
        "--out",
        type=Path,
        default=Path("out/gpu_check"),
        help="folder of all results so far, and of new ones",
    )
    add(
        "--stage",
        action="append",
        metavar="NAME",
        help="only this one, again if it is there; may be repeated",
    )
    add("--list", action="store_true", help="the stages, and the seconds that each needs")
    add("--dry-run", action="store_true", help="say of each stage whether it would run here")
    add("--rehearse", action="store_true", help="on the CPU and a stand-in for the driver; measures nothing")
    add(
        "--allow-mps",
        action="store_true",
        help="also the stage that puts two processes into one fault domain",
    )
    add("--trace", type=Path, help="Azure LLM inference trace (CSV); without it bursts are generated")
    add("--rate", type=float, help="production requests per second of the stages with two engines")
    add("--inside", help=argparse.SUPPRESS)
    add("--answer", type=Path, help=argparse.SUPPRESS)
    add("--peer", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    table = stages.table(args.rehearse)
    unknown = [name for name in args.stage or [] if name not in table]
    if unknown:
        parser.error(f"--stage: no stage '{unknown[0]}'; --list names them")
    for name, value in (("--until", args.until), ("--rate", args.rate)):
        if value is not None and not 0 < value < math.inf:
            parser.error(f"{name}: {value:g} is not a number over 0")
    if args.trace is not None and not args.trace.is_file():
        parser.error(f"--trace: no file {args.trace}")
    return args


def _list(table: dict[str, stages.Stage]) -> int:
    for name, stage in table.items():
        print(f"{name:14} {stage.needs_s:4.0f} s  {stage.what}")
    return 0


def _dry_run(args: argparse.Namespace, table: dict[str, stages.Stage]) -> int:
    """Say of each stage what would become of it in a call with these arguments; 1: one lacks something that is no flag."""
    lacks = ready.lacking(table)
    for name, stage in table.items():
        if args.rehearse and stage.rehearse_s is None:
            lacks[name] = ["only a real device can be asked"]
    record = Record(args.out, rehearsal=args.rehearse, look=True)
    for name, told in _outlook(table, record, lacks, args.until - CLOSE_S, args.rehearse).items():
        print(f"{name:14} {_needs_s(table[name], args.rehearse):4.0f} s  {told}")
    flag = missing(("mps",))
    return int(
        any(
            set(lacks[name]) - {flag} and not (args.rehearse and stage.rehearse_s is None)
            for name, stage in table.items()
        )
    )


def _outlook(
    table: dict[str, stages.Stage], record: Record, lacks: dict[str, list[str]], left_s: float, rehearse: bool
) -> dict[str, str]:
    """Of each stage: what it lacks, that it is done, or whether a call of ``left_s`` gets to it."""
    told = {name: f"{one['state']}: not tried again" for name, one in record.best().items() if name in table}
    told |= {name: "done" for name, one in record.best().items() if name in table and one["state"] == "done"}
    for name in _order(table, record):
        needs_s = _needs_s(table[name], rehearse)
        if lacks.get(name):
            continue
        fits = needs_s <= left_s
        told[name] = (
            "would run" if fits else f"not in this call: it needs {needs_s:.0f} s, {left_s:.0f} s are left"
        )
        left_s -= needs_s if fits else 0.0
    told |= {
        name: "; ".join(why)
        for name, why in lacks.items()
        if why and told.get(name) != "done" and name in table
    }
    return {name: told[name] for name in table}


def _why_not(name: str, stage: stages.Stage, rehearse: bool) -> str | None:
    if rehearse and stage.rehearse_s is None:
        return "only a real device can be asked"
    return missing(stage.needs) or ready.no_package(name, stage)


def _run_all(
    args: argparse.Namespace,
    table: dict[str, stages.Stage],
    blocked: dict[str, str],
    record: Record,
    runner: Runner,
    stand_in: StandIn | None,
    began_s: float,
) -> list[str]:
    """Every stage that is left, can run here and fits; their names."""
    tried: list[str] = []
    for name in args.stage or _order(table, record):
        if name in blocked:
            print(f"{name}: skipped: {blocked[name]}", flush=True)
            continue
        left_s = args.until - CLOSE_S - (time.monotonic() - began_s)
        needs_s = _needs_s(table[name], args.rehearse)
        if needs_s > left_s:
            print(f"{name}: not now: it needs {needs_s:.0f} s, {max(0.0, left_s):.0f} s are left", flush=True)
            continue
        print(f"{name} ...", flush=True)
        try:
            running = record.start(name)
        except OSError as error:
            print(f"{name}: could not be started: {error}", flush=True)
            continue
        flags = ["--rehearse"] if args.rehearse else []
        flags += ["--allow-mps"] if args.allow_mps else []
        command = [
            sys.executable,
            __file__,
            "--inside",
            name,
            "--answer",
            str(running / "answer.json"),
            *flags,
        ]
        env = _stage_env(record, running)
        env |= stand_in.env() if stand_in is not None and "driver" in table[name].needs else {}
        found = runner.run(command, running, env, min(_limit_s(table[name], args.rehearse), left_s))
        broken = stand_in.broken_rules() if stand_in is not None else []
        if broken:
            found |= {
                "state": "failed",
                "reason": f"rules of the driver were broken: {broken[0]}",
                "broken": broken[:50],
            }
        tried.append(name)
        print(
            f"  {found['state']} after {found['seconds']} s: {found.get('reason') or found['figures']}",
            flush=True,
        )
        record.end({"stage": name, **found})
        if runner.stopping:
            break
    return tried


def _stage_env(record: Record, running: Path) -> dict[str, str]:
    has_graphs = record.best().get("engine_graphs", {}).get("state") == "done"
    return {
        **os.environ,
        PARTIAL: str(running / "partial.json"),
        MEMORY: record.memory,
        GRAPHS: "1" if has_graphs else "0",
        "PYTHONUNBUFFERED": "1",
    }


def _order(table: dict[str, stages.Stage], record: Record) -> list[str]:
    """Stages that are left: those that were never tried, then those that were tried in vain, then those that this machine lacked something for."""
    states = {name: one["state"] for name, one in record.best().items()}
    left = [name for name in table if record.is_left(name)]
    first, behind = stages.FIRST
    return sorted(
        left,
        key=lambda name: (
            name in states,
            states.get(name) == "skipped",
            name != first or states.get(behind) != "done",
        ),
    )


def _limit_s(stage: stages.Stage, rehearse: bool) -> float:
    """A rehearsal may share its cores: twice a real stage's limit; those that are there to go wrong keep theirs."""
    return 2 * stage.limit_s if rehearse and stage not in stages.BAD.values() else stage.limit_s


def _needs_s(stage: stages.Stage, rehearse: bool) -> float:
    return stage.rehearse_s if rehearse and stage.rehearse_s is not None else stage.needs_s


def _what_next(
    args: argparse.Namespace, table: dict[str, stages.Stage], blocked: dict[str, str], record: Record
) -> None:
    best = record.best()
    for state in ("done", "partial", "failed", "skipped"):
        names = [name for name in table if best.get(name, {}).get("state") == state]
        if names:
            print(f"{state}: {', '.join(names)}")
    left = [name for name in _order(table, record) if name not in blocked]
    print(f"written: {args.out}/{FILE} and log-*.txt")
    if not left:
        print("Nothing is left to run here.")
        return
    print("left: " + ", ".join(f"{name} ({_needs_s(table[name], args.rehearse):.0f} s)" for name in left))
    print(f"Next: {_next(args)}")


def _next(args: argparse.Namespace) -> str:
    """The same call again, for a shell."""
    words = ["python3", "benchmarks/gpu_check.py"]
    words += [flag for flag, on in (("--rehearse", args.rehearse), ("--allow-mps", args.allow_mps)) if on]
    words += [] if args.trace is None else ["--trace", str(args.trace)]
    words += [] if args.rate is None else ["--rate", f"{args.rate:g}"]
    return shlex.join([*words, "--until", f"{args.until:g}", "--out", str(args.out)])


def _inside(stage: stages.Stage, answer: Path) -> int:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = _answer(stage)
    put(answer, found)
    print(f"answered: {found['state']}", flush=True)
    return 0


def _answer(stage: stages.Stage) -> dict[str, Any]:
    try:
        found, details = stage.call()
        return {"state": "done", "figures": found, "details": details}
    except Skip as reason:
        return {"state": "skipped", "reason": str(reason), "figures": {}}
    except Exception as error:  # noqa: BLE001 - whatever it is, the next stage runs
        traceback.print_exc()
        return {
            "state": "failed",
            "reason": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc()[-4000:],
            "figures": {},
        }


if __name__ == "__main__":
    sys.exit(main())
