"""Experts as the checkpoint has them: against the definition, and against vLLM's own packed kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vllm_plugin.experts import plain_experts

EXPERTS, HIDDEN, INNER, TOKENS, TOP = 4, 96, 160, 9, 2


class Layer:
    """Weights, and tokens with the experts that they are for."""

    def __init__(self, dtype: torch.dtype) -> None:
        made = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=made) * 0.15).to(dtype)

        self.hidden = random(TOKENS, HIDDEN)
        self.w13, self.w2 = random(EXPERTS, 2 * INNER, HIDDEN), random(EXPERTS, HIDDEN, INNER)
        self.weights = torch.rand((TOKENS, TOP), generator=made)
        self.ids = torch.stack([torch.randperm(EXPERTS, generator=made)[:TOP] for _ in range(TOKENS)])

    def __call__(
        self, ids: torch.Tensor | None = None, activation: str = "silu", weigh: bool = True
    ) -> torch.Tensor:
        output = torch.full_like(self.hidden, float("nan"))
        ids = self.ids if ids is None else ids
        plain_experts(
            output, self.hidden, self.w13, self.w2, None, None, self.weights, ids, activation, weigh
        )
        return output

    def defined(self, activation: str = "silu", weigh: bool = True) -> torch.Tensor:
        """Token by token in float64."""
        total = torch.zeros((TOKENS, HIDDEN), dtype=torch.float64)
        for token in range(TOKENS):
            for weight, expert in zip(self.weights[token], self.ids[token], strict=True):
                gate, up = (self.w13[expert].double() @ self.hidden[token].double()).chunk(2)
                tanh = "tanh" if activation == "gelu_tanh" else "none"
                gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=tanh)
                made = self.w2[expert].double() @ (gate * up)
                total[token] += made * weight if weigh else made
        return total


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("weigh", [True, False])
def test_it_is_the_weighted_sum_over_each_tokens_experts(activation: str, weigh: bool) -> None:
    layer = Layer(torch.float32)
    found = layer(activation=activation, weigh=weigh)
    torch.testing.assert_close(found.double(), layer.defined(activation, weigh), rtol=1e-4, atol=1e-5)


def test_experts_that_another_rank_holds_are_passed_over() -> None:
    layer = Layer(torch.float32)
    away = torch.where(layer.ids == 3, -1, layer.ids)
    layer.weights = torch.where(layer.ids == 3, 0.0, layer.weights)
    torch.testing.assert_close(layer(ids=away), layer())


@pytest.mark.engine
def test_it_agrees_with_the_kernel_it_stands_in_for() -> None:
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

    layer = Layer(torch.bfloat16)
    theirs = torch.empty_like(layer.hidden)
    packed = (cpu_prepack_moe_weight(layer.w13, "vec"), cpu_prepack_moe_weight(layer.w2, "vec"))
    ids = layer.ids.to(torch.int32)
    cpu_fused_moe(theirs, layer.hidden, *packed, None, None, layer.weights, ids, "silu", "vec")
    torch.testing.assert_close(layer().float(), theirs.float(), rtol=0.05, atol=0.05)
    exact = layer.defined()
    assert (layer().double() - exact).abs().mean() < 2 * (theirs.double() - exact).abs().mean()
