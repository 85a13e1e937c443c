"""Stages of training on one device: steps as ``rose train`` takes them, and the version that is published after each.

Trainer and publisher are what a job builds of its settings (``rose.train.build``); the scheduler, the engines and Ray are not there.  Random weights and
made-up batches: they say seconds, memory and bytes, and nothing of learning.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import device, figures, models
from benchmarks.gpu.common import GIB, Figures, Place, Skip, keep, memory_folder, place, rehearsing
from benchmarks.gpu.models import Shape
from rose.auth import Tokens
from rose.config import validate
from rose.coserve import free_memory
from rose.errors import TrainError
from rose.train.build import make_publisher, torch_trainer
from rose.train.train_config import TrainConfig

CONTRACT = ("tests/train/test_gpu_trainer.py",)
SHAPES = {"0.6B": models.SMALL, "4B": models.MEDIUM}
BATCH = {"groups": 4, "group_size": 8, "prompt": 512, "sampled": 512}
TINY_BATCH = {"groups": 2, "group_size": 4, "prompt": 16, "sampled": 16}
"""Of a rehearsal."""
NUM_STEPS = 4
"""Behind one that warms up."""
STEPS_S = 120.0
"""For all of them; one that would not end in them is not begun."""
MAX_THREADS = 16

WORK_BYTES = 8 * GIB
"""On the device, beside what is counted by the weight: activations of a part of 16,384 tokens with checkpointing, logits in chunks, the encoder."""
RESIDENT, OFFLOADED = (22, 12), (4, 28)
"""Bytes of device and host per weight.  Resident: bf16 weights (2), and in fp32 masters, moments, gradients and AdamW's copy (4 + 8 + 4 + 4); the host has
the folder, the store and what was published last, in bf16, and loads in fp32.  Offloaded: what is in fp32 is the host's, and the device has bf16 weights and
gradients."""


def contract() -> Figures:
    """The trainer's tests marked ``gpu``: two steps on the device and on the CPU."""
    return device.marked_gpu(CONTRACT)


def steps(size: str) -> tuple[Figures, dict[str, Any]]:
    """Seconds, tokens/s, MFU and peak memory of steps of ``size``, and what publishing the version after each takes."""
    here = place()
    shape, offload = models.TINY if rehearsing() else SHAPES[size], False
    if here.device == "cuda":
        offload = offloads(shape, here.free_bytes(), free_memory.free_bytes())
    with tempfile.TemporaryDirectory(dir=_roomy_folder(6 * num_weights(shape))) as folder:
        return take(here, shape, Path(folder), offload=offload)


def num_weights(shape: Shape) -> int:
    """With tied embeddings."""
    return shape.num_layer_parameters + shape.vocab_size * shape.hidden_size


def offloads(shape: Shape, device_bytes: int, host_bytes: int) -> bool:
    """Whether masters and moments go to host memory (``trainer.offload``), where the device has too little.

    Raises:
        Skip: The host has too little then, or for loading.
    """
    size = num_weights(shape)
    for offload, (on_device, on_host) in ((False, RESIDENT), (True, OFFLOADED)):
        if on_device * size + WORK_BYTES <= device_bytes and on_host * size <= host_bytes:
            return offload
    wants = " or ".join(
        f"{(on_device * size + WORK_BYTES) / GIB:.0f} and {on_host * size / GIB:.0f}"
        for on_device, on_host in (RESIDENT, OFFLOADED)
    )
    raise Skip(
        f"{shape.name} wants {wants} GiB of device and host; {device_bytes / GIB:.0f} and {host_bytes / GIB:.0f} are free"
    )


def job(model: Path, store: Path, device: str, *, offload: bool, num_threads: int) -> TrainConfig:
    """The settings of a job as ``rose train`` reads them; what is not named here has its default."""
    trainer = {
        "learning_rate": 1e-6,
        "device": device,
        "compute_dtype": "bfloat16",
        "activation_checkpointing": True,
        "offload": offload,
        "num_threads": num_threads,
    }
    return validate(
        TrainConfig,
        {
            "job": "gpu-check",
            "model": str(model),
            "weights": {"relay_url": f"file://{store}"},
            "trainer": trainer,
        },
    )


def take(here: Place, shape: Shape, folder: Path, *, offload: bool) -> tuple[Figures, dict[str, Any]]:
    """Make the model, build the job's trainer and publisher, and take steps."""
    from benchmarks.gpu.made_up import Sizes, made_up, timed_step, write_model

    on_gpu = here.device == "cuda"
    batch_of = TINY_BATCH if rehearsing() else BATCH
    sizes = Sizes(**batch_of)
    batches = [made_up(sizes, shape.vocab_size, seed=number) for number in range(1 + NUM_STEPS)]
    name = here.torch.cuda.get_device_name(0) if on_gpu else "cpu"
    peak = figures.BF16_FLOP_S.get(name)
    found: Figures = {"shape": shape.name, "device": name, "offload": offload}
    found["make_s"], _ = _timed(lambda: write_model(shape, folder / "model", here.device))
    if on_gpu:
        here.torch.cuda.empty_cache()
        here.torch.cuda.reset_peak_memory_stats()
    num_threads = 1 if rehearsing() else min(MAX_THREADS, len(os.sched_getaffinity(0)))
    config = job(folder / "model", folder / "store", here.device, offload=offload, num_threads=num_threads)
    found["load_s"], trainer = _timed(lambda: torch_trainer(config))
    found["weights"] = sum(tensor.numel() for tensor in trainer.masters)
    keep(found)
    publisher = make_publisher(config, Tokens.generate(), trainer.module, 1)
    rows: list[dict[str, Any]] = []
    try:
        found["anchor_s"], report = _timed(lambda: publisher.publish(0))
        found["anchor_bytes"] = report.bytes_sent
        keep(found | memory(here))
        began_s = time.monotonic()
        for number, batch in enumerate(batches, start=1):
            took_s = time.monotonic() - began_s
            if len(rows) > 1 and took_s * (1 + 1 / len(rows)) > STEPS_S:
                break
            step_s = timed_step(trainer, batch)
            published_s, report = _timed(lambda v=number: publisher.publish(v, step=v - 1, lr=1e-6))
            if not report.num_changed:
                raise TrainError("no weight has moved as engines hold it", field="step")
            rows.append(
                {
                    "step_s": step_s,
                    "publish_s": published_s,
                    "kind": report.kind,
                    "bytes_sent": report.bytes_sent,
                    "density": report.density,
                }
            )
            lengths = [(len(one.token_ids), len(one.positions)) for one in batch]
            found |= figures.training(rows, shape, lengths, peak) | memory(here)
            found["encoder"] = _encoder(publisher, trainer)
            keep(found)
        return found, {"steps": rows, "batch": batch_of}
    finally:
        publisher.close()


def memory(here: Place) -> Figures:
    """The most that was allocated on the device since the model was made, and of this process in main memory."""
    found: Figures = {"peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    if here.device == "cuda":
        found["peak_device_gib"] = here.torch.cuda.max_memory_allocated() / GIB
    return found


def _encoder(publisher: Any, trainer: Any) -> str:
    """Where deltas are encoded: a publisher whose device cannot goes on with the host."""
    there = publisher._baseline._there and next(trainer.module.parameters()).is_cuda
    return "device" if there else "host"


def _roomy_folder(num_bytes: int) -> Path | None:
    """In memory where that has room: a container's may be small.  None: on the disk."""
    folder = memory_folder()
    return folder if folder is not None and shutil.disk_usage(folder).free >= num_bytes else None


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.monotonic()
    answer = call()
    return time.monotonic() - begun, answer
