"""ROSE: reinforcement-learning rollouts on the idle part of GPUs that already serve production traffic."""

__version__ = "0.1.0"
