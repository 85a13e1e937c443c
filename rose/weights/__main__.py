"""``python -m rose.weights``: the relay, where ROSE's own command line is not installed."""

from __future__ import annotations

import sys

from rose.errors import RoseError
from rose.weights.cli import relay_main

if __name__ == "__main__":
    try:
        relay_main()
    except RoseError as error:
        sys.exit(f"rose: {error}")
