"""Run the benchmarks, keep what they found, and write docs/evidence.md from it.   (`make bench`, `bench-quick`, `bench-full`)

    python benchmarks/run.py                  # all that exist, each in its own process, with a limit
    python benchmarks/run.py --quick          # those with a short form, under five minutes together
    python benchmarks/run.py --full           # also the long ones; a run that was stopped goes on
    python benchmarks/run.py --only routing
    python benchmarks/run.py --render         # docs/evidence.md, figures/, the README's figures again, from committed result
                                              # files, and docs/results.md, which git ignores; runs nothing

Writes benchmarks/results/suite/<machine>/<date>.json: the machine, its versions and the commit, and each benchmark's summary and seeds
(those that its details name; else they are constants of the program at that commit).
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.figures import figures  # noqa: E402
from benchmarks.lib import evidence  # noqa: E402
from benchmarks.lib.report import machine  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures"
PARTIAL = ROOT / "out" / "bench"

MINUTES = {
    "coserve": 15,
    "train": 17,
    "weights": 8,
    "weights_live": 15,
    "weights_terms": 1,
    "weights_link": 8,
    "fanout": 4,
    "gateway": 8,
    "sim": 8,
    "routing": 4,
    "activation": 5,
    "crowd": 8,
    "endpoint_memory": 10,
    "standby": 3,
}
"""Budget of each benchmark in a full `make bench`; twice that and it is stopped."""
WHOLE = {
    "coserve": ("--segments", "6"),
    "train": (
        *("--only", "asynchronous_dedicated,asynchronous_harvested,asynchronous_both"),
        *("--steps", "12", "--seeds", "1"),
    ),
    "sim_paper": ("--seconds", "6600"),  # days of one core in all: each run of this goes on with it
}
"""Options with which a benchmark fills its budget here, where by itself it is a short look, or takes longer."""
LONG = {
    "policies": 60,
    "sim_paper": 60,
    "sim_maps": 30,
    "demo": 25,
    "learning": 150,
    "equivalence": 240,
    "production_restart": 12,
    "cycles": 25,
    "weights_kills": 30,
}
"""Only in `make bench-full`.  It goes on where it was stopped: with the first benchmark that has not ended, and this one, where
it can, with what it had found."""
CACHES = {
    "policies": ("--cache", PARTIAL / "policies.jsonl"),
    "demo": ("--resume", "--out", PARTIAL / "demo-seeds"),
}
"""For those that do not go on from their result itself: options, the last of them where they keep it."""
QUICK_S = {"gateway": 30, "routing": 10, "sim": 70, "train": 130}
"""Those of ``--quick``, and about how long each takes on two quiet cores.  The others need minutes to say anything: run them
by name."""
QUICK_TOTAL_S = 290.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", action="append", metavar="NAME")
    parser.add_argument("--render", action="store_true")
    args = parser.parse_args()
    console = Console(stderr=True)
    if args.render:
        DOCUMENT.write_text(render(committed_results()))
        for old in FIGURES.glob("*.svg"):
            old.unlink()
        FIGURES.mkdir(exist_ok=True)
        for name, svg in figures(committed_results()).items():
            (FIGURES / name).write_text(svg)
        runs = evidence.all_runs(committed_results())
        for path, made in (
            (evidence.DOCUMENT, evidence.tables(runs)),
            (evidence.README, evidence.headlines(runs)),
        ):
            path.write_text(evidence.render(path.read_text(), made))
        console.print("wrote docs/results.md, docs/evidence.md, docs/figures/ and the README's figures")
        return 0
    names = QUICK_S if args.quick else {**MINUTES, **(LONG if args.full else {})}
    unknown = [name for name in args.only or [] if name not in {**MINUTES, **LONG}]
    if unknown:
        parser.error(f"no benchmark '{unknown[0]}'; known: {', '.join({**MINUTES, **LONG})}")
    chosen = [name for name in {**MINUTES, **LONG} if name in (args.only or names)]
    if args.quick:  # the shortest first: one that takes longer than it should leaves the others their time
        chosen.sort(key=lambda name: QUICK_S.get(name, math.inf))
    failed: list[str] = []
    done = Done(PARTIAL / "full.json", machine()["commit"]) if args.full else None
    path: Path | None = None
    began = time.monotonic()
    for index, name in enumerate(chosen):
        program = program_of(name)
        if args.quick and "--quick" not in program.read_text():
            console.print(f"[dim]{name}: has no quick form, left out[/]")
            continue
        if done is not None and name in done.names:
            console.print(f"[dim]{name}: ended before this run was stopped, left out[/]")
            continue
        limit_s = {**MINUTES, **LONG}[name] * 60.0 * 2
        if args.quick and not args.only:
            limit_s = max(1.0, QUICK_TOTAL_S - (time.monotonic() - began))
        console.print(f"[bold]{index + 1} of {len(chosen)}: {name}[/], at most {limit_s / 60:.1f} min")
        result = run_one(program, limit_s, quick=args.quick, resume=args.full)
        if result is None:
            failed.append(name)
            console.print(f"[red]{name}: failed, see above; its figures are left out[/]")
        else:
            path = write_result({name: result}, args.quick)  # at once: a later one may be stopped
            if done is not None:
                done.add(name)
    minutes = (time.monotonic() - began) / 60
    if done is not None and not failed:
        done.forget()
    if path is not None:
        console.print(
            f"wrote {path.relative_to(ROOT)} in {minutes:.1f} min; commit it, then: python benchmarks/run.py --render"
        )
    if failed:
        console.print(f"[red]failed: {', '.join(failed)}[/]")
    return 1 if failed else 0


def program_of(name: str) -> Path:
    """The program of a benchmark: a command beside this one, or in the folder of its area."""
    found = ROOT / "benchmarks" / f"{name}.py"
    return found if found.exists() else next((ROOT / "benchmarks").glob(f"*/{name}.py"))


class Done:
    """Names of the benchmarks that have ended in a `--full` run of one commit, kept in a file until all have.

    A run of another commit begins anew: what the long ones had found is removed.
    """

    def __init__(self, path: Path, commit: str | None) -> None:
        self._path, self._commit = path, commit
        kept = json.loads(path.read_text()) if path.exists() else {}
        self.names: list[str] = kept.get("names", [])
        if not kept or kept["commit"] != commit:
            self.names = []
            for name in LONG:
                (PARTIAL / f"{name}.json").unlink(missing_ok=True)
            for *_, cache in CACHES.values():
                shutil.rmtree(cache) if cache.is_dir() else cache.unlink(missing_ok=True)
            self._keep()

    def add(self, name: str) -> None:
        self.names.append(name)
        self._keep()

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)

    def _keep(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps({"commit": self._commit, "names": self.names}))
        os.replace(temporary, self._path)


def run_one(program: Path, limit_s: float, *, quick: bool, resume: bool) -> dict[str, Any] | None:
    """Run one benchmark in a process group of its own; its result, or None when it failed or took too long."""
    PARTIAL.mkdir(parents=True, exist_ok=True)
    path = PARTIAL / f"{program.stem}.json"
    resume = resume and program.stem in LONG
    if not resume:
        path.unlink(missing_ok=True)
    command = [
        sys.executable,
        str(program),
        "--json",
        str(path),
        *(["--quick"] if quick else WHOLE.get(program.stem, ())),
    ]
    if resume and program.stem in CACHES:
        command += map(str, CACHES[program.stem])
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(timeout=limit_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if isinstance(stop, KeyboardInterrupt):
            raise
        code = -1
    if code != 0 or not path.exists():
        return None
    result = json.loads(path.read_text())
    return {
        "summary": result["summary"],
        "seconds": round(time.monotonic() - began, 1),
        "seeds": seeds_of(result.get("details")),
        "commit": machine()["commit"],  # the file's own is that of whatever was run last
    }


def seeds_of(details: Any) -> list[int]:
    """Every number that ``details`` calls a seed, wherever it stands."""
    found: set[int] = set()
    if isinstance(details, dict):
        for name, value in details.items():
            if name == "seed" and type(value) is int:
                found.add(value)
            elif name == "seeds" and isinstance(value, list):  # a number is how many there were
                found.update(one for one in value if type(one) is int)
            else:
                found.update(seeds_of(value))
    elif isinstance(details, list):
        for value in details:
            found.update(seeds_of(value))
    return sorted(found)


def write_result(found: dict[str, Any], quick: bool) -> Path:
    """Into today's file of this machine: what was run now replaces what it had of the same benchmarks."""
    here = machine()
    slug = re.sub(r"[^a-z0-9]+", "-", f"{here['cpu']}-{here['cores']}".lower()).strip("-")
    day = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.json"
    path = RESULTS / "suite" / f"{slug}{'-quick' if quick else ''}" / day
    old = json.loads(path.read_text())["benchmarks"] if path.exists() else {}
    document = {
        "schema": 1,
        "machine": here,
        "quick": quick,
        "benchmarks": {**old, **found},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(temporary, path)
    return path


def committed_results() -> list[Path]:
    """Result files that git knows; outside a checkout, all."""
    listed = subprocess.run(
        ["git", "ls-files", "benchmarks/results"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    names = listed or [str(path.relative_to(ROOT)) for path in RESULTS.rglob("*.json")]
    return [ROOT / name for name in sorted(names) if name.endswith(".json") and (ROOT / name).exists()]


def sections(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(benchmark, flat summary) of a result file, whichever of the two forms it has."""
    document = json.loads(path.read_text())
    if "benchmarks" in document:
        return [(name, result["summary"]) for name, result in document["benchmarks"].items()]
    return (
        [(document.get("benchmark", path.parent.name), document["summary"])] if "summary" in document else []
    )


def render(paths: list[Path]) -> str:
    """docs/results.md: every figure of every result file, and nothing else.  Not kept: git has what it is made from."""
    parts = [
        "# Results\n",
        "Written by `python benchmarks/run.py --render` from the files in `benchmarks/results/`; do not edit.",
        "Figures under `sim` are simulated, those whose names begin with `derived` are computed from measured ones, all "
        "others are measured. No GPU was used for any of them.\n",
    ]
    for path in paths:
        document = json.loads(path.read_text())
        where = document.get("machine") or document.get("details", {}).get("where", {})
        parts.append(f"## {path.relative_to(RESULTS)}\n")
        told = [f"{name}: {where[name]}" for name in ("cpu", "cores", "date", "commit") if where.get(name)]
        if told:
            parts.append(", ".join(told) + "\n")
        for name, summary in sections(path):
            parts.append(f"### {name}\n\n| figure | value |\n|---|---|")
            parts.extend(
                f"| {key} | {show(value)} |"
                for key, value in summary.items()
                if not isinstance(value, dict | list)
            )
            parts.append("")
    return "\n".join(parts)


def show(value: Any) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).replace("|", "/").replace("\n", " ")


SOURCE = re.compile(r"`([\w./-]+\.json):([^`]+)`")
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def wrong_rows(markdown: str, results: Path = RESULTS) -> list[str]:
    """Rows of the sections whose names begin with "Evidence" whose number is not what the named figure says.

    A row is ``| claim | value | `FILE.json:benchmark.key` ... |``: one source per number of the value, in order.  A number is
    right when the figure, times 100 before a % sign, rounds to it.
    """
    wrong: list[str] = []
    parts = re.findall(r"^## Evidence\b[^\n]*\n(.*?)(?=^## |\Z)", markdown, re.M | re.S)
    for row in "\n".join(parts).splitlines():
        cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
        if not row.startswith("|") or len(cells) < 3 or set(cells[0]) <= set("-: "):
            continue
        sources = SOURCE.findall(cells[2])
        numbers = list(NUMBER.finditer(cells[1]))
        if not numbers and not sources:
            continue  # the header
        good = len(numbers) == len(sources)
        for number, (file, key) in zip(numbers, sources, strict=False):
            figure = _figure(results / file, key)
            text = number.group().replace(",", "")
            digits = len(text.partition(".")[2])
            scale = 100.0 if cells[1][number.end() :].lstrip().startswith("%") else 1.0
            good = (
                good and figure is not None and abs(figure * scale - float(text)) <= 0.5000001 * 10.0**-digits
            )
        if not good:
            wrong.append(row)
    return wrong


def _figure(path: Path, key: str) -> float | None:
    if not path.exists():
        return None
    for name, summary in sections(path):
        for own in (key, key.removeprefix(f"{name}.")):
            value = summary.get(own)
            if isinstance(value, int | float):
                return float(value)
    return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
