"""How many files and connections a process may have open.

A thousand, where nobody says otherwise: less than a daemon with two thousand clients needs, or a node that maps the objects of a large
model.  A process may raise its own limit as far as the hard one.
"""

from __future__ import annotations

import logging
import resource

MOST = 1 << 20

logger = logging.getLogger("rose.open_files")


def raise_limit(wanted: int) -> int:
    """Raise this process's soft limit to its hard one; the limit from now on.  A warning in the log where it is below ``wanted``."""
    soft, hard = (
        MOST if each == resource.RLIM_INFINITY else each
        for each in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    limit = soft
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            limit = hard
        except (OSError, ValueError) as error:  # the kernel's own limit is lower: no reason not to start
            logger.warning("the limit of open files stays at %d: %s", soft, error)
    if limit < wanted:
        logger.warning(
            "at most %d files and connections may be open, %d are wanted: raise ulimit -Hn", limit, wanted
        )
    return limit
