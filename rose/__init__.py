"""ROSE: reinforcement-learning rollouts on the idle part of GPUs that already serve production traffic."""

from rose.compiled import install as _install

__version__ = "0.1.0"

_install()
