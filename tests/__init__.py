"""Tests run on the Python sources, also where there is a build (``rose/compiled.py``): compiled classes refuse what tests put into them."""

import os

os.environ.setdefault("ROSE_COMPILED", "0")
