"""Rollouts without an engine: the policy is sampled with torch, on the environment's own prompts.

All episodes of a batch move in lockstep.  With one-token actions and boards of one size every prompt of a turn has
the same length, so a key-value cache needs no padding.  Produces traces in the scheduler's shape, so that
the trainer is fed exactly as in a real run.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import DynamicCache

from rose.train.envs.base import Family, Message


class OfflineRollout:
    """Samples groups of trajectories from ``model``."""

    def __init__(
        self, model: Any, model_path: Path, family: Family, *, temperature: float, seed: int
    ) -> None:
        self._model = model
        self._tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        self._family = family
        self._temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)
        self._actions = [self._encode(text)[0] for text in family.allowed_texts or ()]

    def run(self, step: int, group_size: int, *, greedy: bool = False) -> list[dict[str, Any]]:
        return asyncio.run(self._run(step, group_size, greedy))

    async def _run(self, step: int, group_size: int, greedy: bool) -> list[dict[str, Any]]:
        tasks = [task for task in self._family.tasks() for _ in range(group_size)]
        envs = [self._family.make() for _ in tasks]
        traces: list[dict[str, Any]] = []
        suffixes: list[list[int]] = []
        for index, (task, env) in enumerate(zip(tasks, envs, strict=True)):
            observation = await env.reset(task)
            suffixes.append(self._render(list(observation.messages)))
            traces.append(
                {"id": f"s{step}-t{index:04d}", "group_id": f"s{step}-g{index // group_size}", "turns": []}
            )
        history: list[list[int]] = [[] for _ in tasks]
        live = list(range(len(tasks)))
        cache = DynamicCache()
        while live:
            chunk = torch.tensor([suffixes[index] for index in live])
            with torch.no_grad():
                hidden = self._model.base_model(
                    input_ids=chunk, past_key_values=cache, use_cache=True
                ).last_hidden_state[:, -1]
                logits = self._model.get_output_embeddings()(hidden)[:, self._actions].float()
            log_probs = torch.log_softmax(logits / self._temperature, dim=-1)
            if greedy:
                choices = log_probs.argmax(-1)
            else:
                choices = torch.multinomial(log_probs.exp(), 1, generator=self._generator).squeeze(1)
            still: list[int] = []
            for row, index in enumerate(live):
                action = int(choices[row])
                sampled = self._actions[action]
                history[index] += suffixes[index]
                traces[index]["turns"].append(
                    {
                        "prompt_token_ids": list(history[index]),
                        "token_ids": [sampled],
                        "logprobs": [float(log_probs[row, action])],
                        "sampling": {"temperature": self._temperature, "allowed_token_ids": self._actions},
                    }
                )
                assert self._family.allowed_texts is not None
                observation = await envs[index].step(self._family.allowed_texts[action])
                if observation.done:
                    traces[index].update(reward=observation.reward, success=observation.success)
                    continue
                history[index].append(sampled)
                # The sampled id is part of the history but not yet of the cache.
                suffixes[index] = [
                    sampled,
                    *self._encode("<|end|>"),
                    *self._render(list(observation.messages)),
                ]
                still.append(row)
            for row in still:
                history[live[row]].pop()  # the next chunk brings it
            cache.batch_select_indices(torch.tensor(still, dtype=torch.long))
            live = [live[row] for row in still]
        for env in envs:
            await env.close()
        return traces

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _render(self, messages: list[Message]) -> list[int]:
        text = "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in messages)
        return self._encode(text + "<|assistant|>")


def success_rate(traces: list[dict[str, Any]]) -> float:
    return sum(bool(trace["success"]) for trace in traces) / len(traces)
