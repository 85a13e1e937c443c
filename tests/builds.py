"""Another build of this repository: a copy of its packages with one line changed, for processes that run from it."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def copy_of_the_build(folder: Path, *, file: str = "", old: str = "", new: str = "") -> Path:
    """The folder for ``PYTHONPATH``; ``old`` in ``file`` reads ``new`` there.

    Raises:
        ValueError: ``old`` is not there exactly once.
    """
    ignore = shutil.ignore_patterns("__pycache__")
    for package in ("rose", "vllm_plugin"):
        shutil.copytree(ROOT / package, folder / package, ignore=ignore)
    (folder / "tests").mkdir()
    for name in ("__init__.py", "engine_launcher.py", "tiny_model.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    for package in ("pair", "plugin"):
        shutil.copytree(ROOT / "tests" / package, folder / "tests" / package, ignore=ignore)
    if file:
        text = (folder / file).read_text()
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is {text.count(old)} times in {file}")
        (folder / file).write_text(text.replace(old, new))
    return folder
