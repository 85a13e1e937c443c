"""The decision log: every event a policy was fed and every action it answered, to be replayed exactly.

``PREFIX-<number>.rose`` files.  Each starts with the policy's whole state (``rose.decisions.freeze``) and goes
on with ``[event, actions]`` (``rose.decisions.event_format``); so each file replays by itself, and old ones can be
dropped.  A file is closed at ``max_bytes``, and the newest ``max_files`` are kept.

Shells that keep one: rose-scheduler beside its journal (``decisions-N.rose``: where each turn goes; ``provisioning-N.rose``: which
device works for which job); the node agent where its configuration says (``lending-NODE-N.rose``: what the device lends); and engines where
``ROSE_DECISIONS`` says (``vllm_plugin.protocol_log``: which chunks; ``vllm_plugin.loan_log``: what else decides on a loan).

No shell's memory (the scheduler's is ``rose.scheduler.journal``): nothing waits for this log, it is written when
the clock ticks, and a full disk, or a value that cannot be written, ends it with one line in the log.  It holds no token and no log-prob, only how
many there were.

:func:`replay` feeds the events of a file to a fresh copy of the policy and compares what it answers.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rose.decisions.event_format import FORMATS, Book, EventFormat
from rose.decisions.freeze import freeze, thaw
from rose.errors import LedgerError, PolicyError
from rose.frames import FRAME, MAX_RECORD_BYTES, frame
from rose.policy.lending import Lending

log = logging.getLogger("rose.decisions")

MAGIC = b"ROSEDEC3"
_FLUSH_BYTES = 256 * 2**10
_NAME = re.compile(r"(.+)-(\d+)")

_NO_RECORD = (OverflowError, TypeError, ValueError)
"""Of a number or a text that msgpack has not."""

_encode = msgspec.msgpack.Encoder().encode


class DecisionLog:
    """Args:
    directory: Where the files go; made if missing.
    prefix: Of their names; shells that share a directory have different ones.
    format_: Of the policy.
    book: The policy; frozen at the start of each file.
    max_bytes: Of a file; 0 records nothing.
    max_files: Kept, the current one included.
    """

    def __init__(
        self,
        directory: Path,
        prefix: str,
        format_: EventFormat,
        book: Book,
        *,
        max_bytes: int,
        max_files: int,
    ) -> None:
        self._directory = directory
        self._prefix = prefix
        self._format = format_
        self.book = book
        self._max_bytes = max_bytes
        self._max_files = max(1, max_files)
        self._file = -1
        self._buffer = bytearray()
        self._size = self._start_size = 0
        self.num_lost = 0
        """Events not recorded since the log could not be written."""

    def record(self, event: Any, actions: Sequence[Any]) -> None:
        """Remember one call of the policy's door.  Never raises, hardly ever writes."""
        if self._max_bytes == 0:
            return
        if self._file < 0:
            self.num_lost += 1
            return
        pack = self._format.pack
        try:
            self._append([pack(event), [pack(action) for action in actions]])
        except _NO_RECORD as error:
            self._write()  # what came before it is whole
            self._give_up(error)
        if len(self._buffer) >= _FLUSH_BYTES:
            self.flush()

    def roll(self) -> None:
        """Begin a new file with :attr:`book` as it is: at the start, when one is full, when settings change."""
        if self._max_bytes == 0:
            return
        self.close()
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            names = [_name(path) for path in self._directory.glob("*.rose")]
            numbers = sorted(number for prefix, number in names if prefix == self._prefix)
            for number in numbers[: max(0, len(numbers) - self._max_files + 1)]:
                self._path(number).unlink(missing_ok=True)
            path = self._path(numbers[-1] + 1 if numbers else 1)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._give_up(error)
            return
        self._size = 0
        self._buffer += MAGIC
        collects = gc.isenabled()
        gc.disable()  # it would look at all of the state again and again, while nobody's turn moves
        try:
            self._append({"policy": self._format.name, "book": freeze(self.book)})
        except _NO_RECORD as error:
            self._give_up(error)
        finally:
            if collects:
                gc.enable()
        self._start_size = len(self._buffer)
        self._write()

    def flush(self) -> None:
        """Write what is buffered; begin a new file when this one is full."""
        self._write()
        if self._file >= 0 and self._size - self._start_size >= self._max_bytes:
            self.roll()

    def _write(self) -> None:
        if self._file < 0 or not self._buffer:
            return
        data, self._buffer = memoryview(bytes(self._buffer)), bytearray()
        self._size += len(data)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        self._write()
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _append(self, record: Any) -> None:
        self._buffer += frame(_encode(record))

    def _give_up(self, error: Exception) -> None:
        log.error("the decision log ends here: %s", getattr(error, "strerror", None) or error)
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self._buffer.clear()

    def _path(self, number: int) -> Path:
        return self._directory / f"{self._prefix}-{number}.rose"


@dataclass(kw_only=True, slots=True)
class Replayed:
    """What a replay found.  ``difference`` is None when every action was the same; ``ends``: what a device's status would say at its end."""

    path: Path
    num_events: int = 0
    num_actions: Counter[str] = field(default_factory=lambda: Counter[str]())
    torn: bool = False
    difference: str | None = None
    ends: str = ""


def replay(
    path: Path,
    progress: Callable[[float], None] = lambda share: None,
    watch: Callable[[Any, Sequence[Any]], None] = lambda event, actions: None,
) -> Replayed:
    """Feed a log's events to the book it starts with, and compare.

    Args:
        progress: Told now and then which share of the file was read.
        watch: Told every event and its actions, once they were found the same.

    Raises:
        LedgerError: Not a decision log, or damaged before its tail.
    """
    found = Replayed(path=path)
    frames = _frames(path, found, progress)
    head = next(frames, None)
    format_ = FORMATS.get(head.get("policy", "")) if isinstance(head, dict) else None
    if head is None or format_ is None:
        raise LedgerError("does not begin with the state of a policy", field=path.name)
    book = thaw(head["book"])
    if not isinstance(book, format_.book):
        raise LedgerError(f"does not begin with the state of {format_.book.__name__}", field=path.name)
    for packed, recorded in frames:
        event = format_.unpack_event(packed)
        try:
            actions = book.handle(event)
        except PolicyError as error:
            found.difference = f"event {found.num_events + 1}, {type(event).__name__}: refused now: {error}"
            return found
        found.num_events += 1
        # Through the same encoding, so that lists and tuples, enums and their values compare equal.
        now = msgspec.msgpack.decode(_encode([format_.pack(action) for action in actions]))
        if not covers(now, recorded):
            found.difference = f"event {found.num_events}, {event}:\n  then {recorded}\n  now  {now}"
            return found
        found.num_actions.update(type(action).__name__ for action in actions)
        watch(event, actions)
        if format_.always_check:
            book.check()
    book.check()
    if isinstance(book, Lending):
        found.ends = f"{book.lend_pages} pages lent: {book.stands_because}"
    return found


def covers(now: list[list[Any]], then: list[list[Any]]) -> bool:
    """Whether these are the recorded actions.  An older version's have fewer fields: new ones come last, or have a name."""
    return len(now) == len(then) and all(
        len(one) >= len(other) and all(map(_says_too, one, other))
        for one, other in zip(now, then, strict=True)
    )


def _says_too(now: Any, then: Any) -> bool:
    if isinstance(now, dict) and isinstance(then, dict):
        return all(name in now and _says_too(now[name], value) for name, value in then.items())
    if isinstance(now, list) and isinstance(then, list):
        return len(now) == len(then) and all(map(_says_too, now, then))
    return now == then


def logs(path: Path, prefix: str = "") -> list[Path]:
    """The decision logs that ``path`` names: a file, or all under a directory, each shell's oldest first.

    Args:
        prefix: Of the names of those that are wanted; empty: all.

    Raises:
        LedgerError: There is none.
    """
    if path.is_file():
        return [path]
    found = sorted(
        (p for p in path.glob("**/*-*.rose") if p.name.startswith(prefix)),
        key=lambda p: (str(p.parent), *_name(p)),
    )
    if not found:
        raise LedgerError(f"{path} holds no decision log", field="journal")
    return found


def _name(path: Path) -> tuple[str, int]:
    """(prefix, number) of a file's name."""
    match = _NAME.fullmatch(path.stem)
    return (match[1], int(match[2])) if match else (path.stem, 0)


def _frames(path: Path, found: Replayed, progress: Callable[[float], None]) -> Iterator[Any]:
    size = max(1, path.stat().st_size)
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise LedgerError("is not a decision log of this version", field=path.name)
        while head := file.read(FRAME.size):
            good = len(head) == FRAME.size
            length, crc = FRAME.unpack(head) if good else (0, 0)
            if length > MAX_RECORD_BYTES:
                raise LedgerError(f"is damaged at byte {file.tell() - FRAME.size}", field=path.name)
            payload = file.read(length)
            if not good or len(payload) < length:
                found.torn = True  # the process was killed while it wrote; what is before is whole
                return
            if zlib.crc32(payload) != crc:
                raise LedgerError(f"is damaged at byte {file.tell() - length - FRAME.size}", field=path.name)
            if found.num_events % 1000 == 0:
                progress(file.tell() / size)
            yield msgspec.msgpack.decode(payload)
