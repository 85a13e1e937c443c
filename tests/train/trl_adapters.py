"""``examples/trl_grpo.py`` with TRL's ``peft_config``; a module of its own, for a process of its own."""

from __future__ import annotations

import runpy
from functools import partial
from typing import Any

import trl
from peft import LoraConfig

if __name__ == "__main__":
    trl_module: Any = trl  # its names are loaded lazily, which types do not say
    trl_module.GRPOTrainer = partial(
        trl_module.GRPOTrainer, peft_config=LoraConfig(r=2, target_modules="all-linear")
    )
    runpy.run_module("examples.trl_grpo", run_name="__main__")
