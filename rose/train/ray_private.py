"""What ROSE needs of Ray that Ray has no public name for.  Nothing else in ROSE uses ``ray._private`` or ``ray._raylet``.

``tests/train/test_ray_private.py`` looks at each name and at what it does in the Ray that is installed.
Callers: ``rose.train.cluster``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


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


def reread_authentication() -> None:
    """Have this process go by ``RAY_AUTH_MODE`` and the token as the environment names them now; Ray remembers both."""
    from ray._raylet import AuthenticationTokenLoader, Config

    # In this order: a thread of Ray's that is still ending would look for a token that is gone, and abort the process.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
