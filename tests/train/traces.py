"""Hand-made trajectories in the scheduler's shape."""

from __future__ import annotations

import random
from typing import Any

ACTIONS = [258, 261, 265, 266]


def turn(prompt: list[int], sampled: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt,
        "token_ids": sampled,
        "logprobs": [-1.0 - 0.1 * index for index in range(len(sampled))],
        "sampling": {"temperature": 1.0},
        **changes,
    }


def trajectory(turns: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {"id": "t1", "group_id": "g1", "reward": 1.0, "success": True, "turns": turns, **changes}


def random_batch(seed: int, *, num_groups: int = 4, group_size: int = 4) -> list[dict[str, Any]]:
    """Conversations of one-token actions with rewards of both kinds in each group."""
    rng = random.Random(seed)
    batch: list[dict[str, Any]] = []
    for index in range(num_groups * group_size):
        history: list[int] = []
        turns = []
        for _ in range(rng.randint(1, 6)):
            history = [*history, *(rng.randrange(250) for _ in range(rng.randint(4, 20)))]
            action = rng.choice(ACTIONS)
            sampling = {"temperature": 0.8, "allowed_token_ids": ACTIONS}
            turns.append(turn(history, [action], logprobs=[-rng.uniform(1.0, 1.8)], sampling=sampling))
            history = [*history, action]
        reward = float(index % group_size < 2)
        batch.append(trajectory(turns, id=f"t{index:03d}", group_id=f"g{index // group_size}", reward=reward))
    return batch
