"""The demo's policy before its first RL step: it has read careless plans of the same lakes.

A policy with random weights needs updates that change nearly every bf16 weight before it succeeds at all; a model that can do its
task now and then needs small ones, as in real fine-tuning.  So the policy model is trained for a moment on plans of
:mod:`rose.train.envs.frozenlake_plan` in which a share of the moves is random.  It then succeeds in a fraction of its episodes, and RL has
to find out which moves are the good ones.

Same recipe, seed and machine: same bytes (one thread).  A folder is complete or absent, as those of :mod:`rose.demo.models`, whose
cache it shares.  About half a minute, once.  Heavy imports happen inside functions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rose.demo.models import POLICY, ModelRecipe, default_cache_dir, ensure_model, model_key, sync_tree
from rose.errors import ConfigError
from rose.train.envs.frozenlake import ACTIONS, FrozenLakeParams, show_map
from rose.train.envs.frozenlake_plan import LakePlanFamily, shortest_plan, start_of

PLANNER = dataclasses.replace(POLICY, name="planner", num_kv_heads=4, head_size=64)
"""The policy with wider attention: 2 KiB of keys and values a token, so that its turns hold memory that production misses."""

FORMAT = 1
_DONE = "rose_pretrained.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainParams:
    num_updates: int = 100
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup_updates: int = 15
    careless: float = 0.45
    """Share of the moves that are drawn at random."""


def ensure_pretrained(
    recipe: ModelRecipe,
    lakes: FrozenLakeParams,
    params: PretrainParams | None = None,
    cache_dir: Path | None = None,
    *,
    seed: int = 0,
) -> Path:
    """The folder of ``recipe`` trained on careless plans of ``lakes``; made first where it is missing.

    Raises:
        ConfigError: The cache folder cannot be written.
    """
    params, cache_dir = params or PretrainParams(), cache_dir or default_cache_dir()
    described = {
        "format": FORMAT,
        "model": model_key(recipe, seed=seed),
        "lakes": dataclasses.asdict(lakes),
        "params": dataclasses.asdict(params),
    }
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]
    target = cache_dir / f"{recipe.name}-pretrained-{key}"
    if (target / _DONE).is_file():
        return target
    start = ensure_model(recipe, cache_dir, seed=seed)
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache_dir))
        try:
            shutil.copytree(start, staging, dirs_exist_ok=True)
            _train(staging, lakes, params, seed)
            (staging / _DONE).write_text(json.dumps(described, indent=2) + "\n")
            sync_tree(staging)
            staging.chmod(0o755)  # mkdtemp gives 0700; another user's engine may read the cache
            try:
                staging.rename(target)
            except OSError:
                if not (target / _DONE).is_file():  # somebody else was first, with the same contents
                    raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}", field="cache_dir") from error
    return target


def _train(folder: Path, lakes: FrozenLakeParams, params: PretrainParams, seed: int) -> None:
    """Replace the weights in ``folder``."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    boards = [task["map"] for task in LakePlanFamily(lakes).tasks()]
    prompts_MP = torch.tensor(
        [encode(f"<|user|>{show_map(rows, start_of(rows))}<|end|><|assistant|>") for rows in boards]
    )
    plans_MC = torch.tensor([shortest_plan(rows) for rows in boards])
    moves = torch.tensor([encode(word)[0] for word in ACTIONS])
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order
    try:
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=params.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        draws = torch.Generator().manual_seed(seed)
        for update in range(params.num_updates):
            rows_B = torch.arange(update * params.batch_size, (update + 1) * params.batch_size) % len(boards)
            plan_BC = plans_MC[rows_B]
            careless_BC = torch.rand(plan_BC.shape, generator=draws) < params.careless
            random_BC = torch.randint(0, len(ACTIONS), plan_BC.shape, generator=draws)
            ids_BT = torch.cat(
                [prompts_MP[rows_B], moves[torch.where(careless_BC, random_BC, plan_BC)]], dim=1
            )
            rise = min(1.0, (update + 1) / params.warmup_updates)
            fall = max(0.05, 1.0 - update / params.num_updates)
            for group in optimizer.param_groups:
                group["lr"] = params.learning_rate * rise * fall
            first = prompts_MP.shape[1]
            hidden_BCH = model.base_model(input_ids=ids_BT).last_hidden_state[:, first - 1 : -1]
            logits_BCV = model.lm_head(hidden_BCH)
            loss = torch.nn.functional.cross_entropy(logits_BCV.flatten(0, 1), ids_BT[:, first:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    finally:
        torch.set_num_threads(num_threads)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
