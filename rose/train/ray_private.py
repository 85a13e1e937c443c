"""What ROSE needs of Ray that Ray has no public name for.  Nothing else in ROSE uses ``ray._private`` or ``ray._raylet``.

``tests/train/test_ray_private.py`` looks at each name and at what it does in the Ray that is installed.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

logger = logging.getLogger(__name__)

MAX_ADDRESS_BYTES = 256
LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
HELPERS = ("start_api_server", "start_monitor", "start_log_monitor")
"""Methods of Ray's node that start a program each."""


@contextmanager
def on_loopback() -> Iterator[None]:
    """A cluster that is started inside listens on 127.0.0.1 alone.

    Ray's ports take commands from whoever reaches them.  It replaces a loopback address by an outside one unless this, the only
    switch there is, says that the node will have no peers.
    """
    from ray._private import ray_constants

    before = os.environ.get(LOOPBACK_VARIABLE), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[LOOPBACK_VARIABLE] = "0"  # for the processes of the cluster
    ray_constants.ENABLE_RAY_CLUSTER = False  # for this one, which has read the variable already
    try:
        yield
    finally:
        if before[0] is None:
            os.environ.pop(LOOPBACK_VARIABLE, None)
        else:
            os.environ[LOOPBACK_VARIABLE] = before[0]
        ray_constants.ENABLE_RAY_CLUSTER = before[1]


@contextmanager
def without_helpers() -> Iterator[None]:
    """A cluster that is started inside has no dashboard, no autoscaler and no reader of logs: three programs that nobody asks anything there,
    and that on few cores take longer to start than the rest of Ray.

    Ray has no switch for them: told ``include_dashboard=False`` and ``log_to_driver=False`` it starts them all the same.
    """
    from ray._private.node import Node

    node: Any = Node
    # Another version of Ray may have others: what is not there is left alone.
    before = {name: getattr(node, name) for name in HELPERS if hasattr(node, name)}
    for name in before:
        setattr(node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, start in before.items():
            setattr(node, name, start)


def reread_authentication() -> None:
    """Have this process go by ``RAY_AUTH_MODE`` and the token as the environment names them now; Ray remembers both."""
    from ray import _raylet

    raylet: Any = _raylet  # compiled, without type information
    # In this order: a thread of Ray's that is still ending would look for a token that is gone, and abort the process.
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def cluster_started_here() -> str | None:
    """The cluster that the last ``ray start`` on this machine belongs to, ``host:port``, if its node still runs.

    Ray keeps the address in a directory that anybody may write to, and who joins hands over the job's tokens.  So the file must
    be root's or ours and nobody else's to write, and so must the node's process be.
    """
    from ray._common.utils import get_ray_address_file

    path = get_ray_address_file(None)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        address = file.read(MAX_ADDRESS_BYTES).decode(errors="replace").strip()
    if not stat.S_ISREG(info.st_mode) or info.st_uid not in _trusted() or info.st_mode & 0o022:
        logger.warning("%s could be somebody else's: the cluster that it names is not joined", path)
        return None
    return address if any(f"--gcs-address={address}" in arguments for _, arguments in raylets()) else None


def raylets() -> list[tuple[psutil.Process, list[str]]]:
    """The node processes on this machine that are root's or ours, with their arguments."""
    found: list[tuple[psutil.Process, list[str]]] = []
    for process in psutil.process_iter(["name", "cmdline", "uids"]):
        uids = process.info["uids"]
        if process.info["name"] == "raylet" and uids is not None and uids.effective in _trusted():
            found.append((process, process.info["cmdline"] or []))
    return found


def _trusted() -> set[int]:
    return {0, os.geteuid()}
