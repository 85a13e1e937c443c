"""How many files and connections a process may have open.

A thousand, where nobody says otherwise: less than a daemon with two thousand clients needs, or a node that maps the objects of a large
model.  A process may raise its own limit as far as the hard one.

Callers: ``rose.scheduler.cli``, ``rose.coserve.cli``.
"""

from __future__ import annotations

import logging
import resource

MOST = 1 << 20

logger = logging.getLogger("rose.open_files")


def raise_limit(wanted: int) -> int:
    """Raise this process's soft limit to its hard one; the limit from now on.  A warning in the log where it is below ``wanted``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= limit:
        limit = MOST if soft == resource.RLIM_INFINITY else soft
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < wanted:
        logger.warning(
            "at most %d files and connections may be open, %d are wanted: raise ulimit -Hn", limit, wanted
        )
    return limit
