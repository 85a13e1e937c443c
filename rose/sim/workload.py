"""What agents do: turns, lengths and environment times of a trajectory, the same for every system of a seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from rose.sim.scenario import JobSection


@dataclass(frozen=True, slots=True)
class Script:
    """One trajectory: per turn, sampled tokens, tokens of the observation that follows, seconds until it comes."""

    prompt_tokens: int
    outputs: tuple[int, ...]
    observations: tuple[int, ...]
    env_s: tuple[float, ...]

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + sum(self.outputs) + sum(self.observations)


def make_script(config: JobSection, seed: int, group: int, member: int) -> Script:
    """Depends on its arguments alone, not on who asks or when."""
    rng = random.Random((seed << 42) ^ (group << 14) ^ member)
    num_turns = min(config.turns_max, max(1, round(_draw(rng, config.turns_median, config.turns_log_std))))
    tokens = config.prompt_tokens
    outputs: list[int] = []
    observations: list[int] = []
    env_s: list[float] = []
    for _ in range(num_turns):
        output = min(
            config.output_max, max(1, round(_draw(rng, config.output_median, config.output_log_std)))
        )
        observation = max(1, round(_draw(rng, config.observation_median, config.observation_log_std)))
        if outputs and tokens + output + observation >= config.max_model_len:
            break
        outputs.append(output)
        observations.append(observation)
        env_s.append(_draw(rng, config.env_median_s, config.env_log_std))
        tokens += output + observation
    return Script(config.prompt_tokens, tuple(outputs), tuple(observations), tuple(env_s))


def rewards_differ(config: JobSection, seed: int, step: int, group: int) -> bool:
    """DAPO: whether the rewards of a group differ.  How many do changes from step to step."""
    if config.algorithm == "grpo":
        return True
    share = random.Random((seed << 20) ^ step).uniform(config.keep_low, config.keep_high)
    return random.Random((seed << 42) ^ (group << 14) ^ 0x3FFF).random() < share


def _draw(rng: random.Random, median: float, log_std: float) -> float:
    return median * math.exp(rng.gauss(0.0, log_std)) if median > 0 else 0.0
