"""The trainer on a GPU takes the steps that it takes on a CPU.

The reference computes in fp32 on the CPU.  What the tests marked ``gpu`` are held to, bf16 products on the CPU are held to here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rose.train.batch import samples_of
from rose.train.model import Device, Dtype
from rose.train.trainer import TorchTrainer, TrainerParams
from tests.train.traces import random_batch

BOUNDS: dict[Dtype, tuple[float, float]] = {"float32": (1e-4, 1e-3), "bfloat16": (5e-4, 1e-2)}
"""How far a step's loss, and on average the log-prob of a sampled token after two steps, may be from the reference.  Of no step at all they are 0.001 and 0.08
away, of bf16 products on a CPU 0.0001 and 0.001; fp32 on another device sums in another order.
"""


def two_steps(
    folder: Path, device: Device, dtype: Dtype, *, offload: bool = False
) -> tuple[list[float], torch.Tensor]:
    """Losses, and the log-probs after them."""
    batches = [
        [one for trace in random_batch(seed) for one in samples_of(trace, vocab_size=320, max_tokens=1024)]
        for seed in (1, 2)
    ]
    trainer = TorchTrainer(
        folder,
        TrainerParams(
            learning_rate=1e-4,
            num_epochs=1,
            minibatch_sequences=8,
            device=device,
            compute_dtype=dtype,
            offload=offload,
        ),
    )
    losses = [trainer.step(batch).loss for batch in batches]
    return losses, torch.cat(trainer.log_probs(batches[0])).cpu()


def check(folder: Path, device: Device, dtype: Dtype, *, offload: bool = False) -> None:
    loss, log_prob = BOUNDS[dtype]
    losses, log_probs_N = two_steps(folder, device, dtype, offload=offload)
    expected, expected_N = two_steps(folder, "cpu", "float32")
    assert losses == pytest.approx(expected, abs=loss)
    assert float((log_probs_N - expected_N).abs().mean()) < log_prob


def test_bf16_products_on_the_cpu_stay_within_what_a_gpu_is_held_to(policy_model: Path) -> None:
    check(policy_model, "cpu", "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "offload"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_two_steps_on_the_device_are_those_of_the_cpu(
    policy_model: Path, dtype: Dtype, offload: bool
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    check(policy_model, "cuda", dtype, offload=offload)
