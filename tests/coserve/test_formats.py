"""The table of file formats in ``docs/operating.md`` is the constants of the programs, all of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| .* \| `(rose/[a-z_/]+)\.py` `([A-Z]+)` = (\w+)", re.MULTILINE)
CONSTANT = re.compile(r"^_?(?:VERSION|SCHEMA|FORMAT|MAGIC)\b[^=\n]* = ", re.MULTILINE)
NO_OTHER_PROGRAM_READS = "rose/demo/"
"""Keys of its own caches, which are made anew."""


def test_the_table_of_formats_names_every_constant_with_its_value() -> None:
    told = {
        f"{module}.py": (module, name, value)
        for module, name, value in ROW.findall((ROOT / "docs" / "operating.md").read_text())
    }
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "rose").rglob("*.py")
        if CONSTANT.search(path.read_text())
        and not str(path.relative_to(ROOT)).startswith(NO_OTHER_PROGRAM_READS)
    }
    assert set(told) == found
    for module, name, value in told.values():
        there = getattr(importlib.import_module(module.replace("/", ".")), name)
        assert (there.decode() if isinstance(there, bytes) else str(there)) == value, module
