"""The stages of ``benchmarks/gpu_check.py``: what each asks, what it needs, how many seconds, and in which order they are worth them.

The order is by what a minute of a GPU tells: what everything else rests on, then what decides whether ROSE works there, then repeats.
``lend`` is in the first call of ten minutes however slow its stages are, since a call that has it done begins with the first table (``FIRST``).
A stage is a function by module and name, so a machine without a GPU imports none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.common import Figures

Found = tuple[Figures, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Stage:
    """One question.

    Attributes:
        needs_s: Seconds it takes, the start of its processes included: with fewer left it is not started.
        limit_s: Seconds after which it is ended with everything below it.
        rehearse_s: ``needs_s`` of a rehearsal; None: only a real device can be asked.
        ends: The state that a rehearsal of it has to end in.
    """

    module: str
    name: str
    what: str
    needs: tuple[str, ...]
    needs_s: float
    limit_s: float
    rehearse_s: float | None = None
    argument: Any = None
    ends: str = "done"

    def call(self) -> Found:
        function: Callable[..., Any] = getattr(
            importlib.import_module(f"benchmarks.gpu.{self.module}"), self.name
        )
        found = function() if self.argument is None else function(self.argument)
        return found if isinstance(found, tuple) else (found, {})


_DEVICE = ("driver", "bindings", "torch")
_ENGINE = ("gpu", "bindings", "torch", "vllm")
_ROSE = (*_ENGINE, "plugin")
_TRAIN = ("gpu", "torch", "transformers")
STAGES: dict[str, Stage] = {
    "machine": Stage("device", "machine", "driver, device, and the rung of the compute ladder", _DEVICE, 20, 60, 10),
    "contract": Stage("device", "contract", "the tests marked gpu", (*_DEVICE, "vllm"), 60, 120, 20),
    "vmm": Stage("device", "vmm", "map and unmap by size of handle: single, ranged, retained", _DEVICE, 30, 60, 20),
    "handover": Stage("device", "handover", "memory from a peer to us, per GiB", _DEVICE, 40, 80, 25),
    "step_self": Stage("device", "step_self", "P99 of a step while this process moves 1 GiB/s", _DEVICE, 40, 80, 15),
    "kernels": Stage("engines", "kernels", "the kernels a dense bf16 model needs", (*_ENGINE, "kernels"), 30, 60),
    "engine": Stage("engines", "eager", "one engine of the 8B shape, eager", _ENGINE, 100, 150, 80),
    "lend": Stage("engines", "lend", "an engine lends a quarter of its cache and takes it back, eager", _ROSE, 150, 220, 110),
    "step_peer": Stage("device", "step_peer", "P99 of a step while another process moves 1 GiB/s", _DEVICE, 45, 90, 20),
    "kill": Stage("device", "kill", "until the memory of a killed process is free", _DEVICE, 40, 80, 25),
    "table_1": Stage("coserve", "repeat", "two engines on the busiest 20 s, repeat 1", _ROSE, 420, 540, 190, 1),
    "weights": Stage("weights", "updates", "a seeded checkpoint is loaded, replaced whole, then updated by deltas", _ROSE, 120, 200, 100),
    "codec": Stage("weights", "kernels", "the codec's kernels: the CPU codec's bytes, GB/s, a payload over 2^31 bits", ("gpu", "torch", "triton"), 60, 120, 25),
    "contract_train": Stage("train", "contract", "the trainer's tests marked gpu: two steps here and on the CPU", _TRAIN, 60, 120),
    "train": Stage("train", "steps", "steps of Qwen3-0.6B's shape: tokens/s, MFU, memory, the delta after each", _TRAIN, 90, 150, 30, "0.6B"),
    "train_4b": Stage("train", "steps", "the same of Qwen3-4B's shape", _TRAIN, 200, 300, None, "4B"),
    "activation": Stage("coserve", "activation", "a deployed engine: memory, on to a first token, off", _ROSE, 150, 220, 130),
    "lend_graphs": Stage("engines", "lend_graphs", "the same with CUDA graphs", (*_ROSE, "kernels"), 200, 280),
    "fence": Stage("device", "fence", "P99 of a step with an event behind each, and how long a fence waits", _DEVICE, 35, 70, 15),
    "ahead": Stage("device", "ahead", "what a bounded launch-ahead costs a step, and how soon the device is idle with it", _DEVICE, 35, 70, 15),
    "green": Stage("device", "green", "steps on part of the SMs; P99 beside a peer on all and on half of them", _DEVICE, 60, 120, 30),
    "fallback": Stage("device", "fallback", "what the shared page behind unmapped addresses costs", _DEVICE, 20, 40, 15),
    "engine_graphs": Stage("engines", "graphs", "the same with CUDA graphs", (*_ENGINE, "kernels"), 150, 220),
    "engine_v1": Stage("engines", "old_runner", "the same with the first model runner", (*_ENGINE, "kernels"), 100, 150),
    "mps": Stage("device", "mps", "a low-priority client, and its end by terminate_client with kernels in flight", (*_DEVICE, "kernels", "mps"), 60, 120),
    "table_green": Stage("coserve", "on_rung", "as table_1, the rollout engine on a green context without MPS", _ROSE, 420, 540, None, "green-context"),
    "table_2": Stage("coserve", "repeat", "two engines on the busiest 20 s, repeat 2", _ROSE, 420, 540, None, 2),
    "table_3": Stage("coserve", "repeat", "two engines on the busiest 20 s, repeat 3", _ROSE, 420, 540, None, 3),
}  # fmt: skip
REPEATS = ("table_1", "table_2", "table_3")
FIRST = ("table_1", "lend")
"""The longest stage, which has no room behind others: a call begins with it as soon as the second one is done."""

BAD: dict[str, Stage] = {
    "hangs": Stage("rehearsal", "hangs", "hangs, and so does what it started", (), 3, 10, 3, None, "partial"),
    "dies": Stage("rehearsal", "dies", "dies of a signal", (), 3, 20, 3, None, "partial"),
    "prints": Stage("rehearsal", "prints", "prints behind its answer, and does not end", (), 3, 40, 12),
}  # fmt: skip
"""What goes wrong on a machine that cannot be looked at: part of a rehearsal, and of nothing else."""


def table(rehearse: bool) -> dict[str, Stage]:
    """The stages of a real run, or of a rehearsal."""
    return {**BAD, **STAGES} if rehearse else STAGES
