"""What the log of a child says of why it ended: the first error in it.

A program of several processes (vLLM) hands an error on from one to the next, each with a traceback of its own, and the last of them
says only to look above.  Decides nothing, and may find nothing: what it finds stands beside the end of the log, not in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

MAX_BYTES = 4 << 20
"""Of a start that are looked at: it writes thousands of lines at most."""
MAX_CHARACTERS = 500

_PREFIX = re.compile(r"(\([^()]*\) )?(?:(?:ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] )?")
"""vLLM's: which process, and of what is an error. A traceback in a warning keeps its prefix, and so is none: the program went on."""
_HEADER = "Traceback (most recent call last):"
_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception)(?::.*)?")


def first_error(lines: Iterable[str]) -> str:
    """How the first traceback ends, whichever process wrote it; "" where there is none."""
    in_traceback: set[str] = set()
    for line in lines:
        found = _PREFIX.match(line)
        process, text = (found[1] or "", line[found.end() :].rstrip()) if found else ("", line.rstrip())
        if text == _HEADER:
            in_traceback.add(process)
        elif process in in_traceback and _RAISED.fullmatch(text):
            return text[:MAX_CHARACTERS]
    return ""


def first_error_in(path: Path, start: int) -> str:
    """The same of a log from its byte ``start`` on; from the beginning of one that has been cut shorter.  "" where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(start if start <= file.seek(0, 2) else 0)
            return first_error(file.read(MAX_BYTES).decode(errors="replace").splitlines())
    except OSError:
        return ""
