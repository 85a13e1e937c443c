"""Chunked log-probs and entropies: equal to the whole softmax, forward and backward, in the memory of a chunk."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rose.train.logprobs import token_log_probs
from rose.train.loss import distinct_restrictions, entropy, restricted_log_softmax

N, D, V = 23, 7, 31


def inputs(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {"hidden": normal(N, D), "weight": normal(V, D), "bias": normal(V)}


def known(restricted: bool) -> dict[str, Tensor | None]:
    """Temperatures, targets and restrictions; every third token is free."""
    choices = [None, (1, 2, 3), (3, 11, 30)]
    allowed = [choices[index % 3] if restricted else None for index in range(N)]
    allowed_KV, index = distinct_restrictions(allowed, V)
    return {
        "targets_N": torch.tensor(
            [index % V if one is None else one[index % 3] for index, one in enumerate(allowed)]
        ),
        "temperature_N": torch.linspace(0.3, 2.0, N, dtype=torch.float64),
        "allowed_KV": allowed_KV,
        "allowed_index_N": torch.tensor(index),
    }


def whole(made: dict[str, Tensor], told: dict[str, Tensor | None], bias: bool) -> tuple[Tensor, Tensor]:
    logits_NV = functional.linear(made["hidden"], made["weight"], made["bias"] if bias else None)
    temperature_N, index_N, targets_N = (
        told[name] for name in ("temperature_N", "allowed_index_N", "targets_N")
    )
    assert temperature_N is not None
    assert index_N is not None
    assert targets_N is not None
    log_probs_NV = restricted_log_softmax(logits_NV, temperature_N, told["allowed_KV"], index_N)
    return log_probs_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1), entropy(log_probs_NV)


@pytest.mark.parametrize("chunk_tokens", [1, 5, N, 10 * N])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "weights", [(1.0, 0.0), (0.0, 1.0), (1.0, -3.0)], ids=["log-probs", "entropy", "both"]
)
def test_chunks_equal_the_whole_in_float64(
    chunk_tokens: int, restricted: bool, bias: bool, weights: tuple[float, float]
) -> None:
    told = known(restricted)
    by_token_N = torch.linspace(-1.0, 2.0, N, dtype=torch.float64)
    found = []
    for chunked in (True, False):
        made = inputs(3)
        if chunked:
            log_prob_N, entropy_N = token_log_probs(
                made["hidden"],
                made["weight"],
                made["bias"] if bias else None,
                chunk_logits=chunk_tokens * V,
                **told,  # pyright: ignore[reportArgumentType]
            )
        else:
            log_prob_N, entropy_N = whole(made, told, bias)
        loss = torch.zeros((), dtype=torch.float64)
        if weights[0]:
            loss = loss + weights[0] * (by_token_N * log_prob_N).sum()
        if weights[1]:
            loss = loss + weights[1] * (by_token_N * entropy_N).sum()
        loss.backward()
        names = ["hidden", "weight", *(["bias"] if bias else [])]
        found.append([log_prob_N.detach(), entropy_N.detach(), *(made[name].grad for name in names)])
    for ours, reference in zip(*found, strict=True):
        assert ours is not None
        assert reference is not None
        assert torch.allclose(ours, reference, rtol=0.0, atol=1e-9)


def test_gradients_of_bf16_products_add_up_in_fp32() -> None:
    """Many chunks of one token each, whose gradients on the output layer are equal: in bf16 the sum would stop growing at 256 of them."""
    count = 1024
    hidden_ND = torch.ones(count, 1, dtype=torch.bfloat16)
    weight_VD = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    log_prob_N, _ = token_log_probs(
        hidden_ND,
        weight_VD,
        None,
        targets_N=torch.zeros(count, dtype=torch.long),
        temperature_N=torch.ones(count),
        allowed_KV=None,
        allowed_index_N=torch.full((count,), -1),
        chunk_logits=2,
    )
    assert log_prob_N.dtype == torch.float32
    log_prob_N.sum().backward()
    assert weight_VD.grad is not None
    assert weight_VD.grad.flatten().tolist() == [count / 2, -count / 2]


MEMORY = """
import resource, torch
from rose.train.logprobs import token_log_probs
torch.set_num_threads(1)
num_tokens, hidden_size, vocab_size = 1024, 8, 151_936
hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
weight = torch.randn(vocab_size, hidden_size, requires_grad=True)
told = dict(
    targets_N=torch.arange(num_tokens), temperature_N=torch.ones(num_tokens), allowed_KV=None,
    allowed_index_N=torch.full((num_tokens,), -1),
)
def once(count):
    cut = {name: value if value is None else value[:count] for name, value in told.items()}
    log_probs, entropies = token_log_probs(hidden[:count], weight, None, chunk_logits=2**22, **cut)
    (log_probs.sum() + 0.01 * entropies.sum()).backward()
once(8)  # what the first product allocates for good
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
once(num_tokens)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_that_of_a_chunk_whatever_the_number_of_tokens() -> None:
    """1,024 tokens have 0.6 GB of logits; a chunk of 16 MiB has to do with a few copies of itself, forward and backward."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, timeout=120
    )
    grown_bytes = int(done.stdout) * 1024
    assert grown_bytes < 6 * 4 * 2**22, grown_bytes
