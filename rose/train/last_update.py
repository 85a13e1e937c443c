"""An AdamW update taken back in part, from the optimiser's own moments: no copy of the weights is held for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rose.train.model import local_of


@torch.no_grad()
def keep_of_last(optimizer: torch.optim.AdamW, moved: Sequence[Any], *, before: float, now: float) -> None:
    """Leave ``now`` of the last update in the weights, of which ``before`` is in them: 1 after the update, 0 takes it back.

    With ``a`` the step that AdamW made (Loshchilov and Hutter 2019, algorithm 2: rate * m_hat / (sqrt(v_hat) + eps)) and ``d`` rate times weight decay,
    the weight is ``w - part * (d * w + a)``.  The moments stay: the gradient was seen.

    Args:
        moved: The parameters that the update moved.  On several ranks each changes its own part.
    """
    groups = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
    for tensor in moved:
        group, state = groups[id(tensor)], optimizer.state[tensor]
        beta1, beta2 = group["betas"]
        num_updates = float(state["step"])
        rate, decay = float(group["lr"]), float(group["lr"]) * float(group["weight_decay"])
        weight, mean, square = (
            local_of(one) for one in (tensor.detach(), state["exp_avg"], state["exp_avg_sq"])
        )
        scale = square.sqrt().div_((1.0 - beta2**num_updates) ** 0.5).add_(group["eps"])
        step = (mean / scale).mul_(rate / (1.0 - beta1**num_updates))
        if decay:
            start = (weight + before * step) / (1.0 - before * decay)
            step.add_(start, alpha=decay)
        weight.add_(step, alpha=before - now)
