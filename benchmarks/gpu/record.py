"""What the calls of ``benchmarks/gpu_check.py`` have found so far: one folder that travels as it is, in few files.

``gpu_check.json``  every attempt of every call, and the figures of the best of each stage; replaced whole after every stage
``log-NN.txt``      all that the stages of call NN printed, in the order of their ends
``.lock``           held by the call that uses the folder
``running/``        the stage under way: its log and those of what it started, its figures so far, its answer.  What a call that was cut off left there is
                    taken over by the next one as a partial attempt.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu import figures
from benchmarks.gpu.common import SHARED_MEMORY
from benchmarks.gpu.stages import REPEATS
from benchmarks.lib.report import machine, write

FILE = "gpu_check.json"
LOG_BYTES = 2 << 20
"""Of one stage, most of it from the end: the reason is there.  Of each program that it starts, an eighth."""
TAIL_CHARS = 3000
MOST_TRIES = 2
"""Of a stage that failed or used up its time; one that was skipped, or ended together with its call, has not had its try."""
Attempt = dict[str, Any]
_MEMORY_NAME = "rose-gpu-check-"


@contextmanager
def only_user(folder: Path) -> Iterator[None]:
    """Hold ``folder`` (made where it is missing) against other calls.

    Raises:
        SystemExit: Another call has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise SystemExit(f"another call (pid {file.read(20).strip()}) uses {folder}") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


class Record:
    """One ``--out`` folder; with ``look`` it is only read.

    Raises:
        SystemExit: It holds a rehearsal where a measurement is wanted, or the other way round.
    """

    def __init__(self, folder: Path, *, rehearsal: bool, look: bool = False) -> None:
        folder = folder.resolve()
        self.folder, self.running = folder, folder / "running"
        self.attempts: list[Attempt] = []
        self.calls: list[dict[str, Any]] = []
        self.rehearsal = rehearsal
        self.memory = ""
        """Name of the shared-memory folder of the stage under way."""
        path = folder / FILE
        if path.exists():
            self._load(path, look)
        if look:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if self.running.exists():
            self._take_over()

    def begin(self, until_s: float, blocked: Mapping[str, str]) -> None:
        """A call begins; ``blocked`` says which stages cannot run here, and why."""
        self.calls.append(
            {"number": self._number(), "began": _now(), "until_s": until_s, "blocked": dict(blocked), "machine": machine()}
        )  # fmt: skip
        try:
            self.save()
        except OSError as error:
            print(f"not written down: {error}", flush=True)

    def start(self, stage: str) -> Path:
        """The folder of a stage that is about to run.

        Raises:
            OSError: It could not be made.
        """
        shutil.rmtree(self.running, ignore_errors=True)
        self.running.mkdir()
        self.memory = _MEMORY_NAME + uuid.uuid4().hex
        put(
            self.running / "stage.json",
            {"stage": stage, "began": _now("microseconds"), "memory": self.memory},
        )
        return self.running

    def end(self, attempt: Attempt) -> None:
        """Write down what became of it; its log goes behind those of this call."""
        self.attempts.append(
            {
                "began": self._told().get("began"),
                **attempt,
                "call": self.calls[-1]["number"] if self.calls else 0,
                "ended": _now(),
            }
        )
        # The figures before the log, and a disk that is full costs no later stage: the next one writes these down too.
        for write_down in (self.save, lambda: self._keep_log(attempt), self._clear):
            try:
                write_down()
            except OSError as error:
                print(f"  not written down: {error}", flush=True)

    def save(self) -> None:
        write(
            self.folder / FILE,
            "gpu_check",
            self.summary(),
            {"rehearsal": self.rehearsal, "calls": self.calls, "attempts": self.attempts},
        )

    # -- what there is

    def best(self) -> dict[str, Attempt]:
        """Of each stage that was tried: the last attempt that is done; else the last with figures; else the last."""
        found: dict[str, Attempt] = {}
        for one in self.attempts:
            before = found.get(one["stage"])
            if before is None or _rank(one) >= _rank(before):
                found[one["stage"]] = one
        return found

    def tries(self, stage: str) -> int:
        """How often it had its time and did not use it: neither skipped nor ended together with its call."""
        mine = [one for one in self.attempts if one["stage"] == stage]
        return sum(one["state"] != "skipped" and not one.get("interrupted") for one in mine)

    def is_left(self, stage: str) -> bool:
        """Is it worth a run: not done, and tried in vain less than ``MOST_TRIES`` times?"""
        best = self.best().get(stage)
        return best is None or (best["state"] != "done" and self.tries(stage) < MOST_TRIES)

    def summary(self) -> dict[str, Any]:
        """Everything flat, ``stage.figure``; the repeats of the table also put together, as ``table.figure``."""
        best = self.best()
        flat = {
            f"{n}.{key}": value for n, one in best.items() for key, value in one.get("figures", {}).items()
        }
        flat |= {f"{n}.state": one["state"] for n, one in best.items()}
        repeats = {n: best[n] for n in REPEATS if best.get(n, {}).get("state") == "done"}
        kinds = {n: _traffic(one) for n, one in repeats.items()}
        if len(set(kinds.values())) > 1:
            told = ", ".join(
                f"{n}: {workload} at {rate}/s{', production eager' if eager else ''}"
                for n, (workload, rate, eager) in kinds.items()
            )
            return flat | {"table.not_pooled": f"the repeats differ in workload, rate or graphs: {told}"}
        table = figures.table_1([one["figures"] for one in repeats.values()])
        return flat | {f"table.{key}": value for key, value in table.items()}

    def beginning(self) -> str:
        """What a call has before it begins."""
        done = sum(one["state"] == "done" for one in self.best().values())
        if not self.calls and not self.attempts:
            return "an empty folder: begins at the beginning"
        return f"{done} stages done in {len(self.calls)} earlier calls"

    # -- files

    def _load(self, path: Path, look: bool) -> None:
        try:
            details = json.loads(path.read_text())["details"]
            attempts, calls, rehearsal = details["attempts"], details["calls"], details["rehearsal"]
            if not (
                isinstance(rehearsal, bool)
                and isinstance(attempts, list)
                and isinstance(calls, list)
                and all(_is_attempt(one) for one in attempts)
                and all(isinstance(one["number"], int) for one in calls)
            ):
                raise ValueError("not what is written here")
        except (ValueError, KeyError, TypeError):
            if look:
                print(f"{path} is damaged: a call sets it aside", flush=True)
                return
            aside = _aside(path)
            print(f"{path} is damaged: set aside as {aside.name}", flush=True)
            return
        self.attempts, self.calls = attempts, calls
        if rehearsal != self.rehearsal:
            what = "a rehearsal" if rehearsal else "measurements"
            raise SystemExit(f"{path} holds {what}; take another --out")

    def _take_over(self) -> None:
        """A call was cut off in the middle of a stage."""
        told = self._told()
        began = told.get("began")
        if began is not None and began in [one.get("began") for one in self.attempts]:
            self._clear()  # copied back: it is written down already
            return
        attempt = read_answer(self.running)
        if attempt is None:
            attempt = {**cut_off(self.running, "the call was cut off"), "interrupted": True}
        self.end({"stage": str(told.get("stage", "unknown")), **attempt})

    def _clear(self) -> None:
        name = str(self._told().get("memory"))
        if re.fullmatch(_MEMORY_NAME + "[0-9a-f]{32}", name):
            shutil.rmtree(SHARED_MEMORY / name, ignore_errors=True)
        shutil.rmtree(self.running)

    def _told(self) -> dict[str, Any]:
        """What ``start`` said of the stage under way; nothing where that is gone."""
        told = _read(self.running / "stage.json")
        return told if isinstance(told, dict) else {}

    def _keep_log(self, attempt: Attempt) -> None:
        texts = [_shortened(read_log(self.running), LOG_BYTES)]
        for path in sorted((self.running / "logs").rglob("*.log")):
            texts += [f"\n--- {path.name}\n".encode(), _shortened(path.read_bytes(), LOG_BYTES // 8)]
        number = self.calls[-1]["number"] if self.calls else 0
        with (self.folder / f"log-{number:02}.txt").open("ab") as file:
            file.write(
                f"\n=== {attempt['stage']}: {attempt['state']} after {attempt.get('seconds')} s\n".encode()
            )
            file.writelines(texts)

    def _number(self) -> int:
        """One more than any call here has: files of two folders can be put into one."""
        logs = [int(path.stem[4:]) for path in self.folder.glob("log-[0-9][0-9].txt")]
        return 1 + max([*logs, *(call["number"] for call in self.calls), 0])


def cut_off(running: Path, reason: str) -> Attempt:
    """A stage that ended without what was asked: its figures so far, and the end of what it said."""
    found = _read(running / "partial.json")
    tail = read_log(running)[-TAIL_CHARS:].decode(errors="replace")
    return {"state": "partial" if found else "failed", "figures": found or {}, "reason": reason, "tail": tail}


def read_answer(running: Path) -> Attempt | None:
    """What the stage has answered, an answer that it failed with what it had until then; None when it has not."""
    answer = _read(running / "answer.json")
    if answer is None or answer["state"] != "failed":
        return answer
    return {**answer, **cut_off(running, answer["reason"])}


def read_log(running: Path) -> bytes:
    try:
        return (running / "log.txt").read_bytes()
    except OSError:
        return b""


def _shortened(text: bytes, limit: int) -> bytes:
    """At most about ``limit`` bytes of it: a quarter from its beginning, the rest from its end."""
    if len(text) <= limit:
        return text
    left_out = f"\n... {len(text) - limit} bytes left out ...\n".encode()
    return text[: limit // 4] + left_out + text[-(limit * 3 // 4) :]


def put(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees all of it or none."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(value, default=str))
    os.replace(temporary, path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _aside(path: Path) -> Path:
    """Move ``path`` away, over nothing."""
    names = (path.with_name(path.name + end) for end in (".bad", *(f".bad-{n}" for n in range(2, 1000))))
    aside = next(name for name in names if not name.exists())
    os.replace(path, aside)
    return aside


def _is_attempt(one: Any) -> bool:
    return (
        isinstance(one, dict)
        and isinstance(one.get("stage"), str)
        and isinstance(one.get("state"), str)
        and isinstance(one.get("figures", {}), dict)
        and isinstance(one.get("details") or {}, dict)
    )


def _traffic(attempt: Attempt) -> tuple[Any, Any, Any]:
    """Workload and rate of a repeat, and whether its production was eager."""
    details = attempt.get("details") or {}
    return details.get("workload"), details.get("rate_hz"), details.get("production_eager")


def _rank(attempt: Attempt) -> int:
    return 2 if attempt["state"] == "done" else 1 if attempt.get("figures") else 0


def _now(timespec: str = "seconds") -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec=timespec)
