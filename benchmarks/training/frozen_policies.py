"""Policies for the equivalence gate: the demo's planner, trained on careless plans until it succeeds as often as asked for.

How careless decides how often (``rose.demo.pretrain``).  Success is measured on sampled episodes, 128 of each board, in torch and with the
engine's restriction to moves; where it is not as asked for the carelessness is halved in on.  The first one that fits is kept in the
cache of models, so that a policy is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.demo.pretrain import PLANNER, PretrainParams, ensure_pretrained
from rose.errors import TrainError
from rose.train.envs.frozenlake import ACTIONS, FrozenLakeParams, show_map
from rose.train.envs.frozenlake_plan import LakePlanFamily, follow, start_of

NEAR = 0.05
"""How far measured success may lie from what was asked for."""
EPISODES_PER_BOARD = 128
MAX_TRIES = 8
CARELESS = {0.2: 0.45, 0.5: 0.18, 0.9: 0.03}
"""Where to look first, by success."""
MOST_CARELESS = 0.75
"""As careless as chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenPolicy:
    folder: Path
    careless: float
    success: float
    by_board: tuple[float, ...]


def find_policy(
    success: float,
    lakes: FrozenLakeParams,
    told: Callable[[str], None] = lambda text: None,
    cache_dir: Path | None = None,
) -> FrozenPolicy:
    """The policy that succeeds in about ``success`` of its sampled episodes; minutes where it has to be made.

    Args:
        told: Of each try.

    Raises:
        TrainError: None was found in :data:`MAX_TRIES` tries.
    """
    low, high = 0.0, MOST_CARELESS
    careless = CARELESS.get(success, 0.5 * (low + high))
    for _ in range(MAX_TRIES):
        folder = ensure_pretrained(
            PLANNER, lakes, PretrainParams(careless=careless), cache_dir, seed=lakes.seed
        )
        by_board = sampled_success(folder, lakes, EPISODES_PER_BOARD)
        found = sum(by_board) / len(by_board)
        told(f"careless {careless:.4f}: {found:.3f} of sampled episodes succeed, {success} asked for")
        if abs(found - success) <= NEAR:
            return FrozenPolicy(folder=folder, careless=careless, success=found, by_board=by_board)
        low, high = (careless, high) if found > success else (low, careless)
        careless = 0.5 * (low + high)
    raise TrainError(f"no policy of success {success} in {MAX_TRIES} tries", field="level")


def sampled_success(folder: Path, lakes: FrozenLakeParams, num_episodes: int) -> tuple[float, ...]:
    """Share of ``num_episodes`` sampled plans that reach the goal, by board."""
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    boards = [task["map"] for task in LakePlanFamily(lakes).tasks()]
    return success_on(model, folder, boards, num_episodes=num_episodes, seed=lakes.seed)


def success_on(
    model: Any, folder: Path, boards: Sequence[Any], *, num_episodes: int, seed: int, greedy: bool = False
) -> tuple[float, ...]:
    """Share of plans that reach the goal, by board; of ``model``, restricted to moves as an engine would be.

    Args:
        folder: With its tokenizer.
        boards: All of one size.
        greedy: One plan for each board, of the likeliest moves.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    moves = torch.tensor([encode(word)[0] for word in ACTIONS])

    class MovesAlone(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            kept = torch.full_like(scores, float("-inf"))
            kept[:, moves] = scores[:, moves]
            return kept

    prompts_MP = torch.tensor(
        [encode(f"<|user|>{show_map(rows, start_of(rows))}<|end|><|assistant|>") for rows in boards]
    )
    times = 1 if greedy else num_episodes
    input_ids = prompts_MP.repeat_interleave(times, 0)
    was_training = model.training
    model.eval()
    with (
        torch.random.fork_rng([]),
        torch.inference_mode(),
    ):  # who else draws here draws as if this had not been
        torch.manual_seed(seed)
        sampling = {} if greedy else {"temperature": 1.0, "top_k": 0}
        sampled = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=not greedy,
            max_new_tokens=len(boards[0]) ** 2,
            logits_processor=LogitsProcessorList([MovesAlone()]),
            pad_token_id=0,
            **sampling,
        )
    model.train(was_training)
    number = {int(token): move for move, token in enumerate(moves)}
    plans = [[number[int(token)] for token in row] for row in sampled[:, prompts_MP.shape[1] :]]
    reached = [follow(boards[index // times], plan)[1] for index, plan in enumerate(plans)]
    return tuple(sum(reached[start : start + times]) / times for start in range(0, len(reached), times))
