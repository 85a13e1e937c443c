#!/usr/bin/env python
"""What can happen to one device, done to real engines at seeded random instants, and what it cost production.

One production engine, one node agent with its sentinel, one rollout engine (tiny models, vLLM on CPU), streaming clients on
production, a burst that wants most of its memory back in every case, and rollouts all the time (``tests/pair``).  Cases:

- ``alone`` (mode off) and ``lent`` (nothing happens): what production's clients see without a fault.
- ``kill`` and ``stop`` (SIGSTOP, SIGCONT after 0.2 to 6 s) of ``agent``, ``engine`` (the rollout engine's API server), ``core``,
  ``worker`` and ``sentinel``; ``kill keepers``: agent, guard and sentinel at once, who would each have ended the engine.
- ``freeze v1`` and ``freeze v2``: agent and engine together by their cgroup, as ``docker pause`` does it, for 0.2 to 6 s.
- ``unlink``, ``truncate``, ``garbage``, ``chmod`` of each shared file, ``rmdir`` (the whole directory), ``full`` (its tmpfs has no
  byte left, and one of its files is deleted).

Each case: memory is lent and in use; the fault; up to half a second later the burst, and an operator's ``off`` where the agent can
hear it; what was stopped goes on; *back* is the time until the kernel says that production has all of its memory; then ``on``, and
the case ends when a rollout engine holds memory again, with nobody's help.  Production writes off ROSE where a stranger
has written into its own files (docs/operating.md): there the program restarts it, as a fleet does some day, and says so.

Limits, for every case: no error and no wrong token in any of production's answers; never more memory than the device has; all
memory back; recovered.  And ``late``: back no later than promised, which is what the agent itself gives a cut that is not obeyed, and the
kill (``worst_reclaim_s`` of its status, ``rose/policy/deadlines.py``), and the silence after which a dead or stopped agent counts as one
(3 s).
Of what is stopped, and does not give back meanwhile, from when it goes on.  Production's longest silence is compared with the longest of
``alone``, by the most and by the median of a case.

    python benchmarks/faults.py --json FILE             # 20 of each kill, stop and freeze, 3 of each file fault: hours
    python benchmarks/faults.py --json FILE --resume --minutes 10
    python benchmarks/faults.py --json FILE --only "kill sentinel" --only "unlink"
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from benchmarks.lib.report import Report, machine, write  # noqa: E402
from rose.coserve.records import Phase  # noqa: E402
from rose.evaluation.statistics import percentile  # noqa: E402
from rose.proc_share import cpu_cgroup  # noqa: E402
from rose.proc_tree import ProcessHandle  # noqa: E402
from rose.shared_memory import SharedMemorySweep  # noqa: E402
from tests.pair.load import Answer  # noqa: E402
from tests.pair.memory import TOTAL_PAGES  # noqa: E402
from tests.pair.pair import Pair  # noqa: E402

NAME = "faults"
SEED = 15
KILLS = 20
FILE_FAULTS = 3
PROCESSES = ("sentinel", "core", "agent", "engine", "worker")
"""In an order in which a new sentinel comes with a new engine soon after one was killed: by itself it takes half a minute."""
KEEPERS = "keepers"
FILES = (
    "node.state",
    *("serving.lease", "serving.board", "serving.chunks", "serving.rank0"),
    *("rollout.lease", "rollout.chunks", "rollout.rank0"),
)
PRODUCTIONS = FILES[1:5]
HOLD_S = (0.2, 6.0)
NEXT_S = 0.5
SILENCE_S = 3.0
"""After which production and the policy count an agent as silent."""
SENTINEL_S = 40.0
GIVE_UP_S = 120.0
"""A case that is not over by then has not recovered."""
MARGIN_S = 0.3
"""What this program's own looks, and a heartbeat of production, may add to a time that was promised."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """``what`` is done to ``whom``, the ``number``-th time."""

    what: str
    whom: str
    number: int

    @property
    def kind(self) -> str:
        return f"{self.what} {self.whom}".strip()

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"


@dataclass(kw_only=True)
class Found:
    """What a case showed.  Times in seconds; None: it did not come to that."""

    name: str
    kind: str
    seed: int
    requests: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: int = 0
    silence_s: float = 0.0
    held_pages: int = 0
    worst_pages: float = 0.0
    back_s: float | None = None
    promised_s: float = 0.0
    recovered_s: float | None = None
    production_restarted: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def group(self) -> str:
        """Its kind; of faults of files, what was done to any of them."""
        what, _, whom = self.kind.partition(" ")
        return what if whom in FILES else self.kind.replace(" ", ".")

    @property
    def late(self) -> bool:
        return self.back_s is not None and self.back_s > self.promised_s + MARGIN_S

    @property
    def failures(self) -> list[str]:
        """Which limits it broke."""
        broken = {
            "errors": bool(self.errors),
            "wrong tokens": self.wrong > 0,
            "more than the device": self.worst_pages > TOTAL_PAGES,
            "not back": self.back_s is None,
            "not recovered": self.recovered_s is None,
            "late": self.late,
        }
        return [name for name, is_broken in broken.items() if is_broken]


def plan(kills: int = KILLS, file_faults: int = FILE_FAULTS) -> list[Case]:
    """Every case, all kinds in turn, so that a part of it says something about each."""
    often = [("alone", ""), ("lent", "")]
    often += [pair for who in PROCESSES for pair in (("kill", who), ("stop", who))]
    often += [("freeze", "v1"), ("freeze", "v2"), ("kill", KEEPERS)]
    files = [(what, file) for what in ("unlink", "chmod", "truncate", "garbage") for file in FILES]
    files += [("rmdir", ""), ("full", "")]
    rounds: list[Case] = []
    for number in range(max(kills, file_faults)):
        rounds += [Case(what=what, whom=whom, number=number) for what, whom in often if number < kills]
        rounds += [Case(what=what, whom=whom, number=number) for what, whom in files if number < file_faults]
    return rounds


def promised_s(case: Case, status: dict[str, Any]) -> float:
    """Until all memory is back, by the agent's own reckoning when the fault is made."""
    silence_s = SILENCE_S if _agent_is_deaf(case) else 0.0
    return silence_s + float(status["lending"]["worst_reclaim_s"])


def _agent_is_deaf(case: Case) -> bool:
    return case.whom in ("agent", KEEPERS) or case.what == "freeze"


class Run:
    """Cases, one after the other, on one pair of engines."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair, self.seed = pair, seed

    async def case(self, case: Case) -> Found:
        pair, rng = self.pair, random.Random(f"{self.seed} {case.name}")
        found = Found(name=case.name, kind=case.kind, seed=self.seed)
        await self._settle(case)
        held = pair.rollout()
        found.held_pages = held.reserved_pages if held is not None else 0
        while (status := await asyncio.to_thread(pair.status)) is None:
            await pair.until(lambda: pair.status() is not None, "the agent answers")
        found.promised_s = promised_s(case, status)
        first, wrong = len(pair.load.answers), pair.load.wrong
        pair.memory.worst_pages = 0.0
        await asyncio.sleep(rng.uniform(0.0, NEXT_S))
        try:
            await self._do(case, rng, found)
        except TimeoutError as error:
            found.notes.append(str(error))
        answers: Sequence[Answer] = pair.load.answers[first:]
        try:
            await pair.until(lambda: all(one.ended_s for one in answers), "all are answered", GIVE_UP_S)
        except TimeoutError:
            found.errors.append("requests without an answer")
        found.requests = len(answers)
        found.errors += [answer.error for answer in answers if answer.error]
        found.wrong = pair.load.wrong - wrong
        found.silence_s = max((answer.silence_s for answer in answers), default=0.0)
        found.worst_pages = pair.memory.worst_pages
        if found.worst_pages > TOTAL_PAGES:
            found.notes.append(pair.memory.worst_look)
        return found

    async def _settle(self, case: Case) -> None:
        """All is well, and memory is lent (``alone``: none is)."""
        pair = self.pair
        mode = "off" if case.what == "alone" else "on"
        await pair.until(lambda: pair.set_mode(mode), "the agent listens")
        if mode == "off":
            await pair.until(pair.all_back, "production has all its memory")
            return
        await pair.lend()
        if case.whom in ("sentinel", KEEPERS) or case.what in ("stop", "freeze"):
            await pair.until(lambda: pair.pid_of("sentinel") is not None, "there is a sentinel", SENTINEL_S)

    async def _do(self, case: Case, rng: random.Random, found: Found) -> None:
        """The fault, the burst, the order, and the time until all memory is back.

        Raises:
            TimeoutError: It is not back, or the fault could not be made.
        """
        pair = self.pair
        hold_s = rng.uniform(*HOLD_S) if case.what in ("stop", "freeze") else 0.0
        burst_s = rng.uniform(0.0, NEXT_S)
        agent_hears = not _agent_is_deaf(case)
        before = await asyncio.to_thread(pair.engine_pids)
        began_s = time.monotonic()
        undo = await asyncio.to_thread(self._fault, case, rng)
        tasks: list[asyncio.Task[Any]] = []
        try:
            await asyncio.sleep(burst_s)
            tasks.append(asyncio.create_task(pair.load.burst()))
            asked_s = time.monotonic() if agent_hears else began_s
            if agent_hears:  # an operator switches off, whatever has happened
                tasks.append(asyncio.create_task(self._order_off()))
            back = asyncio.create_task(self._when_back())
            tasks.append(back)
            if hold_s:
                await asyncio.sleep(max(0.0, began_s + hold_s - time.monotonic()))
                undone_s = time.monotonic()
                undo()
                noticed = back.done() or (case.what == "stop" and hold_s > found.promised_s + MARGIN_S)
                if not agent_hears and not noticed:
                    # Frozen, or too short to be missed: from now on it is owed, and somebody has to ask for all of it.
                    asked_s = undone_s
                    tasks.append(asyncio.create_task(self._order_off()))
            if case.what == "full":
                await asyncio.sleep(rng.uniform(0.5, 3.0))
                (pair.volume / "filler").unlink()
            late_look = asyncio.create_task(self._tell_of_the_late(found, asked_s, before))
            tasks.append(late_look)
            found.back_s = max(0.0, await back - asked_s)
            late_look.cancel()
        finally:
            undo()
            (pair.volume / "filler").unlink(missing_ok=True)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        found.notes += [str(end) for end in ends if isinstance(end, Exception)]
        if case.what == "alone":
            found.recovered_s = 0.0
        else:
            await self._recover(case, found)

    async def _order_off(self) -> None:
        """``rose node off``, as often as it takes."""
        await self.pair.until(self.pair.off, "off is heard", GIVE_UP_S)

    async def _tell_of_the_late(self, found: Found, asked_s: float, pids: Sequence[int]) -> None:
        """What the engine's processes are at when memory should have been back: who does not run, and in which class."""
        await asyncio.sleep(max(0.0, asked_s + found.promised_s + MARGIN_S - time.monotonic()))
        found.notes += await asyncio.to_thread(lambda: [*map(_look_at, pids)])

    async def _when_back(self) -> float:
        await self.pair.until(self.pair.all_back, "all memory is back", GIVE_UP_S)
        return time.monotonic()

    async def _recover(self, case: Case, found: Found) -> None:
        pair = self.pair
        began_s = time.monotonic()
        lease = pair.lease()
        if case.what in ("truncate", "garbage") and case.whom in PRODUCTIONS:
            off = lease is None or lease.phase == Phase.OFF
            found.notes.append("production wrote ROSE off" if off else "production went on")
            if off:
                found.production_restarted = True
                await pair.restart_production()
        elif lease is not None and lease.phase == Phase.OFF:
            found.notes.append("production wrote ROSE off")
        await (
            pair.load.pause()
        )  # a new engine of the idle class starts in minutes beside clients that never rest
        await pair.until(lambda: pair.set_mode("on"), "the agent listens again", GIVE_UP_S)
        await pair.until(pair.is_lent, "memory is lent again", GIVE_UP_S)
        pair.load.go_on()
        status = pair.status() or {}
        if audit := status.get("errors", {}).get("audit"):
            found.errors.append(f"audit: {audit}")
        found.recovered_s = time.monotonic() - began_s

    # -- the faults

    def _fault(self, case: Case, rng: random.Random) -> Callable[[], object]:
        """Do it; what undoes it, as far as that is not left to those it was done to.

        Raises:
            TimeoutError: There is nothing here that it could be done to.
        """
        try:
            if case.what in ("kill", "stop"):
                return self._signal(case)
            if case.what == "freeze":
                group = self.pair.freezers["v1" if case.whom == "v1" else "v2"]
                group.freeze()
                return group.thaw
            self._spoil(case, rng)
        except (OSError, KeyError) as error:
            raise TimeoutError(f"{case.name}: {error!r}") from error
        return lambda: None

    def _signal(self, case: Case) -> Callable[[], object]:
        whom = ("agent", "guard", "sentinel") if case.whom == KEEPERS else (case.whom,)
        handles: list[ProcessHandle] = []
        for who in whom:
            pid = self.pair.pid_of(who)
            if pid is None:
                raise TimeoutError(f"there is no {who}")
            handles.append(ProcessHandle(pid))  # its number may be another's when it goes on
        # Stopped first, so that none of several sees another's end.
        for number in (signal.SIGSTOP, signal.SIGKILL) if case.what == "kill" else (signal.SIGSTOP,):
            for handle in handles:
                handle.send(number)
        return lambda: [handle.send(signal.SIGCONT) for handle in handles]

    def _spoil(self, case: Case, rng: random.Random) -> None:
        path = self.pair.dir / case.whom
        match case.what:
            case "unlink":
                path.unlink()
            case "chmod":
                path.chmod(rng.choice((0o000, 0o644, 0o666)))
            case "truncate":
                os.truncate(path, rng.choice((0, 1, 64, 1000, 1087)))
            case "garbage":
                with path.open("r+b") as file:
                    file.seek(rng.randrange(path.stat().st_size - 64))
                    file.write(rng.randbytes(64))
            case "rmdir":
                shutil.rmtree(self.pair.dir, ignore_errors=True)  # its writers make files meanwhile
            case "full":
                self._fill()
                (self.pair.dir / rng.choice(FILES)).unlink()
            case _:
                pass

    def _fill(self) -> None:
        with contextlib.suppress(OSError), (self.pair.volume / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)


def _look_at(pid: int) -> str:
    """One process: what it is, its state, and its share of the cores; of one that is nearly gone the kernel names the root group."""
    try:
        process = psutil.Process(pid)
        group, is_root = cpu_cgroup(Path("/sys/fs/cgroup"), Path(f"/proc/{pid}/cgroup"))
        idle = "-" if group is None or is_root else (group / "cpu.idle").read_text().strip()
        return (
            f"late: {process.name()} {pid} is {process.status()}, class {os.sched_getscheduler(pid)}, cpu.idle {idle}, "
            f"{sum(process.cpu_times()[:2]):.1f} s of CPU"
        )
    except (OSError, psutil.Error) as error:
        return f"late: {pid}: {error!r}"


def summarise(done: Sequence[Found]) -> dict[str, Any]:
    """Counts over all cases, and for each group of them the longest silence and the longest way back."""
    alone = [one.silence_s for one in done if one.kind == "alone"]
    faults = [one for one in done if one.kind not in ("alone", "lent")]
    summary: dict[str, Any] = {
        "cases": len(done),
        "requests": sum(one.requests for one in done),
        "production_errors": sum(len(one.errors) for one in done),
        "wrong_answers": sum(one.wrong for one in done),
        "worst_pages": max((one.worst_pages for one in done), default=0.0),
        "total_pages": TOTAL_PAGES,
        "not_back": sum(one.back_s is None for one in done),
        "not_recovered": sum(one.recovered_s is None for one in done),
        "late": sum(one.late for one in done),
        "cases_that_broke_a_limit": sum(bool(one.failures) for one in done),
        "silence_s_alone_median": statistics.median(alone) if alone else None,
        "silence_s_alone_max": max(alone, default=None),
        "silence_s_faults_median": statistics.median(one.silence_s for one in faults) if faults else None,
        "silence_s_faults_p95": percentile([one.silence_s for one in faults], 0.95) if faults else None,
        "silence_s_faults_max": max((one.silence_s for one in faults), default=None),
    }
    for group in dict.fromkeys(one.group for one in done):
        those = [one for one in done if one.group == group]
        backs = [one.back_s for one in those if one.back_s is not None]
        summary[f"{group}.cases"] = len(those)
        summary[f"{group}.broke_a_limit"] = sum(bool(one.failures) for one in those)
        summary[f"{group}.silence_s_max"] = max(one.silence_s for one in those)
        summary[f"{group}.back_s_max"] = max(backs, default=None)
    return summary


def load(path: Path) -> list[Found]:
    """The cases that an earlier run of this program has written to ``path``."""
    if not path.exists():
        return []
    names = set(Found.__dataclass_fields__)
    cases = json.loads(path.read_text())["details"]["cases"]
    return [Found(**{name: value for name, value in one.items() if name in names}) for one in cases]


def save(path: Path, done: Sequence[Found], commits: Sequence[str], args: argparse.Namespace) -> None:
    cases = [{**asdict(one), "failures": one.failures} for one in done]
    details = {
        "seeds": [args.seed],
        "kills": args.kills,
        "file_faults": args.file_faults,
        "commits": list(commits),
        "cases": cases,
    }
    write(path, NAME, summarise(done), details)


def _commit() -> str:
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return f"{machine()['commit']}{'-dirty' if changed else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("out/faults.json"), help="result, after each case")
    parser.add_argument("--resume", action="store_true", help="leave out the cases that the result file has")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case later than that")
    parser.add_argument("--kills", type=int, default=KILLS, help="of each kill, stop and freeze")
    parser.add_argument("--file-faults", type=int, default=FILE_FAULTS, help="of each fault of a file")
    parser.add_argument("--only", action="append", help='kinds that begin so, for example "kill core"')
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    try:
        return asyncio.run(_main(args))
    except KeyboardInterrupt:
        print(f"stopped; --resume goes on behind the cases in {args.json}", file=sys.stderr)
        return 130


async def _main(args: argparse.Namespace) -> int:
    until_s = time.monotonic() + args.minutes * 60.0
    report, commit = Report(NAME), _commit()
    done = load(args.json) if args.resume else []
    commits = json.loads(args.json.read_text())["details"]["commits"] if done else []
    commits = list(dict.fromkeys([*commits, commit]))
    had = {one.name for one in done}
    cases = [case for case in plan(args.kills, args.file_faults) if case.name not in had]
    if args.only:
        cases = [case for case in cases if case.kind.startswith(tuple(args.only))]
    total = len(cases)
    with SharedMemorySweep():
        while (
            cases and time.monotonic() <= until_s
        ):  # a case that nobody recovered from needs new engines behind it
            async with Pair(args.json.parent / "faults-logs", seed=args.seed) as pair:
                run, well = Run(pair, args.seed), True
                while cases and well and time.monotonic() <= until_s:
                    found = await run.case(cases.pop(0))
                    done.append(found)
                    save(args.json, done, commits, args)
                    _say(found, total - len(cases), total)
                    well = found.recovered_s is not None
    report.table(("figure", "value"), summarise(done).items(), title=NAME)
    return 1 if any(one.failures for one in done) else 0


def _say(found: Found, number: int, total: int) -> None:
    back = "never" if found.back_s is None else f"{found.back_s:.2f} s"
    verdict = ", ".join(found.failures) or "ok"
    for note in found.notes:
        print(f"     {note}")
    print(
        f"{number:4} of {total}  {found.name:28} back {back} (promised {found.promised_s:.2f})  "
        f"longest silence {found.silence_s:.2f} s  {found.requests} requests  {verdict}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
