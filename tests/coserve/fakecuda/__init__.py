"""A strict stand-in for CUDA's driver library, for the real cuda-bindings to load.  What it checks: ``README.md`` beside this file.

One :class:`Device` is one GPU: a file with its pages, shared by every process that is started with :meth:`Device.env`, and a log of the
rules that anybody broke.  :meth:`Device.plugged` puts it into this process, for as long as a ``with`` lasts.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from rose.units import PAGE_BYTES
from tests.conftest import has_gpu

HERE = Path(__file__).parent
CACHE = HERE.parents[2] / "build" / "fakecuda"
OUT_OF_MEMORY, NOT_READY = 2, 600
"""CUDA's numbers of the two failures that happen on a healthy device."""
ONLY_WITHOUT_A_GPU = pytest.mark.skipif(has_gpu(), reason="this machine has a CUDA driver of its own")
"""Of tests that plug a device in: a process has one ``libcuda.so.1``."""


@functools.cache
def library() -> Path:
    """``libcuda.so.1``, compiled once for each state of its source.  Its folder holds nothing else."""
    sources = sorted(HERE.glob("*.c"))
    text = b"".join(path.read_bytes() for path in [*sources, HERE / "fakecuda.h"])
    target = CACHE / hashlib.sha256(text).hexdigest()[:16] / "libcuda.so.1"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_name(f"{target.name}.{os.getpid()}")
        options = ["-shared", "-fPIC", "-O1", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread"]
        subprocess.run(["gcc", *options, f"-Wl,-soname,{target.name}", "-o", made, *sources], check=True)
        made.rename(target)  # whole or not at all, also beside another run
    return target


class Device:
    """One GPU.

    Args:
        folder: Where its file and its log lie; a new device in a new folder.
        pages: Its memory, in pages of 2 MiB.
    """

    def __init__(self, folder: Path, pages: int = 64) -> None:
        self._folder, self.pages = folder, pages
        self.log = folder / "fakecuda.log"

    def env(
        self, *, seed: int = 0, fail: Mapping[str, tuple[float, int]] | None = None, quirks: str = ""
    ) -> dict[str, str]:
        """What a process needs to find this device instead of a real one.

        Args:
            seed: Of the order in which the device works, and of its failures.
            fail: By call: how probable it fails, and with which of CUDA's numbers.
            quirks: Names of the README, with commas.
        """
        faults = ",".join(f"{call}={chance}:{code}" for call, (chance, code) in (fail or {}).items())
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(
                filter(None, [str(library().parent), os.environ.get("LD_LIBRARY_PATH", "")])
            ),
            "FAKECUDA_DEVICE": str(self._folder / "fakecuda.device"),
            "FAKECUDA_PAGES": str(self.pages),
            "FAKECUDA_LOG": str(self.log),
            "FAKECUDA_SEED": str(seed),
            "FAKECUDA_FAIL": faults,
            "FAKECUDA_QUIRKS": quirks,
        }

    def broken_rules(self) -> list[str]:
        """What every process did that CUDA does not allow, one line each."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    @contextmanager
    def plugged(self, **settings: object) -> Iterator[Hooks]:
        """The device is in this process; ``settings`` are those of :meth:`env`.

        Raises:
            AssertionError: A rule of CUDA's was broken, here or in another process.
        """
        env = self.env(**settings)  # type: ignore[arg-type]
        before = {name: os.environ.get(name) for name in env}
        hooks = Hooks()
        os.environ.update(env)
        try:
            yield hooks
        finally:
            hooks.unplug()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        assert not (broken := self.broken_rules()), "\n".join(broken)


class Hooks:
    """The stand-in in this process.  The library stays loaded; without a device in it, it says that there is none."""

    def __init__(self) -> None:
        # cuda-bindings ask for a library of that name, and get the one that is there.
        self._library = ctypes.CDLL(str(library()))
        self._library.fakecuda_count.restype = ctypes.c_long
        self._library.fakecuda_kernel.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.c_int,
        )
        self._library.fakecuda_fail.argtypes = (
            ctypes.c_char_p,
            ctypes.c_double,
            ctypes.c_long,
            ctypes.c_int,
        )

    def count(self, what: str) -> int:
        """How often a call was made, by its name; or how many there are of ``handles``, ``mappings``, ``reservations``, ``streams``,
        ``events``, ``green_contexts``; ``violations`` of this process; ``used`` bytes of the device."""
        return int(self._library.fakecuda_count(what.encode()))

    def fail(
        self, call: str, *, probability: float = 0.0, from_now: int = 0, code: int = OUT_OF_MEMORY
    ) -> None:
        """Let a call fail, by chance or the ``from_now``-th from now; without either, no more."""
        self._library.fakecuda_fail(call.encode(), probability, from_now, code)

    def hold(self, held: bool = True) -> None:
        """The device does no work but what is waited for."""
        self._library.fakecuda_hold(int(held))

    def kernel(self, stream: int, address: int, size: int = PAGE_BYTES, value: int = 1) -> None:
        """Launch a kernel that writes there when it runs; without memory there, it is the end of the process's CUDA."""
        assert self._library.fakecuda_kernel(stream or None, address, size, value) == 0

    def unplug(self) -> None:
        """Everything of this process goes."""
        self._library.fakecuda_unplug()

    def left(self) -> dict[str, int]:
        """What there is that somebody made and nobody freed: memory, and what it hangs on."""
        kinds = ("handles", "mappings", "reservations", "events", "used")
        return {kind: number for kind in kinds if (number := self.count(kind))}
