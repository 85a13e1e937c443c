"""A seeded supervised start for the arithmetic task: the policy learns the form of an episode, and some of its content.

A random policy never writes ``ANSWER``, so reinforcement would have nothing to go on.  Demonstrations ask the calculator with the
question's own expression and answer with what it said.  Training ends as soon as sampled episodes succeed as often as asked for:
the seed decides after how many updates, the clock never does.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose.errors import TrainError
from rose.train.envs.base import Family, Message, Observation, Task
from rose.train.envs.math_tools import calculate

_QUESTION = re.compile(r"What is (.*)\?")


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    success: float = 0.3
    """Sampled episodes that succeed when it ends."""
    batch_size: int = 16
    learning_rate: float = 1e-3
    look_every: int = 5
    """Updates between two looks at the success rate."""
    num_looked: int = 128
    max_updates: int = 4000
    max_tokens: int = 24


def warm_start(
    model_path: Path, target: Path, family: Family, params: WarmStart, *, seed: int
) -> dict[str, Any]:
    """Write a model folder like ``model_path`` with warm weights to ``target``; how long it took and what it reached.

    Raises:
        TrainError: The success rate was not reached within ``max_updates``.
    """
    started_s = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=params.learning_rate, weight_decay=0.0)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tasks = list(family.tasks())
    success, num_updates = 0.0, 0
    while success < params.success:
        if num_updates >= params.max_updates:
            raise TrainError(f"success {success:.2f} after {num_updates} updates", field="warm_start.success")
        for _ in range(params.look_every):
            _update(model, optimizer, tokenizer, rng.choices(tasks, k=params.batch_size))
        num_updates += params.look_every
        # The first look that is good enough is a lucky one: it has to be so twice.
        for _ in range(2):
            looked_at = rng.choices(tasks, k=params.num_looked)
            success = asyncio.run(_look(model, tokenizer, family, looked_at, params))
            if success < params.success:
                break
    shutil.copytree(model_path, target, dirs_exist_ok=True)
    tensors = {name: value.detach().bfloat16() for name, value in model.state_dict().items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return {"updates": num_updates, "success": success, "seconds": round(time.monotonic() - started_s, 1)}


def demonstration(task: Task, prompt: str) -> list[Message]:
    found = _QUESTION.search(str(task["question"]))
    assert found is not None
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": f"CALC {found[1]}"},
        {"role": "user", "content": f"= {calculate(found[1])}"},
        {"role": "assistant", "content": f"ANSWER {task['answer']}"},
    ]


def _update(model: Any, optimizer: Any, tokenizer: Any, tasks: Sequence[Task]) -> None:
    rows: list[list[int]] = []
    masks: list[list[int]] = []
    for task in tasks:
        prompt = f"{task['question']}\nSay CALC and an expression to compute it, or ANSWER and the number."
        ids: list[int] = []
        mask: list[int] = []
        for message in demonstration(task, prompt):
            head = tokenizer.encode(f"<|{message['role']}|>", add_special_tokens=False)
            body = tokenizer.encode(message["content"] + "<|end|>", add_special_tokens=False)
            ids += head + body
            mask += [0] * len(head) + [int(message["role"] == "assistant")] * len(body)
        rows.append(ids)
        masks.append(mask)
    width = max(map(len, rows))
    input_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask_BT = torch.tensor([row + [0] * (width - len(row)) for row in masks], dtype=torch.bool)[:, 1:]
    logits = model(input_ids=input_ids[:, :-1]).logits[mask_BT]
    loss = cross_entropy(logits, input_ids[:, 1:][mask_BT])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


async def _look(
    model: Any, tokenizer: Any, family: Family, tasks: Sequence[Task], params: WarmStart
) -> float:
    """Share of sampled episodes that succeed, all in step."""
    environments = [family.make() for _ in tasks]
    observations: list[Observation] = [
        await one.reset(task) for one, task in zip(environments, tasks, strict=True)
    ]
    messages: list[list[Message]] = [list(one.messages) for one in observations]
    while live := [index for index, one in enumerate(observations) if not one.done]:
        prompts = [
            tokenizer.apply_chat_template(messages[index], tokenize=False, add_generation_prompt=True)
            for index in live
        ]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            sampled = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=params.max_tokens,
                pad_token_id=tokenizer.pad_token_id,
            )
        texts = tokenizer.batch_decode(sampled[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        for index, text in zip(live, texts, strict=True):
            messages[index].append({"role": "assistant", "content": text})
            observations[index] = await environments[index].step(text)
            messages[index].extend(observations[index].messages)
    for one in environments:
        await one.close()
    return sum(one.success for one in observations) / len(observations)
