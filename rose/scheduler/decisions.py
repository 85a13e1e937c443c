"""The decision log: every event the turn book was fed and every action it answered, to be replayed exactly.

``decisions-<number>.rose`` files in the journal's directory, in the journal's frames.  Each starts with the
whole state of the book (``rose.scheduler.freeze``) and goes on with ``[event, actions]``; so each file replays
by itself, and old ones can be dropped.  A file is closed at ``max_bytes``, and the newest ``max_files`` are
kept.

Not the scheduler's memory (that is ``rose.scheduler.journal``): nothing waits for this log, it is written when
the clock ticks, and a full disk ends it with one line in the log.  It holds no token and no log-prob, only how
many there were: no decision depends on them.

:func:`replay` feeds the events of a file to a fresh book and compares what it answers.

Callers: ``rose.scheduler.dispatch`` (write), ``rose replay`` (read).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec

from rose.errors import LedgerError, PolicyError
from rose.policy import turn_events as te
from rose.policy.turns import TurnBook
from rose.scheduler.freeze import freeze, thaw
from rose.scheduler.journal import FRAME, MAX_RECORD_BYTES

log = logging.getLogger("rose.scheduler")

MAGIC = b"ROSEDEC1"
_FLUSH_BYTES = 256 * 2**10

_EVENTS: tuple[type, ...] = get_args(te.Event)
_ACTIONS: tuple[type, ...] = get_args(te.Action)
_CODES = {cls: code for code, cls in enumerate((*_EVENTS, *_ACTIONS))}
_NAMES = {cls: tuple(f.name for f in dataclasses.fields(cls)) for cls in _CODES}
_encode = msgspec.msgpack.Encoder().encode


def pack(item: te.Event | te.Action) -> list[Any]:
    """``[code, *fields]``, tokens and log-probs as their number."""
    cls = type(item)
    values = [getattr(item, name) for name in _NAMES[cls]]
    if cls is te.TokensArrived:
        values = [len(value) if isinstance(value, tuple) else value for value in values]
    elif isinstance(item, te.TurnEnded):
        bare = dataclasses.replace(item.result, token_ids=(), logprobs=())
        values[_NAMES[cls].index("result")] = [len(item.result.token_ids), bare]
    return [_CODES[cls], *values]


def unpack_event(packed: Sequence[Any]) -> te.Event:
    """Raises:
    LedgerError: Not an event.
    """
    try:
        cls = _EVENTS[packed[0]]
        if len(packed) - 1 > len(_NAMES[cls]):
            raise ValueError("more fields than it has")
        # An older version's events are shorter: new fields come last, with a default.
        fields = dict(zip(_NAMES[cls], packed[1:], strict=False))
        if cls is te.TokensArrived:
            fields["token_ids"] = (0,) * fields["token_ids"]
            fields["logprobs"] = (0.0,) * fields["logprobs"]
        return msgspec.convert(fields, cls)
    except (msgspec.ValidationError, IndexError, TypeError, ValueError) as error:
        raise LedgerError(f"an event cannot be read: {error}", field="decisions") from error


class DecisionLog:
    """Args:
    directory: Of the journal.
    book: Frozen at the start of each file.
    max_bytes: Of a file; 0 records nothing.
    max_files: Kept, the current one included.
    """

    def __init__(self, directory: Path, book: TurnBook, *, max_bytes: int, max_files: int) -> None:
        self._directory = directory
        self._book = book
        self._max_bytes = max_bytes
        self._max_files = max(1, max_files)
        self._file = -1
        self._buffer = bytearray()
        self._size = self._start_size = 0
        self.num_lost = 0
        """Events not recorded since the log could not be written."""

    def record(self, event: te.Event, actions: Sequence[te.Action]) -> None:
        """Remember one call of the book's door.  Never raises, hardly ever writes."""
        if self._max_bytes == 0:
            return
        if self._file < 0:
            self.num_lost += 1
            return
        self._append([pack(event), [pack(action) for action in actions]])
        if len(self._buffer) >= _FLUSH_BYTES:
            self.flush()

    def roll(self) -> None:
        """Begin a new file with the book as it is: at the start, when one is full, when settings change."""
        if self._max_bytes == 0:
            return
        self.close()
        try:
            numbers = sorted(_number(path) for path in self._directory.glob("decisions-*.rose"))
            for number in numbers[: max(0, len(numbers) - self._max_files + 1)]:
                self._path(number).unlink(missing_ok=True)
            path = self._path(numbers[-1] + 1 if numbers else 1)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._give_up(error)
            return
        self._size = 0
        self._buffer += MAGIC
        self._append({"book": freeze(self._book)})
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
        payload = _encode(record)
        self._buffer += FRAME.pack(len(payload), zlib.crc32(payload))
        self._buffer += payload

    def _give_up(self, error: OSError) -> None:
        log.error("the decision log ends here: %s", error.strerror)
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self._buffer.clear()

    def _path(self, number: int) -> Path:
        return self._directory / f"decisions-{number}.rose"


@dataclass(kw_only=True, slots=True)
class Replayed:
    """What a replay found.  ``difference`` is None when every action was the same."""

    path: Path
    num_events: int = 0
    num_actions: Counter[str] = field(default_factory=lambda: Counter[str]())
    torn: bool = False
    difference: str | None = None


def replay(path: Path) -> Replayed:
    """Feed a log's events to the book it starts with, and compare.

    Raises:
        LedgerError: Not a decision log, or damaged before its tail.
    """
    found = Replayed(path=path)
    frames = _frames(path, found)
    head = next(frames, None)
    if not isinstance(head, dict) or "book" not in head:
        raise LedgerError("does not begin with a state", field=path.name)
    book = thaw(head["book"])
    if not isinstance(book, TurnBook):
        raise LedgerError("does not begin with the state of a turn book", field=path.name)
    for packed, recorded in frames:
        event = unpack_event(packed)
        try:
            actions = book.handle(event)
        except PolicyError as error:
            found.difference = f"event {found.num_events + 1}, {type(event).__name__}: refused now: {error}"
            return found
        found.num_events += 1
        # Through the same encoding, so that lists and tuples, enums and their values compare equal.
        now = msgspec.msgpack.decode(_encode([pack(action) for action in actions]))
        if now != recorded:
            found.difference = f"event {found.num_events}, {event}:\n  then {recorded}\n  now  {now}"
            return found
        found.num_actions.update(type(action).__name__ for action in actions)
    book.check()
    return found


def logs(path: Path) -> list[Path]:
    """The decision logs that ``path`` names: a file, or all in a journal's directory, oldest first.

    Raises:
        LedgerError: There is none.
    """
    if path.is_file():
        return [path]
    found = sorted(path.glob("decisions-*.rose"), key=_number)
    if not found:
        raise LedgerError(f"{path} holds no decision log", field="journal")
    return found


def _number(path: Path) -> int:
    text = path.stem.rpartition("-")[2]
    return int(text) if text.isdigit() else 0


def _frames(path: Path, found: Replayed) -> Iterator[Any]:
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
            yield msgspec.msgpack.decode(payload)
