"""Actors that end with the node of Ray that started them.

Ray's own workers may stay when their node's process is killed while the cluster's head and the driver live: they wait for orders from nobody, and keep
their GPUs, their memory and their ports.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any


def with_its_node(actor_class: type) -> Any:
    """The same class, for Ray to make actors of: each is killed when the process that started its own has ended.

    Nothing of ROSE's is lost by a kill at any instant, so there is nothing to wait for.
    """
    inner: Any = actor_class

    class Bound(inner):
        def __init__(self, *args: Any, **named: Any) -> None:
            _end_with_parent()
            super().__init__(*args, **named)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):  # Ray shows them
        setattr(Bound, name, getattr(actor_class, name))
    return Bound


def _end_with_parent() -> None:
    """A thread and a descriptor, not the kernel's parent-death signal: that fires when the *thread* that forked ends."""
    try:
        parent = os.pidfd_open(os.getppid())
    except OSError:  # it is gone, or a kernel or sandbox without such descriptors: as Ray has it
        return
    threading.Thread(target=_wait_and_end, args=(parent,), name="rose-fate", daemon=True).start()


def _wait_and_end(parent: int) -> None:
    ended = select.poll()
    ended.register(parent, select.POLLIN)
    while not ended.poll():
        pass
    os.kill(os.getpid(), signal.SIGKILL)
