"""How the loops over weights are compiled: by numba, once for each machine where it can be kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def _jit(function: Callable[..., Any], **options: Any) -> Any:
    """Compile at first use, and keep the result on disk where there is a place to write it."""
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither beside this file nor in the user's cache folder: a read-only container
        return njit(**options)(function)


def compiled(function: Callable[..., Any]) -> Any:
    """A loop that holds no GIL, so that several threads may run it."""
    return _jit(function, nogil=True)


def inlined(function: Callable[..., Any]) -> Any:
    """A piece of a loop, put in wherever it is called."""
    return _jit(function, inline="always")
