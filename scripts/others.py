"""The tests with packages that cannot all be in one environment with ours: other frameworks', and vLLM's other supported lines.

    python scripts/others.py             # all of them
    python scripts/others.py verl
    python scripts/others.py vllm-0.31   # the plugin's tests on that line; `make lines`

Each has an environment in ``build/NAME`` with what ``requirements/NAME.txt`` pins, in front of all that ``.venv`` has, so that torch is there
once.  Without it their tests are skipped by name.  Standard library only; safe to run again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    "verifiers": ("tests/scheduler/test_verifiers.py",),
    "verl": ("tests/scheduler/test_verl_rollout.py", "tests/weights/test_verl.py"),
    "vllm-0.31": ("tests/plugin", "-m", ""),
}
MENDED = {
    "vllm-0.31": (
        (
            "transformers/models/idefics3/image_processing_pil_idefics3.py",
            "TorchvisionBackend",
            "its other backend",
        ),
    ),
}
"""Words of an installed file, and what is put in their place.  Transformers before 5.18 takes a class whose docstrings have this word for one that
needs torchvision, which has no build here (scripts/setup.py): the model of the tests with images would not load."""


def environment(name: str) -> Path:
    """Make it where it is not, or was made of other pins; returns its interpreter."""
    folder = ROOT / "build" / name
    python, stamp = folder / "bin" / "python", folder / ".made-of"
    pins = ROOT / "requirements" / f"{name}.txt"
    made_of = f"{pins.read_text()}{MENDED.get(name, '')}"
    if stamp.exists() and stamp.read_text() == made_of:
        return python
    print(f"others: installing {name} into {folder}", flush=True)
    venv.create(folder, clear=True, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (ours,) = (ROOT / ".venv").resolve().glob("lib/python*/site-packages")
    (packages / "rose_others.pth").write_text(f"{ours}\n")
    shims = str(ROOT / ".venv" / "shims")  # of scripts/setup.py
    command = [str(python), "-m", "pip", "install", "--no-input", "-q", "--no-deps", "--ignore-installed"]
    command += ["--find-links", shims, "-r", str(pins)]
    subprocess.run(command, check=True)
    for path, words, others in MENDED.get(name, ()):
        text = (packages / path).read_text()
        (packages / path).write_text(text.replace(words, others))
    stamp.write_text(made_of)
    return python


def main(names: list[str]) -> int:
    if unknown := set(names) - TESTS.keys():
        print(f"others: there are {', '.join(TESTS)}, not {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    environ = os.environ | {"PYTHONPATH": str(ROOT)}  # a .pth that is behind another's is not followed
    worst = 0
    for name in names or TESTS:
        python = str(environment(name))
        if name.startswith("vllm-"):
            # vLLM keeps one description of each class of models, and each version makes it anew: a cache of its own.
            environ = environ | {"XDG_CACHE_HOME": str(ROOT / "build" / name / "cache")}
            subprocess.run([python, "-m", "tests.model_infos"], cwd=ROOT, env=environ, check=True)
        command = [python, "-m", "pytest", *TESTS[name]]
        worst = max(worst, subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
